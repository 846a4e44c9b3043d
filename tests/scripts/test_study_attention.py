"""The studies attention_memory and attention_speed: end to end on a CPU, and what a GPU's rows would say."""

from __future__ import annotations

import json
import sys

import pytest
import torch

from attention.geometry import tile_kind
from attention.geometry import tiles as ranges
from scripts.bench_points import Shape
from scripts.claims import FAILS, HOLDS, IN_PART, NotMeasured, Results
from scripts.claims import attention as claims
from scripts.rows import read
from scripts.studies import attention_memory, attention_speed, attention_speed_plots, speed_points
from scripts.studies import attention_memory_report as memory_report
from scripts.studies import attention_speed_report as speed_report
from scripts.studies.attention_memory import Study, Task, curve, tasks
from scripts.studies.speed_bench import SpeedBench, tiles
from scripts.studies.speed_points import Asked
from scripts.studies.standard import contestants, known
from scripts.studies.workers import Gauge, Worker, sizes
from tests.scripts.attention_rows import memory_rows, speed_rows

SHAPE = Shape(1, 2, 2, 64, 16, True, "fp32", study="attention_memory")


@pytest.fixture(autouse=True)
def device(request, monkeypatch):
    """A CPU, also where there is a GPU, but for what is marked so."""
    if not request.node.get_closest_marker("gpu"):
        monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


class Here:
    """A worker in this process."""

    def __init__(self, name):
        self.gauge = Gauge(name, contestants([name])[name], "cpu")

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
    assert "12 points" in printed and "[12/12]" in printed and "Exponent p of N^p" in printed
    assert out.with_suffix(".svg").read_text().startswith("<?xml")
    monkeypatch.setattr(Study, "keep", lambda *_: pytest.fail("measured again"))
    assert run(attention_memory, monkeypatch, out, *asked) == rows


def test_a_worker_answers_until_it_is_closed():
    worker = Worker("naive")
    result = worker.ask(SHAPE, "both")
    assert (
        result["status"] == "ok" and result["kernels_ok"] and result["peak_mib"] > result["outputs_mib"] > 0
    )
    worker.process.kill()
    died = worker.ask(SHAPE, "both")
    assert died["status"] == "error" and "killed by signal 9" in died["reason"]
    worker.close()
    assert worker.process is None


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
    Study(tmp_path / "rows.jsonl", cap, most_s, False, Scripted(answers, asked)).run([task], 1)
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
    assert "out of memory at 32k" in report.pictures[""] and "NVIDIA H200" in report.pictures[""]


def test_lines_that_lie_on_each_other_are_one():
    drawn = memory_report.series(memory_rows(["standard", "triton", "cuda_fa2"]), "forward")
    found = memory_report.groups(drawn)
    assert found == [(["standard"], "out of memory at 64k"), (["cuda_fa2", "triton"], "")]


def test_speed_on_a_cpu(tmp_path, monkeypatch, capsys):
    out, asked = (
        tmp_path / "rows.jsonl",
        ("--attention", "standard", "tiled", "--longest", "64", "--budget", "0.002"),
    )
    rows = run(attention_speed, monkeypatch, out, *asked)
    assert len(rows) == 2 * 2 * 3  # two lengths; forward and both causal, forward without a mask
    for row in rows:
        result = row["result"]
        assert result["status"] == "ok" and result["error_ratio"] <= 1 and result["kernels_ok"]
        assert result["stream_us"] > 0 and result["copy_gb_per_s"] > 0
    tile = speed_report.pick(rows, passed="forward", causal=True, seq_len=64)["tiled"]["result"]
    assert (tile["tile"], tile["tiles_computed"], tile["tiles_all"]) == ([128, 128], 1, 1)
    printed = capsys.readouterr().out
    assert "4 of 4 shapes" in printed and "ms, forward, causal, fp32" in printed
    assert out.with_suffix(".svg").is_file()
    assert run(attention_speed, monkeypatch, out, *asked) == rows
    assert "0 of 4 shapes" in capsys.readouterr().out


def test_slow_contestants_are_left_out_at_longer_n(tmp_path):
    out = tmp_path / "rows.jsonl"
    bench = SpeedBench(contestants(["naive", "sdpa"]), "cpu", 0.001, out, slow_ms=1e9)
    points = [
        Asked(
            "curve",
            Shape(1, 1, 1, n, 8, True, "fp32", study="attention_speed"),
            {"forward": ["naive", "sdpa"]},
        )
        for n in (16, 32)
    ]
    bench.note(points[0], "forward", "naive", {"status": "ok", "ms_median": 2e9})
    bench.note(points[0], "backward", "sdpa", {"status": "oom"})
    for point in points:
        bench.point(point, point.passes)
    found = {
        (row["point"]["implementation"], row["point"]["seq_len"]): row["result"] for row in read(out).values()
    }
    assert [found[name, 16]["status"] for name in ("naive", "sdpa")] == ["ok", "ok"]  # not beyond it
    assert found["sdpa", 32]["status"] == "ok" and found["naive", 32]["not_tried"]
    assert found["naive", 32]["reason"] == "not tried: a call took 2000000000 ms at N = 16"


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("window", [None, 5, 100])
@pytest.mark.parametrize("tile", [(8, 4), (16, 16), (5, 7)])
def test_tiles_are_those_that_somebody_sees(causal, window, tile):
    shape = Shape(1, 1, 1, 50, 8, causal, "fp32", window=window)
    if window is not None and not causal:
        return  # the studies have none
    band = (-1 if window is None else window, 0 if causal else -1)
    kinds = [tile_kind(r, c, 0, band) for r in ranges(50, tile[0]) for c in ranges(50, tile[1])]
    assert tiles(shape, *tile) == (sum(kind in ("past", "boundary") for kind in kinds), len(kinds))


def test_of_a_grid_of_16_tiles_10_are_computed():
    assert tiles(Shape(1, 1, 1, 512, 8, True, "fp32"), 128, 128) == (10, 16)


def test_points_of_speed():
    names = known()
    every = speed_points.asked(list(speed_points.PARTS), names, True)
    points = [(point.part, point.shape) for point in every]
    assert len(points) == len(set(points)) and "auto" not in names and names[0] == "standard"
    curve = {point.shape.tokens for point in every if point.part == "curve"}
    assert curve == {2**n for n in range(9, 17)}
    short = {point.shape.tokens for point in every if point.part == "short"}
    assert short == {32, 64, 128, 256, 512}
    flex = {p.shape.tokens for p in every if p.part == "curve" and "flex" in p.passes["forward"]}
    assert flex == {1024, 4096, 16384}
    assert max(p.shape.tokens for p in speed_points.asked(["curve"], names, True, longest=2048)) == 2048


def test_what_is_compiled_ahead():
    points = speed_points.asked(["curve"], ["standard", "cuda_fa2", "flex"], True)
    found = attention_speed.to_compile(points)
    assert {name for name, _ in found} == {"cuda_fa2", "flex"}
    (fa2,) = (calls for name, calls in found if name == "cuda_fa2")
    kinds = {(shape.tokens, shape.causal, passed) for shape, passed in fa2}
    assert kinds == {
        (512, True, "forward"), (512, True, "backward"), (1024, True, "both"),
        (1024, False, "forward"), (4096, False, "backward"),
    }  # fmt: skip
    flex = [call for name, calls in found if name == "flex" for call in calls]
    assert len(flex) == len(set(flex)) == (3 * 2 + 1) + (1 + 2 + 2)  # causal, where at 1k all passes; full


def test_report_of_speed_on_a_gpu():
    some = ["standard", "naive", "cuda_fa1", "cuda_fa2", "tiled", "triton", "sdpa_flash"]
    report = attention_speed.report(speed_rows(some))
    titles = [table.title for table in report.tables]
    for n in (3, 8, 9, 12, 15, 16, 24):
        assert any(title.startswith("Claim") and str(n) in title.split(":")[0] for title in titles), n
    (over,) = (table for table in report.tables if table.title.startswith("Claims 3"))
    cells = {line[0]: dict(zip(over.lines[0][1:], line[1:], strict=True)) for line in over.lines[1:]}
    assert cells["standard"]["2k causal both"] == "10.3" and cells["cuda_fa2"]["2k causal both"] == "6.6x"
    assert set(report.pictures) == {"", "short"} and "shaded" in report.pictures["short"]
    assert any("one sequence, device: it wins at N = 32 (standard, 1.74x)" in note for note in report.notes)


def test_a_wrong_kernel_is_no_winner():
    rows = speed_rows(["standard", "triton", "sdpa_flash"])
    for row in rows:
        if row["point"]["implementation"] == "triton":
            row["result"]["kernels_ok"], row["result"]["verdict"] = False, "asked for triton, ran gemm"
    won = speed_report.winners(rows, "forward", False, "device")
    assert {fused for _, _, fused, _ in won.values()} == {"sdpa_flash"}
    notes = attention_speed_plots.notes(rows)
    assert any("asked for triton, ran gemm" in note for note in notes)


@pytest.fixture
def results(tmp_path):
    def results(memory=(), speed=()):
        for name, rows in (("attention_memory", memory), ("attention_speed", speed)):
            (tmp_path / name).mkdir(exist_ok=True)
            text = "".join(json.dumps(row) + "\n" for row in rows)
            (tmp_path / name / "h200.jsonl").write_text(text)
        return Results(tmp_path)

    return results


def test_claims_are_answered_from_rows(results):
    found = results(memory_rows(), speed_rows())
    first = claims.scores_and_statistics(found)
    assert (first.figure, first.verdict) == ("64 GiB against 8.0 MiB", HOLDS) and "256x and 16x" in first.why
    assert claims.twenty_times_less(found).figure == "32.8x at N = 4k"
    assert claims.alone(found).verdict == HOLDS and "11.7x at N = 2,048" in claims.alone(found).why
    eleven = claims.one_head(found)
    assert eleven.verdict == IN_PART and "528 MiB at 8,192" in eleven.figure
    assert claims.tiles_in_pytorch(found).figure == "11.85x as fast, 98% less memory"
    assert claims.skipped_tiles(found).figure == "2.00x at N = 16k"
    assert claims.short_sequences(found).figure == "it wins up to N = 256"
    last = claims.scores_over_memory(found)
    assert last.figure == "at least 4.1 ms, measured 15.5 ms a layer" and last.gpu == "NVIDIA H200"


def test_claims_without_rows_are_not_answered(results):
    found = results(memory_rows(["triton"]), speed_rows(["triton"]))
    for claim in (claims.scores_and_statistics, claims.twenty_times_less, claims.alone, claims.one_head,
                  claims.tiles_in_pytorch, claims.short_sequences, claims.scores_over_memory):  # fmt: skip
        with pytest.raises(NotMeasured):
            claim(found)


def test_a_claim_can_fail(results):
    rows = speed_rows()
    for row in rows:  # standard attention as fast as anything
        if row["point"]["implementation"] == "standard" and row["result"]["status"] == "ok":
            row["result"]["ms_median"] = 1e-3
    found = results(memory_rows(), rows)
    assert claims.alone(found).verdict == FAILS
    assert claims.tiles_in_pytorch(found).verdict == IN_PART  # it still saves memory
    assert claims.scores_over_memory(found).verdict == FAILS


@pytest.mark.gpu
def test_a_neighbour_does_not_change_a_peak():
    shape = Shape(1, 12, 12, 2048, 64, True, "bf16", study="attention_memory")
    first, second = Worker("sdpa_flash"), Worker("sdpa_flash")
    alone = first.ask(shape, "both")
    second.ask(Shape(1, 12, 12, 8192, 64, True, "bf16"), "both", 0.1)
    beside = first.ask(shape, "both", 0.1)
    capped = second.ask(Shape(8, 12, 12, 65536, 64, True, "bf16"), "both", 0.01)
    first.close(), second.close()
    assert alone["status"] == "ok" and beside["peak_mib"] == alone["peak_mib"]
    assert capped["status"] == "oom"
