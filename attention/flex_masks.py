"""FlexAttention's masks: what a query sees as a few numbers, the tiles of scores to compute, and their cache.

Whether a tile of 128 x 128 scores is empty, partial or full comes from its corners, in O((T / 128)^2): no
mask of T^2 is ever made, nothing waits for the device, and the same lines run in a compiled step and in a
CUDA graph.
"""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

TILE = 128  # PyTorch's sparse tiles; a kernel's own are divisors

DocumentIds = tuple[Tensor, Tensor]


class TileLists(NamedTuple):
    """Which tiles are computed, as BlockMask takes them, (1 or B, 1 or H, rows) and (1 or B, 1 or H, rows,
    columns), int32: how many key tiles a query tile sees in part, and which; the same in full; and how many
    query tiles see a key tile, and which. None in the place of full ones: every query sees every key."""

    kv_num_blocks: Tensor
    kv_indices: Tensor
    full_kv_num_blocks: Tensor | None
    full_kv_indices: Tensor | None
    q_num_blocks: Tensor
    q_indices: Tensor
    full_q_num_blocks: Tensor | None
    full_q_indices: Tensor | None


class Limits(NamedTuple):
    """What query i sees: keys j < keys with -left <= rel <= right, rel = j - (i + keys - queries). Numbers
    become constants of a kernel, but where left or right is FAR, or `keys` is a number (Tk, which PyTorch
    checks), there is no comparison at all; tensors, (B,) int32, are read by the kernel."""

    queries: int | Tensor
    keys: int | Tensor
    left: int | Tensor
    right: int | Tensor

    def for_row(self, b: Tensor) -> Limits:
        return Limits(*(n[b] if isinstance(n, Tensor) else n for n in self))

    def tensors(self, batch: int, device: torch.device) -> Limits:
        """All of them as they are now."""
        like = {"dtype": torch.int32, "device": device}
        return Limits(
            *(n.clone() if isinstance(n, Tensor) else torch.full((batch,), n, **like) for n in self)
        )


def tile_lists(
    tq: int,
    tk: int,
    limits: Limits,
    document_ids: DocumentIds | None,
    device: torch.device,
    spare: int = 1,
    block_mask: Tensor | None = None,
) -> TileLists:
    """The tiles to compute. There are `spare` rows and columns more than tiles: with one, torch.compile does
    not specialise on a single tile."""
    queries, keys, left, right = (n.view(-1, 1, 1, 1) if isinstance(n, Tensor) else n for n in limits)
    i = TILE * torch.arange((tq + TILE - 1) // TILE + spare, device=device).view(1, 1, -1, 1)
    j = TILE * torch.arange((tk + TILE - 1) // TILE + spare, device=device).view(1, 1, 1, -1)
    causal_offset = keys - queries
    # the least and most rel
    first, last = j - (i + TILE - 1) - causal_offset, j + TILE - 1 - i - causal_offset
    some = (first <= right) & (last >= -left) & (j < keys) & (i < tq)
    full = (first >= -left) & (last <= right) & (j + TILE <= keys) & (i + TILE <= tq)
    if document_ids is not None:
        # Documents by the range of their ids in a tile: exact for ids in order, else a tile too many.
        (q_low, q_high), (k_low, k_high) = (_tile_range(ids) for ids in document_ids)
        q_low, q_high = q_low[:, None, :, None], q_high[:, None, :, None]  # (B, 1, rows, 1)
        k_low, k_high = k_low[:, None, None, :], k_high[:, None, None, :]
        some = some & (q_low <= k_high) & (k_low <= q_high)
        full = full & (q_low == q_high) & (k_low == k_high) & (q_low == k_low)
    if block_mask is not None:
        kept = torch.nn.functional.pad(block_mask, (0, spare, 0, spare))
        some, full = some & kept, full & kept
    kinds = (some & ~full, full)
    return TileLists(
        *(part for kind in kinds for part in _ordered(kind)),
        *(part for kind in kinds for part in _ordered(kind.transpose(-2, -1))),
    )


def unmasked_lists(tq: int, tk: int, device: torch.device) -> TileLists:
    """The tiles where every query sees every key: no list of full ones, so that the kernel has one loop.

    One tile of FAR x FAR, the same that PyTorch makes where it is given no mask, but PyTorch runs a dozen
    kernels for it in each call. For one query the tiles of its keys, since newer versions divide keys among
    the splits of the decoding kernel by tiles.
    """
    like = {"dtype": torch.int32, "device": device}
    tiles = (tk + TILE - 1) // TILE if tq == 1 else 1
    order = torch.arange(tiles + (tq == 1), **like).view(1, 1, -1)  # a spare one: see tile_lists
    by_query = torch.full((1, 1, 1), tiles, **like), order[:, :, None]
    by_key = (order < tiles).to(torch.int32), torch.zeros_like(order)[..., None]
    return TileLists(*by_query, None, None, *by_key, None, None)


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


class RecentResults:
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
