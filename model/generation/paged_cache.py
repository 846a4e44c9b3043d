"""A KV cache in blocks that rows share by reference: what each holds is decided by blocks.BlockPool."""

from __future__ import annotations

import torch
from torch import Tensor

from attention.base import Attention, CacheView
from model.generation.blocks import BlockPool
from model.generation.decode import compute_dtype
from model.generation.view_cache import cache_kinds, cached_tensor, write
from model.gpt import GPT
from model.kv_cache import KVCache


class PagedCache(KVCache):
    """`blocks` blocks of `block` tokens for `batch` rows that decode, each of up to `capacity` tokens.

    k, v:  a CachedTensor a layer, (blocks + 1, Hkv, block, D); block 0 takes what belongs to nobody: padding,
           and the tokens of rows that hold nothing
    table: (B, capacity / block) int32, the blocks of each row, 0 where it has none
    active: (B,) int64, 1 for rows that decode; the others stay where they are

    A decoding call brings a token of every row. Others bring the next tokens of whatever rows `append`
    announces, which need not be among those that decode.
    """

    def __init__(
        self,
        n_layer: int,
        batch: int,
        kv_heads: int,
        capacity: int,
        head_dim: int,
        *,
        blocks: int,
        block: int,
        attention: Attention,
        kind: str = "auto",
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ):
        super().__init__(0, batch, kv_heads, capacity, head_dim, attention=attention, device=device)
        self.kind, self._capacity, self.block = kind, capacity, block
        self.table = torch.zeros(batch, -(-capacity // block), dtype=torch.int32, device=device)
        self.active = torch.zeros_like(self.lengths)
        shape = blocks + 1, kv_heads, block, head_dim
        self.k, self.v = (
            [cached_tensor(shape, kind, dtype, device, self.table) for _ in range(n_layer)] for _ in range(2)
        )
        # of the announced call: tables (R, n), positions (R, T), lengths with the padding (R,), all from 0
        self._chunk: tuple[Tensor, Tensor, Tensor, bool] | None = None
        self._places: tuple[Tensor, Tensor] | None = None  # of a call's tokens: blocks, and in them (R, T)

    @property
    def capacity(self) -> int:
        return self._capacity

    @property
    def nbytes(self) -> int:
        return sum(side.nbytes for side in self.k + self.v)

    @property
    def decoding(self) -> bool:
        return self._chunk is None or not self._chunk[3]

    @property
    def positions(self) -> Tensor | None:
        if self._chunk is None:
            return self.lengths.unsqueeze(1)
        _, positions, _, from_start = self._chunk
        # padding may go past the context, which has no position there
        return None if from_start else positions.clamp_max(self.capacity - 1)

    @property
    def kv_lengths(self) -> None:
        return None

    def append(self, table: Tensor, starts: Tensor, tokens: int, from_start: bool) -> None:
        """Announce that the next call brings `tokens` more of R rows, right-padded: row r holds `starts[r]`
        in the blocks of `table` (R, n) int32, which reaches to starts + tokens, with 0 for padding alone.

        from_start: all starts are 0, and the tokens attend to their own keys as computed."""
        positions = starts.unsqueeze(1) + torch.arange(tokens, device=starts.device)  # (R, T)
        self._chunk = table, positions, (starts + tokens).to(torch.int32), from_start

    def update(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor | CacheView, Tensor | None]:
        """Write k, v (B, Hkv, T, D) of a layer; give what to attend to."""
        if self._chunk is None:
            assert k.shape[2] == 1, f"decoding takes one token a call, not {k.shape[2]}; announce by append"
            table, positions, lengths = self.table, self.lengths.unsqueeze(1), self.next_lengths
        else:
            table, positions, lengths, _ = self._chunk
        if layer == 0:  # the same in all layers
            self._places = table.gather(1, positions // self.block), positions % self.block
        for x, to in ((k, self.k[layer]), (v, self.v[layer])):
            write(x, to, self.kind, *self._places)
        if not self.decoding:
            return k, v
        held = (side[layer]._replace(table=table) for side in (self.k, self.v))
        return CacheView(*held, lengths), None

    def advance(self) -> None:
        """After a forward pass: the rows that decode hold one token more; of the others the caller knows."""
        if self._chunk is None:
            self.lengths.add_(self.active)
            self.next_lengths.add_(self.active)
        self._chunk = None


def paged_cache(
    model: GPT, slots: int, blocks: BlockPool, attention: Attention, cache_dtype: str
) -> PagedCache:
    """The tensors behind `blocks`, for `slots` rows that decode."""
    config = model.config
    return PagedCache(
        config.n_layer,
        slots,
        config.kv_heads,
        config.seq_len,
        config.head_size,
        blocks=blocks.capacity // blocks.size,
        block=blocks.size,
        attention=attention,
        kind=cache_dtype,
        dtype=compute_dtype(model),
        device=model.device,
    )


def paged_kinds(model: GPT, cache_dtype: str) -> frozenset[str]:
    """What an attention has to declare to read these blocks."""
    return cache_kinds(cache_dtype, model.config.head_size) | {"paged"}
