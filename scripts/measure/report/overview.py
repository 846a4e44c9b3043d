"""The README's picture, results/overview.svg: memory and tokens/s against the context, by attention."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from scripts.measure.report import attention_memory_report as memory
from scripts.measure.report import sweep_report
from scripts.measure.report.figures import Line, canvas, is_drawn, merged, panel, svg
from scripts.measure.rows import by_gpu
from scripts.measure.studies import Row

WHOLE = "step_memory"
SHOWN = ("naive", "triton", "sdpa_cudnn", "flash4", "nanoGPT")  # few: each line is to be read


def written(results: Path, redraw: bool = False) -> dict[Path, str]:
    """The picture of the first GPU that has rows of both, if its rows have changed (redraw: or not)."""
    peaks = by_gpu(results / WHOLE) or by_gpu(results / "attention_memory")
    steps, path = by_gpu(results / "seqlen_scaling"), results / "overview.svg"
    for gpu in sorted(peaks.keys() & steps.keys())[:1]:
        rows = drawn(peaks[gpu], steps[gpu])
        if redraw or not is_drawn(rows, path):
            return {path: picture(rows)}
    return {}


def drawn(peaks: list[Row], steps: list[Row]) -> list[Row]:
    """Of the rows of memory and of seqlen_scaling those that the picture shows."""
    peaks = [row for row in peaks if row["point"]["study"] == WHOLE or is_of_attention(row)]
    return [row for row in [*peaks, *sweep_report.points(steps)] if row["point"]["implementation"] in SHOWN]


def is_of_attention(row: Row) -> bool:
    return row["point"]["pass"] == "both" and memory.is_curve(row)


def picture(rows: list[Row]) -> str:
    """Peak memory, T^2 beside T, and tokens/s against the context, from the rows of `drawn`."""
    figure, ((left, right),) = canvas(rows, "GPT-2 124M by attention", 2)
    steps = sweep_report.points(rows)
    whole = [row for row in steps if row["point"]["study"] == WHOLE]
    steps = [row for row in steps if row["point"]["study"] != WHOLE]
    if whole:
        title, unit = "memory of a training step of one sequence", "MiB beside weights, gradients, optimizer"
        lines = sweep_report.drawn(sweep_report.lines(whole), sweep_report.beyond_state)
    else:  # until that is measured
        title, unit = "a layer's attention, forward and backward, one sequence", "peak memory, MiB"
        found = memory.series(rows, "both")
        lines = [Line(name, memory.measured(of), ends=memory.ending(of)) for name, of in found.items()]
    panel(left, list(map(growing, merged(lines))), title, "T, tokens of context", unit)
    said, hollow = next(iter(sweep_report.panels(steps))), "hollow: a smaller micro-batch, which fits"
    speeds = sweep_report.drawn(sweep_report.lines(steps), lambda result: result["tokens_per_s"])
    panel(right, speeds, f"training, {said}; {hollow}", "T, tokens of context", "tokens/s")
    return svg(figure, rows)


def growing(line: Line) -> Line:
    """Named with the exponent of its growth, over the upper half of T."""
    grows = memory.exponent(line.points)
    return line if grows is None else replace(line, name=f"{line.name}, as T^{grows:.2f}")
