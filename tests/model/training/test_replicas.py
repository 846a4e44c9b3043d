"""What trainer=ddp wraps and averages; tests/test_distributed.py trains by it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.strategies import DDPStrategy

from model.training.replicas import ReplicaStrategy


@pytest.fixture
def group() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def strategy(compiled: bool | str) -> tuple[ReplicaStrategy, list[str]]:
    """Of a linear layer, and whether Lightning has wrapped it."""
    made, seen = ReplicaStrategy(parallel_devices=[torch.device("cpu")]), []
    made.model = torch.nn.Linear(2, 3)
    made._lightning_module = SimpleNamespace(compile_net=compiled, state_dict=made.model.state_dict)

    def wrap(self: Any) -> None:
        seen.append("wrapped")
        self.model = torch.nn.parallel.DistributedDataParallel(self.model)

    with mock.patch.object(DDPStrategy, "configure_ddp", wrap):
        made.configure_ddp()
    return made, seen


@pytest.mark.parametrize(("compiled", "wrapped"), [(True, False), (False, True), ("blocks", True)])
def test_a_model_of_one_graph_alone_is_not_wrapped(
    compiled: bool | str, wrapped: bool, group: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is wrapped has averaged its gradients when the backward ends."""
    sent, averaged = [], []
    monkeypatch.setattr(dist, "broadcast", lambda tensor, rank: sent.append((tensor.shape, rank)))
    monkeypatch.setattr(dist, "all_reduce_coalesced", averaged.append)
    made, seen = strategy(compiled)
    gradients = [torch.tensor([2.0, 4.0]), torch.tensor([[6.0]])]
    made.average(gradients)
    assert seen == ["wrapped"] * wrapped and averaged == ([] if wrapped else [gradients])
    assert sent == ([] if wrapped else [((3, 2), 0), ((3,), 0)])
    assert isinstance(made.block_backward_sync(), nullcontext) is not wrapped


def test_gloo_divides_by_the_ranks(group: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "get_world_size", lambda: 4)
    gradients = [torch.tensor([2.0, 4.0]), torch.tensor([[6.0]])]
    strategy(True)[0].average(gradients)
    assert gradients[0].tolist() == [0.5, 1.0] and gradients[1].item() == 1.5
