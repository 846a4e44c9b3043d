"""What trainer=ddp averages, in a process group of one; tests/test_distributed.py has several."""

from __future__ import annotations

from collections.abc import Iterator
from copy import deepcopy

import pytest
import torch
import torch.distributed as dist

from attention.base import Attention
from model.gpt import GPT, GPTConfig
from model.training.replicas import GradientMeans
from tests.grid import build

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.fixture
def group() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def gpt(attention: Attention, checkpointing: bool = False, width: int = 32, seq_len: int = 16) -> GPT:
    torch.manual_seed(0)
    config = GPTConfig(vocab_size=60, seq_len=seq_len, n_layer=2, n_head=2, n_embd=width)
    return GPT(config, attention, checkpointing)


def gradients(net: GPT, means: GradientMeans | None, device: str, bf16: bool) -> dict[str, torch.Tensor]:
    shape = 32, net.config.seq_len + 1
    ids = torch.randint(0, 60, shape, generator=torch.Generator().manual_seed(1)).to(device)
    with torch.autocast(device, torch.bfloat16, enabled=bf16):
        loss = net(ids[:, :-1], targets=ids[:, 1:])
    loss.backward()
    if means is not None:
        means.finish()
    return {name: p.grad.clone() for name, p in net.named_parameters() if p.grad is not None}


@pytest.mark.parametrize(
    ("compiled", "checkpointing", "bf16"),
    [
        (False, False, False),
        (False, True, True),
        pytest.param(True, False, False, marks=pytest.mark.long),
        pytest.param(True, False, True, marks=pytest.mark.long),
        pytest.param(True, True, True, marks=pytest.mark.long),
    ],
)
@pytest.mark.parametrize("device", DEVICES)
def test_gradients_are_those_of_one_device(
    device: str, compiled: bool, checkpointing: bool, bf16: bool, group: None
) -> None:
    """On a GPU of a size at which Inductor computes gradients of norms beside other sums."""
    size = (768, 256) if device == "cuda" else (32, 16)
    plain = gpt(build("standard"), checkpointing, *size).to(device)
    net = deepcopy(plain)
    means = GradientMeans(net, overlapped=True)
    if compiled:
        plain.compile(dynamic=False)
        net.compile(dynamic=False, fullgraph=not checkpointing)
    expected = gradients(plain, None, device, bf16)
    for _ in range(2):  # compiled, then from the cache
        net.zero_grad(set_to_none=True)
        got = gradients(net, means, device, bf16)
        assert got.keys() == expected.keys()
        for name, gradient in expected.items():
            near = 1e-2 if bf16 and compiled else 1e-5
            torch.testing.assert_close(
                got[name], gradient, rtol=near, atol=near * float(gradient.abs().max()), msg=name
            )
    assert not means.started


def test_blocks_are_averaged_in_the_backward_and_the_rest_after_it(
    group: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each element once; of what is not trained nothing."""
    net = gpt(build("naive"))
    net.transformer.h[0].attn.requires_grad_(False)
    sizes, finished = [], []
    average = GradientMeans._average
    monkeypatch.setattr(
        GradientMeans, "_average", lambda self, x: (sizes.append(x.numel()), average(self, x))[1]
    )
    means = GradientMeans(net, overlapped=True)
    finish = means.finish
    means.finish = lambda: (finished.append(len(sizes)), finish())
    gradients(net, means, "cpu", False)
    trained = [sum(p.numel() for p in block.parameters() if p.requires_grad) for block in net.transformer.h]
    assert finished == [2] and sizes[:2] == trained[::-1]
    assert sum(sizes) == sum(p.numel() for p in net.parameters() if p.requires_grad)


def test_without_overlap_all_are_averaged_after_the_last_micro_batch(group: None) -> None:
    net = gpt(build("naive"))
    expected = {name: 2 * gradient for name, gradient in gradients(deepcopy(net), None, "cpu", False).items()}
    means = GradientMeans(net, overlapped=False)
    gradients(net, None, "cpu", False)
    got = gradients(net, means, "cpu", False)
    torch.testing.assert_close(got, expected)


def test_a_gradient_that_autograd_copied_is_an_error(group: None) -> None:
    """Its copy may have been made before the average was there."""
    net = gpt(build("naive"))
    means = GradientMeans(net, overlapped=True)
    gradients(net, None, "cpu", False)
    weight = net.transformer.h[0].mlp.c_fc.weight
    weight.grad = weight.grad.clone()
    with pytest.raises(RuntimeError, match="copied gradients"):
        means.finish()
