"""Launches attention in fp8 on Hopper, forward only (ops/csrc/ladder/fp8.cu, fa3.cu with OPERANDS_8BIT)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ops import nvrtc
from ops.cuda.call import Call
from ops.cuda.hopper import _mappable, run_forward
from ops.cuda.hopper_tiles import HopperTile

FP8_QUERIES = 64  # that share a scale (fp8_scales.cuh), as the keys of a tile do
V_TILE = 64  # keys that a block transposes of v


@dataclass(frozen=True)
class Fp8Tile(HopperTile):
    """A tile of fa3 whose operands have 8 bits."""

    def shared_bytes(self, head_dim: int) -> int:
        """Q, K and V in 8 bits, O in 16."""
        rows = 64 * self.warp_groups * (self.q_stages + 2) + 2 * self.stages * self.bc
        return self.teams * padded_head_dim(head_dim) * rows

    def scales(self, tq: int, tk: int) -> tuple[int, int]:
        """How many a head of q has, in whole blocks of as many queries as a tile has keys, and one of k."""
        return self.bc // FP8_QUERIES * math.ceil(tq / self.bc), math.ceil(tk / self.bc)

    def defines(self, head_dim: int) -> dict[str, int]:
        width = padded_head_dim(head_dim)
        return super().defines(head_dim) | {"PADDED_D": width, "USED_D": width, "OPERANDS_8BIT": 1}


# Ping-pong at D = 128: 0.94 to 1.05x, e4m3 and int8, T = 4k to 16k, in the mean 0.99x; at D = 256: 0.99 to
# 1.04x, in the mean 1.01x (H200).
_TILES = {
    128: Fp8Tile(2, 192, 3, q_stages=2, ping_pong=False),
    256: Fp8Tile(2, 128, 2, q_stages=1),
}


def padded_head_dim(head_dim: int) -> int:
    """The head dim that tiles have, and the Hadamard transform, which is of a power of two."""
    return next(d for d in _TILES if d >= head_dim)


def scratch_bytes(batch: int, heads: int, kv_heads: int, tq: int, tk: int, head_dim: int) -> int:
    """What a call needs beside its results: q, k and v in 8 bits, and their scales."""
    rows = V_TILE * math.ceil(tk / V_TILE)
    q_blocks, k_blocks = _TILES[padded_head_dim(head_dim)].scales(tq, tk)
    numbers = batch * (heads * tq + kv_heads * (tk + rows)) * padded_head_dim(head_dim)
    return numbers + 4 * batch * (heads * q_blocks + kv_heads * (2 * k_blocks + 1))


def fp8_forward(q: Tensor, k: Tensor, v: Tensor, *options: Any) -> tuple[Tensor, Tensor]:
    """out (B, Hq, Tq, D) in q's dtype and layout and lse (B, Hq, Tq) fp32; options as in ops/library.py, and
    settings = [whether q and k are transformed, whether one scale is for all of q, and of k, whether both are
    integers]."""
    call = Call(*map(_mappable, (q, k, v)), *options)
    hadamard, one_scale, integers = call.settings or (1, 0, 1)
    (batch, heads, tq, head_dim), (kv_heads, tk) = q.shape, k.shape[1:3]
    if batch > 65_535:  # the last axis of a grid
        raise ValueError(f"attention=cuda_fp8 got {batch:,} batch rows; it takes at most 65,535")
    tile, width = _TILES[padded_head_dim(head_dim)], padded_head_dim(head_dim)
    rows, (q_blocks, k_blocks) = V_TILE * math.ceil(tk / V_TILE), tile.scales(tq, tk)
    n_q_scales, n_k_scales = batch * heads * q_blocks, batch * kv_heads * k_blocks
    scratch = q.new_empty(n_q_scales + 2 * n_k_scales + batch * kv_heads, dtype=torch.float32)
    # As TMA has them, pairs of numbers; these lie where a backward has dq, dk and dv.
    q8, k8 = (q.new_empty(batch, h, t, width // 2) for h, t in ((heads, tq), (kv_heads, tk)))
    v8 = q.new_empty(batch, kv_heads, width, rows // 2)
    params = call.params.bind(scratch=scratch, dq=q8, dk=k8, dv=v8)
    blocks = (math.ceil(max(tq, tk) / tile.bc), heads + 2 * kv_heads, batch)

    def launch(name: str, grid: tuple[int, int, int], threads: int, given: int = 0) -> None:
        own = {"INT8": integers, "HADAMARD": int(hadamard), "SCALES_GIVEN": given}
        defines = call.defines | tile.defines(head_dim) | own
        nvrtc.kernel("ladder/fp8.cu", name, defines, q.device).launch(grid, threads, params)

    threads = tile.bc * width // 64
    launch("tilegpt_fp8_rows", blocks, threads)
    if one_scale:  # the largest, by which all are rounded again
        for part in (scratch[:n_q_scales], scratch[n_q_scales : n_q_scales + n_k_scales]):
            part.copy_(part.max())
        launch("tilegpt_fp8_rows", blocks, threads, given=1)
    launch("tilegpt_fp8_values", (rows // V_TILE, kv_heads, batch), 256)
    keys = 64 if tile.bc % 128 else 128  # of a block of v (V_BLOCK), which is pairs of numbers too
    operands = (q8, 64, 64), (k8, tile.bc, 64), (v8, width, keys // 2)
    return run_forward(q, call, tile, operands, INT8=integers)
