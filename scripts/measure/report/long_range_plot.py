"""The picture of studies/long_range.py: accuracy seed by seed, and speed-up over the length."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from scripts.measure.report.colours import colour_of
from scripts.measure.report.figures import Line, canvas, panel, svg
from scripts.measure.report.long_range_accuracy import Group
from scripts.measure.report.long_range_report import NAMES, speed_ups
from scripts.measure.studies import Row


def picture(rows: Sequence[Row], found: Sequence[Group]) -> str:
    tasks = list(dict.fromkeys(group.task for group in found))
    drawn = [row for row in rows if row["result"]["status"] == "ok"]
    figure, grid = canvas(drawn, "Long-range classification", len(tasks), 2)
    below = grid[1, 0].get_gridspec()[1, :]
    for spare in grid[1]:
        spare.remove()
    speed = figure.add_subplot(below)
    for at, task in zip(grid[0], tasks, strict=True):
        dots(at, [group for group in found if group.task == task])
    lines = []
    for compiled in (False, True):
        for name, factors in speed_ups(rows, compiled).items():
            name += ", compiled" * compiled
            lines.append(Line(name, factors, style="-" if compiled else "--"))
    title = "A training step without padding, against standard attention run alike"
    panel(speed, lines, title, "T, tokens", "times as fast as standard", log_y=False)
    speed.axhline(1, color="grey", lw=0.8)
    return svg(figure, drawn)


def dots(axes: Any, of: Sequence[Group]) -> None:
    """A dot per seed, the mean as a bar; what answers without reading the whole sequence as lines."""
    for i, group in enumerate(of):
        colour = colour_of(group.name)
        n = len(group.rows)
        places = [i + 0.12 * (j - (n - 1) / 2) for j in range(n)]
        axes.plot(places, [100 * a for a in group.accuracies], "o", color=colour, ms=5, clip_on=False)
        axes.hlines(100 * group.mean, i - 0.3, i + 0.3, color=colour, lw=1.6)
    fact, point = of[0].fact, of[0].rows[0]["point"]
    lines = {"majority\nclass": fact["majority"]}
    if point["task"] == "listops":
        lines["outermost\noperator alone"] = fact["first_token"]
    for label, share in lines.items():
        axes.axhline(100 * share, color="grey", lw=1, ls="--")
        beside = {"transform": axes.get_yaxis_transform(), "fontsize": 8, "color": "dimgrey"}
        axes.text(1.02, 100 * share, label, va="center", **beside)
    axes.set_xlim(-0.5, len(of) - 0.5)
    axes.set_xticks(range(len(of)), [group.name for group in of], fontsize=8)
    axes.tick_params(axis="y", labelsize=8)
    low = min(fact["majority"], *(min(group.accuracies) for group in of))
    axes.set_ylim(max(0, 100 * low - 8), None)
    axes.set_ylabel("test accuracy, %", fontsize=9)
    axes.set_title(
        f"{NAMES[point['task']]}, T = {point['seq_len']:,}: a dot a seed, a bar their mean", fontsize=9
    )
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(alpha=0.25, axis="y")
