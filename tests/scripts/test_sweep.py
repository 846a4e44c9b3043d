"""Sweeps: they survive kills, failures are rows, shards and printed commands make up the whole."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import ClassVar

import pytest

from scripts import sweep
from scripts.measure import sources
from scripts.measure.report import figures, sweep_report
from scripts.measure.rows import read
from scripts.measure.sweep_company import Room
from tests.running import ROOT
from tests.scripts.studies import TINY, fake_result

pytestmark = pytest.mark.usefixtures("on_a_cpu")


def environment() -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}


def started(out: Path) -> subprocess.Popen:
    grid = ["sweep.grid.attention=[naive,tiled]", "sweep.grid.seq_len=[16]"]
    command = [sys.executable, str(ROOT / "scripts" / "sweep.py"), *TINY, *grid, f"--out={out}"]
    return subprocess.Popen(
        command,
        cwd=out.parent,
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.mark.long
@pytest.mark.skipif(sys.platform != "linux", reason="looks for processes under /proc")
def test_a_killed_sweep_goes_on_where_it_stopped(tmp_path: Path) -> None:
    out = tmp_path / "cpu.jsonl"
    first = started(out)
    for line in first.stdout:
        if line.startswith("[1/2]"):
            break
    deadline = time.monotonic() + 20
    while not (points := children(first.pid)) and time.monotonic() < deadline:
        time.sleep(0.01)
    first.kill()
    first.communicate()
    assert first.returncode == -signal.SIGKILL and len(points) == 1
    while alive(points[0]):  # a point does not outlive its sweep
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert len(out.read_text().splitlines()) == 1

    said = started(out)
    text, _ = said.communicate(timeout=100)
    assert said.returncode == 0, text
    assert len(re.findall(r"\(kept\)$", text, flags=re.MULTILINE)) == 1 and "[2/2] tiled" in text
    lines = [json.loads(line) for line in out.read_text().splitlines()]
    assert [line["result"]["status"] for line in lines] == ["ok"] * 2
    assert [line["point"]["implementation"] for line in lines] == ["naive", "tiled"]
    assert len({line["key"] for line in lines}) == 2 and len({line["run_id"] for line in lines}) == 2
    for line in lines:
        result, point = line["result"], line["point"]
        assert point["micro_batch"] == 128 // point["seq_len"] and point["tokens_per_step"] == 128
        assert result["tokens_per_s"] == pytest.approx(128e3 / result["ms_median"])
        assert result["ms_p10"] <= result["ms_median"] <= result["ms_p90"] and result["n"] == 3
        assert result["peak_mib"] > 0 and "resident" in result["peak_of"] and result["mfu"] is None
        assert result["kernels"] and result["kernels_ok"], result["verdict"]
        assert result["memory_split_error"] <= 0.03 and result["memory_split"]["parameters"] > 0
        assert 3.9 < result["loss"]["first"] < 4.5  # the logarithm of 64, and a little
    picture = (tmp_path / "cpu.svg").read_text()
    ElementTree.fromstring(picture)
    assert figures.is_drawn(list(read(out).values()), tmp_path / "cpu.svg")


@pytest.fixture
def point_results(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """The commands of points, which are not run: naive is out of memory above micro-batches of 2, flash2
    breaks, tiled takes too long for 32 tokens."""
    ran: list[list[str]] = []
    drawn = sweep_report.picture

    def once(target: str, request: dict[str, list[str]], timeout_s: float) -> dict[str, object]:
        command = request["words"]
        ran.append(command)
        values = dict(word.split("=", 1) for word in command if "=" in word)
        if values["attention"] == "naive" and int(values["data.batch_size"]) > 2:
            return {"status": "oom", "reason": "CUDA out of memory"}
        if values["attention"] == "flash2":
            return {"status": "error", "reason": "RuntimeError: broken"}
        if values["attention"] == "tiled" and int(values["seq_len"]) >= 32:
            return {"status": "error", "reason": f"took longer than {timeout_s} s", "timeout_s": timeout_s}
        return fake_result()

    monkeypatch.setattr(sweep, "once", once)
    # The SVG has tests of its own.
    monkeypatch.setattr(sweep_report, "picture", lambda *given: drawn(*given) if given[1:] else "")
    monkeypatch.setattr(sources, "code", lambda *_: "sources")  # whoever edits them meanwhile
    return ran


def run(out: Path, *arguments: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["sweep.py", *TINY, f"--out={out}", *arguments])
    sweep.main()


@pytest.mark.long
def test_what_fails_is_a_row_and_the_sweep_goes_on(tmp_path, point_results, monkeypatch, capsys):
    out = tmp_path / "cpu.jsonl"
    grid = ("sweep.grid.attention=[naive,flash2,tiled,sdpa]", "sweep.grid.seq_len=[16,32,64]")
    run(out, *grid, monkeypatch=monkeypatch)
    got = {
        (p["implementation"], p["seq_len"], p["micro_batch"]): row["result"]["status"]
        for row in read(out).values()
        for p in [row["point"]]
    }
    assert got == {
        ("naive", 16, 8): "oom", ("naive", 16, 4): "oom", ("naive", 16, 2): "ok",
        ("naive", 32, 4): "oom", ("naive", 32, 2): "ok", ("naive", 64, 2): "ok",
        ("flash2", 16, 8): "error", ("flash2", 32, 4): "error", ("flash2", 64, 2): "error",
        ("tiled", 16, 8): "ok", ("tiled", 32, 4): "error", ("tiled", 64, 2): "error",
        ("sdpa", 16, 8): "ok", ("sdpa", 32, 4): "ok", ("sdpa", 64, 2): "ok",
    }  # fmt: skip
    assert sum("attention=tiled" in command for command in point_results) == 2  # 64 was not tried
    table = capsys.readouterr().out
    assert "points/min, about" in table
    assert re.search(r"naive +1,000 \(2\) +1,000 \(2\) +1,000\n", table), table
    assert re.search(r"tiled +1,000 +timeout +timeout\n", table), table
    assert "flash2 at T = 16; 32; 64: error: RuntimeError: broken" in table
    assert "tiled at T = 64: error: not tried: a context of 32 tokens" in table

    point_results.clear()  # again: errors are tried once more, the rest stands
    run(out, *grid, monkeypatch=monkeypatch)
    assert all("attention=flash2" in command for command in point_results) and len(point_results) == 3
    run(out, *grid, "--fresh", monkeypatch=monkeypatch)
    assert len(point_results) == 3 + 14

    point_results.clear()  # by other sources: what has a row stands if it is asked to
    monkeypatch.setattr(sources, "code", lambda *_: "other sources")
    more = ("sweep.grid.attention=[flash2,tiled,triton]", "sweep.grid.seq_len=[16]")
    capsys.readouterr()
    run(out, *more, "--missing", monkeypatch=monkeypatch)
    assert ["attention=flash2" in command for command in point_results] == [True, False]
    assert "attention=triton" in point_results[1]
    assert re.search(r"sdpa +1,000", capsys.readouterr().out)  # old rows are in the table
    run(out, *more, monkeypatch=monkeypatch)
    assert len(point_results) == 2 + 2  # flash2 again, and tiled


def test_what_took_too_long_is_tried_where_more_differs_than_the_context(tmp_path, monkeypatch):
    monkeypatch.setattr(sources, "code", lambda *_: "sources")
    ran = []

    def once(target: str, request: dict[str, list[str]], timeout_s: float) -> dict[str, object]:
        words = request["words"]
        ran.append(words)
        slow = "checkpointing=true" in words and "seq_len=16" not in words
        return {"status": "error", "reason": "late", "timeout_s": timeout_s} if slow else fake_result()

    monkeypatch.setattr(sweep, "once", once)
    grid = (
        "sweep.grid.attention=[sdpa]",
        "sweep.grid.seq_len=[16,32,64]",
        "+sweep.grid.checkpointing=[true,false]",
    )
    run(tmp_path / "cpu.jsonl", *grid, monkeypatch=monkeypatch)
    found = {
        (row["point"]["checkpointing"], row["point"]["seq_len"]): row["result"]["status"]
        for row in read(tmp_path / "cpu.jsonl").values()
    }
    late = {(True, 16): "ok", (True, 32): "error", (True, 64): "error"}
    assert found == late | {(False, tokens): "ok" for tokens in (16, 32, 64)}
    assert len(ran) == 5  # 64 with checkpointing is not tried


def test_nanogpt_runs_beside(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sources, "code", lambda *_: "sources")
    model = tmp_path / "model.py"
    model.write_text("")
    ran = []

    def once(target: str, request: dict[str, list[str]], timeout_s: float) -> dict[str, object]:
        ran.append(request["words"])
        return fake_result(tokens_per_s=500.0)

    monkeypatch.setattr(sweep, "once", once)
    arguments = ("sweep.grid.attention=[sdpa]", "sweep.grid.seq_len=[16]", f"--nanogpt={model}")
    run(tmp_path / "cpu.jsonl", *arguments, monkeypatch=monkeypatch)
    assert [f"--peer=nanogpt={model}" in command for command in ran] == [True, False]
    names = [row["point"]["implementation"] for row in read(tmp_path / "cpu.jsonl").values()]
    assert names == ["nanoGPT", "sdpa"] and "x nanoGPT" in capsys.readouterr().out
    ran.clear()
    run(tmp_path / "cpu.jsonl", *arguments, monkeypatch=monkeypatch)
    assert not ran  # it is there already


@pytest.mark.long
def test_set_up_side_by_side(tmp_path, monkeypatch):
    """Two points take their first steps at once, those that are timed in turn, and are profiled at once."""
    monkeypatch.setattr("os.environ", environment())
    grid = ("sweep.grid.attention=[naive,tiled]", "sweep.grid.seq_len=[16]", "--together=2")
    run(tmp_path / "cpu.jsonl", *grid, monkeypatch=monkeypatch)
    results = {row["point"]["implementation"]: row["result"] for row in read(tmp_path / "cpu.jsonl").values()}
    assert results.keys() == {"naive", "tiled"}
    for result in results.values():
        assert result["status"] == "ok" and result["beside"] == 1, result["reason"]
        assert result["n"] == 3 and result["kernels_ok"]


class Beside:
    """A point of a company: naive is out of memory in it, tiled breaks, sdpa_math takes too long."""

    LOST: ClassVar = {
        "attention=naive": {"status": "oom", "reason": "out"},
        "attention=tiled": {"status": "error", "reason": "no room for a handle"},
        "attention=sdpa_math": {"status": "error", "reason": "late", "timeout_s": 1},
    }

    def __init__(self, target: str, timeout_s: float, beside: int):
        self.beside = beside

    def start(self, request: dict[str, list[str]], wait: bool) -> None:
        self.lost = next((how for word, how in self.LOST.items() if word in request["words"]), None)

    def ready(self) -> None: ...

    def go(self) -> None: ...

    def end(self) -> None: ...

    def result(self) -> dict[str, object]:
        more = {"beside": self.beside}
        return {**self.lost, **more} if self.lost else fake_result(**more)


def test_what_fails_in_company_is_measured_again_alone(tmp_path, point_results, monkeypatch):
    """Also where it has failed, as others may be to blame; not what took too long."""
    monkeypatch.setattr(sweep, "Worker", Beside)
    names = "sweep.grid.attention=[naive,tiled,sdpa_math,sdpa]"
    grid = (names, "sweep.grid.seq_len=[16]", "sweep.micro_tokens=32", "--together=4")
    run(tmp_path / "cpu.jsonl", *grid, monkeypatch=monkeypatch)
    rows = list(read(tmp_path / "cpu.jsonl").values())
    said = [
        (row["point"]["implementation"], row["result"]["status"], "beside" in row["result"]) for row in rows
    ]
    assert said == [
        ("sdpa_math", "error", True), ("sdpa", "ok", True), ("naive", "ok", False), ("tiled", "ok", False)
    ]  # fmt: skip
    assert len(point_results) == 2 and "attention=naive" in point_results[0]


def test_a_memory_split_that_found_no_room_in_company_is_none():
    kept = {"status": "ok", "memory_split": None, "memory_split_reason": "4 more steps would take too long"}
    lost = kept | {"memory_split_reason": "CUDA out of memory. Tried to allocate 2.00 GiB"}
    assert sweep.may_be_of_company(lost)
    assert not sweep.may_be_of_company(kept) and not sweep.may_be_of_company({"status": "ok"})


@pytest.mark.long
def test_wandb_gets_a_run_for_each_point(tmp_path, point_results, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.chdir(tmp_path)
    grid = ("sweep.grid.attention=[sdpa]", "sweep.grid.seq_len=[16,32]", "--wandb=tilegpt-test")
    run(tmp_path / "cpu.jsonl", *grid, monkeypatch=monkeypatch)
    runs = sorted(path.name for path in (tmp_path / "runs").iterdir())
    assert [name.rpartition("-")[0] for name in runs] == [
        "seqlen_scaling_tiny-picture", "seqlen_scaling_tiny-sdpa-16", "seqlen_scaling_tiny-sdpa-32"
    ]  # fmt: skip
    assert len(list((tmp_path / "runs").glob("*/wandb/offline-run-*/*.wandb"))) == 3
    pictures = list((tmp_path / "runs").glob("*/wandb/offline-run-*/files/media/images/*.png"))
    assert len(pictures) == 1 and pictures[0].read_bytes().startswith(b"\x89PNG")


def test_what_needs_far_more_than_there_is_is_not_tried_twice(tmp_path, point_results, monkeypatch):
    """Once a shorter context was out of memory; nor is what may fit left out."""
    monkeypatch.setattr(Room, "is_hopeless", lambda _, point: point.fields["micro_batch"] > 2)
    monkeypatch.setattr(Room, "needs", lambda *_: 2**40)
    grid = ("sweep.grid.attention=[naive,sdpa]", "sweep.grid.seq_len=[16,32,64]")
    run(tmp_path / "cpu.jsonl", *grid, monkeypatch=monkeypatch)
    rows = read(tmp_path / "cpu.jsonl").values()
    naive = [row for row in rows if row["point"]["implementation"] == "naive"]
    assert [(row["point"]["micro_batch"], row["result"]["status"]) for row in naive] == [
        (8, "oom"), (2, "ok"), (4, "oom"), (2, "ok"), (2, "ok")
    ]  # fmt: skip
    assert naive[0]["result"]["reason"] == "CUDA out of memory"
    assert naive[2]["result"]["reason"].startswith("not tried: 16 tokens were out of memory")
    assert len(point_results) == 4 + 3
