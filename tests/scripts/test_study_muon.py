"""The study of Muon: its points, the learning rates that it goes on with, and what its rows say."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from scripts.measure import sweep_points
from scripts.measure.rows import key_of, read
from scripts.measure.runner import Run
from scripts.measure.studies import muon, real_text
from tests.scripts.studies import row_of

PARTS = {"files": 3, "bytes": 10**6, "sha256": "a"}


@pytest.fixture(autouse=True)
def text(monkeypatch: pytest.MonkeyPatch) -> None:
    corpus = {"training": PARTS, "held_out": PARTS}
    monkeypatch.setattr(real_text, "gathered", lambda options: (Path("text"), corpus))


def result(loss: float, ms: float = 10.0, steps: int = 1000, **more: Any) -> dict[str, Any]:
    """Evaluated three times, for a second each."""
    losses = {0: 9.0, steps // 10: 9.0, steps: loss}
    held_out = [
        {"step": step, "loss": found, "s": 5.0 + i + step * ms / 1e3, "took": 1.0}
        for i, (step, found) in enumerate(losses.items())
    ]
    return {"status": "ok", "reason": None, "ended_by": "steps", "held_out": held_out} | more


def test_points_are_runs_of_train_py() -> None:
    plan = muon.Plan(muon.arguments(["--seeds", "2"]), "cuda")
    choice, compared = plan.choice(), plan.comparison({"adamw": 2e-3, "muon": 4e-3})
    assert len({key_of(point) for point in [*choice, *compared]}) == 6 + 2 + 8 - 2  # two are of both
    assert [point["steps"] for point in compared] == [1000] * 2 + [666, 666, 800, 800, 909, 909, 1000, 1000]
    for point in compared:
        cfg, chosen = sweep_points.composed(plan.words(point))
        assert chosen["optim"] == point["optimizer"] and cfg.optim.lr == point["lr"]
        assert (cfg.seed, cfg.trainer.max_steps) == (point["seed"], point["steps"])
        assert cfg.data.batch_size * cfg.seq_len == 32768 and cfg.compile == "blocks"
    assert point["text"] and "data.path" not in point["settings"]


def answered_by(
    monkeypatch: pytest.MonkeyPatch, ask: Callable[[Any, dict[str, Any]], dict[str, Any]]
) -> None:
    """No process trains: `ask` takes what one would be asked."""

    class Worker:
        def __init__(self, child: str, timeout_s: float) -> None: ...

        def __enter__(self) -> Worker:
            return self

        def __exit__(self, *_: Any) -> None: ...

    Worker.ask = ask
    monkeypatch.setattr("scripts.measure.worker.Worker", Worker)


def test_it_goes_on_with_the_learning_rate_of_the_lowest_loss(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    def ask(_: Any, request: dict[str, Any]) -> dict[str, Any]:
        words = dict(word.split("=", 1) for word in request["words"])
        asked.append(words)
        lr = float(words["optim.lr"])
        if lr == 8e-3:
            return {"status": "error", "reason": "diverged"}
        return result(3.0 + abs(lr - {"adamw": 1e-3, "muon": 2e-3}[words["optim"]]))

    answered_by(monkeypatch, ask)
    out = tmp_path / "rows.jsonl"
    given = ["--seeds", "2", "--steps", "30", "--out", str(out), "--lrs", "1e-3", "2e-3", "8e-3"]
    options = muon.arguments(given)
    muon.measure(options, Run("muon", options))
    assert len(asked) == 6 + 1 + 7
    assert {(w["optim"], w["optim.lr"]) for w in asked[6:]} == {("adamw", "0.001"), ("muon", "0.002")}
    assert len(read(out)) == 14


def test_it_does_not_choose_before_all_learning_rates_are_tried(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Another process is at the best one."""
    answered_by(monkeypatch, lambda *_: result(3.0))
    out = tmp_path / "rows.jsonl"
    options = muon.arguments(["--seeds", "2", "--steps", "30", "--out", str(out), "--lrs", "1e-3", "2e-3"])
    run = Run("muon", options)
    monkeypatch.setattr(run, "claim", lambda point: (point["optimizer"], point["lr"]) != ("muon", 2e-3))
    muon.measure(options, run)
    assert len(read(out)) == 3 and "another process tries the other" in capsys.readouterr().out


def report(losses: dict[tuple[str, float], list[float]]) -> Any:
    plan = muon.Plan(muon.arguments([]), "cuda")
    rows = []
    for (name, share), each in losses.items():
        for i, loss in enumerate(each):
            point = plan.point(name, 2e-3, muon.SEED + i, share)
            ms = 12.0 if name == "muon" else 10.0
            rows.append(row_of(point, result(loss, ms, point["steps"])))
    rows.append(row_of(plan.point("adamw", 8e-3, muon.SEED), {"status": "error", "reason": "diverged"}))
    return muon.report(rows)


def falling(*losses: float) -> dict[str, Any]:
    """A run evaluated with these losses, the last at step 1,000, a hundred steps apart."""
    first = 1000 - 100 * (len(losses) - 1)
    held_out = [{"step": first + 100 * i, "loss": loss, "s": 5.0 + i} for i, loss in enumerate(losses)]
    return result(losses[-1]) | {"held_out": [{"step": 0, "loss": 9.0, "s": 1.0}, *held_out]}


ONE_SEED = {
    ("adamw", 1e-3, muon.SEED): falling(3.2, 3.1),
    ("adamw", 2e-3, muon.SEED): falling(3.1, 3.0),
    ("muon", 1e-3, muon.SEED): falling(3.1, 3.05),
    ("muon", 4e-3, muon.SEED): falling(3.3, 2.99, 2.95, 2.92, 2.9),
}


def test_steps_of_the_same_sources_are_timed() -> None:
    """The last of which both optimisers have runs; seeds are in any order."""
    plan, rows = muon.Plan(muon.arguments([]), "cuda"), []
    for name, code, ms in (
        ("adamw", "a", 29.0),
        ("muon", "a", 36.0),
        ("adamw", "b", 10.0),
        ("muon", "b", 15.0),
        ("adamw", "c", 9.0),
    ):
        point = plan.point(name, 2e-3, muon.SEED + 9 - len(rows))
        rows.append(row_of(point, result(3.0, ms, point["steps"]), code=code))
    found = muon.report(rows)
    assert "A step of Muon takes 1.50x the time of AdamW's." in found.notes
    assert [line[-1] for line in found.tables[0].lines[1:]] == ["10.00", "15.00"]


def test_what_rows_say() -> None:
    losses = {("adamw", 1.0): [3.00, 3.02, 3.01], ("muon", 1.0): [2.90, 2.92, 2.91]}
    losses |= {("muon", 1.1): [2.95, 2.96, 2.97], ("muon", 1.25): [2.99, 3.00, 3.01]}
    losses |= {("muon", 1.5): [3.05, 3.06, 3.07]}
    found = report(losses)
    assert found.found == "With 1.1x fewer tokens than AdamW, Muon reaches its held-out loss."
    assert found.notes[0].startswith("Muon on as many tokens as AdamW (32.8 million)")
    assert "-0.1000 ± 0.0000" in found.notes[0] and "-0.0100 ± 0.0248" in found.notes[2]
    assert found.notes[4] == "A step of Muon takes 1.20x the time of AdamW's."
    assert found.notes[5].endswith("AdamW 0.002 3.0000, Muon 0.002 2.9000.")
    assert found.notes[6] == "adamw, lr 0.008, seed 1337, 1,000 steps: diverged."
    assert found.tables[0].lines[3][1:] == [
        *["0.002", "909", "29,786,112", "3", "2.9600"],
        *["-0.0500", "0.0248", "12.00"],
    ]
    assert found.pictures[""].startswith("<?xml")
    first = report({("adamw", 1.0): [3.0], ("muon", 1.0): [2.9]})
    assert not first.found
    rows = [row_of(muon.Plan(muon.arguments([]), "cuda").point(*at), got) for at, got in ONE_SEED.items()]
    first = muon.report(rows)
    assert first.found == "Muon reaches AdamW's held-out loss with 1.43x fewer tokens, in 1 seed."
    assert first.notes[0].startswith(
        "Seed 1337: of the evaluations during Muon's run on as many tokens, that"
    )
    assert "after step 700 is the first at or below AdamW's loss after step 1,000." in first.notes[0]
    assert [line[1] for line in first.tables[0].lines[1:]] == ["0.002", "0.004"]
    worse = report(losses | {("muon", share): [3.1, 3.0, 3.0] for share in muon.SHARES})
    assert worse.found.startswith("Muon is not shown to reach")
