"""Pictures of attention_speed, from its rows; templates/attention_speed.md.j2 has the words."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence

from scripts.measure.instruments.speed_points import SHORT, STUDY
from scripts.measure.report.attention_speed_report import (
    MANY,
    MEASURES,
    ONE,
    PASSES,
    at_short,
    beats,
    crossover,
    lengths,
    order,
    paper,
    pick,
    tables,
    timed,
    winners,
)
from scripts.measure.report.figures import Line, canvas, merged, panel, svg, thousands, wrapped
from scripts.measure.report.pages import page
from scripts.measure.report.tables import Record, records, where
from scripts.measure.studies import Report, Row

LENGTHS = (1024, 2048, 16384)  # N of the notes on standard attention


def pictures(rows: list[Row]) -> dict[str, str]:
    """ "" speed over N; "short" microseconds at short N. What there is no row of is not drawn."""
    drawn = {"": speed(rows), "short": short(rows)}
    return {name: picture for name, picture in drawn.items() if picture}


def speed(rows: list[Row]) -> str:
    """TFLOP/s over N, forward and backward, causal; a CPU's forward and both."""
    cpu = all(row["point"]["dtype"] == "float32" for row in rows)
    found: dict[str, dict[int, dict[str, Row]]] = {}
    for passed in ("forward", "both" if cpu else "backward"):
        for n in lengths(rows):
            wanted = {"seq_len": n, "causal": True, "dtype": "float32"} if cpu else paper(n, 64, True)
            if (cpu or n >= SHORT) and (mine := pick(rows, passed=passed, **wanted)):
                found.setdefault(passed, {})[n] = mine
    if not found:
        return ""
    names = timed_names(found.values())
    what = "causal, fp32" if cpu else "causal, D = 64, 32 heads, 16,384 tokens or one sequence, bf16"
    figure, axes = canvas(rows, f"Attention by itself, {what}", len(found))
    for at, (passed, by_n) in zip(axes[0], found.items(), strict=True):
        lines = [line(name, by_n) for name in names]
        panel(at, merged(lines), PASSES[passed], "N, tokens", "TFLOP/s")
    return svg(figure, rows)


def timed_names(found: Iterable[dict[int, dict[str, Row]]]) -> list[str]:
    """Those with a time at some N, in order: each is given a colour and a style."""
    return sorted(
        {name for by_n in found for of in by_n.values() for name in of if timed(of[name])}, key=order
    )


def line(name: str, by_n: dict[int, dict[str, Row]]) -> Line:
    """An implementation's TFLOP/s, with what stopped it."""
    points, ends = {}, ""
    for n, of in by_n.items():
        result = of[name]["result"] if name in of else {"status": ""}
        if result["status"] == "ok":
            points[n] = result["tflops"]
        elif result.get("not_tried") or result["status"] == "oom":
            why = "out of memory" if result["status"] == "oom" else "not tried"
            ends = ends or f"{why} at {thousands(n)}"
    return Line(name, points, ends=ends)


def short(rows: list[Row]) -> str:
    """Microseconds of the forward over short N: by the device and in a stream, one sequence and many. What is
    slower than standard attention at every N is named, not drawn."""
    found = {many: at_short(rows, "forward", many) for many in (False, True)}
    found = {many: by_n for many, by_n in found.items() if by_n}
    if not found:
        return ""
    names = timed_names(found.values())
    figure, axes = canvas(rows, "Short sequences, forward, causal, D = 64, 32 heads, bf16", 2, len(found))
    for at, (many, by_n) in zip(axes, found.items(), strict=True):
        for each, (what, us) in zip(at, MEASURES.items(), strict=True):
            lines = []
            for name in names:
                mine = {n: of[name]["result"] for n, of in by_n.items() if name in of}
                points = {n: us(result) for n, result in mine.items() if result["status"] == "ok"}
                lines.append(Line(name, points))
            lines, slower = contenders(lines)
            won = winners(rows, "forward", many, what)
            wins = [n for n, (_, written, _, tiled) in won.items() if written < tiled]
            for n in wins:
                each.axvspan(n / 2**0.5, n * 2**0.5, color="0.92", lw=0)
            title = f"{MANY if many else ONE}: {what}" + (
                " (shaded: standard attention wins)" if wins else ""
            )
            panel(each, merged(lines, 0.1), title, "N, tokens", "microseconds")
            if slower:
                each.set_ylim(top=each.get_ylim()[1] * 1.5)  # room for their names
                said = ",\n".join(wrapped(slower, 6))
                where = {"transform": each.transAxes, "fontsize": 8, "color": "0.35", "va": "top"}
                each.text(0.02, 0.99, f"slower than standard at every N:\n{said}", **where)
    return svg(figure, rows)


def contenders(lines: list[Line]) -> tuple[list[Line], list[str]]:
    """Those that are not slower than standard attention at every N, and the names of the others."""
    standard = next((line.points for line in lines if line.name == "standard"), {})
    drawn, slower = [], []
    for line in lines:
        common = line.points.keys() & standard.keys()
        if common and all(line.points[n] > standard[n] for n in common):
            slower.append(line.name)
        else:
            drawn.append(line)
    return drawn, slower


def report(rows: Sequence[Row]) -> Report:
    every = where(records(rows), study=STUDY)
    outcomes: dict[str, list[str]] = {}
    beaten = {}
    for many, passed in itertools.product((False, True), ("forward", "both")):
        for what in MEASURES:
            way = f"{PASSES[passed]}, {MANY if many else ONE}, {what}"
            if won := winners(every, passed, many, what):
                outcomes.setdefault(crossover(won), []).append(way)
                beaten[way] = beats(every, passed, many, what, SHORT)
    doubts: dict[str, list[str]] = {}
    for r in every:
        if words := doubt(r):
            doubts.setdefault(words, []).append(f"{r.passed} {r.seq_len:,}")
    return page(
        STUDY,
        tables(every),
        pictures(every) if every else {},
        outcomes=outcomes,
        beaten=beaten,
        best={passed: best(every, passed) for passed in ("forward", "both")},
        unmasked=best(every, "forward", causal=False),
        passes=PASSES,
        lengths=LENGTHS,
        doubts={words: list(dict.fromkeys(at)) for words, at in doubts.items()},
    )


def best(rows: Sequence[Row], passed: str, causal: bool = True) -> dict[int, tuple[str, float]]:
    """N -> (the fastest that may be trusted, times as fast as standard attention), where it is another."""
    found = {}
    for n in LENGTHS:
        of = pick(rows, passed=passed, **paper(n, 64, causal))
        standard, fast = timed(of.get("standard")), {name: r.ms_median for name, r in of.items() if r.trusted}
        name = min(fast, key=fast.get, default="standard")
        if standard and name != "standard":
            found[n] = name, standard / fast[name]
    return found


def doubt(r: Record) -> str:
    """Why it may not be trusted, or how it failed."""
    if r.status == "error" and not r.get("not_tried"):
        return f"{r.implementation} failed: {r.reason}"
    if r.status != "ok" or r.trusted:
        return ""
    if not r.get("kernels_ok", True):
        return f"! {r.verdict}"
    return f"! {r.implementation} has an error ratio of {r.get('error_ratio')}, correct up to 1"
