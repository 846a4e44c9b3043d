"""What a run says while it works."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from model.training import callbacks, runtime
from model.training.callbacks import Progress


def test_a_long_validation_says_how_far_it_is(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Batches of 4 s: a line after the third, and each 10 s from then on; a short one says its loss alone."""
    now = [100.0]
    monkeypatch.setattr(callbacks.time, "perf_counter", lambda: now[0])
    facts = {"global_step": 20, "is_global_zero": True, "num_val_batches": [8]}
    trainer = SimpleNamespace(**facts, callback_metrics={"val/loss": 2.5})
    for seconds in (4.0, 1.0):
        progress = Progress()
        progress.on_validation_start(trainer, None)
        for batch in range(8):
            now[0] += seconds
            progress.on_validation_batch_end(trainer, None, None, None, batch)
        progress.on_validation_end(trainer, None)
    assert capsys.readouterr().out.splitlines() == [
        "step 20: validation, 3/8 batches, 20 s left",
        "step 20: validation, 6/8 batches, 8 s left",
        "step 20: validation loss 2.5000",
        "step 20: validation loss 2.5000",
    ]


def test_the_first_step_of_a_compiled_run_says_how_long_it_took(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also where it goes on from a checkpoint; not compiled, nothing is said."""
    now = [10.0]
    monkeypatch.setattr(callbacks.time, "perf_counter", lambda: now[0])
    for compiled in (True, False):
        facts = {"global_step": 40, "max_steps": 1000, "is_global_zero": True, "callbacks": []}
        trainer, lit = (
            SimpleNamespace(**facts),
            SimpleNamespace(compile_net=compiled, cuda_graphs=not compiled),
        )
        progress = Progress()
        progress.on_train_start(trainer, lit)
        for _ in range(2):
            now[0] += 12.34
            trainer.global_step += 1
            progress.on_train_batch_end(trainer, lit)
    assert capsys.readouterr().out.splitlines() == ["the first step took 12.3 s, including compilation"]


def test_the_estimate_leaves_the_first_step_out(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of 30 s, then steps of 2 s, begun anew and from a checkpoint."""
    now = [0.0]
    monkeypatch.setattr(callbacks.time, "perf_counter", lambda: now[0])
    for begun in (0, 100):
        facts = {"global_step": begun, "max_steps": begun + 40, "is_global_zero": True, "callbacks": []}
        trainer = SimpleNamespace(**facts)
        lit = SimpleNamespace(compile_net=True, cuda_graphs=False)
        progress = Progress(every=1)
        progress.on_train_start(trainer, lit)
        for seconds in (30.0, 2.0, 2.0):
            now[0] += seconds
            trainer.global_step += 1
            progress.on_train_batch_end(trainer, lit)
        lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("step")]
        assert [line.split()[-3] for line in lines] == ["1170", "76", "74"]


def test_what_would_be_faster_is_said_on_a_gpu_in_16_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    for triton, cublaslt in ((True, True), (False, True), (True, False)):
        monkeypatch.setattr("model.loss.HAS_TRITON", triton)
        monkeypatch.setattr("ops.cublaslt.available", lambda cublaslt=cublaslt: cublaslt)
        said = runtime.slower("cuda", "bf16-mixed")
        assert [("Triton" in line, "cublasLt" in line) for line in said] == [(True, False)] * (not triton) + [
            (False, True)
        ] * (not cublaslt)
        assert runtime.slower("cuda", "32-true") == runtime.slower("cpu", "bf16-mixed") == []
