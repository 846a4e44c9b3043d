"""Ranks that share a sequence: together they compute what one call on the whole computes. Here all ranks are
in one process, which gathers for them; processes are in tests/test_distributed.py."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from attention.naive import NaiveAttention
from conf.values import UserError
from model.config import GPTConfig
from model.context_parallel import ContextParallel, require_divisible


class OneOfMany(ContextParallel):
    """Rank r of n, to which the others' shares are known beforehand."""

    def __init__(self, rank: int, ranks: int):
        self.rank, self.ranks = rank, ranks
        self.others: list[Tensor] = []

    def gather(self, x: Tensor) -> Tensor:
        shares = self.others.pop(0)
        assert torch.equal(shares[self.rank], x)
        return shares


def in_order(shares: list[Tensor], dim: int) -> Tensor:
    """The ranks' shares put together, as the zigzag says: rank r has chunks r and 2n-1-r."""
    halves = [share.chunk(2, dim=dim) for share in shares]
    return torch.cat([half[0] for half in halves] + [half[1] for half in reversed(halves)], dim=dim)


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_a_share_has_its_place(ranks: int) -> None:
    tokens = torch.arange(3 * 24).view(3, 24)
    all_of_them = [OneOfMany(rank, ranks) for rank in range(ranks)]
    shares = [one.share(tokens) for one in all_of_them]
    assert torch.equal(in_order(shares, 1), tokens)
    for one, share in zip(all_of_them, shares, strict=True):
        assert torch.equal(tokens[:, one.positions(24 // ranks, tokens.device)], share)
        one.others = [torch.stack(shares).unsqueeze(-1)]
        assert torch.equal(one.documents(share)[1], tokens)


def test_every_rank_has_the_same_work() -> None:
    visible = torch.ones(16, 16).tril().sum(dim=1)[None]
    assert {OneOfMany(rank, 4).share(visible).sum().item() for rank in range(4)} == {16 * 17 / 2 / 4}


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"document_ids": True},
        {"window": (5, 0)},
        {"document_ids": True, "window": (7, 0), "softcap": 2.0, "alibi_slopes": True},
    ],
    ids=str,
)
def test_attention_over_ranks_is_attention(ranks: int, options: dict) -> None:
    """Outputs and gradients, with grouped queries."""
    draw = torch.Generator().manual_seed(3)
    q, k, v = (
        torch.randn(2, heads, 24, 8, dtype=torch.float64, generator=draw, requires_grad=True)
        for heads in (4, 2, 2)
    )
    ids = None
    options = dict(options)
    if options.pop("document_ids", False):
        ids = torch.randint(0, 2, (2, 24), generator=draw).cumsum(dim=1).int()
    if "alibi_slopes" in options:
        options["alibi_slopes"] = torch.tensor([0.5, 0.25, 0.1, 0.0], dtype=torch.float64)
    naive = NaiveAttention("naive")
    expected = naive(q, k, v, document_ids=ids, **options)

    def share(one: OneOfMany, x: Tensor) -> Tensor:
        return x[:, :, one.positions(24 // ranks, x.device)]

    all_of_them = [OneOfMany(rank, ranks) for rank in range(ranks)]
    kvs = torch.stack([torch.stack((share(one, k), share(one, v))) for one in all_of_them])
    outs = []
    for one in all_of_them:
        documents = None
        if ids is not None:
            one.others = [torch.stack([other.share(ids) for other in all_of_them]).unsqueeze(-1)]
            documents = one.documents(one.share(ids))
        one.others = [kvs]
        outs.append(
            one.attend(naive, share(one, q), share(one, k), share(one, v), document_ids=documents, **options)
        )
    out = in_order(outs, 2)
    torch.testing.assert_close(out, expected)
    grad = torch.randn(out.shape, dtype=torch.float64, generator=draw)
    for ours, theirs in zip(
        torch.autograd.grad(out, (q, k, v), grad), torch.autograd.grad(expected, (q, k, v), grad), strict=True
    ):
        torch.testing.assert_close(ours, theirs)


def config(**changes: object) -> GPTConfig:
    return GPTConfig(**{"vocab_size": 64, "seq_len": 32, "n_layer": 1, "n_head": 2, "n_embd": 16} | changes)


@pytest.mark.parametrize(
    ("changes", "ranks", "devices", "words"),
    [
        ({}, 3, 8, ("over 3 devices", "there are 8", "1, 2, 4, 8")),
        ({"seq_len": 30}, 4, 8, ("seq_len=30", "multiple of 8", "24 or 32")),
        ({"seq_len": 3}, 2, 2, ("seq_len=3", "use 4.")),
        ({"causal": False}, 2, 2, ("model.causal=true", "trainer=fsdp2")),
        ({"sparsity": "strided"}, 2, 2, ("model.sparsity",)),
    ],
    ids=str,
)
def test_what_cannot_be_shared_is_refused(changes: dict, ranks: int, devices: int, words: tuple) -> None:
    with pytest.raises(UserError) as refused:
        require_divisible(config(**changes), ranks, devices)
    assert all(word in str(refused.value) for word in words), refused.value


def test_what_can_is_not() -> None:
    require_divisible(config(), 4, 8)
    require_divisible(config(causal=False, seq_len=7), 1, 8)
