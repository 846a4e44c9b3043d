"""Every yaml of conf/attention on every case of tests/grid.py: within the criterion, or refused."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any
from zlib import crc32

import pytest
import torch
from torch.nn.attention import flex_attention

from attention.base import Attention
from tests.attention.criterion import run_case
from tests.grid import CASES, NAMES, Case, build

# Kernels that a CPU runs in an interpreter: rounding to low precision is written into them.
INTERPRETED = {"triton"}
# Compiled anew for each case and dtype by PyTorch, 5 s each: half of the grid's time on a GPU.
COMPILED = {"flex"}
GPU_ONLY = [name for name in NAMES if "cpu" not in build(name).capabilities.devices]
SMALL = [case for case in CASES if case.small]


def _of_a_cpu() -> Iterator[Any]:
    """The small cases in all dtypes that differ; those that are not quick are long, and of what is
    interpreted all dtypes but one, which takes turns. Pairs of features are interpreted in fp32 and one of
    16 bits, in turns too: each feature alone meets both, each pair does on a GPU. `make test` has each
    feature by itself, one in three of them with a single query, and one in five pairs."""
    for number, case in enumerate(SMALL):
        for name in (name for name in NAMES if name not in GPU_ONLY):
            interpreted = name in INTERPRETED
            low = (torch.float16, torch.bfloat16) if interpreted else (torch.bfloat16,)
            if interpreted and case.group == "pair":
                low = low[number // 2 % 2 :][:1]
            dtypes = (torch.float32, *(low if interpreted or not case.exact_dtypes_only else ()))
            quick = () if not case.quick else dtypes[number % 2 :][:1] if interpreted else dtypes
            if quick:
                one_in = 5 if case.group == "pair" else 3 if case.features and case.tq == 1 else 1
                yield pytest.param(
                    name, case, quick, id=f"{case.id}-{name}", marks=pytest.mark.sampled(one_in)
                )
            if rest := tuple(dtype for dtype in dtypes if dtype not in quick):
                yield pytest.param(name, case, rest, id=f"{case.id}-{name}-rest", marks=pytest.mark.long)


def _check(name: str, case: Case, device: str, dtypes: tuple[torch.dtype, ...]) -> None:
    attention = build(name)
    for dtype in dtypes:
        ratios = run_case(attention, case, device, dtype) or {}
        wrong = {what: round(ratio, 2) for what, ratio in ratios.items() if not ratio <= 1}
        assert not wrong, f"{name}, {case.id}, {dtype}: error over what is allowed: {wrong}"


@pytest.mark.parametrize(("name", "case", "dtypes"), list(_of_a_cpu()))
def test_cpu(name: str, case: Case, dtypes: tuple[torch.dtype, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    # flex has no backward here, and tracing each forward would take five times as long.
    monkeypatch.setattr(flex_attention, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True)
    _check(name, case.fewer_heads if name in INTERPRETED else case.on_cpu, "cpu", dtypes)


@cache
def _gpu_only() -> list[Attention]:
    return [build(name) for name in GPU_ONLY]


@pytest.mark.sampled(4)
@pytest.mark.parametrize("case", SMALL, ids=lambda case: case.id)
def test_a_cpu_is_refused(case: Case) -> None:
    for attention in _gpu_only():
        for dtype in (torch.float32, torch.bfloat16)[: 2 if case.quick else 1]:
            assert run_case(attention, case, "cpu", dtype) is None, attention.name


@pytest.mark.gpu
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_gpu(name: str, case: Case) -> None:
    """All dtypes; of what PyTorch compiles, one of the two of 16 bits, by the case's name."""
    low = (torch.bfloat16, torch.float16)
    if name in COMPILED:
        low = low[crc32(case.id.encode()) % 2 :][:1]
    _check(name, case, "cuda", (*low, torch.float32))
