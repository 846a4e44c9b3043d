"""An attention of one's own: one file and one yaml in a copy of the project, and everything finds it."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

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


def run(place: Path, *command: str) -> str:
    clean = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    environment = clean | {"TILEGPT_COMMIT": "copy", "CUDA_VISIBLE_DEVICES": ""}
    command = (sys.executable, *command)
    done = subprocess.run(command, cwd=place, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return done.stdout


def benched(place: Path) -> dict[str, dict]:
    """Rows of the new attention by pass, measured here and, for the ranking, as if on an H200."""
    out = place / "rows.jsonl"
    asked = ("--attention", "mine", "standard", "--seq-len", "64", "--head-dim", "32", "--causal")
    run(place, "scripts/bench_attention.py", *asked, "--batch", "1", "--heads", "2", "--out", str(out))
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    with (place / "results" / "attention" / "h200.jsonl").open("a") as file:
        for row in rows:
            as_if = row | {"key": f"copy {row['key']}", "machine": row["machine"] | {"gpu": "NVIDIA H200"}}
            file.write(json.dumps(as_if) + "\n")
    return {row["point"]["pass"]: row for row in rows if row["point"]["implementation"] == "mine"}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return copied(tmp_path_factory.mktemp("mine"), "MATMUL_KERNELS")


def ranked(place: Path) -> bool:
    run(place, "scripts/report.py", "auto", "capabilities")
    return "mine" in (place / "attention" / "auto_table.py").read_text()


def test_it_is_trained(place: Path) -> None:
    said = run(place, "train.py", *SMALL, "attention=mine", "trainer.max_steps=2", "trainer.accelerator=cpu")
    assert "attention  mine" in said


def test_its_memory_is_predicted(place: Path) -> None:
    said = run(place, "scripts/estimate.py", *SMALL, "attention=mine", "gpu=h200")
    assert "attention=mine" in said and "attention's memory grows as T\n" in said


def test_it_is_in_a_studys_report(place: Path) -> None:
    sizes = ("--attention", "mine", "standard", "--seq-len", "64", "--curve")
    said = run(place, "scripts/study.py", "attention_memory", *sizes, "--out", str(place / "memory.jsonl"))
    assert "mine" in said
    code = "from scripts.measure.studies.attention_memory import contestants; print(contestants(False))"
    assert "'mine'" in run(place, "-c", code)  # where nobody is named, too


def test_it_is_measured_its_kernels_are_checked_and_auto_ranks_it(place: Path) -> None:
    for passed, row in benched(place).items():
        result = row["result"]
        assert (result["status"], result["kernels_ok"]) == ("ok", True), (passed, result)
        assert result["error_ratio"] <= 1
    assert ranked(place)
    table = (place / "attention" / "README.md").read_text()
    assert "| `mine` |" in table


def test_with_wrong_kernels_declared_it_is_not_ranked(tmp_path: Path) -> None:
    wrong = copied(tmp_path, '(Kernels("mine", "^mine_"),)')
    for row in benched(wrong).values():
        assert row["result"]["status"] == "ok" and row["result"]["kernels_ok"] is False
        assert "where mine was to run" in row["result"]["verdict"]
    assert not ranked(wrong)
