"""Speculative decoding: the text, or its distribution, is that without drafts."""

import pytest
import torch

from attention.base import UnsupportedAttention
from attention.naive import NaiveAttention
from model.generation.decode import Sampling
from model.generation.generate import generate, window_start
from model.generation.speculate import Context, NGrams, accept, probabilities, speculate
from tests.grid import build
from tests.model.generation.test_generate import PROMPTS, SHAPES, make

pytestmark = pytest.mark.sampled(3)

GREEDY = {"temperature": 0.0}
REPEATING = [[1, 2, 3, 4, 1, 2, 3, 4, 1, 2], [5] * 9]


def other(**changes):
    """A model that agrees with `make` now and then."""
    model = make(**changes)
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.05 * parameter.std() * torch.randn_like(parameter))
    return model


@pytest.mark.parametrize("shape", sorted(SHAPES.keys() - {"t5"}))  # its bias is no option of a paged cache
@pytest.mark.parametrize("drafter", [None, "other"])
def test_greedy_text_is_that_of_generate(shape, drafter):
    """In fp32, of unequal rows, past the context too."""
    model = make(**SHAPES[shape])
    prompts = PROMPTS + REPEATING
    expected = generate(model, prompts, 40, **GREEDY)
    found = speculate(model, prompts, 40, draft=drafter and other(**SHAPES[shape]), draft_tokens=3, **GREEDY)
    assert found.tokens == expected.tokens
    assert (found.cut, found.reencoded) == (expected.cut, expected.reencoded)
    assert 0 < found.accepted <= found.drafted and found.calls < 40


def test_all_drafts_of_the_model_itself_are_kept():
    """Four drafts and one more a call, whatever the temperature."""
    for how in (GREEDY, {"temperature": 0.7, "top_k": 5, "seed": 1}):
        found = speculate(make(), [[1, 2, 3]], 11, draft=make(), draft_tokens=4, **how)
        assert found.calls == 3 and found.accepted == found.drafted == 8


def test_the_draft_reads_the_texts_as_they_are(monkeypatch):
    """Also after a call without a draft, as where the model's window is full."""
    read = Context.read

    def checked(self, rows, texts, asked):
        logits = read(self, rows, texts, asked)
        for each, text in zip(logits, texts, strict=True):
            if self.model is draft:
                whole = draft(torch.tensor([text[window_start(len(text), 8) :]]))[0, -1:]
                assert torch.allclose(each, whole[:, : draft.config.vocab_size], atol=1e-4)
        return logits

    monkeypatch.setattr(Context, "read", checked)
    draft = make(**SHAPES["rope_gqa"], seq_len=8)
    speculate(make(**SHAPES["rope_gqa"]), [[1, 2, 3], [4, 5, 1, 2]], 40, draft=draft, seed=0)


def test_the_caches_are_as_long_as_the_texts_can_become(monkeypatch):
    """And no longer, as pretrained models have contexts of 131,072 tokens; of another model its own."""
    init, columns = Context.__init__, []  # of 16 tokens
    monkeypatch.setattr(Context, "__init__", lambda self, *a: init(self, *a) or columns.append(self.columns))
    wide = {"position": "rope", "seq_len": 1024}
    draft = make(**wide | {"seq_len": 8})
    speculate(make(**wide), [[1, 2, 3], [4]], 20, draft=draft, draft_tokens=4, **GREEDY)
    assert columns == [2, 1]  # 3 + 20 + 4 tokens, and 8


def near(counts: torch.Tensor, p: torch.Tensor) -> bool:
    """Whether chi-square does not tell apart, at 5 standard deviations."""
    counts, expected = counts.double(), counts.sum() * p.double()
    assert counts[expected == 0].sum() == 0
    counts, expected = counts[expected > 0], expected[expected > 0]
    freedom = len(counts) - 1
    return float(((counts - expected) ** 2 / expected).sum()) < freedom + 5 * (2 * freedom) ** 0.5


def test_what_is_kept_or_drawn_has_the_models_distribution():
    """The first token, of 4, whether it was drafted or not; of rows without a draft too."""
    generator = torch.Generator().manual_seed(0)
    n, p = 40_000, torch.tensor([[0.5, 0.3, 0.2, 0.0], [0.1, 0.2, 0.3, 0.4]])
    q = torch.tensor([[0.1, 0.2, 0.3, 0.4]])
    drafts = q.expand(n, 4).multinomial(1, generator=generator)
    counts = torch.arange(n) % 2
    kept, tokens = accept(p.expand(n, 2, 4), q.expand(n, 1, 4), drafts, counts, generator)
    first = torch.where(kept > 0, drafts[:, 0], tokens)
    assert near(first[counts == 1].bincount(minlength=4), p[0])
    assert near(first[counts == 0].bincount(minlength=4), p[0])
    assert near(tokens[kept > 0].bincount(minlength=4), p[1])
    assert not near(drafts[:, 0].bincount(minlength=4) + 1, p[0] + 1e-9)  # the test tells a difference
    assert abs(float(kept[counts == 1].float().mean()) - float(torch.minimum(p[0], q[0]).sum())) < 0.02


@pytest.mark.parametrize("drafter", [None, "other"])
@pytest.mark.parametrize("how", [{"temperature": 1.5}, {"temperature": 2.0, "top_k": 3}, {"top_p": 0.8}])
def test_sampled_text_has_the_distribution_without_drafts(drafter, how):
    """Of all pairs of tokens after a prompt, over 3,000 rows; n-grams draft for some of them."""
    changes = {"vocab_size": 4, "n_layer": 1, "n_embd": 8, "n_head": 2}
    model, prompt, rows = make(**changes), [0, 1, 2, 3, 0, 1], 3000
    found = speculate(
        model, [prompt] * rows, 3, draft=drafter and other(**changes), draft_tokens=2, seed=2, **how
    )
    assert found.accepted < found.drafted
    pairs = torch.tensor([4 * a + b for a, b, _ in found.tokens]).bincount(minlength=16)
    sampling = Sampling(**{"temperature": 1.0, **how})
    with torch.inference_mode():
        first = probabilities(model(torch.tensor([prompt]))[0, -1, :4], sampling)
        texts = torch.tensor([[*prompt, token] for token in range(4)])
        second = probabilities(model(texts)[:, -1, :4], sampling)
    assert near(pairs, (first.unsqueeze(1) * second).flatten())


def test_drafts_follow_the_longest_match_and_the_latest():
    drafter = NGrams(1)
    assert drafter.draft(0, [1, 2, 3, 9, 2, 3, 7, 1, 2, 3], 2) == [9, 2]  # three tokens before two
    assert drafter.draft(0, [1, 2, 3, 9, 2, 3, 7, 1, 2, 3, 9, 2, 3], 3) == [7, 1, 2]
    assert drafter.draft(0, [1, 2, 3, 9, 2, 3, 7, 1, 2, 3, 9, 2, 3, 8], 3) == []


def test_rows_stop_and_are_streamed():
    model, said = make(), []
    whole = generate(model, REPEATING, 12, **GREEDY).tokens
    eot = whole[1][4]
    found = speculate(
        model, REPEATING, 12, **GREEDY, eot=eot, on_token=lambda *each: said.append(each) or len(said) == 50
    )
    upto = [row[: row.index(eot) + 1] if eot in row else row for row in whole]
    assert found.tokens == upto
    assert [[token for row, token in said if row == r] for r in range(2)] == upto


def test_a_quantised_cache():
    found = speculate(make(**SHAPES["rope_gqa"]), REPEATING, 6, **GREEDY, cache_dtype="int8")
    assert (
        found.tokens
        == generate(make(**SHAPES["rope_gqa"]), REPEATING, 6, **GREEDY, cache_dtype="int8").tokens
    )


def test_what_is_refused():
    with pytest.raises(ValueError, match="has 7 tokens, the other 61: give one with"):
        speculate(make(), [[1]], 2, draft=make(vocab_size=7))
    with pytest.raises(ValueError, match="draft_tokens=0: it needs to be at least 1"):
        speculate(make(), [[1]], 2, draft_tokens=0)
    with pytest.raises(UnsupportedAttention, match="decode: no paged cache"):
        speculate(make(build("sdpa")), [[1]], 2)
    with pytest.raises(UnsupportedAttention, match="decode: no paged cache"):
        speculate(make(NaiveAttention()), [[1]], 2, draft=make(build("sdpa")))
    draft = make()
    with torch.no_grad():
        draft.lm_head.weight[3, 4] = float("nan")
    with pytest.raises(ValueError, match=r"has NaN or infinity in lm_head.weight: give one whose"):
        speculate(make(), [[1]], 2, draft=draft)


@pytest.mark.parametrize("training", [True, False])
def test_both_models_are_left_as_they_were(training):
    models = [make().train(training) for _ in range(2)]
    speculate(models[0], [[1]], 2, draft=models[1])
    assert all(model.training is training for model in models)
