"""How much memory does attention take, and how does it grow with N? Claims 1, 2, 11 and 12.

    python scripts/study.py attention_memory                    one GPU, about 100 s
    python scripts/study.py attention_memory --attention standard triton --seq-len 512 1024 2048 4096

The curve: one layer of GPT-2 small (batch 1, 12 heads of 64, causal, bf16) at N = 512 to 64k, forward and
both passes, every implementation of conf/attention and standard attention (instruments/standard.py).
Then the shapes of the claims: `of_claims`. Each implementation has a process of its own for each pass, and
several share the GPU under caps that leave their peaks what they are: parts/workers.py says why.
Without a GPU: small shapes in fp32, of what runs there.

Rows: results/attention_memory/<gpu or cpu>.jsonl. `point` as in results/attention, `pass` forward or both
(forward and backward in one call). `result`:

status, reason  ok, oom, unsupported, error; not_tried: true where a shorter N of the same implementation ran
                out of memory (oom) or took so long that this one would take over --most-s (error)
peak_mib        allocated at most during the call, beyond its inputs
extra_mib       the peak less outputs_mib: what the call has to give, out (and dq, dk, dv)
inputs_mib, outputs_mib, scores_mib (N x N, all heads, dtype of the inputs), scores_fp32_mib, lse_mib:
                computed
kernels, kernels_ok, verdict: as in results/attention; ms: one call's wall time beside others, no measurement
"""

from __future__ import annotations

import argparse
import os
import threading
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from attention import registry
from scripts.measure.instruments.bench_points import Shape
from scripts.measure.instruments.workers import Measurer
from scripts.measure.rows import choices, positive
from scripts.measure.runner import Run, parser, run_study
from scripts.measure.studies import Report, Row

STUDY = "attention_memory"
GPU_S = 85
# Where tiles are compared with all scores in memory.
COMPARED = ("standard", "sdpa_flash", "cuda_fa2", "triton", "flash4")
MOST_JOBS = 16
SHARED = 0.8  # of the GPU's memory, for all processes that run at once


def curve(tokens: int, cuda: bool) -> Shape:
    """A layer of GPT-2 small; on a CPU smaller."""
    if cuda:
        return Shape(1, 12, 12, tokens, 64, True, "bf16", study=STUDY)
    return Shape(1, 2, 2, tokens, 16, True, "fp32", study=STUDY)


def of_claims(tokens: int) -> dict[int, tuple[Shape, tuple[str, ...], tuple[str, ...]]]:
    """(shape, passes, implementations) of the claims, at one of their lengths."""
    return {
        # 32 GiB of scores against 8 MiB of statistics
        1: (Shape(8, 32, 32, tokens, 64, True, "fp16", study=STUDY), ("forward",), COMPARED),
        # the batch and heads of whose memory the FlashAttention paper's figures are: 128 matrices of scores
        2: (Shape(16, 8, 8, tokens, 64, True, "fp16", study=STUDY), ("both",), COMPARED),
        # one head
        11: (
            Shape(1, 1, 1, tokens, 128, False, "fp32", study=STUDY),
            ("forward",),
            ("standard", "cuda_naive", "cuda_tiled"),
        ),
        12: (
            Shape(1, 8, 8, tokens, 64, True, "fp16", study=STUDY),
            ("forward", "both"),
            ("standard", "naive", "tiled", "sdpa_flash"),
        ),
    }


LENGTHS = {1: [8192], 2: [2**n for n in range(7, 13)], 11: [1024, 4096, 8192, 16384], 12: [2048]}


@dataclass
class Task:
    """Of one implementation and pass: series of shapes of growing N, the first that fails ends its series."""

    name: str
    passed: str
    series: list[list[Shape]]


def takes_long(name: str) -> bool:
    """Whether there are a kernel or more for each length to compile, or a launch for each tile: what the
    others can overlap with."""
    made = registry.declaration(name)
    return made.launches_each_tile or (made.compilation is not None and made.compilation.each == "shape")


def contestants(cuda: bool) -> list[str]:
    """Who takes part where nobody is named: all, on a CPU those that can run there."""
    from scripts.measure.instruments.contestants import usual

    return registry.implementations() if cuda else usual(curve(64, cuda), cuda)


def tasks(names: list[str], lengths: list[int], cuda: bool, claims: bool = True) -> list[Task]:
    """The curve, and on a GPU the shapes of the claims; the longest tasks first."""
    found = []
    for name in sorted(names, key=lambda name: not takes_long(name)):
        for passed in ("both", "forward"):
            series = [[curve(tokens, cuda) for tokens in sorted(lengths)]]
            for claim, at in LENGTHS.items() if cuda and claims else ():
                asked = [of_claims(tokens)[claim] for tokens in at]
                mine = [shape for shape, passes, whose in asked if passed in passes and name in whose]
                series += [mine] if mine else []
            found.append(Task(name, passed, series))
    return found


class Study:
    """Runs tasks side by side, and appends a row for each point as it is measured."""

    def __init__(self, run: Run, cap: float | None, most_s: float, worker: Any = Measurer):
        self.shared, self.cap, self.most_s, self.worker = run, cap, most_s, worker
        self.lock = threading.Lock()

    def run(self, todo: Iterable[Task], jobs: int, takes: str = "") -> None:
        """`jobs` at once under the cap; what hits it again by itself, one after the other."""
        todo = list(todo)
        self.shared.left([s.point(t.name, t.passed) for t in todo for one in t.series for s in one], takes)
        todo = [task for task in todo if any(not self.known(task, s) for one in task.series for s in one)]
        with ThreadPoolExecutor(jobs) as pool:
            waiting = [left for left in pool.map(self.together, todo) if left is not None]
        for worker, task in waiting:
            print(f"{task.name}, {task.passed}: by itself", flush=True)
            self.finish(worker, task, None)

    def known(self, task: Task, shape: Shape) -> dict[str, Any] | None:
        point = shape.point(task.name, task.passed)
        kept = self.shared.kept
        return kept.row(point)["result"] if kept.done(point) else None

    def together(self, task: Task) -> tuple[Any, Task] | None:
        """What is left of the task where it needs more than its cap, and the process that goes on with it."""
        mine = [shape.point(task.name, task.passed) for one in task.series for shape in one]
        with self.lock:
            if not self.shared.claim(*mine):
                self.shared.say(f"{task.name} {task.passed}: by another process", len(mine))
                return None
        return self.finish(self.worker(task.name), task, self.cap)

    def finish(self, worker: Any, task: Task, cap: float | None) -> tuple[Any, Task] | None:
        left = []
        for shapes in task.series:
            before: tuple[Shape, dict[str, Any]] | None = None
            for i, shape in enumerate(shapes):
                result = self.known(task, shape) or self.not_tried(shape, before)
                if result is None:
                    result = worker.ask(shape, task.passed, cap)
                    if result["status"] == "oom" and cap is not None:
                        left.append(shapes[i:])
                        break
                    if result["status"] == "error":  # its process may have lost the GPU
                        worker.close()
                        worker = self.worker(task.name)
                if not self.known(task, shape):
                    self.keep(task, shape, result)
                before = (shape, result)
        if left:
            return worker, Task(task.name, task.passed, left)
        worker.close()
        return None

    def not_tried(self, shape: Shape, before: tuple[Shape, dict[str, Any]] | None) -> dict[str, Any] | None:
        """The result of a shape that the one before it makes hopeless."""
        if before is None:
            return None
        shorter, result = before
        if "not_tried" in result:
            return result
        if result["status"] == "oom":
            why = f"not tried: out of memory at N = {shorter.tokens:,}"
            return {"status": "oom", "reason": why, "not_tried": True}
        likely_s = result.get("ms", 0.0) * (shape.tokens / shorter.tokens) ** 2 / 1e3
        if likely_s > self.most_s:
            why = f"not tried: N = {shape.tokens:,} would take about {likely_s:.0f} s a call"
            return {"status": "error", "reason": why, "not_tried": True}
        return None

    def keep(self, task: Task, shape: Shape, result: dict[str, Any]) -> None:
        said = f"{result['peak_mib']:,.1f} MiB" if result["status"] == "ok" else result["status"]
        with self.lock:
            self.shared.add(
                shape.point(task.name, task.passed), result, f"{task.name} {task.passed} {shape}: {said}"
            )


def report(rows: list[Row]) -> Report:
    from scripts.measure.report import attention_memory_report

    return attention_memory_report.report(rows)


def arguments() -> argparse.Namespace:
    made = parser(__doc__, STUDY)
    add = made.add_argument
    add("--attention", nargs="+", choices=choices("attention"), metavar="NAME", help="default: all but auto")
    add("--seq-len", type=positive, nargs="+", help="of the curve (default: 512 to 64k; on a CPU 64 to 512)")
    add("--curve", action="store_true", help="the curve alone, without the shapes of the claims")
    add("--jobs", type=positive, help="processes at once (default: one for each CPU, at most 16)")
    add("--most-s", type=float, default=30.0, help="a call that would take longer is not tried (default: 30)")
    return made.parse_args()


def measure(options: argparse.Namespace, run: Run) -> None:
    cuda = run.device == "cuda"
    lengths = options.seq_len or [2**n for n in (range(9, 17) if cuda else range(6, 10))]
    asked = tasks(options.attention or contestants(cuda), lengths, cuda, not options.curve)
    jobs = options.jobs or min(os.cpu_count() or 1, MOST_JOBS)
    takes = f"{jobs} processes at once, about {'100 s of an H200' if cuda else 'a minute'} for all"
    Study(run, SHARED / jobs if cuda else None, options.most_s).run(asked, jobs, takes)


def main() -> None:
    run_study(STUDY, arguments(), measure, report)
