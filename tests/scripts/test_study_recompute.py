"""The study backward_recompute: products counted, bytes split, memory between forward and backward."""

from __future__ import annotations

import json
import sys

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from ops.options import AttentionOptions
from scripts.measure import rows
from scripts.measure.claims import FAILS, IN_PART, NotMeasured, Results
from scripts.measure.claims.exactness import recomputed
from scripts.measure.instruments import backward_work, counters
from scripts.measure.instruments.backward_bench import kept_mib
from scripts.measure.instruments.backward_work import (
    NOT_YET,
    contestants,
    counted,
    flops_done,
    kind_of,
    model_bytes,
)
from scripts.measure.instruments.bench_points import Shape
from scripts.measure.instruments.contestants import Field
from scripts.measure.report import backward_report
from scripts.measure.rows import read
from scripts.measure.studies import backward_recompute
from tests.scripts.studies import results, row_of

STUDY = "backward_recompute"
SHAPE = Shape(1, 2, 2, 64, 16, True, "fp32", study=STUDY)
NAMES = ["naive", "naive_checkpointed", "standard", "sdpa_math", "tiled"]


pytestmark = pytest.mark.usefixtures("on_a_cpu")


@pytest.fixture(scope="module")
def built():
    return contestants(NAMES)


@pytest.mark.parametrize("name", ["naive", "naive_checkpointed", "standard", "sdpa_math"])
def test_products_of_the_formulas_are_counted(built, name):
    contestant = Field(SHAPE, "cpu").contestant(name, built[name], "backward")
    out = contestant.prepare()
    with FlopCounterMode(display=False) as counter:
        contestant.run(out)
    assert counter.get_total_flops() == flops_done(kind_of(name, SHAPE), SHAPE)


def test_products_of_tiles_are_counted():
    from attention.tiled import tiled_backward

    full = Shape(1, 2, 2, 64, 16, False, "fp32")
    q, k, v, dout = full.tensors("cpu")
    lse, options = torch.zeros(1, 2, 64), (AttentionOptions(False, 0.25), None, [16, 16], False)
    with FlopCounterMode(display=False) as counter:
        tiled_backward(dout, q, k, v, q, lse, *options)
    assert counter.get_total_flops() == flops_done(kind_of("tiled", SHAPE), full)
    assert flops_done(kind_of("triton", SHAPE), full) == 7 / 5 * flops_done(kind_of("tiled", SHAPE), full)
    assert flops_done(kind_of("tiled", SHAPE), SHAPE) == flops_done(kind_of("tiled", SHAPE), full) / 2


def test_all_that_run_are_of_a_kind():
    cuda = backward_recompute.work(backward_recompute.arguments([]), cuda=True)
    names = {name for _, names in cuda for name in names}
    assert {"cuda_fa2", "cuda_tiled", "standard_compiled", "sdpa_cudnn", "naive_checkpointed"} <= names
    assert not {"cuda", "sdpa", "flex", "flash4", "cuda_fa1"} & names  # choose, compile for long, no backward
    assert all(kind_of(name, shape).products in (4, 5, 7) for shape, mine in cuda for name in mine)
    assert {shape.tokens for shape, _ in cuda} == {512, 1024, 4096}
    assert {shape.batch * shape.tokens for shape, _ in cuda} == {16384}


def test_kernels_to_compile_ahead():
    cuda = backward_recompute.work(backward_recompute.arguments([]), cuda=True)
    found = {
        (name, shape.dtype, shape.head_dim, shape.tokens, passed)
        for name, calls in backward_recompute.to_compile(cuda)
        for shape, passed in calls
    }
    wide = ("triton", "cuda_plain", "cuda_tiled")
    compiled = ("cuda_fa2", "cuda_fa3", "standard_compiled", *wide)
    bf16 = {(name, "bf16", d) for name in compiled for d in (64, 128)}
    assert {each[:3] for each in found} == bf16 | {(name, "fp32", 64) for name in wide}
    assert {each[4] for each in found} == {"both"}
    assert {each[2:4] for each in found if each[1] == "bf16"} == {(64, 512), (128, 4096)}  # the shortest


def test_memory_between_forward_and_backward(built):
    matrix, row = 2 * 64 * 64 * 4, 2 * 64 * 16 * 4  # scores of both heads; q, k, v or out
    kept = {
        name: kept_mib(Field(SHAPE, "cpu").contestant(name, built[name], "backward"), "cpu") * 2**20
        for name in NAMES
    }
    assert kept["tiled"] == row + 2 * 64 * 4  # out and lse
    assert 2 * matrix < kept["naive"] < 3 * matrix  # exp(s - max) and P, and the mask
    assert all(matrix < kept[name] < 2 * matrix for name in ("standard", "sdpa_math"))
    assert row <= kept["naive_checkpointed"] < row + 64


def test_checkpointed_and_standard_are_the_formula(built):
    field = Field(SHAPE, "cpu")
    for name in ("naive_checkpointed", "standard"):
        found = field.errors(built[name], "backward")
        assert set(found) == {"out", "dq", "dk", "dv"} and max(found.values()) <= 1


def test_model_bytes_by_hand():
    bf16 = Shape(1, 2, 2, 64, 16, True, "bf16", study=STUDY)
    token, matrix = 2 * 64 * 16 * 2, 2 * 64 * 64
    assert model_bytes("standard", bf16) == 8 * token + 11 * 2 * matrix + 4 * 2 * 64
    fused = model_bytes("triton", bf16)
    assert 8 * token <= fused <= 8 * token + 2 * 4 * 2 * 64
    assert model_bytes("naive", bf16) == fused + 25 * 4 * matrix
    assert model_bytes("naive_checkpointed", bf16) > model_bytes("naive", bf16) + 13 * 4 * matrix
    assert model_bytes("standard_compiled", bf16) is None
    fp32 = Shape(1, 2, 2, 64, 16, True, "fp32", study=STUDY)
    # q, k, v and dout, each read once more, and written and read as two numbers of 2 bytes
    assert model_bytes("cuda_tiled", fp32) == model_bytes("triton", fp32) + 4 * 12 * (token / 2)


def launches(*kernels):
    one = {"dram__bytes_read.sum": 100.0, "dram__bytes_write.sum": 10.0}
    return [(name, one) for name in kernels]


def test_counters_are_split_at_the_separators(monkeypatch):
    spin, asked = "spin_kernel(long)", []
    seen = launches(
        "gemm", "softmax", "gemm", spin, "gemm", "gemm", spin, spin, spin, "flash", spin, "bwd", spin
    )
    answers = [(None, 2), ("out of memory", 2), ("refused", 0), (None, 2)]
    said = "\n".join(json.dumps({"reason": reason, "parts": parts}) for reason, parts in answers)

    def count(program, quick=False, marked=False):
        asked.append((json.loads(program[-1]), marked))
        return f"a warning\n{said}\n", seen

    monkeypatch.setattr(counters, "count", count)
    points = [(name, SHAPE) for name in ("naive", "sdpa_math", "flash2", "sdpa_flash", "triton")]
    found = list(counted(points).values())
    assert found[0] == {
        "forward": {"dram_read_bytes": 300, "dram_write_bytes": 30, "launches": 3},
        "backward": {"dram_read_bytes": 200, "dram_write_bytes": 20, "launches": 2},
    }
    assert found[1:3] == ["out of memory", "refused"]
    assert found[3]["backward"]["launches"] == 1
    assert found[4] == "the program ended before it"
    assert asked[0][1] is True and asked[0][0][0][0] == "naive"


@pytest.mark.parametrize("there", [True, False])
def test_counters_come_into_rows_that_have_none(tmp_path, monkeypatch, capsys, there):
    out, seen = tmp_path / "gpu.jsonl", []
    asked = [
        (Shape(1, 2, 2, n, 64, True, dtype, study=STUDY), ["naive", "tiled"])
        for n, dtype in ((64, "bf16"), (128, "bf16"), (64, "fp32"))
    ]
    for shape, names in asked:
        for name in names:
            rows.append(out, shape.point(name, "backward"), {"status": "ok", "counters_from": NOT_YET})

    def counts(points):
        seen.append(points)
        if not there:
            raise counters.NoCounters("there is no ncu on the PATH")
        return {point: {"forward": {}, "backward": {"launches": 7}} for point in points}

    monkeypatch.setattr(backward_work, "counted", counts)
    for _ in range(2):  # the second time there is nothing to do
        backward_recompute.count(asked, (64,), out)
    assert seen == [[("naive", asked[0][0])]]
    results = {(r["point"]["implementation"], r["point"]["seq_len"]): r["result"] for r in read(out).values()}
    assert results["naive", 128]["counters_from"] == results["tiled", 64]["counters_from"] == NOT_YET
    got = results["naive", 64]
    if there:
        assert got["counters_from"] == "ncu" and got["counters"]["backward"] == {"launches": 7}
        assert "1 of 1 points counted" in capsys.readouterr().out
    else:
        assert got["counters_from"] == "there is no ncu on the PATH" and got["counters"] is None


def test_ncu_is_asked_for_all_kernels_that_are_marked(tmp_path):
    line = counters.command(["a", "b"], tmp_path, ["python", "x.py"], marked=True)
    assert line[line.index("--profile-from-start") + 1] == "off" and "--kernel-name" not in line
    assert "--profile-from-start" not in counters.command(["a"], tmp_path, ["python"])


def run(monkeypatch, out, *arguments):
    tiny = ["--seq-len", "32", "--tokens", "64", "--width", "32", "--head-dim", "16", "--budget", "0.001"]
    monkeypatch.setattr(sys, "argv", ["backward_recompute.py", *tiny, "--out", str(out), *arguments])
    backward_recompute.main()


def test_the_command_and_what_it_leaves_out(tmp_path, monkeypatch, capsys):
    out, names = tmp_path / "cpu.jsonl", ("naive", "tiled", "sdpa_cudnn")
    shown = []

    def show(report, out):
        shown.append(report(list(read(out).values())))

    monkeypatch.setattr("scripts.measure.report.printed.show", show)
    monkeypatch.setattr("scripts.measure.report.backward_report.pictures", lambda rows: {})  # a second each
    run(monkeypatch, out, "--attention", *names)
    found = {row["point"]["implementation"]: row["result"] for row in read(out).values()}
    assert found["sdpa_cudnn"]["status"] == "unsupported"
    for name in ("naive", "tiled"):
        result = found[name]
        assert result["status"] == "ok" and result["error_ratio"] <= 1 and result["kernels_ok"]
        assert result["keeps"] is kind_of(name, SHAPE).keeps and result["kept_mib"] > 0
        assert result["products"] == kind_of(name, SHAPE).products and result["flops_done"] > 0
        assert result["counters"] is None and result["counters_from"] == NOT_YET
    assert "1 of 1 shapes; about" in capsys.readouterr().out
    assert any("that recomputes P, relative to" in note for note in shown[0].notes)
    assert [line[0] for line in shown[0].tables[0].lines] == ["", "naive", "tiled"]

    before = out.read_text()
    run(monkeypatch, out, "--attention", *names)
    assert "0 of 1 shapes; about" in capsys.readouterr().out and out.read_text() == before
    run(monkeypatch, out, "--attention", "standard", *names)  # times of two runs do not compare
    assert "1 of 1 shapes; about" in capsys.readouterr().out


def faked(kept_ms, again_ms, counters_=True):
    """Rows of a GPU: one that kept P, one that did not, one checkpointed, at two lengths."""
    made = []
    for n in (1024, 4096):
        shape = Shape(16384 // n, 16, 16, n, 64, True, "bf16", study=STUDY)
        for name, ms in (("naive", kept_ms), ("sdpa_flash", again_ms), ("naive_checkpointed", 2 * kept_ms)):
            moved = {"dram_read_bytes": 9e9, "dram_write_bytes": 1e9} if name == "naive" else None
            moved = moved or {"dram_read_bytes": 4e8, "dram_write_bytes": 1e8}
            result = {"status": "ok", "ms_median": ms * n, "error_ratio": 0.5, "kernels_ok": True}
            result |= {
                "keeps": kind_of(name, SHAPE).keeps,
                "products": kind_of(name, SHAPE).products,
                "kept_mib": 32.0,
            }
            result |= {"flops_done": flops_done(kind_of(name, SHAPE), shape)}
            result |= {"counters": {"forward": moved, "backward": moved} if counters_ else None}
            result |= {"counters_from": "ncu", "copy_gb_per_s": 4000.0}
            made.append(row_of(shape.point(name, "backward"), result))
    return made


def test_report_of_a_gpu():
    report = backward_recompute.report(faked(3.0, 1.0))
    times, work = report.tables
    assert times.lines[0] == ["", "P", "N = 1k", "N = 4k"]
    assert times.lines[2] == ["sdpa_flash", "recomputed", "1.02e+03 (3.00x)", "4.1e+03 (3.00x)"]
    head, first = work.lines[:2]
    assert first[:2] == ["sdpa_flash", "recomputed"] and first[head.index("DRAM GB, backward")] == "0.5"
    said = " ".join(report.notes)
    assert "3.0x at N = 4k (sdpa_flash relative to naive)" in said and "2.00x the time" in said
    assert "20 times less DRAM traffic (measured by ncu)" in said and "saves memory, not time" in said
    # half of 4 x 16 x 4096^2 in 2 bytes, twice, at 4,000 GB/s
    assert f"takes {1e3 * 64 * 4096**2 * 2 / 4000e9:.3g} ms at the speed of a copy" in said
    assert "counted by ncu" in report.pictures[""]
    assert backward_recompute.report([]).tables == [] and backward_recompute.report([]).pictures == {}


@pytest.mark.parametrize(("kept", "again", "verdict"), [(3, 1, IN_PART), (1, 3, FAILS)])
def test_the_claim(tmp_path, kept, again, verdict):
    assert claimed(tmp_path, faked(kept, again)).verdict == verdict


def test_the_claim_in_part(tmp_path):
    fakes = faked(3.0, 1.0)
    fakes[1]["result"]["ms_median"] *= 10  # then the checkpointed one is the fastest, at half the speed
    found = claimed(tmp_path, fakes)
    assert found.verdict == IN_PART and found.figure.startswith("0.5 to 3.0x")
    said = (
        "bf16, D = 64, causal: recomputing P is 0.5x (N = 1k) to 3.0x (N = 4k) as fast as storing it (cuBLAS)"
    )
    assert backward_report.report(fakes).found == f"{said}; in one unfused formula 0.50x to 0.50x."
    alone = backward_report.report(
        [row for row in faked(3.0, 1.0) if "check" not in row["point"]["implementation"]]
    )
    assert "recomputing P (fused) is 3.0x" in alone.found and alone.found.endswith("storing it (cuBLAS).")
    assert not backward_report.is_fused("tiled") and backward_report.is_fused("triton")
    with pytest.raises(NotMeasured):
        recomputed(Results(tmp_path / "nothing"))


def claimed(folder, fakes):
    return recomputed(results(folder, **{STUDY: fakes}))


@pytest.mark.gpu
def test_on_a_gpu(tmp_path, monkeypatch):
    out = tmp_path / "gpu.jsonl"
    run(
        monkeypatch,
        out,
        "--attention",
        "standard",
        "sdpa_flash",
        "--dtype",
        "bf16",
        "--head-dim",
        "64",
        "--no-ncu",
    )
    results = {row["point"]["implementation"]: row["result"] for row in read(out).values()}
    assert all(result["status"] == "ok" and result["kernels_ok"] for result in results.values()), results
    assert results["standard"]["keeps"] and results["sdpa_flash"]["products"] == 5
