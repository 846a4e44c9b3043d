"""Tables, picture and findings of attention_memory, from its rows."""

from __future__ import annotations

import math
from collections.abc import Callable

from attention import registry
from scripts.measure.report.figures import Line, canvas, panel, svg, thousands, wrapped
from scripts.measure.studies import Row, Table

Series = dict[int, Row]  # by N
PASSES = {"forward": "forward", "both": "forward + backward"}
SAME = 0.1  # peaks this close at all N are one line of the picture
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


def cell(row: Row | None, field: str = "peak_mib") -> str:
    if row is None:
        return ""
    result = row["result"]
    if result["status"] != "ok":
        slow = result["status"] == "error" and result.get("not_tried")
        return "slow" if slow else {"unsupported": "-"}.get(result["status"], result["status"])
    value = result[field]
    return f"{value:,.1f}" if value < 100 else f"{value:,.0f}"


def tables(rows: list[Row]) -> list[Table]:
    return [
        *curves(rows),
        *exponents(rows),
        *growth(rows),
        *compared(rows),
        *one_head(rows),
        *in_pytorch(rows),
    ]


def curves(rows: list[Row]) -> list[Table]:
    found = []
    for passed, said in PASSES.items():
        lines = series(rows, passed)
        lengths = sorted({n for of in lines.values() for n in of})
        if not lengths:
            continue
        body = [[name, *(cell(of.get(n)) for n in lengths)] for name, of in lines.items() if shown(of)]
        any_row = {n: row for of in lines.values() for n, row in measured_rows(of).items()}
        for label, field in (("(scores, computed)", "scores_mib"), ("(scores in fp32)", "scores_fp32_mib")):
            body.append([label, *(cell(any_row.get(n), field) for n in lengths)])
        p = next(iter(lines.values()))[lengths[-1]]["point"]
        title = f"{said}: MiB at the peak beyond the inputs; batch 1, {p['heads']} heads of {p['head_dim']}, "
        found.append(Table(f"{title}causal, {p['dtype']}", [["N", *map(thousands, lengths)], *body]))
    return found


def shown(of: Series) -> bool:
    """Whether it can do this at all."""
    return any(row["result"]["status"] != "unsupported" for row in of.values())


def measured_rows(of: Series) -> Series:
    return {n: row for n, row in of.items() if row["result"]["status"] == "ok"}


def exponents(rows: list[Row]) -> list[Table]:
    """How peaks, and what is beyond the outputs, grow."""
    lines = [["", *(f"{said}, {what}" for said in PASSES.values() for what in ("peak", "extra"))]]
    by_pass = {passed: series(rows, passed) for passed in PASSES}
    for name in dict.fromkeys(name for found in by_pass.values() for name in found):
        fits = [
            exponent(measured(by_pass[passed].get(name, {}), field))
            for passed in PASSES
            for field in ("peak_mib", "extra_mib")
        ]
        if any(fit is not None for fit in fits):
            lines.append([name, *("" if fit is None else f"{fit:.2f}" for fit in fits)])
    title = (
        "Exponent p of N^p, fitted over the upper half of the N; extra: the peak less out (and dq, dk, dv)"
    )
    return [Table(title, lines)] if len(lines) > 1 else []


def growth(rows: list[Row]) -> list[Table]:
    """Claim 1: 32 GiB of scores against 8 MiB of statistics; and growth from 1k to 16k."""
    found = []
    big = series(rows, "forward", lambda row: (row["point"]["batch"], row["point"]["heads"]) == (8, 32))
    lines = [["", "peak, MiB", "extra, MiB", "scores computed", "row statistics computed"]]
    for name, of in big.items():
        for row in of.values():
            figures = (cell(row, field) for field in ("peak_mib", "extra_mib", "scores_mib", "lse_mib"))
            lines.append([name, *figures])
    if len(lines) > 1:
        found.append(Table("Claim 1: forward, B = 8, H = 32, N = 8192, D = 64, causal, fp16", lines))
    lengths = [2**n for n in range(10, 15)]
    lines = [["extra memory, N =", *map(thousands, lengths)]]
    for name, of in series(rows, "forward").items():
        extra = measured(of, "extra_mib")
        if extra.get(lengths[0], 0) > 0:
            lines.append(
                [name, *(f"{extra[n] / extra[lengths[0]]:.1f}x" if n in extra else "" for n in lengths)]
            )
    if len(lines) > 1:
        found.append(Table("Claim 1: growth from N = 1k, forward", lines))
    return found


def compared(rows: list[Row]) -> list[Table]:
    """Claim 2: standard attention over tiles, with and without the inputs in both."""
    of_claim = series(rows, "both", lambda row: (row["point"]["batch"], row["point"]["heads"]) == (16, 8))
    standard = measured_rows(of_claim.pop("standard", {}))
    found = []
    for what, fields in {"peak": ("peak_mib",), "peak and inputs": ("peak_mib", "inputs_mib")}.items():
        lines = [["standard over", *map(thousands, standard)]]
        for name, of in of_claim.items():
            ratios = {
                n: ratio(standard[n], row, fields) for n, row in measured_rows(of).items() if n in standard
            }
            if ratios:
                lines.append([name, *(f"{ratios[n]:.1f}x" if n in ratios else "" for n in standard)])
        if len(lines) > 1:
            title = f"Claim 2: {what}, B = 16, H = 8, D = 64, causal, fp16, forward + backward"
            found.append(Table(title, lines))
    return found


def ratio(above: Row, below: Row, fields: tuple[str, ...] = ("peak_mib",)) -> float:
    return sum(above["result"][f] for f in fields) / sum(below["result"][f] for f in fields)


def one_head(rows: list[Row]) -> list[Table]:
    """Claim 11."""
    found = series(rows, "forward", lambda row: (row["point"]["heads"], row["point"]["head_dim"]) == (1, 128))
    lines = [["N", "implementation", "scores, MiB", "q, k, v, out", "peak and inputs"]]
    flat = [(n, name, row) for name, of in found.items() for n, row in of.items()]
    for n, name, row in sorted(flat, key=lambda at: at[:2]):
        r = row["result"]
        if r["status"] == "ok":
            given, total = r["inputs_mib"] + r["outputs_mib"], r["inputs_mib"] + r["peak_mib"]
            figures = [cell(row, "scores_mib"), f"{given:,.1f}", f"{total:,.1f}"]
        else:
            figures = ["", "", cell(row)]
        lines.append([thousands(n), name, *figures])
    return [Table("Claim 11: one head, D = 128, fp32, forward", lines)] if len(lines) > 1 else []


def in_pytorch(rows: list[Row]) -> list[Table]:
    """Claim 12."""
    lines = [["", "pass", "peak, MiB", "of standard's"]]
    for passed, said in PASSES.items():
        found = series(rows, passed, lambda row: (row["point"]["batch"], row["point"]["heads"]) == (1, 8))
        standard = next(iter(measured_rows(found.get("standard", {})).values()), None)
        for name, of in found.items():
            for row in of.values():
                known = standard is not None and row["result"]["status"] == "ok"
                part = f"{1 / ratio(standard, row):.0%}" if known else ""
                lines.append([name, said, cell(row), part])
    title = "Claim 12: B = 1, H = 8, N = 2048, D = 64, causal, fp16"
    return [Table(title, lines)] if len(lines) > 1 else []


def picture(rows: list[Row]) -> str:
    """Peak memory over N, a panel a pass; implementations whose peaks are the same share a line."""
    passes = [passed for passed in PASSES if any(map(measured, series(rows, passed).values()))]
    p = next(row["point"] for row in rows if is_curve(row) and row["result"]["status"] == "ok")
    title = f"Memory of attention, batch 1, {p['heads']} heads of {p['head_dim']}, causal, {p['dtype']}"
    figure, axes = canvas(rows, title, len(passes))
    found = {name for passed in PASSES for name in series(rows, passed)}
    names = sorted(found, key=lambda name: (not registry.declaration(name).writes_scores, name))
    for at, passed in zip(axes[0], passes, strict=False):
        drawn = series(rows, passed)
        lines = [
            Line(",\n".join(wrapped(group)), measured(drawn[group[0]]), names.index(group[0]), end)
            for group, end in groups(drawn)
        ]
        panel(at, lines, PASSES[passed], "N, tokens", "MiB at the peak beyond the inputs")
        at.set_ylim(bottom=0.8 * min(min(line.points.values()) for line in lines))
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


def notes(rows: list[Row]) -> list[str]:
    found = []
    for passed, said in PASSES.items():
        for group in fits(rows, passed):
            if group:
                low, high = min(group.values()), max(group.values())
                found.append(f"{said}: exponents of {low:.2f} to {high:.2f}: {', '.join(group)}.")
        ends = {name: ending(of) for name, of in series(rows, passed).items()}
        if ends := {name: end for name, end in ends.items() if end}:
            found.append(f"{said}: {'; '.join(f'{name} {end}' for name, end in ends.items())}.")
    doubtful = {row["result"]["verdict"] for row in rows if not row["result"].get("kernels_ok", True)}
    return found + [f"Not the kernels asked for: {words}" for words in sorted(doubtful)]


def finding(rows: list[Row]) -> str:
    """The largest exponents of forward and backward, where there are both kinds."""
    steep, others = fits(rows, "both")
    if not (steep and others):
        return ""
    square, linear = max(steep.values()), max(others.values())
    said = "Forward and backward, memory grows as"
    return f"{said} N^{square:.2f} where scores are written, as N^{linear:.2f} elsewhere."
