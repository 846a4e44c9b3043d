"""Two processes are one: the same numbers from the same global batch, and checkpoints that move between
them."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest
import torch

from model.training.checkpoint import read_checkpoint
from tests.running import finish, rows, start, start_nodes, train_here

# 256 tokens a step: 2 micro-batches of 8 rows on one device, or of 4 rows on each of two.
STEP = ("tokens_per_step=256", "schedule=constant", "schedule.warmup_steps=5", "optim.lr=3e-3")
ONE = ("data.batch_size=8",)
CHUNKS = "model.loss_chunk=48"  # the loss in chunks, of which the last is shorter: the same numbers too
STEPS = 30
BAD = 14  # the step that POISON makes a NaN in
POISON = """
import train
from model.costs import flops
from model.training.lit_gpt import LitGPT
flops.WHOLE_BYTES = 0
update = LitGPT._update
def poisoned(self):
    if self.global_step == 14 - 1:
        next(iter(self.net.parameters())).grad.mul_(float("nan"))
    return update(self)
LitGPT._update = poisoned
train.main()
"""

# SIGTERM to one rank alone, the one that says nothing
ASKED = """
import os, signal
import train
from model.training.lit_gpt import LitGPT
step = LitGPT.STEP
def asked(self, batch, batch_idx):
    if self.global_step == 10 and self.global_rank == 1:
        os.kill(os.getpid(), signal.SIGTERM)
    return step(self, batch, batch_idx)
LitGPT.STEP = asked
train.main()
"""


def two(strategy: str) -> tuple[str, ...]:
    return (f"trainer={strategy}", "trainer.accelerator=cpu", "trainer.devices=2", "data.batch_size=4")


def limits(steps: int) -> tuple[str, ...]:
    return (f"trainer.max_steps={steps}", "trainer.val_check_interval=10")


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> dict[int, dict[str, str]]:
    folder = tmp_path_factory.mktemp("one")
    assert train_here(folder, "name=one", *STEP, *ONE, *limits(STEPS)).code == 0
    return rows(folder / "runs" / "one")


def assert_same(table: dict, reference: dict, steps: range) -> None:
    for step in steps:
        assert table[step].keys() == reference[step].keys(), step
        for key, value in reference[step].items():
            near = {"rel": 1e-3} if key == "train/grad_norm" else {"abs": 1e-5}
            assert float(table[step][key]) == pytest.approx(float(value), **near), (step, key)


@pytest.mark.parametrize("one_graph", [True, pytest.param(False, marks=pytest.mark.long)])
def test_ddp_is_one_process_stops_by_a_signal_and_goes_on_in_one(
    one_graph: bool, tmp_path: Path, reference: dict, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the model is one graph, which it is here without compiling it."""
    monkeypatch.setenv("TORCHDYNAMO_DISABLE", "1")
    process = start(
        tmp_path, "name=a", *STEP, *two("ddp"), *limits(3000), CHUNKS, f"compile={str(one_graph).lower()}"
    )
    metrics = tmp_path / "runs" / "a" / "metrics.csv"
    while process.poll() is None and not (metrics.exists() and "\n8," in metrics.read_text()):
        time.sleep(0.01)
    os.kill(process.pid, signal.SIGTERM)
    result = finish(process)
    assert result.code == 143, result.err
    assert result.out.count("machine    CPU") == 1  # one rank speaks
    stopped = max(rows(tmp_path / "runs" / "a"))
    assert f"Stopped at step {stopped}, saved." in result.out
    assert_same(rows(tmp_path / "runs" / "a"), reference, range(1, min(stopped, STEPS)))
    saved = read_checkpoint(tmp_path / "runs" / "a" / "checkpoints" / f"step-{stopped:08d}.ckpt")
    assert saved["TokenDataModule"]["consumed"] == 16 * stopped
    if stopped < STEPS:
        result = train_here(
            tmp_path, "ckpt=a", "trainer=default", "trainer.accelerator=cpu", *limits(STEPS), *ONE,
            "compile=false", tiny=False,
        )  # fmt: skip
        assert result.code == 0, result.err
        assert_same(rows(tmp_path / "runs" / "a"), reference, range(STEPS + 1))


@pytest.mark.long
@pytest.mark.parametrize(("step", "stopped"), [("validation_step", 10), ("training_step", 11)])
def test_all_ranks_stop_by_a_signal_to_one(step: str, stopped: int, tmp_path: Path) -> None:
    script = tmp_path / "asked.py"
    script.write_text(ASKED.replace("STEP", step))
    result = finish(start(tmp_path, "name=a", *STEP, *two("ddp"), *limits(30), script=script))
    assert result.code == 143, result.err
    assert f"Stopped at step {stopped}, saved. Continue: python train.py ckpt=a" in result.out
    assert max(rows(tmp_path / "runs" / "a")) == stopped


@pytest.mark.long
def test_fsdp2_is_one_process_and_skips_what_is_not_finite(tmp_path: Path, reference: dict) -> None:
    """Gathered block by block. The checkpoint is the normal one: the same names, shapes and optimiser as one
    process writes."""
    script = tmp_path / "poison.py"
    script.write_text(POISON)
    result = finish(start(tmp_path, "name=a", *STEP, *two("fsdp2"), *limits(STEPS), script=script))
    assert result.code == 1 and "Traceback" not in result.err, result.err
    assert f"Step {BAD}: the gradient norm is nan" in result.err
    table = rows(tmp_path / "runs" / "a")
    assert max(table) == BAD and table[BAD]["train/grad_norm"] == "nan"
    assert_same(table, reference, range(BAD))

    assert train_here(tmp_path, "name=one", *STEP, *ONE, "trainer.max_steps=13").code == 0
    ours, plain = (
        read_checkpoint(tmp_path / "runs" / path)
        for path in ("a/checkpoints/step-00000014.ckpt", "one/checkpoints/step-00000013.ckpt")
    )
    assert list(ours["state_dict"]) == list(plain["state_dict"])
    for name, value in plain["state_dict"].items():
        torch.testing.assert_close(ours["state_dict"][name], value, rtol=1e-3, atol=1e-5)
    optimizers = [content["optimizer_states"][0] for content in (ours, plain)]
    assert [g["params"] for g in optimizers[0]["param_groups"]] == [
        g["params"] for g in optimizers[1]["param_groups"]
    ]
    for number, state in optimizers[1]["state"].items():
        assert optimizers[0]["state"][number].keys() == state.keys()
        for key, value in state.items():
            torch.testing.assert_close(optimizers[0]["state"][number][key], value, rtol=1e-3, atol=1e-5)
    assert optimizers[0]["state"][0]["step"] == 13


@pytest.mark.long
def test_checkpoints_move_from_one_to_fsdp2_and_back(tmp_path: Path, reference: dict) -> None:
    assert train_here(tmp_path, "name=a", *STEP, *ONE, *limits(10)).code == 0
    result = finish(start(tmp_path, "ckpt=a", *two("fsdp2"), *limits(20), CHUNKS, tiny=False))
    assert result.code == 0, result.err
    result = train_here(
        tmp_path, "ckpt=a", "trainer=default", "trainer.accelerator=cpu", *limits(STEPS), *ONE, tiny=False
    )
    assert result.code == 0, result.err
    assert_same(rows(tmp_path / "runs" / "a"), reference, range(STEPS + 1))


@pytest.mark.long
@pytest.mark.parametrize("strategy", ["ddp", "fsdp2"])
def test_kernels_of_our_own_in_two_processes(
    strategy: str, tmp_path: Path, reference: dict, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Triton's, in its interpreter: the steps are those that naive takes in one process."""
    pytest.importorskip("triton", reason="triton is not installed (pip install triton)")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    script = tmp_path / "quick.py"
    script.write_text("import train\nfrom tests import interpreter\ninterpreter.hasten()\ntrain.main()\n")
    steps = ("trainer.max_steps=3", "trainer.val_check_interval=10", "checkpointing=true")
    run = ("name=a", *STEP, *two(strategy), *steps, "attention=triton", "data.max_val_tokens=16")
    result = finish(start(tmp_path, *run, script=script))
    assert result.code == 0, result.err
    assert "attention  triton" in result.out
    assert_same(rows(tmp_path / "runs" / "a"), reference, range(1, 3))


LONG = ("data.document_mask=true", "model.window=6", "model.position=rope", "model.n_kv_head=1")


def spread(devices: int, ranks: int) -> tuple[str, ...]:
    """Each sequence over `ranks` of `devices` processes; all of them take 8 rows at once."""
    over = f"trainer.strategy.context_parallel={ranks}"
    rows = f"data.batch_size={8 * ranks // devices}"
    return ("trainer=context_parallel", "trainer.accelerator=cpu", f"trainer.devices={devices}", over, rows)


@pytest.mark.long
def test_a_sequence_over_two_processes_is_one_process(tmp_path: Path) -> None:
    """With documents and windows; the run goes on in one process, and its data where it was."""
    assert train_here(tmp_path, "name=one", *STEP, *ONE, *LONG, *limits(20)).code == 0
    result = finish(start(tmp_path, "name=a", *STEP, *LONG, *spread(2, 2), *limits(10)))
    assert result.code == 0, result.err
    assert "256 tokens (2 x 8 x 16 on 2 device(s), 2 to a sequence)" in result.out
    saved = read_checkpoint(tmp_path / "runs" / "a" / "checkpoints" / "step-00000010.ckpt")
    assert saved["TokenDataModule"]["consumed"] == 16 * 10
    alone = ("trainer=default", "trainer.accelerator=cpu", *ONE)
    result = train_here(tmp_path, "ckpt=a", *alone, *limits(20), tiny=False)
    assert result.code == 0, result.err
    assert_same(rows(tmp_path / "runs" / "a"), rows(tmp_path / "runs" / "one"), range(21))


@pytest.mark.long
@pytest.mark.parametrize("ranks", [4, 2])
def test_sequences_over_four_processes(ranks: int, tmp_path: Path) -> None:
    """One sequence over all four, and two groups of two; a run of one process goes on in them."""
    assert train_here(tmp_path, "name=one", *STEP, *ONE, *LONG, *limits(10)).code == 0
    assert train_here(tmp_path, "name=a", *STEP, *ONE, *LONG, *limits(5)).code == 0
    more = (*spread(4, ranks), *limits(10), "checkpointing=true", CHUNKS)
    result = finish(start(tmp_path, "ckpt=a", *more, tiny=False))
    assert result.code == 0, result.err
    assert_same(rows(tmp_path / "runs" / "a"), rows(tmp_path / "runs" / "one"), range(6, 11))


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (("trainer.strategy.context_parallel=3",), ("over 3 devices, and there are 2", "(1, 2)")),
        (("trainer.strategy.context_parallel=no",), ("context_parallel=no:", "or all")),
        (("seq_len=18",), ("seq_len=18", "use 16 or 20")),
        (("attention=standard",), ("not trainer=context_parallel",)),
    ],
    ids=str,
)
def test_what_no_sequence_can_be_spread_with_is_refused(
    overrides: tuple[str, ...], words: tuple[str, ...], tmp_path: Path
) -> None:
    result = train_here(tmp_path, "trainer=context_parallel", "trainer.devices=2", *overrides)
    assert result.code == 1 and all(word in result.err for word in words), result.err


@pytest.mark.long
def test_two_machines_are_one_process(tmp_path: Path, reference: dict) -> None:
    """Two of torchrun's process groups on this machine, each of which takes itself for one."""
    rows_each = ("name=a", "trainer=fsdp2", "data.batch_size=4")
    results = [finish(node) for node in start_nodes(tmp_path, 2, *STEP, *rows_each, *limits(10))]
    assert [result.code for result in results] == [0, 0], results
    assert [result.out.count("machine    CPU") for result in results] == [1, 0]
    assert_same(rows(tmp_path / "runs" / "a"), reference, range(11))


def test_a_sweep_over_several_devices_is_refused(tmp_path: Path) -> None:
    result = train_here(tmp_path, *two("ddp"), "seed=1,2", "-m")
    assert result.code == 1
    assert "-m with trainer.devices=2" in result.err and "trainer.devices=1" in result.err
    assert not (tmp_path / "runs").exists() or not list((tmp_path / "runs").glob("*/checkpoints"))
