"""Lines of measurements, drawn alike in every study: logarithmic axes, names at the ends of the lines, units,
the GPU and the date; told apart by colour-blind readers and in print."""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from scripts.plot import COLOURS

STYLES = ("-", "--", ":", "-.")

Row = dict[str, Any]
_drawing = True


@contextlib.contextmanager
def undrawn() -> Iterator[None]:
    """While this lasts, `svg` gives no more than which rows a picture shows: enough, and fast, to see whether
    it has to be drawn."""
    global _drawing
    _drawing = False
    try:
        yield
    finally:
        _drawing = True


def drawing() -> bool:
    return _drawing


def digest(rows: Sequence[Row]) -> str:
    """Of what is drawn, which the picture carries: drawn again only where it differs."""
    drawn = [[row["key"], row["result"]] for row in rows]
    return hashlib.sha256(json.dumps(drawn, sort_keys=True).encode()).hexdigest()[:16]


def is_drawn(rows: Sequence[Row], path: Path) -> bool:
    return path.is_file() and f"rows {digest(rows)}" in path.read_text(encoding="utf-8")


@dataclass(frozen=True)
class Line:
    """`points`: x -> y, for x in order; `ends`: what stopped it there ("out of memory at 64k"), marked x;
    `place`: its colour and style, for the same name in several panels."""

    name: str
    points: dict[float, float]
    place: int
    ends: str = ""


def canvas(
    rows: Sequence[Row], title: str, columns: int, lines: int = 1, width: float = 6.3
) -> tuple[Any, Any]:
    """(figure, (lines, columns) array of axes) under the title, the GPUs and the date of the newest row."""
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams["svg.hashsalt"] = "tilegpt"  # the same figures, the same file
    from matplotlib import pyplot as plt

    size = (width * columns, 4.3 * lines + 0.5)
    figure, axes = plt.subplots(lines, columns, figsize=size, layout="constrained", squeeze=False)
    gpus = dict.fromkeys(row["machine"]["gpu"] or "CPU" for row in rows)
    figure.suptitle(f"{title}: {', '.join(gpus)}, {max(row['machine']['date'] for row in rows)}", fontsize=11)
    return figure, axes


def panels_of(rows: Sequence[Row], title: str, number: int) -> tuple[Any, list[Any]]:
    """(figure, axes), two panels a line: of three, nothing could be read on a page."""
    columns = min(number, 2)
    figure, axes = canvas(rows, title, columns, -(-number // columns))
    for spare in axes.flat[number:]:
        spare.remove()
    return figure, list(axes.flat[:number])


def merged(lines: Sequence[Line], same: float = 0.03) -> list[Line]:
    """Lines that lie on each other, within this share at every x, as one with their names."""
    found: list[tuple[Line, list[str]]] = []
    for line in lines:
        for other, names in found:
            alike = line.points.keys() == other.points.keys() and line.ends == other.ends
            if alike and all(abs(y - other.points[x]) <= same * abs(y) for x, y in line.points.items()):
                names.append(line.name)
                break
        else:
            found.append((line, [line.name]))
    return [replace(line, name=",\n".join(wrapped(names))) for line, names in found]


def wrapped(names: Sequence[str], most: int = 3) -> list[str]:
    """A few names a line."""
    return [", ".join(names[i : i + most]) for i in range(0, len(names), most)]


def panel(
    axes: Any,
    lines: Sequence[Line],
    title: str,
    x: str,
    y: str,
    *,
    log_x: bool = True,
    log_y: bool = True,
) -> None:
    """Draw the lines, a tick at each x, the names to the right of the panel."""
    labels = []
    for line in lines:
        if not line.points:
            continue
        colour, style = COLOURS[line.place % len(COLOURS)], STYLES[line.place // len(COLOURS) % len(STYLES)]
        axes.plot(
            list(line.points), list(line.points.values()), style, color=colour, lw=1.6, marker="o", ms=4
        )
        end = list(line.points.items())[-1]
        if line.ends:
            axes.plot(*end, "x", color=colour, ms=9, mew=2)
        labels.append((*end, line.name + (f" ({line.ends})" if line.ends else ""), colour))
    if log_x:
        axes.set_xscale("log", base=2)
        every = sorted({at for line in lines for at in line.points})
        axes.set_xticks(every, [thousands(at) for at in every])
        axes.xaxis.minorticks_off()
    if log_y:
        axes.set_yscale("log")
        low, high = axes.get_ylim()
        digits = "23457" if high < 10 * low else "25"  # of the ticks between powers of ten that have a number
        axes.yaxis.set_major_formatter(lambda number, _: f"{number:,g}")
        axes.yaxis.set_minor_formatter(lambda number, _: f"{number:,g}" if f"{number:e}"[0] in digits else "")
    axes.tick_params(axis="both", which="both", labelsize=8)
    axes.set_title(title, fontsize=9)
    axes.set_xlabel(x, fontsize=9)
    axes.set_ylabel(y, fontsize=9)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(alpha=0.25, which="both")
    name_ends(axes, labels)


def svg(figure: Any, rows: Sequence[Row]) -> str:
    """The figure as text that says which rows it shows (`is_drawn`), and closes it."""
    from matplotlib import pyplot as plt

    text, shown = io.StringIO(), f"rows {digest(rows)}"
    if _drawing:
        figure.savefig(text, format="svg", metadata={"Date": None, "Description": shown})
    plt.close(figure)
    return text.getvalue() or shown


def thousands(number: float) -> str:
    """4096 as 4k, 512 as 512."""
    return f"{number / 1024:g}k" if number >= 1024 else f"{number:g}"


def name_ends(axes: Any, labels: Sequence[tuple[float, float, str, str]]) -> None:
    """(x, y, name, colour): names beside the panel, in the order of the ends of their lines, moved apart
    where these are close. A leader that runs through the panel is dotted: no line of data."""
    if not (labels and _drawing):
        return
    axes.figure.canvas.draw()
    height, places = max(0.02, min(0.06, 1 / len(labels))), []
    within = axes.transData + axes.transAxes.inverted()
    ends = sorted((within.transform(at[:2])[1], at) for at in labels)
    # the least distance of each from the one below: more where a name has several lines
    tall = [height * max(1.0, 0.8 * (at[2].count("\n") + 1)) for _, at in ends]
    between = [(below + above) / 2 for below, above in zip([0.0, *tall], tall, strict=False)]
    for (end, _), apart in zip(ends, between, strict=True):
        places.append(max(end, places[-1] + apart if places else 0.0))
    top = 1.0
    for i in reversed(range(len(places))):  # from the top down again where that has run out of the panel
        places[i] = min(places[i], top)
        top = places[i] - between[i]
    for (_, (x, y, name, colour)), place in zip(ends, places, strict=True):
        dots = (0, (1, 4)) if within.transform((x, y))[0] < 0.8 else "-"
        arrow = {"arrowstyle": "-", "color": colour, "lw": 0.5, "ls": dots, "shrinkA": 0, "shrinkB": 2}
        arrow |= {"relpos": (0, 0.5)}  # to the left edge of the name, so that it crosses no other
        axes.annotate(
            name,
            xy=(x, y),
            xytext=(1.07, place),
            textcoords="axes fraction",
            color=colour,
            fontsize=8,
            va="center",
            annotation_clip=False,
            arrowprops=arrow,
        )
