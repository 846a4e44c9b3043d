"""Linear layers with products in fp8 while they train; model/training/fp8.py chooses them. Its operators
(ops/fp8.py) are registered when they are first needed: other runs have no use for them, and where there is no
Triton, torch warns of it then."""

from __future__ import annotations

from torch import Tensor, nn

from model.loss import compute_dtype


class Fp8Linear(nn.Linear):
    """nn.Linear, whose products are in fp8 in training; in evaluation they are as nn.Linear's."""

    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            return super().forward(x)
        from ops import fp8

        x = x.to(compute_dtype(x))
        return fp8.linear(x, self.weight, bias_of(self, x))


def gelu_mlp(first: Fp8Linear, second: Fp8Linear, x: Tensor) -> Tensor:
    """second(gelu(first(x))) in training, whose GELU is part of the rounding to fp8."""
    from ops import fp8

    x = x.to(compute_dtype(x))
    return fp8.gelu_mlp(x, first.weight, bias_of(first, x), second.weight, bias_of(second, x))


def bias_of(layer: nn.Linear, x: Tensor) -> Tensor | None:
    return None if layer.bias is None else layer.bias.to(x.dtype)
