"""Rows of results/<study>/<gpu>.jsonl: a measured point each, with the machine and the command behind it.

A row: schema, key, run_id; point, what was asked: study, implementation, pass, shapes, dtype, settings, ...;
result: status ok, oom, unsupported or error, with a reason, times, peaks, kernels, error_ratio, ...; machine:
GPU, versions, commit, date, command, and code, a digest of the sources that ran.

A row is found by its point, whatever the config has got since: the key counts what the point says otherwise
than the defaults, under the names of today. Fields that are false, none or empty are not counted, and
`settings` hold what the config says otherwise than conf/ (sweep_points.settings).
"""

from __future__ import annotations

import argparse
import fcntl
import hashlib
import json
import os
import uuid
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from conf import renames
from conf.values import UserError
from scripts.measure.machine import CONF, machine, without_folders

if TYPE_CHECKING:
    from pandas import DataFrame

Row = dict[str, Any]
Point = dict[str, Any]

RUN_ID = uuid.uuid4().hex[:12]
SCHEMA = max([2, *(since for since, *_ in renames.DEFAULTS)])
# Rows of schema 1 have a digest of the whole config: what it stood for in the studies of that time.
_STEADY = {"data": "synthetic", "schedule": "constant", "schedule.warmup_steps": 5}
OF_DIGEST: dict[str, dict[str, Any]] = {
    "seqlen_scaling": _STEADY | {"model.bias": False, "optim.lr": 6e-4},
    "speedup_end_to_end": _STEADY | {"optim.lr": 6e-4},
    "encoder_short": _STEADY | {"model.causal": False, "optim.lr": 1e-4, "data.corpus.vocab_size": 30528},
    "long_context_quality": {
        "data": "text",
        "data.block": 4096,
        "data.tokenizer.vocab_size": 8192,
        "data.val_fraction": 0.01,
        "model.position": "rope",
        "model.dropout": 0.0,
        "model.attn_dropout": 0.0,
        "optim.lr": 2e-3,
        "schedule.min_factor": 0.0,
    },
}


def choices(group: str) -> list[str]:
    """The files of a folder of conf/, for argparse."""
    return sorted(path.stem for path in (CONF / group).glob("*.yaml"))


def positive(text: str) -> int:
    """An argument that counts something, for argparse."""
    if not text.isascii() or not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text} is no whole number, at least 1")
    return int(text)


def seconds(text: str) -> float:
    """An argument that is a time to spend, for argparse."""
    try:
        found = float(text)
    except ValueError:
        found = 0.0
    if not 0 < found < float("inf"):  # nor NaN
        raise argparse.ArgumentTypeError(f"{text} is no number of seconds above 0")
    return found


def rows_file(text: str) -> Path:
    """An argument that names a file for rows, for argparse: what cannot be one is said before measuring."""
    path = Path(text)
    above = next(folder for folder in path.absolute().parents if folder.exists())
    if path.is_dir() or not above.is_dir():
        raise argparse.ArgumentTypeError(f"{path if path.is_dir() else above} is in the way: name a new file")
    return path


def key_of(point: Point) -> str:
    """The same for the same point of the same study: a later row replaces an earlier one."""
    counted = {
        key: value for key, value in point.items() if value is not False and value not in (None, "", {})
    }
    return hashlib.sha256(json.dumps(counted, sort_keys=True).encode()).hexdigest()[:16]


def today(point: Point, schema: int = SCHEMA) -> Point:
    """The point of a row of that schema as it would be written today: by the names and beside the defaults
    that keys have now."""
    found = {renames.key(name): value for name, value in point.items()}
    digest = found.get("recipe") or (found.get("config") if "tokens_per_step" in found else None)
    if digest and found["study"] in OF_DIGEST:
        found = {name: value for name, value in found.items() if name not in ("config", "recipe")}
        found["settings"] = OF_DIGEST[found["study"]]
    elif isinstance(words := found.get("config"), str):
        found["config"] = " ".join(map(renames.override, words.split()))
    if isinstance(model := found.get("model"), dict):
        found["model"] = not_usual(renames.config({"model": model})["model"])
    if isinstance(settings := found.get("settings"), dict):
        settings = {renames.key(name): value for name, value in settings.items()}
        for since, name, before, _ in renames.DEFAULTS:
            if schema < since:
                settings.setdefault(name, before)
        now = {name: now for _, name, _, now in renames.DEFAULTS}
        found["settings"] = {
            name: value for name, value in settings.items() if name not in now or now[name] != value
        }
    return found


def not_usual(model: dict[str, Any]) -> dict[str, Any]:
    """Of a model's config what is otherwise than GPTConfig's defaults."""
    from dataclasses import fields

    from model.config import GPTConfig

    usual = {field.name: field.default for field in fields(GPTConfig)}
    return {name: value for name, value in model.items() if usual.get(name, ...) != value}


def read(path: Path) -> dict[str, Row]:
    """Rows by key, a later one in the place of an earlier; a line that a kill has cut is left out."""
    return _newest(_lines(path))


def with_baselines(path: Path) -> list[Row]:
    """The rows of `read`, and before them a sweep's rows of nanoGPT at other commits, which later ones have
    replaced: what was measured beside them is compared with them (sweep_report.beside)."""
    rows = _lines(path)
    newest = _newest(rows)
    of_nanogpt = [row for row in rows if row["point"].get("implementation") == "nanoGPT"]
    each = {(key_of(row["point"]), row["machine"].get("commit")): row for row in of_nanogpt}
    return [row for (key, _), row in each.items() if row is not newest[key]] + list(newest.values())


def by_gpu(folder: Path) -> dict[str, list[Row]]:
    """The rows of each file of a study that were measured on a GPU."""
    found = {path.stem: with_baselines(path) for path in sorted(folder.glob("*.jsonl"))}
    found = {gpu: [row for row in rows if row["machine"]["gpu"]] for gpu, rows in found.items()}
    return {gpu: rows for gpu, rows in found.items() if rows}


def load(*places: Path) -> DataFrame:
    """Rows of files, or of all files below these folders, as a table: a column for each field of point and
    result, those of the machine as machine.<field>; `trusted`, as said there; `row`, as read."""
    files = [
        file for place in places for file in ([place] if place.is_file() else sorted(place.rglob("*.jsonl")))
    ]
    return frame([row for file in files for row in with_baselines(file)])


def frame(rows: list[Row]) -> DataFrame:
    """These rows as a table, as in `load`."""
    import pandas

    return pandas.DataFrame(
        {
            **row["point"],
            **row["result"],
            **{f"machine.{name}": value for name, value in row["machine"].items()},
            "trusted": trusted(row["result"]),
            "row": row,
        }
        for row in rows
    )


def trusted(result: dict[str, Any]) -> bool:
    """Whether figures may be quoted: there are some, and what was looked at came out right: the kernels that
    ran, the error beside that of the formula (at most 1; None where it could not be told), a falling loss."""
    ratio = result.get("error_ratio", 0.0)
    right = result.get("kernels_ok", True) and result.get("learns", True) and ratio is not None and ratio <= 1
    return result["status"] == "ok" and bool(right)


def is_final(result: dict[str, Any]) -> bool:
    """An error is tried again, as it may have been the machine's; what took too long is not."""
    return result["status"] != "error" or "timeout_s" in result


class Kept:
    """The rows of a file that are not measured again: those of today's sources on this machine with these
    versions; with `missing` those of any sources and machine, with `fresh` those that come from now on."""

    def __init__(self, path: Path, fresh: bool = False, missing: bool = False):
        self.path, self.missing, self.rows = path, missing, {}
        self.seen, self.lines = 0, 0  # bytes, and the lines in them
        if fresh:
            self._new()
        self.update()

    def update(self) -> None:
        """With what has been written since."""
        now = {name: value for name, value in machine().items() if name not in ("commit", "date", "command")}
        before, text = self.lines, self._new()
        for key, row in _newest(_rows(self.path, text, before)).items():
            if self.missing or current(row, now):
                self.rows[key] = row
            else:
                self.rows.pop(key, None)

    def _new(self) -> bytes:
        """What was written since: whole lines, as a rest without an end is read again when it has one."""
        if not self.path.is_file():
            return b""
        with open(self.path, "rb") as file:
            fcntl.flock(file, fcntl.LOCK_SH)  # whoever appends has it alone
            file.seek(self.seen)
            text = file.read()
        text = text[: text.rfind(b"\n") + 1]
        self.seen, self.lines = self.seen + len(text), self.lines + text.count(b"\n")
        return text

    def row(self, point: Point) -> Row | None:
        """Whatever its status is."""
        return self.rows.get(key_of(point))

    def done(self, point: Point) -> bool:
        row = self.row(point)
        return row is not None and is_final(row["result"])

    def todo(self, points: Iterable[Point]) -> list[Point]:
        return [point for point in points if not self.done(point)]

    def beside(self, points: dict[str, Point]) -> list[str]:
        """Of contestants of one shape those to measure: none if each has a row. Else all again, as only times
        of one run compare, but for those that ended in an error: it may have taken the process with it."""
        found = {name: self.row(point) for name, point in points.items()}
        if all(found.values()):
            return []
        return [name for name, row in found.items() if row is None or row["result"]["status"] != "error"]


def current(row: Row, now: dict[str, Any]) -> bool:
    """Whether it was measured with the machine and versions `now`, by the sources of today."""
    from scripts.measure.sources import is_of_today

    return all(row["machine"].get(name) == value for name, value in now.items()) and is_of_today(row)


def _newest(rows: Iterable[Row]) -> dict[str, Row]:
    found: dict[str, Row] = {}
    for row in rows:
        key = key_of(row["point"])
        found.pop(key, None)  # the order is that of the newest
        found[key] = row
    return found


def _lines(path: Path) -> list[Row]:
    return _rows(path, path.read_bytes()) if path.is_file() else []


def _rows(path: Path, text: bytes, before: int = 0) -> list[Row]:
    """Those in this text of a file, so many lines from its start."""
    rows = []
    for number, line in enumerate(text.decode().splitlines(), before + 1):
        try:
            row = json.loads(line)
            row["point"] = today(row["point"], row.get("schema", 1))
            row["key"], row["result"], row["machine"]
        except (ValueError, KeyError, TypeError):
            if line.endswith("}}"):
                raise UserError(f"{path}, line {number}: that is no row; mend it or take it out.") from None
            continue
        rows.append(row)
    return rows


def append(path: Path, point: dict[str, Any], result: dict[str, Any]) -> dict[str, Any]:
    """Append a row to the file at once, so that a killed sweep keeps what it has measured."""
    from scripts.measure.sources import code

    row = {
        "schema": SCHEMA,
        "key": key_of(point),
        "run_id": RUN_ID,
        "point": point,
        "result": json.loads(without_folders(json.dumps(result))),  # a library's reason may name its files
        "machine": machine() | {"code": code(point)},
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps(row) + "\n"
    with open(path, "a+b") as file:
        fcntl.flock(file, fcntl.LOCK_EX)  # processes that share the work take turns
        if file.seek(0, os.SEEK_END):
            file.seek(-1, os.SEEK_END)
            if file.read(1) != b"\n":
                text = "\n" + text  # what a kill has cut stays a line of its own
        file.write(text.encode())
    return row
