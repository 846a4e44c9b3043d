"""Tables and pictures of results/attention, drawn from its rows."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from scripts.measure.instruments.bench_points import PASSES
from scripts.measure.report.figures import STYLES, name_ends, svg, thousands
from scripts.measure.report.tables import listed
from scripts.measure.rows import trusted
from scripts.measure.studies import Row, Table
from scripts.plot import COLOURS

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
    if row is None:
        return ""
    result = row["result"]
    if result["status"] != "ok":
        return {"unsupported": "-"}.get(result["status"], result["status"])
    if row["point"]["pass"] == "decode":
        text = f"{1e3 * result['ms_median']:.1f} us {100 * result['copy_fraction']:.0f}%"
    else:
        text = f"{result['tflops']:#.3g}".rstrip(".")
    compared = ratio(name, panel, tokens)
    return text + ("" if compared is None else f" {compared:.2f}x") + ("" if trusted(result) else " !")


def tables(rows: list[Row]) -> list[Table]:
    """One a panel."""
    found = []
    for key, panel in panels(rows).items():
        decode = key[0] == "decode"
        lengths = sorted({tokens for line in panel.values() for tokens in line})
        unit = "us, percent of a copy's bandwidth" if decode else "TFLOP/s"
        found.append(
            listed(
                f"{title(key)}: {unit}; x: as fast as the best peer",
                "|".join(["cache" if decode else "T", *(f"{tokens:,}" for tokens in lengths)]),
                sorted(panel, key=ours_first),
                lambda name, panel=panel, lengths=lengths: [name, *(cell(name, panel, n) for n in lengths)],
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
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams["svg.hashsalt"] = "tilegpt"  # the same figures, the same file
    from matplotlib import pyplot as plt

    drawn = {}
    for passed in dict.fromkeys(row["point"]["pass"] for row in rows):
        mine = [row for row in rows if row["point"]["pass"] == passed]
        found = panels(mine)
        names = sorted({name for panel in found.values() for name in panel}, key=ours_first)
        columns = min(2, len(found))
        lines = -(-len(found) // columns)
        figure, grid = plt.subplots(
            lines, columns, figsize=(5.4 * columns, 3.6 * lines + 0.4), layout="constrained", squeeze=False
        )
        for axes in grid.flat[len(found) :]:
            axes.remove()
        for axes, (key, panel) in zip(grid.flat, found.items(), strict=False):
            _panel(axes, key, panel, names)
        machines = dict.fromkeys((row["machine"]["gpu"] or "CPU") for row in mine)
        date = max(row["machine"]["date"] for row in mine)
        figure.suptitle(f"Attention, {passed}: {', '.join(machines)}, {date}")
        drawn[passed] = svg(figure, mine)
    return drawn


def _panel(axes: Any, key: tuple[Any, ...], panel: Panel, names: list[str]) -> None:
    """`names` of the whole picture: each has one colour and style in all panels."""
    decode, labels = key[0] == "decode", []
    for name, line in panel.items():
        timed = {t: row["result"] for t, row in sorted(line.items()) if row["result"]["status"] == "ok"}
        if not timed:
            continue
        place = names.index(name)
        colour, style = COLOURS[place % len(COLOURS)], STYLES[place // len(COLOURS) % len(STYLES)]
        values = [result["gb_per_s" if decode else "tflops"] for result in timed.values()]
        width = 1.2 if is_peer(name) else 2.2
        axes.plot(list(timed), values, style, color=colour, lw=width, marker="o", ms=3)
        gone = [t for t, row in line.items() if row["result"]["status"] == "oom"]
        label = name + (f" (out of memory at {min(gone):,})" if gone else "")
        labels.append((max(timed), values[-1], label, colour))
    if decode and labels:
        copies = [row["result"]["copy_gb_per_s"] for line in panel.values() for row in line.values()
                  if "copy_gb_per_s" in row["result"]]  # fmt: skip
        axes.axhline(max(copies), color="0.6", lw=0.8)
        labels.append((max(label[0] for label in labels), max(copies), "copy", "0.4"))
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter(lambda tokens, _: thousands(tokens))
    axes.set_ylim(bottom=0)
    axes.set_title(title(key).removeprefix(f"{key[0]}, "), fontsize=9)
    axes.set_xlabel("keys in the cache" if decode else "T, tokens", fontsize=9)
    axes.set_ylabel("GB/s of K and V" if decode else "TFLOP/s", fontsize=9)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(alpha=0.25)
    name_ends(axes, labels)
