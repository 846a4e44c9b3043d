"""Cubins on disk: whole or not at all, whoever races, within a bound."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import pytest

from ops import nvrtc_cache

ROOT = Path(__file__).resolve().parents[2]


def test_a_file_of_another_key_is_damaged(folder: Path) -> None:
    nvrtc_cache.write("a", b"of a")
    (folder / "b.cubin").write_bytes((folder / "a.cubin").read_bytes())
    assert nvrtc_cache.read("a") == b"of a" and nvrtc_cache.read("b") is None


def started(code: str, *arguments: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", code, *arguments]
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def finished(*processes: subprocess.Popen[str]) -> list[str]:
    said = [process.communicate(timeout=120) for process in processes]
    assert not any(process.returncode for process in processes), said
    return [out.strip() for out, _ in said]


def test_processes_that_race_build_the_same(source: Path, folder: Path) -> None:
    """Both compile, as neither finds anything, and what is kept is whole."""
    code = """
import hashlib, sys, time
from pathlib import Path
from ops import nvrtc_build as build
build.compiler_version()
Path(sys.argv[2]).touch()
while len(list(Path(sys.argv[2]).parent.glob("ready*"))) < 2: time.sleep(0.001)
print(hashlib.sha256(build.build(sys.argv[1], {"FACTOR": 2}, "sm_80").code).hexdigest())
"""
    ready = [str(source.parent / f"ready{i}") for i in range(2)]
    one, other = finished(*(started(code, str(source), path) for path in ready))
    assert one == other and [path.suffix for path in folder.iterdir()] == [".cubin"]
    assert finished(started(code, str(source), ready[0])) == [one]


def test_a_file_appears_whole(folder: Path) -> None:
    """Four writers and readers of one key, each with a payload of its own length."""
    code = """
import sys
from ops import nvrtc_cache as cache
for i in range(300):
    cache.write("key", sys.argv[1].encode() * (1000 + i * 37))
    found = cache.read("key")
    assert found and set(found) == {found[0]}, found
"""
    finished(*(started(code, letter) for letter in "abcd"))
    assert [path.name for path in folder.iterdir()] == ["key.cubin"]


def test_the_least_recently_used_goes_first(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TILEGPT_CACHE_MIB", "1")
    for age, key in enumerate(("old", "older", "oldest"), start=1):
        nvrtc_cache.write(key, bytes(300_000))
        os.utime(folder / f"{key}.cubin", (time.time() - 1000 * age,) * 2)
    nvrtc_cache.read("oldest")  # and so is not
    nvrtc_cache.write("new", bytes(300_000))
    assert {path.stem for path in folder.iterdir()} == {"new", "old", "oldest"}
    nvrtc_cache.write("huge", bytes(2_000_000))  # alone over the bound, but it is what is needed now
    assert {path.stem for path in folder.iterdir()} == {"huge"}
    monkeypatch.setenv("TILEGPT_CACHE_MIB", "a lot")
    with pytest.raises(ValueError, match="TILEGPT_CACHE_MIB is 'a lot'"):
        nvrtc_cache.write("more", b"x")


def test_what_a_killed_process_left_goes_after_an_hour(folder: Path) -> None:
    folder.mkdir()
    for name, age in (("stale.tmp", 4000), ("fresh.tmp", 10)):
        (folder / name).touch()
        os.utime(folder / name, (time.time() - age,) * 2)
    nvrtc_cache.write("key", b"x")
    assert {path.name for path in folder.iterdir()} == {"fresh.tmp", "key.cubin"}


def test_a_full_disk_leaves_no_halves(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(nvrtc_cache.os, "replace", full)
    with pytest.warns(RuntimeWarning, match="No space left on device"):
        nvrtc_cache.write("key", b"x")
    assert list(folder.iterdir()) == [] and nvrtc_cache.read("key") is None


def test_a_folder_that_takes_no_file_is_named_once(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Though each attempt has a file of another name."""

    def refuse(path: Any, *_: Any) -> None:
        raise OSError(errno.EROFS, "Read-only file system", str(path))

    folder.mkdir()
    monkeypatch.setattr(nvrtc_cache.tempfile._os, "open", refuse)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for key in "abc":
            nvrtc_cache.write(key, b"x")
    assert [str(folder) in str(w.message) and "Read-only file" in str(w.message) for w in said] == [True]


def test_where_cubins_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TILEGPT_CACHE", "~/here")
    monkeypatch.setenv("HOME", "/home/ada")
    assert nvrtc_cache.folder() == Path("/home/ada/here")
    monkeypatch.delenv("TILEGPT_CACHE")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert nvrtc_cache.folder() == Path("/home/ada/.cache/tilegpt/cubin")
    monkeypatch.setenv("XDG_CACHE_HOME", "/scratch")
    assert nvrtc_cache.folder() == Path("/scratch/tilegpt/cubin")
