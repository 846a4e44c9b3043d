"""The model under torch.compile: what is cached, and blocks that share their code."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch._functorch._aot_autograd.autograd_cache import check_cacheable

from attention.base import Attention
from attention.registry import build
from model.gpt import GPT, GPTConfig

pytestmark = pytest.mark.sampled(3)


def model(attention: Attention, n_layer: int = 3, checkpointing: bool = False, **options) -> GPT:
    torch.manual_seed(0)
    config = GPTConfig(vocab_size=50, seq_len=16, n_layer=n_layer, n_head=2, n_embd=32, **options)
    return GPT(config, attention, checkpointing=checkpointing)


@pytest.mark.parametrize("attention", ["tiled", "triton", "sdpa"])
def test_what_is_traced_can_be_cached(attention: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing in the graph keeps AOTAutograd from its cache, as a torch.autograd.Function would, with the
    passes of a GPU too: a second start takes seconds less."""
    monkeypatch.setattr("model.gpt.fuses", lambda x, hidden: torch.is_grad_enabled())
    monkeypatch.setattr("model.gpt.pays", lambda x, out_features: torch.is_grad_enabled())
    seen = []

    def look(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]):
        check_cacheable(graph)
        seen.append({str(node.target) for node in graph.graph.nodes if node.op == "call_function"})
        raise SystemExit  # the kernels need a GPU

    for options in ({"loss_chunk": 16}, {"position": "rope", "qk_norm": True, "norm": "rmsnorm"}):
        torch._dynamo.reset()
        net = model(build(attention), dropout=0.1, attn_dropout=0.1, **options).train()
        net.compile(dynamic=False, fullgraph=True, backend=look)
        ids = torch.arange(32).view(2, 16)
        with pytest.raises(SystemExit):
            net(ids, targets=ids)
    assert any("gelu_mlp" in name for name in seen[1])
    assert any("tilegpt.linear" in name for name in seen[1])
    assert any("summed_loss" in name for name in seen[0])


@pytest.mark.parametrize("checkpointing", [False, True])
def test_blocks_are_compiled_once_and_compute_the_same(
    checkpointing: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids = torch.arange(48).view(3, 16)

    def run(net: GPT) -> tuple[torch.Tensor, ...]:
        loss = net(ids, targets=ids)
        return loss, *torch.autograd.grad(loss, list(net.parameters()))

    graphs = []

    def traced(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]):
        graphs.append(graph)
        return graph.forward

    expected = run(model(build("naive"), 4, checkpointing))
    torch._dynamo.reset()
    net = model(build("naive"), 4, checkpointing)
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=traced))
    net.compile_blocks(dynamic=False)
    torch.testing.assert_close(run(net), expected)
    assert len(graphs) == 3  # the embedding, one block, the head
