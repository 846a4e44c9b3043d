"""Pictures of results/prefill_decode: the the parts of a layer under both roofs, whole models."""

from __future__ import annotations

from typing import Any

from scripts.figures import Line, canvas, name_ends, panel, svg
from scripts.plot import COLOURS
from scripts.studies import Row
from scripts.studies.parts.prefill_decode_report import balance, intensity, parts_of, setting, share

MARKERS = {"weights": "o", "standard": "s", "fused": "D", "pointwise": "^"}


def roofs(layers: list[Row]) -> str:
    """Of the widest model: the longest prefill, and decode of the fewest and of the most rows."""
    widest = max(layers, key=lambda row: row["point"]["heads"] * row["point"]["head_dim"])["point"]["model"]
    mine = [row for row in layers if row["point"]["model"] == widest]
    prefill = [row for row in mine if row["point"]["pass"] == "prefill"]
    decode = sorted(
        (row for row in mine if row["point"]["pass"] == "decode"), key=lambda row: row["point"]["batch"]
    )
    shown = [
        each for each in ([max(prefill, key=tokens)] if prefill else [], decode[:1], decode[1:][-1:]) if each
    ]
    figure, axes = canvas(layers, f"Parts of a layer under their roofs, {widest}", len(shown))
    for at, (row,) in enumerate(shown):
        under(axes[0, at], row)
    return svg(figure, layers)


def tokens(row: Row) -> int:
    return row["point"]["seq_len"]


def under(axes: Any, row: Row) -> None:
    """One mark a part, between the roofs that were measured in the same process."""
    ceilings, parts = row["result"]["ceilings"], parts_of(row)
    x = {name: intensity(part) for name, part in parts.items()}
    y = {name: part["tflops"] for name, part in parts.items()}
    meet, top = balance(ceilings), ceilings["tflops"]
    low, high = min([*x.values(), meet]) / 3, max([*x.values(), meet]) * 3
    axes.plot([low, meet, high], [top * low / meet, top, top], color="0.35", lw=1.2)
    axes.set_xscale("log")
    axes.set_yscale("log")
    labels = []
    of_kind = dict.fromkeys(MARKERS, 0)  # colours start anew: kinds differ in their marks
    for name, part in parts.items():
        colour = COLOURS[of_kind[part["kind"]] % len(COLOURS)]
        of_kind[part["kind"]] += 1
        axes.plot(x[name], y[name], MARKERS[part["kind"]], color=colour, ms=6)
        labels.append((x[name], y[name], name, colour))
    axes.set_xlim(low, high)
    axes.set_ylim(min([*y.values(), top * low / meet]) / 2, top * 2)
    said = f"{top:,.3g} TFLOP/s, cuBLAS"
    axes.annotate(said, (high, top), xytext=(-3, 3), textcoords="offset points", fontsize=8, ha="right")
    bandwidth = f"{ceilings['gb_per_s']:,.0f} GB/s, a copy"
    at = (low * meet) ** 0.5
    place = {"xytext": (-4, 6), "textcoords": "offset points", "fontsize": 8, "ha": "right"}
    axes.annotate(bandwidth, (at, top * at / meet), **place)
    axes.set_title(setting(row), fontsize=9)
    axes.set_xlabel(
        "FLOPs a byte that has to move  (o weights, square standard, diamond fused, triangle others)",
        fontsize=8,
    )
    axes.set_ylabel("TFLOP/s", fontsize=9)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(alpha=0.25)
    name_ends(axes, labels)


def lengths(whole: list[Row]) -> str:
    """Shares of cuBLAS's rate by the tokens of a prefill, and of a copy's by the rows decoded."""
    figure, axes = canvas(whole, "Whole models: compute in prefill, bandwidth in decode", 2)
    names = list(dict.fromkeys(row["point"]["model"] for row in whole))
    sides = (("prefill", "seq_len", 0), ("decode", "batch", 1))
    said = (
        ("Prefill of one row", "tokens", "% of the compute of a cuBLAS product"),
        ("Decode", "rows at once", "% of the bandwidth of a copy (weights and cache)"),
    )
    for at, (phase, key, which) in enumerate(sides):
        lines = []
        for place, name in enumerate(names):
            mine = [row for row in whole if row["point"]["model"] == name and row["point"]["pass"] == phase]
            points = {
                float(row["point"][key]): 100 * share(row["result"], row["result"]["ceilings"])[which]
                for row in sorted(mine, key=lambda row: row["point"][key])
            }
            lines.append(Line(name, points, place))
        panel(axes[0, at], lines, *said[at], log_y=False)
    return svg(figure, whole)
