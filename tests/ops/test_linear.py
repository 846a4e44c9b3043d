"""Linear layers on many rows, with what they are added to, against PyTorch's in fp64."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from attention.naive import NaiveAttention
from model.gpt import GPT, GPTConfig
from ops import cublaslt
from ops.linear import linear, pays, product

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def problem(dtype: torch.dtype, device: str) -> list[Tensor | None]:
    """x (2, 24, 32), weight (40, 32), bias (40,), addend (2, 24, 40)."""
    generator = torch.Generator().manual_seed(5)
    shapes = [(2, 24, 32), (40, 32), (40,), (2, 24, 40)]
    return [torch.randn(s, generator=generator).to(device, dtype).requires_grad_() for s in shapes]


def plain(x: Tensor, weight: Tensor, bias: Tensor | None, addend: Tensor | None) -> Tensor:
    out = F.linear(x, weight, bias)
    return out if addend is None else out + addend


def computed(layer, leaves: list[Tensor | None]) -> list[Tensor]:
    out = layer(*leaves)
    given = [leaf for leaf in leaves if leaf is not None]
    rising = torch.cos(torch.arange(out.numel()).view(out.shape)).to(out)
    return [out, *torch.autograd.grad(out, given, rising)]


@pytest.mark.parametrize("left_out", [(), (2,), (3,), (2, 3)], ids=str)
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16], ids=str)
def test_values_and_gradients(dtype: torch.dtype, device: str, left_out: tuple[int, ...]) -> None:
    """With and without bias and addend; in 16 bits errors of at most 1.5 times PyTorch's."""
    leaves = [None if i in left_out else leaf for i, leaf in enumerate(problem(dtype, device))]
    doubles = [leaf if leaf is None else leaf.detach().double().requires_grad_() for leaf in leaves]
    results = (computed(linear, leaves), computed(plain, leaves), computed(plain, doubles))
    for found, usual, right in zip(*results, strict=True):
        assert found.dtype == dtype and found.shape == right.shape
        error, allowed = ((each.double() - right).norm() / right.norm() for each in (found, usual))
        assert error <= 1.5 * allowed + 1e-14


def test_a_frozen_weight_has_no_gradient_and_the_second_derivative_is_refused() -> None:
    leaves = problem(torch.float32, "cpu")
    leaves[1].requires_grad_(False)
    out = linear(*leaves).sum()
    with pytest.raises(NotImplementedError, match="no second derivative"):
        torch.autograd.grad(out, leaves[0], create_graph=True)
    linear(*leaves).sum().backward()
    assert leaves[1].grad is None and all(leaves[i].grad is not None for i in (0, 2, 3))


@pytest.mark.parametrize("device", DEVICES)
def test_the_op_is_whole(device: str) -> None:
    x, weight, bias, addend = (leaf.detach() for leaf in problem(torch.bfloat16, device))
    rows = x.flatten(0, 1), addend.flatten(0, 1)
    torch.library.opcheck(torch.ops.tilegpt.product.default, (rows[0], weight, True, bias, rows[1]))
    torch.library.opcheck(torch.ops.tilegpt.product.default, (rows[1], weight, False, None, None))


@pytest.mark.parametrize("fp32_residual", [False, True])
@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_a_model_computes_the_same_with_it_compiled_too(
    dropout: float, fp32_residual: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Under autocast to bf16: a residual stream of bf16 is added in the product, one of fp32 behind it."""
    asked = []

    def run(compiled: bool, fused: bool) -> list[Tensor]:
        def seen(x: Tensor, *_: int) -> bool:
            asked.append(x.dtype)
            return fused

        monkeypatch.setattr("model.gpt.pays", seen)
        monkeypatch.setattr("model.gpt.fuses", seen)
        torch._dynamo.reset()
        torch.manual_seed(0)
        sizes = {"vocab_size": 50, "seq_len": 16, "n_layer": 2, "n_head": 2, "n_embd": 32}
        config = GPTConfig(**sizes, dropout=dropout, fp32_residual=fp32_residual)
        net = GPT(config, NaiveAttention()).train()
        if compiled:
            net.compile(dynamic=False, backend="aot_eager", fullgraph=True)
        ids = torch.arange(48).view(3, 16)
        torch.manual_seed(1)
        with torch.autocast("cpu", torch.bfloat16):
            loss = net(ids, targets=ids)
        loss.backward()
        return [loss, *(p.grad for p in net.parameters())]

    usual = run(False, False)
    for compiled in (False,) if dropout else (False, True):  # compiled, other numbers are dropped
        for found, right in zip(run(compiled, True), usual, strict=True):
            assert (found - right).norm() <= 0.02 * right.norm()
    assert set(asked) == {torch.bfloat16}


def test_few_rows_and_other_dtypes_are_left_to_pytorch(monkeypatch: pytest.MonkeyPatch) -> None:
    class OnGPU(Tensor):
        is_cuda = True

    rows = cublaslt.FEWEST_ROWS
    x = torch.empty(2, rows // 2, 8, dtype=torch.bfloat16).as_subclass(OnGPU)
    assert pays(x) and not pays(x[:, 1:]) and not pays(x.float()) and not pays(x.as_subclass(Tensor))
    with torch.no_grad():
        assert not pays(x)


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
    product = cublaslt._Product(*sizes, epilogue == GELU, epilogue, torch.bfloat16, 0)
    assert cublaslt._Plan(product).found.algo[0] == wanted


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
    asked = cublaslt._product(dy, weight, False, DGELU)
    if torch.cuda.get_device_capability() == HOPPER:
        assert cublaslt._shape(cublaslt._plan(asked).found) in cublaslt._OF_DGELU


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
    asked = cublaslt._product(a, b, transposed, cublaslt._WITH_BIAS if bias else cublaslt._PLAIN)
    if torch.cuda.get_device_capability() == HOPPER:
        assert cublaslt._shape(cublaslt._plan(asked).found) in cublaslt._preferred(asked)
    addend = torch.randn(m, n, **made)
    exact = addend[:64].double() + a[:64].double() @ (b.T if transposed else b).double()
    exact = exact if c is None else exact + c.double()
    error = (product(a, b, transposed, c, addend)[:64] - exact).norm() / exact.norm()
    assert error <= 2**-9
