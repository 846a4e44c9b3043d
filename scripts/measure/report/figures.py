"""Lines of measurements, drawn alike in every study: logarithmic axes, names at the ends of the lines, units,
the GPU and the date. An implementation has one colour everywhere, a mark one meaning, and what leads to a
name is grey, as no data are."""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from scripts.measure.report.colours import colour_of
from scripts.plot import COLOURS

# What a line ends in, by the words that say so.
MARKS = {"out of memory": "x", "not tried": "|", "too slow": "|", "NaN": "*"}
LEADER = {"arrowstyle": "-", "color": "0.65", "lw": 0.8, "ls": (0, (1, 3))}  # dotted, as no line of data is
LEADER |= {"shrinkA": 0, "shrinkB": 3, "relpos": (0, 0.5)}

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
    """`points`: x -> y, for x in order; `place`: its colour, where it is no implementation, which has its
    own; `ends`: what stopped it there ("out of memory at 64k"), with a mark of MARKS; `style`, `hollow` (the
    x whose marks are not filled): where these say something, which the title tells."""

    name: str
    points: dict[float, float]
    place: int | None = None
    ends: str = ""
    style: str = "-"
    hollow: frozenset[float] = frozenset()

    @property
    def colour(self) -> str:
        return colour_of(self.name) if self.place is None else COLOURS[self.place % len(COLOURS)]


def subplots(columns: int, lines: int, size: tuple[float, float]) -> tuple[Any, Any]:
    """(figure, (lines, columns) array of axes) of so many inches."""
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams["svg.hashsalt"] = "tilegpt"  # the same figures, the same file
    from matplotlib import pyplot as plt

    return plt.subplots(lines, columns, figsize=size, layout="constrained", squeeze=False)


def machines(rows: Sequence[Row]) -> str:
    """The GPUs, and the date of the newest row."""
    gpus = dict.fromkeys(row["machine"]["gpu"] or "CPU" for row in rows)
    return f"{', '.join(gpus)}, {max(row['machine']['date'] for row in rows)}"


def canvas(rows: Sequence[Row], title: str, columns: int, lines: int = 1) -> tuple[Any, Any]:
    """`subplots` of the usual size under the title and the machines."""
    figure, axes = subplots(columns, lines, (6.3 * columns, 4.3 * lines + 0.5))
    figure.suptitle(f"{title}: {machines(rows)}", fontsize=11)
    return figure, axes


def panels_of(
    rows: Sequence[Row],
    title: str,
    number: int,
    size: tuple[float, float] = (6.3, 4.3),
    head: float = 0.5,
    fontsize: int = 11,
) -> tuple[Any, list[Any]]:
    """(figure, axes), two panels a line: of three, nothing could be read on a page. In inches, the size of a
    panel and what the head takes."""
    columns, lines = min(number, 2), -(-number // 2)
    figure, axes = subplots(columns, lines, (size[0] * columns, size[1] * lines + head))
    figure.suptitle(f"{title}: {machines(rows)}", fontsize=fontsize)
    for spare in axes.flat[number:]:
        spare.remove()
    return figure, list(axes.flat[:number])


def label(axes: Any, title: str, x: str, y: str) -> None:
    """What the axes show, on a plain frame."""
    axes.set_title(title, fontsize=9)
    axes.set_xlabel(x, fontsize=9)
    axes.set_ylabel(y, fontsize=9)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(alpha=0.25)


def numbered(axes: Any) -> None:
    """Plain numbers at the ticks of a logarithmic y, between powers of ten at some of them."""
    axes.set_yscale("log")
    low, high = axes.get_ylim()
    digits = "23457" if high < 10 * low else "25"
    axes.yaxis.set_major_formatter(lambda number, _: f"{number:,g}")
    axes.yaxis.set_minor_formatter(lambda number, _: f"{number:,g}" if f"{number:e}"[0] in digits else "")


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
    bottom: float | None = None,
) -> None:
    """Draw the lines, a tick at each x, the names to the right of the panel; at one x alone, bars."""
    lines, labels = [line for line in lines if line.points], []
    every = sorted({at for line in lines for at in line.points})
    drawn = [[line.name, line.colour, line.style, line.ends, [*line.points.items()]] for line in lines]
    panels = axes.figure.__dict__.setdefault("panels", [])  # for `carried`
    panels.append({"title": title, "x": x, "y": y, "log": [log_x, log_y], "lines": drawn})
    if len(every) == 1 and len(lines) > 1:
        bars(axes, lines, f"{title}; {x.split(',')[0]} = {thousands(every[0])}", y)
        return
    for line in lines:
        axes.plot(list(line.points), list(line.points.values()), line.style, color=line.colour, lw=1.6)
        for at in line.points:
            face = "white" if at in line.hollow else line.colour
            axes.plot(at, line.points[at], "o", color=line.colour, ms=4, mfc=face)
        end = list(line.points.items())[-1]
        if line.ends:
            mark = next(mark for why, mark in MARKS.items() if line.ends.startswith(why))
            axes.plot(*end, mark, color=line.colour, ms=9, mew=2)
        labels.append((*end, line.name + (f" ({line.ends})" if line.ends else ""), line.colour))
    if bottom is not None:
        axes.set_ylim(bottom=bottom)
    if log_x:
        axes.set_xscale("log", base=2)
        axes.set_xticks(every, [thousands(at) for at in every])
        axes.xaxis.minorticks_off()
    if log_y:
        numbered(axes)
    axes.tick_params(axis="both", which="both", labelsize=8)
    label(axes, title, x, y)
    name_ends(axes, labels)


def bars(axes: Any, lines: Sequence[Line], title: str, what: str) -> None:
    """A bar a line, which has one point, and its figure; hatched where the line would not be solid."""
    lines = sorted(lines, key=lambda line: max(line.points.values()))
    values = [max(line.points.values()) for line in lines]
    hatches = ["" if line.style == "-" else "///" for line in lines]
    axes.barh(
        range(len(lines)), values, 0.7, color=[line.colour for line in lines], hatch=hatches, ec="white"
    )
    for place, found in enumerate(values):
        axes.text(found, place, f" {found:,.3g}", va="center", fontsize=8)
    axes.set_yticks(range(len(lines)), [line.name for line in lines])
    axes.margins(x=0.15)
    axes.tick_params(labelsize=8)
    axes.set_axisbelow(True)
    label(axes, title, what, "")


def svg(figure: Any, rows: Sequence[Row]) -> str:
    """The figure as text that says which rows it shows (`is_drawn`) and carries what its panels show
    (`carried`), and closes it."""
    from matplotlib import pyplot as plt

    text, shown = io.StringIO(), f"rows {digest(rows)}"
    if _drawing:
        panels = json.dumps(figure.__dict__.get("panels", []))
        about = {"Date": None, "Description": shown, "Source": panels}
        figure.savefig(text, format="svg", metadata=about)
    plt.close(figure)
    return text.getvalue() or shown


def carried(text: str) -> list[dict[str, Any]]:
    """What the panels of an SVG's text show: title, x, y, log (of x and y) and lines of [name, colour, style,
    what ended it, points]; none of a picture that was drawn otherwise."""
    if not text.startswith("<?xml"):
        return []
    found = ElementTree.fromstring(text).find(".//{http://purl.org/dc/elements/1.1/}source")
    return json.loads(found.text) if found is not None and found.text else []


def thousands(number: float) -> str:
    """4096 as 4k, 512 as 512."""
    return f"{number / 1024:g}k" if number >= 1024 else f"{number:g}"


def name_ends(axes: Any, labels: Sequence[tuple[float, float, str, str]]) -> None:
    """(x, y, name, colour): names beside the panel, in the order of the ends of their lines, moved apart
    where these are close."""
    if not (labels and _drawing):
        return
    axes.get_ylim()  # which fits the limits to what is drawn, and transData with them
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
        axes.annotate(
            name,
            xy=(x, y),
            xytext=(1.07, place),
            textcoords="axes fraction",
            color=colour,
            fontsize=8,
            va="center",
            annotation_clip=False,
            arrowprops=LEADER,  # to the left edge of the name, so that it crosses no other
            zorder=1,  # below the data
        )
