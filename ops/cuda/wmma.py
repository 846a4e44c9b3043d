"""Launches stage wmma of the CUDA ladder (csrc/ladder/wmma.cu)."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from ops import nvrtc
from ops.cuda.call import Call, padded
from ops.cuda.tensor_cores import _aligned
from ops.library import empty_as

_WARPS, BC = 4, 64
BR = 16 * _WARPS


def shared_bytes(head_dim: int) -> int:
    """Q, one tile of K or V, and P in 16 bits, S and O in 32; rows are 16 bytes longer than their data."""
    row = padded(head_dim)
    in_16_bits = (BR + BC) * (row + 8) + BR * (BC + 8)
    return 2 * in_16_bits + 4 * BR * (BC + 4 + row + 4)


def wmma_forward(q: Tensor, k: Tensor, v: Tensor, *options: Any) -> tuple[Tensor, Tensor]:
    """out (B, Hq, Tq, D) in q's dtype and layout and lse (B, Hq, Tq) fp32; of the options of ops/library.py
    scale and a causal mask only. It reads no settings."""
    call = Call(q, k, v, *options)
    batch, heads, tq, head_dim = q.shape
    out, lse = empty_as(q), q.new_empty(q.shape[:3], dtype=torch.float32)
    params = call.params.bind(out=out, lse=lse)
    blocks = call.in_order(math.ceil(tq / BR), batch * heads, k, times=heads // k.shape[1])
    own = {"WARPS": _WARPS, "BC": BC, "BLOCKS": 2, "ALIGNED": int(_aligned(q, k, v)), "VECTOR": 0}
    kernel = nvrtc.kernel("ladder/wmma.cu", "tilegpt_wmma_forward", call.defines | own, q.device)
    kernel.launch(blocks, 32 * _WARPS, params, shared_bytes(head_dim))
    return out, lse
