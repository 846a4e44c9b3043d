"""Where a run goes on that resumes from a checkpoint, and what its folder begins with."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path

from lightning.pytorch.utilities import rank_zero_only

from conf.values import UserError
from model.pretrained.base_weights import BASE
from model.training.checkpoint import (
    RUNS,
    CheckpointError,
    checkpoints_of,
    link,
    link_best,
    read_checkpoint,
    read_header,
    step_of,
    verify,
)
from model.training.loggers import MetricsCSV
from model.training.runs import Hold, last_logged, new_run

NOTHING_TO_OVERWRITE = (
    "overwrite=true sets a run back to an older checkpoint, with ckpt= and without name=: leave it out."
)


def run_of(ckpt: Path, runs: Path = RUNS) -> Path | None:
    """The run that a checkpoint lies in; None for a file from anywhere else, whose folder is not ours."""
    folder = Path(os.path.abspath(ckpt)).parent
    run = runs / folder.parent.name
    inside = folder.name == "checkpoints" and run.is_dir() and folder.parent.samefile(run)
    return run if inside else None


def run_from(
    ckpt: Path,
    step: int,
    name: str | None,
    choices: Mapping[str, str | None],
    runs: Path,
    overwrite: bool,
    hold: Hold,
) -> Path:
    """The run that goes on from `ckpt`: the one that it lies in, unless that has gone on to a later
    checkpoint, which stays: then, without `overwrite`, or under another name, a run of its own."""
    own = run_of(ckpt, runs)
    if name is not None or own is None:
        return new_run(name, choices, runs=runs)
    hold.take(own)
    later = next((at for _, at in _later(own, step) if at > step), None)  # of a damaged one it is -1
    if later is None:  # of a run that has finished, nobody comes to look again
        best = read_checkpoint(ckpt, verified=True, mmap=True).get("callbacks", {})
        link_best(ckpt.parent, best.get("Checkpoints", {}).get("best_step"))
    if later is None or overwrite:
        return own
    run = new_run(None, choices, runs=runs, base=f"{own.name}-from-{step}")
    print(
        f"{own} has checkpoints up to step {later}: resuming from step {step} starts a new run, {run} "
        f"(overwrite=true: sets {own} back to step {step}, and deletes what came after)."
    )
    return run


def _later(run: Path, step: int) -> Iterator[tuple[Path, int]]:
    """The run's checkpoints after `step`, newest first, then best.ckpt: each read only when it is asked for,
    and its step, -1 of one that is damaged."""
    for path in checkpoints_of(run / "checkpoints"):
        if step_of(path) > step:
            try:
                verify(path)
                yield path, step_of(path)
            except CheckpointError:
                yield path, -1
    best = run / "checkpoints" / "best.ckpt"
    # nothing is lost with a damaged one, and `link` replaces it
    with suppress(CheckpointError):
        if best.is_file() and (at := read_header(best)[1]) > step:
            verify(best)
            yield best, at


def take_over(run: Path, ckpt: Path, step: int, overwrite: bool) -> Path:
    """The file to read from now on. Of a run that goes on from another run's `ckpt`: a link to it in its own
    folder, since a process that trains the other may replace or remove it; the metrics, samples and the best
    checkpoint up to `step` come along."""
    own = run_of(ckpt, run.parent)
    if overwrite and own != run:
        raise UserError(NOTHING_TO_OVERWRITE)
    if own in (None, run):
        return ckpt
    folder = run / "checkpoints"
    mine, best = folder / f"step-{step:08d}.ckpt", folder / "best.ckpt"
    if rank_zero_only.rank:  # linked before the ranks meet, which is before the weights are read
        return mine if mine.exists() else ckpt
    folder.mkdir(exist_ok=True)
    try:
        link(ckpt, mine)
    except FileNotFoundError:
        raise CheckpointError(f"{ckpt} was removed meanwhile, by who trains {own}: start again.") from None
    read_checkpoint(mine, verified=True, mmap=True, step=step)
    if (own / BASE).is_file():
        link(own / BASE, run / BASE)
    os.environ["TILEGPT_CKPT"] = str(mine)  # for the processes that Lightning starts
    for name in ("metrics.csv", "samples.txt"):
        if (own / name).is_file():
            shutil.copyfile(own / name, run / name)
    MetricsCSV(f"{run}/metrics.csv", step)  # cuts what is after the step, as `Samples` will
    if (own / "checkpoints" / best.name).is_file():
        link(own / "checkpoints" / best.name, best)
        if read_header(best)[1] > step:
            best.unlink()
    return mine


@rank_zero_only
def drop_later(run: Path, ckpt: Path, step: int) -> None:
    """What a run that goes on in its folder has after `step` goes, as was asked for, and is said."""
    if run_of(ckpt, run.parent) != run:
        return
    later = dict(_later(run, step))
    for path in [path for path, at in later.items() if at < 0]:
        del later[path]
        print(f"{path} is damaged: now {path.rename(f'{path}.damaged').name}")
    if later:
        last = max(last_logged(run), *later.values())
        names = ", ".join(path.name for path in later)
        print(f"overwrite=true: deleting {names} and the metrics of steps {step + 1} to {last} of {run}.")
    for path in later:
        path.unlink()
