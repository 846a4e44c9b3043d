"""Tables and pictures of results/attention, drawn from its rows."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from scripts.measure.instruments.bench_points import PASSES
from scripts.measure.report.figures import Line, panel, panels_of, svg, thousands
from scripts.measure.report.tables import cell_of, listed
from scripts.measure.rows import trusted
from scripts.measure.studies import Row, Table

Panel = dict[str, dict[int, Row]]  # implementation -> tokens -> row


def is_peer(name: str) -> bool:
    """Whether its kernels are other people's."""
    from attention import registry

    return registry.declaration(name).origin != "ours"


def ours_first(name: str) -> tuple[bool, str]:
    return is_peer(name), name


def panels(rows: Iterable[Row]) -> dict[tuple[Any, ...], Panel]:
    """Rows that belong in one table, by all that they have in common: the tokens in all where several T share
    these, as the batch shrinks while T grows; else the batch."""
    rows = list(rows)
    lengths: dict[tuple[Any, ...], set[int]] = {}
    for row in rows:
        lengths.setdefault(_common(row), set()).add(row["point"]["seq_len"])
    found: dict[tuple[Any, ...], Panel] = {}
    for row in rows:
        p, common = row["point"], _common(row)
        *most, total, full = common
        size = f"{total:,} tokens" if len(lengths[common]) > 1 else f"batch {p['batch']}"
        found.setdefault((*most, size, full), {}).setdefault(p["implementation"], {})[p["kv_len"]] = row
    return {(PASSES[key[0]], *key[1:]): found[key] for key in sorted(found)}


def _common(row: Row) -> tuple[Any, ...]:
    p = row["point"]
    head = (p["dtype"], p["head_dim"], p["heads"], p["kv_heads"], p["features"])
    return (PASSES.index(p["pass"]), *head, p["batch"] * p["seq_len"], not p["causal"])


def title(key: tuple[Any, ...]) -> str:
    passed, dtype, head_dim, heads, kv_heads, features, size, full = key
    of = f"{heads} heads" if heads == kv_heads else f"{heads} query, {kv_heads} KV heads"
    if passed == "decode":
        words = ["decode", size, f"D {head_dim}", of, dtype]
    else:
        words = [passed, f"D {head_dim}", "full" if full else "causal", of, size, dtype]
    return ", ".join(words + [features] * bool(features))


def ratio(name: str, panel: Panel, tokens: int) -> float | None:
    """How many times as fast as the best peer of the same run, where both may be trusted."""
    row = panel[name][tokens]
    peers = [
        other[tokens]
        for peer, other in panel.items()
        if is_peer(peer) and tokens in other and other[tokens]["run_id"] == row["run_id"]
    ]
    timed = [peer["result"] for peer in peers if peer["result"]["status"] == "ok"]
    best = min(timed, key=lambda result: result["ms_median"], default=None)
    # the best has to have been checked: a wrong peer is no measure, and the next best would flatter
    if is_peer(name) or best is None or not trusted(row["result"]) or not trusted(best):
        return None
    return best["ms_median"] / row["result"]["ms_median"]


def cell(name: str, panel: Panel, tokens: int) -> str:
    row = panel[name].get(tokens)

    def show(result: dict[str, Any]) -> str:
        compared, text = ratio(name, panel, tokens), f"{result['tflops']:#.3g}".rstrip(".")
        if row["point"]["pass"] == "decode":
            text = f"{1e3 * result['ms_median']:.1f} us {100 * result['copy_fraction']:.0f}%"
        return text + ("" if compared is None else f" {compared:.2f}x")

    return cell_of(row and row["result"], show)


def tables(rows: list[Row]) -> list[Table]:
    """One a panel."""
    found = []
    for key, mine in panels(rows).items():
        decode = key[0] == "decode"
        lengths = sorted({tokens for line in mine.values() for tokens in line})
        unit = "us, percent of a copy's bandwidth" if decode else "TFLOP/s"
        found.append(
            listed(
                f"{title(key)}: {unit}; x: as fast as the best peer",
                "|".join(["cache" if decode else "T", *(f"{tokens:,}" for tokens in lengths)]),
                sorted(mine, key=ours_first),
                lambda name, mine=mine, lengths=lengths: [name, *(cell(name, mine, n) for n in lengths)],
            )
        )
    return found


def doubts(rows: list[Row]) -> dict[str, list[str]]:
    """What was refused, failed or may not be trusted, and why; with the passes where that is so."""
    found: dict[str, list[str]] = {}
    for row in rows:
        p, result = row["point"], row["result"]
        if result["status"] != "ok":
            words = "" if result["status"] == "oom" else f"{result['status']}: {result['reason']}"
        elif not result.get("kernels_ok", True):
            words = f"! {result['verdict']}"
        elif not trusted(result):
            words = f"! at {p['kv_len']:,} tokens, D {p['head_dim']}: "
            words += result.get("error_reason", f"error ratio {result['error_ratio']}, correct up to 1")
        else:
            continue
        where = found.setdefault(f"{p['implementation']}: {words}", []) if words else [p["pass"]]
        if p["pass"] not in where:
            where.append(p["pass"])
    return found


def pictures(rows: list[Row]) -> dict[str, str]:
    """An SVG for each pass: a panel a table, TFLOP/s (decode: GB/s) over T."""
    drawn = {}
    for passed in dict.fromkeys(row["point"]["pass"] for row in rows):
        mine = [row for row in rows if row["point"]["pass"] == passed]
        drawn[passed] = picture(mine, panels(mine), f"Attention, {passed}", (5.4, 3.6))
    return drawn


def picture(
    rows: list[Row],
    found: dict[tuple[Any, ...], Panel],
    said: str,
    size: tuple[float, float],
    whole: bool = False,
) -> str:
    """whole: the pass stands in the title of each panel."""
    figure, grid = panels_of(rows, said, len(found), size, 0.4, 12)
    for axes, (key, mine) in zip(grid, found.items(), strict=True):
        _panel(axes, title(key).removeprefix("" if whole else f"{key[0]}, "), key[0] == "decode", mine)
    return svg(figure, rows)


def _panel(axes: Any, said: str, decode: bool, found: Panel) -> None:
    lines = []
    for name, line in found.items():
        timed = {t: row["result"] for t, row in sorted(line.items()) if row["result"]["status"] == "ok"}
        gone = [t for t, row in line.items() if row["result"]["status"] == "oom"]
        points = {t: result["gb_per_s" if decode else "tflops"] for t, result in timed.items()}
        lines.append(Line(name, points, ends=f"out of memory at {thousands(min(gone))}" if gone else ""))
    x, y = ("keys in the cache", "GB/s of K and V") if decode else ("T, tokens", "TFLOP/s")
    panel(axes, lines, said, x, y, log_y=False, bottom=0)
    copies = [row["result"].get("copy_gb_per_s", 0) for line in found.values() for row in line.values()]
    if decode and any(copies):
        axes.axhline(max(copies), color="0.6", lw=0.8)
        beside = {"transform": axes.get_yaxis_transform(), "fontsize": 8, "color": "0.4"}
        axes.text(0.01, max(copies), "a copy", va="bottom", **beside)
