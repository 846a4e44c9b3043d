"""studies/prefill_decode.py on a CPU: its FLOPs and bytes, its rows from end to end, what is said."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from attention.naive import NaiveAttention
from attention.sdpa import SDPAAttention
from model.kv_cache import KVCache
from scripts.measure.instruments import layer_times
from scripts.measure.instruments.layer_parts import Layer, layer_parts
from scripts.measure.report import prefill_decode_report
from scripts.measure.rows import append, key_of, read
from scripts.measure.studies import prefill_decode

CLAIMED = Layer(8, 512, 512, 1024, 16, causal=False)
LIKE = {"device": "cpu", "dtype": torch.float32}


def parts(layer: Layer) -> dict[str, Any]:
    return {part.name: part for part in layer_parts(layer, {"sdpa": SDPAAttention()})}


def test_the_shape_of_the_claimed_figures() -> None:
    """910, 102 and 2.5 "FLOP/byte" are FLOPs an element; their shares of the peak are of about 125 * 2^40
    FLOP/s, not of 125e12. P V comes out at 19.5% where they have 19.4%."""
    found = parts(CLAIMED)
    rows, width = 8 * 512, 1024
    alone = 2 * rows * width**2 / (2 * rows * width + width**2)
    assert alone == pytest.approx(910, abs=0.5)
    assert found["QK^T"].flops / found["QK^T"].elements == pytest.approx(102.4)
    assert found["softmax"].flops / found["softmax"].elements == 2.5
    for name, us, share in (("QKV projection", 306, 0.612), ("QK^T", 143, 0.218), ("PV", 160, 0.194)):
        rate = found[name].flops / (us * 1e-6)
        digits = share * 0.5 / us + 0.001  # theirs: whole microseconds, tenths of a percent
        assert rate / (125 * 2**40) == pytest.approx(share, abs=digits)
        assert rate / 125e12 != pytest.approx(share, abs=10 * digits)


@pytest.mark.parametrize(
    "layer", [Layer(2, 8, 8, 32, 4), Layer(3, 1, 8, 32, 4), Layer(1, 8, 8, 32, 4, False)]
)
def test_flops_and_elements_of_parts(layer: Layer) -> None:
    pairs = layer.batch * layer.heads * layer.tokens * layer.keys
    for name, part in parts(layer).items():
        generator = torch.Generator().manual_seed(0)
        call = part.make(LIKE | {"generator": generator})
        with FlopCounterMode(display=False) as counter:
            out = call()
        written = out.numel()
        assert written == {"QK^T": pairs, "softmax": pairs}.get(name, written)
        assert part.elements > written
        if part.kind == "weights" or name in ("QK^T", "PV"):
            assert counter.get_total_flops() == part.flops
        if part.kind == "pointwise":
            assert part.elements == written * (3 if name == "residual" else 2)
    fused = parts(layer)["attention, sdpa"]
    halved = layer.causal and layer.tokens > 1
    assert fused.flops == 4 * pairs * layer.head_dim * (0.5 if halved else 1)


def test_standard_parts_are_attention() -> None:
    layer = Layer(1, 8, 8, 32, 4)
    torch.manual_seed(0)
    softmax = parts(layer)["softmax"].make(LIKE | {"generator": torch.Generator().manual_seed(1)})()
    torch.testing.assert_close(softmax.sum(-1), torch.ones(1, 4, 8))
    assert (softmax.triu(1) == 0).all() and (softmax[..., -1, :] > 0).all()


@pytest.mark.parametrize("phase", ["prefill", "decode"])
def test_work_of_a_forward(phase: str) -> None:
    layers, heads, width, keys = 3, 2, 64, 8
    tokens = keys if phase == "prefill" else 1
    point = {"batch": 2, "seq_len": tokens, "kv_len": keys, "heads": heads, "head_dim": width // heads}
    net = layer_times.random_gpt(layers, width, heads, keys, NaiveAttention(), LIKE)
    cache = KVCache(layers, 2, heads, keys, width // heads, attention=NaiveAttention())
    last = None
    with torch.inference_mode(), FlopCounterMode(display=False) as counter:
        if phase == "prefill":
            cache.prefill(torch.full((2,), tokens))
            last = torch.full((2,), tokens - 1)
        else:
            cache.set_lengths(torch.full((2,), keys - 1))
        net.forward(torch.zeros(2, tokens, dtype=torch.int64), cache=cache, last=last)
    work = layer_times.forward_work(point, layers, 4)
    masked = layers * 2 * 2 * heads * tokens * keys * (width // heads) if phase == "prefill" else 0
    assert counter.get_total_flops() == work["flops"] + masked  # the formula skips nothing that is masked
    matrices = sum(p.nbytes for name, p in net.named_parameters() if p.ndim == 2 and "wpe" not in name)
    assert work["bytes"] == matrices + cache.nbytes
    assert all(p.dtype == torch.float32 for p in net.parameters())


def test_points() -> None:
    found = prefill_decode.points(prefill_decode.arguments([]), cuda=True)
    assert len({key_of(point) for point in found}) == len(found) == 1 + 3 * 5 + 3 * 9
    first = found[0]
    shape = (first["batch"], first["seq_len"], first["heads"], first["head_dim"], first["causal"])
    assert shape == (8, 512, 16, 64, False)
    large = [point for point in found if point["model"] == "13b" and point["implementation"] == "triton"]
    assert {(p["n_layer"], p["heads"] * p["head_dim"]) for p in large} == {(40, 5120)}
    assert [p["seq_len"] for p in large if p["pass"] == "prefill"] == [64, 128, 256, 512, 1024, 2048]
    parts_only = prefill_decode.points(prefill_decode.arguments(["--no-whole"]), cuda=True)
    assert {point["implementation"] for point in parts_only} == {"parts"}


def test_rows_from_end_to_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(layer_times, "BUDGET_S", 0.001)
    monkeypatch.setattr(layer_times, "WHOLE_BUDGET_S", 0.001)
    monkeypatch.setattr(layer_times, "CPU_MATRIX", 64)
    monkeypatch.setitem(prefill_decode.MODELS, prefill_decode.BERT, (1, 32, 2))
    monkeypatch.setitem(prefill_decode.MODELS, "small", (1, 32, 2))
    out = tmp_path / "cpu.jsonl"
    command = ["--prefill", "8", "--decode", "2", "--context", "8", f"--out={out}"]
    prefill_decode.main(command)
    rows = list(read(out).values())
    assert [row["point"]["implementation"] for row in rows] == ["parts"] * 3 + ["sdpa"] * 2
    assert {row["result"]["status"] for row in rows} == {"ok"}
    for row in rows[:3]:
        found = row["result"]["parts"]
        assert len(found) == len(prefill_decode_report.parts_of(row)) == 11
        assert found["attention, sdpa"]["error_ratio"] <= 1 and found["attention, sdpa"]["kernels_ok"]
        assert all(part["ms_median"] > 0 and part["tflops"] > 0 for part in found.values())
    assert "A layer of small, prefill 1 x 8" in capsys.readouterr().out
    prefill_decode.main(command)
    assert "0 points, 5 kept" in capsys.readouterr().out


def test_what_fails_is_a_part_or_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layer_times, "product_tflops", lambda: 1.0)
    monkeypatch.setattr(layer_times, "copy_gb_per_s", lambda: 1.0)
    monkeypatch.setattr(layer_times, "BUDGET_S", 0.001)
    measuring = layer_times.Measuring(["sdpa_cudnn"], "cpu", 8)
    options = prefill_decode.arguments(["--attention", "sdpa_cudnn", "--models", "small", "--prefill", "8"])
    point = prefill_decode.points(options, cuda=False)[1]
    found = measuring.parts(point)["parts"]
    assert found["attention, sdpa_cudnn"]["status"] == "unsupported"
    assert "cudnn" in found["attention, sdpa_cudnn"]["reason"]
    assert all(part["status"] == "ok" for name, part in found.items() if name != "attention, sdpa_cudnn")


def fake_rows(out: Path) -> list[dict[str, Any]]:
    """Rows of a GPU of 700 TFLOP/s and 4,000 GB/s: all at 80% of its roof, whole models with 1 ms more."""
    ceilings = {"tflops": 700.0, "gb_per_s": 4000.0}
    fused = {name: SDPAAttention(name=name) for name in ("triton", "sdpa_cudnn")}
    for point in prefill_decode.points(prefill_decode.arguments([]), cuda=True):
        width = point["heads"] * point["head_dim"]

        def timed(work: dict[str, Any], more: float = 0.0) -> dict[str, Any]:
            ms = max(work["flops"] / 700e9, work["bytes"] / 4e9) / 0.8 + more
            return work | {"ms_median": ms} | layer_times.rates(work["flops"], work["bytes"], ms)

        if point["implementation"] == "parts":
            layer = Layer(
                *(point[key] for key in ("batch", "seq_len", "kv_len")),
                width,
                point["heads"],
                point["causal"],
            )
            found = {part.name: {"status": "ok"} | timed(part.work(2)) for part in layer_parts(layer, fused)}
            result: dict[str, Any] = {"parts": found}
        else:
            result = timed(layer_times.forward_work(point, point["n_layer"], 2), 1.0)
            result["tokens_per_s"] = 1e3 * point["batch"] * point["seq_len"] / result["ms_median"]
        append(out, point, {"status": "ok", "ceilings": ceilings} | result)
    rows = list(read(out).values())
    for row in rows:
        row["machine"]["gpu"] = "NVIDIA H200"
    return rows


@pytest.mark.long
def test_report_of_rows(tmp_path: Path) -> None:
    rows = fake_rows(tmp_path / "h200.jsonl")
    found = prefill_decode.report(rows)
    assert len(found.tables) == 3 + 16
    assert all(len(set(map(len, table.lines))) == 1 for table in found.tables)
    said = " ".join(found.notes)
    assert "has 910 FLOPs per element read or written, Q K^T has 102 and softmax 2.5" in said
    assert "67,108,864 scores in a prefill of 8,192 tokens" in said and "matrix products are 99.7%" in said
    assert "13b: a prefill reaches 90% of its best" in said
    assert "; at 512 tokens it reaches 77% of the rate of a large cuBLAS product." in said
    assert found.found == (
        "13b: a prefill of 512 tokens uses 77% of the GPU's compute; a decoding step of one row uses 71% of "
        "its bandwidth and 0.4% of its compute."
    )
    few = [row for row in rows if row["point"]["model"] == "13b" and row["point"]["pass"] == "prefill"]
    pictures = prefill_decode.report(few).pictures
    assert list(pictures) == ["", "models"] and all(text.startswith("<?xml") for text in pictures.values())
    large = next(row for row in rows if row["point"]["model"] == "13b" and row["point"]["seq_len"] == 2048)
    used = prefill_decode_report.utilisation(prefill_decode_report.parts_of(large))
    assert used["weights"][1] == pytest.approx(0.8 * 700)
    assert used["standard"][1] < 0.5 * used["attention, triton"][1]


@pytest.mark.long
def test_what_is_wrong_is_left_out_and_said(tmp_path: Path) -> None:
    rows = fake_rows(tmp_path / "h200.jsonl")
    rows[0]["result"]["parts"]["attention, triton"]["error_ratio"] = 2.0
    rows[-1]["result"] = {"status": "oom", "reason": "CUDA out of memory"}
    found = prefill_decode.report(rows)
    left = [note for note in found.notes if note.startswith("Left out")]
    assert len(left) == 2 and "CUDA out of memory" in left[0] and "attention, triton" in left[1]
    assert "attention, triton" not in prefill_decode_report.utilisation(
        prefill_decode_report.parts_of(rows[0])
    )
    assert prefill_decode.report([]).tables == [] and prefill_decode.report([]).found == ""


@pytest.mark.gpu
def test_points_on_a_gpu(tmp_path: Path) -> None:
    out = tmp_path / "gpu.jsonl"
    prefill_decode.main(["--models", "gpt2", "--prefill", "64", "--decode", "2", f"--out={out}"])
    rows = list(read(out).values())
    assert {row["result"]["status"] for row in rows} == {"ok"} and len(rows) == 5
    for row in rows[:3]:
        for name, part in row["result"]["parts"].items():
            assert part["status"] == "ok", (name, part)
            assert part["kind"] != "fused" or (part["error_ratio"] <= 1 and part["kernels_ok"]), (name, part)
    assert rows[0]["result"]["ceilings"]["tflops"] > 10
