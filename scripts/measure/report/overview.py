"""The README's picture, results/overview.svg: memory and tokens/s against the context, by attention."""

from __future__ import annotations

from pathlib import Path

from scripts.measure.report import attention_memory_report as memory
from scripts.measure.report import sweep_report
from scripts.measure.report.figures import Line, canvas, is_drawn, panel, svg
from scripts.measure.rows import by_gpu
from scripts.measure.studies import Row

SHOWN = ("naive", "triton", "sdpa_cudnn", "flash4", "nanoGPT")  # few: each line is to be read


def written(results: Path, redraw: bool = False) -> dict[Path, str]:
    """The picture of the first GPU that has rows of both, if its rows have changed (redraw: or not)."""
    peaks, steps = (by_gpu(results / study) for study in ("attention_memory", "seqlen_scaling"))
    path = results / "overview.svg"
    for gpu in sorted(peaks.keys() & steps.keys())[:1]:
        rows = drawn(peaks[gpu], steps[gpu])
        if redraw or not is_drawn(rows, path):
            return {path: picture(rows)}
    return {}


def drawn(peaks: list[Row], steps: list[Row]) -> list[Row]:
    """Of the rows of attention_memory and seqlen_scaling those that the picture shows."""
    peaks = [row for row in peaks if row["point"]["pass"] == "both" and memory.is_curve(row)]
    return [row for row in [*peaks, *sweep_report.points(steps)] if row["point"]["implementation"] in SHOWN]


def picture(rows: list[Row]) -> str:
    """Peak memory, N^2 beside N, and tokens/s against the context, from the rows of `drawn`."""
    figure, ((left, right),) = canvas(rows, "GPT-2 124M by attention", 2)
    lines = []
    for name, of in memory.series(rows, "both").items():
        points = memory.measured(of)
        grows = memory.exponent(points)
        words = name if grows is None else f"{name}, as T^{grows:.1f}"
        lines.append(Line(words, points, ends=memory.ending(of)))
    title = "a layer's attention, forward and backward, one sequence"
    panel(left, lines, title, "T, tokens of context", "peak memory, MiB")
    steps = sweep_report.points(rows)
    said, hollow = next(iter(sweep_report.panels(steps))), "hollow: a smaller micro-batch, which fits"
    speeds = sweep_report.drawn(sweep_report.lines(steps), lambda result: result["tokens_per_s"])
    panel(right, speeds, f"training, {said}; {hollow}", "T, tokens of context", "tokens/s")
    return svg(figure, rows)
