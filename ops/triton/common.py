"""What the Triton kernels share: tiles in, scores, what is visible, the dropout mask.

All work in either orientation: `i` (queries) and `j` (keys) are index tensors that broadcast against each
other, (M, 1) with (1, N), or (1, M) with (N, 1).
"""

from __future__ import annotations

import triton
import triton.language as tl

from ops.triton.interpret import INTERPRETED

# How fp32 tiles are multiplied: each operand as three bf16 terms, the six largest products of them on
# tensor cores. Triton adds the accumulator behind those by an fp32 addition, which rounds; tensor cores
# truncate, and a sum over thousands of keys would drift. The interpreter does not know the word, and
# multiplies in fp64. 16 bits do not ask.
PRECISION = tl.constexpr("ieee" if INTERPRETED else "bf16x6")
# Columns of an fp32 tile that are multiplied at once: the terms of 128 spilled up to 12 times as many bytes.
FP32_PART = tl.constexpr(64)
LOG2E = tl.constexpr(1.4426950408889634)
LOG2E_REST = tl.constexpr(1.925963033500e-08)  # log2(e) less its fp32
LN2 = tl.constexpr(0.6931471805599453)
# Numbers that change from call to call: their values must not compile a kernel anew.
PLAIN = [
    "heads",
    "kv_heads",
    "tq",
    "tk",
    "n_tiles",
    "n_heads",
    "heads_in_l2",
    "tail",
    "lead",
    "window_left",
    "window_right",
    "dropout_threshold",
]
PLAIN += ["bias_b", "bias_h", "bias_i", "bias_j", "blocks_b", "blocks_h", "blocks_t"]


@triton.jit
def load_tile(
    x,
    b,
    h,
    start,
    limit,
    stride_t,
    BLOCK: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    DESC: tl.constexpr,
    BOUNDED: tl.constexpr,
):
    """Rows start .. start + BLOCK of a (T, D) matrix as (BLOCK, BLOCK_D), zeros beyond D.

    x: a descriptor of the whole (B, H, T, D) tensor with DESC, which gives zeros beyond T by itself; else a
    pointer to the matrix, and then BOUNDED gives zeros from row `limit` on."""
    if DESC:
        tile = x.load([b, h, start, 0]).reshape(BLOCK, BLOCK_D)
    else:
        rows, cols = tl.arange(0, BLOCK), tl.arange(0, BLOCK_D)
        pointers = x + tl.cast(start, tl.int64) * stride_t + rows[:, None] * stride_t + cols[None, :]
        if BOUNDED:
            inside = (start + rows)[:, None] < limit
            tile = tl.load(pointers, mask=inside & (cols < D)[None, :] if D < BLOCK_D else inside, other=0.0)
        elif D < BLOCK_D:
            tile = tl.load(pointers, mask=(cols < D)[None, :], other=0.0)
        else:
            tile = tl.load(pointers)
    return tile


@triton.jit
def load_parts(
    x,
    b,
    h,
    start,
    limit,
    stride_t,
    BLOCK: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PART: tl.constexpr,
    DESC: tl.constexpr,
    BOUNDED: tl.constexpr,
):
    """load_tile as a tuple of (BLOCK, PART) tiles; with DESC PART is BLOCK_D."""
    parts = ()
    for d in tl.static_range(0, BLOCK_D, PART):
        at = x if d == 0 else x + d
        parts += (load_tile(at, b, h, start, limit, stride_t, BLOCK, D - d, PART, DESC, BOUNDED),)
    return parts


@triton.jit
def zeros(M: tl.constexpr, BLOCK_D: tl.constexpr, PART: tl.constexpr):
    """An accumulator: a tuple of (M, PART) tiles."""
    parts = ()
    for _ in tl.static_range(0, BLOCK_D, PART):
        parts += (tl.zeros((M, PART), tl.float32),)
    return parts


@triton.jit
def product(a, b):
    """a b^T (M, N) of tiles (M, BLOCK_D) and (N, BLOCK_D), both in parts."""
    s = tl.dot(a[0], b[0].T, input_precision=PRECISION)
    for part in tl.static_range(1, len(a)):
        s = tl.dot(a[part], b[part].T, s, input_precision=PRECISION)
    return s


@triton.jit
def accumulate(a, b, acc, rescale=None):
    """acc + a b for a (M, N) and b (N, BLOCK_D), acc (M, BLOCK_D) in parts; `rescale` (M,) multiplies acc
    before."""
    sums = ()
    for part in tl.static_range(0, len(b)):
        past = acc[part] if rescale is None else acc[part] * rescale[:, None]
        sums += (tl.dot(a.to(b[part].dtype), b[part], past, input_precision=PRECISION),)
    return sums


@triton.jit
def store_tile(x, tile, start, limit, stride_t, BLOCK: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr):
    """Rows start .. min(start + BLOCK, limit) of the (T, D) matrix at pointer x, in its dtype."""
    rows, cols = tl.arange(0, BLOCK), tl.arange(0, BLOCK_D)
    inside = ((start + rows)[:, None] < limit) & (cols < D)[None, :]
    pointers = x + tl.cast(start, tl.int64) * stride_t + rows[:, None] * stride_t + cols[None, :]
    tl.store(pointers, tile.to(x.dtype.element_ty), mask=inside)


@triton.jit
def store_parts(
    x,
    parts,
    factor,
    start,
    limit,
    stride_t,
    BLOCK: tl.constexpr,
    D: tl.constexpr,
    PART: tl.constexpr,
    real=None,
):
    """store_tile of parts, times `factor`; zeros in the rows that are not `real`."""
    for part in tl.static_range(0, len(parts)):
        tile = parts[part] * factor
        if real is not None:
            tile = tl.where(real[:, None], tile, 0.0)
        store_tile(x + part * PART, tile, start, limit, stride_t, BLOCK, D - part * PART, PART)


@triton.jit
def tanh(x, EXACT: tl.constexpr):
    """By one exp2, without overflow: exp2 goes to 0 or infinity. That is exact to the rounding of 1; EXACT
    takes the series near 0, where x is small beside 1."""
    y = 1.0 - 2.0 / (tl.exp2(x * (2.0 * LOG2E)) + 1.0)
    if EXACT:
        u = x * x
        series = x * (1.0 - u * (1 / 3 - u * (2 / 15 - u * (17 / 315 - u * (62 / 2835)))))
        y = tl.where(u < 0.0625, series, y)
    return y


@triton.jit
def exp_natural(x):
    """exp(x) to fp32's rounding: exp2(x * log2(e)) alone errs by |x| / 2 units in the last place."""
    x = tl.where(x < -1000.0, -1000.0, x)  # 0 all the same; the least of fp32 times log2(e) is none
    t = x * LOG2E
    # what the product lost, and what the constant lacks
    lost = tl.fma(x, LOG2E, -t) + x * LOG2E_REST
    return tl.exp2(t) * (1.0 + lost * LN2)


@triton.jit
def exp_difference(s, shift, scale, EXACT: tl.constexpr, APART: tl.constexpr):
    """exp((s - shift) * scale).

    One FMA and one exp2, where shift * scale * log2(e) is far below 2**24, as sums of products are. APART
    takes the difference first: a bias may be the least number that there is. EXACT: to fp32's rounding.
    """
    if EXACT:
        p = exp_natural((s - shift) * scale)
    elif APART:
        p = tl.exp2((s - shift) * (scale * LOG2E))
    else:
        p = tl.exp2(s * (scale * LOG2E) - shift * (scale * LOG2E))
    return p


@triton.jit
def scores(
    s,
    i,
    j,
    offset,
    scale,
    softcap,
    slope,
    bias,
    bias_i,
    bias_j,
    tq,
    tk,
    ALIBI: tl.constexpr,
    SOFTCAP: tl.constexpr,
    EXACT: tl.constexpr,
):
    """(scores, tanh of the softcap or s) from s = <q_i, k_j>, before any mask.

    SOFTCAP: 0 off, 1 on, 2 where scores may be so small beside it that tanh's rounding of 1, times it, shows.
    bias: pointer to the (Tq, Tk) matrix of this batch and head (one per row in decode), or None.
    """
    tanh_score = s
    if SOFTCAP:
        tanh_score = tanh(s * (scale / softcap), EXACT or SOFTCAP > 1)
        s = tanh_score * softcap
    else:
        s = s * scale
    if ALIBI:
        s -= slope * tl.abs(j - i - offset).to(tl.float32)
    if bias is not None:
        inside = (i < tq) & (j < tk)
        pointers = bias + tl.cast(i, tl.int64) * bias_i + tl.cast(j, tl.int64) * bias_j
        s += tl.load(pointers, mask=inside, other=0.0).to(tl.float32)
    return s, tanh_score


@triton.jit
def looked_up(s, i, j, offset, table, REACH: tl.constexpr):
    """s plus the number of each distance, of which those beyond REACH count as REACH; `table` points to that
    of distance 0 (in decode a pointer a row)."""
    return s + tl.load(table + tl.minimum(tl.maximum(j - i - offset, -REACH), REACH))


@triton.jit
def near(i0, j0, offset, M: tl.constexpr, N: tl.constexpr, REACH: tl.constexpr):
    """Whether a tile of M queries and N keys has distances within REACH."""
    return (j0 - (i0 + M - 1) - offset < REACH) & (j0 + N - 1 - i0 - offset > -REACH)


@triton.jit
def relative_scores(s, i, j, offset, table, i0, j0, M: tl.constexpr, N: tl.constexpr, REACH: tl.constexpr):
    """`looked_up` for queries i0 .. i0 + M and keys j0 .. j0 + N. A tile beyond REACH, as most of a long
    sequence are, adds one number."""
    if near(i0, j0, offset, M, N, REACH):
        s = looked_up(s, i, j, offset, table, REACH)
    else:
        s += tl.load(table + tl.where(j0 < i0 + offset, -REACH, REACH))
    return s


@triton.jit
def store_diagonals(sums, stride, ds, first, M: tl.constexpr, N: tl.constexpr):
    """The sums of ds (M, N) by distance, whose top left is at distance `first`, into rows of `stride` numbers
    where `sums` points to distance 0. Tiles whose `first` are multiples of N apart write no number twice."""
    c = tl.arange(0, N)
    # 0, but not to the compiler, which would keep the matrix in registers from tile to tile.
    zero = tl.minimum(tl.abs(first), 0)
    turned = c[None, :] + (tl.arange(0, M) + zero)[:, None]
    # Row r begins with its key r: what was a diagonal is a column, down to where rows have turned around.
    columns = tl.gather(ds, turned % N, 1)
    for turn in tl.static_range(0, (M + N - 2) // N + 1):
        total = tl.sum(tl.where(turned // N == turn, columns, 0.0), 0)
        tl.store(sums + turn * stride + (first - turn * N + c), total)


@triton.jit
def visible(
    i,
    j,
    offset,
    limit,
    window_left,
    window_right,
    q_ids,
    k_ids,
    HAS_LEFT: tl.constexpr,
    HAS_RIGHT: tl.constexpr,
    DOCUMENT_IDS: tl.constexpr,
):
    """Which query sees which key: j < limit, in the band around the diagonal j = i + offset, same document.

    q_ids, k_ids: document ids shaped as i and j; anything without DOCUMENT_IDS.
    """
    # Comparisons of vectors: a difference of matrices would be hoisted out of the loop, 44 registers in the
    # backward.
    seen = j < limit
    if HAS_RIGHT:
        seen = seen & (j <= i + (offset + window_right))
    if HAS_LEFT:
        seen = seen & (j >= i + (offset - window_left))
    if DOCUMENT_IDS:
        seen = seen & (q_ids == k_ids)
    return seen


@triton.jit
def documents_of(ranges, tile, DOCUMENT_IDS: tl.constexpr):
    """First, end and whole of a tile, from _tilegpt_document_ranges; anything without DOCUMENT_IDS."""
    first, end, whole = 0, 0, True
    if DOCUMENT_IDS:
        first, end = tl.load(ranges + tile * 3), tl.load(ranges + tile * 3 + 1)
        whole = tl.load(ranges + tile * 3 + 2) != 0
    return first, end, whole


@triton.jit
def bounds(blocks, lo, hi, BLOCK: tl.constexpr, MASK_BLOCK: tl.constexpr, BLOCKS: tl.constexpr):
    """Where a loop over the tiles of BLOCK within lo .. hi begins and ends: at lo and hi, in steps of BLOCK.
    With BLOCKS at 0 and the number of tiles in the blocks that are kept, whose list from _tilegpt_kept_blocks
    begins at `blocks`: a count in both cases made fp32's dK and dV spill 92 bytes at a head dim of 64."""
    first, end = lo, hi
    if BLOCKS:
        first, end = 0, tl.load(blocks) * (MASK_BLOCK // BLOCK)
    return first, end


@triton.jit
def tile_start(blocks, at, BLOCK: tl.constexpr, MASK_BLOCK: tl.constexpr, BLOCKS: tl.constexpr):
    """Where the tile begins at which that loop is."""
    start = at
    if BLOCKS:
        per_block: tl.constexpr = MASK_BLOCK // BLOCK
        start = tl.load(blocks + 1 + at // per_block) * MASK_BLOCK + at % per_block * BLOCK
    return start


@triton.jit
def fmix32(x):
    """murmur3's finaliser on uint32."""
    x ^= x >> 16
    x *= 0x85EBCA6B
    x ^= x >> 13
    x *= 0xC2B2AE35
    return x ^ (x >> 16)


@triton.jit
def row_keys(seed, b, h, i):
    """ops.dropout.row_keys for the queries `i` of head h in batch row b; seed: a pointer to one int64."""
    value = tl.load(seed)
    key = tl.full((), 0, tl.uint32)
    key = fmix32((key ^ value.to(tl.uint32)) + 0x9E3779B9)
    key = fmix32((key ^ (value >> 32).to(tl.uint32)) + 0x9E3779B9)
    key = fmix32((key ^ tl.cast(b, tl.uint32)) + 0x9E3779B9)
    key = fmix32((key ^ tl.cast(h, tl.uint32)) + 0x9E3779B9)
    return fmix32((key ^ i.to(tl.uint32)) + 0x9E3779B9)


@triton.jit
def kept(keys, j, dropout_threshold):
    """ops.dropout.keep_mask; keys and j broadcast, `dropout_threshold` counts in 2**-32."""
    return fmix32(keys + j.to(tl.uint32) * 0x9E3779B9) >= tl.cast(dropout_threshold, tl.uint32)


@triton.jit
def scheduled_tile(
    pid, n_tiles, n_heads, heads_in_l2, tail, lead, LAST_FIRST: tl.constexpr, HAS_LEAD: tl.constexpr
):
    """(tile, head) of program `pid`: `heads_in_l2` heads side by side, so that their K and V stay in L2, and
    within them tile after tile, with LAST_FIRST from the last, which is the longest under a causal mask;
    `lead` tiles of all heads come first (HAS_LEAD), `tail` in the end (ops/order.py)."""
    before_tail = n_tiles - tail
    ahead = 0
    if HAS_LEAD:
        ahead = tl.where(pid < lead * n_heads, 0, lead)
        before_tail = tl.where(pid < lead * n_heads, 0, before_tail - lead)
        pid -= ahead * n_heads
    first, width, within = 0, n_heads, pid
    if pid < before_tail * n_heads:
        # The host keeps heads_in_l2 * n_tiles within the grid, and so within 32 bits.
        first = pid // (heads_in_l2 * before_tail) * heads_in_l2
        width = tl.minimum(heads_in_l2, n_heads - first)
        within = pid - first * before_tail
    tile = ahead + within // width  # of all heads the tail's come behind `before_tail` others
    if LAST_FIRST:
        tile = n_tiles - 1 - tile
    return tile, first + within % width
