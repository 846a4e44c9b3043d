"""What the rows of the study `numerics` say: tables, a picture, findings."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from scripts.measure.instruments.textbook import SAID
from scripts.measure.report.figures import Line, canvas, panel, svg
from scripts.measure.studies import Table

Row = dict[str, Any]

SHORT = {"float64": "fp64", "float32": "fp32", "float16": "fp16", "bfloat16": "bf16"}
LARGEST_FP16 = 65504


def of_part(rows: list[Row], part: str, **wanted: Any) -> list[Row]:
    """Those of a part, measured, with these values in their points."""
    return [
        row
        for row in rows
        if row["point"]["part"] == part
        and row["result"]["status"] == "ok"
        and all(row["point"].get(key) == value for key, value in wanted.items())
    ]


def unique(rows: Iterable[Row], key: str) -> list[Any]:
    return list(dict.fromkeys(row["point"][key] for row in rows))


def tables(rows: list[Row]) -> list[Table]:
    """Those that have rows."""
    found = [known(of_part(rows, "known")), tiles(of_part(rows, "tiles"))]
    for dtype in ("float16", "bfloat16"):
        mine = of_part(rows, "stability", dtype=dtype)
        found.append(stability(mine, dtype, "", "Largest error of the output"))
        found.append(stability(mine, dtype, "_gradients", "Largest error of dQ, dK and dV"))
    found.append(asked([row for row in rows if row["point"]["part"] == "asked"]))
    return [table for table in found if len(table.lines) > 1]


def known(rows: list[Row]) -> Table:
    title = "Known answers: the sum of exp(s - 5) over scores 2, 5, 3, and the output of scores 1, 2, 0.5 on "
    title += "values 10, 20, 40"
    lines = [["implementation", "dtype", "the keys", "sum", "its error", "output", "its error"]]
    for row in rows:
        point, got, wanted = row["point"], row["result"]["got"], row["result"]["expected"]
        cells = [point["implementation"], SHORT[point["dtype"]], point["features"]]
        for name in ("sum", "out"):
            if got[name] is None:
                cells += ["-", "-"]
            else:
                cells += [f"{got[name]:.6f}", f"{abs(got[name] - wanted[name]):.0e}"]
        lines.append(cells)
    return Table(title, lines)


def tiles(rows: list[Row]) -> Table:
    title = "Largest error against fp64 by tile, and in epsilons of the dtype (of the largest value)"
    dtypes = [dtype for dtype in SHORT if dtype in unique(rows, "dtype")]
    lines = [["implementation", "tile, queries x keys", *(SHORT[dtype] for dtype in dtypes)]]
    by: dict[tuple[str, str], dict[str, str]] = {}
    for row in rows:
        tile, result = row["point"]["tile"], row["result"]
        key = row["point"]["implementation"], " x ".join(map(str, tile)) if tile else "its own"
        cell = f"{result['max_error']:.1e} ({result['epsilons']:.1f})"
        by.setdefault(key, {})[row["point"]["dtype"]] = cell
    lines += [[*key, *(cells.get(dtype, "-") for dtype in dtypes)] for key, cells in by.items()]
    return Table(title, lines)


def stability(rows: list[Row], dtype: str, of: str, what: str) -> Table:
    """`of`: "" for the output, "_gradients"."""
    rows = [row for row in rows if f"nan{of}" in row["result"]]
    magnitudes = unique(rows, "magnitude")
    heads = []
    for magnitude in magnitudes:
        largest = max(r["result"]["largest_score"] for r in rows if r["point"]["magnitude"] == magnitude)
        heads.append(f"x {magnitude} (scores to {largest:,.3g})")
    lines = [["", *heads]]
    for name in unique(rows, "implementation"):
        mine = {row["point"]["magnitude"]: row["result"] for row in rows if named(row, name)}
        cells = [cell(mine.get(magnitude), of) for magnitude in magnitudes]
        lines.append([f"{name}: {SAID[name]}" if name in SAID else name, *cells])
    return Table(f"{what} against fp64 as q and k grow, {SHORT[dtype]}; the share that is no number", lines)


def named(row: Row, name: str) -> bool:
    return row["point"]["implementation"] == name


def cell(result: dict[str, Any] | None, of: str) -> str:
    if result is None:
        return ""
    shares = {word: share for word in ("nan", "inf") if (share := result[f"{word}{of}"])}
    bad = [f"{share:.0%} {word}" if share >= 0.005 else f"<1% {word}" for word, share in shares.items()]
    error = result[f"max_error{of}"]
    return ", ".join(bad or [f"{error:.1e}"]).replace("nan", "NaN")


def asked(rows: list[Row]) -> Table:
    lines = [["asked for", "with", "ran", "as asked"]]
    for row in rows:
        point, result = row["point"], row["result"]
        dtype, dim = SHORT[point["dtype"]], point["head_dim"]
        given = ", ".join(filter(None, [dtype, f"D = {dim}", point["features"].replace(",", ", ")]))
        if result["status"] == "ok":
            choice = "left to PyTorch" if not point["wants"] else "yes" if result["as_asked"] else "NO"
            ran = " and ".join(result["ran"]) or "nothing that is known here"
            silent = choice == "NO" and not result["said"]
            lines.append([point["implementation"], given, ran, choice + (", silently" if silent else "")])
        elif result["status"] == "unsupported":
            lines.append([point["implementation"], given, "nothing", f"refused: {result['reason'][:90]}"])
        else:
            lines.append(
                [point["implementation"], given, "nothing", f"{result['status']}: {result['reason']}"]
            )
    return Table("Asked for, and run by the profiler's kernels", lines)


def broken(result: dict[str, Any], of: str = "") -> bool:
    return result[f"nan{of}"] + result[f"inf{of}"] > 0


def pictures(rows: list[Row]) -> dict[str, str]:
    """Error against scale, in both dtypes; an x where a line ends in NaN or infinity. Implementations lie on
    top of each other: `naive` and the worst of the others stand for those that survive."""
    found = of_part(rows, "stability")
    if not found:
        return {}
    figure, axes = canvas(found, "Attention on large inputs, against fp64", columns=2)
    for at, dtype in zip(axes.flat, ("float16", "bfloat16"), strict=True):
        mine = [row for row in found if row["point"]["dtype"] == dtype]
        if not mine:
            at.remove()
            continue
        every = [line(name, [r for r in mine if named(r, name)]) for name in unique(mine, "implementation")]
        apart = [each for each in every if each.ends or each.name in (*SAID, "naive")]
        others = [each for each in every if each not in apart]
        if others:
            worst = {x: max(each.points.get(x, 0) for each in others) for x in others[0].points}
            apart.append(Line(f"{len(others)} other implementations, the worst", worst, 5))
        said = f"{SHORT[dtype]}: N = {mine[0]['point']['seq_len']}, D = 64, causal, standard normal q, k, v"
        panel(at, apart, said, "factor on q and k", "largest error of the output")
    return {"": svg(figure, found)}


def line(name: str, rows: list[Row]) -> Line:
    """Up to the first factor at which it is no number; an error of nothing is drawn at 1e-5."""
    place = [*SAID, "", "naive"].index(name) if name in (*SAID, "naive") else 7
    points: dict[float, float] = {}
    for row in sorted(rows, key=lambda row: row["point"]["magnitude"]):
        if broken(row["result"]):
            return Line(name, points, place, f"NaN from x {row['point']['magnitude']}")
        points[row["point"]["magnitude"]] = max(row["result"]["max_error"], 1e-5)
    return Line(name, points, place)


def notes(rows: list[Row]) -> list[str]:
    return [note for say in (exact_note, *STABILITY_NOTES, asked_note, failed_note) if (note := say(rows))]


def failed_note(rows: list[Row]) -> str:
    bad = [row for row in rows if row["result"]["status"] in ("error", "oom")]
    said = {
        f"{row['point']['implementation']} ({row['point']['part']}): {row['result']['reason']}" for row in bad
    }
    return f"{len(bad)} points failed: {'; '.join(sorted(said))}." if bad else ""


def exact_note(rows: list[Row]) -> str:
    found = of_part(rows, "tiles", implementation="tiled")
    if not found:
        return ""
    said = []
    for dtype in (d for d in SHORT if d in unique(found, "dtype")):
        mine = [row["result"]["epsilons"] for row in found if row["point"]["dtype"] == dtype]
        said.append(f"{max(mine):.1f} in {SHORT[dtype]}")
    number = len({str(row["point"]["tile"]) for row in found})
    return (
        f"Online softmax is exact but for rounding: with {number} sizes of tiles the error of `tiled` is at "
        f"most {', '.join(said)} epsilons of the largest value; of all implementations {worst(rows):.1f}."
    )


def worst(rows: list[Row]) -> float:
    """The largest error of all tiles of all implementations, in epsilons."""
    return max(row["result"]["epsilons"] for row in of_part(rows, "tiles"))


def first_bad(rows: list[Row], name: str, dtype: str) -> tuple[Any, dict[str, Any]] | None:
    """(factor, result) of the first NaN or infinity in the output."""
    mine = of_part(rows, "stability", implementation=name, dtype=dtype)
    bad = [row for row in mine if broken(row["result"])]
    worst = min(bad, key=lambda row: row["point"]["magnitude"], default=None)
    return worst and (worst["point"]["magnitude"], worst["result"])


def _overflow(name: str, dtype: str, why: str) -> Callable[[list[Row]], str]:
    def say(rows: list[Row]) -> str:
        found = of_part(rows, "stability", implementation=name, dtype=dtype)
        if not found:
            return ""
        if (bad := first_bad(rows, name, dtype)) is None:
            return f"{SAID[name].capitalize()} has no NaN here in {SHORT[dtype]}."
        factor, result = bad
        sizes = f"scores to {result['largest_score']:,.3g}, q k to {result['largest_product']:,.3g}"
        return f"In {SHORT[dtype]}, {SAID[name]} gives NaN from a factor of {factor} on ({sizes}): {why}."

    return say


def survivors(rows: list[Row]) -> str:
    """Who has no NaN and no infinity at any factor, outputs and gradients, and how far off."""
    found = of_part(rows, "stability")
    names = [name for name in unique(found, "implementation") if name not in SAID]
    bad = [
        name
        for name in names
        if any(
            broken(row["result"])
            or ("nan_gradients" in row["result"] and broken(row["result"], "_gradients"))
            for row in found
            if named(row, name)
        )
    ]
    if not names:
        return ""
    good = [name for name in names if name not in bad]
    worst = max(
        (row["result"]["max_error"] or 0 for row in found if row["point"]["implementation"] in good),
        default=0,
    )
    said = (
        f"No NaN and no infinity at any factor, outputs and gradients: {', '.join(good) or 'none'} (error of "
    )
    said += f"the output at most {worst:.1e})."
    if "naive" in good:
        said += " `naive` is among them: it writes all scores out, but in fp32."
    return said + (f" Not so: {', '.join(bad)}." if bad else "")


def precision(rows: list[Row]) -> str:
    """Rounding scores to 16 bits costs the result long before anything overflows."""
    said = []
    for dtype in ("float16", "bfloat16"):
        errors = {
            name: {row["point"]["magnitude"]: row["result"]["max_error"] for row in found}
            for name in ("formula_torch", "naive")
            if (found := of_part(rows, "stability", implementation=name, dtype=dtype))
        }
        if len(errors) == 2 and errors["formula_torch"].get(16) and errors["naive"].get(16):
            plain, wide = errors["formula_torch"][16], errors["naive"][16]
            said.append(f"{plain:.1e} in {SHORT[dtype]} at a factor of 16 where fp32 scores give {wide:.1e}")
    where = ", ".join(said)
    return f"Scores kept in 16 bits lose the result long before they overflow: {where}." if said else ""


STABILITY_NOTES = (
    _overflow("formula_no_max", "float16", "exp(s) passes 65,504 at s = 11.1"),
    _overflow("formula_torch", "float16", "the product itself passes 65,504, and inf - inf is NaN"),
    _overflow("formula_no_max_fp32", "float16", "exp(s) passes fp32's 3.4e38 at s = 88.7: it is the missing "
              "maximum, not the 16 bits"),
    precision,
    survivors,
)  # fmt: skip


def with_wishes(rows: list[Row]) -> tuple[list[Row], list[Row]]:
    """Calls that ran and had asked for a kernel, and those of them that took another."""
    found = [row for row in of_part(rows, "asked") if row["point"]["wants"]]
    return found, [row for row in found if not row["result"]["as_asked"]]


def asked_note(rows: list[Row]) -> str:
    found, wrong = with_wishes(rows)
    if not found:
        return ""
    silent = [row for row in wrong if not row["result"]["said"]]
    named_ = dict.fromkeys(row["point"]["implementation"] for row in wrong)
    refused = [
        row for row in rows if row["point"]["part"] == "asked" and row["result"]["status"] == "unsupported"
    ]
    said = f"{len(wrong)} of {len(found)} calls that ran took another kernel than they asked for"
    said += f", {len(silent)} of them without a word ({'; '.join(named_)})" if wrong else ""
    return f"{said}; {len(refused)} were refused with a reason. Only the kernels' names tell."


def finding(rows: list[Row]) -> str:
    found, wrong = with_wishes(rows)
    if not (found and of_part(rows, "tiles", implementation="tiled")):
        return ""
    calls = f"{len(wrong)} of {len(found)} calls ran another kernel than they asked for"
    return f"Exact within {worst(rows):.1f} epsilons; {calls}."
