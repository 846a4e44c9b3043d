"""Launches the stage of the CUDA ladder that is for Hopper alone: fa3 (ops/csrc/ladder/fa3.cu tells it).

The functions are those of ops/library.py's register_attention; for options and `Call` see there and call.py.
"""

from __future__ import annotations

import ctypes
import functools
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ops import nvrtc
from ops.cuda.call import Call, Params
from ops.cuda.hopper_tiles import (
    HopperBackwardTile,
    HopperTile,
    backward_columns,
    backward_head_dim,
    backward_tile,
    by_query_head,
    forward_tile,
    stores_first_dq,
)
from ops.cuda.kept_tiles import kept_tiles
from ops.cuda.plain import document_ranges
from ops.cuda.tensor_cores import fa2_backward, prepare_backward
from ops.library import empty_as, gradients, rows_aligned
from ops.order import multiprocessors

_MAP_BYTES = 128
_OF_A_LAUNCH = {"BOUNDED_WAITS": 0, "PERSISTENT": 1, "EARLY_LAUNCH": 1}


class Launch(ctypes.Structure):
    """struct Launch of csrc/ladder/fa3_tiles.cuh; the driver copies whole multiples of 64 bytes."""

    _fields_ = [
        ("maps", ctypes.c_ubyte * (4 * _MAP_BYTES)),
        ("params", Params),
        ("tile_counter", ctypes.c_void_p),
        ("_", ctypes.c_ubyte * 64),
    ]


def tensor_map(x: Tensor, rows: int, columns: int = 64) -> bytes:
    """What TMA has to know to copy boxes of `rows` tokens and `columns` of x (B, H, T, D)."""
    return _tensor_map(x.data_ptr(), x.dtype, tuple(x.shape), tuple(x.stride()), rows, columns)


@functools.lru_cache(maxsize=4096)  # encoding takes longer than a look-up, and addresses come again
def _tensor_map(
    address: int,
    dtype: torch.dtype,
    shape: tuple[int, ...],
    strides: tuple[int, ...],
    rows: int,
    columns: int,
) -> bytes:
    from cuda.bindings import driver

    sizes = shape[::-1]
    # in bytes, of t, h and b; that of a dimension of 1 says nothing, and may be anything
    steps = [2 * stride if n > 1 else 16 for n, stride in zip(shape[2::-1], strides[2::-1], strict=True)]
    kind, swizzle = driver.CUtensorMapDataType, driver.CUtensorMapSwizzle
    status, made = driver.cuTensorMapEncodeTiled(
        getattr(kind, f"CU_TENSOR_MAP_DATA_TYPE_{'BFLOAT16' if dtype == torch.bfloat16 else 'FLOAT16'}"),
        len(sizes),
        address,
        [driver.cuuint64_t(n) for n in sizes],
        [driver.cuuint64_t(step) for step in steps],
        [driver.cuuint32_t(n) for n in (columns, rows, 1, 1)],
        [driver.cuuint32_t(1)] * len(sizes),
        driver.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE,
        getattr(swizzle, f"CU_TENSOR_MAP_SWIZZLE_{2 * columns}B"),
        driver.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
        driver.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
    )
    if status:
        raise nvrtc.CudaError(
            f"no tensor map for {dtype} {shape} with strides {strides} at {address:#x}: {status.name}"
        )
    return ctypes.string_at(made.getPtr(), _MAP_BYTES)


def _mappable(x: Tensor) -> Tensor:
    """x, or a copy whose rows begin at multiples of 16 bytes, with no stride of 0, as TMA needs them."""
    b, h, t, _ = x.stride()
    repeats = b * h * t == 0 and any(
        n > 1 and not stride for n, stride in zip(x.shape, (b, h, t), strict=False)
    )
    return x if rows_aligned(x) and not repeats else x.clone(memory_format=torch.contiguous_format)


def fa3_forward(q: Tensor, k: Tensor, v: Tensor, *options: Any) -> tuple[Tensor, Tensor]:
    """out (B, Hq, Tq, D) in q's dtype and layout and lse (B, Hq, Tq) fp32; options as in ops/library.py, and
    settings = [deterministic], which the backward reads."""
    call = Call(*map(_mappable, (q, k, v)), *options)
    return run_forward(q, call, forward_tile(q.shape[3], k.shape[2], call.defines))


def forward_defines(call: Call, tile: HopperTile, head_dim: int) -> dict[str, int | str]:
    """Those of fa3.cu."""
    own = {"ALIGNED": 1, "SCALE_BEFORE_MAX": call.scale_before_max, "INTRA_GROUP_OVERLAP": 1}
    return call.defines | tile.defines(head_dim) | own | _OF_A_LAUNCH


def run_forward(
    q: Tensor, call: Call, tile: HopperTile, operands: Sequence[tuple[Tensor, int, int]] = (), **defines: int
) -> tuple[Tensor, Tensor]:
    """`call` with `tile`, its results as q (B, Hq, Tq, D) is laid out; `operands`: what TMA copies in the
    place of q, k and v, and how many rows and columns at a time; `defines` of fa3.cu beside its own."""
    q_mapped, k, v = call.tensors[:3]
    batch, heads, tq, head_dim = q.shape
    out, lse = empty_as(q), q.new_empty((batch, heads, tq), dtype=torch.float32)
    rows = 64 * tile.warp_groups
    # All live until the launch: the parameters hold addresses. A zero of the launch's own: one that is kept
    # from call to call would lie in whatever memory pool or graph it was first asked for in. With a block
    # mask kept_tiles writes it, which is a launch less.
    ranges = document_ranges(call, rows)
    params = call.params.bind(out=out, lse=lse, document_bounds=ranges)
    make = q.new_zeros if call.block_mask is None else q.new_empty
    counter = make(1, dtype=torch.int32)
    kept = kept_tiles(call, rows, tile.bc, counter=counter)
    params.bind(kept=kept)
    blocks = call.in_order(
        math.ceil(tq / rows), batch * heads, k, times=heads // k.shape[1], blocks=tile.teams
    )
    launch = Launch(params=params, tile_counter=counter.data_ptr())
    # (a launch has bound torch's context to this thread, which encoding a map needs)
    specialised = forward_defines(call, tile, head_dim) | defines
    columns = 32 if specialised["PADDED_D"] % 64 else 64  # of a box (hopper.cuh)
    boxes = operands or ((q_mapped, 64, columns), (k, tile.bc, columns), (v, tile.bc, columns))
    maps = (tensor_map(*box) for box in (*boxes, (out, 64, columns)))
    ctypes.memmove(launch.maps, b"".join(maps), 4 * _MAP_BYTES)
    kernel = nvrtc.kernel("ladder/fa3.cu", "tilegpt_fa3_forward", specialised, q.device)
    # A block a tile, while there are multiprocessors for it: a team without a tile ends at once.
    grid = math.ceil(blocks / tile.teams)
    if specialised["PERSISTENT"]:
        grid = min(blocks, multiprocessors(q.device))
    early, threads = bool(specialised["EARLY_LAUNCH"]), 128 * (tile.teams * tile.warp_groups + 1)
    kernel.launch(grid, threads, launch, tile.shared_bytes(head_dim), early)
    return out, lse


class BackwardLaunch(ctypes.Structure):
    """struct Launch of csrc/ladder/fa3_backward_tiles.cuh."""

    _fields_ = [
        ("maps", ctypes.c_ubyte * (6 * _MAP_BYTES)),
        ("params", Params),
        ("tile_counter", ctypes.c_void_p),
        ("dq_states", ctypes.c_void_p),
        ("_", ctypes.c_ubyte * 64),
    ]


def fa3_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, *options: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """dq, dk, dv in the layouts of q, k and v, and nothing for the bias: it has none."""
    *of_call, _ = options
    call = Call(*map(_mappable, (q, k, v)), *of_call)
    if call.settings and call.settings[0]:  # deterministic: here dQ is added up in any order
        return fa2_backward(dout, q, k, v, out, lse, *options)
    tile = backward_tile(q.shape[3], call.defines)
    has = (bool(call.defines[name]) for name in ("DOCUMENT_IDS", "BLOCK_MASK"))
    growing = call.options.causal and call.growing  # (as attention/cuda.py knows it)
    split = by_query_head(*q.shape[2:], q.shape[1] // k.shape[1], growing, *has)
    return run_backward(dout, q, k, v, out, lse, call, tile, split)


def run_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    call: Call,
    tile: HopperBackwardTile,
    split: bool = False,
    **defines: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """`call` with `tile`; `defines` of fa3_backward.cu beside its own. `split`: see `by_query_head`."""
    (batch, heads, tq, head_dim), (kv_heads, tk) = q.shape, k.shape[1:3]
    # out.sum() sends one number, expanded
    dout = _mappable(dout if dout.stride(3) == 1 else empty_as(out).copy_(dout))
    dq, dk, dv = gradients(q, k, v, call.options)
    written = dk, dv
    own = _OF_A_LAUNCH | {"SCALE_BEFORE_MAX": 0, "DKV_EXPANSION": 1, "SKIPS": 1, "BEGINS_LATER": 1}
    own["STORES_FIRST_DQ"] = int(stores_first_dq(tk, head_dim, call.defines))
    if split:
        written = q.new_empty((2, batch, heads, tk, head_dim)).unbind()
        own |= {"HEADS_PER_KV": 1, "DKV_EXPANSION": heads // kv_heads}
        kv_heads = call.params.kv_heads = heads
    tiles, width = math.ceil(tq / tile.br), backward_head_dim(head_dim)
    n_rows = batch * heads * tiles * tile.br
    specialised = call.defines | tile.defines(head_dim) | own | defines
    parts = tile.warp_groups * (2 if width > 128 else 1)  # of a tile of dQ, DQ_TILE_CHUNKS
    states = parts * specialised["STORES_FIRST_DQ"]
    scratch = q.new_empty((2 + width) * n_rows + 1 + states * batch * heads * tiles, dtype=torch.float32)
    lse_log2, delta, accumulator = scratch[:n_rows], scratch[n_rows : 2 * n_rows], scratch[2 * n_rows :]
    params = call.params.bind(dout=dout, out=out, lse=lse, dq=dq, padded_lse=lse_log2, delta=delta)
    ranges = document_ranges(call, tile.bc, transposed=True)  # lives until the launch
    params.bind(scratch=accumulator, document_bounds=ranges)
    params.padded_tq = tiles * tile.br
    over = 2 * heads // kv_heads  # with the accumulator of dQ
    blocks = call.in_order(math.ceil(tk / tile.bc), batch * kv_heads, q, over=over, blocks=1)
    early, threads = bool(specialised["EARLY_LAUNCH"]), 128 * (tile.warp_groups + 1)
    prepare_backward(call, out, dout, width, clear=not states, states=(tile.br, states))
    kept = kept_tiles(call, tile.bc, tile.br, transposed=True, early=early)
    params.bind(kept=kept)
    counter = accumulator.data_ptr() + 4 * n_rows * width
    launch = BackwardLaunch(params=params, tile_counter=counter, dq_states=counter + 4)
    mapped = (*call.tensors[:3], dout, *written)
    stored = tile.bc if tile.warp_groups == 3 else 64  # rows of dK and dV at a time
    boxes = zip(mapped, (tile.br, tile.bc, tile.bc, tile.br, stored, stored), strict=True)
    maps = (tensor_map(x, rows, backward_columns(head_dim)) for x, rows in boxes)
    ctypes.memmove(launch.maps, b"".join(maps), 6 * _MAP_BYTES)
    kernel = functools.partial(nvrtc.kernel, "ladder/fa3_backward.cu", defines=specialised, device=q.device)
    grid = min(blocks, multiprocessors(q.device)) if specialised["PERSISTENT"] else blocks
    kernel(name="tilegpt_fa3_backward").launch(grid, threads, launch, tile.shared_bytes(head_dim), early)
    threads = tile.br * width // parts // 16  # 16 numbers each
    blocks = parts * batch * heads * tiles
    kernel(name="tilegpt_fa3_backward_finish").launch(blocks, threads, params, early=early)
    if split:
        for of_heads, summed in zip(written, (dk, dv), strict=True):
            torch.sum(of_heads.unflatten(1, (k.shape[1], -1)), 2, out=summed)
    return dq, dk, dv, q.new_empty(0)
