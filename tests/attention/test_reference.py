"""naive.py is the specification: it is checked against the definition written as loops over numbers."""

from __future__ import annotations

import math
import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from attention.naive import NaiveAttention, attention_probs, attention_scores, naive_attention
from ops.dropout import keep_tile
from ops.options import AttentionOptions

SEED = torch.tensor(1234567890123, dtype=torch.int64)


def by_hand(q, k, v, *, causal, scale, window, softcap, slopes, bias, document_ids, lengths, table, p):
    """out and lse as nested lists: the docstring of attention/base.py, one number at a time."""
    batch, heads, tq, dim = q.shape
    group, tk = heads // k.shape[1], k.shape[2]
    keep = keep_tile(SEED, batch, heads, range(tq), range(tk), p) if p else None
    out, lse = torch.zeros(q.shape, dtype=torch.float64), torch.zeros(q.shape[:3], dtype=torch.float64)
    for b, h, i in ((b, h, i) for b in range(batch) for h in range(heads) for i in range(tq)):
        keys = tk if lengths is None else int(lengths[b])
        scores = {}
        for j in range(keys):
            rel = j - (i + keys - tq)
            if (causal and rel > 0) or (document_ids and document_ids[0][b, i] != document_ids[1][b, j]):
                continue
            if window and ((0 <= window[0] < -rel) or (0 <= window[1] < rel)):
                continue
            s = scale * sum(float(q[b, h, i, d]) * float(k[b, h // group, j, d]) for d in range(dim))
            s = softcap * math.tanh(s / softcap) if softcap else s
            s -= float(slopes[h]) * abs(rel) if slopes is not None else 0
            s += float(table[h, 2 + min(max(rel, -2), 2)]) if table is not None else 0
            scores[j] = s + (float(bias[b, h, i, j]) if bias is not None else 0)
        total = sum(math.exp(s) for s in scores.values())
        lse[b, h, i] = math.log(total) if scores else -math.inf
        for j, s in scores.items():
            weight = math.exp(s) / total * (1 if keep is None else float(keep[b, h, i, j]) / (1 - p))
            out[b, h, i] += weight * v[b, h // group, j]
    return out, lse


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.integers(0, 10**6), st.integers(1, 5), st.integers(1, 5))
def test_equals_the_definition(seed: int, tq: int, tk: int) -> None:
    g, pick = torch.Generator().manual_seed(seed), random.Random(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=g, dtype=torch.float64)

    heads, kv_heads = pick.choice([(2, 2), (4, 2), (2, 1)])
    q, k, v = normal(2, heads, tq, 3), normal(2, kv_heads, tk, 3), normal(2, kv_heads, tk, 3)
    causal, scale, p = pick.random() < 0.5, pick.choice([3**-0.5, 1.0]), pick.choice([0, 0.4])
    window = pick.choice([None, (1, 0), (0, 2), (-1, 1), (2, -1)])
    softcap = pick.choice([None, 1.3])
    slopes = normal(heads) if pick.random() < 0.5 else None
    bias = normal(2, heads, tq, tk) if pick.random() < 0.5 else None
    ids = [torch.randint(0, 2, (2, n), generator=g, dtype=torch.int32) for n in (tq, tk)]
    document_ids = tuple(ids) if pick.random() < 0.5 else None
    lengths = torch.randint(0, tk + 1, (2,), generator=g, dtype=torch.int32) if pick.random() < 0.5 else None
    table = normal(heads, 5) if pick.random() < 0.5 else None
    options = AttentionOptions(causal, scale, window, softcap, slopes, bias, document_ids, lengths)
    out, lse = naive_attention(q, k, v, options._replace(relative_bias=table, dropout_p=p), SEED)
    expected = by_hand(
        q,
        k,
        v,
        causal=causal,
        scale=scale,
        window=window,
        softcap=softcap,
        slopes=slopes,
        bias=bias,
        document_ids=document_ids,
        lengths=lengths,
        table=table,
        p=p,
    )
    torch.testing.assert_close(out, expected[0])
    torch.testing.assert_close(lse, expected[1])


def test_known_answer() -> None:
    """Scores [1, 2, 0.5] with values [10, 20, 40] give 20.492649."""
    out = NaiveAttention()(
        torch.ones(1, 1, 1, 1, dtype=torch.float64),
        torch.tensor([1, 2, 0.5], dtype=torch.float64).view(1, 1, 3, 1),
        torch.tensor([10.0, 20, 40], dtype=torch.float64).view(1, 1, 3, 1),
        scale=1.0,
    )
    assert out.item() == pytest.approx(20.492649, abs=1e-6)


def test_probabilities_can_be_seen() -> None:
    """For whoever wants to plot them: rows of the causal matrix sum to one and look only back."""
    q, k = torch.randn(1, 2, 6, 4), torch.randn(1, 2, 6, 4)
    p, _ = attention_probs(attention_scores(q, k))
    torch.testing.assert_close(p.sum(-1), torch.ones(1, 2, 6))
    assert not p.triu(1).any()
