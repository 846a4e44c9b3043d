"""Weights in 8 bits: their values, and that every way of decoding multiplies with these values."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from conf.values import UserError
from model.generation.engine import Pool
from model.generation.generate import generate
from model.generation.serve import serve
from model.generation.speculate import speculate
from model.generation.weights import Int8Linear, quantise_weights
from model.gpt import GPT
from tests.model.generation.test_generate import PROMPTS, SHAPES, make

GREEDY = {"temperature": 0.0}


def quantised(model: GPT) -> tuple[GPT, GPT]:
    """The model with weights in 8 bits, and one whose weights were replaced by the same values."""
    replaced, int8 = copy.deepcopy(model), model
    quantise_weights(int8, "int8")
    for name, module in int8.named_modules():
        if isinstance(module, Int8Linear):
            # A tied weight is that of the embedding too, which stays as it is.
            replaced.get_submodule(name).weight = nn.Parameter(module.weight.clone())
    return int8, replaced


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_weight_is_a_number_and_a_scale_an_output_channel(dtype: torch.dtype) -> None:
    linear = nn.Linear(12, 5).to(dtype)
    with torch.no_grad():
        linear.weight *= torch.tensor([1e-6, 0, 1, 30, 1e4])[:, None]
    int8, exact = Int8Linear(linear), linear.weight.detach().double()
    scale = int8.scale.double()
    torch.testing.assert_close(scale, exact.abs().amax(1) / 127, rtol=2**-8, atol=0)
    # column j K/4 + i is number [i, j]
    numbers = int8.numbers.double().transpose(1, 2).reshape(5, 12)
    assert numbers.abs().amax(1).tolist() == [127, 0, 127, 127, 127]
    divisor = torch.where(scale == 0, 1, scale)[:, None]
    assert (numbers - exact / divisor).abs().max() <= 0.51  # the greatest to 127, though bf16 has its scale
    assert torch.equal(int8.weight, (numbers * scale[:, None]).to(dtype)) and int8.weight.dtype == dtype
    x = torch.randn(3, 12, dtype=dtype)
    expected = nn.functional.linear(x, int8.weight, linear.bias)
    assert torch.equal(int8(x), expected) and not torch.equal(int8(x), linear(x))


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("shape", ["learned", "rope_gqa", "softcap"])
def test_text_is_that_of_a_model_with_these_weights(shape: str, tied: bool) -> None:
    """By PyTorch's step, with a dense and a paged cache, without one, and with drafts."""
    model = make(**{**SHAPES[shape], "tie_embeddings": tied})
    tokens = torch.tensor([PROMPTS[2]])
    before = model(tokens)
    int8, replaced = quantised(model)
    assert torch.equal(int8(tokens), replaced(tokens)) and not torch.equal(int8(tokens), before)
    expected = generate(replaced, PROMPTS, 12, **GREEDY).tokens
    assert generate(int8, PROMPTS, 12, **GREEDY).tokens == expected
    assert generate(int8, PROMPTS, 12, kv_cache=False, **GREEDY).tokens == expected
    assert serve(int8, PROMPTS, 12, pool=Pool(block=4), **GREEDY).tokens == expected
    assert speculate(int8, PROMPTS, 12, temperature=0.0).tokens == expected


def test_what_is_not_a_product_stays_as_it_is() -> None:
    model = make(tie_embeddings=True)
    tied, norm, biases = model.lm_head.weight, model.transformer.ln_f, model.transformer.h[0].mlp.c_fc.bias
    quantise_weights(model, "auto")
    assert model.lm_head.weight is tied
    int8, _ = quantised(model)
    assert int8.transformer.wte.weight is tied and type(int8.transformer.ln_f) is type(norm)
    assert int8.transformer.h[0].mlp.c_fc.bias is biases
    assert sum(isinstance(module, Int8Linear) for module in int8.modules()) == 2 * 4 + 1
    # of the products a byte a weight, and a scale a channel
    held = sum(x.nbytes for x in int8.buffers() if x.dtype == torch.int8)
    assert held == 2 * 12 * 32 * 32 + int8.config.padded_vocab_size * 32


def test_what_cannot_be_quantised_is_refused_and_left() -> None:
    model = make()
    with pytest.raises(UserError, match="weight_dtype=int4: choose one of auto, int8"):
        quantise_weights(model, "int4")
    model.transformer.h[1].mlp.c_proj = nn.Identity()
    with pytest.raises(
        UserError, match="weight_dtype=int8: c_proj is of type Identity, and needs to be a plain"
    ):
        quantise_weights(model, "int8")
    with pytest.raises(UserError, match="the rows of c_proj have 37 numbers, and need a multiple of 4"):
        quantise_weights(make(mlp_hidden=37), "int8")
    assert not any(isinstance(module, Int8Linear) for module in model.modules())
