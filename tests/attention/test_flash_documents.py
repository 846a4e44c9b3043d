"""Documents as cumulative lengths, read from the device once."""

from __future__ import annotations

import pytest
import torch

from attention import flash_documents


def ids_of(*rows: list[int]) -> torch.Tensor:
    return torch.tensor(rows, dtype=torch.int32)


def test_documents() -> None:
    same = ids_of([5, 5, 5, -1, -1, 0], [0, 0, 0, 0, 0, 0])
    found = flash_documents.documents(same, same)
    assert found.cu_seqlens_q.tolist() == found.cu_seqlens_k.tolist() == [0, 3, 5, 6, 12]
    assert found.cu_seqlens_q.dtype == torch.int32
    assert (found.max_seqlen_q, found.max_seqlen_k, found.keyless, found.ends_on_diagonal) == (
        6,
        6,
        None,
        True,
    )
    # The last 3 of 6: documents of the keys may have no queries; 9 has no keys, and is counted to its place.
    found = flash_documents.documents(ids_of([2, 9, 3]), ids_of([1, 1, 2, 2, 2, 3]))
    assert (found.cu_seqlens_q.tolist(), found.cu_seqlens_k.tolist()) == ([0, 0, 2, 3], [0, 2, 5, 6])
    assert found.keyless.tolist() == [[False, True, False]] and found.ends_on_diagonal
    assert not flash_documents.documents(ids_of([1, 2, 2]), ids_of([1, 1, 2])).ends_on_diagonal


def test_documents_are_read_once_per_tensor(monkeypatch: pytest.MonkeyPatch) -> None:
    """In place changes are noticed; how often layers ask is in test_flash_lib.py."""
    reads = []
    find = flash_documents._find
    monkeypatch.setattr(flash_documents, "_find", lambda *ids: reads.append(ids) or find(*ids))
    ids, other = ids_of([1, 1, 2, 2]), ids_of([1, 1, 2, 2])
    for _ in range(12):
        flash_documents.documents(ids, ids)
    assert len(reads) == 1
    flash_documents.documents(other, other)
    assert len(reads) == 2
    ids[0, 1] = 2
    assert flash_documents.documents(ids, ids).cu_seqlens_q.tolist() == [0, 1, 4] and len(reads) == 3
    with torch.inference_mode():  # its tensors count no changes
        uncounted = ids_of([1, 1, 2, 2])
        flash_documents.documents(uncounted, uncounted)
        uncounted[0, 1] = 2
        assert flash_documents.documents(uncounted, uncounted).cu_seqlens_q.tolist() == [0, 1, 4]
    assert len(flash_documents._RECENT) <= 8
