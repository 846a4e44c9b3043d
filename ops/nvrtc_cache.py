"""Cubins on disk: a file each, named by the hash of all that went into it, so that none is ever out of date.

TILEGPT_CACHE names the folder (else ~/.cache/tilegpt/cubin), TILEGPT_CACHE_MIB bounds it (else 1,024): the
least recently used go first. A file is a checksum of 32 bytes and what `write` was given. Processes may race:
a file appears whole or not at all, and one that is damaged is as one that is missing.
"""

from __future__ import annotations

import hashlib
import logging
import os
import tempfile
import time
import warnings
from contextlib import suppress
from functools import cache
from pathlib import Path

from conf.values import UserError

log = logging.getLogger(__name__)
_SUFFIX, _UNFINISHED = ".cubin", ".tmp"
_CHECKSUM_BYTES = 32
# What a killed process left half written is removed after this.
_STALE_SECONDS = 3600


def folder() -> Path:
    if named := os.environ.get("TILEGPT_CACHE"):
        return Path(os.path.expanduser(named))
    caches = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return Path(caches) / "tilegpt" / "cubin"


def bound_bytes() -> int:
    """Raises ValueError where TILEGPT_CACHE_MIB is no number of mebibytes."""
    given = os.environ.get("TILEGPT_CACHE_MIB", "1024")
    if not given.isdecimal():
        raise UserError(f"TILEGPT_CACHE_MIB is {given!r}; it needs a whole number of MiB, 1024 say")
    return int(given) << 20


def read(key: str) -> bytes | None:
    """What was written under `key`; None where there is nothing, or nothing whole."""
    path = folder() / f"{key}{_SUFFIX}"
    try:
        content = path.read_bytes()
    except OSError:
        return None
    payload = content[_CHECKSUM_BYTES:]
    if content[:_CHECKSUM_BYTES] != _checksum(key, payload):
        log.warning("%s is damaged and will be built again", path)
        return None
    with suppress(OSError):  # a read-only folder
        os.utime(path)
    return payload


def write(key: str, payload: bytes) -> None:
    """Keeps `payload` under `key`, in place of what is there. A folder that takes no file is named once."""
    at = folder()
    try:
        at.mkdir(parents=True, exist_ok=True)
        handle, unfinished = tempfile.mkstemp(dir=at, suffix=_UNFINISHED)
        try:
            with open(handle, "wb") as file:
                file.write(_checksum(key, payload) + payload)
            os.replace(unfinished, at / f"{key}{_SUFFIX}")
        except BaseException:
            with suppress(OSError):
                os.unlink(unfinished)
            raise
    except OSError as error:
        # without the name of the unfinished file, another each time
        _cannot_write(str(at), error.strerror or str(error))
    else:
        _evict(key)


def entries() -> list[Path]:
    """The files of the cache, the most recently used first."""
    return sorted(_files(_SUFFIX), key=lambda path: _stat(path)[1], reverse=True)


def clear() -> int:
    """Removes every file of the cache and says how many cubins there were."""
    found = _files(_SUFFIX)
    for path in (*found, *_files(_UNFINISHED)):
        path.unlink(missing_ok=True)
    return len(found)


def _checksum(key: str, payload: bytes) -> bytes:
    """Of the key too: a file under another's name is damaged."""
    return hashlib.sha256(key.encode() + payload).digest()


def _files(suffix: str) -> list[Path]:
    at = folder()
    return [path for path in at.iterdir() if path.suffix == suffix] if at.is_dir() else []


def _stat(path: Path) -> tuple[int, float]:
    """(bytes, seconds since the epoch of the last use); (0, 0) where another process removed it."""
    try:
        found = path.stat()
    except OSError:
        return 0, 0.0
    return found.st_size, found.st_mtime


def _evict(newest: str) -> None:
    """Removes the least recently used beyond the bound, but never what has just been written."""
    limit, total = bound_bytes(), 0
    with suppress(OSError):  # another process evicts too
        for path in _files(_UNFINISHED):
            if time.time() - _stat(path)[1] > _STALE_SECONDS:
                path.unlink(missing_ok=True)
        for path in sorted(entries(), key=lambda path: path.stem != newest):
            total += _stat(path)[0]
            if total > limit and path.stem != newest:
                path.unlink(missing_ok=True)


@cache
def _cannot_write(at: str, reason: str) -> None:
    warnings.warn(
        f"{at} takes no file ({reason}): CUDA kernels are compiled again in every process. Set TILEGPT_CACHE "
        "to a folder that can be written, or free space there",
        RuntimeWarning,
        stacklevel=4,
    )
