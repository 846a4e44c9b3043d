"""Every yaml of conf/attention on every case of tests/grid.py: within the criterion, or refused."""

from __future__ import annotations

import pytest
import torch

from tests.attention.criterion import run_case
from tests.grid import CASES, NAMES, Case, build

SMALL = [case for case in CASES if case.small]


def _check(name: str, case: Case, device: str, dtypes: tuple[torch.dtype, ...]) -> None:
    attention = build(name)
    for dtype in dtypes:
        ratios = run_case(attention, case, device, dtype) or {}
        wrong = {what: round(ratio, 2) for what, ratio in ratios.items() if not ratio <= 1}
        assert not wrong, f"{name}, {case.id}, {dtype}: error over what is allowed: {wrong}"


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("case", SMALL, ids=lambda case: case.id)
def test_cpu(name: str, case: Case) -> None:
    _check(name, case, "cpu", (torch.float32,) if case.exact_dtypes_only else (torch.float32, torch.bfloat16))


@pytest.mark.gpu
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_gpu(name: str, case: Case) -> None:
    _check(name, case, "cuda", (torch.bfloat16, torch.float16, torch.float32))
