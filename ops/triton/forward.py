"""The forward kernel: FlashAttention-2's loop (Dao 2023, algorithm 1) with every option of the contract.

A program owns BLOCK_M queries of one head and walks the keys that any of them may see; only tiles that an
edge of the window, the diagonal, a document's end or the end of the keys cuts are masked.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ops.triton.common import (
    FP32_PART,
    PLAIN,
    accumulate,
    bounds,
    documents_of,
    exp_difference,
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


@triton.jit
def key_range(
    i0,
    rows,
    offset,
    limit,
    window_left,
    window_right,
    first_key,
    end_key,
    whole,
    BLOCK_N: tl.constexpr,
    HAS_LEFT: tl.constexpr,
    HAS_RIGHT: tl.constexpr,
    DOCUMENT_IDS: tl.constexpr,
):
    """For queries i0 .. i0 + rows: keys lo .. hi are seen by some, the tiles in full_lo .. full_hi by all.

    first_key, end_key and whole: of their documents. lo, full_lo, full_hi are multiples of BLOCK_N.
    """
    lo, hi = 0, limit
    if HAS_LEFT:
        lo = tl.maximum(lo, i0 + offset - window_left)
    if HAS_RIGHT:
        hi = tl.minimum(hi, i0 + rows + offset + window_right)
    if DOCUMENT_IDS:
        lo, hi = tl.maximum(lo, first_key), tl.minimum(hi, end_key)
    full_lo = lo
    lo = lo // BLOCK_N * BLOCK_N
    hi = tl.maximum(hi, lo)
    full_hi = hi
    if HAS_LEFT:
        full_lo = tl.maximum(full_lo, i0 + rows - 1 + offset - window_left)
    if HAS_LEFT or DOCUMENT_IDS:
        full_lo = tl.minimum(tl.cdiv(full_lo, BLOCK_N), tl.cdiv(hi, BLOCK_N)) * BLOCK_N
    if HAS_RIGHT:
        full_hi = tl.minimum(hi, i0 + 1 + offset + window_right)
    full_hi = tl.maximum(full_hi // BLOCK_N * BLOCK_N, full_lo)
    if DOCUMENT_IDS:
        full_hi = tl.where(whole, full_hi, full_lo)  # else every tile compares ids
    return lo, full_lo, full_hi, hi


@triton.jit(do_not_specialize=PLAIN)
def _tilegpt_attention_forward(
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
    out_b,
    out_h,
    out_t,
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
    EVEN_K: tl.constexpr,
    EXACT: tl.constexpr,
    DESC: tl.constexpr,
    MASK_BLOCK: tl.constexpr,
    REACH: tl.constexpr,
    SLOPES_B: tl.constexpr,
):
    """out and lse of BLOCK_M queries of one head; see ops/triton/attention.py for the arguments."""
    PART: tl.constexpr = BLOCK_D if DESC or not EXACT else min(BLOCK_D, FP32_PART)
    ALIBI: tl.constexpr = alibi_slopes is not None
    DOCUMENT_IDS: tl.constexpr = q_document_ids is not None
    LENGTHS: tl.constexpr = kv_lengths is not None
    BLOCKS: tl.constexpr = blocks is not None
    RELATIVE: tl.constexpr = relative_bias is not None
    BIASED: tl.constexpr = bias is not None or RELATIVE
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
        k += b64 * k_b + kv_head.to(tl.int64) * k_h
        v += b64 * v_b + kv_head.to(tl.int64) * v_h
    if bias is not None:
        bias += b64 * bias_b + h64 * bias_h
    if RELATIVE:
        relative_bias += h * (2 * REACH + 1) + REACH
    if SLOPES_B:
        alibi_slopes += b * SLOPES_B
    slope = tl.load(alibi_slopes + h).to(tl.float32) if ALIBI else 0.0
    keys = row_keys(seed, b, h, i) if DROPOUT else i
    q_ids = 0
    if DOCUMENT_IDS:
        q_ids = tl.load(q_document_ids + b64 * tq + i, mask=i < tq, other=-1)[:, None]
        k_document_ids += b64 * tk
    first_key, end_key, whole = documents_of(ranges, b * n_tiles + tile, DOCUMENT_IDS)
    lo, full_lo, full_hi, hi = key_range(
        i0, tl.minimum(BLOCK_M, tq - i0), offset, limit, window_left, window_right, first_key, end_key, whole,
        BLOCK_N, HAS_LEFT, HAS_RIGHT, DOCUMENT_IDS,
    )  # fmt: skip
    if BLOCKS:
        blocks += b64 * blocks_b + h64 * blocks_h + i0 // MASK_BLOCK * blocks_t
    first, end = bounds(blocks, lo, hi, BLOCK_N, MASK_BLOCK, BLOCKS)
    MASKED: tl.constexpr = HAS_LEFT or HAS_RIGHT or DOCUMENT_IDS or not EVEN_K
    # With SCALE_LATE the scale goes into the exponential's FMA, and m is kept unscaled.
    m_scale = scale if SCALE_LATE else 1.0
    q_tile = load_parts(q, b, h, i0, tq, q_t, BLOCK_M, D, BLOCK_D, PART, DESC, True)
    m = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK_M,), tl.float32)
    acc = zeros(BLOCK_M, BLOCK_D, PART)
    for at in tl.range(first, end, 1 if BLOCKS else BLOCK_N):
        start = tile_start(blocks, at, BLOCK_N, MASK_BLOCK, BLOCKS)
        k_tile = load_parts(k, b, kv_head, start, limit, k_t, BLOCK_N, D, BLOCK_D, PART, DESC, not EVEN_K)
        s = product(q_tile, k_tile)
        j = start + tl.arange(0, BLOCK_N)
        if not SCALE_LATE:
            s, _ = scores(
                s, i[:, None], j[None, :], offset, scale, softcap, slope, bias, bias_i, bias_j, tq, limit,
                ALIBI, SOFTCAP, EXACT,
            )  # fmt: skip
        if RELATIVE:
            s = relative_scores(
                s, i[:, None], j[None, :], offset, relative_bias, i0, start, BLOCK_M, BLOCK_N, REACH
            )
        if MASKED:  # noqa: SIM102 (a constexpr, then a branch)
            # One loop with a branch: a loop each for masked and unmasked tiles took 50 registers more.
            if (start < full_lo) | (start >= full_hi):
                k_ids = tl.load(k_document_ids + j, mask=j < limit, other=-1)[None, :] if DOCUMENT_IDS else 0
                seen = visible(
                    i[:, None], j[None, :], offset, limit, window_left, window_right, q_ids, k_ids,
                    HAS_LEFT, HAS_RIGHT, DOCUMENT_IDS,
                )  # fmt: skip
                s = tl.where(seen, s, float("-inf"))
        m_new = tl.maximum(m, tl.max(s, 1))
        # A row that has seen no key yet has m = -inf; shifted by 0 it gives exp2(-inf) = 0, and not NaN.
        shift = tl.where(m_new == float("-inf"), 0.0, m_new) if MASKED or BIASED else m_new
        p = exp_difference(s, shift[:, None], m_scale, EXACT, BIASED)
        rescale = exp_difference(m, shift, m_scale, EXACT, BIASED)
        total = total * rescale + tl.sum(p, 1)
        if DROPOUT:
            p = tl.where(kept(keys[:, None], j[None, :], dropout_threshold), p, 0.0)
        v_tile = load_parts(v, b, kv_head, start, limit, v_t, BLOCK_N, D, BLOCK_D, PART, DESC, not EVEN_K)
        acc = accumulate(p, v_tile, acc, rescale)
        m = m_new
    blind = total == 0.0
    factor = (keep_scale / tl.where(blind, 1.0, total))[:, None]
    out += b64 * out_b + h64 * out_h
    store_parts(out, acc, factor, i0, tq, out_t, BLOCK_M, D, PART)
    row_lse = tl.where(blind, float("-inf"), m * m_scale + tl.log(total))
    tl.store(lse + head.to(tl.int64) * tq + i, row_lse, mask=i < tq)


@triton.jit(do_not_specialize=["n_own", "n_other", "n_tiles"])
def _tilegpt_document_ranges(
    own, other, ranges, n_own, n_other, n_tiles, BLOCK: tl.constexpr, CHUNK: tl.constexpr
):
    """(B, n_tiles, 3): first and end of `other` whose ids lie within those of each tile of BLOCK `own`, and
    whether these and the tile are of one document, so that nobody needs to compare ids.

    Where documents follow each other, exactly the tiles of the own documents remain.
    """
    tile, b = tl.program_id(0) % n_tiles, (tl.program_id(0) // n_tiles).to(tl.int64)
    rows = tile * BLOCK + tl.arange(0, BLOCK)
    ids = tl.load(own + b * n_own + rows, mask=rows < n_own, other=0)
    least = tl.min(tl.where(rows < n_own, ids, 2147483647), 0)
    greatest = tl.max(tl.where(rows < n_own, ids, -2147483648), 0)
    first, end, near_ones = n_other, 0, 0
    for start in range(0, n_other, CHUNK):
        j = start + tl.arange(0, CHUNK)
        inside = j < n_other
        other_ids = tl.load(other + b * n_other + j, mask=inside, other=0)
        near = inside & (other_ids >= least) & (other_ids <= greatest)
        first = tl.minimum(first, tl.min(tl.where(near, j, n_other), 0))
        end = tl.maximum(end, tl.max(tl.where(near, j + 1, 0), 0))
        near_ones += tl.sum(near.to(tl.int32), 0)
    to = ranges + (b * n_tiles + tile) * 3
    tl.store(to, first)
    tl.store(to + 1, end)
    tl.store(to + 2, ((least == greatest) & (near_ones == end - first)).to(tl.int32))


@triton.jit(do_not_specialize=["heads", "n_rows", "n_columns", "tq", "tk", "window_left", "window_right"])
def _tilegpt_kept_blocks(
    mask,
    kept,
    kv_lengths,
    mask_b,
    mask_h,
    mask_row,
    mask_column,
    heads,
    n_rows,
    n_columns,
    tq,
    tk,
    window_left,
    window_right,
    TRANSPOSED: tl.constexpr,
    HAS_LEFT: tl.constexpr,
    HAS_RIGHT: tl.constexpr,
    MASK_BLOCK: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """kept (B, H, n_rows, 1 + n_columns) int32: how many blocks of a row of the block mask are kept and in
    the band, and which, in order. Rows are of queries, columns of keys, or TRANSPOSED."""
    row = tl.program_id(0)
    b, h, r = (row // n_rows // heads).to(tl.int64), (row // n_rows % heads).to(tl.int64), row % n_rows
    mask += b * mask_b + h * mask_h + r.to(tl.int64) * mask_row
    kept += row.to(tl.int64) * (1 + n_columns)
    limit = tl.minimum(tl.load(kv_lengths + b), tk) if kv_lengths is not None else tk
    offset = limit - tq
    count = 0
    for first in range(0, n_columns, CHUNK):
        c = first + tl.arange(0, CHUNK)
        on = tl.load(mask + c * mask_column, mask=c < n_columns, other=0) != 0
        i0, j0 = (c, r) if TRANSPOSED else (r, c)
        i0, j0 = i0 * MASK_BLOCK, j0 * MASK_BLOCK
        on = on & (j0 < limit)
        if HAS_RIGHT:
            on = on & (j0 <= tl.minimum(i0 + MASK_BLOCK, tq) - 1 + offset + window_right)
        if HAS_LEFT:
            on = on & (j0 + MASK_BLOCK - 1 >= i0 + offset - window_left)
        place = count + tl.cumsum(on.to(tl.int32), 0)
        tl.store(kept + place, c, mask=on)
        count += tl.sum(on.to(tl.int32), 0)
    tl.store(kept, count)
