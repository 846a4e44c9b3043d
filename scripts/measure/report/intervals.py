"""Intervals of 95%: of a mean over runs, and of the ratio of two median times."""

from __future__ import annotations

from math import hypot, pi, sqrt
from typing import Any

# Two-sided 95% of Student's t by degrees of freedom; for more of them that of 9, which is wider.
STUDENT = {1: 12.71, 2: 4.30, 3: 3.18, 4: 2.78, 5: 2.57, 6: 2.45, 7: 2.36, 8: 2.31, 9: 2.26}
TENTHS = 2.563  # from the 10th to the 90th percentile of normal values, in standard deviations


def student(runs: int) -> float:
    """For a mean over so many runs, which has one degree of freedom less."""
    return STUDENT[min(max(runs - 1, 1), 9)]


def of_mean(deviation: float, runs: int) -> float:
    """Half the interval of a mean over runs with this standard deviation."""
    return student(runs) * deviation / sqrt(runs)


def of_ratio(first: dict[str, Any], second: dict[str, Any]) -> float:
    """Half the interval of the ratio of two median times, as a share of it: by the number of steps and the
    spread (p10 to p90) of each, as if times were normal and steps independent."""
    return student(min(first["n"], second["n"])) * hypot(_error(first), _error(second))


def _error(result: dict[str, Any]) -> float:
    """Standard error of a median time, as a share of it: that of a mean times sqrt(pi / 2)."""
    deviation = (result["ms_p90"] - result["ms_p10"]) / TENTHS
    return sqrt(pi / 2 / result["n"]) * deviation / result["ms_median"]
