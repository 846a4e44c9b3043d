"""What the study long_context_quality and claim 5 make of rows."""

from __future__ import annotations

import pytest

from scripts.measure.claims import FAILS, HOLDS, IN_PART, UNTESTED, NotMeasured
from scripts.measure.claims.training import longer_contexts
from scripts.measure.report.long_context_report import Gain, Measured, report
from scripts.measure.studies import long_context_quality as study
from tests.scripts import studies
from tests.scripts.studies import results


def result(values, documents=(0.0, 0.0), **more):
    """A fake result; `values`: loss at positions 40 and 300."""
    corpus = {"training": {"files": 9, "bytes": 10**8, "sha256": "a" * 64, "tokens": 10**6}, "passes": 1}
    corpus |= {"evaluated": {"documents": 2, "targets": 1024, "sha256": "b" * 64}}
    loss = sum(values) / 2
    by_position = [[40.0, values[0]], [300.0, values[1]]]
    found = {"status": "ok", "reason": None, "loss": loss, "loss_last_half": values[1], "loss_chunked": loss}
    found |= {"loss_by_position": by_position, "corpus": corpus, "wall_s": 9.0, "parameters": 5}
    return found | {"loss_by_document": [loss + one for one in documents]} | more


def row(measured, seq_len, seed, result, **more):
    point = {"study": study.STUDY, "measured": measured, "seq_len": seq_len, "seed": seed, "tokens": 10**6}
    point |= {
        "text": "t",
        "settings": {"optim.lr": 1},
        "model": "m",
        "tokens_per_step": 64,
        "implementation": "auto",
        "dtype": "bf16-mixed",
    }
    point |= {"compile": True} | more
    return studies.row_of(point, result)


def speed(train_s):
    found = {"status": "ok", "reason": None, "tokens_per_s": 1e6 / train_s, "train_s": train_s, "mfu": 0.3}
    return found | {"ms_median": 5.0, "ms_p10": 4.9, "ms_p90": 5.2, "peak_mib": 2048.0}


def test_the_report_says_what_the_rows_say():
    rows = [row("loss", 128, 1, result((9, 9)), text="older")]
    rows += [row("loss", 128, seed, result((2.0, 1.5 + seed / 100), (0.01, -0.01))) for seed in (1, 2)]
    rows += [row("loss", 512, seed, result((2.02, 1.3 + seed / 100))) for seed in (1, 2)]
    rows += [row("speed", 128, 1, speed(2.0)), row("speed", 512, 1, speed(3.0))]
    rows += [row("loss", 1024, 1, {"status": "oom", "reason": "CUDA out of memory"})]
    made = report(rows)
    quality, cost, positions = (table.lines for table in made.tables)
    assert [line[0] for line in quality] == ["context", "128", "512"]
    assert quality[1][1:3] == ["2", "1.7575 ± 0.0035"] and quality[2][-1] == "-0.0900 ± 0.0000 ± 0.0100"
    assert [line[4] for line in cost[1:]] == ["1.00x", "1.50x"] and cost[2][1] == "333,333"
    assert positions[1:] == [
        ["40", "2.0000 ± 0.0000", "2.0200 ± 0.0000"],
        ["300", "1.5150 ± 0.0071", "1.3150 ± 0.0071"],
    ]
    said = " ".join(made.notes)
    assert "the loss is lower than with 128: by 0.0900 ± 0.0000 nats (95% interval by Student's t" in said
    assert "differ by +0.0200" in said
    assert (
        "3 s with a context of 512, and 2 s with 128" in said
        and "T=1,024, loss, seed 1: oom, CUDA out of memory" in said
    )
    assert made.pictures[""].count("NVIDIA H200") == 1 and "older" not in said


def test_a_difference_within_the_spread_is_none():
    rows = [row("loss", 128, seed, result((2.0, 1.5))) for seed in (1, 2)]
    rows += [row("loss", 512, seed, result((2.0, 1.5 + (seed - 1.4) / 10))) for seed in (1, 2)]
    assert "not shown to differ from that with 128: +0.0050 ± 0.3178 nats" in report(rows).notes[0]
    one = report([row for row in rows if row["point"]["seed"] == 1])
    assert "lower than with 128 by 0.0200 nats with one seed, so that the spread is not known" in one.notes[0]
    alone = Measured([row("loss", 128, 1, result((2.0, 1.5)))])
    assert alone.gain(128) is None
    failed = report([row("loss", 128, 1, {"status": "error", "reason": "killed"})])
    assert failed.tables == [] and "error, killed" in failed.notes[0]


@pytest.mark.parametrize(("seeds", "clear"), [(0.0209, True), (0.0211, False)])
def test_a_difference_is_clear_beyond_students_interval(seeds, clear):
    """Of three seeds that is 4.30 standard errors, not two; of documents, which are many, it is two."""
    gain = Gain(0.0522, seeds, 3, 0.005)
    assert gain.interval == pytest.approx(2.483 * seeds, rel=1e-3) and gain.clear == clear
    assert not Gain(0.0522, 0.0, 1, 0.005).clear and not Gain(0.0522, 0.0, 3, 0.0262).clear


@pytest.mark.parametrize(
    "gain, train_s, verdict", [(0.2, 2.6, HOLDS), (0.2, 2.8, IN_PART), (-0.2, 2.1, FAILS)]
)
def test_claim_5_wants_a_better_model_at_little_cost(tmp_path, gain, train_s, verdict):
    rows = [row("loss", 512, 1, result((9, 9))), row("speed", 512, 1, speed(1.0))]
    rows += [row("loss", 1024, seed, result((2.0, 2.0 + seed / 100))) for seed in (1, 2)]
    rows += [row("loss", 4096, seed, result((2.0, 2.0 + seed / 100 - gain))) for seed in (1, 2)]
    with pytest.raises(NotMeasured, match="speed"):
        longer_contexts(results(tmp_path, **{study.STUDY: rows}))
    rows += [row("speed", 1024, 1, speed(2.0)), row("speed", 4096, 1, speed(train_s))]
    found = longer_contexts(results(tmp_path, **{study.STUDY: rows}))
    assert found.verdict == UNTESTED and found.why.startswith("not at this scale: a model of")
    for one in rows:
        one["result"]["parameters"] = 124_000_000
    found = longer_contexts(results(tmp_path, **{study.STUDY: rows}))
    assert found.verdict == verdict and f"{-gain / 2:+.3f} ± 0.000 nats from 1,024 to 4,096" in found.why
    assert found.figure.endswith(f"time 1.00 / {train_s / 2:.2f}") and found.gpu == "NVIDIA H200"
