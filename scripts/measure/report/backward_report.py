"""What the rows of the study `backward_recompute` say: tables and a picture;
templates/backward_recompute.md.j2 has the words."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from scripts.measure.report.figures import Line, merged, panel, panels_of, svg, thousands
from scripts.measure.report.pages import page
from scripts.measure.report.tables import SHORT, Record, distinct, fmt, listed, records, where
from scripts.measure.studies import Report, Row, Table

Panel = tuple[str, int]  # dtype, head dim


def report(rows: list[Row]) -> Report:
    found, every = panels(rows), records(rows)
    timed = where(every, status="ok")
    of, first = next(((of, mine) for of, mine in found.items() if pairs(mine)), (None, []))
    ends = pairs(first)
    return page(
        "backward_recompute",
        [table for of, mine in found.items() for table in tables(of, mine)],
        pictures(every),
        ends={n: gain(*ends[n]) for n in sorted({min(ends), max(ends)})} if ends else {},
        kinds=[said_of({pair[which].implementation for pair in ends.values()}) for which in (0, 1)],
        formula=[1 / time for time, _ in again(first).values()],
        of=of,
        panels=found,
        gain=gain,
        pairs=pairs,
        shown=shown_length,
        again_of=again,
        moved=lambda r: dram(r) or modelled(r),
        counted=any(dram(r) for r in timed),
        dram=dram,
        untrusted=sorted({r.implementation for r in timed if not r.trusted}),
        why=sorted({r.counters_from for r in timed} - {"ncu"}),
    )


def panels(rows: list[Row]) -> dict[Panel, list[Record]]:
    """Rows by dtype and head dim, bf16 and 64 first, each by length."""
    found: dict[Panel, list[Record]] = {}
    for r in sorted(records(rows), key=lambda r: r.seq_len):
        found.setdefault((r.dtype, r.head_dim), []).append(r)
    return dict(sorted(found.items()))


def fastest(found: list[Record], n: int, keeps: bool) -> Record | None:
    """At one length: the fastest that may be trusted of those that kept P, or of those that did not."""
    mine = where(found, seq_len=n, trusted=True, keeps=keeps)
    return min(mine, key=lambda r: r.ms_median, default=None)


def said_of(names: set[str]) -> str:
    """Whether these backwards are fused, or matrix products of cuBLAS, in parentheses; nothing where they are
    both or none."""
    fused = {is_fused(name) for name in names}
    return {(True,): " (fused)", (False,): " (cuBLAS)"}.get(tuple(fused), "")


def is_fused(name: str) -> bool:
    from attention import registry

    if name.endswith(("_compiled", "_checkpointed")):  # the formulas
        return False
    declared = registry.declaration(name)
    return not declared.writes_scores and not declared.launches_each_tile


def dram(result: dict[str, Any], passed: str = "backward") -> float | None:
    """Bytes counted by ncu, read and written; None where it has not counted."""
    of = (result.get("counters") or {}).get(passed)
    return of and of["dram_read_bytes"] + of["dram_write_bytes"]


def modelled(row: Row) -> float | None:
    """DRAM bytes of the backward, by the model as it is now."""
    from scripts.measure.instruments.backward_work import model_bytes
    from scripts.measure.instruments.bench_points import Shape

    p = row["point"]
    names = ("batch", "heads", "kv_heads", "seq_len", "head_dim", "causal")
    return model_bytes(p["implementation"], Shape(*(p[name] for name in names), SHORT[p["dtype"]]))


def shown_length(found: list[Record]) -> int | None:
    """The longest that ncu has counted, else the longest measured."""
    timed = where(found, status="ok")
    return max((r.seq_len for r in list(filter(dram, timed)) or timed), default=None)


def tables(of: Panel, found: list[Record]) -> list[Table]:
    """Times by length; and what the backward does at the longest."""
    lengths, p, what = distinct(found, "seq_len"), found[0], f"{SHORT[of[0]]}, D = {of[1]}, causal"
    best = {n: fastest(found, n, True) for n in lengths}
    able = [name for name in distinct(found, "implementation") if any(
        r.status != "unsupported" for r in where(found, implementation=name))]  # fmt: skip

    def times(name: str) -> str:
        cells = []
        for n in lengths:
            r = (where(found, implementation=name, seq_len=n) or [None])[-1]
            cells.append("" if r is None else r.status)
            if r and r.status == "ok":
                over = f" ({best[n].ms_median / r.ms_median:.2f}x)" if best[n] else ""
                cells[-1] = f"{r.ms_median:.3g}{'' if r.trusted else ' !'}{over}"
        return "|".join([name, {True: "stored", False: "recomputed", None: ""}[kept_by(found, name)], *cells])

    def work(r: Record) -> str:
        gflop = f"{r.flops_done / 1e9:,.0f}" if r.flops_done > 1e11 else f"{r.flops_done / 1e9:.3g}"
        moved = [fmt(x and x / 1e9, ".3g", "-") for x in (dram(r, "forward"), dram(r), modelled(r))]
        start = [r.implementation, "stored" if r.keeps else "recomputed", str(r.products), gflop, *moved]
        return "|".join(
            [*start, f"{r.kept_mib:.0f}", f"{r.ms_median:.3g}", f"{r.flops_done / r.ms_median / 1e9:.3g}"]
        )

    n = shown_length(found)
    done = sorted(where(found, status="ok", seq_len=n), key=lambda r: r.ms_median)
    what_it_does = listed(
        f"Work of the backward at N = {thousands(n or 0)}; {what}",
        "|P|products per tile|GFLOP|DRAM GB, forward|DRAM GB, backward|the same, by the model|stored, MiB|ms|"
        "TFLOP/s, all products counted",
        done,
        work,
    )
    return [
        listed(
            f"Backward, ms (speed relative to the fastest that stores P); {what}, "
            f"{p.batch * p.seq_len:,} tokens, {p.heads} heads",
            "|".join(["", "P", *(f"N = {thousands(n)}" for n in lengths)]),
            able,
            times,
        ),
    ] + ([what_it_does] if done else [])


def pictures(every: list[Record]) -> dict[str, str]:
    """Time against the fastest that kept P, bytes of DRAM, and what is kept, over N; solid lines with P kept,
    dashed with P computed again. What was measured at one N is in the tables alone, where there is other."""
    timed = where(every, status="ok")
    by_panel = panels(timed)
    over_n = {of: mine for of, mine in by_panel.items() if len(distinct(mine, "seq_len")) > 1}
    found = over_n or by_panel
    if not found:
        return {}
    figure, axes = panels_of(timed, "Backward: P kept, or computed again (dashed, hatched)", 3 * len(found))
    for i, (of, mine) in enumerate(found.items()):
        said, counted = f"{SHORT[of[0]]}, D = {of[1]}, causal", any(map(dram, mine))
        best = {n: fastest(mine, n, True) for n in distinct(mine, "seq_len")}
        bytes_of = dram if counted else modelled
        drawn: list[tuple[str, str, Callable[[Record], float | None]]] = [
            ("time of the backward / fastest that kept P", "time",
             lambda r, best=best: best[r.seq_len] and r.ms_median / best[r.seq_len].ms_median),
            ("DRAM, GB", f"moved by the backward, {'counted by ncu' if counted else 'by the model'}",
             lambda r, of=bytes_of: (moved := of(r)) and moved / 1e9),
            ("MiB", "kept from forward to backward", lambda r: r.kept_mib),
        ]  # fmt: skip
        for axis, (y, what, value) in zip(axes[3 * i : 3 * i + 3], drawn, strict=True):
            panel(axis, merged(lines_of(mine, value)), f"{said}: {what}", "N, tokens", y)
        axes[3 * i].axhline(1, color="0.4", lw=0.8)
    return {"": svg(figure, timed)}


def lines_of(found: list[Record], value: Callable[[Record], float | None]) -> list[Line]:
    """A line a name; those that kept P solid, the others dashed."""
    lines = []
    for name in distinct(found, "implementation"):
        points = {r.seq_len: y for r in where(found, implementation=name) if (y := value(r))}
        lines.append(Line(name, points, style="-" if kept_by(found, name) else "--"))
    return lines


def kept_by(found: list[Record], name: str) -> bool | None:
    return next((r.keeps for r in where(found, implementation=name, status="ok")), None)


def pairs(found: list[Record]) -> dict[int, tuple[Record, Record]]:
    """By length: the fastest that kept P, and the fastest that did not."""
    both = {n: (fastest(found, n, True), fastest(found, n, False)) for n in distinct(found, "seq_len")}
    return {n: (kept, again) for n, (kept, again) in both.items() if kept and again}


def gain(kept: Record, again: Record) -> float:
    """Times as fast to compute P again."""
    return kept.ms_median / again.ms_median


def again(found: list[Record]) -> dict[int, tuple[float, float]]:
    """The formula computed again by checkpointing over the formula, by length: time, and what is kept."""
    ratios = {}
    for n in distinct(found, "seq_len"):
        here = {r.implementation: r for r in where(found, seq_len=n, status="ok")}
        if {"naive", "naive_checkpointed"} <= here.keys():
            plain, twice = here["naive"], here["naive_checkpointed"]
            ratios[n] = twice.ms_median / plain.ms_median, twice.kept_mib / plain.kept_mib
    return ratios
