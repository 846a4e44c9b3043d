"""Tiny training runs for the tests: in this process where that is enough, in one of their own where a process
is what is tested."""

from __future__ import annotations

import contextlib
import csv
import io
import os
import random
import socket
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

ROOT = Path(__file__).resolve().parents[1]
REPORTED = 3  # exit code of a worker (tests/batch.py) that has said why it ends
# What two runs from the same numbers have in common; times are not among it.
EXACT = ("train/loss", "train/grad_norm", "train/lr", "val/loss")
SHORT = (
    "data=text", "data.path=book.txt", "data.data_dir=prepared", "data.batch_size=4",
    "data.max_val_tokens=128", "seq_len=16", "attention=naive", "trainer.accelerator=cpu",
    "callbacks.metrics.every=1", "callbacks.samples=null",
)  # fmt: skip
TINY = (
    *SHORT, "data.tokenizer.kind=byte", "model.n_layer=2", "model.n_head=2", "model.n_embd=32",
    "optim.lr=1e-2", "schedule.warmup_steps=5", "trainer.max_steps=20", "trainer.val_check_interval=10",
)  # fmt: skip


@dataclass
class Result:
    code: int
    out: str
    err: str


def write_book(folder: Path, characters: int = 6000) -> Path:
    """A text of words, for data.path=book.txt; the same every time."""
    draw = random.Random(7)
    words = ["attention", "is", "all", "you", "need", "and", "some", "tiles", "of", "keys"]
    text = " ".join(draw.choice(words) for _ in range(characters // 4))[:characters]
    path = folder / "book.txt"
    path.write_text(text, encoding="utf-8")
    return path


def train_here(folder: Path, *overrides: str, tiny: bool = True) -> Result:
    """`python train.py` with these overrides in `folder`, run in this process, from its command line to its
    exit code."""
    from hydra._internal.hydra import Hydra

    import train

    if tiny and not (folder / "book.txt").exists():
        write_book(folder)
    code, out, err = 0, io.StringIO(), io.StringIO()
    with (
        contextlib.chdir(folder),
        mock.patch.object(sys, "argv", ["train.py", *(TINY if tiny else ()), *overrides]),
        # Hydra composes all once more to see whether hydra.mode is set, which it is not: 0.08 s a run.
        mock.patch.object(Hydra, "get_mode", return_value=None),
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
    ):
        try:
            train.main()
        except SystemExit as stop:
            code = stop.code or 0
    return Result(code, out.getvalue(), err.getvalue())


def start(
    folder: Path, *overrides: str, tiny: bool = True, script: Path = ROOT / "train.py"
) -> subprocess.Popen:
    """The same in a process of its own, under way; `script` takes the place of train.py."""
    if tiny and not (folder / "book.txt").exists():
        write_book(folder)
    return _python(folder, str(script), *(TINY if tiny else ()), *overrides)


def _python(folder: Path, *words: str) -> subprocess.Popen:
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    return subprocess.Popen([sys.executable, *words], cwd=folder, env=environment, **pipes)


def start_nodes(folder: Path, nodes: int, *overrides: str, processes: int = 1) -> list:
    """The same by torchrun, as on so many machines of `processes` each."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    if not (folder / "book.txt").exists():
        write_book(folder)
    torchrun = ["-m", "torch.distributed.run", f"--nnodes={nodes}", f"--nproc-per-node={processes}"]
    meet = ["--master-addr=127.0.0.1", f"--master-port={port}"]
    devices = [f"trainer.num_nodes={nodes}", f"trainer.devices={processes}"]
    run = [str(ROOT / "train.py"), *TINY, *devices, *overrides]
    return [_python(folder, *torchrun, f"--node-rank={node}", *meet, *run) for node in range(nodes)]


def finish(process: subprocess.Popen, timeout: float = 120) -> Result:
    try:
        out, err = process.communicate(timeout=timeout)
    finally:
        process.kill()
    return Result(process.returncode, out, err)


def rows(run: Path) -> dict[int, dict[str, str]]:
    """Step -> what metrics.csv says of it, as written, but for the times."""
    table: dict[int, dict[str, str]] = {}
    with open(run / "metrics.csv", newline="", encoding="utf-8") as file:
        for row in csv.DictReader(file):
            kept = {key: row[key] for key in EXACT if row.get(key)}
            assert not kept.keys() & table.get(int(row["step"]), {}).keys(), f"step {row['step']} twice"
            table.setdefault(int(row["step"]), {}).update(kept)
    return table
