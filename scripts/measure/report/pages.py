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


def page(study: str, tables: list[Table], pictures: dict[str, str] | None = None, **facts: Any) -> Report:
    """A study's report: its tables that have lines, its pictures, and its template with these facts."""
    text = _environment().get_template(f"{study}.md.j2").render(facts)
    head: dict[str, str] = {"found": ""}
    notes: list[str] = []
    for block in _BEGINS.split(text):
        said = " ".join(block.split("\n\n")[0].split())
        if said.startswith("- "):
            notes.append(said.removeprefix("- "))
        elif said and not said.startswith("-"):
            key, _, words = said.partition(": ")
            head[key] = words
    tables = [table for table in tables if len(table.lines) > 1]
    return Report(head["question"], head["command"], tables, pictures or {}, notes, head["found"])
