"""Pictures of results/prefill_decode: the parts of a layer under both roofs, whole models."""

from __future__ import annotations

from typing import Any

from scripts.measure.report.figures import Line, canvas, label, name_ends, panel, panels_of, svg, wrapped
from scripts.measure.report.prefill_decode_report import balance, intensity, parts_of, setting, share
from scripts.measure.studies import Row
from scripts.plot import COLOURS

MARKERS = {"weights": "o", "standard": "s", "fused": "D", "pointwise": "^"}
KINDS = {"weights": "products with weights", "standard": "standard attention", "fused": "fused attention"}
KINDS |= {"pointwise": "the rest"}
COLOUR = dict(zip(MARKERS, COLOURS, strict=False))
NEAR = 1.35  # times: marks of a kind that are as close as this share a name


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
    figure, axes = panels_of(layers, f"Parts of a layer under their roofs, {widest}", len(shown))
    for at, (row,) in zip(axes, shown, strict=True):
        under(at, row)
    for kind, mark in MARKERS.items():
        axes[0].plot([], [], mark, color=COLOUR[kind], ms=6, label=KINDS[kind])
    figure.legend(fontsize=8, frameon=False, loc="outside lower center", ncols=len(KINDS))
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
    labels: list[tuple[float, float, list[str], str]] = []
    for name, part in parts.items():
        colour = COLOUR[part["kind"]]
        axes.plot(x[name], y[name], MARKERS[part["kind"]], color=colour, ms=6)
        near = (at for at in labels if at[3] == colour and close(at[0], x[name]) and close(at[1], y[name]))
        if beside := next(near, None):
            beside[2].append(name.removeprefix("attention, "))
        else:
            labels.append((x[name], y[name], [name.removeprefix("attention, ")], colour))
    axes.set_xlim(low, high)
    axes.set_ylim(min([*y.values(), top * low / meet]) / 2, top * 3)
    said = f"{top:,.3g} TFLOP/s, cuBLAS"
    axes.annotate(said, (meet, top), xytext=(-4, 2), textcoords="offset points", fontsize=8, ha="right")
    bandwidth = f"{ceilings['gb_per_s']:,.0f} GB/s, a copy"
    at = (low * meet) ** 0.5
    place = {"xytext": (-4, 6), "textcoords": "offset points", "fontsize": 8, "ha": "right"}
    axes.annotate(bandwidth, (at, top * at / meet), **place)
    axes.tick_params(labelsize=8)
    label(axes, setting(row), "FLOPs a byte that has to move", "TFLOP/s")
    name_ends(axes, [(at_x, at_y, ",\n".join(wrapped(of, 2)), colour) for at_x, at_y, of, colour in labels])


def close(one: float, other: float) -> bool:
    return max(one, other) <= NEAR * min(one, other)


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


def pictures(whole: list[Any], layers: list[Any]) -> dict[str, str]:
    """Those of a study's page, by name, of records of whole models and of layers."""
    found = {"": roofs(layers)} if layers else {}
    return found | ({"models": lengths(whole)} if whole else {})
