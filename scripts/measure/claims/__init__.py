"""Answers to what the sources claim about attention, each computed from rows: results/CLAIMS.md, which
`python scripts/report.py claims` writes. The other modules of this folder hold the claims, a module a theme:

    @claim(
        17,
        "A KV cache makes generation faster.",            # what the sources say
        theirs="5-10x",                                   # their figures
        holds=lambda f: f.factor >= 5,                    # the threshold, and that of "holds in part";
        partly=lambda f: f.factor > 1,                    # otherwise it does not hold
        differ=("kv_cache",),                             # what contestants differ in, and nothing else,
        apart=("implementation", "seq_len"),              # where these are the same (audit.py)
        figure="{factor:.1f}x",                           # ours, short
        why='''
            A step takes {cached:.2f} ms with the cache.

            With {tiled} it is {tiled_factor:.1f}x.
            ''',
    )
    def steps_with_a_cache(results: Results) -> Figures:  # the query, from rows that may be trusted
        rows = results.ok("kv_cache", passed="generate", seq_len=1024)   # NotMeasured where there are none
        ...
        return Figures(rows, factor=..., cached=..., tiled=..., tiled_factor=...)

A paragraph of `why` is left out where one of its figures is None. The verdict follows from the figures and
the thresholds alone; what has no rows is "not tested here", with the command that measures it.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from string import Formatter
from types import SimpleNamespace
from typing import Any

from scripts.measure.measurements import command_of
from scripts.measure.rows import trusted

Row = dict[str, Any]

HOLDS, IN_PART, FAILS, UNTESTED = "holds", "holds in part", "does not hold", "not tested here"
VERDICTS = (HOLDS, IN_PART, FAILS, UNTESTED)
NUMERICS = ("fp8_error",)  # studies of numbers alone, whose rows may be a CPU's


class NotMeasured(LookupError):
    """No rows for an answer: says which, and the command that measures them."""


class Figures(SimpleNamespace):
    """What a query found, by the names that thresholds and templates use. rows: those that they are from, all
    of them and no others, as what differs between them is audited; command: what measures them, where that
    is not the command of their study."""

    def __init__(self, rows: Iterable[Row], /, command: str = "", **figures: Any) -> None:
        super().__init__(rows=list(rows), command=command, **figures)


@dataclass(frozen=True)
class Answer:
    """What our rows say. figure, why: the templates with their figures; verdict: one of VERDICTS; gpu,
    command: "" where nothing was measured."""

    figure: str
    verdict: str
    why: str
    gpu: str = ""
    command: str = ""


Threshold = Callable[[Any], bool]


@dataclass(frozen=True)
class Claim:
    """An entry of the page; called with results it answers. differ: the fields of rows in which those that
    are compared may differ; apart: those by whose values they are compared apart; source: "tutorial" or
    "paper", where their figures are from; undecided: where the figures cannot decide, and `why` is the
    reason."""

    number: int
    claim: str
    theirs: str
    holds: Threshold
    partly: Threshold
    figure: str
    why: str
    query: Callable[[Results], Figures]
    differ: tuple[str, ...]
    apart: tuple[str, ...] = ()
    source: str = "tutorial"
    undecided: Threshold = lambda f: False

    def verdict(self, f: Any) -> str:
        if self.undecided(f):
            return UNTESTED
        return HOLDS if self.holds(f) else IN_PART if self.partly(f) else FAILS

    def __call__(self, results: Results) -> Answer:
        """Raises NotMeasured where there are no rows."""
        f = self.query(results)
        gpus = dict.fromkeys(row["machine"]["gpu"] or "CPU" for row in f.rows)
        commands = dict.fromkeys([f.command] if f.command else [command_of(folder(row)) for row in f.rows])
        said = [text for part in self.why.split("\n\n") if (text := filled(part, f)) is not None]
        return Answer(
            filled(self.figure, f) or "",
            self.verdict(f),
            " ".join(said),
            ", ".join(gpus),
            ", ".join(f"`{command}`" for command in commands),
        )


def filled(template: str, f: Any) -> str | None:
    """The template on one line, with its figures; None where one of them is None."""
    template = " ".join(template.split())
    names = {name.split("[")[0] for _, name, _, _ in Formatter().parse(template) if name}
    if any(getattr(f, name) is None for name in names):
        return None
    return template.format(**vars(f))


CLAIMS: dict[int, Claim] = {}


def claim(
    number: int, text: str, theirs: str, **entry: Any
) -> Callable[[Callable[[Results], Figures]], Claim]:
    """Make a query the answer to a claim. Raises ValueError for a number that another has."""

    def register(query: Callable[[Results], Figures]) -> Claim:
        if number in CLAIMS:
            raise ValueError(f"claim {number} is answered by {CLAIMS[number].query.__module__} already")
        CLAIMS[number] = Claim(number, text, " ".join(theirs.split()), query=query, **entry)
        return CLAIMS[number]

    return register


def all_claims() -> list[Claim]:
    for module in pkgutil.iter_modules(__path__):
        importlib.import_module(f"{__name__}.{module.name}")
    return [CLAIMS[number] for number in sorted(CLAIMS)]


def answered(results: Results) -> dict[int, Answer]:
    """Every claim's answer, by number; "not tested here" where there are no rows."""
    found = {}
    for each in all_claims():
        try:
            found[each.number] = each(results)
        except NotMeasured as reason:
            found[each.number] = Answer("", UNTESTED, str(reason))
        except Exception as error:
            error.add_note(f"in the answer to claim {each.number}")
            raise
    return found


def study(row: Row) -> str:
    return row["point"]["study"]


def folder(row: Row) -> str:
    """Of results/ that it was read from: hopper has the same study's points as attention."""
    return row.get("folder", study(row))


def matches(row: Row, wanted: dict[str, Any]) -> bool:
    """Whether the point has these values; `passed` is its "pass". A set, tuple or list: one of them."""
    point = row["point"]
    for key, value in wanted.items():
        found = point.get("pass" if key == "passed" else key)
        if found not in value if isinstance(value, set | tuple | list) else found != value:
            return False
    return True


class Results:
    """Rows by study, those of one GPU: the one with the most; read when they are asked for."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._read: dict[str, list[Row]] = {}

    def rows(self, study: str, **wanted: Any) -> list[Row]:
        """Those whose points have the wanted values (`matches`). Raises NotMeasured where there are none."""
        if study not in self._read:
            self._read[study] = self._of(study)
        found = [row for row in self._read[study] if matches(row, wanted)]
        if not found:
            raise missing(study, **(wanted if self._read[study] else {}))
        return found

    def ok(self, study: str, **wanted: Any) -> list[Row]:
        """Those with figures that may be trusted (rows.trusted)."""
        rows = self.rows(study, **wanted)
        found = [row for row in rows if trusted(row["result"])]
        if not found:
            raise missing(study, **wanted)
        return found

    def _of(self, study: str) -> list[Row]:
        from scripts.measure.rows import with_baselines

        files = [with_baselines(path) for path in sorted((self.folder / study).glob("*.jsonl"))]
        if study not in NUMERICS:
            files = [[row for row in rows if row["machine"]["gpu"]] for rows in files]
        return [row | {"folder": study} for row in max(files, key=len, default=[])]


def missing(study: str, **wanted: Any) -> NotMeasured:
    which = ", ".join(f"{'pass' if key == 'passed' else key} {value}" for key, value in wanted.items())
    return NotMeasured(f"no rows of {study}{f' with {which}' if which else ''}: run `{command_of(study)}`")


def of(rows: Iterable[Row], **wanted: Any) -> Row:
    """The newest of these rows with the wanted values. Raises NotMeasured where there is none."""
    rows = list(rows)
    found = [row for row in rows if matches(row, wanted)]
    if not found:
        raise missing(study(rows[0]) if rows else "?", **wanted)
    return found[-1]


def ms(row: Row) -> float:
    return row["result"]["ms_median"]


def name(row: Row) -> str:
    return row["point"]["implementation"]


def listed(template: str, items: Iterable[tuple[Any, ...]], joint: str = ", ") -> str:
    """A list in a sentence: the template with each item's values."""
    return joint.join(template.format(*item) for item in items)


def by_length(factors: dict[int, float], figures: int = 1) -> str:
    """Factors in a sentence."""
    return ", ".join(f"{factor:.{figures}f}x at N = {n:,}" for n, factor in factors.items())
