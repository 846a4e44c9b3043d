"""Plants the mistakes of tests/mistakes.toml, one at a time, and says whether the tests named there notice.

    python -m tests.mistakes [--quick] [--only NAME ...] [--jobs 2]

Each mistake is planted in a copy of this checkout, in which the tests run that `make test` would run of those
named; where these pass, those that `make test-all` adds. A test that finds no mistake of its kind is no loss:
this is what may be asked before one is taken out.
"""

from __future__ import annotations

import argparse
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import tomllib
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
LIST = ROOT / "tests" / "mistakes.toml"
BY_MAKE_TEST = 50  # so many at least have to be caught by `make test`
SECONDS = 300  # that the tests of a mistake may take; more is no answer
MARKS = {"make test": "not long and not slow", "make test-all": "long and not slow"}


@dataclass(frozen=True)
class Mistake:
    """`old` text of a file, there once, with `new` in its place; what that breaks; arguments for pytest that
    name the tests to notice."""

    name: str
    file: str
    old: str
    new: str
    breaks: str
    tests: str

    @contextmanager
    def planted(self, tree: Path) -> Iterator[None]:
        """Raises ValueError where `old` is not there exactly once."""
        path = tree / self.file
        text = path.read_text(encoding="utf-8") if path.is_file() else ""
        if (times := text.count(self.old)) != 1:
            raise ValueError(f"{self.name}: {self.file} has {self.old!r} {times} times; it needs to be once")
        path.write_text(text.replace(self.old, self.new), encoding="utf-8")
        try:
            yield
        finally:
            path.write_text(text, encoding="utf-8")


def mistakes(path: Path = LIST) -> list[Mistake]:
    """Those of a list, in its order."""
    return [Mistake(name, **facts) for name, facts in tomllib.loads(path.read_text(encoding="utf-8")).items()]


def copy_of_checkout(to: Path) -> Path:
    """All files that git knows or would add."""
    listing = ["git", "-C", str(ROOT), "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    for name in subprocess.run(listing, capture_output=True, text=True, check=True).stdout.split("\0"):
        if (ROOT / name).is_file():
            (to / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(ROOT / name, to / name)
    return to


def tested(tree: Path, tests: str, marks: str, log: Path) -> int:
    """In a forked process, to which all that is heavy has been imported: pytest's exit code."""
    signal.alarm(SECONDS)
    os.chdir(tree)
    out = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    for stream in (1, 2):
        os.dup2(out, stream)
    # A changed file of the same size and second would be taken for the one that was compiled before.
    sys.dont_write_bytecode, os.environ["PYTHONDONTWRITEBYTECODE"] = True, "1"
    sys.path[0] = str(tree)
    for name in [name for name in sys.modules if name.partition(".")[0] == "tests"]:
        del sys.modules[name]
    import pytest

    return pytest.main([*shlex.split(tests), "-x", "-q", "-p", "no:cacheprovider", "-m", marks])


class Trials:
    """Mistakes under way, one in each copy of the checkout."""

    def __init__(self, folder: Path, jobs: int):
        self.free = [copy_of_checkout(folder / str(job)) for job in range(jobs)]
        self.running: dict[int, tuple[Mistake, str, Path, float, object]] = {}

    def start(self, mistake: Mistake, command: str) -> None:
        tree, planted = self.free.pop(), mistake.planted
        change = planted(tree)
        change.__enter__()
        if not (pid := os.fork()):
            code = 70
            try:
                code = int(tested(tree, mistake.tests, MARKS[command], tree.with_suffix(".log")))
            finally:
                os._exit(code)
        self.running[pid] = mistake, command, tree, time.monotonic(), change

    def finish(self) -> tuple[Mistake, str, int, float, str]:
        """(mistake, command, exit code, seconds, the last words) of the next that ends."""
        pid, status = os.wait()
        mistake, command, tree, began, change = self.running.pop(pid)
        change.__exit__(None, None, None)
        self.free.append(tree)
        said = tree.with_suffix(".log").read_text(errors="replace")
        return mistake, command, os.waitstatus_to_exitcode(status), time.monotonic() - began, said


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.mistakes", description=__doc__.split("\n")[0])
    parser.add_argument("--quick", action="store_true", help="ask only the tests of `make test`")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="these mistakes alone")
    parser.add_argument("--list", type=Path, default=LIST, help=f"another list than {LIST.name}")
    parser.add_argument("--jobs", type=int, default=2, help="so many at a time (default: 2)")
    options = parser.parse_args(arguments)
    chosen = [m for m in mistakes(options.list) if options.only is None or m.name in options.only]
    if unknown := set(options.only or ()) - {m.name for m in chosen}:
        parser.error(f"there is no mistake {', '.join(sorted(unknown))}; {options.list.name} has all names")
    import hydra.utils  # noqa: F401 - for the forked processes
    import lightning  # noqa: F401
    import torch  # noqa: F401

    waiting = deque((mistake, "make test") for mistake in chosen)
    caught: dict[str, str] = {}
    with tempfile.TemporaryDirectory(prefix="mistakes") as folder:
        trials = Trials(Path(folder), options.jobs)
        while waiting or trials.running:
            if waiting and trials.free:
                trials.start(*waiting.popleft())
                continue
            mistake, command, code, seconds, said = trials.finish()
            if code == 1:
                caught[mistake.name] = command
            elif code in (0, 5) and command == "make test" and not options.quick:
                waiting.append((mistake, "make test-all"))
                continue
            verdict = f"caught by {command}" if code == 1 else "NOT CAUGHT" if code in (0, 5) else "FAILED"
            print(f"{verdict:24} {seconds:5.1f} s  {mistake.name}: {mistake.breaks}", flush=True)
            if code not in (0, 1, 5):
                print(f"{said[-2000:]}\npytest ended with {code}: the tests of {mistake.name} did not run")
    quick = sum(command == "make test" for command in caught.values())
    print(f"{len(caught)} of {len(chosen)} mistakes are caught, {quick} of them by make test.")
    return int(len(caught) < len(chosen) or (options.only is None and quick < BY_MAKE_TEST))


if __name__ == "__main__":
    sys.exit(main())
