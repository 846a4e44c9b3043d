"""The study attention_memory: end to end on a CPU, and what a GPU's rows would say."""

from __future__ import annotations

import sys

import pytest

from attention import registry
from scripts.measure.instruments.bench_points import Shape
from scripts.measure.instruments.workers import Gauge, Measurer, sizes
from scripts.measure.report import attention_memory_report as memory_report
from scripts.measure.rows import read
from scripts.measure.studies import attention_memory
from scripts.measure.studies.attention_memory import Study, Task, curve, tasks
from tests.scripts.attention_rows import memory_rows
from tests.scripts.studies import run_of

SHAPE = Shape(1, 2, 2, 64, 16, True, "fp32", study="attention_memory")


pytestmark = pytest.mark.usefixtures("on_a_cpu")


class Here:
    """A worker in this process."""

    def __init__(self, name):
        self.gauge = Gauge(name, registry.build(name), "cpu")

    def ask(self, shape, passed, cap=None):
        return self.gauge.measure(shape, passed)

    def close(self):
        pass


def run(module, monkeypatch, out, *arguments):
    monkeypatch.setattr(sys, "argv", [f"{module.STUDY}.py", "--out", str(out), *arguments])
    module.main()
    return list(read(out).values())


def test_memory_on_a_cpu(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(Study.__init__, "__defaults__", (Here,))
    out, asked = (
        tmp_path / "rows.jsonl",
        ("--attention", "standard", "tiled", "--jobs", "1", "--seq-len", "128", "256", "512"),
    )
    rows = run(attention_memory, monkeypatch, out, *asked)
    assert len(rows) == 2 * 2 * 3 and {row["result"]["status"] for row in rows} == {"ok"}
    peaks = memory_report.series(rows, "forward", lambda row: True)
    growth = memory_report.exponent(memory_report.measured(peaks["standard"]))
    assert 1.8 < growth < 2.1  # one piece of q, k, v and out is in it
    row = peaks["standard"][512]
    # scores, and what is made of them, at once: two matrices in fp32, and a mask of bytes
    assert row["result"]["scores_mib"] == 2 * 512**2 * 4 / 2**20
    assert 2 <= row["result"]["peak_mib"] / row["result"]["scores_mib"] < 3.3
    assert peaks["tiled"][512]["result"]["peak_mib"] < row["result"]["peak_mib"] / 4
    printed = capsys.readouterr().out
    assert "12 points" in printed and "[12/12, " in printed and "Exponent p of N^p" in printed
    assert out.with_suffix(".svg").read_text().startswith("<?xml")
    monkeypatch.setattr(Study, "keep", lambda *_: pytest.fail("measured again"))
    assert run(attention_memory, monkeypatch, out, *asked) == rows


@pytest.mark.long
def test_a_worker_answers_until_it_is_closed():
    worker = Measurer("naive")
    result = worker.ask(SHAPE, "both")
    assert (
        result["status"] == "ok" and result["kernels_ok"] and result["peak_mib"] > result["outputs_mib"] > 0
    )
    assert worker.ask(SHAPE, "both", brief=True) == {"status": "ok"}
    worker.worker.process.kill()
    died = worker.ask(SHAPE, "both")
    assert died["status"] == "error" and "killed by signal 9" in died["reason"]
    worker.close()
    assert worker.worker is None


def test_sizes_by_hand():
    shape = Shape(8, 32, 32, 8192, 64, True, "fp16")
    forward, both = sizes(shape, "forward"), sizes(shape, "both")
    assert (forward["scores_mib"], forward["scores_fp32_mib"], forward["lse_mib"]) == (32768, 65536, 8)
    assert (forward["inputs_mib"], forward["outputs_mib"]) == (3 * 256, 256)
    assert (both["inputs_mib"], both["outputs_mib"]) == (4 * 256, 4 * 256)


class Scripted:
    """A worker that answers from a list."""

    def __init__(self, answers, asked):
        self.answers, self.asked = answers, asked

    def __call__(self, name):
        return self

    def ask(self, shape, passed, cap=None):
        self.asked.append((shape.tokens, cap))
        return dict(self.answers.pop(0))

    def close(self):
        self.asked.append("closed")


OK = {"status": "ok", "peak_mib": 1.0, "ms": 1.0}
OOM = {"status": "oom", "reason": "CUDA out of memory"}


def study(tmp_path, answers, most_s=30.0, cap=0.1):
    asked = []
    lengths = [512, 1024, 2048, 4096]
    task = Task("naive", "forward", [[curve(n, True) for n in lengths]])
    Study(run_of(tmp_path / "rows.jsonl"), cap, most_s, Scripted(answers, asked)).run([task], 1)
    rows = {row["point"]["seq_len"]: row["result"] for row in read(tmp_path / "rows.jsonl").values()}
    return asked, rows


def test_what_hits_its_cap_is_measured_by_itself(tmp_path, capsys):
    asked, rows = study(tmp_path, [OK, OOM, OK, OOM])
    assert asked == [(512, 0.1), (1024, 0.1), (1024, None), (2048, None), "closed"]
    assert [rows[n]["status"] for n in sorted(rows)] == ["ok", "ok", "oom", "oom"]
    assert "not_tried" not in rows[2048] and rows[4096]["not_tried"]
    assert rows[4096]["reason"] == "not tried: out of memory at N = 2,048"


def test_what_would_take_too_long_is_not_tried(tmp_path, capsys):
    asked, rows = study(tmp_path, [OK, OK | {"ms": 9000.0}])
    assert [at for at in asked if at != "closed"] == [(512, 0.1), (1024, 0.1)]
    assert rows[2048]["reason"] == rows[4096]["reason"] == "not tried: N = 2,048 would take about 36 s a call"
    assert rows[2048]["status"] == "error" and rows[2048]["not_tried"]


def test_an_error_ends_the_process_and_not_the_series(tmp_path, capsys):
    error = {"status": "error", "reason": "its process ended"}
    asked, rows = study(tmp_path, [OK, error, OK, OK])
    assert asked == [(512, 0.1), (1024, 0.1), "closed", (2048, 0.1), (4096, 0.1), "closed"]
    assert [rows[n]["status"] for n in sorted(rows)] == ["ok", "error", "ok", "ok"]


def test_the_shapes_of_the_claims_are_there():
    asked = tasks(["standard", "tiled", "triton"], [512], True)
    assert {task.name for task in asked} == {"standard", "tiled", "triton"} and asked[0].name == "tiled"
    (forward,) = (task for task in asked if (task.name, task.passed) == ("standard", "forward"))
    shapes = [shape for series in forward.series for shape in series]
    assert Shape(8, 32, 32, 8192, 64, True, "fp16", study="attention_memory") in shapes
    assert Shape(1, 1, 1, 16384, 128, False, "fp32", study="attention_memory") in shapes
    (both,) = (task for task in asked if (task.name, task.passed) == ("triton", "both"))
    lengths = [[shape.tokens for shape in series] for series in both.series]
    assert lengths == [[512], [128, 256, 512, 1024, 2048, 4096]]
    assert all(shape.batch * shape.heads == 128 for shape in both.series[1])


@pytest.mark.parametrize("p", [1, 2])
def test_exponents_are_fitted_over_the_upper_half(p):
    points = {2**n: 3.0 * 2 ** (n * p) for n in range(9, 17)}
    points[512], points[1024] = 1e6, 1e6  # what is constant at short N
    assert memory_report.exponent(points) == pytest.approx(p)
    assert memory_report.exponent({1: 1.0, 2: 2.0}) is None
    assert memory_report.exponent({1: 1.0, 2: 2.0, 4: 0.0}) is None


def test_report_of_memory_on_a_gpu():
    report = attention_memory.report(memory_rows())
    forward, both, exponents, *_ = report.tables
    cells = {line[0]: line[1:] for line in forward.lines}
    assert cells["N"] == ["512", "1k", "2k", "4k", "8k", "16k", "32k", "64k"]
    assert cells["standard"][-2:] == ["49,202", "oom"] and cells["(scores, computed)"][-1] == "98,304"
    assert "flash3" not in cells and "cuda_fa1" not in {line[0] for line in both.lines}
    fits = {line[0]: line[1:] for line in exponents.lines}
    assert fits["standard"] == ["2.00", "2.00", "1.99", "2.00"] and fits["triton"] == ["1.00"] * 4
    titles = " ".join(table.title for table in report.tables)
    assert all(f"Claim {n}" in titles for n in (1, 2, 11, 12))
    assert any("standard out of memory at 64k" in note for note in report.notes)
    assert report.found == (
        "Memory of forward and backward grows as N^2.00 where scores are written to memory, else as N^1.00."
    )
    assert memory_report.report(memory_rows(["triton"])).found == ""
    assert "out of memory at 32k" in report.pictures[""] and "NVIDIA H200" in report.pictures[""]


def test_lines_that_lie_on_each_other_are_one():
    drawn = memory_report.series(memory_rows(["standard", "triton", "cuda_fa2"]), "forward")
    found = memory_report.groups(drawn)
    assert found == [(["standard"], "out of memory at 64k"), (["cuda_fa2", "triton"], "")]


@pytest.mark.gpu
def test_a_neighbour_does_not_change_a_peak():
    shape = Shape(1, 12, 12, 2048, 64, True, "bf16", study="attention_memory")
    first, second = Measurer("sdpa_flash"), Measurer("sdpa_flash")
    alone = first.ask(shape, "both")
    second.ask(Shape(1, 12, 12, 8192, 64, True, "bf16"), "both", 0.1)
    beside = first.ask(shape, "both", 0.1)
    capped = second.ask(Shape(8, 12, 12, 65536, 64, True, "bf16"), "both", 0.01)
    first.close(), second.close()
    assert alone["status"] == "ok" and beside["peak_mib"] == alone["peak_mib"]
    assert capped["status"] == "oom"
