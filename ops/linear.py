"""Linear layers on many rows: their output and the gradient of their input by cuBLAS' fastest algorithms
(ops/cublaslt.py), which are not always those that it takes by itself. The residual stream, to which their
output is added, is added in the product's epilogue.

    tilegpt::product(a, b, transposed, bias, addend) -> a @ b + bias + addend, of b^T where `transposed`
    tilegpt::linear(x, weight, bias, addend) -> x @ weight^T + bias + addend, with its gradients

`linear` is an op for the sake of torch.compile's cache, as in ops/mlp.py.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ops import cublaslt


@torch.library.custom_op("tilegpt::product", mutates_args=())
def product(
    a: Tensor, b: Tensor, transposed: bool, bias: Tensor | None = None, addend: Tensor | None = None
) -> Tensor:
    """a (m, k) @ b + bias (n,) + addend (m, n); b is (n, k) where `transposed`, else (k, n)."""
    return cublaslt.plain_product(a, b, transposed, bias, addend)


@product.register_fake
def _(
    a: Tensor, b: Tensor, transposed: bool, bias: Tensor | None = None, addend: Tensor | None = None
) -> Tensor:
    return a.new_empty(a.shape[0], b.shape[0 if transposed else 1])


def first_derivative_only(subject: str, otherwise: str) -> None:
    """Raises NotImplementedError in a backward that is to be differentiated in turn."""
    if torch.is_grad_enabled() and not torch.compiler.is_compiling():
        raise NotImplementedError(f"{subject} no second derivative (double backward); {otherwise}.")


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, addend: Tensor | None) -> Tensor:
        ctx.save_for_backward(x if ctx.needs_input_grad[1] else None, weight)
        return product(x, weight, True, bias, addend)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        first_derivative_only("The linear layer on many rows has", "in precision=32-true it has")
        x, weight = ctx.saved_tensors
        wanted = ctx.needs_input_grad
        return (
            product(dy, weight, False) if wanted[0] else None,
            dy.T @ x if wanted[1] else None,
            dy.sum(0) if wanted[2] else None,
            dy if wanted[3] else None,
        )


torch.library.define("tilegpt::linear", "(Tensor x, Tensor weight, Tensor? bias, Tensor? addend) -> Tensor")
torch.library.impl("tilegpt::linear", "CompositeImplicitAutograd")(_Linear.apply)


def fuses(x: Tensor, out_features: int) -> bool:
    """Whether products of x (..., C), in their dtype, are those of this file and of ops/mlp.py: on a GPU,
    where a backward is to follow, in 16 bits and rows of whole 16 bytes."""
    supported = x.dtype in (torch.bfloat16, torch.float16) and x.shape[-1] % 8 == out_features % 8 == 0
    return x.is_cuda and supported and torch.is_grad_enabled()


def pays(x: Tensor, out_features: int) -> bool:
    """Whether `linear` is for this input: of so many rows, too, that cuBLAS' own choice may not be the best.
    It is known to be another on Hopper; on other GPUs what is gained is the addition."""
    return fuses(x, out_features) and x.numel() // x.shape[-1] >= cublaslt.FEWEST_ROWS


def linear(x: Tensor, weight: Tensor, bias: Tensor | None, addend: Tensor | None = None) -> Tensor:
    """x (..., C) @ weight (out, C)^T + bias (out,) + addend (..., out), all of one dtype."""
    rows = None if addend is None else addend.flatten(0, -2)
    out = torch.ops.tilegpt.linear(x.flatten(0, -2), weight, bias, rows)  # (B, T, C) -> (B*T, C)
    return out.view(*x.shape[:-1], len(weight))  # (B*T, out) -> (B, T, out)
