"""The backward kernels: P recomputed from (q, k, lse), no atomics, so the same bits every time.

    delta = rowsum(dout * out);  P = exp(S - lse);  dP = dout V^T;  dS = P * (dP - delta)
    dV = P^T dout;  dK = scale * dS^T Q;  dQ = scale * dS K                  (Dao 2023, section 3.1.2)

Two passes: dK and dV per tile of keys, over the queries of its whole group (GQA needs no copy of K and V and
no sum afterwards), and dQ per tile of queries, over the keys (backward_dq.py). They recompute S and dP each:
7 products instead of 5.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ops.triton.common import (
    FP32_PART,
    LOG2E,
    PLAIN,
    accumulate,
    bounds,
    documents_of,
    exp_natural,
    kept,
    load_parts,
    product,
    relative_scores,
    row_keys,
    scheduled_tile,
    scores,
    store_parts,
    tile_start,
    visible,
    zeros,
)


@triton.jit(do_not_specialize=["heads", "tq", "padded"])
def _tilegpt_attention_delta(
    out,
    dout,
    lse,
    delta,
    padded_lse,
    out_b,
    out_h,
    out_t,
    dout_b,
    dout_h,
    dout_t,
    heads,
    tq,
    padded,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    NATURAL_LOG: tl.constexpr,
):
    """delta = rowsum(out * dout), padded_lse = lse * log2(e), or with NATURAL_LOG lse: (B, H, padded) fp32.

    A row that sees no key, or lies beyond Tq, gets padded_lse = inf: exp2(s - inf) = 0 for any s. So does one
    whose keys are all hidden by a bias of the least finite number: its lse is none to subtract.
    """
    blocks = padded // BLOCK_M
    head = tl.program_id(0) // blocks
    b64, h64 = (head // heads).to(tl.int64), (head % heads).to(tl.int64)
    i = tl.program_id(0) % blocks * BLOCK_M + tl.arange(0, BLOCK_M)
    d = tl.arange(0, BLOCK_D)
    inside = (i < tq)[:, None] & (d < D)[None, :]
    rows = tl.cast(i, tl.int64)[:, None]
    o = tl.load(out + b64 * out_b + h64 * out_h + rows * out_t + d[None, :], mask=inside, other=0.0)
    do = tl.load(dout + b64 * dout_b + h64 * dout_h + rows * dout_t + d[None, :], mask=inside, other=0.0)
    row_lse = tl.load(lse + head.to(tl.int64) * tq + i, mask=i < tq, other=float("-inf"))
    row_lse = tl.where(row_lse < -2e38, float("inf"), row_lse if NATURAL_LOG else row_lse * LOG2E)
    at = head.to(tl.int64) * padded + i
    tl.store(delta + at, tl.sum(o.to(tl.float32) * do.to(tl.float32), 1), mask=i < padded)
    tl.store(padded_lse + at, row_lse, mask=i < padded)


@triton.jit
def weights(
    s,
    i,
    j,
    padded_lse,
    offset,
    limit,
    tq,
    bias,
    bias_i,
    bias_j,
    relative_bias,
    i0,
    j0,
    slope,
    q_ids,
    k_ids,
    window_left,
    window_right,
    scale,
    softcap,
    masked,
    M: tl.constexpr,
    N: tl.constexpr,
    REACH: tl.constexpr,
    MASKED: tl.constexpr,
    HAS_LEFT: tl.constexpr,
    HAS_RIGHT: tl.constexpr,
    ALIBI: tl.constexpr,
    SOFTCAP: tl.constexpr,
    DOCUMENT_IDS: tl.constexpr,
    SCALE_LATE: tl.constexpr,
    EXACT: tl.constexpr,
):
    """(P, tanh of the softcap) from s = <q_i, k_j>, in either orientation; i0, j0: the tile's first ones.

    `masked`: whether an edge of the mask runs through the tile.
    """
    tanh_score = s
    if not SCALE_LATE or EXACT:
        s, tanh_score = scores(
            s, i, j, offset, scale, softcap, slope, bias, bias_i, bias_j, tq, limit, ALIBI, SOFTCAP, EXACT
        )
    if relative_bias is not None:
        s = relative_scores(s, i, j, offset, relative_bias, i0, j0, M, N, REACH)
    if MASKED:  # noqa: SIM102 (a constexpr, then a branch)
        if masked:
            seen = visible(
                i, j, offset, limit, window_left, window_right, q_ids, k_ids,
                HAS_LEFT, HAS_RIGHT, DOCUMENT_IDS,
            )  # fmt: skip
            s = tl.where(seen, s, float("-inf"))
    if EXACT:
        p = exp_natural(s - padded_lse)
    elif bias is not None or relative_bias is not None:  # see exp_difference
        p = tl.exp2((s - padded_lse) * LOG2E)
    else:
        p = tl.exp2(s * (scale * LOG2E if SCALE_LATE else LOG2E) - padded_lse)
    return p, tanh_score


@triton.jit
def _query_range(
    j0,
    cols,
    offset,
    tq,
    window_left,
    window_right,
    first_query,
    end_query,
    BLOCK_M: tl.constexpr,
    HAS_LEFT: tl.constexpr,
    HAS_RIGHT: tl.constexpr,
    DOCUMENT_IDS: tl.constexpr,
):
    """For keys j0 .. j0 + cols: queries lo .. hi see some, those of the tiles in full_lo .. full_hi all."""
    lo, hi = 0, tq
    if HAS_RIGHT:
        lo = tl.maximum(lo, j0 - offset - window_right)
    if HAS_LEFT:
        hi = tl.minimum(hi, j0 + cols - offset + window_left)
    if DOCUMENT_IDS:
        lo, hi = tl.maximum(lo, first_query), tl.minimum(hi, end_query)
    lo = lo // BLOCK_M * BLOCK_M
    hi = tl.maximum(hi, lo)
    end = tl.cdiv(hi, BLOCK_M) * BLOCK_M
    full_lo, full_hi = lo, end
    if DOCUMENT_IDS:
        # Every tile compares ids, in dQ's kernel too. Sparing whole documents that, as the forward does, the
        # backward took up to 13% longer at D = 64, up to 4% less at 128 (H200, 256 to 1,024 tokens each).
        full_lo = end
    else:
        if HAS_RIGHT:
            edge = tl.maximum(j0 + cols - 1 - offset - window_right, 0)
            full_lo = tl.maximum(tl.minimum(tl.cdiv(edge, BLOCK_M) * BLOCK_M, end), lo)
        if HAS_LEFT:
            full_hi = tl.minimum(end, tl.maximum(j0 - offset + window_left + 1, 0) // BLOCK_M * BLOCK_M)
        full_hi = tl.maximum(full_hi, full_lo)
    return lo, full_lo, full_hi, hi


@triton.jit(do_not_specialize=[*PLAIN, "padded"])
def _tilegpt_attention_backward_dkdv(
    q,
    k,
    v,
    dout,
    padded_lse,
    delta,
    dk,
    dv,
    alibi_slopes,
    bias,
    relative_bias,
    q_document_ids,
    k_document_ids,
    ranges,
    blocks,
    kv_lengths,
    seed,
    q_b,
    q_h,
    q_t,
    k_b,
    k_h,
    k_t,
    v_b,
    v_h,
    v_t,
    dout_b,
    dout_h,
    dout_t,
    dk_b,
    dk_h,
    dk_t,
    dv_b,
    dv_h,
    dv_t,
    bias_b,
    bias_h,
    bias_i,
    bias_j,
    blocks_b,
    blocks_h,
    blocks_t,
    kv_heads,
    tq,
    tk,
    padded,
    n_tiles,
    n_heads,
    heads_in_l2,
    tail,
    lead,
    window_left,
    window_right,
    scale,
    softcap,
    dropout_threshold,
    keep_scale,
    HEADS_PER_KV: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    HAS_LEFT: tl.constexpr,
    HAS_RIGHT: tl.constexpr,
    SOFTCAP: tl.constexpr,
    DROPOUT: tl.constexpr,
    SCALE_LATE: tl.constexpr,
    EXACT: tl.constexpr,
    DESC: tl.constexpr,
    MASK_BLOCK: tl.constexpr,
    REACH: tl.constexpr,
    SLOPES_B: tl.constexpr,
):
    """dK and dV of BLOCK_N keys of one key head, over the queries of its group. Key tile 0 is the longest."""
    PART: tl.constexpr = BLOCK_D if DESC or not EXACT else min(BLOCK_D, FP32_PART)
    ALIBI: tl.constexpr = alibi_slopes is not None
    DOCUMENT_IDS: tl.constexpr = q_document_ids is not None
    LENGTHS: tl.constexpr = kv_lengths is not None
    BLOCKS: tl.constexpr = blocks is not None
    tile, kv_row = scheduled_tile(tl.program_id(0), n_tiles, n_heads, heads_in_l2, tail, lead, False, BLOCKS)
    b, kv_head = kv_row // kv_heads, kv_row % kv_heads
    b64 = b.to(tl.int64)
    if SLOPES_B:
        alibi_slopes += b * SLOPES_B
    j0 = tile * BLOCK_N
    j = j0 + tl.arange(0, BLOCK_N)
    limit = tl.minimum(tl.load(kv_lengths + b), tk) if LENGTHS else tk
    offset = limit - tq
    if not DESC:
        k += b64 * k_b + kv_head.to(tl.int64) * k_h
        v += b64 * v_b + kv_head.to(tl.int64) * v_h
    k_tile = load_parts(k, b, kv_head, j0, limit, k_t, BLOCK_N, D, BLOCK_D, PART, DESC, True)
    v_tile = load_parts(v, b, kv_head, j0, limit, v_t, BLOCK_N, D, BLOCK_D, PART, DESC, True)
    k_ids = 0
    if DOCUMENT_IDS:
        k_ids = tl.load(k_document_ids + b64 * tk + j, mask=j < limit, other=-1)[:, None]
        q_document_ids += b64 * tq
    first_query, end_query, _ = documents_of(ranges, b * n_tiles + tile, DOCUMENT_IDS)
    lo, full_lo, full_hi, hi = _query_range(
        j0, tl.minimum(BLOCK_N, tk - j0), offset, tl.where(j0 < limit, tq, 0), window_left, window_right,
        first_query, end_query, BLOCK_M, HAS_LEFT, HAS_RIGHT, DOCUMENT_IDS,
    )  # fmt: skip
    MASKED: tl.constexpr = HAS_LEFT or HAS_RIGHT or DOCUMENT_IDS
    dk_acc = zeros(BLOCK_N, BLOCK_D, PART)
    dv_acc = zeros(BLOCK_N, BLOCK_D, PART)
    for g in tl.range(0, HEADS_PER_KV):
        h = kv_head * HEADS_PER_KV + g
        h64 = h.to(tl.int64)
        q_head, dout_head = q, dout
        if not DESC:
            q_head = q + b64 * q_b + h64 * q_h
            dout_head = dout + b64 * dout_b + h64 * dout_h
        bias_head = bias + b64 * bias_b + h64 * bias_h if bias is not None else bias
        table = relative_bias
        if relative_bias is not None:
            table = relative_bias + h * (2 * REACH + 1) + REACH
        row = (b64 * (kv_heads * HEADS_PER_KV) + h) * padded
        slope = tl.load(alibi_slopes + h).to(tl.float32) if ALIBI else 0.0
        row_blocks = blocks
        if BLOCKS:
            row_blocks = blocks + b64 * blocks_b + h64 * blocks_h + j0 // MASK_BLOCK * blocks_t
        first, end = bounds(row_blocks, lo, hi, BLOCK_M, MASK_BLOCK, BLOCKS)
        for at in tl.range(first, end, 1 if BLOCKS else BLOCK_M):
            start = tile_start(row_blocks, at, BLOCK_M, MASK_BLOCK, BLOCKS)
            i = start + tl.arange(0, BLOCK_M)
            # Transposed tiles, (keys, queries): P^T and dS^T are left operands as they are.
            q_tile = load_parts(q_head, b, h, start, tq, q_t, BLOCK_M, D, BLOCK_D, PART, DESC, True)
            st = product(k_tile, q_tile)
            q_ids = tl.load(q_document_ids + i, mask=i < tq, other=-1)[None, :] if DOCUMENT_IDS else 0
            pt, tanh_score = weights(
                st, i[None, :], j[:, None], tl.load(padded_lse + row + i)[None, :], offset, limit, tq,
                bias_head, bias_i, bias_j, table, start, j0, slope, q_ids, k_ids, window_left, window_right,
                scale, softcap, (start < full_lo) | (start >= full_hi), BLOCK_M, BLOCK_N, REACH, MASKED,
                HAS_LEFT, HAS_RIGHT, ALIBI, SOFTCAP, DOCUMENT_IDS, SCALE_LATE, EXACT,
            )  # fmt: skip
            do_tile = load_parts(dout_head, b, h, start, tq, dout_t, BLOCK_M, D, BLOCK_D, PART, DESC, True)
            dpt = product(v_tile, do_tile)
            row_delta = tl.load(delta + row + i)[None, :]
            if DROPOUT:
                is_kept = kept(row_keys(seed, b, h, i)[None, :], j[:, None], dropout_threshold)
                dv_acc = accumulate(tl.where(is_kept, pt, 0.0), do_tile, dv_acc)
                dst = pt * (tl.where(is_kept, dpt * keep_scale, 0.0) - row_delta)
            else:
                dv_acc = accumulate(pt, do_tile, dv_acc)
                dst = pt * (dpt - row_delta)
            if SOFTCAP:
                dst *= 1.0 - tanh_score * tanh_score
            dk_acc = accumulate(dst, q_tile, dk_acc)
    # Beyond the length k is zero, p is not: exp2(0 - padded_lse).
    real = j < limit if LENGTHS else None
    dk += b64 * dk_b + kv_head.to(tl.int64) * dk_h
    dv += b64 * dv_b + kv_head.to(tl.int64) * dv_h
    store_parts(dk, dk_acc, scale, j0, tk, dk_t, BLOCK_N, D, PART, real)
    store_parts(dv, dv_acc, keep_scale, j0, tk, dv_t, BLOCK_N, D, PART, real)
