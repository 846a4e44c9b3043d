"""The criterion of scripts/accuracy.py on the cases of tests/grid.py."""

from __future__ import annotations

from functools import lru_cache

import torch

from attention.base import Attention, AttentionCall, AttentionOptions, UnsupportedAttention
from scripts.accuracy import Problem, Result, allowed, computed, error_ratio
from scripts.accuracy import expected as reference_and_plain
from tests.grid import Case, Inputs, make_inputs


@lru_cache(maxsize=1024)
def expected(
    case: Case, device: str, dtype: torch.dtype, operand_dtype: torch.dtype | None
) -> tuple[Result, dict[str, float]]:
    """(the reference in fp64, the largest error that each of its tensors may have), shared by all
    implementations. In one piece, so that the specification alone says who sees whom."""
    inputs = make_inputs(case, device, dtype)
    reference, plain = reference_and_plain(_problem(inputs, backward=True), 2**62, operand_dtype)
    return reference, {name: allowed(name, reference, plain, dtype) for name in reference}


def _problem(inputs: Inputs, backward: bool) -> Problem:
    return Problem(inputs.q, inputs.k, inputs.v, inputs.options, inputs.dout if backward else None)


def run_case(attention: Attention, case: Case, device: str, dtype: torch.dtype) -> dict[str, float] | None:
    """The error ratio of out, lse and each gradient; None where the implementation refuses, as it declares.

    Asserts that a refusal at start-up is a refusal of the live call too. What has no gradient runs forward.
    """
    inputs = make_inputs(case, device, dtype)
    for backward in (True, False):
        with torch.set_grad_enabled(backward):
            call = AttentionCall.of(inputs.q, inputs.k, inputs.v, AttentionOptions(**inputs.options))
            if attention.unsupported_reasons(call):
                _assert_refuses(attention, inputs)
                continue
        got = computed(attention, _problem(inputs, backward))
        assert not got or (got["out"].dtype == dtype and got["out"].shape == inputs.q.shape)
        if case.group == "empty":
            assert all(not x.isnan().any() and not x[x.isfinite()].any() for x in got.values())
            return {}
        return error_ratios(got, case, device, dtype, attention.declaration.operand_dtype)
    return None


def _assert_refuses(attention: Attention, inputs: Inputs) -> None:
    try:
        attention(inputs.q, inputs.k, inputs.v, **inputs.options)
    except UnsupportedAttention as refusal:
        assert refusal.reasons and attention.name in str(refusal)
    else:
        raise AssertionError(f"{attention.name} declares that it cannot run this call, and ran it")


def error_ratios(
    got: Result, case: Case, device: str, dtype: torch.dtype, operand_dtype: torch.dtype | None = None
) -> dict[str, float]:
    """The error of each tensor over the largest that it may have."""
    reference, most = expected(case, device, dtype, operand_dtype)
    return {name: error_ratio(x, reference[name], most[name]) for name, x in got.items()}
