"""Products of a decoding step with their neighbours: one token a row, so few rows that weights are all there
is to read.

A program holds a few rows of a weight matrix whole, in registers; of a large matrix it asks for the next ones
while it multiplies them. The weights do not depend on the kernel before, so the first are asked for ahead of
the wait for it (programmatic dependent launch), and memory goes on delivering while the small kernels of a
step hand over to each other.

Of weights in 8 bits a register holds four numbers, one of each quarter of a row: so each quarter of x is
multiplied as it was read, and no number moves from thread to thread.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ops.triton.common import tanh

LAYER_NORM, RMS_NORM = tl.constexpr(1), tl.constexpr(2)
GELU, SWIGLU = tl.constexpr(1), tl.constexpr(2)


@triton.jit
def parts_of(x, k, inside, K: tl.constexpr, PARTS: tl.constexpr):
    """A row of K numbers at pointer x in equal parts, a tuple of fp32; zeros beyond them."""
    parts = ()
    for i in tl.static_range(PARTS):
        at = x + i * (K // PARTS) + k
        parts += (tl.load(at, mask=inside, other=0.0).to(tl.float32),)
    return parts


@triton.jit
def total(parts):
    added = parts[0]
    for i in tl.static_range(1, len(parts)):
        added += parts[i]
    return tl.sum(added, 0)


@triton.jit
def normalised(parts, inside, weight, bias, eps, size: tl.constexpr, NORM: tl.constexpr):
    """LayerNorm or RMSNorm of one row of `size` numbers in parts, fp32; zeros beyond them."""
    centred, squares, scaled = parts, (), ()
    if NORM == 1:
        centred, mean = (), total(parts) / size
        for i in tl.static_range(len(parts)):
            centred += (tl.where(inside, parts[i] - mean, 0.0),)
    for i in tl.static_range(len(parts)):
        squares += (centred[i] * centred[i],)
    factor = tl.rsqrt(total(squares) / size + eps)
    for i in tl.static_range(len(parts)):
        x = centred[i] * factor
        if weight is not None:
            x *= weight[i]
        if bias is not None:
            x += bias[i]
        scaled += (x,)
    return scaled


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
    weight, scale, bias, first, k, N: tl.constexpr, K: tl.constexpr, BLOCK_N: tl.constexpr,
    GATED: tl.constexpr,
):  # fmt: skip
    """Rows of the weight, their scales, none in 16 bits, and their biases, both (BLOCK_N,) fp32; where GATED
    those of the gates, which lie before the others, and the others."""
    n = first + tl.arange(0, BLOCK_N)
    weights, scales, biases = (rows_of(weight, first, k, N, K, BLOCK_N),), (), (0.0, 0.0)
    if GATED:
        weights += (rows_of(weight + N * K, first, k, N, K, BLOCK_N),)
    if scale is not None:
        s = tl.load(scale + n, mask=n < N, other=0.0).to(tl.float32)
        scales = (s, tl.load(scale + N + n, mask=n < N, other=0.0).to(tl.float32) if GATED else s)
    if bias is not None:
        b = tl.load(bias + n, mask=n < N, other=0.0).to(tl.float32)
        biases = (b, tl.load(bias + N + n, mask=n < N, other=0.0).to(tl.float32) if GATED else b)
    return weights, scales, biases


@triton.jit
def number(word, i: tl.constexpr):
    """Byte i of a word, with its sign, as fp32: as the last bits of 2^23 + 128 + byte, since a conversion has
    a quarter of an addition's rate (GPT-2 XL on an H100: 761 tokens/s instead of 713)."""
    biased = ((word ^ -0x7F7F7F80) >> (8 * i)) & 0xFF  # 128 more: its first bit is turned
    return (biased | 0x4B000000).to(tl.float32, bitcast=True) - (2.0**23 + 128)


@triton.jit
def product(tile, row, GATE: tl.constexpr):
    """(BLOCK_N,) of a tile and a row in parts: the gates, or the others. What all numbers of a sum have in
    common, their scale, multiplies the sum."""
    weights, scales, biases = tile
    which: tl.constexpr = 0 if GATE else 1
    weight = weights[0 if GATE else -1]
    if len(scales) == 0:
        y = tl.sum(weight.to(tl.float32) * row[0][None, :], 1)
    else:
        terms = number(weight, 0) * row[0][None, :]
        for i in tl.static_range(1, len(row)):
            terms += number(weight, i) * row[i][None, :]
        y = tl.sum(terms, 1) * scales[which]
    return y + biases[which]


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
    n = first + tl.arange(0, BLOCK_N)
    for b in tl.static_range(len(rows)):
        to = out + b * N + n
        past = tl.load(to, mask=n < N, other=0.0) if ADD else 0.0
        y = product(tile, rows[b], False)
        gate = y
        if ACTIVATION == 2:
            gate = product(tile, rows[b], True)
        y = past + activated(y, gate, ACTIVATION)
        tl.store(to, y.to(out.dtype.element_ty), mask=n < N)


@triton.jit
def _tilegpt_step_linear(
    x,
    norm_weight,
    norm_bias,
    weight,
    weight_scale,
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

    x (B, K); weight (N, K), with SWIGLU (2N, K): gates, then values. With weight_scale (N,) or (2N,) it is in
    8 bits: words (N, K/4) of four numbers, one of each quarter of a row. A program takes TURNS tiles."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    GATED: tl.constexpr = ACTIVATION == 2
    PARTS: tl.constexpr = 1 if weight_scale is None else 4
    k, first, step = tl.arange(0, BLOCK_K // PARTS), tl.program_id(0) * BLOCK_N, tl.num_programs(0) * BLOCK_N
    columns = k < K // PARTS
    tile = tile_of(weight, weight_scale, bias, first, k, N, K // PARTS, BLOCK_N, GATED)
    g, beta = None, None
    if norm_weight is not None:
        g = parts_of(norm_weight, k, columns, K, PARTS)
    if norm_bias is not None:
        beta = parts_of(norm_bias, k, columns, K, PARTS)
    if PDL:
        tl.extra.cuda.gdc_wait()
    rows = ()
    for b in tl.static_range(B):
        row = parts_of(x + b * K, k, columns, K, PARTS)
        rows += (normalised(row, columns, g, beta, eps, K, NORM) if NORM > 0 else row,)
    if TURNS == 1:
        store_products(out, tile, rows, first, N, BLOCK_N, ACTIVATION, ADD)
    else:
        for start in tl.range(first, N, step):
            now = tile
            tile = tile_of(weight, weight_scale, bias, start + step, k, N, K // PARTS, BLOCK_N, GATED)
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
        g = parts_of(norm_weight, c, inside, C, 1)
    if norm_bias is not None:
        beta = parts_of(norm_bias, c, inside, C, 1)
    row = normalised((row,), inside, g, beta, eps, C, NORM)[0]
    tl.store(out + b * C + c, row.to(out.dtype.element_ty), mask=inside)
