"""Launches csrc/decode/attend_cache.cu: one query a row against an int8 or int4 cache, with the keys split
for the combining kernel of ops/triton/decode.py."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ops import nvrtc
from ops.cache_view import SCALE_DTYPE, CacheView
from ops.cuda.call import ELEMENTS, Params
from ops.options import AttentionOptions


@dataclass(frozen=True)
class BytesTile:
    """Keys of a warp's tile, warps of a block, tiles of a warp's ring, blocks that share a
    multiprocessor."""

    bc: int
    warps: int
    stages: int
    programs: int

    @property
    def n(self) -> int:
        """Keys of a block's tiles: a split has as many, or some of its warps have nothing to do."""
        return self.bc * self.warps

    def shared_bytes(self, of: Mapping[str, Any]) -> int:
        """K and V of `defines`, and a scale of two bytes for each token and part (int4 has two)."""
        token = of["HEAD_DIM"] * of["BITS"] // 4 + (8 if of["BITS"] == 4 else 4)
        return self.warps * self.stages * self.bc * token


KERNEL = "decode/attend_cache.cu", "tilegpt_attend_bytes"
TILES = {"int8": BytesTile(32, 4, 3, 2), "int4": BytesTile(64, 4, 3, 2)}
_POINTERS = "q k v k_scale v_scale table lengths parts statistics"
_STRIDES = "q_b q_h k_n k_h k_t scale_n scale_h scale_p table_b"


class CacheLaunch(ctypes.Structure):
    """struct Launch of csrc/decode/attend_cache.cu, field by field."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in _POINTERS.split()),
        *((name, ctypes.c_longlong) for name in _STRIDES.split()),
        *((name, ctypes.c_int) for name in ("kv_heads", "splits", "window_left")),
        ("scale", ctypes.c_float),
    ]


def reads(q: Tensor, view: CacheView, options: AttentionOptions) -> bool:
    """Whether the kernel computes this call: see its file for the layouts."""
    (k, scale, table), v = view.k, view.v
    if view.k.dtype_name not in TILES or q.shape[2] > 1 or options.alibi_slopes is not None:
        return False
    # int4 with q in fp16: on an H200 the lse was off by 25 to 62 times what the criterion allows.
    dtypes = (torch.bfloat16,) if view.k.dtype_name == "int4" else (torch.bfloat16, torch.float16)
    if options.softcap or q.dtype not in dtypes:
        return False
    multiples_of_16 = [x.data_ptr() for x in (k, v.data, scale, v.scale)]
    for x, size in ((k, 1), (scale, 2), (q, 4)):  # of q, 8 bytes
        multiples_of_16 += [size * x.stride(axis) for axis in range(3) if x.shape[axis] > 1]
    return (
        q.shape[3] == 128
        and q.stride(3) == k.stride(3) == 1  # Triton's kernel refuses any other
        and q.shape[1] // k.shape[1] <= 8
        and k.stride() == v.data.stride()  # K's strides and table are all that `fill` passes
        and view.one_table
        and scale.stride() == v.scale.stride()
        and scale.stride(3) == 1
        and scale.dtype == v.scale.dtype == SCALE_DTYPE  # Triton's kernel reads any
        and (table is None or (k.shape[2] % 16 == 0 and k.shape[0] * k.stride(0) < 2**36))
        and q.data_ptr() % 8 == 0
        and not any(n % 16 for n in multiples_of_16)
    )


def defines(q: Tensor, view: CacheView, options: AttentionOptions, tile: BytesTile) -> dict[str, int | str]:
    """The specialisation for a call."""
    kv_heads, block = view.k.data.shape[1:3]
    return {
        "PARAMS_BYTES": ctypes.sizeof(Params),
        "ELEMENT": ELEMENTS[q.dtype],
        "HEAD_DIM": q.shape[3],
        "HEADS_PER_KV": q.shape[1] // kv_heads,
        "HAS_LEFT": int(options.band[0] >= 0),
        "BITS": 4 if view.k.dtype_name == "int4" else 8,
        "PAGE": 0 if view.k.table is None else block,
        "BC": tile.bc,
        "WARPS": tile.warps,
        "STAGES": tile.stages,
        "BLOCKS": tile.programs,
    }


def fill(
    parts: Tensor,
    statistics: Tensor,
    q: Tensor,
    view: CacheView,
    options: AttentionOptions,
    tile: BytesTile,
) -> None:
    """Fills parts (splits, B, Hq, 1, D) and statistics (2, splits, B, Hq, 1), fp32: unnormalised sums, their
    maxima and totals."""
    (k, k_scale, table), v = view.k, view.v
    kv_heads, splits = k.shape[1], parts.shape[0]
    lengths = view.lengths.contiguous()
    table = None if table is None else table.contiguous()
    table_b = 0 if table is None else table.stride(0)
    tensors = (q, k, v.data, k_scale, v.scale, table, lengths, parts, statistics)
    params = CacheLaunch(
        *(None if x is None else x.data_ptr() for x in tensors),
        *(*q.stride()[:2], *k.stride()[:3], *k_scale.stride()[:3], table_b),
        kv_heads,
        splits,
        min(options.band[0], view.k.shape[2]),
        options.scale,
    )
    made = defines(q, view, options, tile)
    kernel = nvrtc.kernel(*KERNEL, made, q.device)
    kernel.launch(splits * q.shape[0] * kv_heads, 32 * tile.warps, params, tile.shared_bytes(made))
