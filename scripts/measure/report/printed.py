"""Reports on the terminal, and their pictures beside the rows."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path

from scripts.measure.rows import read
from scripts.measure.studies import Report, Row, Table


def say(tables: Iterable[Table], notes: Iterable[str] = ()) -> None:
    """Prints them, columns aligned."""
    for table in tables:
        print(f"\n{table.title}")
        widths = [max(map(len, cells)) for cells in zip(*table.lines, strict=True)]
        for first, *rest in table.lines:
            cells = [first.ljust(widths[0]), *map(str.rjust, rest, widths[1:])]
            print("  ".join(cells).rstrip())
    print()
    for note in notes:
        print(f"- {note}")


def draw(pictures: dict[str, str], out: Path) -> None:
    """Writes the pictures beside the file of rows, named by it, and says where."""
    for name, picture in pictures.items():
        path = out.with_name(f"{out.stem}_{name}.svg" if name else f"{out.stem}.svg")
        path.write_text(picture, encoding="utf-8")
        print(path)


def show(report_of: Callable[[list[Row]], Report], out: Path) -> None:
    """What the rows in `out` say."""
    rows = list(read(out).values())
    if not rows:
        raise SystemExit(f"{out} has no rows: measure first.")
    report = report_of(rows)
    say(report.tables, report.notes)
    draw(report.pictures, out)
    print(f"rows in {out}; measured by {report.command}")
