"""Kernels compiled into the caches on disk by processes side by side, so that studies find them there."""

from __future__ import annotations

import os
import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

from scripts.studies.parts import workers

if TYPE_CHECKING:
    from scripts.bench_points import Shape

Task = tuple[str, list[tuple["Shape", str]]]  # an implementation, and calls that make its kernels

COMPILED = ("cuda", "triton", "flex")  # how the names of those begin whose kernels end up in a cache on disk
SHARED = 0.8  # of the GPU's memory, for all processes that compile
MOST_JOBS = 16


def compile_ahead(tasks: list[Task], jobs: int | None = None) -> None:
    """Run the calls, each task in a process; what fails here fails again where it is a row. A backward by
    itself has no forward to start from: there both passes run."""
    jobs = jobs or min(os.cpu_count() or 1, MOST_JOBS)

    def one(task: Task) -> None:
        name, calls = task
        worker = workers.Worker(name)
        for shape, passed in dict.fromkeys((s, "both" if p == "backward" else p) for s, p in calls):
            worker.ask(shape, passed, SHARED / jobs)
        worker.close()

    start = time.perf_counter()
    with ThreadPoolExecutor(jobs) as pool:
        list(pool.map(one, tasks))
    print(f"compiled ahead in {time.perf_counter() - start:.0f} s", flush=True)
