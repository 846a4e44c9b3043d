"""The backward's second pass: dQ = scale * dS K per tile of queries, over the keys (see backward.py), and
with biases their gradients, which are sums of dS: by distance for a relative bias."""

from __future__ import annotations

import triton
import triton.language as tl

from ops.triton.backward import weights
from ops.triton.common import (
    FP32_PART,
    PLAIN,
    accumulate,
    bounds,
    documents_of,
    kept,
    load_parts,
    near,
    product,
    row_keys,
    scheduled_tile,
    store_diagonals,
    store_parts,
    tile_start,
    zeros,
)
from ops.triton.forward import key_range


@triton.jit(do_not_specialize=[*PLAIN, "padded"])
def _tilegpt_attention_backward_dq(
    q,
    k,
    v,
    dout,
    padded_lse,
    delta,
    dq,
    dbias,
    by_distance,
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
    dq_b,
    dq_h,
    dq_t,
    bias_b,
    bias_h,
    bias_i,
    bias_j,
    blocks_b,
    blocks_h,
    blocks_t,
    heads,
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
    EVEN_K: tl.constexpr,
    DESC: tl.constexpr,
    MASK_BLOCK: tl.constexpr,
    REACH: tl.constexpr,
    SLOPES_B: tl.constexpr,
    BIAS_ROWS: tl.constexpr,
    BIAS_COLS: tl.constexpr,
):
    """dQ of BLOCK_M queries of one head, and what adds up to the gradients of biases, zeros before: dbias
    (B, H, Tq or n_tiles, Tk or 1), whether the bias has ROWS for queries or not, COLS for keys or not; and
    by_distance (B, H, n_tiles, TURNS, 2 SIDE + 1), for tiles beyond REACH at the two ends."""
    PART: tl.constexpr = BLOCK_D if DESC or not EXACT else min(BLOCK_D, FP32_PART)
    ALIBI: tl.constexpr = alibi_slopes is not None
    DOCUMENT_IDS: tl.constexpr = q_document_ids is not None
    LENGTHS: tl.constexpr = kv_lengths is not None
    BLOCKS: tl.constexpr = blocks is not None
    RELATIVE: tl.constexpr = relative_bias is not None
    pid = tl.program_id(0)
    tile, head = scheduled_tile(pid, n_tiles, n_heads, heads_in_l2, tail, lead, HAS_RIGHT, BLOCKS)
    b, h = head // heads, head % heads
    b64, h64, kv_head = b.to(tl.int64), h.to(tl.int64), h // HEADS_PER_KV
    i0 = tile * BLOCK_M
    i = i0 + tl.arange(0, BLOCK_M)
    limit = tl.minimum(tl.load(kv_lengths + b), tk) if LENGTHS else tk
    offset = limit - tq
    if not DESC:
        q += b64 * q_b + h64 * q_h
        dout += b64 * dout_b + h64 * dout_h
        k += b64 * k_b + kv_head.to(tl.int64) * k_h
        v += b64 * v_b + kv_head.to(tl.int64) * v_h
    if bias is not None:
        bias += b64 * bias_b + h64 * bias_h
    SIDE: tl.constexpr = REACH + BLOCK_N + max(BLOCK_M, BLOCK_N)
    TURNS: tl.constexpr = (BLOCK_M + BLOCK_N - 2) // BLOCK_N + 1
    if RELATIVE:
        relative_bias += h * (2 * REACH + 1) + REACH
        by_distance += (head.to(tl.int64) * n_tiles + tile) * (TURNS * (2 * SIDE + 1)) + SIDE
    if dbias is not None:
        dbias += head.to(tl.int64) * (tq if BIAS_ROWS else n_tiles) * (tk if BIAS_COLS else 1)
    row_sums = tl.zeros((BLOCK_M,), tl.float32)
    far_left = tl.zeros((BLOCK_M,), tl.float32)
    far_right = tl.zeros((BLOCK_M,), tl.float32)
    if SLOPES_B:
        alibi_slopes += b * SLOPES_B
    slope = tl.load(alibi_slopes + h).to(tl.float32) if ALIBI else 0.0
    keys = row_keys(seed, b, h, i) if DROPOUT else i
    q_ids = 0
    if DOCUMENT_IDS:
        q_ids = tl.load(q_document_ids + b64 * tq + i, mask=i < tq, other=-1)[:, None]
        k_document_ids += b64 * tk
    first_key, end_key, _ = documents_of(ranges, b * n_tiles + tile, DOCUMENT_IDS)
    lo, full_lo, full_hi, hi = key_range(
        i0, tl.minimum(BLOCK_M, tq - i0), offset, limit, window_left, window_right, first_key, end_key, False,
        BLOCK_N, HAS_LEFT, HAS_RIGHT, DOCUMENT_IDS,
    )  # fmt: skip
    q_tile = load_parts(q, b, h, i0, tq, q_t, BLOCK_M, D, BLOCK_D, PART, DESC, True)
    do_tile = load_parts(dout, b, h, i0, tq, dout_t, BLOCK_M, D, BLOCK_D, PART, DESC, True)
    row = head.to(tl.int64) * padded
    row_padded_lse = tl.load(padded_lse + row + i)[:, None]
    row_delta = tl.load(delta + row + i)[:, None]
    acc = zeros(BLOCK_M, BLOCK_D, PART)
    MASKED: tl.constexpr = HAS_LEFT or HAS_RIGHT or DOCUMENT_IDS or not EVEN_K
    if BLOCKS:
        blocks += b64 * blocks_b + h64 * blocks_h + i0 // MASK_BLOCK * blocks_t
    first, end = bounds(blocks, lo, hi, BLOCK_N, MASK_BLOCK, BLOCKS)
    for at in tl.range(first, end, 1 if BLOCKS else BLOCK_N):
        start = tile_start(blocks, at, BLOCK_N, MASK_BLOCK, BLOCKS)
        j = start + tl.arange(0, BLOCK_N)
        k_tile = load_parts(k, b, kv_head, start, limit, k_t, BLOCK_N, D, BLOCK_D, PART, DESC, not EVEN_K)
        v_tile = load_parts(v, b, kv_head, start, limit, v_t, BLOCK_N, D, BLOCK_D, PART, DESC, not EVEN_K)
        s = product(q_tile, k_tile)
        dp = product(do_tile, v_tile)
        k_ids = tl.load(k_document_ids + j, mask=j < limit, other=-1)[None, :] if DOCUMENT_IDS else 0
        p, tanh_score = weights(
            s, i[:, None], j[None, :], row_padded_lse, offset, limit, tq, bias, bias_i, bias_j, relative_bias,
            i0, start, slope, q_ids, k_ids, window_left, window_right, scale, softcap,
            (start < full_lo) | (start >= full_hi), BLOCK_M, BLOCK_N, REACH, MASKED, HAS_LEFT, HAS_RIGHT,
            ALIBI, SOFTCAP, DOCUMENT_IDS, SCALE_LATE, EXACT,
        )  # fmt: skip
        if DROPOUT:
            dp = tl.where(kept(keys[:, None], j[None, :], dropout_threshold), dp * keep_scale, 0.0)
        dscores = p * (dp - row_delta)
        if dbias is not None:
            if BIAS_ROWS and BIAS_COLS:
                to = dbias + i.to(tl.int64)[:, None] * tk + j[None, :]
                tl.store(to, dscores.to(dbias.dtype.element_ty), mask=(i < tq)[:, None] & (j < tk)[None, :])
            elif BIAS_COLS:
                tl.store(dbias + tile.to(tl.int64) * tk + j, tl.sum(dscores, 0), mask=j < tk)
            else:
                row_sums += tl.sum(dscores, 1)
        if RELATIVE:
            if near(i0, start, offset, BLOCK_M, BLOCK_N, REACH):
                store_diagonals(by_distance, 2 * SIDE + 1, dscores, start - i0 - offset, BLOCK_M, BLOCK_N)
            elif start < i0 + offset:
                far_left += tl.sum(dscores, 1)
            else:
                far_right += tl.sum(dscores, 1)
        ds = dscores * (1.0 - tanh_score * tanh_score) if SOFTCAP else dscores
        acc = accumulate(ds, k_tile, acc)
    dq += b64 * dq_b + h64 * dq_h
    store_parts(dq, acc, scale, i0, tq, dq_t, BLOCK_M, D, PART)
    if dbias is not None and not BIAS_COLS:
        if BIAS_ROWS:
            tl.store(dbias + i, row_sums, mask=i < tq)
        else:
            tl.store(dbias + tile, tl.sum(row_sums, 0))
    if RELATIVE:
        tl.store(by_distance - SIDE, tl.sum(far_left, 0))
        tl.store(by_distance + SIDE, tl.sum(far_right, 0))
