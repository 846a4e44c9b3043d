"""A study's report on the terminal, and its pictures beside the rows."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from scripts.measure.rows import read
from scripts.measure.studies import Report, Row


def show(report_of: Callable[[list[Row]], Report], out: Path) -> None:
    """Prints tables and notes of the rows in `out` and writes the pictures beside it, named by it."""
    rows = list(read(out).values())
    if not rows:
        raise SystemExit(f"{out} has no rows: measure first.")
    report = report_of(rows)
    for table in report.tables:
        print(f"\n{table.title}")
        widths = [max(map(len, cells)) for cells in zip(*table.lines, strict=True)]
        for line in table.lines:
            first, *rest = (cell.ljust(width) for cell, width in zip(line, widths, strict=True))
            print("  ".join([first, *rest]).rstrip())
    print()
    for note in report.notes:
        print(f"- {note}")
    for name, picture in report.pictures.items():
        path = out.with_name(f"{out.stem}_{name}.svg" if name else f"{out.stem}.svg")
        path.write_text(picture, encoding="utf-8")
        print(path)
    print(f"rows in {out}; measured by {report.command}")
