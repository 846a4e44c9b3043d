"""Launches the stages of the CUDA ladder on tensor cores: fa1 and fa2 (ops/csrc tells each).

The functions are those of ops/library.py's register_attention; for options and `Call` see there and call.py.
"""

from __future__ import annotations

import functools
import math
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from ops import nvrtc
from ops.cuda.call import PADDED_TO, Call, padded
from ops.cuda.kept_tiles import kept_tiles
from ops.cuda.plain import document_ranges
from ops.library import empty_as, gradients, rows_aligned

_PREPARE_THREADS, _PREPARE_ROWS = 256, 64  # of a block
_FINISH_ROWS = 128  # of a block


@dataclass(frozen=True)
class Tile:
    """Queries and keys of a tile, warps of a block, and blocks that share a multiprocessor, which bounds the
    registers: of the forward and of dQ by itself."""

    br: int
    bc: int
    warps: int
    blocks: int

    def shared_bytes(self, head_dim: int, query_tiles: int = 1) -> int:
        """Q (and dO), and two tiles of K and of V."""
        return 2 * padded(head_dim) * (query_tiles * self.br + 4 * self.bc)


@dataclass(frozen=True)
class BackwardTile:
    """Queries and keys of a tile, warps of a block, stages of Q and dO, and how many warps lie along
    the rows of S and dP, of dK and dV, and of dQ."""

    br: int
    bc: int
    warps: int
    stages: int
    s_row_warps: int
    dkv_row_warps: int
    dq_row_warps: int

    def shared_bytes(self, head_dim: int) -> int:
        """K, V, P, dS, and per stage Q, dO and two numbers a row."""
        row = 2 * padded(head_dim)
        return 2 * self.bc * row + 4 * self.br * self.bc + self.stages * self.br * (2 * row + 8)


@dataclass(frozen=True)
class TeamTile(Tile):
    """Of fa1: `bc` keys are split over the four warps of a team."""

    def shared_bytes(self, head_dim: int, query_tiles: int = 2) -> int:
        """K and V, and per team its tiles of Q, what each warp leaves of 16 rows of O for the other three, in
        fp32, and two numbers a row and warp."""
        row = 2 * padded(head_dim)
        team = query_tiles * self.br * row + 12 * 4 * padded(head_dim) * 4 + 32 * self.br
        return 2 * self.bc * row + self.warps // 4 * team


# By the padded head dim; the first that fits into a block's shared memory (see _BACKWARD).
_FA1 = {
    32: (TeamTile(32, 256, 8, 1),),
    64: (TeamTile(16, 256, 16, 1), TeamTile(32, 128, 8, 1)),
    96: (TeamTile(32, 256, 8, 1), TeamTile(32, 64, 4, 1)),
    128: (TeamTile(32, 256, 8, 1), TeamTile(32, 128, 8, 1), TeamTile(32, 64, 4, 1)),
}
# By the padded head dim.
_FORWARD = {
    32: Tile(128, 64, 4, 2),
    64: Tile(128, 64, 4, 2),
    96: Tile(128, 64, 4, 2),
    128: Tile(128, 64, 4, 2),
}
_DQ = {
    32: Tile(64, 64, 4, 2),
    64: Tile(64, 64, 4, 2),
    96: Tile(64, 64, 4, 2),
    128: Tile(64, 32, 4, 2),
}
# The first that fits into a block's shared memory: 166,912 bytes on sm_80, 101,376 on sm_86 and sm_89.
_BACKWARD = {
    32: (BackwardTile(128, 128, 8, 2, 4, 4, 4), BackwardTile(64, 128, 8, 2, 2, 4, 4)),
    64: (BackwardTile(128, 128, 8, 2, 4, 4, 4), BackwardTile(64, 128, 8, 1, 2, 4, 2)),
    96: (BackwardTile(64, 128, 8, 2, 2, 4, 4), BackwardTile(64, 64, 8, 1, 4, 4, 4)),
    128: (BackwardTile(64, 128, 8, 2, 2, 4, 2), BackwardTile(64, 64, 8, 1, 4, 2, 4)),
}


@functools.cache
def _shared_bytes(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).shared_memory_per_block_optin


def backward_tile(head_dim: int, max_bytes: int) -> BackwardTile:
    """The backward's tile where a block may use `max_bytes` bytes of shared memory."""
    tiles = _BACKWARD[padded(head_dim)]
    # the launch of the last says what is missing
    return next((tile for tile in tiles if tile.shared_bytes(head_dim) <= max_bytes), tiles[-1])


def _aligned(*tensors: Tensor) -> bool:
    """Whether all rows, those beyond the last too, begin at multiples of 16 bytes, as cp.async needs them."""
    return all(x.stride(2) % 8 == 0 and rows_aligned(x) for x in tensors)


def _defines(call: Call, tile: Tile | BackwardTile, *tensors: Tensor) -> dict[str, int | str]:
    """The specialisation of a kernel of this file that reads `tensors`."""
    own = {"ALIGNED": int(_aligned(*tensors)), "SCALE_BEFORE_MAX": call.scale_before_max}
    return call.defines | _tile_defines(tile) | own


@functools.cache
def _tile_defines(tile: Tile | BackwardTile) -> dict[str, int]:
    return {name.upper(): value for name, value in asdict(tile).items()}


def fa1_tile(head_dim: int, max_bytes: int) -> TeamTile:
    """fa1's tile where a block may use `max_bytes` bytes of shared memory."""
    tiles = _FA1[padded(head_dim)]
    return next((tile for tile in tiles if tile.shared_bytes(head_dim) <= max_bytes), tiles[-1])


def fa1_forward(q: Tensor, k: Tensor, v: Tensor, *options: Any) -> tuple[Tensor, Tensor]:
    """As fa2_forward; it reads no settings. Of the options scale and a causal mask only."""
    call = Call(q, k, v, *options)
    return run_fa1(q, k, v, call, fa1_tile(q.shape[3], _shared_bytes(q.device)))


def run_fa1(q: Tensor, k: Tensor, v: Tensor, call: Call, tile: TeamTile) -> tuple[Tensor, Tensor]:
    batch, heads, tq, head_dim = q.shape
    out, lse = empty_as(q), q.new_empty((batch, heads, tq), dtype=torch.float32)
    padded_tq = math.ceil(tq / tile.br) * tile.br
    scratch = q.new_empty((padded(head_dim) + 2) * batch * heads * padded_tq, dtype=torch.float32)
    params = call.params.bind(out=out, lse=lse, scratch=scratch)
    params.padded_tq = padded_tq
    kernel = nvrtc.kernel("ladder/fa1.cu", "tilegpt_fa1_forward", _defines(call, tile, q, k, v), q.device)
    kernel.launch(batch * heads, 32 * tile.warps, params, tile.shared_bytes(head_dim))
    return out, lse


def fa2_forward(q: Tensor, k: Tensor, v: Tensor, *options: Any) -> tuple[Tensor, Tensor]:
    """out (B, Hq, Tq, D) in q's dtype and layout and lse (B, Hq, Tq) fp32; options as in ops/library.py, and
    settings = [deterministic], which the backward reads."""
    call = Call(q, k, v, *options)
    return run_forward(q, k, v, call, _FORWARD[padded(q.shape[3])])


def run_forward(q: Tensor, k: Tensor, v: Tensor, call: Call, tile: Tile) -> tuple[Tensor, Tensor]:
    batch, heads, tq, head_dim = q.shape
    out, lse = empty_as(q), q.new_empty((batch, heads, tq), dtype=torch.float32)
    ranges = document_ranges(call, tile.br)
    params = call.params.bind(out=out, lse=lse, document_bounds=ranges)
    kept = kept_tiles(call, tile.br, tile.bc)  # lives until the launch, as `ranges` does
    params.bind(kept=kept)
    blocks = call.in_order(math.ceil(tq / tile.br), batch * heads, k, times=heads // k.shape[1])
    kernel = nvrtc.kernel("ladder/fa2.cu", "tilegpt_fa2_forward", _defines(call, tile, q, k, v), q.device)
    kernel.launch(blocks, 32 * tile.warps, params, tile.shared_bytes(head_dim))
    return out, lse


def fa2_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, *options: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """dq, dk, dv in the layouts of q, k and v, and nothing for the bias: it has none."""
    *options, _ = options
    call = Call(q, k, v, *options)
    deterministic = bool(call.settings and call.settings[0])
    tile = backward_tile(q.shape[3], _shared_bytes(q.device))
    return run_backward(dout, q, k, v, out, lse, call, tile, deterministic)


def run_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    call: Call,
    tile: BackwardTile,
    deterministic: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    (batch, heads, tq, head_dim), (kv_heads, tk) = q.shape, k.shape[1:3]
    if dout.stride(3) != 1:  # out.sum() sends one number, expanded
        dout = empty_as(out).copy_(dout)
    dq, dk, dv = gradients(q, k, v, call.options)
    padded_tq = math.ceil(tq / PADDED_TO) * PADDED_TO
    n_rows = batch * heads * padded_tq
    numbers = 2 if deterministic else 2 + padded(head_dim)
    scratch = q.new_empty(numbers * n_rows, dtype=torch.float32)
    lse_log2, delta, accumulator = scratch[:n_rows], scratch[n_rows : 2 * n_rows], scratch[2 * n_rows :]
    ranges = document_ranges(call, tile.bc, transposed=True)
    params = call.params.bind(
        dout=dout, out=out, lse=lse, dq=dq, dk=dk, dv=dv, padded_lse=lse_log2, delta=delta
    )
    params.bind(document_bounds=ranges, scratch=None if deterministic else accumulator)
    kept = kept_tiles(call, tile.bc, tile.br, transposed=True)
    params.bind(kept=kept)
    params.padded_tq = padded_tq
    # The accumulator of dQ takes as many bytes as Q and dO: 7% at D = 128, T = 16k, causal, where it counts.
    over = heads // kv_heads * (1 if deterministic else 2)
    n_blocks = call.in_order(math.ceil(tk / tile.bc), batch * kv_heads, q, over=over)
    defines = _defines(call, tile, q, k, v, out, dout) | {"ATOMIC": int(not deterministic)}
    kernel = functools.partial(nvrtc.kernel, "ladder/fa2_backward.cu", defines=defines, device=q.device)
    prepare_backward(call, out, dout, padded(head_dim), clear=not deterministic)
    shared = tile.shared_bytes(head_dim)
    kernel(name="tilegpt_fa2_backward").launch(n_blocks, 32 * tile.warps, params, shared)
    if deterministic:
        _run_dq(q, k, v, dout, call)
    else:
        blocks = math.ceil(n_rows / _FINISH_ROWS)
        kernel(name="tilegpt_fa2_backward_finish").launch(blocks, 256, params)
    return dq, dk, dv, q.new_empty(0)


def prepare_backward(
    call: Call, out: Tensor, dout: Tensor, width: int, clear: bool, states: tuple[int, int] = (0, 0)
) -> None:
    """lse_log2 (the field `padded_lse`) and delta to where `call.params` has them; with `clear` zeros of
    `width` for each row of dQ, and behind these, with `states` (rows of a tile, integers for each), a counter
    and the integers, all 0: see csrc/lib/prepare.cu."""
    params = call.params
    shared = {name: call.defines[name] for name in ("PARAMS_BYTES", "ELEMENT", "HEAD_DIM")}
    own = {"PADDED_D": width, "ALIGNED": int(_aligned(out, dout))}
    own |= {"CLEAR": int(clear), "TILE_ROWS": states[0], "TILE_STATES": states[1]}
    kernel = nvrtc.kernel("lib/prepare.cu", "tilegpt_backward_prepare", shared | own, out.device)
    assert params.padded_tq % _PREPARE_ROWS == 0, params.padded_tq
    blocks = params.batch * params.heads * (params.padded_tq // _PREPARE_ROWS)
    kernel.launch(blocks, _PREPARE_THREADS, params)


def _run_dq(q: Tensor, k: Tensor, v: Tensor, dout: Tensor, call: Call) -> None:
    """dQ by itself, into what `call.params` has for it."""
    (batch, heads, tq, head_dim), params = q.shape, call.params
    tile = _DQ[padded(head_dim)]
    ranges = document_ranges(call, tile.br)
    params.bind(document_bounds=ranges)
    kept = kept_tiles(call, tile.br, tile.bc)
    params.bind(kept=kept)
    blocks = call.in_order(math.ceil(tq / tile.br), batch * heads, k, times=heads // k.shape[1])
    defines = _defines(call, tile, q, k, v, dout)
    kernel = nvrtc.kernel("ladder/fa2_backward_dq.cu", "tilegpt_fa2_backward_dq", defines, q.device)
    shared = tile.shared_bytes(head_dim, query_tiles=2)
    kernel.launch(blocks, 32 * tile.warps, params, shared)
