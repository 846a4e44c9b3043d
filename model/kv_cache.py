"""The KV cache: what attention has to remember of the tokens before, allocated once, written in place."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from attention.base import Attention


class KVCache:
    """Keys and values of all layers for B rows of up to `capacity` tokens.

    k, v:     (L, B, Hkv, capacity, D), kv-head sized: GQA and MQA shrink it by H / Hkv
    lengths:  (B,) int32 on the device, the tokens each row holds; never read by the host

    An empty cache takes a right-padded prompt in one call (prefill: causal attention among the prompt's own keys,
    so that nothing of the padding is ever seen), then one token a call (decode: attention over the whole
    allocation, `kv_lengths` saying how much of it counts). Each row writes at its own length. `attention` is the
    implementation that decodes, where it is not the one that trains.
    """

    def __init__(
        self,
        n_layer: int,
        batch: int,
        kv_heads: int,
        capacity: int,
        head_dim: int,
        *,
        attention: Attention,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ):
        shape = (n_layer, batch, kv_heads, capacity, head_dim)
        # zeros, not empty: an implementation that multiplies masked keys by zero must not meet a NaN
        self.k = torch.zeros(shape, dtype=dtype, device=device)
        self.v = torch.zeros(shape, dtype=dtype, device=device)
        self.lengths = torch.zeros(batch, dtype=torch.int32, device=device)
        self.rows = torch.arange(batch, device=device)
        self.attention = attention
        self.filled = False

    @property
    def capacity(self) -> int:
        return self.k.shape[3]

    @property
    def nbytes(self) -> int:
        return 2 * self.k.numel() * self.k.element_size()

    @property
    def positions(self) -> Tensor | None:
        """(B, 1) int64 position of the token about to be decoded; None in prefill, whose positions are 0 .. T-1."""
        return self.lengths.long().unsqueeze(1) if self.filled else None

    @property
    def kv_lengths(self) -> Tensor | None:
        """(B,) int32 keys that count once the token about to be decoded is written; None in prefill."""
        return self.lengths + 1 if self.filled else None

    def update(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Write k, v (B, Hkv, T, D) of a layer; return the keys and values to attend to: the prompt's own in
        prefill, the whole allocation (B, Hkv, capacity, D) while decoding."""
        if not self.filled:
            T = k.shape[2]
            self.k[layer, :, :, :T] = k
            self.v[layer, :, :, :T] = v
            return k, v
        assert k.shape[2] == 1, "decoding takes one token a call"
        at = self.lengths.long()
        self.k[layer].index_put_((self.rows, slice(None), at), k[:, :, 0].to(self.k.dtype))
        self.v[layer].index_put_((self.rows, slice(None), at), v[:, :, 0].to(self.v.dtype))
        return self.k[layer], self.v[layer]

    def advance(self, tokens: int) -> None:
        """After a decoded token: one longer. After prefill the caller sets the prompts' own `lengths`."""
        if self.filled:
            self.lengths += 1
        else:
            self.lengths.fill_(tokens)
            self.filled = True
