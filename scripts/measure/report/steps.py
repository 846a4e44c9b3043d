"""Times of generation from the rows of single steps (studies/kv_cache.py)."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable
from typing import Any

from scripts.measure.claims import matches
from scripts.measure.rows import trusted
from scripts.measure.studies import Row

Way = tuple[str, bool]  # an implementation, and whether there is a cache


def chosen(rows: Iterable[Row], **wanted: Any) -> list[Row]:
    """Rows with figures to trust whose points have these values, by `scripts.measure.claims.matches`."""
    return [row for row in rows if trusted(row["result"]) and matches(row, wanted)]


class Steps:
    """The rows of steps as functions of the tokens, by way."""

    def __init__(self, rows: list[Row]):
        steps = chosen(rows, passed="step")
        self.names = list(dict.fromkeys(row["point"]["implementation"] for row in steps))
        self.ways: list[Way] = [(name, cached) for cached in (False, True) for name in self.names]
        self.without: dict[str, dict[int, float]] = {name: {} for name in self.names}
        self.eager: dict[str, dict[int, float]] = {name: {} for name in self.names}
        self.within: dict[str, dict[tuple[int, int], float]] = {name: {} for name in self.names}
        for row in sorted(steps, key=lambda row: row["point"]["seq_len"]):
            point, result = row["point"], row["result"]
            name, tokens = point["implementation"], point["seq_len"]
            if point["kv_cache"]:
                self.within[name][point["capacity"], tokens] = result["ms_median"]
            else:
                self.without[name][tokens] = result["ms_median"]
                self.eager[name][tokens] = result["eager_ms"]

    @property
    def lengths(self) -> list[int]:
        """Those that all ways have a step of."""
        found = [set(self.per_token(way)) for way in self.ways]
        return sorted(set.intersection(*found)) if found else []

    def per_token(self, way: Way) -> dict[int, float]:
        """Milliseconds of choosing one token by the number of tokens it is chosen after; with the cache, of
        just their capacity."""
        name, cached = way
        if not cached:
            return self.without[name]
        tight = {tokens: ms for (room, tokens), ms in self.within[name].items() if room < tokens + 128}
        return dict(sorted(tight.items()))

    def total(self, way: Way, new: int) -> float | None:
        """Seconds of generating `new` tokens from one, integrated from steps: see kv_cache.py."""
        name, cached = way
        if cached:
            half = self.within[name].get((-(-new // 128) * 128, max(1, new // 2)))
            return None if half is None else new * half / 1e3
        return integrated(self.without[name], new)

    def totals(self, way: Way) -> dict[int, float]:
        found = {new: self.total(way, new) for new in self.lengths if new > 1}
        return {new: seconds for new, seconds in found.items() if seconds is not None}

    def four(self, new: int) -> dict[Way, float] | None:
        """Seconds of all ways, where all have them."""
        found = {way: self.totals(way).get(new) for way in self.ways}
        return None if None in found.values() else found


def integrated(steps: dict[int, float], new: int) -> float | None:
    """Seconds of the steps after 1 .. new tokens, those between measured ones (milliseconds) by the power law
    through their neighbours; None beyond what is measured."""
    known = sorted(steps)
    if not known or known[0] != 1 or known[-1] < new:
        return None
    total, at = 0.0, 0
    for tokens in range(1, new + 1):
        while known[at] < tokens:
            at += 1
        if known[at] == tokens:
            total += steps[tokens]
            continue
        low, high = known[at - 1], known[at]
        share = math.log(tokens / low) / math.log(high / low)
        total += steps[low] ** (1 - share) * steps[high] ** share
    return total / 1e3


def exponent(points: dict[int, float]) -> float | None:
    """p of the least-squares y = c x^p; None for fewer than two points."""
    if len(points) < 2:
        return None
    fit = statistics.linear_regression([math.log(x) for x in points], [math.log(y) for y in points.values()])
    return fit.slope


def halves(points: dict[int, float]) -> tuple[dict[int, float], dict[int, float]]:
    """The shorter lengths and the longer ones, the middle in both."""
    lengths = sorted(points)
    middle = len(lengths) // 2
    return {n: points[n] for n in lengths[: middle + 1]}, {n: points[n] for n in lengths[middle:]}


def factors(four: dict[Way, float], names: list[str]) -> dict[str, float]:
    """What each saves of the time without either, and both; `stacking` is both over the product."""
    standard, tiled = names
    neither = four[standard, False]
    cache, tiles = neither / four[standard, True], neither / four[tiled, False]
    both = neither / four[tiled, True]
    return {"cache": cache, "tiled": tiles, "product": cache * tiles, "both": both} | {
        "stacking": both / (cache * tiles)
    }
