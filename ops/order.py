"""In which order the blocks of a kernel come, of those that walk a row or a column of tiles of scores.

Heads go in groups, so that their K and V (in the backward Q and dO) stay in the L2, and within a group tile
after tile. Under a causal mask tiles differ: of n the longest has n times the work of the shortest. Longest
first, they fill a GPU, but not group by group: the long ones of the last group begin late, and most
multiprocessors wait for them. So the shortest tiles of all heads are left for the end.
"""

from __future__ import annotations

import functools
import math

import torch
from torch import Tensor

# What the heads of a group may take: half of an H200's 50 MB of L2.
HEADS_IN_L2_BYTES = 24 << 20
# Blocks that a multiprocessor runs at once, unless a kernel says otherwise.
_BLOCKS = 2


@functools.cache
def multiprocessors(device: torch.device) -> int:
    """Of a GPU; a few for a CPU, on which tests run the kernels."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 4


def order(
    x: Tensor,
    n_heads: int,
    n_tiles: int,
    growing: bool,
    times: int = 1,
    over: int = 1,
    blocks: int | None = None,
    block_mask: bool = False,
) -> tuple[int, int, int]:
    """(heads of a group, tiles of each head that are left for the end, and that come before any group) of a
    grid of n_heads * n_tiles blocks.

    Args:
        x: k, in the backward q, (B, H, T, D): what a group's heads read again and again, with its twin.
        growing: the tiles' lengths grow evenly, as under a causal mask without a window.
        times, over: a head of x serves `times` heads of the grid; a head of the grid reads `over` heads of x.
        blocks: that a multiprocessor runs at once. Fewer leave a shorter tail, whose heads are too many for
            the L2.
        block_mask: which may make the first tiles many times as long as the others (column 0, which all
            queries see). In the last group they would begin late, and most multiprocessors would wait for
            them: as many as run at a time come first.
    """
    fitting = HEADS_IN_L2_BYTES // (2 * x.shape[2] * x.shape[3] * x.element_size())
    heads_in_l2 = min(n_heads, max(1, max(1, fitting) * times // over))
    slots = (blocks or _BLOCKS) * multiprocessors(x.device)
    left = tail(n_tiles, n_heads, heads_in_l2, slots) if growing else 0
    if not block_mask:
        return heads_in_l2, left, 0
    first = min(n_tiles, math.ceil(slots / max(1, n_heads)))
    if growing:  # the shortest of all heads at the end: 0.5 to 2%, with 12% of the tiles
        left = max(left, first)
    return heads_in_l2, left, min(n_tiles - left, first)


def tail(n_tiles: int, n_heads: int, heads_in_l2: int, slots: int) -> int:
    """How many of a head's n tiles, of which the r-th has r of work, are left for the end; `slots` blocks run
    at a time.

    When the last group, of w heads, begins, x tiles of every head are to be as much as keeps all slots busy
    until its longest is done: w (n^2 - x^2) / 2 + n_heads x^2 / 2 = n slots. By list scheduling on 264 slots,
    16 heads of T = 16k in tiles of 128 in groups of 3 use 86% of the slots' time without, and 99% with it.
    """
    if heads_in_l2 >= n_heads:
        return 0  # one group: the longest first
    last = n_heads % heads_in_l2 or heads_in_l2
    lacking = 2 * n_tiles * slots - last * n_tiles**2
    return min(n_tiles, math.ceil(math.sqrt(max(0, lacking) / (n_heads - last))))
