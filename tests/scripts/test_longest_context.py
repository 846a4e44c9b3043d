"""The search for the longest context, on a GPU that the memory model stands for."""

from __future__ import annotations

import json
import sys
import types
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

from model.costs.memory import peak
from scripts.estimate import run_of
from scripts.measure import rows, runner, worker
from scripts.measure.report import longest_context_report
from scripts.measure.rows import read
from scripts.measure.studies import longest_context
from scripts.memory import composed

MIB, TOTAL = 2**20, 140 * 2**30


class Gpu:
    """In the place of processes on an H200: peaks are `off` times the predicted ones, and a step takes 1 s
    for each 10^15 FLOPs."""

    def __init__(self, off: float = 1.04) -> None:
        self.off, self.asked, self.peaks = off, [], {}

    def measured(self, target: str, request: dict[str, list[str]], timeout_s: float) -> dict[str, object]:
        from model.costs.gpus import GPUS
        from model.costs.roofline import step_work

        command = request["words"]
        words = [word for word in command if "=" in word and not word.startswith("-")]
        values = dict(word.split("=") for word in words)
        assert {"--brief", "--warm-up=1", "--steps=1"} <= set(command) and values["data.batch_size"] == "1"
        run = run_of(composed(words), GPUS["h200"])
        size, tokens = self.off * peak(run).peak, int(values["seq_len"])
        self.asked.append((values["attention"], values["checkpointing"], tokens))
        if size > 0.98 * TOTAL:
            return {"status": "oom", "reason": "CUDA out of memory."}
        return {
            "status": "ok",
            "reason": None,
            "peak_mib": size / MIB,
            "ms_median": step_work(run).flops / 1e12,
        }


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Gpu:
    found = Gpu()
    monkeypatch.setattr(worker, "once", found.measured)
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.get_device_name", lambda *_: "NVIDIA H200")
    memory = types.SimpleNamespace(total_memory=TOTAL)
    monkeypatch.setattr("torch.cuda.get_device_properties", lambda _: memory)
    machine = {"gpu": "NVIDIA H200", "date": "2026-11-21", "command": "x", "torch": "2"}
    for module in (rows, runner):
        monkeypatch.setattr(module, "machine", lambda: machine)
    return found


def run(out: Path, *arguments: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["longest_context.py", f"--out={out}", *arguments])
    longest_context.main()


@pytest.mark.long
@pytest.mark.parametrize("off", [0.9, 1.2])
def test_a_search_ends_within_3_percent_after_few_steps(gpu, tmp_path, monkeypatch, capsys, off):
    gpu.off = off
    two = ("--attention", "naive", "triton", "--checkpointing", "yes", "--limit-s", "200")
    run(tmp_path / "h200.jsonl", *two, monkeypatch=monkeypatch)
    found = list(read(tmp_path / "h200.jsonl").values())
    for name in ("naive", "triton"):
        mine = [row for row in found if row["point"]["implementation"] == name]
        one = longest_context_report.end(mine)
        assert one.tokens < one.fails <= 1.03 * one.tokens + 64 and len(mine) <= 5
        assert one.fits["predicted_longest"] / one.tokens == pytest.approx(off, rel=0.25)
        assert one.fits["predicted_compiled"] > one.fits["predicted_longest"]
    assert len(gpu.asked) == len(found)
    out = capsys.readouterr().out
    assert "naive trains up to T = " in out and "triton, checkpointing T=" in out
    ElementTree.parse(tmp_path / "h200.svg")


@pytest.mark.long
def test_it_goes_on_where_it_stopped(gpu, tmp_path, monkeypatch):
    out, one = tmp_path / "h200.jsonl", ("--attention", "naive", "--checkpointing", "no")
    run(out, *one, monkeypatch=monkeypatch)
    asked, lines = list(gpu.asked), out.read_text().splitlines()
    gpu.asked.clear()
    run(out, *one, monkeypatch=monkeypatch)
    assert not gpu.asked
    broken = json.loads(lines[-1])
    broken["result"] = {"status": "error", "reason": "RuntimeError: broken"}
    out.write_text("\n".join([*lines[:-1], json.dumps(broken)]) + "\n")
    run(out, *one, monkeypatch=monkeypatch)
    assert gpu.asked == asked[-1:]  # an error is tried again
    gpu.asked.clear()
    run(out, *one, "--fresh", monkeypatch=monkeypatch)
    assert gpu.asked == asked


def test_what_takes_too_long_is_not_tried(gpu, tmp_path, monkeypatch, capsys):
    only = ("--attention", "triton", "--checkpointing", "yes", "--compile", "--limit-s", "5")
    run(tmp_path / "h200.jsonl", *only, monkeypatch=monkeypatch)
    *_, fits, late = found = list(read(tmp_path / "h200.jsonl").values())
    assert fits["result"]["status"] == "ok" and fits["result"]["ms_median"] < 5e3
    assert late["result"]["too_slow"] and "more than 5" in late["result"]["reason"]
    assert late["result"]["predicted_step_s"] > 5 and len(gpu.asked) == len(found) - 1
    assert fits["result"]["predicted_longest"] == fits["result"]["predicted_compiled"]
    assert "not tried: a step would take" in capsys.readouterr().out
    gpu.asked.clear()
    run(tmp_path / "h200.jsonl", *only, monkeypatch=monkeypatch)
    assert not gpu.asked


def test_the_loss_in_chunks_is_a_search_of_its_own(gpu, tmp_path, monkeypatch):
    """Its contexts are longer, its rows not mistaken for the others', whose points have no such field."""
    out, one = tmp_path / "h200.jsonl", ("--attention", "triton", "--checkpointing", "no")
    run(out, *one, monkeypatch=monkeypatch)
    plain = list(gpu.asked)
    run(out, *one, "--loss-chunk", "2048", monkeypatch=monkeypatch)
    run(out, *one, monkeypatch=monkeypatch)
    rows = list(read(out).values())
    assert {row["point"].get("loss_chunk") for row in rows[: len(plain)]} == {None}
    assert {row["point"].get("loss_chunk") for row in rows[len(plain) :]} == {2048}
    assert len(gpu.asked) == len(rows) > len(plain)  # the third run found all that it needs
    (first, whole), (second, chunks) = longest_context_report.found(rows).items()
    assert "loss of 2,048 tokens at a time" in longest_context_report.heading(second)
    assert "at a time" not in longest_context_report.heading(first)
    assert (
        chunks[0].tokens > 1.2 * whole[0].tokens
    )  # whose logits are bf16, and nothing else of theirs is there


def test_a_refusal_is_a_row(gpu, tmp_path, monkeypatch):
    run(
        tmp_path / "h200.jsonl", "--attention", "cuda_tiled", "--checkpointing", "no", monkeypatch=monkeypatch
    )
    statuses = {row["result"]["status"] for row in read(tmp_path / "h200.jsonl").values()}
    assert statuses and statuses <= {"unsupported", "ok", "oom"}


def test_without_a_gpu_it_says_so(monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setattr(sys, "argv", ["longest_context.py"])
    with pytest.raises(SystemExit, match="needs a CUDA GPU"):
        longest_context.main()
