"""Imports without Python's garbage collector, and Inductor's processes started ahead."""

from __future__ import annotations

import atexit
import gc
from collections.abc import Iterator
from contextlib import contextmanager, suppress


@contextmanager
def uncollected() -> Iterator[None]:
    """For large imports: the collector looks through all that they make, again and again, which is a fifth of
    the time that PyTorch and Lightning take."""
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()


def start_compilers() -> None:
    """Start the processes in which Inductor compiles Triton's kernels. It would start them with its first
    compilation, and until they are there, seconds later, compile one kernel after another in this one."""
    with uncollected(), suppress(ImportError):  # not a public name
        from torch._inductor.async_compile import maybe_warm_pool

        maybe_warm_pool()
        atexit.register(_leave_compilers)


def _leave_compilers() -> None:
    """Inductor would wait a second at exit until its processes have ended, which they do by themselves as
    soon as their pipe is closed."""
    with suppress(ImportError):
        from torch._inductor.async_compile import _pool_set

        for pool in _pool_set:
            pool.running = False
