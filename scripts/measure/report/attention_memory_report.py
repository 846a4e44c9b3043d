"""Tables and picture of attention_memory, from its rows; templates/attention_memory.md.j2 has the words."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING

from scripts.measure.report.figures import Line, canvas, panel, svg, thousands, wrapped
from scripts.measure.report.pages import page
from scripts.measure.report.tables import (
    FIRST,
    by_name,
    figure,
    fmt,
    lines,
    outcome,
    outcomes,
    records,
    table,
    times,
)
from scripts.measure.rows import frame
from scripts.measure.studies import Report, Row, Table

if TYPE_CHECKING:
    from pandas import DataFrame

STUDY = "attention_memory"
Series = dict[int, Row]  # by N
PASSES = {"forward": "forward", "both": "forward + backward"}
SAME = 0.1  # peaks this close at all N are one line of the picture
FIGURES = ("peak_mib", "extra_mib", "inputs_mib", "outputs_mib", "scores_mib", "scores_fp32_mib", "lse_mib")
FEWEST = 3  # points of a fit


def is_curve(row: Row) -> bool:
    """Of the curve, not of a claim's shape: batch 1 and the heads that most rows of the file have."""
    p = row["point"]
    return p["batch"] == 1 and p["causal"] and (p["heads"], p["dtype"]) in ((12, "bfloat16"), (2, "float32"))


def series(rows: list[Row], passed: str, wanted: Callable[[Row], bool] = is_curve) -> dict[str, Series]:
    """Rows of a pass by implementation and N, both in order."""
    found: dict[str, Series] = {}
    for row in sorted(rows, key=lambda row: row["point"]["seq_len"]):
        if row["point"]["pass"] == passed and wanted(row):
            found.setdefault(row["point"]["implementation"], {})[row["point"]["seq_len"]] = row
    return dict(sorted(found.items(), key=lambda item: (item[0] != "standard", item[0])))


def measured(of: Series, field: str = "peak_mib") -> dict[int, float]:
    """N -> a figure, where there is one."""
    return {n: row["result"][field] for n, row in of.items() if row["result"]["status"] == "ok"}


def exponent(points: dict[int, float]) -> float | None:
    """p of a N^p, by least squares of logarithms over the upper half of the N (three at least); None for too
    few points, or where nothing was allocated."""
    upper = list(points.items())[-max(FEWEST, math.ceil(len(points) / 2)) :]
    if len(upper) < FEWEST or min(value for _, value in upper) <= 0:
        return None
    xs, ys = ([math.log(at[i]) for at in upper] for i in (0, 1))
    x, y = sum(xs) / len(xs), sum(ys) / len(ys)
    return sum((a - x) * (b - y) for a, b in zip(xs, ys, strict=True)) / sum((a - x) ** 2 for a in xs)


def ending(of: Series) -> str:
    """What stopped an implementation: "out of memory at 32k"; "" where nothing did."""
    for n, row in of.items():
        result = row["result"]
        if result["status"] == "oom":
            return f"out of memory at {thousands(n)}"
        if result.get("not_tried"):
            return f"too slow at {thousands(n)}"
    return ""


def report(rows: list[Row]) -> Report:
    rows = [row for row in rows if row["point"]["study"] == STUDY]
    drawn = any(is_curve(row) and row["result"]["status"] == "ok" for row in rows)
    ends = {
        said: {name: end for name, of in series(rows, passed).items() if (end := ending(of))}
        for passed, said in PASSES.items()
    }
    return page(
        STUDY,
        tables(rows),
        {"": picture(rows)} if drawn else {},
        groups={said: fits(rows, passed) for passed, said in PASSES.items()},
        both=fits(rows, "both"),
        ends=ends,
        doubtful=sorted({r.verdict for r in records(rows) if not r.get("kernels_ok", True)}),
    )


def tables(rows: list[Row]) -> list[Table]:
    every = frame(rows).sort_values("seq_len", kind="stable")
    every = every.reindex(columns=every.columns.union(FIGURES))  # rows that all failed have none
    curve = every[[is_curve(row) for row in every["row"]]]
    return [*curves(curve), *exponents(curve), *claims(every, curve)]


def curves(curve: DataFrame) -> list[Table]:
    found = []
    for passed, said in PASSES.items():
        of = outcomes(curve[curve["pass"] == passed], "peak_mib")
        if of.empty:
            continue
        able = of[of["status"].ne("unsupported").groupby(of["implementation"]).transform("any")]
        wide = by_name(able, "seq_len", "cell").reindex(columns=sorted(of["seq_len"].unique())).fillna("")
        body = lines(wide, "N", thousands, str)
        any_row = of[of["status"] == "ok"].drop_duplicates("seq_len").set_index("seq_len")
        for label, field in (("(scores, computed)", "scores_mib"), ("(scores in fp32)", "scores_fp32_mib")):
            body.append([label, *map(figure, any_row[field].reindex(wide.columns))])
        p = of.iloc[-1]
        title = f"{said}: MiB at the peak beyond the inputs; batch 1, {p['heads']} heads of {p['head_dim']}, "
        found.append(Table(f"{title}causal, {p['dtype']}", body))
    return found


def exponents(curve: DataFrame) -> list[Table]:
    """How peaks, and what is beyond the outputs, grow."""
    ok = curve[curve["status"] == "ok"].groupby(["implementation", "pass"])
    fits = {
        key: [exponent(dict(zip(of["seq_len"], of[f], strict=True))) for f in FIGURES[:2]] for key, of in ok
    }
    cells = [["", *(f"{said}, {what}" for said in PASSES.values() for what in ("peak", "extra"))]]
    for name in sorted({name for name, _ in fits}, key=lambda name: (name != FIRST, name)):
        mine = [fit for passed in PASSES for fit in fits.get((name, passed), [None, None])]
        if any(fit is not None for fit in mine):
            cells.append([name, *(fmt(fit, ".2f") for fit in mine)])
    return table(
        "Exponent p of N^p, fitted over the upper half of the N; extra: the peak less out (and dq, dk, dv)",
        cells,
    )


def claims(every: DataFrame, curve: DataFrame) -> list[Table]:
    """The shapes that the sources claim something of."""

    def chosen(passed: str, **wanted: int) -> DataFrame:
        found = every[every["pass"] == passed]
        for field, value in wanted.items():
            found = found[found[field] == value]
        return found.sort_values(["implementation", "seq_len"], kind="stable")

    def listed(of: DataFrame, *fields: str) -> list[list[str]]:
        records = sorted(of.to_dict("records"), key=lambda row: row["implementation"] != FIRST)
        return [[row["implementation"], *(outcome(row, field) for field in fields)] for row in records]

    head = ["", "peak, MiB", "extra, MiB", "scores computed", "row statistics computed"]
    big = listed(chosen("forward", batch=8, heads=32), "peak_mib", "extra_mib", "scores_mib", "lse_mib")
    return [
        *table("Claim 1: forward, B = 8, H = 32, N = 8192, D = 64, causal, fp16", [head, *big]),
        *growth(curve[(curve["pass"] == "forward") & (curve["status"] == "ok")]),
        *compared(chosen("both", batch=16, heads=8)),
        *one_head(chosen("forward", heads=1, head_dim=128)),
        *in_pytorch({passed: chosen(passed, batch=1, heads=8) for passed in PASSES}),
    ]


def growth(ok: DataFrame) -> list[Table]:
    lengths = [2**n for n in range(10, 15)]
    extra = by_name(ok, "seq_len", "extra_mib").reindex(columns=lengths)
    extra = extra[extra[lengths[0]] > 0]
    grown = extra.div(extra[lengths[0]], axis=0)
    return table("Claim 1: growth from N = 1k, forward", lines(grown, "extra memory, N =", thousands, times))


def compared(of: DataFrame) -> list[Table]:
    """Claim 2: standard attention over tiles, with and without the inputs in both."""
    ok, found = of[of["status"] == "ok"], []
    if FIRST not in set(ok["implementation"]):
        return []
    for what, mib in {"peak": ok["peak_mib"], "peak and inputs": ok["peak_mib"] + ok["inputs_mib"]}.items():
        wide = by_name(ok.assign(mib=mib), "seq_len", "mib").dropna(axis=1, subset=[FIRST])
        ratios = (1 / wide.div(wide.loc[FIRST])).drop(FIRST).dropna(how="all")
        title = f"Claim 2: {what}, B = 16, H = 8, D = 64, causal, fp16, forward + backward"
        found += table(title, lines(ratios, "standard over", thousands, times))
    return found


def one_head(of: DataFrame) -> list[Table]:
    cells = [["N", "implementation", "scores, MiB", "q, k, v, out", "peak and inputs"]]
    for row in of.sort_values(["seq_len", "implementation"]).to_dict("records"):
        figures = ["", "", outcome(row, "peak_mib")]
        if row["status"] == "ok":
            given, total = row["inputs_mib"] + row["outputs_mib"], row["inputs_mib"] + row["peak_mib"]
            figures = [figure(row["scores_mib"]), f"{given:,.1f}", f"{total:,.1f}"]
        cells.append([thousands(row["seq_len"]), row["implementation"], *figures])
    return table("Claim 11: one head, D = 128, fp32, forward", cells)


def in_pytorch(by_pass: dict[str, DataFrame]) -> list[Table]:
    cells = [["", "pass", "peak, MiB", "of standard's"]]
    for passed, of in by_pass.items():
        base = of[(of["implementation"] == FIRST) & (of["status"] == "ok")]["peak_mib"]
        for row in sorted(of.to_dict("records"), key=lambda row: row["implementation"] != FIRST):
            known = len(base) and row["status"] == "ok"
            part = f"{row['peak_mib'] / base.iloc[0]:.0%}" if known else ""
            cells.append([row["implementation"], PASSES[passed], outcome(row, "peak_mib"), part])
    return table("Claim 12: B = 1, H = 8, N = 2048, D = 64, causal, fp16", cells)


def picture(rows: list[Row]) -> str:
    """Peak memory over N, a panel a pass; implementations whose peaks are the same share a line."""
    passes = [passed for passed in PASSES if any(map(measured, series(rows, passed).values()))]
    p = next(row["point"] for row in rows if is_curve(row) and row["result"]["status"] == "ok")
    title = f"Memory of attention, batch 1, {p['heads']} heads of {p['head_dim']}, causal, {p['dtype']}"
    figure, axes = canvas(rows, title, len(passes))
    for at, passed in zip(axes[0], passes, strict=False):
        drawn = series(rows, passed)
        lines = [
            Line(",\n".join(wrapped(group)), measured(drawn[group[0]]), ends=end)
            for group, end in groups(drawn)
        ]
        panel(at, lines, PASSES[passed], "N, tokens", "MiB at the peak beyond the inputs")
    return svg(figure, rows)


def groups(lines: dict[str, Series]) -> list[tuple[list[str], str]]:
    """Names whose lines lie on each other and end alike, and how they end."""
    found: list[tuple[list[str], str]] = []
    for name, of in lines.items():
        points, end = measured(of), ending(of)
        if not points:
            continue
        for names, other_end in found:
            other = measured(lines[names[0]])
            same = points.keys() == other.keys() and end == other_end
            if same and all(abs(points[n] / other[n] - 1) < SAME for n in points):
                names.append(name)
                break
        else:
            found.append(([name], end))
    return found


def fits(rows: list[Row], passed: str) -> tuple[dict[str, float], dict[str, float]]:
    """Exponents of a pass by implementation: of those that grow with the square, and of the others."""
    known = {name: exponent(measured(of)) for name, of in series(rows, passed).items()}
    known = {name: fit for name, fit in known.items() if fit is not None}
    steep = {name: fit for name, fit in known.items() if fit > 1.5}
    return steep, {name: fit for name, fit in known.items() if name not in steep}
