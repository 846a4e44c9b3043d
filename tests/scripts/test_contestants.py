"""What is captured lives as long as the function that replays it."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch

from attention import registry
from attention.sdpa import SDPAAttention
from model.gpt import GPT, GPTConfig
from scripts.measure.instruments import layer_times, whole_model
from scripts.measure.instruments.contestants import captured
from scripts.measure.instruments.layer_parts import Layer, layer_parts
from tests.scripts.graphs import fake_graphs

TOKENS = list(range(1, 10))
LIKE = {"device": "cpu", "dtype": torch.float32}


@pytest.fixture(autouse=True)
def graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_graphs(monkeypatch)


def product() -> Callable[[], None]:
    """A call that alone holds what it reads."""
    x, out = torch.randn(4, 4), torch.empty(4, 4)
    return lambda: torch.mm(x, x, out=out)


def test_a_graph_that_holds_addresses_alone_reads_what_is_freed() -> None:
    """What the fake is for: without whoever holds the tensors a replay fails."""
    call, graph = product(), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    graph.replay()
    del call
    with pytest.raises(AssertionError, match="2 of 2 tensors that the graph reads are freed"):
        graph.replay()


def small_gpt() -> GPT:
    config = GPTConfig(layer_times.VOCABULARY, seq_len=32, n_layer=2, n_head=2, n_embd=16)
    return GPT(config, registry.build("standard")).eval()


@torch.inference_mode()
def uncached() -> Callable[[Any], Any]:
    return captured(whole_model.Uncached(small_gpt(), TOKENS)._step)


def of_measuring() -> layer_times.Measuring:
    """Without its ceilings, and as if on a GPU of so small an L2 that two sets of operands are enough."""
    measuring = object.__new__(layer_times.Measuring)
    measuring.device, measuring.cuda, measuring.l2, measuring.like = "cpu", True, 1, LIKE
    measuring.fused = {"sdpa": SDPAAttention()}
    return measuring


POINT = {"implementation": "sdpa", "batch": 2, "seq_len": 8, "kv_len": 8}


@torch.inference_mode()
def prefill() -> Callable[[Any], Any]:
    return captured(of_measuring().prefill(small_gpt(), POINT))


@torch.inference_mode()
def decode() -> Callable[[Any], Any]:
    return captured(of_measuring().decode(small_gpt(), POINT | {"seq_len": 1}))


def parts() -> Callable[[Any], Any]:
    like = LIKE | {"generator": torch.Generator().manual_seed(0)}
    runs = []
    for part in layer_parts(Layer(2, 8, 8, 32, 4), {"sdpa": SDPAAttention()}):
        contestant, _, cold = of_measuring().contestant(part, 4 * part.elements, like)
        assert contestant.calls == 2 and cold
        runs.append(contestant.run)
    return lambda _: [run(None) for run in runs]


@pytest.mark.parametrize("made", [lambda: captured(product()), uncached, prefill, decode, parts])
def test_what_is_captured_stays_alive(made: Callable[[], Callable[[Any], Any]]) -> None:
    run = made()
    gc.collect()
    run(None)
