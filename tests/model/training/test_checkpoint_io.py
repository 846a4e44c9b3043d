"""Checkpoints that are written while training goes on."""

from __future__ import annotations

import errno
import threading
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from model.training import checkpoint_io as module
from model.training.checkpoint import CheckpointError, write_checkpoint
from model.training.checkpoint_io import VerifiedCheckpointIO
from tests.model.training.test_checkpoint import CONTENT


def training_state() -> dict[str, Any]:
    """Tied weights, a view, an OrderedDict with an attribute, a list that training appends to."""
    weight = torch.arange(12.0).view(3, 4)
    state = torch.nn.Linear(2, 2).state_dict()
    state |= {"tied": weight, "head": weight.detach(), "column": weight[:, 1]}
    return {**CONTENT, "state_dict": state, "steps": [1, 2]}


def test_what_is_written_in_the_background_is_of_the_step_that_was_saved(tmp_path: Path) -> None:
    paths, saved, free = [tmp_path / f"{name}.ckpt" for name in "ab"], training_state(), threading.Event()
    write_checkpoint(saved, paths[0])
    write, writer, order = module.write_checkpoint, VerifiedCheckpointIO(), []

    def slow(*args: Any) -> None:
        assert free.wait(60)
        write(*args)

    with mock.patch.object(module, "write_checkpoint", slow):
        writer.save_checkpoint(saved, paths[1])
        writer.then(lambda: order.append(paths[1].exists()))
        saved["state_dict"]["tied"].zero_()
        saved["steps"].append(3)
        assert not paths[1].exists() and not order
        free.set()
        writer.teardown()
    assert paths[0].read_bytes() == paths[1].read_bytes() and order == [True]
    read = torch.load(paths[1], weights_only=True)["state_dict"]
    read["tied"].add_(1)
    assert torch.equal(read["head"], read["tied"]) and torch.equal(read["column"], read["tied"][:, 1])


def test_the_memory_of_one_copy_serves_the_next(tmp_path: Path) -> None:
    """Also where a tensor has another size, or none, by then."""
    writer, saved, seen = VerifiedCheckpointIO(), training_state(), []
    for step in range(3):
        saved["state_dict"]["tied"].add_(1)
        saved["state_dict"]["other"] = torch.full((step,), 7.0)
        writer.save_checkpoint(saved, tmp_path / f"{step}.ckpt")
        writer.teardown()
        write_checkpoint(saved, tmp_path / "expected.ckpt")
        assert (tmp_path / f"{step}.ckpt").read_bytes() == (tmp_path / "expected.ckpt").read_bytes()
        seen.append({storage.data_ptr() for storage in writer.spare})
    assert len(seen[1] & seen[2]) == len(saved["state_dict"]) - 3  # three share one; `other` grows


@pytest.mark.parametrize("in_background", [0, 1 << 30])
def test_what_cannot_be_written_is_an_error_and_nothing_follows(tmp_path: Path, in_background: int) -> None:
    writer, done = VerifiedCheckpointIO(), []
    full = OSError(errno.ENOSPC, "No space left on device")
    with (
        mock.patch.object(module, "IN_BACKGROUND", in_background),
        mock.patch.object(module.torch, "save", side_effect=full),
        pytest.raises(CheckpointError, match="No space left"),
    ):
        writer.save_checkpoint(training_state(), tmp_path / "a.ckpt")
        assert in_background
        writer.then(done.append, "the file's best name")
        writer.save_checkpoint(training_state(), tmp_path / "b.ckpt")
    writer.teardown()
    assert not done and not list(tmp_path.iterdir())
