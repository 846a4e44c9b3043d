"""What a study's report says in words, as text to edit: templates/<study>.md.j2 has the question, the
command, the finding and the notes; `page` fills in the figures.

    question: ..., command: ..., found: ...   one of each; found may be missing
    - a sentence                              a note; with nothing behind the dash there is none

Each goes on until a blank line or the next.
"""

from __future__ import annotations

import functools
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from scripts.measure.report.figures import thousands
from scripts.measure.report.tables import SHORT, fmt, why
from scripts.measure.studies import Report, Table

if TYPE_CHECKING:
    from jinja2 import Environment

TEMPLATES = Path(__file__).parent / "templates"
_BEGINS = re.compile(r"^(?=(?:question|command|found): |- )", re.MULTILINE)


@functools.cache
def _environment() -> Environment:
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    made = Environment(
        loader=FileSystemLoader(TEMPLATES), undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    made.filters |= {"fmt": fmt, "short": SHORT.__getitem__, "thousands": thousands, "why": why}
    return made


def blocks(template: str, **facts: Any) -> list[str]:
    """The entries of a template with these facts, each on one line."""
    text = _environment().get_template(f"{template}.md.j2").render(facts)
    found = (" ".join(block.split("\n\n")[0].split()) for block in _BEGINS.split(text))
    return [said for said in found if said not in ("", "-")]


def notes(template: str, **facts: Any) -> list[str]:
    """The notes alone."""
    return [said.removeprefix("- ") for said in blocks(template, **facts) if said.startswith("- ")]


def page(study: str, tables: list[Table], pictures: dict[str, str] | None = None, **facts: Any) -> Report:
    """A study's report: its tables that have lines, its pictures, and its template with these facts."""
    every = blocks(study, **facts)
    head = {"found": ""} | dict(said.split(": ", 1) for said in every if not said.startswith("- "))
    said = [said.removeprefix("- ") for said in every if said.startswith("- ")]
    tables = [table for table in tables if len(table.lines) > 1]
    return Report(head["question"], head["command"], tables, pictures or {}, said, head["found"])
