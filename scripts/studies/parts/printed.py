"""A study's report on the terminal, and its pictures beside the rows."""

from __future__ import annotations

from pathlib import Path

from scripts.studies import Report


def show(report: Report, out: Path) -> None:
    """Prints tables and notes and writes the pictures: `out`, the file of the rows, names them."""
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
