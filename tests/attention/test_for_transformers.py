"""Our attentions in models of transformers: random ones, logits, gradients, generation; no network."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from attention import registry
from attention.base import UnsupportedAttention
from scripts.accuracy import allowed, error_ratio

pytestmark = pytest.mark.sampled(4)

transformers = pytest.importorskip("transformers")
for_transformers = pytest.importorskip("attention.for_transformers")

SIZES = {
    "llama": {"num_key_value_heads": 2},
    "gpt2": {},
    "mistral": {"num_key_value_heads": 2, "sliding_window": 7},  # in every layer
    "qwen2": {  # in one of two layers
        "num_key_value_heads": 2, "use_sliding_window": True, "sliding_window": 7, "max_window_layers": 1
    },
    "gemma2": {"num_key_value_heads": 2, "head_dim": 16, "sliding_window": 7},  # and softcap
}  # fmt: skip
CPU = ["naive", "tiled", "sdpa", "sdpa_math", "auto"]
B, T = 3, 20


def model_of(kind: str, attention: str, **more: Any) -> Any:
    sizes = {
        "vocab_size": 96, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
        "num_attention_heads": 4, "max_position_embeddings": 128, "bos_token_id": 1, "eos_token_id": None,
    }  # fmt: skip
    if kind == "gpt2":
        sizes = {
            "vocab_size": 96, "n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 128,
            "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "bos_token_id": 1, "eos_token_id": None,
        }  # fmt: skip
    config = transformers.AutoConfig.for_model(kind, **sizes, **SIZES[kind], **more)
    torch.manual_seed(0)
    return transformers.AutoModelForCausalLM.from_config(config, attn_implementation=attention)


def tokens(batch: int = B, length: int = T) -> Tensor:
    return torch.randint(2, 96, (batch, length), generator=torch.Generator().manual_seed(1))


def padded(side: str) -> Tensor:
    mask = torch.ones(B, T, dtype=torch.int64)
    if side == "left":
        mask[1, :6] = mask[2, :1] = 0
    if side == "right":
        mask[1, -6:] = mask[2, -1:] = 0
    return mask


def name_of(attention: str) -> str:
    return for_transformers.registered_name(attention)


def results(model: Any, mask: Tensor) -> dict[str, Tensor]:
    """The logits and the gradients of the loss of what is not padding."""
    ids = tokens()
    logits = model(ids, attention_mask=mask).logits
    targets = ids.masked_fill(mask == 0, -100)[:, 1:].flatten()
    seen = (mask[:, :-1] > 0).flatten()
    torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1)[seen], targets[seen]).backward()
    gradients = {f"d{name}": p.grad for name, p in model.named_parameters() if p.grad is not None}
    return {"logits": logits[mask.bool()].detach(), **gradients, "lse": torch.zeros(1)}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("side", ["none", "left", "right"])
@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_logits_and_gradients_by_the_criterion(kind: str, side: str, dtype: torch.dtype) -> None:
    """The reference: the model in fp64, by sdpa, as transformers' written-out softmax is in fp32; the plain
    formula: attention written out, in `dtype`."""
    mask = padded(side)
    exact = results(model_of(kind, "sdpa").to(dtype).double(), mask)
    formula = results(model_of(kind, "eager").to(dtype), mask)
    for attention in CPU:
        got = results(model_of(kind, name_of(attention)).to(dtype), mask)
        assert got.keys() == exact.keys()
        for name in got.keys() - {"lse"}:
            ratio = error_ratio(got[name], exact[name], allowed(name, exact, formula, dtype))
            assert ratio <= 1, (attention, name, ratio)


@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("kind", SIZES)
def test_generates_as_sdpa_does(kind: str, cache: str) -> None:
    def generated(attention: str) -> Tensor:
        model = model_of(kind, attention).eval()
        options = {} if cache == "dynamic" else {"cache_implementation": "static"}
        return model.generate(
            tokens(),
            attention_mask=padded("left"),
            max_new_tokens=24,
            do_sample=False,
            pad_token_id=0,
            **options,
        )

    expected = generated("eager" if kind == "gemma2" else "sdpa")
    for attention in ("tiled", "naive") if kind == "gemma2" else ("tiled", "auto"):
        assert torch.equal(generated(name_of(attention)), expected), attention


@pytest.mark.parametrize("kind", SIZES)
@pytest.mark.parametrize("side", ["none", "left", "right"])
def test_windows_and_padding_are_those_of_the_mask_written_out(kind: str, side: str) -> None:
    mask = padded(side)
    expected, got = (
        model_of(kind, attention).eval()(tokens(), attention_mask=mask).logits[mask.bool()]
        for attention in ("eager", name_of("tiled"))
    )
    assert torch.allclose(got, expected, atol=2e-6)


@pytest.mark.parametrize("side", ["none", "left", "right"])
def test_a_window_to_both_sides_is_that_of_the_mask(side: str) -> None:
    """ModernBERT's layers pass one more than the mask's window, for FlashAttention to take it off again."""
    config = transformers.ModernBertConfig(
        vocab_size=96, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
        local_attention=8, global_attn_every_n_layers=2, pad_token_id=0, bos_token_id=1, eos_token_id=2,
        cls_token_id=1, sep_token_id=2,
    )  # fmt: skip
    torch.manual_seed(0)
    model, mask = transformers.ModernBertModel(config).eval(), padded(side)
    expected, got = (
        (model.set_attn_implementation(name), model(tokens(), attention_mask=mask))[1].last_hidden_state
        for name in ("eager", name_of("tiled"))
    )
    assert torch.allclose(got[mask.bool()], expected[mask.bool()], atol=2e-6)


def test_the_window_is_that_of_the_mask_function() -> None:
    """(w, w) of |q - k| <= w, (w - 1, 0) of k > q - w where causal, whatever the layer says of its size."""
    masks = transformers.masking_utils

    def window(mask_function: Any) -> Any:
        mask = for_transformers.encode_mask(B, T, T, mask_function=mask_function, name="naive")
        return for_transformers.options_of(mask, T, T, 99, "naive").window

    assert window(masks.sliding_window_bidirectional_mask_function(4)) == (4, 4)
    assert window(masks.sliding_window_causal_mask_function(4)) == (3, 0)
    assert window(masks.sliding_window_causal_mask_function(1)) == (0, 0)
    assert window(masks.sliding_window_overlay(4)) == (3, -1)


def test_a_mask_of_other_lengths_is_refused_and_small_wherever_it_is_copied_to() -> None:
    window = transformers.masking_utils.sliding_window_causal_mask_function(4096)
    mask = for_transformers.encode_mask(
        B, T, T, mask_function=window, attention_mask=padded("left") > 0, name="tiled"
    )
    assert mask.numel() < 32 * 13 * B * (2 * T + 4096)
    assert for_transformers.options_of(mask, T, T, 4096, "tiled").window == (4095, 0)
    for queries, keys in ((T, T + 1), (1, T), (T, 3 * T)):
        with pytest.raises(UnsupportedAttention, match="a mask for other lengths"):
            for_transformers.options_of(mask, queries, keys, 4096, "tiled")


@pytest.mark.parametrize("kind", ["llama", "mistral"])
def test_packed_sequences_do_not_see_each_other(kind: str) -> None:
    model, ids = model_of(kind, name_of("tiled")).eval(), tokens(1)
    alone = [model(part).logits for part in (ids[:, :8], ids[:, 8:])]
    positions = torch.cat([torch.arange(8), torch.arange(12)])[None]
    starts = torch.tensor([0, 8, 20], dtype=torch.int32)
    packed = [
        model(ids, position_ids=positions, use_cache=False).logits,
        # as DataCollatorWithFlattening hands them on, with a mask of ones, which sdpa would see as one text
        model(
            ids,
            position_ids=positions,
            attention_mask=torch.ones_like(ids),
            cu_seq_lens_q=starts,
            cu_seq_lens_k=starts,
        ).logits,
        # copied to a device, two tensors
        model(ids, position_ids=positions, cu_seq_lens_q=starts, cu_seq_lens_k=starts.clone()).logits,
    ]
    for got in packed:
        assert torch.allclose(got, torch.cat(alone, dim=1), atol=2e-6)


def test_ends_that_are_written_anew_are_compared_anew() -> None:
    model, starts = model_of("llama", name_of("tiled")).eval(), torch.tensor([0, 8, 20], dtype=torch.int32)
    lengths = {"cu_seq_lens_q": starts, "cu_seq_lens_k": starts.clone()}
    model(tokens(1), **lengths)
    lengths["cu_seq_lens_k"][1] = 9
    with pytest.raises(UnsupportedAttention, match="no packed rows of several lengths"):
        model(tokens(1), **lengths)


def test_dropout_is_that_of_training() -> None:
    model = model_of("llama", name_of("naive"), attention_dropout=0.5)
    torch.manual_seed(1)
    first = model.train()(tokens()).logits
    assert not torch.equal(first, model(tokens()).logits)
    assert torch.equal(model.eval()(tokens()).logits, model(tokens()).logits)


def chunked(attention: str) -> Any:
    mask = transformers.masking_utils.chunked_causal_mask_function(4, torch.zeros(B, dtype=torch.int64))
    for_transformers.encode_mask(B, T, T, mask_function=mask, name=attention)


REFUSALS = {
    "a mask written out": ({"attention_mask": torch.ones(B, 1, T, T).bool()}, "a mask of your own"),
    "attention weights": ({"output_attentions": True}, "no attention weights as an output"),
    "sinks": ({"s_aux": torch.zeros(4)}, "no attention sinks"),
    "sinks of Inkling": ({"sinks": torch.zeros(4)}, "no attention sinks"),
    "keys that an index chose": ({"indices": torch.zeros(B, T, 2)}, "no choice of keys"),
    "blocks that an index chose": ({"block_indices": torch.zeros(B, T, 2)}, "no choice of blocks of keys"),
    "packed rows": ({"cu_seq_lens_q": torch.tensor([0, T])}, "no packed rows of several lengths"),
    "a window that the mask lacks": ({"sliding_window": 4}, "sliding_window=4 and a mask that says"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSALS)
def test_what_cannot_be_expressed_is_refused(case: str) -> None:
    asked, words = REFUSALS[case]
    attention = registry.build("naive")
    q = torch.randn(B, 4, T, 16)
    with pytest.raises(UnsupportedAttention, match=words):
        for_transformers.attend(
            torch.nn.Module(), q, q, q, **{"attention_mask": None, **asked}, attention=attention
        )


def test_masks_of_other_patterns_are_refused() -> None:
    with pytest.raises(
        UnsupportedAttention, match=r"a mask of the pattern chunked_overlay.*: needs causal, full"
    ):
        chunked("naive")
    with pytest.raises(UnsupportedAttention, match=r"attention=naive(.|\n)*<lambda>: needs causal"):
        for_transformers.encode_mask(B, T, T, mask_function=lambda b, h, q, k: q > k, name="naive")
    with pytest.raises(UnsupportedAttention, match=r"attention=standard(.|\n)*no document_ids"):
        model_of("gpt2", name_of("standard"))(tokens(), attention_mask=padded("left"))


def test_every_name_has_both_halves() -> None:
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    known = {name_of(name) for name in registry.names()}
    assert not any("flash" in name for name in known) and "tilegpt-triton" in known
    assert len(known) == len(registry.names())
    both = set(ALL_ATTENTION_FUNCTIONS.keys()) & set(ALL_MASK_ATTENTION_FUNCTIONS.keys())
    assert {name_of(name) for name in CPU} <= both & known
    assert known & set(ALL_ATTENTION_FUNCTIONS.keys()) == known & both


def test_a_name_without_a_mask_function_would_lose_the_padding() -> None:
    """Why there are two halves: transformers says nothing."""
    half = for_transformers.functools.partial(for_transformers.attend, attention=registry.build("naive"))
    transformers.AttentionInterface.register("tilegpt-half", half)
    mask = padded("left")
    whole, lost = (
        model_of("gpt2", name).eval()(tokens(), attention_mask=mask).logits[mask.bool()]
        for name in (name_of("naive"), "tilegpt-half")
    )
    assert not torch.allclose(whole, lost, atol=1e-3)
