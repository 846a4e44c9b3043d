"""attention=auto: the first capable implementation, in order of speed on the device at hand.

It decides per call, by device, dtype, head dim, features, and whether a gradient is wanted; it says what it
chose and why, and what it chooses runs as if it had been asked for by name.
"""

from __future__ import annotations

import importlib
from typing import Any, ClassVar

import torch
from torch import Tensor

from attention.base import FEATURES, Attention, AttentionCall, Capabilities

# Fastest first, by device. To be generated from results/ (scripts/report.py, the op benchmark at the training
# shape); until those exist, what is known to be fast comes before what can do everything.
ORDER: dict[str, tuple[str, ...]] = {
    "cuda": ("sdpa", "tiled", "naive"),
    "cpu": ("sdpa", "tiled", "naive"),
    "mps": ("sdpa", "naive"),
}
# One query over a cache in a compiled step on CUDA: Inductor makes two fused reductions of the formula, which
# read the cache once, where SDPA's mask needs it copied first. GPT-2 124M on an H200, tokens/s: 1,892 against
# 1,706 at batch 1, 36,860 against 28,540 at 32 (results/generate).
COMPILED_DECODE: tuple[str, ...] = ("naive", "sdpa", "tiled")
# Where a name is built from, at first use: the class, as in its yaml, and its defaults.
CLASSES: dict[str, str] = {
    "sdpa": "attention.sdpa.SDPAAttention",
    "tiled": "attention.tiled.TiledAttention",
    "naive": "attention.naive.NaiveAttention",
}


def _order(call: AttentionCall, compiled: bool) -> tuple[str, ...]:
    decoding = call.tq == 1 and "kv_lengths" in call.features
    if call.device == "cuda" and compiled and decoding:
        return COMPILED_DECODE
    return ORDER.get(call.device, ())


class AutoAttention(Attention):
    """Delegates each call to the first implementation in ORDER that can run it."""

    capabilities: ClassVar[Capabilities] = Capabilities(
        features=frozenset(FEATURES), devices=frozenset(ORDER)
    )

    draws_seed: ClassVar[bool] = False  # what it chooses does, if at all

    def __init__(self, name: str = "auto"):
        super().__init__(name)
        # Plain dicts: what is built later must not appear in the module tree.
        self._built: dict[str, Attention] = {}
        self._chosen: dict[tuple[Any, ...], str] = {}

    def _build(self, name: str) -> Attention:
        if name not in self._built:
            module, cls = CLASSES[name].rsplit(".", 1)
            self._built[name] = getattr(importlib.import_module(module), cls)(name=name)
        return self._built[name]

    def _refusals(
        self, call: AttentionCall, order: tuple[str, ...] | None = None
    ) -> tuple[str | None, dict[str, list[str]]]:
        """The first capable implementation, if any, and why those before it were passed over."""
        refusals: dict[str, list[str]] = {}
        for name in _order(call, False) if order is None else order:
            if not (reasons := self._build(name).unsupported_reasons(call)):
                return name, refusals
            refusals[name] = reasons
        return None, refusals

    def choice(self, call: AttentionCall, *, compiled: bool = False) -> tuple[str, str]:
        """(name, why) of what will run `call`, in a compiled step or not. Raises UnsupportedAttention where
        nothing can."""
        self.require(call)
        order = _order(call, compiled)
        name, refusals = self._refusals(call, order)
        why = f"the fastest on {call.device} in {' > '.join(order)}"
        if refusals:
            why += ", as " + "; ".join(f"{other} has {', '.join(said)}" for other, said in refusals.items())
        return name, why

    def resolve(self, call: AttentionCall) -> Attention:
        return self._build(self.choice(call)[0])

    def unsupported_reasons(self, call: AttentionCall) -> list[str]:
        name, refusals = self._refusals(call)
        if name is not None:
            return []
        reasons = [f"{other}: {reason}" for other, said in refusals.items() for reason in said]
        return reasons or super().unsupported_reasons(call)

    @torch.compiler.assume_constant_result
    def _pick(self, *facts: Any) -> str:
        """The choice by plain facts, which torch.compile evaluates once, while it traces."""
        if facts not in self._chosen:
            device, index, dtype, heads, kv_heads, tq, tk, head_dim, causal, backward, compiled, *on = facts
            names = (
                "window",
                "softcap",
                "alibi",
                "bias",
                "bias_grad",
                "segments",
                "kv_lengths",
                "dropout",
                "lse",
            )
            call = AttentionCall(
                purpose="call",
                device=device,
                arch=torch.cuda.get_device_capability(index) if device == "cuda" else None,
                dtype=dtype,
                batch=1,
                heads=heads,
                kv_heads=kv_heads,
                tq=tq,
                tk=tk,
                head_dim=head_dim,
                causal=causal,
                features=frozenset(name for name, is_on in zip(names, on, strict=True) if is_on),
                backward=backward,
            )
            self._chosen[facts] = self.choice(call, compiled=compiled)[0]
        return self._chosen[facts]

    def attend(self, q: Tensor, k: Tensor, v: Tensor, **o: Any) -> tuple[Tensor, Tensor | None]:
        grad, bias = torch.is_grad_enabled(), o["bias"]
        bias_grad = grad and bias is not None and bias.requires_grad
        # Lengths may be symbolic while compiling; all that a choice asks of them is 1 or more, equal or not.
        tq = 1 if q.shape[2] == 1 else 2
        tk = tq if q.shape[2] == k.shape[2] else 3
        name = self._pick(
            q.device.type,
            q.device.index,
            q.dtype,
            q.shape[1],
            k.shape[1],
            tq,
            tk,
            q.shape[3],
            o["causal"],
            grad and (q.requires_grad or k.requires_grad or v.requires_grad or bias_grad),
            torch.compiler.is_compiling(),
            o["window"] is not None,
            o["softcap"] is not None,
            o["alibi_slopes"] is not None,
            bias is not None,
            bias_grad,
            o["segments"] is not None,
            o["kv_lengths"] is not None,
            o["dropout_p"] > 0,
            o["return_lse"],
        )
        chosen = self._built[name]
        return chosen.attend(q, k, v, **(o | {"dropout_seed": chosen.draw_seed(o["dropout_p"], q.device)}))
