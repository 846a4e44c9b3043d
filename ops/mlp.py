"""The MLP with GELU as two products, each with the elementwise half of its work in its epilogue.

    tilegpt::linear_gelu(x, weight, bias) -> (gelu(h), h)       h = x @ weight^T + bias
    tilegpt::linear_gelu_backward(dy, weight, h) -> (dy @ weight) * gelu'(h)

On a GPU by cublasLt (ops/cublaslt.py); elsewhere, and where that is not found, by PyTorch's functions. GELU
is the tanh form throughout. h is kept in 16 bits; GELU is of the product in fp32, where PyTorch's is of h.

`gelu_mlp` is an op too, which torch.compile takes apart. Where it meets a torch.autograd.Function in Python,
it does not cache what it has traced, and each start of a run traces that again.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ops import cublaslt
from ops.linear import first_derivative_only, product


@torch.library.custom_op("tilegpt::linear_gelu", mutates_args=())
def linear_gelu(x: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
    """gelu(h) and h, (n, hidden) each, of x (n, C) and weight (hidden, C)."""
    if x.is_cuda and cublaslt.available():
        return cublaslt.linear_gelu(x, weight, bias)
    h = F.linear(x, weight, bias)
    return F.gelu(h, approximate="tanh"), h


@linear_gelu.register_fake
def _(x: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
    out = x.new_empty(x.shape[0], weight.shape[0])
    return out, torch.empty_like(out)


@torch.library.custom_op("tilegpt::linear_gelu_backward", mutates_args=())
def linear_gelu_backward(dy: Tensor, weight: Tensor, h: Tensor) -> Tensor:
    """The gradient by h (n, hidden), of dy (n, C) and weight (C, hidden) of the product after GELU."""
    if dy.is_cuda and cublaslt.available():
        return cublaslt.dgelu_product(dy, weight, h)
    return torch.ops.aten.gelu_backward(dy @ weight, h, approximate="tanh")


@linear_gelu_backward.register_fake
def _(dy: Tensor, weight: Tensor, h: Tensor) -> Tensor:
    return torch.empty_like(h)


class _GeluMLP(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        w1: Tensor,
        b1: Tensor | None,
        w2: Tensor,
        b2: Tensor | None,
        addend: Tensor | None,
    ) -> Tensor:
        a, h = linear_gelu(x, w1, b1)
        ctx.save_for_backward(x, w1, w2, a, h)
        return product(a, w2, True, b2, addend)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        first_derivative_only("The fused MLP has", "in precision=32-true it has")
        x, w1, w2, a, h = ctx.saved_tensors
        wanted = ctx.needs_input_grad
        dh = linear_gelu_backward(dy, w2, h)
        return (
            product(dh, w1, False) if wanted[0] else None,
            dh.T @ x if wanted[1] else None,
            dh.sum(0) if wanted[2] else None,
            dy.T @ a if wanted[3] else None,
            dy.sum(0) if wanted[4] else None,
            dy if wanted[5] else None,
        )


torch.library.define(
    "tilegpt::gelu_mlp",
    "(Tensor x, Tensor w1, Tensor? b1, Tensor w2, Tensor? b2, Tensor? addend) -> Tensor",
)
torch.library.impl("tilegpt::gelu_mlp", "CompositeImplicitAutograd")(_GeluMLP.apply)


def missing() -> str | None:
    """What keeps a GPU from the fused products, and how to have them; None where nothing does."""
    if cublaslt.available():
        return None
    return (
        "no cublasLt, which CUDA builds of torch bring along: GELU, its gradient and additions to the "
        "residual stream are passes of their own"
    )


def gelu_mlp(
    x: Tensor,
    w1: Tensor,
    b1: Tensor | None,
    w2: Tensor,
    b2: Tensor | None,
    addend: Tensor | None = None,
) -> Tensor:
    """linear(gelu(linear(x, w1, b1)), w2, b2) + addend of x (..., C), all of one dtype; a GELU by tanh."""
    rows = None if addend is None else addend.flatten(0, -2)
    out = torch.ops.tilegpt.gelu_mlp(x.flatten(0, -2), w1, b1, w2, b2, rows)  # (B, T, C) -> (B*T, C)
    return out.view(*x.shape[:-1], len(w2))  # (B*T, C) -> (B, T, C)
