"""Generation: the cache changes nothing but the time, rows keep to themselves, sampling does as it says."""

import functools
import itertools
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from attention.base import UnsupportedAttention
from attention.naive import NaiveAttention
from model.calls import attention_call
from model.generation.decode import Rows
from model.generation.generate import generate, window_moves, window_start
from model.generation.serve import serve
from model.generation.speculate import speculate
from model.generation.weights import quantise_weights
from model.gpt import GPT, GPTConfig
from tests.grid import NAMES, build, long_but

pytestmark = pytest.mark.sampled(4)

VOCAB, CONTEXT = 61, 16
PROMPTS = [[1, 2, 3], [4], [5, 6] * 6, list(range(40))]  # unequal, and one past the context
SHAPES = {
    "learned": {},
    "rope_gqa": {"position": "rope", "n_kv_head": 2, "qk_norm": True, "norm": "rmsnorm", "mlp": "swiglu"},
    "alibi_mqa": {"position": "alibi", "n_kv_head": 1},
    "t5": {"position": "t5", "relative_buckets": 4, "relative_distance": 6},
    "window": {"position": "rope", "window": 3},
    "softcap": {"position": "none", "softcap": 3.0, "window": 5},
}


def make(attention=None, device: str = "cpu", **changes) -> GPT:
    torch.manual_seed(0)
    shape = {"vocab_size": VOCAB, "seq_len": CONTEXT, "n_layer": 2, "n_head": 4, "n_embd": 32}
    shape["tie_embeddings"] = False  # tied, greedy text of random weights only repeats itself
    model = GPT(GPTConfig(**{**shape, **changes}), attention or NaiveAttention()).eval().to(device)
    with torch.no_grad():
        for parameter in model.parameters():  # at GPT-2's initialisation attention hardly matters
            if parameter.dim() > 1:
                parameter.mul_(6)
    return model


@pytest.fixture
def recorded(monkeypatch):
    """The logits of every step, as they are chosen by."""
    steps, append = [], Rows.append
    monkeypatch.setattr(
        Rows, "append", lambda rows, logits: (steps.append(logits.clone()), append(rows, logits))
    )
    return steps


def _registered():
    """flex and Triton's interpreter take 10 to 20 s a shape, and the grid covers the options."""
    for name, shape in itertools.product(NAMES, SHAPES):
        if name != "triton" or shape == "rope_gqa":
            slow = [pytest.mark.long] * (name in ("flex", "triton"))
            yield pytest.param(name, shape, marks=slow, id=f"{name}-{shape}")


@pytest.mark.parametrize(("name", "shape"), list(_registered()))
def test_the_cache_changes_nothing(name, shape, recorded):
    model = make(build(name), **SHAPES[shape])
    for purpose in ("prefill", "decode"):
        call = attention_call(
            model.config, purpose, batch=4, tokens=CONTEXT, device=torch.device("cpu"), dtype=torch.float32
        )
        if reasons := model.transformer.h[0].attn.attention.unsupported_reasons(call):
            pytest.skip("; ".join(reasons))
    cached = generate(model, PROMPTS, 40, seed=1)
    split = len(recorded)
    plain = generate(model, PROMPTS, 40, seed=1, kv_cache=False)
    assert split == 40 == len(recorded) - split
    assert cached.reencoded == plain.reencoded > 8 and cached.cut == plain.cut == 1
    assert cached.tokens == plain.tokens and len(set(cached.tokens[0])) > 4
    torch.testing.assert_close(
        torch.stack(recorded[:split]), torch.stack(recorded[split:]), rtol=1e-3, atol=1e-3
    )


def test_logits_are_those_of_the_whole_window(recorded):
    model = make()
    tokens = generate(model, PROMPTS, 40, seed=1).tokens
    for row, prompt in enumerate(PROMPTS):
        text = prompt + tokens[row]
        for step in range(40):
            end = len(prompt) + step
            window = torch.tensor([text[window_start(end, CONTEXT) : end]])
            torch.testing.assert_close(recorded[step][row], model(window)[0, -1:], rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("context", [1, 2, 3, 4, 7, 16])
def test_the_window_is_cut_to_half_when_full(context):
    start, moves = 0, 0
    for length in range(1, 5 * context):
        if length - start > context:
            start, moves = length - max(1, context // 2), moves + 1
        assert (window_start(length, context), window_moves(length, context)) == (start, moves)


@pytest.mark.parametrize("context", [1, 2, 3, 5])
def test_tiny_contexts(context):
    model = make(seq_len=context)
    with_cache = generate(model, [[1], [2, 3, 4]], 12, temperature=0)
    assert with_cache.tokens == generate(model, [[1], [2, 3, 4]], 12, temperature=0, kv_cache=False).tokens


@pytest.mark.parametrize("kv_cache", [True, False])
def test_a_row_does_not_depend_on_its_batch_mates(kv_cache):
    model = make(position="rope", n_kv_head=2)
    options = {"max_new_tokens": 40, "temperature": 0, "kv_cache": kv_cache}
    together = generate(model, PROMPTS, **options).tokens
    assert together == [generate(model, [prompt], **options).tokens[0] for prompt in PROMPTS]


@pytest.mark.long
def test_the_same_seed_gives_the_same_text_in_any_process():
    model = make()
    options = {"max_new_tokens": 30, "seed": 7, "temperature": 0.9, "top_k": 20, "top_p": 0.9}
    first = generate(model, PROMPTS, **options)
    assert first.tokens == generate(model, PROMPTS, **options).tokens
    assert first.tokens != generate(model, PROMPTS, **{**options, "seed": 8}).tokens
    code = (
        "from tests.model.generation.test_generate import *\n"
        f"torch.rand(3); print(generate(make(), PROMPTS, **{options!r}).tokens == {first.tokens!r})"
    )
    root = Path(__file__).parents[3]
    ran = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True, check=True)
    assert ran.stdout.strip() == "True"


def test_without_a_seed_it_reports_the_one_it_took():
    model = make()
    free = generate(model, PROMPTS, 20)
    assert generate(model, PROMPTS, 20, seed=free.seed).tokens == free.tokens
    assert generate(model, PROMPTS, 20).tokens != free.tokens


def test_training_notices_nothing():
    model = make().train()
    model.transformer.h[0].attn.attention.requires_grad_(False)
    keys, state = list(model.state_dict()), torch.get_rng_state()
    generate(model, PROMPTS, 5)
    generate(model, PROMPTS, 5, seed=1, kv_cache=False)
    assert torch.equal(torch.get_rng_state(), state)
    assert model.training and all(module.training for module in model.modules())
    assert list(model.state_dict()) == keys
    model(torch.tensor([[1, 2]]), targets=torch.tensor([[2, 3]])).backward()
    with pytest.raises(RuntimeError, match="halt"):
        generate(model, PROMPTS, 5, on_token=lambda row, token: (_ for _ in ()).throw(RuntimeError("halt")))
    assert model.training


@pytest.mark.parametrize("options", [{"temperature": 0}, {}, {"top_k": 64}, {"top_p": 1.0}])
def test_padding_of_the_vocabulary_is_never_chosen(options):
    model = make(n_layer=1)
    with torch.no_grad():  # the padding's logits: +-huge, by the sign of one feature
        model.lm_head.weight[VOCAB:] = 1e4 * model.lm_head.weight[0]
    tokens = torch.tensor(generate(model, [[t] for t in range(30)], 20, seed=0, **options).tokens)
    assert tokens.max() < VOCAB


def test_top_k_of_one_is_greedy():
    model = make()
    greedy = generate(model, PROMPTS, 20, temperature=0).tokens
    assert generate(model, PROMPTS, 20, top_k=1, temperature=5.0).tokens == greedy
    assert generate(model, PROMPTS, 20, top_p=1e-6, temperature=1.0).tokens == greedy


def test_a_row_stops_after_eot_and_when_asked():
    model = make()
    free = generate(model, PROMPTS, 30, temperature=0).tokens
    eot = free[0][4]
    cut = [row[: row.index(eot) + 1] if eot in row else row for row in free]
    seen = [[] for _ in PROMPTS]
    result = generate(
        model, PROMPTS, 30, temperature=0, eot=eot, on_token=lambda row, token: seen[row].append(token)
    )
    assert result.tokens == seen == cut and len(cut[0]) <= 5
    third = generate(model, PROMPTS[:2], 30, temperature=0, on_token=lambda row, token: row == 0)
    assert third.tokens == [free[0][:1], free[1]]
    assert (
        generate(model, [[]], 5, eot=3, temperature=0).tokens
        == generate(model, [[3]], 5, eot=3, temperature=0).tokens
    )


def test_rates_leave_nothing_out():
    result = generate(make(), PROMPTS, 10, temperature=0)
    assert result.prefill_tokens == 3 + 1 + 12 + 40 - window_start(40, CONTEXT)
    assert result.decode_tokens_per_s == pytest.approx(4 * 9 / result.decode_s)
    assert generate(make(), [[1]], 1).decode_tokens_per_s == 0


def test_another_implementation_decodes(monkeypatch):
    model, other = make(NaiveAttention("trains")), NaiveAttention("decodes")
    calls = []
    for attention in (other, model.transformer.h[0].attn.attention):
        forward = attention.forward
        monkeypatch.setattr(
            attention,
            "forward",
            lambda q, k, v, forward=forward, name=attention.name, **options: (
                calls.append((name, q.shape[2], options["kv_lengths"] is not None)),
                forward(q, k, v, **options),
            )[1],
        )
    generate(model, [[1, 2, 3]], 4, decode_attention=other)
    assert set(calls) == {("trains", 3, False), ("decodes", 1, True)}


class NoDecode(NaiveAttention):
    def unsupported_reasons(self, call):
        return ["no kv_lengths"] if call.purpose == "decode" else []


def test_who_cannot_decode_is_refused_before_anything_runs():
    model = make(NoDecode("odd"))
    with pytest.raises(UnsupportedAttention, match="decode: no kv_lengths"):
        generate(model, PROMPTS, 5)
    generate(model, PROMPTS, 5, kv_cache=False)
    generate(model, PROMPTS, 5, decode_attention=NaiveAttention())


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"temperature": -1.0}, "temperature=-1.0"),
        ({"top_k": 0}, "top_k=0"),
        ({"top_p": 0.0}, "top_p=0.0"),
        ({"max_new_tokens": 0}, "max_new_tokens=0"),
        ({"prompts": []}, "no prompt"),
        ({"prompts": [[1], []]}, "prompt 1 is empty, and this tokenizer has no end-of-text token"),
        ({"prompts": [[1, VOCAB]]}, f"token {VOCAB}"),
        (
            {"prompts": ["text"]},
            r"prompts=\['text'\]: they need to be a list of prompts, each a list of token",
        ),
        ({"prompts": [1, 2]}, r"prompts=\[1, 2\]: they need to be"),
        ({"prompts": [[1.0]]}, r"prompts=\[\[1.0\]\]: they need to be"),
        ({"temperature": "1"}, "temperature='1'"),
        ({"top_k": 5.0}, "top_k=5.0: it needs to be at least 1, as a whole number, or null for all tokens"),
        ({"top_p": "x"}, "top_p='x'"),
        ({"max_new_tokens": 2.0}, "max_new_tokens=2.0: it needs to be at least 1, as a whole number"),
        ({"seed": 1.5}, "seed=1.5: it needs to be a whole number, at least 0"),
        ({"seed": 2**64}, f"seed={2**64}: it needs to be a whole number, at least 0"),
        ({"kv_cache": False, "cache_dtype": "int8"}, "kv_cache=False and cache_dtype: they are of decoding"),
        ({"kv_cache": False, "decode_attention": NaiveAttention()}, "kv_cache=False and decode_attention"),
        ({"kv_cache": False, "compile": True, "fused": True}, "kv_cache=False and compile, fused: they are"),
    ],
)
def test_wrong_input_is_named(options, words):
    with pytest.raises(ValueError, match=words):
        generate(make(), **{"prompts": [[1]], "max_new_tokens": 3, **options})
    with pytest.raises(ValueError, match="causal"):
        generate(make(causal=False), [[1]], 3)


@pytest.mark.parametrize("by", [generate, serve, speculate])
def test_whole_numbers_of_numpy_and_torch_are_numbers(by):
    plain = by(make(), [[1, 2]], 3, top_k=5, seed=1).tokens
    for kind in (np.int64, torch.tensor):
        assert by(make(), kind([[1, 2]]), kind(3), top_k=kind(5), seed=1).tokens == plain
    if by is serve:
        assert by(make(), [[1, 2]], torch.tensor([3]), top_k=5, seed=1).tokens == plain
    with torch.inference_mode():
        model = make()
        by(model, [[1]], 2)
        model.lm_head.weight[0, 0] = torch.nan  # a write that no version tells
    with pytest.raises(ValueError, match="NaN or infinity"):
        by(model, [[1]], 2)


@pytest.mark.parametrize("by", [generate, serve, speculate])
def test_weights_that_are_not_finite_are_named_and_read_once(by, monkeypatch):
    read, total = [], torch.nn.utils.get_total_norm
    monkeypatch.setattr(torch.nn.utils, "get_total_norm", lambda *args: (read.append(model), total(*args))[1])
    for bad in (float("nan"), float("-inf")):
        model = make()
        for _ in range(3):
            by(model, [[1]], 2)
        assert read == [model]
        with torch.no_grad():
            model.transformer.wte.weight[7, 3] = bad  # of a token that is in no prompt
        for _ in range(2):
            with pytest.raises(
                ValueError, match=r"1 of 29 weight tensors hold NaN or infinity, .*wte.weight"
            ):
                by(model, [[1]], 2)
        read.clear()
        quantise_weights(model, "int8")
        model.transformer.wte.weight.data[7, 3] = 0.0
        model.lm_head.scale[2] = bad
        with pytest.raises(ValueError, match=r"hold NaN or infinity, lm_head\.scale"):
            by(model, [[1]], 2)
        read.clear()


def test_autocast_and_bf16_weights():
    model = make(position="rope")
    with torch.autocast("cpu", torch.bfloat16):
        assert len(generate(model, PROMPTS, 20).tokens[0]) == 20
    model.to(torch.bfloat16)
    assert model.rope.dtype == torch.float32
    assert len(generate(model, PROMPTS, 20).tokens[0]) == 20


@pytest.mark.parametrize("name", long_but(("naive", "tiled", "sdpa"), 2))
def test_a_step_is_one_graph_for_the_compiler(name, monkeypatch):
    from model.generation import decode

    compile = functools.partial(torch.compile, backend="aot_eager")
    monkeypatch.setattr(torch, "compile", lambda step, options, **rest: compile(step, **rest))
    decode.compiled_decode_step.cache_clear()
    try:
        model = make(build(name), position="rope", n_kv_head=2)
        options = {"max_new_tokens": 30, "seed": 1, "top_k": 20, "top_p": 0.9}
        assert (
            generate(model, PROMPTS, compile=True, **options).tokens
            == generate(model, PROMPTS, **options).tokens
        )
    finally:
        decode.compiled_decode_step.cache_clear()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
@pytest.mark.parametrize("compile", [False, True])
@pytest.mark.parametrize("options", [{"temperature": 0}, {"seed": 1}, {"seed": 2, "top_k": 9, "top_p": 0.9}])
def test_the_cuda_graph_computes_what_eager_does(options, compile, monkeypatch):
    from model.generation.decode import Decoder

    model = make(device="cuda", position="rope", n_kv_head=2)
    state = torch.cuda.get_rng_state()
    graph = generate(model, PROMPTS, 40, compile=compile, **options).tokens
    assert graph == generate(model, PROMPTS, 40, compile=compile, **options).tokens
    assert torch.equal(torch.cuda.get_rng_state(), state)
    assert graph == generate(model, PROMPTS, 40, kv_cache=False, **options).tokens
    monkeypatch.setattr(Decoder, "capture", lambda self: None)
    assert graph == generate(model, PROMPTS, 40, **options).tokens
