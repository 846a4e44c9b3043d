"""Products by cublasLt: which algorithm is chosen, and what it computes."""

from __future__ import annotations

import ctypes
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from ops import cublaslt
from ops.linear import product
from ops.mlp import linear_gelu, linear_gelu_backward

HOPPER, OTHER = (9, 0), (10, 0)
PLAIN, BIAS, GELU, DGELU = cublaslt._PLAIN, cublaslt._WITH_BIAS, cublaslt._GELU_AUX, cublaslt._DGELU


@pytest.mark.parametrize(
    ("m", "n", "k", "transposed", "epilogue", "capability", "wanted"),
    [
        (65536, 2304, 768, True, PLAIN, HOPPER, cublaslt._128_X_160),
        (65536, 768, 3072, False, BIAS, HOPPER, cublaslt._128_X_160),
        (65536, 2304, 768, True, PLAIN, OTHER, ()),
        (32767, 2304, 768, True, PLAIN, HOPPER, ()),
        (32768, 1024, 4096, True, PLAIN, HOPPER, ()),
        (8192, 50304, 768, True, PLAIN, HOPPER, cublaslt._OF_THE_HEAD),
        (8191, 50304, 768, True, PLAIN, HOPPER, ()),
        (16384, 50304, 768, False, PLAIN, HOPPER, ()),
        (16384, 1536, 384, True, GELU, HOPPER, cublaslt._128_X_128),
        (16384, 1536, 384, True, GELU | BIAS, HOPPER, cublaslt._128_X_128),
        (16384, 1536, 384, False, DGELU, HOPPER, cublaslt._OF_DGELU),
        (16383, 1536, 384, False, DGELU, HOPPER, ()),
        (16384, 8192, 2048, False, DGELU, HOPPER, ()),
    ],
)
def test_which_algorithm_is_preferred(
    m, n, k, transposed, epilogue, capability, wanted, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    asked = cublaslt._Product(m, n, k, transposed, epilogue, torch.bfloat16, 0)
    assert cublaslt._preferred(asked) == wanted


@pytest.mark.parametrize(
    ("epilogue", "rows", "capability", "wanted"),
    [
        (GELU, 16384, HOPPER, 3),  # 1 cannot, 2 has no clusters
        (GELU, 16383, HOPPER, 0),
        (GELU, 16384, OTHER, 0),
        (DGELU, 16384, HOPPER, 12),  # of 10 to 13, proposed for 65,536 x 3,072, 11 is not right for this
        (DGELU, 65536, HOPPER, 12),  # these are those sizes
    ],
)
def test_which_algorithm_is_chosen(
    epilogue: int, rows: int, capability: tuple[int, int], wanted: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    shapes = {0: {1: 24, 8: 5}, 1: {1: 20, 8: 3}, 2: {1: 20}, 3: {1: 20, 8: 3}}  # by number: tile, cluster
    shapes |= {10: {1: 20, 8: 7}, 11: {1: 20, 8: 5}, 12: {1: 20, 8: 3}, 13: {1: 20, 8: 9}}
    columns = []

    def call(function: str, *args) -> None:
        if function == "cublasLtMatrixLayoutCreate":
            columns.append(args[3].value)
        if function == "cublasLtMatmulAlgoGetHeuristic":
            *_, asked, found, count = args
            proposed = [10, 11, 12, 13] if epilogue == DGELU and columns[-1] == 65536 else [0, 1, 2, 3]
            if epilogue == DGELU and columns[-1] != 65536:
                proposed = [0]
            assert asked == len(found) >= len(proposed)
            for place, number in enumerate(proposed):
                found[place].algo[0], found[place].state = number, int(number in (1, 11))
            count._obj.value = len(proposed)
        if function == "cublasLtMatmulAlgoCheck" and args[-2]._obj[0] == 10:
            raise RuntimeError(f"{function} failed: cublasStatus_t 15")
        if function == "cublasLtMatmulAlgoConfigGetAttribute":
            algorithm, attribute, value, size, _ = args
            if attribute not in shapes[algorithm._obj[0]]:
                raise RuntimeError(f"{function} failed: cublasStatus_t 7")
            value._obj.value = shapes[algorithm._obj[0]][attribute]
            assert size.value == {1: 4, 8: 2}[attribute]

    monkeypatch.setattr(cublaslt, "_call", call)
    monkeypatch.setattr(cublaslt, "_handle", lambda device: None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    sizes = (rows, 3072, 768) if rows == 65536 else (rows, 1536, 384)
    asked = cublaslt._Product(*sizes, epilogue == GELU, epilogue, torch.bfloat16, 0)
    assert cublaslt._Plan(asked).found.algo[0] == wanted


@pytest.mark.gpu
def test_a_product_for_which_the_heuristics_have_nothing_good() -> None:
    """Of 32,768 x 4,096 with GELU's gradient: an algorithm that is proposed for other sizes."""
    torch.manual_seed(0)
    made = {"device": "cuda", "dtype": torch.bfloat16}
    dy, weight, h = (torch.randn(s, **made) for s in ((32768, 1024), (1024, 4096), (32768, 4096)))
    found = cublaslt.dgelu_product(dy, weight / 32, h)[-64:]
    exact = torch.ops.aten.gelu_backward(
        dy[-64:].double() @ (weight / 32).double(), h[-64:].double(), approximate="tanh"
    )
    assert (found - exact).norm() / exact.norm() <= 2**-8
    asked = cublaslt._described(dy, weight, False, DGELU)
    if torch.cuda.get_device_capability() == HOPPER:
        assert cublaslt._shape(cublaslt._plan(asked).found) in cublaslt._OF_DGELU


def test_a_bias_of_any_stride(monkeypatch: pytest.MonkeyPatch) -> None:
    """cublasLt is given its address alone."""
    found: list[Tensor] = []

    def read(descriptor: None, attribute: int, value: ctypes.c_void_p) -> None:
        found.append(torch.tensor((ctypes.c_int16 * 8).from_address(value.value)[:], dtype=torch.int16))

    algorithm = SimpleNamespace(algo=ctypes.c_uint64(), workspace_bytes=0)
    plan = SimpleNamespace(descriptor=None, layouts=[None] * 3, found=algorithm)
    for owner, name, stand_in in (
        (cublaslt, "_plan", lambda _: plan),
        (cublaslt, "_set", read),
        (cublaslt, "_handle", lambda _: None),
        (cublaslt, "_call", lambda *_: None),
        (torch.cuda, "device", lambda _: nullcontext()),
        (torch.cuda, "current_stream", lambda: SimpleNamespace(cuda_stream=0)),
    ):
        monkeypatch.setattr(owner, name, stand_in)
    a, b, bias = (torch.randn(*shape).bfloat16() for shape in ((8, 8), (8, 8), (16,)))
    cublaslt._multiply(a, b, True, BIAS, bias[::2])
    assert torch.equal(found[0].view(torch.bfloat16), bias[::2])


@pytest.mark.gpu
def test_products_of_the_preferred_algorithm() -> None:
    """Large enough for it; see ops/cublaslt.py."""
    torch.manual_seed(0)
    x, dy = (torch.randn(16384, 384, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    w1 = torch.randn(1536, 384, device="cuda", dtype=torch.bfloat16) / 384**0.5
    w2 = torch.randn(384, 1536, device="cuda", dtype=torch.bfloat16) / 384**0.5
    gelu, h = linear_gelu(x, w1, None)
    exact_h = x.double() @ w1.double().T
    exact = [F.gelu(exact_h, approximate="tanh"), exact_h]
    exact.append(torch.ops.aten.gelu_backward(dy.double() @ w2.double(), h.double(), approximate="tanh"))
    for found, right in zip((gelu, h, linear_gelu_backward(dy, w2, h)), exact, strict=True):
        assert (found - right).norm() / right.norm() <= 2**-8
    for transposed, epilogue in ((True, GELU), (False, DGELU)):
        asked = cublaslt._Product(16384, 1536, 384, transposed, epilogue, torch.bfloat16, x.device.index)
        chosen = cublaslt._shape(cublaslt._plan(asked).found)
        assert chosen in cublaslt._preferred(asked) or torch.cuda.get_device_capability() != HOPPER


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("m", "n", "k", "transposed", "bias"),
    [(32768, 2304, 768, True, False), (32768, 768, 768, True, True), (32768, 768, 2304, False, False),
     (8192, 50304, 768, True, False)],
)  # fmt: skip
def test_the_preferred_algorithm_runs_and_computes_what_cublas_does(
    m: int, n: int, k: int, transposed: bool, bias: bool
) -> None:
    """Bitwise: each sum runs over k in the same order."""
    torch.manual_seed(0)
    made = {"device": "cuda", "dtype": torch.bfloat16}
    a, b = torch.randn(m, k, **made), torch.randn(*((n, k) if transposed else (k, n)), **made) / k**0.5
    c = torch.randn(n, **made) if bias else None
    usual, found = F.linear(a, b if transposed else b.T, c), product(a, b, transposed, c)
    assert torch.equal(usual, found)
    asked = cublaslt._described(a, b, transposed, cublaslt._WITH_BIAS if bias else cublaslt._PLAIN)
    if torch.cuda.get_device_capability() == HOPPER:
        assert cublaslt._shape(cublaslt._plan(asked).found) in cublaslt._preferred(asked)
    addend = torch.randn(m, n, **made)
    exact = addend[:64].double() + a[:64].double() @ (b.T if transposed else b).double()
    exact = exact if c is None else exact + c.double()
    error = (product(a, b, transposed, c, addend)[:64] - exact).norm() / exact.norm()
    assert error <= 2**-9
