"""Tables and picture of a study of training points: tokens/s and peak memory against the context; of a study
at one context, bars (report/sweep_bars.py)."""

from __future__ import annotations

import io
from collections.abc import Callable
from datetime import date
from typing import Any

from scripts.measure.report import figures, sweep_bars
from scripts.measure.report.attention_report import ours_first
from scripts.measure.report.figures import digest, drawing, machines, merged, panel, subplots, thousands
from scripts.measure.report.tables import cell_of
from scripts.measure.studies import Row, Table

Line = dict[int, list[Row]]  # tokens of context -> rows, the micro-batch that was asked for first


def points(rows: list[Row]) -> list[Row]:
    """Those that scripts/sweep.py has measured."""
    return [row for row in rows if row["point"].get("pass") == "train" and "settings" in row["point"]]


def lines(rows: list[Row]) -> dict[str, Line]:
    """Implementation -> its rows by T; of one point measured under two configs, the later. Compiled and not
    are two, where there are both."""
    ways = {(row["point"]["implementation"], bool(row["point"].get("compile"))) for row in rows}
    newest = {}
    for row in rows:
        point = row["point"]
        name = point["implementation"]
        name += ", compiled" * bool(point.get("compile") and (name, False) in ways)
        newest[name, point["seq_len"], point["micro_batch"]] = row
    found: dict[str, Line] = {}
    for (name, tokens, _), row in sorted(newest.items(), key=lambda item: (ours_first(item[0][0]), item[0])):
        found.setdefault(name, {}).setdefault(tokens, []).insert(0, row)
    return found


def beyond_state(result: dict[str, Any]) -> float:
    """MiB of a step's peak beside parameters, gradients and the optimizer's state: what grows with T."""
    split = result.get("memory_split") or {}
    return result["peak_mib"] - sum(split.get(part, 0) for part in ("parameters", "gradients", "optimizer"))


def at_one_length(rows: list[Row]) -> bool:
    return len({row["point"]["seq_len"] for row in rows}) == 1


def panels(rows: list[Row]) -> dict[str, list[Row]]:
    """Rows that belong in one table, under what they have in common."""
    found: dict[str, list[Row]] = {}
    alone = all(row["point"]["tokens_per_step"] == row["point"]["seq_len"] for row in rows)
    for row in rows:
        point = row["point"]
        size = "one sequence" if alone else f"{point['tokens_per_step']:,} tokens"
        words = [point["model"], f"{size} a step", point["dtype"]]
        words += ["not causal"] * (not point.get("causal", True))
        words += [point["features"]] * bool(point["features"]) + ["checkpointing"] * point["checkpointing"]
        words += [f"T = {point['seq_len']:,}"] * at_one_length(rows)
        found.setdefault(", ".join(words), []).append(row)
    return {title: of for common, mine in found.items() for title, of in _by_settings(common, mine).items()}


def _by_settings(common: str, rows: list[Row]) -> dict[str, list[Row]]:
    """A table for each of the settings that not all of them share, which its title names."""
    every = [row["point"].get("settings") or {} for row in rows]
    apart = {key for of in every for key in of if any(other.get(key, ...) != of[key] for other in every)}
    found: dict[str, list[Row]] = {}
    for row, settings in zip(rows, every, strict=True):
        own = [f"{key}={value}" for key, value in settings.items() if key in apart]
        found.setdefault(", ".join([common, *own]), []).append(row)
    return found


def works(rows: list[Row]) -> Row | None:
    """The row with a time: of the largest micro-batch that fits."""
    return next((row for row in rows if row["result"]["status"] == "ok"), None)


def beside(row: Row, rows: list[Row], name: str = "nanoGPT") -> Row | None:
    """The peer's row with a time at the row's T: of the same commit where there is one, as sweeps of other
    days may have had different machines (two H200s differed by 2%), else the nearest in time."""
    of_peer = [
        each
        for each in rows
        if each["point"]["implementation"] == name and each["point"]["seq_len"] == row["point"]["seq_len"]
    ]
    timed = [each for each in of_peer if each["result"]["status"] == "ok"]
    same = [each for each in timed if each["machine"].get("commit") == row["machine"].get("commit")]
    return min(reversed(same or timed), key=lambda each: _days_apart(each, row), default=None)


def _days_apart(a: Row, b: Row) -> int:
    of_a, of_b = (date.fromisoformat(row["machine"]["date"]) for row in (a, b))
    return abs((of_a - of_b).days)


def cell(rows: list[Row] | None, show: Callable[[Row], str]) -> str:
    if not rows:
        return ""
    row = works(rows)
    text = cell_of((row or rows[-1])["result"], lambda _: show(row))
    return text if row in (None, rows[0]) else f"{text} ({row['point']['micro_batch']})"


def tables(rows: list[Row]) -> list[Table]:
    """(n) in a cell: in micro-batches of n, as the one asked for is out of memory."""
    found = []
    for common, mine in panels(rows).items():
        if at_one_length(rows):
            found.append(sweep_bars.table(common, mine))
            continue
        by_name = lines(mine)
        lengths = sorted({tokens for line in by_name.values() for tokens in line})

        def speed(row: Row, mine: list[Row] = mine) -> str:
            result = row["result"]
            text = f"{result['tokens_per_s']:,.0f}"
            text += f", {100 * result['mfu']:.0f}%" if result.get("mfu") else ""
            peer = beside(row, mine)
            if peer is None or row["point"]["implementation"] == "nanoGPT":
                return text
            return f"{text}, {result['tokens_per_s'] / peer['result']['tokens_per_s']:.2f}x"

        units = "tokens/s, MFU" if any(row["result"].get("mfu") for row in mine) else "tokens/s"
        units += ", x: of nanoGPT's" if "nanoGPT" in by_name else ""
        for unit, show in {units: speed, "peak MiB": lambda row: f"{row['result']['peak_mib']:,.0f}"}.items():
            body = [[name, *(cell(line.get(n), show) for n in lengths)] for name, line in by_name.items()]
            found.append(Table(f"{common}: {unit}", [["T", *(f"{n:,}" for n in lengths)], *body]))
    return found


def doubts(rows: list[Row]) -> list[str]:
    """Why something has no figure, or one with a mark, and at which T."""
    found: dict[tuple[str, str], list[int]] = {}
    for row in rows:
        name, result = row["point"]["implementation"], row["result"]
        if result["status"] in ("unsupported", "error"):
            why = f": {result['status']}: {result['reason']}"
        elif result["status"] == "ok" and not result.get("kernels_ok", True):
            why = f" ! {result.get('verdict', 'its kernels were not seen')}"
        elif result["status"] == "ok" and not result.get("learns", True):
            why = " ! the loss went from {first:.2f} to {last:.2f}".format(**result["loss"])
        else:
            continue
        found.setdefault((name, why), []).append(row["point"]["seq_len"])
    return [
        f"{name} at T = {'; '.join(f'{tokens:,}' for tokens in sorted(set(lengths)))}{why}"
        for (name, why), lengths in found.items()
    ]


def heading(rows: list[Row]) -> str:
    """What the picture shows, in plain words."""
    peers = {row["point"]["implementation"] for row in rows}
    others = [name for name in ("nanoGPT", "transformers") if any(peer.startswith(name) for peer in peers)]
    beside = f", beside {' and '.join(others)}" if others else ""
    if at_one_length(rows):
        return (
            f"How fast the same model trains with each attention, T = {rows[0]['point']['seq_len']:,}{beside}"
        )
    return f"What a longer context costs in training, by attention{beside}"


def picture(rows: list[Row], kind: str = "svg") -> Any:
    """An SVG as text (png: bytes): a line of two panels for each model and precision; at one length, a panel
    of bars for each."""
    if not drawing():
        return f"rows {digest(rows)}"
    from matplotlib import pyplot as plt

    found, one = panels(rows), at_one_length(rows)
    columns, height = 1 if one else 2, 4.3
    if one:
        height = 1.1 + 0.27 * max(len(sweep_bars.best(mine)) for mine in found.values())
    size = (12.6 if not one else 9.5, height * len(found) + 0.6)
    figure, grid = subplots(columns, len(found), size)
    for (common, mine), axes in zip(found.items(), grid, strict=True):
        if one:
            sweep_bars.bars(axes[0], mine, common)
            continue
        by_name = lines(mine)
        scale, unit = (1024, "GiB") if mine[0]["machine"]["gpu"] else (1, "MiB")
        less = "; hollow: a smaller micro-batch, as that is what fits"
        less *= any(row["result"]["status"] == "oom" for row in mine)
        speeds = drawn(by_name, lambda result: result["tokens_per_s"])
        panel(axes[0], speeds, common, "T, tokens of context", "tokens/s")
        of = next((row["result"]["peak_of"] for row in mine if "peak_of" in row["result"]), "")
        peaks = drawn(by_name, lambda result, scale=scale: result["peak_mib"] / scale)
        panel(axes[1], merged(peaks), of + less, "T, tokens of context", f"peak memory, {unit}")
    figure.suptitle(f"{heading(rows)}: {machines(rows)}")
    text = io.StringIO() if kind == "svg" else io.BytesIO()
    about = {"Date": None, "Description": f"rows {digest(rows)}"} if kind == "svg" else None
    figure.savefig(text, format=kind, metadata=about, dpi=150)
    plt.close(figure)
    return text.getvalue()


def drawn(by_name: dict[str, Line], value: Callable[[dict[str, Any]], float]) -> list[figures.Line]:
    """A figure of the largest micro-batch that fits against T; hollow where a larger one was asked for."""
    found = []
    for name, line in by_name.items():
        fits = {t: row for t, rows in line.items() if (row := works(rows))}
        less = frozenset(t for t, row in fits.items() if row is not line[t][0])
        gone = [t for t, rows in line.items() if t not in fits and rows[-1]["result"]["status"] == "oom"]
        late = [t for t, rows in line.items() if cell(rows, lambda _: "") == "timeout"]
        ends = {"out of memory": gone, "too slow": late}
        words = ", ".join(f"{why} at {thousands(min(at))}" for why, at in ends.items() if at)
        points = {t: value(row["result"]) for t, row in fits.items()}
        found.append(figures.Line(name, points, ends=words, hollow=less))
    return found
