"""Split-key decode: one or a few queries against a long cache (Flash-Decoding, Dao et al. 2023).

So few queries make too few programs to fill a GPU, so the keys are split: each program runs the online
softmax over its part and leaves an unnormalised sum with its maximum and total, and a second kernel combines
the parts. The query heads of a key head are rows of one tile, so that K and V are read once for the group.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ops.triton.common import (
    FP32_PART,
    PLAIN,
    accumulate,
    exp_difference,
    kept,
    load_parts,
    looked_up,
    product,
    row_keys,
    scores,
    visible,
    zeros,
)


@triton.jit(do_not_specialize=[*PLAIN, "splits"])
def _tilegpt_decode_split(
    q,
    k,
    v,
    out,
    lse,
    alibi_slopes,
    bias,
    relative_bias,
    q_document_ids,
    k_document_ids,
    ranges,
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
    out_b,
    out_h,
    out_t,
    bias_b,
    bias_h,
    bias_i,
    bias_j,
    kv_heads,
    tq,
    tk,
    splits,
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
    EXACT: tl.constexpr,
    SPLIT: tl.constexpr,
    DESC: tl.constexpr,
    PDL: tl.constexpr,
    REACH: tl.constexpr,
    SLOPES_B: tl.constexpr,
):
    """One split of the keys for a key head's queries: row r is query r // HEADS_PER_KV of its head
    r % HEADS_PER_KV.

    With SPLIT, out (splits, B, Hq, Tq, D) and lse (2, splits, B, Hq, Tq), fp32, get the part's unnormalised
    sum, its maximum and its total (its log-sum-exp would bring the maximum's rounding into every weight);
    without, they are the results."""
    PART: tl.constexpr = BLOCK_D if DESC or not EXACT else min(BLOCK_D, FP32_PART)
    ALIBI: tl.constexpr = alibi_slopes is not None
    DOCUMENT_IDS: tl.constexpr = q_document_ids is not None
    LENGTHS: tl.constexpr = kv_lengths is not None
    RELATIVE: tl.constexpr = relative_bias is not None
    BIASED: tl.constexpr = bias is not None or RELATIVE
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    # One axis: the others end at 65,535.
    split, kv_row = tl.program_id(0) % splits, tl.program_id(0) // splits
    kv_rows = tl.num_programs(0) // splits
    b, kv_head = kv_row // kv_heads, kv_row % kv_heads
    b64 = b.to(tl.int64)
    limit = tl.minimum(tl.load(kv_lengths + b), tk) if LENGTHS else tk
    offset = limit - tq
    rows = tl.arange(0, BLOCK_M)
    i, h = rows // HEADS_PER_KV, kv_head * HEADS_PER_KV + rows % HEADS_PER_KV
    real = i < tq
    d = tl.arange(0, PART)
    # Keys lo .. hi are seen by some query, full_lo .. full_hi by all.
    lo, hi, full_lo, full_hi = 0, limit, 0, limit
    if HAS_LEFT:
        lo = tl.maximum(lo, offset - window_left) // BLOCK_N * BLOCK_N
        full_lo = tl.maximum(tq - 1 + offset - window_left, 0)
    if HAS_RIGHT:
        hi = tl.minimum(hi, tq + offset + window_right)
        full_hi = tl.minimum(full_hi, 1 + offset + window_right)
    # The tiles in equal parts by the row's own length.
    n_tiles = tl.cdiv(tl.maximum(hi - lo, 0), BLOCK_N)
    first = lo + split * n_tiles // splits * BLOCK_N
    last = tl.minimum(lo + (split + 1) * n_tiles // splits * BLOCK_N, hi)
    q_rows = b64 * q_b + h.to(tl.int64) * q_h + i.to(tl.int64) * q_t
    q_tile = ()
    for first_d in tl.static_range(0, BLOCK_D, PART):
        columns = first_d + d
        inside = real[:, None] & (columns < D)[None, :]
        q_tile += (tl.load(q + q_rows[:, None] + columns[None, :], mask=inside, other=0.0),)
    if not DESC:
        k += b64 * k_b + kv_head.to(tl.int64) * k_h
        v += b64 * v_b + kv_head.to(tl.int64) * v_h
    bias_rows = bias
    if bias is not None:
        bias_rows = bias + (b64 * bias_b + h.to(tl.int64) * bias_h)[:, None]
    if RELATIVE:
        relative_bias += (h * (2 * REACH + 1) + REACH)[:, None]
    if SLOPES_B:
        alibi_slopes += b * SLOPES_B
    slope = tl.load(alibi_slopes + h, mask=real, other=0.0).to(tl.float32)[:, None] if ALIBI else 0.0
    keys = row_keys(seed, b, h, i) if DROPOUT else i
    q_ids = tl.load(q_document_ids + b64 * tq + i, mask=real, other=-1)[:, None] if DOCUMENT_IDS else 0
    if DOCUMENT_IDS:
        k_document_ids += b64 * tk
    m = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    # A sum for each column of the tile: the warps share the columns, and add up once, not in every tile.
    total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    acc = zeros(BLOCK_M, BLOCK_D, PART)
    for start in tl.range(first, last, BLOCK_N):
        k_tile = load_parts(k, b, kv_head, start, limit, k_t, BLOCK_N, D, BLOCK_D, PART, DESC, True)
        v_tile = load_parts(v, b, kv_head, start, limit, v_t, BLOCK_N, D, BLOCK_D, PART, DESC, True)
        s = product(q_tile, k_tile)
        j = start + tl.arange(0, BLOCK_N)
        s, _ = scores(
            s, i[:, None], j[None, :], offset, scale, softcap, slope, bias_rows, bias_i, bias_j, tq, limit,
            ALIBI, SOFTCAP, EXACT,
        )  # fmt: skip
        if RELATIVE:
            s = looked_up(s, i[:, None], j[None, :], offset, relative_bias, REACH)
        if DOCUMENT_IDS or (start < full_lo) | (start + BLOCK_N > full_hi):
            k_ids = tl.load(k_document_ids + j, mask=j < limit, other=-1)[None, :] if DOCUMENT_IDS else 0
            seen = visible(
                i[:, None], j[None, :], offset, limit, window_left, window_right, q_ids, k_ids,
                HAS_LEFT, HAS_RIGHT, DOCUMENT_IDS,
            )  # fmt: skip
            s = tl.where(seen, s, float("-inf"))
        m_new = tl.maximum(m, tl.max(s, 1))
        shift = tl.where(m_new == float("-inf"), 0.0, m_new)
        p = exp_difference(s, shift[:, None], 1.0, EXACT, BIASED)
        rescale = exp_difference(m, shift, 1.0, EXACT, BIASED)
        total = total * rescale[:, None] + p
        if DROPOUT:
            p = tl.where(kept(keys[:, None], j[None, :], dropout_threshold), p, 0.0)
        acc = accumulate(p, v_tile, acc, rescale)
        m = m_new
    total = tl.sum(total, 1)
    at = ((tl.cast(split, tl.int64) * kv_rows + kv_row) * HEADS_PER_KV + rows % HEADS_PER_KV) * tq + i
    factor = 1.0
    if SPLIT:
        out_rows = at * D
        tl.store(lse + at, m, mask=real)
        parts = tl.num_programs(0).to(tl.int64) * HEADS_PER_KV * tq
        tl.store(lse + parts + at, total, mask=real)
    else:
        out_rows = b64 * out_b + h.to(tl.int64) * out_h + i.to(tl.int64) * out_t
        blind = total == 0.0
        factor = (keep_scale / tl.where(blind, 1.0, total))[:, None]
        tl.store(lse + at, tl.where(blind, float("-inf"), m + tl.log(total)), mask=real)
    for part in tl.static_range(0, len(acc)):
        columns = part * PART + d
        tl.store(
            out + out_rows[:, None] + columns[None, :],
            (acc[part] * factor).to(out.dtype.element_ty),
            mask=real[:, None] & (columns < D)[None, :],
        )


@triton.jit(do_not_specialize=["heads", "tq", "splits", "n_rows"])
def _tilegpt_decode_combine(
    parts,
    statistics,
    out,
    lse,
    out_b,
    out_h,
    out_t,
    heads,
    tq,
    splits,
    n_rows,
    keep_scale,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    SPLITS: tl.constexpr,
    PDL: tl.constexpr,
):
    """One row of the result from the parts' sums, maxima and totals."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    d, s = tl.arange(0, BLOCK_D), tl.arange(0, SPLITS)
    there = s < splits
    at = s.to(tl.int64) * n_rows + row
    # All parts at once: a loop would wait for memory in each turn.
    part = tl.load(parts + at[:, None] * D + d[None, :], mask=there[:, None] & (d < D)[None, :], other=0.0)
    m = tl.load(statistics + at, mask=there, other=float("-inf"))
    total = tl.load(statistics + splits.to(tl.int64) * n_rows + at, mask=there, other=0.0)
    m_all = tl.max(m, 0)
    shift = tl.where(m_all == float("-inf"), 0.0, m_all)
    weight = exp_difference(m, shift, 1.0, True, True)
    total_all = tl.sum(total * weight, 0)
    blind = total_all == 0.0
    acc = tl.sum(part * weight[:, None], 0) * (keep_scale / tl.where(blind, 1.0, total_all))
    out += (row // tq // heads) * out_b + (row // tq % heads) * out_h + row % tq * out_t
    tl.store(out + d, acc.to(out.dtype.element_ty), mask=d < D)
    tl.store(lse + row, tl.where(blind, float("-inf"), m_all + tl.log(total_all)))
