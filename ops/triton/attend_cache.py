"""Launches the kernel of ops/triton/cached.py: the function behind torch.ops.tilegpt.triton_cached."""

from __future__ import annotations

import dataclasses

import torch
import triton
from torch import Tensor

from ops import nvrtc
from ops.cache_view import CacheView
from ops.cuda.attend_cache import TILES, BytesTile, fill, reads
from ops.library import empty_as
from ops.options import AttentionOptions
from ops.order import multiprocessors
from ops.triton.attention import key_splits
from ops.triton.cached import _tilegpt_attend_cache
from ops.triton.common import FP32_PART
from ops.triton.decode import _tilegpt_decode_combine
from ops.triton.interpret import INTERPRETED


@dataclasses.dataclass(frozen=True)
class CacheTile:
    """Rows (queries times heads of a group) and keys of a tile; programs that share a multiprocessor, and
    registers that a thread may take for that many, None for what the compiler takes."""

    m: int
    n: int
    warps: int
    stages: int
    programs: int
    registers: int | None = None


# (stored as, in blocks) -> of one query a row, D up to 128: the fastest of those tried on an H200 with 32k
# tokens, batch 16, D = 128, 32 / 8 heads. One warp needs no barrier, and its numbers change layout sooner.
DECODE_TILES = {
    (None, False): CacheTile(16, 64, 4, 3, 2),  # 0.482 ms
    (None, True): CacheTile(16, 64, 4, 5, 2),  # blocks of 16: 0.492 ms; two of the stages look up blocks
    ("int8", False): CacheTile(16, 16, 1, 4, 8),  # 0.328 ms
    ("int8", True): CacheTile(16, 32, 1, 5, 8),  # 0.383 ms
    ("int4", False): CacheTile(16, 32, 1, 3, 8),  # 0.236 ms
    ("int4", True): CacheTile(16, 64, 4, 5, 3, 168),  # 0.409 ms
    ("fp8", False): CacheTile(16, 64, 4, 3, 3, 168),  # 0.463 ms
    ("fp8", True): CacheTile(16, 64, 4, 5, 3, 168),  # not timed
}


def cache_tile(
    rows: int, bits: int, block_d: int, stored: str | None = None, paged: bool = False
) -> CacheTile:
    """rows: queries times heads of a group; bits: of a number of q; stored: fp8, int8, int4, None for q's."""
    m = min(64, max(16, triton.next_power_of_2(rows)))
    if INTERPRETED:
        return CacheTile(m, 32, 4, 1, 2)
    if bits == 32:
        return CacheTile(min(m, 32), 32, 4, 1, 2)
    if m > 16:
        warps = 8 if m == 64 else 4  # with 4, a chunk's tile spills registers over an int4 cache
        return CacheTile(m, 64 if block_d <= 128 else 32, warps, 2, 2)
    if block_d > 128:
        return CacheTile(m, 32, 4, 5 if paged else 3, 2)
    return DECODE_TILES[stored, paged]


def attend_cache(q: Tensor, view: CacheView, options: AttentionOptions) -> tuple[Tensor, Tensor]:
    """out (B, Hq, Tq, D) in q's dtype and layout, lse (B, Hq, Tq) fp32; normalised options."""
    if _arch(q) == (9, 0) and nvrtc.missing() is None and reads(q, view, options):
        return run(q, view, options, TILES[view.k.dtype_name])
    rows, block_d = q.shape[2] * (q.shape[1] // view.k.data.shape[1]), triton.next_power_of_2(q.shape[3])
    tile = cache_tile(rows, 8 * q.element_size(), block_d, view.k.dtype_name, view.k.table is not None)
    return run(q, view, options, tile)


def _arch(x: Tensor) -> tuple[int, int]:
    return torch.cuda.get_device_capability(x.device) if x.is_cuda else (0, 0)


def run(
    q: Tensor, view: CacheView, options: AttentionOptions, tile: CacheTile | BytesTile
) -> tuple[Tensor, Tensor]:
    """What attend_cache gives, with tiles of Triton's kernel or of the CUDA kernel for bytes."""
    (batch, heads, tq, head_dim), kv_heads = q.shape, view.k.data.shape[1]
    by_bytes = isinstance(tile, BytesTile)
    m_tiles = 1 if by_bytes else triton.cdiv(tq * (heads // kv_heads), tile.m)
    programs, slots = batch * kv_heads * m_tiles, tile.programs * multiprocessors(q.device)
    splits = key_splits(programs, slots, triton.cdiv(view.k.shape[2], tile.n))
    out, lse = empty_as(q), q.new_empty((batch, heads, tq), dtype=torch.float32)
    to, to_lse = out, lse
    if splits > 1 or by_bytes:
        to = q.new_empty((splits, batch, heads, tq, head_dim), dtype=torch.float32)
        to_lse = q.new_empty((2, splits, batch, heads, tq), dtype=torch.float32)
    if by_bytes:
        fill(to, to_lse, q, view, options, tile)
    else:
        _run_triton(to, to_lse, out, q, view, options, tile, splits, m_tiles)
    if to is not out:
        n_rows, pdl = batch * heads * tq, _arch(q) >= (9, 0)
        _tilegpt_decode_combine[(n_rows,)](
            to, to_lse, out, lse, *out.stride()[:3], heads, tq, splits, n_rows, 1.0,
            head_dim, triton.next_power_of_2(head_dim), triton.next_power_of_2(splits), pdl,
            num_warps=4 if splits <= 32 else 8, **({"launch_pdl": True} if pdl else {}),
        )  # fmt: skip
    return out, lse


def _run_triton(
    to: Tensor,
    to_lse: Tensor,
    out: Tensor,
    q: Tensor,
    view: CacheView,
    options: AttentionOptions,
    tile: CacheTile,
    splits: int,
    m_tiles: int,
) -> None:
    """Fills `to` and `to_lse`, the parts, or where splits is 1 the results, with out's strides."""
    (k, k_scale, table), v = view.k, view.v
    (batch, heads, tq, head_dim), (kv_heads, block) = q.shape, k.shape[1:3]
    # of blocks of one token, the last stride of the scales says nothing
    scales = k_scale is None or (
        k_scale.stride() == v.scale.stride() and (k_scale.stride(3) == 1 or block == 1)
    )
    if k.stride() != v.data.stride() or not scales or k.stride(3) != 1 or q.stride(3) != 1:
        raise ValueError(
            f"attention=triton got a cache with strides {k.stride()} and {v.data.stride()}, q {q.stride()}; "
            "it needs keys and values, and their scales, of one layout, and contiguous last dimensions"
        )
    exact, heads_per_kv = q.dtype == torch.float32, heads // kv_heads
    if view.k.dtype_name == "int4":
        part, parts = max(16, triton.next_power_of_2(head_dim // 2)), 2
    else:
        block_d = max(16, triton.next_power_of_2(head_dim))
        part = min(block_d, FP32_PART.value) if exact and k_scale is None else block_d
        parts = block_d // part
    left, right = options.band
    longest = tq + view.k.shape[2]  # beyond it a bound says nothing, and 32 bits hold what is left
    lengths, slopes = view.lengths.contiguous(), options.alibi_slopes
    slopes = None if slopes is None else slopes.contiguous()
    table = None if table is None else table.contiguous()
    softcap = options.finite_softcap
    _tilegpt_attend_cache[(splits * batch * kv_heads * m_tiles,)](
        q, k, v.data, k_scale, v.scale, table, lengths, slopes, to, to_lse,
        *q.stride()[:3], *k.stride()[:3], *((0, 0, 0) if k_scale is None else k_scale.stride()[:3]),
        0 if table is None else table.stride(0), *out.stride()[:3],
        kv_heads, tq, splits, m_tiles, min(left, longest), min(right, longest), options.scale, softcap,
        heads_per_kv, head_dim, part, parts, 0 if table is None else block, tile.m, tile.n,
        HAS_LEFT=left >= 0, HAS_RIGHT=right >= 0, SOFTCAP=(softcap > 0) + (softcap > 64),
        EXACT=exact, SPLIT=splits > 1, PDL=splits > 1 and _arch(q) >= (9, 0), num_warps=tile.warps,
        num_stages=tile.stages, maxnreg=tile.registers,
    )  # fmt: skip
