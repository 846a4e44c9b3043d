"""Python processes that begin with torch, Lightning and Hydra imported, and nothing of ours: forks of one
process, for which that takes 3 s once, not each time.

    with Forks(environment) as python:
        done = python(folder, "scripts/report.py", "auto")
"""

from __future__ import annotations

import json
import os
import runpy
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

SECONDS = 600  # that one may take; then it is killed


class Forks:
    """What is called runs `python <words>` in a folder, to its end."""

    def __init__(self, environment: Mapping[str, str]):
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        self.process = subprocess.Popen([sys.executable, __file__], env=environment, **pipes)

    def __call__(self, folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
        with tempfile.TemporaryDirectory() as logs:
            out, err = Path(logs, "out"), Path(logs, "err")
            request = {"folder": str(folder), "words": words, "out": str(out), "err": str(err)}
            self.process.stdin.write(json.dumps(request) + "\n")
            self.process.stdin.flush()
            code = int(self.process.stdout.readline())
            return subprocess.CompletedProcess(words, code, out.read_text(), err.read_text())

    def __enter__(self) -> Forks:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.stdin.close()  # it ends with its input
        self.process.wait()
        self.process.stdout.close()


def _become(folder: str, words: list[str], out: str, err: str) -> None:
    """As `python <words>` begins: a script, -c or -m."""
    signal.alarm(SECONDS)
    os.chdir(folder)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    for stream, path in ((1, out), (2, err)):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), stream)
    kind, what = (words[0], words[1]) if words[0] in ("-c", "-m") else ("", words[0])
    sys.argv = ["-c", *words[2:]] if kind == "-c" else words[1:] if kind else words
    sys.path[0] = "" if kind == "-c" else folder if kind else str(Path(folder, what).parent)
    if kind == "-c":
        exec(compile(what, "<string>", "exec"), {"__name__": "__main__"})
    elif kind == "-m":
        runpy.run_module(what, run_name="__main__", alter_sys=True)
    else:
        runpy.run_path(what, run_name="__main__")


def main() -> None:
    import hydra.utils  # noqa: F401
    import lightning.pytorch  # noqa: F401
    import pytest  # noqa: F401

    for line in sys.stdin:
        if not (child := os.fork()):
            return _become(**json.loads(line))
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        print(code, flush=True)


if __name__ == "__main__":
    main()
