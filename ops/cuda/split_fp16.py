"""Launches the forward of stage `tiled` on tensor cores: fp32 as two terms of fp16 (split_products.cuh).

The backward is in split_fp16_backward.py; ops/cuda/tiled.py chooses between these and FMA units.
"""

from __future__ import annotations

import functools
import math
from dataclasses import asdict, dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor

from ops.cuda import plain
from ops.cuda.call import Call, Params, padded
from ops.library import empty_as

TERMS = 2
_TENSORS = ("q", "k", "v", "dout")  # whose magnitudes `largest` knows, in this order
# Below, FMA units: to split all of K and V moves four times their bytes, which a large batch would wait for.
# (Not so 32 heads with 8,192 keys, where one query took 0.61 ms by six products and 1.20 by FMA at D = 64.)
FEWEST_QUERIES = 64
_MIN_CAPABILITY = (8, 0)
_MOST_HEAD_DIM = 128
_SPLIT_THREADS, _LARGEST_ROWS = 256, 64
AnyTile = TypeVar("AnyTile")  # of this file or of split_fp16_backward.py


@dataclass(frozen=True)
class Tile:
    """Queries and keys of a tile, warps of a block, how many blocks are to share a multiprocessor, which
    bounds the registers, and how many terms of Q stay in them."""

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
        return 2 * padded(head_dim) * (TERMS * 4 * self.bc + (TERMS - self.held) * self.br)


# By the padded head dim: the first for whose blocks there is room; those behind it were not timed. One H200,
# 32 heads, N = 4096, causal and full, TFLOP/s: D = 64 111, 120 (no term held 113, 116; 64 keys 115, 114; 8
# warps 104, 110; 64 queries 106, 111), D = 128 119, 122 (32 keys 117, 117; 128 queries, 64 keys and 8 warps
# 115, 121), D = 96 107, 115 (8 warps 105, 105), D = 32 96, 100 (32 keys and three blocks 94, 98; 8 warps 83,
# 89).
_FORWARD = {
    32: (Tile(128, 64, 4, 2, 1),),
    64: (Tile(128, 32, 4, 2, 1),),
    96: (Tile(128, 32, 4, 2, 0), Tile(64, 32, 4, 2, 1), Tile(64, 32, 4, 2, 2)),
    128: (Tile(64, 48, 4, 2, 1), Tile(64, 32, 4, 2, 1), Tile(64, 16, 4, 2, 1)),
}


@functools.cache
def shared_bytes_of(device: torch.device) -> int:
    """Bytes of shared memory that a block may use; for tensors on a CPU as on an H200."""
    if device.type == "cpu":
        return plain._SHARED_BYTES
    return torch.cuda.get_device_properties(device).shared_memory_per_block_optin


def first_that_fits(tiles: tuple[AnyTile, ...], head_dim: int, shared_bytes: int) -> AnyTile:
    """Where a block may use `shared_bytes`, the tile for which a multiprocessor has room for as many blocks
    as are to share it; if there is none, for one; or the last, whose launch says what is missing."""
    # A multiprocessor has 1 KiB more than a block may use, and a block costs 1 KiB beside its own
    # (CUDA C++ programming guide, sm_80 to sm_120).
    blocks_of = {each: (shared_bytes + 1024) // (each.shared_bytes(head_dim) + 1024) for each in tiles}
    shared = [each for each in tiles if blocks_of[each] >= each.blocks]
    alone = [each for each in tiles if blocks_of[each]]
    return [*shared, *alone, tiles[-1]][0]


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


def _split_kernel(name: str, call: Call, device: torch.device) -> Any:
    # what else specialises the call says nothing here
    used = ("PARAMS_BYTES", "ELEMENT", "HEAD_DIM", "LENGTHS")
    return plain._kernel("fp32/split_fp16.cu", name, {name: call.defines[name] for name in used}, device)


def largest(call: Call, q: Tensor, k: Tensor, v: Tensor, dout: Tensor | None = None) -> Tensor:
    """The largest finite magnitudes that a key head and its query heads have in q, k, v and dout: (4, B, Hkv)
    fp32, zeros where there is no dout. Keys beyond kv_lengths do not count."""
    (batch, heads, tq), (kv_heads, tk) = q.shape[:3], k.shape[1:3]
    found = q.new_zeros((len(_TENSORS), batch, kv_heads))
    blocks = batch * heads * math.ceil(max(tq, tk) / _LARGEST_ROWS)
    params = call.params.bind(q=q, k=k, v=v, dout=dout, scratch=found)
    grid = (blocks, len(_TENSORS) - (dout is None), 1)
    _split_kernel("tilegpt_largest", call, q.device).launch(grid, _SPLIT_THREADS, params)
    return found


def split(name: str, x: Tensor, found: Tensor, call: Call) -> Tensor:
    """The terms of x (B, H, T, D), which is q, k, v or dout by `name`, in any strides with a contiguous last
    dimension, times powers of two by what `largest` has found: (B, H, T, 2 * padded D) fp16, contiguous,
    zeros beyond D."""
    batch, heads, tokens, head_dim = x.shape
    terms = x.new_empty((batch, heads, tokens, TERMS * padded(head_dim)), dtype=torch.float16)
    params = Params(batch=batch, heads=heads, kv_heads=found.shape[2], tq=tokens)
    params.bind(q=x, out=terms, scratch=found[_TENSORS.index(name)])
    chunks = batch * heads * tokens * padded(head_dim) // 4
    kernel = _split_kernel("tilegpt_split_fp16", call, x.device)
    kernel.launch(math.ceil(chunks / _SPLIT_THREADS), _SPLIT_THREADS, params)
    return terms


def forward(q: Tensor, k: Tensor, v: Tensor, call: Call) -> tuple[Tensor, Tensor]:
    """out (B, Hq, Tq, D) in q's layout and lse (B, Hq, Tq), both fp32."""
    tile = first_that_fits(_FORWARD[padded(q.shape[3])], q.shape[3], shared_bytes_of(q.device))
    return run_forward(q, k, v, call, tile)


def run_forward(q: Tensor, k: Tensor, v: Tensor, call: Call, tile: Tile) -> tuple[Tensor, Tensor]:
    batch, heads, tq, head_dim = q.shape
    out, lse = empty_as(q), q.new_empty(q.shape[:3])
    found = largest(call, q, k, v)
    k, v = split("k", k, found, call), split("v", v, found, call)
    ranges = plain.document_ranges(call, tile.br)
    params = call.params.bind(k=k, v=v, out=out, lse=lse, document_bounds=ranges)
    blocks = call.in_order(math.ceil(tq / tile.br), batch * heads, k, times=heads // k.shape[1])
    own = {"ALIGNED": 1, "EVEN": int(even(q, out)), "SCALE_BEFORE_MAX": call.scale_before_max}
    defines = call.defines | tile.defines | own
    kernel = plain._kernel("fp32/tiled_split_fp16.cu", "tilegpt_tiled_split_fp16_forward", defines, q.device)
    kernel.launch(blocks, 32 * tile.warps, params, tile.shared_bytes(head_dim))
    return out, lse
