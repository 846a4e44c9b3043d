"""What one of several devices holds, predicted: against what a rank of a process group allocates in a step.
The group is torch's fake one, whose collectives move nothing: sizes are right, values are of no use."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from attention.registry import shared_instance
from attention.tiled import TiledAttention
from model.context_parallel import ContextParallel
from model.costs import flops
from model.costs.memory import attention_kept, memory_snapshots, peak, saved_by_layer
from model.costs.roofline import attention_work, step_work
from model.costs.run import Run, shared_by
from model.gpt import GPT, GPTConfig
from model.training.sharding import shard
from scripts.measure.instruments.allocations import Ledger, recorder_of, storages

pytestmark = pytest.mark.sampled(5)

# mostly parameters, mostly activations
WIDE = GPTConfig(vocab_size=512, seq_len=16, n_layer=6, n_head=4, n_embd=256, bias=False)
LONG = GPTConfig(vocab_size=64, seq_len=512, n_layer=3, n_head=4, n_embd=64, bias=False, position="rope")
DDP = "model.training.replicas.ReplicaStrategy"
FSDP2 = "model.training.sharding.FSDP2Strategy"


@contextmanager
def group(ranks: int) -> Iterator[None]:
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)
    try:
        yield
    finally:
        dist.destroy_process_group()


def allocated(run: Run) -> int:
    """The most bytes in a step of this run, of which two micro-batches are taken where it accumulates."""
    config, narrow = run.config, run.value_bytes == 2
    with group(run.shards):
        names = ("data_parallel", "tensor_parallel")
        sizes = (run.shards // run.sequence_ranks, run.sequence_ranks)
        net = GPT(config, TiledAttention(), checkpointing=run.checkpointing).train()
        shard(net, dist.init_device_mesh("cpu", sizes, mesh_dim_names=names), narrow)
        optimizer = torch.optim.AdamW(net.parameters(), fused=True)
        ids = torch.randint(config.vocab_size, (run.batch, config.seq_len // run.sequence_ranks))

        def step() -> None:
            for last in [False, True] if run.accumulates else [True]:
                net.set_requires_gradient_sync(last)
                with torch.autocast("cpu", torch.bfloat16, enabled=narrow):
                    loss = net(ids, targets=ids)
                loss.backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)

        step()
        recorder = recorder_of(torch.device("cpu"))
        with recorder:
            step()
        state = [x for each in optimizer.state.values() for x in each.values()]
        local = [x.to_local() if hasattr(x, "to_local") else x for x in (*net.parameters(), *state)]
        there = sum(storages([*local, *net.buffers()]).values()) + 2 * ids.nbytes  # and the targets
        return Ledger(recorder.events(), {"other": there}).peak


@pytest.mark.parametrize("at_once", [True, False], ids=["whole", "blocks"])
@pytest.mark.parametrize("bytes_", [4, 2], ids=["fp32", "bf16"])
@pytest.mark.parametrize(
    ("config", "how"),
    [
        (WIDE, {"shards": 2}),
        (WIDE, {"shards": 8}),
        (WIDE, {"shards": 8, "accumulates": True}),  # the whole gradients are on every device
        (LONG, {"shards": 4, "sequence_ranks": 2}),
        (LONG, {"shards": 4, "sequence_ranks": 4, "checkpointing": True}),
    ],
    ids=str,
)
def test_a_device_of_several_holds_what_is_predicted(
    config: GPTConfig, how: dict[str, Any], bytes_: int, at_once: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not at_once:
        monkeypatch.setattr(flops, "WHOLE_BYTES", 0)
    run = Run(config, 2, shared_instance("tiled"), bytes_, "cpu", **how)
    assert peak(run).peak == pytest.approx(allocated(run), rel=0.05)
    alone = replace(run, shards=1, sequence_ranks=1)
    assert peak(alone).peak > (1.1 if at_once else 1.15) * peak(run).peak


@pytest.mark.parametrize("position", ["rope", "learned"])
def test_what_a_block_keeps_of_shared_sequences_is_what_autograd_saves(position: str) -> None:
    """K and V of whole sequences among it."""

    def saved(layers: int) -> int:
        net = GPT(replace(config, n_layer=layers), TiledAttention()).train()
        net.share_sequences(ContextParallel(dist.group.WORLD))
        parameters, found = {p.untyped_storage().data_ptr() for p in net.parameters()}, {}

        def pack(x: torch.Tensor) -> torch.Tensor:
            found[x.untyped_storage().data_ptr()] = x.untyped_storage()
            return x

        ids = torch.randint(64, (2, config.seq_len // 4))
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
            net(ids, targets=ids)
        return sum(storage.nbytes() for address, storage in found.items() if address not in parameters)

    config = replace(LONG, position=position, n_kv_head=2)
    run = Run(replace(config, n_layer=1), 2, shared_instance("tiled"), 4, "cpu", sequence_ranks=4)
    with group(4):
        kept = saved(2) - saved(1)
    assert kept == pytest.approx(sum(saved_by_layer(run).values()) + attention_kept(run), rel=0.005)
    assert run.whole_kv_bytes == 2 * 2 * 512 * 2 * 16 * 4


def test_devices_share_the_work_of_a_sequence_equally() -> None:
    run = Run(LONG, 2, shared_instance("tiled"), 2, shards=4, sequence_ranks=4)
    alone = replace(run, shards=1, sequence_ranks=1)
    assert 4 * attention_work(run)[1].flops == attention_work(alone)[1].flops
    assert 4 * step_work(run).flops == pytest.approx(step_work(alone).flops)
    assert step_work(run).bytes < step_work(alone).bytes


@pytest.mark.parametrize(
    ("devices", "nodes", "strategy", "one_graph", "expected"),
    [
        (1, 1, "auto", False, (1, 1, False)),
        (4, 1, {"_target_": DDP}, False, (1, 1, True)),  # in DDP's buckets from the first step on
        (2, 1, {"_target_": DDP}, True, (1, 1, False)),  # which a model of one graph has not
        (2, 1, {"_target_": DDP, "bucket_cap_mb": 50}, True, (1, 1, True)),
        ("0,2", 1, "auto", True, (1, 1, True)),
        (8, 2, {"_target_": FSDP2}, True, (16, 1, False)),
        ([0, 1], 1, {"_target_": FSDP2, "context_parallel": "all"}, True, (2, 2, True)),
        ("4", 1, {"_target_": FSDP2, "context_parallel": 2}, False, (4, 2, False)),
    ],
)
def test_what_devices_share_is_read_from_the_config(
    devices: Any, nodes: int, strategy: Any, one_graph: bool, expected: tuple[int, int, bool]
) -> None:
    """256 tokens a step, of which a micro-batch has 128 on each device, or group that shares sequences."""
    trainer = {"devices": devices, "num_nodes": nodes, "strategy": strategy}
    step = {1: 128, 2: 256, 4: 256}.get(expected[0], 2048)
    assert tuple(shared_by(trainer, step, 128, one_graph).values()) == expected


def test_ddp_has_all_gradients_at_any_moment() -> None:
    run = Run(
        LONG,
        2,
        shared_instance("tiled"),
        **shared_by({"devices": 2, "num_nodes": 1, "strategy": "auto"}, None, 1, False),
    )
    assert len({snapshot.gradients for snapshot in memory_snapshots(run)}) == 1
