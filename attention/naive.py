"""Naive attention, softmax(Q K^T) V: the specification that every other implementation is measured against.

It makes the whole (Tq, Tk) matrix, so its memory grows as T^2. Nothing here is tuned, and fast code never
imports it.
"""

from __future__ import annotations

from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from attention.base import (
    CACHES,
    FEATURES,
    MATMUL_KERNELS,
    Attention,
    AttentionCall,
    AttentionOptions,
    CacheView,
    Capabilities,
    Costs,
    Declaration,
)
from attention.declaration import lse_bytes, q_bytes, q_fp32_bytes, scores_bytes
from ops.dropout import keep_tile
from ops.options import MASK_BLOCK

DEFAULTS = AttentionOptions()
# Queries look relative biases up in copies of the table, in turns. An embedding's gradient is one fp32 sum
# for each row, here over the scores of all far keys, a million: its error differed fourfold between two runs.
COPIES = 256


def attention_scores(q: Tensor, k: Tensor, options: AttentionOptions = DEFAULTS) -> Tensor:
    """What goes into the softmax: (B, Hq, Tq, Tk), -inf where a query does not see a key; the dtype is that
    of q and k."""
    scale, softcap, kv_lengths = options.scale, options.softcap, options.kv_lengths
    heads, tq, tk = q.shape[1], q.shape[2], k.shape[2]
    i = torch.arange(tq, device=q.device).view(1, 1, tq, 1)
    j = torch.arange(tk, device=q.device).view(1, 1, 1, tk)
    # The number of keys, per sequence: (B or 1, 1, 1, 1)
    keys = torch.full_like(i[:, :, :1], tk) if kv_lengths is None else kv_lengths.view(-1, 1, 1, 1)
    rel = j - (i + keys - tq)  # (B or 1, 1, Tq, Tk), 0 on the bottom-right diagonal

    k = k.repeat_interleave(heads // k.shape[1], dim=1)  # (B, Hkv, Tk, D) -> (B, Hq, Tk, D)
    scores = (q @ k.transpose(-2, -1)) * (q.shape[-1] ** -0.5 if scale is None else scale)
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    if options.alibi_slopes is not None:
        scores = scores - options.alibi_slopes.to(scores.dtype).view(-1, heads, 1, 1) * rel.abs()
    if options.bias is not None:
        scores = scores + options.bias.to(scores.dtype)
    if options.relative_bias is not None:
        table = options.relative_bias.to(scores.dtype)  # (Hq, 2 R + 1)
        distances = table.shape[1]
        index = rel.clamp(-(distances // 2), distances // 2) + distances // 2 + i % COPIES * distances
        of_pair = F.embedding(index.squeeze(1), table.T.repeat(COPIES, 1))  # (B or 1, Tq, Tk, Hq)
        scores = scores + of_pair.permute(0, 3, 1, 2)

    hidden = j >= keys
    if options.causal:
        hidden = hidden | (rel > 0)
    left, right = options.window or (-1, -1)
    if left >= 0:
        hidden = hidden | (rel < -left)
    if right >= 0:
        hidden = hidden | (rel > right)
    if options.document_ids is not None:
        q_ids, k_ids = options.document_ids
        hidden = hidden | (q_ids[:, None, :, None] != k_ids[:, None, None, :])
    if options.block_mask is not None:
        each = options.block_mask.repeat_interleave(MASK_BLOCK, dim=2).repeat_interleave(MASK_BLOCK, dim=3)
        hidden = hidden | ~each[:, :, :tq, :tk]
    return scores.masked_fill(hidden, -torch.inf)


def attention_probs(scores: Tensor) -> tuple[Tensor, Tensor]:
    """Softmax over the keys, and its log-denominator: ((B, Hq, Tq, Tk), (B, Hq, Tq)).

    A row of -inf gives zeros and -inf, in the gradients too, where torch.softmax would give NaN.
    """
    # The maximum only shifts, so it needs no gradient; a row without keys is shifted by 0.
    m = scores.detach().amax(dim=-1, keepdim=True)
    m = m.masked_fill(m == -torch.inf, 0)
    p = torch.exp(scores - m)
    total = p.sum(dim=-1, keepdim=True)
    lse = (m + torch.log(total)).squeeze(-1).detach()
    return p / total.masked_fill(total == 0, 1), lse


def naive_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    options: AttentionOptions = DEFAULTS,
    dropout_seed: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """(out (B, Hq, Tq, D) in q's dtype, lse (B, Hq, Tq)), in fp32 inside, or fp64 for fp64 inputs.

    `dropout_seed` is a 0-d int64 tensor, see ops/dropout.py.
    """
    dtype = torch.promote_types(q.dtype, torch.float32)
    batch, heads, tq, _ = q.shape
    kv_heads, tk = k.shape[1:3]
    kv_lengths, dropout_p = options.kv_lengths, options.dropout_p
    if kv_lengths is not None:
        # What lies beyond may be anything, and 0 * NaN is NaN: in P V here, and in dS K in the backward.
        beyond = torch.arange(tk, device=q.device).view(1, 1, tk, 1) >= kv_lengths.view(-1, 1, 1, 1)
        k, v = k.masked_fill(beyond, 0), v.masked_fill(beyond, 0)
    # Autocast would send the fp32 products back to 16 bits.
    with torch.autocast(q.device.type, enabled=False):
        p, lse = attention_probs(attention_scores(q.to(dtype), k.to(dtype), options))
        if dropout_p > 0:
            keep = keep_tile(dropout_seed, batch, heads, range(tq), range(tk), dropout_p)
            p = p * keep / (1 - dropout_p)
        v = v.to(dtype).repeat_interleave(heads // kv_heads, dim=1)  # (B, Hkv, Tk, D) -> (B, Hq, Tk, D)
        return (p @ v).to(q.dtype), lse


class NaiveAttention(Attention):
    """The specification as a contestant: every option, memory O(T^2)."""

    capabilities: ClassVar[Capabilities] = Capabilities(
        features=frozenset(FEATURES),
        devices=frozenset({"cpu", "cuda", "mps"}),
        deterministic=True,
        caches=frozenset(CACHES),
    )

    declaration: ClassVar[Declaration] = Declaration(
        kernels=MATMUL_KERNELS, writes_scores=True, writes_masks=True
    )

    def __init__(self, name: str = "naive"):
        super().__init__(name)

    def costs(self, call: AttentionCall, compiled: bool = False) -> Costs:
        """M = 4 B H T^2, the bytes of the scores in fp32. Kept for the backward: exp(s - max) by the division
        and the probabilities by P V, M each, and M more by a softcap's tanh; the operands q, k and v,
        contiguous, in fp32 and for all H heads; the mask, T^2 bytes, with documents B T^2; sum and lse. The
        backward has dP and three matrices of the division's gradient at once, after the copy of v is freed;
        compiled, only dP. Compiled under autocast, the backward products are in 16 bits: of the 16-bit q, k
        and v that were kept, and of P, recomputed from exp(s - max) (with dropout, P is kept in 16 bits).
        Compiled layers share one mask.

        Passes over the scores: Q K^T writes them; scale, mask, subtract, exp and divide read and write; max,
        sum and P V read: 14. Backward: dV and dP 2, the division 12, the sum 2, exp 3, mask and scale 4, dQ
        and dK 2: 25. A softcap divides, takes tanh and multiplies: 6, and 7 in the backward."""
        matrix, mask, sums = scores_bytes(call), call.tq * call.tk, 2 * lse_bytes(call)
        mask *= call.batch if "document_ids" in call.features else 1
        capped = "softcap" in call.features
        # which probabilities were kept, as bool
        dropout_bytes = matrix // 4 if "dropout" in call.features else 0
        if "relative_bias" in call.features:
            mask += 8 * call.tq * call.tk  # the distances, which the embedding keeps
        shared_costs = {
            "moved_bytes": (20 * matrix, 32 * matrix) if capped else (14 * matrix, 25 * matrix),
            "writes_scores": True,
            "backward_matmuls": 4,
        }
        if compiled:
            matrices = 2 * matrix if call.dtype.itemsize == 4 else matrix + 2 * dropout_bytes
            matrices += capped * matrix
            return Costs(matrices + 3 * q_bytes(call) + sums, matrix, mask, **shared_costs)
        wide, matrices = q_fp32_bytes(call), (3 if capped else 2) * matrix
        return Costs(matrices + 3 * wide + mask + sums + dropout_bytes, 4 * matrix - wide, **shared_costs)

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, options: AttentionOptions, dropout_seed: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        return naive_attention(q, k, v, options, dropout_seed)

    def attend_cached(self, q: Tensor, view: CacheView, options: AttentionOptions) -> tuple[Tensor, Tensor]:
        return naive_attention(q, *view.tensors(), options._replace(kv_lengths=view.lengths))
