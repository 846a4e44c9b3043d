"""Weights in 8 bits: a step of few rows takes the time in which the weights are read.

weight (N, K) = number * scale, whole numbers from -127 to 127 with a scale an output channel (`quantise` of
ops/cache_view.py). What is quantised are the products of the blocks and the head; the embeddings, of which a
token reads one row, and the norms stay as they are.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from attention.base import quantise
from conf.values import UserError
from model.gpt import GPT

WEIGHT_DTYPES = ("auto", "int8")
PARTS = 4  # of a row, whose numbers at the same place share a word


class Int8Linear(nn.Module):
    """`linear` with a weight in 8 bits. PyTorch multiplies with the weight in its old dtype, made for each
    call; the kernels of ops/triton/step.py multiply with the numbers.

    numbers (N, K / 4, 4) int8: [n, i, j] is of row n and column j K/4 + i
    scale (N,), in the dtype of the weight; bias (N,) or None"""

    def __init__(self, linear: nn.Linear):
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        numbers, scale = quantise(linear.weight.detach(), "int8")
        numbers = numbers.unflatten(-1, (PARTS, -1)).transpose(-2, -1)  # (N, K) -> (N, 4, K/4) -> (N, K/4, 4)
        self.register_buffer("numbers", numbers.contiguous())
        self.register_buffer("scale", scale.squeeze(-1).to(linear.weight.dtype))
        self.bias = linear.bias

    @property
    def weight(self) -> Tensor:
        """(N, K), made anew."""
        weight = self.numbers * self.scale[:, None, None]  # rounded once: a number is exact in 16 bits
        return weight.transpose(-2, -1).flatten(1)  # (N, K/4, 4) -> (N, 4, K/4) -> (N, K)

    @property
    def words(self) -> Tensor:
        """The numbers as (N, K / 4) int32."""
        return self.numbers.view(torch.int32).squeeze(-1)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias)


def quantise_weights(model: GPT, weight_dtype: str) -> None:
    """From now on `model`, which has its device and dtype already, has weights of that dtype: auto, as they
    are, or int8. Raises UserError, and then has changed nothing."""
    if weight_dtype not in WEIGHT_DTYPES:
        raise UserError(f"weight_dtype={weight_dtype}: choose one of {', '.join(WEIGHT_DTYPES)}.")
    if weight_dtype == "auto":
        return
    owners = [model, *(part for block in model.transformer.h for part in (block.attn, block.mlp))]
    products = [
        (owner, name, child)
        for owner in owners
        for name, child in owner.named_children()
        if name in ("lm_head", "c_attn", "c_fc", "c_proj")
    ]
    for _, name, child in products:
        if type(child) is not nn.Linear:
            raise UserError(
                f"weight_dtype={weight_dtype}: {name} is of type {type(child).__name__}, and needs to be a "
                "plain linear layer; choose auto."
            )
        if child.in_features % PARTS:
            raise UserError(
                f"weight_dtype={weight_dtype}: the rows of {name} have {child.in_features} numbers, and need "
                f"a multiple of {PARTS}; choose auto."
            )
    for owner, name, child in products:
        setattr(owner, name, Int8Linear(child))
