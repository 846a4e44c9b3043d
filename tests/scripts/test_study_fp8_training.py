"""The study of training in fp8: its points and runs, what it reads of a run, and what its rows say."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from scripts.measure import sweep_points
from scripts.measure.instruments.training_point import arguments as training_point
from scripts.measure.rows import key_of
from scripts.measure.studies import fp8_training, real_text
from tests.scripts.studies import row_of

PARTS = {"files": 3, "bytes": 10**6, "sha256": "a"}


@pytest.fixture(autouse=True)
def text(monkeypatch: pytest.MonkeyPatch) -> None:
    corpus = {"training": PARTS, "held_out": PARTS}
    monkeypatch.setattr(real_text, "gathered", lambda options: (Path("text"), corpus))


def plan(*given: str, device: str = "cuda", devices: int = 1) -> fp8_training.Plan:
    return fp8_training.Plan(fp8_training.arguments(list(given)), device, devices)


def test_points_differ_in_precision_alone() -> None:
    on_four = plan(devices=4)
    for measured in ("speed", "loss"):
        bf16, fp8 = on_four.points(measured)
        assert len({key_of(bf16), key_of(fp8)}) == 2 and bf16["study"] == "fp8_training"
        assert (bf16["precision"], fp8["precision"]) == ("bf16-mixed", "fp8")
        different = {key for key in bf16 if bf16[key] != fp8[key]}
        # train.py compiles blocks in fp8 by itself; a step that is measured is captured as train.py's is
        graph = {"settings"} if measured == "speed" else set()
        assert different == {"precision", "dtype", "compile"} | graph
    (again,) = on_four.points("chance")  # the same batches: data/stream.py
    assert again == bf16 | {"micro_batch": bf16["micro_batch"] // 2}
    assert (bf16["devices"], bf16["steps"]) == (4, 381) and bf16["steps"] * 131072 == pytest.approx(
        5e7, rel=2e-3
    )
    assert on_four.points("speed")[0]["devices"] == 1
    other = plan("optim.lr=1e-3")
    for measured in ("speed", "loss"):
        words = [word for word in other.words(measured, "fp8") if not word.startswith("--")]
        assert sweep_points.composed(words)[0].optim.lr == 1e-3


@pytest.mark.parametrize(("device", "devices"), [("cuda", 2), ("cpu", 1)])
def test_words_are_what_runs_take(device: str, devices: int) -> None:
    mine = plan(device=device, devices=devices)
    for precision in fp8_training.PRECISIONS:
        cfg, chosen = sweep_points.composed(mine.words("loss", precision))
        trainer = "ddp" if devices > 1 else "default"
        assert (cfg.precision, chosen["trainer"], cfg.trainer.devices) == (precision, trainer, devices)
        assert cfg.tokens_per_step % (devices * cfg.data.batch_size * cfg.seq_len) == 0
        assert cfg.trainer.max_steps // cfg.trainer.val_check_interval >= 20
        point = training_point(mine.words("speed", precision))
        cfg, _ = sweep_points.composed(point.overrides)
        assert cfg.cuda_graphs is (precision == "fp8" and device == "cuda") and point.brief
        assert cfg.data.corpus.vocab_size == (50304 if device == "cuda" else 320)


def test_a_run_is_read_from_its_metrics() -> None:
    rows = [
        {
            "step": "10",
            "train/loss": "5.5",
            "perf/tokens_per_s": "100.0",
            "perf/peak_mib": "7.5",
            "val/loss": "",
        },
        {"step": "10", "train/loss": "", "perf/tokens_per_s": "", "perf/peak_mib": "", "val/loss": "5.25"},
        {
            "step": "20",
            "train/loss": "5.0",
            "perf/tokens_per_s": "300.0",
            "perf/peak_mib": "8.0",
            "val/loss": "",
        },
    ]
    assert fp8_training.of_metrics(rows) == {
        "validation": [[10, 5.25]],
        "losses": [[10, 5.5], [20, 5.0]],
        "tokens_per_s": 200.0,
        "peak_mib": 8.0,
    }


def test_a_run_that_fails_is_a_row(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    mine = plan("data.batch_size=3", device="cpu")
    mine.text = tmp_path, mine.text[1]
    found = fp8_training.trained(mine, mine.point("loss", "fp8"))
    assert found["status"] == "error" and "tokens_per_step=256 is not a multiple" in found["reason"]


def result(**of: Any) -> dict[str, Any]:
    return {"status": "ok", "reason": None, "peak_mib": 2048.0} | of


def test_what_its_rows_say() -> None:
    mine, rows = plan(devices=4), []
    times = {"bf16-mixed": [100.0, 120.0, 110.0], "fp8": [80.0, 100.0, 100.0]}
    for point in mine.points("speed"):
        ms = times[point["precision"]]
        speed = {"ms_by_round": ms, "ms_median": ms[0], "tokens_per_s": 1e5 / ms[0]}
        rows.append(row_of(point, result(**speed)))
    for point in mine.points("loss"):
        worse = 0.01 * (point["precision"] == "fp8")
        rows.append(row_of(point, result(validation=[[0, 11.0], [381, 4.5 + worse]], losses=[])))
    rows.append(
        row_of(mine.point("speed", "fp8") | {"micro_batch": 64}, {"status": "oom", "reason": "too much"})
    )
    found = fp8_training.report(rows)
    assert found.found == (
        "gpt2_xl trains 1.20x as fast in fp8 as in bf16, and the loss of gpt2_xl differs by +0.0100 nats "
        "after 49.9 million tokens."
    )
    assert "4.5100 nats per token in fp8 and 4.5000 in bf16 (+0.0100)" in " ".join(found.notes)
    assert "381 steps of 131,072 tokens on 4 devices" in " ".join(found.notes)
    assert found.notes[-1] == "gpt2_xl, fp8, speed: oom: too much"
    speeds, losses = found.tables
    assert speeds.lines[2][6] == "1.200x" and losses.lines[-1] == [
        "381",
        "49,938,432",
        "4.5000",
        "4.5100",
        "+0.0100",
    ]
    assert found.pictures[""].startswith("<?xml")
    (again,) = mine.points("chance")
    rows.append(row_of(again, result(validation=[[0, 11.0], [381, 4.475]], losses=[])))
    found = fp8_training.report(rows)
    assert (
        "in micro-batches of 8 rows instead of 16, which only rounds differently, ends at 4.4750 (-0.0250)"
        in (" ".join(found.notes))
    )
    assert found.found.endswith("after 49.9 million tokens (-0.0250 by chance).")
    assert found.tables[1].lines[-1] == [*losses.lines[-1], "4.4750", "-0.0250"]
    losses = found.tables[1]
    others = plan("optim.weight_decay=0.2", devices=4).points("loss")
    rows.append(row_of(others[0], result(validation=[[0, 11.0], [381, 4.2]], losses=[])))
    assert fp8_training.report(rows).tables[1:] == [losses]  # of another config, whose fp8 is missing
    only = fp8_training.report(rows[:2])
    assert only.found == "gpt2_xl trains 1.20x as fast in fp8 as in bf16." and not only.pictures


def test_micro_batches_of_chance_are_half_as_long(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        plan("--batch", "3")
    assert "--batch is to be even, not 3" in capsys.readouterr().err
    assert plan("--batch", "3", "--measured", "loss").options.batch == 3
