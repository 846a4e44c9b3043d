"""Shared by all tests: GPU tests skip, with the reason, where there is none; one CPU thread;
Triton's kernels run in its interpreter where there is no GPU."""

from __future__ import annotations

import ctypes
import gc
import importlib.util
import os
import signal
from math import ceil
from zlib import crc32

# What starts the tests in the background may have them ignore what tests of interruption send: a shell
# SIGINT, nohup SIGHUP.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
# Tensors here are small: more threads cost more than they bring, and tests share the machine. numpy, which
# the interpreter multiplies with, reads this when it is loaded: two threads took three times as long.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import pytest
import torch

from tests import composing, interpreter

composing.hasten()
torch.set_num_threads(1)
# Memory that a tensor leaves stays with the process: given back to the system and taken again, its pages are
# cleared each time (212 cases of test_a_cpu_is_refused: 4.8 s in the system, so 0.6).
if mallopt := getattr(ctypes.CDLL(None), "mallopt", None):  # glibc
    for threshold in (-1, -3):  # M_TRIM_THRESHOLD, M_MMAP_THRESHOLD
        mallopt(threshold, 1 << 30)
if not torch.cuda.is_available():
    # Before triton is imported: its kernels then run on CPU tensors.
    os.environ.setdefault("TRITON_INTERPRET", "1")
    if os.environ["TRITON_INTERPRET"] == "1" and importlib.util.find_spec("triton"):
        interpreter.hasten()


def _leave_a_sample(items: list[pytest.Item]) -> None:
    """Of the cases of a test marked sampled(n), one in n stays in `make test`; the others are long. Their
    names alone decide which, not the order of parameters, in which every third may have one dtype."""
    cases: dict[tuple[str, int], list[pytest.Item]] = {}
    for item in items:
        sampled = item.get_closest_marker("sampled")
        if sampled and not any(item.get_closest_marker(name) for name in ("gpu", "long", "slow")):
            cases.setdefault((item.nodeid.partition("[")[0], *sampled.args), []).append(item)
    for (_, one_in), found in cases.items():
        for item in sorted(found, key=lambda item: crc32(item.nodeid.encode()))[ceil(len(found) / one_in) :]:
            item.add_marker(pytest.mark.long)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    _leave_a_sample(items)
    missing = pytest.mark.skipif(
        not torch.cuda.is_available(), reason="no CUDA device: torch.cuda.is_available() is False"
    )
    for item in (item for item in items if item.get_closest_marker("gpu")):
        item.add_marker(missing)
        if item.nodeid.startswith("tests/scripts/"):  # they measure memory and time
            item.add_marker(pytest.mark.alone)
    # 50 of its 75 s wait for a rank that is silent: at the end, other workers would have nothing left to do
    items.sort(key=lambda item: item.path.name != "test_peers.py")


def pytest_collection() -> None:
    gc.disable()


def pytest_collection_finish() -> None:
    """What is there now stays: whatever collects garbage, as imports and measurements do, need not go over
    thousands of tests and all modules again and again."""
    gc.enable()
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000)  # for 700 allocations: 4% less time
