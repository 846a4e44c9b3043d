"""A training point in a process of its own, which ends when this one does."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import tempfile
import threading
from typing import Any


class Process:
    """Runs a instruments/training_point.py. With `beside`, the number of others that run at the same time, it
    waits after its first step and again after those that are timed, each time until `go`: what compiles, is
    profiled or counts memory may do so side by side, what is timed is alone. Before it waits, and from `go`
    on, it may take `timeout_s`."""

    def __init__(self, command: list[str], timeout_s: float, beside: int = 0):
        self.timeout_s, self.beside = timeout_s, beside
        self.found: dict[str, Any] | None = None
        self.late = False
        self.waits, self.ended = threading.Event(), threading.Event()
        self.err = tempfile.TemporaryFile("w+")  # noqa: SIM115
        environment = dict(os.environ)
        if beside:
            share = max(1, (os.cpu_count() or 1) // (beside + 1))
            environment.setdefault("TORCHINDUCTOR_COMPILE_THREADS", str(share))
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": self.err}
        words = [*command, "--until-eof", *(["--wait"] if beside else [])]
        self.process = subprocess.Popen(words, **pipes, env=environment, text=True)
        self.timer = self._timer()
        self.reader = threading.Thread(target=self._read, daemon=True)
        self.reader.start()

    def _timer(self) -> threading.Timer:
        def kill() -> None:
            self.late = True
            self.process.kill()

        timer = threading.Timer(self.timeout_s, kill)
        timer.daemon = True
        timer.start()
        return timer

    def _read(self) -> None:
        for line in self.process.stdout:
            if line == "READY\n":
                self.timer.cancel()
                self.waits.set()
            elif line.startswith("RESULT "):
                self.found = json.loads(line.removeprefix("RESULT "))
                break
        self.timer.cancel()
        self.ended.set()
        self.waits.set()

    def ready(self) -> None:
        """Wait until it waits, or has ended."""
        self._wait(self.waits)

    def go(self) -> None:
        """On from where it waits, if it has not ended."""
        self.waits.clear()
        if self.ended.is_set() or self.process.poll() is not None:
            self.waits.set()
            return
        self.timer = self._timer()
        with contextlib.suppress(BrokenPipeError):  # it has failed, and has said so
            self.process.stdin.write("go\n")
            self.process.stdin.flush()

    def _wait(self, event: threading.Event) -> None:
        """For the event, or the end of the process: its output may stay open for longer, where a child of its
        own holds it."""
        while not event.wait(0.2):
            if self.process.poll() is not None:
                event.wait(2)  # what it has printed last may be on its way
                return

    def result(self) -> dict[str, Any]:
        """A row's result: the point's own, or how its process failed. Wherever it waits still, it goes on."""
        try:
            while self.beside:
                self.ready()
                if self.ended.is_set() or self.process.poll() is not None:
                    break
                self.go()
            self._wait(self.ended)
            if self.found is None and not self.late:
                self.process.wait()
            return (self.found or self._failed()) | ({"beside": self.beside} if self.beside else {})
        finally:
            self.end()

    def end(self) -> None:
        self.timer.cancel()
        self.process.kill()
        self.process.wait()
        self.reader.join(2)
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.close()
        if not self.reader.is_alive():
            self.process.stdout.close()
        self.err.close()

    def _failed(self) -> dict[str, Any]:
        if self.late:
            why = f"timeout: the point took longer than {self.timeout_s} s"
            return {"status": "error", "reason": why, "timeout_s": self.timeout_s}
        self.err.seek(0)
        last = next((line for line in reversed(self.err.read().splitlines()) if line.strip()), "")[:300]
        code = self.process.returncode
        how = f"killed by signal {-code}" if code < 0 else f"ended with exit code {code}"
        return {"status": "error", "reason": f"the point's process was {how}: {last}".rstrip(": ")}


def measured(command: list[str], timeout_s: float) -> dict[str, Any]:
    """The result of a point by itself."""
    return Process(command, timeout_s).result()
