"""Pictures of results/roofline: the stages under their roofs, and the bytes they move against the model."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from scripts.measure.instruments.ladder import STAGES
from scripts.measure.report.colours import colour_of
from scripts.measure.report.figures import label, machines, subplots, svg
from scripts.measure.report.pages import page
from scripts.measure.report.roofline_report import (
    DRAM,
    Row,
    bytes_of,
    ceilings,
    facts,
    grids,
    groups,
    length,
    moved,
    title,
)
from scripts.measure.studies import Report

COLOUR = {name: colour_of(name) for name in STAGES}
MARKER = dict(zip(STAGES, "osvD^", strict=True))  # told apart in grey, and where one hides another
ROOFS = {"tensor_cublas": "tensor cores, cuBLAS", "tensor_mma": "tensor cores, mma.sync", "fma": "FMA, fp32"}


def pictures(rows: list[Row]) -> dict[str, str]:
    """For each group of rows a roofline, and bytes against the model: SVGs as text, by name."""
    found, roofs = {}, ceilings(rows)
    for group, mine in groups(rows).items():
        timed = [row for row in mine if row["result"]["status"] == "ok"]
        if not timed:
            continue
        machine = machines(timed)
        name = f"{'causal' if group[3] else 'full'}_d{group[2]}"
        figure, axes = subplots(1, 1, (8.6, 5.4))
        roofline(axes[0, 0], timed, roofs)
        figure.suptitle(f"The CUDA ladder under its roofs, forward: {title(group)}\n{machine}", fontsize=10)
        found[f"{name}_roofline"] = svg(figure, rows)
        figure, ((left, right),) = subplots(2, 1, (11, 4.6))
        panel(left, timed, "DRAM, read and written", *DRAM)
        panel(right, timed, "L2 to and from the multiprocessors", "l2_bytes")
        caption = (
            f"Bytes that a forward moves, {title(group)}: {machine}\nlines: the model; marks: counted by ncu"
        )
        figure.suptitle(caption, fontsize=10)
        found[f"{name}_bytes"] = svg(figure, rows)
    return found


def by_stage(rows: list[Row]) -> Iterator[tuple[str, list[Row]]]:
    for stage in STAGES:
        if mine := [row for row in rows if row["point"]["implementation"] == stage]:
            yield stage, mine


def roofline(axes: Any, rows: list[Row], roofs: dict[str, Row]) -> None:
    """TFLOP/s over FLOPs a byte of DRAM, a line a stage, from the shortest T to the longest."""
    spots: list[Any] = []
    style: dict[str, Any]
    for stage, mine in by_stage(rows):
        flops = [row["result"]["tflops"] * row["result"]["ms_median"] * 1e9 for row in mine]
        x = [f / moved(row["result"], *DRAM) for f, row in zip(flops, mine, strict=True)]
        y = [row["result"]["tflops"] for row in mine]
        axes.plot(x, y, "-", color=COLOUR[stage], lw=1.6)
        for at, of, row in zip(x, y, mine, strict=True):
            counted = bytes_of(row["result"], *DRAM)[0] is not None
            face = COLOUR[stage] if counted else "white"
            axes.plot(at, of, MARKER[stage], color=COLOUR[stage], mfc=face, ms=5)
        spots.append((x, y, stage, mine))
    axes.set_xscale("log")
    axes.set_yscale("log")
    low, high = axes.get_xlim()
    low, high = low / 4, high * 6  # room for the names
    bottom = axes.get_ylim()[0] / 2
    flat = {name: roofs[name]["value"] for name in ROOFS if name in roofs}
    top = max([*flat.values(), *(max(y) for _, y, _, _ in spots)])
    if "dram_read" in roofs:
        slope = roofs["dram_read"]["value"] / 1e3  # TFLOP/s at one FLOP a byte
        axes.plot([low, top / slope], [low * slope, top], color="0.35", lw=1)
        said, at = f"DRAM, {slope:.2f} TB/s", (top * 0.6 / slope, top * 0.6)
        axes.annotate(said, at, xytext=(-6, 2), textcoords="offset points", fontsize=8, ha="right")
    for name, value in flat.items():
        axes.plot([value / slope if "dram_read" in roofs else low, high], [value] * 2, color="0.35", lw=1)
        said = f"{ROOFS[name]}, {value:.0f}"
        below = name == "tensor_mma"  # close under the other
        style = {
            "textcoords": "offset points",
            "fontsize": 8,
            "ha": "right",
            "va": "top" if below else "bottom",
        }
        axes.annotate(said, (high, value), xytext=(-2, -2 if below else 2), **style)
    for x, y, stage, mine in spots:
        ends = (length(mine[0]["point"]["seq_len"]), length(mine[-1]["point"]["seq_len"]))
        name = f"{stage} {ends[1]}" if len(mine) > 1 else f"{stage} {ends[0]}"
        style = {"textcoords": "offset points", "color": COLOUR[stage], "fontsize": 8}
        back = len(x) > 1 and x[-1] < x[-2]  # the line comes from the right
        place = {"xytext": (-7 if back else 7, 0), "ha": "right" if back else "left", "va": "center"}
        style["bbox"] = {"facecolor": "white", "edgecolor": "none", "pad": 0.5, "alpha": 0.8}
        axes.annotate(name, (x[-1], y[-1]), **place, **style)
        if len(mine) > 1:
            axes.annotate(ends[0], (x[0], y[0]), xytext=(0, -11), ha="center", **style)
    axes.set_xlim(low, high)
    axes.set_ylim(bottom, top * 2)
    said = "full marks: bytes counted by ncu; hollow: the model's"
    label(axes, said, "FLOPs a byte of DRAM", "TFLOP/s")


def panel(axes: Any, rows: list[Row], caption: str, *fields: str) -> None:
    """GB over T: a line a stage by the model, a mark where it was counted."""
    labels: list[tuple[float, str, str]] = []
    for stage, mine in by_stage(rows):
        tokens = [row["point"]["seq_len"] for row in mine]
        model = [bytes_of(row["result"], *fields)[1] / 1e9 for row in mine]
        axes.plot(tokens, model, "-", color=COLOUR[stage], lw=1.6)
        seen = [(t, bytes_of(row["result"], *fields)[0]) for t, row in zip(tokens, mine, strict=True)]
        seen = [(t, value / 1e9) for t, value in seen if value is not None]
        x, y = [t for t, _ in seen], [value for _, value in seen]
        axes.plot(x, y, MARKER[stage], color=COLOUR[stage], mfc="none", ms=7)
        labels.append((model[-1], stage, COLOUR[stage]))
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.xaxis.set_major_formatter(lambda tokens, _: length(tokens))
    spread(axes, labels)
    label(axes, caption, "T, tokens", "GB")


def spread(axes: Any, labels: list[tuple[float, str, str]]) -> None:
    """Names right of the panel at the heights of their lines' ends, moved apart where these are close."""
    low, high = (math.log10(limit) for limit in axes.get_ylim())
    height, last = 0.06, -math.inf
    for value, name, colour in sorted(labels):
        place = (math.log10(value) - low) / (high - low) if value > 0 else 0.0
        last = max(place, last + height)
        axes.annotate(name, (1.02, last), xycoords="axes fraction", color=colour, fontsize=8, va="center")


def report(rows: list[Row]) -> Report:
    """For results/README.md, as the studies have one."""
    return page("roofline", grids(rows), pictures(rows), **facts(rows))
