"""Tables of results/roofline, and its rows held against the model; roofline_plot.py draws them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import Any

from scripts.measure.instruments.ladder import STAGES
from scripts.measure.report.tables import listed
from scripts.measure.studies import Table

Row = dict[str, Any]
Group = tuple[int, int, int, bool]  # batch, heads, head dim, causal
# What measured may differ from the model by: reads at both lengths, writes at the longer, where they overflow
# the L2 many times.
BAR, BAR_STAGES, BAR_TOKENS = 0.25, ("cuda_naive", "cuda_fa2"), (4096, 16384)


def ceilings(rows: Iterable[Row]) -> dict[str, Row]:
    """Results by name."""
    found = {
        row["point"]["pass"]: row["result"] for row in rows if row["point"]["implementation"] == "ceiling"
    }
    return {name: result for name, result in found.items() if result["status"] == "ok"}


def groups(rows: Iterable[Row], tiles: bool = False) -> dict[Group, list[Row]]:
    """Rows of the stages (or of fa2's tiles) that belong in one table, stage by stage, shortest first."""
    found: dict[Group, list[Row]] = {}
    for row in rows:
        p = row["point"]
        if p["implementation"] in STAGES and ("tile" in p) == tiles:
            key = (p["batch"], p["heads"], p["head_dim"], p["causal"])
            found.setdefault(key, []).append(row)
    order = STAGES.index
    return {
        key: sorted(
            found[key], key=lambda row: (order(row["point"]["implementation"]), row["point"]["seq_len"])
        )
        for key in sorted(found)
    }


def title(group: Group) -> str:
    batch, heads, head_dim, causal = group
    return f"batch {batch}, {heads} heads, D {head_dim}, {'causal' if causal else 'full'}"


def length(tokens: float) -> str:
    return f"{tokens / 1024:g}k" if tokens >= 1024 else f"{tokens:g}"


def bytes_of(result: Row, *fields: str) -> tuple[float | None, float]:
    """(measured or None, by the model), the sum of these."""
    counts = result.get("counters") or {}
    seen = sum(counts[field] for field in fields) if all(field in counts for field in fields) else None
    return seen, sum(result["model"][field] for field in fields)


def moved(result: Row, *fields: str) -> float:
    """Bytes: measured, or else by the model."""
    seen, model = bytes_of(result, *fields)
    return model if seen is None else seen


DRAM = ("dram_read_bytes", "dram_write_bytes")


def bar(rows: Iterable[Row]) -> Iterator[tuple[str, bool | None]]:
    """What was measured against the model where the ladder is held to it, and whether it is within BAR; None
    where nothing was counted."""
    for group, mine in groups(rows).items():
        for row in mine:
            p, result = row["point"], row["result"]
            tokens = p["seq_len"]
            if p["implementation"] not in BAR_STAGES or tokens not in BAR_TOKENS or result["status"] != "ok":
                continue
            for field in DRAM[: 1 + (tokens == BAR_TOKENS[-1])]:
                seen, model = bytes_of(result, field)
                what = f"{p['implementation']}, {length(tokens)}, {title(group)}: {field.replace('_', ' ')}"
                if seen is None:
                    yield f"{what}: {model / 1e9:.3f} GB by the model, not counted", None
                else:
                    ratio = seen / model if model else math.inf
                    said = f"{what}: {seen / 1e9:.3f} GB, {ratio:.2f} of the model's"
                    yield said, abs(ratio - 1) <= BAR


CEILINGS = "what|measured|unit|a clock and SM, or clocks|MiB walked"
STAGE = "stage|T|ms|TFLOP/s|DRAM read|model|written|model|L2|model|shared|% of threads|registers|counted by"
TILE = "Br x Bc x warps, blocks|T|ms|TFLOP/s|registers|spilled|shared, KiB|of an SM|% of threads|counted"


def grids(rows: list[Row]) -> list[Table]:
    """Ceilings, then the stages by what they share, then tiles."""
    found = [("Ceilings", CEILINGS, list(_ceiling_lines(rows)))]
    for group, mine in groups(rows).items():
        lines = [line for row in mine for line in (_stage_line(row), *_kernel_lines(row))]
        found.append((f"{title(group)}: GB moved", STAGE, lines))
    for group, mine in groups(rows, tiles=True).items():
        found.append((f"fa2's tile, {title(group)}", TILE, list(map(_tile_line, mine))))
    return [listed(caption, columns, lines, list) for caption, columns, lines in found if lines]


def notes(rows: list[Row]) -> list[str]:
    """Measured against the model, then what failed."""
    marks = {True: "ok", False: f"MORE THAN {BAR:.0%} OFF", None: "-"}
    said = [f"{marks[within]}  {words}" for words, within in bar(rows)]
    for row in rows:
        if row["result"]["status"] != "ok":
            p = row["point"]
            where = p["pass"] if p["implementation"] == "ceiling" else f"T {p['seq_len']} {p.get('tile', '')}"
            said.append(
                f"{row['result']['status']}  {p['implementation']} {where}: {row['result']['reason']}"
            )
    return said


def finding(rows: list[Row]) -> str:
    """Bytes that the first and the last stage read, causal, D = 128, at the longest T counted of both."""
    read = {
        (row["point"]["implementation"], row["point"]["seq_len"]): row["result"]["counters"][DRAM[0]] / 1e9
        for row in rows
        if row["result"].get("counters") and row["point"].get("causal") and row["point"]["head_dim"] == 128
    }
    both = [tokens for name, tokens in read if name == "cuda_naive" and ("cuda_fa2", tokens) in read]
    if not both:
        return ""
    naive, fa2 = (read[name, max(both)] for name in ("cuda_naive", "cuda_fa2"))
    return f"At T = {max(both):,} naive reads {naive:.0f} GB of DRAM, fa2 {fa2:.2f} GB."


def _ceiling_lines(rows: list[Row]) -> Iterator[list[str]]:
    for name, result in ceilings(rows).items():
        per_clock, mib = result["per_clock"], result["mib"]
        optional = ("" if x is None else f"{x:,.1f}" for x in (per_clock, mib))
        yield [name, f"{result['value']:,.1f}", result["unit"], *optional]


def _gb(value: float | None) -> str:
    return "" if value is None else f"{value / 1e9:.3f}"


def _stage_line(row: Row) -> list[str]:
    p, result = row["point"], row["result"]
    start = [p["implementation"].removeprefix("cuda_"), f"{p['seq_len']:,}"]
    if result["status"] != "ok":
        return [*start, result["status"]]
    counts = result["counters"] or {}
    cells = [_gb(x) for field in (*DRAM, "l2_bytes") for x in bytes_of(result, field)]
    occupancy = counts.get("occupancy_percent")
    most = ", ".join(f"{use['occupancy_percent']:.0f}" for use in result["usage"].values())
    occupied = f"{'' if occupancy is None else f'{occupancy:.0f} '}<= {most}"
    registers = ", ".join(str(use["registers"]) for use in result["usage"].values())
    times = [f"{result['ms_median']:.3f}", f"{result['tflops']:.1f}"]
    by = "ncu" if counts else "model"
    return [*start, *times, *cells, _gb(counts.get("shared_bytes")), occupied, registers, by]


def _kernel_lines(row: Row) -> Iterator[list[str]]:
    """What ncu counted of each kernel of a call that has several."""
    for name, of in ((row["result"].get("counters") or {}).get("by_kernel") or {}).items():
        cells = [cell for field in (*DRAM, "l2_bytes") for cell in (_gb(of.get(field)), "")]
        took = "" if "ms" not in of else f"{of['ms']:.3f}"
        occupied = "" if "occupancy_percent" not in of else f"{of['occupancy_percent']:.0f}"
        yield [f"  {name.split('_')[-1]}", "", took, "", *cells, _gb(of.get("shared_bytes")), occupied]


def _tile_line(row: Row) -> list[str]:
    p, result = row["point"], row["result"]
    tile = p["tile"]
    start = [f"{tile['br']} x {tile['bc']} x {tile['warps']}, {tile['blocks']}", f"{p['seq_len']:,}"]
    if result["status"] != "ok":
        return [*start, result["status"]]
    (use,) = result["usage"].values()
    occupancy = (result["counters"] or {}).get("occupancy_percent")
    return [
        *start,
        f"{result['ms_median']:.3f}",
        f"{result['tflops']:.1f}",
        str(use["registers"]),
        str(use["spilled_bytes"]),
        f"{use['shared_bytes'] / 1024:.0f}",
        str(use["blocks_per_sm"]),
        f"{use['occupancy_percent']:.0f}",
        "" if occupancy is None else f"{occupancy:.0f}",
    ]
