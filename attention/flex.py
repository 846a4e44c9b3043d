"""FlexAttention (Dong et al. 2024, arXiv 2412.05496): Inductor writes a Triton kernel for the scores at hand.

The contract's masks become one `mask_mod`, its scores one `score_mod`. Whether a tile of 128 x 128 scores is
empty, partial or full comes from its corners, in O((T / 128)^2): no mask of T^2 is ever made, nothing waits
for the device, and the same lines run in a compiled step and in a CUDA graph.

Called on CUDA from outside of a torch.compile it is compiled here, once for each kind of call and once more
for all lengths: causal, windows, rectangles and kv_lengths are data for one kernel. Lengths of whole tiles
from 512 on, as in training, get kernels of their own, which need no bounds checks. Inside of a torch.compile
it is traced; with a backend that generates no code (aot_eager) PyTorch makes all T^2 scores there, and loses
the gradient of a bias.
"""

from __future__ import annotations

import types
import weakref
from collections import OrderedDict
from collections.abc import Callable
from functools import lru_cache
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, flex_attention

from attention.base import FEATURES, LOW_PRECISION, Attention, AttentionCall, Capabilities
from attention.geometry import blank_beyond, diagonal_band

TILE = 128  # PyTorch's sparse tiles; a kernel's own are divisors
FAR = 2**30  # stands for unbounded
# Uncompiled, PyTorch makes a few fp32 copies of all scores: 256 MiB each at this bound.
MAX_DENSE_SCORES = 2**26

Segments = tuple[Tensor, Tensor]


class Limits(NamedTuple):
    """What query i sees: keys j < keys with -left <= rel <= right, rel = j - (i + keys - queries). Numbers
    become constants of a kernel; tensors, (B,) int32, are read by it."""

    queries: int | Tensor
    keys: int | Tensor
    left: int | Tensor
    right: int | Tensor

    def of(self, b: Tensor) -> Limits:
        return Limits(*(n[b] if isinstance(n, Tensor) else n for n in self))

    def tensors(self, batch: int, device: torch.device) -> Limits:
        """All of them as they are now."""
        like = {"dtype": torch.int32, "device": device}
        return Limits(
            *(n.clone() if isinstance(n, Tensor) else torch.full((batch,), n, **like) for n in self)
        )


def tile_lists(
    tq: int, tk: int, limits: Limits, segments: Segments | None, device: torch.device
) -> tuple[Tensor, ...]:
    """The tiles to compute, in the order of BlockMask's arguments.

    How many key tiles a query tile sees in part, and which come first; the same in full; then both by key
    tile: (1 or B, 1, rows) and (1 or B, 1, rows, columns), int32.
    """
    queries, keys, left, right = (n.view(-1, 1, 1, 1) if isinstance(n, Tensor) else n for n in limits)
    # A row and a column of tiles more than there are: torch.compile would specialise on a single one.
    i = TILE * torch.arange((tq + TILE - 1) // TILE + 1, device=device).view(1, 1, -1, 1)
    j = TILE * torch.arange((tk + TILE - 1) // TILE + 1, device=device).view(1, 1, 1, -1)
    diagonal = keys - queries
    first, last = j - (i + TILE - 1) - diagonal, j + TILE - 1 - i - diagonal  # the least and most rel
    some = (first <= right) & (last >= -left) & (j < keys) & (i < tq)
    full = (first >= -left) & (last <= right) & (j + TILE <= keys) & (i + TILE <= tq)
    if segments is not None:
        # Documents by the range of their ids in a tile: exact for ids in order, else a tile too many.
        (q_low, q_high), (k_low, k_high) = (_tile_range(ids) for ids in segments)
        q_low, q_high = q_low[:, None, :, None], q_high[:, None, :, None]  # (B, 1, rows, 1)
        k_low, k_high = k_low[:, None, None, :], k_high[:, None, None, :]
        some = some & (q_low <= k_high) & (k_low <= q_high)
        full = full & (q_low == q_high) & (k_low == k_high) & (q_low == k_low)
    kinds = (some & ~full, full)
    return (
        *(part for kind in kinds for part in _ordered(kind)),
        *(part for kind in kinds for part in _ordered(kind.transpose(-2, -1))),
    )


def _tile_range(ids: Tensor) -> tuple[Tensor, Tensor]:
    """The least and greatest of ids (B, T) in each tile: (B, tiles + 1) each, the last id filling up."""
    tokens = ids.shape[1]
    t = torch.arange(((tokens + TILE - 1) // TILE + 1) * TILE, device=ids.device).clamp(max=tokens - 1)
    tiled = ids[:, t].unflatten(1, (-1, TILE))
    return tiled.amin(-1), tiled.amax(-1)


def _ordered(tiles: Tensor) -> tuple[Tensor, Tensor]:
    """How many columns of each row are set, and the columns with these first."""
    tiles = tiles.to(torch.int32)
    order = torch.argsort(tiles, dim=-1, descending=True, stable=True)
    return tiles.sum(-1).to(torch.int32), order.to(torch.int32).contiguous()


def _mask_mod(limits: Limits, segments: Segments | None) -> Callable[..., Tensor]:
    """What PyTorch asks of partial tiles: does query i see key j?"""

    def visible(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        queries, keys, left, right = limits.of(b)
        rel = j - (i + keys - queries)
        seen = (rel + left >= 0) & (rel <= right) & (j < keys)
        return seen if segments is None else seen & (segments[0][b, i] == segments[1][b, j])

    return visible


def _score_mod(
    limits: Limits, softcap: float | None, slopes: Tensor | None, bias: Tensor | None
) -> Callable[..., Tensor] | None:
    """What the contract does to scaled scores, in its order; None for nothing."""
    if softcap is None and slopes is None and bias is None:
        return None
    if bias is not None:
        bias = bias[(None,) * (4 - bias.ndim)]

    def scores(s: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        if softcap is not None:
            s = softcap * torch.tanh(s / softcap)
        if slopes is not None:
            queries, keys, _, _ = limits.of(b)
            s = s - slopes[h] * (j - (i + keys - queries)).abs()
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
    lists: tuple[Tensor, ...],
    segments: Segments | None,
    kv_lengths: Tensor | None,
    slopes: Tensor | None,
    bias: Tensor | None,
    constants: tuple[float, float | None, bool],
) -> tuple[Tensor, Tensor | None]:
    """(out, lse) by PyTorch's flex_attention; `constants` are scale, softcap and return_lse."""
    scale, softcap, return_lse = constants
    if kv_lengths is not None:
        # Q K^T is masked, but 0 * NaN would reach P V, and in the backward dS K.
        v = blank_beyond(v, kv_lengths)
        k = blank_beyond(k, kv_lengths) if torch.is_grad_enabled() else k
    slopes = None if slopes is None else slopes.float()
    if bias is not None and (bias.requires_grad or bias.dtype == torch.float64):
        bias = bias.float()  # its gradient is summed in its own dtype
    options: dict[str, Any] = {}
    if q.shape[2] != 1:
        # The decoding kernel packs a group's heads and queries in one tile, which many queries outgrow.
        options["FORCE_USE_FLEX_ATTENTION"] = True
    if q.dtype == torch.float32:
        # No TF32, whatever torch.set_float32_matmul_precision allows.
        options["FLOAT32_PRECISION"] = "'ieee'"
        if q.shape[3] > 64 and q.shape[2] != 1:
            # 64 x 64 in three stages, the default for most of these: 229,376 bytes of shared memory at head
            # dims from 65 (padded to 128), and twice that from 129; a block of sm_90 has 232,448.
            options |= {"fwd_BLOCK_M": 32, "fwd_BLOCK_N": 32, "fwd_num_stages": 2}
    lengths, gqa, aux = (q.shape[2], k.shape[2]), q.shape[1] != k.shape[1], AuxRequest(lse=return_lse)
    mask = BlockMask(lengths, *lists, BLOCK_SIZE=(TILE, TILE), mask_mod=_mask_mod(limits, segments))
    score_mod = _score_mod(limits, softcap, slopes, bias)
    out, aux = flex_attention(
        q, k, v, score_mod, mask, scale, enable_gqa=gqa, kernel_options=options, return_aux=aux
    )
    return out, aux.lse


class Recent:
    """What was made for the last calls, so that the layers of a step share it.

    It is found by plain facts, and where it depends on tensors by the very tensors, in the version they had:
    an in-place change makes it anew.
    """

    def __init__(self, size: int = 16):
        self.size = size
        self._made: OrderedDict[Any, tuple[list[weakref.ref[Tensor]], Any]] = OrderedDict()

    def get(self, facts: tuple[Any, ...], tensors: list[Tensor], make: Callable[[], Any]) -> Any:
        capturing = torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()
        # A CUDA graph makes its own at each replay; tensors of inference mode count no versions.
        if capturing or any(t.is_inference() for t in tensors):
            return make()
        key = (*facts, *((id(t), t._version) for t in tensors))
        refs, made = self._made.get(key, ([], None))
        if made is None or not all(ref() is t for ref, t in zip(refs, tensors, strict=True)):
            # Made in inference mode, it would be of no use to a training step.
            with torch.inference_mode(False), torch.no_grad():
                made = make()
            self._made[key] = ([weakref.ref(t) for t in tensors], made)
            if len(self._made) > self.size:
                self._made.popitem(last=False)
        self._made.move_to_end(key)
        return made


_RECENT = Recent()


@lru_cache(maxsize=128)
def _compiled(kind: tuple[Any, ...], backend: str) -> Callable[..., tuple[Tensor, Tensor | None]]:
    """`flex`, compiled for one kind of call.

    torch.compile counts recompilations by code object, and gives up after eight: each kind gets its own.
    """
    own = types.FunctionType(flex.__code__.replace(), flex.__globals__, "flex")
    return torch.compile(own, fullgraph=True, backend=backend)


def _kind(*arguments: Any) -> Any:
    """All that a compiled kernel depends on, but for sizes beyond one or many."""
    kinds = []
    for x in arguments:
        if isinstance(x, Tensor):
            order = sorted(range(x.ndim), key=x.stride)
            x = (*(min(n, 2) for n in x.shape), *order, x.dtype, x.device, x.requires_grad)
        kinds.append(_kind(*x) if isinstance(x, tuple) and any(isinstance(y, Tensor) for y in x) else x)
    return tuple(kinds)


def _run_compiled(q: Tensor, k: Tensor, *rest: Any, backend: str) -> tuple[Tensor, Tensor | None]:
    """`flex` in the kernel for this kind of call, which is compiled if it is the first."""
    batch, heads, tq, head_dim = q.shape
    v, limits, lists, *options = rest
    own = tq >= 512 and k.shape[2] >= 512 and tq % TILE == k.shape[2] % TILE == 0
    sizes = (batch, heads, k.shape[1], head_dim, (tq, k.shape[2]) if own else None)
    kind = (sizes, torch.is_grad_enabled(), _kind(q, k, v, *options))
    return _compiled(kind, backend)(q, k, v, limits, lists, *options)


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
    """torch.nn.attention.flex_attention, compiled; on a CPU forward only and short, as PyTorch has it."""

    capabilities: ClassVar[Capabilities] = Capabilities(
        features=frozenset(FEATURES) - {"dropout"},
        dtypes=LOW_PRECISION | {torch.float32},
        min_arch=(8, 0),
        max_head_dim=256,
    )
    backend: ClassVar[str] = "inductor"  # of torch.compile, for calls from outside of one

    def __init__(self, name: str = "flex"):
        super().__init__(name)

    def unsupported_reasons(self, call: AttentionCall) -> list[str]:
        reasons = super().unsupported_reasons(call)
        if call.device == "cuda" and call.head_dim < 16:
            reasons.append(f"no head dim {call.head_dim}: needs at least 16 (model.n_embd / model.n_head)")
        if call.device == "cpu" and call.backward:
            reasons.append("no backward on a CPU: PyTorch's FlexAttention has none (trainer.accelerator)")
        if "lse" in call.features and call.dtype == torch.float32:
            # PyTorch keeps it in base 2 and converts twice: 1.08 times the error that DESIGN.md section 4
            # allows (one query on 239 keys, on a CPU).
            reasons.append("no lse in float32: needs 16 bits (precision), or return_lse=False")
        if call.device == "cpu" or torch._dynamo.config.disable:
            reasons += _dense_reasons(call)
        return reasons

    def attend(self, q: Tensor, k: Tensor, v: Tensor, **o: Any) -> tuple[Tensor, Tensor | None]:
        batch, tq, tk = q.shape[0], q.shape[2], k.shape[2]
        segments, kv_lengths = o["segments"], o["kv_lengths"]
        left, right = (side if side >= 0 else FAR for side in diagonal_band(o["causal"], o["window"]))
        limits = Limits(tq, tk if kv_lengths is None else kv_lengths, left, right)
        constants = (o["scale"], o["softcap"], o["return_lse"])
        rest = (segments, kv_lengths, o["alibi_slopes"], o["bias"], constants)
        if torch.compiler.is_compiling():
            # The same lines in every layer: the compiler keeps one of them.
            return flex(q, k, v, limits, tile_lists(tq, tk, limits, segments, q.device), *rest)

        def make() -> tuple[Limits, tuple[Tensor, ...]]:
            lists = tile_lists(tq, tk, limits, segments, q.device)
            for t in lists:  # else one compilation more, when both of their sizes have changed
                torch._dynamo.maybe_mark_dynamic(t, list(range(2, t.ndim)))
            return limits.tensors(batch, q.device), lists

        facts = (batch, tq, tk, left, right, kv_lengths is None, q.device)
        tensors = [t for t in (kv_lengths, *(segments or ())) if t is not None]
        data, lists = _RECENT.get(facts, tensors, make)
        if q.is_cuda:
            return _run_compiled(q, k, v, data, lists, *rest, backend=self.backend)
        # PyTorch refuses what requires a gradient on a CPU even where none is recorded.
        return flex(q.detach(), k.detach(), v.detach(), data, lists, *rest)
