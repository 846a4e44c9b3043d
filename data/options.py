"""Checks of single options: a ValueError that names the key, what it got and what it needs."""

from __future__ import annotations

import math
from typing import Any


def whole(key: str, value: Any, least: int, most: int | None = None, null: str = "") -> None:
    """null: what null stands for, where it is allowed."""
    good = isinstance(value, int) and not isinstance(value, bool)
    if (value is None and null) or (good and least <= value and (most is None or value <= most)):
        return
    upto = "" if most is None else f" and at most {most}"
    also = f", or null for {null}" if null else ""
    raise ValueError(f"{key} is {shown(value)}; it has to be a whole number, at least {least}{upto}{also}")


def number_above(key: str, value: Any, least: float) -> None:
    if not _is_number(value) or value <= least:
        raise ValueError(f"{key} is {shown(value)}; it has to be a number above {least:g}")


def fraction(key: str, value: Any) -> None:
    if not _is_number(value) or not 0 < value < 1:
        raise ValueError(
            f"{key} is {shown(value)}; it has to be a number that lies between 0 and 1, such as 0.1"
        )


def shown(value: Any) -> str:
    """As it was typed."""
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
