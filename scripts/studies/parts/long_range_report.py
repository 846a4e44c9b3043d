"""What the rows of scripts/studies/long_range.py say: tables, picture, and whether accuracies are alike."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from scripts.claims import wrong
from scripts.studies import Report, Row, Table

COMMAND = "python scripts/studies/long_range.py"
STANDARD = "standard"
QUESTION = (
    "Does a classifier of long sequences come to the same accuracy with tiled as with standard attention, "
    "and how much faster does it train?"
)
FALSE_ALARMS = 0.05  # over all comparisons together, were all implementations alike
NAMES = {"listops": "ListOps", "matching": "Matching"}


@dataclass(frozen=True)
class Group:
    """The runs of one implementation on one task: accuracy by seed, and rows of the same order."""

    task: str
    name: str
    rows: list[Row]

    @property
    def accuracies(self) -> list[float]:
        return [row["result"]["accuracy"] for row in self.rows]

    @property
    def mean(self) -> float:
        return statistics.mean(self.accuracies)

    @property
    def ms(self) -> float:
        return statistics.median(row["result"]["ms_median"] for row in self.rows)

    @property
    def fact(self) -> dict[str, Any]:
        """What is the same for all runs of a task: majority, first_token, test_examples, mean_length."""
        return self.rows[-1]["result"]


def trusted(rows: Iterable[Row], measured: str) -> list[Row]:
    """Rows with figures, of the newest settings that this was measured with."""
    found = [row for row in rows if row["point"]["measured"] == measured and row["result"]["status"] == "ok"]
    found = [row for row in found if not wrong(row["result"])]
    newest = {row["point"]["task"]: setting(row) for row in found}
    return [row for row in found if newest[row["point"]["task"]] == setting(row)]


def setting(row: Row) -> str:
    """All of a point but who runs it, with which seed, and at which length of those whose speed is timed."""
    apart = {"implementation", "seed", "compile"}
    if row["point"]["measured"] == "speed":
        apart |= {"seq_len", "micro_batch", "tokens_per_step"}
    return repr([(key, value) for key, value in row["point"].items() if key not in apart])


def groups(rows: Iterable[Row]) -> list[Group]:
    """By task and implementation, in the order of their first rows."""
    found: dict[tuple[str, str], list[Row]] = {}
    for row in trusted(rows, "accuracy"):
        found.setdefault((row["point"]["task"], row["point"]["implementation"]), []).append(row)
    made = [Group(*key, sorted(of, key=lambda row: row["point"]["seed"])) for key, of in found.items()]
    return sorted(made, key=lambda group: (group.task, group.name != STANDARD))


@dataclass(frozen=True)
class Comparison:
    """An implementation's accuracy beside that of standard attention. `allowed` is how far two means of so
    many seeds lie apart when nothing but the seed differs; None where one seed alone was run."""

    group: Group
    difference: float
    allowed: float | None

    @property
    def alike(self) -> bool | None:
        return None if self.allowed is None else abs(self.difference) <= self.allowed + 1e-12


def comparisons(found: Sequence[Group]) -> list[Comparison]:
    """Of all implementations but the standard. The spread over seeds is pooled over the implementations of
    a task, and the limit is such that in all comparisons together, of equals, one in twenty studies would
    find a difference."""
    baselines = {group.task: group for group in found if group.name == STANDARD}
    others = [group for group in found if group.name != STANDARD and group.task in baselines]
    made = []
    for group in others:
        baseline, allowed = baselines[group.task], None
        several = [each.accuracies for each in found if each.task == group.task and len(each.rows) > 1]
        if several:
            freedom = sum(len(each) - 1 for each in several)
            squares = sum(statistics.variance(each) * (len(each) - 1) for each in several)
            parts = 1 / len(group.rows) + 1 / len(baseline.rows)
            quantile = student(1 - FALSE_ALARMS / 2 / len(others), freedom)
            allowed = quantile * math.sqrt(squares / freedom * parts)
        made.append(Comparison(group, group.mean - baseline.mean, allowed))
    return made


def student(p: float, freedom: int) -> float:
    """The quantile of Student's t, by the expansion in 1 / freedom (Abramowitz and Stegun 26.7.5): within 1%
    from 4 degrees of freedom on, 3% at 2."""
    z = statistics.NormalDist().inv_cdf(p)
    terms = ((z**3 + z) / 4, (5 * z**5 + 16 * z**3 + 3 * z) / 96)
    terms += ((3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,)
    return z + sum(term / freedom**power for power, term in enumerate(terms, 1))


def learned(group: Group) -> bool:
    """Whether the accuracy is above that of the majority class by more than the test set's own error."""
    share, n = group.fact["majority"], group.fact["test_examples"]
    return group.mean > share + 2 * math.sqrt(share * (1 - share) / n)


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
    lines = [["task", "T", "attention", "accuracy", "seeds", "- standard", "allowed", "ms a step", "faster"]]
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
        if result["status"] == "ok" and not wrong(result):
            continue
        why = result["reason"]
        if result["status"] == "ok":
            right = result.get("kernels_ok", True)
            why = f"error ratio {result.get('error_ratio'):.2f}" if right else "not the kernels asked for"
        name = point["implementation"] + (", compiled" if point["compile"] else "")
        lines.append([NAMES[point["task"]], f"{point['seq_len']:,}", name, result["status"], why])
    return [list(line) for line in dict.fromkeys(map(tuple, lines))]


def notes(rows: Sequence[Row], found: Sequence[Group]) -> list[str]:
    said = []
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
            line += " Not all learned anything: equal accuracies say nothing there."
        said.append(line)
    compared = comparisons(found)
    judged = [each for each in compared if each.alike is not None]
    if judged:
        apart = [f"{each.group.name} on {NAMES[each.group.task]}" for each in judged if not each.alike]
        whole = "all" if not apart else f"all but {', '.join(apart)}"
        said.append(
            f"Within what seeds alone would do, {whole} of {len(judged)} comparisons are as accurate as "
            "standard attention."
        )
    elif compared:
        said.append("One seed alone: whether accuracies are alike takes two or more.")
    for compiled, how in ((False, "eager"), (True, "compiled")):
        factors = speed_ups(rows, compiled)
        if (name := best(factors)) is not None:
            each = ", ".join(f"{factor:.2f}x at T={length:,}" for length, factor in factors[name].items())
            mean = mean_speed_up(factors[name])
            said.append(f"Steps with {name}, {how} as the standard is: {each}; mean {mean:.2f}x.")
    return said


def report(rows: list[Row]) -> Report:
    found = groups(rows)
    tables = []
    if found:
        tables.append(accuracy_table(found))
    if trusted(rows, "speed"):
        tables.append(speed_table(rows))
    if missing := left_out(rows):
        tables.append(Table("Without figures", [["task", "T", "attention", "status", "why"], *missing]))
    drawable = found and speed_ups(rows, False)
    pictures = {}
    if drawable:
        from scripts.studies.parts.long_range_plot import picture

        pictures[""] = picture(rows, found)
    return Report(QUESTION, COMMAND, tables, pictures, notes(rows, found))
