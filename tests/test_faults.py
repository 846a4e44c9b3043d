"""A run that a fault broke off goes on to the very end that it would have had."""

from __future__ import annotations

import io
import os
import random
import signal
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from model.training.lit_gpt import LitGPT
from tests import faults
from tests.faults import RUN, SETTINGS, STEPS, Child, Disk, outcome, same, saved, signalled
from tests.grid import long_but
from tests.running import Result, train_here, write_book

pytestmark = pytest.mark.sampled(3)

QUIT = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


class References:
    """Of each of SETTINGS a run that nobody disturbs: its outcome, and how many lines of ours it passes."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.known: dict[str, tuple[dict[str, Any], int]] = {}

    def overrides(self, settings: str) -> tuple[str, ...]:
        return (*RUN, *SETTINGS[settings], f"data.data_dir={self.folder}/prepared", "name=a")

    def __getitem__(self, settings: str) -> tuple[dict[str, Any], int]:
        if settings not in self.known:
            folder = self.folder / settings
            folder.mkdir()
            assert train_here(folder, *self.overrides(settings)).code == 0
            ended = outcome(folder / "runs" / "a")
            other = self.folder / f"{settings}-lines"
            other.mkdir()
            write_book(other)
            self.known[settings] = ended, faults.lines_of(other, *self.overrides(settings))
        return self.known[settings]


@pytest.fixture(scope="module")
def references(tmp_path_factory: pytest.TempPathFactory) -> References:
    return References(tmp_path_factory.mktemp("references"))


def to_the_end(folder: Path, references: References, settings: str) -> None:
    """What was saved goes on, or the run begins again; either way it ends as if nothing had been."""
    if saved(folder):
        result = train_here(folder, "ckpt=a", tiny=False)
        finished = result.code == 1 and f"at step {STEPS} of trainer.max_steps={STEPS}" in result.err
        assert result.code == 0 or finished, result.err
    else:
        result = train_here(folder, *references.overrides(settings))
        assert result.code == 0, result.err
    ours, theirs = outcome(folder / "runs" / "a"), references[settings][0]
    for key, value in theirs.items():
        assert same(ours[key], value), key


def kill_and_resume(trial: int, trials: int, folder: Path, references: References) -> None:
    """SIGKILL at a line; every fourth time the resumed run is killed as well."""
    settings = list(SETTINGS)[trial % len(SETTINGS)]
    lines, draw = references[settings][1], random.Random(trial)
    at = int((trial + draw.random()) * lines / trials)
    code = signalled(folder, signal.SIGKILL, at, *references.overrides(settings))
    assert code in (-signal.SIGKILL, 0)
    if trial % 4 == 3 and saved(folder):
        assert signalled(folder, signal.SIGKILL, draw.randrange(lines), "ckpt=a", tiny=False) != 99
    to_the_end(folder, references, settings)


def quit_and_resume(trial: int, trials: int, folder: Path, references: References) -> None:
    """SIGTERM, Ctrl-C or SIGHUP at a line: in training it is saved first."""
    settings = list(SETTINGS)[trial % len(SETTINGS)]
    at, number = int((trial + 0.5) * references[settings][1] / trials), QUIT[trial // 3 % 3]
    code = signalled(folder, number, at, *references.overrides(settings))
    assert code in (128 + number, -number, 0)
    said = (folder / "said").read_text() if (folder / "said").exists() else ""
    assert "Traceback" not in said and ("ckpt=" not in said or saved(folder)), said
    if "saving " in said:
        assert saved(folder)
    to_the_end(folder, references, settings)


@pytest.mark.parametrize("trial", long_but(range(4), 0))
@pytest.mark.parametrize("fault", [kill_and_resume, quit_and_resume])
def test_a_few_signals(fault: Any, trial: int, tmp_path: Path, references: References) -> None:
    fault(trial, 4, tmp_path, references)


@pytest.mark.slow
@pytest.mark.parametrize("trial", range(200))
@pytest.mark.parametrize("fault", [kill_and_resume, quit_and_resume])
def test_two_hundred_signals(fault: Any, trial: int, tmp_path: Path, references: References) -> None:
    """The bar: 200 kills, and 200 signals that ask to stop, evenly over the lines of a run."""
    fault(trial, 200, tmp_path, references)


def test_killed_in_the_middle_of_a_write(tmp_path: Path, references: References) -> None:
    """Half a checkpoint is on the disk, under a name that means nothing."""
    overrides, write = references.overrides("plain"), torch.save

    def half(checkpoint: dict[str, Any], file: Any) -> None:
        if checkpoint["global_step"] < 8:
            return write(checkpoint, file)
        whole = io.BytesIO()
        write(checkpoint, whole)
        file.write(whole.getvalue()[: len(whole.getvalue()) // 2])
        file.flush()
        os.kill(os.getpid(), signal.SIGKILL)

    with mock.patch.object(torch, "save", half):
        assert Child(lambda: faults.trained(tmp_path, *overrides)).wait() == -signal.SIGKILL
    assert len(list((tmp_path / "runs").rglob("*.partial"))) == 1
    to_the_end(tmp_path, references, "plain")


def power_cut(trial: int, trials: int, folder: Path, references: References) -> None:
    at = int((trial + 0.5) * references["plain"][1] / trials)
    run, shadow = folder / "runs" / "a", folder / "shadow"
    with faults.recording(shadow):
        signalled(folder, signal.SIGKILL, at, *references.overrides("plain"))
    if run.is_dir():
        faults.power_cut(run, shadow)
    to_the_end(folder, references, "plain")


@pytest.mark.parametrize("trial", range(2))
def test_a_power_cut(trial: int, tmp_path: Path, references: References) -> None:
    power_cut(trial, 2, tmp_path, references)


@pytest.mark.slow
@pytest.mark.parametrize("trial", range(40))
def test_forty_power_cuts(trial: int, tmp_path: Path, references: References) -> None:
    """What was not synced is lost, names of files included."""
    power_cut(trial, 40, tmp_path, references)


needs_disks = pytest.mark.skipif(not faults.disks(), reason="this kernel lets us mount no file system")


def one_line(result: Result, *words: str) -> None:
    assert result.code == 1, result.out
    errors = [line for line in result.err.splitlines() if not line.startswith("prepared ")]
    assert len(errors) == 1, result.err
    assert all(word in errors[0] for word in ("error: ", "runs_dir=", *words)), result.err


def full(kib: int, folder: Path, references: References) -> None:
    """A disk of so many KiB; then there is room, and the run goes on."""
    overrides = references.overrides("plain")

    def work() -> None:
        disk = Disk(folder / "runs", kib)
        result = train_here(folder, *overrides)
        if result.code:
            one_line(result, "No space left on device")
            assert ("ckpt=a continues from step" in result.err) == saved(folder), result.err
            assert not list((folder / "runs").rglob("*.ckpt.*")), "a half-written checkpoint stays"
        disk.grow()
        to_the_end(folder, references, "plain")

    references["plain"]
    child = Child(work)
    assert child.wait() == 0, child.said


@needs_disks
@pytest.mark.parametrize("kib", [4, 600])
def test_a_full_disk(kib: int, tmp_path: Path, references: References) -> None:
    full(kib, tmp_path, references)


@needs_disks
@pytest.mark.slow
@pytest.mark.parametrize("kib", [4 * n for n in range(1, 12)] + [50 * n for n in range(1, 40)])
def test_disks_of_all_sizes(kib: int, tmp_path: Path, references: References) -> None:
    full(kib, tmp_path, references)


@needs_disks
@pytest.mark.parametrize("step", [None, 0, 3, 8])
def test_a_disk_that_becomes_read_only(step: int | None, tmp_path: Path, references: References) -> None:
    """Before the run, and in its steps."""
    training_step, overrides = LitGPT.training_step, references.overrides("plain")

    def work() -> None:
        disk = Disk(tmp_path / "runs", 1 << 20)

        def read_only(self: LitGPT, batch: dict, batch_idx: int) -> None:
            if self.global_step == step:
                self.trainer.strategy.checkpoint_io.teardown()  # an open file would keep it writable
                disk.read_only()
            training_step(self, batch, batch_idx)

        if step is None:
            disk.read_only()
        with mock.patch.object(LitGPT, "training_step", read_only):
            one_line(train_here(tmp_path, *overrides), "Read-only file system")
        if step is None:
            one_line(train_here(tmp_path, *overrides, "seed=1,2", "-m"), "Read-only file system")
            return
        if saved(tmp_path):
            one_line(train_here(tmp_path, "ckpt=a", tiny=False), "Read-only file system")
        disk.writable()
        to_the_end(tmp_path, references, "plain")

    references["plain"]
    child = Child(work)
    assert child.wait() == 0, child.said
