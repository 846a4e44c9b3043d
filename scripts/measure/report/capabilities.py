"""What each implementation of conf/attention can do, as it declares: the table of attention/README.md.

Every cell is asked of `unsupported_reasons` for a call that has this one thing more than a plain causal one,
so that the table cannot say otherwise than a refusal at start-up. What the plain call is refused for already,
as a library that is not installed here, says nothing about the cell.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch

from attention import registry
from attention.base import Attention, AttentionCall
from scripts.measure.report.tables import markdown

ARCHS = ((7, 5), (8, 0), (8, 6), (8, 9), (9, 0), (10, 0), (11, 0), (12, 0))
DTYPES = {
    torch.float16: "fp16",
    torch.bfloat16: "bf16",
    torch.float32: "fp32",
    torch.float64: "fp64",
}
DEVICES = {"cuda": "CUDA", "cpu": "CPU", "mps": "MPS"}
HEAD_DIMS = (8, 16, 32, 64, 96, 128, 160, 192, 256, 320, 512)
# Heading -> the features asked for; bias with its gradient stands beside bias.
FEATURES = {
    "window": "window",
    "ALiBi": "alibi",
    "relative bias": "relative_bias",
    "documents": "document_ids",
    "block-sparse": "block_mask",
    "softcap": "softcap",
    "bias": "bias",
    "dropout": "dropout",
    "kv_lengths": "kv_lengths",
    "GQA": "gqa",
    "lse": "lse",
}


class Asked:
    """One implementation, asked about calls. `arch`: the GPU that calls on CUDA are asked for."""

    arch: tuple[int, int] = (9, 0)

    def __init__(self, attention: Attention):
        self.attention = attention
        probes = [self.call(device, dtype, backward=False) for device in DEVICES for dtype in DTYPES]
        # What every call is refused for is a fault of this machine: a library that is not here.
        self.faults = set.intersection(*(set(attention.unsupported_reasons(probe)) for probe in probes))
        self.archs = [arch for arch in ARCHS if self._dtypes("cuda", arch=arch)]
        if self.archs and self.arch not in self.archs:
            self.arch = self.archs[0]
        self.devices = {device: found for device in DEVICES if (found := self._dtypes(device))}

    def call(self, device: str, dtype: torch.dtype, *features: str, **changes: Any) -> AttentionCall:
        """A short causal call, forward and backward unless changed."""
        facts = {
            "purpose": "call",
            "device": device,
            "arch": self.arch if device == "cuda" else None,
            "dtype": dtype,
            "batch": 1,
            "heads": 4,
            "kv_heads": 2 if "gqa" in features else 4,
            "tq": 128,
            "tk": 128,
            "head_dim": 64,
            "features": frozenset(features) - {"gqa"},
            "backward": True,
        }
        return AttentionCall(**(facts | changes))

    def can(self, call: AttentionCall) -> bool:
        return set(self.attention.unsupported_reasons(call)) <= self.faults

    def _dtypes(self, device: str, **changes: Any) -> list[torch.dtype]:
        return [d for d in DTYPES if self.can(self.call(device, d, backward=False, **changes))]

    def usual(self, device: str) -> torch.dtype:
        """The dtype that features are asked for in: bf16, or what there is."""
        return torch.bfloat16 if torch.bfloat16 in self.devices[device] else self.devices[device][0]

    def trains(self, device: str) -> bool:
        return self.can(self.call(device, self.usual(device)))

    def where(self) -> str:
        """Devices with their dtypes and the GPUs: "CUDA sm_80+: bf16, fp16; CPU (forward only): fp32"."""
        named: dict[tuple[str, ...], list[str]] = {}
        for device, dtypes in self.devices.items():
            words = DEVICES[device] + (f" {self.gpus()}" if device == "cuda" and self.gpus() else "")
            words += "" if self.trains(device) else " (forward only)"
            named.setdefault(tuple(DTYPES[dtype] for dtype in dtypes), []).append(words)
        return "; ".join(f"{', '.join(names)}: {_span(dtypes)}" for dtypes, names in named.items())

    def gpus(self) -> str:
        first, last = ("sm_{}{}".format(*arch) for arch in (self.archs[0], self.archs[-1]))
        if self.archs[-1] == ARCHS[-1]:
            return "" if self.archs[0] == ARCHS[0] else f"{first}+"
        return first if first == last else f"{first} to {last}"

    def head_dims(self) -> str:
        """Those that it trains with, and those of the forward where they are more; of an older GPU where it
        takes others than the one asked for."""
        if getattr(self.attention, "backend", None) in ("flash", "efficient", "cudnn"):
            return "PyTorch decides"  # on the GPU at hand: attention/sdpa.py
        device = next(iter(self.devices))
        dtype = self.usual(device)
        archs = [x for x in self.archs if self.can(self.call(device, dtype, arch=x, backward=False))]
        oldest = archs[0] if device == "cuda" else None
        asked, older = (self._of_passes(device, arch) for arch in (self.call(device, dtype).arch, oldest))
        return asked if asked == older else f"{older}; sm_{self.arch[0]}{self.arch[1]}: {asked}"

    def _of_passes(self, device: str, arch: tuple[int, int] | None) -> str:
        forward = self._head_dims(device, arch, backward=False)
        trained = self._head_dims(device, arch, backward=True) if self.trains(device) else forward
        return trained if trained == forward else f"{trained}; forward: {forward}"

    def _head_dims(self, device: str, arch: tuple[int, int] | None, backward: bool) -> str:
        def can(head_dim: int) -> bool:
            changes = {"arch": arch, "head_dim": head_dim, "backward": backward}
            return self.can(self.call(device, self.usual(device), **changes))

        able = [head_dim for head_dim in HEAD_DIMS if can(head_dim)]
        multiple = next(m for m in (1, 8, 16, 32, 64) if can(64 + m) or m == 64)
        least = f"{able[0]}" if able[0] > max(HEAD_DIMS[0], multiple) else "up"
        by = f", multiples of {multiple}" if multiple > 1 else ""
        return ("any" if able[-1] == HEAD_DIMS[-1] else f"{least} to {able[-1]}") + by

    def feature(self, name: str) -> str:
        """yes; -; forward only, without a gradient; or the devices that can."""
        words = {}
        for device in self.devices:
            call = self.call(device, self.usual(device), name)
            trains = self.trains(device)
            if self.can(replace(call, backward=trains)):
                words[device] = "yes"
            else:
                words[device] = "forward only" if self.can(replace(call, backward=False)) else "-"
        if len(set(words.values())) == 1:
            return next(iter(words.values()))
        limits = {"yes": "", "forward only": " (forward only)"}
        return ", ".join(DEVICES[d] + limits[word] for d, word in words.items() if word in limits)

    def bias(self) -> str:
        """With a gradient, without, or not at all."""
        value, gradient = self.feature("bias"), self._gradient()
        return value if value == "-" else f"{value}, {gradient}"

    def _gradient(self) -> str:
        able = [
            d for d in self.devices
            if self.trains(d) and self.can(self.call(d, self.usual(d), "bias", "bias_grad"))
        ]  # fmt: skip
        trained = [d for d in self.devices if self.trains(d)]
        if not able:
            return "no gradient"
        return "with gradient" + ("" if able == trained else f" on {', '.join(DEVICES[d] for d in able)}")

    def deterministic(self) -> str:
        if self.attention.capabilities.deterministic:
            return "yes"
        return "on request" if hasattr(self.attention, "deterministic") else "-"

    def cells(self) -> list[str]:
        features = [self.bias() if name == "bias" else self.feature(name) for name in FEATURES.values()]
        return [self.where(), self.head_dims(), *features, self.deterministic()]


def _span(dtypes: Sequence[str]) -> str:
    return f"{dtypes[0]} to {dtypes[-1]}" if len(dtypes) == len(DTYPES) else ", ".join(dtypes)


def memory(rows: Iterable[dict[str, Any]]) -> dict[str, str]:
    """O(T) or O(T^2) by name, from rows of the study attention_memory and of the benchmark: the power of T by
    which a head's peak grows from the last length but one to the last. With the backward, or forward where
    that is all there is; in the shape that was measured at the most lengths."""
    found: dict[str, dict[tuple[Any, ...], dict[int, float]]] = {}
    for row in rows:
        p, result = row["point"], row["result"]
        if result.get("peak_mib") and not p["features"]:
            shape = (p["pass"], p["dtype"], p["head_dim"], p["causal"])
            series = found.setdefault(p["implementation"], {}).setdefault(shape, {})
            a_head = result["peak_mib"] / (p["batch"] * p["heads"])
            series[p["seq_len"]] = max(series.get(p["seq_len"], 0.0), a_head)
    named = {}
    for name, by_shape in found.items():
        by_length = max(by_shape.items(), key=lambda item: (item[0][0] != "forward", len(item[1])))[1]
        if len(by_length) > 1:
            *_, (before, small), (last, large) = sorted(by_length.items())
            named[name] = "O(T^2)" if math.log(large / small, last / before) > 1.5 else "O(T)"
    return named


def table(names: Sequence[str], measured: dict[str, str]) -> str:
    """Markdown, a row a yaml."""
    heads = ["", "peak memory", "runs on", "head dim", *FEATURES, "deterministic"]
    cells = {name: Asked(registry.build(name)).cells() for name in names}
    return markdown([heads, *([f"`{n}`", measured.get(n, "not measured"), *of] for n, of in cells.items())])
