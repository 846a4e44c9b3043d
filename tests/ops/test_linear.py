"""Linear layers on many rows, with what they are added to, against PyTorch's in fp64."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from attention.naive import NaiveAttention
from model.gpt import GPT, GPTConfig
from ops import cublaslt
from ops.linear import linear, pays
from ops.mlp import gelu_mlp

pytestmark = pytest.mark.sampled(4)

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
    asked, added = [], []

    def recorded(layer: Callable[..., Tensor], takes: int) -> Callable[..., Tensor]:
        def record(*args: Tensor | None) -> Tensor:
            added.append(len(args) == takes and args[-1] is not None)
            return layer(*args)

        return record

    monkeypatch.setattr("model.gpt.linear", recorded(linear, 4))
    monkeypatch.setattr("model.gpt.gelu_mlp", recorded(gelu_mlp, 6))

    def run(compiled: bool, fused: bool) -> list[Tensor]:
        def seen(x: Tensor, out_features: int) -> bool:
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
        directly = not (compiled or dropout or fp32_residual)
        assert compiled or added == [False, directly, directly] * 2  # c_attn, c_proj, MLP of each layer
    assert set(asked) == {torch.bfloat16}


def test_few_rows_and_other_dtypes_are_left_to_pytorch() -> None:
    class OnGPU(Tensor):
        is_cuda = True

    x = torch.empty(2, cublaslt.FEWEST_ROWS // 2, 8, dtype=torch.bfloat16).as_subclass(OnGPU)
    assert pays(x, 16) and not pays(x[:, 1:], 16) and not pays(x[..., 1:], 16) and not pays(x, 15)
    assert not pays(x.float(), 16) and not pays(x.as_subclass(Tensor), 16)
    with torch.no_grad():
        assert not pays(x, 16)


def test_what_does_not_fit_is_refused() -> None:
    """On a GPU it would be read beyond its end, or as numbers of another type."""
    x, weight, bias, addend = (leaf.detach() for leaf in problem(torch.bfloat16, "cpu"))
    wrongs = {"addend": addend[:1]}, {"addend": addend.float()}, {"bias": bias[1:]}, {"bias": bias.float()}
    for wrong in wrongs:
        (name,) = wrong
        with pytest.raises(ValueError, match=f"{name} is torch..* and has to be torch.bfloat16"):
            linear(x, weight, **({"bias": bias, "addend": addend} | wrong))
