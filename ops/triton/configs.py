"""Tile shapes by device, dtype, head dim and mask, so that nobody waits for autotuning."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from ops.triton.interpret import INTERPRETED

Arch = tuple[int, int]


@dataclass(frozen=True)
class Tile:
    """`m` queries by `n` keys; `warps`, and `stages` of the software pipeline; `desc`: loads by tensor
    descriptors (TMA), where the tensors allow it."""

    m: int
    n: int
    warps: int
    stages: int
    desc: bool = False


def _rows(tiles: str, desc: bool) -> tuple[Tile, ...]:
    """Three tiles, "m n warps stages" each: without a mask; with one; with more to compute for each score."""
    return tuple(Tile(*map(int, tile.split()), desc) for tile in tiles.split("|"))


# The third column (softcap, ALiBi, bias, dropout, documents, lengths) needs registers: what fits without
# spills. sm_90: the fastest of 7 to 11 tiles that do not spill. Figures: milliseconds on one H200, bf16,
# 16,384 tokens, width 2,048, T = 4,096, without a mask and causal. Automatic warp specialisation (triton 3.6)
# compiled the forward and hung there, and failed to compile the backward.
_HOPPER = {
    ("forward", 32): "64 128 4 3 | 64 128 4 3 | 64 128 4 3",  # 1.76, 1.00; 128 x 128 1.93, 1.06
    ("forward", 64): "128 128 4 3 | 64 128 4 3 | 64 128 4 3",  # 1.24, 0.69; the other's 1.30, 0.74
    ("forward", 128): "128 128 8 3 | 64 64 4 3 | 64 64 4 3",  # 1.14, 0.55; the other's 1.15, 0.60
    ("forward", 256): "128 64 8 2 | 128 64 8 2 | 64 64 8 2",  # 1.08, 0.62; 64 x 64 x 4 1.23, 0.70
    ("dkdv", 32): "64 64 4 3 | 64 128 4 2 | 64 64 4 3",  # 3.12, 1.70; the other's 3.24, 1.96
    # ptxas serialises the products of 128 x 64 without a mask: 2.97
    ("dkdv", 64): "64 64 4 3 | 128 64 4 2 | 64 64 4 3",  # 2.07, 1.20; the other's 2.97, 1.48
    ("dkdv", 128): "64 64 4 2 | 64 64 4 2 | 64 64 8 2",  # 1.85, 1.08; 64 x 128 x 8 1.97, 1.34
    ("dkdv", 256): "64 64 8 2 | 64 32 8 2 | 64 32 8 2",  # 3.46, not measured
    ("dq", 32): "64 128 4 3 | 64 64 4 3 | 64 64 4 3",  # 1.82, 1.01; the other's 1.82, 1.29
    ("dq", 64): "64 128 4 3 | 64 128 4 3 | 64 64 4 3",  # 1.32, 0.75; 128 x 64 1.34, 0.75
    ("dq", 128): "128 64 8 3 | 128 64 8 3 | 128 64 8 3",  # 1.27, 0.75; 128 x 32 1.41, 0.87
    ("dq", 256): "128 32 8 2 | 128 32 8 2 | 128 32 8 2",  # 1.95, 1.08; 64 x 32 x 4 2.77, 1.39
}
# sm_80, sm_86, sm_89 and unknown GPUs: compiled within 101,376 bytes of shared memory and without spills, not
# measured.
_AMPERE = {
    ("forward", 32): "128 64 8 3 | 128 64 4 3 | 128 64 8 3",
    ("forward", 64): "128 64 8 3 | 128 64 4 3 | 128 64 8 3",
    ("forward", 128): "128 64 8 2 | 128 64 8 2 | 128 32 8 2",
    ("forward", 256): "64 32 8 2 | 64 32 8 2 | 64 32 8 2",
    ("dkdv", 32): "64 64 8 2 | 64 64 8 2 | 64 64 4 2",
    ("dkdv", 64): "64 64 8 2 | 64 64 8 2 | 32 64 8 2",
    ("dkdv", 128): "32 64 8 2 | 32 64 8 2 | 32 64 8 2",
    ("dkdv", 256): "32 32 8 1 | 32 32 8 1 | 32 32 8 1",
    ("dq", 32): "128 64 8 2 | 128 64 8 2 | 128 32 8 2",
    ("dq", 64): "128 64 8 2 | 128 64 8 2 | 128 32 8 2",
    ("dq", 128): "64 32 4 2 | 64 32 4 2 | 64 32 8 1",
    ("dq", 256): "64 32 8 1 | 64 32 8 1 | 64 32 8 1",
}
# fp32 holds three bf16 terms of each operand and a product apart from its accumulator: small tiles, and
# one stage, as the terms are made on the way into shared memory. The largest of 6 to 9 tiles with no or
# few bytes spilled. With wgmma, 64 rows; one H200, 32 heads, N = 4096, causal, ms: forward D = 64 1.42 (64
# x 32 1.63), 128 2.83 (128 x 32 in two stages 3.17; 128 x 64, which spills 548 bytes, 2.45), dkdv 64 2.58
# (64 x 32 4.82), 128 8.61 (16 x 64 17.2, 32 x 64 11.6), dq 64 1.68 (128 x 32 2.07), 128 3.75 (128 x 32
# 3.77, 64 x 32 by 8 warps 8.22).
_HOPPER_FP32 = {
    ("forward", 32): "128 64 8 1 | 128 64 8 1 | 128 64 8 1",
    ("forward", 64): "128 64 8 1 | 128 64 8 1 | 128 32 8 1",
    ("forward", 128): "64 32 4 1 | 64 32 4 1 | 64 32 4 1",
    ("forward", 256): "64 16 8 1 | 64 16 8 1 | 16 32 8 1",
    ("dkdv", 32): "32 64 4 1 | 32 64 4 1 | 32 64 4 1",
    ("dkdv", 64): "32 64 4 1 | 32 64 4 1 | 16 64 8 1",
    ("dkdv", 128): "64 32 8 1 | 64 32 8 1 | 16 32 8 1",
    ("dkdv", 256): "16 16 8 1 | 16 16 8 1 | 16 16 8 1",
    ("dq", 32): "128 64 8 1 | 128 64 8 1 | 128 64 8 1",
    ("dq", 64): "128 64 8 1 | 128 64 8 1 | 128 32 8 1",
    ("dq", 128): "64 32 4 1 | 64 32 4 1 | 64 32 8 1",
    ("dq", 256): "64 16 8 1 | 64 16 8 1 | 64 16 8 1",
}
# By mma.sync, whose left operands are in registers, within 101,376 bytes of shared memory.
_AMPERE_FP32 = {
    ("forward", 32): "128 32 8 1 | 128 32 8 1 | 64 32 4 1",
    ("forward", 64): "128 32 8 1 | 128 32 8 1 | 64 16 4 1",
    ("forward", 128): "64 16 8 1 | 64 16 8 1 | 16 32 4 1",
    ("forward", 256): "16 32 8 1 | 16 32 8 1 | 16 32 8 1",
    ("dkdv", 32): "16 32 8 1 | 16 32 8 1 | 16 32 8 1",
    ("dkdv", 64): "64 32 8 1 | 64 32 8 1 | 16 32 8 1",
    ("dkdv", 128): "16 32 8 1 | 16 32 8 1 | 16 16 8 1",
    ("dkdv", 256): "16 16 8 1 | 16 16 8 1 | 16 16 8 1",
    ("dq", 32): "64 32 8 1 | 64 32 8 1 | 16 64 8 1",
    ("dq", 64): "32 64 8 1 | 32 64 8 1 | 16 64 8 1",
    ("dq", 128): "32 64 8 1 | 32 64 8 1 | 16 32 8 1",
    ("dq", 256): "16 32 8 1 | 16 32 8 1 | 16 32 8 1",
}
_TABLES = {
    ("sm_90", 16): {key: _rows(tiles, True) for key, tiles in _HOPPER.items()},
    ("sm_80", 16): {key: _rows(tiles, False) for key, tiles in _AMPERE.items()},
    ("sm_90", 32): {key: _rows(tiles, False) for key, tiles in _HOPPER_FP32.items()},
    ("sm_80", 32): {key: _rows(tiles, False) for key, tiles in _AMPERE_FP32.items()},
}
# dQ's kernel also makes the gradients of biases. Where the third column's tile would spill, these do not;
# not measured. By the bias, the family of the device, bits and head dim.
_DQ_AND_BIAS = {
    ("relative_bias", "sm_90", 16, 128): Tile(128, 32, 8, 3, desc=True),
    ("relative_bias", "sm_90", 16, 256): Tile(64, 32, 8, 2, desc=True),
    ("bias", "sm_80", 16, 256): Tile(64, 16, 8, 1),
}
# With a block mask a program has few tiles of keys, and much of its time is its beginning and its end. With
# two stages three programs fit on an SM: T = 16k, causal, 12% of the tiles, 1.08 to 1.09x (H200).
_BLOCK_MASK = {("forward", "sm_90", 16, 64): Tile(64, 128, 4, 2, desc=True)}
# The interpreter needs few programs, whatever they hold.
_INTERPRETED = Tile(64, 64, 4, 1, desc=True)


def tile(
    kind: str,
    arch: Arch,
    bits: int,
    block_d: int,
    masked: bool,
    has_options: bool,
    bias_with_grad: str = "",
    block_mask: bool = False,
) -> Tile:
    """The tile of `kind`: forward, dkdv or dq.

    Args:
        arch: compute capability; bits: 16 or 32 of the dtype; block_d: the head dim as a power of two.
        masked: causal or a window; has_options: softcap, ALiBi, bias, dropout, documents or lengths;
            bias_with_grad: the bias that gets a gradient, "relative_bias" or "bias", if any; block_mask:
            whether there is one.
    """
    if INTERPRETED:
        return _INTERPRETED
    usual = _table(arch, bits)[kind, max(32, block_d)][2 if has_options else int(masked)]
    if bias_with_grad and kind == "dq":
        return _DQ_AND_BIAS.get((bias_with_grad, _family(arch), bits, block_d), usual)
    return _BLOCK_MASK.get((kind, _family(arch), bits, block_d), usual) if block_mask else usual


def tile_of(kind: str, arch: Arch, value_bytes: int, head_dim: int, *of_call: Any) -> Tile:
    """The tile of `kind` for any head dim; `of_call`: masked and what follows it in `tile`."""
    return tile(kind, arch, 8 * value_bytes, _power(head_dim), *of_call)


def shared_bytes(kind: str, arch: Arch, value_bytes: int, head_dim: int, *of_call: Any) -> dict[str, int]:
    """What the tiles of `kind` come to in shared memory, by a name that has their size: of what stays, one
    tile (forward: q) or two, and two of what is walked (k and v, or q and dout), times the stages."""
    chosen = tile_of(kind, arch, value_bytes, head_dim, *of_call)
    own, walked = (chosen.n, chosen.m) if kind == "dkdv" else (chosen.m, chosen.n)
    rows = own * (1 if kind == "forward" else 2) + 2 * walked * chosen.stages
    return {f"{kind}, {chosen.m} x {chosen.n}": value_bytes * _power(head_dim) * rows}


def _power(head_dim: int) -> int:
    return max(32, 1 << (head_dim - 1).bit_length())


def by_distance_shape(tile: Tile, tq: int, reach: int) -> tuple[int, int]:
    """(rows, numbers in one) in which dQ's kernel leaves the sums of dS by distance, for each head: a tile of
    queries has a row for each time that its rows turn around, of `side` distances to both sides."""
    side, turns = reach + tile.n + max(tile.m, tile.n), (tile.m + tile.n - 2) // tile.n + 1
    return -(-tq // tile.m) * turns, 2 * side + 1


def candidates(kind: str, arch: Arch, bits: int, block_d: int) -> list[Tile]:
    """What autotuning tries: every tile of this kind and head dim in the device's table and its
    neighbours."""
    sizes = {max(32, size) for size in (block_d // 2, block_d, min(256, block_d * 2))}
    found = [tile for size in sizes for tile in _table(arch, bits)[kind, size]]
    return list(dict.fromkeys(found))


def _table(arch: Arch, bits: int) -> dict[tuple[str, int], tuple[Tile, ...]]:
    return _TABLES[_family(arch), bits]


def _family(arch: Arch) -> str:
    return "sm_90" if arch[0] == 9 else "sm_80"


@dataclass(frozen=True)
class DecodeTile:
    """`n` keys a tile; `programs` that an SM runs at once; `desc`, `warps` and `stages` as above; `pdl`: the
    combining kernel starts while the splits run and waits for them there (sm_90 and newer)."""

    n: int
    warps: int
    stages: int
    programs: int
    desc: bool = False
    pdl: bool = False


def decode_tile(arch: Arch, bits: int, block_d: int, full: bool, desc: bool) -> DecodeTile:
    """The tile of the split-key kernel.

    Args:
        full: batch and KV heads alone fill the GPU, and nothing is split.
        desc: descriptors can be used.
    """
    if INTERPRETED:
        return DecodeTile(32, 4, 1, 2, desc)
    if bits == 32:
        return DecodeTile(16, 4 if block_d <= 128 else 8, 2, 2)
    if arch[0] != 9:
        return DecodeTile(64 if block_d <= 128 else 32, 4, 2, 2)
    # One H200, 32 query heads, 8 KV heads, D = 128, in us (cuDNN's). With descriptors B = 1, L = 4k 9.7
    # (12.1), 16k 22.4 (23.4), 128k 124.0 (124.5); by pointers 11.0, 22.9, 124.3. B = 16, L = 1k 19.9 (19.9),
    # 64k 942, 128k 1876 (945, 1880); 963, 1915 (951, 1891) where p90 was 5% above the median
    # (results/attention). All wait for memory there, and a slower clock tells short tiles: 64 keys 945, 1966;
    # 128 keys with one sum a row, added up in each tile, 945, 1881.
    if desc:
        tile = DecodeTile(128, 4, 3 if full else 2, 1 if full else 2, desc, pdl=True)
    else:
        tile = DecodeTile(64, 4, 4, 1, pdl=True) if full else DecodeTile(64, 4, 3, 2, pdl=True)
    return tile if block_d <= 128 else replace(tile, n=tile.n // 2, warps=8)
