"""Launches attention in fp8 on Hopper, forward only (ops/csrc/ladder/fp8.cu, and fa3.cu with FP8)."""

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

# Tokens whose numbers share a scale, of q and of k (fp8_scales.cuh); keys that a block transposes of v.
QUERIES, KEYS, VALUES = 64, 128, 64


@dataclass(frozen=True)
class Fp8Tile(HopperTile):
    """A tile of fa3 whose operands have 8 bits; K and V lie in whole rows of 128 bytes."""

    def shared_bytes(self, head_dim: int) -> int:
        """Q, K and V in 8 bits, O in 16."""
        rows = 64 * self.groups * (self.q_slots + 2) + 2 * self.stages * self.bc
        return padded_head_dim(head_dim) * rows

    def defines(self, head_dim: int) -> dict[str, int]:
        width = padded_head_dim(head_dim)
        return super().defines(head_dim) | {"PAD_D": width, "USED_D": width, "FP8": 1}


_TILES = {128: Fp8Tile(2, KEYS, 4, q_slots=2), 256: Fp8Tile(2, KEYS, 2, q_slots=1)}


def padded_head_dim(head_dim: int) -> int:
    """The head dim that tiles have, and the Hadamard transform, which is of a power of two."""
    return next(d for d in _TILES if d >= head_dim)


def scratch_bytes(batch: int, heads: int, kv_heads: int, tq: int, tk: int, head_dim: int) -> int:
    """What a call needs beside its results: q, k and v in 8 bits, and their scales."""
    q_blocks, k_blocks, rows = 2 * math.ceil(tq / KEYS), math.ceil(tk / KEYS), VALUES * math.ceil(tk / VALUES)
    numbers = batch * (heads * tq + kv_heads * (tk + rows)) * padded_head_dim(head_dim)
    return numbers + 4 * batch * (heads * q_blocks + kv_heads * (2 * k_blocks + 1))


def fp8_forward(q: Tensor, k: Tensor, v: Tensor, *options: Any) -> tuple[Tensor, Tensor]:
    """out (B, Hq, Tq, D) in q's dtype and layout and lse (B, Hq, Tq) fp32; options as in ops/library.py, and
    tuning = [whether q and k are transformed, whether one scale is for all of q, and of k, whether both are
    integers]."""
    call = Call(*map(_mappable, (q, k, v)), *options)
    hadamard, one_scale, integers = call.tuning or (1, 0, 0)
    (batch, heads, tq, head_dim), (kv_heads, tk) = q.shape, k.shape[1:3]
    tile, width = _TILES[padded_head_dim(head_dim)], padded_head_dim(head_dim)
    k_blocks, rows = math.ceil(tk / KEYS), VALUES * math.ceil(tk / VALUES)
    of_q, of_k = batch * heads * 2 * math.ceil(tq / KEYS), batch * kv_heads * k_blocks
    scratch = q.new_empty(of_q + 2 * of_k + batch * kv_heads, dtype=torch.float32)
    # As TMA has them, pairs of numbers; these lie where a backward has dq, dk and dv.
    q8, k8 = (q.new_empty(batch, h, t, width // 2) for h, t in ((heads, tq), (kv_heads, tk)))
    v8 = q.new_empty(batch, kv_heads, width, rows // 2)
    params = call.params.bind(scratch=scratch, dq=q8, dk=k8, dv=v8)
    blocks = (max(math.ceil(tq / KEYS), k_blocks), heads + 2 * kv_heads, batch)

    def launch(name: str, grid: tuple[int, int, int], threads: int, given: int = 0) -> None:
        own = {"PAD_D": width, "FP8": 1, "INT8": integers, "HADAMARD": int(hadamard), "GIVEN": given}
        nvrtc.kernel("ladder/fp8.cu", name, call.defines | own, q.device).launch(grid, threads, params)

    launch("tilegpt_fp8_rows", blocks, 2 * width)
    if one_scale:  # the largest, by which all are rounded again
        for part in (scratch[:of_q], scratch[of_q : of_q + of_k]):
            part.copy_(part.max())
        launch("tilegpt_fp8_rows", blocks, 2 * width, given=1)
    launch("tilegpt_fp8_values", (rows // VALUES, kv_heads, batch), 256)
    return run_forward(q, call, tile, ((q8, 64), (k8, tile.bc), (v8, width)), INT8=integers)
