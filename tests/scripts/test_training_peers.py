"""Others' GPTs beside ours: what is built, what is measured, what is refused."""

from __future__ import annotations

import itertools
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from model.config import GPTConfig
from scripts.measure.instruments import training_peers
from scripts.measure.instruments.kernels import PLAIN, family
from scripts.measure.instruments.training_meter import Laps, rated

# nanoGPT's interface: the least of a model that its name promises.
MODEL = """
from dataclasses import dataclass
import torch
from torch import nn

@dataclass
class GPTConfig:
    block_size: int
    vocab_size: int
    n_layer: int
    n_head: int
    n_embd: int
    dropout: float
    bias: bool

class GPT(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.wte = nn.Embedding(config.vocab_size, config.n_embd)
        assert (config.block_size, config.dropout, config.bias) == (16, 0.0, True)

    def forward(self, x, y):
        assert x.shape == y.shape == (4, 16) and x.max() < 60
        logits = self.wte(x) @ self.wte.weight.T
        return logits, nn.functional.cross_entropy(logits.flatten(0, 1), y.flatten())
"""
CONFIG = GPTConfig(vocab_size=60, seq_len=16, n_layer=1, n_head=2, n_embd=32)


pytestmark = pytest.mark.usefixtures("on_a_cpu")


@pytest.fixture
def nanogpt(tmp_path: Path) -> str:
    (tmp_path / "model.py").write_text(MODEL)
    return f"nanogpt={tmp_path / 'model.py'}"


def test_a_step_is_made_of_its_micro_batches(nanogpt):
    peer, path = training_peers.chosen(nanogpt)
    torch.manual_seed(1)
    model = peer.build(CONFIG, path)
    weight = model.wte.weight
    assert weight.shape == (64, 32)  # the vocabulary is padded to a multiple of 64
    seen, before = [], weight.detach().clone()
    weight.register_hook(lambda grad: seen.append(grad.norm().item()))
    step = training_peers.stepper(peer, model, itertools.cycle(torch.randint(60, (16, 2, 3, 4, 16))))
    first = step().item()
    assert len(seen) == 3 and weight.grad is None and not torch.equal(weight, before)
    assert first > 4.0  # the logarithm of 60: nothing is learnt yet
    losses = [step().item() for _ in range(15)]
    assert step().item() < first and len(losses) == 15  # the first batch again


def test_a_row_of_nanogpt(nanogpt, monkeypatch):
    result = training_peers.measure(nanogpt, CONFIG, 4, 128, Laps(1, 3, 0.0))
    assert (result["status"], result["n"], result["kernels_from"]) == ("ok", 3, "a whole training step")
    assert result["tokens_per_s"] == pytest.approx(128e3 / result["ms_median"]) and result["mfu"] is None
    assert result["peak_mib"] >= 0 and result["loss"]["first"] > 4
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.get_device_name", lambda: "NVIDIA H200")
    gpt2 = GPTConfig(vocab_size=50304, seq_len=1024, bias=False)
    flops = 6 * (50304 * 768 + 12 * 12 * 768**2 + 25 * 768) + 12 * 12 * 768 * 1024  # 6 N + 12 L C T
    found = rated(gpt2, 65536, {"ms_median": 100.0})
    assert found == {"tokens_per_s": 655360.0, "mfu": pytest.approx(flops * 655360 / 989e12)}


@pytest.mark.parametrize(
    ("peer", "change", "words"),
    [
        ("megatron", {}, ["megatron", "nanogpt", "transformers_sdpa"]),
        ("nanogpt", {}, ["nanogpt=path/to/model.py"]),
        ("transformers_sdpa=x.py", {}, ["it takes no path"]),
        ("nanogpt", {"position": "rope"}, ["model.position=rope", "nanoGPT is GPT-2", "learned"]),
        ("transformers_sdpa", {"causal": False}, ["model.causal=false"]),
        ("transformers_sdpa", {"bias": False}, ["model.bias=false", "model.bias=true"]),
    ],
    ids=str,
)
def test_mistakes_are_named(nanogpt, peer, change, words):
    peer = nanogpt if peer == "nanogpt" and change else peer
    with pytest.raises(ValueError) as error:
        training_peers.measure(peer, replace(CONFIG, **change), 4, 64, Laps(1, 1, 0.0))
    assert all(word in str(error.value) for word in words), error.value


LLAMA = replace(CONFIG, n_head=4, n_kv_head=2, position="rope", norm="rmsnorm", mlp="swiglu", bias=False)


@pytest.mark.parametrize("config", [CONFIG, LLAMA], ids=["gpt2", "llama"])
def test_transformers_trains_alike_by_its_attentions_and_ours(config):
    pytest.importorskip("transformers")
    found, first = {}, []
    for name in ("transformers_eager", "transformers_sdpa", "transformers_tilegpt"):
        torch.manual_seed(0)
        found[name] = result = training_peers.measure(name, config, 4, 64, Laps(1, 3, 0.0))
        assert result["status"] == "ok" and result["kernels_from"] == "a whole training step"
        first.append((result["loss"]["first"], result["loss"]["last"]))
    assert first[1] == pytest.approx(first[0], abs=1e-5) and first[2] == pytest.approx(first[0], abs=1e-5)
    assert "aten::bmm" in found["transformers_eager"]["kernels"]
    peer, path = training_peers.chosen("transformers_tilegpt")
    model = peer.build(config, path)
    assert model.config._attn_implementation == "tilegpt-auto" and not peer.compiled
    assert model.config.vocab_size == 64 and not model.config.use_cache  # the vocabulary is padded as ours


def test_what_is_not_installed_is_unsupported(monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    result = training_peers.measure("transformers_sdpa", CONFIG, 4, 64, Laps(1, 1, 0.0))
    assert result["status"] == "unsupported" and "transformers" in result["reason"]


@pytest.mark.gpu
def test_transformers_on_a_gpu():
    """Eager attention runs matrix products, SDPA a fused kernel; both in bf16."""
    pytest.importorskip("transformers")
    config = replace(CONFIG, vocab_size=512, seq_len=128, n_embd=128)
    found = {
        name: training_peers.measure(name, config, 4, 1024, Laps(1, 3, 0.0))
        for name in ("transformers_eager", "transformers_sdpa")
    }
    families = {name: set(map(family, result["kernels"])) for name, result in found.items()}
    assert families["transformers_eager"] == {PLAIN} != families["transformers_sdpa"]
    for result in found.values():
        assert result["status"] == "ok" and result["peak_of"] == "allocated on the GPU"
        assert result["tokens_per_s"] == pytest.approx(1024e3 / result["ms_median"])
