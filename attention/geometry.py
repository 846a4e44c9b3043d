"""Which query sees which key: the arithmetic that implementations share. (naive.py writes its own out.)"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ops.options import MASK_BLOCK

FAR = 2**30  # beyond all tokens: stands for unbounded, and sums with it stay within 32 bits


def normalise_window(window: Sequence[int | None] | None) -> tuple[int, int] | None:
    """(left, right) with -1 for unbounded, at most FAR; None when both sides are unbounded."""
    if window is None:
        return None
    # Compared, where min() would give Inductor an expression of a window that varies, which a mask of
    # flex_attention may not hold (torch 2.11).
    left, right = (-1 if side is None else FAR if side > FAR else side for side in window)
    return None if left < 0 and right < 0 else (left, right)


def relative_positions(i: Tensor, j: Tensor, tq: int, tk: int, kv_lengths: Tensor | None) -> Tensor:
    """rel = j - (i + Tk - Tq) for queries i and keys j (1-d): (1, 1, |i|, |j|), or (B, 1, |i|, |j|) with
    `kv_lengths` (B,) in the place of Tk."""
    keys = tk if kv_lengths is None else kv_lengths.view(-1, 1, 1, 1)
    return j.view(1, 1, 1, -1) - (i.view(1, 1, -1, 1) + (keys - tq))


def visible(
    rel: Tensor,
    j: Tensor,
    band: tuple[int, int],
    kv_lengths: Tensor | None,
    document_ids: tuple[Tensor, Tensor] | None,
    blocks: Tensor | None = None,
) -> Tensor:
    """True where a query sees a key, broadcastable to (B, Hq, |i|, |j|).

    `rel` comes from `relative_positions`, `band` from `AttentionOptions.band`, and `document_ids` is already
    cut to the queries and keys in hand, (B, |i|) and (B, |j|); so is `blocks`, see `block_mask_of`.
    """
    left, right = band
    seen = torch.ones_like(rel, dtype=torch.bool) if right < 0 else rel <= right
    if left >= 0:
        seen = seen & (rel >= -left)
    if kv_lengths is not None:
        seen = seen & (j.view(1, 1, 1, -1) < kv_lengths.view(-1, 1, 1, 1))
    if document_ids is not None:
        q_ids, k_ids = document_ids
        seen = seen & (q_ids[:, None, :, None] == k_ids[:, None, None, :])
    return seen if blocks is None else seen & blocks


def block_mask_of(block_mask: Tensor | None, i: Tensor, j: Tensor) -> Tensor | None:
    """A block mask at queries i and keys j (1-d): (1 or B, 1 or Hq, |i|, |j|); None for None."""
    return None if block_mask is None else block_mask[:, :, i // MASK_BLOCK][..., j // MASK_BLOCK]


def bias_tile(bias: Tensor, rows: range, cols: range) -> Tensor:
    """The tile of a bias that broadcasts to (B, Hq, Tq, Tk): a view of four dimensions."""
    bias = bias.view((1,) * (4 - bias.ndim) + tuple(bias.shape))
    if bias.shape[2] > 1:
        bias = bias[:, :, rows.start : rows.stop]
    return bias[..., cols.start : cols.stop] if bias.shape[3] > 1 else bias


class _RelativeBias(torch.autograd.Function):
    """A lookup by distance. The gradient of plain indexing would be summed in the dtype of the scores,
    score by score."""

    @staticmethod
    def forward(ctx: Any, table: Tensor, rel: Tensor, dtype: torch.dtype) -> Tensor:
        reach = table.shape[1] // 2
        ctx.save_for_backward(rel[:, 0, -1:, 0].clone())  # not rel, of which it would be a view
        ctx.dtype, ctx.reach = table.dtype, reach
        index = rel.squeeze(1).clamp(-reach, reach) + reach
        return F.embedding(index, table.to(dtype).T).permute(0, 3, 1, 2)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return diagonal_sums(grad, ctx.saved_tensors[0], ctx.reach).to(ctx.dtype), None, None


def relative_bias_of(relative_bias: Tensor, rel: Tensor, dtype: torch.dtype) -> Tensor:
    """relative_bias (Hq, 2 R + 1) at distances rel (B or 1, 1, r, c), as `relative_positions` has them:
    (B or 1, Hq, r, c) of `dtype`. Its gradient is summed in fp32, or fp64, in a definite order."""
    return _RelativeBias.apply(relative_bias, rel, dtype)


def widest(device: torch.device) -> torch.dtype:
    """What sums of many numbers are kept in: fp64, which Apple's GPUs do not have."""
    return torch.float32 if device.type == "mps" else torch.float64


def diagonal_sums(x: Tensor, first: Tensor, reach: int) -> Tensor:
    """The gradient of `relative_bias_of`: x (B, Hq, r, c) summed over all scores of each distance,
    (Hq, 2 reach + 1) in `widest`. first: (B or 1, 1), the distance of the last row's first key, the least."""
    rows, cols = x.shape[2:]
    # With each row shifted right by one relative to the row below, a diagonal becomes a column.
    skewed = F.pad(x.flip(2), (0, rows)).flatten(2)[..., :-rows].unflatten(2, (rows, rows + cols - 1))
    sums = skewed.sum(2, dtype=torch.promote_types(x.dtype, torch.float32))  # (B, Hq, distances)
    sums = sums.to(widest(x.device))
    distances = first + torch.arange(rows + cols - 1, device=x.device)
    index = torch.arange(1 - reach, reach, device=x.device) - first  # of the distances within reach
    there = (index >= 0) & (index < sums.shape[2])
    index = index.clamp(0, sums.shape[2] - 1)[:, None].expand(len(sums), sums.shape[1], -1)
    within = sums.gather(2, index) * there[:, None]
    before, beyond = (
        (sums * selected[:, None]).sum(2, keepdim=True)
        for selected in (distances <= -reach, distances >= reach)
    )
    return torch.cat([before, within, beyond], 2).sum(0)


def zero_beyond_lengths(x: Tensor, kv_lengths: Tensor | None) -> Tensor:
    """k or v (B, Hkv, Tk, D) with zeros from `kv_lengths` on.

    A mask does not do: what is parked there may be NaN, and 0 * NaN is NaN, in P V and in dS K.
    """
    if kv_lengths is None:
        return x
    j = torch.arange(x.shape[2], device=x.device).view(1, 1, -1, 1)
    return x.masked_fill(j >= kv_lengths.view(-1, 1, 1, 1), 0)


def align_to_16_bytes(x: Tensor) -> Tensor:
    """x where every row begins at a multiple of 16 bytes, as kernels read, else a contiguous copy: they would
    fail with a misaligned address, which ends all work of the process on the GPU."""
    step = 16 // x.element_size()
    fits = x.stride(-1) == 1 and not any(s % step for s in x.stride()[:-1]) and x.data_ptr() % 16 == 0
    return x if fits else x.clone(memory_format=torch.contiguous_format)


def empty_attention(q: Tensor, k: Tensor, v: Tensor, *biases: Tensor | None) -> tuple[Tensor, Tensor]:
    """(out, lse) where B, Tq or Tk is 0: zeros and -inf, with gradients of zero rather than an error."""
    everything = torch.ones((), dtype=torch.bool, device=q.device)
    out = q.masked_fill(everything, 0) + (k[..., :0].sum() + v[..., :0].sum())
    for bias in biases:
        if bias is not None:
            out = out + bias.flatten()[:0].sum().to(out.dtype)
    lse_dtype = torch.promote_types(q.dtype, torch.float32)
    return out, torch.full(q.shape[:3], -torch.inf, dtype=lse_dtype, device=q.device)


def tile_kind(rows: range, cols: range, offset: int, band: tuple[int, int]) -> str:
    """What queries `rows` see of keys `cols`, for the diagonal rel = j - (i + offset) and a band around it.

    full: every query sees every key, no mask needed; partial: some do; right_of_band: none, the keys are in
    the future; left_of_band: none, a sliding window has moved on.
    """
    left, right = band
    first = cols.start - (rows.stop - 1 + offset)
    last = cols.stop - 1 - (rows.start + offset)
    if 0 <= right < first:
        return "right_of_band"
    if left >= 0 and last < -left:
        return "left_of_band"
    return "full" if (right < 0 or last <= right) and (left < 0 or first >= -left) else "partial"


def tiles(length: int, block: int) -> list[range]:
    """[0, length) in ranges of `block`, the last one shorter."""
    return [range(start, min(start + block, length)) for start in range(0, length, block)]
