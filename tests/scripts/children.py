"""What processes of measure/worker.py run in its tests."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

Request = dict[str, Any]


def doubled(request: Request, ready: Callable[[], None]) -> Request:
    print("RESULTS are not results\nRESULT of a library\nRESULT 3")
    return {"status": "ok", "twice": 2 * request["number"]}


def killed(request: Request, ready: Callable[[], None]) -> Request:
    os.kill(os.getpid(), 9)


def stopped(request: Request, ready: Callable[[], None]) -> Request:
    sys.exit("a warning\nno such thing")


def raised(request: Request, ready: Callable[[], None]) -> Request:
    raise TypeError("no such launch\nmore")


def hangs(request: Request, ready: Callable[[], None]) -> Request:
    time.sleep(60)


def lasting(request: Request, ready: Callable[[], None]) -> Request:
    subprocess.Popen(["sleep", "30"])
    sys.exit("gone")


def out_of_memory(request: Request, ready: Callable[[], None]) -> Request:
    sys.exit("a warning\nerror: out of memory on a GPU\n  seq_len=8")


def in_turns(request: Request, ready: Callable[[], None]) -> Request:
    """Says what it does in a file, and waits twice."""

    def say(what: str) -> None:
        with open(request["file"], "a", buffering=1) as file:
            print(request["name"], what, file=file)

    say("sets up")
    ready()
    say("is timed")
    ready()
    say("is profiled")
    if request["name"] == "b":
        sys.exit("broken")
    return {"status": "ok"}


def claims(request: Request, ready: Callable[[], None]) -> Request:
    """Whether a run in this process may measure a point; then it may append its row."""
    from scripts.measure.rows import append
    from tests.scripts.studies import run_of

    KEPT.append(run_of(Path(request["out"])))  # the claim goes with the process
    mine = KEPT[-1].claim(request["point"])
    if request.get("result"):
        append(KEPT[-1].out, request["point"], request["result"])
    return {"status": "ok", "mine": mine}


KEPT: list[Any] = []
