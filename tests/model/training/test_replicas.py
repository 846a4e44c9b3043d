"""What trainer=ddp wraps and averages; tests/test_distributed.py trains by it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.strategies import DDPStrategy
from torch.nn.parallel import DistributedDataParallel

from model.training.replicas import ReplicaStrategy


class Wrapped(DistributedDataParallel):
    def __init__(self, *_: Any):
        """Without a process group."""


class Ranks:
    """`torch.distributed` of `size` ranks, which hold the same: what it is asked for is kept."""

    ReduceOp = dist.ReduceOp

    def __init__(self, backend: str):
        self.backend, self.sent, self.summed, self.averaged = backend, [], [], []

    def get_backend(self) -> str:
        return self.backend

    def broadcast(self, tensor: torch.Tensor, rank: int) -> None:
        self.sent.append((tuple(tensor.shape), rank))

    def all_reduce(self, tensor: torch.Tensor) -> None:
        self.summed.append(tensor)
        tensor *= 4

    def all_reduce_coalesced(self, tensors: list[torch.Tensor], op: Any) -> None:
        self.averaged.append((tensors, op))


def strategy(
    compiled: bool | str, monkeypatch: pytest.MonkeyPatch, ranks: Ranks, size: int = 4, **given: Any
) -> ReplicaStrategy:
    """Configured, of a linear layer whose weight is frozen."""
    made, net = ReplicaStrategy(gradient_as_bucket_view=True, **given), torch.nn.Linear(2, 3)
    net.weight.requires_grad_(False)
    net.compile_net = compiled
    made.model = made._lightning_module = net
    monkeypatch.setattr(ReplicaStrategy, "world_size", size)
    monkeypatch.setattr("model.training.replicas.dist", ranks)
    monkeypatch.setattr(DDPStrategy, "configure_ddp", lambda self: setattr(self, "model", Wrapped()))
    made.configure_ddp()
    return made


@pytest.mark.parametrize(
    ("compiled", "given", "wrapped"),
    [
        (True, {}, False),
        (False, {}, True),
        ("blocks", {}, True),
        (True, {"bucket_cap_mb": 50}, True),
        (True, {"ddp_comm_hook": print}, True),
    ],
)
def test_a_model_of_one_graph_alone_is_not_wrapped(
    compiled: bool | str, given: dict[str, Any], wrapped: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Unless an argument says how; what is wrapped has averaged its gradients when the backward ends."""
    ranks, gradients = Ranks("nccl"), [torch.ones(2), torch.ones(1, 1)]
    made = strategy(compiled, monkeypatch, ranks, **given)
    made.average(gradients)
    assert isinstance(made.model, Wrapped) is wrapped
    assert ranks.sent == ([] if wrapped else [((3, 2), 0), ((3,), 0)])  # what is frozen too
    assert ranks.averaged == ([] if wrapped else [(gradients, dist.ReduceOp.AVG)])


def test_gloo_sums_and_the_ranks_divide(monkeypatch: pytest.MonkeyPatch) -> None:
    gradients = [torch.tensor([2.0, 4.0]), torch.tensor([[6.0]])]
    strategy(True, monkeypatch, Ranks("gloo")).average(gradients)
    assert gradients[0].tolist() == [2.0, 4.0] and gradients[1].item() == 6.0  # the mean of equal ones


def test_one_rank_asks_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = Ranks("nccl")
    strategy(True, monkeypatch, ranks, size=1).average([torch.ones(2)])
    assert not (ranks.sent or ranks.averaged or ranks.summed)


def test_what_is_not_wrapped_has_nothing_to_hold_back(monkeypatch: pytest.MonkeyPatch) -> None:
    with strategy(True, monkeypatch, Ranks("nccl")).block_backward_sync():
        pass  # as LitGPT does for each micro-batch but the last
