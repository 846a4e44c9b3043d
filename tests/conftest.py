"""Shared by all tests: GPU tests skip, with the reason, where there is none; one CPU thread;
Triton's kernels run in its interpreter where there is no GPU."""

from __future__ import annotations

import gc
import importlib.util
import os
import signal

# A shell that starts the tests in the background has them ignore SIGINT, which tests of interruption send.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
# Tensors here are small: more threads cost more than they bring, and tests share the machine. numpy, which
# the interpreter multiplies with, reads this when it is loaded: two threads took three times as long.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import pytest
import torch

from tests import composing, interpreter

composing.hasten()
torch.set_num_threads(1)
if not torch.cuda.is_available():
    # Before triton is imported: its kernels then run on CPU tensors.
    os.environ.setdefault("TRITON_INTERPRET", "1")
    if os.environ["TRITON_INTERPRET"] == "1" and importlib.util.find_spec("triton"):
        interpreter.hasten()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    missing = pytest.mark.skipif(
        not torch.cuda.is_available(), reason="no CUDA device: torch.cuda.is_available() is False"
    )
    for item in (item for item in items if item.get_closest_marker("gpu")):
        item.add_marker(missing)
        if item.nodeid.startswith("tests/scripts/"):  # they measure memory and time
            item.add_marker(pytest.mark.alone)


def pytest_collection() -> None:
    gc.disable()


def pytest_collection_finish() -> None:
    """What is there now stays: whatever collects garbage, as imports and measurements do, need not go over
    thousands of tests and all modules again and again."""
    gc.enable()
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000)  # for 700 allocations: 4% less time
