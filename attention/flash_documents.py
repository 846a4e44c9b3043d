"""Documents in a packed batch, as flash-attn's variable-length kernels want them: cumulative lengths.

How many documents there are is data, so it costs one host synchronisation per tensor of ids. Every layer is
given the same tensor, so the last few answers are kept (not in inference mode: there it is one per call).
"""

from __future__ import annotations

import weakref
from collections import deque
from dataclasses import dataclass

import torch
from torch import Tensor

from conf.values import UserError

_RECENT: deque = deque(maxlen=8)  # (refs to the ids, their versions, Documents): eight micro-batches


@dataclass(frozen=True)
class Documents:
    """N documents, in the order of the packed keys (B * Tk); a document may have no queries.

    `keyless` (B, Tq) marks the queries whose document has no keys, or is None: they are counted to the
    document on their diagonal, so that all others keep their place, and their results are to be blanked.
    """

    cu_seqlens_q: Tensor  # (N + 1,) int32 on the device
    cu_seqlens_k: Tensor
    max_seqlen_q: int
    max_seqlen_k: int
    keyless: Tensor | None
    # Each document ends on the diagonal of the whole, so that its own bottom-right corner lies there too.
    ends_on_diagonal: bool

    def varlen_arguments(self) -> dict[str, Tensor | int]:
        """As all versions name them."""
        return {
            "cu_seqlens_q": self.cu_seqlens_q,
            "cu_seqlens_k": self.cu_seqlens_k,
            # For 1, version 2 packs the heads of a group into the tokens, and a document has to have a query.
            "max_seqlen_q": max(2, self.max_seqlen_q),
            "max_seqlen_k": self.max_seqlen_k,
        }


def documents(q_ids: Tensor, k_ids: Tensor) -> Documents:
    """The documents of ids (B, Tq) and (B, Tk); the ids are read from the device only where they are new.

    Raises ValueError for ids that cumulative lengths cannot tell: one that comes back after another, or
    another order among queries than among keys.
    """
    if q_ids.is_cuda and torch.cuda.is_current_stream_capturing():
        raise UserError(
            "document_ids: the number of documents is needed on the host, and a CUDA graph under capture "
            "cannot give it; use cuda_graphs=false, or attention=tiled"
        )
    given = (q_ids, k_ids)
    # What inference mode makes counts no changes, so nothing can be kept for it.
    versions = None if any(ids.is_inference() for ids in given) else tuple(ids._version for ids in given)
    for refs, of_versions, found in tuple(_RECENT):
        if versions == of_versions and all(ref() is ids for ref, ids in zip(refs, given, strict=True)):
            return found
    found = _find(q_ids, k_ids)
    if versions is not None:
        _RECENT.append((tuple(map(weakref.ref, given)), versions, found))
    return found


def _find(q_ids: Tensor, k_ids: Tensor) -> Documents:
    tq, tk, device = q_ids.shape[1], k_ids.shape[1], q_ids.device
    k_codes = _row_and_id(k_ids.cpu())
    q_codes, keyless = k_codes, None
    if q_ids is not k_ids:
        q_codes = _row_and_id(q_ids.cpu())
        lost = ~torch.isin(q_codes, k_codes)
        if lost.any():
            diagonal = (torch.arange(tq) + tk - tq).clamp(0, tk - 1)
            q_codes = torch.where(lost, k_codes[:, diagonal], q_codes)
            keyless = lost.to(device)
    k_docs, k_counts = _packed_documents(k_codes, "keys")
    q_docs, q_counts = (k_docs, k_counts) if q_codes is k_codes else _packed_documents(q_codes, "queries")
    order = k_docs.argsort()
    place = order[torch.searchsorted(k_docs[order], q_docs)]  # of each query document among those of the keys
    if (place.diff() < 0).any():
        raise UserError(
            "document_ids: the documents of the queries come in another order than those of the keys, which "
            "the flash-attn library cannot tell; put them in one order, or use attention=tiled"
        )
    lengths = torch.zeros_like(k_counts).index_copy_(0, place, q_counts)
    cu_q, cu_k = (torch.cat([counts.new_zeros(1), counts.cumsum(0)]) for counts in (lengths, k_counts))
    next_row = (q_docs >> 32) + 1
    from_the_end = (next_row * tq - cu_q[place + 1], next_row * tk - cu_k[place + 1])
    return Documents(
        cu_seqlens_q=cu_q.to(device, torch.int32),
        cu_seqlens_k=cu_k.to(device, torch.int32),
        max_seqlen_q=int(lengths.max()),
        max_seqlen_k=int(k_counts.max()),
        keyless=keyless,
        ends_on_diagonal=torch.equal(*from_the_end),
    )


def _row_and_id(ids: Tensor) -> Tensor:
    """The row in the upper 32 bits, the id in the lower: one number per document of the batch."""
    rows = torch.arange(ids.shape[0]).unsqueeze(1)
    return (rows << 32) + (ids.long() + 2**31)


def _packed_documents(codes: Tensor, what: str) -> tuple[Tensor, Tensor]:
    """(documents, lengths) in packed order (B * T), of `_row_and_id`'s codes."""
    docs, counts = torch.unique_consecutive(codes.flatten(), return_counts=True)
    distinct, times = docs.unique(return_counts=True)
    if (times > 1).any():
        back = int(distinct[times > 1][0])
        raise UserError(
            f"document_ids: document {(back & 0xFFFFFFFF) - 2**31} of row {back >> 32} comes back after "
            f"another one (among the {what}), and the flash-attn library takes a document in one piece; give "
            "each piece an id of its own if they are not to see each other, or use attention=tiled"
        )
    return docs, counts
