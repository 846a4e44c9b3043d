"""Table and picture of training points at one context: bars, against a baseline."""

from __future__ import annotations

from typing import Any

from scripts.measure.report.colours import colour_of
from scripts.measure.report.tables import Record, listed, records
from scripts.measure.rows import trusted
from scripts.measure.studies import Row, Table

# The first of these that a study has is what the others are held against: (implementation, compiled).
BASELINES = (("transformers eager", False), ("nanoGPT", True), ("nanoGPT", False), ("standard", False))
BASELINES += (("naive", False), ("standard", True), ("naive", True), ("transformers SDPA", False))


def kind(name: str) -> str:
    if name.startswith(("transformers", "nanoGPT")):
        return "peer"
    from attention import registry
    from attention.base import MATMUL_KERNELS

    declared = registry.declaration(name)
    if declared.kernels == MATMUL_KERNELS:
        return "standard"
    return "ours" if declared.origin == "ours" else "library"


def label(row: Row) -> str:
    point = row["point"]
    return point["implementation"] + ", compiled" * bool(point.get("compile"))


def best(rows: list[Row]) -> list[Row]:
    """A row for each implementation, compiled and not: of the largest micro-batch that fits, or the one that
    was asked for; the slowest first."""
    newest = {(label(row), row["point"]["micro_batch"]): row for row in rows}
    found: dict[str, Row] = {}
    for (name, _), row in sorted(newest.items(), key=lambda item: -item[0][1]):
        if name not in found or (found[name]["result"]["status"] != "ok" and row["result"]["status"] == "ok"):
            found[name] = row
    return sorted(found.values(), key=lambda row: row["result"].get("tokens_per_s", 0.0))


def baseline(rows: list[Row]) -> Row | None:
    """The row that the others are held against."""
    of = {(row["point"]["implementation"], bool(row["point"].get("compile"))): row for row in best(rows)}
    return next((of[key] for key in BASELINES if key in of and of[key]["result"]["status"] == "ok"), None)


def ratio(row: Row, base: Row | None) -> float | None:
    """Times the baseline's speed."""
    if base is None or row["result"]["status"] != "ok":
        return None
    return row["result"]["tokens_per_s"] / base["result"]["tokens_per_s"]


def table(title: str, rows: list[Row]) -> Table:
    base = baseline(rows)

    def line(r: Record) -> str:
        if r.status != "ok":
            return f"{label(r)}|{r.status}|||||{r.micro_batch}"
        times, mfu = ratio(r, base), r.get("mfu")
        speed = f"{r.tokens_per_s:,.0f}{'' if r.trusted else ' !'}|{f'{times:.2f}x' if times else ''}"
        mfu = f"{100 * mfu:.0f}%" if mfu else ""
        return f"{label(r)}|{speed}|{r.ms_median:,.1f}|{mfu}|{r.peak_mib:,.0f}|{r.micro_batch}"

    head = f"|tokens/s|{f'x {label(base)}' if base else 'x'}|ms a step|MFU|peak MiB|micro-batch"
    return listed(title, head, records(best(rows)), line)


def bars(axes: Any, rows: list[Row], title: str) -> None:
    """Horizontal bars of tokens/s, slowest at the top, each with its figures beside it."""
    base, shown = baseline(rows), best(rows)
    most = max((row["result"].get("tokens_per_s", 0.0) for row in shown), default=0.0) or 1.0
    for place, row in enumerate(shown):
        result, times = row["result"], ratio(row, base)
        if result["status"] != "ok":
            axes.text(0.01 * most, place, result["status"], va="center", fontsize=8, color="0.35")
            continue
        speed = result["tokens_per_s"]
        colour = colour_of(row["point"]["implementation"])
        hatch = "" if row["point"].get("compile") else "///"
        axes.barh(place, speed, 0.72, color=colour, hatch=hatch, edgecolor="white", lw=0)
        words = f"{speed:,.0f}" + (f"  {times:.2f}x" if times else "") + ("" if trusted(result) else " !")
        words += f"  {result['peak_mib'] / 1024:,.1f} GiB"
        axes.text(speed + 0.01 * most, place, words, va="center", fontsize=8)
    axes.set_yticks(range(len(shown)), [label(row) for row in shown], fontsize=8)
    axes.set_xlim(0, 1.42 * most)
    axes.set_ylim(len(shown) - 0.4, -0.6)  # from the top down
    of = f", times {label(base)}'s" if base else ""
    axes.set_title(f"{title}\nbeside each bar: tokens/s{of}, peak memory; hatched: not compiled", fontsize=9)
    axes.set_xlabel("tokens/s", fontsize=9)
    axes.xaxis.set_major_formatter(lambda number, _: f"{number:,.0f}")
    axes.tick_params(axis="x", labelsize=8)
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_axisbelow(True)
    axes.grid(alpha=0.25, axis="x")
