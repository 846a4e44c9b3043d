"""Tables of a report. From rows, one a line: `listed`, of the fields of a row by `records`. From a frame of
rows (rows.frame): select, pivot, divide, then write the figures."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from scripts.measure.rows import trusted
from scripts.measure.studies import Row, Table

if TYPE_CHECKING:
    from pandas import DataFrame

FIRST = "standard"  # the implementation that the others are compared with
SHORT = {"float64": "fp64", "float32": "fp32", "float16": "fp16", "bfloat16": "bf16"}


class Record(dict[str, Any]):
    """A row, whose fields of point and result are at hand as attributes too; `passed` is the pass."""

    def __getattr__(self, name: str) -> Any:
        if name in self:
            return self[name]
        raise AttributeError(name)


def records(rows: Iterable[Row]) -> list[Record]:
    def record(row: Row) -> Record:
        point, result = row["point"], row["result"]
        return Record(row | point | result, trusted=trusted(result), passed=point.get("pass"))

    return [row if isinstance(row, Record) else record(row) for row in rows]


def where(found: Iterable[Record], **wanted: Any) -> list[Record]:
    """Those whose fields have these values."""
    return [r for r in found if all(r.get(key) == value for key, value in wanted.items())]


def distinct(found: Iterable[Record], key: str) -> list[Any]:
    """The values of a field, in the order of their first."""
    return list(dict.fromkeys(r[key] for r in found))


def listed(title: str, head: str, things: Iterable[Any], line: Callable[[Any], str | list[str]]) -> Table:
    """A line for each thing: its cells, or as the head with "|" between them; those that are missing at the
    end are empty."""
    heads, found = head.split("|"), [line(thing) for thing in things]
    lines = [each.split("|") if isinstance(each, str) else each for each in found]
    return Table(title, [heads, *(cells + [""] * (len(heads) - len(cells)) for cells in lines)])


def markdown(lines: list[list[str]], rule: str = "---") -> str:
    """The lines of a table, the head first; rule: below all columns of the head but the first."""
    head, *body = [[cell.replace("|", "\\|").replace("\n", " ") for cell in line] for line in lines]
    rules = "|".join(["---", *[rule] * (len(head) - 1)])
    padded = [line + [""] * (len(head) - len(line)) for line in body]
    return "\n".join(
        [f"| {' | '.join(head)} |", f"|{rules}|", *(f"| {' | '.join(line)} |" for line in padded)]
    )


def why(result: dict[str, Any]) -> str:
    """There are no figures to trust."""
    wrong = f"error ratio {result.get('error_ratio')}, kernels right: {result.get('kernels_ok')}"
    return result.get("reason") or wrong


def fmt(value: Any, spec: str = ",", none: str = "") -> str:
    """The value by a format specification; `none` where there is none."""
    return none if value is None or value != value else format(value, spec)


def figure(value: float) -> str:
    """A number with one decimal below 100 and none above; "" for one that is missing."""
    return "" if value != value else f"{value:,.1f}" if value < 100 else f"{value:,.0f}"


def times(value: float) -> str:
    return "" if value != value else f"{value:.1f}x"


def cell_of(result: dict[str, Any] | None, show: Callable[[Any], str]) -> str:
    """A figure, "!" after one that may not be trusted; why there is none: oom, timeout, slow
    (not tried), error, - (refused); "" for no row."""
    if result is None:
        return ""
    if result["status"] == "ok":
        return show(result) + ("" if trusted(result) else " !")
    if "timeout_s" in result:
        return "timeout"
    if result["status"] == "error" and result.get("not_tried"):
        return "slow"
    return "-" if result["status"] == "unsupported" else result["status"]


def outcome(row: Any, field: str) -> str:
    """The figure of a row of a frame, or why there is none: oom, slow, error, - (unsupported)."""
    if row["status"] == "ok":
        return figure(row[field])
    if row["status"] == "error" and row.get("not_tried") is True:
        return "slow"
    return "-" if row["status"] == "unsupported" else row["status"]


def outcomes(frame: DataFrame, field: str) -> DataFrame:
    """The frame with a column `cell`, the `outcome` of each row."""
    return frame.assign(cell=[outcome(row, field) for row in frame.to_dict("records")])


def by_name(frame: DataFrame, columns: str, values: str) -> DataFrame:
    """Values by implementation (lines, the standard one first) and another field (columns)."""
    wide = frame.pivot(index="implementation", columns=columns, values=values)
    return wide.reindex(sorted(wide.index, key=lambda name: (name != FIRST, name)))


def lines(
    wide: DataFrame, corner: str, head: Callable[[Any], str], cell: Callable[[Any], str]
) -> list[list[str]]:
    """The cells of a pivoted frame, the head first."""
    body = [[name, *map(cell, values)] for name, *values in wide.itertuples()]
    return [[corner, *map(head, wide.columns)], *body]


def table(title: str, cells: list[list[str]]) -> list[Table]:
    """The table, or none where it has no lines below its head."""
    return [Table(title, cells)] if len(cells) > 1 else []
