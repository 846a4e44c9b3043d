"""Attention of new tokens against a cache in blocks, quantised or both (ops/cache_view.py): a decoding step,
or the next chunk of a prompt.

As in ops/triton/decode.py the keys are split where queries are few, and the query heads of a key head are
rows of one tile. Numbers of 8 and 4 bits become 16 in registers, exactly; their scales multiply the scores
and the probabilities, N numbers a tile and not N x D.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ops.triton.common import accumulate, exp_difference, product, scores, visible, zeros
from ops.triton.interpret import INTERPRETED

IN_PTX = tl.constexpr(not INTERPRETED)
NUMBERS = ["kv_heads", "tq", "splits", "m_tiles", "window_left", "window_right", "table_b"]


@triton.jit
def exactly(x, dtype: tl.constexpr):
    """Numbers of 8 bits or a part's own dtype in `dtype`, which holds them all."""
    if not IN_PTX:  # the interpreter makes bf16 of fp32 alone
        x = x.to(tl.float32)
    return x.to(dtype)


@triton.jit
def held(x):
    """x, in the layout of its load up to here: in that of tensor cores, numbers of 8 bits would come from
    shared memory byte by byte."""
    if IN_PTX and x.dtype == tl.bfloat16:
        x = tl.inline_asm_elementwise(
            "mov.b32 $0, $1;", "=r,r", [x], dtype=tl.bfloat16, is_pure=False, pack=2
        )
    return x


@triton.jit
def nibbles(x, dtype: tl.constexpr):
    """The low and the high four bits of each byte, less 8, in a 16-bit dtype or fp32."""
    if IN_PTX and dtype == tl.bfloat16:
        # 0x43 in the upper byte makes 128 + n of a nibble n, and an FMA takes 136 away, of two at once;
        # a subtraction of bf16 is there from sm_90 on.
        low, high = tl.inline_asm_elementwise(
            """{
            .reg .b32 a, b, c, d, one, less;
            prmt.b32 a, $4, 0, 0x4140;
            prmt.b32 b, $4, 0, 0x4342;
            shr.u32 c, a, 4;
            shr.u32 d, b, 4;
            lop3.b32 a, a, 0x000f000f, 0x43004300, 0xea;
            lop3.b32 b, b, 0x000f000f, 0x43004300, 0xea;
            lop3.b32 c, c, 0x000f000f, 0x43004300, 0xea;
            lop3.b32 d, d, 0x000f000f, 0x43004300, 0xea;
            mov.b32 one, 0x3f803f80;
            mov.b32 less, 0xc308c308;
            fma.rn.bf16x2 $0, a, one, less;
            fma.rn.bf16x2 $1, b, one, less;
            fma.rn.bf16x2 $2, c, one, less;
            fma.rn.bf16x2 $3, d, one, less;
            }""",
            "=r,=r,=r,=r,r",
            [x],
            dtype=(tl.bfloat16, tl.bfloat16),
            is_pure=True,
            pack=4,
        )
    else:
        low = exactly((x & 15).to(tl.int8) - 8, dtype)
        high = exactly((x >> 4).to(tl.int8) - 8, dtype)
    return low, high


@triton.jit
def load_numbers(x, at, there, D: tl.constexpr, PART: tl.constexpr, PARTS: tl.constexpr, dtype: tl.constexpr):
    """Rows at element offsets `at` (N,) of x as a tuple of PARTS tiles (N, PART) in `dtype`; zeros, or of
    int4 -8, where not `there`. Two parts of int4 are D / 2 channels each."""
    columns = tl.arange(0, PART)
    if x.dtype.element_ty == tl.uint8:
        inside = there[:, None] & (columns < D // 2)[None, :]
        parts = nibbles(tl.load(x + at[:, None] + columns[None, :], mask=inside, other=0), dtype)
    else:
        parts = ()
        for part in tl.static_range(0, PARTS):
            inside = there[:, None] & (part * PART + columns < D)[None, :]
            pointers = x + part * PART + at[:, None] + columns[None, :]
            parts += (exactly(tl.load(pointers, mask=inside, other=0.0), dtype),)
    return parts


@triton.jit
def blocks_of(table, start, limit, PAGE: tl.constexpr, BLOCK_N: tl.constexpr):
    """The blocks of PAGE tokens that a row's keys from `start` on lie in: one where a tile lies in one, else
    one a key."""
    if PAGE % BLOCK_N == 0:
        block = tl.load(table + tl.minimum(start, limit - 1) // PAGE)
    else:
        j = start + tl.arange(0, BLOCK_N)
        block = tl.load(table + j // PAGE, mask=j < limit, other=0)
    return block.to(tl.int64)


@triton.jit
def load_scales(
    scale, block, start, limit, scale_n, scale_p, PAGE: tl.constexpr, N: tl.constexpr, INT4: tl.constexpr
):
    """Scales of N keys from `start` on as stored, a tuple for the parts of the channels: one, of int4 two."""
    j = start + tl.arange(0, N)
    inner = j
    if PAGE > 0:
        inner = j % PAGE
    at = scale + block * scale_n + inner
    scales = (tl.load(at, mask=j < limit, other=0.0),)
    if INT4:
        scales += (tl.load(at + scale_p, mask=j < limit, other=0.0),)
    return scales


@triton.jit
def scaled_product(q, k, scales):
    """q k^T (M, N), k as stored: each part's scales, a number a key, multiply its scores."""
    s = product((q[0],), (k[0],)) * scales[0].to(tl.float32)[None, :]
    for part in tl.static_range(1, len(k)):
        s += product((q[part],), (k[part],)) * scales[part].to(tl.float32)[None, :]
    return s


@triton.jit
def weighted(p, v, scales, acc, rescale):
    """acc + p v in parts, v as stored: the scales go to the probabilities."""
    sums = ()
    for part in tl.static_range(0, len(v)):
        weight, tile, scale = p, v[part], scales[part].to(tl.float32)
        if tile.dtype == tl.float16:  # a probability times a scale may be below its normal numbers
            tile = (tile.to(tl.float32) * scale[:, None]).to(tl.float16)
        else:
            weight = p * scale[None, :]
        sums += accumulate(weight, (held(tile),), (acc[part],), rescale)
    return sums


@triton.jit(do_not_specialize=NUMBERS)
def _tilegpt_attend_cache(
    q,
    k,
    v,
    k_scale,
    v_scale,
    table,
    kv_lengths,
    alibi_slopes,
    out,
    lse,
    q_b,
    q_h,
    q_t,
    k_n,
    k_h,
    k_t,
    scale_n,
    scale_h,
    scale_p,
    table_b,
    out_b,
    out_h,
    out_t,
    kv_heads,
    tq,
    splits,
    m_tiles,
    window_left,
    window_right,
    scale,
    softcap,
    HEADS_PER_KV: tl.constexpr,
    D: tl.constexpr,
    PART: tl.constexpr,
    PARTS: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    HAS_LEFT: tl.constexpr,
    HAS_RIGHT: tl.constexpr,
    SOFTCAP: tl.constexpr,
    EXACT: tl.constexpr,
    SPLIT: tl.constexpr,
    PDL: tl.constexpr,
):
    """One split of the keys for BLOCK_M rows of a key head: row r is query r // HEADS_PER_KV of its head
    r % HEADS_PER_KV.

    k and v have one layout, k_scale and v_scale another. out and lse as in ops/triton/decode.py: with SPLIT
    the parts, for the combining kernel."""
    QUANTISED: tl.constexpr = k_scale is not None
    ALIBI: tl.constexpr = alibi_slopes is not None
    dtype: tl.constexpr = q.dtype.element_ty
    # Where part p of the channels begins: of int4 at D / 2, whatever the tile.
    WIDTH: tl.constexpr = D // 2 if k.dtype.element_ty == tl.uint8 else PART
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    split, rest = tl.program_id(0) % splits, tl.program_id(0) // splits
    m_tile, kv_row = rest % m_tiles, rest // m_tiles
    b, kv_head = kv_row // kv_heads, kv_row % kv_heads
    b64 = b.to(tl.int64)
    limit = tl.load(kv_lengths + b)
    offset = limit - tq
    rows = m_tile * BLOCK_M + tl.arange(0, BLOCK_M)
    i, h = rows // HEADS_PER_KV, kv_head * HEADS_PER_KV + rows % HEADS_PER_KV
    first_i = m_tile * BLOCK_M // HEADS_PER_KV
    last_i = tl.minimum((m_tile * BLOCK_M + BLOCK_M - 1) // HEADS_PER_KV, tq - 1)
    real = i < tq
    # Keys lo .. hi are seen by some query, full_lo .. full_hi by all.
    lo, hi, full_lo, full_hi = 0, limit, 0, limit
    if HAS_LEFT:
        lo = tl.maximum(lo, first_i + offset - window_left) // BLOCK_N * BLOCK_N
        full_lo = tl.maximum(last_i + offset - window_left, 0)
    if HAS_RIGHT:
        hi = tl.minimum(hi, last_i + 1 + offset + window_right)
        full_hi = tl.minimum(full_hi, first_i + 1 + offset + window_right)
    n_tiles = tl.cdiv(tl.maximum(hi - lo, 0), BLOCK_N)
    first = lo + split * n_tiles // splits * BLOCK_N
    last = tl.minimum(lo + (split + 1) * n_tiles // splits * BLOCK_N, hi)
    d = tl.arange(0, PART)
    q_rows = b64 * q_b + h.to(tl.int64) * q_h + i.to(tl.int64) * q_t
    q_tile = ()
    for part in tl.static_range(0, PARTS):
        inside = real[:, None] & ((d < WIDTH) & (part * WIDTH + d < D))[None, :]
        q_tile += (tl.load(q + q_rows[:, None] + (part * WIDTH + d)[None, :], mask=inside, other=0.0),)
    slope = tl.load(alibi_slopes + h, mask=real, other=0.0).to(tl.float32)[:, None] if ALIBI else 0.0
    k_head, scale_head = kv_head.to(tl.int64) * k_h, kv_head.to(tl.int64) * scale_h
    m = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)  # added up once, as in ops/triton/decode.py
    acc = zeros(BLOCK_M, PARTS * PART, PART)
    if PAGE > 0:
        table += b64 * table_b
    if QUANTISED:
        # Scales are prefetched one tile ahead, their blocks two: of loads that small no pipeline is made, and
        # each would wait for memory.
        INT4: tl.constexpr = PARTS == 2 and k.dtype.element_ty == tl.uint8
        k_scale, v_scale, nearest, prefetched = k_scale + scale_head, v_scale + scale_head, b64, b64
        if PAGE > 0:
            nearest = blocks_of(table, first, limit, PAGE, BLOCK_N)
            prefetched = blocks_of(table, first + BLOCK_N, limit, PAGE, BLOCK_N)
        k_next = load_scales(k_scale, nearest, first, limit, scale_n, scale_p, PAGE, BLOCK_N, INT4)
        v_next = load_scales(v_scale, nearest, first, limit, scale_n, scale_p, PAGE, BLOCK_N, INT4)
    for start in tl.range(first, last, BLOCK_N):
        j = start + tl.arange(0, BLOCK_N)
        there, block, inner = j < limit, b64, j
        if PAGE > 0:
            block, inner = blocks_of(table, start, limit, PAGE, BLOCK_N), j % PAGE
        at = block * k_n + k_head + inner.to(tl.int64) * k_t
        if QUANTISED:
            k_scales, v_scales, then = k_next, v_next, start + BLOCK_N
            k_next = load_scales(k_scale, prefetched, then, limit, scale_n, scale_p, PAGE, BLOCK_N, INT4)
            v_next = load_scales(v_scale, prefetched, then, limit, scale_n, scale_p, PAGE, BLOCK_N, INT4)
            if PAGE > 0:
                prefetched = blocks_of(table, then + BLOCK_N, limit, PAGE, BLOCK_N)
        k_tile = load_numbers(k, at, there, D, PART, PARTS, dtype)
        v_tile = load_numbers(v, at, there, D, PART, PARTS, dtype)
        s = scaled_product(q_tile, k_tile, k_scales) if QUANTISED else product(q_tile, k_tile)
        s, _ = scores(
            s, i[:, None], j[None, :], offset, scale, softcap, slope, None, 0, 0, tq, limit,
            ALIBI, SOFTCAP, EXACT,
        )  # fmt: skip
        if (start < full_lo) | (start + BLOCK_N > full_hi):
            seen = visible(
                i[:, None], j[None, :], offset, limit, window_left, window_right, 0, 0,
                HAS_LEFT, HAS_RIGHT, False,
            )  # fmt: skip
            s = tl.where(seen, s, float("-inf"))
        m_new = tl.maximum(m, tl.max(s, 1))
        shift = tl.where(m_new == float("-inf"), 0.0, m_new)
        p = exp_difference(s, shift[:, None], 1.0, EXACT, False)
        rescale = exp_difference(m, shift, 1.0, EXACT, False)
        total = total * rescale[:, None] + p
        if QUANTISED:
            acc = weighted(p, v_tile, v_scales, acc, rescale)
        else:
            acc = accumulate(p, v_tile, acc, rescale)
        m = m_new
    total = tl.sum(total, 1)
    kv_rows = tl.num_programs(0) // splits // m_tiles
    at = ((tl.cast(split, tl.int64) * kv_rows + kv_row) * HEADS_PER_KV + rows % HEADS_PER_KV) * tq + i
    factor = 1.0
    if SPLIT:
        out_rows = at * D
        tl.store(lse + at, m, mask=real)
        parts = (tl.num_programs(0) // m_tiles).to(tl.int64) * HEADS_PER_KV * tq
        tl.store(lse + parts + at, total, mask=real)
    else:
        out_rows = b64 * out_b + h.to(tl.int64) * out_h + i.to(tl.int64) * out_t
        blind = total == 0.0
        factor = (1.0 / tl.where(blind, 1.0, total))[:, None]
        tl.store(lse + at, tl.where(blind, float("-inf"), m + tl.log(total)), mask=real)
    for part in tl.static_range(0, PARTS):
        inside = real[:, None] & ((d < WIDTH) & (part * WIDTH + d < D))[None, :]
        values = (acc[part] * factor).to(out.dtype.element_ty)
        tl.store(out + out_rows[:, None] + (part * WIDTH + d)[None, :], values, mask=inside)
