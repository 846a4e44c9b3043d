"""Tables of a report from a frame of rows (rows.frame): select, pivot, divide, then write the figures."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from scripts.measure.studies import Table

if TYPE_CHECKING:
    from pandas import DataFrame

FIRST = "standard"  # the implementation that the others are compared with


def figure(value: float) -> str:
    """A number with one decimal below 100 and none above; "" for one that is missing."""
    return "" if value != value else f"{value:,.1f}" if value < 100 else f"{value:,.0f}"


def times(value: float) -> str:
    return "" if value != value else f"{value:.1f}x"


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
