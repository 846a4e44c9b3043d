"""Claims and their answers: from rows alone, "not tested here" without any."""

from __future__ import annotations

import json
import re

import pytest

from scripts.measure import claims
from scripts.measure.claims import (
    FAILS,
    HOLDS,
    IN_PART,
    UNTESTED,
    Figures,
    NotMeasured,
    Results,
    all_claims,
    of,
)
from scripts.measure.claims.page import page
from tests.scripts.test_claims_verdicts import entry


def row(study="kv_cache", gpu="NVIDIA H200", result=None, **point):
    point = {"study": study} | {"pass" if key == "passed" else key: value for key, value in point.items()}
    key = json.dumps(point, sort_keys=True)
    machine = {"gpu": gpu, "date": "2026-11-21", "torch": "2.11", "triton": "3.6.0"}
    return {"key": key, "point": point, "result": {"status": "ok"} | (result or {}), "machine": machine}


def results(tmp_path, *rows):
    for one in rows:
        folder = tmp_path / one["point"]["study"]
        folder.mkdir(parents=True, exist_ok=True)
        with open(folder / f"{(one['machine']['gpu'] or 'cpu').split()[-1].lower()}.jsonl", "a") as file:
            file.write(json.dumps(one) + "\n")
    return Results(tmp_path)


def test_rows_are_those_of_the_gpu_with_the_most(tmp_path):
    rows = [row(seq_len=n) for n in (1, 2)] + [row(gpu=None, seq_len=n) for n in (1, 2, 3)]
    found = results(tmp_path, *rows, row(gpu="NVIDIA A100", seq_len=3))
    assert [r["point"]["seq_len"] for r in found.rows("kv_cache")] == [1, 2]
    assert [r["point"]["seq_len"] for r in found.rows("kv_cache", seq_len=(2, 3))] == [2]


def test_what_is_missing_says_the_command(tmp_path):
    found = results(tmp_path, row(passed="generate"))
    with pytest.raises(NotMeasured, match=r"no rows of numerics: run `python scripts/study.py numerics`"):
        found.rows("numerics", dtype="float16")
    with pytest.raises(NotMeasured, match="no rows of kv_cache with pass decode: run"):
        found.rows("kv_cache", passed="decode")
    with pytest.raises(NotMeasured, match=r"of attention: run `python scripts/bench_attention\.py`"):
        found.rows("attention")


@pytest.mark.parametrize("bad", [{"status": "oom"}, {"error_ratio": 1.1}, {"kernels_ok": False}])
def test_figures_that_may_not_be_trusted_are_no_evidence(tmp_path, bad):
    found = results(tmp_path, row(seq_len=1, result=bad), row(seq_len=2, result={"error_ratio": 1.0}))
    assert [r["point"]["seq_len"] for r in found.ok("kv_cache")] == [2]
    with pytest.raises(NotMeasured, match="seq_len 1"):
        found.ok("kv_cache", seq_len=1)


def test_an_answer_names_gpu_and_command(tmp_path):
    rows = [row(seq_len=1), row(seq_len=2), row("roofline")]
    found = entry(query=lambda results: Figures(rows, factor=2))(None)
    assert (found.figure, found.gpu, found.verdict) == ("2.0x", "NVIDIA H200", HOLDS)
    assert found.command == "`python scripts/study.py kv_cache`, `python scripts/roofline.py`"
    found = entry(query=lambda results: Figures(rows, "python x.py", factor=1))(None)
    assert (found.verdict, found.command) == (FAILS, "`python x.py`")
    assert of(rows, seq_len=2) is rows[1]
    with pytest.raises(NotMeasured):
        of(rows, seq_len=3)


def test_without_rows_every_claim_is_not_tested_and_says_why(tmp_path):
    found = claims.answered(Results(tmp_path))
    assert list(found) == sorted(claims.CLAIMS) and list(found) == list(range(1, 40))
    assert {one.verdict for one in found.values()} == {UNTESTED}
    assert all(
        re.match(r"no (rows|counters) of .*run `python scripts/\S+\.py", one.why) for one in found.values()
    )


def test_an_answer_that_fails_is_named(monkeypatch, tmp_path):
    all_claims()
    monkeypatch.setitem(claims.CLAIMS, 17, entry(number=17, query=lambda results: {}["x"]))
    with pytest.raises(KeyError) as caught:
        claims.answered(Results(tmp_path))
    assert caught.value.__notes__ == ["in the answer to claim 17"]


def test_two_answers_to_a_claim_are_a_mistake():
    all_claims()
    with pytest.raises(
        ValueError, match=r"claim 17 is answered by scripts.measure.claims.generation already"
    ):
        claims.claim(17, "Fast.", theirs="2x")(max)


def ladder(first=10.0, second=1.0, slow=1.0, tiled=8.0):
    """Times that a table of claim 10 needs, and fa1's and fa2's at 4,096 tokens."""
    alike = {"passed": "forward", "batch": 1, "heads": 32, "head_dim": 128, "causal": False, "features": ""}
    times = {"cuda_naive": 40.0, "cuda_rowwise": 20.0 * slow, "cuda_tiled_fma": tiled, "cuda_fa2": second}
    times |= {"cuda_fa1": first, "sdpa_cudnn": second / 2}
    return [
        row(
            "cuda_ladder", implementation=name, seq_len=n, dtype="bfloat16", **alike,
            result={"ms_median": ms, "tflops": 100 / ms},
        )
        for name, ms in times.items()
        for n in (1024, 4096, 8192)
    ]  # fmt: skip


def ceiling(name, value, per_clock=None):
    result = {"value": value, "per_clock": per_clock, "unit": "", "mib": None}
    return row("roofline", implementation="ceiling", passed=name, result=result)


def ceilings(exp2=3.0, shared=30e3, level_2=7e3, clocks=(40, 280, 660)):
    rates = {"tensor_cublas": 800, "fma": 50, "exp2": exp2, "shared_read": shared, "l2_read": level_2}
    clocks = dict(zip(("latency_shared", "latency_l2", "latency_dram"), clocks, strict=True))
    rows = [ceiling(name, value) for name, value in (rates | {"dram_read": 3e3}).items()]
    return rows + [ceiling(name, 1, value) for name, value in clocks.items()]


def test_rates_and_memories(tmp_path):
    found = claims.answered(results(tmp_path / "a", *ceilings(shared=26e3)))
    assert (found[26].verdict, found[26].figure) == (HOLDS, "16x for fp32 FMA, 267x for exp2")
    assert found[27].verdict == HOLDS and found[27].figure.startswith("shared memory 26 TB/s, 40 clocks")
    assert "L2 over shared memory in clocks 7.0x (6.7x)" in found[27].why and "4 of 4 are" in found[27].why
    found = claims.answered(results(tmp_path / "b", *ceilings(exp2=4.0, shared=120e3)))
    assert found[26].verdict == IN_PART
    assert found[27].verdict == IN_PART and "more than 128 bytes a clock" in found[27].why
    found = claims.answered(results(tmp_path / "c", *ceilings(900.0, 6e3, 60e3, (40, 40, 400))))
    assert (found[26].verdict, found[27].verdict) == (FAILS, FAILS)


def moved(stage, n, dram, level_2, tile=None, **result):
    counters = {"dram_read_bytes": dram / 2, "dram_write_bytes": dram / 2, "l2_bytes": level_2}
    point = {"implementation": stage, "passed": "forward", "seq_len": n, "head_dim": 128, "causal": True}
    point |= {"tile": tile} if tile else {}
    return row("roofline", **point, result={"counters": counters} | result)


def usage(spilled, occupancy=12, shared=1024):
    return {"f": {"occupancy_percent": occupancy, "shared_bytes": shared, "spilled_bytes": spilled}}


def test_traffic_is_counted_and_its_orders_fitted(tmp_path):
    def rows(dram, lengths=(1024, 4096, 16384)):
        return [
            moved(stage, n, n**2 if stage == "cuda_naive" else dram * n, n**2)
            for stage in ("cuda_naive", "cuda_tiled")
            for n in lengths
        ]

    found = claims.answered(results(tmp_path / "a", *rows(400)))[13]
    assert found.verdict == IN_PART  # tiles: N where N^2 is claimed
    assert found.figure == "DRAM traffic 2.56x at 1,024, 10.2x at 4,096, 41x at 16,384"
    assert (
        "as N^2.00, that of `cuda_tiled` (FMA units) as N^1.00 and not N^2" in found.why
        and "1 of 3 lengths" in found.why
        and "the bytes do grow as N^2.00;" in found.why
    )
    squares = [
        moved(stage, n, n**2 / (1 if stage == "cuda_naive" else 12), n**2)
        for stage in ("cuda_naive", "cuda_tiled")
        for n in (1024, 4096)
    ]
    tiles = [
        moved("cuda_fa2", 4096, 1, 1e9 * 64 / br, {"br": br, "bc": 64, "warps": 4}, usage=usage(0))
        for br in (64, 128)
    ]
    found = claims.answered(results(tmp_path / "b", *squares, *tiles))[13]
    assert found.verdict == HOLDS and "1.00 GB with 64, 0.50 GB with 128" in found.why
    found = claims.answered(results(tmp_path / "c", *rows(400, (4096,))))[13]
    assert found.verdict == UNTESTED and "no counters of cuda_naive's traffic" in found.why


def test_the_page_has_every_claim_and_counts_them(tmp_path):
    text = page(results(tmp_path, *ladder(slow=2), row(passed="generate")))
    assert f"\n1 holds in part and {len(claims.CLAIMS) - 1} are not tested here.\n" in text
    assert all(f"\n### Claim {n}\n" in text and f"| [{n}](#claim-{n}) | " in text for n in claims.CLAIMS)
    assert "**Holds in part**: 3 of 4 steps are 2x and more; ms: naive 40 / 40 / 40" in text
    assert "NVIDIA H200; `python scripts/bench_ladder.py`" in text
    assert "70 TFLOP/s, 357% of the peak of 19.5" in text and "6 MiB at 1,024, 72 MiB at 4,096" in text
    assert "10.0 GiB with 64 KV heads, 1.25 GiB with its 8" in text
    assert text.rstrip().splitlines()[-3].startswith("| holds in part | 1 | [10](#claim-10) |")
