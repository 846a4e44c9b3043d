"""studies/kv_cache.py on a CPU: its counts, its rows from end to end, and what is said of them."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from model.gpt import GPT, GPTConfig
from scripts.accuracy import Problem, expected
from scripts.measure.instruments import whole_model
from scripts.measure.instruments.cache_counts import cache_bytes, counted, requested
from scripts.measure.report import kv_cache_report
from scripts.measure.rows import append, key_of, read
from scripts.measure.studies import kv_cache


def count(new: int, cached: bool, prompt: int = 1) -> dict[str, Any]:
    return counted({"new_tokens": new, "kv_cache": cached, "prompt": prompt})


def test_keys_and_values_computed() -> None:
    assert count(100, False)["kv_computations"] == 5050
    assert count(100, True)["kv_computations"] == 100
    for cached, right in ((False, 5 + 6 + 7), (True, 7)):
        found = count(3, cached, prompt=5)
        assert found["kv_computations"] == found["formula"] == right


def test_bytes_of_a_cache() -> None:
    shape = {"n_layer": 3, "heads": 8, "head_dim": 16, "batch": 2, "seq_len": 10}
    found = [cache_bytes(shape | {"kv_heads": kv_heads}) for kv_heads in (8, 2, 1)]
    assert [each["allocated_bytes"] for each in found] == [2 * 3 * 2 * 10 * h * 16 * 2 for h in (8, 2, 1)]
    assert all(each["allocated_bytes"] == each["formula_bytes"] for each in found)


def test_bytes_are_those_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    stats = {"requested_bytes.all.current": 700, "allocated_bytes.all.current": 1024}
    monkeypatch.setattr(torch.cuda, "memory_stats", lambda: stats)
    assert requested() == 700
    monkeypatch.setattr(torch.cuda, "memory_stats", dict)  # before anything is on the GPU
    assert requested() == 0


@pytest.mark.parametrize(("tq", "lengths"), [(7, None), (1, (7, 4))])
def test_standard_attention_is_right(tq: int, lengths: tuple[int, ...] | None) -> None:
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, 3, t, 8) for t in (tq, 7, 7))
    options = {} if lengths is None else {"kv_lengths": torch.tensor(lengths, dtype=torch.int32)}
    exact, _ = expected(Problem(q, k, v, {"causal": True} | options))
    got = whole_model.implementations(["standard"])["standard"](q, k, v, causal=True, **options)
    torch.testing.assert_close(got, exact["out"].float(), rtol=1e-5, atol=1e-5)


def test_steps_with_and_without_the_cache_choose_alike() -> None:
    torch.manual_seed(0)
    standard = whole_model.implementations(["standard"])["standard"]
    config = GPTConfig(vocab_size=64, seq_len=32, n_layer=2, n_head=2, n_embd=16)
    net, tokens = GPT(config, standard).eval(), list(range(1, 10))
    with torch.inference_mode():
        without = whole_model.Uncached(net, tokens)
        within = whole_model.Cached(net, standard, tokens, 16)
        torch.testing.assert_close(within.logits(), without.logits(), rtol=1e-4, atol=1e-5)
        chosen = []
        for step in (without, within):
            contestant = step.contestant()
            for _ in range(2):  # the same step again, once it is put back
                contestant.run(contestant.prepare())
            chosen.append(step.rows.text[0, : len(tokens) + 1].tolist())
    assert chosen[0] == chosen[1] and chosen[0][:-1] == tokens
    assert within.decoder.cache.lengths.tolist() == [len(tokens)]


@pytest.mark.parametrize(
    ("asked", "kernels", "right"),
    [
        ("standard", ["nvjet_hsh", "softmax"], True),
        ("standard", ["nvjet_hsh", "_tilegpt_forward"], False),
        ("triton", ["nvjet_hsh", "_tilegpt_forward"], True),
        ("triton", ["nvjet_hsh"], False),
        ("triton", ["nvjet_hsh", "pytorch_flash::flash_fwd_kernel"], False),
        ("sdpa", ["pytorch_flash::flash_fwd_kernel"], True),
    ],
)
def test_kernels_of_a_whole_model(asked: str, kernels: list[str], right: bool) -> None:
    assert whole_model.right_kernels(asked, kernels) is right


def test_points() -> None:
    found = kv_cache.points(kv_cache.arguments([]), cuda=True)
    assert len({key_of(point) for point in found}) == len(found)
    steps = [point for point in found if point["pass"] == "step"]
    assert {point["implementation"] for point in steps} == {"standard", "triton"}
    assert {(p["seq_len"], p["capacity"]) for p in steps if p["kv_cache"] and p["seq_len"] >= 2048} == {
        (2048, 2048),
        (2048, 4096),
        (4096, 4096),
    }
    assert all(point["capacity"] is None for point in steps if not point["kv_cache"])


@pytest.mark.long
def test_rows_from_end_to_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(kv_cache, "COUNTED", (3,))
    monkeypatch.setattr(kv_cache, "CPU_MODEL", ["model.n_layer=1", "model.n_embd=16", "model.n_head=2"])
    monkeypatch.setattr(kv_cache, "CACHES", {"GPT-2 124M": kv_cache.CACHES["GPT-2 124M"]})
    out = tmp_path / "cpu.jsonl"
    command = ["--lengths", "1", "4", "--whole", "4", f"--out={out}"]
    kv_cache.main(command)
    rows = list(read(out).values())
    assert {row["result"]["status"] for row in rows} == {"ok"}
    steps = [row["result"] for row in rows if row["point"]["pass"] == "step"]
    assert len(steps) == 10
    assert all(step["error_ratio"] <= 1 and step["kernels_ok"] and step["ms_median"] > 0 for step in steps)
    said = capsys.readouterr().out
    assert "Device time of generating tokens after a prompt of one" in said and "Exponents" in said
    kv_cache.main(command)  # nothing is left to do
    assert "0 points, 19 kept" in capsys.readouterr().out
    assert list(read(out).values()) == rows


def fake_rows(out: Path) -> list[dict[str, Any]]:
    """Rows in which a step without the cache takes t or, by standard attention, t^2 microseconds, and with it
    2 or 1."""
    for point in kv_cache.points(kv_cache.arguments([]), cuda=True):
        standard = point["implementation"] == "standard"
        if point["pass"] == "step":
            tokens = point["seq_len"]
            us = (2.0 if standard else 1.0) if point["kv_cache"] else float(tokens ** (2 if standard else 1))
            result = {"ms_median": us / 1e3, "eager_ms": us / 500, "error_ratio": 0.4, "kernels_ok": True}
        elif point["pass"] == "generate":
            seconds = point["new_tokens"] * (1e-4 if point["kv_cache"] else 8e-4)
            result = {"seconds": seconds, "tokens_per_s": point["new_tokens"] / seconds}
        elif point["pass"] == "count":
            new = point["new_tokens"]
            number = new if point["kv_cache"] else new * (new + 1) // 2
            result = {"kv_computations": number, "formula": number}
        else:
            of = ("n_layer", "kv_heads", "seq_len", "head_dim")
            size = 4 * math.prod(point[key] for key in of)
            result = {"allocated_bytes": size, "formula_bytes": size}
        append(out, point, {"status": "ok"} | result)
    return list(read(out).values())


def test_report_of_rows(tmp_path: Path) -> None:
    rows = fake_rows(tmp_path / "h200.jsonl")
    found = kv_cache_report.report(rows)
    steps = kv_cache_report.Steps(rows)
    four = steps.four(4096)
    assert four["triton", False] == pytest.approx(4096 * 4097 / 2 * 1e-6, rel=1e-6)  # power laws are exact
    assert four["standard", False] == pytest.approx(4096 * 4097 * 8193 / 6 * 1e-6, rel=1e-6)
    assert four["standard", True] == pytest.approx(2 * 4096e-6)
    saved = kv_cache_report.factors(four, steps.names)
    assert saved["both"] / saved["product"] == pytest.approx(saved["stacking"])
    assert saved["stacking"] == pytest.approx(2 / saved["tiled"])
    assert kv_cache_report.exponent(steps.totals(("triton", True))) == pytest.approx(1)
    said = " ".join(found.notes)
    assert "computes 5,050 pairs of a key and a value without a cache, and 100 with it" in said
    assert (
        "1.34 GB (1.25 GiB) with its 8 KV heads, and would take 10.74 GB (10.00 GiB) with 64 KV heads" in said
    )
    # 4097 * 8193 / 12, 8193 / 3 and their product over 2 / 8193 * 3
    assert found.found == (
        "Generating 4,096 tokens (device time, integrated over steps) is 2797226.8x as fast with the cache, "
        "2731.0x with triton instead of standard, and 5594453.5x with both."
    )
    assert (
        "speed-ups do not multiply" in said
        and "8.0x as fast with standard and 8.0x as fast with triton" in said
    )
    assert len(found.tables) == 6 and all(len(set(map(len, t.lines))) == 1 for t in found.tables)
    assert found.pictures[""].startswith("<?xml")


def test_what_is_wrong_is_left_out_and_said(tmp_path: Path) -> None:
    rows = fake_rows(tmp_path / "h200.jsonl")
    bad = next(row for row in rows if row["point"].get("capacity") == 4096)
    bad["result"]["error_ratio"] = 3.0
    oom = next(row for row in rows if row["point"]["pass"] == "step" and row["point"]["seq_len"] == 2048)
    oom["result"] = {"status": "oom", "reason": "CUDA out of memory"}
    found = kv_cache_report.report(rows)
    assert sum(note.startswith("Left out") for note in found.notes) == 2
    assert any("error ratio 3.0" in note for note in found.notes)
    assert any("CUDA out of memory" in note for note in found.notes)
    assert kv_cache_report.report([]).found == ""
    assert kv_cache_report.report([]).tables == [] and kv_cache_report.report([]).pictures == {}


def test_a_lost_device_ends_the_study(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its point is a row, to be tried again; those after it, errors for no fault of theirs, are none."""

    def lost() -> None:
        raise RuntimeError("CUDA error: device-side assert triggered")

    def fails(point: dict[str, Any]) -> dict[str, Any]:
        monkeypatch.setattr("scripts.measure.instruments.timing.synchronise", lost)
        raise RuntimeError("CUDA error: device-side assert triggered")

    monkeypatch.setattr("scripts.measure.instruments.cache_counts.counted", fails)
    out = tmp_path / "cpu.jsonl"
    with pytest.raises(SystemExit, match="the device is lost"):
        kv_cache.main([f"--out={out}"])
    assert [row["result"]["status"] for row in read(out).values()] == ["error"]


def test_integration_knows_its_range() -> None:
    steps = {1: 1.0, 4: 4.0}
    assert kv_cache_report.integrated(steps, 4) == pytest.approx(10e-3)
    assert kv_cache_report.integrated(steps, 5) is None
    assert kv_cache_report.integrated({2: 1.0, 4: 1.0}, 4) is None


@pytest.mark.gpu
def test_steps_on_a_gpu(tmp_path: Path) -> None:
    out = tmp_path / "gpu.jsonl"
    kv_cache.main(["--lengths", "1", "256", "--whole", "32", f"--out={out}"])
    rows = list(read(out).values())
    assert {row["result"]["status"] for row in rows} == {"ok"}
    steps = [row["result"] for row in rows if row["point"]["pass"] == "step"]
    assert all(step["error_ratio"] <= 1 and step["kernels_ok"] for step in steps)
    for row in rows:
        if row["point"]["pass"] == "cache_bytes":
            assert row["result"]["allocated_bytes"] == pytest.approx(row["result"]["formula_bytes"], rel=1e-4)
