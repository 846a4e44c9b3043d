"""The study attention_speed: end to end on a CPU, and what a GPU's rows would say."""

from __future__ import annotations

import re
import sys

import pytest

from attention import registry
from attention.geometry import tile_kind
from attention.geometry import tiles as ranges
from scripts.measure.instruments import speed_points, workers
from scripts.measure.instruments.bench_points import Shape
from scripts.measure.instruments.speed_bench import SpeedBench, tiles
from scripts.measure.instruments.speed_points import Asked
from scripts.measure.report import attention_speed_plots
from scripts.measure.report import attention_speed_report as speed_report
from scripts.measure.rows import read
from scripts.measure.studies import attention_speed
from tests.scripts.attention_rows import speed_rows

pytestmark = pytest.mark.usefixtures("on_a_cpu")


def run(monkeypatch, out, *arguments):
    monkeypatch.setattr(sys, "argv", ["attention_speed.py", "--out", str(out), *arguments])
    attention_speed.main()
    return list(read(out).values())


def test_speed_on_a_cpu(tmp_path, monkeypatch, capsys):
    out, asked = (
        tmp_path / "rows.jsonl",
        ("--attention", "standard", "tiled", "--longest", "64", "--budget", "0.002"),
    )
    rows = run(monkeypatch, out, *asked)
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
    assert run(monkeypatch, out, *asked) == rows
    assert "0 of 4 shapes" in capsys.readouterr().out


def test_slow_contestants_are_left_out_at_longer_n(tmp_path):
    out = tmp_path / "rows.jsonl"
    bench = SpeedBench(
        {name: registry.build(name) for name in ("naive", "sdpa")}, "cpu", 0.001, out, slow_ms=1e9
    )
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
    assert tiles(shape, *tile) == (sum(kind in ("full", "partial") for kind in kinds), len(kinds))


def test_of_a_grid_of_16_tiles_10_are_computed():
    assert tiles(Shape(1, 1, 1, 512, 8, True, "fp32"), 128, 128) == (10, 16)


def test_points_of_speed():
    names = registry.implementations()
    every = speed_points.asked(list(speed_points.PARTS), names, True)
    points = [(point.part, point.shape) for point in every]
    assert len(points) == len(set(points)) and "auto" not in names and "standard" in names
    curve = {point.shape.tokens for point in every if point.part == "curve"}
    assert curve == {2**n for n in range(9, 17)}
    short = {point.shape.tokens for point in every if point.part == "short"}
    assert short == {32, 64, 128, 256, 512}
    flex = {p.shape.tokens for p in every if p.part == "curve" and "flex" in p.passes["forward"]}
    assert flex == {1024, 4096, 16384}
    later = speed_points.asked(list(speed_points.PARTS), ["later"], True)  # an implementation yet to come
    assert {p.part for p in later} == set(speed_points.PARTS)
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


def test_kernels_are_compiled_by_processes_that_end(monkeypatch, capsys):
    asked = []

    class Asked:
        def __init__(self, name):
            self.name = name

        def ask(self, shape, passed, cap, brief):
            assert brief  # figures are not asked for
            asked.append((self.name, shape.tokens, passed, cap))

        def close(self):
            asked.append(self.name)

    monkeypatch.setattr(workers, "Measurer", Asked)
    points = speed_points.asked(["windows"], ["triton", "standard"], True)
    attention_speed.compile_ahead(attention_speed.to_compile(points), jobs=2)
    triton = [("triton", 16384, passed, 0.4) for passed in ("forward", "both")]  # no backward of nothing
    assert asked == [*triton, "triton"]
    assert "s; longest: triton bf16 D=64" in capsys.readouterr().out


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
    (wins,) = (note for note in report.notes if "faster at N = 32 (standard, 1.74x)" in note)
    assert wins.startswith("Compared with the fastest implementation") and "one sequence, device" in wins
    assert report.found == (
        "Fastest forward over standard attention (bf16, D = 64): unmasked 13.7x (N = 1,024) to 14.1x "
        "(N = 16,384); causal (standard attention masks too) 20.6x to 21.9x."
    )


def test_at_one_length_one_factor_is_told():
    rows = [row for row in speed_rows(["standard", "triton"]) if row["point"]["seq_len"] == 2048]
    assert re.fullmatch(
        r"Fastest forward over standard attention \(bf16, D = 64\): unmasked \d+\.\dx \(N = 2,048\); "
        r"causal \(standard attention masks too\) \d+\.\dx\.",
        attention_speed_plots.report(rows).found,
    )
    assert attention_speed_plots.report([]).found == ""


@pytest.mark.long
def test_a_wrong_kernel_is_no_winner():
    rows = speed_rows(["standard", "triton", "sdpa_flash"])
    for row in rows:
        if row["point"]["implementation"] == "triton":
            row["result"]["kernels_ok"], row["result"]["verdict"] = False, "asked for triton, ran gemm"
    won = speed_report.winners(rows, "forward", False, "device")
    assert {fused for _, _, fused, _ in won.values()} == {"sdpa_flash"}
    notes = attention_speed_plots.report(rows).notes
    assert any("asked for triton, ran gemm" in note for note in notes)
