"""Launches the forward of stage `tiled` on tensor cores: fp32 as planes of bf16 (csrc/planes.cuh tells how).

The backward is in planes_backward.py; ops/cuda/tiled.py chooses between these and FMA units.
"""

from __future__ import annotations

import functools
import math
from dataclasses import asdict, dataclass
from typing import TypeVar

import torch
from torch import Tensor

from ops.cuda import plain
from ops.cuda.call import Call, Params, padded
from ops.library import empty_as

PLANES = 3
# Below, FMA units: to split all of K and V moves four times their bytes, which a large batch would wait for.
# (Not so 32 heads with 8,192 keys, where one query takes 0.61 ms by planes and 1.20 by FMA at D = 64.)
FEWEST_QUERIES = 64
_MIN_CAPABILITY = (8, 0)
_MOST_HEAD_DIM = 128
_SPLIT_THREADS = 256
AnyTile = TypeVar("AnyTile")  # of this file or of planes_backward.py


@dataclass(frozen=True)
class Tile:
    """Queries and keys of a tile, warps of a block, how many blocks are to share a multiprocessor, which
    bounds the registers, and how many planes of Q stay in them."""

    br: int
    bc: int
    warps: int
    blocks: int
    held: int

    @property
    def defines(self) -> dict[str, int]:
        return {name.upper(): value for name, value in asdict(self).items()}

    def shared_bytes(self, head_dim: int) -> int:
        """Two tiles of K and of V, and what is not held of Q."""
        return 2 * padded(head_dim) * (PLANES * 4 * self.bc + (PLANES - self.held) * self.br)


# By the padded head dim: the first that fits into a block's shared memory. One H200, 32 heads, N = 4096,
# causal and full, TFLOP/s: D = 64 68.6, 72.6 (one plane held 67.3, 70.4; 256 queries and one block 63.1,
# 69.3; 8 warps, 64 keys and two planes held 63.4, 65.6; 12 warps 58), D = 128 63.9, 67.7 (none held 62.8,
# 67.7; two 64.0, 65.7; 16 keys 61.3, 63.0; 4 warps of two row tiles 49.3, 50.0).
_FORWARD = {
    32: (Tile(128, 64, 8, 1, 3),),
    64: (Tile(128, 32, 4, 2, 0),),
    96: (Tile(128, 32, 8, 1, 3),),
    128: (Tile(128, 32, 8, 1, 1), Tile(128, 16, 8, 1, 2)),
}


@functools.cache
def able(device: torch.device) -> int:
    """Bytes of shared memory that a block may use; for tensors on a CPU as on an H200."""
    if device.type == "cpu":
        return plain._SHARED_BYTES
    return torch.cuda.get_device_properties(device).shared_memory_per_block_optin


def first_that_fits(tiles: tuple[AnyTile, ...], head_dim: int, shared_bytes: int) -> AnyTile:
    """The tile where a block may use `shared_bytes`; the launch of the last says what is missing."""
    return next((each for each in tiles if each.shared_bytes(head_dim) <= shared_bytes), tiles[-1])


@functools.cache
def _has_tensor_cores(device: torch.device) -> bool:
    return torch.cuda.get_device_capability(device) >= _MIN_CAPABILITY


def usable(q: Tensor) -> bool:
    """Whether a call on these queries is one for these kernels: fp32, sm_80 and newer, and queries enough."""
    fits = q.dtype == torch.float32 and q.shape[3] <= _MOST_HEAD_DIM and q.shape[2] >= FEWEST_QUERIES
    return fits and q.is_cuda and _has_tensor_cores(q.device)


def even(*tensors: Tensor) -> bool:
    """Whether all rows begin at multiples of two fp32 numbers and have a whole number of such pairs."""
    return all(
        x.data_ptr() % 8 == 0
        and x.shape[3] % 2 == 0
        and all(n == 1 or stride % 2 == 0 for n, stride in zip(x.shape[:3], x.stride()[:3], strict=True))
        for x in tensors
    )


def split(x: Tensor, call: Call) -> Tensor:
    """The planes of x (B, H, T, D), in any strides with a contiguous last dimension: (B, H, T, 3 * padded D)
    bf16, contiguous, zeros beyond D."""
    batch, heads, tokens, head_dim = x.shape
    planes = x.new_empty((batch, heads, tokens, PLANES * padded(head_dim)), dtype=torch.bfloat16)
    params = Params(batch=batch, heads=heads, tq=tokens).bind(q=x, scratch=planes)
    # what else specialises the call says nothing here
    defines = {name: call.defines[name] for name in ("PARAMS_BYTES", "ELEMENT", "HEAD_DIM")}
    kernel = plain._kernel("planes.cu", "tilegpt_planes", defines, x.device)
    chunks = batch * heads * tokens * padded(head_dim) // 4
    kernel.launch(math.ceil(chunks / _SPLIT_THREADS), _SPLIT_THREADS, params)
    return planes


def forward(q: Tensor, k: Tensor, v: Tensor, call: Call) -> tuple[Tensor, Tensor]:
    """out (B, Hq, Tq, D) in q's layout and lse (B, Hq, Tq), both fp32."""
    tile = first_that_fits(_FORWARD[padded(q.shape[3])], q.shape[3], able(q.device))
    return run_forward(q, k, v, call, tile)


def run_forward(q: Tensor, k: Tensor, v: Tensor, call: Call, tile: Tile) -> tuple[Tensor, Tensor]:
    batch, heads, tq, head_dim = q.shape
    out, lse = empty_as(q), q.new_empty(q.shape[:3])
    k, v = split(k, call), split(v, call)
    ranges = plain.segment_ranges(call, tile.br)
    params = call.params.bind(k=k, v=v, out=out, lse=lse, ranges=ranges)
    blocks = call.in_order(math.ceil(tq / tile.br), batch * heads, k, times=heads // k.shape[1])
    scale_first = call.defines["SOFTCAP"] or call.defines["ALIBI"] or call.params.scale <= 0
    own = {"ALIGNED": 1, "EVEN": int(even(q, out)), "SCALE_FIRST": int(bool(scale_first))}
    defines = call.defines | tile.defines | own
    kernel = plain._kernel("tiled_planes.cu", "tilegpt_tiled_planes_forward", defines, q.device)
    kernel.launch(blocks, 32 * tile.warps, params, tile.shared_bytes(head_dim))
    return out, lse
