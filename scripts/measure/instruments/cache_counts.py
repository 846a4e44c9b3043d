"""What a KV cache saves and takes, counted rather than timed: keys and values computed, bytes allocated."""

from __future__ import annotations

from typing import Any

import torch

from attention.naive import NaiveAttention
from model.costs.flops import kv_cache_bytes
from model.generation.generate import generate
from model.gpt import GPT, GPTConfig
from model.kv_cache import KVCache
from scripts.measure.instruments.timing import clean_up
from scripts.measure.studies import Point


def counted(point: Point) -> dict[str, Any]:
    """Keys and values computed by each layer of a small model; on the CPU, where no CUDA graph replays what a
    hook would have to see."""
    new = point["new_tokens"]
    config = GPTConfig(vocab_size=64, seq_len=point["prompt"] + new, n_layer=2, n_head=2, n_embd=16)
    net = GPT(config, NaiveAttention())
    seen = [0] * config.n_layer

    def count(layer: int, out: Any) -> None:
        seen[layer] += out.shape[0] * out.shape[1]  # (B, T, C + 2 Hkv D): a key and a value for each token

    for i, block in enumerate(net.transformer.h):
        block.attn.c_attn.register_forward_hook(lambda _, __, out, i=i: count(i, out))
    generate(net, [[1] * point["prompt"]], new, temperature=0.0, kv_cache=point["kv_cache"])
    last = point["prompt"] + new - 1  # the token chosen last is never fed
    formula = last if point["kv_cache"] else sum(range(point["prompt"], last + 1))
    assert len(set(seen)) == 1, f"layers differ: {seen}"
    return {"status": "ok", "kv_computations": seen[0], "formula": formula}


def cache_bytes(point: Point) -> dict[str, Any]:
    """What a cache of the shape takes beside the formula of costs/flops.py: on a GPU what the allocator was
    asked for, whose blocks may be up to 1 MiB larger."""
    layers, heads, dim = point["n_layer"], point["heads"], point["head_dim"]
    device = "cuda" if torch.cuda.is_available() else "cpu"
    before = requested() if device == "cuda" else 0
    shape = (layers, point["batch"], point["kv_heads"], point["seq_len"], dim)
    cache = KVCache(*shape, attention=NaiveAttention(), dtype=torch.bfloat16, device=device)
    stored = sum(x.untyped_storage().nbytes() for x in (*cache.k, *cache.v))
    allocated = requested() - before if device == "cuda" else stored
    del cache
    clean_up()
    config = GPTConfig(64, n_layer=layers, n_head=heads, n_embd=heads * dim, n_kv_head=point["kv_heads"])
    formula = kv_cache_bytes(config, point["batch"], point["seq_len"])
    return {"status": "ok", "allocated_bytes": allocated, "formula_bytes": formula}


def requested() -> int:
    """Bytes that live tensors of the current GPU asked for."""
    return torch.cuda.memory_stats().get("requested_bytes.all.current", 0)
