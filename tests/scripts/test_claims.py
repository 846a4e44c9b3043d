"""Claims and their answers: from rows alone, "not tested here" without any."""

from __future__ import annotations

import json

import pytest

from scripts import claims
from scripts.claims import FAILS, HOLDS, IN_PART, UNTESTED, Answer, NotMeasured, Results, answer, graded, of
from scripts.claims.sources import CLAIMS


def row(study="kv_cache", gpu="NVIDIA H200", result=None, **point):
    point = {"study": study} | {"pass" if key == "passed" else key: value for key, value in point.items()}
    key = json.dumps(point, sort_keys=True)
    machine = {"gpu": gpu, "date": "2026-11-21", "torch": "2.11", "triton": "3.6.0"}
    return {"key": key, "point": point, "result": {"status": "ok"} | (result or {}), "machine": machine}


def results(tmp_path, *rows):
    for one in rows:
        folder = tmp_path / one["point"]["study"]
        folder.mkdir(exist_ok=True)
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
    with pytest.raises(NotMeasured, match=r"no rows of numerics: run `python scripts/studies/numerics.py`"):
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


def test_an_answer_names_gpu_and_command():
    rows = [row(seq_len=1), row(seq_len=2), row("roofline")]
    found = answer(rows, "2.0x", graded(2, 2), "Because.")
    assert (found.gpu, found.verdict) == ("NVIDIA H200", HOLDS)
    assert found.command == "`python scripts/studies/kv_cache.py`, `python scripts/roofline.py`"
    assert of(rows, seq_len=2) is rows[1]
    with pytest.raises(NotMeasured):
        of(rows, seq_len=3)
    with pytest.raises(ValueError, match="'yes' is no verdict"):
        Answer("", "yes", "")


def test_a_factor_is_graded_by_size_and_direction():
    assert [graded(ours, 7.6) for ours in (8, 7.6, 2, 1, 0.5)] == [HOLDS, HOLDS, IN_PART, FAILS, FAILS]
    assert graded(1.5, 2, least=1.6) == FAILS


def test_without_rows_every_claim_is_not_tested_and_says_why(tmp_path):
    found = claims.answered(Results(tmp_path))
    assert list(found) == [claim.number for claim in CLAIMS] == list(range(1, 30))
    assert {one.verdict for one in found.values()} == {UNTESTED}
    assert all(one.why for one in found.values())


def test_two_answers_to_a_claim_are_a_mistake(monkeypatch):
    monkeypatch.setattr(claims, "ANSWERS", {})
    claims.answers(17)(len)
    with pytest.raises(ValueError, match="claim 17 is answered by builtins already"):
        claims.answers(17)(max)
