"""Random calls of the contract, for every yaml of conf/attention: refused, or as the reference has it.

`make test-fuzz` draws many more; what failed there is kept here, and run again.
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.attention.agreement import Fault, check
from tests.attention.calls import Call, kind_of_call, usable, vary
from tests.grid import NAMES, build

pytestmark = pytest.mark.sampled(4)

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
SLOW = ("triton", "flex")  # interpreted on a CPU, or as good as
PLAIN, TINY = ("contiguous",) * 2, (1e-4,) * 3
LARGE_V = (1.0, 1.0, 1e4)
LIBRARIES = ("sdpa", "sdpa_cudnn", "sdpa_efficient", "sdpa_flash", "flash4", "flex")
# As tests/fuzz.py printed them: "python -m tests.fuzz --replay".
REGRESSIONS = (
    # SDPA multiplies by the scale behind the mask: NaN for 0, the future for less.
    Call("sdpa", 5, 5, head_dim=8, scale=0.0),
    Call("sdpa_flash", 5, 5, dtype="bfloat16", head_dim=8, scale=-0.2),
    # Rows that do not begin at 16 bytes, in forward and backward: misaligned addresses, no kernel, NaN.
    Call(
        "sdpa_cudnn", 1, 127, dtype="bfloat16", head_dim=8, heads=8, kv_heads=2, bias=(0, 0, 1, 0),
        bias_layout="last_strided", mode="inference", layouts=("transposed", "odd", "sliced", "transposed"),
    ),
    Call("sdpa_cudnn", 2, 2, dtype="bfloat16", dropout_p=0.1, layouts=("odd", "sliced", *PLAIN)),
    Call("sdpa_efficient", 1, 1, dtype="bfloat16", head_dim=8, layouts=("contiguous", "odd", *PLAIN)),
    Call("sdpa_efficient", 1, 1, dtype="float16", head_dim=32, layouts=(*PLAIN, "odd", "odd")),
    *(Call(name, 65, 65, dtype="bfloat16", layouts=("odd",) * 4) for name in LIBRARIES),
    # The gradient of the bias alone: PyTorch reads an lse that it did not keep.
    *(
        Call(name, 9, 9, dtype="float16", bias=(0, 1, 1, 0), bias_dtype="bfloat16", bias_layout="sliced",
             dropout_p=p, needs_grad="b")
        for name in ("sdpa", "sdpa_efficient") for p in (0.0, 0.1)
    ),
    Call("sdpa_efficient", 1, 1, dtype="float16", head_dim=264, bias=(0, 0, 0, 1), needs_grad="b"),
    # Bounds beyond 32 bits.
    *(
        Call(name, 63, 63, dtype="float16", causal=causal, window=(2**31, 2**40), mode="no_grad")
        for name in ("flash2", "flash4", "flex", "triton", "cuda") for causal in (True, False)
    ),
    # Inductor: slopes in fp64, and a bias in fp16 with a gradient.
    Call(
        "flex", 1, 1, dtype="bfloat16", head_dim=80, heads=2, kv_heads=2, alibi="float64", bias=(0, 1, 0, 0),
        bias_dtype="float16", bias_layout="last_strided", bias_masks="keys", documents=1, lse=True,
        layouts=("transposed", "offset", "one_token", "contiguous"),
    ),
    Call("flex", 17, 17, dtype="bfloat16", alibi="float64", bias=(0, 1, 0, 0), bias_dtype="float16"),
    Call("flex", 1, 1, dtype="bfloat16", heads=14, bias=(0, 1, 0, 1)),
    Call("flex", 17, 1, dtype="bfloat16", heads=2, bias=(0, 1, 1, 0), lse=True),
    *(Call("flex", tq, tk, dtype="bfloat16", heads=2, bias=(0, 1, 0, 0)) for tq, tk in ((1, 7), (7, 9))),
    # A softcap far beyond the scores: 1 - 2 / (exp(2 x) + 1) rounds 1, and the softcap multiplies that.
    Call("triton", 1, 1, dtype="bfloat16", softcap=1000000.0, lse=True),
    Call("triton", 1, 2, dtype="bfloat16", heads=4, softcap=1000000.0, mode="no_grad"),
    Call("triton", 2, 2, dtype="float16", softcap=1000000.0, lse=True),
    Call("cuda_tiled", 1, 65, batch=2, heads=12, kv_heads=3, softcap=1000000.0),
    # cuDNN's backward, masked, of half a tile of keys: NaN where lse < -88.7.
    *(
        Call(name, 1, 64, dtype="bfloat16", batch=3, heads=3, window=(0, None), magnitudes=(8.0, 8.0, 1.0))
        for name in ("sdpa", "sdpa_cudnn")
    ),
    # A scale of 0: it multiplied a gradient that fp16 does not hold.
    Call("naive", 1, 7, dtype="float16", scale=0.0, magnitudes=LARGE_V),
    Call("flash4", 1, 7, dtype="float16", scale=0.0, magnitudes=LARGE_V),
    Call("cuda_fa3", 2, 2, dtype="float16", batch=3, scale=0.0, magnitudes=LARGE_V),
    # dS, or the output that dS is made with, beyond fp16; errors of P beside values of 1e4.
    Call("sdpa", 3, 3, dtype="float16", batch=3, heads=14, causal=False, bias=(1, 1, 0, 0),
         magnitudes=LARGE_V),
    Call("auto", 129, 55, dtype="float16", head_dim=80, batch=2, heads=4, scale=-0.2, window=(2, -1),
         magnitudes=LARGE_V),
    Call("cuda", 1, 1, dtype="float16", heads=4, dropout_p=0.9, magnitudes=LARGE_V),
    Call("cuda_fa2", 1, 1, dtype="float16", heads=12, dropout_p=0.9, needs_grad="kv", magnitudes=LARGE_V),
    Call("cuda_fa3", 16, 16, dtype="float16", batch=2, heads=2, magnitudes=LARGE_V),
    Call("flex", 256, 5, dtype="float16", batch=3, heads=2, magnitudes=LARGE_V, seed=24),
    Call("sdpa_cudnn", 1, 65, dtype="float16", head_dim=8, heads=3, kv_heads=3, alibi="float32", slope=-0.25,
         magnitudes=LARGE_V, equal="k"),
    Call("cuda_fa3", 1, 128, dtype="float16", head_dim=8, heads=2, kv_heads=2, dropout_p=0.1,
         magnitudes=LARGE_V, seed=715),
    # A mask that hid keys by -65504.
    Call("sdpa_cudnn", 135, 17, dtype="bfloat16", head_dim=16, scale=1.0, magnitudes=(10000.0, 1.0, 1.0)),
    Call("sdpa", 2, 2, dtype="bfloat16", heads=6, scale=1.0, documents=1, magnitudes=(10000.0, 1.0, 1.0)),
    # Few rows of few draws, in which an error shows that many draws show of both.
    Call("cuda", 65, 65, head_dim=8, heads=2, causal=False, softcap=30.0, alibi="float32", slope=0.0,
         documents=2, lengths=(1,), dropout_p=0.5, mode="inference", needs_grad="v",
         layouts=("odd", "one_batch", "transposed", "contiguous"), seed=577),
    # A bias of no dimension, which alone requires a gradient.
    Call("sdpa_efficient", 1, 1, dtype="bfloat16", bias=(), bias_dtype="float16", needs_grad="b"),
    # A sum of values that are all alike; a NaN beside few rows.
    Call("tiled", 1, 87, heads=12, kv_heads=3, scale=0.0, equal="v"),
    Call("cuda_naive", 1, 259, head_dim=128, batch=2, heads=2, kv_heads=2, scale=-0.2, mode="inference",
         layouts=("sliced", "one_batch", "packed", "offset"), poison="nan q", seed=3),
    # A NaN in V behind a document, in the tile that is read.
    Call("flash4", 1, 1, dtype="bfloat16", batch=2, documents=1, mode="inference", poison="nan v"),
    # One lse for all rows, which the criterion's floor rounds to nothing; tokens that are all alike.
    Call("cuda_fa2", 1, 300, dtype="bfloat16", batch=2, heads=2, kv_heads=2, scale=1e-4, lse=True),
    Call("flash4", 1, 258, dtype="float16", batch=3, heads=8, scale=1e-4, lse=True),
    Call("cuda_fa3", 258, 258, dtype="bfloat16", head_dim=32, batch=2, heads=2, causal=False, scale=1e-4,
         lse=True),
    Call("cuda_fa1", 1, 257, dtype="bfloat16", lse=True, needs_grad="", magnitudes=TINY),
    Call("cuda_fa3", 1, 24, dtype="bfloat16", batch=2, heads=4, documents=2, lse=True, magnitudes=TINY),
    Call("cuda_fa2", 5, 5, dtype="float16", head_dim=80, scale=0.0, softcap=0.1, lse=True, mode="no_grad"),
    Call("flash4", 19, 19, dtype="float16", batch=3, heads=2, causal=False, lse=True, mode="inference",
         layouts=("one_token", "offset", *PLAIN), magnitudes=TINY, equal="q", seed=576),
    Call("auto", 16, 62, head_dim=128, heads=3, kv_heads=3, scale=1e-4, alibi="bfloat16", slope=8.0,
         lengths=(62,), lse=True, mode="inference", equal="qkv", seed=901),
    # A NaN where q and k become integers; operands of 8 bits; an lse near 0 whose m lies 5 below it.
    Call("cuda_fp8", 1, 1, dtype="bfloat16", mode="no_grad", poison="nan q"),
    Call("cuda_fp8", 2, 300, dtype="float16", heads=4, kv_heads=2, mode="no_grad", poison="nan k"),
    Call("cuda_fp8", 1, 1, dtype="bfloat16", mode="no_grad"),
    Call("cuda_fp8", 7, 1, dtype="bfloat16", head_dim=80, batch=3, heads=21, kv_heads=3, lse=True,
         mode="no_grad", magnitudes=TINY, equal="qkv", seed=678),
)  # fmt: skip


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
    attention.attend = lambda *call: WRONG[wrong](*plain(*call))
    with pytest.raises(Fault):
        check(attention, call, "cpu")


@pytest.mark.parametrize(("ulps", "agrees"), [(1, True), (4, False)])
def test_lse_may_round_once_where_it_is_one_number(ulps: int, agrees: bool) -> None:
    attention = build("naive")
    call = Call("naive", 1, 257, dtype="bfloat16", lse=True, needs_grad="", magnitudes=TINY)
    plain = attention.attend

    def attend(*call: Any) -> Any:
        out, lse = plain(*call)
        return out, lse + ulps * 2**-21  # lse is log 257 = 5.5

    attention.attend = attend
    with nullcontext() if agrees else pytest.raises(Fault, match="lse"):
        check(attention, call, "cpu")


def test_writing_to_an_input_is_found() -> None:
    attention = build("naive")
    call = Call("naive", 5, 7, head_dim=8, mode="no_grad", layouts=("sliced",) * 4)
    plain = attention.attend

    def attend(q, *rest):
        q.as_strided(q.shape, q.stride(), q.storage_offset() + 8).fill_(0)  # between its elements
        return plain(q, *rest)

    attention.attend = attend
    with pytest.raises(Fault, match="modified"):
        check(attention, call, "cpu")


@pytest.mark.parametrize("poison", ["nan q", "nan k", "nan v"])
def test_hiding_a_nan_is_found(poison: str) -> None:
    attention = build("naive")
    call = Call("naive", 5, 7, head_dim=8, needs_grad="", poison=poison)
    assert check(attention, call, "cpu") is None
    plain = attention.attend

    def attend(*call):
        out, lse = plain(*call)
        return out.nan_to_num(), lse

    attention.attend = attend
    with pytest.raises(Fault, match="does not reach"):
        check(attention, call, "cpu")


def test_a_call_is_made_again_from_its_repr() -> None:
    call = Call("naive", 5, 7, window=(None, 2), layouts=("odd", "sliced", "offset", "one"), lengths=(0, 3))
    assert Call.parse(repr(call)) == call and repr(replace(call, lengths=None)) != repr(call)
    with pytest.raises(ValueError, match=r"needs Call\("):
        Call.parse("__import__('os').system('true')")
