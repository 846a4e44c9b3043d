"""Run a sweep: train every point of an experiment's grid, each in a separate process.

    python scripts/sweep.py experiment=seqlen_scaling_tiny               two minutes on a CPU
    python scripts/sweep.py experiment=seqlen_scaling sweep.grid.attention=[naive,sdpa] model.n_layer=6

If the same command is started several times, the processes share the points (measure/runner.py).

On a GPU, several points run at the same time (--together), as many as fit by the memory model, during their
first steps, which compile, and at the end, when they profile and measure memory. The steps in between, which
are timed, run one point at a time, alone on the GPU. Out of memory is recorded only for points that run
alone.

Rows go to results/<study>/<gpu or cpu>.jsonl as points finish; the plot is drawn at the end. Points that
run out of memory, are refused or fail get a row with the reason. If a micro-batch does not fit, it is
halved until it fits. After a kill, the same command resumes, as long as the machine and the sources of a
point are the same; failed points are tried again. With --missing, rows of other sources and versions are
kept, and only points without any row are measured.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

if __name__ == "__main__" and not __package__:  # python scripts/<command>.py: see there
    import _checkout  # noqa: F401

from conf.values import UserError
from scripts.measure.worker import Worker, once

if TYPE_CHECKING:
    from scripts.measure.runner import Run
    from scripts.measure.sweep_points import Point, Study

Row = dict[str, Any]
CHILD = "scripts.measure.instruments.training_point:child"


def arguments() -> argparse.Namespace:
    from scripts.measure.rows import positive
    from scripts.measure.runner import parsed_with_overrides, parser

    made = parser(__doc__, "<study>")
    add = made.add_argument
    add("overrides", nargs="*", metavar="key=value", help="experiment=..., then of the config; sweep.* too")
    add("--nanogpt", metavar="MODEL.PY", help="nanoGPT's model, trained at the same lengths")
    add(
        "--peer",
        action="append",
        default=[],
        metavar="NAME",
        help="the same of one of training_peers.py",
    )
    add("--together", type=positive, metavar="K", help="points set up at a time (default: a GPU 4, a CPU 1)")
    add("--wandb", metavar="PROJECT", help="log every point as a run, in a group named by the study")
    return parsed_with_overrides(made)


class Sweep:
    """Measures the points of a study on this machine, and appends their rows to `out`."""

    def __init__(self, study: Study, run: Run, together: int):
        from scripts.measure.sweep_company import Room

        self.study, self.shared, self.room = study, run, Room.here(together)
        self.slow: dict[str, int] = {}  # of points `alike`, the context at which one took too long
        self.full: dict[str, int] = {}  # and at which one was out of memory

    def run(self, points: list[Point]) -> Iterator[tuple[Row, bool]]:
        """Rows of the points, and whether each was measured now: where one is out of memory, of smaller
        micro-batches too. What was out of memory or failed in company is measured again alone."""
        old = [point for point in points if self.kept(point) is not None]
        for point in old:
            yield from self.alone(point)
        for group in self.room.groups([point for point in points if point not in old]):
            group = [point for point in group if self.shared.claim(point.fields)]
            left = []
            for point, result in self.in_company(group):
                if result is None or may_be_of_company(result):
                    left.append(point)
                else:
                    yield self.append(point, result), True
            for point in left:
                yield from self.alone(point)

    def in_company(self, group: list[Point]) -> Iterator[tuple[Point, dict[str, Any] | None]]:
        """Results of points whose first steps, which compile, ran side by side, then the timed steps one by
        one, then what is left (profile and memory split) side by side; None for those that have no company,
        or need not be tried."""
        tried = [point for point in group if self.not_tried(point) is None]
        processes: dict[Point, Worker] = {}
        try:
            for point in tried if len(tried) > 1 else ():
                processes[point] = Worker(CHILD, self.study.timeout_s, beside=len(tried) - 1)
                processes[point].start({"words": self.words(point)}, wait=True)
            for process in processes.values():
                process.ready()
            for process in processes.values():
                process.go()
                process.ready()
            for process in processes.values():
                process.go()
            for point in group:
                yield point, processes[point].result() if point in processes else None
        finally:
            for process in processes.values():
                process.end()

    def alone(self, asked: Point) -> Iterator[tuple[Row, bool]]:
        """Rows of a point by itself, and of ever smaller micro-batches of it until one fits."""
        from scripts.measure.sweep_points import smaller

        row, new = self.row(asked)
        yield row, new
        if row["result"]["status"] != "oom":
            return
        for point in smaller(self.study, asked, self.shared.device):
            if self.room.is_hopeless(point):
                continue
            row, new = self.row(point)
            yield row, new
            if row["result"]["status"] != "oom":
                return

    def row(self, point: Point) -> tuple[Row, bool]:
        if (row := self.kept(point)) is not None:
            self._note(row)
            return row, False
        asked = {"words": self.words(point)}
        result = self.not_tried(point) or once(CHILD, asked, self.study.timeout_s)
        return self.append(point, result), True

    def kept(self, point: Point) -> Row | None:
        kept = self.shared.kept
        return kept.row(point.fields) if kept.done(point.fields) else None

    def not_tried(self, point: Point) -> dict[str, Any] | None:
        """The result of a point that is not tried, as a shorter context took too long, or was out of memory
        where this one needs far more than there is."""
        which, tokens = alike(point.fields), point.fields["seq_len"]
        if (shorter := self.slow.get(which, tokens)) < tokens:
            limit = self.study.timeout_s
            why = f"not tried: a context of {shorter:,} tokens took longer than {limit} s"
            return {"status": "error", "reason": why, "timeout_s": limit}
        if (shorter := self.full.get(which, tokens)) < tokens and self.room.is_hopeless(point):
            why = f"not tried: {shorter:,} tokens were out of memory, and this is predicted to take "
            return {"status": "oom", "reason": f"{why}{self.room.needs(point) / 2**30:,.0f} GiB"}
        return None

    def append(self, point: Point, result: dict[str, Any]) -> Row:
        from scripts.measure.rows import append

        row = append(self.shared.out, point.fields, result)
        self._note(row)
        return row

    def words(self, point: Point) -> list[str]:
        study = self.study
        words = [*point.overrides, f"--warm-up={study.warm_up}"]
        words += [f"--steps={study.steps}", f"--seconds={study.seconds}"]
        words += [f"--piece={study.piece}", "--brief"] if study.piece else []
        return words + ([f"--peer={point.peer}"] if point.peer else [])

    def _note(self, row: Row) -> None:
        which, tokens = alike(row["point"]), row["point"]["seq_len"]
        for ended, limits in (
            ("timeout_s" in row["result"], self.slow),
            (row["result"]["status"] == "oom", self.full),
        ):
            if ended:
                limits[which] = min(limits.get(which, tokens), tokens)


def alike(point: dict[str, Any]) -> str:
    """What points have in common that differ in the context alone, and so in the rows of a step: of another
    model, say, a longer context may be fast enough."""
    from scripts.measure.rows import key_of

    return key_of(point | {"seq_len": None, "micro_batch": None, "tokens_per_step": None})


def may_be_of_company(result: dict[str, Any]) -> bool:
    """Whether a failure, of the point or of its memory split, may be that of points side by side: the room
    that others took, or caches that they write. What took too long would take long alone."""
    if "out of memory" in (result.get("memory_split_reason") or ""):
        return True
    return result["status"] in ("oom", "error") and "timeout_s" not in result


def said(row: Row) -> str:
    """A point in a line."""
    point, result = row["point"], row["result"]
    head = f"{point['implementation']} T={point['seq_len']:,} micro-batch {point['micro_batch']}: "
    if result["status"] != "ok":
        return f"{head}{result['status']}" + (f", {result['reason']}" if result["reason"] else "")
    ms, mib = result["ms_median"], result["peak_mib"]
    return f"{head}{result['tokens_per_s']:,.0f} tokens/s, {ms:,.1f} ms/step, peak {mib:,.0f} MiB"


def asked(options: argparse.Namespace) -> Study:
    """The study of the command line, its peers included."""
    from dataclasses import replace

    from scripts.measure.sweep_points import study_of

    study = study_of(options.overrides)
    more = [*options.peer, *([f"nanogpt={options.nanogpt}"] if options.nanogpt else [])]
    study = replace(study, peers=(*study.peers, *more))
    if not study.grid.get("attention") and not study.peers:
        raise UserError("sweep.grid.attention is empty: name one, or give --nanogpt or --peer.")
    return study


def run(options: argparse.Namespace) -> list[Row]:
    """The study's rows, measured where they were not there."""
    from scripts.measure.sweep_points import point_of, tasks

    study = asked(options)
    if not (todo := tasks(study)):
        raise UserError("the grid has no points: give each key of sweep.grid a value.")

    from scripts.measure.report import printed, sweep_report
    from scripts.measure.rows import with_baselines
    from scripts.measure.runner import Run
    from scripts.measure.sources import is_of_today

    shared = Run(study.name, options)
    out, device = shared.out, shared.device
    points = [point_of(study, task, device) for task in todo]  # mistakes are said before one runs
    points.sort(key=lambda point: point.fields["seq_len"])  # what is slow shows early
    together = options.together or (4 if device == "cuda" else 1)
    sweep = Sweep(study, shared, together)
    if not options.plot_only:
        print(f"{study.name}: {len(todo)} points, rows in {out}", flush=True)
        progress(options, sweep, points)
    every = options.missing or options.plot_only
    rows = [row for row in with_baselines(out) if every or is_of_today(row)]
    if not rows:
        why = (
            "measure first, without --plot-only" if options.plot_only else "others measure all its points now"
        )
        raise UserError(f"{out} has no rows: {why}.")
    printed.say(sweep_report.tables(rows), sweep_report.doubts(rows))
    printed.draw({"": sweep_report.picture(rows)}, out)
    if options.wandb:
        from scripts.measure.sweep_wandb import log_picture

        log_picture(rows, options.wandb)
    print(f"rows in {out}")
    return rows


def progress(options: argparse.Namespace, sweep: Sweep, points: list[Point]) -> None:
    """Run the sweep, and say each row and how long the rest will take."""
    from scripts.measure.rows import key_of

    keys = {key_of(point.fields) for point in points}
    new, done, start = 0, 0, time.perf_counter()
    for row, fresh in sweep.run(points):
        new, done = new + fresh, done + (key_of(row["point"]) in keys)
        print(f"[{done}/{len(points)}] {said(row)}" + ("" if fresh else " (kept)"), flush=True)
        if options.wandb:
            from scripts.measure.sweep_wandb import log_point

            log_point(row, options.wandb)
        if new and fresh and done < len(points):
            rate = new / (time.perf_counter() - start)
            left = (len(points) - done) / rate
            print(f"    {60 * rate:.1f} points/min, about {left:.0f} s left", flush=True)


def main() -> list[Row]:
    options = arguments()  # --help answers before anything is imported
    from conf.command import user_errors

    return user_errors(run)(options)


if __name__ == "__main__":
    main()
