"""Tensors of more than 2^31 elements, as packed q, k and v of a million tokens have: small ones with large
strides, of which only the pages that hold values take memory."""

from __future__ import annotations

import torch
from torch import Tensor

# (B, H, T) strides: the last index of one dimension lies beyond 2^31 elements
LAYOUTS = {
    "rows": (128, 64, 2**24 - 8),  # the most that Triton's kernels take between two tokens
    "heads": (2**20, 2**31 + 64, 64),
    "batches": (2**31 + 64, 2**20, 64),
}


def near(dtype: torch.dtype, tokens: int) -> list[Tensor]:
    """q, k, v and dout (2, 2, tokens, 16), contiguous."""
    draw = torch.Generator().manual_seed(5)
    return [torch.randn(2, 2, tokens, 16, generator=draw).to(dtype) for _ in range(4)]


def far(tensors: list[Tensor], layout: str) -> list[Tensor]:
    """The same values with the strides of LAYOUTS."""
    strides = (*LAYOUTS[layout], 1)
    last = sum((size - 1) * stride for size, stride in zip(tensors[0].shape, strides, strict=True))
    assert last > 2**31
    return [torch.empty(last + 1, dtype=x.dtype).as_strided(x.shape, strides).copy_(x) for x in tensors]
