"""Faults in the middle of a run: a signal at any line of ours, a file system that is full, read-only, or
forgets what was not synced. Runs are children forked from this process, which has imported everything."""

from __future__ import annotations

import ctypes
import itertools
import json
import os
import shutil
import sys
import tempfile
import threading
import traceback
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any
from unittest import mock

import torch

from model.training.checkpoint import checkpoints_of, read_checkpoint
from tests.running import ROOT, rows, train_here

OURS = tuple(str(ROOT / part) for part in ("model", "data", "conf", "train.py"))
STEPS = 12
RUN = (f"trainer.max_steps={STEPS}", "trainer.val_check_interval=4", "callbacks.checkpoints.every=3")
SETTINGS: dict[str, tuple[str, ...]] = {
    "plain": (),
    "dropout": ("model.dropout=0.2", "model.attn_dropout=0.2"),
    "accumulation": ("tokens_per_step=128", "schedule=constant"),
}
CLONE_NEWNS, CLONE_NEWUSER, MS_RDONLY, MS_REMOUNT, MS_BIND, MNT_DETACH = 0x20000, 0x10000000, 1, 32, 4096, 2


class Child:
    """`work()` in a forked process. Its exit code is that of a SystemExit, 99 with its stack trace in `said`
    for any other exception."""

    def __init__(self, work: Callable[[], Any]):
        self.log = tempfile.TemporaryFile("w+")  # noqa: SIM115 - until `wait`
        self.pid = os.fork()
        if self.pid:
            return
        code = 99
        try:
            work()
            code = 0
        except SystemExit as stop:
            code = int(stop.code or 0)
        except BaseException:
            traceback.print_exc(file=self.log)
            self.log.flush()
        finally:
            os._exit(code)

    def wait(self) -> int:
        """The exit code, negative for a signal."""
        code = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        self.log.seek(0)
        self.said = self.log.read()
        self.log.close()
        return code


def trained(folder: Path, *overrides: str, tiny: bool = True) -> None:
    """A run, for a child to end with its exit code; what it said is in `folder`/said."""
    result = train_here(folder, *overrides, tiny=tiny)
    (folder / "said").write_text(result.out + result.err)
    raise SystemExit(result.code)


def counted(at: int, then: Callable[[], None]) -> list[int]:
    """Call `then` before the line of ours that is number `at` from now on, of all threads; the list holds the
    count."""
    count, numbers = [0], itertools.count(1)  # of which no two threads get the same

    def line(frame: FrameType, event: str, argument: Any) -> Any:
        if event == "line":
            number = next(numbers)
            count[0] = max(count[0], number)
            if number == at:
                then()
        return line

    def call(frame: FrameType, *_: Any) -> Any:
        return line if frame.f_code.co_filename.startswith(OURS) else None

    threading.settrace(call)  # the one that writes checkpoints
    sys.settrace(call)
    return count


def lines_of(folder: Path, *overrides: str) -> int:
    """How many lines of ours a run passes."""

    def work() -> None:
        count = counted(-1, lambda: None)
        train_here(folder, *overrides)
        (folder / "lines").write_text(str(count[0]))

    child = Child(work)
    assert child.wait() == 0, child.said
    return int((folder / "lines").read_text())


def signalled(folder: Path, number: int, line: int, *overrides: str, tiny: bool = True) -> int:
    """The exit code of a run that gets a signal at a line."""

    def work() -> None:
        counted(line, lambda: os.kill(os.getpid(), number))
        trained(folder, *overrides, tiny=tiny)

    child = Child(work)
    code = child.wait()
    assert code != 99, child.said
    return code


def saved(folder: Path) -> bool:
    return bool(checkpoints_of(folder / "runs" / "a" / "checkpoints"))


def outcome(run: Path) -> dict[str, Any]:
    """Everything that has to be the same in the end, bit by bit."""
    last = read_checkpoint(run / "checkpoints" / f"step-{STEPS:08d}.ckpt")
    keys = ("state_dict", "optimizer_states", "callbacks", "TokenDataModule", "global_step")
    return {
        "rows": rows(run),
        "best": read_checkpoint(run / "checkpoints" / "best.ckpt")["global_step"],
        "half-written": [path.name for path in run.rglob("*.partial")],
        **{key: last[key] for key in keys},
    }


def same(ours: Any, theirs: Any) -> bool:
    if isinstance(ours, torch.Tensor):
        return isinstance(theirs, torch.Tensor) and torch.equal(ours, theirs)
    if isinstance(ours, dict):
        return ours.keys() == theirs.keys() and all(same(ours[key], theirs[key]) for key in ours)
    if isinstance(ours, list | tuple):
        return len(ours) == len(theirs) and all(map(same, ours, theirs))
    return ours == theirs


class Disk:
    """A file system in memory of so many KiB at `folder`, seen by this process alone. OSError where the
    kernel allows none."""

    def __init__(self, folder: Path, kib: int):
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        user, group = os.getuid(), os.getgid()
        self._call("unshare", CLONE_NEWNS | (CLONE_NEWUSER if user else 0))
        if user:
            Path("/proc/self/setgroups").write_text("deny")
            Path("/proc/self/uid_map").write_text(f"0 {user} 1")
            Path("/proc/self/gid_map").write_text(f"0 {group} 1")
        self._call("mount", b"none", b"/", None, 0x44000, None)  # private: nobody else is to see it
        self.mount(f"size={kib}k", 0)

    def mount(self, options: str, flags: int) -> None:
        self._call("mount", b"none", str(self.folder).encode(), b"tmpfs", flags, options.encode())

    def grow(self) -> None:
        self.mount("size=1g", MS_REMOUNT)

    def read_only(self) -> None:
        """From now on, also where files are open."""
        path = str(self.folder).encode()
        self._call("mount", path, path, None, MS_BIND, None)
        self._call("mount", None, path, None, MS_REMOUNT | MS_BIND | MS_RDONLY, None)

    def writable(self) -> None:
        self._call("umount2", str(self.folder).encode(), MNT_DETACH)

    @staticmethod
    def _call(name: str, *arguments: Any) -> None:
        if getattr(ctypes.CDLL(None, use_errno=True), name)(*arguments):
            raise OSError(ctypes.get_errno(), f"{name}: {os.strerror(ctypes.get_errno())}")


def disks() -> bool:
    """Whether this kernel lets us mount one."""
    with tempfile.TemporaryDirectory() as folder:
        return Child(lambda: Disk(Path(folder), 64)).wait() == 0


def recording(shadow: Path) -> Any:
    """A patch under which every fsync leaves in `shadow` what a power cut would spare: the content of a file,
    by its inode, or the names in a folder."""
    fsync = os.fsync
    shadow.mkdir()

    def recorded(fd: int) -> None:
        fsync(fd)
        path = Path(os.readlink(f"/proc/self/fd/{fd}"))
        if path.is_dir():
            names = {entry.name: entry.stat().st_ino for entry in path.iterdir() if entry.is_file()}
            (shadow / path.name).write_text(json.dumps(names))
        else:
            shutil.copyfile(path, shadow / str(path.stat().st_ino))

    return mock.patch.object(os, "fsync", recorded)


def power_cut(run: Path, shadow: Path) -> None:
    """Leave of a run's files what was synced, under the names that were."""
    for folder in (run, run / "checkpoints"):
        listing = shadow / folder.name
        names = json.loads(listing.read_text()) if listing.exists() else {}
        for path in [path for path in folder.glob("*") if path.is_file()]:
            path.unlink()
        for name, inode in names.items():
            synced = shadow / str(inode)
            (folder / name).write_bytes(synced.read_bytes() if synced.exists() else b"")
