"""Parameters and FLOPs: formulas against counts."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from attention.naive import NaiveAttention
from model.flops import (
    attention_flops,
    flops_per_token,
    kv_cache_bytes,
    parameter_count,
    peak_bf16_flops,
    score_matrix_bytes,
)
from model.gpt import GPT, GPTConfig

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
        {"position": "none", "tie_embeddings": False, "vocab_size": 65},
        {"qk_norm": True, "norm": "rmsnorm", "bias": False, "n_layer": 3, "n_embd": 72},
    ],
)
def test_parameters_by_part(changes: dict[str, Any]) -> None:
    config = GPTConfig(**{**SMALL, **changes})
    parts = dict.fromkeys(parameter_count(config), 0)
    words = {"wte": "wte", "wpe": "wpe", "attn": "attention", "mlp": "mlp", "lm_head": "lm_head"}
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
        ("NVIDIA GeForce RTX 4090", 165e12),
        ("NVIDIA L40", None),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", None),
        ("Tesla T4", None),
        ("", None),
    ],
)
def test_peaks(name: str, peak: float | None) -> None:
    assert peak_bf16_flops(name) == peak
