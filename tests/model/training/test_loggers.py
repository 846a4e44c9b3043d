"""metrics.csv across a resume, Weights & Biases without an account, TensorBoard."""

from __future__ import annotations

import csv
import math
import socket
import time
from pathlib import Path
from unittest import mock

import pytest

from model.training import loggers
from model.training.loggers import MetricsCSV, tensorboard_logger
from tests.running import Result, finish, rows, start, train_here


def table(path: Path) -> list[dict[str, str]]:
    with open(path, newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def filled(path: Path, steps: int = 4) -> MetricsCSV:
    logger = MetricsCSV(str(path))
    for step in range(1, steps + 1):
        logger.log_metrics({"loss": 1 / step}, step)
    return logger


def test_a_row_is_on_disk_once_logged(tmp_path: Path) -> None:
    filled(tmp_path / "m.csv")
    assert (tmp_path / "m.csv").read_text().split() == [
        "step,loss", "1,1.0", "2,0.5", "3,0.3333333333333333", "4,0.25"
    ]  # fmt: skip


def test_a_resume_cuts_and_goes_on(tmp_path: Path) -> None:
    path = tmp_path / "m.csv"
    filled(path)
    before = path.read_text().splitlines()
    logger = MetricsCSV(str(path), resume_step=2)
    assert path.read_text().splitlines() == before[:3]
    logger.log_metrics({"loss": 7.0}, 3)
    assert [(row["step"], row["loss"]) for row in table(path)] == [("1", "1.0"), ("2", "0.5"), ("3", "7.0")]
    assert [entry.name for entry in tmp_path.iterdir()] == ["m.csv"]


def test_a_new_run_starts_empty(tmp_path: Path) -> None:
    filled(tmp_path / "m.csv")
    MetricsCSV(str(tmp_path / "m.csv"))
    assert table(tmp_path / "m.csv") == []


@pytest.mark.parametrize("torn", ["4", "4,", "4,0.2", "4,0.2,9", "4,0.25,9.5,1", "\0\0", "\u00b2,1,1"])
def test_a_torn_last_row_goes(torn: str, tmp_path: Path) -> None:
    """Whatever of it was written before the kill: it lies behind the checkpoint, so it is cut."""
    path = tmp_path / "m.csv"
    path.write_text(f"step,loss,norm\n1,1.0,2.0\n2,0.5,\n3,0.25,2.5\n{torn}")
    logger = MetricsCSV(str(path), resume_step=3)
    logger.log_metrics({"loss": 0.125, "norm": math.inf}, 4)
    assert path.read_text().splitlines() == [
        "step,loss,norm",
        "1,1.0,2.0",
        "2,0.5,",
        "3,0.25,2.5",
        "4,0.125,inf",
    ]


@pytest.mark.parametrize("content", ["", "step"])
def test_a_torn_header_is_written_anew(content: str, tmp_path: Path) -> None:
    path = tmp_path / "m.csv"
    path.write_text(content)
    MetricsCSV(str(path), resume_step=0).log_metrics({"loss": 1.0}, 1)
    assert table(path) == [{"step": "1", "loss": "1.0"}]


def test_a_metric_that_comes_later_gets_a_column(tmp_path: Path) -> None:
    logger = filled(tmp_path / "m.csv", steps=1)
    logger.log_metrics({"val": 3.0}, 1)
    logger.log_metrics({"loss": 0.5, "val": 2.0}, 2)
    assert table(tmp_path / "m.csv") == [
        {"step": "1", "loss": "1.0", "val": ""},
        {"step": "1", "loss": "", "val": "3.0"},
        {"step": "2", "loss": "0.5", "val": "2.0"},
    ]
    again = MetricsCSV(str(tmp_path / "m.csv"), resume_step=1)
    again.log_metrics({"new": 1.0, "loss": 4.0}, 2)
    assert table(tmp_path / "m.csv")[2] == {"step": "2", "loss": "4.0", "val": "", "new": "1.0"}


def test_tensorboard_writes_events(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    logger = tensorboard_logger(str(tmp_path), {})
    logger.log_metrics({"train/loss": 2.5}, 3)
    logger.finalize("success")
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert [(event.step, event.value) for event in events.Scalars("train/loss")] == [(3, 2.5)]


def test_tensorboard_goes_on_where_the_checkpoint_was(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    for resume_step, steps, value in ((None, (1, 2, 3), 2.5), (1, (2,), 7.0)):
        if resume_step is not None:
            time.sleep(1.1)  # event files are ordered by the second in their names
        logger = tensorboard_logger(str(tmp_path), {}, resume_step)
        for step in steps:
            logger.log_metrics({"loss": value}, step)
        logger.finalize("success")
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert [(event.step, event.value) for event in events.Scalars("loss")] == [(1, 2.5), (2, 7.0)]


def test_tensorboard_as_asked_for_beside_the_csv(tmp_path: Path) -> None:
    assert train_here(tmp_path, "name=a", "logger=tensorboard").code == 0
    assert list((tmp_path / "runs/a/tensorboard").glob("events.*"))
    assert len(rows(tmp_path / "runs" / "a")) == 21


@pytest.fixture
def no_account(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in ("WANDB_MODE", "WANDB_API_KEY", "WANDB_BASE_URL"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    return tmp_path


def run_with_wandb(folder: Path, *overrides: str) -> Result:
    return finish(start(folder, "name=a", "logger=wandb", *overrides), timeout=60)


@pytest.mark.long
def test_wandb_without_a_key_logs_offline_and_says_how_to_sync(no_account: Path) -> None:
    result = run_with_wandb(
        no_account, "callbacks.samples={_target_: model.training.callbacks.Samples, tokens: 4}"
    )
    assert result.code == 0, result.err
    assert "W&B logs offline: there is no API key (wandb login)." in result.out
    assert "wandb sync runs/a/wandb/offline-run-*" in result.out
    (run,) = (no_account / "runs" / "a" / "wandb").glob("offline-run-*")
    (log,) = run.glob("run-*.wandb")
    content = log.read_bytes()
    for word in (b"train/loss", b"val/loss", b"n_embd", b"samples"):
        assert word in content
    assert list(run.glob("files/media/table/samples*.json"))
    assert len(rows(no_account / "runs" / "a")) == 21


@pytest.mark.long
def test_a_malformed_key_is_refused_before_training(
    no_account: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "not-a-key")
    result = run_with_wandb(no_account)
    assert result.code == 1
    assert "error: W&B did not start: WANDB_API_KEY invalid" in result.err, result.err
    assert "logger.offline=true" in result.err and "Traceback" not in result.err
    assert "step 0: validation" not in result.out


@pytest.mark.parametrize("offline", [None, False])
def test_a_server_that_cannot_be_reached(
    offline: bool | None, no_account: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    """Within seconds: offline where that was left open, an error where it was excluded."""
    monkeypatch.setenv("WANDB_BASE_URL", "http://127.0.0.1:9")
    with mock.patch("wandb.login", return_value=True), mock.patch("wandb.init") as init:
        if offline is None:
            loggers.wandb_logger(f"{no_account}/runs/a", {})
            assert init.call_args.kwargs["mode"] == "offline"
            assert (
                "offline: 127.0.0.1:9 cannot be reached. Upload later with: wandb" in capsys.readouterr().out
            )
        else:
            with pytest.raises(ValueError, match=r"logger.offline=false, but 127.0.0.1:9 cannot be reached"):
                loggers.wandb_logger("runs/a", {}, offline=False)
            assert not init.called


def test_a_key_and_a_server_mean_online(no_account: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        monkeypatch.setenv("WANDB_BASE_URL", f"http://127.0.0.1:{server.getsockname()[1]}")
        with mock.patch("wandb.login", return_value=True), mock.patch("wandb.init") as init:
            loggers.wandb_logger(f"{no_account}/runs/a", {"seed": 1}, resume_step=3)
            assert init.call_args.kwargs["mode"] == "online"
            loggers.wandb_logger(f"{no_account}/runs/a", {"seed": 1}, offline=True)
            assert init.call_args.kwargs["mode"] == "offline"
    settings = init.call_args.kwargs
    assert settings["reinit"] == "finish_previous"  # the next job of a sweep is a run of its own
    assert settings["name"] == "a" and settings["resume"] == "allow" and settings["config"] == {"seed": 1}


def test_runs_of_one_name_in_two_folders_are_two_to_wandb(no_account: Path) -> None:
    """A resumed run goes on in its own, also one of a version that knew it by its name; what begins anew, in
    the folder of a run that left nothing, does not."""

    def id_of(folder: str, resume_step: int | None = None) -> str:
        with mock.patch("wandb.login", return_value=False), mock.patch("wandb.init") as init:
            loggers.wandb_logger(str(no_account / folder), {}, resume_step)
        assert init.call_args.kwargs["name"] == Path(folder).name
        return init.call_args.kwargs["id"]

    first, second = id_of("runs/a"), id_of("others/a")
    assert first != second and len(first) == len(second) == 16
    assert id_of("runs/a", 3) == id_of("runs/a", 5) == first and id_of("others/a", 3) == second
    assert id_of("runs/a") not in (first, second)
    (no_account / "runs" / "old" / "wandb").mkdir(parents=True)
    assert id_of("runs/old", 3) == id_of("runs/old", 5) == "old"
    assert id_of("runs/new", 3) not in ("new", first, second)
