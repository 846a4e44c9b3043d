"""Quantised caches: their size, what they hold, text by them, and what is refused."""

import pytest
import torch

from attention.base import UnsupportedAttention, quantise
from attention.naive import NaiveAttention
from model.generation.decode import compiled_decode_step
from model.generation.generate import generate
from model.generation.view_cache import QuantisedCache
from tests.grid import build
from tests.model.generation.test_generate import PROMPTS, SHAPES, make, recorded  # noqa: F401

KINDS = ("fp8", "int8", "int4")
# Bytes a number, and a scale of two a token and part.
BYTES = {"fp8": 1, "int8": 1, "int4": 0.5}


@pytest.mark.parametrize("kind", KINDS)
def test_what_it_holds_is_what_was_written(kind):
    cache = QuantisedCache(2, 3, 2, 8, 16, attention=NaiveAttention(), kind=kind)
    parts = 2 if kind == "int4" else 1
    assert cache.nbytes == 2 * 2 * 3 * 2 * 8 * (16 * BYTES[kind] + 2 * parts) and cache.capacity == 8
    where = [x.data_ptr() for side in cache.k + cache.v for x in side[:2]]
    cache.prefill(torch.tensor([4, 2]), rows=torch.tensor([2, 0]))
    k, v = torch.randn(2, 2, 2, 4, 16).unbind()
    assert cache.update(0, k, v) == (k, v) and not cache.decoding
    cache.advance()
    new_k, new_v = torch.randn(2, 3, 2, 1, 16).unbind()
    view, nothing = cache.update(0, new_k, new_v)
    assert nothing is None and cache.decoding and cache.kv_lengths is None
    assert view.lengths.tolist() == [3, 1, 5] and view.kinds == {kind}
    data, scale = quantise(k, kind)
    for at, row in enumerate((2, 0)):
        held = view.k.data[row].view(torch.uint8)
        assert torch.equal(held[:, :2], data[at].view(torch.uint8)[:, :2])
        assert torch.equal(view.k.scale[row, :, :, :2], scale[at].transpose(-2, -1)[..., :2])
    back = torch.stack([side.tokens(0, 8)[1, :, 0] for side in (view.k, view.v)])
    written = torch.stack([x[1, :, 0] for x in (new_k, new_v)])
    off = (back - written).abs().amax(-1) / written.abs().amax(-1)
    assert (off < {"fp8": 0.04, "int8": 0.006, "int4": 0.09}[kind]).all()
    assert where == [x.data_ptr() for side in cache.k + cache.v for x in side[:2]]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["naive", "tiled"])
def test_text_by_a_quantised_cache(name, kind, recorded):  # noqa: F811
    """Steps are those of the full cache but for the rounding; rows past the context are encoded anew."""
    model = make(build(name), **SHAPES["rope_gqa"])
    full = generate(model, PROMPTS, 3, temperature=0.0)
    exact = torch.stack(recorded)
    recorded.clear()
    found = generate(model, PROMPTS, 3, temperature=0.0, cache_dtype=kind)
    same = [a[:2] == b[:2] for a, b in zip(full.tokens, found.tokens, strict=True)]
    off = (torch.stack(recorded)[1] - exact[1])[torch.tensor(same)].norm() / exact[1].norm()
    assert 1e-5 < off < {"fp8": 0.1, "int8": 0.03, "int4": 0.3}[kind] and any(same)
    again = generate(model, PROMPTS, 20, seed=3, cache_dtype=kind)
    assert again.reencoded > 0 and all(len(row) == 20 for row in again.tokens)
    assert again.tokens == generate(model, PROMPTS, 20, seed=3, cache_dtype=kind).tokens


def test_a_step_over_a_quantised_cache_is_one_graph(monkeypatch):
    compile = torch.compile
    monkeypatch.setattr(torch, "compile", lambda step, options, **o: compile(step, backend="eager", **o))
    compiled_decode_step.cache_clear()
    model = make(n_layer=1)
    for kind in KINDS:
        how = {"temperature": 0.0, "cache_dtype": kind}
        assert generate(model, [[1], [2, 3]], 4, **how).tokens == (
            generate(model, [[1], [2, 3]], 4, compile=True, **how).tokens
        )
    compiled_decode_step.cache_clear()


def test_refusals_name_what_can():
    with pytest.raises(UnsupportedAttention, match="decode: no int8 cache: needs cache_dtype=auto") as error:
        generate(make(build("sdpa")), [[1]], 2, cache_dtype="int8")
    assert "attention=naive and attention=tiled" in str(error.value)
    with pytest.raises(ValueError, match="head dim is 9, which is odd; choose int8, fp8 or auto"):
        generate(make(n_embd=36), [[1]], 2, cache_dtype="int4")
    with pytest.raises(ValueError, match="cache_dtype=int3: choose one of auto, fp8, int8, int4"):
        generate(make(), [[1]], 2, cache_dtype="int3")
