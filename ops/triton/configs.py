"""Tile shapes by device, dtype, head dim and mask, so that nobody waits for autotuning.

The figures behind the rows of sm_90: one H200, bf16, 16,384 tokens, width 2,048, T = 4,096, in milliseconds.
"""

from __future__ import annotations

from dataclasses import dataclass

from ops.triton.interpret import INTERPRETED


@dataclass(frozen=True)
class Tile:
    """`m` queries by `n` keys; `warps`, `stages` of the software pipeline; `desc`: loads by tensor descriptors (TMA)
    where the tensors allow it."""

    m: int
    n: int
    warps: int
    stages: int
    desc: bool = False


# The interpreter needs few programs, whatever they hold.
_INTERPRETED = Tile(64, 64, 4, 1, desc=True)
_FP32 = Tile(32, 32, 4, 1)


def forward_tile(arch: tuple[int, int], bits: int, block_d: int, masked: bool) -> Tile:
    if INTERPRETED:
        return _INTERPRETED
    if bits == 32:
        return _FP32
    desc = arch[0] == 9
    if block_d <= 64:
        return Tile(64, 128, 4, 3, desc) if masked else Tile(128, 128, 4, 3, desc)
    if block_d == 128:
        return Tile(64, 64, 4, 3, desc) if masked else Tile(128, 128, 8, 3, desc)
    return Tile(64, 64, 4, 2, desc)


def dkdv_tile(arch: tuple[int, int], bits: int, block_d: int, masked: bool) -> Tile:
    if INTERPRETED:
        return _INTERPRETED
    if bits == 32:
        return _FP32
    desc = arch[0] == 9
    if block_d <= 64:
        return Tile(128, 64, 4, 2, desc) if masked else Tile(64, 64, 4, 3, desc)
    if block_d == 128:
        return Tile(64, 64, 4, 2, desc)
    return Tile(64, 64, 8, 1, desc)


def dq_tile(arch: tuple[int, int], bits: int, block_d: int, masked: bool) -> Tile:
    if INTERPRETED:
        return _INTERPRETED
    if bits == 32:
        return _FP32
    desc = arch[0] == 9
    if block_d <= 64:
        return Tile(64, 128, 4, 3, desc)
    if block_d == 128:
        return Tile(128, 64, 8, 3, desc)
    return Tile(64, 64, 8, 1, desc)


@dataclass(frozen=True)
class DecodeTile:
    """`n` keys a tile; `programs` that an SM runs at once."""

    n: int
    warps: int
    stages: int
    programs: int
    desc: bool = False
    pdl: bool = False


def decode_tile(arch: tuple[int, int], bits: int, block_d: int) -> DecodeTile:
    if INTERPRETED:
        return DecodeTile(32, 4, 1, 2, True)
    if bits == 32:
        return DecodeTile(32, 4, 2, 2)
    return DecodeTile(64, 4, 3, 2, desc=False)
