"""Run a study: every point of an experiment's grid, each in a process of its own.

    python scripts/sweep.py experiment=seqlen_scaling_tiny               a CPU, about two minutes
    python scripts/sweep.py experiment=seqlen_scaling sweep.grid.attention=[naive,sdpa] model.n_layer=6
    python scripts/sweep.py experiment=seqlen_scaling --shard 0/4        every fourth point; 1/4, 2/4, 3/4
    python scripts/sweep.py experiment=seqlen_scaling --print-commands   one for each point, for a scheduler

Rows go to results/<study>/<gpu or cpu>.jsonl as points end, the picture beside it at the end. What runs out
of memory, is refused or fails is a row with the reason; where memory runs out, smaller micro-batches follow,
to the largest that fits. A sweep that was killed goes on where it stopped, as long as the machine and the
sources that a point runs are the same; errors are tried again.
"""

from __future__ import annotations

import argparse
import fcntl
import json
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # for a checkout that is not installed

if TYPE_CHECKING:
    from scripts.sweep_points import Point, Study

Row = dict[str, Any]
CHILD = ROOT / "scripts" / "training_point.py"


def shard(text: str) -> tuple[int, int]:
    index, slash, count = text.partition("/")
    if not slash or not index.isdigit() or not count.isdigit() or not int(index) < int(count):
        raise argparse.ArgumentTypeError(f"{text} is no i/n with 0 <= i < n")
    return int(index), int(count)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("overrides", nargs="*", metavar="key=value", help="experiment=..., then of the config; sweep.* too")
    add("--fresh", action="store_true", help="measure again what has been measured")
    add("--shard", type=shard, default=(0, 1), metavar="I/N", help="points I, I + N, I + 2 N, ...")
    add("--print-commands", action="store_true", help="print a command for each point, run nothing")
    add("--nanogpt", type=Path, metavar="MODEL.PY", help="nanoGPT's model, trained at the same lengths")
    add("--wandb", metavar="PROJECT", help="log every point as a run, in a group named by the study")
    add("--out", type=Path, help="rows go here (default: results/<study>/<gpu or cpu>.jsonl)")
    return parser.parse_intermixed_args()


class Sweep:
    """Measures the points of a study on this machine, and appends their rows to `out`."""

    def __init__(self, study: Study, device: str, out: Path, fresh: bool, nanogpt: Path | None):
        from scripts import rows, sweep_points

        self.study, self.device, self.out, self.nanogpt = study, device, out, nanogpt
        self.sources, self.machine = sweep_points.code(), rows.machine()
        self.rows = {
            key: row
            for key, row in rows.read(out).items()
            if sweep_points.is_current(row, self.machine, self.sources)
        }
        if fresh:
            self.rows.clear()
        self.slow: dict[str, int] = {}  # the context at which an implementation took too long

    def run(self, assigned: dict[str, Any], asked: Point) -> Iterator[tuple[Row, bool]]:
        """Rows of a point, as asked for first, and whether each was measured now: where it is out of memory,
        of smaller micro-batches too."""
        from scripts.sweep_points import smaller

        row, new = self.row(asked, assigned)
        yield row, new
        if row["result"]["status"] != "oom" or "attention" not in assigned:
            return
        for point in smaller(self.study, assigned, self.device, asked):
            row, new = self.row(point, assigned)
            yield row, new
            if row["result"]["status"] != "oom":
                return

    def row(self, point: Point, assigned: dict[str, Any]) -> tuple[Row, bool]:
        from scripts.rows import append, key_of

        fields = point.fields | ({} if "attention" in assigned else {"implementation": "nanoGPT"})
        if (row := self.rows.get(key_of(fields))) is not None:
            self._note(row)
            return row, False
        name, tokens = fields["implementation"], fields["seq_len"]
        if self.slow.get(name, tokens) < tokens:
            limit, shorter = self.study.timeout_s, self.slow[name]
            why = f"not tried: a context of {shorter:,} tokens took longer than {limit} s"
            result = {"status": "error", "reason": why, "timeout_s": limit}
        else:
            result = measured(self.command(point, assigned), self.study.timeout_s)
        with alone(self.out):
            row = append(self.out, fields, result | {"code": self.sources})
        self._note(row)
        return row, True

    def command(self, point: Point, assigned: dict[str, Any]) -> list[str]:
        study = self.study
        words = [sys.executable, str(CHILD), *point.overrides, f"--warm-up={study.warm_up}"]
        words += [f"--steps={study.steps}", f"--seconds={study.seconds}"]
        return words + ([] if "attention" in assigned else [f"--nanogpt={self.nanogpt}"])

    def _note(self, row: Row) -> None:
        if "timeout_s" in row["result"]:
            point = row["point"]
            before = self.slow.get(point["implementation"], point["seq_len"])
            self.slow[point["implementation"]] = min(before, point["seq_len"])


@contextmanager
def alone(path: Path) -> Iterator[None]:
    """Shards that write to one file take turns."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "a", encoding="utf-8") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def measured(command: list[str], timeout_s: float) -> dict[str, Any]:
    """The result of a point's own process, which ends when this one does; how it failed, where it did."""
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        process = subprocess.Popen(
            [*command, "--until-eof"], stdin=subprocess.PIPE, stdout=out, stderr=err, text=True
        )
        try:
            process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            why = f"timeout: the point took longer than {timeout_s} s"
            return {"status": "error", "reason": why, "timeout_s": timeout_s}
        finally:
            process.kill()
            process.wait()
            process.stdin.close()
        out.seek(0)
        for line in out:
            if line.startswith("RESULT "):
                return json.loads(line.removeprefix("RESULT "))
        err.seek(0)
        last = next((line for line in reversed(err.read().splitlines()) if line.strip()), "")[:300]
    code = process.returncode
    how = f"killed by signal {-code}" if code < 0 else f"ended with exit code {code}"
    return {"status": "error", "reason": f"the point's process was {how}: {last}".rstrip(": ")}


def tasks(study: Study, nanogpt: Path | None) -> list[dict[str, Any]]:
    """What to run: nanoGPT at each of the other coordinates, then the grid."""
    from dataclasses import replace

    from scripts.sweep_points import assignments

    rest = {key: values for key, values in study.grid.items() if key != "attention"}
    peers = assignments(replace(study, grid=rest)) if nanogpt else []
    return peers + assignments(study)


def commands(options: argparse.Namespace, study: Study, todo: list[dict[str, Any]]) -> Iterator[str]:
    """A command line for each task: this script, its grid cut down to one point."""
    from scripts.sweep_points import shown

    common = [o for o in options.overrides if not o.lstrip("+").startswith("sweep.grid.")]
    added = {o.split("=")[0] for o in options.overrides if o.startswith("+")}
    for assigned in todo:
        keys = {key: f"sweep.grid.{key}" for key in assigned}
        keys = {key: f"+{name}" if f"+{name}" in added else name for key, name in keys.items()}
        grid = [f"{keys[key]}=[{shown(value)}]" for key, value in assigned.items()]
        words = ["python", "scripts/sweep.py", *common, *grid]
        if "attention" not in assigned:
            words += ["sweep.grid.attention=[]", f"--nanogpt={options.nanogpt}"]
        words += [f"--out={options.out}"] if options.out else []
        words += [f"--wandb={options.wandb}"] if options.wandb else []
        yield shlex.join([*words, *(["--fresh"] if options.fresh else [])])


def said(row: Row) -> str:
    """A point in a line."""
    point, result = row["point"], row["result"]
    head = f"{point['implementation']} T={point['seq_len']:,} micro-batch {point['micro_batch']}: "
    if result["status"] != "ok":
        return f"{head}{result['status']}" + (f", {result['reason']}" if result["reason"] else "")
    ms, mib = result["ms_median"], result["peak_mib"]
    return f"{head}{result['tokens_per_s']:,.0f} tokens/s, {ms:,.1f} ms/step, peak {mib:,.0f} MiB"


def run(options: argparse.Namespace) -> None:
    from scripts.sweep_points import point_of, study_of

    study = study_of(options.overrides)
    if not study.grid.get("attention") and not options.nanogpt:
        raise ValueError("sweep.grid.attention is empty: name one, or give --nanogpt.")
    if options.nanogpt and not options.nanogpt.is_file():
        raise ValueError(f"--nanogpt {options.nanogpt}: no such file.")
    index, count = options.shard
    todo = tasks(study, options.nanogpt)[index::count]
    if options.print_commands:
        print("\n".join(commands(options, study, todo)))
        return
    import torch

    from scripts.rows import gpu_slug, read
    from scripts.sweep_report import draw, tables

    device = "cuda" if torch.cuda.is_available() else "cpu"
    gpu = gpu_slug(torch.cuda.get_device_name()) if device == "cuda" else "cpu"
    out = options.out or ROOT / "results" / study.name / f"{gpu}.jsonl"
    points = [point_of(study, assigned, device) for assigned in todo]  # mistakes are said before one runs
    sweep = Sweep(study, device, out, options.fresh, options.nanogpt)
    new, start = 0, time.perf_counter()
    print(f"{study.name}: {len(todo)} points, rows in {out}", flush=True)
    for done, (assigned, point) in enumerate(zip(todo, points, strict=True), 1):
        for row, fresh in sweep.run(assigned, point):
            new += fresh
            print(f"[{done}/{len(todo)}] {said(row)}" + ("" if fresh else " (kept)"), flush=True)
            if options.wandb:
                from scripts.sweep_wandb import log_point

                log_point(row, options.wandb)
        if new and done < len(todo):
            rate = new / (time.perf_counter() - start)
            print(f"    {60 * rate:.1f} points/min, about {(len(todo) - done) / rate:.0f} s left", flush=True)
    rows = [row for row in read(out).values() if row["result"].get("code") == sweep.sources]  # of all shards
    tables(rows)
    picture = draw(rows, out.with_suffix(".svg"))
    if options.wandb:
        from scripts.sweep_wandb import log_picture

        log_picture(rows, options.wandb)
    print(f"picture  {picture}\nrows     {out}")


def main() -> None:
    options = arguments()  # --help answers before anything is imported
    from conf.compose import user_errors

    user_errors(run)(options)


if __name__ == "__main__":
    main()
