"""T5's relative positions in a GPT: the buckets, and that all implementations compute and learn the same."""

from __future__ import annotations

import math

import pytest
import torch

from attention.base import AttentionCall, UnsupportedAttention
from conf.values import UserError
from model import relative
from model.calls import attention_call
from model.costs.flops import flops_per_token
from model.generation.generate import generate
from model.gpt import GPT, GPTConfig
from model.relative import bucket_of, buckets_of_distances
from tests.grid import build

pytestmark = pytest.mark.sampled(3)

TOKENS = 200
T5 = {"position": "t5", "relative_buckets": 16, "relative_distance": 40}  # beyond 40: tiles with one number


def test_buckets_by_hand() -> None:
    """8 buckets up to 16: 0 to 3 alone, then edges at 4 times 4 ** (1 / 4, 1 / 2, 3 / 4)."""
    found = [bucket_of(n, 8, 16) for n in range(18)]
    assert found == [0, 1, 2, 3, 4, 4, 5, 5, 6, 6, 6, 6, 7, 7, 7, 7, 7, 7]
    assert buckets_of_distances(8, 16, causal=True)[:18] == [*found[16::-1], 0]
    both = buckets_of_distances(8, 16, causal=False)
    assert both[16:] == [0, 5, 6, 6, 6, 6, *[7] * 11] and both[:16] == [3] * 11 + [2, 2, 2, 2, 1]


@pytest.mark.parametrize("causal", [True, False])
def test_buckets_are_t5s(causal: bool) -> None:
    """The paper's formula with logarithms, where these do not round across an edge."""
    found, count = buckets_of_distances(32, 128, causal), 32 if causal else 16
    for rel, bucket in zip(range(-128, 129), found, strict=True):
        n, own = (max(-rel, 0), bucket) if causal else (abs(rel), bucket - 16 * (rel > 0))
        exact = count // 2
        place = math.log(max(n, exact) / exact) / math.log(128 / exact) * (count - exact)
        if n < exact:
            assert own == n
        elif abs(place - round(place)) > 1e-9:
            assert own == min(exact + int(place), count - 1)
    assert set(found) == set(range(32)) - (set() if causal else {16})  # no distance of 0 lies ahead


def test_where_buckets_begin_is_worked_out_once() -> None:
    """And not by powers of thousands of bits for each distance: 512 buckets up to 16,384 took 27 s."""
    relative._starts.cache_clear()
    found = buckets_of_distances(128, 2048, causal=True)
    assert relative._starts.cache_info().misses == 1
    assert found[0] == 127 and sorted(set(found)) == list(range(128))
    # the first edge is 64 * 32 ** (1 / 64) = 67.6
    assert [bucket_of(n, 128, 2048) for n in (63, 67, 68, 2048, 9999)] == [63, 64, 65, 127, 127]


def net(name: str, **more: object) -> GPT:
    torch.manual_seed(0)
    model = GPT(GPTConfig(64, TOKENS, 2, 4, 32, **T5 | more), build(name))
    torch.nn.init.normal_(model.transformer.relative_attention_bias.weight)
    return model.eval()


def learned(model: GPT, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The loss and the table's gradient."""
    loss = model(ids, targets=ids.roll(-1, 1))
    return loss.detach(), torch.autograd.grad(loss, model.transformer.relative_attention_bias.weight)[0]


@pytest.mark.parametrize("causal", [True, False])
def test_implementations_learn_the_same(causal: bool) -> None:
    ids = torch.randint(0, 64, (2, TOKENS), generator=torch.Generator().manual_seed(1))
    loss, gradient = learned(net("naive", causal=causal), ids)
    assert gradient.any(1).sum() == (16 if causal else 15), "each bucket learns"
    for name in ("tiled", "sdpa", "triton"):
        found = learned(net(name, causal=causal), ids)
        torch.testing.assert_close(found, (loss, gradient), atol=1e-3, rtol=1e-4)


def test_the_gradient_of_the_table_is_that_of_differences() -> None:
    model, ids = net("naive").double(), torch.arange(40).view(1, -1)
    table = model.transformer.relative_attention_bias.weight
    gradient = torch.autograd.grad(model(ids).square().sum(), table)[0]
    with torch.no_grad():
        for at in ((3, 1), (15, 2)):
            ends = []
            for step in (1e-4, -1e-4):
                table[at] += step
                ends.append(float(model(ids).square().sum()))
                table[at] -= step
            assert (ends[0] - ends[1]) / 2e-4 == pytest.approx(float(gradient[at]), rel=1e-5)


@pytest.mark.parametrize("name", ["naive", "tiled", "triton"])
def test_generation_with_a_cache_is_that_without(name: str) -> None:
    prompts = [[1] * 60, list(range(40))]
    model = net(name)
    texts = [generate(model, prompts, 12, temperature=0.0, kv_cache=on).tokens for on in (True, False)]
    assert texts[0] == texts[1]


def test_a_fused_step_generates_the_same() -> None:
    model = net("auto")
    texts = [generate(model, [[5, 6, 7]], 8, temperature=0.0, fused=on).tokens for on in (True, False)]
    assert texts[0] == texts[1]


def call(config: GPTConfig, purpose: str, **more: object) -> AttentionCall:
    like = {"batch": 1, "tokens": TOKENS, "device": torch.device("cpu"), "dtype": torch.float32}
    return attention_call(config, purpose, **like | more)


def test_refused_where_it_is_not_known() -> None:
    config = GPTConfig(64, TOKENS, **T5)
    with pytest.raises(UnsupportedAttention, match=r"no relative_bias: needs model\.position=learned"):
        build("cuda_fa2").require(call(config, "training"))
    with pytest.raises(UnsupportedAttention, match=r"no gradient with relative_bias"):
        build("sdpa_flash").require(call(config, "training"))
    with pytest.raises(UnsupportedAttention, match=r"no relative_bias with a cache that is paged"):
        build("triton").require(call(config, "decode", cache=frozenset({"paged"})))
    with pytest.raises(UserError, match=r"relative_distance=8: "):
        GPTConfig(64, TOKENS, position="t5", relative_buckets=16, relative_distance=8)


def test_of_positions_no_flops_are_counted() -> None:
    config = GPTConfig(64, TOKENS, 2, 4, 32, **T5)
    assert flops_per_token(config) == flops_per_token(GPTConfig(64, TOKENS, 2, 4, 32, position="none"))


def test_the_estimate_knows_what_the_gradient_leaves() -> None:
    """By the tensor that it does leave, which grows as T: 4 heads, in tiles of 64 queries by 64 keys."""
    with_bias, without = (
        [
            build("triton").costs(call(GPTConfig(64, n, 2, 4, 256, position=position), "training", tokens=n))
            for n in (512, 1024)
        ]
        for position in ("t5", "none")
    )
    more = [a.transient_bytes - b.transient_bytes for a, b in zip(with_bias, without, strict=True)]
    assert more == [4 * 4 * (n // 64) * 2 * (2 * (128 + 64 + 64) + 1) for n in (512, 1024)]
