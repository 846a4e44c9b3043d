"""attention=auto: the fastest capable implementation, from a table generated out of results/ (auto_table.py).

It decides per call, by device, dtype, head dim, length, mask, other features, and whether a gradient is
wanted; it says what it chose and why, and what it chooses runs as if it had been asked for by name.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from attention import registry
from attention.auto_table import MEASURED
from attention.base import (
    CACHES,
    FEATURES,
    Attention,
    AttentionCall,
    AttentionOptions,
    CacheView,
    Capabilities,
    Costs,
    Declaration,
    UnsupportedAttention,
    must_be_deterministic,
)
from attention.call import NEEDS_ATTN_MASK, cached_call_fields, call_fields
from attention.checks import arch_name

# Where nothing is measured: what is known to be fast, before the two that do everything.
DEFAULT: dict[str, tuple[str, ...]] = {
    "cuda": ("sdpa", "triton", "flex", "tiled", "naive"),
    "cpu": ("sdpa", "tiled", "naive"),
    "mps": ("sdpa", "naive"),
}
# One query over a short cache in a compiled step on CUDA: Inductor makes two fused reductions of the formula,
# which read the cache once, where SDPA's mask needs it copied first. GPT-2 124M on an H200, tokens/s: 1,892
# against 1,706 at batch 1, 36,860 against 28,540 at 32. Longer caches want their keys split.
COMPILED_DECODE: tuple[str, ...] = ("naive", "sdpa", "tiled")
# Tried after all measured implementations: PyTorch's own choice, which may be its unfused math backend, then
# the implementations that support every option, the one with O(T) memory before the one with O(T^2).
LAST = ("sdpa", "tiled", "naive")
# Two classes of lengths, as the winners differ: a short call is a few waves of tiles, whose launch and tail
# count, a long one is its inner loop. More classes would give the same names on a GPU at hand.
SHORT = 1024


def table_key(call: AttentionCall) -> tuple[str, str]:
    """(workload, mask) as in the table: training, forward or decode; causal, full or masked."""
    workload = "training" if call.backward else "decode" if call.tq == 1 else "forward"
    if call.features & NEEDS_ATTN_MASK or (call.causal and 1 < call.tq != call.tk):
        return workload, "masked"
    return workload, "causal" if call.causal or call.tq == 1 else "full"


@dataclass(frozen=True)
class Order:
    """Names, fastest first, and the source of this order; the first `measured` of them have been measured."""

    names: tuple[str, ...]
    source: str
    measured: int = 0


def order(call: AttentionCall, compiled: bool = False) -> Order:
    """Whom to try for `call`, in a compiled step or not."""
    workload, mask = table_key(call)
    compiled_decode = call.device == "cuda" and compiled and (workload, mask) == ("decode", "masked")
    workloads = (["compiled decode"] if compiled_decode else []) + [workload]
    # Where no masked call has been measured, the causal order; SDPA, which writes it out, at the end.
    masks = [mask] if mask != "masked" else ["masked", "causal"]
    for workload, measured_mask in ((p, m) for p in workloads for m in masks):
        if found := _measured(call, workload, measured_mask):
            names, source = found
            if measured_mask != mask:
                names = tuple(sorted(names, key=_writes_masks))
                source += ", those last that write the mask out"
            return Order(tuple(dict.fromkeys((*names, *LAST))), source, len(names))
        if workload == "compiled decode" and call.tk <= SHORT:
            return Order(COMPILED_DECODE, "in a compiled step")
    names = DEFAULT.get(call.device, ())
    if mask == "masked" and call.device == "cuda":
        names = (*(name for name in names if name not in LAST), *LAST)
    return Order(names, "in the default order")


def _writes_masks(name: str) -> bool:
    return registry.declaration(name).writes_masks


def _measured(call: AttentionCall, workload: str, mask: str) -> tuple[tuple[str, ...], str] | None:
    """The line of the table for a call, and what it is of."""
    lines = MEASURED.get((call.arch or (0, 0), 8 * call.dtype.itemsize, workload, mask))
    if not lines:
        return None
    dims = sorted({head_dim for head_dim, _, _ in lines if head_dim is not None})
    dim = next((d for d in dims if call.head_dim <= d), dims[-1] if dims else None)
    lines = [line for line in lines if line[0] in (dim, None)]
    _, longest, names = next((line for line in lines if line[1] is None or call.tk <= line[1]), lines[-1])
    words = [f"{mask} {workload}" if workload in ("training", "forward") else workload]
    words += [] if dim is None else [f"D <= {dim}"]
    words += [] if longest is None else [f"T <= {longest:,}"]
    return tuple(names.split()), f"of those measured for {', '.join(words)}"


class AutoAttention(Attention):
    """Delegates each call to the first implementation in its order that can run it."""

    capabilities: ClassVar[Capabilities] = Capabilities(
        features=frozenset(FEATURES),
        devices=frozenset(DEFAULT),
        deterministic_on_request=True,
        caches=frozenset(CACHES),
    )
    declaration: ClassVar[Declaration] = Declaration(dispatches_to="implementations")
    uses_our_dropout_mask: ClassVar[bool] = False  # what it chooses does, if at all

    def __init__(self, name: str = "auto"):
        super().__init__(name)
        # Plain dicts: what is built later must not appear in the module tree.
        self._built: dict[str, Attention] = {}
        self._chosen: dict[tuple[Any, ...], str] = {}

    def _build(self, name: str) -> Attention:
        if name not in self._built:
            self._built[name] = registry.build(name)
        return self._built[name]

    def _reasons(self, name: str, call: AttentionCall) -> list[str]:
        """Why `name` cannot run `call`, or is not to be chosen for it."""
        attention = self._build(name)
        return [*attention.unsupported_reasons(call), *attention.reasons_against_auto(call)]

    def _first_capable(
        self, call: AttentionCall, names: tuple[str, ...] | None = None
    ) -> tuple[str | None, dict[str, list[str]]]:
        """The first capable implementation, if any, and why those before it were passed over."""
        refusals: dict[str, list[str]] = {}
        for name in order(call).names if names is None else names:
            if not (reasons := self._reasons(name, call)):
                return name, refusals
            refusals[name] = reasons
        return None, refusals

    def choice(self, call: AttentionCall, *, compiled: bool = False) -> tuple[str, str]:
        """(name, why) of what will run `call`, in a compiled step or not. Raises UnsupportedAttention where
        nothing can."""
        self.require(call)
        found = order(call, compiled)
        name, refusals = self._first_capable(call, found.names)
        device_name = arch_name(call.arch) or call.device
        names = " > ".join(found.names[: max(2, len(refusals) + 2)])
        more = " > ..." if len(found.names) > max(2, len(refusals) + 2) else ""
        if found.measured and name not in found.names[: found.measured]:
            why = f"on {device_name} none {found.source} can; the first of {' > '.join(LAST)} that can"
        else:
            why = f"the fastest on {device_name} {found.source}: {names}{more}"
        if refusals:
            brief = (f"{other}: {', '.join(map(_without_remedy, said))}" for other, said in refusals.items())
            why += f"; passed over {'; '.join(brief)}"
        return name, why

    def resolve(self, call: AttentionCall) -> Attention:
        return self._build(self.choice(call)[0])

    def predicted_choice(self, call: AttentionCall) -> Attention:
        """What would run `call`, which may be of a GPU that is not at hand: then by what is declared, as if
        all libraries were installed there."""
        arch = torch.cuda.get_device_capability() if torch.cuda.is_available() else None
        if call.device != "cuda" or (arch is not None and call.arch == arch):
            return self.resolve(call)
        for name in order(call).names:
            attention = self._build(name)
            if not [*attention.capabilities.reasons(call), *attention.reasons_against_auto(call)]:
                return attention
        raise UnsupportedAttention(self.name, self.unsupported_reasons(call), call)

    def costs(self, call: AttentionCall, compiled: bool = False) -> Costs:
        return self.predicted_choice(call).costs(call, compiled)

    def shared_memory(self, call: AttentionCall, max_bytes: int) -> dict[str, int]:
        return self.predicted_choice(call).shared_memory(call, max_bytes)

    def unsupported_reasons(self, call: AttentionCall) -> list[str]:
        name, refusals = self._first_capable(call)
        if name is not None:
            return []
        reasons = [f"{other}: {reason}" for other, said in refusals.items() for reason in said]
        return reasons or super().unsupported_reasons(call)

    def _memoised_choice(self, index: int | None, compiled: bool, facts: dict[str, Any]) -> str:
        """The choice by an AttentionCall's facts, which torch.compile evaluates once, while it traces."""
        key = (index, compiled, must_be_deterministic(), *facts.values())
        if key not in self._chosen:
            arch = torch.cuda.get_device_capability(index) if facts["device"] == "cuda" else None
            call = AttentionCall(purpose="call", arch=arch, **facts)
            self._chosen[key] = self.choice(call, compiled=compiled)[0]
        return self._chosen[key]

    # as torch.compiler.assume_constant_result does, which imports Dynamo: 2 s, also where nothing is compiled
    _memoised_choice._dynamo_marked_constant = True

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, options: AttentionOptions, dropout_seed: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        chosen = self._chosen_for(q, call_fields(q, k, v, options))
        return chosen.attend(q, k, v, options, chosen.draw_seed(options.dropout_p, q.device))

    def attend_cached(
        self, q: Tensor, view: CacheView, options: AttentionOptions
    ) -> tuple[Tensor, Tensor | None]:
        return self._chosen_for(q, cached_call_fields(q, view, options)).attend_cached(q, view, options)

    def _chosen_for(self, q: Tensor, facts: dict[str, Any]) -> Attention:
        # Lengths may be symbolic while compiling, so others stand for them. The order depends only on whether
        # they are 1, whether they are short or long, and which one is greater. A refusal of a certain length
        # (sdpa_cudnn's, and flex's where nothing is compiled) is not seen here.
        tq, tk = facts["tq"], facts["tk"]
        representative_tk = 1 if tk == 1 else SHORT if tk <= SHORT else 2 * SHORT
        tq_offset = 0 if tq == tk else -1 if tq < tk else 1
        facts |= {"batch": 1, "tq": 1 if tq == 1 else representative_tk + tq_offset, "tk": representative_tk}
        return self._built[self._memoised_choice(q.device.index, torch.compiler.is_compiling(), facts)]


def _without_remedy(reason: str) -> str:
    """A refusal without its remedy."""
    return reason.partition(": needs ")[0].partition(" (")[0]
