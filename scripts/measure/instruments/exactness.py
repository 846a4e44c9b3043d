"""Is online softmax exact? Small answers that can be checked by hand, and errors over sizes of tiles.

Parts of the study `numerics`; what its rows hold is told there.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from attention.base import Attention, AttentionCall
from attention.tiled import TiledAttention
from ops.options import AttentionOptions
from scripts.measure.instruments.bench_points import Shape

Result = dict[str, Any]

HEAD_DIM = 64
# The sources' examples. The sum of exp(s - 5) of the first, over a block [2, 5] and a block [3]; the output
# of the second.
SUM_SCORES, SUM_SHIFT = (2.0, 5.0, 3.0), 5.0
OUT_SCORES, OUT_VALUES = (1.0, 2.0, 0.5), (10.0, 20.0, 40.0)
# Between the second and the third of them lie keys whose scores leave exp() nothing (exp(-10,000) is 0 in all
# precisions), as many as no tile of a kernel holds.
LEAST_APART, NOTHING = 384, -10_000.0
EXACT_DTYPES = ("float64", "float32", "float16")
# Beside its own, 128 x 128. One key at a time, but not one query: of 512 tokens 131,328 tiles, of some twenty
# launches each, took a GPU 20 seconds.
TILES = ((128, 1), (16, 16), (64, 32), (32, 256), (100, 7))
FA2_TILES = ((64, 32, 4, 2), (64, 128, 4, 1), (128, 64, 8, 1))  # queries, keys, warps, blocks


@dataclass(frozen=True)
class Measurement:
    """A point, and what gives its result; `run` may raise."""

    point: dict[str, Any]
    run: Callable[[], Result]


@dataclass(frozen=True)
class Setting:
    """Where the study runs, the shape of its random inputs, and who takes part."""

    device: str
    batch: int
    heads: int
    tokens: int
    attentions: dict[str, Attention]

    def point(self, part: str, name: str, passed: str, dtype: str, **more: Any) -> dict[str, Any]:
        shape = Shape(
            self.batch, self.heads, self.heads, self.tokens, HEAD_DIM, True, "fp32", study="numerics"
        )
        return shape.point(name, passed) | {"dtype": dtype, "part": part} | more

    def tensors(self, dtype: str, magnitude: float = 1.0, seed: int = 0) -> tuple[Tensor, ...]:
        """q, k, v, dout, normally distributed; q and k times `magnitude`. From the CPU's generator, so that
        every device has the same."""
        g, shape = torch.Generator().manual_seed(seed), (self.batch, self.heads, self.tokens, HEAD_DIM)
        q, k, v, dout = (torch.randn(shape, generator=g) for _ in range(4))
        made = (q * magnitude, k * magnitude, v, dout)
        return tuple(x.to(self.device, getattr(torch, dtype)) for x in made)

    def able(self, attention: Attention, dtype: str, backward: bool = False) -> bool:
        like = {"dtype": getattr(torch, dtype), "device": self.device, "requires_grad": backward}
        x = torch.empty(self.batch, self.heads, self.tokens, HEAD_DIM, **like)
        return not attention.unsupported_reasons(AttentionCall.of(x, x, x, AttentionOptions(causal=True)))

    def passes(self, attention: Attention, dtype: str) -> str:
        """ "both" where it has a backward, else "forward"."""
        return "both" if self.able(attention, dtype, backward=True) else "forward"


def dtypes_of(setting: Setting, attention: Attention) -> list[str]:
    """Those of EXACT_DTYPES that it has; one, which it will refuse with the reason, for none."""
    return [d for d in EXACT_DTYPES if setting.able(attention, d)] or ["float16"]


def known(setting: Setting) -> Iterator[Measurement]:
    """The small answers by every implementation, keys apart; by `tiled` also as the sources have them, two
    keys to a tile."""
    tokens = max(setting.tokens, LEAST_APART)
    for name, attention in setting.attentions.items():
        for dtype in dtypes_of(setting, attention):
            places = [("apart", tokens, attention)]
            if name == "tiled":
                places.append(("two keys to a tile", 3, TiledAttention(block_q=2, block_k=2)))
            for said, n, by in places:
                point = setting.point("known", name, "forward", dtype, features=said, seq_len=n, kv_len=n)
                yield Measurement(point, partial(small, setting, by, dtype, n))


def small(setting: Setting, attention: Attention, dtype: str, tokens: int) -> Result:
    """Both examples: what was got and what the formula gives."""
    weights = [math.exp(s) for s in OUT_SCORES]
    expected = {
        "sum": sum(math.exp(s - SUM_SHIFT) for s in SUM_SCORES),
        "out": sum(w * v for w, v in zip(weights, OUT_VALUES, strict=True)) / sum(weights),
    }
    out, _ = last_row(setting, attention, OUT_SCORES, dtype, tokens)
    _, lse = last_row(setting, attention, SUM_SCORES, dtype, tokens)
    got = {"sum": None if lse is None else math.exp(lse - SUM_SHIFT), "out": out}
    return {"status": "ok", "got": got, "expected": expected}


def last_row(
    setting: Setting, attention: Attention, scores: tuple[float, ...], dtype: str, tokens: int
) -> tuple[float, float | None]:
    """(out, lse) of a query with these scores, the first two at the first keys and the third at the last: the
    last row of a causal square, which sees every key. All heads are alike, and as many as elsewhere, so that
    no kernel is compiled for this alone."""
    like = {"device": setting.device, "dtype": getattr(torch, dtype)}
    q, k, v = (torch.zeros(setting.batch, setting.heads, tokens, HEAD_DIM, **like) for _ in range(3))
    places = torch.tensor([0, 1, tokens - 1], device=setting.device)
    q[..., 0] = 1
    k[..., 0] = NOTHING
    k[:, :, places, 0] = torch.tensor(scores, **like)
    v[:, :, places] = torch.tensor(OUT_VALUES, **like)[:, None]
    options = {"causal": True, "scale": 1.0}
    with torch.no_grad():
        lse = not attention.unsupported_reasons(
            AttentionCall.of(q, k, v, AttentionOptions(**options, return_lse=True))
        )
        result = attention(q, k, v, **options, return_lse=lse)
    out = result[0] if lse else result
    return float(out[-1, -1, -1].double().mean()), float(result[1][-1, -1, -1]) if lse else None


def tiles(setting: Setting) -> Iterator[Measurement]:
    """Errors against fp64 of every implementation with its own tile, of `tiled` with others, and on a GPU of
    `cuda_fa2` with others."""
    for name, attention in setting.attentions.items():
        for dtype in dtypes_of(setting, attention):
            yield _tile(setting, name, dtype, None, attention)
            if name == "tiled":
                for br, bc in TILES:
                    yield _tile(setting, name, dtype, (br, bc), TiledAttention(br, bc))
    if setting.device == "cuda" and "cuda_fa2" in setting.attentions:
        for tile in FA2_TILES:
            yield _tile(setting, "cuda_fa2", "float16", tile, partial(fa2, tile))


def fa2(tile: tuple[int, int, int, int], q: Tensor, k: Tensor, v: Tensor, *, causal: bool) -> Tensor:
    """Our kernel of FlashAttention-2 with a tile of its own."""
    from ops.cuda.call import Call
    from ops.cuda.tensor_cores import Tile, run_forward

    options = AttentionOptions(causal, q.shape[3] ** -0.5)
    return run_forward(q, k, v, Call(q, k, v, options), Tile(*tile))[0]


def _tile(
    setting: Setting, name: str, dtype: str, tile: tuple[int, ...] | None, call: Callable[..., Tensor]
) -> Measurement:
    point = setting.point("tiles", name, "forward", dtype, tile=tile and list(tile[:2]))
    return Measurement(point, partial(rounding, setting, dtype, call))


def rounding(setting: Setting, dtype: str, call: Callable[..., Tensor]) -> Result:
    """The largest error of the output against the formula in fp64, and in units of the dtype's epsilon of
    the largest value."""
    from attention.naive import naive_attention

    q, k, v, _ = setting.tensors(dtype)
    with torch.no_grad():
        got = call(q, k, v, causal=True).double()
        exact = naive_attention(q.double(), k.double(), v.double())[0]
    error = float((got - exact).abs().max())
    unit = torch.finfo(getattr(torch, dtype)).eps * float(exact.abs().max())
    return {"status": "ok", "max_error": error, "epsilons": error / unit}
