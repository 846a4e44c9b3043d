"""Every yaml of conf/attention on every case of tests/grid.py: within the criterion, or refused."""

from __future__ import annotations

import pytest
import torch

from tests.attention.criterion import run_case
from tests.grid import CASES, NAMES, Case, build

SMALL = [case for case in CASES if case.small]
# Kernels that a CPU runs in an interpreter: rounding to low precision is written into them.
INTERPRETED = {"triton"}


def _check(name: str, case: Case, device: str, dtypes: tuple[torch.dtype, ...]) -> None:
    attention = build(name)
    for dtype in dtypes:
        ratios = run_case(attention, case, device, dtype) or {}
        wrong = {what: round(ratio, 2) for what, ratio in ratios.items() if not ratio <= 1}
        assert not wrong, f"{name}, {case.id}, {dtype}: error over what is allowed: {wrong}"


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("case", SMALL, ids=lambda case: case.id)
def test_cpu(name: str, case: Case) -> None:
    low = (torch.float16, torch.bfloat16) if name in INTERPRETED else (torch.bfloat16,)
    if case.exact_dtypes_only and name not in INTERPRETED:
        low = ()
    _check(name, case, "cpu", (torch.float32, *low))


@pytest.mark.gpu
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_gpu(name: str, case: Case) -> None:
    _check(name, case, "cuda", (torch.bfloat16, torch.float16, torch.float32))
