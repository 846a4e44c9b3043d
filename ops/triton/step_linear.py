"""Products of a decoding step with their neighbours: one token a row, so few rows that weights are all there
is to read.

A program holds some rows of a weight matrix whole, in registers. The weights do not depend on the kernel
before, so they are asked for ahead of the wait for it (programmatic dependent launch), and memory goes on
delivering while the small kernels of a step hand over to each other.
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
    PDL: tl.constexpr,
):
    """out (B, N) = activation(norm(x) weight^T + bias), added to what is there with ADD.

    x (B, K); weight (N, K), with SWIGLU (2N, K): gates, then values."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    program, k = tl.program_id(0), tl.arange(0, BLOCK_K)
    n, columns = program * BLOCK_N + tl.arange(0, BLOCK_N), k < K
    at, inside = n[:, None].to(tl.int64) * K + k[None, :], (n < N)[:, None] & columns[None, :]
    w = tl.load(weight + at, mask=inside, other=0.0, eviction_policy="evict_first")
    w_gate, b_gate, b_n = w, 0.0, 0.0
    if ACTIVATION == 2:
        w_gate, w = w, tl.load(weight + N * K + at, mask=inside, other=0.0, eviction_policy="evict_first")
    if bias is not None:
        b_n = tl.load(bias + n, mask=n < N, other=0.0).to(tl.float32)
        if ACTIVATION == 2:
            b_gate, b_n = b_n, tl.load(bias + N + n, mask=n < N, other=0.0).to(tl.float32)
    g, beta = None, None
    if norm_weight is not None:
        g = tl.load(norm_weight + k, mask=columns, other=0.0).to(tl.float32)
    if norm_bias is not None:
        beta = tl.load(norm_bias + k, mask=columns, other=0.0).to(tl.float32)
    if PDL:
        tl.extra.cuda.gdc_wait()
    for b in tl.static_range(B):
        to = out + b * N + n
        past = tl.load(to, mask=n < N, other=0.0) if ADD else 0.0
        row = tl.load(x + b * K + k, mask=columns, other=0.0).to(tl.float32)
        if NORM > 0:
            row = normalised(row, columns, g, beta, eps, K, NORM)
        y = tl.sum(w.to(tl.float32) * row[None, :], 1) + b_n
        gate = y
        if ACTIVATION == 2:
            gate = tl.sum(w_gate.to(tl.float32) * row[None, :], 1) + b_gate
        y = activated(y, gate, ACTIVATION)
        tl.store(to, (past + y).to(out.dtype.element_ty), mask=n < N)


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
