"""Tables of results/roofline, and its rows held against the model; roofline_plot.py draws them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import Any

from scripts.measure.instruments.ladder import STAGES
from scripts.measure.report.tables import Record, fmt, listed, records, where
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


def facts(rows: list[Row]) -> dict[str, Any]:
    """For templates/roofline.md.j2: bytes that the first stage, the tiled one and the last read, with their
    dtypes, causal, D = 128, at the longest T counted of the first and the last; what was measured against the
    model; what failed."""
    every = records(rows)
    read = {
        (r.implementation, r.seq_len): (r.dtype, r.counters[DRAM[0]] / 1e9)
        for r in where(every, causal=True, head_dim=128)
        if r.get("counters") and not r.get("tile")
    }
    longest = max((n for name, n in read if name == "cuda_naive" and ("cuda_fa2", n) in read), default=0)
    stages = [name for name in ("cuda_naive", "cuda_tiled", "cuda_fa2") if (name, longest) in read]
    return {
        "longest": longest,
        "read": [(name.removeprefix("cuda_"), *read[name, longest]) for name in stages if longest],
        "held": list(bar(rows)),
        "bar": BAR,
        "failed": [r for r in every if r.status != "ok"],
    }


def grids(rows: list[Row]) -> list[Table]:
    """Ceilings, then the stages by what they share, then tiles."""
    found = [listed("Ceilings", CEILINGS, ceilings(rows).items(), _ceiling_line)]
    for group, mine in groups(rows).items():
        lines = [line for r in records(mine) for line in (_stage_line(r), *_kernel_lines(r))]
        found.append(listed(f"{title(group)}: GB moved", STAGE, lines, list))
    for group, mine in groups(rows, tiles=True).items():
        found.append(listed(f"fa2's tile, {title(group)}", TILE, records(mine), _tile_line))
    return [table for table in found if len(table.lines) > 1]


def _ceiling_line(named: tuple[str, Row]) -> str:
    name, r = named
    said = f"{name}|{r['value']:,.1f}|{r['unit']}"
    return f"{said}|{fmt(r['per_clock'], ',.1f')}|{fmt(r['mib'], ',.1f')}"


def _gb(value: float | None) -> str:
    return "" if value is None else f"{value / 1e9:.3f}"


def _stage_line(r: Record) -> list[str]:
    start = [r.implementation.removeprefix("cuda_"), f"{r.seq_len:,}"]
    if r.status != "ok":
        return [*start, r.status]
    counts, uses = r.counters or {}, r.usage.values()
    cells = [_gb(x) for field in (*DRAM, "l2_bytes") for x in bytes_of(r, field)]
    most = ", ".join(f"{use['occupancy_percent']:.0f}" for use in uses)
    occupied = f"{fmt(counts.get('occupancy_percent'), '.0f')} <= {most}".lstrip()
    registers = ", ".join(str(use["registers"]) for use in uses)
    shared, by = _gb(counts.get("shared_bytes")), "ncu" if counts else "model"
    return [*start, f"{r.ms_median:.3f}", f"{r.tflops:.1f}", *cells, shared, occupied, registers, by]


def _kernel_lines(r: Record) -> Iterator[list[str]]:
    """What ncu counted of each kernel of a call that has several."""
    for name, of in ((r.get("counters") or {}).get("by_kernel") or {}).items():
        cells = [cell for field in (*DRAM, "l2_bytes") for cell in (_gb(of.get(field)), "")]
        occupied = fmt(of.get("occupancy_percent"), ".0f")
        start = [f"  {name.split('_')[-1]}", "", fmt(of.get("ms"), ".3f"), ""]
        yield [*start, *cells, _gb(of.get("shared_bytes")), occupied]


def _tile_line(r: Record) -> str:
    start = "{br} x {bc} x {warps}, {blocks}".format(**r.tile) + f"|{r.seq_len:,}"
    if r.status != "ok":
        return f"{start}|{r.status}"
    (use,) = r.usage.values()
    held = (
        f"{use['registers']}|{use['spilled_bytes']}|{use['shared_bytes'] / 1024:.0f}|{use['blocks_per_sm']}"
    )
    counted = fmt((r.counters or {}).get("occupancy_percent"), ".0f")
    return f"{start}|{r.ms_median:.3f}|{r.tflops:.1f}|{held}|{use['occupancy_percent']:.0f}|{counted}"
