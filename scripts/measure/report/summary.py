"""Speeds of all implementations for docs/measuring.md, a table and a picture; results/attention has more."""

from __future__ import annotations

import textwrap
from typing import Any

from scripts.measure.report import attention_report as report
from scripts.measure.report.tables import cell_of, markdown
from scripts.measure.rows import trusted

HEAD_DIMS, LENGTHS, CACHES = (64, 128, 256), (1024, 4096, 16384), (4096, 32768)
IN_TABLE = (64, 128)  # head dims, or the table outgrows a page

Row = dict[str, Any]


def shown(rows: list[Row]) -> dict[tuple[Any, ...], report.Panel]:
    """The panels of docs/measuring.md: causal, bf16, without features, D by D forward and backward; then
    decode for two batches, with the lengths of a cache where measured. Of several, the one with most rows."""
    best: dict[tuple[Any, ...], tuple[int, tuple[Any, ...], report.Panel]] = {}
    kept = [row for row in rows if row["point"]["dtype"] == "bfloat16"]
    for key, panel in report.panels(kept).items():
        passed, _, head_dim, _, _, features, size, full = key
        decode = passed == "decode"
        usual = features in ("", "kv_lengths") if decode else not features and not full
        if passed == "both" or not usual or (head_dim not in HEAD_DIMS and not decode):
            continue
        place = (1, size) if decode else (0, head_dim, passed != "forward")
        weight = (features == "kv_lengths", sum(map(len, panel.values())))
        if place not in best or weight > best[place][0]:
            best[place] = (weight, key, panel)
    squares = sorted(place for place in best if place[0] == 0)
    decodes = sorted((place for place in best if place[0] == 1), key=lambda place: int(place[1].split()[-1]))
    return {best[place][1]: best[place][2] for place in (*squares, *decodes[:2])}


def picture(rows: list[Row]) -> str:
    """An SVG: a line per D, forward and backward beside each other, and decode."""
    said = "Speed of attention, each implementation"
    return report.picture(rows, shown(rows), said, (5.4, 3.3), whole=True)


def machine(rows: list[Row]) -> str:
    """The GPUs, and all versions that took part."""
    said: dict[str, None] = {}
    for of in (row["machine"] for row in rows):
        versions = {"torch": of["torch"], "triton": of["triton"], **of.get("peers", {})}
        said |= dict.fromkeys([of["gpu"], *(f"{name} {number}" for name, number in versions.items())])
    return ", ".join(said)


def table(rows: list[Row]) -> list[list[str]]:
    """The cells of docs/measuring.md's, the head first; the fastest of each column is bold."""
    found, columns = shown(rows), []
    squares: dict[int, dict[str, report.Panel]] = {}
    for key, panel in found.items():
        if key[0] != "decode" and key[2] in IN_TABLE:
            squares.setdefault(key[2], {})[key[0]] = panel
    for dim, of in squares.items():
        for n in LENGTHS:
            if any(n in line for panel in of.values() for line in panel.values()):
                columns.append(
                    (f"D {dim}, T {n // 1024}k", {name: _both(of, name, n) for name in _names(found)})
                )
    for key, panel in [item for item in found.items() if item[0][0] == "decode"][-1:]:
        for n in CACHES:
            if any(n in line for line in panel.values()):
                cells = {name: _cell(panel, name, n, "ms_median") for name in _names(found)}
                columns.append((f"decode, {key[6]}, {n // 1024}k", cells))
    lines = [[f"`{name}`", *(of[name] for _, of in columns)] for name in _names(found)]
    able = [line for line in lines if any(cell not in ("", "-") for cell in line[1:])]
    return [["", *(head for head, _ in columns)], *able]


def block(rows: list[Row], gpu: str) -> str:
    """Of docs/measuring.md: picture, table, and what the table's signs stand for."""
    passes = dict.fromkeys(row["point"]["pass"] for row in rows)
    more = ", ".join(f"[{passed}](../results/attention/{gpu}_{passed}.svg)" for passed in passes)
    caption = textwrap.fill(
        f"{machine(rows)}. bf16, causal. Cells give TFLOP/s of forward / backward; for decode, microseconds "
        "with one query per sequence. The fastest of each column is bold. `!` marks results that are not "
        "ranked (their error exceeds rounding error, or another kernel ran than requested), `-` refused "
        f"calls; an empty cell was not measured. All plots: {more}. `results/attention/{gpu}.jsonl` has "
        "all rows, with kernels, errors and command.",
        width=118,
        break_long_words=False,
        break_on_hyphens=False,
    )
    picture = f"![attention, TFLOP/s over T](../results/attention/{gpu}.svg)"
    return "\n\n".join([picture, markdown(table(rows)), caption])


def _names(found: dict[tuple[Any, ...], report.Panel]) -> list[str]:
    return sorted({name for panel in found.values() for name in panel}, key=report.ours_first)


def _both(of: dict[str, report.Panel], name: str, length: int) -> str:
    cells = [_cell(of.get(passed, {}), name, length, "tflops") for passed in ("forward", "backward")]
    return cells[0] if len(set(cells)) == 1 and cells[0] in ("", "-", "oom") else " / ".join(cells)


def _cell(panel: report.Panel, name: str, length: int, field: str) -> str:
    result = panel.get(name, {}).get(length, {"result": None})["result"]
    timed = [line[length]["result"] for line in panel.values() if length in line]
    right = [other for other in timed if trusted(other)]
    fastest = min(right, key=lambda other: other["ms_median"], default=None)

    def show(result: dict[str, Any]) -> str:
        us = field == "ms_median"
        return f"{1e3 * result[field]:.1f}" if us else f"{result[field]:#.3g}".rstrip(".")

    value = cell_of(result, show)
    return f"**{value}**" if fastest and result is fastest else value
