"""Rows of results/<study>/<gpu>.jsonl: a measured point each, with the machine and the command behind it."""

from __future__ import annotations

import argparse
import functools
import hashlib
import json
import os
import re
import shlex
import subprocess
import sys
import time
import uuid
from collections.abc import Iterable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from conf.values import UserError

RUN_ID = uuid.uuid4().hex[:12]
ROOT = Path(__file__).resolve().parents[2]
CONF = ROOT / "conf"
# Wheels that bring attention kernels of others, or what those are compiled with.
PEERS = (
    "flash-attn",
    "flash-attn-3",
    "flash-attn-4",
    "nvidia-cudnn-frontend",
    "nvidia-cutlass-dsl",
    "xformers",
)


def gpu_slug(name: str) -> str:
    """What a GPU's file is called: "NVIDIA H200" h200, "NVIDIA H100 80GB HBM3" h100-80gb-hbm3."""
    return "-".join(word for word in re.findall(r"[a-z0-9.]+", name.lower()) if word != "nvidia")


def choices(group: str) -> list[str]:
    """The files of a folder of conf/, for argparse."""
    return sorted(path.stem for path in (CONF / group).glob("*.yaml"))


def positive(text: str) -> int:
    """An argument that counts something, for argparse."""
    if not text.isascii() or not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text} is no whole number, at least 1")
    return int(text)


def rows_file(text: str) -> Path:
    """An argument that names a file for rows, for argparse: what cannot be one is said before measuring."""
    path = Path(text)
    above = next(folder for folder in path.absolute().parents if folder.exists())
    if path.is_dir() or not above.is_dir():
        raise argparse.ArgumentTypeError(f"{path if path.is_dir() else above} is in the way: name a new file")
    return path


def key_of(point: dict[str, Any]) -> str:
    """The same for the same point of the same study: a later row replaces an earlier one."""
    return hashlib.sha256(json.dumps(point, sort_keys=True).encode()).hexdigest()[:16]


def commit() -> str | None:
    """The checkout's commit, "-dirty" after it where code differs from it; TILEGPT_COMMIT for a copy that has
    no .git."""
    if named := os.environ.get("TILEGPT_COMMIT"):
        return named
    short = _asked("git", "-C", str(CONF), "rev-parse", "--short", "HEAD")
    code = (":(top)*.py", ":(top)*.cu", ":(top)*.cuh", ":(top)conf")
    changed = short and _asked("git", "-C", str(CONF), "status", "--porcelain", "--", *code)
    return f"{short}-dirty" if changed else short


def _asked(*command: str) -> str | None:
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None


def _installed(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def command() -> str:
    """What was typed, as it works elsewhere: the script from the checkout's root, without where rows went."""
    script, *words = sys.argv
    kept: list[str] = []
    for before, word in zip([script, *words], words, strict=False):
        if before != "--out" and word != "--out" and not word.startswith("--out="):
            kept.append(word)
    path, root = Path(script).absolute(), CONF.parent
    named = str(path.relative_to(root)) if path.is_relative_to(root) else path.name
    return shlex.join([Path(sys.executable).name, *shlex.split(named), *kept])


def without_folders(text: str) -> str:
    """`text` without the folders of this machine: those that Python imports from, the checkout's first."""
    folders = {str(CONF.parent), sys.prefix, *(folder for folder in sys.path if len(folder) > 1)}
    for folder in sorted(folders, key=len, reverse=True):
        text = text.replace(f"{folder}/", "")
    return text


@functools.cache
def machine() -> dict[str, Any]:
    """What a figure depends on besides the point: GPU, driver, versions, commit, date, command."""
    import torch

    cuda = torch.cuda.is_available()
    driver = ("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
    return {
        "gpu": torch.cuda.get_device_name() if cuda else None,
        "driver": _asked(*driver) if cuda else None,
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version() if cuda else None,
        "triton": _installed("triton"),
        "peers": {name: number for name in PEERS if (number := _installed(name))},
        "commit": commit(),
        "date": time.strftime("%Y-%m-%d"),
        "command": command(),
    }


def read(path: Path) -> dict[str, dict[str, Any]]:
    """Rows by key, a later one in the place of an earlier; a line that a kill has cut is left out."""
    return _newest(_lines(path))


def with_baselines(path: Path) -> list[dict[str, Any]]:
    """The rows of `read`, and before them a sweep's rows of nanoGPT at other commits, which later ones have
    replaced: what was measured beside them is compared with them (sweep_report.beside)."""
    rows = _lines(path)
    newest = _newest(rows)
    of_nanogpt = [row for row in rows if row["point"].get("implementation") == "nanoGPT"]
    each = {(row["key"], row["machine"].get("commit")): row for row in of_nanogpt if "config" in row["point"]}
    return [row for row in each.values() if row is not newest[row["key"]]] + list(newest.values())


def _newest(rows: Iterable[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = {}
    for row in rows:
        found.pop(row["key"], None)  # the order is that of the newest
        found[row["key"]] = row
    return found


def _lines(path: Path) -> list[dict[str, Any]]:
    rows = []
    lines = path.read_text(encoding="utf-8").splitlines() if path.is_file() else []
    for number, line in enumerate(lines, 1):
        try:
            row = json.loads(line)
            row["key"]
        except (ValueError, KeyError, TypeError):
            if line.endswith("}}"):
                raise UserError(f"{path}, line {number}: that is no row; mend it or take it out.") from None
            continue
        rows.append(row)
    return rows


def append(path: Path, point: dict[str, Any], result: dict[str, Any]) -> dict[str, Any]:
    """Append a row to the file at once, so that a killed sweep keeps what it has measured."""
    row = {
        "schema": 1,
        "key": key_of(point),
        "run_id": RUN_ID,
        "point": point,
        "result": json.loads(without_folders(json.dumps(result))),  # a library's reason may name its files
        "machine": machine(),
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps(row) + "\n"
    with open(path, "a+b") as file:
        if file.tell():
            file.seek(-1, os.SEEK_END)
            if file.read(1) != b"\n":
                text = "\n" + text  # what a kill has cut stays a line of its own
        file.write(text.encode())
    return row
