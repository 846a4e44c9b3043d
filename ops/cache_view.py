"""A KV cache as attention reads it in place of k and v: dense or in blocks, in 16 bits or more or quantised.

A quantised token is written with a scale of its own, per KV head and part of its channels, so that nothing
waits in 16 bits for its group to fill up:

    fp8, int8   one part, all D channels; e4m3 up to 448, whole numbers from -127 to 127
    int4        two parts of D / 2 channels; -7 to 7, stored plus 8, channel c in the low four bits of a byte
                and c + D / 2 in the high four: a tile of bytes is two tiles of channels

value = number * scale. A kernel multiplies the scores by the scale of K and the probabilities by that of V, a
number a token and part, and never makes a 16-bit copy of what it reads.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

# name: storage, and the number that the largest absolute value of a part becomes
CACHE_DTYPES: dict[str, tuple[torch.dtype, float]] = {
    "fp8": (torch.float8_e4m3fn, 448.0),
    "int8": (torch.int8, 127.0),
    "int4": (torch.uint8, 7.0),
}
# bf16: the range of fp32; values are rounded after dividing by the scale as stored.
SCALE_DTYPE = torch.bfloat16


def quantise(x: Tensor, kind: str) -> tuple[Tensor, Tensor]:
    """(numbers, scales) of x (..., D): (..., D) with scales (..., 1); int4 (..., D / 2) with (..., 2)."""
    dtype, largest = CACHE_DTYPES[kind]
    parts = x.float().unflatten(-1, (2 if kind == "int4" else 1, -1))  # (..., parts, D / parts)
    scale = (parts.abs().amax(dim=-1) / largest).to(SCALE_DTYPE)
    # a part of zeros, or of numbers that even bf16 has as 0, is divided by 1
    divisor = scale.float().masked_fill(scale == 0, 1).unsqueeze(-1)
    numbers = (parts / divisor).clamp(-largest, largest)
    if kind == "fp8":
        return numbers.flatten(-2).to(dtype), scale
    numbers = numbers.round()
    if kind == "int8":
        return numbers.flatten(-2).to(dtype), scale
    low, high = (numbers + 8).to(dtype).unbind(-2)
    return low | (high << 4), scale


def dequantise(data: Tensor, scale: Tensor) -> Tensor:
    """The way back, in fp32: x (..., D) of what `quantise` made."""
    if data.dtype == torch.uint8:
        data = torch.stack((data & 15, data >> 4), dim=-2).float() - 8  # (..., 2, D / 2)
    else:
        data = data.float().unsqueeze(-2)  # (..., 1, D)
    return (data * scale.float().unsqueeze(-1)).flatten(-2)


class CachedTensor(NamedTuple):
    """The keys, or the values, of a layer.

    data:  (N, Hkv, block, D), of int4 (N, Hkv, block, D / 2); N blocks of tokens, a row's whole capacity each
           where there is no table
    scale: (N, Hkv, parts, block) where quantised
    table: (B, n) int32, the blocks of each row in order; what lies beyond its length may be any block
    """

    data: Tensor
    scale: Tensor | None = None
    table: Tensor | None = None

    @property
    def dtype_name(self) -> str | None:
        """fp8, int8 or int4; None where it is not quantised."""
        if self.scale is None:
            return None
        return next(name for name, (dtype, _) in CACHE_DTYPES.items() if dtype == self.data.dtype)

    @property
    def nbytes(self) -> int:
        return self.data.nbytes + (0 if self.scale is None else self.scale.nbytes)

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """(B, Hkv, capacity, D), as of the tensor that this stands for."""
        n, heads, block, width = self.data.shape
        batch, blocks = (n, 1) if self.table is None else self.table.shape
        return batch, heads, blocks * block, width * (2 if self.data.dtype == torch.uint8 else 1)

    def tokens(self, start: int, stop: int) -> Tensor:
        """Tokens [start, stop) of each row: (B, Hkv, stop - start, D), in fp32 where quantised."""
        if self.table is None:
            data = self.data[:, :, start:stop]
            scale = None if self.scale is None else self.scale[..., start:stop].transpose(-2, -1)
        else:
            j = torch.arange(start, stop, device=self.data.device)
            block, at = self.table[:, j // self.data.shape[2]].long(), j % self.data.shape[2]
            # (B, t, Hkv, ...) as the table indexes, to (B, Hkv, t, ...)
            data = raw(self.data)[block, :, at].view(self.data.dtype).transpose(1, 2)
            scale = None if self.scale is None else self.scale[block, :, :, at].transpose(1, 2)
        return data if scale is None else dequantise(data, scale)


class CacheView(NamedTuple):
    """Keys and values of a layer, and how many of each row's tokens count: lengths (B,) int32, among them
    the Tq new ones whose queries are asked."""

    k: CachedTensor
    v: CachedTensor
    lengths: Tensor

    @property
    def kinds(self) -> frozenset[str]:
        """What an implementation has to declare to read it: paged, and fp8, int8 or int4."""
        paged = {"paged"} if self.k.table is not None else set()
        return frozenset(paged | ({self.k.dtype_name} - {None}))

    @property
    def one_table(self) -> bool:
        """Whether keys and values lie in the same blocks, as kernels that take one table need. Two tables are
        read from the device; a cache holds one tensor for both."""
        k, v = self.k.table, self.v.table
        return k is v or (k is not None and v is not None and torch.equal(k, v))

    def tensors(self) -> tuple[Tensor, Tensor]:
        """k and v (B, Hkv, capacity, D) copied out, in fp32 where quantised: for the specification."""
        capacity = self.k.shape[2]
        return self.k.tokens(0, capacity), self.v.tokens(0, capacity)


def raw(x: Tensor) -> Tensor:
    """The same bytes in a dtype that PyTorch can index: it cannot index fp8."""
    return x.view(torch.uint8) if x.dtype == torch.float8_e4m3fn else x
