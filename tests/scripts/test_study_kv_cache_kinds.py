"""The study of kinds of KV caches: what is held, what is read, what the rows say."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from scripts.measure.claims import FAILS, HOLDS, IN_PART, UNTESTED, Answer, Results, answered, matches
from scripts.measure.rows import append, read
from scripts.measure.studies import kv_cache_kinds as study


@pytest.mark.parametrize("kind", study.KINDS)
@pytest.mark.parametrize("block", [None, 16])
def test_all_caches_hold_the_same_tokens(kind: str, block: int | None) -> None:
    k, v = torch.randn(2, 2, 8, 64, 128, generator=torch.Generator().manual_seed(0))
    view = study.view_of(k, v, kind, block)
    allowed = {"auto": 0, "fp8": 0.05, "int8": 0.02, "int4": 0.2}[kind]  # of a number's size
    for x, got in zip((k, v), view.tensors(), strict=True):
        assert (got - x).norm() <= allowed * x.norm()
    assert (view.k.table is None) == (block is None)


def test_attention_is_timed_over_each() -> None:
    point = {"implementation": "naive", "dtype": "float32", "batch": 2, "kv_len": 32}
    of = [
        point | {"cache": kind, "block": block}
        for kind, block in (("auto", None), ("int8", 16), ("int4", None))
    ]
    found = study.attention(of, "cpu")
    assert all(each["error_ratio"] == 0 and each["ms_median"] > 0 for each in found)
    numbers = 2 * 8 * 128  # of keys and values of a token; scales have 2 bytes
    assert [each["bytes_per_token"] for each in found] == [4 * numbers, numbers + 32, numbers / 2 + 64]


def test_the_loss_is_that_of_the_kind(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "a.md").write_text("abcdefgh " * 400)
    monkeypatch.setattr(study, "ROOT", tmp_path)
    net, text = study.trained(3, "cpu")
    losses = [study.loss(net, text[:150], kind)["nats"] for kind in ("auto", "int4")]
    assert losses[0] != losses[1] and abs(losses[1] / losses[0] - 1) < 0.05 and losses[0] < 5.6  # < log(256)


WORTH = {"auto": 1, "fp8": 2, "int8": 2, "int4": 4}


def written(out: Path) -> None:
    """Rows in which all is smaller and faster by the bits."""
    for point in study.points(study.arguments([]), cuda=True):
        worth = WORTH[point["cache"]]
        of = {
            "attention": {"ms_median": 0.4 / worth, "gb_per_s": 4000.0, "bytes_per_token": 4096 / worth},
            "generate": {"tokens_per_s": 100.0 * worth},
            "loss": {"nats": 2.0 if worth < 4 else 2.01},
        }
        append(out, point, {"status": "ok"} | of[point["pass"]])


def claim_38(folder: Path, change: Callable[[list[dict[str, Any]]], Any] = lambda rows: None) -> Answer:
    """The answer from these rows, as those of an H200, changed."""
    out = folder / "kv_cache_kinds" / "h200.jsonl"
    written(out)
    rows = list(read(out).values())
    change(rows)
    for row in rows:
        row["machine"]["gpu"] = "NVIDIA H200"
    out.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return answered(Results(folder))[38]


def chosen(rows: list[dict[str, Any]], **wanted: Any) -> list[dict[str, Any]]:
    return [row for row in rows if matches(row, wanted)]


def test_what_rows_say(tmp_path: Path) -> None:
    out = tmp_path / "h200.jsonl"
    written(out)
    attention, generate, loss = study.report(list(read(out).values())).tables
    assert len(attention.lines) == 1 + 48 and len(generate.lines) == 1 + 16
    assert attention.lines[1] == ["1", "8,192", "auto", "dense", "4,096", "0.400", "4,000", "1.00"]
    assert attention.lines[-1][-1] == "4.00" and generate.lines[4] == ["1", "512", "int4", "400", "4.00"]
    assert loss.lines[4] == ["int4", "2.0100", "+0.50%"]


def dequantises(ms: float) -> Callable[[list[dict[str, Any]]], None]:
    """Another reader of int8 and int4, which takes so long."""

    def change(rows: list[dict[str, Any]]) -> None:
        for row in chosen(rows, passed="attention", cache=("int8", "int4"), block=None):
            other = json.loads(json.dumps(row))
            other["point"]["implementation"], other["result"]["ms_median"] = "sdpa", ms
            rows.append(other)

    return change


@pytest.mark.parametrize(("ms", "verdict"), [(0.4, HOLDS), (0.39, IN_PART), (None, IN_PART)])
def test_it_takes_a_kernel_where_nothing_else_is_faster_than_16_bits(
    ms: float | None, verdict: str, tmp_path: Path
) -> None:
    answer = claim_38(tmp_path, dequantises(ms) if ms else lambda rows: None)
    assert answer.verdict == verdict and ("Not tested: attention that dequantises" in answer.why) == (
        ms is None
    )
    said = (
        "0.50 and 0.25 of the bytes; attention 2.00 to 2.00x and 4.00 to 4.00x, steps 2.00 to 4.00x as fast"
    )
    assert answer.figure == said and "another run" not in answer.why
    assert "16 x 32,768 tokens 2.00x with int8 and 4.00x with int4" in answer.why
    assert "changes by 0.50% at most" in answer.why and "400 steps, one seed" in answer.why


def test_one_shape_that_is_slower_is_enough(tmp_path: Path) -> None:
    def attention(rows: list[dict[str, Any]]) -> None:
        dequantises(1.0)(rows)
        for row in chosen(
            rows, passed="attention", batch=1, kv_len=8192, cache="int8", implementation="triton"
        ):
            row["result"]["ms_median"] = 0.4

    def steps(prompt: int) -> Callable[[list[dict[str, Any]]], None]:
        def change(rows: list[dict[str, Any]]) -> None:
            dequantises(1.0)(rows)
            for row in chosen(rows, passed="generate", batch=1, prompt=prompt, cache="int4"):
                row["result"]["tokens_per_s"] = 90.0

        return change

    assert claim_38(tmp_path / "a", attention).verdict == IN_PART
    assert claim_38(tmp_path / "b", steps(4032)).verdict == IN_PART
    answer = claim_38(tmp_path / "c", steps(512))  # a short prompt does not decide, and is said
    assert answer.verdict == HOLDS and "1 of 8 are slower" in answer.why


def test_steps_of_another_run_and_more_bytes(tmp_path: Path) -> None:
    def other_run(rows: list[dict[str, Any]]) -> None:
        dequantises(1.0)(rows)
        for row in chosen(rows, passed="generate", cache="auto"):
            row["run_id"] = "earlier"

    def larger(rows: list[dict[str, Any]]) -> None:
        for row in chosen(rows, passed="attention", cache="int4"):
            row["result"]["bytes_per_token"] = 2048

    def incomplete(rows: list[dict[str, Any]]) -> None:
        rows[:] = [row for row in rows if not matches(row, {"passed": "generate", "cache": "int8"})]

    answer = claim_38(tmp_path / "a", other_run)
    assert answer.verdict == IN_PART and "are of another run" in answer.why
    assert claim_38(tmp_path / "b", larger).verdict == FAILS
    answer = claim_38(tmp_path / "c", incomplete)
    assert answer.verdict == UNTESTED and "cache int8, batch 1, prompt 512" in answer.why
