"""FlexAttention's tile lists against the masks of the specification, and what its layers share."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from attention.flex_masks import FAR, TILE, Limits, Recent, tile_lists
from attention.naive import attention_scores

CPU = torch.device("cpu")


def _dense(num: Tensor, indices: Tensor) -> Tensor:
    """Lists of tiles as a matrix of booleans (1 or B, rows, columns)."""
    first = torch.arange(indices.shape[-1]) < num[..., None]
    return torch.zeros_like(indices).scatter(-1, indices.long(), first.int()).bool()[:, 0]


DOCUMENTS = torch.tensor([[0] * 150 + [1] * 200 + [2] * 163, [5] * 513], dtype=torch.int32)


@pytest.mark.parametrize(
    ("tq", "tk", "band", "options"),
    [
        (1, 1, (-1, 0), {}),
        (256, 256, (-1, 0), {}),
        (300, 513, (-1, 0), {}),
        (513, 300, (-1, 0), {}),
        (300, 513, (-1, -1), {}),
        (513, 513, (130, 0), {}),
        (300, 513, (100, 60), {}),
        (300, 513, (-1, 0), {"kv_lengths": torch.tensor([513, 200], dtype=torch.int32)}),
        (1, 513, (40, 0), {"kv_lengths": torch.tensor([0, 129], dtype=torch.int32)}),
        (513, 513, (-1, 0), {"segments": (DOCUMENTS, DOCUMENTS)}),
        (300, 513, (-1, -1), {"segments": (DOCUMENTS[:, 213:], DOCUMENTS)}),
    ],
)
def test_tile_lists_are_what_the_mask_says(tq: int, tk: int, band: tuple[int, int], options: dict) -> None:
    left, right = (FAR if side < 0 else side for side in band)
    kv_lengths, segments = options.get("kv_lengths"), options.get("segments")
    limits = Limits(tq, tk if kv_lengths is None else kv_lengths, left, right)
    lists = tile_lists(tq, tk, limits, segments, CPU)
    partial, full, partial_by_key, full_by_key = (_dense(*lists[n : n + 2]) for n in (0, 2, 4, 6))
    q, k = torch.zeros(2, 1, tq, 1), torch.zeros(2, 1, tk, 1)
    scores = attention_scores(q, k, causal=False, window=band, **options)  # a causal band has right = 0
    rows, columns = partial.shape[1:]
    seen = torch.zeros(2, rows * TILE, columns * TILE, dtype=torch.bool)
    seen[:, :tq, :tk] = scores[:, 0] == 0
    tiles = seen.view(2, rows, TILE, columns, TILE)
    some, all_of_it = tiles.any(4).any(2), tiles.all(4).all(2)
    assert torch.equal(full.expand_as(some), all_of_it)
    assert torch.equal(partial.expand_as(some), some & ~all_of_it)
    assert torch.equal(partial_by_key, partial.transpose(1, 2))
    assert torch.equal(full_by_key, full.transpose(1, 2))
    # The same from data as from numbers.
    again = tile_lists(tq, tk, limits.tensors(2, CPU), segments, CPU)
    assert all(torch.equal(a.expand_as(b), b) for a, b in zip(lists, again, strict=True))


def test_ids_out_of_order_never_lose_a_tile() -> None:
    ids = torch.randint(0, 3, (2, 700), dtype=torch.int32, generator=torch.Generator().manual_seed(0))
    lists = tile_lists(700, 700, Limits(700, 700, FAR, FAR), (ids, ids), CPU)
    assert _dense(*lists[:2])[:, :6, :6].all() and not _dense(*lists[2:4]).any()


def test_layers_share_what_was_made() -> None:
    recent, lengths = Recent(size=2), torch.tensor([3, 4], dtype=torch.int32)
    first = recent.get(("a",), [lengths], object)
    assert recent.get(("a",), [lengths], object) is first
    assert recent.get(("b",), [lengths], object) is not first
    lengths += 1  # the next step
    second = recent.get(("a",), [lengths], object)
    assert second is not first
    # Another tensor at the same address is another tensor.
    key = next(key for key, (_, made) in recent._made.items() if made is second)
    recent._made[key] = ([lambda: None], second)
    assert recent.get(("a",), [lengths], object) is not second
    for n in range(5):
        recent.get((n,), [], object)
    assert len(recent._made) == 2
