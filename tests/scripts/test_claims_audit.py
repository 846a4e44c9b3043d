"""The audit of the claims: what is compared differs in nothing that the claim does not name."""

from __future__ import annotations

import pytest

from scripts import report
from scripts.measure.claims import Figures, Results
from scripts.measure.claims.audit import audited, faults, thresholds
from scripts.measure.machine import ROOT
from tests.scripts.test_claims import results, row
from tests.scripts.test_claims_verdicts import entry


def contestants(**second):
    """Two rows alike but for the implementation, and what is given of the second."""
    point = {"passed": "forward", "seq_len": 1024, "kv_len": 1024, "dtype": "bfloat16", "causal": True}
    rows = [row("attention", implementation=name, **point) for name in ("standard", "triton")]
    for where, changes in second.items():
        rows[1][where] = rows[1].get(where, {}) | changes if isinstance(changes, dict) else changes
    return rows


def test_contestants_that_differ_in_what_is_named_are_no_fault():
    assert not list(faults(entry(), contestants()))
    longer = contestants(point={"seq_len": 2048, "kv_len": 2048})
    assert not list(faults(entry(apart=("seq_len",)), longer))
    narrow = entry(differ=("implementation", "dtype"))
    assert not list(faults(narrow, contestants(point={"dtype": "float32"})))


@pytest.mark.parametrize(
    ("second", "said"),
    [
        ({"point": {"dtype": "float32"}}, "dtype differs and is not named: bfloat16, float32"),
        ({"point": {"compile": True}}, "compile differs and is not named: none, True"),
        ({"point": {"causal": False}}, "causal differs and is not named: True, none"),
        ({"point": {"features": "transposed"}}, "features differs and is not named: none, transposed"),
        ({"point": {"batch": 2}}, "batch differs and is not named: none, 2"),
        ({"point": {"tile": {"warps": 8}}}, "tile.warps differs and is not named: none, 8"),
        ({"point": {"kv_len": 4096}}, "kv_len differs and is not named: none, 4096"),
        ({"machine": {"torch": "2.12"}}, "torch differs and is not named: 2.11, 2.12"),
        ({"run_id": "later"}, "run differs and is not named: none, later"),
    ],
)
def test_a_difference_that_is_not_named_is_a_fault(second, said):
    assert list(faults(entry(), contestants(**second))) == [said]
    assert list(faults(entry(apart=("pass",)), contestants(**second))) == [f"{said} (pass forward)"]


def test_thresholds_are_printed_with_the_distance_of_their_figures():
    claim = entry(
        holds=lambda f: 2 <= f.factor and f.alike,
        partly=lambda f: abs(f.factor - 1) > 0.5,
    )
    assert list(thresholds(claim, Figures([], factor=1.9, alike=True))) == [
        "holds: no: 2 <= f.factor and f.alike; f.factor = 1.9 is 0.95 x 2",
        "partly: yes: abs(f.factor - 1) > 0.5; abs(f.factor - 1) = 0.9 is 1.8 x 0.5",
    ]


def scores_in_memory(causal):
    """The rows of claim 24, those of standard attention with that mask."""
    alike = {
        "passed": "forward",
        "batch": 1,
        "heads": 32,
        "seq_len": 8192,
        "head_dim": 128,
        "dtype": "float16",
    }
    result = {"ms_median": 3.0, "copy_gb_per_s": 4000}
    return [
        row("attention_speed", implementation=name, causal=mask, **alike, result=result)
        for name, mask in (("standard", causal), ("flash4", True))
    ]


def test_the_command_fails_where_a_made_up_row_has_another_mask(tmp_path, capsys):
    results(tmp_path / "alike", *scores_in_memory(causal=True))
    report.audit(tmp_path / "alike")
    said = capsys.readouterr().out
    assert "Claim 24, holds in part: Scores in memory" in said and "FAULT" not in said
    assert "contestants: implementation standard, flash4" in said
    assert "Claim 17: no rows of kv_cache" in said
    results(tmp_path / "other", *scores_in_memory(causal=False))
    with pytest.raises(SystemExit, match="in claim 24 contestants differ in more"):
        report.audit(tmp_path / "other")
    assert "FAULT: causal differs and is not named: none, True" in capsys.readouterr().out


def test_no_claim_compares_what_it_does_not_name():
    text, wrong = audited(Results(ROOT / "results"))
    assert not wrong, text
