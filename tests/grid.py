"""The covering list of attention cases for every implementation; tests/attention/criterion.py judges them.
 It covers, it is not the product of everything: each shape, head dim, feature, pair of features and layout is
met somewhere. An implementation is run on each case that it declares, and must refuse the others.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from attention.base import Attention
from ops.options import MASK_BLOCK

CONF = Path(__file__).parents[1] / "conf" / "attention"
NAMES = sorted(path.stem for path in CONF.glob("*.yaml"))
DROPOUT_P = 0.2
RELATIVE_REACH = 20


@cache
def _declared(name: str) -> Any:
    from omegaconf import OmegaConf

    return OmegaConf.load(CONF / f"{name}.yaml")


def build(name: str) -> Attention:
    """The implementation of conf/attention/<name>.yaml."""
    from hydra.utils import instantiate

    return instantiate(_declared(name))


def long_but(values: Iterable[Any], *quick: int) -> list[Any]:
    """`values` for pytest.mark.parametrize, those that are not at these places marked `long`."""
    each = [value if isinstance(value, tuple) else (value,) for value in values]
    marks = [() if place in quick else pytest.mark.long for place in range(len(each))]
    return [pytest.param(*value, marks=mark) for value, mark in zip(each, marks, strict=True)]


@dataclass(frozen=True)
class Case:
    """One call. `group` says what it is here for; `features` are names of attention.base.FEATURES."""

    group: str
    tq: int
    tk: int
    head_dim: int = 64
    batch: int = 2
    heads: int = 4
    kv_heads: int = 4
    features: frozenset[str] = frozenset()
    layout: str = "contiguous"
    magnitude: float = 1.0
    scale: float | None = None
    blind: bool = False  # some rows see no key

    @property
    def id(self) -> str:
        words = [self.group, f"{self.tq}x{self.tk}", f"d{self.head_dim}", *sorted(self.features)]
        words += [f"b{self.batch}"] * (self.batch != 2) + [f"kv{self.kv_heads}"] * (self.kv_heads != 4)
        return "-".join(words + [self.layout] * (self.layout != "contiguous") + ["blind"] * self.blind)

    @property
    def small(self) -> bool:
        """For the CPU and the interpreter: up to 256 tokens, and one case of 512."""
        return max(self.tq, self.tk) <= 256 or (self.group == "shape" and (self.tq, self.tk) == (256, 512))

    @property
    def quick(self) -> bool:
        """For `make test`: of the small ones each shape, feature, pair and layout once, and four head dims;
        the rectangle where there is a square too."""
        if self.group in ("shape", "empty", "scale"):
            return self.small and (self.tq, self.tk) not in ((200, 200), (256, 512))
        head_dims = QUICK_HEAD_DIMS if self.group == "head_dim" else (64,)
        return self.small and self.tq != self.tk and self.head_dim in head_dims

    @property
    def on_cpu(self) -> Case:
        """At most eight rows: with two of two heads a single query has four numbers of lse, and one that errs
        as `tiled` does is refused in 5% of the draws (with sixteen in none of 300)."""
        return replace(self, batch=min(8, self.batch))

    @property
    def fewer_heads(self) -> Case:
        """For what is slow on a CPU: two heads, which are enough to be mixed up."""
        groups = ("feature", "pair", "head_dim", "no_key", "blocks", "large")
        many = self.group in groups and self.heads == self.kv_heads
        return replace(self.on_cpu, heads=2, kv_heads=2) if many else self.on_cpu

    @property
    def exact_dtypes_only(self) -> bool:
        """Features meet low precision on the GPU; on the CPU fp32 shows the same mistakes."""
        return self.group in ("feature", "pair", "head_dim")


SHAPES = [(1, 1), (1, 239), (239, 1), (3, 799), (127, 512), (113, 203), (128, 217), (256, 512)]
SHAPES += [(128, 128), (200, 200), (1023, 1024), (1024, 1024), (2048, 2048)]
QUICK_HEAD_DIMS = (40, 59, 96, 160)  # a multiple of 8, none, one that is padded, one beyond 128
HEAD_DIMS = (32, 40, 59, 64, 80, 96, 111, 128, 160, 192, 256)
CROSSED = (
    "window",
    "softcap",
    "alibi",
    "alibi_rows",
    "bias",
    "bias_grad",
    "document_ids",
    "kv_lengths",
    "block_mask",
    "relative_bias",
    "dropout",
    "noncausal",
    "gqa",
)


def _featured(group: str, features: tuple[str, ...], tq: int, tk: int, head_dim: int) -> Case:
    kv_heads, batch = 2 if "gqa" in features else 4, _batch(tq, tk)
    return Case(group, tq, tk, head_dim, batch, kv_heads=kv_heads, features=frozenset(features) - {"gqa"})


def _batch(tq: int, tk: int) -> int:
    """Two rows; more of one query, as the largest error of a few rows is a matter of luck: in fp32 that of
    sums in order, over D by 16 and over 239 keys by 64, is 1.6 times that of sums by halves, and 3.5 times in
    one of 12 draws of 64 rows; of 256 rows 1.3 times, and 2.1 times."""
    return 64 if tq == 1 < tk else 2


def _cases() -> list[Case]:
    square, rectangle = (128, 128), (113, 203)
    cases = [Case("shape", *shape, batch=_batch(*shape)) for shape in SHAPES]
    cases += [Case("head_dim", *shape, d) for d in HEAD_DIMS for shape in (square, rectangle)]
    cases += [Case("heads", *shape, kv_heads=kv) for kv in (2, 1) for shape in (square, rectangle)]
    for feature, shape, d in itertools.product(
        CROSSED, (square, rectangle, (1, 239), (1023, 1024)), (64, 128)
    ):
        cases.append(_featured("feature", (feature,), *shape, d))
    cases += [_featured("pair", pair, *rectangle, 64) for pair in itertools.combinations(CROSSED, 2)]
    for layout, shape in itertools.product(("transposed", "sliced", "expanded_grad"), (square, rectangle)):
        cases.append(Case("strides", *shape, layout=layout))
    # Scores of standard deviation 64: exp overflows unless the maximum is taken off.
    cases += [Case("large", *shape, magnitude=8.0) for shape in (square, rectangle)]
    cases.append(Case("scale", *square, scale=0.3))
    cases.append(Case("no_key", 203, 113))
    cases += [
        Case("blocks", 256, 256, features=frozenset({"block_mask"}) | more)
        for more in (frozenset(), {"noncausal"}, {"noncausal", "window", "kv_lengths"})
    ]
    # Whole tiles of queries that see no key.
    cases += [Case("no_key", 250, 40, head_dim) for head_dim in (64, 128)]
    for feature in ("kv_lengths", "document_ids", "window"):
        cases.append(Case("no_key", *rectangle, features=frozenset({feature}), blind=True))
    # A window that slides past the last key, with more queries than keys and no causal mask.
    cases.append(Case("no_key", 203, 113, features=frozenset({"window", "noncausal"})))
    cases += [Case("empty", *square, batch=0), Case("empty", 0, 16), Case("empty", 16, 0)]
    # A pair may name the same case as a feature.
    return list({case.id: case for case in cases}.values())


CASES = _cases()


@dataclass
class Inputs:
    q: Tensor
    k: Tensor
    v: Tensor
    dout: Tensor
    options: dict[str, Any]  # keywords of Attention.forward

    def leaves(self) -> dict[str, Tensor]:
        leaves = {"q": self.q, "k": self.k, "v": self.v}
        given = {name: self.options.get(name) for name in ("bias", "relative_bias")}
        return leaves | {name: x for name, x in given.items() if x is not None and x.requires_grad}


# Dimensions from the outermost on, the step between tokens, columns behind D, elements before all.
LAYOUTS = {
    "contiguous": ("bht", 1, 0, 0),
    "transposed": ("bth", 1, 0, 0),  # as projections give it
    "packed": ("bth", 3, 0, 0),  # as one projection of q, k and v gives it
    "sliced": ("bht", 2, 8, 0),
    "offset": ("htb", 1, 16, 8),
    "odd": ("bth", 1, 1, 1),  # no row begins at a multiple of anything
}
# One batch row, head, token or number for all, as `expand` makes it: these change the values.
EXPANDED = {"one_batch": 1, "one_head": 2, "one_token": 4, "one": 15}


def laid_out(x: Tensor, layout: str) -> Tensor:
    """x (B, H, T, D) in a layout of LAYOUTS, NaN between its elements, or EXPANDED, or "last_strided", whose
    last dimension is not contiguous; as it is for another."""
    if layout in EXPANDED:
        bits = EXPANDED[layout]
        return x[tuple(slice(1 if bits >> n & 1 else None) for n in range(4))].expand(x.shape)
    if layout == "last_strided":
        return x.transpose(2, 3).contiguous().transpose(2, 3)
    order, step, columns, before = LAYOUTS.get(layout, LAYOUTS["contiguous"])
    if (order, step, columns, before) == LAYOUTS["contiguous"]:
        return x
    sizes = dict(zip("bht", (x.shape[0], x.shape[1], x.shape[2] * step), strict=True))
    width = x.shape[3] + columns
    buffer = x.new_full((before + math.prod(sizes.values()) * width,), torch.nan)
    wide = buffer[before:].view(*(sizes[d] for d in order), width)
    laid = wide.permute(*(order.index(d) for d in "bht"), 3)[:, :, ::step, : x.shape[3]]
    return laid.copy_(x)


@lru_cache(maxsize=4)  # of one case after the other, for all implementations
def _drawn(case: Case) -> tuple[list[Tensor], Tensor]:
    """Numbers for q, k, v and dout, and the state of the generator after them."""
    g = torch.Generator().manual_seed(len(case.id) + case.tq * 7 + case.tk * 13 + case.head_dim)
    of_q, of_k = (case.heads, case.tq), (case.kv_heads, case.tk)
    drawn = [torch.randn(case.batch, *n, case.head_dim, generator=g) for n in (of_q, of_k, of_k, of_q)]
    return drawn, g.get_state()


def make_inputs(case: Case, device: str, dtype: torch.dtype) -> Inputs:
    """Random, the same for every implementation (made on the CPU), never zeros."""
    drawn, state = _drawn(case)
    g = torch.Generator().set_state(state)
    tk, magnitudes = case.tk, (case.magnitude, case.magnitude, 1.0, 1.0)
    made = [(x * size).to(device, dtype) for x, size in zip(drawn, magnitudes, strict=True)]
    q, k, v, dout = (laid_out(x, case.layout) for x in made)
    if case.layout == "expanded_grad":  # what out.sum().backward() sends
        dout = laid_out(dout, "one")
    options = _options(case, g, device, dtype)
    if (lengths := options.get("kv_lengths")) is not None:
        beyond = torch.arange(tk, device=device).view(1, 1, tk, 1) >= lengths.view(-1, 1, 1, 1)
        k, v = k.masked_fill(beyond, torch.nan), v.masked_fill(beyond, torch.nan)
    return Inputs(*(x.requires_grad_() for x in (q, k, v)), dout, options)


def _options(case: Case, g: torch.Generator, device: str, dtype: torch.dtype) -> dict[str, Any]:
    b, h, tq, tk, on = case.batch, case.heads, case.tq, case.tk, case.features
    options: dict[str, Any] = {"causal": "noncausal" not in on, "scale": case.scale}
    if "window" in on:
        options["window"] = (tk // 3, tk // 5 if "noncausal" in on else 0)
    if "softcap" in on:
        options["softcap"] = 1.5
    if "alibi" in on:
        options["alibi_slopes"] = 2.0 ** (-8 * (torch.arange(h, device=device) + 1) / h)
    if "alibi_rows" in on:
        options["alibi_slopes"] = torch.rand(b, h, generator=g).to(device)
    if on & {"bias", "bias_grad"}:
        # With a gradient in a shape that broadcasts, so that it has to be reduced.
        shape = (h, 1, tk) if "bias_grad" in on else (b, h, tq, tk)
        bias = torch.randn(shape, generator=g).to(device, dtype)
        options["bias"] = bias.requires_grad_("bias_grad" in on)
    if "document_ids" in on:
        k_ids = (torch.rand(b, tk, generator=g) < 4 / tk).cumsum(1)
        q_ids = k_ids[:, tk - tq :] if tq <= tk else (torch.rand(b, tq, generator=g) < 4 / tq).cumsum(1)
        if case.blind:
            q_ids = torch.where(torch.arange(tq) % 5 == 0, 99, q_ids)  # a document without keys
        pair = tuple(ids.to(device, torch.int32) for ids in (q_ids, k_ids))
        options["document_ids"] = pair[1] if tq == tk else pair
    if "kv_lengths" in on:
        lengths = [0 if case.blind else tk, max(1, tk * 2 // 3)] * (b // 2)
        options["kv_lengths"] = torch.tensor(lengths, dtype=torch.int32, device=device)
    if "window" in on and case.blind:
        options |= {"causal": False, "window": (3, 3)}
        options["kv_lengths"] = torch.tensor([tk // 4, tk], dtype=torch.int32, device=device)
    if "block_mask" in on:
        heads = 1 if "alibi" in on else h  # for all, or each its own; some rows see no key
        kept = torch.rand(1, heads, -(-tq // MASK_BLOCK), -(-tk // MASK_BLOCK), generator=g) < 0.6
        options["block_mask"] = kept.to(device)
    if "relative_bias" in on:  # of more than one tile, so that far ones have but one number; learned
        table = torch.randn(h, 2 * RELATIVE_REACH + 1, generator=g).to(device, dtype)
        options["relative_bias"] = table.requires_grad_()
    if "dropout" in on:
        options["dropout_p"] = DROPOUT_P
    return options
