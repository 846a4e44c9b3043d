"""Answers to what the sources claim about attention, each computed from rows: results/CLAIMS.md, which
`python scripts/report.py claims` writes.

The claims are in sources.py. Any other module of this folder answers some of them, from rows alone:

    @answers(17)
    def steps_with_a_cache(results: Results) -> Answer:
        rows = results.ok("kv_cache", passed="generate", seq_len=1024)   # NotMeasured where there are none
        cached, not_cached = (of(rows, kv_cache=on)["result"]["ms_median"] for on in (True, False))
        factor = not_cached / cached
        return answer(rows, f"{factor:.1f}x", graded(factor, 5), f"A step takes {cached:.2f} ms with ...")

The verdict is decided by a threshold in code, whose reason is in a comment, and `why` is a sentence composed
with the figures: neither is typed. What has no rows raises NotMeasured, which becomes "not tested here".
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from scripts.measure.rows import trusted

Row = dict[str, Any]

HOLDS, IN_PART, FAILS, UNTESTED = "holds", "holds in part", "does not hold", "not tested here"
VERDICTS = (HOLDS, IN_PART, FAILS, UNTESTED)
# What measures a study, where that is not scripts/studies/<study>.py.
COMMANDS = {
    "attention": "python scripts/bench_attention.py",
    "cuda_ladder": "python scripts/bench_ladder.py",
    "generate": "python scripts/bench_generate.py",
    "gpt2_124m": "python scripts/bench_train.py --nanogpt nanoGPT/model.py",
    "parity": "python scripts/parity.py",
    "roofline": "python scripts/roofline.py",
}


@dataclass(frozen=True)
class Claim:
    """What the sources say. source: "tutorial" or "paper", where their figures are from."""

    number: int
    claim: str
    figures: str
    source: str = "tutorial"


@dataclass(frozen=True)
class Answer:
    """What our rows say. figure: ours, short, with its unit; verdict: one of VERDICTS; why: a sentence or
    two; gpu, command: "" where nothing was measured."""

    figure: str
    verdict: str
    why: str
    gpu: str = ""
    command: str = ""

    def __post_init__(self) -> None:
        if self.verdict not in VERDICTS:
            raise ValueError(f"{self.verdict!r} is no verdict: one of {', '.join(VERDICTS)}")


class NotMeasured(LookupError):
    """No rows for an answer: says which, and the command that measures them."""


def command_of(study: str) -> str:
    return COMMANDS.get(study, f"python scripts/study.py {study}")


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
        return max(([row for row in rows if row["machine"]["gpu"]] for rows in files), key=len, default=[])


def missing(study: str, **wanted: Any) -> NotMeasured:
    which = ", ".join(f"{'pass' if key == 'passed' else key} {value}" for key, value in wanted.items())
    return NotMeasured(f"no rows of {study}{f' with {which}' if which else ''}: run `{command_of(study)}`")


def of(rows: Iterable[Row], **wanted: Any) -> Row:
    """The newest of these rows with the wanted values. Raises NotMeasured where there is none."""
    rows = list(rows)
    found = [row for row in rows if matches(row, wanted)]
    if not found:
        raise missing(rows[0]["point"]["study"] if rows else "?", **wanted)
    return found[-1]


def graded(ours: float, claimed: float, least: float = 1.0) -> str:
    """The verdict on a factor: at least as large as claimed, or in its direction (above `least`), or not."""
    return HOLDS if ours >= claimed else IN_PART if ours > least else FAILS


def answer(rows: Iterable[Row], figure: str, verdict: str, why: str, command: str = "") -> Answer:
    """An answer from these rows, with their GPU and the command of their study, or the one given."""
    rows = list(rows)
    gpus = ", ".join(dict.fromkeys(row["machine"]["gpu"] for row in rows))
    commands = ", ".join(dict.fromkeys(f"`{command_of(row['point']['study'])}`" for row in rows))
    return Answer(figure, verdict, why, gpus, f"`{command}`" if command else commands)


Answering = Callable[[Results], Answer]
ANSWERS: dict[int, Answering] = {}


def answers(number: int) -> Callable[[Answering], Answering]:
    """Register the function that answers a claim. Raises ValueError for one that another answers."""

    def register(function: Answering) -> Answering:
        if number in ANSWERS:
            raise ValueError(f"claim {number} is answered by {ANSWERS[number].__module__} already")
        ANSWERS[number] = function
        return function

    return register


def answered(results: Results) -> dict[int, Answer]:
    """Every claim's answer, by number; "not tested here" where there are no rows."""
    from scripts.measure.claims.sources import CLAIMS

    for module in pkgutil.iter_modules(__path__):
        importlib.import_module(f"{__name__}.{module.name}")
    found = {}
    for claim in CLAIMS:
        if claim.number not in ANSWERS:
            found[claim.number] = Answer("", UNTESTED, "nothing here measures it")
            continue
        try:
            found[claim.number] = ANSWERS[claim.number](results)
        except NotMeasured as reason:
            found[claim.number] = Answer("", UNTESTED, str(reason))
        except Exception as error:
            error.add_note(f"in the answer to claim {claim.number}")
            raise
    return found
