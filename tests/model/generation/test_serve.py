"""Continuous batching over a paged cache: the same text as by generate, whatever shares the steps."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from attention.base import UnsupportedAttention
from attention.naive import NaiveAttention
from model.generation import serve as serving
from model.generation.engine import Engine, Pool, made_blocks, made_rows
from model.generation.generate import generate
from model.generation.serve import serve
from tests.grid import build
from tests.model.generation.test_generate import PROMPTS, SHAPES, make

pytestmark = pytest.mark.sampled(5)

NEW = 40
GREEDY = {"temperature": 0.0}


@pytest.fixture
def engines(monkeypatch):
    """Those that ran, with the pool as they left it."""
    made = []

    class Kept(Engine):
        def __init__(self, *args):
            super().__init__(*args)
            made.append(self)

    monkeypatch.setattr(serving, "Engine", Kept)
    return made


@pytest.mark.parametrize("shape", sorted(SHAPES.keys() - {"t5"}))  # a bias is refused: below
@pytest.mark.parametrize("name", ["naive", "tiled"])
def test_the_same_text_as_row_by_row(name, shape, engines):
    """In fp32, for chunks, slots, blocks and pools of several sizes, past the context too."""
    model = make(build(name), **SHAPES[shape])
    expected = generate(model, PROMPTS, NEW, **GREEDY)
    for chunk, slots, block, tokens in ((512, 16, 16, None), (3, 2, 4, 40), (7, 3, 1, 16), (1, 4, 5, None)):
        pool = Pool(block=block, tokens=tokens, slots=slots, chunk=chunk)
        found = serve(model, PROMPTS, NEW, **GREEDY, pool=pool)
        assert found.tokens == expected.tokens
        assert found.reencoded == expected.reencoded
        blocks = engines[-1].pool
        assert blocks.held == blocks.promised == 0


@settings(max_examples=15, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 3), st.integers(1, 12), st.integers(1, 6)), min_size=1, max_size=7),
    st.integers(1, 6),
    st.integers(1, 4),
    st.integers(1, 5),
    st.booleans(),
)
def test_whatever_joins_and_leaves(asked, chunk, slots, block, prefix_caching):
    """Prompts of few beginnings, outputs of any length, some cancelled: each as if it were alone."""
    model = make(n_layer=1)
    prompts = [[kind, kind, kind, 1, 2, 3, 1, 2, 3, kind, 5, 6][:length] for kind, length, _ in asked]
    alone = {
        (tuple(prompt), new): generate(model, [prompt], new, **GREEDY).tokens[0]
        for prompt, (_, _, new) in zip(prompts, asked, strict=True)
    }
    said = itertools.count()
    found = serve(
        model,
        prompts,
        [new for _, _, new in asked],
        **GREEDY,
        pool=Pool(block=block, slots=slots, chunk=chunk, prefix_caching=prefix_caching),
        on_token=lambda row, token: row % 3 == 2 and next(said) % 2 == 1,
    )
    for row, (prompt, (_, _, new)) in enumerate(zip(prompts, asked, strict=True)):
        whole = alone[tuple(prompt), new]
        assert found.tokens[row] == (whole if row % 3 < 2 else whole[: len(found.tokens[row])])
        assert found.tokens[row]


def test_a_beginning_is_computed_once(engines):
    model = make()
    prompts = [[7, 3, 9, 1, 4, 4, 2, 8, last] for last in (1, 2, 3, 4, 5, 6)]
    pool = {"block": 4, "slots": 3, "chunk": 5}
    shared = serve(model, prompts, 4, **GREEDY, pool=Pool(**pool))
    apart = serve(model, prompts, 4, **GREEDY, pool=Pool(**pool, prefix_caching=False))
    assert shared.tokens == apart.tokens
    assert (shared.computed, shared.found) == (9 + 5, 5 * 8)
    assert (apart.computed, apart.found) == (6 * 9, 0)
    assert shared.most_bytes < apart.most_bytes
    again = serve(model, prompts[:1], 4, **GREEDY, pool=Pool(**pool))
    assert again.tokens == shared.tokens[:1]


def test_rows_in_progress_go_on_beside_a_long_prompt():
    order = []
    prompts = [[1, 2], list(range(14))]
    serve(
        make(), prompts, 2 * [8], **GREEDY, pool=Pool(chunk=2), on_token=lambda row, token: order.append(row)
    )
    assert order.index(1) >= 6  # seven steps of two tokens; the other row was given its own meanwhile


def test_memory_is_bounded_and_rows_wait(engines):
    """Six rows of 12 tokens in a pool for two: each waits for its blocks, none is without in the middle."""
    model = make()
    prompts = [[n, n + 1, n + 2, n + 3] for n in range(6)]
    found = serve(model, prompts, 9, **GREEDY, pool=Pool(block=4, tokens=24))
    assert found.tokens == generate(model, prompts, 9, **GREEDY).tokens
    assert engines[0].most[0] <= 6
    assert found.most_bytes <= 6 * 4 * found.held_bytes / engines[0].most[1]


def test_a_window_keeps_what_it_can_see(engines):
    model = make(position="rope", window=3)
    found = serve(model, [[1, 2, 3, 4]], 12, **GREEDY, pool=Pool(block=1, chunk=2))
    assert found.tokens == generate(model, [[1, 2, 3, 4]], 12, **GREEDY).tokens
    assert engines[0].most[0] <= 3 + 2 < 15


def test_a_cancelled_row_frees_its_blocks(engines):
    held = []

    def cancel(row: int, token: int) -> bool:
        held.append(engines[0].pool.held)
        return row == 0

    found = serve(make(), [[1, 2, 3], [4, 5, 6]], 10, **GREEDY, on_token=cancel, pool=Pool(block=1))
    assert len(found.tokens[0]) == 1 and len(found.tokens[1]) == 10
    assert held[0] >= 6 and held[2] <= 5  # the cancelled row's three are gone by the second's second token


@pytest.mark.parametrize("kind", ["fp8", "int8", "int4"])
def test_quantised_blocks(kind):
    """In whole-prompt chunks without sharing, as by the dense cache of that kind."""
    model = make(**SHAPES["rope_gqa"])
    prompts = [p[:6] for p in PROMPTS]
    dense = generate(model, prompts, 8, **GREEDY, cache_dtype=kind)
    paged = serve(model, prompts, 8, **GREEDY, cache_dtype=kind, pool=Pool(block=4, prefix_caching=False))
    assert paged.tokens == dense.tokens


def test_the_seed_gives_the_same_again():
    model = make()
    first = serve(model, PROMPTS, 20, seed=3, top_k=5)
    assert first.tokens == serve(model, PROMPTS, 20, seed=first.seed, top_k=5).tokens
    assert first.tokens != serve(model, PROMPTS, 20, seed=4, top_k=5).tokens


def test_what_is_refused():
    with pytest.raises(ValueError, match="prompt 1 has 3 tokens, and with 8 new ones comes to 10") as error:
        serve(make(), [[1], [1, 2, 3]], 8, pool=Pool(block=4, tokens=8))
    assert "the pool holds 8, a prompt of 1 beside them: give pool_tokens=12 or more" in str(error.value)
    with pytest.raises(UnsupportedAttention, match="decode: no paged cache: needs cache=dense"):
        serve(make(build("sdpa")), [[1]], 2)
    with pytest.raises(UnsupportedAttention, match="no relative_bias with a cache that is paged"):
        serve(make(**SHAPES["t5"]), [[1]], 2)
    with pytest.raises(ValueError, match="block=64: it needs to be at most 32, for a trained context of 32"):
        made_blocks(made_rows([[1]], [2]), 32, Pool(block=64))
    assert made_blocks(made_rows([[1]], [2]), 8, Pool()).capacity == 16  # the default
    assert made_blocks(made_rows([[1] * 9], [8]), 32, Pool(block=4, tokens=2**31 - 1)).capacity == 16
    with pytest.raises(ValueError, match="slots=0: it needs to be at least 1"):
        Pool(slots=0)
    with pytest.raises(ValueError, match="tokens=-5: it needs to be at least 1"):
        Pool(tokens=-5)
    with pytest.raises(ValueError, match="max_new_tokens has 2 numbers for 3 prompts: give one for each, or"):
        serve(make(), [[1], [2], [3]], [4, 4])
    with pytest.raises(ValueError, match=r"max_new_tokens=2\.5"):
        serve(make(), [[1], [2]], [2, 2.5])
    with pytest.raises(ValueError, match=r"block=2\.5: it needs to be at least 1, as a whole number"):
        Pool(block=2.5)
    with pytest.raises(ValueError, match="max_new_tokens=0"):
        serve(make(NaiveAttention()), [[1]], 0)
