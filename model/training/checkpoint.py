"""Checkpoints that are whole or absent: written beside their place, flushed, renamed; checked byte by byte
when read.

A checkpoint is one file, `runs/<run>/checkpoints/step-00000500.ckpt`: a zip archive of torch's own, whose
CRCs catch truncation and bit rot, read with `weights_only=True`. What makes it ours is the key "tilegpt".
"""

from __future__ import annotations

import contextlib
import os
import pickle
import shutil
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from conf.values import UserError
from model.training.untrusted import printable, require_checkpoint

RUNS = Path("runs")


class CheckpointError(UserError):
    """A checkpoint that cannot be used, or could not be written; the message says what to do."""


def write_checkpoint(checkpoint: dict[str, Any], path: Path) -> None:
    """Write atomically. On a full disk the half-written file goes, and what was there before stays."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f"{path.name}.{os.getpid()}.partial")
    try:
        with open(partial, "wb") as file:
            torch.save(checkpoint, file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, path)
        sync_folder(path.parent)
    except BaseException as error:
        with contextlib.suppress(OSError):
            partial.unlink()
        if not isinstance(error, OSError | RuntimeError):
            raise
        why: BaseException | None = error
        while why is not None and not isinstance(why, OSError):  # torch's own words: "unexpected pos"
            why = why.__cause__ or why.__context__
        raise CheckpointError(
            f"{path} could not be written: {why.strerror if why else error}. {_room(path.parent)} "
            "Checkpoints written before are untouched."
        ) from error


def sync_folder(folder: Path) -> None:
    """The names in it survive a power cut."""
    directory = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)


def _room(folder: Path) -> str:
    return f"{shutil.disk_usage(folder).free / 2**20:,.0f} MiB are free; runs_dir=... puts runs elsewhere."


def link(path: Path, name: Path) -> None:
    """Make `name` another name of the file at `path`, atomically: a copy of gigabytes that costs nothing."""
    if name.exists() and name.samefile(path):
        return  # renaming one name of a file to another of its names does nothing, and would leave both
    partial = name.with_name(f"{name.name}.{os.getpid()}.partial")
    try:
        os.link(path, partial)
    except OSError:  # a file system without hard links
        shutil.copyfile(path, partial)
    os.replace(partial, name)


def link_best(folder: Path, step: int | None) -> None:
    """Make the checkpoint of `step`, if it is there, the best: once more, a kill may have fallen before."""
    if isinstance(step, int) and (path := folder / f"step-{step:08d}.ckpt").exists():
        link(path, folder / "best.ckpt")


def read_checkpoint(
    path: Path, *, verified: bool = False, mmap: bool = False, step: int | None = None
) -> dict[str, Any]:
    """Verify, if that is not done, and load to the CPU; CheckpointError on a truncated, damaged or foreign
    file, or one that is no longer of `step`. mmap: tensors are read when they are looked at."""
    if not verified:
        verify(path)
    also_safe = torch.serialization.get_safe_globals()  # what libraries have allowed beside tensors
    try:
        torch.serialization.clear_safe_globals()
        checkpoint = torch.load(path, map_location="cpu", weights_only=True, mmap=mmap)
    except pickle.UnpicklingError as error:  # torch's own words advise to read it unsafely
        raise CheckpointError(
            f"{path} holds more than tensors and plain values, and reading it could run code: refused. No "
            "checkpoint of this project does."
        ) from error
    except Exception as error:
        said = str(error).splitlines() or [type(error).__name__]
        raise CheckpointError(f"{path} is no checkpoint: {ascii(said[0])[1:-1]}") from error
    finally:
        torch.serialization.add_safe_globals(also_safe)
    if type(checkpoint) is not dict or "tilegpt" not in checkpoint:
        raise CheckpointError(
            f"{path} is no checkpoint of this project: it has no 'tilegpt' entry. Give ckpt= a file or a run "
            "that train.py wrote."
        )
    try:
        require_checkpoint(checkpoint)
    except ValueError as error:
        raise CheckpointError(f"{path} is refused: {error}.") from None
    if step not in (None, found := checkpoint["global_step"]):
        raise CheckpointError(f"{path} was replaced meanwhile by one of step {found}: start again.")
    return checkpoint


def read_header(path: Path) -> tuple[dict[str, Any], int]:
    """The 'tilegpt' entry and the step of a verified file, without its tensors."""
    checkpoint = read_checkpoint(path, verified=True, mmap=True)
    return checkpoint["tilegpt"], checkpoint["global_step"]


def read_data(path: Path) -> tuple[dict[str, Any], dict[str, Any] | None]:
    """What a verified file says of its data: the data module's state and the tokenizer."""
    checkpoint = read_checkpoint(path, verified=True, mmap=True)
    return checkpoint["TokenDataModule"], checkpoint["tilegpt"]["tokenizer"]


def verify(path: Path) -> None:
    """Read every byte against its CRC; CheckpointError where the file is missing, truncated or damaged."""
    if not path.is_file():
        raise CheckpointError(f"There is no checkpoint {path}.")
    try:
        with zipfile.ZipFile(path) as archive:
            damaged = archive.testzip()
    except (zipfile.BadZipFile, OSError, EOFError) as error:
        raise CheckpointError(f"{path} is truncated or no checkpoint ({error}). {_remedy(path)}") from error
    if damaged is not None:
        raise CheckpointError(
            f"{path} is damaged: the checksum of {printable(damaged)} is wrong. {_remedy(path)}"
        )


def _remedy(path: Path) -> str:
    others = [other.name for other in checkpoints_of(path.parent) if other != path]
    if others:
        return f"Beside it: {', '.join(others)}; ckpt=last takes the newest that is whole."
    return "There is no other in its folder."


def checkpoints_of(folder: Path) -> list[Path]:
    """The step checkpoints of a folder, newest step first."""
    return sorted(folder.glob("step-*.ckpt"), reverse=True)


def step_of(path: Path) -> int:
    """The step in a checkpoint's name; -1 where there is none."""
    number = path.stem.removeprefix("step-")
    return int(number) if number.isdecimal() else -1


def prune(written: Path, keep: int, spare: Path | None = None) -> None:
    """Leave the `keep` newest up to the one just written, and `spare`. Later ones are not this course's."""
    older = [path for path in checkpoints_of(written.parent) if path.name <= written.name]
    for path in older[max(1, keep) :]:
        if path != spare:
            path.unlink()


def resolve(
    ckpt: str, runs: Path = RUNS, found: Callable[[Path], None] = lambda run: None, key: str = "ckpt"
) -> Path:
    """The file meant by `ckpt`, verified: a path; a run's name (its newest whole checkpoint); `<run>/best`;
    `last` (the newest whole checkpoint of the newest run that has one).

    found: called with the run that a name means before one of its files is chosen
    key: what the command calls `ckpt`"""
    if Path(ckpt).is_file():
        verify(Path(ckpt))
        return Path(ckpt)
    names = sorted(
        (folder for folder in runs.glob("*") if (folder / "checkpoints").is_dir()),
        key=lambda folder: folder.stat().st_mtime_ns,
        reverse=True,
    )
    if ckpt == "last":
        for folder in names:
            if checkpoints_of(folder / "checkpoints"):
                found(folder)
                return _newest_whole(folder)
        raise CheckpointError(
            f"{key}=last: no run under {runs}/ has a checkpoint yet. Train first: python train.py"
        )
    name, _, which = ckpt.removeprefix(f"{runs}/").rstrip("/").partition("/")
    folder = runs / name
    if which not in ("", "best") or folder not in names:
        if Path(ckpt, "config.json").is_file():
            raise CheckpointError(
                f"{key}={ckpt} is a folder of pretrained weights, not a run. A run starts from it: "
                f"python train.py init_from={ckpt} data=..."
            )
        have = ", ".join(f.name for f in names[:5]) or "none"
        raise CheckpointError(
            f"{key}={ckpt} is neither a file nor a run under {runs}/ with checkpoints. "
            f"Runs, newest first: {have}."
        )
    found(folder)
    if which == "best":
        best = folder / "checkpoints" / "best.ckpt"
        verify(best)
        return best
    return _newest_whole(folder)


def _newest_whole(run: Path) -> Path:
    """The newest checkpoint of a run that verifies, saying which were passed over."""
    found = checkpoints_of(run / "checkpoints")
    for path in found:
        try:
            verify(path)
        except CheckpointError as error:
            print(f"Skipping a damaged checkpoint: {error}")
            continue
        return path
    raise CheckpointError(
        f"No checkpoint of {run} is whole; {len(found)} were tried. Start anew or give another ckpt=."
    )
