from __future__ import annotations

import heapq

import pytest
import torch

from ops import order as module
from ops.order import order, tail


def blocks(n_tiles: int, n_heads: int, heads_in_l2: int, left: int, lead: int = 0) -> list[tuple[int, int]]:
    """(tile, head) of the blocks in the order of `scheduled_tile`."""
    found = [(x // n_heads, x % n_heads) for x in range(lead * n_heads)]
    for first in range(0, n_heads, heads_in_l2):
        width = min(heads_in_l2, n_heads - first)
        in_group = (n_tiles - left - lead) * width
        found += [(lead + x // width, first + x % width) for x in range(in_group)]
    return found + [(n_tiles - left + x // n_heads, x % n_heads) for x in range(left * n_heads)]


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
        [n_tiles - tile for tile, _ in blocks(n_tiles, n_heads, heads_in_l2, each)] for each in (left, 0)
    )
    assert sorted(now) == sorted(before)
    assert use(before, 264) == pytest.approx(without, abs=0.02) and use(now, 264) > 0.97


def test_no_tail_where_none_is_needed() -> None:
    assert tail(32, 12, 12, 264) == 0  # one group
    assert tail(32, 768, 96, 264) == 0  # the last group is work enough
    assert tail(4, 8, 1, 1000) == 4  # the whole grid, longest first
    k = torch.empty(2, 4, 1 << 15, 64, dtype=torch.bfloat16)  # 8 MiB of K and V a head
    assert order(k, 8, 256, growing=False) == (3, 0, 0)
    assert order(k, 16, 256, growing=False, times=2) == (6, 0, 0)
    assert order(k, 4, 256, growing=False, over=4) == (1, 0, 0)
    assert order(k, 8, 256, growing=True) == (3, 0, 0)  # eight slots of a CPU are soon full


@pytest.mark.parametrize(("heads", "dim", "without"), [(16, 128, 0.75), (32, 64, 0.89)])
def test_a_long_first_tile_of_each_head_comes_first(
    heads: int, dim: int, without: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Column 0 of a block mask is visited by all 128 tiles of queries, others by 9."""
    monkeypatch.setattr(module, "multiprocessors", lambda _: 132)
    q = torch.empty(1, heads, 1 << 14, dim, dtype=torch.bfloat16, device="meta")

    def used(block_mask: bool) -> float:
        of_grid = blocks(128, heads, *order(q, heads, 128, growing=True, block_mask=block_mask))
        assert len(set(of_grid)) == 128 * heads
        return use([min(9, 128 - tile) if tile else 128 for tile, _ in of_grid], 132)

    assert used(False) == pytest.approx(without, abs=0.01) and used(True) > 0.97


def test_kernels_in_groups_with_a_tail(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "HEADS_IN_L2_BYTES", 1)
    assert order(torch.empty(2, 4, 200, 16), 8, 4, growing=True) == (1, 3, 0)
