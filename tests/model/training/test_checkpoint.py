"""Checkpoints are whole or absent; what is not whole is said in one message."""

from __future__ import annotations

import errno
import os
import pickle
import zipfile
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from model.gpt import GPT, GPTConfig
from model.training import checkpoint as module
from model.training.checkpoint import (
    CheckpointError,
    checkpoints_of,
    link,
    read_checkpoint,
    resolve,
    verify,
    write_checkpoint,
)
from tests.running import rows, train_here

CONFIG = GPTConfig(vocab_size=64, seq_len=8, n_layer=1, n_head=1, n_embd=16)
WEIGHTS = {f"net.{name}": value for name, value in GPT(CONFIG, torch.nn.Identity()).state_dict().items()}
WEIGHT = "net.transformer.wpe.weight"
CONTENT: dict[str, Any] = {
    "epoch": 0, "global_step": 3, "pytorch-lightning_version": "2.6.0", "loops": {}, "callbacks": {},
    "optimizer_states": [], "lr_schedulers": [], "TokenDataModule": {}, "state_dict": WEIGHTS,
    "tilegpt": {"schema": 1, "choices": {}, "config": {}, "model": vars(CONFIG), "tokenizer": None},
}  # fmt: skip


@pytest.fixture
def good(tmp_path: Path) -> Path:
    path = tmp_path / "runs" / "a" / "checkpoints" / "step-00000003.ckpt"
    write_checkpoint(CONTENT, path)
    return path


def test_what_is_written_is_read(good: Path) -> None:
    content = read_checkpoint(good)
    assert content["tilegpt"] == CONTENT["tilegpt"] and content["global_step"] == 3
    assert torch.equal(content["state_dict"][WEIGHT], WEIGHTS[WEIGHT])
    assert [path.name for path in good.parent.iterdir()] == [good.name]


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-100])


def cut_in_half(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    at = data.index(WEIGHTS[WEIGHT].numpy().tobytes()[400:440])
    data[at] ^= 1
    path.write_bytes(bytes(data))


def empty(path: Path) -> None:
    path.write_bytes(b"")


def text(path: Path) -> None:
    path.write_text("not a checkpoint at all\n" * 100)


def foreign_zip(path: Path) -> None:
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("hello.txt", "hello")


def foreign_torch(path: Path) -> None:
    torch.save({"state_dict": {}}, path)


def foreign_list(path: Path) -> None:
    torch.save([1, 2, 3], path)


class Payload:
    def __reduce__(self) -> tuple:
        return (os.mkdir, ("owned",))


def payload(path: Path) -> None:
    torch.save({"tilegpt": Payload()}, path)


def bare_pickle(path: Path) -> None:
    path.write_bytes(pickle.dumps({"tilegpt": Payload()}))


BAD = {
    truncate: "is truncated or no checkpoint",
    cut_in_half: "is truncated or no checkpoint",
    flip: "is damaged: the checksum of .* is wrong",
    empty: "is truncated or no checkpoint",
    text: "is truncated or no checkpoint",
    foreign_zip: "is no checkpoint: ",
    foreign_torch: "has no 'tilegpt' entry",
    foreign_list: "is no checkpoint of this project",
    payload: "could run code: refused",
    bare_pickle: "is truncated or no checkpoint",
}


@pytest.mark.parametrize("damage", BAD, ids=lambda function: function.__name__)
def test_a_bad_file_is_one_clear_error(damage: Any, good: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(good.parent)
    damage(good)
    with pytest.raises(CheckpointError, match=BAD[damage]) as caught:
        read_checkpoint(good)
    assert str(good) in str(caught.value) and str(caught.value).count("\n") == 0
    assert not Path("owned").exists()


def test_a_missing_file_and_what_lies_beside_a_damaged_one(good: Path) -> None:
    with pytest.raises(CheckpointError, match="There is no checkpoint"):
        verify(good.with_name("step-00000009.ckpt"))
    newer = good.with_name("step-00000005.ckpt")
    write_checkpoint(CONTENT, newer)
    flip(newer)
    with pytest.raises(CheckpointError, match=r"Beside it: step-00000003.ckpt; ckpt=last takes"):
        verify(newer)


@pytest.mark.parametrize("damage", [truncate, flip])
def test_last_passes_over_a_bad_newest(
    damage: Any, good: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.chdir(good.parents[3])
    newer = good.with_name("step-00000005.ckpt")
    write_checkpoint(CONTENT, newer)
    assert resolve("last") == newer.relative_to(Path.cwd()) == resolve("a")
    damage(newer)
    assert resolve("last") == good.relative_to(Path.cwd()) == resolve("a")
    assert f"Skipping a damaged checkpoint: {newer.relative_to(Path.cwd())}" in capsys.readouterr().out
    truncate(good)
    with pytest.raises(CheckpointError, match="No checkpoint of runs/a is whole; 2 were tried"):
        resolve("last")


def test_names_that_can_be_given(good: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(good.parents[3])
    relative = good.relative_to(Path.cwd())
    link(good, good.with_name("best.ckpt"))
    for name in ("last", "a", "runs/a", "runs/a/", str(relative)):
        assert resolve(name) == relative
    assert resolve("a/best") == relative.with_name("best.ckpt")
    assert resolve(str(good)) == good
    newer = Path("runs/b/checkpoints/step-00000001.ckpt")
    write_checkpoint(CONTENT, newer)
    os.utime("runs/a", ns=(1, 1))
    assert resolve("last") == newer
    Path("runs/c/checkpoints").mkdir(parents=True)  # a run that has saved nothing yet
    assert resolve("last") == newer
    for name in ("nobody", "nobody/best", "a/worst", "../a"):
        with pytest.raises(
            CheckpointError, match=r"neither a file nor a run under runs/.*Runs, newest first: "
        ):
            resolve(name, found=lambda run: pytest.fail(f"{run} is locked"))
    with pytest.raises(CheckpointError, match=r"There is no checkpoint runs/b/checkpoints/best.ckpt"):
        resolve("b/best")
    Path("llama").mkdir()
    Path("llama/config.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"ckpt=llama is a folder of pretrained .* init_from=llama"):
        resolve("llama")


def test_last_without_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(CheckpointError, match=r"no run under runs/ has a checkpoint yet. Train first"):
        resolve("last")


def test_a_full_disk_leaves_the_earlier_ones(good: Path) -> None:
    whole = good.read_bytes()

    def full(checkpoint: Any, file: Any) -> None:
        file.write(b"half of it")
        raise OSError(errno.ENOSPC, "No space left on device")

    for path in (good, good.with_name("step-00000005.ckpt")):
        with (
            mock.patch.object(module.torch, "save", full),
            pytest.raises(
                CheckpointError,
                match=r"could not be written: No space left on device. [\d,]+ MiB are free; runs_dir=",
            ),
        ):
            write_checkpoint(CONTENT, path)
    assert [path.name for path in good.parent.iterdir()] == [good.name]
    assert good.read_bytes() == whole


def test_what_is_interrupted_leaves_nothing(good: Path) -> None:
    whole = good.read_bytes()
    with mock.patch.object(os, "fsync", side_effect=KeyboardInterrupt), pytest.raises(KeyboardInterrupt):
        write_checkpoint({**CONTENT, "global_step": 4}, good)
    assert [path.name for path in good.parent.iterdir()] == [good.name] and good.read_bytes() == whole


def test_link_without_hard_links(good: Path) -> None:
    best = good.with_name("best.ckpt")
    link(good, best)
    link(good, best)  # once more: nothing left over
    assert best.stat().st_ino == good.stat().st_ino and not list(good.parent.glob("*.partial"))
    best.unlink()
    with mock.patch.object(os, "link", side_effect=OSError("no hard links here")):
        link(good, best)
    assert best.stat().st_ino != good.stat().st_ino and best.read_bytes() == good.read_bytes()


def test_a_run_keeps_the_newest_and_the_best(tmp_path: Path) -> None:
    """The learning rate blows up half way, so that the best is not the newest."""
    settings = ("callbacks.checkpoints.every=4", "callbacks.checkpoints.keep=3", "schedule=constant")
    result = train_here(
        tmp_path, "name=a", *settings, "schedule.warmup_steps=1", "trainer.val_check_interval=5"
    )
    assert result.code == 0, result.err
    folder = tmp_path / "runs" / "a" / "checkpoints"
    assert [path.name for path in checkpoints_of(folder)] == [f"step-000000{n}.ckpt" for n in (20, 16, 15)]
    result = train_here(
        tmp_path, "ckpt=a", "trainer.max_steps=30", "optim.lr=10", "grad_clip=null", tiny=False
    )
    assert result.code == 0, result.err
    best = read_checkpoint(folder / "best.ckpt")
    losses = {
        step: float(row["val/loss"])
        for step, row in rows(tmp_path / "runs" / "a").items()
        if "val/loss" in row
    }
    assert list(losses) == [0, 5, 10, 15, 20, 25, 30]
    assert best["global_step"] == min(losses, key=losses.get) < 30
    assert f"best validation loss {min(losses.values()):.4f}" in result.out
    assert {path.name for path in folder.iterdir()} == {  # 20: the last before the loss was beyond sense
        "best.ckpt", "step-00000030.ckpt", "step-00000028.ckpt", "step-00000025.ckpt", "step-00000020.ckpt"
    }  # fmt: skip


def test_a_run_on_a_full_disk_says_so_once(tmp_path: Path) -> None:
    save = torch.save

    def full(checkpoint: Any, file: Any) -> None:
        if checkpoint["global_step"] > 10:
            raise OSError(errno.ENOSPC, "No space left on device")
        save(checkpoint, file)

    with mock.patch.object(torch, "save", full):
        result = train_here(tmp_path, "name=a")
    assert result.code == 1
    assert "step-00000020.ckpt could not be written: No space left on device." in result.err
    assert "ckpt=a continues from step 10" in result.err and "Traceback" not in result.err
    assert {path.name for path in (tmp_path / "runs/a/checkpoints").iterdir()} == {
        "best.ckpt", "step-00000010.ckpt"
    }  # fmt: skip
    assert train_here(tmp_path, "ckpt=last", tiny=False).code == 0
