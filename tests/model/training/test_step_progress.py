"""How far a long step is: blocks and micro-batches in order, checkpointing's second forward not counted."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from attention.naive import NaiveAttention
from model.gpt import GPT, GPTConfig
from model.training import callbacks, step_progress
from model.training.step_progress import Mark, StepProgress
from tests.running import train_here


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch):
    """Makes a watched model of three blocks; the watching thread never looks by itself."""
    found = []

    def make(checkpointing: bool = False, micro_batches: int = 1) -> tuple[GPT, StepProgress]:
        config = GPTConfig(11, seq_len=8, n_layer=3, n_head=2, n_embd=8)
        net = GPT(config, NaiveAttention(), checkpointing=checkpointing).train()
        found.append(StepProgress(net, micro_batches, print, 1e6))
        return net, found[-1]

    yield make
    for one in found:
        one.ended.set()
        one.end()


@pytest.mark.parametrize("checkpointing", [False, True])
def test_marks_come_in_the_order_of_the_work(made, checkpointing: bool) -> None:
    net, progress = made(checkpointing, 2)
    x = torch.zeros(1, 8, dtype=torch.int64)
    for step in (1, 2):
        progress.begin(step)
        for _ in range(2):
            net(x, targets=x).backward()
    with torch.no_grad():
        net(x)  # a validation leaves no mark
    each = [(False, 1), (False, 2), (False, 3), (True, 0), (True, 1), (True, 2)]
    expected = [(step, micro, *work) for step in (1, 2) for micro in (0, 1) for work in each]
    assert [mark[:4] for mark in progress.marks] == expected
    progress.begin(4)
    assert {mark.step for mark in progress.marks} == {2}


def test_a_line_says_what_the_device_has_done(made, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(step_progress.time, "perf_counter", lambda: now[0])
    _, progress = made(True, 2)
    done, queued = (SimpleNamespace(query=lambda over=over: over) for over in (True, False))
    progress.marks = [Mark(1, 1, True, 2, done), Mark(2, 0, False, 1, done), Mark(2, 0, False, 2, queued)]
    assert progress.line() == "" and (progress.step, progress.seen) == (2, (0.0, 1))
    now[0] = 5.0
    assert progress.line() == ""  # nothing since
    progress.marks.append(Mark(2, 0, False, 3, done))
    now[0] = 12.0  # two blocks of 24, a backward being worth three
    assert progress.line() == "step 2: micro-batch 1/2, forward of 3/3 blocks in 18 s, 126 s left"
    progress.marks.append(Mark(2, 1, True, 1, done))
    now[0] = 34.0  # 18 of 24, the first before it was seen
    assert progress.line() == "step 2: micro-batch 2/2, backward of 1/3 blocks in 36 s, 12 s left"
    progress.marks.append(Mark(2, 1, True, 2, done))
    assert progress.line() == ""  # what is left of it is no longer told from what comes between steps
    progress.marks = []
    assert progress.line() == ""


def test_a_run_watches_its_steps_and_ends_that(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    watched = []

    class Watched(StepProgress):
        def __init__(self, *args: Any) -> None:
            self.begun = []
            super().__init__(*args)
            watched.append(self)

        def begin(self, step: int) -> None:
            self.begun.append(step)
            super().begin(step)

    monkeypatch.setattr(callbacks, "StepProgress", Watched)
    assert train_here(tmp_path, "trainer.max_steps=2", "callbacks.progress.every=1").code == 0
    (one,) = watched
    assert one.begun == [0, 1, 2] and one.marks[-1][:4] == (2, 0, True, one.blocks - 1)
    assert one.every_s == 10 and one.ended.is_set() and not one.net._forward_pre_hooks
