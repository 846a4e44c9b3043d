"""Random calls of the contract, for every yaml of conf/attention: refused, or as the reference has it.

`make test-fuzz` draws many more; what failed there is kept here, and run again.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.attention.agreement import Fault, check
from tests.attention.calls import Call, kind_of_call, usable, vary
from tests.grid import NAMES, build

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
SLOW = ("triton", "flex")  # interpreted on a CPU, or as good as
# As tests/fuzz.py printed them: "python -m tests.fuzz --replay".
REGRESSIONS = (
    # SDPA multiplies by the scale behind the mask: NaN for 0, the future for less.
    Call("sdpa", 5, 5, head_dim=8, scale=0.0),
    Call("sdpa_flash", 5, 5, dtype="bfloat16", head_dim=8, scale=-0.2),
)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", NAMES)
def test_agrees_or_refuses(name: str, device: str) -> None:
    attention = build(name)
    runs = usable(attention, device)
    slow = device == "cpu" and name in SLOW

    @settings(
        max_examples=5 if slow or not runs else 25,
        derandomize=True,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(st.data())
    def calls(data: Any) -> None:
        def pick(some: Any) -> Any:
            return data.draw(st.sampled_from(some))

        kind = kind_of_call(pick, attention, device, able=runs)
        check(attention, vary(pick, kind, 17 if slow else 70), device)

    calls()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("call", REGRESSIONS, ids=repr)
def test_what_failed_before(call: Call, device: str) -> None:
    check(build(call.attention), call, device)


WRONG = {
    "out": lambda out, lse: (out * 1.05, lse),
    "lse": lambda out, lse: (out, lse + 0.01),
    "dtype": lambda out, lse: (out.double(), lse),
    "strides": lambda out, lse: (out.transpose(2, 3).contiguous().transpose(2, 3), lse),
    "nan": lambda out, lse: (out.index_fill(2, torch.tensor([0]), torch.nan), lse),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_a_mistake_is_found(wrong: str) -> None:
    attention, call = build("naive"), Call("naive", 5, 7, dtype="bfloat16", head_dim=8, lse=True)
    assert check(attention, call, "cpu") is None
    plain = attention.attend
    attention.attend = lambda *tensors, **options: WRONG[wrong](*plain(*tensors, **options))
    with pytest.raises(Fault):
        check(attention, call, "cpu")


def test_writing_to_an_input_is_found() -> None:
    attention = build("naive")
    call = Call("naive", 5, 7, head_dim=8, mode="no_grad", layouts=("sliced",) * 4)
    plain = attention.attend

    def attend(q, k, v, **options):
        q.as_strided(q.shape, q.stride(), q.storage_offset() + 8).fill_(0)  # between its elements
        return plain(q, k, v, **options)

    attention.attend = attend
    with pytest.raises(Fault, match="modified"):
        check(attention, call, "cpu")


@pytest.mark.parametrize("poison", ["nan q", "nan k", "nan v"])
def test_hiding_a_nan_is_found(poison: str) -> None:
    attention = build("naive")
    call = Call("naive", 5, 7, head_dim=8, needs_grad="", poison=poison)
    assert check(attention, call, "cpu") is None
    plain = attention.attend

    def attend(*tensors, **options):
        out, lse = plain(*tensors, **options)
        return out.nan_to_num(), lse

    attention.attend = attend
    with pytest.raises(Fault, match="does not reach"):
        check(attention, call, "cpu")


def test_a_call_is_made_again_from_its_repr() -> None:
    call = Call("naive", 5, 7, window=(None, 2), layouts=("odd", "sliced", "offset", "one"), lengths=(0, 3))
    assert Call.parse(repr(call)) == call and repr(replace(call, lengths=None)) != repr(call)
    with pytest.raises(ValueError, match=r"needs Call\("):
        Call.parse("__import__('os').system('true')")
