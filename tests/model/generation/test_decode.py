"""The choice of a token follows its distribution."""

import pytest
import torch

from attention.base import AttentionCall
from attention.naive import NaiveAttention
from model.generation.decode import Sampling, compiled_decode_step
from model.generation.generate import generate
from model.gpt import GPT, GPTConfig
from tests.grid import NAMES, build, long_but

pytestmark = pytest.mark.sampled(4)


def drawn(logits: list[float], n: int = 20_000, **options) -> torch.Tensor:
    """How often each token is drawn."""
    sampling = Sampling(**options)
    k = min(sampling.top_k or len(logits), len(logits))
    noise = torch.empty(n, k).exponential_(generator=torch.Generator().manual_seed(0))
    tokens = sampling.choose(torch.tensor(logits).expand(n, -1), noise)
    return torch.bincount(tokens.flatten(), minlength=len(logits)) / n


def test_tokens_are_drawn_by_their_probability():
    p = torch.tensor([0.1, 0.4, 0.05, 0.3, 0.15])
    logits = p.log().tolist()
    torch.testing.assert_close(drawn(logits), p, rtol=0, atol=0.015)
    hot = (p.log() / 2).softmax(0)
    torch.testing.assert_close(drawn(logits, temperature=2.0), hot, rtol=0, atol=0.015)
    for options in ({"top_k": 2}, {"top_p": 0.6}, {"top_p": 0.41}, {"top_k": 3, "top_p": 0.7}):
        kept = torch.tensor([0, 0.4, 0, 0.3, 0]) / 0.7
        torch.testing.assert_close(drawn(logits, **options), kept, rtol=0, atol=0.015)
    assert drawn(logits, top_k=100).min() > 0


def test_noise_of_zero_does_not_draw_what_is_ruled_out():
    assert (
        Sampling(top_p=0.5).choose(torch.tensor([[3.0, 1.0, 0.0]]), torch.tensor([[1.0, 0.0, 0.0]])).item()
        == 0
    )


def test_a_temperature_that_overflows_is_refused():
    for temperature in (-1.0, 1e-39, float("inf"), float("nan")):
        with pytest.raises(ValueError, match="temperature="):
            Sampling(temperature=temperature)


@pytest.mark.long
def test_more_batch_sizes_than_dynamo_would_compile(monkeypatch):
    """Each is a compilation of its own, and a ninth is no error."""
    compile = torch.compile
    monkeypatch.setattr(torch, "compile", lambda step, options, **o: compile(step, backend="eager", **o))
    compiled_decode_step.cache_clear()
    config = GPTConfig(vocab_size=11, seq_len=16, n_layer=1, n_head=1, n_embd=8)
    model = GPT(config, NaiveAttention())
    for batch in range(1, 11):
        result = generate(model, [[1]] * batch, 3, seed=0, compile=True)
        assert [len(row) for row in result.tokens] == [3] * batch
    compiled_decode_step.cache_clear()


@pytest.mark.parametrize("kv_heads", long_but((4, 1), 1))
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("name", [name for name in NAMES if name != "naive"])
def test_whoever_decodes_chooses_the_same_tokens(name: str, device: str, kv_heads: int) -> None:
    """Greedy, beside a naive prefill, with prompts of unequal length in one cache (`kv_lengths`)."""
    call = AttentionCall(
        "decode", device, None, torch.float32, 2, 4, kv_heads, 1, 128, 16, features=frozenset({"kv_lengths"})
    )
    if reasons := build(name).unsupported_reasons(call):
        pytest.skip("; ".join(reasons))
    torch.manual_seed(0)
    config = GPTConfig(vocab_size=61, seq_len=64, n_layer=2, n_head=4, n_embd=64, n_kv_head=kv_heads)
    model = GPT(config, NaiveAttention()).eval().to(device)
    with torch.no_grad():
        for parameter in model.parameters():  # at GPT-2's initialisation attention hardly matters
            if parameter.dim() > 1:
                parameter.mul_(6)
    prompts = [list(range(20)), [5, 6, 7]]
    expected = generate(model, prompts, 20, temperature=0)
    got = generate(model, prompts, 20, temperature=0, decode_attention=build(name))
    assert got.tokens == expected.tokens and len({*got.tokens[0]}) > 4
