"""Attention of a decoding step with what stands around it: QK-norm, rotary embedding, the append to the
cache, and the split keys' sums. To a quantised cache a kernel of its own appends, and attention reads it.

Keys that are cached do not depend on the kernel before: a program asks for its first tile ahead of the wait.
The newest key and value come from the projection and never pass through the cache. Query heads of a key head
are taken one after another on the same tile of keys, by sums of products: for one query each, tensor cores
would work on padding. Each place of the tile keeps an online softmax of its own, so that warps meet once, at
the end, and not in every tile.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ops.triton.common import tanh


@triton.jit
def head(x, norm, rope, position, rope_length, d, inside, eps, D: tl.constexpr):
    """A head (D,) of the projection at pointer x, fp32, after QK-norm and rotary embedding, if any."""
    half: tl.constexpr = D // 2
    row = tl.load(x + d, mask=inside, other=0.0).to(tl.float32)
    scale = 1.0
    if norm is not None:
        scale = tl.rsqrt(tl.sum(row * row, 0) / D + eps)
        row *= scale * tl.load(norm + d, mask=inside, other=0.0).to(tl.float32)
    if rope is not None:  # d < D/2: a cos - b sin, else b cos + a sin
        other = tl.where(d < half, d + half, d - half)
        partner = tl.load(x + other, mask=inside, other=0.0).to(tl.float32)
        if norm is not None:
            partner *= scale * tl.load(norm + other, mask=inside, other=0.0).to(tl.float32)
        at = rope + position * half + tl.where(d < half, d, d - half)
        cos = tl.load(at, mask=inside, other=0.0)
        sin = tl.load(at + rope_length * half, mask=inside, other=0.0)
        row = row * cos + tl.where(d < half, -partner, partner) * sin
    return row


@triton.jit
def places(table, j, there, KV: tl.constexpr, D: tl.constexpr, PAGE: tl.constexpr):
    """Offsets of a row's keys j: in its own (capacity, D), or in blocks (N, KV, PAGE, D) that table names."""
    at = j * D
    if PAGE > 0:
        block = tl.load(table + j // PAGE, mask=there, other=0).to(tl.int64)
        at = block * (KV * PAGE * D) + j % PAGE * D
    return at


@triton.jit
def score(s, distance, slope, softcap, SOFTCAP: tl.constexpr):
    if SOFTCAP:
        s = softcap * tanh(s / softcap, True)
    return s - slope * distance


@triton.jit(do_not_specialize=["capacity", "columns", "rope_length", "window_left"])
def _tilegpt_step_attention(
    qkv,
    q_norm,
    k_norm,
    rope,
    slopes,
    k_cache,
    v_cache,
    table,
    lengths,
    out,
    statistics,
    capacity,
    columns,
    rope_length,
    window_left,
    scale,
    softcap,
    eps,
    B: tl.constexpr,
    H: tl.constexpr,
    HEADS_PER_KV: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PAGE: tl.constexpr,
    SPLITS: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    PDL: tl.constexpr,
):
    """One split of the keys of a key head for the newest token of a row.

    qkv (B, (H + 2 Hkv) D); caches (B, Hkv, capacity, D), or blocks (N, Hkv, PAGE, D) that table (B, columns)
    names, of which lengths (B,) are filled before this token.
    out (B, H D); with SPLITS > 1 unnormalised parts (SPLITS, B, H D), and statistics (2, SPLITS, B, H): their
    maxima and totals."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    KV: tl.constexpr = H // HEADS_PER_KV
    split, row = tl.program_id(0) % SPLITS, tl.program_id(0) // SPLITS
    b, kv_head = row // KV, row % KV
    d, r = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_N)
    inside = d < D
    position = tl.load(lengths + b).to(tl.int32)
    low = 0
    if WINDOW:
        low = tl.maximum(position - window_left, 0)
    # Tiles in equal parts by the row's own length.
    n_tiles = tl.cdiv(position - low, BLOCK_N)
    first = low + split * n_tiles // SPLITS * BLOCK_N
    last = tl.minimum(low + (split + 1) * n_tiles // SPLITS * BLOCK_N, position)
    begins = row.to(tl.int64) * capacity * D
    if PAGE > 0:
        begins, table = kv_head.to(tl.int64) * (PAGE * D), table + b * columns
    k_cache, v_cache = k_cache + begins, v_cache + begins
    here = first + r < last
    keys = places(table, first + r, here, KV, D, PAGE)[:, None] + d[None, :]
    k_tile = tl.load(k_cache + keys, mask=here[:, None] & inside[None, :], other=0.0)
    v_tile = tl.load(v_cache + keys, mask=here[:, None] & inside[None, :], other=0.0)
    if PDL:
        tl.extra.cuda.gdc_wait()

    qkv += b.to(tl.int64) * (H + 2 * KV) * D
    q, slope, m, total, acc = (), (), (), (), ()
    for g in tl.static_range(HEADS_PER_KV):
        h = kv_head * HEADS_PER_KV + g
        x = head(qkv + h * D, q_norm, rope, position, rope_length, d, inside, eps, D)
        q += (x.to(qkv.dtype.element_ty).to(tl.float32) * scale,)
        slope += (tl.load(slopes + h) if slopes is not None else 0.0,)
        m += (tl.full((BLOCK_N,), float("-inf"), tl.float32),)
        total += (tl.zeros((BLOCK_N,), tl.float32),)
        acc += (tl.zeros((BLOCK_N, BLOCK_D), tl.float32),)
    x = head(qkv + (H + kv_head) * D, k_norm, rope, position, rope_length, d, inside, eps, D)
    k_new = x.to(k_cache.dtype.element_ty)
    v_new = tl.load(qkv + (H + KV + kv_head) * D + d, mask=inside, other=0.0).to(v_cache.dtype.element_ty)
    if split == 0:
        newest = places(table, position, True, KV, D, PAGE) + d
        tl.store(k_cache + newest, k_new, mask=inside)
        tl.store(v_cache + newest, v_new, mask=inside)
    for start in tl.range(first, last, BLOCK_N):
        k, v, j = k_tile.to(tl.float32), v_tile.to(tl.float32), start + r
        prefetched = j + BLOCK_N
        here = prefetched < last
        keys = places(table, prefetched, here, KV, D, PAGE)[:, None] + d[None, :]
        k_tile = tl.load(k_cache + keys, mask=here[:, None] & inside[None, :], other=0.0)
        v_tile = tl.load(v_cache + keys, mask=here[:, None] & inside[None, :], other=0.0)
        maxima, totals, sums = (), (), ()
        for g in tl.static_range(HEADS_PER_KV):
            s = score(tl.sum(k * q[g][None, :], 1), position - j, slope[g], softcap, SOFTCAP)
            s = tl.where(j < last, s, float("-inf"))
            # A place that has seen no key keeps -inf, which must not meet itself.
            maxima += (tl.maximum(m[g], s),)
            shift = tl.where(maxima[g] == float("-inf"), 0.0, maxima[g])
            p, rescale = tl.exp(s - shift), tl.exp(m[g] - shift)
            totals += (total[g] * rescale + p,)
            sums += (acc[g] * rescale[:, None] + p[:, None] * v,)
        m, total, acc = maxima, totals, sums
    for g in tl.static_range(HEADS_PER_KV):
        # The newest key counts in the first split.
        own = score(tl.sum(q[g] * k_new.to(tl.float32), 0), 0.0, slope[g], softcap, SOFTCAP)
        own = tl.where(split == 0, own, float("-inf"))
        highest = tl.maximum(tl.max(m[g], 0), own)
        shift = tl.where(highest == float("-inf"), 0.0, highest)
        weight, p = tl.exp(m[g] - shift), tl.exp(own - shift)
        whole = tl.sum(total[g] * weight, 0) + p
        result = tl.sum(acc[g] * weight[:, None], 0) + p * v_new.to(tl.float32)
        at = b * H + kv_head * HEADS_PER_KV + g
        if SPLITS > 1:
            at += split * (B * H)
            tl.store(statistics + at, highest)
            tl.store(statistics + SPLITS * B * H + at, whole)
            tl.store(out + at * D + d, result, mask=inside)
        else:
            tl.store(out + at * D + d, (result / whole).to(out.dtype.element_ty), mask=inside)


@triton.jit
def halves(x, norm, rope, position, rope_length, c, inside, eps, D: tl.constexpr):
    """The two halves (D / 2,) of a head at pointer x, fp32, after QK-norm and rotary embedding, if any."""
    half: tl.constexpr = D // 2
    low = tl.load(x + c, mask=inside, other=0.0).to(tl.float32)
    high = tl.load(x + half + c, mask=inside, other=0.0).to(tl.float32)
    if norm is not None:
        scale = tl.rsqrt((tl.sum(low * low, 0) + tl.sum(high * high, 0)) / D + eps)
        low *= scale * tl.load(norm + c, mask=inside, other=0.0).to(tl.float32)
        high *= scale * tl.load(norm + half + c, mask=inside, other=0.0).to(tl.float32)
    if rope is not None:
        at = rope + position * half + c
        cos = tl.load(at, mask=inside, other=0.0)
        sin = tl.load(at + rope_length * half, mask=inside, other=0.0)
        low, high = low * cos - high * sin, high * cos + low * sin
    return low, high


@triton.jit
def quantised(x, of, largest, scale_at, WHOLE: tl.constexpr):
    """x, whose largest magnitude is `of`, in multiples of a scale, which is stored: `quantise` of
    ops/cache_view.py. With WHOLE whole numbers, halves to the even one."""
    bits = tl.div_rn(of, largest).to(tl.int32, bitcast=True)
    bits += 0x7FFF + ((bits >> 16) & 1)  # to bf16, the nearest: the interpreter's own conversion cuts off
    scale = (bits >> 16 << 16).to(tl.float32, bitcast=True)
    tl.store(scale_at, scale.to(scale_at.dtype.element_ty))
    divisor = tl.where(scale == 0.0, 1.0, scale)
    number = tl.minimum(tl.maximum(tl.div_rn(x, divisor), -largest), largest)
    if WHOLE:
        number = (number + 12582912.0) - 12582912.0  # 1.5 * 2^23: the sum has no bits behind the point
    return number


@triton.jit(do_not_specialize=["capacity", "columns", "rope_length"])
def _tilegpt_step_append(
    qkv,
    q_norm,
    k_norm,
    rope,
    k_cache,
    v_cache,
    k_scale,
    v_scale,
    table,
    lengths,
    q,
    capacity,
    columns,
    rope_length,
    eps,
    largest,
    H: tl.constexpr,
    HEADS_PER_KV: tl.constexpr,
    D: tl.constexpr,
    BLOCK: tl.constexpr,
    PAGE: tl.constexpr,
    PARTS: tl.constexpr,
    WHOLE: tl.constexpr,
    PDL: tl.constexpr,
):
    """A head of the newest token of a row: of queries to q (B, H, D), of keys or values to the cache.

    qkv (B, (H + 2 Hkv) D); caches and scales as in ops/cache_view.py, (B, Hkv, capacity, ...), or blocks of
    PAGE tokens that table (B, columns) names; lengths (B,): tokens before this one."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    KV: tl.constexpr = H // HEADS_PER_KV
    half: tl.constexpr = D // 2
    b, h = (tl.program_id(0) // (H + 2 * KV)).to(tl.int64), tl.program_id(0) % (H + 2 * KV)
    c = tl.arange(0, BLOCK)
    inside, position = c < half, tl.load(lengths + b).to(tl.int32)
    x = qkv + (b * (H + 2 * KV) + h) * D
    dtype: tl.constexpr = qkv.dtype.element_ty
    if h < H:
        low, high = halves(x, q_norm, rope, position, rope_length, c, inside, eps, D)
        q_to = q + (b * H + h) * D + c
        tl.store(q_to, low.to(dtype), mask=inside)
        tl.store(q_to + half, high.to(dtype), mask=inside)
    else:
        block, at, size = b, position, capacity
        if PAGE > 0:
            block = tl.load(table + b * columns + position // PAGE).to(tl.int64)
            at, size = position % PAGE, PAGE
        if h < H + KV:
            low, high = halves(x, k_norm, rope, position, rope_length, c, inside, eps, D)
            row = block * KV + h - H
            to, scale = k_cache + (row * size + at) * (D // PARTS) + c, k_scale + row * PARTS * size + at
        else:
            low, high = halves(x, None, None, position, rope_length, c, inside, eps, D)
            row = block * KV + h - H - KV
            to, scale = v_cache + (row * size + at) * (D // PARTS) + c, v_scale + row * PARTS * size + at
        low, high = low.to(dtype).to(tl.float32), high.to(dtype).to(tl.float32)
        low_max, high_max = tl.max(tl.abs(low), 0), tl.max(tl.abs(high), 0)
        if PARTS == 1:
            low_max = tl.maximum(low_max, high_max)
            high_max = low_max
        low = quantised(low, low_max, largest, scale, WHOLE)
        high = quantised(high, high_max, largest, scale + (PARTS - 1) * size, WHOLE)
        if PARTS == 2:
            packed = (low + 8).to(tl.uint8) | ((high + 8).to(tl.uint8) << 4)
            tl.store(to, packed, mask=inside)
        else:
            tl.store(to, low.to(to.dtype.element_ty), mask=inside)
            tl.store(to + half, high.to(to.dtype.element_ty), mask=inside)
