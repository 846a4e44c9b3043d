"""Autotuning, for whoever asks (`attention.autotune=true`): the fastest of the table's tiles on the tensors
in hand."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import TypeVar

import torch

Choice = TypeVar("Choice")
_best: dict[Hashable, object] = {}


def fastest(key: Hashable, choices: list[Choice], run: Callable[[Choice], object]) -> Choice:
    """The choice whose `run` takes least time, measured once per `key`; one that does not fit the device is
    left out.

    While a CUDA graph is captured nothing can be timed: the first choice, unless the key is known.
    """
    if key not in _best:
        if not torch.cuda.is_available() or torch.cuda.is_current_stream_capturing():
            return choices[0]
        from triton.testing import do_bench

        times = {choice: _milliseconds(do_bench, run, choice) for choice in choices}
        _best[key] = min(times, key=times.__getitem__)
    return _best[key]


def _milliseconds(do_bench: Callable[..., float], run: Callable[[Choice], object], choice: Choice) -> float:
    from triton.compiler.errors import CompilationError
    from triton.runtime.errors import OutOfResources, PTXASError

    try:
        return do_bench(lambda: run(choice), warmup=5, rep=20, return_mode="median")
    except (OutOfResources, CompilationError, PTXASError):
        return float("inf")
