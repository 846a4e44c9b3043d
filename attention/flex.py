"""FlexAttention (Dong et al. 2024, arXiv 2412.05496): Inductor writes a Triton kernel for the scores at hand.

The contract's masks become one `mask_mod`, its scores one `score_mod`. Whether a tile of 128 x 128 scores is
empty, full or partial comes from the tile's corners, in O((T / 128)^2): no mask of T^2 is ever made, nothing
waits for the device, and the same lines run in a compiled step and in a CUDA graph.

Every number that a mask depends on is data for the kernel: causal, windows, rectangles and kv_lengths of any
size share one. Called without a surrounding torch.compile on CUDA it is compiled here, once per kind of call
and then once more for all lengths; lengths >= 512 in whole tiles, as in training, get kernels of their own
without bounds checks. Under a backend that does not generate code (aot_eager) PyTorch makes all T^2 scores.
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

TILE = 128  # of PyTorch's sparse tiles; a kernel's own are divisors
FAR = 2**30  # stands for unbounded
# Uncompiled, PyTorch makes a few fp32 copies of all scores: 256 MiB each at this bound.
MAX_DENSE_SCORES = 2**26

Segments = tuple[Tensor, Tensor]
MaskMod = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
ScoreMod = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]


class Mask(NamedTuple):
    """Which query sees which key, as tensors.

    `limits` (B, 4) int32 holds the diagonal (keys - Tq), how far left and right of it a query sees, and the
    keys there are. The rest are PyTorch's lists of tiles, partial and full, by query tile and by key tile.
    """

    limits: Tensor
    kv_num_blocks: Tensor
    kv_indices: Tensor
    full_kv_num_blocks: Tensor
    full_kv_indices: Tensor
    q_num_blocks: Tensor
    q_indices: Tensor
    full_q_num_blocks: Tensor
    full_q_indices: Tensor


def make_mask(
    batch: int,
    tq: int,
    tk: int,
    band: tuple[int, int],
    kv_lengths: Tensor | None,
    segments: Segments | None,
    device: torch.device,
) -> Mask:
    """The Mask of a call; `band` is that of geometry.diagonal_band. Lists are (1 or B, 1, rows, columns)."""
    left, right = (side if side >= 0 else FAR for side in band)
    keys = torch.full((1,), tk, dtype=torch.int32, device=device) if kv_lengths is None else kv_lengths
    sides = [torch.full_like(keys, side) for side in (left, right)]
    limits = torch.stack([keys - tq, *sides, keys], dim=1)
    diagonal, left, right, keys = (limits[:, n].view(-1, 1, 1, 1) for n in range(4))
    # A row and a column of tiles more than there are: torch.compile would specialise on a single one.
    i = TILE * torch.arange((tq + TILE - 1) // TILE + 1, device=device).view(1, 1, -1, 1)
    j = TILE * torch.arange((tk + TILE - 1) // TILE + 1, device=device).view(1, 1, 1, -1)
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
    lists = [
        _ordered(kind.transpose(-2, -1) if by_key else kind)
        for by_key in (False, True)
        for kind in (some & ~full, full)
    ]
    return Mask(limits.expand(batch, 4).contiguous(), *(part for pair in lists for part in pair))


def _tile_range(ids: Tensor) -> tuple[Tensor, Tensor]:
    """The least and greatest of ids (B, T) in each tile: (B, tiles + 1) each, the last id filling up."""
    tokens = ids.shape[1]
    t = torch.arange(((tokens + TILE - 1) // TILE + 1) * TILE, device=ids.device).clamp(max=tokens - 1)
    tiled = ids[:, t].unflatten(1, (-1, TILE))
    return tiled.amin(-1), tiled.amax(-1)


def _ordered(tiles: Tensor) -> tuple[Tensor, Tensor]:
    """How many columns of each row are set, and which come first: (..., rows), (..., rows, columns)."""
    tiles = tiles.to(torch.int32)
    order = torch.argsort(tiles, dim=-1, descending=True, stable=True)
    return tiles.sum(-1).to(torch.int32), order.to(torch.int32).contiguous()


def _mask_mod(limits: Tensor, segments: Segments | None) -> MaskMod:
    """What PyTorch asks of partial tiles."""

    def visible(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        rel = j - i - limits[b, 0]
        return (rel >= -limits[b, 1]) & (rel <= limits[b, 2]) & (j < limits[b, 3])

    if segments is None:
        return visible
    q_ids, k_ids = segments
    return lambda b, h, i, j: visible(b, h, i, j) & (q_ids[b, i] == k_ids[b, j])


def _score_mod(
    limits: Tensor, softcap: float | None, slopes: Tensor | None, bias: Tensor | None
) -> ScoreMod | None:
    """What the contract does to scaled scores, in its order; None for nothing."""
    if softcap is None and slopes is None and bias is None:
        return None
    if bias is not None:
        bias = bias[(None,) * (4 - bias.ndim)]
        sizes = bias.shape

    def scores(s: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        if softcap is not None:
            s = softcap * torch.tanh(s / softcap)
        if slopes is not None:
            s = s - slopes[h] * (j - i - limits[b, 0]).abs()
        if bias is not None:
            # Never expanded: the gradient of an expanded bias would be (B, Hq, Tq, Tk) before its reduction.
            where = [0 * x if size == 1 else x for x, size in zip((b, h, i, j), sizes, strict=True)]
            s = s + bias[where[0], where[1], where[2], where[3]]
        return s

    return scores


def flex(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Mask,
    segments: Segments | None,
    kv_lengths: Tensor | None,
    alibi_slopes: Tensor | None,
    bias: Tensor | None,
    constants: tuple[float, float | None, bool],
) -> tuple[Tensor, Tensor | None]:
    """(out, lse) by PyTorch's flex_attention; `constants` are scale, softcap and return_lse."""
    scale, softcap, return_lse = constants
    if kv_lengths is not None:
        # What lies beyond is masked in Q K^T, but 0 * NaN would reach P V, and in the backward dS K.
        v = blank_beyond(v, kv_lengths)
        k = blank_beyond(k, kv_lengths) if torch.is_grad_enabled() else k
    if alibi_slopes is not None:
        alibi_slopes = alibi_slopes.float()
    if bias is not None and (bias.requires_grad or bias.dtype == torch.float64):
        bias = bias.float()  # its gradient is summed in its own dtype
    block_mask = BlockMask(
        (q.shape[2], k.shape[2]),
        *mask[1:],
        BLOCK_SIZE=(TILE, TILE),
        mask_mod=_mask_mod(mask.limits, segments),
    )
    out, aux = flex_attention(
        q,
        k,
        v,
        score_mod=_score_mod(mask.limits, softcap, alibi_slopes, bias),
        block_mask=block_mask,
        scale=scale,
        enable_gqa=q.shape[1] != k.shape[1],
        kernel_options=_kernel_options(q),
        return_aux=AuxRequest(lse=return_lse),
    )
    return out, aux.lse


def _kernel_options(q: Tensor) -> dict[str, Any]:
    # The split-K decoding kernel packs a group's heads and queries in one tile, which outgrows 128 rows when
    # there are many queries; so it is kept to one.
    options: dict[str, Any] = {"FORCE_USE_FLEX_ATTENTION": q.shape[2] != 1}
    if q.dtype == torch.float32:
        # As exact as the dtype says, whatever torch.set_float32_matmul_precision allows (TF32).
        options["FLOAT32_PRECISION"] = "'ieee'"
        if q.shape[3] > 128 and q.shape[2] > 1:
            # 64 x 64 tiles, the default for some of these head dims, need more shared memory than there is.
            options |= {"fwd_BLOCK_M": 32, "fwd_BLOCK_N": 32, "fwd_num_stages": 2}
    return options


class MaskCache:
    """The masks of the last calls, so that the layers of a step share one.

    A mask is found by the plain facts in its key, and where it depends on tensors by the very tensors, in
    the version they had: an in-place change makes another mask.
    """

    def __init__(self, size: int = 16):
        self.size = size
        self._masks: OrderedDict[Any, tuple[list[weakref.ref[Tensor]], Mask]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._masks)

    def get(self, facts: tuple[Any, ...], tensors: list[Tensor], make: Callable[[], Mask]) -> Mask:
        capturing = torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()
        # A graph has to compute its masks at each replay; tensors of inference mode count no versions.
        if capturing or any(t.is_inference() for t in tensors):
            return make()
        key = (*facts, *((id(t), t._version) for t in tensors))
        refs, mask = self._masks.get(key, ([], None))
        if mask is None or not all(ref() is t for ref, t in zip(refs, tensors, strict=True)):
            # In inference mode it would be of no use to a training step.
            with torch.inference_mode(False), torch.no_grad():
                mask = make()
            self._masks[key] = ([weakref.ref(t) for t in tensors], mask)
            if len(self._masks) > self.size:
                self._masks.popitem(last=False)
        self._masks.move_to_end(key)
        return mask


_MASKS = MaskCache()


@lru_cache(maxsize=128)
def _compiled(kind: tuple[Any, ...], backend: str) -> Callable[..., tuple[Tensor, Tensor | None]]:
    """`flex`, compiled for one kind of call.

    torch.compile counts recompilations by code object, and gives up after eight: each kind gets its own.
    """
    own = types.FunctionType(flex.__code__.replace(), flex.__globals__, "flex")
    return torch.compile(own, fullgraph=True, backend=backend)


def _layout(t: Tensor | None) -> tuple[Any, ...] | None:
    """What a compiled kernel depends on besides lengths."""
    if t is None:
        return None
    order = tuple(sorted(range(t.ndim), key=lambda n: -t.stride(n)))
    sizes = tuple(size if n in (0, 1, t.ndim - 1) else size > 1 for n, size in enumerate(t.shape))
    return sizes if t.ndim == 4 else t.ndim, order, t.dtype, t.device, t.requires_grad


def _dense_reason(call: AttentionCall) -> list[str]:
    """Where no kernel is generated PyTorch makes all scores, without a word."""
    scores = call.batch * call.heads * call.tq * call.tk
    if scores <= MAX_DENSE_SCORES:
        return []
    return [
        f"no {scores:,} scores: uncompiled, as on this {call.device}, PyTorch makes them all; needs at most "
        f"{MAX_DENSE_SCORES:,} (B x Hq x Tq x Tk: data.batch_size, seq_len), or CUDA and torch.compile"
    ]


class FlexAttention(Attention):
    """torch.nn.attention.flex_attention, compiled.

    Head dims from 16 on CUDA, where tl.dot begins; on a CPU forward only and short, as PyTorch has it.
    """

    capabilities: ClassVar[Capabilities] = Capabilities(
        features=frozenset(FEATURES) - {"dropout"},
        dtypes=LOW_PRECISION | {torch.float32},
        min_arch=(8, 0),
        max_head_dim=256,
    )
    backend: ClassVar[str] = "inductor"  # of torch.compile, for calls from outside of a compiled step

    def __init__(self, name: str = "flex"):
        super().__init__(name)

    def unsupported_reasons(self, call: AttentionCall) -> list[str]:
        reasons = super().unsupported_reasons(call)
        if call.device == "cuda" and call.head_dim < 16:
            reasons.append(f"no head dim {call.head_dim}: needs at least 16 (model.n_embd / model.n_head)")
        if call.device == "cpu" and call.backward:
            reasons.append(
                "no backward on a CPU: PyTorch's FlexAttention has none there (trainer.accelerator)"
            )
        if "lse" in call.features and call.dtype == torch.float32:
            # PyTorch keeps it in base 2 and converts twice: 1.08 times the error that DESIGN.md section 4
            # allows (one query on 239 keys, on a CPU).
            reasons.append("no lse in float32: needs 16 bits (precision), or return_lse=False")
        if call.device == "cpu" or torch._dynamo.config.disable:
            reasons += _dense_reason(call)
        return reasons

    def attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        causal: bool,
        scale: float,
        window: tuple[int, int] | None,
        softcap: float | None,
        alibi_slopes: Tensor | None,
        bias: Tensor | None,
        segments: Segments | None,
        kv_lengths: Tensor | None,
        dropout_p: float,
        dropout_seed: Tensor | None,
        return_lse: bool,
    ) -> tuple[Tensor, Tensor | None]:
        batch, tq, tk, band = q.shape[0], q.shape[2], k.shape[2], diagonal_band(causal, window)
        constants = (scale, softcap, return_lse)

        def make() -> Mask:
            return make_mask(batch, tq, tk, band, kv_lengths, segments, q.device)

        if torch.compiler.is_compiling():
            # The same lines in every layer: the compiler keeps one of them.
            return flex(q, k, v, make(), segments, kv_lengths, alibi_slopes, bias, constants)
        tensors = [t for t in (kv_lengths, *(segments or ())) if t is not None]
        facts = (batch, tq, tk, band, kv_lengths is None, q.device)
        mask = _MASKS.get(facts, tensors, make)
        if not q.is_cuda:
            # PyTorch refuses what requires a gradient here even where none is recorded.
            q, k, v = (t.detach() for t in (q, k, v))
            return flex(q, k, v, mask, segments, kv_lengths, alibi_slopes, bias, constants)
        run = _compiled(
            self._kind(q, k, v, alibi_slopes, bias, segments, kv_lengths, constants), self.backend
        )
        return run(q, k, v, mask, segments, kv_lengths, alibi_slopes, bias, constants)

    @staticmethod
    def _kind(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        slopes: Tensor | None,
        bias: Tensor | None,
        segments: Segments | None,
        kv_lengths: Tensor | None,
        constants: tuple[float, float | None, bool],
    ) -> tuple[Any, ...]:
        """The kind of a call for `_compiled`: all but the lengths, and these where a kernel is worth it."""
        lengths = (q.shape[2], k.shape[2])
        own = all(t >= 512 and t % TILE == 0 for t in lengths)
        layouts = tuple(map(_layout, (q, k, v, slopes, bias)))
        grad = torch.is_grad_enabled()
        return layouts, segments is None, kv_lengths is None, constants, grad, lengths if own else None
