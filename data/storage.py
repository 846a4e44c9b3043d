"""Files that are whole or absent, a lock, a progress line: what `prepare` stands on."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import os
import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, BinaryIO

import numpy as np

from conf.values import UserError

SCHEMA = 1
ALWAYS_HASHED = (
    64 << 20
)  # bytes: a file up to here is hashed whenever it is opened (0.1 s), a larger one on demand


def _write(file: BinaryIO, block: bytes) -> None:
    file.write(block)


def write_atomically(path: Path, blocks: Iterable[bytes]) -> dict[str, Any]:
    """Writes a file under a temporary name and renames it when it is on disk. Returns {"bytes", "sha256"}."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    digest, size = hashlib.sha256(), 0
    try:
        with temporary.open("wb") as file:
            for block in blocks:
                _write(file, block)
                digest.update(block)
                size += len(block)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    return {"bytes": size, "sha256": digest.hexdigest()}


def usable_cores() -> int:
    """Cores that this process may use; macOS, which cannot say it, has them all."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class Unfinished(UserError):
    """Something from outside ended a preparation: run again, and it goes on with its finished shards."""


def explained(error: OSError, data_dir: Path) -> Exception:
    """An error of the file system with the key that it is about."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return UserError(
            f"the disk is full: {data_dir} could not be written ({error.strerror}). Free some space, or "
            "choose another place with data.data_dir=<folder>, and run again: finished shards are kept"
        )
    if error.filename is None:
        return error
    place = Path(error.filename)
    if data_dir in (place, *place.parents) or place in data_dir.parents:
        return UserError(
            f"data.data_dir={data_dir}: {place} cannot be written ({error.strerror}). Choose a folder that "
            "can be, with data.data_dir=<folder>"
        )
    return UserError(
        f"{place} cannot be read ({error.strerror}): choose the text with data.path=<file, folder or glob>"
    )


@contextmanager
def locked(folder: Path, quiet: bool = False) -> Iterator[None]:
    """Makes the folder and holds its lock; waits, saying so, while another process has it. A killed holder
    frees it; one that failed has removed the folder, which is then made anew."""
    with _lock(folder, quiet):
        yield


def _lock(folder: Path, quiet: bool) -> IO[str]:
    while True:
        folder.mkdir(parents=True, exist_ok=True)
        try:
            file = (folder / ".lock").open("w")
        except FileNotFoundError:  # removed in between
            continue
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if not quiet:
                print(f"another process is preparing {folder}: waiting for it", file=sys.stderr, flush=True)
            fcntl.flock(file, fcntl.LOCK_EX)
        if os.fstat(file.fileno()).st_nlink:
            return file
        file.close()  # of a folder that is gone


def load_meta(folder: Path, verify: bool = False) -> dict[str, Any]:
    """The folder's meta.json, its files checked: sizes, and the sha256 of small ones, of all with `verify`.

    UserError names the file that is missing, cut short or altered, and what to do.
    """
    remedy = f"delete {folder} and run again: it will be prepared anew"
    try:
        meta = json.loads((folder / "meta.json").read_bytes())
    except FileNotFoundError:
        raise UserError(
            f"{folder} is not prepared (no meta.json): run once with this data to prepare it"
        ) from None
    except ValueError as error:
        raise UserError(f"{folder / 'meta.json'} is damaged ({error}): {remedy}") from error
    if meta.get("schema") != SCHEMA:
        raise UserError(f"{folder} has schema {meta.get('schema')!r}, this version reads {SCHEMA}: {remedy}")
    for facts in meta["splits"].values():
        for name, expected in facts["files"].items():
            path = folder / name
            size = path.stat().st_size if path.exists() else None
            if size != expected["bytes"]:
                found = (
                    "is missing" if size is None else f"has {size:,} bytes instead of {expected['bytes']:,}"
                )
                raise UserError(f"{path} {found}: {remedy}")
            if (verify or size <= ALWAYS_HASHED) and file_sha256(path) != expected["sha256"]:
                raise UserError(f"{path} was altered after its preparation (its sha256 differs): {remedy}")
    return meta


def join_shards(
    split: str, done: list[dict[str, Any]], shards: Path, folder: Path, itemsize: int
) -> dict[str, Any]:
    """Joins the shards of a split; the facts for the meta."""
    stems = [shards / f"{index:06d}" for index in range(len(done))]
    tokens = sum(facts["tokens"][split] for facts in done)

    def documents() -> Iterator[bytes]:
        offset = 0
        for stem, facts in zip(stems, done, strict=True):
            ends = np.frombuffer(stem.with_suffix(f".{split}.docs.bin").read_bytes(), dtype="<i8")
            yield (ends + offset).tobytes()
            offset += facts["tokens"][split]

    bodies = (stem.with_suffix(f".{split}.bin").read_bytes() for stem in stems)
    files = {
        f"{split}.bin": write_atomically(folder / f"{split}.bin", bodies),
        f"{split}.docs.bin": write_atomically(folder / f"{split}.docs.bin", documents()),
    }
    assert files[f"{split}.bin"]["bytes"] == tokens * itemsize
    return {
        "tokens": tokens,
        "documents": files[f"{split}.docs.bin"]["bytes"] // 8,
        "bytes": sum(facts["bytes"][split] for facts in done),
        "files": files,
    }


def file_sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


class Progress:
    """A bar with rate and estimate on a terminal, and one line at the end. `total` in bytes, or None."""

    def __init__(self, title: str, total: int | None, quiet: bool = False) -> None:
        self.title, self.total, self.quiet = title, total, quiet
        self._bar: Any = None

    def __enter__(self) -> Progress:
        self._started, self._bytes = time.perf_counter(), 0
        if sys.stderr.isatty() and not self.quiet:
            from rich.console import Console
            from rich.progress import (
                BarColumn,
                DownloadColumn,
                TextColumn,
                TimeRemainingColumn,
                TransferSpeedColumn,
            )
            from rich.progress import Progress as Bar

            columns = TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn()
            self._bar = Bar(*columns, TimeRemainingColumn(), console=Console(stderr=True), transient=True)
            self._task = self._bar.add_task(f"preparing {self.title}", total=self.total)
            self._bar.start()
        return self

    def advance(self, n_bytes: int) -> None:
        self._bytes += n_bytes
        if self._bar:
            self._bar.advance(self._task, n_bytes)

    def finish(self, result: str) -> None:
        """The one line that stays."""
        if not self.quiet:
            took = time.perf_counter() - self._started
            line = f"{self.title}: {self._bytes / 1e6:,.1f} MB, {result}, in {took:.1f} s"
            print(f"prepared {line}", file=sys.stderr, flush=True)

    def __exit__(self, *_: object) -> None:
        if self._bar:
            self._bar.stop()
