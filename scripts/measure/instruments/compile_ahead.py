"""Kernels compiled into the caches on disk by processes side by side, so that studies find them there."""

from __future__ import annotations

import os
import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

from scripts.measure.instruments import workers

if TYPE_CHECKING:
    from scripts.measure.instruments.bench_points import Shape

Task = tuple[str, list[tuple["Shape", str]]]  # an implementation, and calls that make its kernels

COMPILED = ("cuda", "triton", "flex")  # how the names of those begin whose kernels end up in a cache on disk
SHARED = 0.8  # of the GPU's memory, for all processes that compile
MOST_JOBS = 16


def compile_ahead(tasks: list[Task], jobs: int | None = None) -> None:
    """Run the calls once, each task in a process, and say which took longest; what fails here fails again
    where it is a row. A backward by itself has no forward to start from: there both passes run."""
    jobs = jobs or min(os.cpu_count() or 1, MOST_JOBS)

    def one(task: Task) -> tuple[float, str]:
        name, calls = task
        began = time.perf_counter()
        worker = workers.Worker(name)
        for shape, passed in dict.fromkeys((s, "both" if p == "backward" else p) for s, p in calls):
            worker.ask(shape, passed, SHARED / jobs, brief=True)
        worker.close()
        return time.perf_counter() - began, f"{name} {calls[0][0].dtype} D={calls[0][0].head_dim}"

    start = time.perf_counter()
    with ThreadPoolExecutor(jobs) as pool:
        took = sorted(pool.map(one, tasks), reverse=True)
    longest = "; longest: " + ", ".join(f"{name} {s:.0f} s" for s, name in took[:3]) if took else ""
    print(f"compiled ahead in {time.perf_counter() - start:.0f} s{longest}", flush=True)
