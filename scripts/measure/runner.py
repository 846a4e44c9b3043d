"""How whatever appends rows runs: the common flags, what is there already, a row whatever happens, and
how long the rest will take.

The same command, started several times, shares its points: one that another process is at is left to that,
and a row that another has written is found. So the GPUs of one machine are used by a command for each
(`CUDA_VISIBLE_DEVICES=1 python ... &`), those of a cluster by an array job of its scheduler
(`sbatch --array=1-8`) on a file system that all of them see.
"""

from __future__ import annotations

import argparse
import errno
import fcntl
import re
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from scripts.measure.machine import ROOT, gpu_slug, machine
from scripts.measure.rows import Kept, Point, append, key_of, rows_file

Result = dict[str, Any]


class DeviceLost(RuntimeError):
    """A kernel has failed in a way that leaves the process without its device."""


def parser(doc: str | None, study: str, plots: bool = True) -> argparse.ArgumentParser:
    """With the flags that all have."""
    made = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    which = made.add_mutually_exclusive_group()
    which.add_argument("--fresh", action="store_true", help="measure again what has a row")
    which.add_argument("--missing", action="store_true", help="measure what has no row of whatever sources")
    if plots:
        which.add_argument("--plot-only", action="store_true", help="print from the rows, measure nothing")
    where = f"rows go here (default: results/{study}/<gpu or cpu>.jsonl)"
    made.add_argument("--out", type=rows_file, help=where)
    return made


def parsed_with_overrides(
    made: argparse.ArgumentParser, given: Sequence[str] | None = None
) -> argparse.Namespace:
    """The options of a parser that takes `overrides`. Where these stand behind several values of an option,
    argparse would take them for more of these (`--measured loss seed=1`): so key=value comes first, unless it
    stands right behind an option, whose value it is."""
    words = sys.argv[1:] if given is None else given
    is_override = re.compile(r"[+~]*[A-Za-z_][\w./@]*=").match
    first: list[str] = []
    rest: list[str] = []
    for before, word in zip(["", *words], words, strict=False):
        (first if is_override(word) and not before.startswith("-") else rest).append(word)
    return made.parse_intermixed_args([*first, *rest])


def device() -> str:
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def rows_path(study: str) -> Path:
    """Where this machine's rows of a study go: results/<study>/<gpu>.jsonl, cpu.jsonl without a GPU."""
    import torch

    gpu = gpu_slug(torch.cuda.get_device_name()) if torch.cuda.is_available() else "cpu"
    return ROOT / "results" / study / f"{gpu}.jsonl"


def failure(error: BaseException) -> dict[str, str]:
    """The status and the reason of a row."""
    from attention.base import UnsupportedAttention
    from model.training.out_of_memory import is_out_of_memory

    if isinstance(error, UnsupportedAttention):
        return {"status": "unsupported", "reason": "; ".join(error.reasons)}
    line = next(iter(str(error).splitlines()), "")[:300]
    if is_out_of_memory(error):
        return {"status": "oom", "reason": line}
    return {"status": "error", "reason": f"{type(error).__name__}: {line}"}


def attempt(work: Callable[..., Result], *given: Any) -> Result:
    """What the work gives, or how it failed: whatever a library raises is a row."""
    try:
        return work(*given)
    except Exception as error:
        return failure(error)


def run_study(
    study: str,
    options: argparse.Namespace,
    measure: Callable[[Any, Run], None],
    report: Callable[[list[dict[str, Any]]], Any],
) -> None:
    """A study's command: measures what is left, unless it only prints, and prints what the rows say."""
    from conf.command import user_errors
    from scripts.measure.report.printed import show

    def command() -> None:
        run = Run(study, options)
        if not options.plot_only:
            measure(options, run)
        show(report, run.out)

    user_errors(command)()


class Run:
    """One run of a study: `out`, the file of its rows; `kept`, those that stand; a line for each new one."""

    def __init__(self, study: str, options: argparse.Namespace):
        self.study, self.device, self.out = study, device(), options.out or rows_path(study)
        self.kept = Kept(self.out, options.fresh, options.missing)
        self.out.parent.mkdir(parents=True, exist_ok=True)
        self.locks = open(self.out.with_name(f"{self.out.name}.lock"), "a")  # noqa: SIM115
        machine()  # asked while the device is well
        self.start(0)

    def left(self, points: Iterable[Point], takes: str = "") -> list[Point]:
        """Those that have no row; says how many there are, and what all of them take."""
        points = list(points)
        left = self.kept.todo(points)
        kept = f", {len(points) - len(left)} kept" if len(left) < len(points) else ""
        self.start(len(left), f"{len(left)} points{kept}; {takes}".rstrip("; "))
        return left

    def start(self, total: int, said: str = "") -> None:
        """The clock, with so much to do."""
        self.total, self.done, self.began = total, 0, time.perf_counter()
        if said:
            print(f"{self.study}: {said}. Rows in {self.out}", flush=True)

    def claim(self, *points: Point) -> bool:
        """Whether these are this process's to measure: no other one is at them or has come to an end with
        them. Locks a byte for each of a file beside the rows; they go with the process."""
        mine: list[int] = []
        try:
            for point in points:
                at = int(key_of(point)[:12], 16)
                fcntl.lockf(self.locks, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, at)
                mine.append(at)
        except OSError as error:
            for at in mine:  # another process may do these
                fcntl.lockf(self.locks, fcntl.LOCK_UN, 1, at)
            if error.errno not in (errno.EACCES, errno.EAGAIN):
                raise
            return False
        self.kept.update()
        return not all(map(self.kept.done, points))

    def each(
        self,
        points: Iterable[Point],
        measure: Callable[[Point], Result],
        said: Callable[[Point, Result], str],
    ) -> None:
        """A row of each, one after the other."""
        for point in points:
            self.group([point], lambda mine: [measure(mine[0])], said)

    def group(
        self,
        points: list[Point],
        measure: Callable[[list[Point]], list[Result]],
        said: Callable[[Point, Result], str],
    ) -> None:
        """Rows of points that are measured together."""
        from scripts.measure.instruments.timing import clean_up

        if not self.claim(*points):
            self.say(f"{len(points)} by another process", len(points))
            return
        try:
            results = measure(points)
        except Exception as error:  # whatever a library raises is a row
            results = [failure(error)] * len(points)
        for point, result in zip(points, results, strict=True):
            self.add(point, result, said(point, result))
        self.stop_if_lost()
        clean_up()

    def shapes(self, work: list[tuple[Any, dict[str, list[str]]]], measure: Callable[..., Any]) -> None:
        """Shapes with the contestants of their passes, by a bench that appends the rows."""
        for shape, passes in work:
            points = [shape.point(name, at) for at, names in passes.items() for name in names]
            if not self.claim(*points):
                self.say(f"{shape}: by another process")
                continue
            try:
                measure(shape, passes)
            except DeviceLost as lost:
                why = f"{shape}: the device is lost after {lost}. The same command goes on."
                raise SystemExit(why) from None
            self.say(f"{shape} {' '.join(passes)}")

    def add(self, point: Point, result: Result, said: str) -> None:
        append(self.out, point, result)
        self.say(said)

    def say(self, text: str, done: int = 1) -> None:
        """A line with how much is done, the time since the start, the rate and about what is left."""
        self.done += done
        took = time.perf_counter() - self.began
        rate, left = self.done / took, took / self.done * (self.total - self.done) if self.done else 0.0
        head = f"[{self.done}/{self.total}, {took:.0f} s, {60 * rate:.0f}/min, about {left:.0f} s left]"
        print(f"{head} {text}", flush=True)

    def stop_if_lost(self) -> None:
        """Ends the program where a failed kernel has left it without its device: what would come after is
        errors too, about nothing."""
        from scripts.measure.instruments.timing import synchronise

        try:
            synchronise()
        except RuntimeError as error:
            why = failure(error)["reason"]
            raise SystemExit(f"the device is lost ({why}). The same command goes on.") from None
