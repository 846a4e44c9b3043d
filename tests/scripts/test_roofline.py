"""The roofline without a GPU: points, rows, tables and pictures, and the ceilings compiled."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from model.costs.flops import AttentionSize, Gpu, fa1_traffic, tiled_traffic
from ops import nvrtc
from scripts import roofline
from scripts.measure.instruments import ceilings, counters, ladder
from scripts.measure.instruments.bench_points import Shape
from scripts.measure.instruments.ladder import STAGES, Launch, Point
from scripts.measure.report import printed, roofline_plot, roofline_report
from scripts.measure.rows import read
from scripts.measure.studies import Row
from tests.compilers import pinned
from tests.ops.test_cuda_compile import sass
from tests.scripts.studies import row_of

H200 = SimpleNamespace(
    multi_processor_count=132,
    L2_cache_size=50 << 20,
    regs_per_multiprocessor=65536,
    shared_memory_per_multiprocessor=233_472,
    max_threads_per_multi_processor=2048,
)


def shape(tokens: int = 4096, dtype: str = "bf16", causal: bool = True) -> Shape:
    return Shape(1, 32, 32, tokens, 128, causal, dtype)


def launch(name: str, registers: int = 128, threads: int = 128, shared: int = 0, **defines: str) -> Launch:
    return Launch(f"tilegpt_{name}", defines, threads, registers, 0, shared)


LAUNCHES = {
    "cuda_naive": [launch(f"naive_{step}", 64, 256, STRIP="4") for step in ("scores", "softmax", "output")],
    "cuda_rowwise": [launch("rowwise_forward", 64, 256)],
    "cuda_tiled": [launch("tiled_forward", 255, 128, 100_000, WARPS="4", ROWS="8", COLS="4")],
    "cuda_fa1": [launch("fa1_forward", 255, 256, 150_000, BR="64", BC="128")],
    "cuda_fa2": [launch("fa2_forward", 255, 128, 98_304, BR="128", BC="64")],
}


def test_points_of_the_command_line() -> None:
    default = roofline.points(roofline.arguments([]))
    assert [mine[0].stage for mine in default] == list(STAGES)
    assert [point.shape.tokens for point in default[0]] == [512, 1024, 2048, 4096, 8192, 16384]
    assert {point.shape.dtype for point in default[0]} == {"fp32"}
    assert default[-1][0].row()["study"] == "roofline" and default[-1][0].row()["causal"]
    full = roofline.points(roofline.arguments(["--full", "--quick", "--stages", "cuda_fa2"]))
    assert [(point.shape.tokens, point.shape.causal) for point in full[0]] == [
        (1024, False),
        (4096, False),
        (16384, False),
    ]
    (tiles,) = roofline.points(roofline.arguments(["--tiles"]))
    assert tiles[0].row()["tile"] == {"br": 64, "bc": 32, "warps": 4, "blocks": 1}
    assert len({json.dumps(point.row()) for point in tiles}) == len(roofline.TILES) == len(tiles)


def test_a_point_goes_to_ncus_program_and_back() -> None:
    point = Point("cuda_fa2", shape(), (64, 64, 4, 2))
    (asked,) = json.loads(ladder.program([point])[-1])
    assert Point(asked["stage"], Shape(**asked["shape"]), tuple(asked["tile"])) == point
    assert str(point) == "cuda_fa2 D=128 causal T=4096 B=1 H=32 bf16 tile 64 x 64 x 4 x 2"


def test_blocks_of_a_multiprocessor() -> None:
    assert launch("x", registers=255, threads=128, shared=0).blocks(H200) == 2
    assert launch("x", registers=33, threads=256).blocks(H200) == 6  # 40 registers are set aside
    assert launch("x", registers=32, threads=256, shared=98_304).blocks(H200) == 2
    usage = launch("x", registers=32, threads=1024).usage(H200)
    assert (usage["blocks_per_sm"], usage["occupancy_percent"]) == (2, 100)


def test_launches_are_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    launched = []
    monkeypatch.setattr(nvrtc.Kernel, "launch", lambda *arguments, **_: launched.append(arguments[1:3]))
    kernel = nvrtc.Kernel.__new__(nvrtc.Kernel)
    kernel.name, kernel.label = "tilegpt_fa2_forward", "fa2.cu sm_90a ELEMENT=bf16 BR=128 BC=64"
    kernel.registers, kernel.spilled_bytes, kernel.shared_bytes = 255, 4, 16
    with ladder.recorded() as seen:
        kernel.launch(7, 128, None, shared_bytes=1000)
    kernel.launch(8, 128, None)
    assert launched == [(7, 128), (8, 128)]
    (only,) = seen
    assert (only.name, only.defines["BR"], only.defines["BC"]) == ("tilegpt_fa2_forward", "128", "64")
    assert (only.threads, only.registers, only.spilled_bytes, only.shared_bytes) == (128, 255, 4, 1016)


def test_the_model_of_a_point_takes_its_tile_from_the_launch() -> None:
    gpu = Gpu(132, 50 << 20, 233_472)
    of = {
        dtype: AttentionSize(1, 32, 32, 4096, 4096, 128, True, size)
        for dtype, size in (("bf16", 2), ("fp32", 4))
    }

    def model(stage: str, dtype: str) -> Any:
        return ladder.modelled(Point(stage, shape(dtype=dtype)), LAUNCHES[stage], H200)

    assert model("cuda_fa2", "bf16") == tiled_traffic(of["bf16"], gpu, 128, 64, 264)
    assert model("cuda_fa1", "bf16") == fa1_traffic(of["bf16"], gpu, 64, 128, 132)
    assert model("cuda_tiled", "fp32") == tiled_traffic(of["fp32"], gpu, 128, 32, 264)
    assert model("cuda_rowwise", "fp32") == tiled_traffic(of["fp32"], gpu, 1, 1, 4 * 132, 0)
    assert model("cuda_naive", "fp32").dram_read > 2 * 32 * 4096**2 * 4


def test_a_row_says_where_its_bytes_are_from() -> None:
    model = {"dram_read_bytes": 3e6, "dram_write_bytes": 1e6, "l2_bytes": 9e6}

    def result() -> dict[str, Any]:
        return {"status": "ok", "ms_median": 2.0, "model": model}

    found = roofline.with_counters(result(), {"dram_read_bytes": 5e6, "dram_write_bytes": 1e6})
    assert (found["counters_from"], found["gb_per_s"]) == ("ncu", 3)
    found = roofline.with_counters(result(), "there is no ncu on the PATH")
    said = "the model: there is no ncu on the PATH"
    assert (found["counters_from"], found["counters"], found["gb_per_s"]) == (said, None, 2)
    oom = {"status": "oom", "reason": "CUDA out of memory"}
    assert roofline.with_counters(dict(oom), "x") == oom


def result_of(point: Point, ms: float, counted: float | None) -> dict[str, Any]:
    """As `ladder.measured` would have it; counters are the model's times `counted`."""
    traffic = asdict(ladder.modelled(point, LAUNCHES[point.stage], H200))
    model = {f"{name}_bytes": traffic[name] for name in ("dram_read", "dram_write", "l2")}
    found = {
        "status": "ok",
        "ms_median": ms,
        "tflops": point.shape.flops("forward") / ms / 1e9,
        "kernels": {each.name: 1 for each in LAUNCHES[point.stage]},
        "usage": {each.name: each.usage(H200) for each in LAUNCHES[point.stage]},
        "model": model,
    }
    counts = {name: counted * value for name, value in model.items()} if counted else "no ncu"
    if counted:
        counts |= {"occupancy_percent": 12.0, "shared_bytes": 1e9}
        if point.stage == "cuda_naive":
            counts["by_kernel"] = {"tilegpt_naive_softmax": {"dram_read_bytes": 7.125e9}}
    return roofline.with_counters(found, counts)


@pytest.fixture
def rows() -> list[Row]:
    """Every stage at speeds such as they have, one point without memory, ceilings and tiles."""
    found = []
    roofs = {
        "tensor_mma": ("TFLOP/s", 610.0),
        "tensor_cublas": ("TFLOP/s", 750.0),
        "fma": ("TFLOP/s", 60.0),
        "dram_read": ("GB/s", 4400.0),
        "latency_l2": ("ns", 150.0),
    }
    for name, (unit, value) in roofs.items():
        result = {"status": "ok"} | asdict(ceilings.Ceiling(value, unit, 1.5))
        found.append(row_of({"study": "roofline", "implementation": "ceiling", "pass": name}, result))
    rates = {"cuda_naive": 9, "cuda_rowwise": 1.3, "cuda_tiled": 35, "cuda_fa1": 60, "cuda_fa2": 400}
    for stage, rate in rates.items():
        for tokens in roofline.LENGTHS:
            point = Point(stage, shape(tokens, ladder.DTYPE[stage]))
            ms = point.shape.flops("forward") / rate / 1e9 * (1 + 1000 / tokens)
            counted = {"cuda_naive": 1.3, "cuda_fa1": None}.get(stage, 1.1)
            result = result_of(point, ms, counted)
            if (stage, tokens) == ("cuda_naive", 8192):
                result = {"status": "oom", "reason": "CUDA out of memory"}
            found.append(row_of(point.row(), result))
    for tile in roofline.TILES:
        point = Point("cuda_fa2", shape(), tile)
        found.append(row_of(point.row(), result_of(point, 1.0, None)))
    return found


@pytest.mark.long
def test_pictures_from_rows(rows: list[Row]) -> None:
    pictures = roofline_plot.pictures(rows)
    assert list(pictures) == ["causal_d128_roofline", "causal_d128_bytes"]
    assert all("<svg" in text for text in pictures.values())
    assert roofline_plot.pictures(rows) == pictures


def test_tables_from_rows(rows: list[Row], capsys: pytest.CaptureFixture[str]) -> None:
    report = roofline_plot.report(rows)
    assert report.found == (
        "Causal, D = 128, T = 16,384, GB read from DRAM: naive 90.4 (fp32), tiled 0.886 (fp32), "
        "fa2 0.443 (bf16)."
    )
    naive = [row for row in rows if row["point"]["implementation"] != "cuda_fa2"]
    assert roofline_plot.report(naive).found == ""
    printed.say(report.tables, report.notes)
    said = capsys.readouterr().out
    assert "batch 1, 32 heads, D 128, causal: GB moved" in said
    assert "  softmax" in said and "7.125" in said
    assert "128 x 64 x 4, 2" in said and "latency_l2" in said
    assert "MORE THAN 25% OFF: cuda_naive, 16k" in said
    assert "ok: cuda_fa2, 4k" in said and "1.10 of the model's" in said
    assert "oom: cuda_naive T 8192 : CUDA out of memory" in said


def test_the_bar_is_for_reads_at_both_lengths_and_writes_at_the_longer(rows: list[Row]) -> None:
    held = dict(roofline_report.bar(rows))
    assert len(held) == 6
    assert sum("write" in what for what in held) == 2
    assert all(within == ("fa2" in what) for what, within in held.items())


def test_a_gpu_is_needed_to_measure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr("sys.argv", ["roofline.py"])
    with pytest.raises(SystemExit, match="needs a CUDA GPU"):
        roofline.main()


def test_what_fails_is_a_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def measured(point: Point, _: float) -> dict[str, Any]:
        if point.shape.tokens == 1024:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate")
        return {"status": "ok", "ms_median": 1.0, "model": {"dram_read_bytes": 1e6, "dram_write_bytes": 0}}

    monkeypatch.setattr(roofline, "measured", measured)
    out = tmp_path / "x.jsonl"
    arguments = ["--no-ncu", "--no-ceilings", "--stages", "cuda_naive", "--seq-len", "1024", "512"]
    roofline.measure(roofline.arguments(arguments), out)
    first, second = read(out).values()
    assert (first["result"]["status"], first["point"]["seq_len"]) == ("oom", 1024)
    assert second["result"]["counters_from"] == "the model: --no-ncu"


def test_what_has_a_row_is_measured_again_when_asked(tmp_path: Path, monkeypatch) -> None:
    lengths: list[int] = []

    def measured(point: Point, _: float) -> dict[str, Any]:
        lengths.append(point.shape.tokens)
        return {"status": "ok", "ms_median": 1.0, "model": {"dram_read_bytes": 1e6, "dram_write_bytes": 0}}

    monkeypatch.setattr(roofline, "measured", measured)
    out, words = tmp_path / "x.jsonl", ["--no-ncu", "--no-ceilings", "--stages", "cuda_naive", "--seq-len"]
    for more in (["512"], ["512", "1024"], ["512", "--fresh"]):
        roofline.measure(roofline.arguments([*words, *more]), out)
    assert lengths == [512, 1024, 512]
    text = out.read_text().replace('"code": "', '"code": "of other sources ')
    out.write_text(text)
    roofline.measure(roofline.arguments([*words, "512", "--missing"]), out)
    assert len(lengths) == 3
    roofline.measure(roofline.arguments([*words, "512"]), out)
    assert lengths[3:] == [512]


@pytest.mark.parametrize(("lasting", "asked"), [(True, 1), (False, 2)])
def test_ncu_is_asked_again_unless_it_never_will(
    lasting: bool, asked: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = []

    def counted(points: list[Point], quick: bool) -> None:
        calls.append(points[0].stage)
        raise counters.NoCounters("it does not count", lasting)

    monkeypatch.setattr(roofline, "counted", counted)
    monkeypatch.setattr(roofline, "measured", lambda *_: {"status": "oom", "reason": "small"})
    arguments = ["--no-ceilings", "--stages", "cuda_naive", "cuda_fa2", "--seq-len", "512"]
    roofline.measure(roofline.arguments(arguments), tmp_path / "x.jsonl")
    assert len(calls) == asked


MEANT = {
    "mma": "HMMA",
    "fma": "FFMA",
    "exp2": "MUFU",
    "read": "LDG",
    "shared": "LDS",
    "chase": "LDG",
    "chase_shared": "LDS",
}


@pytest.mark.long
@pinned("nvidia-cuda-nvrtc")
@pytest.mark.skipif(nvrtc.missing() is not None, reason=str(nvrtc.missing()))
@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
def test_ceilings_are_what_they_say(arch: str) -> None:
    cubin = nvrtc.build("bench/ceilings.cu", ceilings.DEFINES, arch)
    assert {name.removeprefix("tilegpt_ceiling_") for name in cubin.kernels} == set(MEANT)
    for name, used in cubin.kernels.items():
        assert used.spilled_bytes == 0 and used.registers <= 64
        found = sass(cubin, name)
        short = name.removeprefix("tilegpt_ceiling_")
        assert MEANT[short] in found
        # nothing else that is meant of another, but for what sums the results
        assert not found.keys() & ({"HMMA", "MUFU", "LDG"} - {MEANT[short]})
        if short in ("read", "shared"):
            # two three-way exclusive ors sum 16 bytes up: none was read once for two
            assert found[MEANT[short]] >= ceilings.CHAINS
            assert found["LOP3"] < 2 * found[MEANT[short]] + 8


@pytest.mark.gpu
def test_ceilings_on_a_gpu() -> None:
    found = {
        name: call()
        for name, call in ceilings.Ceilings().all()
        if name in ("fma", "latency_shared", "l2_read")
    }
    # Bounds that hold whoever else is on the GPU: others only take time. 128 FMA units a multiprocessor,
    # two operations each.
    assert 0 < found["fma"].per_clock < 256 * 1.05
    assert found["latency_shared"].per_clock > 10
    assert found["l2_read"].value > 0


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("stage", "dtype", "tile"), [("naive", "fp32", None), ("fa2", "bf16", (64, 64, 4, 2))]
)
def test_a_point_on_a_gpu(stage: str, dtype: str, tile: tuple[int, int, int, int] | None) -> None:
    found = ladder.measured(Point(f"cuda_{stage}", shape(512, dtype), tile), 0.01)
    steps = {"naive": ("scores", "softmax", "output"), "fa2": ("forward",)}[stage]
    assert set(found["kernels"]) == {f"tilegpt_{stage}_{step}" for step in steps}
    assert found["ms_median"] > 0 and found["model"]["dram_read_bytes"] >= 3 * 32 * 512 * 128 * 2
