"""The attention interface: one exact function, many implementations.

Every implementation computes, per batch b, head h and query i,

    s_j = scale * <q_i, k_j>;  s_j = softcap * tanh(s_j / softcap);
    s_j += -slope_h * |rel| + bias_ij + relative_bias_h[rel];
    s_j = -inf where j is not visible;  p = softmax(s);  p = dropout(p);  out_i = sum_j p_j v_j

in this order, with rel = j - (i + Tk - Tq), the distance to the bottom-right diagonal. `kv_lengths[b]` takes
the place of Tk in every formula. attention/naive.py is the specification.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from attention.call import (
    CACHES,
    FEATURES,
    FLOATS,
    LOW_PRECISION,
    AttentionCall,
    Capabilities,
    UnsupportedAttention,
)
from attention.checks import (
    are_packed_views,
    cached_call_key,
    call_key,
    check_cached,
    check_inputs,
    check_packed_views,
    must_be_deterministic,
    traced,
)
from attention.declaration import (
    MATMUL_KERNELS,
    Compilation,
    Costs,
    CostsNotDeclared,
    Declaration,
    Kernels,
    lse_bytes,
    scores_bytes,
)
from attention.geometry import empty_attention, normalise_window, widest
from ops.cache_view import CACHE_DTYPES, SCALE_DTYPE, CachedTensor, CacheView, quantise, raw
from ops.options import MASK_BLOCK, AttentionOptions

# The contract is one import, for implementations and for those who ask them.
__all__ = [
    "CACHES",
    "CACHE_DTYPES",
    "FEATURES",
    "FLOATS",
    "LOW_PRECISION",
    "MASK_BLOCK",
    "MATMUL_KERNELS",
    "SCALE_DTYPE",
    "Attention",
    "AttentionCall",
    "AttentionOptions",
    "CacheView",
    "CachedTensor",
    "Capabilities",
    "Compilation",
    "Costs",
    "CostsNotDeclared",
    "Declaration",
    "Kernels",
    "UnsupportedAttention",
    "lse_bytes",
    "must_be_deterministic",
    "quantise",
    "raw",
    "scores_bytes",
    "widest",
]
DocumentIds = Tensor | tuple[Tensor, Tensor]


class Attention(nn.Module):
    """Base of every implementation: checks, the dropout seed, empty inputs; the maths is in `attend`.

    No parameters, no buffers: checkpoints never depend on the choice. Subclasses set `capabilities`,
    `declaration`, `attend`, `costs` and, where a block's shared memory is known, `shared_memory`.
    """

    capabilities: ClassVar[Capabilities] = Capabilities()
    declaration: ClassVar[Declaration] = Declaration()
    # Whether its dropout mask is what ops/dropout.py makes of the seed; libraries have their own generators.
    uses_our_dropout_mask: ClassVar[bool] = True

    def __init__(self, name: str):
        super().__init__()
        self.name = name
        self._allowed: set[Any] = set()

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, options: AttentionOptions, dropout_seed: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """The implementation: (out, lse), where lse may be None unless `options.return_lse`.

        Inputs are checked and none is empty; `options` are normalised (ops/options.py); `dropout_seed` is a
        0-d int64 tensor on the device (None without dropout).
        """
        raise NotImplementedError

    def attend_cached(
        self, q: Tensor, view: CacheView, options: AttentionOptions
    ) -> tuple[Tensor, Tensor | None]:
        """The same against a cache of a kind that `capabilities.caches` names, forward only: `options` say
        causal, scale, window, softcap and alibi_slopes. One that is of no kind, dense in q's dtype, is k and
        v with lengths."""
        return self.attend(q, view.k.data, view.v.data, options._replace(kv_lengths=view.lengths), None)

    def unsupported_reasons(self, call: AttentionCall) -> list[str]:
        """All reasons why this implementation cannot run `call`; empty when it can."""
        reasons = self.capabilities.reasons(call)
        # PyTorch raises for its own operators; a library's nondeterministic backward would otherwise run
        # silently.
        if call.backward and must_be_deterministic() and not self.capabilities.can_be_deterministic:
            reasons.append("no deterministic backward: needs deterministic=false")
        return reasons

    def reasons_against_auto(self, call: AttentionCall) -> list[str]:
        """Why `auto` should not choose this implementation for a call that it can run; it can still be
        requested by name."""
        return []

    def resolve(self, call: AttentionCall) -> Attention:
        """The implementation that runs `call`: this one, unless it delegates."""
        return self

    def costs(self, call: AttentionCall, compiled: bool = False) -> Costs:
        """What `call` takes in a layer of a training step, under autocast where its dtype is of 16 bits;
        `compiled`: traced by torch.compile. Raises CostsNotDeclared where the class says nothing of it."""
        raise CostsNotDeclared(self.name, type(self))

    def forward_tile(self, call: AttentionCall) -> tuple[int, int] | None:
        """Queries and keys in a tile of the forward; None where that is not known, or there are none."""
        return None

    def shared_memory(self, call: AttentionCall, max_bytes: int) -> dict[str, int]:
        """Bytes of shared memory that a block takes, by kernel, where it may use `max_bytes`; none where
        that is not known."""
        return {}

    def require(self, call: AttentionCall) -> None:
        """Raises UnsupportedAttention, with every reason, unless `call` can run."""
        if reasons := self.unsupported_reasons(call):
            raise UnsupportedAttention(self.name, reasons, call)

    def forward(
        self,
        q: Tensor,
        k: Tensor | CacheView,
        v: Tensor | None = None,
        *,
        causal: bool = True,
        scale: float | None = None,
        window: tuple[int | None, int | None] | None = None,
        softcap: float | None = None,
        alibi_slopes: Tensor | None = None,
        bias: Tensor | None = None,
        document_ids: DocumentIds | None = None,
        kv_lengths: Tensor | None = None,
        block_mask: Tensor | None = None,
        relative_bias: Tensor | None = None,
        dropout_p: float = 0.0,
        return_lse: bool = False,
        packed: Tensor | None = None,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Exact attention: out (B, Hq, Tq, D) in q's dtype, or (out, lse), lse (B, Hq, Tq) fp32, natural log.

        Args:
            q: (B, Hq, Tq, D), any strides with a contiguous last dimension, as k and v.
            k, v: (B, Hkv, Tk, D), Hq a multiple of Hkv; query head h reads key head h // (Hq / Hkv). Or a
                CacheView in place of both, which has lengths of its own: without a gradient, and without
                bias, document_ids, kv_lengths, block_mask, relative_bias and dropout.
            causal: query i sees keys j <= i + Tk - Tq (aligned bottom-right).
            scale: of the scores, any number; None is D**-0.5. One of 0 or less copies q.
            window: (left, right), keys seen on each side of the diagonal; -1 or None is unbounded.
            softcap: softcap * tanh(s / softcap) on the scaled scores, before ALiBi, bias and mask (Gemma 2).
            alibi_slopes: (Hq,) or (B, Hq), adds -slope * |i + Tk - Tq - j| (Press et al. 2022).
            bias: broadcastable to (B, Hq, Tq, Tk), added to the scores; -inf hides a key. A row whose
                every key has -1e9 instead gets wrong gradients in triton, tiled and fused SDPA: lse is fp32.
            document_ids: (B, T) int32, or a pair (B, Tq), (B, Tk): tokens see each other where equal.
            kv_lengths: (B,) int32 on the device, 0 to Tk, in its place; what lies beyond may be NaN.
            block_mask: bool, (1 or B, 1 or Hq, Tq / 128, Tk / 128), rounded up: which tiles of 128 queries
                and 128 keys count; other options apply within them (block-sparse, Dao et al. 2022).
            relative_bias: (Hq, 2 R + 1), a number added for each distance rel, of which those beyond R count
                as R: relative_bias[h, R + min(max(rel, -R), R)] (T5, Raffel et al. 2020), with a gradient.
            dropout_p: of the probabilities, in [0, 1); the seed comes from torch's default generator.
            return_lse: also the log of the softmax's denominator; it carries no gradient.
            packed: (B, T, (Hq + 2 Hkv) D), of which q, k and v are the views, in this order: then the
                gradient may come as one tensor instead of three that are copied into it.

        A row that sees no key gives 0 and lse = -inf. fp64 inputs are computed, and give an lse, in fp64.

        Raises:
            ValueError: shapes, dtypes or values that make no sense.
            UnsupportedAttention: a sensible call that this implementation cannot do.
        """
        # by position, and made once more below: by keyword and _replace, a host takes 1 us longer
        options = AttentionOptions(
            causal, scale, window, softcap, alibi_slopes, bias, document_ids, kv_lengths, block_mask,
            relative_bias, dropout_p, return_lse, packed,
        )  # fmt: skip
        if type(k) is CacheView:
            if v is not None or packed is not None:
                raise ValueError("v or packed with a CacheView, which stands for k and v: pass it alone")
            return self._forward_cached(q, k, options)
        if v is None:
            raise ValueError("k without v; attention needs both, or a CacheView in place of k")
        if not torch.compiler.is_compiling():
            self._check(q, k, v, options)
        elif not self._check_traced(q, k, v, options):
            packed = None
        # leaves that lie in it have gradients of their own, and what was detached from it has none
        if packed is not None and not (
            packed.requires_grad == q.requires_grad == k.requires_grad == v.requires_grad
        ):
            packed = None
        if q.numel() == 0 or k.numel() == 0:
            out, lse = empty_attention(q, k, v, bias, relative_bias)
        else:
            seed = self.draw_seed(dropout_p, q.device) if dropout_p else None
            if scale is None:
                scale = q.shape[-1] ** -0.5
            elif scale <= 0:  # kernels that scale behind the mask, or the maximum, need more than 0
                # For 0 a small one: the gradient that is multiplied by 0 must not be an infinity of fp16.
                q, scale = q * (-1.0 if scale < 0 else 0.0), -scale or 2.0**-10
                packed = None
            if isinstance(document_ids, Tensor):
                document_ids = document_ids, document_ids
            options = AttentionOptions(
                causal, scale, normalise_window(window), softcap, alibi_slopes, bias, document_ids,
                kv_lengths, block_mask, relative_bias, dropout_p, return_lse, packed,
            )  # fmt: skip
            device = q.device.type
            if torch.is_autocast_enabled(device) and q.dtype != torch.get_autocast_dtype(device):
                # Autocast would compute in 16 bits of its own, and give these; q's dtype is the caller's
                # decision.
                with torch.autocast(device, enabled=False):
                    out, lse = self.attend(q, k, v, options, seed)
            else:
                out, lse = self.attend(q, k, v, options, seed)
        return (out, lse.detach()) if return_lse else out

    def _forward_cached(
        self, q: Tensor, view: CacheView, options: AttentionOptions
    ) -> Tensor | tuple[Tensor, Tensor]:
        if torch.compiler.is_compiling():
            self._check_traced(q, view, None, options)
        else:
            key = cached_call_key(q, view, options)
            if key not in self._allowed:
                self._check_now(q, view, None, options)
                self._allow(key)
        scale = q.shape[-1] ** -0.5 if options.scale is None else options.scale
        options = options._replace(scale=scale, window=normalise_window(options.window))
        if q.numel() == 0 or view.k.shape[2] == 0:
            out, lse = empty_attention(q, q, q)
        else:
            with torch.autocast(q.device.type, enabled=False):
                out, lse = self.attend_cached(q, view, options)
        return (out, lse) if options.return_lse else out

    def draw_seed(self, dropout_p: float, device: torch.device) -> Tensor | None:
        """The seed of one call's dropout, from torch's default generator; None where none is to be drawn."""
        if dropout_p == 0 or not self.uses_our_dropout_mask:
            return None
        return torch.randint(0, 2**63 - 1, (), dtype=torch.int64, device=device)

    def _check(self, q: Tensor, k: Tensor, v: Tensor, options: AttentionOptions) -> None:
        """Checks a live call once per kind of call: a repeated one costs a set look-up."""
        key = call_key(q, k, v, options)
        if key not in self._allowed:
            self._check_now(q, k, v, options)
            self._allow(key)
        # Of another call as large, q may be no view. What is empty has no address.
        if options.packed is not None and options.packed.numel():
            check_packed_views(options.packed, q, k, v)

    def _check_now(
        self, q: Tensor, k: Tensor | CacheView, v: Tensor | None, options: AttentionOptions
    ) -> None:
        """All checks of a call; without v, k is a CacheView."""
        if v is None:
            check_cached(q, k, options)
            self.require(AttentionCall.of_cached(q, k, options))
        else:
            check_inputs(q, k, v, options)
            self.require(AttentionCall.of(q, k, v, options))

    def _check_traced(
        self, q: Tensor, k: Tensor | CacheView, v: Tensor | None, options: AttentionOptions
    ) -> bool:
        """The same checks while torch.compile traces the call, with fake tensors: compared lengths guard
        the graph, and nothing of the checks is in it. What they refuse is raised where `forward` then runs
        uncompiled; with fullgraph, torch.compile quotes it. False where q, k and v are not seen to be views
        of `packed`, as of inputs of the graph, whose storage nobody knows."""
        from torch._dynamo.comptime import comptime  # takes a second to import, which compiling has anyway

        comptime(_hold_traced_call, lambda: self._check_now(q, k, v, options))
        refusal = self._refusal_of_traced_call()
        if refusal is not None and refusal != _NO_VIEWS:
            raise ValueError(refusal)
        return refusal is None

    def _refusal_of_traced_call(self) -> str | None:
        try:
            if _TRACED_CALLS:
                q, k, v, options = _TRACED_CALLS.pop()
                self._check_now(q, k, v, options)
                if options.packed is not None and not are_packed_views(options.packed, q, k, v):
                    return _NO_VIEWS
        except ValueError as error:
            return str(error)
        except Exception:  # what cannot be asked of a fake tensor is no reason not to compile
            return None
        return None

    def _allow(self, key: Any) -> None:
        if len(self._allowed) >= 4096:  # a growing cache has a new shape every step
            self._allowed.clear()
        self._allowed.add(key)

    def extra_repr(self) -> str:
        return self.name


# A call between the two functions that torch.compile runs while it traces: the first sees the call, but no
# module, the second its own module, but constants alone.
_TRACED_CALLS: list[tuple[Any, ...]] = []
_NO_VIEWS = "no views of packed"


def _hold_traced_call(context: Any) -> None:
    # Here, as a decorator would import the compiler.
    torch.compiler.assume_constant_result(Attention._refusal_of_traced_call)
    _TRACED_CALLS.clear()
    try:
        *tensors, options = (traced(context, name) for name in ("q", "k", "v", "options"))
    except Exception:  # a version of the compiler that shows less: as before there were these checks
        return
    # A number of NumPy is a tensor here, whose value nobody knows: one that makes sense stands for it.
    numbers = ("scale", "softcap", "dropout_p")
    unknown = {name: 0.5 for name in numbers if isinstance(getattr(options, name), Tensor)}
    _TRACED_CALLS.append((*tensors, options._replace(**unknown)))
