"""The picture of scripts/studies/long_range.py: accuracy seed by seed, and speed-up over the length."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from scripts.figures import Line, panel, panels_of, svg
from scripts.plot import COLOURS
from scripts.studies import Row
from scripts.studies.parts.long_range_report import NAMES, Group, speed_ups


def picture(rows: Sequence[Row], found: Sequence[Group]) -> str:
    tasks = list(dict.fromkeys(group.task for group in found))
    drawn = [row for row in rows if row["result"]["status"] == "ok"]
    figure, axes = panels_of(drawn, "Long-range classification", len(tasks) + 1)
    names = list(
        dict.fromkeys([*(group.name for group in found), *(r["point"]["implementation"] for r in drawn)])
    )
    for at, task in zip(axes, tasks, strict=False):
        dots(at, [group for group in found if group.task == task], names)
    lines = []
    for compiled in (False, True):
        for name, factors in speed_ups(rows, compiled).items():
            place = names.index(name) + 7 * compiled  # the same colour, another style
            lines.append(Line(name + (", compiled" if compiled else ""), factors, place))
    title = "A training step without padding, against standard attention run alike"
    panel(axes[-1], lines, title, "T, tokens", "times as fast as standard", log_y=False)
    axes[-1].axhline(1, color="grey", lw=0.8)
    return svg(figure, drawn)


def dots(axes: Any, of: Sequence[Group], names: Sequence[str]) -> None:
    """A dot per seed, the mean as a bar; what answers without reading the whole sequence as lines."""
    for i, group in enumerate(of):
        colour = COLOURS[names.index(group.name) % len(COLOURS)]
        n = len(group.rows)
        places = [i + 0.12 * (j - (n - 1) / 2) for j in range(n)]
        axes.plot(places, [100 * a for a in group.accuracies], "o", color=colour, ms=5, clip_on=False)
        axes.hlines(100 * group.mean, i - 0.3, i + 0.3, color=colour, lw=1.6)
    fact, point = of[0].fact, of[0].rows[0]["point"]
    lines = {"majority class": fact["majority"]}
    if point["task"] == "listops":
        lines["outermost operator alone"] = fact["first_token"]
    for label, share in lines.items():
        axes.axhline(100 * share, color="grey", lw=1, ls="--")
        axes.annotate(
            label, (len(of) - 0.5, 100 * share), fontsize=8, color="dimgrey", ha="right", va="bottom"
        )
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
