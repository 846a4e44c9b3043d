"""What the rows of studies/long_range.py say: tables, picture, and whether accuracies are alike."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from scripts.measure.report.long_range_accuracy import (
    DECISIVE,
    STANDARD,
    Comparison,
    Group,
    capped,
    comparisons,
    groups,
    learned,
    plateau,
    trusted,
)
from scripts.measure.report.pages import page
from scripts.measure.report.tables import Record, distinct, fmt, listed, records, where
from scripts.measure.studies import Report, Row, Table

NAMES = {"listops": "ListOps", "matching": "Matching", "pathfinder": "Pathfinder"}


def timed(rows: Iterable[Row], compiled: bool) -> dict[tuple[str, int], dict[str, Any]]:
    """(implementation, T) -> the result of its steps, eager or compiled."""
    return {
        (row["point"]["implementation"], row["point"]["seq_len"]): row["result"]
        for row in trusted(rows, "speed")
        if row["point"]["compile"] == compiled
    }


def speed_ups(rows: Iterable[Row], compiled: bool) -> dict[str, dict[int, float]]:
    """Implementation -> T -> step time of standard attention over its own, both eager or both compiled."""
    of = timed(rows, compiled)
    found: dict[str, dict[int, float]] = {}
    for (name, length), result in sorted(of.items(), key=lambda item: item[0][1]):
        if name != STANDARD and (STANDARD, length) in of:
            found.setdefault(name, {})[length] = of[STANDARD, length]["ms_median"] / result["ms_median"]
    return found


def mean_speed_up(factors: dict[int, float]) -> float:
    """Over the lengths: the geometric mean."""
    return statistics.geometric_mean(factors.values())


def best(factors: dict[str, dict[int, float]]) -> str | None:
    """The implementation with the largest mean among those that have most lengths."""
    most = max(map(len, factors.values()), default=0)
    able = [name for name, by_length in factors.items() if len(by_length) == most]
    return max(able, key=lambda name: mean_speed_up(factors[name]), default=None)


def tables(rows: Sequence[Row], found: Sequence[Group]) -> list[Table]:
    compared = {id(each.group): each for each in comparisons(found)}
    standard = {group.task: group for group in found if group.name == STANDARD}

    def accuracy(group: Group) -> str:
        each, baseline = compared.get(id(group)), standard.get(group.task)
        held = "||"
        if each:
            held = f"{each.difference:+.4f}|{fmt(each.allowed, '.4f')}|{each.verdict}"
        seeds = " ".join(f"{accuracy:.3f}" for accuracy in group.accuracies)
        faster = f"{baseline.ms / group.ms:.2f}x" if baseline else ""
        start = f"{NAMES[group.task]}|{group.rows[0]['point']['seq_len']:,}|{group.name}|{group.mean:.4f}"
        return f"{start}|{seeds}|{held}|{group.ms:.2f}|{faster}"

    timed = records(trusted(rows, "speed"))
    lengths = sorted(set(distinct(timed, "seq_len")))
    factors = {compiled: speed_ups(rows, compiled) for compiled in (False, True)}
    ways = {
        (compiled, r.implementation): None for compiled in factors for r in where(timed, compile=compiled)
    }

    def speed(way: tuple[bool, str]) -> str:
        compiled, name = way
        of = {r.seq_len: r.ms_median for r in where(timed, implementation=name, compile=compiled)}
        times = factors[compiled].get(name, {})
        cells = [f"{of[n]:.2f}" if n in of else "-" for n in lengths]
        cells = [f"{c} ({times[n]:.2f}x)" if n in times else c for n, c in zip(lengths, cells, strict=True)]
        return "|".join([name + ", compiled" * compiled, *cells])

    def left_out(r: Record) -> tuple[str, ...]:
        """What has no figure, or none to trust, and why."""
        why = r.reason
        if r.status == "ok":
            right = r.get("kernels_ok", True)
            why = f"error ratio {r.get('error_ratio'):.2f}" if right else "not the kernels asked for"
        name = r.implementation + ", compiled" * r["compile"]
        return NAMES[r.task], f"{r.seq_len:,}", name, r.status, why

    shown = [
        listed(
            "Accuracy on the test set, by seed; and the step time of the same runs, without torch.compile",
            "task|T|attention|accuracy|seeds|minus standard|allowed|verdict|ms per step|speed-up",
            found,
            accuracy,
        ),
        listed(
            "Milliseconds of a training step without padding (speed-up over standard attention, run alike)",
            "|".join(["attention", *(f"T={n:,}" for n in lengths)]),
            ways,
            speed,
        ),
        of_capped(capped(rows)),
        listed(
            "Points without results",
            "task|T|attention|status|reason",
            dict.fromkeys(left_out(r) for r in records(rows) if not r.trusted),
            list,
        ),
    ]
    return [table for table in shown if len(table.lines) > 1]


def of_capped(runs: Sequence[Group]) -> Table:
    def alone(group: Group) -> str:
        point, fact = group.rows[0]["point"], group.fact
        how = (
            f"{point['model']}|{group.name}|{point['cap_s']}|{fact['steps_done']:,}|{fact['examples_seen']:,}"
        )
        seen = "|".join(f"{fact[key]:.4f}" for key in ("accuracy", "majority", "first_token"))
        return f"{NAMES[group.task]}|{point['seq_len']:,}|{how}|{seen}|{'yes' if learned(group) else 'no'}"

    return listed(
        "One run each until its time was up, beside other runs on the same GPU; learned: more than the "
        "majority class and the first token alone give, by more than two standard errors of the test set",
        "task|T|model|attention|cap, s|steps|examples|accuracy|majority class|first token alone|learned",
        runs,
        alone,
    )


def report(rows: list[Row], picture: Callable[[list[Row], list[Group]], str]) -> Report:
    found, timed = groups(rows), [(compiled, speed_ups(rows, compiled)) for compiled in (False, True)]
    by_task: dict[str, list[Group]] = {}
    for group in found:
        by_task.setdefault(group.task, []).append(group)
    return page(
        "long_range",
        tables(rows, found),
        {"": picture(rows, found)} if found and timed[0][1] else {},
        **sentences(comparisons(found), found),
        capped=[(group, NAMES[group.task], learned(group)) for group in capped(rows)],
        earlier=any("schedule" not in row["point"] for group in found for row in group.rows),
        tasks={NAMES[task]: of for task, of in by_task.items()},
        unlearned=[NAMES[task] for task, of in by_task.items() if not all(map(learned, of))],
        steps=[(how, name, of[name], mean_speed_up(of[name])) for how, of in timed if (name := best(of))],
    )


def sentences(compared: Sequence[Comparison], found: Sequence[Group]) -> dict[str, Any]:
    """What templates/long_range_accuracy.md.j2 says: how many of the comparisons decide, and which runs left
    the plateau of their loss where it is what a task's accuracies differ by."""
    tasks = dict.fromkeys(each.group.task for each in compared)
    plateaus = {task: plateau(found, task) for task in tasks}
    return {"compared": compared, "plateaus": plateaus, "names": NAMES, "decisive": DECISIVE}
