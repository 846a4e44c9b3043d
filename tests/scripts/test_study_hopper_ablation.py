"""The ablation of the Hopper kernel: which points there are, a variant that is wrong, what the rows say."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from ops.cuda.hopper_tiles import backward_tile, forward_tile, stores_first_dq
from scripts.measure.rows import append, read
from scripts.measure.studies import hopper_ablation as study


@pytest.mark.parametrize("shape", study.shapes()[::3], ids=str)
def test_an_idea_is_left_out_where_there_is_one(shape: study.Shape) -> None:
    options = ("SOFTCAP", "DROPOUT", "HAS_LEFT", "DOCUMENT_IDS", "ALIBI", "LENGTHS", "BLOCK_MASK")
    defines = dict.fromkeys(options, 0)
    every = study.points(shape)
    ahead = forward_tile(shape.head_dim, shape.tokens, defines | {"HAS_RIGHT": int(shape.causal)})
    named = {point["without"] for point in every["forward"]}
    assert ("ping-pong" in named, study.TEAMS in named) == (ahead.ping_pong, ahead.teams == 2)
    tile = backward_tile(shape.head_dim, defines)
    named = {point["without"] for point in every["backward"]}
    assert study.LATE in named and tile.late_dq and tile.late_dk
    stored = stores_first_dq(shape.tokens, shape.head_dim, defines)
    assert (study.SKIPPED in named) == (shape.causal and tile.br == 64)
    assert named & {study.STORED, study.CLEARED} == {study.STORED if stored else study.CLEARED}


def test_a_variant_that_differs_is_no_result(monkeypatch: pytest.MonkeyPatch) -> None:
    x, shape = torch.tensor([1.0, -2.0]), study.shapes()[0]
    monkeypatch.setattr(study, "BUDGET_S", 1e-4)
    monkeypatch.setattr(
        study,
        "variants",
        lambda *_: lambda without: (x + (1e-2 if without in ("overlap", study.LATE) else 0),),
    )
    of = study.points(shape)
    by_name = {p["without"]: r for p, r in zip(of["forward"], study.timed(shape, of["forward"]), strict=True)}
    assert by_name["overlap"]["status"] == "error" and "5.00e-03" in by_name["overlap"]["reason"]
    assert by_name["persistence"]["status"] == "ok" and by_name["persistence"]["difference"] == 0
    # of a gradient, P's rounding is allowed
    assert [r["status"] for r in study.timed(shape, of["backward"])] == ["ok"] * 5


@pytest.mark.long
def test_what_rows_say(tmp_path: Path) -> None:
    out = tmp_path / "h200.jsonl"
    for shape in study.shapes():
        for points in study.points(shape).values():
            for point in points:
                speed = {"": 500.0, "overlap": 450.0, "persistence": 500.0 * (shape.tokens > 1024)}
                found = {"status": "ok", "ms_median": 1.0, "tflops": speed.get(point["without"], 475.0)}
                append(
                    out,
                    point,
                    found | {"difference": 0.0} if found["tflops"] else {"status": "error", "reason": ""},
                )
    report = study.report(list(read(out).values()))
    forward, backward = report.tables
    # D = 64 has teams at T = 1k and ping-pong beyond, D = 128 ping-pong alone
    assert len(forward.lines) == 1 + 6 * 2 + 5 * 2 and len(backward.lines) == 1 + 5 * 4 + 2
    assert ["D = 64, causal", "overlap", "0.90", "0.90", "0.90"] in forward.lines
    assert ["D = 128, no mask", "persistence", "", "1.00", "1.00"] in backward.lines
    assert "overlap 0.90x, " in report.found and report.found.endswith("persistence 1.00x (backward).")
    assert set(report.pictures) == {"forward", "backward"}
    assert study.report([]).found == ""
