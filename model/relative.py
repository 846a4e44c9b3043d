"""T5's relative positions, model.position=t5 (Raffel et al. 2020, section 2.1): a number for each head and
bucket of distances is added to the scores. It is learned, and one table serves all layers.

Near distances have a bucket each, further ones share buckets that widen with the logarithm of the distance,
up to one beyond which all are the same: 2 x distance + 1 numbers a head say it all, whatever the context.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from functools import cache


def bucket_of(distance: int, buckets: int, furthest: int) -> int:
    """The bucket of a distance of 0 or more: half of them are of one distance each, the others split what
    lies between that and `furthest` in equal ratios. In whole numbers, as logarithms round at the edges."""
    exact = buckets // 2
    return distance if distance < exact else exact + bisect_right(_starts(buckets, furthest), distance)


@cache
def _starts(buckets: int, furthest: int) -> list[int]:
    """The first distance of each bucket behind the one that begins where the exact ones end. Once for all
    distances: the powers of 1,024 buckets up to 65,536 have thousands of bits."""
    exact = buckets // 2
    ratios = buckets - exact
    # distance / exact >= (furthest / exact) ** (n / ratios)
    edges = (exact ** (ratios - n) * furthest**n for n in range(1, ratios))
    return [bisect_left(range(furthest + 1), edge, key=lambda distance: distance**ratios) for edge in edges]


def buckets_of_distances(buckets: int, furthest: int, causal: bool) -> list[int]:
    """The bucket of each distance rel = key - query from -furthest to furthest. Causal, keys behind the query
    have all buckets, else half of them and keys ahead of it the others."""
    if causal:
        return [bucket_of(max(-rel, 0), buckets, furthest) for rel in range(-furthest, furthest + 1)]
    half = buckets // 2
    return [bucket_of(abs(rel), half, furthest) + half * (rel > 0) for rel in range(-furthest, furthest + 1)]
