"""What the rows of the study `backward_recompute` say: tables, a picture, findings."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from scripts.measure.report.figures import Line, merged, panel, panels_of, svg, thousands
from scripts.measure.rows import trusted
from scripts.measure.studies import Table

Row = dict[str, Any]
Panel = tuple[str, int]  # dtype, head dim

SHORT = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}


def panels(rows: list[Row]) -> dict[Panel, list[Row]]:
    """Rows by dtype and head dim, bf16 and 64 first, each by length."""
    found: dict[Panel, list[Row]] = {}
    for row in sorted(rows, key=lambda row: row["point"]["seq_len"]):
        found.setdefault((row["point"]["dtype"], row["point"]["head_dim"]), []).append(row)
    return dict(sorted(found.items()))


def measured(rows: list[Row]) -> list[Row]:
    return [row for row in rows if row["result"]["status"] == "ok"]


def unique(rows: list[Row], key: str) -> list[Any]:
    return list(dict.fromkeys(row["point"][key] for row in rows))


def fastest(rows: list[Row], keeps: bool) -> Row | None:
    """Of one shape: the fastest that may be trusted of those that kept P, or of those that did not."""
    mine = [row for row in measured(rows) if trusted(row["result"]) and row["result"]["keeps"] is keeps]
    return min(mine, key=lambda row: row["result"]["ms_median"], default=None)


def at(rows: list[Row], n: int) -> list[Row]:
    return [row for row in rows if row["point"]["seq_len"] == n]


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


def tables(rows: list[Row]) -> list[Table]:
    found = []
    for panel_, mine in panels(rows).items():
        found.append(times(panel_, mine))
        if (n := shown_length(mine)) is not None:
            found.append(work(panel_, at(mine, n), n))
    return found


def shown_length(rows: list[Row]) -> int | None:
    """The longest that ncu has counted, else the longest measured."""
    counted = [row for row in measured(rows) if dram(row["result"])]
    return max((row["point"]["seq_len"] for row in counted or measured(rows)), default=None)


def times(of: Panel, rows: list[Row]) -> Table:
    lengths = unique(rows, "seq_len")
    lines = [["", "P", *(f"N = {thousands(n)}" for n in lengths)]]
    for name in unique(rows, "implementation"):
        mine = [row for row in rows if row["point"]["implementation"] == name]
        keeps = next((row["result"]["keeps"] for row in measured(mine)), None)
        if keeps is None and all(row["result"]["status"] == "unsupported" for row in mine):
            continue
        cells = []
        for n in lengths:
            here, best = [row for row in mine if row["point"]["seq_len"] == n], fastest(at(rows, n), True)
            cells.append(_time(here[-1]["result"], best) if here else "")
        lines.append([name, {True: "kept", False: "again", None: ""}[keeps], *cells])
    point = rows[0]["point"]
    title = (
        f"Backward, ms (times the speed of the fastest that kept P); {SHORT[of[0]]}, D = {of[1]}, causal, "
    )
    return Table(title + f"{point['batch'] * point['seq_len']:,} tokens, {point['heads']} heads", lines)


def _time(result: dict[str, Any], best: Row | None) -> str:
    if result["status"] != "ok":
        return result["status"]
    ms, doubt = result["ms_median"], "" if trusted(result) else " !"
    return f"{ms:.3g}{doubt}" + (f" ({best['result']['ms_median'] / ms:.2f}x)" if best else "")


def work(of: Panel, rows: list[Row], n: int) -> Table:
    head = ["", "P", "products", "GFLOP", "DRAM, GB forward", "DRAM, GB backward", "by the model"]
    lines = [[*head, "kept, MiB", "ms", "TFLOP/s of what it does"]]
    for row in sorted(measured(rows), key=lambda row: row["result"]["ms_median"]):
        result = row["result"]
        forward, backward, model = dram(result, "forward"), dram(result), modelled(row)
        rate = result["flops_done"] / result["ms_median"] / 1e9
        cells = [row["point"]["implementation"], "kept" if result["keeps"] else "again"]
        cells += [str(result["products"]), gflop(result["flops_done"])]
        cells += [f"{x / 1e9:.3g}" if x else "-" for x in (forward, backward, model)]
        lines.append([*cells, f"{result['kept_mib']:.0f}", f"{result['ms_median']:.3g}", f"{rate:.3g}"])
    return Table(f"What a backward does at N = {thousands(n)}; {SHORT[of[0]]}, D = {of[1]}, causal", lines)


def gflop(flops: float) -> str:
    return f"{flops / 1e9:,.0f}" if flops > 1e11 else f"{flops / 1e9:.3g}"


def pictures(rows: list[Row]) -> dict[str, str]:
    """Time against the fastest that kept P, bytes of DRAM, and what is kept, over N; solid lines with P kept,
    dashed with P computed again. What was measured at one N is in the tables alone, where there is other."""
    every = panels(measured(rows))
    over_n = {of: mine for of, mine in every.items() if len({row["point"]["seq_len"] for row in mine}) > 1}
    found = over_n or every
    if not found:
        return {}
    title = "Backward: P kept (solid), or computed again (dashed)"
    figure, axes = panels_of(measured(rows), title, 3 * len(found))
    names = unique(rows, "implementation")
    for i, (of, mine) in enumerate(found.items()):
        said = f"{SHORT[of[0]]}, D = {of[1]}, causal"
        counted = any(dram(row["result"]) for row in mine)
        by = "counted by ncu" if counted else "by the model"
        drawn = [
            ("time of the backward / fastest that kept P", f"{said}: time", relative(mine)),
            ("DRAM, GB", f"{said}: moved by the backward, {by}", lambda row, c=counted: moved(row, c)),
            ("MiB", f"{said}: kept from forward to backward", lambda row: row["result"]["kept_mib"]),
        ]
        for axis, (y, title, value) in zip(axes[3 * i : 3 * i + 3], drawn, strict=True):
            panel(axis, merged(lines_of(mine, names, value)), title, "N, tokens", y)
        axes[3 * i].axhline(1, color="0.4", lw=0.8)
    return {"": svg(figure, measured(rows))}


def relative(rows: list[Row]) -> Callable[[Row], float | None]:
    def ratio(row: Row) -> float | None:
        best = fastest(at(rows, row["point"]["seq_len"]), True)
        return best and row["result"]["ms_median"] / best["result"]["ms_median"]

    return ratio


def moved(row: Row, counted: bool) -> float | None:
    found = dram(row["result"]) if counted else modelled(row)
    return found and found / 1e9


def lines_of(rows: list[Row], names: list[str], value: Callable[[Row], float | None]) -> list[Line]:
    """A line a name; those that kept P solid, the others dashed."""
    found = []
    for name in unique(rows, "implementation"):
        mine = [row for row in rows if row["point"]["implementation"] == name]
        points = {row["point"]["seq_len"]: y for row in mine if (y := value(row))}
        keeps = mine[0]["result"]["keeps"]
        of_kind = [other for other in names if kept_by(rows, other) is keeps]
        found.append(Line(name, points, of_kind.index(name) % 7 + (0 if keeps else 7)))
    return found


def kept_by(rows: list[Row], name: str) -> bool | None:
    return next((r["result"]["keeps"] for r in rows if r["point"]["implementation"] == name), None)


def notes(rows: list[Row]) -> list[str]:
    found = []
    for of, mine in panels(rows).items():
        found += [said for say in (speed, bytes_moved, checkpointing) if (said := say(of, mine))]
    untrusted = [row for row in measured(rows) if not trusted(row["result"])]
    if untrusted:
        names = sorted({row["point"]["implementation"] for row in untrusted})
        found.append(f"Marked !, wrong beyond rounding or another kernel than asked for: {', '.join(names)}.")
    why = sorted({row["result"]["counters_from"] for row in measured(rows)} - {"ncu"})
    if why and not any(dram(row["result"]) for row in measured(rows)):
        found.append(f"Bytes are the model's: {'; '.join(why)}.")
    return found


def pairs(rows: list[Row]) -> dict[int, tuple[Row, Row]]:
    """By length: the fastest that kept P, and the fastest that did not."""
    both = {n: (fastest(at(rows, n), True), fastest(at(rows, n), False)) for n in unique(rows, "seq_len")}
    return {n: (kept, again) for n, (kept, again) in both.items() if kept and again}


def speed(of: Panel, rows: list[Row]) -> str:
    said = []
    for n, (kept, again) in pairs(rows).items():
        names = [row["point"]["implementation"] for row in (again, kept)]
        said.append(f"{gain(kept, again):.1f}x at N = {thousands(n)} ({names[0]} over {names[1]})")
    return (
        f"{SHORT[of[0]]}, D = {of[1]}: P again over P kept, the fastest of each: {', '.join(said)}."
        if said
        else ""
    )


def gain(kept: Row, again: Row) -> float:
    """Times as fast to compute P again."""
    return kept["result"]["ms_median"] / again["result"]["ms_median"]


def finding(rows: list[Row]) -> str:
    """At the shortest and at the longest N of the first panel that has both."""
    found = next((both for mine in panels(rows).values() if (both := pairs(mine))), {})
    if not found:
        return ""
    each = [f"{gain(*found[n]):.1f}x (N = {thousands(n)})" for n in sorted({min(found), max(found)})]
    return f"To compute P again is {' to '.join(each)} as fast as to keep it."


def bytes_moved(of: Panel, rows: list[Row]) -> str:
    """FLOPs more, bytes fewer, and what it would take to bring P back."""
    found = pairs(rows)
    n = shown_length(rows)
    if n not in found:
        return ""
    kept, again = (row["result"] for row in found[n])
    moved_ = [dram(row["result"]) or modelled(row) for row in found[n]]
    point = found[n][1]["point"]
    pairs_seen = point["batch"] * point["heads"] * n * n / 2
    value_bytes = 4 if of[0] == "float32" else 2
    ms = 2e3 * pairs_seen * value_bytes / (kept["copy_gb_per_s"] * 1e9)
    said = f"{SHORT[of[0]]}, D = {of[1]}, N = {thousands(n)}: {again['products']} products a tile where "
    said += (
        f"{kept['products']} would do ({again['flops_done'] / 1e9:,.0f} GFLOP, the future left out, against "
    )
    said += f"{kept['flops_done'] / 1e9:,.0f})"
    if all(moved_):
        by = "by ncu" if dram(kept) and dram(again) else "by the model"
        said += f", and {moved_[0] / moved_[1]:.0f} times fewer bytes of DRAM ({by})"
    share = again["ms_median"] / again["products"]
    return (
        f"{said}. To write the causal half of P and read it back takes {ms:.3g} ms at a copy's speed; "
        f"one of the {again['products']} products takes about {share:.3g} of the {again['ms_median']:.3g} ms."
    )


def again(rows: list[Row]) -> dict[int, tuple[float, float]]:
    """The formula computed again by checkpointing over the formula, by length: time, and what is kept."""
    found = {}
    for n in unique(rows, "seq_len"):
        here = {row["point"]["implementation"]: row["result"] for row in measured(at(rows, n))}
        if {"naive", "naive_checkpointed"} <= here.keys():
            plain, twice = here["naive"], here["naive_checkpointed"]
            time = twice["ms_median"] / plain["ms_median"]
            found[n] = time, twice["kept_mib"] / plain["kept_mib"]
    return found


def checkpointing(of: Panel, rows: list[Row]) -> str:
    """Recomputation without fusion."""
    if not (found := again(rows)):
        return ""
    said = [
        f"{time:.2f}x the time, {kept:.1%} kept at N = {thousands(n)}" for n, (time, kept) in found.items()
    ]
    told = f"{SHORT[of[0]]}, D = {of[1]}: the same formula computed again by checkpointing, scores and all: "
    told += f"{'; '.join(said)}."
    if min(time for time, _ in found.values()) > 1:
        told += " To compute again saves memory, not time: time is saved where the scores are not written."
    return told
