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


def test_a_ratio_takes_both(monkeypatch: pytest.MonkeyPatch) -> None:
    from scripts.measure.instruments import training_turns

    lost = {"status": "oom", "reason": "CUDA out of memory"}  # in company, so that no row may say so
    answers = dict(zip(fp8_training.PRECISIONS, ({"status": "ok"}, lost), strict=True))
    monkeypatch.setattr(training_turns, "in_turns", lambda asked: {name: answers[name] for name in asked})
    mine = plan()
    with pytest.raises(RuntimeError, match="CUDA out of memory"):
        fp8_training.speeds(mine, mine.points("speed"))


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
    (again,) = on_four.points("again")  # the same batches: data/stream.py
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


@pytest.mark.long
def test_a_run_that_fails_is_a_row(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    mine = plan("--batch", "3", "--measured", "loss", device="cpu")
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
        rows.append(
            row_of(point, result(validation=[[0, 11.0], [380, 4.5 + worse]], losses=[], tokens_per_s=1e5))
        )
    rows.append(
        row_of(mine.point("speed", "fp8") | {"micro_batch": 64}, {"status": "oom", "reason": "too much"})
    )
    found = fp8_training.report(rows)
    assert found.found == (
        "gpt2_xl trains 1.20x as fast in fp8 as in bf16, and the loss of gpt2_xl differs by +0.0100 nats "
        "after 49.8 million tokens."
    )
    said = " ".join(found.notes)
    assert (
        "at step 380, the validation loss is 4.5100 nats per token in fp8 and 4.5000 in bf16 (+0.0100)"
        in said
    )
    assert "381 steps of 131,072 tokens in micro-batches of 16 rows on 4 devices" in said
    assert "100,000 in fp8 (compile=blocks), 100,000 in bf16 (compile=True)" in said
    assert found.notes[-1] == "gpt2_xl, fp8, speed: oom: too much"
    speeds, losses = found.tables
    assert speeds.lines[2][6] == "1.200x" and losses.lines[-1] == [
        "380",
        "49,807,360",
        "4.5000",
        "4.5100",
        "+0.0100",
    ]
    assert found.pictures[""].startswith("<?xml")
    (again,) = mine.points("again")
    rows.append(row_of(again, result(validation=[[0, 11.0], [380, 4.475]], losses=[], tokens_per_s=9e4)))
    found = fp8_training.report(rows)
    said = " ".join(found.notes)
    assert (
        "micro-batches of 8 rows, where the same batches are rounded differently, bf16 has 4.4750 (-0.0250)"
        in said
    )
    assert found.found.endswith("million tokens (bf16 in micro-batches of 8 rows instead of 16: -0.0250).")
    assert found.tables[1].lines[-1] == [*losses.lines[-1], "4.4750", "-0.0250"]
    losses = found.tables[1]
    others = plan("optim.weight_decay=0.2", devices=4).points("loss")
    rows.append(row_of(others[0], result(validation=[[0, 11.0], [380, 4.2]], losses=[])))
    assert fp8_training.report(rows).tables[1:] == [losses]  # of another config, whose fp8 is missing
    only = fp8_training.report(rows[:2])
    assert only.found == "gpt2_xl trains 1.20x as fast in fp8 as in bf16." and not only.pictures


def test_losses_are_compared_where_both_were_validated() -> None:
    bf16, fp8 = plan().points("loss")
    long = result(validation=[[0, 11.0], [19, 7.0], [38, 6.0]], losses=[], tokens_per_s=1e5)
    for steps, expected in (([0, 19], "at step 19"), ([0, 20], "at step 0"), ([20], None), ([], None)):
        other = long | {"validation": [[step, 6.5] for step in steps]}
        found = fp8_training.report([row_of(bf16, long), row_of(fp8, other)])
        assert len(found.tables) == bool(expected)
        assert expected is None or expected in " ".join(found.notes)
        last = "6.5000 nats per token" if steps else "no validation"
        assert fp8_training.said(fp8, other).endswith(f"{last} after 381 steps")


def test_the_run_again_has_micro_batches_half_as_long(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for words, error in (
        (["--batch", "3"], "--batch is to be even, not 3"),
        (["data.batch_size=8"], "data.batch_size= is --batch here"),
    ):
        with pytest.raises(SystemExit):
            plan(*words)
        assert error in capsys.readouterr().err

    def started(words: list[str], place: object) -> None:
        assert [word for word in words if word.startswith("data.batch_size=")] == ["data.batch_size=8"]
        raise InterruptedError

    monkeypatch.setattr(fp8_training.scaling, "started", started)
    mine = plan()
    with pytest.raises(InterruptedError):
        fp8_training.trained(mine, mine.points("again")[0])


def test_losses_of_several_seeds_have_a_mean() -> None:
    rows = []
    for seed, worse in ((1337, -0.03), (7, 0.01), (8, 0.05)):
        for point in plan(f"seed={seed}", devices=2).points("loss"):
            nats = 4.5 + worse * (point["precision"] == "fp8")
            rows.append(row_of(point, result(validation=[[380, nats]], losses=[], tokens_per_s=1e5)))
        found, half, seeds = fp8_training.report(rows).found, "", len(rows) // 2
        if seeds == 2:
            half = " ± 0.2542"  # 12.71 * 0.0283 / sqrt(2)
        if seeds == 3:
            half = " ± 0.0993"  # 4.30 * 0.04 / sqrt(3)
        of = f" ({seeds} seeds)" if half else ""
        gap = {1: "-0.0300", 2: "-0.0100", 3: "+0.0100"}[seeds]
        assert found == f"the loss of gpt2_xl differs by {gap}{half} nats after 49.8 million tokens{of}."
    said = " ".join(fp8_training.report(rows).notes)
    assert (
        "3 seeds: the last loss in fp8 less that in bf16 is +0.0100 ± 0.0993 nats per token (95% by "
        "Student's t): -0.0300 with seed=1337, +0.0100 with seed=7, +0.0500 with seed=8." in said
    )
