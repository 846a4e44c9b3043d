"""Products with GELU, or its gradient, in the epilogue: cublasLt of the CUDA libraries that torch has loaded,
called as it is, as torch calls it for plain products. Nothing is built, and nothing else is needed.

cublasLt's matrices are in columns: the rows of a row-major matrix are the columns of its transpose, so that
out = a @ b is asked for as out^T = b^T @ a^T.
"""

from __future__ import annotations

import ctypes
import functools
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

# cublasLt.h and library_types.h
_TYPES = {torch.float32: 0, torch.float16: 2, torch.bfloat16: 14}
_COMPUTE_32F = 68
_TRANSA, _EPILOGUE, _BIAS, _AUX, _AUX_LD = 3, 7, 8, 11, 12  # attributes of a product
_MOST_WORKSPACE = 1  # of a preference
_TILE, _CLUSTER = 1, 8  # of an algorithm
_GELU_AUX, _WITH_BIAS, _DGELU = 160, 4, 192
_WORKSPACE_BYTES = 32 * 2**20  # what NVIDIA advises for Hopper
_ALIGNED = 256  # bytes: what the heuristics take for granted
# Preferred on Hopper among the heuristics' first _CANDIDATES: tiles of 128 x 128 in clusters of 2 x 1. Times
# of a call on an H100, its launch by the host included, in bf16 without a bias, in us, with it and with the
# heuristics' first:
#                                   GELU           its gradient
#     16,384 x 1,536, k = 384       101, 105       120, 128
#     65,536 x 3,072, k = 768       572, 623       626, 647
#     16,384 x 6,400, k = 1,600     538, 564       574, 580
# Smaller results, which were not measured, get the first.
_CANDIDATES, _PREFERRED, _LEAST_RESULTS = 8, (20, 3), 16384 * 1536


class _Heuristic(ctypes.Structure):
    """cublasLtMatmulHeuristicResult_t."""

    _fields_ = [
        ("algo", ctypes.c_uint64 * 8),
        ("workspace_bytes", ctypes.c_size_t),
        ("state", ctypes.c_int),
        ("waves", ctypes.c_float),
        ("reserved", ctypes.c_int * 4),
    ]


@functools.cache
def _library() -> ctypes.CDLL | None:
    """None where torch brings no cublasLt, or one of another name."""
    major = (torch.version.cuda or "").split(".")[0]
    for name in (f"libcublasLt.so.{major}", f"cublasLt64_{major}.dll"):
        try:
            return ctypes.CDLL(name)
        except OSError:
            continue
    return None


def available() -> bool:
    return _library() is not None


def _call(function: str, *args: Any) -> None:
    if status := getattr(_library(), function)(*args):
        raise RuntimeError(f"{function} failed: cublasStatus_t {status}")


@functools.cache
def _handle(device: int) -> ctypes.c_void_p:
    """Of the current device, which is `device`."""
    handle = ctypes.c_void_p()
    _call("cublasLtCreate", ctypes.byref(handle))
    return handle


def _set(descriptor: ctypes.c_void_p, attribute: int, value: Any) -> None:
    _call(
        "cublasLtMatmulDescSetAttribute",
        descriptor,
        attribute,
        ctypes.byref(value),
        ctypes.c_size_t(ctypes.sizeof(value)),
    )


@dataclass(frozen=True)
class _Product:
    """out (m, n) = epilogue(a (m, k) @ b), b (n, k) where `transposed`, else (k, n)."""

    m: int
    n: int
    k: int
    transposed: bool
    epilogue: int
    dtype: torch.dtype
    device: int


class _Plan:
    """What a product needs again and again: its layouts, and the algorithm that the heuristics choose."""

    def __init__(self, product: _Product):
        p, kind = product, _TYPES[product.dtype]
        shapes = ((p.k, p.n) if p.transposed else (p.n, p.k)), (p.k, p.m), (p.n, p.m)
        self.layouts = [ctypes.c_void_p() for _ in shapes]
        for layout, (rows, columns) in zip(self.layouts, shapes, strict=True):
            size, across = ctypes.c_uint64(rows), ctypes.c_uint64(columns)
            _call(
                "cublasLtMatrixLayoutCreate", ctypes.byref(layout), kind, size, across, ctypes.c_int64(rows)
            )
        self.descriptor = ctypes.c_void_p()
        _call("cublasLtMatmulDescCreate", ctypes.byref(self.descriptor), _COMPUTE_32F, _TYPES[torch.float32])
        _set(self.descriptor, _TRANSA, ctypes.c_int32(p.transposed))
        _set(self.descriptor, _EPILOGUE, ctypes.c_uint32(p.epilogue))
        _set(self.descriptor, _AUX_LD, ctypes.c_int64(p.n))
        self._choose(p)

    def _choose(self, product: _Product) -> None:
        preference, count = ctypes.c_void_p(), ctypes.c_int()
        found = (_Heuristic * _CANDIDATES)()
        _call("cublasLtMatmulPreferenceCreate", ctypes.byref(preference))
        workspace_bytes = ctypes.c_uint64(_WORKSPACE_BYTES)
        _call(
            "cublasLtMatmulPreferenceSetAttribute",
            preference,
            _MOST_WORKSPACE,
            ctypes.byref(workspace_bytes),
            ctypes.c_size_t(8),
        )
        b, a, out = self.layouts
        _call(
            "cublasLtMatmulAlgoGetHeuristic",
            _handle(product.device), self.descriptor, b, a, out, out, preference, _CANDIDATES,
            found, ctypes.byref(count),
        )  # fmt: skip
        _call("cublasLtMatmulPreferenceDestroy", preference)
        able = [candidate for candidate in found[: count.value] if not candidate.state]
        if not able:
            raise RuntimeError(f"cublasLt has no algorithm for {product}")
        self.found = able[0]
        hopper = torch.cuda.get_device_capability(product.device) == (9, 0)
        if hopper and product.m * product.n >= _LEAST_RESULTS:
            self.found = next((each for each in able if _shape(each) == _PREFERRED), able[0])


def _shape(candidate: _Heuristic) -> tuple[int, int]:
    """The numbers that stand for an algorithm's tile and cluster; 0 where it has none."""
    tile, cluster, written = ctypes.c_uint32(), ctypes.c_uint16(), ctypes.c_size_t()
    for attribute, value in ((_TILE, tile), (_CLUSTER, cluster)):
        with suppress(RuntimeError):
            _call(
                "cublasLtMatmulAlgoConfigGetAttribute",
                ctypes.byref(candidate.algo),
                attribute,
                ctypes.byref(value),
                ctypes.c_size_t(ctypes.sizeof(value)),
                ctypes.byref(written),
            )
    return tile.value, cluster.value


_plan = functools.cache(_Plan)


def _aligned(x: Tensor) -> Tensor:
    x = x.contiguous()
    return x if x.data_ptr() % _ALIGNED == 0 else x.clone()


def _multiply(
    a: Tensor, b: Tensor, transposed: bool, epilogue: int, bias: Tensor | None, aux: Tensor
) -> Tensor:
    with torch.cuda.device(a.device):
        (m, k), n = a.shape, b.shape[0 if transposed else 1]
        a, b = _aligned(a), _aligned(b)
        out = a.new_empty(m, n)
        plan = _plan(_Product(m, n, k, transposed, epilogue, a.dtype, a.device.index))
        for attribute, tensor in ((_BIAS, bias), (_AUX, aux)):
            if tensor is not None:
                _set(plan.descriptor, attribute, ctypes.c_void_p(tensor.data_ptr()))
        workspace = a.new_empty(plan.found.workspace_bytes, dtype=torch.uint8)
        one, zero = ctypes.c_float(1), ctypes.c_float(0)
        b_layout, a_layout, out_layout = plan.layouts
        _call(
            "cublasLtMatmul",
            _handle(a.device.index), plan.descriptor,
            ctypes.byref(one), _address(b), b_layout, _address(a), a_layout,
            ctypes.byref(zero), _address(out), out_layout, _address(out), out_layout,
            ctypes.byref(plan.found.algo), _address(workspace), ctypes.c_size_t(workspace.numel()),
            ctypes.c_void_p(torch.cuda.current_stream().cuda_stream),
        )  # fmt: skip
    return out


def _address(x: Tensor) -> ctypes.c_void_p:
    return ctypes.c_void_p(x.data_ptr())


def linear_gelu(x: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
    """gelu(h) by tanh and h, (n, hidden) each, of h = x (n, C) @ weight (hidden, C)^T + bias."""
    h = x.new_empty(len(x), len(weight))
    return _multiply(x, weight, True, _GELU_AUX | _WITH_BIAS * (bias is not None), bias, h), h


def dgelu_product(dy: Tensor, weight: Tensor, h: Tensor) -> Tensor:
    """(dy (n, C) @ weight (C, hidden)) * gelu'(h), (n, hidden)."""
    return _multiply(dy, weight, False, _DGELU, None, _aligned(h))
