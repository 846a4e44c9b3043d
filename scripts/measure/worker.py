"""Child processes that measure: what is told them, what they answer, and that none outlives its parent.

    worker = Worker("scripts.measure.instruments.training_point:child", timeout_s=120)
    result = worker.ask({"words": ["attention=triton"]})

The child imports the module and calls the function with each request: `child(request, ready)` gives a row's
result, and what it raises is one too. Requests are lines of JSON on its standard input, answers are lines
"RESULT {...}" on its standard output, whatever else is printed there. `ready()` says READY and waits for a
line, so that several get ready side by side and are timed one by one. A child ends when its input does.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import queue
import runpy
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from typing import Any

from scripts.measure.machine import ROOT

Result = dict[str, Any]
READY = "READY"


class Worker:
    """A process of its own, started at once. `timeout_s`: what an answer, or getting ready, may take;
    `beside`: the number of others at the same time, which share the cores to compile."""

    def __init__(
        self, target: str, timeout_s: float | None = None, beside: int = 0, **environment: str
    ) -> None:
        self.timeout_s, self.beside, self.late = timeout_s, beside, False
        self.said: queue.Queue[str | Result] = queue.Queue()
        self.found: Any = (
            None  # READY or an answer, which it said last; ...: it is at work; None: it has ended
        )
        self.err = tempfile.TemporaryFile("w+")  # noqa: SIM115
        path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
        environment = {**os.environ, **environment, "PYTHONPATH": path}
        if beside:
            share = max(1, (os.cpu_count() or 1) // (beside + 1))
            environment.setdefault("TORCHINDUCTOR_COMPILE_THREADS", str(share))
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": self.err}
        command = [sys.executable, "-m", __name__, target]
        self.process = subprocess.Popen(command, **pipes, env=environment, text=True)
        self.reader = threading.Thread(target=self._read, daemon=True)
        self.reader.start()

    def ask(self, request: dict[str, Any] | None = None) -> Result:
        """The answer to a request, or how the process failed."""
        self.start(request)
        return self.result()

    def start(self, request: dict[str, Any] | None = None, wait: bool = False) -> None:
        """Ask without waiting for the answer; wait: it waits in turn where it is ready."""
        self._tell(json.dumps({"request": request or {}, "wait": wait}))

    def ready(self) -> None:
        """Wait until it waits, or has answered or ended."""
        if self.found is ...:
            self.found = self._next()

    def go(self) -> None:
        """On from where it waits, if it does."""
        self.ready()
        if self.found == READY:
            self._tell("go")

    def result(self) -> Result:
        """The answer; wherever it waits still, it goes on."""
        self.ready()
        while self.found == READY:
            self.go()
            self.ready()
        found = self.found if isinstance(self.found, dict) else self._failed()
        return found | ({"beside": self.beside} if self.beside else {})

    def end(self) -> None:
        self.process.kill()
        self.process.wait()
        self.reader.join(2)
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.close()
        if not self.reader.is_alive():  # a child of its own may hold its output
            self.process.stdout.close()
        self.err.close()

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    def _tell(self, line: str) -> None:
        self.began, self.found = time.monotonic(), ...
        with contextlib.suppress(OSError):  # it has failed, and says so where it is asked
            self.process.stdin.write(line + "\n")
            self.process.stdin.flush()

    def _read(self) -> None:
        for line in self.process.stdout:
            if line == f"{READY}\n":
                self.said.put(READY)
            elif line.startswith("RESULT "):
                with contextlib.suppress(ValueError):  # a library says so, too
                    found = json.loads(line.removeprefix("RESULT "))
                    if isinstance(found, dict):
                        self.said.put(found)

    def _next(self) -> str | Result | None:
        """What it says next; None where it has ended or taken too long. Its output may stay open for longer
        than it lives, where a child of its own holds it."""
        while True:
            over = self.process.poll() is not None
            try:
                return self.said.get(timeout=1 if over else 0.1)
            except queue.Empty:
                if over:
                    return None
            if self.timeout_s is not None and time.monotonic() - self.began > self.timeout_s:
                self.late = True
                self.process.kill()
                return None

    def _failed(self) -> Result:
        if self.late:
            why = f"timeout: the point took longer than {self.timeout_s} s"
            return {"status": "error", "reason": why, "timeout_s": self.timeout_s}
        code = self.process.wait()
        self.err.seek(0)
        lines = [line.strip() for line in self.err.read().splitlines() if line.strip()] or [""]
        # whose remedies follow
        memory = next((line for line in lines if "out of memory" in line.lower()), None)
        how = f"killed by signal {-code}" if code < 0 else f"ended with exit code {code}"
        why = f"the point's process was {how}: {(memory or lines[-1])[:300]}".rstrip(": ")
        return {"status": "oom" if memory else "error", "reason": why}


def once(target: str, request: dict[str, Any], timeout_s: float | None = None, **environment: str) -> Result:
    """The answer of a process that is asked one thing."""
    with Worker(target, timeout_s, **environment) as worker:
        return worker.ask(request)


def train(request: dict[str, Any], ready: Callable[[], None]) -> Result:
    """train.py with these words, in that folder."""
    os.chdir(request["folder"])
    sys.argv = ["train.py", *request["words"]]
    runpy.run_path(str(ROOT / "train.py"), run_name="train")["main"]()  # as __main__ it ends the process
    return {"status": "ok", "reason": None}


def main() -> None:
    """The child's side."""
    module, _, name = sys.argv[1].partition(":")
    answer: Callable[[dict[str, Any], Callable[[], None]], Result] = getattr(
        importlib.import_module(module), name
    )
    lines: queue.Queue[str] = queue.Queue()

    def follow() -> None:
        # not sys.stdin, whose lock a thread would hold when the process exits
        with open(0, closefd=False, encoding="utf-8") as stdin:
            for line in stdin:
                lines.put(line)
        os._exit(1)  # whoever asked is gone

    def ready() -> None:
        torch = sys.modules.get("torch")  # who has not imported it holds no memory
        if torch and torch.cuda.is_available():
            torch.cuda.empty_cache()  # whoever is first finds room
        print(f"\n{READY}", flush=True)
        lines.get()

    threading.Thread(target=follow, daemon=True).start()
    while True:
        asked = json.loads(lines.get())
        try:
            result = answer(asked["request"], ready if asked["wait"] else lambda: None)
        except Exception as error:  # whatever it is, it is the point's result
            from scripts.measure.runner import failure

            result = failure(error)
        print("\nRESULT", json.dumps(result), flush=True)  # a library may have begun a line


if __name__ == "__main__":
    main()
