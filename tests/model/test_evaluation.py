"""Perplexity in windows, and the likelihood of answers, against the loss of one token at a time."""

from __future__ import annotations

import math

import pytest
import torch

from attention.base import UnsupportedAttention
from attention.naive import NaiveAttention
from conf.values import UserError
from model.evaluation import Score, continuation, loss_in_pieces, made_cache, score, windows
from model.gpt import GPT, IGNORE, GPTConfig
from tests.grid import build

CONTEXT = 8


@pytest.fixture(scope="module")
def net() -> GPT:
    torch.manual_seed(0)
    net = GPT(
        GPTConfig(50, seq_len=CONTEXT, n_layer=2, n_head=2, n_embd=32, position="rope"), NaiveAttention()
    )
    for weight in net.parameters():
        weight.data.mul_(10)
    return net.eval()


def text(tokens: int) -> list[int]:
    return torch.randint(50, (tokens,), generator=torch.Generator().manual_seed(1)).tolist()


@torch.no_grad()
def nats(net: GPT, ids: list[int], token: int, seen: int) -> float:
    """Of one token behind the `seen` before it."""
    logits = net(torch.tensor([ids[token - seen : token]]))[0, -1, :50]
    return -float(logits.log_softmax(-1)[ids[token]])


@pytest.mark.parametrize("tokens", [1, 7, 8, 9, 16, 30])
@pytest.mark.parametrize("stride", [1, 3, 8])
def test_each_token_is_counted_once(tokens: int, stride: int) -> None:
    found = list(windows(tokens, CONTEXT, stride))
    assert [i for w in found for i in range(w.first, w.stop)] == list(range(tokens))
    assert all(0 < w.stop - w.start <= CONTEXT and w.start <= w.first for w in found)
    assert all(w.first + 1 - w.start > CONTEXT - stride for w in found[1:])


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize(("stride", "tokens"), [(1, 21), (3, 21), (8, 21), (8, 17), (None, 20), (2, 5)])
def test_the_score_is_that_of_its_tokens(net: GPT, stride: int | None, tokens: int, batch: int) -> None:
    ids = text(tokens)
    expected = sum(
        nats(net, ids, i + 1, i + 1 - w.start)
        for w in windows(tokens - 1, CONTEXT, stride or CONTEXT // 2)
        for i in range(w.first, w.stop)
    )
    found = score(net, ids, stride, batch)
    assert found.tokens == tokens - 1 and found.nats == pytest.approx(expected, rel=1e-5)
    assert found.perplexity == pytest.approx(math.exp(expected / (tokens - 1)), rel=1e-4)


@pytest.mark.parametrize("context", [1, 4, 20])
def test_an_answer_is_scored_behind_its_context(net: GPT, context: int) -> None:
    before, answer = text(context), text(30)[-3:]
    ids, expected = [*before, *answer], 0.0
    for i in range(3):
        at = context + i
        # the first tokens go where all of it does not fit
        start = max(0, len(ids) - 1 - CONTEXT)
        expected -= nats(net, ids, at, at - start)
    likely, greedy = continuation(net, before, answer)
    assert likely == pytest.approx(expected, rel=1e-5) and not greedy
    best = list(before)
    for _ in range(3):
        window = torch.tensor([best[-(CONTEXT - 2) :]])
        best.append(int(net(window)[0, -1, :50].argmax()))
    if context == 1:
        assert continuation(net, before, best[context:])[1]


@pytest.mark.parametrize("training", [True, False])
def test_a_model_that_trains_is_scored_without_dropout_and_goes_on(training: bool) -> None:
    torch.manual_seed(0)
    net = GPT(GPTConfig(50, seq_len=CONTEXT, n_layer=2, n_head=2, n_embd=32, dropout=0.5), NaiveAttention())
    expected = score(net.eval(), text(20)), continuation(net, text(4), text(3))
    net.train(training)
    assert (score(net, text(20)), continuation(net, text(4), text(3))) == expected
    assert net.training is training and net.transformer.drop.training is training


def test_mistakes_are_said(net: GPT) -> None:
    sees_all = GPT(GPTConfig(50, seq_len=8, n_layer=1, n_head=2, n_embd=32, causal=False), NaiveAttention())
    for asked in (lambda: score(sees_all, text(20)), lambda: continuation(sees_all, [1], [2])):
        with pytest.raises(
            UserError, match="causal=false: a model that sees a token gives it no probability"
        ):
            asked()
    with pytest.raises(ValueError, match="stride=9: it needs to be a whole number, at least 1 and at most 8"):
        score(net, text(20), 9)
    with pytest.raises(ValueError, match="batch=0: it needs to be a whole number, at least 1"):
        score(net, text(20), batch=0)
    with pytest.raises(ValueError, match="the text has 1 tokens, and needs 2 or more"):
        score(net, text(1))
    with pytest.raises(ValueError, match="an answer needs a context"):
        continuation(net, [], [1])
    with pytest.raises(ValueError, match="the tokens of an answer=9"):
        continuation(net, [1], text(9))


def test_a_perplexity_beyond_all_floats_is_infinite() -> None:
    assert Score(1e5, 10).perplexity == math.inf and math.isnan(Score(math.nan, 10).perplexity)
    assert Score(7080.0, 10).perplexity == math.exp(708)


@pytest.mark.parametrize("kind", ["fp8", "int8", "int4"])
@torch.inference_mode()
def test_the_score_over_a_cache_is_that_of_decoding(net: GPT, kind: str) -> None:
    """One token a step, each reading what was quantised before it."""
    ids, expected = text(2 * CONTEXT + 1), 0.0
    for start in range(0, len(ids) - 1, CONTEXT):
        cache = made_cache(net, 1, kind, net.config.seq_len)
        cache.active += 1
        for at in range(start, start + CONTEXT):
            logits = net(torch.tensor([[ids[at]]]), cache=cache)[0, -1, :50]
            expected -= float(logits.log_softmax(-1)[ids[at + 1]])
    found = score(net, ids, CONTEXT, cache_dtype=kind)
    assert found.nats == pytest.approx(expected, rel=1e-5)
    assert found.nats != pytest.approx(score(net, ids, CONTEXT).nats, rel=1e-5)


def test_a_cache_that_cannot_be_read_is_refused(net: GPT) -> None:
    sdpa = GPT(net.config, build("sdpa"))
    with pytest.raises(UnsupportedAttention, match="decode: no int8 cache"):
        score(sdpa, text(9), cache_dtype="int8")


@pytest.mark.parametrize("piece", [1, 3, 8, 11])
@pytest.mark.parametrize(
    "options",
    [
        {"position": "rope", "qk_norm": True},
        {"position": "learned", "window": 3},
        {"position": "alibi", "loss_chunk": 4},
        {"position": "t5"},
        {"position": "none", "n_kv_head": 1},
    ],
)
def test_a_loss_in_pieces_is_that_of_the_whole(options: dict, piece: int) -> None:
    torch.manual_seed(0)
    config = GPTConfig(50, seq_len=11, n_layer=2, n_head=2, n_embd=32, **options)
    net = GPT(config, NaiveAttention()).eval()
    for weight in net.parameters():
        weight.data.mul_(5)
    ids = torch.tensor([text(12), text(24)[12:]])
    x, targets = ids[:, :-1], ids[:, 1:].clone()
    targets[0, 4] = IGNORE
    expected = float(net(x, targets=targets).detach())
    assert loss_in_pieces(net, x, targets, piece) == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("options", [{"causal": False}, {"sparsity": "local"}])
def test_a_loss_in_pieces_needs_rows_that_come_in_order(options: dict) -> None:
    net = GPT(GPTConfig(50, seq_len=8, n_layer=1, n_head=2, n_embd=32, **options), NaiveAttention())
    with pytest.raises(UserError, match="no model"):
        loss_in_pieces(net, torch.zeros(1, 8, dtype=torch.long), torch.zeros(1, 8, dtype=torch.long), 4)
