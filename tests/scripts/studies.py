"""A small study for the tests of scripts/sweep.py and of its parts."""

from __future__ import annotations

import argparse
from pathlib import Path

from scripts.measure import sweep_points
from scripts.measure.runner import Run

TINY = ["experiment=seqlen_scaling_tiny", "data=synthetic", "data.corpus.vocab_size=64", "model.n_embd=32"]
TINY += ["data.corpus.n_tokens=4096", "model.n_layer=1", "tokens_per_step=128", "sweep.steps=3"]
GRID = ["sweep.grid.attention=[naive,sdpa]", "sweep.grid.seq_len=[16,32]"]


def study(*overrides: str, tiny: list[str] = TINY) -> sweep_points.Study:
    return sweep_points.study_of([*tiny, *overrides])


def points_of(study: sweep_points.Study, device: str = "cpu") -> list[sweep_points.Point]:
    return [sweep_points.point_of(study, task, device) for task in sweep_points.tasks(study)]


def fake_result(**more: object) -> dict[str, object]:
    result = {"status": "ok", "reason": None, "ms_median": 10.0, "tokens_per_s": 1000.0, "peak_mib": 50.0}
    result |= {"kernels_ok": True, "learns": True, "peak_of": "allocated on the GPU", "mfu": None}
    return result | more


def run_of(out: Path, study: str = "probe", device: str | None = None, **flags: bool) -> Run:
    """A run of a study whose rows go there."""
    options = {"fresh": False, "missing": False, "plot_only": False} | flags
    run = Run(study, argparse.Namespace(out=out, **options))
    run.device = device or run.device
    return run
