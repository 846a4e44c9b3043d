"""What the rows of the study `numerics` say: tables and a picture; templates/numerics.md.j2 has the words."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from scripts.measure.instruments.textbook import SAID
from scripts.measure.report.figures import Line, canvas, panel, svg
from scripts.measure.report.pages import page
from scripts.measure.report.tables import SHORT, Record, distinct, listed, records, where
from scripts.measure.studies import Report, Row, Table

MODEL = "GPT2Model("  # transformers', with a flag
GRADIENTS = "_gradients"
SIXTEEN = ("float16", "bfloat16")


def unique(rows: Iterable[Row], key: str) -> list[Any]:
    return list(dict.fromkeys(row["point"][key] for row in rows))


def report(rows: list[Row]) -> Report:
    of = {part: where(records(rows), part=part) for part in ("known", "tiles", "stability", "asked")}
    done = {part: where(mine, status="ok") for part, mine in of.items()}
    tiled = where(done["tiles"], implementation="tiled")
    wished = [r for r in done["asked"] if r.wants]
    names = [name for name in distinct(done["stability"], "implementation") if name not in SAID]
    lost = {r.implementation for r in done["stability"] if broken(r) or broken(r, GRADIENTS)}
    errors = [r.max_error or 0 for r in done["stability"] if r.implementation in set(names) - lost]
    return page(
        "numerics",
        tables(of, done),
        picture(done["stability"]),
        sizes=len({str(r.tile) for r in tiled}),
        epsilons={d: max(r.epsilons for r in where(tiled, dtype=d)) for d in SHORT if where(tiled, dtype=d)},
        worst=max((r.epsilons for r in done["tiles"]), default=0),
        overflow=lambda name, dtype: first_bad(rows, name, dtype),
        measured=lambda name, dtype: where(done["stability"], implementation=name, dtype=dtype),
        said=SAID,
        rounded={dtype: pair for dtype in SIXTEEN if all(pair := at_16(done["stability"], dtype))},
        good=[name for name in names if name not in lost],
        bad=[name for name in names if name in lost],
        error=max(errors, default=0),
        wished=wished,
        others=[r for r in wished if not r.as_asked],
        kinds=kinds(wished),
        refused=len(where(of["asked"], status="unsupported")),
        failed=sorted(
            {(r.implementation, r.part, r.reason) for r in records(rows) if r.status in ("error", "oom")}
        ),
        failures=sum(row["result"]["status"] in ("error", "oom") for row in rows),
    )


def forces(call: str) -> bool:
    """Whether a call leaves nothing else to run: not a list of backends, a flag or a formula to compile."""
    return call.startswith(("sdpa_kernel(", MODEL)) and not call.startswith("sdpa_kernel([")


def prefers(call: str) -> bool:
    """Whether a call names a backend and leaves another to run."""
    return call.startswith(("sdpa_kernel([", "enable_"))


def kinds(wished: list[Record]) -> list[tuple[str, int, int]]:
    """How many ran another kernel, of the calls that leave no other to run and of those that do."""
    found = []
    for what, is_so in (("force one backend", forces), ("state a preference", prefers)):
        if mine := [r for r in wished if is_so(r.implementation)]:
            found.append((what, sum(not r.as_asked for r in mine), len(mine)))
    return found


def at_16(found: list[Record], dtype: str) -> tuple[float | None, ...]:
    """Errors of the formula in 16 bits and of naive, which has fp32 inside, at a factor of 16."""
    mine = where(found, dtype=dtype, magnitude=16)
    of = {r.implementation: r.max_error for r in mine}
    return of.get("formula_torch"), of.get("naive")


def tables(of: dict[str, list[Record]], done: dict[str, list[Record]]) -> list[Table]:
    dtypes = [dtype for dtype in SHORT if dtype in distinct(done["tiles"], "dtype")]
    by: dict[tuple[str, str], dict[str, str]] = {}
    for r in done["tiles"]:
        key = r.implementation, " x ".join(map(str, r.tile)) if r.tile else "default"
        by.setdefault(key, {})[r.dtype] = f"{r.max_error:.1e} ({r.epsilons:.1f})"

    def known(r: Record) -> str:
        pairs = [(r.got[name], r.expected[name]) for name in ("sum", "out")]
        each = ["-|-" if got is None else f"{got:.6f}|{abs(got - exact):.0e}" for got, exact in pairs]
        return "|".join([r.implementation, SHORT[r.dtype], r.features, *each])

    return [
        listed(
            "Known answers: the sum of exp(s - 5) over scores 2, 5, 3, and the output of scores 1, 2, 0.5 on "
            "values 10, 20, 40",
            "implementation|dtype|the keys|sum|its error|output|its error",
            done["known"],
            known,
        ),
        listed(
            "Largest error against fp64 by tile size; in parentheses in epsilons of the dtype, relative to "
            "the largest value",
            "|".join(["implementation", "tile, queries x keys", *map(SHORT.get, dtypes)]),
            by.items(),
            lambda each: "|".join([*each[0], *(each[1].get(dtype, "-") for dtype in dtypes)]),
        ),
        *(
            stability(where(done["stability"], dtype=dtype), dtype, gradients, what)
            for dtype in SIXTEEN
            for gradients, what in (("", "the output"), (GRADIENTS, "dQ, dK and dV"))
        ),
        listed(
            "Requested, and what ran by the profiler's kernels",
            "requested|with|ran|as requested",
            of["asked"],
            asked,
        ),
    ]


def stability(found: list[Record], dtype: str, gradients: str, what: str) -> Table:
    found = [r for r in found if f"nan{gradients}" in r]
    factors = distinct(found, "magnitude")
    largest = {factor: max(r.largest_score for r in where(found, magnitude=factor)) for factor in factors}

    def line(name: str) -> str:
        mine = {r.magnitude: cell(r, gradients) for r in where(found, implementation=name)}
        said = f"{name}: {SAID[name]}" if name in SAID else name
        return "|".join([said, *(mine.get(factor, "") for factor in factors)])

    return listed(
        f"Largest error of {what} against fp64, q and k multiplied by a factor, {SHORT[dtype]}; or the share "
        "of NaN and infinity",
        "|".join(["", *(f"x {factor} (scores to {score:,.3g})" for factor, score in largest.items())]),
        distinct(found, "implementation"),
        line,
    )


def cell(r: Record, gradients: str) -> str:
    shares = {word: share for word in ("NaN", "inf") if (share := r[f"{word.lower()}{gradients}"])}
    bad = [f"{share:.0%} {word}" if share >= 0.005 else f"<1% {word}" for word, share in shares.items()]
    return ", ".join(bad) or f"{r[f'max_error{gradients}']:.1e}"


def asked(r: Record) -> list[str]:
    given = [SHORT[r.dtype], f"D = {r.head_dim}", r.features.replace(",", ", ")]
    if r.status == "ok":
        ran = " and ".join(r.ran) or "no known kernel"
        so = "left to PyTorch" if not r.wants else "yes" if r.as_asked else "NO" if r.said else "NO, silently"
    else:
        ran, refused = "nothing", r.status == "unsupported"
        so = f"refused: {r.reason[:90]}" if refused else f"{r.status}: {r.reason}"
    return [r.implementation, ", ".join(filter(None, given)), ran, so]


def broken(r: dict[str, Any], gradients: str = "") -> bool:
    return r.get(f"nan{gradients}", 0) + r.get(f"inf{gradients}", 0) > 0


def picture(found: list[Record]) -> dict[str, str]:
    """Error against scale, in both dtypes; an x where a line ends in NaN or infinity. Implementations lie on
    top of each other: `naive` and the worst of the others stand for those that survive."""
    if not found:
        return {}
    figure, axes = canvas(found, "Attention on large inputs, against fp64", columns=2)
    for at, dtype in zip(axes.flat, SIXTEEN, strict=True):
        mine = where(found, dtype=dtype)
        if not mine:
            at.remove()
            continue
        every = [line(name, where(mine, implementation=name)) for name in distinct(mine, "implementation")]
        apart = [each for each in every if each.ends or each.name in (*SAID, "naive")]
        others = [each for each in every if each not in apart]
        if others:
            worst = {x: max(each.points.get(x, 0) for each in others) for x in others[0].points}
            apart.append(Line(f"{len(others)} other implementations, the worst", worst, 5))
        said = f"{SHORT[dtype]}: N = {mine[0].seq_len}, D = 64, causal, standard normal q, k, v"
        panel(at, apart, said, "factor on q and k", "largest error of the output")
    return {"": svg(figure, found)}


def line(name: str, found: list[Record]) -> Line:
    """Up to the first factor at which it is no number; an error of nothing is drawn at 1e-5."""
    place = [*SAID].index(name) if name in SAID else None  # formulas, which are no implementations
    points: dict[float, float] = {}
    for r in sorted(found, key=lambda r: r.magnitude):
        if broken(r):
            return Line(name, points, place, f"NaN from x {r.magnitude}")
        points[r.magnitude] = max(r.max_error, 1e-5)
    return Line(name, points, place)


def first_bad(rows: list[Row], name: str, dtype: str) -> tuple[Any, Record] | None:
    """(factor, result) of the first NaN or infinity in the output."""
    mine = where(records(rows), part="stability", status="ok", implementation=name, dtype=dtype)
    worst = min(filter(broken, mine), key=lambda r: r.magnitude, default=None)
    return worst and (worst.magnitude, worst)
