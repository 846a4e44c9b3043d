"""What the rows of studies/long_range.py say: tables, picture, and whether accuracies are alike."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence

from scripts.measure import rows as measured
from scripts.measure.report.long_range_accuracy import (
    ALIKE,
    DECISIVE,
    DIFFERS,
    OPEN,
    STANDARD,
    Comparison,
    Group,
    accuracies,
    comparisons,
    learned,
    plateau,
    trusted,
)
from scripts.measure.studies import Row, Table

COMMAND = "python scripts/study.py long_range"
QUESTION = (
    "Does a classifier of long sequences come to the same accuracy with tiled as with standard attention, "
    "and how much faster does it train?"
)
NAMES = {"listops": "ListOps", "matching": "Matching"}
EARLIER = (
    "The accuracies are of an earlier recipe, a cosine for the learning rate and no QK-norm; the command "
    "trains otherwise now, and measures them anew."
)


def speed_ups(rows: Iterable[Row], compiled: bool) -> dict[str, dict[int, float]]:
    """Implementation -> T -> step time of standard attention over its own, both eager or both compiled."""
    timed = {
        (row["point"]["implementation"], row["point"]["seq_len"]): row["result"]["ms_median"]
        for row in trusted(rows, "speed")
        if row["point"]["compile"] == compiled
    }
    found: dict[str, dict[int, float]] = {}
    for (name, length), ms in sorted(timed.items(), key=lambda item: item[0][1]):
        if name != STANDARD and (STANDARD, length) in timed:
            found.setdefault(name, {})[length] = timed[STANDARD, length] / ms
    return found


def mean_speed_up(factors: dict[int, float]) -> float:
    """Over the lengths: the geometric mean."""
    return statistics.geometric_mean(factors.values())


def best(factors: dict[str, dict[int, float]]) -> str | None:
    """The implementation with the largest mean among those that have most lengths."""
    most = max(map(len, factors.values()), default=0)
    able = [name for name, by_length in factors.items() if len(by_length) == most]
    return max(able, key=lambda name: mean_speed_up(factors[name]), default=None)


def accuracy_table(found: Sequence[Group]) -> Table:
    compared = {id(each.group): each for each in comparisons(found)}
    lines = [["task", "T", "attention", "accuracy", "seeds", "- standard", "allowed", "so"]]
    lines[0] += ["ms a step", "faster"]
    for group in found:
        each = compared.get(id(group))
        baseline = next((g for g in found if g.task == group.task and g.name == STANDARD), None)
        allowed = "" if each is None or each.allowed is None else f"{each.allowed:.4f}"
        lines.append(
            [
                NAMES[group.task],
                f"{group.rows[0]['point']['seq_len']:,}",
                group.name,
                f"{group.mean:.4f}",
                " ".join(f"{accuracy:.3f}" for accuracy in group.accuracies),
                f"{each.difference:+.4f}" if each else "",
                allowed,
                each.verdict if each else "",
                f"{group.ms:.2f}",
                f"{baseline.ms / group.ms:.2f}x" if baseline else "",
            ]
        )
    return Table("Accuracy on the test set, seed by seed; the step time of the same runs, eager", lines)


def speed_table(rows: Sequence[Row]) -> Table:
    timed = trusted(rows, "speed")
    lengths = sorted({row["point"]["seq_len"] for row in timed})
    lines = [["attention", *(f"T={length:,}" for length in lengths)]]
    for compiled in (False, True):
        factors = speed_ups(rows, compiled)
        for name in dict.fromkeys(row["point"]["implementation"] for row in timed):
            of = {
                row["point"]["seq_len"]: row["result"]["ms_median"]
                for row in timed
                if row["point"]["implementation"] == name and row["point"]["compile"] == compiled
            }
            if not of:
                continue
            cells = [f"{of[length]:.2f}" if length in of else "-" for length in lengths]
            for i, length in enumerate(lengths):
                if (factor := factors.get(name, {}).get(length)) is not None:
                    cells[i] += f" ({factor:.2f}x)"
            lines.append([name + (", compiled" if compiled else ""), *cells])
    return Table("Milliseconds of a training step without padding (speed-up over standard, alike run)", lines)


def left_out(rows: Iterable[Row]) -> list[list[str]]:
    """What has no figure, or none to trust, and why."""
    lines = []
    for row in rows:
        point, result = row["point"], row["result"]
        if measured.trusted(result):
            continue
        why = result["reason"]
        if result["status"] == "ok":
            right = result.get("kernels_ok", True)
            why = f"error ratio {result.get('error_ratio'):.2f}" if right else "not the kernels asked for"
        name = point["implementation"] + (", compiled" if point["compile"] else "")
        lines.append([NAMES[point["task"]], f"{point['seq_len']:,}", name, result["status"], why])
    return [list(line) for line in dict.fromkeys(map(tuple, lines))]


def tasks_of(compared: Iterable[Comparison]) -> list[str]:
    return list(dict.fromkeys(each.group.task for each in compared))


def decided(compared: Sequence[Comparison]) -> list[str]:
    """Sentences: how many of the comparisons decide, and what they say; why the others do not."""
    alike, apart, undecided = ([e for e in compared if e.verdict == v] for v in (ALIKE, DIFFERS, OPEN))
    parts = []
    if alike:
        parts.append(f"{len(alike)} alike within what seeds alone do ({named(tasks_of(alike))})")
    if apart:
        which = [f"{each.group.name} on {NAMES[each.group.task]}" for each in apart]
        parts.append(f"{len(apart)} by more than seeds do ({', '.join(which)})")
    clear = (
        f"{len(alike) + len(apart)} of {len(compared)} comparisons with standard attention's accuracy decided"
    )
    said = [f"{clear}{': ' * bool(parts)}{', '.join(parts)}."]
    for task in tasks_of(undecided):
        of = [each for each in undecided if each.group.task == task]
        why, wide = "one seed alone was run", of[0].allowed
        if wide is not None:
            why = f"seeds alone do {100 * wide:.1f} points, more than {DECISIVE:.0%} of the "
            why += f"{100 * of[0].gained:.1f} that standard attention has above what needs no attention"
        said.append(f"Not decided, {len(of)} on {NAMES[task]}: {why}.")
    return said


def unsteady(found: Sequence[Group], task: str) -> str | None:
    """Where it is what a task's accuracies differ by: which runs left the plateau of their loss, and when."""
    runs = plateau(found, task)
    if not runs.splits:
        return None
    left, stayed = accuracies(runs.left), accuracies(runs.stayed)
    return (
        f"Seeds of {NAMES[task]} differ by whether training left its plateau: in {len(left)} of "
        f"{len(left) + len(stayed)} runs the loss came halfway down, after {min(runs.after):.0%} to "
        f"{max(runs.after):.0%} of the steps (accuracy {min(left):.1%} to {max(left):.1%}), in "
        f"{len(stayed)} never ({min(stayed):.1%} to {max(stayed):.1%})."
    )


def named(tasks: Iterable[str]) -> str:
    return ", ".join(NAMES[task] for task in tasks)


def notes(rows: Sequence[Row], found: Sequence[Group]) -> list[str]:
    said = []
    if compared := comparisons(found):
        said.append(" ".join(decided(compared)))
        said += [why for task in tasks_of(compared) if (why := unsteady(found, task))]
    if any("schedule" not in row["point"] for group in found for row in group.rows):
        said.append(EARLIER)
    for task in dict.fromkeys(group.task for group in found):
        of = [group for group in found if group.task == task]
        fact, low, high = of[0].fact, min(g.mean for g in of), max(g.mean for g in of)
        beside = f"the majority class would have {fact['majority']:.1%}"
        if task == "listops":
            beside += f", the outermost operator alone {fact['first_token']:.1%}"
        line = (
            f"{NAMES[task]}: accuracy {low:.1%} to {high:.1%} ({fact['test_examples']:,} examples); {beside}."
        )
        if not all(map(learned, of)):
            line += " Not all learned more than that: equal accuracies say nothing there."
        said.append(line)
    for compiled, how in ((False, "eager"), (True, "compiled")):
        factors = speed_ups(rows, compiled)
        if (name := best(factors)) is not None:
            each = ", ".join(f"{factor:.2f}x at T={length:,}" for length, factor in factors[name].items())
            mean = mean_speed_up(factors[name])
            said.append(f"Steps with {name}, {how} as the standard is: {each}; mean {mean:.2f}x.")
    return said
