"""flash-attn's versions 2, 3 and 4: how each is installed, what it can do, and how its functions are called.

All take q (B, Tq, H, D) and k, v (B, Tk, Hkv, D), or packed documents (B * T, H, D); give out in that layout,
and lse (B, H, Tq), or (H, B * Tq), in natural logarithm; and align causal and window bottom-right. The
low-level functions are called, not the autograd ones, so that ops/library.py can make one op of each.
Written against flash-attn 2.8.3, hopper/ of August 2026, and flash-attn-4 4.0.0b36.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from attention.base import (
    LOW_PRECISION,
    AttentionOptions,
    Capabilities,
    Compilation,
    Kernels,
    UnsupportedAttention,
)
from attention.flash_documents import Documents
from attention.geometry import zero_beyond_lengths

_SHARED = frozenset(
    {"window", "softcap", "document_ids", "kv_lengths", "gqa", "noncausal", "rectangular", "lse"}
)


@dataclass(frozen=True)
class LibraryCall:
    """A call's options with what the library takes in another form."""

    options: AttentionOptions
    documents: Documents | None
    dropout_seed: Tensor | None
    deterministic: bool

    @property
    def kv_lengths(self) -> Tensor | None:
        return self.options.kv_lengths

    @property
    def softcap(self) -> float:  # 0 is off
        return self.options.softcap or 0.0

    @property
    def left(self) -> int:
        return self.options.band[0]

    @property
    def right(self) -> int:
        return self.options.band[1]

    @property
    def causal(self) -> bool:
        return self.right == 0

    @property
    def window_size(self) -> tuple[int, int]:
        """(left, right) beside `causal`, -1 for no bound: with `causal`, which bounds the right side itself,
        right is -1, so that a single query gets the decoding kernels."""
        return self.left, -1 if self.causal else self.right

    def varlen_arguments(self) -> dict[str, Any]:
        return {} if self.documents is None else self.documents.varlen_arguments()

    def common(self) -> dict[str, Any]:
        return {"softmax_scale": self.options.scale, "causal": self.causal, "softcap": self.softcap}

    def window_arguments(self, unbounded: int | None = -1) -> dict[str, int | None]:
        left, right = (unbounded if side < 0 else side for side in self.window_size)
        return {"window_size_left": left, "window_size_right": right}


@dataclass(frozen=True)
class Version:
    """One version of the library. `needs` names, per function called, parameters that older ones lack."""

    number: int
    module: str
    install: str
    needs: dict[str, tuple[str, ...]]
    capabilities: Capabilities
    forward: Callable[..., tuple[Tensor, Tensor]]
    backward: Callable[..., None]
    kernels: Kernels
    compilation: Compilation | None = None
    # Features that it has, but not together.
    mutually_exclusive: tuple[frozenset[str], ...] = ()

    def load(self) -> ModuleType:
        return importlib.import_module(self.module)

    def unavailable_reason(self) -> str | None:
        """Why the library cannot be used here, in its own words where it has any, and how to install it."""
        name = f"FlashAttention-{self.number}"
        try:
            library = self.load()
        except Exception as error:  # a broken binary raises what it likes
            absent = isinstance(error, ModuleNotFoundError) and f"{self.module}.".startswith(f"{error.name}.")
            if absent:
                return f"{name} is not installed ({error}): {self.install}"
            return (
                f"{name} cannot be imported ({type(error).__name__}: {error}): reinstall it, {self.install}"
            )
        for function, parameters in self.needs.items():
            taken = _parameters(getattr(library, function, None))
            if lacking := [p for p in parameters if taken is not None and p not in taken]:
                took = f"{function} takes no {', '.join(lacking)}"
                return f"{name} here is another than this project knows ({took}): {self.install}"
        return None


def _parameters(function: Any) -> list[str] | None:
    """The names of its parameters; none for an absent function; None where they cannot be known."""
    if function is None:
        return []
    function = getattr(function, "_init_fn", function)  # of torch.library.custom_op
    parameters = inspect.signature(function).parameters
    takes_all = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    return None if takes_all else list(parameters)


def _forward2(library: Any, call: LibraryCall, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    tq, tk = q.shape[-3], k.shape[-3]
    if call.documents is not None:
        tq, tk = call.documents.max_seqlen_q, call.documents.max_seqlen_k
    if tq > tk and (call.right >= tk or tk > call.left >= 0 > call.right):
        # flash2 treats window_right >= Tk as unbounded, and an unbounded right side beside a left bound as
        # Tk; both are correct only if Tq <= Tk.
        raise UnsupportedAttention(
            "flash2",
            [
                f"no window {call.left, call.right} for {tq} queries on {tk} keys: "
                f"needs a right bound below {tk}"
            ],
        )
    if call.kv_lengths is not None:
        return _with_cache(library, call, q, k, v, alibi_slopes=call.options.alibi_slopes)
    forward = library._flash_attn_forward if call.documents is None else library._flash_attn_varlen_forward
    with _generator_at(call.dropout_seed, q.device):
        out, lse, *_ = forward(
            q,
            k,
            v,
            **call.varlen_arguments(),
            **call.common(),
            **call.window_arguments(),
            **_options_of_version2(call),
            return_softmax=False,
        )
    return out, lse


def _backward2(library: Any, call: LibraryCall, **tensors: Tensor) -> None:
    # The forward drew from its generator at the seed and offset 0. Filled on the device, with no transfer.
    rng_state = torch.empty(2, dtype=torch.int64, device=tensors["q"].device)
    if call.dropout_seed is not None:
        rng_state[0].fill_(int(call.dropout_seed))
        rng_state[1].fill_(0)
    backward = library._flash_attn_backward if call.documents is None else library._flash_attn_varlen_backward
    options = call.varlen_arguments() | call.common() | call.window_arguments() | _options_of_version2(call)
    backward(**tensors, **options, deterministic=call.deterministic, rng_state=rng_state)


def _options_of_version2(call: LibraryCall) -> dict[str, Any]:
    return {"dropout_p": call.options.dropout_p, "alibi_slopes": call.options.alibi_slopes}


def _default_generator(device: torch.device) -> torch.Generator:
    return torch.cuda.default_generators[device.index]


@contextmanager
def _generator_at(seed: Tensor | None, device: torch.device) -> Iterator[None]:
    """The device's generator at `seed` (a CPU tensor), put back after: the mask is a function of the seed."""
    if seed is None:
        yield
        return
    generator = _default_generator(device)
    state = generator.get_state()
    generator.manual_seed(int(seed))
    try:
        yield
    finally:
        generator.set_state(state)


def _with_cache(
    library: Any, call: LibraryCall, q: Tensor, k: Tensor, v: Tensor, **own: Any
) -> tuple[Tensor, Tensor]:
    """The decoding interface of versions 2 and 3, which splits the keys over the GPU; it has no backward."""
    lengths = {"cache_seqlens": call.kv_lengths.contiguous()}
    out, lse, *_ = library.flash_attn_with_kvcache(
        q, k, v, **lengths, **call.common(), window_size=call.window_size, return_softmax_lse=True, **own
    )
    return out, lse


def _forward3(library: Any, call: LibraryCall, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    if call.kv_lengths is not None:
        return _with_cache(library, call, q, k, _zero_v_beyond_lengths(v, call.kv_lengths))
    out, lse, *_ = library._flash_attn_forward(
        q, k, v, **call.varlen_arguments(), **call.common(), **call.window_arguments()
    )
    return out, lse


def _backward3(library: Any, call: LibraryCall, **tensors: Tensor) -> None:
    options = call.varlen_arguments() | call.common() | call.window_arguments()
    options["is_causal"] = options.pop("causal")
    library._flash_attn_backward(**tensors, **options, deterministic=call.deterministic)


def _forward4(library: Any, call: LibraryCall, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    options = call.varlen_arguments() | call.common() | call.window_arguments(unbounded=None)
    if call.kv_lengths is not None:
        v, options["seqused_k"] = _zero_v_beyond_lengths(v, call.kv_lengths), call.kv_lengths.contiguous()
    out, lse, *_ = library._flash_attn_fwd(q, k, v, **options, return_lse=True)
    return out, lse


def _backward4(library: Any, call: LibraryCall, *, softmax_lse: Tensor, **tensors: Tensor) -> None:
    options = call.varlen_arguments() | call.common() | call.window_arguments(unbounded=None)
    library._flash_attn_bwd(**tensors, lse=softmax_lse, **options, deterministic=call.deterministic)


def _zero_v_beyond_lengths(v: Tensor, kv_lengths: Tensor) -> Tensor:
    """v (B, Tk, Hkv, D), zero beyond kv_lengths: TMA loads whole tiles, and 0 * NaN is NaN."""
    return zero_beyond_lengths(v.transpose(1, 2), kv_lengths).transpose(1, 2)


def _capabilities(features: frozenset[str], **limits: Any) -> Capabilities:
    return Capabilities(
        features=features,
        devices=frozenset({"cuda"}),
        dtypes=LOW_PRECISION,
        max_head_dim=256,
        head_dim_multiple=8,  # the public functions pad to it, which copies q, k and v
        forward_only_features=frozenset({"kv_lengths"}),
        deterministic_on_request=True,
        **limits,
    )


_LENGTHS_OR_DOCUMENTS = frozenset({"document_ids", "kv_lengths"})
_WINDOW_AND_SOFTCAP = ("window_size_left", "window_size_right", "softcap")
VERSIONS = {
    2: Version(
        number=2,
        module="flash_attn.flash_attn_interface",
        install="pip install flash-attn --no-build-isolation",
        needs={
            "_flash_attn_forward": _WINDOW_AND_SOFTCAP,
            "_flash_attn_backward": _WINDOW_AND_SOFTCAP,
            "_flash_attn_varlen_forward": _WINDOW_AND_SOFTCAP,
            "_flash_attn_varlen_backward": _WINDOW_AND_SOFTCAP,
            "flash_attn_with_kvcache": ("cache_seqlens", "softcap"),
        },
        capabilities=_capabilities(_SHARED | {"alibi", "dropout"}, min_arch=(8, 0)),
        forward=_forward2,
        backward=_backward2,
        # Version 3's are in its namespace too.
        kernels=Kernels("FlashAttention-2", r"(?i)^(?!.*FlashAttn(Fwd|Bwd)).*\bflash::"),
        mutually_exclusive=(
            _LENGTHS_OR_DOCUMENTS,
            frozenset({"dropout", "softcap"}),
            frozenset({"dropout", "kv_lengths"}),
            # Its causal lse lacks a term that depends on where the document starts.
            frozenset({"alibi", "document_ids", "lse"}),
        ),
    ),
    3: Version(
        number=3,
        module="flash_attn_interface",
        install="git clone https://github.com/Dao-AILab/flash-attention, cd flash-attention/hopper, "
        "python setup.py install",
        needs={
            "_flash_attn_forward": _WINDOW_AND_SOFTCAP,
            "_flash_attn_backward": ("is_causal", *_WINDOW_AND_SOFTCAP),
            "flash_attn_with_kvcache": ("cache_seqlens", "softcap"),
        },
        capabilities=_capabilities(_SHARED, min_arch=(9, 0), max_arch=(9, 0)),
        forward=_forward3,
        backward=_backward3,
        kernels=Kernels("FlashAttention-3", r"FlashAttn(Fwd|Bwd)"),
        mutually_exclusive=(_LENGTHS_OR_DOCUMENTS,),
    ),
    4: Version(
        number=4,
        module="flash_attn.cute.interface",
        install="pip install flash-attn-4",
        needs={
            "_flash_attn_fwd": (*_WINDOW_AND_SOFTCAP, "seqused_k"),
            "_flash_attn_bwd": (*_WINDOW_AND_SOFTCAP, "dq", "dk", "dv"),
        },
        capabilities=_capabilities(_SHARED, min_arch=(9, 0), max_arch=(11, 0)),
        forward=_forward4,
        backward=_backward4,
        kernels=Kernels("FlashAttention-4", r"(?i)kernel_cutlass.*flash|flash_?attn_?cute"),
        compilation=Compilation(on_disk=False),
        mutually_exclusive=(_LENGTHS_OR_DOCUMENTS,),
    ),
}
