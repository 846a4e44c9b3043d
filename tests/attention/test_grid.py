"""Every yaml of conf/attention on every case of tests/grid.py: within the criterion, or refused."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from tests.attention.criterion import run_case
from tests.grid import CASES, NAMES, Case, build

# Kernels that a CPU runs in an interpreter: rounding to low precision is written into them.
INTERPRETED = {"triton"}


def _of_a_cpu() -> Iterator[Any]:
    """The small cases in all dtypes that differ; those that are not quick are long, and of what is
    interpreted all dtypes but one, which takes turns."""
    for number, case in enumerate(case for case in CASES if case.small):
        for name in NAMES:
            interpreted = name in INTERPRETED
            low = (torch.float16, torch.bfloat16) if interpreted else (torch.bfloat16,)
            dtypes = (torch.float32, *(low if interpreted or not case.exact_dtypes_only else ()))
            quick = dtypes[number % 2 :][:1] if interpreted else dtypes
            # flex, which is not compiled here, takes as long a case: its pairs are long.
            quick = quick if case.quick and (name, case.group) != ("flex", "pair") else ()
            if quick:
                yield pytest.param(name, case, quick, id=f"{case.id}-{name}")
            if rest := tuple(dtype for dtype in dtypes if dtype not in quick):
                yield pytest.param(name, case, rest, id=f"{case.id}-{name}-rest", marks=pytest.mark.long)


def _check(name: str, case: Case, device: str, dtypes: tuple[torch.dtype, ...]) -> None:
    attention = build(name)
    for dtype in dtypes:
        ratios = run_case(attention, case, device, dtype) or {}
        wrong = {what: round(ratio, 2) for what, ratio in ratios.items() if not ratio <= 1}
        assert not wrong, f"{name}, {case.id}, {dtype}: error over what is allowed: {wrong}"


@pytest.mark.parametrize(("name", "case", "dtypes"), list(_of_a_cpu()))
def test_cpu(name: str, case: Case, dtypes: tuple[torch.dtype, ...]) -> None:
    _check(name, case.fewer_heads if name in INTERPRETED else case, "cpu", dtypes)


@pytest.mark.gpu
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_gpu(name: str, case: Case) -> None:
    _check(name, case, "cuda", (torch.bfloat16, torch.float16, torch.float32))
