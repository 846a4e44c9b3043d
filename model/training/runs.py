"""Where a run lives: its folder under runs_dir, decided once, under a name that means nothing else, one
process in it at a time, and gone again if nothing came of it."""

from __future__ import annotations

import csv
import errno
import itertools
import os
import shlex
import shutil
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from conf.values import UserError
from model.training.checkpoint import RUNS, CheckpointError, checkpoints_of, step_of

LOCK = ".lock"  # in the run's folder; locked by the kernel while its process lives, its text says whose it is
UNWRITABLE = (
    errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.ENOTDIR, errno.EEXIST
)  # fmt: skip
NO_LOCKS = (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP)


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


class Hold(ExitStack):
    """The lock of one run, which keeps every other process out of it."""

    run: Path | None = None

    def take(self, run: Path) -> None:
        """Lock `run` in place of what was locked before. UserError where another process has it."""
        if run != self.run:
            self.close()
            self.enter_context(_alone(run))
            self.run = run


@contextmanager
def run_folder(decide: Callable[[], Path], hold: Hold, since: int = -1) -> Iterator[Path]:
    """The folder of a run, held by this process alone; one that was empty before and in which nothing was
    trained beyond step `since` goes again. UserError where another process has it, or it cannot be
    written."""
    first = "TILEGPT_RUN" not in os.environ
    with fixed_path("TILEGPT_RUN", decide) as run, hold:
        new = False
        try:
            if first:
                hold.take(run)
                new = all(path.name == LOCK for path in run.iterdir())
            yield run
        except BaseException as error:
            saved = [step_of(path) for path in checkpoints_of(run / "checkpoints")]
            if new and max([last_logged(run), *saved]) <= since:
                shutil.rmtree(run, ignore_errors=True)
                saved = []
            goes_on = f"{ckpt_of(run)} continues from step {saved[0]}" if saved else None
            if isinstance(error, OSError) and error.errno in UNWRITABLE and _within(error.filename, run):
                raise _unwritable(error.filename or run, error, run.parent, goes_on) from error
            if goes_on and isinstance(error, CheckpointError | KeyboardInterrupt | SystemExit):
                error.add_note(goes_on)  # for `user_errors` to say
            raise


def _within(file: str | None, run: Path) -> bool:
    """Whether an error is the run's; one of a file that was open names none."""
    return file is None or run.absolute() in Path(file).absolute().parents or Path(file) == run


def _unwritable(path: Any, error: OSError, runs: Path, goes_on: str | None = None) -> UserError:
    return UserError(
        f"{path} cannot be written: {error.strerror}. Runs lie in {runs}/; runs_dir=... names another folder."
        + (f" {goes_on}." if goes_on else "")
    )


def _rank() -> int:
    from lightning.pytorch.utilities import rank_zero_only  # seconds of Lightning, which only training needs

    return rank_zero_only.rank


@contextmanager
def _alone(run: Path) -> Iterator[None]:
    """Hold the run's lock, which the kernel takes back however this process ends. Of several ranks, the
    first has it for all."""
    from filelock import FileLock, Timeout

    if _rank():
        yield
        return
    # not filelock's other kind, by a file's existence: what a killed process left would have to be removed
    lock = FileLock(run / LOCK, fallback_to_soft=False)
    try:
        lock.acquire(blocking=False)
        (run / LOCK).write_text(f"process {os.getpid()} on {socket.gethostname()}", encoding="utf-8")
    except Timeout:
        holder = (run / LOCK).read_text(encoding="utf-8", errors="replace") or "another process"
        raise UserError(
            f"{run} is in use by {holder}: one process at a time trains a run. Wait for it or stop it, or "
            "give this one a name= of its own."
        ) from None
    except OSError as error:
        if error.errno not in NO_LOCKS:
            raise _unwritable(run, error, run.parent) from error
        print(f"{run} cannot be locked ({error.strerror}): make sure that no other process trains this run.")
        yield
        return
    try:
        yield
    finally:
        lock.release()


def ckpt_of(run: Path, file: Path | None = None) -> str:
    """What a command line gives to mean this run, or a file of it."""
    elsewhere = [] if run.parent == RUNS else [f"runs_dir={run.parent}"]
    return shlex.join([f"ckpt={file or run.name}", *elsewhere])


def runs_folder(value: Any) -> Path:
    """The folder that a value of runs_dir names."""
    if not isinstance(value, str | int) or isinstance(value, bool) or value == "":
        raise UserError(f"runs_dir={value}: it needs to be a folder, in which each run has one of its own.")
    return Path(str(value))


def new_run(
    name: str | None, choices: Mapping[str, str | None], suffix: str = "", runs: Path = RUNS, base: str = ""
) -> Path:
    """A folder of its own in `runs`: `name`, refused where a run is in it, else `base`, else what was chosen
    and the time."""
    name = None if name in (None, "") else str(name)
    if name is None and _launched():
        raise UserError(
            "Processes that a launcher started (torchrun, srun) have to agree on the run's folder: give it a "
            "name=."
        )
    if name is not None:
        check_name(name, runs)
    made = f"{choices.get('experiment') or choices.get('model')}-{choices.get('attention')}"
    base = name or base or made + time.strftime("-%Y%m%d-%H%M%S")
    for number in itertools.count(1):
        run = runs / f"{base}{suffix}{'' if number == 1 else f'-{number}'}"
        try:
            run.mkdir(parents=True)
        except FileExistsError as error:
            if name is None:
                continue  # another run of this second
            if not run.is_dir():
                raise _unwritable(run, error, runs) from error
            # another rank may find what the first has put there
            if _rank() == 0 and any((run / "checkpoints").glob("*.ckpt")):
                with _alone(run):  # or who trains it is said
                    raise UserError(
                        f"{run} holds a run already. Continue it with {ckpt_of(run)}, or give another name=."
                    ) from None
        except OSError as error:
            raise _unwritable(run, error, runs) from error
        return run


def check_name(name: str, runs: Path) -> None:
    """UserError for what would be no folder right under `runs`, or mean something else to ckpt=."""
    if "/" in name or name in ("last", ".", ".."):
        raise UserError(
            f"name={name}: the name of a folder right under {runs}/, without slashes, and not 'last', which "
            "is the newest run to ckpt=."
        )


def _launched() -> bool:
    """Several processes started from outside, each by this command line."""
    count = "WORLD_SIZE" if "TORCHELASTIC_RUN_ID" in os.environ else "SLURM_NTASKS"
    outside = "TORCHELASTIC_RUN_ID" in os.environ or "SLURM_JOB_ID" in os.environ
    return outside and int(os.environ.get(count) or 1) > 1


def last_logged(run: Path) -> int:
    """The last step in metrics.csv, -1 where there is none."""
    try:
        with open(run / "metrics.csv", newline="", encoding="utf-8") as file:
            return max(
                (int(row["step"]) for row in csv.DictReader(file) if row["step"].isdecimal()), default=-1
            )
    except (OSError, KeyError, ValueError):
        return -1
