"""What the studies of training points share: their command, which is scripts/sweep.py's for an experiment,
and their report, whose tables and picture are those of report/sweep_report.py.

A row is that of scripts/sweep.py: `point` has implementation, compile, model, seq_len, micro_batch,
tokens_per_step; `result` has ms_median, tokens_per_s, mfu, peak_mib, memory_split, loss, kernels, kernels_ok,
and `beside`, with how many others the first step shared the GPU.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

from scripts.measure.report import sweep_bars, sweep_report
from scripts.measure.report.pages import page
from scripts.measure.rows import trusted
from scripts.measure.studies import Report, Row


def run(experiment: str, doc: str, small: Sequence[str], report: Callable[[list[Row]], Report]) -> None:
    """Sweep the experiment, and say what its rows mean. `small`: overrides with which a CPU can; `doc`: the
    help."""
    words = sys.argv[1:]
    if any(word in ("-h", "--help") for word in words):
        print(f"usage: python scripts/study.py {experiment} [OPTION] [KEY=VALUE ...]\n\n{doc.strip()}\n")
        print("Options and overrides are those of scripts/sweep.py: see its --help.")
        return
    import torch

    from scripts import sweep

    if torch.cuda.is_available():
        print(doc.strip(), flush=True)
    else:
        print(f"No GPU: a small version of {experiment}, {' '.join(small)}.", flush=True)
        words = [*small, *words]
    sys.argv = ["scripts/sweep.py", f"experiment={experiment}", *words]
    if rows := sweep.main():
        print(*(f"- {note}" for note in report(rows).notes), sep="\n")


def report(study: str, rows: list[Row], **facts: Any) -> Report:
    """With the tables and the picture of a sweep, and what there is no figure of."""
    rows = sweep_report.points(rows)
    facts = {"label": sweep_bars.label, "speed": speed, "doubts": sweep_report.doubts(rows)} | facts
    return page(study, sweep_report.tables(rows), {"": sweep_report.picture(rows)}, **facts)


def panels(rows: list[Row]) -> dict[str, dict[tuple[str, bool], Row]]:
    """Title -> (implementation, compiled) -> the row with a time, for studies at one length."""
    found = {}
    for title, mine in sweep_report.panels(sweep_report.points(rows)).items():
        timed = [row for row in sweep_bars.best(mine) if row["result"]["status"] == "ok"]
        found[title] = {
            (row["point"]["implementation"], bool(row["point"].get("compile"))): row
            for row in timed
            if trusted(row["result"])
        }
    return found


def fused(found: dict[tuple[str, bool], Row]) -> list[Row]:
    """Those of fused attention, by report/sweep_bars.py's kinds, the slowest first."""
    return sorted((found[key] for key in found if sweep_bars.kind(key[0]) in ("ours", "library")), key=speed)


def fastest(found: dict[tuple[str, bool], Row]) -> Row | None:
    """Of fused attention."""
    return (fused(found) or [None])[-1]


def speed(row: Row) -> float:
    return row["result"]["tokens_per_s"]
