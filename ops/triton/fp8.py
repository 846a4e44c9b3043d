"""Rounding to fp8 with one scale per tensor, in two layouts at once, for training's products (ops/fp8.py).

Hopper's fp8 tensor cores contract over the contiguous dimension of both operands. The forward contracts an
input over its features, the gradient of the weight over its tokens, so each tensor is needed as it is and
transposed. The first kernel finds the largest magnitude, the second rounds a tile and writes it both ways. A
thread packs the values of four rows into a word, so that what is transposed through shared memory are words
of 32 bits.

What Inductor makes of PyTorch's functions takes three times as long (docs/kernels.md).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.library import wrap_triton

from ops.triton.interpret import INTERPRETED, mend

if INTERPRETED:
    mend()

AMAX_BLOCK, AMAX_PROGRAMS, SLOTS = 4096, 2048, 64
ROWS, COLUMNS, WARPS = 64, 128, 4  # of a tile


@triton.jit
def _tilegpt_fp8_amax(x_ptr, maxima_ptr, n, SIGNED: tl.constexpr, SLOTS: tl.constexpr, BLOCK: tl.constexpr):
    """The largest of `maxima` (SLOTS,), which are 0 before, becomes the largest |x|, or with SIGNED the
    largest x, if positive. One slot would have all programs wait for each other."""
    highest = tl.zeros((BLOCK,), tl.float32)
    step = tl.num_programs(0).to(tl.int64) * BLOCK
    offsets = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    for _ in range(tl.cdiv(n, step)):
        x = tl.load(x_ptr + offsets, offsets < n, 0.0).to(tl.float32)
        highest = tl.maximum(highest, x if SIGNED else tl.abs(x))
        offsets += step
    tl.atomic_max(maxima_ptr + tl.program_id(0) % SLOTS, tl.max(highest, 0), sem="relaxed")


@triton.jit
def _sigmoid_2u(x):
    """(sigmoid(2 u), du/dx) with u = sqrt(2 / pi) (x + 0.044715 x^3): gelu(x) by tanh is x sigmoid(2 u)."""
    ROOT: tl.constexpr = 0.7978845608028654
    LOG2E: tl.constexpr = 1.4426950408889634
    u = ROOT * x * (1.0 + 0.044715 * x * x)
    return 1.0 / (1.0 + tl.exp2(-2.0 * LOG2E * u)), ROOT * (1.0 + 0.134145 * x * x)


@triton.jit
def _gelu(x):
    return x * _sigmoid_2u(x)[0]


@triton.jit
def _gelu_slope(x):
    s, slope = _sigmoid_2u(x)
    return s + 2.0 * x * s * (1.0 - s) * slope


@triton.jit
def _tilegpt_fp8_round(
    x_ptr,
    h_ptr,
    maxima_ptr,
    rounded_ptr,
    transposed_ptr,
    scale_ptr,
    sums_ptr,
    M,
    N,
    LARGEST: tl.constexpr,
    SLOTS: tl.constexpr,
    GELU: tl.constexpr,
    SLOPE: tl.constexpr,
    SUMS: tl.constexpr,
    LOWEST: tl.constexpr,
    STEEPEST: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """x (M, N), gelu(x) with GELU, or x gelu'(h) with SLOPE, divided by a scale and rounded to fp8: rounded
    (M, N), and transposed (N, M / 4) in words of four. scale: the largest magnitude, or a bound of it, over
    LARGEST. With SUMS, sums (tiles of rows, N) has the sums over a tile's rows before rounding."""
    amax = tl.max(tl.load(maxima_ptr + tl.arange(0, SLOTS)), 0)
    if GELU:
        amax = tl.maximum(_gelu(amax), LOWEST)
    if SLOPE:
        amax *= STEEPEST
    amax = tl.maximum(amax, 1e-30)
    tile_n = tl.program_id(0)
    tile_m = (
        tl.num_programs(1).to(tl.int64) - 1 - tl.program_id(1)
    )  # L2 has the end of x from the first kernel
    if tile_m == 0 and tile_n == 0:
        tl.store(scale_ptr, amax / LARGEST)
    QUARTER: tl.constexpr = ROWS // 4
    quarters, columns = tl.arange(0, QUARTER), tile_n * COLUMNS + tl.arange(0, COLUMNS)
    words = tl.zeros((QUARTER, COLUMNS), tl.int32)
    sums = tl.zeros((COLUMNS,), tl.float32)
    for i in tl.static_range(4):
        rows = tile_m * ROWS + 4 * quarters + i
        offsets = rows[:, None] * N + columns[None, :]
        inside = (rows < M)[:, None] & (columns < N)[None, :]
        x = tl.load(x_ptr + offsets, inside, 0.0).to(tl.float32)
        if GELU:
            x = _gelu(x)
        if SLOPE:
            x *= _gelu_slope(tl.load(h_ptr + offsets, inside, 0.0).to(tl.float32))
        if SUMS:
            sums += tl.sum(x, 0)
        x = x * (LARGEST / amax)
        x = tl.where(tl.abs(x) > LARGEST, tl.where(x > 0, LARGEST, -LARGEST), x)  # NaN stays
        rounded = x.to(rounded_ptr.dtype.element_ty)
        tl.store(rounded_ptr + offsets, rounded, inside)
        words |= (rounded.to(tl.uint8, bitcast=True).to(tl.int32)) << (8 * i)
    words_m = tile_m * QUARTER + quarters
    offsets = columns[:, None].to(tl.int64) * (M // 4) + words_m[None, :]
    inside = (columns < N)[:, None] & (words_m < M // 4)[None, :]
    tl.store(transposed_ptr + offsets, tl.trans(words), inside)
    if SUMS:
        tl.store(sums_ptr + tile_m * N + columns, sums, columns < N)


def quantise(
    x: Tensor,
    h: Tensor | None,
    gelu: bool,
    dtype: torch.dtype,
    sums: bool,
    bounds: tuple[float, float],
    rows: int = ROWS,
    columns: int = COLUMNS,
    warps: int = WARPS,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """As ops/fp8.py's op; bounds: its LOWEST and STEEPEST."""
    M, N = x.shape
    rounded, transposed = x.new_empty(M, N, dtype=dtype), x.new_empty(N, M // 4, dtype=torch.int32)
    scale = x.new_empty((), dtype=torch.float32)
    tiles, by_gelu = triton.cdiv(M, rows), gelu and h is None
    by_tile = x.new_empty(tiles if sums else 0, N, dtype=torch.float32)
    maxima = x.new_zeros(SLOTS, dtype=torch.float32)
    programs = min(AMAX_PROGRAMS, triton.cdiv(x.numel(), AMAX_BLOCK))
    wrap_triton(_tilegpt_fp8_amax)[(programs,)](
        x, maxima, x.numel(), SIGNED=by_gelu, SLOTS=SLOTS, BLOCK=AMAX_BLOCK
    )
    wrap_triton(_tilegpt_fp8_round)[(triton.cdiv(N, columns), tiles)](
        x, x if h is None else h, maxima, rounded, transposed, scale, by_tile, M, N,
        LARGEST=torch.finfo(dtype).max, SLOTS=SLOTS, GELU=by_gelu, SLOPE=h is not None, SUMS=sums,
        LOWEST=bounds[0], STEEPEST=bounds[1], ROWS=rows, COLUMNS=columns, num_warps=warps,
    )  # fmt: skip
    return rounded, transposed.view(dtype), scale, by_tile.sum(0) if sums else by_tile.flatten()
