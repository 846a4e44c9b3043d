"""Where a run lives: its folder under runs/, decided once, under a name that means nothing else, and gone
again if nothing came of it."""

from __future__ import annotations

import itertools
import os
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from model.checkpoint import RUNS


@contextmanager
def fixed_path(variable: str, decide: Callable[[], Path]) -> Iterator[Path]:
    """A path decided once, by the first process: under DDP the others run this command line again, and
    find it in the environment."""
    path = os.environ.get(variable) or str(decide())
    os.environ[variable] = path
    try:
        yield Path(path)
    finally:
        os.environ.pop(variable, None)  # the next job of a sweep is another run


@contextmanager
def run_folder(decide: Callable[[], Path]) -> Iterator[Path]:
    """The folder of a run; one that was empty before and in which nothing was trained goes again."""
    first = "TILEGPT_RUN" not in os.environ
    with fixed_path("TILEGPT_RUN", decide) as run:
        new = first and not any(run.iterdir())
        try:
            yield run
        except BaseException:
            if new and not _begun(run):
                shutil.rmtree(run, ignore_errors=True)
            raise


def _begun(run: Path) -> bool:
    metrics = run / "metrics.csv"
    return any(run.glob("checkpoints/*.ckpt")) or (
        metrics.is_file() and len(metrics.read_text(encoding="utf-8").splitlines()) > 1
    )


def new_run(name: str | None, choices: Mapping[str, str | None], suffix: str = "") -> Path:
    """A folder of its own under runs/: `name`, refused where a run is in it, else what was chosen and the
    time."""
    name = None if name in (None, "") else str(name)
    if name is None and _launched():
        raise ValueError(
            "Processes that a launcher started (torchrun, srun) have to agree on the run's folder: give it a "
            "name=."
        )
    if name is not None:
        check_name(name)
    made = f"{choices.get('experiment') or choices.get('model')}-{choices.get('attention')}"
    base = made + time.strftime("-%Y%m%d-%H%M%S") if name is None else name
    for number in itertools.count(1):
        run = RUNS / f"{base}{suffix}{'' if number == 1 else f'-{number}'}"
        try:
            run.mkdir(parents=True)
        except FileExistsError:
            if name is None:
                continue  # another run of this second
            if any((run / "checkpoints").glob("*.ckpt")):
                raise ValueError(
                    f"{run} holds a run already. Continue it with ckpt={run.name}, or choose another name=."
                ) from None
        return run


def check_name(name: str) -> None:
    """ValueError for what would be no folder right under runs/, or mean something else to ckpt=."""
    if "/" in name or name in ("last", ".", ".."):
        raise ValueError(
            f"name={name}: the name of a folder right under {RUNS}/, without slashes, and not 'last', which "
            "is the newest run to ckpt=."
        )


def _launched() -> bool:
    """Several processes started from outside, each by this command line."""
    count = "WORLD_SIZE" if "TORCHELASTIC_RUN_ID" in os.environ else "SLURM_NTASKS"
    outside = "TORCHELASTIC_RUN_ID" in os.environ or "SLURM_JOB_ID" in os.environ
    return outside and int(os.environ.get(count) or 1) > 1


def run_of(ckpt: Path) -> Path | None:
    """The run that a checkpoint lies in; None for a file from anywhere else, whose folder is not ours."""
    folder = Path(os.path.abspath(ckpt)).parent
    run = RUNS / folder.parent.name
    inside = folder.name == "checkpoints" and run.is_dir() and folder.parent.samefile(run)
    return run if inside else None
