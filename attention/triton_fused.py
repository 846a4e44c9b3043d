"""FlashAttention in Triton, our own: forward, backward and split-key decode (the kernels: ops/triton)."""

from __future__ import annotations

import importlib.util
import math
from contextlib import AbstractContextManager, nullcontext
from typing import Any, ClassVar

import torch
from torch import Tensor

from attention.base import (
    CACHES,
    FEATURES,
    LOW_PRECISION,
    Attention,
    AttentionCall,
    AttentionOptions,
    CacheView,
    Capabilities,
    Compilation,
    Costs,
    Declaration,
    Kernels,
)
from attention.declaration import lse_bytes, padded_statistic_bytes
from ops.library import register_attention, register_cached_attention
from ops.triton.interpret import INTERPRETED


# Triton is imported at the first call: `--help` and CPU runs do without.
def _forward(*args: Any) -> tuple[Tensor, Tensor]:
    from ops.triton.attention import forward

    with _on_device_of(args[0]):
        return forward(*args)


def _backward(*args: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    from ops.triton.attention import backward

    with _on_device_of(args[0]):
        return backward(*args)


def _cached(q: Tensor, view: CacheView, options: AttentionOptions) -> tuple[Tensor, Tensor]:
    from ops.triton.attend_cache import attend_cache

    with _on_device_of(q):
        return attend_cache(q, view, options)


def _on_device_of(x: Tensor) -> AbstractContextManager[Any]:
    """Triton launches on the current device, which need not be that of the tensors."""
    elsewhere = x.is_cuda and x.device.index != torch.cuda.current_device()
    return torch.cuda.device(x.device) if elsewhere else nullcontext()


_triton = register_attention("triton", _forward, _backward)
_triton_cached = register_cached_attention("triton_cached", _cached)


class TritonAttention(Attention):
    """Tiled, fused attention in Triton on CUDA; with TRITON_INTERPRET=1 in Triton's interpreter on the CPU.

    Args:
        autotune: time the tiles of ops/triton/configs.py at the first call of each shape instead of taking
            the table's: seconds, once a process (and the same bits within one process only).
    """

    capabilities: ClassVar[Capabilities] = Capabilities(
        features=frozenset(FEATURES),
        devices=frozenset({"cuda", "cpu"} if INTERPRETED else {"cuda"}),
        dtypes=LOW_PRECISION | {torch.float32},
        min_arch=(8, 0),
        max_head_dim=256,
        deterministic=True,
        caches=frozenset(CACHES),
    )

    declaration: ClassVar[Declaration] = Declaration(
        # losses and fp8 linear layers are no attention; one kernel is CUDA (ops/triton/attend_cache.py)
        kernels=(Kernels("our Triton kernels", r"^_tilegpt_(?!cross_entropy|fp8_)|^tilegpt_attend_bytes"),),
        compilation=Compilation(),
    )

    def __init__(self, autotune: bool = False, name: str = "triton"):
        super().__init__(name)
        self.autotune = autotune

    def costs(self, call: AttentionCall, compiled: bool = False) -> Costs:
        """lse; in the backward the padded statistics of rows, padded_lse and delta. dQ has a pass of its own.
        An fp32 product is made of six of 16 bits (docs/kernels.md). A relative bias, taken to be T5's of 128
        distances to each side, has its gradient left by each tile of queries."""
        split = 6 if call.dtype == torch.float32 and call.device == "cuda" else 0
        transient = 2 * padded_statistic_bytes(call)
        if "relative_bias" in call.features:
            from ops.triton.configs import by_distance_shape, tile_of

            tile = tile_of("dq", *self._facts(call))
            transient += 4 * call.batch * call.heads * math.prod(by_distance_shape(tile, call.tq, 128))
        return Costs(lse_bytes(call), transient, backward_matmuls=7, split_matmuls=split)

    def _facts(self, call: AttentionCall) -> tuple[Any, ...]:
        """What decides about tiles, as ops/triton/configs.py takes it."""
        options = {"softcap", "alibi", "bias", "relative_bias", "dropout", "document_ids", "kv_lengths"}
        has_options = bool(options & call.features)
        masked = call.causal or "window" in call.features
        bias_with_grad = "bias" if "bias_grad" in call.features else ""
        if "relative_bias" in call.features:
            bias_with_grad = "relative_bias"
        of_call = masked, has_options, bias_with_grad, "block_mask" in call.features
        return call.arch or (8, 0), call.dtype.itemsize, call.head_dim, *of_call

    def forward_tile(self, call: AttentionCall) -> tuple[int, int]:
        from ops.triton.configs import tile_of

        tile = tile_of("forward", *self._facts(call))
        return tile.m, tile.n

    def shared_memory(self, call: AttentionCall, max_bytes: int) -> dict[str, int]:
        """What the tiles of q, k, v and dout come to, to which the compiler adds some."""
        from ops.triton.configs import shared_bytes

        kinds = ("forward", "dkdv", "dq") if call.backward else ("forward",)
        facts = self._facts(call)
        return {name: size for kind in kinds for name, size in shared_bytes(kind, *facts).items()}

    def unsupported_reasons(self, call: AttentionCall) -> list[str]:
        reasons = super().unsupported_reasons(call)
        if importlib.util.find_spec("triton") is None:
            reasons.append(
                "triton is not installed: CUDA builds of torch bring it along (pip install triton)"
            )
        if "fp8" in call.cache and call.arch is not None and call.arch < (8, 9):
            reasons.append("no fp8 cache below sm_89, which has such numbers: needs cache_dtype=int8 or int4")
        return reasons

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, options: AttentionOptions, dropout_seed: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        return _triton(q, k, v, options, dropout_seed, [int(self.autotune)])

    def attend_cached(self, q: Tensor, view: CacheView, options: AttentionOptions) -> tuple[Tensor, Tensor]:
        return _triton_cached(q, view, options)
