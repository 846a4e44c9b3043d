"""The fused decoding step with weights in 8 bits."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from attention.auto import AutoAttention
from model.generation.decode import Decoder, Rows, Sampling, dense_cache
from model.generation.fused import FusedStep, wants_fused
from model.generation.generate import encode_all, generate
from model.generation.weights import Int8Linear
from model.gpt import GPT, GPTConfig
from tests.model.generation.test_fused import CONTEXT, PROMPTS, SHAPES, VOCAB, WIDE, make, stepped
from tests.model.generation.test_weights import quantised

pytestmark = pytest.mark.sampled(3)


@pytest.mark.parametrize(
    ("shape", "rows"),
    [("gpt2", 8), ("llama", 8), ("alibi_mqa_no_bias", 8)]
    + [pytest.param(*each, marks=pytest.mark.long) for each in (("window", 8), ("softcap", 8), ("llama", 0))],
)
def test_logits_are_those_of_the_plain_step(shape: str, rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    from ops.triton import step

    monkeypatch.setattr(step, "MOST_ROWS_INT8", rows)
    model = make(**SHAPES[shape])
    before = logits(model, False)
    int8, replaced = quantised(model)
    assert wants_fused(int8, True)
    expected, got = logits(replaced, False), logits(int8, True)
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)
    assert (got - before).abs().max() > 1e-2


@pytest.mark.long
def test_tiles_that_follow_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """A program takes several, of which the last is not full."""
    from ops.triton import step

    tile = step.linear_tile
    monkeypatch.setattr(step, "linear_tile", lambda *a: (16, tile(*a)[1], 1, 2))
    for shape in ("gpt2", "llama"):
        int8, replaced = quantised(make(n_layer=1, **SHAPES[shape]))
        torch.testing.assert_close(logits(int8, True), logits(replaced, False), rtol=1e-4, atol=1e-4)


@pytest.mark.long
def test_many_rows_are_left_to_a_library() -> None:
    int8, replaced = quantised(make(n_layer=1))
    prompts = [[1 + i, 2] for i in range(9)]
    got = generate(int8, prompts, 5, temperature=0.0, fused=True).tokens
    assert got == generate(replaced, prompts, 5, temperature=0.0, fused=False).tokens
    assert got[:8] == generate(int8, prompts[:8], 5, temperature=0.0, fused=True).tokens


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("batch", [1, 4, 8, 20])
@pytest.mark.parametrize("shape", WIDE)
def test_logits_on_a_gpu(shape: str, batch: int, dtype: torch.dtype) -> None:
    """No further from fp32 with the same weights than the plain step is."""
    int8, replaced = quantised(wide(shape).to("cuda", dtype))
    exact = copy.deepcopy(replaced).float()
    for name, module in int8.named_modules():
        if isinstance(module, Int8Linear):  # as fp32 has it, which bf16 has rounded
            product = exact.get_submodule(name)
            float_ = copy.deepcopy(module)
            float_.scale = module.scale.float()
            product.weight = nn.Parameter(float_.weight)
    prompts = torch.randint(1000, (batch, 300), generator=torch.Generator().manual_seed(0)).tolist()
    prompts[0] = prompts[0][:5]
    expected, plain, fused = (
        stepped(exact, prompts, False), stepped(replaced, prompts, False), stepped(int8, prompts, True)
    )  # fmt: skip
    errors = [float((got - expected).norm() / expected.norm()) for got in (plain, fused)]
    assert errors[1] <= 1.1 * errors[0] + 1e-5, errors


def wide(shape: str) -> GPT:
    torch.manual_seed(0)
    return GPT(GPTConfig(vocab_size=1000, seq_len=600, n_layer=3, **WIDE[shape]), AutoAttention()).eval()


def logits(model: GPT, fused: bool) -> torch.Tensor:
    """(6, B, V) of six steps that are fed the same tokens, behind prompts of unequal length."""
    fed = torch.randint(VOCAB, (6, len(PROMPTS), 1), generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        rows = Rows(PROMPTS, 7, model, Sampling(top_k=VOCAB), 0)
        cache = dense_cache(model, len(PROMPTS), CONTEXT, model.transformer.h[0].attn.attention, "auto")
        decoder = Decoder(model, rows, cache, make_step=FusedStep if fused else None)
        encode_all(model, rows, decoder, [len(prompt) for prompt in PROMPTS])
        found: list[torch.Tensor] = []
        rows.append = lambda x: found.append(x[:, 0, :VOCAB].clone())
        for token in fed:
            rows.token.copy_(token)
            decoder.advance()
    return torch.stack(found)
