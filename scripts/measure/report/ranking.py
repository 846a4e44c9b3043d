"""Who is fastest at what, from results/attention, hopper (the newer row of a point) and generate:
attention/auto_table.py."""

from __future__ import annotations

import statistics
from collections.abc import Iterable
from typing import Any

from attention import registry
from attention.auto import LAST, SHORT
from scripts.measure.rows import trusted

Row = dict[str, Any]
Class = tuple[tuple[int, int], int, str, str, int | None, int | None]
# Compute capability by what a GPU's name contains; others are not ranked.
GPUS = {"H100": (9, 0), "H200": (9, 0), "GH200": (9, 0), "A100": (8, 0), "B200": (10, 0)}
HEAD_DIMS = (64, 128, 256)
BITS = {"float16": 16, "bfloat16": 16, "float32": 32}


def right(row: Row) -> bool:
    """Trusted, or refused or out of memory; its error may be one that could not be told at this shape."""
    result = row["result"]
    told = result | {"error_ratio": result.get("error_ratio") or 0.0}
    return result["status"] in ("unsupported", "oom") or trusted(told)


def newest(rows: Iterable[Row], others: Iterable[Row]) -> list[Row]:
    """`rows`, each replaced by that of the same point and GPU in `others`, if it is trusted and no older."""
    known = {(row["machine"]["gpu"], row["key"]): row for row in others if trusted(row["result"])}
    pairs = ((known.get((row["machine"]["gpu"], row["key"]), row), row) for row in rows)
    return [max(pair, key=lambda row: row["machine"]["date"]) for pair in pairs]


def arch_of(row: Row) -> tuple[int, int] | None:
    return next((arch for name, arch in GPUS.items() if name in (row["machine"]["gpu"] or "")), None)


def is_ranked(name: str) -> bool:
    """Whether auto may take it for its speed: not what chooses, as that is one of the others, nor what writes
    the scores, nor what it takes last whatever the speed."""
    made = registry.declaration(name)
    return name in registry.names() and not (made.dispatches_to or made.writes_scores or name in LAST)


def decodes_fast(name: str) -> bool:
    """The same for a compiled step over a cache, which fuses naive attention."""
    made = registry.declaration(name)
    choosing = made.dispatches_to == "implementations"
    return name in registry.names() and not (choosing or made.launches_each_tile)


# Options that few implementations have: their rows would rank these first for every window.
FEW_HAVE = ("sparsity", "relative_bias")


def classes(rows: Iterable[Row]) -> dict[Class, dict[tuple, dict[str, list[Row]]]]:
    """Class -> point -> implementation -> its rows: forward and backward together are training."""
    found: dict[Class, dict[tuple, dict[str, list[Row]]]] = {}
    for row in rows:
        p, arch = row["point"], arch_of(row)
        if arch is None or p["pass"] == "both" or not is_ranked(p["implementation"]):
            continue
        if any(option in p["features"] for option in FEW_HAVE):
            continue
        mask = "masked" if p["features"] else "causal" if p["causal"] else "full"
        dim = next((d for d in HEAD_DIMS if p["head_dim"] <= d), HEAD_DIMS[-1])
        longest = SHORT if p["kv_len"] <= SHORT else None
        point = tuple(value for key, value in p.items() if key not in ("implementation", "pass", "study"))
        workloads = {"forward": ("forward", "training"), "backward": ("training",), "decode": ("decode",)}
        for workload in workloads[p["pass"]]:
            key = (arch, BITS[p["dtype"]], workload, mask, dim, longest)
            named = found.setdefault(key, {}).setdefault((row["machine"]["gpu"], *point), {})
            named.setdefault(p["implementation"], []).append(row)
    return found


def ranked(points: dict[tuple, dict[str, list[Row]]], passes: int) -> dict[str, float]:
    """Implementations, fastest first, with the geometric mean of their time over that of the fastest at each
    point. One that was wrong anywhere is left out, one with no time somewhere comes after the others."""
    ratios: dict[str, list[float]] = {}
    names = {name for point in points.values() for name in point}
    rows = {name: [row for point in points.values() for row in point.get(name, [])] for name in names}
    checked = {
        name for name in names if any(row["result"].get("error_ratio") is not None for row in rows[name])
    }
    names = {name for name in checked if all(map(right, rows[name]))}
    full = 0
    # Where some were not measured, those that were are not compared with the fastest.
    for point in [p for p in points.values() if names <= p.keys()] or points.values():
        ms = {
            name: sum(row["result"]["ms_median"] for row in point[name])
            for name in names & point.keys()
            if len(point[name]) == passes and all(row["result"]["status"] == "ok" for row in point[name])
        }
        full += bool(ms)
        for name, value in ms.items():
            ratios.setdefault(name, []).append(value / min(ms.values()))
    means = {name: statistics.geometric_mean(values) for name, values in ratios.items()}
    return dict(sorted(means.items(), key=lambda item: (full - len(ratios[item[0]]), item[1], item[0])))


def ranking(rows: Iterable[Row]) -> dict[Class, dict[str, float]]:
    """Class -> implementations, fastest first; training only where forward and backward were measured."""
    found = {key: ranked(points, 2 if key[2] == "training" else 1) for key, points in classes(rows).items()}
    return {key: names for key, names in sorted(found.items(), key=lambda item: _order(item[0])) if names}


def _order(key: Class) -> tuple[Any, ...]:
    arch, bits, workload, mask, dim, longest = key
    workloads = ("training", "forward", "decode", "compiled decode")
    masks = ("causal", "full", "masked")
    return arch, bits, workloads.index(workload), masks.index(mask), dim or 0, longest or float("inf")


def compiled_decode(rows: Iterable[Row]) -> dict[Class, dict[str, float]]:
    """The same for compiled decoding over a cache, from results/generate: where two or more were measured."""
    points: dict[Class, dict[tuple, dict[str, float]]] = {}
    for row in rows:
        p, arch = row["point"], arch_of(row)
        if arch is None or not (p["kv_cache"] and p["compile"]) or not decodes_fast(p["implementation"]):
            continue
        if row["result"]["status"] != "ok":
            continue
        longest = SHORT if p["prompt"] + p["new_tokens"] <= SHORT else None
        point = tuple(value for key, value in p.items() if key != "implementation")
        key = (arch, BITS[p["dtype"]], "compiled decode", "masked", None, longest)
        here = points.setdefault(key, {}).setdefault((row["machine"]["gpu"], *point), {})
        here[p["implementation"]] = row["result"]["tokens_per_s"]
    found = {}
    for key, of in points.items():
        ratios: dict[str, list[float]] = {}
        whole = [speeds for speeds in of.values() if len(speeds) > 1]
        for speeds in whole:
            for name, speed in speeds.items():
                ratios.setdefault(name, []).append(max(speeds.values()) / speed)
        means = {name: statistics.geometric_mean(values) for name, values in ratios.items()}
        if means:
            found[key] = dict(sorted(means.items(), key=lambda x: (len(whole) - len(ratios[x[0]]), x[1])))
    return found


def table_source(ranks: dict[Class, dict[str, float]]) -> str:
    """attention/auto_table.py: the ranks."""
    lines = [
        '"""Implementations by measured speed, as `python scripts/report.py` writes it: not to be edited."""',
        "",
        "from __future__ import annotations",
        "",
        "Ranking = tuple[tuple[int | None, int | None, str], ...]",
        "# (compute capability, bits of a dtype, workload, mask) -> (head dim and keys up to, fastest first)",
    ]
    kind = "MEASURED: dict[tuple[tuple[int, int], int, str, str], Ranking] = {"
    groups: dict[tuple, list[str]] = {}
    for (*key, dim, longest), names in ranks.items():
        entry = f'        ({dim}, {longest}, "{" ".join(names)}"),'
        if len(entry) > 110:  # as ruff formats it
            parts = str(dim), str(longest), f'"{" ".join(names)}"'
            entry = "\n".join(["        (", *(f"            {part}," for part in parts), "        ),"])
        groups.setdefault(tuple(key), []).append(entry)
    lines.append(kind if groups else kind + "}")
    for (arch, bits, workload, mask), entries in groups.items():
        lines += [f'    ({arch}, {bits}, "{workload}", "{mask}"): (', *entries, "    ),"]
    return "\n".join([*lines, *(["}"] if groups else []), ""])
