"""Split-key decode: one or a few queries against a long cache (Flash-Decoding, Dao et al. 2023).

So few queries make too few programs to fill a GPU, so the keys are split: each program runs the online softmax
over its part and leaves an unnormalised sum with its maximum and total, and a second kernel combines the parts. The
query heads of a key head are rows of one tile, so that K and V are read once for the group.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ops.triton.common import LN2, LOG2E, PLAIN, exp_difference, kept, load_tile, row_keys, scores, visible


@triton.jit(do_not_specialize=[*PLAIN, "splits"])
def _tilegpt_decode_split(
    q,
    k,
    v,
    out,
    lse,
    alibi_slopes,
    bias,
    q_segments,
    k_segments,
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
    threshold,
    keep_scale,
    GROUP: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    HAS_LEFT: tl.constexpr,
    HAS_RIGHT: tl.constexpr,
    SOFTCAP: tl.constexpr,
    DROPOUT: tl.constexpr,
    SPLIT: tl.constexpr,
    DESC: tl.constexpr,
    PDL: tl.constexpr,
):
    """One split of the keys for all queries of one key head: row r is query r // GROUP of the group's head r % GROUP.

    With SPLIT, out (splits, B, Hq, Tq, D) fp32 gets the part's own softmax times V and lse (splits, B, Hq, Tq) its
    log-sum-exp; without, they are the results.
    """
    ALIBI: tl.constexpr = alibi_slopes is not None
    SEGMENTS: tl.constexpr = q_segments is not None
    LENGTHS: tl.constexpr = kv_lengths is not None
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    split, kv_row = tl.program_id(0), tl.program_id(1)
    b, kv_head = kv_row // kv_heads, kv_row % kv_heads
    b64 = b.to(tl.int64)
    limit = tl.minimum(tl.load(kv_lengths + b), tk) if LENGTHS else tk
    offset = limit - tq
    rows = tl.arange(0, BLOCK_M)
    i, h = rows // GROUP, kv_head * GROUP + rows % GROUP
    real = i < tq
    d = tl.arange(0, BLOCK_D)
    lo, hi = 0, limit
    if HAS_LEFT:
        lo = tl.maximum(lo, offset - window_left) // BLOCK_N * BLOCK_N
    if HAS_RIGHT:
        hi = tl.minimum(hi, tq + offset + window_right)
    # The tiles in equal parts by the row's own length.
    n_tiles = tl.cdiv(tl.maximum(hi - lo, 0), BLOCK_N)
    first = lo + split * n_tiles // splits * BLOCK_N
    last = tl.minimum(lo + (split + 1) * n_tiles // splits * BLOCK_N, hi)
    q_rows = b64 * q_b + h.to(tl.int64) * q_h + i.to(tl.int64) * q_t
    q_tile = tl.load(q + q_rows[:, None] + d[None, :], mask=real[:, None] & (d < D)[None, :], other=0.0)
    if not DESC:
        k += b64 * k_b + kv_head.to(tl.int64) * k_h
        v += b64 * v_b + kv_head.to(tl.int64) * v_h
    bias_rows = bias
    if bias is not None:
        bias_rows = bias + (b64 * bias_b + h.to(tl.int64) * bias_h)[:, None]
    slope = tl.load(alibi_slopes + h, mask=real, other=0.0).to(tl.float32)[:, None] if ALIBI else 0.0
    keys = row_keys(seed, b, h, i) if DROPOUT else i
    q_ids = tl.load(q_segments + b64 * tq + i, mask=real, other=-1)[:, None] if SEGMENTS else 0
    if SEGMENTS:
        k_segments += b64 * tk
    m = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK_M,), tl.float32)
    acc = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    for start in tl.range(first, last, BLOCK_N):
        k_tile = load_tile(k, b, kv_head, start, limit, k_t, BLOCK_N, D, BLOCK_D, DESC, True)
        v_tile = load_tile(v, b, kv_head, start, limit, v_t, BLOCK_N, D, BLOCK_D, DESC, True)
        s = tl.dot(q_tile, k_tile.T, input_precision="ieee")
        j = start + tl.arange(0, BLOCK_N)
        s, _ = scores(
            s, i[:, None], j[None, :], offset, scale, softcap, slope, bias_rows, bias_i, bias_j, tq, limit, ALIBI,
            SOFTCAP,
        )  # fmt: skip
        k_ids = tl.load(k_segments + j, mask=j < limit, other=-1)[None, :] if SEGMENTS else 0
        seen = visible(
            i[:, None],
            j[None, :],
            offset,
            limit,
            window_left,
            window_right,
            q_ids,
            k_ids,
            HAS_LEFT,
            HAS_RIGHT,
            SEGMENTS,
        )
        s = tl.where(seen, s, float("-inf"))
        m_new = tl.maximum(m, tl.max(s, 1))
        shift = tl.where(m_new == float("-inf"), 0.0, m_new)
        p = exp_difference(s, shift[:, None], LOG2E, True)
        rescale = exp_difference(m, shift, LOG2E, True)
        total = total * rescale + tl.sum(p, 1)
        if DROPOUT:
            p = tl.where(kept(keys[:, None], j[None, :], threshold), p, 0.0)
        acc = tl.dot(p.to(v_tile.dtype), v_tile, acc * rescale[:, None], input_precision="ieee")
        m = m_new
    blind = total == 0.0
    acc = acc * (keep_scale / tl.where(blind, 1.0, total))[:, None]
    row_lse = tl.where(blind, float("-inf"), m + tl.log2(total) * LN2)
    at = ((split * tl.num_programs(1) + kv_row).to(tl.int64) * GROUP + rows % GROUP) * tq + i
    tl.store(lse + at, row_lse, mask=real)
    out_rows = at * D if SPLIT else b64 * out_b + h.to(tl.int64) * out_h + i.to(tl.int64) * out_t
    tl.store(
        out + out_rows[:, None] + d[None, :],
        acc.to(out.dtype.element_ty),
        mask=real[:, None] & (d < D)[None, :],
    )


@triton.jit(do_not_specialize=["heads", "tq", "splits", "n_rows"])
def _tilegpt_decode_combine(
    parts,
    part_lse,
    out,
    lse,
    out_b,
    out_h,
    out_t,
    heads,
    tq,
    splits,
    n_rows,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    SPLITS: tl.constexpr,
    CHUNK: tl.constexpr,
    PDL: tl.constexpr,
):
    """One row of the result: the mean of the parts, weighted by the exp of their log-sum-exp."""
    if PDL:
        tl.extra.cuda.gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    d = tl.arange(0, BLOCK_D)
    every = tl.arange(0, SPLITS)
    logs = tl.load(part_lse + every.to(tl.int64) * n_rows + row, mask=every < splits, other=float("-inf"))
    m = tl.max(logs, 0)
    shift = tl.where(m == float("-inf"), 0.0, m)
    total = tl.sum(exp_difference(logs, shift, LOG2E, True), 0)
    acc = tl.zeros((BLOCK_D,), tl.float32)
    for start in range(0, splits, CHUNK):
        s = start + tl.arange(0, CHUNK)
        logs = tl.load(part_lse + s.to(tl.int64) * n_rows + row, mask=s < splits, other=float("-inf"))
        weight = exp_difference(logs, shift, LOG2E, True)
        at = (s.to(tl.int64) * n_rows + row)[:, None] * D + d[None, :]
        part = tl.load(parts + at, mask=(s < splits)[:, None] & (d < D)[None, :], other=0.0)
        acc += tl.sum(part * weight[:, None], 0)
    blind = total == 0.0
    acc = acc / tl.where(blind, 1.0, total)
    head, i = row // tq, row % tq
    out += (head // heads) * out_b + (head % heads) * out_h + i * out_t
    tl.store(out + d, acc.to(out.dtype.element_ty), mask=d < D)
    tl.store(lse + row, tl.where(blind, float("-inf"), m + tl.log2(total) * LN2))
