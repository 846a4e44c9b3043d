"""Block-sparse attention in a GPT: the patterns, and that every implementation computes the same."""

from __future__ import annotations

import pytest
import torch

from attention.base import UnsupportedAttention
from conf.values import UserError
from model.calls import attention_call
from model.generation.generate import generate
from model.gpt import GPT, GPTConfig
from model.sparsity import PATTERNS, kept_share, pattern
from tests.grid import build

TOKENS = 300  # three tiles, the last one short


def rows(name: str, tiles: int = 6, blocks: int = 2) -> list[str]:
    """What is kept under the diagonal, a word a row."""
    kept = pattern(name, tiles, blocks)
    return ["".join(".#"[int(x)] for x in row[: i + 1]) for i, row in enumerate(kept)]


def test_patterns_by_hand() -> None:
    assert rows("local") == ["#", "##", ".##", "..##", "...##", "....##"]
    assert rows("dilated") == ["#", ".#", "#.#", ".#.#", "#.#.#", ".#.#.#"]
    assert rows("strided", blocks=3) == ["#", "##", "###", ".###", "..###", "..####"]
    assert rows("butterfly", blocks=2) == ["#", "##", "###", "####", "##..#", "##..##"]
    assert rows("butterfly", blocks=1) == ["#", "##", "#.#", "####", "#...#", "##..##"]
    for name in PATTERNS:
        kept = pattern(name, 40, 3)
        assert kept.diagonal().all(), "a token sees itself"
        assert torch.equal(kept, pattern(name, 40, 3)), "the same each time"


def test_an_unknown_pattern_is_none() -> None:
    with pytest.raises(ValueError, match="bogus is no pattern; there are local, dilated"):
        pattern("bogus", 4, 1)


def test_bigbird_draws_in_each_row() -> None:
    kept = pattern("bigbird", 64, 3)
    drawn = kept & ~pattern("local", 64, 3)
    drawn[:, 0] = False
    assert not drawn.triu(1).any()
    assert kept[:, 0].all() and (drawn.sum(1)[8:] <= 3).all() and (drawn.sum(1)[8:] > 0).float().mean() > 0.8
    assert len({tuple(row.nonzero().flatten().tolist()) for row in drawn[16:]}) > 40


def test_share() -> None:
    assert kept_share(pattern("local", 4, 1), causal=True) == pytest.approx(0.4)
    assert kept_share(pattern("local", 4, 1), causal=False) == 0.25


def net(name: str, sparsity: str | None = "local", **more: object) -> GPT:
    torch.manual_seed(0)
    config = GPTConfig(64, TOKENS, 2, 4, 32, sparsity=sparsity, sparsity_blocks=1, **more)
    return GPT(config, build(name)).eval()


@pytest.mark.parametrize("sparsity", ["local", "butterfly"])
def test_implementations_agree(sparsity: str) -> None:
    ids = torch.randint(0, 64, (2, TOKENS), generator=torch.Generator().manual_seed(1))
    expected = net("naive", sparsity)(ids)
    assert not torch.allclose(expected, net("naive", None)(ids), atol=1e-3)
    for name in ("tiled", "sdpa", "triton"):
        torch.testing.assert_close(net(name, sparsity)(ids), expected, atol=2e-5, rtol=1e-4)


def test_a_token_does_not_see_what_its_tiles_leave_out() -> None:
    model, ids = net("naive"), torch.zeros(1, TOKENS, dtype=torch.long)
    other = ids.clone()
    other[0, 5] = 7
    changed = (model(ids) != model(other)).any(-1)[0]
    assert changed[5] and not changed[:5].any() and not changed[128:].any()


@pytest.mark.parametrize("name", ["naive", "tiled", pytest.param("triton", marks=pytest.mark.long)])
def test_generation_with_a_cache_is_that_without(name: str) -> None:
    model = net(name, "butterfly", position="rope")
    prompts = [[1] * 124, list(range(40)) * 4]  # the first grows beyond a block
    with torch.no_grad():
        texts = [generate(model, prompts, 8, temperature=0.0, kv_cache=on).tokens for on in (True, False)]
    assert texts[0] == texts[1]


def test_refused_where_it_is_not_known() -> None:
    config = GPTConfig(64, TOKENS, sparsity="local")
    call = attention_call(
        config, "training", batch=1, tokens=TOKENS, device=torch.device("cpu"), dtype=torch.float32
    )
    with pytest.raises(UnsupportedAttention, match=r"no block_mask: needs model\.sparsity=null"):
        build("cuda_tiled").require(call)
    with pytest.raises(UserError, match=r"model\.sparsity=holes: choose one of local"):
        GPTConfig(64, TOKENS, sparsity="holes")
    with pytest.raises(UserError, match="sparsity_blocks"):
        GPTConfig(64, TOKENS, sparsity_blocks=0)
