"""The KV cache: what attention has to remember of the tokens before, allocated once, written in place."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from attention.base import Attention


class KVCache:
    """Keys and values of all layers for B rows of up to `capacity` tokens.

    k, v:        a (B, Hkv, capacity, D) per layer, kv-head sized: GQA and MQA shrink it by H / Hkv
    lengths:     (B,) int64 on the device, the tokens each row holds, which is where it writes next
    next_lengths (B,) int32, one more: the keys that count once that token is written

    Prompts come in by a right-padded call that `prefill` announces: causal attention among the prompt's own
    keys, so that nothing of the padding is ever seen. Every other call decodes: one token a row, written at
    the row's own length, attention over the whole allocation, `kv_lengths` saying how much of it counts. The
    host never reads the lengths; whoever decodes knows them and keeps them below the capacity. `attention` is
    the implementation that decodes, where it is not the one that trains.
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
        shape = (batch, kv_heads, capacity, head_dim)
        # A tensor a layer: of views of one, a compiled step would copy the whole for each layer's write.
        # zeros, not empty: an implementation that multiplies masked keys by zero must not meet a NaN.
        self.k = [torch.zeros(shape, dtype=dtype, device=device) for _ in range(n_layer)]
        self.v = [torch.zeros(shape, dtype=dtype, device=device) for _ in range(n_layer)]
        self.lengths = torch.zeros(batch, dtype=torch.int64, device=device)
        self.next_lengths = torch.ones(batch, dtype=torch.int32, device=device)
        self.rows = torch.arange(batch, device=device)
        self.attention = attention
        self._prompt: tuple[Tensor, Tensor] | None = (
            None  # rows (R,) and lengths (R,) of the announced prefill
        )

    @property
    def capacity(self) -> int:
        return self.k[0].shape[2]

    @property
    def nbytes(self) -> int:
        return 2 * len(self.k) * self.k[0].nbytes

    @property
    def positions(self) -> Tensor | None:
        """(B, 1) position of the token about to be decoded; None in prefill, whose positions are 0 .. T-1."""
        return self.lengths.unsqueeze(1) if self._prompt is None else None

    @property
    def kv_lengths(self) -> Tensor | None:
        """(B,) int32 keys that count once the token about to be decoded is written; None in prefill."""
        return self.next_lengths if self._prompt is None else None

    @property
    def decoding(self) -> bool:
        """Whether the next call's queries see what is held, and `attention` computes it."""
        return self._prompt is None

    def prefill(self, lengths: Tensor, rows: Tensor | None = None) -> None:
        """Announce that the next call brings `rows` (all of them by default) anew: prompts of `lengths` (R,)
        tokens, right-padded to one T. The other rows stay as they are."""
        self._prompt = (self.rows if rows is None else rows, lengths)

    def update(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Write k, v (B, Hkv, T, D) of a layer; return the keys and values to attend to: the prompt's own in
        prefill, the whole allocation (B, Hkv, capacity, D) while decoding."""
        T = k.shape[2]
        assert self.capacity >= T, f"{T} tokens do not fit into a cache of {self.capacity}"
        if self._prompt is not None:
            rows = self._prompt[0]
            self.k[layer][rows, :, :T] = k.to(self.k[layer].dtype)
            self.v[layer][rows, :, :T] = v.to(self.v[layer].dtype)
            return k, v
        assert T == 1, f"decoding takes one token a call, not {T}; announce a prompt by prefill(lengths)"
        # (B, Hkv, 1, D) -> (B, Hkv, D), each to its row's place: index_put compiles to a write in place
        self.k[layer][self.rows, :, self.lengths] = k[:, :, 0].to(self.k[layer].dtype)
        self.v[layer][self.rows, :, self.lengths] = v[:, :, 0].to(self.v[layer].dtype)
        return self.k[layer], self.v[layer]

    def advance(self) -> None:
        """After a forward pass: rows hold their prompt, or one token more."""
        if self._prompt is None:
            self.lengths.add_(1)
            self.next_lengths.add_(1)
        else:
            self.set_lengths(self._prompt[1], self._prompt[0])
            self._prompt = None

    def set_lengths(self, lengths: Tensor, rows: Tensor | None = None) -> None:
        """Say how many tokens `rows` hold (all of them by default); 0 forgets them."""
        rows = self.rows if rows is None else rows
        self.lengths[rows] = lengths.to(self.lengths.dtype)
        self.next_lengths[rows] = (lengths + 1).to(self.next_lengths.dtype)
