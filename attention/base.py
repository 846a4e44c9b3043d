"""The attention contract: one exact function, many implementations.

Every implementation computes, per batch b, head h and query i,

    s_j = scale * <q_i, k_j>;  s_j = softcap * tanh(s_j / softcap);  s_j += -slope_h * |rel| + bias_ij;
    s_j = -inf where j is not visible;  p = softmax(s);  p = dropout(p);  out_i = sum_j p_j v_j

in this order, with rel = j - (i + Tk - Tq), the distance to the bottom-right diagonal. `kv_lengths[b]` takes
the place of Tk in every formula. attention/naive.py is the specification written out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from attention.checks import arch_name, call_key, check_inputs, dtype_name
from attention.geometry import empty_attention, normalise_window
from conf.values import UserError

Segments = Tensor | tuple[Tensor, Tensor]

# What a call may ask for beyond plain causal self-attention, and what to change to do without it.
FEATURES: dict[str, str] = {
    "window": "model.window=null",
    "softcap": "model.softcap=null",
    "alibi": "model.position=learned, or rope",
    "bias": "no attention bias",
    "bias_grad": "a bias without gradient",
    "segments": "data.document_mask=false",
    "kv_lengths": "another attention for generation with a cache",
    "dropout": "model.attn_dropout=0",
    "gqa": "model.n_kv_head=null",
    "noncausal": "model.causal=true",
    "rectangular": "as many queries as keys",
    "lse": "return_lse=False",
}
LOW_PRECISION = frozenset({torch.float16, torch.bfloat16})
FLOATS = LOW_PRECISION | {torch.float32, torch.float64}


class UnsupportedAttention(UserError):
    """An implementation was asked for what it cannot do. `.reasons` holds all reasons, not the first."""

    def __init__(self, name: str, reasons: Sequence[str], call: AttentionCall | None = None):
        self.name, self.reasons, self.call = name, list(reasons), call
        lines = "".join(f"\n  - {reason}" for reason in self.reasons)
        super().__init__(
            f"attention={name} cannot run {call or 'this call'}:{lines}\n"
            "Change what is named above, or choose another implementation: attention=auto takes the first "
            "capable one; attention=naive and attention=tiled do every option."
        )


@dataclass(frozen=True)
class AttentionCall:
    """A call as known before any tensor exists, so that refusals come at start-up.

    `purpose` is training, validation, prefill, decode, or call (made from live tensors); `arch` is the
    compute capability of a CUDA device, (9, 0), where known; `backward`: whether gradients will be asked for.
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

    @classmethod
    def of(cls, q: Tensor, k: Tensor, v: Tensor, *, purpose: str = "call", **options: Any) -> AttentionCall:
        """The call that `Attention.forward(q, k, v, **options)` would be."""
        bias, grad = options.get("bias"), torch.is_grad_enabled()
        bias_grad = grad and bias is not None and bias.requires_grad
        causal = options.get("causal", True)
        left, right = normalise_window(options.get("window")) or (-1, -1)
        asked = {
            # Under `causal` a right bound says nothing.
            "window": left >= 0 or (right >= 0 and not causal),
            "softcap": options.get("softcap") is not None,
            "alibi": options.get("alibi_slopes") is not None,
            "bias": bias is not None,
            "bias_grad": bias_grad,
            "segments": options.get("segments") is not None,
            "kv_lengths": options.get("kv_lengths") is not None,
            "dropout": options.get("dropout_p", 0.0) > 0,
            "lse": options.get("return_lse", False),
        }
        return cls(
            purpose=purpose,
            device=q.device.type,
            arch=torch.cuda.get_device_capability(q.device) if q.device.type == "cuda" else None,
            dtype=q.dtype,
            batch=q.shape[0],
            heads=q.shape[1],
            kv_heads=k.shape[1],
            tq=q.shape[2],
            tk=k.shape[2],
            head_dim=q.shape[3],
            causal=causal,
            features=frozenset(name for name, on in asked.items() if on),
            backward=grad and (q.requires_grad or k.requires_grad or v.requires_grad or bias_grad),
        )

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
    no_gradient: frozenset[str] = frozenset()
    # The same call gives the same bits, forward and backward.
    deterministic: bool = False

    def reasons(self, call: AttentionCall) -> list[str]:
        """Why `call` cannot run, every reason with what to change; empty when it can."""
        reasons = [f"no {f}: needs {FEATURES[f]}" for f in sorted(call.features - self.features)]
        if call.device not in self.devices:
            reasons.append(
                f"no {call.device}: runs on {' and '.join(sorted(self.devices))} (trainer.accelerator)"
            )
        if call.dtype not in self.dtypes:
            able = ", ".join(sorted(map(dtype_name, self.dtypes)))
            reasons.append(f"no {dtype_name(call.dtype)}: needs one of {able} (precision)")
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
            lacking = sorted(call.features & self.no_gradient)
            reasons += [f"no gradient with {f}: needs {FEATURES[f]}" for f in lacking]
        return reasons


class Attention(nn.Module):
    """Base of every implementation: checks, the dropout seed, empty inputs; the maths is in `attend`.

    No parameters, no buffers: checkpoints never depend on the choice. Subclasses set `capabilities`,
    `attend`.
    """

    capabilities: ClassVar[Capabilities] = Capabilities()
    # Libraries with a generator of their own set this to False.
    draws_seed: ClassVar[bool] = True

    def __init__(self, name: str):
        super().__init__()
        self.name = name
        self._allowed: set[Any] = set()

    def attend(self, q: Tensor, k: Tensor, v: Tensor, **options: Any) -> tuple[Tensor, Tensor | None]:
        """The implementation: (out, lse), where lse may be None unless `return_lse`.

        Inputs are checked and none is empty. `options` are all the keywords of `forward`, made definite
        (`scale` a float > 0, `window` None or (left, right) with -1 for unbounded, `segments` a pair), and
        `dropout_seed`, a 0-d int64 tensor on the device (None without dropout).
        """
        raise NotImplementedError

    def unsupported_reasons(self, call: AttentionCall) -> list[str]:
        """All reasons why this implementation cannot run `call`; empty when it can."""
        return self.capabilities.reasons(call)

    def resolve(self, call: AttentionCall) -> Attention:
        """The implementation that runs `call`: this one, unless it delegates."""
        return self

    def require(self, call: AttentionCall) -> None:
        """Raises UnsupportedAttention, with every reason, unless `call` can run."""
        if reasons := self.unsupported_reasons(call):
            raise UnsupportedAttention(self.name, reasons, call)

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        causal: bool = True,
        scale: float | None = None,
        window: tuple[int | None, int | None] | None = None,
        softcap: float | None = None,
        alibi_slopes: Tensor | None = None,
        bias: Tensor | None = None,
        segments: Segments | None = None,
        kv_lengths: Tensor | None = None,
        dropout_p: float = 0.0,
        return_lse: bool = False,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Exact attention: out (B, Hq, Tq, D) in q's dtype, or (out, lse), lse (B, Hq, Tq) fp32, natural log.

        Args:
            q: (B, Hq, Tq, D), any strides with a contiguous last dimension, as k and v.
            k, v: (B, Hkv, Tk, D), Hq a multiple of Hkv; query head h reads key head h // (Hq / Hkv).
            causal: query i sees keys j <= i + Tk - Tq (aligned bottom-right).
            scale: of the scores, any number; None is D**-0.5. One of 0 or less copies q.
            window: (left, right), keys seen on each side of the diagonal; -1 or None is unbounded.
            softcap: softcap * tanh(s / softcap) on the scaled scores, before ALiBi, bias and mask (Gemma 2).
            alibi_slopes: (Hq,), adds -slope * |i + Tk - Tq - j| (Press et al. 2022).
            bias: broadcastable to (B, Hq, Tq, Tk), added to the scores.
            segments: document ids (B, T) int32, or a pair (B, Tq), (B, Tk): they see each other where equal.
            kv_lengths: (B,) int32 on the device, 0 to Tk, in its place; what lies beyond may be NaN.
            dropout_p: of the probabilities, in [0, 1); the seed comes from torch's default generator.
            return_lse: also the log of the softmax's denominator; it carries no gradient.

        A row that sees no key gives 0 and lse = -inf. fp64 inputs are computed, and give an lse, in fp64.

        Raises:
            ValueError: shapes, dtypes or values that make no sense.
            UnsupportedAttention: a sensible call that this implementation cannot do.
        """
        options = {
            "causal": causal,
            "scale": scale,
            "window": window,
            "softcap": softcap,
            "alibi_slopes": alibi_slopes,
            "bias": bias,
            "segments": segments,
            "kv_lengths": kv_lengths,
            "dropout_p": dropout_p,
            "return_lse": return_lse,
        }
        if not torch.compiler.is_compiling():
            self._check(q, k, v, options)
        if q.numel() == 0 or k.numel() == 0:
            out, lse = empty_attention(q, k, v, bias)
        else:
            seed = self.draw_seed(dropout_p, q.device)
            options["window"] = normalise_window(window)
            options["segments"] = (segments, segments) if isinstance(segments, Tensor) else segments
            if scale is None:
                scale = q.shape[-1] ** -0.5
            elif scale <= 0:  # kernels that scale behind the mask, or the maximum, need more than 0
                # For 0 a small one: the gradient that is multiplied by 0 must not be an infinity of fp16.
                q, scale = q * (-1.0 if scale < 0 else 0.0), -scale or 2.0**-10
            options["scale"] = scale
            if q.dtype == torch.float32 and torch.is_autocast_enabled(q.device.type):
                # Autocast would compute in 16 bits, and give these; the dtype is the caller's decision.
                with torch.autocast(q.device.type, enabled=False):
                    out, lse = self.attend(q, k, v, dropout_seed=seed, **options)
            else:
                out, lse = self.attend(q, k, v, dropout_seed=seed, **options)
        return (out, lse.detach()) if return_lse else out

    def draw_seed(self, dropout_p: float, device: torch.device) -> Tensor | None:
        """The seed of one call's dropout, from torch's default generator; None where none is to be drawn."""
        if dropout_p == 0 or not self.draws_seed:
            return None
        return torch.randint(0, 2**63 - 1, (), dtype=torch.int64, device=device)

    def _check(self, q: Tensor, k: Tensor, v: Tensor, options: dict[str, Any]) -> None:
        """Checks a live call once per kind of call: a repeated one costs a set look-up."""
        key = call_key(q, k, v, options)
        if key in self._allowed:
            return
        check_inputs(q, k, v, **options)
        self.require(AttentionCall.of(q, k, v, **options))
        if len(self._allowed) >= 4096:  # a growing cache has a new shape every step
            self._allowed.clear()
        self._allowed.add(key)

    def extra_repr(self) -> str:
        return self.name
