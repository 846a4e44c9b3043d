"""Kernels compiled into the caches on disk by processes side by side, so that studies find them there."""

from __future__ import annotations

import os
import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

from scripts.measure.instruments import workers

if TYPE_CHECKING:
    from attention.base import Declaration
    from scripts.measure.instruments.bench_points import Shape

Task = tuple[str, list[tuple["Shape", str]]]  # an implementation, and calls that make its kernels

SHARED = 0.8  # of the GPU's memory, for all processes that compile
MOST_JOBS = 16


def is_cached(declared: Declaration) -> bool:
    """Whether kernels that are compiled end up in a cache on disk."""
    return declared.compilation is not None and declared.compilation.on_disk


def is_slow_to_compile(declared: Declaration) -> bool:
    """Whether kernels are compiled anew for each shape, or in each process: seconds of it."""
    how = declared.compilation
    return how is not None and (how.each == "shape" or not how.on_disk)


def compile_ahead(tasks: list[Task], jobs: int | None = None) -> None:
    """Run the calls once, each task in a process, and say which took longest; what fails here fails again
    where it is a row. A backward by itself has no forward to start from: there both passes run."""
    jobs = jobs or min(os.cpu_count() or 1, MOST_JOBS)

    def one(task: Task) -> tuple[float, str]:
        name, calls = task
        began = time.perf_counter()
        worker = workers.Measurer(name)
        for shape, passed in dict.fromkeys((s, "both" if p == "backward" else p) for s, p in calls):
            worker.ask(shape, passed, SHARED / jobs, brief=True)
        worker.close()
        return time.perf_counter() - began, f"{name} {calls[0][0].dtype} D={calls[0][0].head_dim}"

    start = time.perf_counter()
    with ThreadPoolExecutor(jobs) as pool:
        took = sorted(pool.map(one, tasks), reverse=True)
    longest = "; longest: " + ", ".join(f"{name} {s:.0f} s" for s, name in took[:3]) if took else ""
    print(f"compiled ahead in {time.perf_counter() - start:.0f} s{longest}", flush=True)
