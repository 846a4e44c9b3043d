"""The dropout mask of every implementation of our own: one pure function of (seed, b, h, i, j).

With murmur3's 32-bit finaliser fmix32 (Appleby 2011, a bijection), and unsigned 32-bit arithmetic throughout,

    key  = 0
    for x in (seed's low half, seed's high half, b, h, i):   key = fmix32((key ^ x) + C)
    bits = fmix32(key + C * j)                                C = 0x9E3779B9 (2**32 / golden ratio, odd)
    keep = bits >= round(p * 2**32)                           kept probabilities are scaled by 1 / (1 - p)

b is the batch, h the query head, i the query and j the key, all from 0, of the whole call and not of a tile.
Any tile can therefore be made by itself, in any order, in forward and again in backward, in Triton and CUDA
as here, and implementations agree bit by bit. This is a hash for masks, not a generator for cryptography.
"""

from __future__ import annotations

import torch
from torch import Tensor

GOLDEN = 0x9E3779B9
_U32 = 0xFFFFFFFF


def fmix32_(x: Tensor) -> Tensor:
    """murmur3's finaliser, in place, on an int64 tensor that holds values in [0, 2**32). Naive attention's
    peak of memory was here with three tensors of 8 bytes a score at a time; now it has two."""
    # An int64 product wraps modulo 2**64, which leaves the low 32 bits right.
    x.bitwise_xor_(x >> 16).mul_(0x85EBCA6B).bitwise_and_(_U32)
    x.bitwise_xor_(x >> 13).mul_(0xC2B2AE35).bitwise_and_(_U32)
    return x.bitwise_xor_(x >> 16)


def row_keys(seed: Tensor, b: Tensor, h: Tensor, i: Tensor) -> Tensor:
    """The key of each row; `seed` (0-d int64) and the int64 indices broadcast against each other."""
    key = torch.zeros_like(seed)
    for x in (seed & _U32, (seed >> 32) & _U32, b, h, i):
        key = fmix32_(((key ^ x) + GOLDEN) & _U32)
    return key


def dropout_threshold(p: float) -> int:
    """Bits below this are dropped: p as a 32-bit fixed-point number."""
    return round(p * 2**32)


def keep_mask(keys: Tensor, j: Tensor, p: float) -> Tensor:
    """True where the probability of row `keys` and key index `j` (int64, broadcast) is kept."""
    return fmix32_((keys + GOLDEN * j).bitwise_and_(_U32)) >= dropout_threshold(p)


def keep_tile(seed: Tensor, batch: int, heads: int, rows: range, cols: range, p: float) -> Tensor:
    """What is kept in the tile of queries `rows` and keys `cols`: bool (batch, heads, |rows|, |cols|)."""
    device = seed.device
    b = torch.arange(batch, device=device).view(-1, 1, 1, 1)
    h = torch.arange(heads, device=device).view(1, -1, 1, 1)
    i = torch.arange(rows.start, rows.stop, device=device).view(1, 1, -1, 1)
    j = torch.arange(cols.start, cols.stop, device=device).view(1, 1, 1, -1)
    return keep_mask(row_keys(seed, b, h, i), j, p)
