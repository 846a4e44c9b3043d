"""Rows of results/<study>/<gpu>.jsonl: a measured point each, with the machine and the command behind it."""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import subprocess
import sys
import time
import uuid
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

RUN_ID = uuid.uuid4().hex[:12]
CONF = Path(__file__).resolve().parent.parent / "conf"


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


def key_of(point: dict[str, Any]) -> str:
    """The same for the same point of the same study: a later row replaces an earlier one."""
    return hashlib.sha256(json.dumps(point, sort_keys=True).encode()).hexdigest()[:16]


def machine() -> dict[str, Any]:
    """What a figure depends on besides the point: GPU, driver, versions, commit, date, command."""
    import torch

    def installed(name: str) -> str | None:
        try:
            return version(name)
        except PackageNotFoundError:
            return None

    def asked(*command: str) -> str | None:
        try:
            return subprocess.run(
                command, capture_output=True, text=True, timeout=10, check=True
            ).stdout.strip()
        except (OSError, subprocess.SubprocessError):
            return None

    cuda = torch.cuda.is_available()
    return {
        "gpu": torch.cuda.get_device_name() if cuda else None,
        "driver": asked("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
        if cuda
        else None,
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version() if cuda else None,
        "triton": installed("triton"),
        "commit": os.environ.get("TILEGPT_COMMIT") or asked("git", "rev-parse", "--short", "HEAD"),
        "date": time.strftime("%Y-%m-%d"),
        "command": " ".join([Path(sys.executable).name, *sys.argv]),
    }


def append(path: Path, point: dict[str, Any], result: dict[str, Any]) -> dict[str, Any]:
    """Append a row to the file at once, so that a killed sweep keeps what it has measured."""
    row = {
        "schema": 1,
        "key": key_of(point),
        "run_id": RUN_ID,
        "point": point,
        "result": result,
        "machine": machine(),
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "a", encoding="utf-8") as file:
        file.write(json.dumps(row) + "\n")
    return row
