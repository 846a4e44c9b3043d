"""Parameters and FLOPs: formulas against counts."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from attention.naive import NaiveAttention
from model.costs.flops import (
    AttentionSize,
    Gpu,
    Traffic,
    attention_flops,
    fa1_traffic,
    flops_per_token,
    kernel_traffic,
    keys_walked,
    kv_cache_bytes,
    missed,
    naive_traffic,
    parameter_count,
    peak_bf16_flops,
    score_matrix_bytes,
    tiled_traffic,
)
from model.costs.gpus import GPUS
from model.gpt import GPT, GPTConfig
from model.lora import TARGETS, Adapters, adapter_count, add_adapters

GPT2 = {"vocab_size": 50257, "seq_len": 1024}
SMALL = {"vocab_size": 64, "seq_len": 32, "n_layer": 2, "n_head": 4, "n_embd": 64}


def counted(config: GPTConfig) -> dict[str, int]:
    with torch.device("meta"):
        net = GPT(config, NaiveAttention())
    return {name: p.numel() for name, p in net.named_parameters()}


@pytest.mark.parametrize(
    ("layers", "heads", "width", "known"),
    [
        (12, 12, 768, 124_439_808),
        (24, 16, 1024, 354_823_168),
        (36, 20, 1280, 774_030_080),
        (48, 25, 1600, 1_557_611_200),
    ],
)
def test_gpt2s_sizes_are_the_known_ones(layers: int, heads: int, width: int, known: int) -> None:
    config = GPTConfig(**GPT2, n_layer=layers, n_head=heads, n_embd=width)
    assert config.padded_vocab_size == 50304
    total = sum(counted(config).values())
    assert total == sum(parameter_count(config).values())
    assert total - (50304 - 50257) * width == known


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"bias": False},
        {"n_kv_head": 2},
        {"n_kv_head": 1, "bias": False, "qk_norm": True},
        {"position": "rope", "norm": "rmsnorm", "mlp": "swiglu"},
        {"position": "alibi", "mlp": "swiglu", "bias": False},
        {"position": "t5", "relative_buckets": 8},
        {"position": "none", "tie_embeddings": False, "vocab_size": 65},
        {"qk_norm": True, "norm": "rmsnorm", "bias": False, "n_layer": 3, "n_embd": 72},
        {"head_dim": 24, "mlp_hidden": 100, "n_kv_head": 2, "max_positions": 48},
        {"head_dim": 24, "mlp_hidden": 100, "mlp": "swiglu", "bias": False, "qkv_bias": True},
        {"qkv_bias": False},
    ],
)
def test_parameters_by_part(changes: dict[str, Any]) -> None:
    config = GPTConfig(**{**SMALL, **changes})
    parts = dict.fromkeys(parameter_count(config), 0)
    words = {"wte": "wte", "wpe": "wpe", "attn": "attention", "mlp": "mlp", "lm_head": "lm_head"}
    words["relative_attention_bias"] = "relative_bias"
    for name, size in counted(config).items():
        parts[next((part for word, part in words.items() if word in name), "norms")] += size
    assert parameter_count(config) == parts


@pytest.mark.parametrize("tied", [True, False])
def test_flops_against_a_counter(tied: bool) -> None:
    """The counter sees the products of the matrices only: no norms, biases or embeddings."""
    config = GPTConfig(**SMALL, bias=False, tie_embeddings=tied)
    net = GPT(config, NaiveAttention())
    x = torch.randint(64, (2, 32))
    with FlopCounterMode(display=False) as counter:
        net(x, targets=x).backward()
    norms = parameter_count(config)["norms"]
    expected = (flops_per_token(config) - 6 * norms) * x.numel()
    assert counter.get_total_flops() == expected


@pytest.mark.parametrize("kv_heads", [None, 2])
def test_flops_of_adapters_against_a_counter(kv_heads: int | None) -> None:
    """Frozen weights have no gradient, but pass on that of their input."""
    pytest.importorskip("peft")
    config = GPTConfig(**SMALL, bias=False, n_kv_head=kv_heads)
    net = GPT(config, NaiveAttention())
    assert adapter_count(net) is None
    add_adapters(net, Adapters(2, 4.0, list(TARGETS)), 0.0)
    x = torch.randint(64, (2, 32))
    with FlopCounterMode(display=False) as counter:
        net(x, targets=x).backward()
    norms = parameter_count(config)["norms"]
    expected = (flops_per_token(config, adapters=adapter_count(net)) - 4 * norms) * x.numel()
    assert counter.get_total_flops() == pytest.approx(expected, rel=0.005)


def test_flops_per_token_by_hand() -> None:
    config = GPTConfig(**GPT2)
    N = 124_439_808 + 47 * 768 - 1024 * 768
    assert flops_per_token(config) == 6 * N + 12 * 12 * 768 * 1024
    assert flops_per_token(config, seq_len=128) == 6 * N + 12 * 12 * 768 * 128


def test_attention_flops_and_bytes() -> None:
    assert attention_flops(2, 3, 5, 7, 11) == 4 * 2 * 3 * 5 * 7 * 11
    assert attention_flops(1, 1, 8, 8, 4, causal=True) == 512
    assert attention_flops(1, 1, 8, 8, 4, causal=True, backward=True) == 1280
    assert kv_cache_bytes(GPTConfig(**SMALL, n_kv_head=2), batch=3, tokens=10) == 2 * 2 * 3 * 2 * 16 * 10 * 2
    assert score_matrix_bytes(2, 3, 5, 7, bytes_per_value=4) == 840


@pytest.mark.parametrize(
    ("name", "peak"),
    [
        ("NVIDIA H200", 989e12),
        ("NVIDIA H100 80GB HBM3", 989e12),
        ("NVIDIA H100 PCIe", 756e12),
        ("NVIDIA A100-SXM4-80GB", 312e12),
        ("NVIDIA A100 80GB PCIe", 312e12),
        ("NVIDIA L4", 121e12),
        ("NVIDIA L40S", 362e12),
        ("NVIDIA GH200 480GB", 989e12),
        ("NVIDIA GH200 144G HBM3e", 989e12),
        ("NVIDIA GeForce RTX 5090", 209.5e12),
        ("NVIDIA GeForce RTX 4090", 165e12),
        ("NVIDIA L40", None),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", None),
        ("NVIDIA GeForce RTX 4090 D", None),
        ("NVIDIA GeForce RTX 3090 Ti", None),
        ("NVIDIA H200 NVL", None),
        ("NVIDIA H100 NVL", 835e12),
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", None),
        ("NVIDIA H800", 989e12),
        ("NVIDIA H800 PCIe", None),
        ("NVIDIA A100-PCIE-40GB", 312e12),
        ("NVIDIA A100-SXM4-40GB", 312e12),
        ("NVIDIA A800-SXM4-80GB", 312e12),
        ("NVIDIA A10G", 70e12),
        ("NVIDIA GeForce RTX 3090", 71e12),
        ("NVIDIA B200", 2250e12),
        ("NVIDIA GB200", None),
        ("Tesla T4", None),
        ("", None),
    ],
)
def test_peaks(name: str, peak: float | None) -> None:
    assert peak_bf16_flops(name) == peak


# 2 heads of 128 queries and keys, 64 elements of 2 bytes: q, k, v and out 32 KiB each, lse 1 KiB, S 128 KiB.
SIZE = AttentionSize(1, 2, 2, 128, 128, 64, causal=False)
MATRIX, TENSOR, LSE = 1 << 17, 1 << 15, 1 << 10
VAST, TINY = Gpu(l2_bytes=1 << 40, l1_bytes=1 << 40), Gpu(multiprocessors=1, l2_bytes=1, l1_bytes=1)


def test_compulsory_bytes() -> None:
    assert SIZE.compulsory_bytes == 4 * TENSOR + LSE
    grouped = AttentionSize(1, 2, 1, 4, 8, 16, causal=False)
    assert (grouped.q_bytes, grouped.k_bytes, grouped.lse_bytes) == (256, 256, 32)


def test_what_goes_round_misses_by_how_much_does_not_fit() -> None:
    assert missed(100, 100) == 0 == missed(99, 100)
    assert missed(200, 100) == pytest.approx(0.79681, abs=1e-5)  # 1 - exp(-2 * 0.79681) = 0.79681
    assert missed(1e6, 1) == pytest.approx(1)
    shares = [missed(walked, 100) for walked in range(100, 400, 10)]
    assert shares == sorted(shares)


def test_what_was_written_last_is_still_in_the_l2() -> None:
    assert kernel_traffic(300, 100, 7, Gpu(l2_bytes=200)) == Traffic(300, 50, 7)
    assert kernel_traffic(300, 100, 7, Gpu(l2_bytes=401)) == Traffic(300, 0, 7)
    assert kernel_traffic(0, 0, 0, Gpu()) == Traffic(0, 0, 0)
    assert Traffic(1, 2, 3) + Traffic(10, 20, 30) == Traffic(11, 22, 33)


def test_naive_reads_its_matrix_twice_from_dram_and_writes_it_twice() -> None:
    found = naive_traffic(SIZE, VAST, strip=8, softmax_blocks=4, output_blocks=4)
    assert (found.dram_read, found.dram_write) == (3 * TENSOR + 2 * MATRIX, 0)
    # 2 heads of 4 x 2 blocks, 96 rows of 128 bytes each; then V for each of 2 x 1 blocks of 16 strips
    assert found.l2 == 4 * MATRIX + LSE + TENSOR + 16 * 96 * 128 + 2 * 128 * 128


def test_naive_without_caches() -> None:
    found = naive_traffic(SIZE, TINY, strip=8, softmax_blocks=4, output_blocks=1)
    # K for both tiles of 64 queries; S three times in the softmax and once more; V once, for a wave a head
    assert found.dram_read == pytest.approx(TENSOR + 2 * TENSOR + 4 * MATRIX + TENSOR, abs=8)
    assert found.dram_write == pytest.approx(2 * MATRIX + LSE + TENSOR, abs=3)
    # an eighth of the strip: K for 16 tiles of 8 queries, V for eight waves
    thin = naive_traffic(SIZE, TINY, strip=1, softmax_blocks=4, output_blocks=1)
    assert thin.dram_read - found.dram_read == pytest.approx(14 * TENSOR + 7 * TENSOR, abs=8)


def test_naive_keeps_k_in_the_l2() -> None:
    """fp32: K of a head and 64 rows of S are 12 MiB at 16k tokens, and 96 MiB at 128k."""

    def reads(tokens: int) -> float:
        size = AttentionSize(1, 2, 2, tokens, tokens, 128, causal=True, value_bytes=4)
        return naive_traffic(size, Gpu(), 8, softmax_blocks=1, output_blocks=1 << 20).dram_read

    def least(tokens: int) -> int:
        return 3 * 2 * tokens * 128 * 4 + 2 * 2 * tokens**2 * 4

    assert reads(16384) == least(16384)
    again = 2047 * (2 * 131072 * 128 * 4) * missed(96 << 20, 50 << 20)
    assert reads(131072) == pytest.approx(least(131072) + again)


def test_naives_softmax_misses_whatever_is_more_than_the_l2() -> None:
    """1,024 rows at a time: 64 MiB at 16k keys, more than the 50 of L2, and 32 MiB at 8k."""

    def reads(tokens: int) -> float:
        size = AttentionSize(1, 1, 1, tokens, tokens, 128, causal=True, value_bytes=4)
        found = naive_traffic(size, Gpu(multiprocessors=128), 8, softmax_blocks=1024, output_blocks=1 << 20)
        return (found.dram_read - 3 * tokens * 128 * 4) / (4 * tokens**2)

    assert reads(8192) == 2
    # of the second and third walk, what the L1s keep is left out
    assert reads(16384) == pytest.approx(2 + 2 * missed(512 << 10, Gpu().l1_bytes))


def test_keys_walked() -> None:
    def walked(causal: bool, tq: int = 256, tk: int = 256) -> int:
        return keys_walked(AttentionSize(1, 1, 1, tq, tk, 64, causal), 128, 64)

    assert walked(False) == 2 * 256
    assert walked(True) == 128 + 256
    assert walked(True, 128, 200) == 200
    assert walked(True, 200, 300) == 256 + 300  # the first 128 queries see 228 keys, in tiles of 64
    assert walked(True, 256, 64) == 64  # the first 192 queries see none
    assert keys_walked(AttentionSize(1, 1, 1, 100, 100, 64, True), 1, 1) == 5050


def test_tiled_reads_k_and_v_once_from_dram_and_for_every_tile_from_l2() -> None:
    size = AttentionSize(1, 32, 32, 4096, 4096, 128, causal=False)
    tensor, lse = 32 * 4096 * 128 * 2, 32 * 4096 * 4
    found = tiled_traffic(size, Gpu(), 128, 64, blocks=264)
    assert found.dram_read == 3 * tensor
    assert found.l2 == 2 * tensor + lse + 32 * 2 * tensor
    share = (tensor + lse) / (4 * tensor + lse)
    assert found.dram_write == pytest.approx(tensor + lse - share * (50 << 20))


def test_tiled_with_keys_beyond_the_l2() -> None:
    """One head of 128 queries: 4 waves of 32 rows, three of them read K and V again."""
    size = AttentionSize(1, 1, 1, 128, 128, 64, causal=False)
    found = tiled_traffic(size, TINY, 16, 16, blocks=2)
    assert found.dram_read == pytest.approx(16384 * (1 + 2 * 4), abs=1)
    assert tiled_traffic(size, VAST, 16, 16, blocks=2).dram_read == 3 * 16384


def test_grouped_queries_share_keys() -> None:
    of = {kv: AttentionSize(1, 8, kv, 1024, 1024, 64, causal=True) for kv in (8, 2)}
    mha, gqa = (tiled_traffic(of[kv], Gpu(), 128, 64, 264) for kv in (8, 2))
    assert mha.dram_read - gqa.dram_read == 6 * 2 * 1024 * 64 * 2
    assert mha.l2 == gqa.l2


def test_fa1_carries_its_output_from_step_to_step() -> None:
    carried = 2 * 128 * (4 * 64 + 8)
    found = fa1_traffic(SIZE, VAST, 64, 32, blocks=132)
    assert (found.dram_read, found.dram_write) == (3 * TENSOR, 0)
    # four steps, and three times from one to the next
    assert found.l2 == 2 * TENSOR + 4 * TENSOR + 3 * 2 * carried + TENSOR + LSE
    found = fa1_traffic(SIZE, TINY, 64, 32, blocks=132)
    assert found.dram_read == pytest.approx(2 * TENSOR + 4 * TENSOR + 3 * carried, abs=8)
    assert found.dram_write == pytest.approx(3 * carried + TENSOR + LSE, abs=8)


def test_fa1_takes_the_queries_that_see_a_tile() -> None:
    full, causal = (
        fa1_traffic(AttentionSize(1, 1, 1, 256, 256, 64, causal), VAST, 64, 64, 132).l2
        for causal in (False, True)
    )
    # 64, 128 and 192 rows less in the second, third and fourth step
    assert full - causal == (64 + 128 + 192) * (128 + 2 * (4 * 64 + 8))


@pytest.mark.parametrize("name", GPUS)
def test_a_sheets_peak_is_the_one_that_mfu_is_against(name: str) -> None:
    written = name.replace("-40gb", "").upper().replace("PCIE", "PCIe")
    if name != "rtx-5090":  # no MFU
        assert GPUS[name].bf16_flops == pytest.approx(peak_bf16_flops(f"NVIDIA {written}"), rel=0.01)
