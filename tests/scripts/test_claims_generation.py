"""Claims 14, 17, 18, 19, 23 and 28: verdicts by thresholds, from faked rows of a GPU."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from scripts.measure.claims import FAILS, HOLDS, IN_PART, NotMeasured, Results
from scripts.measure.claims.generation import linear_generation, size_of_the_cache, stacking
from scripts.measure.claims.intensity import intensity_decides, prefill_and_decode, utilisations
from scripts.measure.studies.prefill_decode import BERT
from tests.scripts import test_study_kv_cache, test_study_prefill_decode

Rows = list[dict[str, Any]]


def results(folder: Path, study: str, change: Callable[[Rows], Any] = lambda rows: None) -> Results:
    """Of one study: its faked rows, changed, as those of an H200."""
    fake = {"kv_cache": test_study_kv_cache, "prefill_decode": test_study_prefill_decode}[study].fake_rows
    rows = fake(folder / "fake")
    change(rows)
    (folder / study).mkdir()
    with open(folder / study / "h200.jsonl", "w", encoding="utf-8") as file:
        for row in rows:
            row["machine"]["gpu"] = "NVIDIA H200"
            file.write(json.dumps(row) + "\n")
    return Results(folder)


def steps(rows: Rows, us: Callable[[dict[str, Any]], float]) -> None:
    for row in rows:
        if row["point"]["pass"] == "step":
            row["result"]["ms_median"] = us(row["point"]) / 1e3


def test_a_cache_makes_generation_linear(tmp_path: Path) -> None:
    found = linear_generation(results(tmp_path, "kv_cache"))
    assert found.verdict == HOLDS and found.gpu == "NVIDIA H200" and "study.py kv_cache" in found.command
    assert (
        "exponents of the time 2.00 without and 1.00 with it" in found.why
        and "5x from 32 tokens on" in found.why
    )
    assert "100 tokens 8.0x with standard and 8.0x with triton; 512 tokens 8.0x" in found.why


def test_a_cache_that_saves_little_holds_in_part(tmp_path: Path) -> None:
    def flat(rows: Rows) -> None:
        steps(rows, lambda point: 1.0 if point["kv_cache"] else 1.5)

    found = linear_generation(results(tmp_path, "kv_cache", flat))
    assert found.verdict == IN_PART and "1.5x with triton (5x at no length measured" in found.why


def test_a_cache_that_saves_much_with_one_attention_holds_in_part(tmp_path: Path) -> None:
    def fast(rows: Rows) -> None:
        def us(point: dict[str, Any]) -> float:
            square = point["implementation"] == "standard"
            return 1.0 if point["kv_cache"] else point["seq_len"] ** 2 if square else 2.0

        steps(rows, us)

    found = linear_generation(results(tmp_path, "kv_cache", fast))
    assert found.verdict == IN_PART and "2.0x with triton at 4,096 tokens" in found.figure


def test_the_size_of_a_cache(tmp_path: Path) -> None:
    found = size_of_the_cache(results(tmp_path, "kv_cache"))
    assert found.verdict == IN_PART  # the formula, but not their figure
    assert found.figure.endswith("Llama-2-70B 1.34 GB with its 8, 10.74 with 64")
    assert "smaller by 8x with 4 and 32x with 1 KV heads" in found.figure
    assert "within 0.00% for 9 of 9 shapes" in found.why and "Beyond 1%" not in found.why


def test_a_shape_that_takes_a_block_more_is_named(tmp_path: Path) -> None:
    def block(rows: Rows) -> None:
        for row in rows:
            if row["point"].get("model") == "GPT-2 124M" and row["point"]["kv_heads"] == 12:
                row["result"]["allocated_bytes"] += 2**19

    found = size_of_the_cache(results(tmp_path, "kv_cache", block))
    assert found.verdict == IN_PART and "within 0.00% for 8 of 9 shapes" in found.why
    assert "Beyond 1% is GPT-2 124M with 12 KV heads (0.5 MiB, 1.39%)" in found.why


@pytest.mark.parametrize(("most", "verdict"), [(64, IN_PART), (1, FAILS)])
def test_a_size_off_the_formula(most: int, verdict: str, tmp_path: Path) -> None:
    """All by as much: fewer heads still shrink it; those of few heads alone: nothing is as said."""

    def larger(rows: Rows) -> None:
        for row in rows:
            if row["point"]["pass"] == "cache_bytes" and row["point"]["kv_heads"] <= most:
                row["result"]["allocated_bytes"] *= 1.1

    assert size_of_the_cache(results(tmp_path, "kv_cache", larger)).verdict == verdict


@pytest.mark.parametrize(
    ("cached", "verdict"),
    [((1.0, 0.5), HOLDS), ((1.0, 0.9), IN_PART), ((1.0, 1.1), FAILS)],
)
def test_stacking(cached: tuple[float, float], verdict: str, tmp_path: Path) -> None:
    """Without a cache 10 and 5: both are worth 10 x 2 where the cached ones differ by 2 as well."""

    def us(point: dict[str, Any]) -> float:
        tiled = point["implementation"] == "triton"
        return cached[tiled] if point["kv_cache"] else (10.0, 5.0)[tiled]

    found = stacking(results(tmp_path, "kv_cache", lambda rows: steps(rows, us)))
    assert found.verdict == verdict
    assert "triton 2.00x, both" in found.why and f"{cached[0] / cached[1]:.2f}x with it" in found.why
    assert "By the clock" in found.why and " of the product (" in found.why and "(n = 1); with" in found.why


def test_gains_multiply_where_they_do_at_every_length(tmp_path: Path) -> None:
    """With a cache and triton 0.5 ms, but for 0.8 at the longest: 4 of 5 lengths alone would do."""

    def us(point: dict[str, Any]) -> float:
        tiled, longest = point["implementation"] == "triton", point["capacity"] == 4096
        return ((1.0, 0.8 if longest else 0.5) if point["kv_cache"] else (10.0, 5.0))[tiled]

    found = stacking(results(tmp_path, "kv_cache", lambda rows: steps(rows, us)))
    assert found.verdict == IN_PART and found.figure.endswith("1.00 at 2,048 tokens, 0.62 at 4,096 tokens")


def test_lengths_at_which_one_gains_nothing_are_not_judged(tmp_path: Path) -> None:
    """Up to 512 tokens a cache gains 1% and both together less than tiles alone; beyond, both multiply."""

    def us(point: dict[str, Any]) -> float:
        tiled = point["implementation"] == "triton"
        if not point["kv_cache"]:
            return (10.0, 5.0)[tiled]
        return (9.9, 9.9)[tiled] if point["capacity"] <= 512 else (1.0, 0.5)[tiled]

    found = stacking(results(tmp_path, "kv_cache", lambda rows: steps(rows, us)))
    assert found.verdict == HOLDS and found.figure.startswith("both over the product: 1.00 at 1,024 tokens")
    assert "0.50 at 512 tokens (the cache 1.01x)" in found.why

    def never(point: dict[str, Any]) -> float:
        return 1.0

    with pytest.raises(NotMeasured):
        stacking(results(tmp_path / "never", "kv_cache", lambda rows: steps(rows, never)))


def test_all_at_80_percent_of_their_roofs(tmp_path: Path) -> None:
    found = results(tmp_path, "prefill_decode")
    first = intensity_decides(found)
    # products have less than 99.8% of the FLOPs
    assert first.verdict == IN_PART and "QKV projection 647 FLOP/byte" in first.why
    assert "more than QK^T and PV have, which are products. Products are 99.7%" in first.why
    second = prefill_and_decode(found)
    assert second.verdict == HOLDS and "67,108,864 scores" in second.why
    third = utilisations(found)  # 80% of 700 TFLOP/s, of 989
    assert third.verdict == IN_PART and third.figure.startswith("products 57%")
    assert "the better of the 2 fused ones that were timed there (" in third.why
    assert "At its best" not in third.why  # of attention alone there are no rows here


def test_the_best_of_other_shapes_is_said_by_mask_and_decides_nothing(tmp_path: Path) -> None:
    found = results(tmp_path, "prefill_decode")
    before = utilisations(found).verdict
    (tmp_path / "attention").mkdir()
    with open(tmp_path / "attention" / "h200.jsonl", "w", encoding="utf-8") as file:
        for causal, name, tflops in (
            (True, "triton", 500.0),
            (True, "cuda_fa3", 791.2),
            (False, "flash4", 890.1),
        ):
            of = {"study": "attention", "implementation": name, "pass": "forward", "causal": causal}
            of |= {"dtype": "bfloat16", "seq_len": 4096, "head_dim": 128, "features": ""}
            machine = {"gpu": "NVIDIA H200"}
            row = {"key": name, "point": of, "result": {"status": "ok", "tflops": tflops}, "machine": machine}
            file.write(json.dumps(row) + "\n")
    answer = utilisations(Results(tmp_path))
    assert answer.verdict == before and answer.why.endswith(
        "uses 80% with a causal mask (cuda_fa3, T = 4,096, D = 128) and 90% without a mask (flash4, T = "
        "4,096, D = 128)."
    )


def test_products_that_use_little_are_not_as_claimed(tmp_path: Path) -> None:
    def slow(rows: Rows) -> None:
        for row in rows:
            for part in row["result"].get("parts", {}).values():
                if part["kind"] == "weights":
                    part["ms_median"] *= 20
                    part["tflops"] /= 20
            if row["point"]["model"] == BERT:
                softmax = row["result"]["parts"]["softmax"]
                softmax["tflops"] = 100.0

    found = results(tmp_path, "prefill_decode", slow)
    assert intensity_decides(found).verdict == FAILS
    assert utilisations(found).verdict == FAILS


def test_nothing_measured(tmp_path: Path) -> None:
    for one in (linear_generation, size_of_the_cache, stacking, intensity_decides, prefill_and_decode):
        with pytest.raises(NotMeasured, match=r"run `python scripts/study\.py (kv_cache|prefill_decode)`"):
            one(Results(tmp_path))
    with pytest.raises(NotMeasured):
        utilisations(Results(tmp_path))


def test_a_prefill_that_is_not_saturated(tmp_path: Path) -> None:
    def late(rows: Rows) -> None:
        for row in rows:
            if row["point"]["implementation"] != "parts" and row["point"]["pass"] == "prefill":
                row["result"]["tflops"] = 0.3 * row["point"]["seq_len"]

    found = prefill_and_decode(results(tmp_path, "prefill_decode", late))
    assert found.verdict == IN_PART and "at 2,048 tokens" in found.why
