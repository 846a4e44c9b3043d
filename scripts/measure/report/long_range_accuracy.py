"""Accuracies of studies/long_range.py beside those of standard attention: whether they are alike,
where the seeds let that be decided, and which runs left their plateau."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from scripts.measure import rows as measured_rows
from scripts.measure.studies import Row

STANDARD = "standard"
FALSE_ALARMS = 0.05  # over all comparisons together, were all implementations alike
# Of what standard attention has above what needs no attention, the share that the allowed difference may come
# to: with more, an implementation that learned half as much would pass as alike.
DECISIVE = 0.5
ALIKE, DIFFERS, OPEN = "alike", "differs", "not decided"


@dataclass(frozen=True)
class Group:
    """The runs of one implementation on one task: accuracy by seed, and rows of the same order."""

    task: str
    name: str
    rows: list[Row]

    @property
    def accuracies(self) -> list[float]:
        return accuracies(self.rows)

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

    @property
    def without_attention(self) -> float:
        """What the majority class, or of ListOps the outermost operator by itself, already gives."""
        return max(self.fact["majority"], self.fact["first_token"])


def trusted(rows: Iterable[Row], measured: str) -> list[Row]:
    """Rows with figures, of the newest settings that this was measured with."""
    found = [row for row in rows if row["point"]["measured"] == measured]
    found = [row for row in found if measured_rows.trusted(row["result"])]
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


def capped(rows: Iterable[Row]) -> list[Group]:
    """The runs that trained until their time was up, each by itself: the newest of a task and attention."""
    of = trusted(rows, "capped")
    newest = {(row["point"]["task"], row["point"]["implementation"]): row for row in of}
    return [Group(*key, [row]) for key, row in newest.items()]


@dataclass(frozen=True)
class Comparison:
    """An implementation's accuracy beside that of standard attention. `allowed` is how far two means of so
    many seeds lie apart when nothing but the seed differs, None where one seed alone was run; `gained` is
    what standard attention has above what needs no attention."""

    group: Group
    difference: float
    allowed: float | None
    gained: float

    @property
    def verdict(self) -> str:
        """More than seeds do is a difference however wide that is; less is alike only where it is narrow."""
        if self.allowed is None:
            return OPEN
        if abs(self.difference) > self.allowed + 1e-12:
            return DIFFERS
        return ALIKE if self.allowed <= DECISIVE * self.gained else OPEN


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
        gained = baseline.mean - baseline.without_attention
        made.append(Comparison(group, group.mean - baseline.mean, allowed, gained))
    return made


def student(p: float, freedom: int) -> float:
    """The quantile of Student's t: exact for 1 and 2 degrees of freedom, beyond by the expansion in
    1 / freedom (Abramowitz and Stegun 26.7.5), within 1% from 4 on."""
    if freedom == 1:
        return math.tan(math.pi * (p - 0.5))
    if freedom == 2:
        return (2 * p - 1) / math.sqrt(2 * p * (1 - p))
    z = statistics.NormalDist().inv_cdf(p)
    terms = ((z**3 + z) / 4, (5 * z**5 + 16 * z**3 + 3 * z) / 96)
    terms += ((3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,)
    return z + sum(term / freedom**power for power, term in enumerate(terms, 1))


def learned(group: Group) -> bool:
    """Whether the accuracy is above what needs no attention by more than the test set's own error."""
    share, n = group.without_attention, group.fact["test_examples"]
    return group.mean > share + 2 * math.sqrt(share * (1 - share) / n)


@dataclass(frozen=True)
class Plateau:
    """The runs of a task whose loss came halfway from the highest tenth of a run to the lowest, `left`, with
    the share of the steps after which each did, and those whose never did, `stayed`."""

    left: list[Row]
    after: list[float]
    stayed: list[Row]

    @property
    def splits(self) -> bool:
        """Whether that is what the runs' accuracies differ by: every run that left is above every one that
        stayed."""
        left, stayed = map(accuracies, (self.left, self.stayed))
        return bool(left and stayed) and min(left) > max(stayed)


def accuracies(rows: Iterable[Row]) -> list[float]:
    return [row["result"]["accuracy"] for row in rows]


def plateau(found: Sequence[Group], task: str) -> Plateau:
    """By the loss curves of all runs of the task, whose tenths are means over a tenth of the steps each."""
    rows = [row for group in found if group.task == task for row in group.rows]
    curves = [row["result"]["loss"]["curve"] for row in rows]
    half = (max(map(max, curves)) + min(map(min, curves))) / 2
    first = [next((i for i, loss in enumerate(curve) if loss < half), None) for curve in curves]
    left = [(row, i / len(c)) for row, c, i in zip(rows, curves, first, strict=True) if i is not None]
    stayed = [row for row, i in zip(rows, first, strict=True) if i is None]
    return Plateau([row for row, _ in left], [share for _, share in left], stayed)
