"""For the tests of studies: rows as an H200 might give them, and a small study of scripts/sweep.py."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from scripts.measure import sweep_points
from scripts.measure.claims import Results
from scripts.measure.rows import key_of
from scripts.measure.runner import Run
from scripts.measure.studies import Row

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


def row_of(point: dict[str, Any], result: dict[str, Any], run_id: str = "r", **machine: Any) -> Row:
    gpu = {"gpu": "NVIDIA H200", "date": "2026-11-21", "torch": "2.11.0", "triton": "3.6.0", "commit": "abc"}
    of = {"run_id": run_id, "machine": gpu | {"command": "x"} | machine}
    return {"schema": 1, "key": key_of(point), "point": point, "result": result} | of


def results(folder: Path, **studies: Iterable[Row]) -> Results:
    """Results with these rows of an H200 and no others of the study."""
    for study, rows in studies.items():
        (folder / study).mkdir(parents=True, exist_ok=True)
        (folder / study / "h200.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return Results(folder)


def run_of(out: Path, study: str = "probe", device: str | None = None, **flags: bool) -> Run:
    """A run of a study whose rows go there."""
    options = {"fresh": False, "missing": False, "plot_only": False} | flags
    run = Run(study, argparse.Namespace(out=out, **options))
    run.device = device or run.device
    return run
