"""What a run says while it works."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from model.training import callbacks
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
