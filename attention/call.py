"""A call of attention as known before any tensor exists, and what an implementation declares that it can
do."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from attention.checks import arch_name, dtype_name
from attention.geometry import normalise_window
from conf.values import UserError
from ops.cache_view import CACHE_DTYPES, CacheView
from ops.options import AttentionOptions

# What a call may ask for beyond plain causal self-attention, and what to change to do without it.
FEATURES: dict[str, str] = {
    "window": "model.window=null",
    "softcap": "model.softcap=null",
    "alibi": "model.position=learned, or rope",
    "alibi_rows": "alibi_slopes of shape (Hq,)",
    "bias": "no attention bias",
    "bias_grad": "a bias without gradient",
    "document_ids": "data.document_mask=false",
    "kv_lengths": "another attention for generation with a cache",
    "block_mask": "model.sparsity=null",
    "relative_bias": "model.position=learned, rope or alibi",
    "dropout": "model.attn_dropout=0",
    "gqa": "model.n_kv_head=null",
    "noncausal": "model.causal=true",
    "rectangular": "as many queries as keys (not trainer=context_parallel)",
    "lse": "return_lse=False",
}
# For these SDPA needs a mask of Tq x Tk entries (attn_mask), as it does for a causal mask with Tq different
# from Tk and more than one query; others skip masked tiles.
NEEDS_ATTN_MASK = frozenset({"window", "alibi", "bias", "bias_grad", "document_ids", "kv_lengths"})
NEEDS_ATTN_MASK |= {"block_mask", "relative_bias"}
# Caches that are read in place of k and v (ops/cache_view.py), and what to change to do without one.
CACHES: dict[str, str] = {"paged": "cache=dense", **dict.fromkeys(CACHE_DTYPES, "cache_dtype=auto")}
# Features that no implementation has where a cache is read in place of k and v.
UNSUPPORTED_WITH_CACHE = frozenset(
    {"alibi_rows", "bias", "document_ids", "block_mask", "relative_bias", "dropout"}
)
LOW_PRECISION = frozenset({torch.float16, torch.bfloat16})
FLOATS = LOW_PRECISION | {torch.float32, torch.float64}


class UnsupportedAttention(UserError):
    """An implementation was asked for what it cannot do. `.reasons` holds all reasons, not the first."""

    def __init__(self, name: str, reasons: Sequence[str], call: AttentionCall | None = None):
        self.name, self.reasons, self.call = name, list(reasons), call
        lines = "".join(f"\n  - {reason}" for reason in self.reasons)
        super().__init__(
            f"attention={name} cannot run {call or 'this call'}:{lines}\n"
            "Change these settings, or choose another implementation: attention=auto chooses one that "
            "supports the call; attention=naive and attention=tiled support every option."
        )


def call_fields(q: Tensor, k: Tensor, v: Tensor, options: AttentionOptions) -> dict[str, Any]:
    """What an AttentionCall of live tensors says by its fields, but for its purpose and the GPU."""
    grad = torch.is_grad_enabled()
    bias, relative_bias = options.bias, options.relative_bias
    bias_grad = grad and bias is not None and bias.requires_grad
    learned = bias_grad or (grad and relative_bias is not None and relative_bias.requires_grad)
    return {
        "device": q.device.type,
        "dtype": q.dtype,
        "batch": q.shape[0],
        "heads": q.shape[1],
        "kv_heads": k.shape[1],
        "tq": q.shape[2],
        "tk": k.shape[2],
        "head_dim": q.shape[3],
        "causal": options.causal,
        "features": _features_of(options, bias_grad),
        "backward": grad and (q.requires_grad or k.requires_grad or v.requires_grad or learned),
    }


def cached_call_fields(q: Tensor, view: CacheView, options: AttentionOptions) -> dict[str, Any]:
    """The same where `view` is read in place of k and v, which has no gradient."""
    _, kv_heads, capacity, _ = view.k.shape
    return {
        "device": q.device.type,
        "dtype": q.dtype,
        "batch": q.shape[0],
        "heads": q.shape[1],
        "kv_heads": kv_heads,
        "tq": q.shape[2],
        "tk": capacity,
        "head_dim": q.shape[3],
        "causal": options.causal,
        "features": (*_features_of(options, False), "kv_lengths"),
        "cache": tuple(sorted(view.kinds)),
    }


def _features_of(options: AttentionOptions, bias_grad: bool) -> tuple[str, ...]:
    """The features that a call's options ask for; `bias_grad`: whether the bias is to get a gradient."""
    left, right = normalise_window(options.window) or (-1, -1)
    asked = (
        # Under `causal` a right bound says nothing.
        ("window", left >= 0 or (right >= 0 and not options.causal)),
        ("softcap", options.softcap is not None),
        ("alibi", options.alibi_slopes is not None),
        ("alibi_rows", options.alibi_slopes is not None and options.alibi_slopes.ndim == 2),
        ("bias", options.bias is not None),
        ("bias_grad", bias_grad),
        ("document_ids", options.document_ids is not None),
        ("kv_lengths", options.kv_lengths is not None),
        ("block_mask", options.block_mask is not None),
        ("relative_bias", options.relative_bias is not None),
        ("dropout", options.dropout_p > 0),
        ("lse", options.return_lse),
    )
    return tuple([name for name, on in asked if on])


@dataclass(frozen=True)
class AttentionCall:
    """A call as known before any tensor exists, so that refusals come at start-up.

    `purpose` is training, validation, prefill, decode, or call (made from live tensors); `arch` is the
    compute capability of a CUDA device, (9, 0), where known; `backward`: whether gradients will be asked for;
    `cache`: names of CACHES, where a CacheView is read in place of k and v.
    """

    purpose: str
    device: str
    arch: tuple[int, int] | None
    dtype: torch.dtype
    batch: int
    heads: int
    kv_heads: int
    tq: int
    tk: int
    head_dim: int
    causal: bool = True
    features: frozenset[str] = frozenset()
    backward: bool = False
    cache: frozenset[str] = frozenset()

    def __post_init__(self) -> None:
        # The shape implies these, so that no caller can forget them.
        implied = {
            "gqa": self.heads != self.kv_heads,
            "rectangular": self.tq != self.tk,
            "noncausal": not self.causal,
        }
        features = frozenset(self.features) | {name for name, on in implied.items() if on}
        if unknown := features - FEATURES.keys():
            raise ValueError(
                f"unknown attention features {sorted(unknown)}; the known ones are {sorted(FEATURES)}"
            )
        object.__setattr__(self, "features", features)
        object.__setattr__(self, "cache", frozenset(self.cache))

    @classmethod
    def of(
        cls, q: Tensor, k: Tensor, v: Tensor, options: AttentionOptions, purpose: str = "call"
    ) -> AttentionCall:
        """The call that `Attention.forward` of these would be."""
        arch = torch.cuda.get_device_capability(q.device) if q.device.type == "cuda" else None
        return cls(purpose=purpose, arch=arch, **call_fields(q, k, v, options))

    @classmethod
    def of_cached(cls, q: Tensor, view: CacheView, options: AttentionOptions) -> AttentionCall:
        """The same where `view` is read in place of k and v."""
        arch = torch.cuda.get_device_capability(q.device) if q.device.type == "cuda" else None
        return cls(purpose="call", arch=arch, **cached_call_fields(q, view, options))

    def __str__(self) -> str:
        kind = "the call" if self.purpose == "call" else f"the {self.purpose} call"
        return (
            f"{kind} ({f'{self.device} {arch_name(self.arch)}'.rstrip()}, {dtype_name(self.dtype)}, "
            f"q ({self.batch}, {self.heads}, {self.tq}, {self.head_dim}), "
            f"k and v ({self.batch}, {self.kv_heads}, {self.tk}, {self.head_dim}), "
            f"{'forward and backward' if self.backward else 'forward only'}, "
            f"features: {', '.join(sorted(self.features)) or 'none'})"
        )


@dataclass(frozen=True)
class Capabilities:
    """What an implementation can do. Whatever is not declared is refused."""

    features: frozenset[str] = frozenset()
    devices: frozenset[str] = frozenset({"cpu", "cuda"})
    dtypes: frozenset[torch.dtype] = FLOATS
    min_arch: tuple[int, int] | None = None
    max_arch: tuple[int, int] | None = None
    max_head_dim: int | None = None
    head_dim_multiple: int = 1
    backward: bool = True
    # Features that run forward only.
    forward_only_features: frozenset[str] = frozenset()
    # Names of CACHES that it reads in place of k and v.
    caches: frozenset[str] = frozenset()
    # The same call gives the same bits, forward and backward: always, or once
    # torch.use_deterministic_algorithms asks for it (PyTorch may then refuse its own operators).
    deterministic: bool = False
    deterministic_on_request: bool = False

    @property
    def can_be_deterministic(self) -> bool:
        return self.deterministic or self.deterministic_on_request

    def reasons(self, call: AttentionCall) -> list[str]:
        """Why `call` cannot run, every reason with what to change; empty when it can."""
        reasons = [f"no {f}: needs {FEATURES[f]}" for f in sorted(call.features - self.features)]
        reasons += [f"no {kind} cache: needs {CACHES[kind]}" for kind in sorted(call.cache - self.caches)]
        if call.cache:
            kinds, remedies = ", ".join(sorted(call.cache)), sorted({CACHES[kind] for kind in call.cache})
            reasons += [
                f"no {f} with a cache that is {kinds}: needs {' and '.join(remedies)}"
                for f in sorted(call.features & UNSUPPORTED_WITH_CACHE)
            ]
        if call.device not in self.devices:
            reasons.append(
                f"no {call.device}: runs on {' and '.join(sorted(self.devices))} (trainer.accelerator)"
            )
        if call.dtype not in self.dtypes:
            supported = ", ".join(sorted(map(dtype_name, self.dtypes)))
            reasons.append(f"no {dtype_name(call.dtype)}: needs one of {supported} (precision)")
        if call.arch and not (self.min_arch or (0, 0)) <= call.arch <= (self.max_arch or (99, 0)):
            low, high = (arch_name(arch) or "any" for arch in (self.min_arch, self.max_arch))
            reasons.append(f"no {arch_name(call.arch)}: needs a GPU from {low} to {high}")
        if call.head_dim > (self.max_head_dim or call.head_dim) or call.head_dim % self.head_dim_multiple:
            most = f"at most {self.max_head_dim}" if self.max_head_dim else "any size"
            multiple = f", a multiple of {self.head_dim_multiple}" if self.head_dim_multiple > 1 else ""
            reasons.append(
                f"no head dim {call.head_dim}: needs {most}{multiple} (model.n_embd / model.n_head)"
            )
        if call.backward and not self.backward:
            reasons.append("no backward: runs forward only (generation, validation)")
        elif call.backward:
            lacking = sorted(call.features & self.forward_only_features)
            reasons += [f"no gradient with {f}: needs {FEATURES[f]}" for f in lacking]
        return reasons
