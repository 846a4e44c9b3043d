"""softmax(Q K^T / sqrt(D)) V as papers and tutorials write it: the eager baseline of speed-ups.

In the precision of its inputs, with PyTorch's softmax, where attention/naive.py, the specification, is in
fp32 inside and gives an lse: to compare with that would flatter.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar

import torch
from torch import Tensor

from attention.base import (
    MATMUL_KERNELS,
    Attention,
    AttentionCall,
    AttentionOptions,
    Capabilities,
    Costs,
    Declaration,
    scores_bytes,
)
from attention.declaration import q_bytes


def torch_softmax(scores: Tensor) -> Tensor:
    """PyTorch's own: shifted by the maximum and in fp32 inside, rounded when written."""
    return torch.softmax(scores, dim=-1)


def standard_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    options: AttentionOptions,
    softmax: Callable[[Tensor], Tensor] = torch_softmax,
    scale_q: bool = False,
) -> Tensor:
    """out (B, H, Tq, D): all scores in memory, the mask as -inf, probabilities kept by autograd.

    `softmax` over the last dimension; `scale_q`: the scale goes into q, before the product. Every query
    has to see a key, and what lies beyond `kv_lengths` to be finite; all of it is computed."""
    causal, scale, kv_lengths = options.causal, options.scale, options.kv_lengths
    scores = (q * scale) @ k.mT if scale_q else (q @ k.mT) * scale  # (B, H, Tq, Tk)
    hidden, tq, tk = None, q.shape[2], k.shape[2]
    if kv_lengths is not None:
        i, j = torch.arange(tq, device=q.device).view(-1, 1), torch.arange(tk, device=q.device)
        keys = kv_lengths.view(-1, 1, 1, 1)
        hidden = j > i + keys - tq if causal else j >= keys
    elif causal:
        hidden = torch.ones(tq, tk, dtype=torch.bool, device=q.device).triu(1 + tk - tq)
    if options.document_ids is not None:
        q_ids, k_ids = options.document_ids
        apart = q_ids[:, None, :, None] != k_ids[:, None, None, :]
        hidden = apart if hidden is None else hidden | apart
    return softmax(scores if hidden is None else scores.masked_fill(hidden, -torch.inf)) @ v


class StandardAttention(Attention):
    """The baseline, memory O(T^2). Of the contract's options `causal` alone; studies whose queries all see a
    key ask it for documents and a cache too (scripts/measure/instruments/textbook.py).

    Args:
        autocast: whether autocast applies, which computes the softmax in fp32 on a GPU; without it, all is
            computed in the dtype of q.
    """

    capabilities: ClassVar[Capabilities] = Capabilities(
        features=frozenset({"noncausal"}), devices=frozenset({"cpu", "cuda", "mps"}), deterministic=True
    )
    declaration: ClassVar[Declaration] = Declaration(
        kernels=MATMUL_KERNELS, writes_scores=True, writes_masks=True
    )

    def __init__(self, autocast: bool = True, name: str = "standard"):
        super().__init__(name)
        self.autocast = autocast

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, options: AttentionOptions, dropout_seed: Tensor | None
    ) -> tuple[Tensor, None]:
        if self.autocast:
            return standard_attention(q, k, v, options), None
        with torch.autocast(q.device.type, enabled=False):
            return standard_attention(q, k, v, options), None

    def costs(self, call: AttentionCall, compiled: bool = False) -> Costs:
        """M = 4 B H T^2, the bytes of the scores in fp32. Kept for the backward: the probabilities (under
        autocast on a GPU both in fp32, as softmax returns them, and in 16 bits, for P V); q, k and v,
        contiguous; the mask, T^2 bytes. The backward has dP and dS, after the copy of v is freed and, where
        there are two, the 16-bit probabilities; compiled, one fp32 matrix is kept and one is transient, and
        all layers share a mask. Passes over the scores, in the precision of q: Q K^T 1, scale 2, mask 2,
        softmax 2, P V 1; dV and dP 2, softmax 3, mask 2, scale 2, dQ and dK 2."""
        matrix, scores_in_dtype = scores_bytes(call), scores_bytes(call) * call.dtype.itemsize // 4
        copies, mask = 3 * q_bytes(call), call.tq * call.tk if call.causal else 0
        shared_costs = {
            "moved_bytes": (8 * scores_in_dtype, 11 * scores_in_dtype),
            "writes_scores": True,
            "backward_matmuls": 4,
        }
        if compiled:
            return Costs(matrix + copies, matrix, mask, **shared_costs)
        twice = call.dtype.itemsize == 2 and call.device == "cuda" and self.autocast
        kept = scores_in_dtype + (matrix if twice else 0) + copies + mask
        backward = (2 * matrix - scores_in_dtype if twice else 2 * scores_in_dtype) - q_bytes(call)
        return Costs(kept, backward, **shared_costs)
