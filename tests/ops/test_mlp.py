"""The MLP whose products do GELU and its gradient in their epilogues, against the formula in fp64."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from attention.naive import NaiveAttention
from model.gpt import GPT, GPTConfig
from ops import cublaslt
from ops.linear import fuses
from ops.mlp import gelu_mlp, linear_gelu, linear_gelu_backward

pytestmark = pytest.mark.sampled(4)

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
N, C, HIDDEN = 48, 24, 64


def problem(bias: bool, dtype: torch.dtype, device: str) -> list[Tensor | None]:
    """x (2, N/2, C), w1, b1, w2, b2, and what is added (2, N/2, C); values that GELU bends."""
    generator = torch.Generator().manual_seed(3)
    shapes = [(2, N // 2, C), (HIDDEN, C), (HIDDEN,), (C, HIDDEN), (C,), (2, N // 2, C)]
    scales = [1.0, 0.4, 0.5, 0.2, 0.5, 1.0]
    made = [torch.randn(s, generator=generator) * f for s, f in zip(shapes, scales, strict=True)]
    leaves: list[Tensor | None] = [t.to(device, dtype).requires_grad_() for t in made]
    if not bias:
        leaves[2] = leaves[4] = None
    return leaves


def plain(
    x: Tensor, w1: Tensor, b1: Tensor | None, w2: Tensor, b2: Tensor | None, addend: Tensor | None = None
) -> Tensor:
    out = F.linear(F.gelu(F.linear(x, w1, b1), approximate="tanh"), w2, b2)
    return out if addend is None else out + addend


def computed(mlp, leaves: list[Tensor | None]) -> list[Tensor]:
    """The output and the gradients by all there is, for a gradient that differs everywhere."""
    out = mlp(*leaves)
    given = [leaf for leaf in leaves if leaf is not None]
    return [
        out,
        *torch.autograd.grad(out, given, torch.cos(torch.arange(out.numel()).view(out.shape)).to(out)),
    ]


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16], ids=str)
def test_values_and_gradients(dtype: torch.dtype, device: str, bias: bool) -> None:
    """In 16 bits errors of at most twice those of PyTorch's functions, of gradients three times."""
    if device == "cuda" and dtype == torch.float64:
        pytest.skip("cublasLt has GELU in 16 bits")
    leaves = problem(bias, dtype, device)
    if not bias:
        leaves[5] = None
    exact = computed(
        plain, [leaf if leaf is None else leaf.detach().double().requires_grad_() for leaf in leaves]
    )
    found, usual = computed(gelu_mlp, leaves), computed(plain, leaves)
    for i, (a, b, right) in enumerate(zip(found, usual, exact, strict=True)):
        assert a.dtype == dtype and a.shape == right.shape
        error, allowed = ((each.double() - right).norm() / right.norm() for each in (a, b))
        assert error <= (2 if i == 0 else 3) * allowed + 1e-14, (i, error, allowed)


@pytest.mark.gpu
def test_the_epilogue_is_used() -> None:
    assert cublaslt.available()
    x = torch.randn(256, 768, device="cuda", dtype=torch.bfloat16)
    assert fuses(x, 3072) and not fuses(x.float(), 3072) and not fuses(x, 3071)
    with torch.no_grad():
        assert not fuses(x, 3072)


def test_a_frozen_weight_has_no_gradient_and_the_second_derivative_is_refused() -> None:
    leaves = problem(True, torch.float32, "cpu")
    leaves[1].requires_grad_(False)
    out = gelu_mlp(*leaves).sum()
    with pytest.raises(NotImplementedError, match="no second derivative"):
        torch.autograd.grad(out, leaves[0], create_graph=True)
    gelu_mlp(*leaves).sum().backward()
    assert leaves[1].grad is None and leaves[3].grad is not None


@pytest.mark.parametrize("device", DEVICES)
def test_the_ops_are_whole(device: str) -> None:
    x, w1, b1, w2, *_ = (leaf.detach() for leaf in problem(True, torch.bfloat16, device))
    x = x.flatten(0, 1)
    torch.library.opcheck(torch.ops.tilegpt.linear_gelu.default, (x, w1, b1))
    h = linear_gelu(x, w1, None)[1]
    torch.library.opcheck(torch.ops.tilegpt.linear_gelu_backward.default, (x, w2, h))
    assert linear_gelu_backward(x, w2, h).shape == h.shape


def test_it_compiles_whole() -> None:
    leaves = problem(True, torch.float32, "cpu")
    step = torch.compile(gelu_mlp, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(computed(step, leaves), computed(plain, leaves), rtol=1e-5, atol=1e-5)


@pytest.mark.long
@pytest.mark.parametrize("checkpointing", [False, True])
def test_a_model_computes_the_same_with_it_compiled_too(
    checkpointing: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(compiled: bool, fused: bool) -> tuple[Tensor, dict[str, Tensor]]:
        monkeypatch.setattr("model.gpt.fuses", lambda x, hidden: fused)
        torch._dynamo.reset()
        torch.manual_seed(0)
        config = GPTConfig(vocab_size=50, seq_len=16, n_layer=2, n_head=2, n_embd=32)
        net = GPT(config, NaiveAttention(), checkpointing=checkpointing).train()
        if compiled:
            net.compile(dynamic=False, backend="aot_eager", fullgraph=True)
        ids = torch.arange(48).view(3, 16)
        loss = net(ids, targets=ids)
        loss.backward()
        return loss, {name: p.grad for name, p in net.named_parameters()}

    plain = run(False, False)
    for compiled in (False, True):
        torch.testing.assert_close(run(compiled, True), plain, rtol=1e-5, atol=1e-5)
