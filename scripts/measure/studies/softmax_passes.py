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

from scripts.measure.rows import trusted
from scripts.measure.runner import Run, parser, run_study
from scripts.measure.studies import Point, Report, Table

STUDY = "softmax_passes"
GPU_S = 9
VALUES = 1 << 26
COLUMNS = (1 << 12, 1 << 15, 1 << 18, 1 << 22)
NAMES = ("three_passes", "two_passes", "torch")
BUDGET_S = 0.1
ALLOWED = 1e-5  # of the row's largest probability: exponentials are ex2.approx of rounded products

Row = dict[str, Any]


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
    """Tables of the rows; nothing is measured."""
    size = 4 * VALUES
    lines = [
        [
            "columns",
            "",
            "reads of the row",
            "L2, read and written",
            "DRAM, read",
            "ms",
            "GB/s read and written once",
        ]
    ]
    reads: dict[str, list[float]] = {}
    for row in sorted(
        rows, key=lambda row: (row["point"]["seq_len"], NAMES.index(row["point"]["implementation"]))
    ):
        point, result = row["point"], row["result"]
        if not trusted(result):
            continue
        counts = result.get("counters") or {}
        if counts:
            reads.setdefault(point["implementation"], []).append(result["reads"])
        of = (result.get("reads"), *(counts.get(key, 0) / size for key in ("l2_bytes", "dram_read_bytes")))
        cells = [f"{value:.2f}" if value else "" for value in of]
        speed = 2 * size / result["ms_median"] / 1e6
        name = point["implementation"].replace("_", " ")
        lines.append([f"{point['seq_len']:,}", name, *cells, f"{result['ms_median']:.3f}", f"{speed:,.0f}"])
    said = [f"{name.replace('_', ' ')} {min(of):.2f} to {max(of):.2f}" for name, of in reads.items()]
    found = f"Reads of the row that the kernels ask for: {'; '.join(said)}." if said else ""
    why = (
        "One pass would have to write probabilities before their maximum and sum are known. What is read "
        "again may come from a cache: the columns of the L2 and of DRAM tell how much does."
    )
    question = "How often does a softmax read its row, and what does a pass less save?"
    table = Table("256 MiB of scores in fp32; reads, in sizes of the matrix", lines)
    return Report(question, "python scripts/study.py softmax_passes", [table], {}, [why], found)


def main() -> None:
    run_study(STUDY, arguments(), measure, report)
