"""How often does a softmax read its row? Three passes, two (online softmax), and what each costs (claim 39):

    python scripts/study.py softmax_passes

Rows of scores in fp32, 256 MiB in all, of 4k to 4M columns: between passes the short ones stay in a
multiprocessor's L1, the middle ones in the L2, the long ones do not. On an H200 9 seconds, most of them
Nsight Compute's; without a GPU there is nothing to measure.

A row of results/softmax_passes/<gpu>.jsonl has the time (device events, L2 flushed), max_error against fp64
relative to the row's largest probability, error_ratio of it to 1e-5, and of our two kernels by ncu:
load_bytes (asked of the L1), l2_bytes, dram_read_bytes. `reads` is load_bytes over the bytes of the rows.
torch.softmax is timed beside them.
"""

from __future__ import annotations

import argparse
from typing import Any

from scripts.measure.report.pages import page
from scripts.measure.report.tables import Record, listed, records, where
from scripts.measure.runner import Run, parser, run_study
from scripts.measure.studies import Point, Report, Row

STUDY = "softmax_passes"
GPU_S = 9
VALUES = 1 << 26
COLUMNS = (1 << 12, 1 << 15, 1 << 18, 1 << 22)
NAMES = ("three_passes", "two_passes", "torch")
BUDGET_S = 0.1
ALLOWED = 1e-5  # of the row's largest probability: exponentials are ex2.approx of rounded products


def arguments(given: list[str] | None = None) -> argparse.Namespace:
    return parser(__doc__, STUDY).parse_args(given)


def points() -> list[Point]:
    """Those of a shape one after the other."""
    of = {"study": STUDY, "pass": "softmax", "dtype": "float32"}
    shapes = [{"seq_len": columns, "rows": VALUES // columns} for columns in COLUMNS]
    return [of | shape | {"implementation": name} for shape in shapes for name in NAMES]


def measure(options: argparse.Namespace, run: Run) -> None:
    """The contestants of a shape in turns; the counters of all shapes from one program, before."""
    left = run.left(points(), "about 9 s")
    if not left:
        return
    if run.device != "cuda":
        raise SystemExit("softmax_passes measures CUDA kernels, and torch sees no CUDA GPU here.")
    counts = counters([point for point in left if point["implementation"] != "torch"])
    for columns in dict.fromkeys(point["seq_len"] for point in left):
        of_shape = [point for point in left if point["seq_len"] == columns]
        run.group(
            of_shape, lambda mine: timed(mine, counts), lambda point, _: f"{point['seq_len']:,} columns"
        )


def counters(of: list[Point]) -> dict[str, dict[str, Any]]:
    """By the point as text; where there are no counters, why."""
    from scripts.measure.instruments.counters import NoCounters
    from scripts.measure.instruments.softmax import counted

    try:
        found: list[dict[str, Any]] = [{"counters": counts} for counts in counted(of)]
    except (NoCounters, OSError) as error:
        found = [{"counters": None, "counters_from": str(error)}] * len(of)
    return {str(point): counts for point, counts in zip(of, found, strict=True)}


def timed(of: list[Point], counts: dict[str, dict[str, Any]]) -> list[dict[str, Any]]:
    import torch

    from scripts.measure.instruments.softmax import scores, softmax
    from scripts.measure.instruments.timing import Clock, Contestant, probe, spread

    x = scores(of[0])
    out = torch.empty_like(x)
    some = slice(None, max(1, (1 << 22) // x.shape[1]))
    exact = torch.softmax(x[some].double(), -1)
    errors, contestants = [], []
    for point in of:
        name = point["implementation"]
        softmax(name, x, out.fill_(torch.nan))
        worst = ((out[some] - exact).abs().amax(-1) / exact.amax(-1)).max()
        errors.append(float(worst) if bool(out.isfinite().all()) else float("inf"))
        contestants.append(Contestant(name, lambda _, name=name: softmax(name, x, out)))
    times = Clock(BUDGET_S).alternate(contestants, [probe(each) for each in contestants])
    results = []
    for point, error, took in zip(of, errors, times, strict=True):
        found = {"status": "ok", "max_error": error, "error_ratio": error / ALLOWED}
        found |= spread(took) | counts.get(str(point), {})
        if found.get("counters"):
            found["reads"] = found["counters"]["load_bytes"] / (4 * x.numel())
        results.append(found)
    return results


def report(rows: list[Row]) -> Report:
    """The table of the rows; nothing is measured."""
    size = 4 * VALUES
    found = sorted(
        where(records(rows), trusted=True), key=lambda r: (r.seq_len, NAMES.index(r.implementation))
    )
    reads: dict[str, list[float]] = {}

    def line(r: Record) -> str:
        name, counts = r.implementation.replace("_", " "), r.get("counters") or {}
        if counts:
            reads.setdefault(name, []).append(r.reads)
        of = (r.get("reads"), *(counts.get(key, 0) / size for key in ("l2_bytes", "dram_read_bytes")))
        cells = "|".join(f"{value:.2f}" if value else "" for value in of)
        return f"{r.seq_len:,}|{name}|{cells}|{r.ms_median:.3f}|{2 * size / r.ms_median / 1e6:,.0f}"

    head = "columns||reads of the row|L2, read and written|DRAM, read|ms|GB/s read and written once"
    table = listed("256 MiB of scores in fp32; reads, as multiples of the matrix's size", head, found, line)
    return page(STUDY, [table], reads=reads)


def main() -> None:
    run_study(STUDY, arguments(), measure, report)
