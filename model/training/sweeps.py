"""The runs of `python train.py -m ...`: their names, and the table at the end."""

from __future__ import annotations

import csv
import gc
import re
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

LONGEST = 80  # characters that overrides may take of a folder's name, of which file systems allow 255


@dataclass
class Job:
    """A run of a sweep: the overrides that set it apart, its folder once it has one, done, failed or
    stopped."""

    overrides: Sequence[str]
    name: str  # where name= gives none
    suffix: str
    run: Path | None = None
    status: str = "failed"

    def results(self) -> tuple[str, str]:
        """The validation loss at the last step and the median of tokens/s, of a run that is done."""
        if self.run is None or self.status != "done":
            return "-", "-"
        with open(self.run / "metrics.csv", newline="", encoding="utf-8") as file:
            rows = list(csv.DictReader(file))
        last = max((int(row["step"]) for row in rows), default=0)  # an older loss is not the run's result
        losses = [float(row["val/loss"]) for row in rows if row.get("val/loss") and int(row["step"]) == last]
        rates = [float(row["perf/tokens_per_s"]) for row in rows if row.get("perf/tokens_per_s")]
        return f"{losses[-1]:.4f}" if losses else "-", f"{statistics.median(rates):,.0f}" if rates else "-"


@dataclass
class Sweep:
    jobs: list[Job] = field(default_factory=list)

    @property
    def failed(self) -> bool:
        return any(job.status == "failed" for job in self.jobs)

    @contextmanager
    def job(self, overrides: Sequence[str]) -> Iterator[Job]:
        """The next job; where it ends with exit code 1, the others still have their turn."""
        name = self.jobs[0].name if self.jobs else time.strftime("%Y%m%d-%H%M%S")
        job = Job(overrides, name, suffix(len(self.jobs), overrides))
        self.jobs.append(job)
        if len(self.jobs) > 1:
            gc.collect()  # the job before, whose trainer and model refer to each other, gives its memory back
        try:
            yield job
        except SystemExit as stop:
            if stop.code != 1:  # a signal is for the whole sweep
                job.status = "stopped"
                raise
            print(f"job {len(self.jobs) - 1} failed: {' '.join(overrides)}", file=sys.stderr)
        else:
            job.status = "done"

    def table(self) -> str:
        """A line a job: folder, overrides, final validation loss, tokens/s, status."""
        rows = [("run", "overrides", "val loss", "tokens/s", "status")]
        for job in self.jobs:
            name = job.run.name if job.run and job.run.is_dir() else "-"  # what was refused leaves none
            rows.append((name, " ".join(job.overrides), *job.results(), job.status))
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        return "\n".join(
            "  ".join(
                f"{cell:{side}{width}}" for cell, side, width in zip(row, "<<>><", widths, strict=True)
            ).rstrip()
            for row in rows
        )


def suffix(number: int, overrides: Sequence[str]) -> str:
    """How the name of a job's folder ends, -2-lr-0.001-attention-naive say: the number keeps those apart that
    differ only in what is left out here."""
    pairs = (override.lstrip("+~").partition("=") for override in overrides)
    text = "-".join(f"{key.rpartition('.')[2]}-{value}" for key, _, value in pairs)
    return f"-{number}-{re.sub(r'[^A-Za-z0-9._]+', '-', text)[:LONGEST]}".rstrip("-.")
