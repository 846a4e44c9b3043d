"""A run that was killed and continued is the run that was not: every number of metrics.csv, as written."""

from __future__ import annotations

import csv
import fcntl
import gc
import os
import re
import select
import shutil
import signal
import sys
import termios
import time
from pathlib import Path
from unittest import mock

import pytest
import torch

import train
from model.training.checkpoint import read_checkpoint
from tests.faults import Child
from tests.running import ROOT, TINY, Result, finish, rows, start, train_here, write_book

# Dropout of both kinds, worker processes and accumulation: each has broken exact resume somewhere.
SETTINGS = {
    "plain": (),
    "dropout": ("model.dropout=0.2", "model.attn_dropout=0.2"),
    "all": ("model.dropout=0.1", "model.attn_dropout=0.1", "data.num_workers=2", "tokens_per_step=128"),
}
STEPS = 60


@pytest.fixture(scope="module")
def references(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict]:
    """Settings -> the numbers of a run that nobody disturbs."""
    folder = tmp_path_factory.mktemp("reference")
    for name, overrides in SETTINGS.items():
        assert train_here(folder, *long(name), f"name={name}", *overrides).code == 0
    return {name: rows(folder / "runs" / name) for name in SETTINGS}


def long(settings: str, steps: int = STEPS) -> tuple[str, ...]:
    return (f"trainer.max_steps={steps}", "callbacks.checkpoints.every=7", *SETTINGS[settings])


def last_step(run: Path) -> int:
    """The last step whose row is whole."""
    try:
        with open(run / "metrics.csv", newline="", encoding="utf-8") as file:
            return max((int(row["step"]) for row in csv.DictReader(file) if row.get("train/lr")), default=0)
    except (FileNotFoundError, ValueError):
        return 0


def kill_at(folder: Path, step: int, *overrides: str, tiny: bool = True) -> Result:
    """SIGKILL as soon as metrics.csv holds `step`."""
    process = start(folder, *overrides, *(["name=a"] if tiny else []), tiny=tiny)
    while last_step(folder / "runs" / "a") < step and process.poll() is None:
        time.sleep(0.01)
    process.kill()
    return finish(process)


def continued(folder: Path, ckpt: str = "last", *overrides: str) -> dict[int, dict[str, str]]:
    result = train_here(folder, f"ckpt={ckpt}", *overrides, tiny=False)
    assert result.code == 0, result.err
    return rows(folder / "runs" / "a")


def test_killed_with_everything_on_continues_bit_for_bit(tmp_path: Path, references: dict) -> None:
    assert kill_at(tmp_path, 24, *long("all")).code == -signal.SIGKILL
    assert last_step(tmp_path / "runs" / "a") < STEPS
    assert continued(tmp_path) == references["all"]


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)]
)
def test_a_signal_saves_first(number: int, code: int, tmp_path: Path, references: dict) -> None:
    from model.training.lit_gpt import LitGPT

    step = LitGPT.training_step

    def signalled(self, batch, batch_idx):
        if self.global_step == 23:
            os.kill(os.getpid(), number)
        return step(self, batch, batch_idx)

    with mock.patch.object(LitGPT, "training_step", signalled):
        result = train_here(tmp_path, *long("dropout"), "name=a")
    assert result.code == 128 + number, result.err
    assert "step 24, saved. Continue: python train.py ckpt=a" in result.out
    assert (tmp_path / "runs" / "a" / "checkpoints" / "step-00000024.ckpt").is_file()
    assert signal.getsignal(number) in (signal.SIG_DFL, signal.default_int_handler)
    assert continued(tmp_path) == references["dropout"]


@pytest.mark.parametrize(
    ("where", "at", "signals", "promise"),
    [
        ("training_step", 0, 2, ""),
        ("training_step", 15, 2, "; ckpt=a continues from step 10"),
        ("validation_step", 0, 1, ""),  # before training
    ],
)
def test_a_second_signal_or_one_before_training_ends_at_once(
    where: str, at: int, signals: int, promise: str, tmp_path: Path
) -> None:
    """What can be gone on with is said; where nothing is saved, nothing is promised."""
    from model.training.lit_gpt import LitGPT

    step, sent = getattr(LitGPT, where), []

    def signalled(self, batch, batch_idx):
        while self.global_step == at and len(sent) < signals:
            sent.append(signal.SIGINT)
            os.kill(os.getpid(), signal.SIGINT)
        return step(self, batch, batch_idx)

    with mock.patch.object(LitGPT, where, signalled):
        result = train_here(tmp_path, "name=a")
    assert result.code == 130 and "Traceback" not in result.err
    assert result.err.endswith(f"\ninterrupted{promise}\n"), result.err
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_terminal_that_goes_away_loses_no_step(tmp_path: Path, references: dict) -> None:
    """The window is closed: SIGHUP comes, and nothing can be printed any more."""
    ours, theirs = os.openpty()
    write_book(tmp_path)

    def work() -> None:
        os.setsid()
        fcntl.ioctl(theirs, termios.TIOCSCTTY, 0)
        os.close(ours)
        os.chdir(tmp_path)
        for fd in (1, 2):
            os.dup2(theirs, fd)
        sys.stdout = sys.__stdout__ = open(1, "w", closefd=False)  # noqa: SIM115 - for pytest's
        sys.stderr = sys.__stderr__ = open(2, "w", closefd=False)  # noqa: SIM115
        sys.argv = ["train.py", *TINY, *long("dropout"), "name=a"]
        train.main()

    child = Child(work)
    os.close(theirs)
    while last_step(tmp_path / "runs" / "a") < 12:
        if select.select([ours], [], [], 0.001)[0]:
            os.read(ours, 1 << 16)
    os.close(ours)
    assert child.wait() == 128 + signal.SIGHUP, child.said
    assert continued(tmp_path) == references["dropout"]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("attention", ["sdpa", "tiled"])
def test_another_attention_goes_on_within_rounding(attention: str, tmp_path: Path, references: dict) -> None:
    assert train_here(tmp_path, *long("plain"), "trainer.limit_val_batches=1.0", "name=a").code == 0
    run = tmp_path / "runs" / "a"
    for path in run.glob("checkpoints/step-*.ckpt"):
        if path.name > "step-00000056.ckpt":
            path.unlink()
    result = train_here(tmp_path, "ckpt=a", f"attention={attention}", tiny=False)
    assert result.code == 0 and re.search(rf"^attention +{attention}$", result.out, re.MULTILINE)
    table = rows(run)
    assert table.keys() == references["plain"].keys()
    for step, row in references["plain"].items():
        for key, value in row.items():
            assert float(table[step][key]) == pytest.approx(float(value), rel=1e-4), (step, key)


def test_the_end_of_a_run_is_said_and_can_be_moved(tmp_path: Path) -> None:
    result = train_here(tmp_path, "name=a")
    assert result.code == 0 and "compare      python train.py attention=tiled" in result.out
    result = train_here(tmp_path, "ckpt=a", tiny=False)
    assert result.code == 1
    assert "finished" in result.err and "trainer.max_steps=40" in result.err
    result = train_here(tmp_path, "ckpt=a", "trainer.max_steps=30", "optim.lr=5e-3", tiny=False)
    assert result.code == 0 and "compare" not in result.out  # its command line does not say with what
    assert max(rows(tmp_path / "runs" / "a")) == 30


def test_what_resumes_and_what_differs_is_said(finished: Path) -> None:
    changed = (
        "attention=tiled", "attention.block_q=64", "logger=null", "data.batch_size=4",
        "trainer.max_steps=25", "model.dropout=0.1",
    )  # fmt: skip
    result = train_here(finished, "ckpt=a", "name=said", *changed, tiny=False)
    assert result.code == 0, result.err
    said = result.out.split("\nmodel  ")[0].splitlines()
    assert said[0] == "resumes    runs/said at step 20, from runs/a/checkpoints/step-00000020.ckpt"
    assert said[1].startswith("changed    ") and {line[11:] for line in said[1:]} == {
        "attention: naive -> tiled", "attention.block_q: null -> 64", "logger: csv -> null",
        "model.dropout: 0.0 -> 0.1", "trainer.max_steps: 20 -> 25",
        "learning rate at step 20: 0.001 as saved -> 0.002318",
    }  # fmt: skip
    assert float(rows(finished / "runs" / "said")[21]["train/lr"]) == pytest.approx(0.002318, rel=1e-3)


def test_nothing_differs(tmp_path: Path) -> None:
    assert train_here(tmp_path, "name='a (1)'", "callbacks.checkpoints.every=5").code == 0
    (tmp_path / "runs/a (1)/checkpoints/step-00000020.ckpt").unlink()
    result = train_here(tmp_path, "ckpt='a (1)'", tiny=False)
    assert "\nchanged    nothing (the saved config is used unchanged)\n" in result.out, result.err


@pytest.mark.parametrize(
    ("override", "name"),
    [
        ("model.n_embd=64", "model.n_embd"),
        ("model.n_layer=3", "model.n_layer"),
        ("model.position=rope", "model.position"),
        ("seq_len=32", "seq_len"),
        ("seed=1", "seed"),
        ("data.tokenizer.kind=char", "data.tokenizer.kind"),
        ("data=synthetic", "data"),
        ("optim=muon", "another optim (there adamw, asked muon)"),
        ("model=llama_tiny", "model.n_kv_head"),
        ("optim.learning_rate=1", "optim.learning_rate"),
        ("+schedule.nope=1", "schedule: "),
        ("attention=flash99", "no attention=flash99; did you mean flash4?"),
        ("callbacks.checkpoint.every=3", "no key callbacks.checkpoint; did you mean checkpoints?"),
        ("modl.window=3", "no key modl; did you mean model?"),
        ("max_steps=9", "no key max_steps; did you mean trainer.max_steps?"),
        ("seq_len.of=3", "no key seq_len.of. seq_len has none."),
        ("trainer.max_steps=many", "trainer.max_steps=many"),
        ("seed", "seed"),
        ("~optim.lr", "~optim.lr"),
    ],
)
def test_what_would_be_another_run_is_refused_by_name(override: str, name: str, finished: Path) -> None:
    files = [finished / "runs" / "a" / name for name in ("metrics.csv", "config.yaml")]
    before = [file.read_bytes() for file in files]
    result = train_here(finished, "ckpt=a", "trainer.max_steps=30", override, tiny=False)
    assert result.code == 1
    assert "Traceback" not in result.err and name in result.err, result.err
    assert result.err.startswith("error: ") and result.err.count("error: ") == 1
    assert [file.read_bytes() for file in files] == before


def test_a_text_that_has_changed_is_refused_wherever_it_lies(finished: Path) -> None:
    before, prepared = (finished / "runs/a/metrics.csv").read_bytes(), [*(finished / "prepared").iterdir()]
    result = train_here(finished, "ckpt=a", "trainer.max_steps=30", "data.path=other.txt", tiny=False)
    said = "\nerror: data.path=other.txt: the text has changed since the checkpoint was written"
    assert result.code == 1 and said in result.err, result.err
    assert (finished / "runs" / "a" / "metrics.csv").read_bytes() == before
    assert [*(finished / "prepared").iterdir()] == prepared


def test_a_file_from_elsewhere_makes_a_new_run(finished: Path, tmp_path: Path) -> None:
    """The folders around it are not ours to write into."""
    elsewhere = tmp_path / "mail" / "attachments" / "step-00000020.ckpt"
    elsewhere.parent.mkdir(parents=True)
    shutil.copy(finished / "runs" / "a" / "checkpoints" / elsewhere.name, elsewhere)
    write_book(tmp_path)
    result = train_here(tmp_path, f"ckpt={elsewhere}", "trainer.max_steps=22", tiny=False)
    assert result.code == 0, result.err
    (run,) = (tmp_path / "runs").iterdir()
    assert run.name.startswith("tiny-naive-") and list(rows(run)) == [21, 22]
    assert [path.name for path in (tmp_path / "mail").rglob("*")] == ["attachments", elsewhere.name]


def test_a_checkpoint_is_checked_once_and_not_kept(tmp_path: Path) -> None:
    from model.training import checkpoint
    from model.training.lit_gpt import LitGPT

    assert train_here(tmp_path, "name=a").code == 0
    tensors, fit_start = [], LitGPT.on_train_start

    def count(self: LitGPT) -> None:
        gc.collect()
        known = {id(parameter) for parameter in self.parameters()}
        tensors.extend(  # (vocabulary, width) beside the model's own, its moments and its gradient
            t
            for t in gc.get_objects()
            if type(t) is torch.Tensor and t.shape == (320, 32) and id(t) not in known
        )
        fit_start(self)

    with (
        mock.patch.object(LitGPT, "on_train_start", count),
        mock.patch.object(checkpoint, "verify", wraps=checkpoint.verify) as verify,
    ):
        result = train_here(tmp_path, "ckpt=a", "trainer.max_steps=21", tiny=False)
    assert result.code == 0, result.err
    assert verify.call_count == 1
    assert len(tensors) == 2  # the two moments


def test_another_file_of_a_group_keeps_the_steps(finished: Path) -> None:
    result = train_here(finished, "ckpt=a", "name=g", "trainer=default", tiny=False)
    assert result.code == 1 and "at step 20 of trainer.max_steps=20" in result.err


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("finished")
    assert train_here(folder, "name=a").code == 0
    write_book(folder, 5990).rename(folder / "other.txt")
    write_book(folder).rename(folder / "copy.txt")
    write_book(folder)
    return folder


def test_what_may_change_does(finished: Path) -> None:
    result = train_here(
        finished, "ckpt=a", "name=b", "trainer.max_steps=25", "model.dropout=0.1", "optim.lr=1e-3",
        "data.batch_size=2", "data.path=copy.txt", tiny=False,
    )  # fmt: skip
    assert result.code == 0, result.err
    table = rows(finished / "runs" / "b")
    assert list(table) == list(range(26))  # those of the run that it comes from, and its own
    assert float(table[21]["train/lr"]) < 1e-3


@pytest.mark.long
def test_a_bare_command_line_from_another_folder(tmp_path: Path) -> None:
    """As users run it: by its path, runs/ in their folder."""
    assert ROOT not in tmp_path.parents
    result = finish(start(tmp_path, "name=a", "callbacks.metrics.every=5"))
    assert result.code == 0 and "Traceback" not in result.err, result.err
    assert sorted(rows(tmp_path / "runs" / "a")) == [0, 5, 10, 15, 20]


def test_a_callback_of_lightning_s_that_adds_to_the_checkpoint_goes_on(tmp_path: Path) -> None:
    """It keeps the weights of the last step in an entry of its own, and their average as the model's."""
    average = "+callbacks.ema._target_=lightning.pytorch.callbacks.EMAWeightAveraging"
    assert train_here(tmp_path, "name=b", "trainer.max_steps=5", average).code == 0
    assert train_here(tmp_path, "name=a", "trainer.max_steps=3", average).code == 0
    result = train_here(tmp_path, "ckpt=a", "trainer.max_steps=5", average, tiny=False)
    assert (result.code, result.err) == (0, "")
    a, b = (read_checkpoint(tmp_path / f"runs/{run}/checkpoints/step-00000005.ckpt") for run in "ab")
    assert a["averaging_state"] == b["averaging_state"] == {"n_averaged": 5}
    for part in ("state_dict", "current_model_state"):
        assert all(torch.equal(weight, b[part][name]) for name, weight in a[part].items())
