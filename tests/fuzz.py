"""Random calls of the attention contract, many, for every implementation: python -m tests.fuzz --calls 100000

Work goes in numbered batches: `--seed` is the number of the first, and a batch's number decides all it draws,
so that runs with other ranges add up; with `--out` an existing summary is continued. A batch (tests/batch.py)
takes one implementation and one kind of call, whose kernels are compiled once, and varies the rest. Workers
are processes: one that dies, or answers nothing for `--patience` seconds, is replaced, and the call that it
was in is kept. `--replay "Call(...)"` runs one call again.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import subprocess
import sys
import threading
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.running import REPORTED, ROOT

STARTS = 300  # seconds that a worker may take to start


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__.split("\n")[0])
    parser.add_argument(
        "--calls", type=int, default=100_000, help="calls that ran or were refused, in this run"
    )
    parser.add_argument("--minutes", type=float, default=9.0)
    parser.add_argument("--workers", type=int, default=max(1, min(12, (os.cpu_count() or 2) - 2)))
    parser.add_argument("--seed", type=int, default=0, help="number of the first batch")
    parser.add_argument("--device", choices=("cpu", "cuda"), help="default: cuda where there is one")
    parser.add_argument("--attention", help="names, separated by commas; default: all of conf/attention")
    parser.add_argument("--out", type=Path, help="JSON summary; an existing one is continued")
    parser.add_argument("--patience", type=float, default=180.0, help="seconds after which a call hangs")
    parser.add_argument("--replay", metavar="CALL", help='run "Call(...)", as printed for a failure')
    parser.add_argument("--work", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.work:
        return work(args)
    return replay(args) if args.replay else Run(args).go()


@dataclass
class Finding:
    """A kind of failure of an implementation; the simplest call that shows it."""

    attention: str
    kind: str
    call: str
    message: str
    shrunk: bool
    count: int = 1


@dataclass
class Run:
    """The parent: hands out batches, counts, watches."""

    args: argparse.Namespace
    counts: dict[str, Counter[str]] = field(default_factory=dict)
    refusals: Counter[str] = field(default_factory=Counter)
    findings: dict[tuple[str, str], Finding] = field(default_factory=dict)
    earlier_seconds: float = 0.0
    workers: list[_Worker] = field(default_factory=list)

    def go(self) -> int:
        if self.args.out and self.args.out.exists():
            self._continue(json.loads(self.args.out.read_text()))
        self.lock, self.begun, self.first = threading.Lock(), time.monotonic(), self._total()
        self.numbers = itertools.count(self.args.seed)
        self.next = self.args.seed
        threads = [threading.Thread(target=self._tend, daemon=True) for _ in range(self.args.workers)]
        for thread in threads:
            thread.start()
        said = self.begun
        while any(thread.is_alive() for thread in threads):
            time.sleep(0.2)
            if self._done():
                for worker in self.workers:
                    worker.process.kill()
            if time.monotonic() - said > 15:
                said = time.monotonic()
                print(self._progress(), flush=True)
                self._save()
        print(self._progress())
        self._save()
        print(self._table())
        return int(bool(self.findings) or self._total() == self.first)

    def _done(self) -> bool:
        passed = time.monotonic() - self.begun
        return passed > 60 * self.args.minutes or self._total() - self.first >= self.args.calls

    def _total(self) -> int:
        return sum(counts.total() for counts in self.counts.values())

    def _tend(self) -> None:
        """One worker after the other, until all is done."""
        while not self._done():
            worker = _Worker(self.args)
            self.workers.append(worker)
            while worker.alive and not self._done():
                with self.lock:
                    number = next(self.numbers)
                    self.next = number + 1
                worker.give(number)
                self._listen(worker)
            worker.end()
            self.workers.remove(worker)

    def _listen(self, worker: _Worker) -> None:
        """To one batch; a worker that hangs is killed, and one that dies leaves the loop."""
        while True:
            line = worker.line(self.args.patience)
            if line is None or line.get("end"):
                break
            with self.lock:
                self._note(line)
            if self._done():
                return
        if line is None and worker.process.poll() != REPORTED and not self._done():
            if not worker.call:
                raise RuntimeError(f"a worker ends before its first call:\n{worker.words()}")
            kind = "hangs" if worker.hung else f"ends the process ({worker.process.poll()})"
            name = worker.call.split("'")[1]
            with self.lock:
                self._note(
                    {"name": name, "kind": kind, "call": worker.call, "message": f"{kind}\n{worker.words()}"}
                )

    def _note(self, line: dict[str, Any]) -> None:
        counts = self.counts.setdefault(line["name"], Counter())
        if "kind" not in line:
            counts["refused" if line["refused"] else "agreed"] += 1
            if line["refused"]:
                self.refusals[line["refused"]] += 1
            return
        shrunk, key = line.get("shrunk", False), (line["name"], line["kind"])
        counts["failed"] += not shrunk
        found = self.findings.get(key)
        if found is None:
            self.findings[key] = Finding(*key, line["call"], line["message"], shrunk)
            print(f"FAILED {line['name']}: {line['message'][:300]}\n       {line['call']}", flush=True)
        else:
            found.count += not shrunk
            if (shrunk, -len(line["call"])) > (found.shrunk, -len(found.call)):
                found.call, found.message, found.shrunk = line["call"], line["message"], shrunk

    def _progress(self) -> str:
        total, seconds = self._total() - self.first, time.monotonic() - self.begun
        rate = total / seconds
        left = min((self.args.calls - total) / max(rate, 1e-9), 60 * self.args.minutes - seconds)
        sums = sum(self.counts.values(), Counter())
        return (
            f"{seconds:5.0f} s: {total:,} of {self.args.calls:,} calls, {rate:.0f} a second, "
            f"{max(left, 0):.0f} s left; "
            f"{sums['agreed']:,} agreed, {sums['refused']:,} refused, {sums['failed']:,} failed"
        )

    def _table(self) -> str:
        lines = [f"{'':16}{'agreed':>9}{'refused':>9}{'failed':>9}"]
        for name, counts in sorted(self.counts.items()):
            lines.append(f"{name:16}" + "".join(f"{counts[x]:>9,}" for x in ("agreed", "refused", "failed")))
        for found in sorted(self.findings.values(), key=lambda each: (each.attention, -each.count)):
            lines += ["", f"{found.attention}, {found.count} times: {found.message[:500]}", found.call]
        return "\n".join([*lines, "", f"the next batches: --seed {self.next}"])

    def _save(self) -> None:
        if not self.args.out:
            return
        with self.lock:
            seconds = self.earlier_seconds + time.monotonic() - self.begun
            summary = {
                "calls": self._total(),
                "seconds": round(seconds, 1),
                "next_seed": self.next,
                "implementations": {name: dict(counts) for name, counts in sorted(self.counts.items())},
                "findings": [vars(found) for found in self.findings.values()],
                "refusals": dict(self.refusals.most_common(200)),
            }
        made = self.args.out.with_suffix(".part")
        made.write_text(json.dumps(summary, indent=1) + "\n")
        made.replace(self.args.out)

    def _continue(self, summary: dict[str, Any]) -> None:
        self.counts = {name: Counter(counts) for name, counts in summary["implementations"].items()}
        self.refusals = Counter(summary["refusals"])
        self.findings = {(f["attention"], f["kind"]): Finding(**f) for f in summary["findings"]}
        self.earlier_seconds = summary["seconds"]
        self.args.seed = max(self.args.seed, summary["next_seed"])


class _Worker:
    """A process that takes numbers of batches and answers with lines of JSON."""

    def __init__(self, args: argparse.Namespace):
        command = [sys.executable, "-m", "tests.fuzz", "--work"]
        for name in ("device", "attention"):
            command += [f"--{name}", getattr(args, name)] if getattr(args, name) else []
        threads = dict.fromkeys(("OMP_NUM_THREADS", "TORCHINDUCTOR_COMPILE_THREADS"), "1")
        self.process = subprocess.Popen(
            command, cwd=ROOT, env=os.environ | threads, text=True, bufsize=1,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )  # fmt: skip
        self.call, self.hung, self.heard = "", False, time.monotonic()
        self.said: list[str] = []
        threading.Thread(target=self._read_errors, daemon=True).start()

    @property
    def alive(self) -> bool:
        return self.process.poll() is None

    def give(self, number: int) -> None:
        with contextlib.suppress(OSError):  # it died: `line` says so
            self.process.stdin.write(f"{number}\n")

    def line(self, patience: float) -> dict[str, Any] | None:
        """The next answer, None from a worker that is dead or had to be killed."""
        while True:
            watch = threading.Timer(patience if self.call else STARTS, self._kill)
            watch.start()
            text = self.process.stdout.readline()
            watch.cancel()
            if not text:
                self.process.wait()
                return None
            if text.startswith("Call("):
                self.call = text.strip()
            elif text.startswith("{"):
                return json.loads(text)

    def _kill(self) -> None:
        self.hung = True
        self.process.kill()

    def _read_errors(self) -> None:
        for text in self.process.stderr:
            self.said = [*self.said[-20:], text.rstrip()]

    def words(self) -> str:
        return "\n".join(self.said[-5:])

    def end(self) -> None:
        self.process.kill()
        self.process.wait()


def work(args: argparse.Namespace) -> int:
    """A worker's life: a number on stdin, a batch."""
    sys.stdout, answers = sys.stderr, sys.stdout  # what libraries print is no answer
    from tests.batch import Batches

    batches = Batches(args.device, args.attention, answers)
    for line in sys.stdin:
        batches.run(int(line))
    return 0


def replay(args: argparse.Namespace) -> int:
    from tests.attention.agreement import check
    from tests.attention.calls import Call
    from tests.batch import device_of
    from tests.grid import build

    call, device = Call.parse(args.replay), device_of(args.device)
    refusal = check(build(call.attention), call, device)
    print(f"refused: {refusal}" if refusal else "agrees")
    return 0


if __name__ == "__main__":
    sys.exit(main())
