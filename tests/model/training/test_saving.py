"""What a run leaves behind however it ends: whole, at its last step, with the best found again."""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import time
from collections.abc import Callable, Container, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
from lightning.pytorch.strategies import SingleDeviceStrategy

from model.generation import generate
from model.training import checkpoint_io, runtime
from model.training.callbacks import Samples
from model.training.checkpoint import CheckpointError, checkpoints_of, read_checkpoint
from model.training.lit_gpt import LitGPT
from tests.running import rows, train_here

pytestmark = pytest.mark.sampled(3)


def steps(run: Path) -> list[int]:
    return [int(path.stem.removeprefix("step-")) for path in checkpoints_of(run / "checkpoints")]


@contextlib.contextmanager
def signalled_in_step(number: int) -> Iterator[None]:
    """SIGTERM comes in step `number`."""
    step = LitGPT.training_step

    def signalled(self, batch, batch_idx):
        if self.global_step == number - 1:
            os.kill(os.getpid(), signal.SIGTERM)
        return step(self, batch, batch_idx)

    with mock.patch.object(LitGPT, "training_step", signalled):
        yield


def test_a_run_without_validation_saves_its_end(tmp_path: Path) -> None:
    result = train_here(tmp_path, "trainer.limit_val_batches=0", "trainer.max_steps=4", "name=a")
    assert result.code == 0, result.err
    assert steps(tmp_path / "runs" / "a") == [4]
    result = train_here(tmp_path, "ckpt=a", "trainer.max_steps=6", tiny=False)
    assert result.code == 0, result.err
    assert steps(tmp_path / "runs" / "a")[0] == 6


def test_without_validation_none_of_the_checkpoints_is_left_out(tmp_path: Path) -> None:
    """Those at steps of trainer.val_check_interval have no validation to be saved after."""
    every = ("callbacks.checkpoints.every=2", "callbacks.checkpoints.keep=9", "trainer.val_check_interval=4")
    result = train_here(tmp_path, *every, "trainer.limit_val_batches=0", "trainer.max_steps=9", "name=a")
    assert result.code == 0, result.err
    assert sorted(steps(tmp_path / "runs" / "a")) == [2, 4, 6, 8, 9]


def test_without_checkpoints_a_run_ends_with_a_validation_and_a_stop_with_the_truth(tmp_path: Path) -> None:
    settings = ("trainer.max_steps=7", "trainer.val_check_interval=3")
    for name, more in (("saved", ()), ("a", ("callbacks.checkpoints=null",))):
        assert train_here(tmp_path, *settings, *more, f"name={name}").code == 0
    whole = rows(tmp_path / "runs" / "saved")
    assert rows(tmp_path / "runs" / "a") == whole and "val/loss" in whole[7]
    with signalled_in_step(5):
        result = train_here(tmp_path, *settings, "callbacks.checkpoints=null", "name=b")
    assert result.code == 143 and "saving" not in result.out, result.out
    assert (
        "SIGTERM: stopping at the next step, without a checkpoint (callbacks.checkpoints=null)" in result.out
    )
    assert rows(tmp_path / "runs" / "b") == {at: row for at, row in whole.items() if at < 5} | {
        5: {key: value for key, value in whole[5].items() if key != "val/loss"}
    }


def test_a_validation_that_a_signal_cut_off_is_made_up_for(tmp_path: Path) -> None:
    """The signal comes in the step before a validation is due: saved at once, validated after the resume, on
    all of the data, although one before it was saved as done."""
    sampled = "callbacks.samples={_target_: model.training.callbacks.Samples, tokens: 4}"
    every = ("trainer.val_check_interval=5", sampled)
    assert train_here(tmp_path, "name=whole", *every).code == 0
    with signalled_in_step(10):
        assert train_here(tmp_path, "name=a", *every).code == 143
    run, whole = tmp_path / "runs" / "a", tmp_path / "runs" / "whole"
    assert steps(run)[0] == 10 and "val/loss" not in rows(run)[10]
    result = train_here(tmp_path, "ckpt=a", tiny=False)
    assert result.code == 0, result.err
    assert rows(run) == rows(whole)
    text = (run / "samples.txt").read_text()
    assert text == (whole / "samples.txt").read_text() and "--- step 10\n" in text


@pytest.mark.parametrize("killed", [False, True])
def test_a_signal_within_a_validation_saves_at_once(killed: bool, tmp_path: Path) -> None:
    """It may last longer than who sent the signal waits; then the resume makes up for it."""
    settings = ("trainer.val_check_interval=5", "data.max_val_tokens=null", "data.eval_batch_size=1")
    assert train_here(tmp_path, "name=whole", *settings).code == 0
    step = LitGPT.validation_step

    def signalled(self, batch, batch_idx):
        if self.global_step == 10 and batch_idx in ((1, 2) if killed else (1,)):
            os.kill(os.getpid(), signal.SIGTERM)  # the second ends it at once
        return step(self, batch, batch_idx)

    with mock.patch.object(LitGPT, "validation_step", signalled):
        result = train_here(tmp_path, "name=a", *settings)
    assert result.code == (130 if killed else 143), result.err
    assert "SIGTERM: saving now, then stopping when the validation ends." in result.out
    assert ("Stopped at step 10, saved." in result.out) != killed
    run = tmp_path / "runs" / "a"
    assert steps(run)[0] == 10 and ("val/loss" in rows(run)[10]) != killed and max(rows(run)) == 10
    assert train_here(tmp_path, "ckpt=a", tiny=False).code == 0
    assert rows(run) == rows(tmp_path / "runs" / "whole")


def test_a_signal_while_a_sample_is_generated_ends_the_run_without_another_step(tmp_path: Path) -> None:
    sampled = "callbacks.samples={_target_: model.training.callbacks.Samples, tokens: 4}"

    def signalled(*args, of=generate.generate, **kwargs):
        os.kill(os.getpid(), signal.SIGTERM)
        return of(*args, **kwargs)

    with mock.patch.object(generate, "generate", signalled):
        result = train_here(tmp_path, "name=a", sampled)
    assert result.code == 143, result.err
    run = tmp_path / "runs" / "a"
    assert steps(run)[0] == max(rows(run)) == 10
    assert "--- step 10\n" in (run / "samples.txt").read_text()


@pytest.mark.parametrize(("local_rank", "code"), [("0", 143), ("1", 0)])
def test_a_run_that_was_stopped_is_no_success_on_any_machine(
    local_rank: str, code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the first process on each: torchrun asks no other machine for its code."""
    monkeypatch.setenv("LOCAL_RANK", local_rank)
    trainer = SimpleNamespace(is_global_zero=False, callbacks=[], global_step=5, max_steps=9)
    with pytest.raises(SystemExit) if code else contextlib.nullcontext() as stop:
        runtime.finish(trainer, SimpleNamespace(fault=None, stopping=True), Path("a"))
    assert (stop.value.code if code else 0) == code


def test_sigterm_before_training_is_no_success(tmp_path: Path) -> None:
    step = LitGPT.validation_step

    def signalled(self, batch, batch_idx):
        os.kill(os.getpid(), signal.SIGTERM)
        return step(self, batch, batch_idx)

    with mock.patch.object(LitGPT, "validation_step", signalled):
        result = train_here(tmp_path, "data.max_val_tokens=null")
    assert result.code == 143 and "interrupted" in result.err


def test_the_best_is_linked_again_after_a_kill_between(tmp_path: Path) -> None:
    assert train_here(tmp_path, "name=a").code == 0
    folder = tmp_path / "runs" / "a" / "checkpoints"
    best_step = read_checkpoint(folder / "best.ckpt")["global_step"]
    assert best_step == 20
    (folder / "best.ckpt").unlink()
    assert train_here(tmp_path, "ckpt=a", tiny=False).code == 1  # it has finished
    assert read_checkpoint(folder / "best.ckpt")["global_step"] == 20
    (folder / "best.ckpt").unlink()
    assert train_here(tmp_path, "ckpt=a", "trainer.max_steps=21", "optim.lr=1", tiny=False).code == 0
    assert read_checkpoint(folder / "best.ckpt")["global_step"] in (20, 21)


def test_a_validation_loss_of_nan_is_not_the_best(tmp_path: Path) -> None:
    step = LitGPT.validation_step

    def nan(self, batch, batch_idx):
        step(self, batch, batch_idx)
        if self.global_step == 10:
            self.val_sums[0] = float("nan")

    with mock.patch.object(LitGPT, "validation_step", nan):
        result = train_here(tmp_path, "name=a")
    assert result.code == 0, result.err
    assert read_checkpoint(tmp_path / "runs/a/checkpoints/best.ckpt")["global_step"] == 20


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ("callbacks.samples.tokens=0", "callbacks.samples.tokens=0"),
        ("callbacks.samples.temperature=-1", "temperature=-1"),
        ("callbacks.samples.prompt=QQ", "does not know"),
    ],
)
def test_sample_settings_are_refused_before_anything_trains(setting: str, words: str, tmp_path: Path) -> None:
    sampled = "callbacks.samples={_target_: model.training.callbacks.Samples, tokens: 4}"
    result = train_here(
        tmp_path, "data.tokenizer.kind=char", sampled, setting.replace("callbacks", "++callbacks")
    )
    assert result.code == 1 and words in result.err and "step 0" not in result.out


@pytest.mark.parametrize("prompt", ["123", "0"])
def test_a_prompt_may_look_like_a_number(prompt: str, tmp_path: Path) -> None:
    sampled = "callbacks.samples={_target_: model.training.callbacks.Samples, tokens: 4}"
    encoded, seen = Samples._encoded, []

    def watched(self, tokenizer):
        seen.append(encoded(self, tokenizer))
        return seen[-1]

    with mock.patch.object(Samples, "_encoded", watched):
        result = train_here(tmp_path, sampled, f"+callbacks.samples.prompt={prompt}", "trainer.max_steps=1")
    assert result.code == 0, result.err
    assert seen[-1] == list(prompt.encode())


def test_samples_come_by_the_step_and_once(tmp_path: Path) -> None:
    """Every second validation, whether or not the run was resumed between; those of a later step are cut."""
    sampled = "callbacks.samples={_target_: model.training.callbacks.Samples, tokens: 4, every: 2}"
    settings = (sampled, "trainer.val_check_interval=5", "name=a")
    assert train_here(tmp_path, *settings, "trainer.max_steps=15").code == 0
    text = tmp_path / "runs" / "a" / "samples.txt"

    def headers() -> list[str]:
        return [line for line in text.read_text().splitlines() if line.startswith("--- step")]

    assert headers() == ["--- step 10", "--- step 15"]
    text.write_text(text.read_text() + "--- step 18\nof a course that was left\n")
    assert train_here(tmp_path, "ckpt=a", "trainer.max_steps=20", tiny=False).code == 0
    assert headers() == ["--- step 10", "--- step 15", "--- step 20"]


def test_a_model_that_sees_the_future_trains_without_samples(tmp_path: Path) -> None:
    sampled = "callbacks.samples={_target_: model.training.callbacks.Samples, tokens: 4}"
    result = train_here(tmp_path, sampled, "model.causal=false", "trainer.max_steps=2")
    assert result.code == 0, result.err


@contextlib.contextmanager
def late_writes(fails: Container[int] = (), first: Callable[[], None] = lambda: None) -> Iterator[None]:
    """Checkpoints are written 0.3 s late, behind a call of `first`, those at `fails` not at all; and the
    strategy does not wait for them, as Lightning's of FSDP2 does not."""
    write, calls = checkpoint_io.write_checkpoint, itertools.count()

    def late(*args: Any) -> None:
        first()
        time.sleep(0.3)
        if next(calls) in fails:
            raise CheckpointError("No space left on device")
        write(*args)

    with (
        mock.patch.object(checkpoint_io, "write_checkpoint", late),
        mock.patch.object(SingleDeviceStrategy, "teardown"),
    ):
        yield


NO_VALIDATION = ("name=a", "trainer.limit_val_batches=0", "trainer.max_steps=2")


@pytest.mark.parametrize("fails", [False, True])
def test_the_last_checkpoint_is_awaited(tmp_path: Path, fails: bool) -> None:
    with late_writes([0] if fails else []):
        result = train_here(tmp_path, *NO_VALIDATION)
        assert steps(tmp_path / "runs" / "a") == ([] if fails else [2])
    assert result.code == fails, result.err
    assert ("No space left" in result.err) == fails


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGHUP])
def test_a_signal_while_the_last_checkpoint_is_written(tmp_path: Path, number: int) -> None:
    with late_writes(first=lambda: os.kill(os.getpid(), number)):
        result = train_here(tmp_path, *NO_VALIDATION)
    assert "saving at the next step" in result.out and steps(tmp_path / "runs" / "a") == [2], result.err


def test_a_run_stops_where_a_checkpoint_cannot_be_written(tmp_path: Path) -> None:
    """At the next step, without waiting for the next checkpoint."""
    step, seen = LitGPT.training_step, []

    def slow(self, batch, batch_idx):
        seen.append(self.global_step)
        time.sleep(0.6 * (self.global_step == 5))
        return step(self, batch, batch_idx)

    with late_writes([0]), mock.patch.object(LitGPT, "training_step", slow):
        result = train_here(tmp_path, *NO_VALIDATION[:2], "callbacks.checkpoints.every=5")
    assert result.code == 1 and "No space left" in result.err and seen[-1] < 9  # it would save again then


def test_weights_are_saved_though_those_before_could_not_be(tmp_path: Path) -> None:
    unnoticed = mock.patch.object(checkpoint_io.VerifiedCheckpointIO, "check")
    with late_writes([0]), unnoticed:
        result = train_here(tmp_path, *NO_VALIDATION, "callbacks.checkpoints.every=1")
    assert result.code == 1 and "No space left" in result.err and "from step 2" in result.err
    assert steps(tmp_path / "runs" / "a") == [2]


def test_what_is_being_written_ends_before_a_run_that_failed_is_left(tmp_path: Path) -> None:
    """Or another process might take the run over meanwhile."""

    def broken(self, batch, batch_idx, step=LitGPT.training_step):
        if self.global_step == 2:
            raise OSError("a mistake")
        return step(self, batch, batch_idx)

    for name, fails, kept in (("a", [], [2]), ("b", [0], [])):
        with late_writes(fails), mock.patch.object(LitGPT, "training_step", broken):
            result = train_here(tmp_path, *NO_VALIDATION[:2], "callbacks.checkpoints.every=2", f"name={name}")
            assert steps(tmp_path / "runs" / name) == kept
        assert result.code == 1 and "a mistake" in result.err
        assert ("could not be written: No space left" in result.err) == bool(fails)
