from __future__ import annotations

import heapq

import pytest
import torch

from ops import order as module
from ops.order import order, tail


def blocks(n_tiles: int, n_heads: int, heads_in_l2: int, left: int) -> list[tuple[int, int]]:
    """(length, head) of the blocks in the order of `scheduled_tile`, the longest of a head n_tiles."""
    before_tail = n_tiles - left
    found = []
    for first in range(0, n_heads, heads_in_l2):
        width = min(heads_in_l2, n_heads - first)
        found += [(n_tiles - x // width, first + x % width) for x in range(before_tail * width)]
    return found + [(left - x // n_heads, x % n_heads) for x in range(left * n_heads)]


def use(lengths: list[int], slots: int) -> float:
    """The share of the slots' time that is work, where each takes the next block when it is free."""
    free = [0] * slots
    for length in lengths:
        heapq.heappush(free, heapq.heappop(free) + length)
    return sum(lengths) / slots / max(free)


@pytest.mark.parametrize(
    ("n_tiles", "n_heads", "heads_in_l2", "without"),
    [(128, 16, 3, 0.86), (32, 64, 12, 0.87), (64, 32, 6, 0.86), (8, 256, 48, 0.88), (128, 32, 6, 0.95)],
)
def test_the_tail_fills_a_gpu(n_tiles: int, n_heads: int, heads_in_l2: int, without: float) -> None:
    left = tail(n_tiles, n_heads, heads_in_l2, 264)
    assert 0 < left < 0.7 * n_tiles
    now, before = (
        [length for length, _ in blocks(n_tiles, n_heads, heads_in_l2, each)] for each in (left, 0)
    )
    assert sorted(now) == sorted(before)
    assert use(before, 264) == pytest.approx(without, abs=0.02) and use(now, 264) > 0.97


def test_no_tail_where_none_is_needed() -> None:
    assert tail(32, 12, 12, 264) == 0  # one group
    assert tail(32, 768, 96, 264) == 0  # the last group is work enough
    assert tail(4, 8, 1, 1000) == 4  # the whole grid, longest first
    k = torch.empty(2, 4, 1 << 15, 64, dtype=torch.bfloat16)  # 8 MiB of K and V a head
    assert order(k, 8, 256, uneven=False) == (3, 0)
    assert order(k, 16, 256, uneven=False, times=2) == (6, 0)
    assert order(k, 4, 256, uneven=False, over=4) == (1, 0)
    assert order(k, 8, 256, uneven=True) == (3, 0)  # eight slots of a CPU are soon full


def test_kernels_in_groups_with_a_tail(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "HEADS_IN_L2_BYTES", 1)
    assert order(torch.empty(2, 4, 200, 16), 8, 4, uneven=True) == (1, 3)
