"""The machine that measures, and the command: what a figure depends on besides its point."""

from __future__ import annotations

import functools
import os
import re
import shlex
import subprocess
import sys
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

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
    # of one GPU: it says the same of each
    driver = ("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader", "--id=0")
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
