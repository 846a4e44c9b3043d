"""Products of a decoding step with their neighbours: one token a row, so few rows that weights are all there
is to read.

A program holds a few rows of a weight matrix whole, in registers; of a large matrix it asks for the next ones
while it multiplies them. The weights do not depend on the kernel before, so the first are asked for ahead of
the wait for it (programmatic dependent launch), and memory goes on delivering while the small kernels of a
step hand over to each other.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ops.triton.common import tanh

LAYER_NORM, RMS_NORM = tl.constexpr(1), tl.constexpr(2)
GELU, SWIGLU = tl.constexpr(1), tl.constexpr(2)


@triton.jit
def normalised(x, inside, weight, bias, eps, size: tl.constexpr, NORM: tl.constexpr):
    """LayerNorm or RMSNorm of one row x, fp32, of `size` numbers; zeros beyond them."""
    if NORM == 1:
        x = tl.where(inside, x - tl.sum(x, 0) / size, 0.0)
    x *= tl.rsqrt(tl.sum(x * x, 0) / size + eps)
    if weight is not None:
        x *= weight
    if bias is not None:
        x += bias
    return x


@triton.jit
def activated(y, gate, ACTIVATION: tl.constexpr):
    if ACTIVATION == 1:  # the tanh form, as in GPT-2
        y = 0.5 * y * (1.0 + tanh(0.7978845608028654 * (y + 0.044715 * y * y * y), True))
    if ACTIVATION == 2:
        y = y * gate * tl.sigmoid(gate)
    return y


@triton.jit
def rows_of(weight, first, k, N: tl.constexpr, K: tl.constexpr, BLOCK_N: tl.constexpr):
    """Rows `first` and on of weight (N, K) as (BLOCK_N, BLOCK_K), which nobody reads again in this step."""
    n = first + tl.arange(0, BLOCK_N)
    at, inside = n[:, None].to(tl.int64) * K + k[None, :], (n < N)[:, None] & (k < K)[None, :]
    return tl.load(weight + at, mask=inside, other=0.0, eviction_policy="evict_first")


@triton.jit
def tile_of(
    weight, bias, first, k, N: tl.constexpr, K: tl.constexpr, BLOCK_N: tl.constexpr, GATED: tl.constexpr
):
    """Rows of the weight and their biases, (BLOCK_N,) fp32; where GATED those of the gates, which lie before
    the others, and the others."""
    n = first + tl.arange(0, BLOCK_N)
    weights, biases = (rows_of(weight, first, k, N, K, BLOCK_N),), (0.0, 0.0)
    if GATED:
        weights += (rows_of(weight + N * K, first, k, N, K, BLOCK_N),)
    if bias is not None:
        b = tl.load(bias + n, mask=n < N, other=0.0).to(tl.float32)
        biases = (b, tl.load(bias + N + n, mask=n < N, other=0.0).to(tl.float32) if GATED else b)
    return weights, biases


@triton.jit
def store_products(
    out,
    tile,
    rows,
    first,
    N: tl.constexpr,
    BLOCK_N: tl.constexpr,
    ACTIVATION: tl.constexpr,
    ADD: tl.constexpr,
):
    """Some columns of out (B, N) by a tile and `rows`, a tuple of B."""
    weights, biases = tile
    n = first + tl.arange(0, BLOCK_N)
    for b in tl.static_range(len(rows)):
        to = out + b * N + n
        past = tl.load(to, mask=n < N, other=0.0) if ADD else 0.0
        y = tl.sum(weights[-1].to(tl.float32) * rows[b][None, :], 1) + biases[1]
        gate = y
        if len(weights) == 2:
            gate = tl.sum(weights[0].to(tl.float32) * rows[b][None, :], 1) + biases[0]
        y = past + activated(y, gate, ACTIVATION)
        tl.store(to, y.to(out.dtype.element_ty), mask=n < N)


@triton.jit
def _tilegpt_step_linear(
    x,
    norm_weight,
    norm_bias,
    weight,
    bias,
    out,
    eps,
    N: tl.constexpr,
    K: tl.constexpr,
    B: tl.constexpr,
    NORM: tl.constexpr,
    ACTIVATION: tl.constexpr,
    ADD: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    TURNS: tl.constexpr,
    PDL: tl.constexpr,
):
    """out (B, N) = activation(norm(x) weight^T + bias), added to what is there with ADD.

    x (B, K); weight (N, K), with SWIGLU (2N, K): gates, then values. A program takes TURNS tiles."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    GATED: tl.constexpr = ACTIVATION == 2
    k, first, step = tl.arange(0, BLOCK_K), tl.program_id(0) * BLOCK_N, tl.num_programs(0) * BLOCK_N
    columns = k < K
    tile = tile_of(weight, bias, first, k, N, K, BLOCK_N, GATED)
    g, beta = None, None
    if norm_weight is not None:
        g = tl.load(norm_weight + k, mask=columns, other=0.0).to(tl.float32)
    if norm_bias is not None:
        beta = tl.load(norm_bias + k, mask=columns, other=0.0).to(tl.float32)
    if PDL:
        tl.extra.cuda.gdc_wait()
    rows = ()
    for b in tl.static_range(B):
        row = tl.load(x + b * K + k, mask=columns, other=0.0).to(tl.float32)
        rows += (normalised(row, columns, g, beta, eps, K, NORM) if NORM > 0 else row,)
    if TURNS == 1:
        store_products(out, tile, rows, first, N, BLOCK_N, ACTIVATION, ADD)
    else:
        for start in tl.range(first, N, step):
            now = tile
            tile = tile_of(weight, bias, start + step, k, N, K, BLOCK_N, GATED)
            store_products(out, now, rows, start, N, BLOCK_N, ACTIVATION, ADD)


@triton.jit
def _tilegpt_step_embed(
    token, lengths, wte, wpe, x, C: tl.constexpr, BLOCK_C: tl.constexpr, PDL: tl.constexpr
):
    """x (B, C) fp32: the embedding of each row's newest token, at its position."""
    if PDL:
        # In this order: what comes next may read the lengths before it waits, which the last step counts on.
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    b, c = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK_C)
    row = tl.load(wte + tl.load(token + b) * C + c, mask=c < C).to(tl.float32)
    if wpe is not None:
        row += tl.load(wpe + tl.load(lengths + b) * C + c, mask=c < C).to(tl.float32)
    tl.store(x + b * C + c, row, mask=c < C)


@triton.jit
def _tilegpt_step_norm(
    x, delta, norm_weight, norm_bias, out, eps, C: tl.constexpr, NORM: tl.constexpr, BLOCK_C: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """x (B, C) += delta, and out (B, C) = norm(x), for products by a library."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    b, c = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK_C)
    inside = c < C
    row = tl.load(x + b * C + c, mask=inside, other=0.0)
    if delta is not None:
        row += tl.load(delta + b * C + c, mask=inside, other=0.0).to(tl.float32)
        tl.store(x + b * C + c, row, mask=inside)
    g, beta = None, None
    if norm_weight is not None:
        g = tl.load(norm_weight + c, mask=inside, other=0.0).to(tl.float32)
    if norm_bias is not None:
        beta = tl.load(norm_bias + c, mask=inside, other=0.0).to(tl.float32)
    row = normalised(row, inside, g, beta, eps, C, NORM)
    tl.store(out + b * C + c, row.to(out.dtype.element_ty), mask=inside)
