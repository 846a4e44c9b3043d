"""A run's folder: one process at a time, nothing newer dropped without a word, anywhere the user says."""

from __future__ import annotations

import errno
import os
import pkgutil
import shutil
import socket
import time
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from filelock import FileLock
from lightning.pytorch.utilities import rank_zero_only

from model.training.checkpoint import checkpoints_of, link, read_checkpoint, step_of
from model.training.runs import Hold
from tests.running import Result, finish, rows, start, train_here

DIVERGE = ("optim.lr=10", "grad_clip=null", "schedule=constant", "schedule.warmup_steps=1")


def contents(run: Path) -> dict[str, bytes]:
    return {str(path.relative_to(run)): path.read_bytes() for path in run.rglob("*") if path.is_file()}


def best(run: Path) -> int:
    """The step of best.ckpt, which has to be the best of those in metrics.csv."""
    losses = {step: float(row["val/loss"]) for step, row in rows(run).items() if "val/loss" in row and step}
    step = read_checkpoint(run / "checkpoints" / "best.ckpt")["global_step"]
    assert step == min(losses, key=losses.get), losses
    return step


@pytest.fixture(scope="module")
def gone_on(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run whose best checkpoint, of step 10, is not its newest, of step 20."""
    folder = tmp_path_factory.mktemp("gone_on")
    every = ("trainer.val_check_interval=5", "callbacks.checkpoints.keep=9", "name=a")
    assert train_here(folder, *every, "trainer.max_steps=10").code == 0
    assert train_here(folder, "ckpt=a", "trainer.max_steps=20", *DIVERGE, tiny=False).code == 0
    assert best(folder / "runs" / "a") == 10
    return folder


@pytest.fixture
def folder(gone_on: Path, tmp_path: Path) -> Path:
    shutil.copytree(gone_on, tmp_path, dirs_exist_ok=True)
    return tmp_path


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("ckpt", "step"), [("a/best", 10), ("runs/a/checkpoints/step-00000015.ckpt", 15), ("a", 20)]
)
def test_going_back_is_a_run_of_its_own(ckpt: str, step: int, folder: Path) -> None:
    parent = folder / "runs" / "a"
    before, table = contents(parent), rows(parent)
    again = ("schedule=cosine", "optim.lr=1e-3", "grad_clip=1.0", "trainer.max_steps=23")
    result = train_here(folder, f"ckpt={ckpt}", *again, tiny=False)
    assert result.code == 0, result.err
    if step == 20:  # the newest
        assert [path.name for path in (folder / "runs").iterdir()] == ["a"] and "going back" not in result.out
        assert list(rows(parent)) == list(range(24))
        return
    run = folder / "runs" / f"a-from-{step}"
    assert f"runs/a has checkpoints up to step 20: resuming from step {step} starts a new run" in result.out
    assert f"runs/a-from-{step}" in result.out and contents(parent) == before
    forked = rows(run)
    assert list(forked) == list(range(24)) and all(forked[n] == table[n] for n in range(step + 1))
    assert forked[step + 1] != table[step + 1]
    assert best(run) in range(10, 24)
    assert train_here(folder, f"ckpt={ckpt}", "trainer.max_steps=16", tiny=False).code == 0
    assert list(rows(folder / "runs" / f"a-from-{step}-2")) == list(range(17)) and contents(parent) == before


def test_going_back_in_place_says_what_it_drops(folder: Path) -> None:
    result = train_here(folder, "overwrite=true", "name=b")
    assert result.code == 1 and "overwrite=true sets a run back" in result.err
    assert not (folder / "runs" / "b").exists()
    older, run = "ckpt=runs/a/checkpoints/step-00000005.ckpt", folder / "runs" / "a"
    table = rows(run)
    result = train_here(folder, older, "overwrite=true", "trainer.max_steps=7", "optim.lr=1e-3", tiny=False)
    assert result.code == 0, result.err
    names = ", ".join(f"step-000000{n}.ckpt" for n in (20, 15, 10))
    assert f"deleting {names}, best.ckpt and the metrics of steps 6 to 20 of runs/a" in result.out
    assert [step_of(path) for path in checkpoints_of(run / "checkpoints")] == [7, 5]
    again = rows(run)
    assert list(again) == list(range(8)) and all(again[step] == table[step] for step in range(6))
    assert best(run) in (5, 7)
    assert train_here(folder, "ckpt=a", "trainer.max_steps=8", tiny=False).code == 0  # once, not from now on
    result = train_here(folder, older, "trainer.max_steps=6", tiny=False)
    assert "starts a new run" in result.out


@pytest.mark.parametrize(
    ("when", "ckpt", "resumes"),
    [
        ("data.datamodule.TokenDataModule.prepare_data", "a/best", True),
        ("train.recompose", "a/best", False),  # before it is linked
        ("data.datamodule.TokenDataModule.prepare_data", "best.ckpt", False),  # a file from elsewhere
    ],
)
def test_a_checkpoint_that_is_replaced_meanwhile(when: str, ckpt: str, resumes: bool, folder: Path) -> None:
    """By the process that trains the other run."""
    checkpoints = folder / "runs" / "a" / "checkpoints"
    shutil.copy(checkpoints / "best.ckpt", folder)
    module, _, name = when.rpartition(".")
    original = getattr(pkgutil.resolve_name(module), name)

    def replaced(*args: Any) -> Any:
        for path in (checkpoints / "best.ckpt", folder / "best.ckpt"):
            link(checkpoints / "step-00000020.ckpt", path)
        return original(*args)

    again = ("name=b", "schedule=cosine", "optim.lr=1e-3", "grad_clip=1.0", "trainer.max_steps=23")
    with mock.patch(when, replaced):
        result = train_here(folder, f"ckpt={ckpt}", *again, tiny=False)
    run = folder / "runs" / "b"
    if not resumes:
        assert result.code == 1 and "was replaced meanwhile by one of step 20: start again" in result.err
        assert not run.exists()
        return
    assert result.code == 0, result.err
    assert "resumes    runs/b at step 10, from runs/a/checkpoints/best.ckpt" in result.out
    assert list(rows(run)) == list(range(24)) and best(run) >= 10


def test_a_damaged_newest_makes_no_other_run(folder: Path) -> None:
    newest = folder / "runs/a/checkpoints/step-00000020.ckpt"
    newest.write_bytes(newest.read_bytes()[:-1000])
    result = train_here(folder, "ckpt=a", "trainer.max_steps=17", tiny=False)
    assert result.code == 0 and "step-00000020.ckpt is damaged: now step-00000020.ckpt.damaged" in result.out
    assert list(rows(folder / "runs" / "a")) == list(range(18))


def test_weights_that_exploded_are_not_called_good(tmp_path: Path) -> None:
    assert train_here(tmp_path, "name=a").code == 0
    result = train_here(tmp_path, "ckpt=a", "trainer.max_steps=40", "optim.lr=1e28", *DIVERGE[1:], tiny=False)
    assert result.code == 1 and "The weights had exploded (the largest weight is 9.0e+27)" in result.err, (
        result.err
    )
    assert (
        "were not saved. The last good ones are of step 20: ckpt=runs/a/checkpoints/step-00000020"
        in result.err
    )
    for path in (tmp_path / "runs" / "a" / "checkpoints").iterdir():
        weights = read_checkpoint(path)["state_dict"].values()
        assert max(float(weight.abs().max()) for weight in weights) < 100
    result = train_here(tmp_path, "name=b", "optim.lr=1e28", *DIVERGE[1:])
    assert result.code == 1 and "No checkpoint of this run has good ones: start again." in result.err
    assert not list((tmp_path / "runs" / "b").glob("checkpoints/*"))


@pytest.mark.parametrize("overrides", [("name=a",), ("ckpt=a",)])
def test_a_second_process_is_refused_at_once(overrides: tuple[str, ...], tmp_path: Path) -> None:
    tiny = overrides == ("name=a",)
    if not tiny:
        assert train_here(tmp_path, "name=a", "trainer.max_steps=2").code == 0
    run = tmp_path / "runs" / "a"
    run.mkdir(parents=True, exist_ok=True)
    lock = FileLock(run / ".lock")
    with lock:
        Path(lock.lock_file).write_text("process 7 on elsewhere")
        before = contents(run)
        result = train_here(tmp_path, *overrides, "trainer.max_steps=3", tiny=tiny)
        assert result.code == 1 and "runs/a is in use by process 7 on elsewhere: one process" in result.err
        assert contents(run) == before
        with mock.patch.object(rank_zero_only, "rank", 1), Hold() as hold:  # the first rank has it for all
            hold.take(run)
    assert train_here(tmp_path, *overrides, "trainer.max_steps=3", tiny=tiny).code == 0


def test_a_file_system_without_locks_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import fcntl

    flock = fcntl.flock

    def none(fd: Any, operation: int) -> None:
        if isinstance(fd, int) and os.readlink(f"/proc/self/fd/{fd}").endswith("runs/a/.lock"):
            raise OSError(errno.ENOLCK, "No locks available")
        flock(fd, operation)

    monkeypatch.setattr(fcntl, "flock", none)
    result = train_here(tmp_path, "name=a", "trainer.max_steps=1")
    assert result.code == 0 and "runs/a cannot be locked (No locks available)" in result.out


def two_processes(folder: Path, wait: int, *second: str) -> None:
    """A run, and when it has logged step `wait` a second process on it: the first ends as if alone."""
    steps = ("trainer.max_steps=40", "callbacks.checkpoints.every=2")
    assert train_here(folder, *steps, "name=alone").code == 0
    first = start(folder, *steps, "name=a")
    run = folder / "runs" / "a"
    while first.poll() is None and (not (run / "metrics.csv").exists() or max(rows(run), default=-1) < wait):
        time.sleep(0.01)
    results: list[Result] = []
    while first.poll() is None and (
        not results or (second[0] == "ckpt=a" and not refused(results[-1], first.pid))
    ):
        results.append(train_here(folder, *second, tiny=second[0] == "name=a"))
    ended = finish(first)
    assert ended.code == 0, ended.err
    assert results and refused(results[-1], first.pid), results[-1]
    assert rows(run) == rows(folder / "runs" / "alone")
    last, alone = (
        read_checkpoint(folder / "runs" / name / "checkpoints" / "step-00000040.ckpt")["state_dict"]
        for name in ("a", "alone")
    )
    assert all(torch.equal(last[name], value) for name, value in alone.items())


def refused(result: Result, pid: int) -> bool:
    return result.code == 1 and f"in use by process {pid} on {socket.gethostname()}" in result.err


@pytest.mark.long
def test_two_processes_on_one_run(tmp_path: Path) -> None:
    two_processes(tmp_path, 3, "ckpt=a")


@pytest.mark.slow
@pytest.mark.parametrize("trial", range(20))
def test_twenty_trials_of_two_processes(trial: int, tmp_path: Path) -> None:
    two_processes(tmp_path, trial, "name=a" if trial % 2 else "ckpt=a")


@pytest.mark.long
def test_runs_lie_where_runs_dir_says(tmp_path: Path) -> None:
    from conf.trained import load_model

    there = "runs_dir=another place"
    result = train_here(tmp_path, "name=a", "trainer.max_steps=4", there)
    assert result.code == 0, result.err
    assert "scripts/generate.py ckpt=a 'runs_dir=another place'" in result.out
    place, before = tmp_path / "another place", contents(tmp_path / "another place" / "a")
    assert not (tmp_path / "runs").exists()
    assert train_here(tmp_path, "ckpt=a", "trainer.max_steps=5", tiny=False).code == 1
    file = "ckpt=another place/a/checkpoints/step-00000004.ckpt"
    result = train_here(tmp_path, file, "trainer.max_steps=5", tiny=False)
    assert result.code == 0 and contents(place / "a") == before  # a file does not say where runs lie
    (run,) = (tmp_path / "runs").iterdir()
    assert run.name.startswith("tiny-naive-") and list(rows(run)) == [5]
    for ckpt, steps in (("a", 5), ("last", 6)):
        result = train_here(tmp_path, f"ckpt={ckpt}", there, f"trainer.max_steps={steps}", tiny=False)
        assert result.code == 0 and list(rows(place / "a")) == list(range(steps + 1)), result.err
    cwd = os.getcwd()
    os.chdir(tmp_path)
    try:
        assert load_model("a", [], "another place")[0].config.n_embd == 32
    finally:
        os.chdir(cwd)
    assert train_here(tmp_path, "seed=1,2", "name=s", "trainer.max_steps=1", there, "-m").code == 0
    assert sorted(path.name for path in place.iterdir()) == ["a", "s-0-seed-1", "s-1-seed-2"]


def test_a_name_that_looks_like_a_number_is_the_folder_s(tmp_path: Path) -> None:
    assert train_here(tmp_path, "name=1e3", "trainer.max_steps=1").code == 0
    result = train_here(tmp_path, "ckpt=1e3", "trainer.max_steps=2", tiny=False)
    assert result.code == 0 and list(rows(tmp_path / "runs" / "1e3")) == [0, 1, 2], result.err
    sweep = ("name=1e3", "seed=1,2", "trainer.max_steps=1", "-m")
    assert train_here(tmp_path, *sweep).code == 0
    assert sorted(run.name for run in (tmp_path / "runs").iterdir()) == [
        "1e3",
        "1e3-0-seed-1",
        "1e3-1-seed-2",
    ]
    result = train_here(tmp_path, "name=again", "init_from=1e3", "trainer.max_steps=1")
    assert result.code == 1 and "init_from=1e3 brings" in result.err


@pytest.mark.parametrize("sweep", [(), ("seed=1,2", "-m")])
def test_a_file_named_runs(sweep: tuple[str, ...], tmp_path: Path) -> None:
    (tmp_path / "runs").write_text("not a folder")
    result = train_here(tmp_path, "trainer.max_steps=1", *sweep)
    assert result.code == 1 and "Traceback" not in result.err
    assert "runs_dir=" in result.err and len(result.err.strip().splitlines()) == 1, result.err
    assert train_here(tmp_path, "trainer.max_steps=1", "runs_dir=there", *sweep).code == 0
    for value in ("null", "true"):
        result = train_here(tmp_path, f"runs_dir={value}")
        assert result.code == 1 and f"runs_dir={value.title()}" in result.err.replace("None", "Null")
