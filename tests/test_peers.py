"""One rank of several is lost: the others end, the message names it, and the run goes on from what it had
saved, on another number of processes, to the same losses."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from tests.running import finish, rows, start, train_here
from tests.test_distributed import ONE, STEP, assert_same, limits, two

AT = 13  # steps that are done when it happens; a checkpoint is there of 10
LIMIT = 8  # seconds for the tests, on a busy machine; model/training/peers.py has more
FAULTY = f"""
import os, signal, time
import train
from data.stream import TrainStream
from model.training import peers
from model.training.lit_gpt import LitGPT
peers.LIMIT, peers.PERIOD = {LIMIT}, 0.5
fault, mine = os.environ["FAULT"], os.environ["FAULTY_RANK"] == os.environ.get("LOCAL_RANK", "0")
step, batches = LitGPT.training_step, TrainStream._batches
def faulty_step(self, *args):
    if mine and self.global_step == {AT}:
        if fault == "error":
            raise ValueError("a\\x1b mistake\\nin two lines")
        if fault in ("SIGKILL", "SIGSTOP"):
            os.kill(os.getpid(), getattr(signal, fault))
    return step(self, *args)
def faulty_batches(self, consumed):
    for i, batch in enumerate(batches(self, consumed)):
        if mine and fault == "data" and i == {AT + 1}:  # Lightning loads one ahead
            time.sleep(1000)
        yield batch
LitGPT.training_step, TrainStream._batches = faulty_step, faulty_batches
train.main()
"""
long = pytest.mark.long
# Of rank 0, which keeps the store: the second where the other one was only about to connect.
GONE = "the connection to it is gone|it has given no sign of life"


@pytest.mark.parametrize(
    ("fault", "rank", "strategy", "why"),
    [
        ("SIGKILL", 1, "ddp", "its process ended with signal SIGKILL"),
        pytest.param("SIGKILL", 0, "ddp", GONE, marks=long),
        pytest.param("SIGKILL", 1, "fsdp2", "its process ended with signal SIGKILL", marks=long),
        pytest.param("SIGSTOP", 1, "ddp", f"it has given no sign of life for {LIMIT} s", marks=long),
        pytest.param("SIGSTOP", 0, "ddp", "it has given no sign of life", marks=long),
        pytest.param("data", 1, "ddp", f"it has been loading its next batch for {LIMIT} s", marks=long),
        pytest.param("error", 1, "ddp", "ValueError: a\\x1b mistake", marks=long),
    ],
)
def test_a_rank_is_lost(
    fault: str, rank: int, strategy: str, why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = tmp_path / "faulty.py"
    script.write_text(FAULTY)
    monkeypatch.setenv("FAULT", fault)
    monkeypatch.setenv("FAULTY_RANK", str(rank))
    process = start(tmp_path, "name=a", *STEP, *two(strategy), *limits(20), script=script)
    metrics = tmp_path / "runs" / "a" / "metrics.csv"
    if fault == "SIGSTOP" and rank == 0:  # it is the process that was started, which stays as it is
        while process.poll() is None and _state_of(process.pid) != "T":
            time.sleep(0.1)
        begun, others = time.monotonic(), Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text()
        while time.monotonic() < begun + LIMIT + 10 and any(_state_of(pid) != "Z" for pid in others.split()):
            time.sleep(0.1)
        process.kill()
    result = finish(process)
    assert result.code != 0
    said = [f"error: rank {rank} was lost after step {AT}: {each}" for each in why.split("|")]
    assert any(each in result.err for each in said), result.err
    assert "Saved: step 10." in result.err and "python train.py ckpt=a trainer.devices=" in result.err
    assert metrics.exists()

    assert train_here(tmp_path, "name=one", *STEP, *ONE, *limits(20)).code == 0
    alone = ("trainer=default", "trainer.accelerator=cpu", *ONE)
    result = train_here(tmp_path, "ckpt=a", *alone, *limits(20), tiny=False)
    assert result.code == 0, result.err
    assert_same(rows(tmp_path / "runs" / "a"), rows(tmp_path / "runs" / "one"), range(21))


def _state_of(pid: int | str) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
