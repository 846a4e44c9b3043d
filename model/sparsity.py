"""Patterns of block-sparse attention, model.sparsity: which tiles of 128 queries by 128 keys count.

    local      the tile on the diagonal and the `blocks` - 1 before it (causal=false: on both sides)
    dilated    every `blocks`-th tile, from the diagonal on
    strided    local, and every `blocks`-th column for all         (Child et al. 2019, Sparse Transformers)
    butterfly  squares of `blocks` tiles: on the diagonal, and where the two numbers differ in one bit; and
               column 0 for all           (Dao et al. 2022, FlashAttention, section 3.3; Pixelated Butterfly)
    bigbird    local, column 0 for all, and `blocks` drawn at random in each row      (Zaheer et al. 2020)

A causal mask hides what lies right of the diagonal, in each of them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:  # the config, which names the patterns, does not wait for torch
    from torch import Tensor

PATTERNS = ("local", "dilated", "strided", "butterfly", "bigbird")


def pattern(name: str, tiles: int, blocks: int) -> Tensor:
    """Which tiles are kept, (tiles of queries, tiles of keys) bool."""
    import torch

    if name not in PATTERNS:
        raise ValueError(f"{name} is no pattern; there are {', '.join(PATTERNS)}.")
    r, c = torch.arange(tiles).view(-1, 1), torch.arange(tiles).view(1, -1)
    apart = (r - c).abs()
    if name == "local":
        return apart < blocks
    if name == "dilated":
        return apart % blocks == 0
    if name == "strided":
        return (apart < blocks) | (c % blocks == blocks - 1)
    if name == "butterfly":
        steps = (r // blocks) ^ (c // blocks)
        return (steps & (steps - 1) == 0) | (c == 0)
    draws = torch.rand(tiles, tiles, generator=torch.Generator().manual_seed(tiles))
    drawn = draws.masked_fill(c > r, 2).argsort(dim=1).argsort(dim=1) < blocks  # among the keys before
    return (apart < blocks) | (c == 0) | (drawn & (c <= r))  # rows with fewer keys have ties beyond


def kept_share(kept: Tensor, causal: bool) -> float:
    """The share of the tiles that are to be computed at all, those under the diagonal where causal."""
    tiles = kept.new_ones(kept.shape)
    tiles = tiles.tril() if causal else tiles
    return float((kept & tiles).sum() / tiles.sum())
