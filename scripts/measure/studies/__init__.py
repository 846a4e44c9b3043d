"""The studies: each a module with a command, whose rows go to results/<its name>/<gpu>.jsonl.

    python scripts/study.py numerics

Its `main` measures, says beforehand what it will take, appends each row as it is measured and
resumes when it was stopped (rows.Kept). It has `report(rows) -> Report`, which measures nothing:
scripts/report.py calls it for the pictures and for results/README.md. What studies measure with is in
instruments/, what their rows say in report/.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

Row = dict[str, Any]
Point = dict[str, Any]


@dataclass(frozen=True)
class Table:
    """`lines` of cells, the first of them the head; `title` says what the figures are, with units."""

    title: str
    lines: list[list[str]]


@dataclass(frozen=True)
class Report:
    """What a study's rows say.

    question: that it answers, a sentence
    command:  that measures it again
    tables:   the figures
    pictures: name -> SVG as text; "" is results/<study>/<gpu>.svg, any other <gpu>_<name>.svg
    notes:    a sentence each: what was found, computed from the rows, and what limits it
    found:    the one with the figures that matter most, for the index of results/README.md; "": the first
              sentence of the first note will do
    """

    question: str
    command: str
    tables: list[Table]
    pictures: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    found: str = ""
