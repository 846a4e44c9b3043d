"""Linear layers and the GELU MLP with products in fp8, forward and backward, one scale per tensor.

    tilegpt::fp8_quantise(x, h, gelu, dtype, sums) -> (rounded, transposed, scale, column sums)

Inputs and weights are rounded to e4m3, gradients to e5m2, each divided by its largest magnitude over the
dtype's. Scales come from the tensors themselves, so there is no state. Rounded are x, weights and dy,
and in the MLP gelu(h) and (dy W2) gelu'(h), which are not written in 16 bits. Of gelu(h) the scale comes from
the largest h, and of the gradient from that of dy W2 times the largest gelu': bounds, for which h need not be
read twice. Kept for the backward are the transposed fp8 copies of inputs and weights, and h.

On a GPU by Triton (ops/triton/fp8.py) and cuBLASLt, elsewhere by PyTorch's functions.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ops.linear import first_derivative_only

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
# of the tanh form, for all h: |gelu(h)| <= max(gelu(largest h), LOWEST), and |gelu'(h)| <= STEEPEST
LOWEST, STEEPEST = 0.1701, 1.1290


@torch.library.triton_op("tilegpt::fp8_quantise", mutates_args=())
def fp8_quantise(
    x: Tensor, h: Tensor | None, gelu: bool, dtype: torch.dtype, sums: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """v / scale (M, N) in fp8; the same transposed, (N, M); the scale, an fp32 scalar; with `sums` the sum of
    v's rows, (N,) fp32, else (0,).

    v is x (M, N), with `gelu` gelu(x), or, given h (M, N), x * gelu'(h). ValueError where M or N is not a
    multiple of 16, as fp8 products need."""
    if x.shape[0] % 16 or x.shape[1] % 16:
        raise ValueError(
            f"a tensor for fp8 products has sizes that are multiples of 16, not {tuple(x.shape)}."
        )
    x, h = x.contiguous(), h if h is None else h.contiguous()
    if x.is_cuda:
        from ops.triton import fp8

        return fp8.quantise(x, h, gelu, dtype, sums, (LOWEST, STEEPEST))
    v, bound = x.float(), x.abs().max().float()
    if h is not None:
        v = torch.ops.aten.gelu_backward(v, h.float(), approximate="tanh")
        bound = bound * STEEPEST
    elif gelu:
        v = F.gelu(v, approximate="tanh")
        bound = F.gelu(x.max().float(), approximate="tanh").clamp(min=LOWEST)
    largest = torch.finfo(dtype).max
    bound = bound.clamp(min=1e-30)
    rounded = (v * (largest / bound)).clamp(-largest, largest).to(dtype)
    return rounded, rounded.T.contiguous(), bound / largest, v.sum(0) if sums else v.new_empty(0)


def _product(
    a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor, dtype: torch.dtype, bias: Tensor | None = None
) -> Tensor:
    """a (M, K) @ b (N, K)^T + bias in `dtype`."""
    return torch._scaled_mm(a, b.T, scale_a=a_scale, scale_b=b_scale, bias=bias, out_dtype=dtype)


def _first_derivative_only() -> None:
    first_derivative_only("Products in fp8 have", "in precision=bf16-mixed they have")


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor, b: Tensor | None) -> Tensor:
        x8, xt, x_scale, _ = fp8_quantise(x, None, False, E4M3, False)
        w8, wt, w_scale, _ = fp8_quantise(w, None, False, E4M3, False)
        ctx.save_for_backward(xt, x_scale, wt, w_scale)
        ctx.dtypes = x.dtype, w.dtype
        return _product(x8, x_scale, w8, w_scale, x.dtype, b)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        _first_derivative_only()
        xt, x_scale, wt, w_scale = ctx.saved_tensors
        x_dtype, w_dtype = ctx.dtypes
        dy8, dyt, dy_scale, db = fp8_quantise(dy, None, False, E5M2, ctx.needs_input_grad[2])
        return (
            _product(dy8, dy_scale, wt, w_scale, x_dtype),
            _product(dyt, dy_scale, xt, x_scale, w_dtype),
            db.to(x_dtype) if ctx.needs_input_grad[2] else None,
        )


class _GeluMLP(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, w1: Tensor, b1: Tensor | None, w2: Tensor, b2: Tensor | None) -> Tensor:
        x8, xt, x_scale, _ = fp8_quantise(x, None, False, E4M3, False)
        w1_8, w1t, w1_scale, _ = fp8_quantise(w1, None, False, E4M3, False)
        h = _product(x8, x_scale, w1_8, w1_scale, x.dtype, b1)
        a8, at, a_scale, _ = fp8_quantise(h, None, True, E4M3, False)
        w2_8, w2t, w2_scale, _ = fp8_quantise(w2, None, False, E4M3, False)
        ctx.save_for_backward(xt, x_scale, w1t, w1_scale, h, at, a_scale, w2t, w2_scale)
        ctx.dtypes = x.dtype, w1.dtype
        return _product(a8, a_scale, w2_8, w2_scale, x.dtype, b2)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        _first_derivative_only()
        xt, x_scale, w1t, w1_scale, h, at, a_scale, w2t, w2_scale = ctx.saved_tensors
        x_dtype, w_dtype = ctx.dtypes
        _, _, wants_b1, _, wants_b2 = ctx.needs_input_grad
        dy8, dyt, dy_scale, db2 = fp8_quantise(dy, None, False, E5M2, wants_b2)
        da = _product(dy8, dy_scale, w2t, w2_scale, x_dtype)
        dh8, dht, dh_scale, db1 = fp8_quantise(da, h, True, E5M2, wants_b1)
        return (
            _product(dh8, dh_scale, w1t, w1_scale, x_dtype),
            _product(dht, dh_scale, xt, x_scale, w_dtype),
            db1.to(x_dtype) if wants_b1 else None,
            _product(dyt, dy_scale, at, a_scale, w_dtype),
            db2.to(x_dtype) if wants_b2 else None,
        )


# ops, which torch.compile takes apart: ops/mlp.py says why
torch.library.define("tilegpt::fp8_linear", "(Tensor x, Tensor w, Tensor? b) -> Tensor")
torch.library.define(
    "tilegpt::fp8_gelu_mlp", "(Tensor x, Tensor w1, Tensor? b1, Tensor w2, Tensor? b2) -> Tensor"
)
torch.library.impl("tilegpt::fp8_linear", "CompositeImplicitAutograd")(_Linear.apply)
torch.library.impl("tilegpt::fp8_gelu_mlp", "CompositeImplicitAutograd")(_GeluMLP.apply)


def linear(x: Tensor, w: Tensor, b: Tensor | None) -> Tensor:
    """x (..., K) @ w (N, K)^T + b in x's dtype, which b has, too; w's gradient has w's dtype. The number of
    tokens, K and N are multiples of 16."""
    return torch.ops.tilegpt.fp8_linear(x.flatten(0, -2), w, b).view(*x.shape[:-1], len(w))


def gelu_mlp(x: Tensor, w1: Tensor, b1: Tensor | None, w2: Tensor, b2: Tensor | None) -> Tensor:
    """linear(gelu(linear(x, w1, b1)), w2, b2) of x (..., C), with the tanh form of GELU; else as `linear`."""
    return torch.ops.tilegpt.fp8_gelu_mlp(x.flatten(0, -2), w1, b1, w2, b2).view(*x.shape[:-1], len(w2))
