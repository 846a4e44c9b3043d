"""Caches that attention reads by a CacheView in place of k and v: quantised, in blocks, or both."""

from __future__ import annotations

import torch
from torch import Tensor

from attention.base import CACHE_DTYPES, SCALE_DTYPE, Attention, CachedTensor, CacheView, quantise, raw
from conf.values import UserError
from model.kv_cache import KVCache

KINDS = ("auto", *CACHE_DTYPES)


def cached_tensor(
    shape: tuple[int, ...],
    kind: str,
    dtype: torch.dtype,
    device: torch.device | str,
    table: Tensor | None = None,
) -> CachedTensor:
    """Zeros for N blocks of tokens, `shape` (N, Hkv, block, D): in `dtype`, or quantised as `kind` says."""
    if kind == "auto":
        return CachedTensor(torch.zeros(shape, dtype=dtype, device=device), None, table)
    n, heads, block, width = shape
    parts = 2 if kind == "int4" else 1
    data = torch.zeros(n, heads, block, width // parts, dtype=CACHE_DTYPES[kind][0], device=device)
    return CachedTensor(data, torch.zeros(n, heads, parts, block, dtype=SCALE_DTYPE, device=device), table)


def write(x: Tensor, to: CachedTensor, kind: str, block: Tensor, at: Tensor) -> None:
    """x (R, Hkv, T, D), each token to its place of a block: both (R, T), or R or T is 1."""
    data, scale = (x, None) if kind == "auto" else quantise(x, kind)
    # (R, Hkv, T, ...) -> (R, T, Hkv, ...), as block and at index; fp8 as bytes
    raw(to.data)[block, :, at] = raw(data.to(to.data.dtype)).transpose(1, 2)
    if scale is not None:
        to.scale[block, :, :, at] = scale.transpose(1, 2)


def cache_kinds(cache_dtype: str, head_dim: int) -> frozenset[str]:
    """What an attention has to declare to read a dense cache of that dtype. Raises UserError where there is
    no such cache."""
    if cache_dtype not in KINDS:
        raise UserError(f"cache_dtype={cache_dtype}: choose one of {', '.join(KINDS)}.")
    if cache_dtype == "int4" and head_dim % 2:
        raise UserError(
            f"cache_dtype=int4: two channels share a byte, and the head dim is {head_dim}, which is odd; "
            "choose int8, fp8 or auto."
        )
    return frozenset({cache_dtype} - {"auto"})


class QuantisedCache(KVCache):
    """A KVCache of fewer bits, quantised as it is written; `k[layer]` and `v[layer]` are CachedTensors."""

    def __init__(
        self,
        n_layer: int,
        batch: int,
        kv_heads: int,
        capacity: int,
        head_dim: int,
        *,
        attention: Attention,
        kind: str,
        device: torch.device | str = "cpu",
    ):
        # rows, lengths and the announced prefill are those of any cache; its tensors are not
        super().__init__(0, batch, kv_heads, capacity, head_dim, attention=attention, device=device)
        self.kind, self._capacity = kind, capacity
        self.k, self.v = (
            [
                cached_tensor((batch, kv_heads, capacity, head_dim), kind, torch.float32, device)
                for _ in range(n_layer)
            ]
            for _ in range(2)
        )

    @property
    def capacity(self) -> int:
        return self._capacity

    @property
    def nbytes(self) -> int:
        return sum(side.nbytes for side in self.k + self.v)

    @property
    def kv_lengths(self) -> None:
        """The views have them."""
        return None

    def update(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor | CacheView, Tensor | None]:
        """Write k, v (B, Hkv, T, D) of a layer; give what to attend to: the prompt's own in prefill, else a
        CacheView and None."""
        T = k.shape[2]
        rows, at = self.rows, self.lengths.unsqueeze(1)
        if self._prompt is not None:
            rows, at = self._prompt[0], torch.arange(T, device=k.device).expand(len(self._prompt[0]), T)
        assert self._prompt or T == 1, (
            f"decoding takes one token a call, not {T}; announce prompts by prefill"
        )
        for x, to in ((k, self.k[layer]), (v, self.v[layer])):
            write(x, to, self.kind, rows.unsqueeze(1), at)
        if self._prompt is not None:
            return k, v
        return CacheView(self.k[layer], self.v[layer], self.next_lengths), None
