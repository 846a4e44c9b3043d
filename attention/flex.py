"""FlexAttention (Dong et al. 2024, arXiv 2412.05496): Inductor writes a Triton kernel for the scores at hand.

The contract's masks become one `mask_mod`, its scores one `score_mod`; which tiles of scores are empty,
partial or full is said by flex_masks.py. Where every query sees every key there is no mask at all.

Called on CUDA from outside of a torch.compile it is compiled here. Lengths of whole tiles, as in training,
get kernels of their own, with every size and limit a constant, as one would write them by hand; at most
MAX_STATIC for each kind of call. All other lengths share a dynamic kernel, as do calls with kv_lengths or
document ids; causal, windows and rectangles are data for it. It is compiled at most three times: for the
first lengths, and then for all others with fewer than 128 queries and with more. (One would do for both, but
PyTorch 2.11 to 2.13 asks for their number to choose a decoding kernel, even where that is ruled out, and a
question to a symbolic size is a guard.)

Inside of a torch.compile it is traced; with a backend that generates no code (aot_eager) PyTorch makes all
T^2 scores there, and loses the gradient of a bias.
"""

from __future__ import annotations

import operator
import types
from collections import Counter
from collections.abc import Callable
from functools import lru_cache, reduce
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, flex_attention, noop_mask

from attention.base import (
    FEATURES,
    LOW_PRECISION,
    MATMUL_KERNELS,
    Attention,
    AttentionCall,
    AttentionOptions,
    Capabilities,
    Compilation,
    Costs,
    Declaration,
    Kernels,
)
from attention.declaration import lse_bytes, padded_statistic_bytes, q_bytes
from attention.flex_masks import (
    TILE,
    DocumentIds,
    Limits,
    RecentResults,
    TileLists,
    tile_lists,
    unmasked_lists,
)
from attention.geometry import FAR, zero_beyond_lengths
from ops.options import MASK_BLOCK

# Uncompiled, PyTorch makes a few fp32 copies of all scores: 256 MiB each at this bound.
MAX_DENSE_SCORES = 2**26
# Lengths with a kernel of their own, for each kind of call: a compilation takes seconds.
MAX_STATIC = 16


def _plus(x: Tensor, n: int | Tensor) -> Tensor:
    return x + n if isinstance(n, Tensor) or n != 0 else x


def _mask_mod(
    limits: Limits, document_ids: DocumentIds | None, block_mask: Tensor | None
) -> Callable[..., Tensor]:
    """What PyTorch asks of partial tiles: does query i see key j? For a causal square just i >= j."""

    def visible(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        queries, keys, left, right = limits.for_row(b)
        diagonal_key = _plus(i, keys - queries)  # the key on the diagonal
        seen = []
        if isinstance(right, Tensor) or right != FAR:
            seen.append(_plus(diagonal_key, right) >= j)
        if isinstance(left, Tensor) or left != FAR:
            seen.append(j + left >= diagonal_key)
        if isinstance(keys, Tensor):  # PyTorch minds Tk itself
            seen.append(j < keys)
        if document_ids is not None:
            seen.append(document_ids[0][b, i] == document_ids[1][b, j])
        if block_mask is not None:
            row, head = (0 * x if n == 1 else x for x, n in zip((b, h), block_mask.shape[:2], strict=True))
            seen.append(block_mask[row, head, i // MASK_BLOCK, j // MASK_BLOCK])
        return reduce(operator.and_, seen)

    return visible


def _score_mod(limits: Limits, options: AttentionOptions) -> Callable[..., Tensor] | None:
    """What the contract does to scaled scores, in its order; None for nothing."""
    softcap, slopes, bias, table = options.softcap, options.alibi_slopes, options.bias, options.relative_bias
    if softcap is None and slopes is None and bias is None and table is None:
        return None
    reach = 0 if table is None else table.shape[1] // 2
    if bias is not None:
        bias = bias[(None,) * (4 - bias.ndim)]

    def scores(s: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        if softcap is not None:
            s = softcap * torch.tanh(s / softcap)
        if slopes is not None or table is not None:
            queries, keys, _, _ = limits.for_row(b)
            rel = j - _plus(i, keys - queries)
        if slopes is not None:
            s = s - (slopes[h] if slopes.ndim == 1 else slopes[b, h]) * rel.abs()
        if table is not None:
            s = s + table[h, torch.clamp(rel, -reach, reach) + reach]
        if bias is not None:
            # Never expanded: the gradient of an expanded bias would be (B, Hq, Tq, Tk) before its reduction.
            n = [0 * x if size == 1 else x for x, size in zip((b, h, i, j), bias.shape, strict=True)]
            s = s + bias[n[0], n[1], n[2], n[3]]
        return s

    return scores


def flex(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    limits: Limits,
    lists: TileLists,
    options: AttentionOptions,
) -> tuple[Tensor, Tensor | None]:
    """(out, lse) by PyTorch's flex_attention; of the options, causal and window are in `limits`.

    `lists` without full tiles say that every query sees every key. A compiled kernel visits only the tiles in
    `lists`, and so needs no `block_mask` in addition. Uncompiled, PyTorch computes all scores, and needs it.
    """
    if options.kv_lengths is not None:
        # Q K^T is masked, but 0 * NaN would reach P V, and in the backward dS K.
        v = zero_beyond_lengths(v, options.kv_lengths)
        k = zero_beyond_lengths(k, options.kv_lengths) if torch.is_grad_enabled() else k
    # The decoding kernel packs a group's heads and queries in one tile, which many queries outgrow.
    kernel_options = {"FORCE_USE_FLEX_ATTENTION": True} if q.shape[2] != 1 else {}
    if options.relative_bias is not None and q.shape[2] != 1:
        # What is read of the table for a tile of scores lies in shared memory with K and V, once a stage: in
        # three, as usual, 240 KiB of the H200's 227 (forward, D = 64) and 228.1 (backward, D = 128).
        kernel_options["num_stages"] = 2
    lengths, gqa, aux = (q.shape[2], k.shape[2]), q.shape[1] != k.shape[1], AuxRequest(lse=options.return_lse)
    unmasked = lists.full_kv_num_blocks is None
    tile = FAR if unmasked and q.shape[2] != 1 else TILE
    visible = noop_mask if unmasked else _mask_mod(limits, options.document_ids, options.block_mask)
    mask = BlockMask(lengths, *lists, BLOCK_SIZE=(tile, tile), mask_mod=visible)
    score_mod = _score_mod(limits, options)
    out, aux = flex_attention(
        q, k, v, score_mod, mask, options.scale, enable_gqa=gqa, kernel_options=kernel_options, return_aux=aux
    )
    return out, aux.lse


_RECENT = RecentResults()
_STATIC: dict[Any, tuple[Callable[..., tuple[Tensor, Tensor | None]], Limits, TileLists]] = {}
_STATIC_COUNT: Counter[Any] = Counter()
_NAMES: dict[Any, str] = {}


def _compile(
    static_key: Any, backend: str, dynamic: bool | None
) -> Callable[..., tuple[Tensor, Tensor | None]]:
    """`flex`, to be compiled by itself.

    torch.compile counts recompilations per code object and gives up after eight, so each kind of call gets
    its own code object. A size that was once dynamic stays dynamic for all functions with the same name and
    line. For lengths this is wanted, but with a dynamic batch a single query would not get the decoding
    kernel. Therefore each `static_key`, of what must stay static, gets a function name of its own.
    """
    name = _NAMES.setdefault(static_key, f"flex_{len(_NAMES)}")
    own = types.FunctionType(flex.__code__.replace(co_name=name), flex.__globals__, name)
    return torch.compile(own, fullgraph=True, backend=backend, dynamic=dynamic)


@lru_cache(maxsize=128)
def _compiled(kind: tuple[Any, ...], backend: str) -> Callable[..., tuple[Tensor, Tensor | None]]:
    """The kernel of all lengths for one kind of call."""
    return _compile(kind[0], backend, None)


def _guard_key(*arguments: Any) -> Any:
    """All that a compiled kernel depends on, but for sizes beyond one or many."""
    kinds = []
    for x in arguments:
        if isinstance(x, Tensor):
            order = sorted(range(x.ndim), key=x.stride)
            x = (*(min(n, 2) for n in x.shape), *order, x.dtype, x.device, x.requires_grad)
        kinds.append(_guard_key(*x) if isinstance(x, tuple) and any(isinstance(y, Tensor) for y in x) else x)
    return tuple(kinds)


def _compile_key(q: Tensor, k: Tensor, v: Tensor, options: AttentionOptions) -> tuple[Any, ...]:
    """The sizes and constants that no kernel shares, and the rest."""
    constants = options.scale, options.softcap, options.return_lse
    static_key = (q.shape[0], q.shape[1], k.shape[1], q.shape[3], constants)
    return static_key, torch.is_grad_enabled(), _guard_key(q, k, v, *options)


def _layout_key(x: Tensor | None) -> Any:
    return None if x is None else (x.shape, x.stride(), x.dtype, x.device, x.requires_grad)


def _run_static(
    q: Tensor, k: Tensor, v: Tensor, limits: Limits, options: AttentionOptions, backend: str
) -> tuple[Tensor, Tensor | None] | None:
    """`flex` in the kernel for this very call, masks included; None where it has none, and gets none.

    A repeated call costs one look-up.
    """
    tq, tk = q.shape[2], k.shape[2]
    # One query's kernel gains little, and a growing cache would have one compiled every 128 tokens.
    unit, least = (1024, 1) if tq == 1 else (TILE, 512)
    if tq < least or tk < 512 or tk % unit or (tq != 1 and tq % TILE):
        return None
    constants = options.scale, options.softcap, options.return_lse
    tensors = tuple(map(_layout_key, (q, k, v, options.alibi_slopes, options.bias, options.relative_bias)))
    key = (tensors, limits, constants, torch.is_grad_enabled(), backend)
    if key not in _STATIC:
        kind = (*_compile_key(q, k, v, options), backend)
        if _STATIC_COUNT[kind] >= MAX_STATIC:
            return None
        _STATIC_COUNT[kind] += 1
        with torch.inference_mode(False), torch.no_grad():  # for a training step too
            lists = _lists(tq, tk, limits, options, q.device, spare=0)
        _STATIC[key] = _compile(kind[0], backend, False), limits, lists
    kernel, limits, lists = _STATIC[key]
    return kernel(q, k, v, limits, lists, options)


def _lists(
    tq: int, tk: int, limits: Limits, options: AttentionOptions, device: torch.device, spare: int = 1
) -> TileLists:
    document_ids, block_mask = options.document_ids, options.block_mask
    unbounded = limits.left == limits.right == FAR and not isinstance(limits.keys, Tensor)
    if unbounded and document_ids is None and block_mask is None:
        return unmasked_lists(tq, tk, device)
    return tile_lists(tq, tk, limits, document_ids, device, spare, block_mask)


def _run_dynamic(
    q: Tensor, k: Tensor, v: Tensor, limits: Limits, options: AttentionOptions, backend: str
) -> tuple[Tensor, Tensor | None]:
    """`flex` in the kernel of all lengths for this kind of call, its limits data."""
    batch, tq, tk, asked = q.shape[0], q.shape[2], k.shape[2], options
    options = options._replace(block_mask=None)  # the lists say it

    def make() -> tuple[Limits, TileLists]:
        lists = _lists(tq, tk, limits, asked, q.device)
        for t in lists:  # else one compilation more, when both of their sizes have changed
            if t is not None:
                torch._dynamo.maybe_mark_dynamic(t, list(range(2, t.ndim)))
        return limits.tensors(batch, q.device), lists

    given = (asked.kv_lengths, asked.block_mask, *(asked.document_ids or ()))
    facts = (batch, tq, tk, limits.left, limits.right, *(t is None for t in given[:2]), q.device)
    tensors = [t for t in given if t is not None]
    data, lists = _RECENT.get(facts, tensors, make)
    kind = (*_compile_key(q, k, v, options), lists.full_kv_num_blocks is None)
    return _compiled(kind, backend)(q, k, v, data, lists, options)


def _run(
    q: Tensor, k: Tensor, v: Tensor, limits: Limits, options: AttentionOptions, backend: str
) -> tuple[Tensor, Tensor | None]:
    """`flex`, compiled: with constants where nothing about the call is data."""
    result = None
    if options.document_ids is None and options.kv_lengths is None and options.block_mask is None:
        result = _run_static(q, k, v, limits, options, backend)
    return result or _run_dynamic(q, k, v, limits, options, backend)


def _dense_reasons(call: AttentionCall) -> list[str]:
    """Where no kernel is generated PyTorch makes all scores, without a word."""
    scores = call.batch * call.heads * call.tq * call.tk
    if scores <= MAX_DENSE_SCORES:
        return []
    return [
        f"no {scores:,} scores: uncompiled, as on this {call.device}, PyTorch makes them all; needs at most "
        f"{MAX_DENSE_SCORES:,} (B x Hq x Tq x Tk: data.batch_size, seq_len), or CUDA and torch.compile"
    ]


class FlexAttention(Attention):
    """torch.nn.attention.flex_attention, compiled, in 16 bits; on a CPU forward only and short."""

    capabilities: ClassVar[Capabilities] = Capabilities(
        features=frozenset(FEATURES) - {"dropout"},
        dtypes=LOW_PRECISION | {torch.float32},
        min_arch=(8, 0),
        max_head_dim=256,
    )
    declaration: ClassVar[Declaration] = Declaration(
        origin="PyTorch",
        # Of flex on a CPU there is no kernel.
        kernels=(Kernels("FlexAttention", r"(?i)^triton_.*flex_"), MATMUL_KERNELS[1]),
        compilation=Compilation(each="shape", by_torch=True),
    )
    backend: ClassVar[str] = "inductor"  # of torch.compile, for calls from outside of one

    def __init__(self, name: str = "flex"):
        super().__init__(name)

    def costs(self, call: AttentionCall, compiled: bool = False) -> Costs:
        """lse; in the backward delta, and dout times out, of which it is the sum."""
        return Costs(lse_bytes(call), padded_statistic_bytes(call) + q_bytes(call), backward_matmuls=7)

    def unsupported_reasons(self, call: AttentionCall) -> list[str]:
        reasons = super().unsupported_reasons(call)
        if call.device == "cuda" and call.head_dim < 16:
            reasons.append(f"no head dim {call.head_dim}: needs at least 16 (model.n_embd / model.n_head)")
        if call.device == "cpu" and call.backward:
            reasons.append("no backward on a CPU: PyTorch's FlexAttention has none (trainer.accelerator)")
        if call.dtype == torch.float32 and call.device == "cuda":
            # The generated kernels, without TF32, miss what scripts/accuracy.py allows: 1.82 times the error
            # for one query on 239 keys (kv_lengths, head dim 128; window 1.09, bias 1.34), 1.32 for 1023 on
            # 1024 (ALiBi, head dim 64) and 1.11 there for the gradient of a bias (H200, torch 2.11).
            reasons.append(
                "no float32 on cuda: needs float16 or bfloat16 (precision), or attention=tiled or triton"
            )
        elif "lse" in call.features and call.dtype == torch.float32:
            # PyTorch keeps it in base 2 and converts twice: 1.08 times the error that scripts/accuracy.py
            # allows (one query on 239 keys, on a CPU).
            reasons.append("no lse in float32: needs 16 bits (precision), or return_lse=False")
        if call.device == "cpu" or torch._dynamo.config.disable:
            reasons += _dense_reasons(call)
        return reasons

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, options: AttentionOptions, dropout_seed: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        tq, tk = q.shape[2], k.shape[2]
        kv_lengths, bias = options.kv_lengths, options.bias
        left, right = (side if side >= 0 else FAR for side in options.band)
        right = FAR if tq == 1 else right  # no key lies right of the last query
        limits = Limits(tq, tk if kv_lengths is None else kv_lengths, left, right)
        # Cast before anything is compiled: Inductor's backward failed on what was fp64, or cast, inside.
        slopes = None if options.alibi_slopes is None else options.alibi_slopes.float()
        if bias is not None and bias.requires_grad and (tk == 1 or bias.ndim == 0 or bias.shape[-1] == 1):
            # A bias that all keys of a row share changes no weight: its gradient is exactly 0, and takes no
            # kernel. Inductor's does not compile for some of these shapes ("rank mismatch", torch 2.11).
            q, bias = q + bias.flatten()[:0].sum().to(q.dtype), bias.detach()
        if bias is not None and (bias.requires_grad or bias.dtype == torch.float64):
            bias = bias.float()  # its gradient is summed in its own dtype
        table = None if options.relative_bias is None else options.relative_bias.float()
        # Causal and window are limits, data to one kernel for all of them.
        options = options._replace(causal=False, window=None, alibi_slopes=slopes, bias=bias)
        options = options._replace(relative_bias=table)
        if torch.compiler.is_compiling():
            # The same lines in every layer: the compiler keeps one of them.
            return flex(q, k, v, limits, _lists(tq, tk, limits, options, q.device), options)
        if not q.is_cuda:
            # PyTorch refuses what requires a gradient on a CPU even where none is recorded.
            q, k, v = q.detach(), k.detach(), v.detach()
            return flex(q, k, v, limits, _lists(tq, tk, limits, options, q.device), options)
        return _run(q, k, v, limits, options, self.backend)
