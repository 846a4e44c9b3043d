"""An attention of one's own: one file and one yaml in a copy of the project, and everything finds it."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.forks import Forks
from tests.running import ROOT

pytestmark = pytest.mark.long  # processes that import torch
MINE = '''
"""softmax(Q K^T) V, a strip of queries at a time, computed again in the backward."""

import torch
from torch.utils.checkpoint import checkpoint

from attention.base import MATMUL_KERNELS, Attention, Capabilities, Costs, Declaration, Kernels

ROWS = 32


class MineAttention(Attention):
    capabilities = Capabilities(features=frozenset({"noncausal"}), deterministic=True)
    declaration = Declaration(kernels=KERNELS)

    def __init__(self, name="mine"):
        super().__init__(name)

    def attend(self, q, k, v, options, dropout_seed):
        def strip(start, q):
            scores = q @ k.mT * options.scale
            if options.causal:
                future = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1 + start)
                scores = scores.masked_fill(future, -torch.inf)
            return scores.softmax(-1) @ v

        starts = range(0, q.shape[2], ROWS)
        strips = (checkpoint(strip, i, q[:, :, i : i + ROWS], use_reentrant=False) for i in starts)
        return torch.cat(list(strips), dim=2), None

    def costs(self, call, compiled=False):
        return Costs(transient_bytes=3 * 4 * call.batch * call.heads * ROWS * call.tk)
'''
YAML = """# A strip of queries at a time.
_target_: attention.mine.MineAttention
name: mine # label in logs, results and checkpoints; choose with attention=...
"""
FOLDERS = ("attention", "conf", "data", "model", "ops", "scripts", "results/attention")
SMALL = ("model=tiny", "data=synthetic", "data.corpus.n_tokens=4096", "seq_len=64", "data.batch_size=2")


def copied(place: Path, kernels: str) -> Path:
    """The project with the new files, and nothing else changed."""
    left_out = shutil.ignore_patterns("__pycache__", "prepared", "*.svg")
    for folder in FOLDERS:
        shutil.copytree(ROOT / folder, place / folder, ignore=left_out)
    for file in ("train.py", "pyproject.toml"):
        shutil.copy(ROOT / file, place)
    (place / "attention" / "mine.py").write_text(MINE.replace("KERNELS)\n", f"{kernels})\n", 1))
    (place / "conf" / "attention" / "mine.yaml").write_text(YAML)
    return place


@pytest.fixture(scope="module")
def python() -> Iterator[Forks]:
    clean = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    with Forks(clean | {"TILEGPT_COMMIT": "copy", "CUDA_VISIBLE_DEVICES": ""}) as python:
        yield python


def run(python: Forks, place: Path, *command: str) -> str:
    done = python(place, *command)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return done.stdout


def benched(python: Forks, place: Path) -> dict[str, dict]:
    """Rows of the new attention by pass, measured here and, for the ranking, as if on an H200."""
    out = place / "rows.jsonl"
    asked = ("--attention", "mine", "standard", "--seq-len", "64", "--head-dim", "32", "--causal")
    run(
        python, place, "scripts/bench_attention.py", *asked, "--batch", "1", "--heads", "2", "--out", str(out)
    )
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    with (place / "results" / "attention" / "h200.jsonl").open("a") as file:
        for row in rows:
            as_if = row | {"key": f"copy {row['key']}", "machine": row["machine"] | {"gpu": "NVIDIA H200"}}
            file.write(json.dumps(as_if) + "\n")
    return {row["point"]["pass"]: row for row in rows if row["point"]["implementation"] == "mine"}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return copied(tmp_path_factory.mktemp("mine"), "MATMUL_KERNELS")


def ranked(python: Forks, place: Path) -> bool:
    run(python, place, "scripts/report.py", "auto", "capabilities")
    return "mine" in (place / "attention" / "auto_table.py").read_text()


def test_it_is_trained(python: Forks, place: Path) -> None:
    said = run(
        python, place, "train.py", *SMALL, "attention=mine", "trainer.max_steps=2", "trainer.accelerator=cpu"
    )
    assert "attention  mine" in said


def test_its_memory_is_predicted(python: Forks, place: Path) -> None:
    said = run(python, place, "scripts/estimate.py", *SMALL, "attention=mine", "gpu=h200")
    assert "attention=mine" in said and "attention's memory grows as T\n" in said


def test_it_is_in_a_studys_report(python: Forks, place: Path) -> None:
    sizes = ("--attention", "mine", "standard", "--seq-len", "64", "--curve")
    said = run(
        python, place, "scripts/study.py", "attention_memory", *sizes, "--out", str(place / "memory.jsonl")
    )
    assert "mine" in said
    code = "from scripts.measure.studies.attention_memory import contestants; print(contestants(False))"
    assert "'mine'" in run(python, place, "-c", code)  # where nobody is named, too


def test_it_is_measured_its_kernels_are_checked_and_auto_ranks_it(python: Forks, place: Path) -> None:
    for passed, row in benched(python, place).items():
        result = row["result"]
        assert (result["status"], result["kernels_ok"]) == ("ok", True), (passed, result)
        assert result["error_ratio"] <= 1
    assert ranked(python, place)
    table = (place / "attention" / "README.md").read_text()
    assert "| `mine` |" in table


def test_with_wrong_kernels_declared_it_is_not_ranked(python: Forks, tmp_path: Path) -> None:
    wrong = copied(tmp_path, '(Kernels("mine", "^mine_"),)')
    for row in benched(python, wrong).values():
        assert row["result"]["status"] == "ok" and row["result"]["kernels_ok"] is False
        assert "where mine was to run" in row["result"]["verdict"]
    assert not ranked(python, wrong)
