"""What FSDP2 shards and gathers, in a process group of one; tests/test_distributed.py has several."""

from __future__ import annotations

from collections.abc import Iterator
from copy import deepcopy

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch._dynamo.testing import CompileCounter

from attention.naive import NaiveAttention
from model.costs import flops
from model.gpt import GPT, GPTConfig
from model.training.sharding import shard


@pytest.fixture
def mesh() -> Iterator[dist.DeviceMesh]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield dist.init_device_mesh("cpu", (1, 1), mesh_dim_names=("data_parallel", "tensor_parallel"))
    dist.destroy_process_group()


def losses_and_gradients(net: GPT, bf16: bool, sharded: bool) -> tuple[Tensor, dict[str, Tensor]]:
    """Of two micro-batches, of which only the last reduces."""
    ids = torch.randint(0, 60, (2, 2, 17), generator=torch.Generator().manual_seed(1))
    losses = []
    for i, micro in enumerate(ids):
        if sharded:
            net.set_requires_gradient_sync(i == 1)
        with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
            loss = net(micro[:, :-1], targets=micro[:, 1:])
        loss.backward()
        losses.append(loss.detach())
    full = (lambda x: x.full_tensor()) if sharded else (lambda x: x)
    return torch.stack(losses), {name: full(p.grad) for name, p in net.named_parameters()}


@pytest.mark.parametrize("at_once", [True, False])
@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("bf16", [False, True])
def test_a_sharded_step_is_the_step(
    bf16: bool, checkpointing: bool, at_once: bool, mesh: dist.DeviceMesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same bits, and what is gathered in 16 bits is what autocast would cast."""
    if not at_once:
        monkeypatch.setattr(flops, "WHOLE_BYTES", 0)
    torch.manual_seed(0)
    config = GPTConfig(vocab_size=60, seq_len=16, n_layer=2, n_head=2, n_embd=16)
    plain = GPT(config, NaiveAttention("naive"), checkpointing=checkpointing)
    sharded = deepcopy(plain)
    shard(sharded, mesh, bf16)
    seen: dict[str, torch.dtype] = {}
    for name, module in sharded.named_modules():
        if getattr(module, "weight", None) is not None:
            module.register_forward_pre_hook(lambda m, _, name=name: seen.update({name: m.weight.dtype}))
    loss, gradients = losses_and_gradients(sharded, bf16, True)
    expected_loss, expected = losses_and_gradients(plain, bf16, False)
    assert torch.equal(loss, expected_loss)
    for name, gradient in expected.items():
        assert gradients[name].dtype == torch.float32
        assert torch.equal(gradients[name], gradient), name
    gathered = {name.rpartition(".")[2] for name, dtype in seen.items() if dtype == torch.bfloat16}
    assert gathered == ({"c_attn", "c_proj", "c_fc"} if bf16 else set())
    assert {"ln_1", "ln_2", "ln_f", "wte"} <= {name.rpartition(".")[2] for name in seen} - gathered


def test_compiled_what_is_gathered_at_once_is_one_graph(mesh: dist.DeviceMesh) -> None:
    net = GPT(GPTConfig(vocab_size=60, seq_len=16, n_layer=2, n_head=2, n_embd=16), NaiveAttention("naive"))
    shard(net, mesh, True)
    counter = CompileCounter()
    net.compile(backend=counter, dynamic=False)
    losses_and_gradients(net, True, True)
    assert counter.frame_count == 1
