"""What a user sets, and what they are told of a mistake in it. A leaf: every package may import it."""

from __future__ import annotations

import os
import sys
from typing import Any


class UserError(ValueError):
    """A mistake that the user can mend. The message says what was given, what is needed and what to do; a
    command prints it without a stack trace. Any other exception is a fault of the program and keeps its."""


def is_first() -> bool:
    """Whether this is the first of the processes that one command has started, which speaks for all: torchrun
    or Lightning on a machine, srun on all of them."""
    return os.environ.get("LOCAL_RANK", os.environ.get("SLURM_PROCID", "0")) == "0"


def shown(value: Any) -> str:
    """As it was typed."""
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def whole(key: str, value: Any, least: int, most: int | None = None, null: str = "") -> None:
    """UserError unless `value` is an integer in this range, or None where `null` says what it stands for."""
    if value is None and null:
        return
    good = isinstance(value, int) and not isinstance(value, bool) and least <= value
    if not good or (most is not None and value > most):
        upto = "" if most is None else f" and at most {most}"
        _refuse(key, value, f"a whole number, at least {least}{upto}", null)


def number(
    key: str,
    value: Any,
    *,
    least: float | None = None,
    above: float | None = None,
    below: float | None = None,
    null: str = "",
) -> None:
    """UserError unless `value` is a finite number in this range, or None where `null` says what that stands
    for."""
    if value is None and null:
        return
    good = isinstance(value, int | float) and not isinstance(value, bool)
    good = good and abs(value) <= sys.float_info.max  # NaN is not, nor an integer beyond all floats
    if good and least is not None:
        good = value >= least
    if good and above is not None:
        good = value > above
    if not good or (below is not None and value >= below):
        limits = {", at least": least, " above": above, " and below": below}
        needs = "".join(f"{words} {limit:g}" for words, limit in limits.items() if limit is not None)
        _refuse(key, value, f"a number{needs}", null)


def one_of(key: str, value: Any, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise UserError(f"{key}={shown(value)}: choose one of {', '.join(allowed)}.")


def switch(key: str, value: Any, null: str = "") -> None:
    if not isinstance(value, bool) and not (value is None and null):
        also = f", or null for {null}" if null else ""
        raise UserError(f"{key}={shown(value)}: choose true or false{also}.")


def _refuse(key: str, value: Any, needs: str, null: str) -> None:
    also = f", or null for {null}" if null else ""
    raise UserError(f"{key}={shown(value)}: it needs to be {needs}{also}.")


def compiled(asked: bool | str, device: str, precision: str) -> bool | str:
    """What compile= of conf/config.yaml means on a kind of device: whether the model is compiled, or
    "blocks", one for all; auto and blocks compile on CUDA alone, and auto means blocks for precision=fp8:
    its kernels make the compilation of GPT-2 XL as a whole take more than 3 minutes, of a block 14 s."""
    if asked == "auto" and precision == "fp8":
        asked = "blocks"
    if asked in ("auto", "blocks"):
        return device == "cuda" and (asked == "auto" or asked)
    return asked
