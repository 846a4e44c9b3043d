"""The points of the attention benchmark: shapes, what they cost, and their tensors."""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

    from scripts.measure.rows import Kept

DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}
PASSES = ("forward", "backward", "both", "decode")
# Of the FlashAttention papers' points, and small ones for a CPU: tokens in all, and heads times head dim.
TOKENS, WIDTH = 16384, 2048
CPU_TOKENS, CPU_WIDTH = 1024, 256


@dataclass(frozen=True)
class Shape:
    """A call's shape. `tokens` are the queries and keys, or for decode (one query) the keys in the cache."""

    batch: int
    heads: int
    kv_heads: int
    tokens: int
    head_dim: int
    causal: bool
    dtype: str
    decode: bool = False
    kv_lengths: bool = False
    window: int | None = None  # keys to the left of the diagonal
    documents: int | None = None  # tokens of each, none of which sees another document
    relative_bias: int = 0  # distances to each side that have a learned bias
    sparsity: str = ""  # a pattern of model/sparsity.py and its blocks, "local:8"
    study: str = "attention"

    @property
    def tq(self) -> int:
        return 1 if self.decode else self.tokens

    def point(self, implementation: str, passed: str) -> dict[str, Any]:
        """What identifies a row of results/<study>."""
        on = [f"window={self.window}"] * (self.window is not None) + ["kv_lengths"] * self.kv_lengths
        on += [f"documents={self.documents}"] * (self.documents is not None)
        on += [f"sparsity={self.sparsity}"] * bool(self.sparsity)
        on += [f"relative_bias={self.relative_bias}"] * bool(self.relative_bias)
        return {
            "study": self.study,
            "implementation": implementation,
            "pass": passed,
            "batch": self.batch,
            "heads": self.heads,
            "kv_heads": self.kv_heads,
            "seq_len": self.tq,
            "kv_len": self.tokens,
            "head_dim": self.head_dim,
            "causal": self.causal,
            "features": ",".join(on),
            "dtype": DTYPES[self.dtype],
        }

    def lacking(self, passes: dict[str, list[str]], kept: Kept) -> dict[str, list[str]]:
        """Of the contestants of each pass those that are to be measured."""
        points = {at: {name: self.point(name, at) for name in names} for at, names in passes.items()}
        return {at: names for at, mine in points.items() if (names := kept.beside(mine))}

    @property
    def seen(self) -> float:
        """Pairs of query and key of each document, halved for causal as is usual; a window's and a sparse
        pattern's are counted."""
        if self.sparsity:
            return self._seen_in_tiles
        if self.documents is not None:
            whole, rest = divmod(self.tokens, self.documents)
            of = [(whole, self.documents), (1, rest)]
            return sum(n * replace(self, documents=None, tokens=tokens).seen for n, tokens in of)
        if self.window is None or self.decode:
            keys = self.tokens if self.window is None else min(self.tokens, self.window + 1)
            return self.tq * keys / (2 if self.causal and not self.decode else 1)
        left = sum(min(i, self.window) + 1 for i in range(self.tokens))
        return left if self.causal else left + sum(self.tokens - 1 - i for i in range(self.tokens))

    @property
    def _seen_in_tiles(self) -> int:
        """Of the tiles kept, what mask, window and documents leave: a query's keys are from low to high, of
        which a tile has a part. A row of tiles at a time, as T x T / 128 may be much."""
        import torch

        from attention.base import MASK_BLOCK

        size, kept = self.documents or self.tokens, self.kept
        tile = torch.arange(kept.shape[1]) * MASK_BLOCK
        total = 0
        for queries, tiles in zip(torch.arange(self.tokens).split(MASK_BLOCK), kept, strict=True):
            start = queries // size * size
            low = start if self.window is None else torch.maximum(start, queries - self.window)
            high = queries + 1 if self.causal else (start + size).clamp(max=self.tokens)
            first = torch.maximum(low[:, None], tile[tiles])
            total += int((torch.minimum(high[:, None], tile[tiles] + MASK_BLOCK) - first).clamp(min=0).sum())
        return total

    @property
    def kept(self) -> torch.Tensor:
        """The sparse pattern, (T / 128, T / 128)."""
        from attention.base import MASK_BLOCK
        from model.sparsity import pattern

        name, _, blocks = self.sparsity.partition(":")
        return pattern(name, -(-self.tokens // MASK_BLOCK), int(blocks or 4))

    def flops(self, passed: str) -> float:
        """4 B H pairs D forward, 2.5 times that backward (five matrix products for two)."""
        factor = {"forward": 1.0, "decode": 1.0, "backward": 2.5, "both": 3.5}[passed]
        return factor * 4 * self.batch * self.heads * self.seen * self.head_dim

    @property
    def kv_bytes(self) -> int:
        """Of K and V, which decode has to read."""
        keys = min(self.tokens, (self.window or self.tokens) + 1)
        return 2 * self.batch * self.kv_heads * keys * self.head_dim * (4 if self.dtype == "fp32" else 2)

    def options(self, device: str) -> dict[str, Any]:
        """The keywords of `Attention.forward`."""
        import torch

        options: dict[str, Any] = {"causal": self.causal}
        if self.window is not None:
            options["window"] = (self.window, 0 if self.causal else -1)
        if self.documents is not None:
            ids = torch.arange(self.tokens, dtype=torch.int32, device=device) // self.documents
            options["document_ids"] = ids.expand(self.batch, -1).contiguous()
        if self.sparsity:
            options["block_mask"] = self.kept.to(device)[None, None]
        if self.relative_bias:
            shape = self.heads, 2 * self.relative_bias + 1
            g = torch.Generator(device).manual_seed(0)
            options["relative_bias"] = torch.randn(shape, device=device, generator=g).requires_grad_()
        if self.kv_lengths:
            options["kv_lengths"] = torch.full((self.batch,), self.tokens, dtype=torch.int32, device=device)
        return options

    def tensors(self, device: str, seed: int = 0) -> tuple[torch.Tensor, ...]:
        """q, k, v and dout, normally distributed: the power a GPU draws depends on the data.

        Laid out as in the model: (B, T, H, D) seen as (B, H, T, D), where flash-attn need not copy its
        output; the cache of a decoding step (B, Hkv, T, D).
        """
        import torch

        g = torch.Generator(device).manual_seed(seed)
        like = {"device": device, "generator": g, "dtype": getattr(torch, DTYPES[self.dtype])}
        q = (self.batch, self.heads, self.tq, self.head_dim)
        kv = (self.batch, self.kv_heads, self.tokens, self.head_dim)

        def normal(batch: int, heads: int, tokens: int, dim: int) -> torch.Tensor:
            return torch.randn(batch, tokens, heads, dim, **like).transpose(1, 2)

        cache = torch.randn if self.decode else lambda shape, **_: normal(*shape)
        return normal(*q), cache(kv, **like), cache(kv, **like), normal(*q)

    def __str__(self) -> str:
        heads = f"{self.heads}" if self.heads == self.kv_heads else f"{self.heads}/{self.kv_heads}"
        what = "cache" if self.decode else "T"
        mask = "" if self.decode else "causal " if self.causal else "full "
        more = f" window {self.window}" if self.window is not None else ""
        more += f" documents of {self.documents}" if self.documents is not None else ""
        more += " kv_lengths" if self.kv_lengths else ""
        more += f" {self.sparsity}" if self.sparsity else ""
        more += " relative bias" if self.relative_bias else ""
        return f"D={self.head_dim} {mask}{what}={self.tokens} B={self.batch} H={heads} {self.dtype}{more}"


def sparse(text: str) -> str:
    """An argument that names a sparse pattern and its blocks, or dense, for argparse."""
    from model.sparsity import PATTERNS

    name, colon, blocks = text.partition(":")
    counted = blocks.isascii() and blocks.isdigit() and int(blocks) > 0
    if text != "dense" and (name not in PATTERNS or (colon and not counted)):
        known = ", ".join(PATTERNS)
        raise argparse.ArgumentTypeError(f"{text} is neither dense nor PATTERN or PATTERN:BLOCKS of {known}")
    return text


def points(options: argparse.Namespace, cuda: bool) -> Iterator[tuple[Shape, list[str]]]:
    """Shapes in the order of the tables, each with its passes: squares first, then decode."""
    dtype = options.dtype or ("bf16" if cuda else "fp32")
    tokens, width = (TOKENS, WIDTH) if cuda else (CPU_TOKENS, CPU_WIDTH)
    usual = [2**n for n in range(9, 15)] if cuda else [128, 256, 512]
    if options.short:
        usual = [2**n for n in range(5, 9)] + (usual if cuda else [])
    square = [passed for passed in options.passes if passed != "decode"]
    masks = (True, False) if options.causal is None else (options.causal,)
    for d, causal, t in itertools.product(
        options.head_dim or ((64, 128, 256) if cuda else (64,)), masks, options.seq_len or usual
    ):
        heads = options.heads or max(1, width // d)
        for batch in options.batch or [max(1, tokens // t)]:
            if square:
                window = options.window
                kv_heads = options.kv_heads or heads
                for sparsity in options.sparsity or ("",):
                    more = {"window": window, "sparsity": "" if sparsity == "dense" else sparsity}
                    more |= {"relative_bias": options.relative_bias or 0, "documents": options.documents}
                    yield Shape(batch, heads, kv_heads, t, d, causal, dtype, **more), square
    if "decode" in options.passes:
        heads = options.heads or 32
        lengths = [2**n for n in range(10, 18)] if cuda else [256, 1024]
        caches = options.seq_len or lengths
        for d, batch, t in itertools.product(
            options.head_dim or (128,), options.batch or ((1, 16) if cuda else (1,)), caches
        ):
            yield (
                Shape(
                    batch,
                    heads,
                    options.kv_heads or options.heads or 8,
                    t,
                    d,
                    True,
                    dtype,
                    decode=True,
                    kv_lengths=options.kv_lengths,
                    window=options.window,
                ),
                ["decode"],
            )
