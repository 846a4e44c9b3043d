"""Products with GELU, its gradient or an addition in the epilogue, and plain ones for which another algorithm
than cuBLAS' choice is faster: by cublasLt of the CUDA libraries that torch has loaded, called as torch does.
Nothing is built, and nothing else is needed.

cublasLt's matrices are in columns: the rows of a row-major matrix are the columns of its transpose, so that
out = a @ b is asked for as out^T = b^T @ a^T.
"""

from __future__ import annotations

import ctypes
import functools
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

# cublasLt.h and library_types.h
_TYPES = {torch.float32: 0, torch.float16: 2, torch.bfloat16: 14}
_SHORT = torch.float16, torch.bfloat16
_COMPUTE_32F = 68
_TRANSA, _EPILOGUE, _BIAS, _AUX, _AUX_LD = 3, 7, 8, 11, 12  # attributes of a product
_MOST_WORKSPACE = 1  # of a preference
_TILE, _CLUSTER = 1, 8  # of an algorithm
_PLAIN, _WITH_BIAS, _GELU_AUX, _DGELU = 1, 4, 160, 192  # a bias: 4 alone, or with _GELU_AUX
_WITH_AUX = _GELU_AUX, _DGELU
_WORKSPACE_BYTES = 32 * 2**20  # what NVIDIA advises for Hopper
_ALIGNED = 256  # bytes: what the heuristics take for granted
_CANDIDATES = 8  # of the heuristics, best first by their estimate
FEWEST_ROWS = 32768  # of an input for which an algorithm other than cuBLAS' choice is known to be faster
# Tiles and clusters by cublasLt's numbers: 20 is 128 x 128, 29 is 128 x 160, 197 and 201 are 168 x 128.
_128_X_128, _128_X_160, _OF_THE_HEAD = ((20, 3),), ((29, 3),), ((197, 5), (201, 5))
_OF_DGELU = (20, 5), (20, 3)


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


def _preferred(product: _Product) -> tuple[tuple[int, int], ...]:
    """Tiles and clusters, best first, of the algorithms that replace the heuristics' first. Speed
    relative to that, in bf16 without a bias, on an H200 that works for 0.03 to 0.15 s at a time, and so at
    its limit of power:

    Plain products (m x n, k), tiles of 128 x 160: 65,536 x 768 and 2,304, k = 768 to 3,072: 1.04 to 1.17x;
    32,768 x 1,024 to 3,840, k = 1,024 to 3,840: 1.00 to 1.06x. Not taken for k = 4,096 and 5,120, 0.98 to
    1.02x, and for 16,384 rows, 0.88 to 1.04x.
    The head, n = 50,304, m = 8,192 and 16,384, k = 768 to 1,600: 1.03 to 1.14x.
    With GELU, n = 4 k: 65,536 x 3,072 1.04x; 32,768 x 4,096 1.13x; 16,384 x 6,400 0.99x (H100: 1.05x).
    With its gradient: 65,536 x 3,072 1.01x; 32,768 x 2,560 to 5,120 1.04 to 1.08x, and 1.60x where n = 4,096;
    16,384 x 1,536 to 6,400 1.01 to 1.12x; not taken for 16,384 x 8,192, 0.98x."""
    p = product
    if torch.cuda.get_device_capability(p.device) != (9, 0):
        return ()
    if p.epilogue & ~_WITH_BIAS == _GELU_AUX:
        return _128_X_128 if p.m * p.n >= 16384 * 1536 else ()
    if p.epilogue == _DGELU:
        return _OF_DGELU if p.m * p.n >= 16384 * 1536 and p.k < 2048 else ()
    if p.n >= 32768:
        return _OF_THE_HEAD if p.transposed and p.m >= 8192 and p.k <= 2048 else ()
    return _128_X_160 if p.m >= FEWEST_ROWS and 768 <= min(p.n, p.k) and max(p.n, p.k) < 4096 else ()


class _Plan:
    """What a product needs again and again: its layouts, and the algorithm that is chosen."""

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
        if p.epilogue & ~_WITH_BIAS in _WITH_AUX:
            _set(self.descriptor, _AUX_LD, ctypes.c_int64(p.n))
        self._choose(p)

    def _choose(self, product: _Product) -> None:
        self.proposed = able = self._proposed(product)
        if not able:
            raise RuntimeError(f"cublasLt has no algorithm for {product}")
        wanted = _preferred(product)
        if product.epilogue == _DGELU and wanted and len(able) < _CANDIDATES:
            able = able + self._borrowed(product)
        by_shape = {_shape(candidate): candidate for candidate in reversed(able)}
        self.found = next((by_shape[shape] for shape in wanted if shape in by_shape), able[0])

    def _proposed(self, product: _Product) -> list[_Heuristic]:
        """By the heuristics, best first."""
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
        return [candidate for candidate in found[: count.value] if not candidate.state]

    def _borrowed(self, product: _Product) -> list[_Heuristic]:
        """What is proposed for GPT-2 124M's sizes and can do this product too. For 32,768 x 4,096, k = 1,024,
        the heuristics of CUDA 13.0 propose only a kernel without wgmma, which takes 790 us instead of 494."""
        usual = replace(product, m=65536, n=3072, k=768)
        if usual == product:
            return []
        b, a, out = self.layouts
        able = []
        for candidate in _Plan(usual).proposed:
            checked = _Heuristic()
            with suppress(RuntimeError):
                _call(
                    "cublasLtMatmulAlgoCheck",
                    _handle(product.device), self.descriptor, b, a, out, out,
                    ctypes.byref(candidate.algo), ctypes.byref(checked),
                )  # fmt: skip
                if not checked.state and checked.workspace_bytes <= _WORKSPACE_BYTES:
                    checked.algo[:] = candidate.algo[:]
                    able.append(checked)
        return able


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


def _described(a: Tensor, b: Tensor, transposed: bool, epilogue: int) -> _Product:
    (m, k), n = a.shape, b.shape[0 if transposed else 1]
    return _Product(m, n, k, transposed, epilogue, a.dtype, a.device.index)


def _multiply(
    a: Tensor,
    b: Tensor,
    transposed: bool,
    epilogue: int,
    bias: Tensor | None,
    aux: Tensor | None = None,
    addend: Tensor | None = None,
) -> Tensor:
    with torch.cuda.device(a.device):
        product = _described(a, b, transposed, epilogue)
        a, b, bias = _aligned(a), _aligned(b), None if bias is None else bias.contiguous()
        out = a.new_empty(product.m, product.n)
        plan = _plan(product)
        for attribute, tensor in ((_BIAS, bias), (_AUX, aux)):
            if tensor is not None:
                _set(plan.descriptor, attribute, ctypes.c_void_p(tensor.data_ptr()))
        workspace = a.new_empty(plan.found.workspace_bytes, dtype=torch.uint8)
        one, beta = ctypes.c_float(1), ctypes.c_float(addend is not None)
        c = out if addend is None else _aligned(addend)
        b_layout, a_layout, out_layout = plan.layouts
        _call(
            "cublasLtMatmul",
            _handle(a.device.index), plan.descriptor,
            ctypes.byref(one), _address(b), b_layout, _address(a), a_layout,
            ctypes.byref(beta), _address(c), out_layout, _address(out), out_layout,
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


def plain_product(
    a: Tensor, b: Tensor, transposed: bool, bias: Tensor | None, addend: Tensor | None
) -> Tensor:
    """a (m, k) @ b + bias (n,) + addend (m, n), b (n, k) where `transposed`, else (k, n): by PyTorch, unless
    another algorithm than cuBLAS' own is known to be faster, or there is an addend, which cublasLt reads in
    the epilogue."""
    epilogue, n = _PLAIN if bias is None else _WITH_BIAS, b.shape[0 if transposed else 1]
    for name, x, shape in (("bias", bias, (n,)), ("addend", addend, (len(a), n))):
        if x is not None and (tuple(x.shape) != shape or x.dtype != a.dtype):
            raise ValueError(f"{name} is {x.dtype} {tuple(x.shape)}, and has to be {a.dtype} {shape}")
    able = a.is_cuda and a.dtype in _SHORT and available()
    if able and (addend is not None or _preferred(_described(a, b, transposed, epilogue))):
        return _multiply(a, b, transposed, epilogue, bias, addend=addend)
    out = F.linear(a, b if transposed else b.T, bias)
    return out if addend is None else out + addend
