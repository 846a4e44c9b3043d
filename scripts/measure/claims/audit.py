"""What each claim compares, computed from its rows: `python scripts/report.py claims --audit`.

A claim declares the fields in which its contestants differ (`differ`) and those by whose values its rows
are compared apart (`apart`). Whatever else differs between rows that are compared is a fault: a cause of
their figures that the claim does not name. Fields are those of a row's point, its run, and the machine's
versions.
"""

from __future__ import annotations

import ast
import functools
import itertools
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from scripts.measure.claims import Claim, Figures, NotMeasured, Results, Row, all_claims

MACHINE = ("gpu", "driver", "torch", "cuda", "cudnn", "triton")
SQUARE = {"kv_len": "seq_len", "kv_heads": "heads"}  # said only where it is another than these
SHOWN = 8  # values of a field in a line

Fields = dict[str, str]


def audited(results: Results) -> tuple[str, list[int]]:
    """The audit as text, and the numbers of the claims in which it finds faults."""
    said, wrong = [], []
    for claim in all_claims():
        try:
            figures = claim.query(results)
        except NotMeasured as reason:
            said.append(f"Claim {claim.number}: {reason}")
            continue
        found = list(faults(claim, figures.rows))
        wrong += [claim.number] if found else []
        lines = [f"Claim {claim.number}, {claim.verdict(figures)}: {claim.claim}"]
        lines += [*compared(claim, figures.rows), *thresholds(claim, figures)]
        said.append("\n  ".join(lines + [f"FAULT: {fault}" for fault in found]))
    return "\n\n".join(said), wrong


def fields(row: Row) -> Fields:
    """What a row may differ in from others; as in its key, nothing that is false or empty."""
    point = row["point"]
    found = {name: value for name, value in point.items() if value != point.get(SQUARE.get(name, ""))}
    if isinstance(found.get("tile"), dict):
        found |= {f"tile.{name}": value for name, value in found.pop("tile").items()}
    found |= {name: row["machine"].get(name) for name in MACHINE} | {"run": row.get("run_id")}
    return {name: str(value) for name, value in found.items() if value not in (None, "", {}, False)}


def differences(rows: Iterable[Fields]) -> dict[str, list[str]]:
    """The fields that have several values among these rows, with their values."""
    names = dict.fromkeys(name for row in rows for name in row)
    found = {name: list(dict.fromkeys(row.get(name, "none") for row in rows)) for name in names}
    return {name: values for name, values in found.items() if len(values) > 1}


def comparisons(claim: Claim, rows: Iterable[Row]) -> dict[str, list[Fields]]:
    """The rows that are compared with each other, by the values of `apart`."""
    found: dict[str, list[Fields]] = {}
    for row in map(fields, rows):
        found.setdefault(", ".join(f"{name} {row.get(name, 'none')}" for name in claim.apart), []).append(row)
    return found


def faults(claim: Claim, rows: Iterable[Row]) -> Iterator[str]:
    """The differences between rows that are compared that the claim does not name."""
    for where, mine in comparisons(claim, rows).items():
        for name, values in differences(mine).items():
            if name not in claim.differ:
                yield f"{name} differs and is not named: {shown(values)}{where and f' ({where})'}"


def compared(claim: Claim, rows: list[Row]) -> Iterator[str]:
    """The rows; what differs between those that are compared, and between the comparisons; what does not."""
    found, every = comparisons(claim, rows), [*map(fields, rows)]
    inside = dict.fromkeys(name for mine in found.values() for name in differences(mine))
    over = differences(every)
    studies = ", ".join(dict.fromkeys(row["study"] for row in every))
    yield f"{len(every)} rows of {studies} in {len(found)} comparisons"
    for what, names in (("contestants", inside), ("apart", over.keys() - inside.keys())):
        yield from (f"{what}: {name} {shown(over[name])}" for name in over if name in names)
    same = {name: value for row in every[:1] for name, value in row.items() if name not in over}
    if times := sorted(spread(row) for row in rows if "ms_p90" in row["result"]):
        yield f"times: p10 to p90 is {times[len(times) // 2]:.1%} of the median, at most {times[-1]:.1%}"
    yield "alike: " + ", ".join(
        f"{name} {value}" for name, value in same.items() if name not in ("study", "run")
    )


def spread(row: Row) -> float:
    """How far a row's times lie apart, of their median."""
    result = row["result"]
    return (result["ms_p90"] - result["ms_p10"]) / result["ms_median"]


def shown(values: list[str]) -> str:
    more = len(values) - SHOWN
    return ", ".join(values[:SHOWN]) + (f" and {more} more" if more > 0 else "")


def thresholds(claim: Claim, figures: Figures) -> Iterator[str]:
    """Each threshold, whether it is met, and how far the figures in it are from their bounds."""
    for what in ("undecided", "holds", "partly"):
        code = getattr(claim, what).__code__
        body = lambdas(code.co_filename)[code.co_firstlineno].body
        if not isinstance(body, ast.Constant):
            names = {**getattr(claim, what).__globals__, "f": figures}
            met = "yes" if value(body, names) else "no"
            yield "; ".join([f"{what}: {met}: {ast.unparse(body)}", *distances(body, names)])


@functools.cache
def lambdas(file: str) -> dict[int, ast.Lambda]:
    """Those of a source file, by the line."""
    tree = ast.parse(Path(file).read_text(encoding="utf-8"))
    return {node.lineno: node for node in ast.walk(tree) if isinstance(node, ast.Lambda)}


def value(node: ast.expr, names: dict[str, Any]) -> Any:
    return eval(compile(ast.Expression(node), "<threshold>", "eval"), names)


def distances(node: ast.expr, names: dict[str, Any]) -> Iterator[str]:
    """Of the comparisons of two numbers in it."""
    if isinstance(node, ast.BoolOp):
        for part in node.values:
            yield from distances(part, names)
    elif isinstance(node, ast.Compare):
        for sides in itertools.pairwise([node.left, *node.comparators]):
            bound, ours = sides if isinstance(sides[0], ast.Constant) else reversed(sides)
            found, limit = value(ours, names), value(bound, names)
            if isinstance(found, int | float) and isinstance(limit, int | float) and limit:
                yield f"{ast.unparse(ours)} = {found:.4g} is {found / limit:.3g} x {limit:.4g}"
