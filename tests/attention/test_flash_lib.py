"""The adapter of the flash-attn library, against recorded signatures and conventions (flash_fakes.py).

The real library is checked by test_grid.py and test_contract.py, on a GPU where it is installed.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch

from attention import flash_documents, flash_lib, flash_versions
from attention.base import FLOATS, AttentionCall, UnsupportedAttention
from attention.flash_lib import FlashLibAttention
from attention.flash_versions import VERSIONS
from ops.library import backward_with_flat_options, with_flat_options
from ops.options import AttentionOptions, flattened
from tests.attention.criterion import run_case
from tests.attention.flash_fakes import install
from tests.grid import CASES, Case, build, make_inputs

pytestmark = pytest.mark.sampled(4)

# The ops have CUDA kernels only; over a fake library the same functions run on a CPU.
_CPU = torch.library.Library("tilegpt", "IMPL")
for _version in VERSIONS:
    _CPU.impl(f"flash{_version}", with_flat_options(partial(flash_lib._forward, _version)), "CPU")
    _backward = backward_with_flat_options(partial(flash_lib._backward, _version))
    _CPU.impl(f"flash{_version}_backward", _backward, "CPU")

BASE = Case("shape", 24, 24, 32)


@pytest.fixture
def on_cpu(monkeypatch: pytest.MonkeyPatch) -> Any:
    """on_cpu(version): (the attention over a fake library, the calls that the library gets)."""

    def make(version: int, **options: Any) -> tuple[FlashLibAttention, list[dict[str, Any]]]:
        calls = install(monkeypatch, version)
        attention = FlashLibAttention(version, **options)
        attention.capabilities = replace(attention.capabilities, devices=frozenset({"cpu"}), dtypes=FLOATS)
        return attention, calls

    monkeypatch.setattr(flash_versions, "_default_generator", lambda device: torch.default_generator)
    return make


def ids_of(*rows: list[int]) -> torch.Tensor:
    return torch.tensor(rows, dtype=torch.int32)


def run(attention: FlashLibAttention, case: Case, **more: Any) -> tuple[torch.Tensor, ...]:
    """(out, lse) of a live call, forward only."""
    inputs = make_inputs(case, "cpu", torch.float32)
    with torch.no_grad():
        return attention(inputs.q, inputs.k, inputs.v, return_lse=True, **(inputs.options | more))


def _groups() -> Iterator[Any]:
    """The small cases, those of a group in one test: first the quick ones."""
    for group, quick in itertools.product(sorted({case.group for case in CASES}), (True, False)):
        if cases := [case for case in CASES if case.small and (case.group, case.quick) == (group, quick)]:
            yield pytest.param(cases, id=group, marks=[pytest.mark.long] * (not quick))


@pytest.mark.parametrize("cases", list(_groups()))
@pytest.mark.parametrize("version", VERSIONS)
def test_grid(on_cpu: Any, version: int, cases: list[Case]) -> None:
    """Every small case within the criterion, forward and backward; and what is refused is not in silence."""
    attention, calls = on_cpu(version)
    ran = 0
    for case in cases:
        # fp32 shows the smallest mistake. But version 2 rounds slope * Tk into its fp32 lse, for which only
        # the 16 bits that the library takes have room.
        dtype = torch.float16 if "alibi" in case.features else torch.float32
        ratios = run_case(attention, case.fewer_heads, "cpu", dtype)
        ran += ratios is not None
        wrong = {what: round(ratio, 2) for what, ratio in (ratios or {}).items() if not ratio <= 1}
        assert not wrong, f"flash{version}, {case.id}: error over what is allowed: {wrong}"
    refused = case.group == "blocks"  # the library skips no tiles
    assert (not ran and not calls) if refused else ran and (calls or case.group == "empty")


@pytest.mark.parametrize("version", VERSIONS)
def test_queries_that_overlap(on_cpu: Any, version: int) -> None:
    """Windows of a row, one element apart: results as torch.compile expects them, with D innermost."""
    attention, _ = on_cpu(version)
    q = torch.randn(2, 3, 36).unfold(2, 32, 1).requires_grad_()  # (B, H, T, D)
    k = torch.randn(2, 3, 5, 32)
    out = attention(q, k, k)
    (dq,) = torch.autograd.grad(out.sum(), q)
    assert out.stride() == dq.stride() == (480, 160, 32, 1)
    torch.testing.assert_close(out, build("naive")(q, k, k))


def test_the_fakes_can_fail(on_cpu: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A wrong translation shows: a right bound lost, V not blanked, the lse of ALiBi left as it comes."""
    by_id = {case.id: case for case in CASES}
    windowed, noncausal = (
        by_id[f"pair-113x203-d64-{pair}"] for pair in ("noncausal-window", "alibi-noncausal")
    )

    def ratios(version: int, case: Case) -> dict[str, float]:
        return run_case(on_cpu(version)[0], case, "cpu", torch.float32)

    with monkeypatch.context() as patch:
        patch.setattr(flash_versions.LibraryCall, "window_size", property(lambda o: (o.left, -1)))
        assert max(ratios(3, windowed).values()) > 1
    with monkeypatch.context() as patch:
        patch.setattr(flash_versions, "_zero_v_beyond_lengths", lambda v, kv_lengths: v)
        assert max(ratios(4, by_id["feature-113x203-d64-kv_lengths"]).values()) > 1
    with monkeypatch.context() as patch:
        patch.setattr(flash_lib, "_diagonal", lambda q, k, kv_lengths: 0)
        assert ratios(2, by_id["feature-113x203-d64-alibi"])["lse"] > 1
        assert ratios(2, noncausal)["lse"] <= 1  # lacks nothing


@pytest.mark.parametrize("version", VERSIONS)
def test_layout_is_a_view_both_ways(on_cpu: Any, version: int) -> None:
    """q, k, v in (B, T, H, D) of one projection, as in the model, reach the library uncopied; so does out."""
    attention, calls = on_cpu(version)
    qkv = torch.randn(2, 24, 3 * 4 * 32, requires_grad=True)
    q, k, v = (x.view(2, 24, 4, 32).transpose(1, 2) for x in qkv.split(128, dim=2))
    out = attention(q, k, v)
    assert out.transpose(1, 2).is_contiguous()
    for name, x in zip("qkv", (q, k, v), strict=True):
        assert calls[0][name].data_ptr() == x.data_ptr()
        assert calls[0][name].shape == (2, 24, 4, 32)
    dq = torch.autograd.grad(out.sum(), q, retain_graph=True)[0]
    assert dq.transpose(1, 2).is_contiguous() and calls[-1]["dq"].shape == (2, 24, 4, 32)
    # Documents: still views, of (B * T, H, D).
    ids = torch.arange(24, dtype=torch.int32).div(10, rounding_mode="floor").expand(2, 24)
    attention(q, k, v, document_ids=ids)
    assert calls[-1]["v"].data_ptr() == v.data_ptr() and calls[-1]["v"].shape == (48, 4, 32)
    assert calls[-1]["cu_seqlens_k"].tolist() == [0, 10, 20, 24, 34, 44, 48]
    assert calls[-1]["max_seqlen_q"] == calls[-1]["max_seqlen_k"] == 10


@pytest.mark.parametrize("version", VERSIONS)
def test_what_is_not_aligned_is_copied(on_cpu: Any, version: int) -> None:
    """The kernels read 16 bytes at a time: rows of an odd stride would be a misaligned address."""
    attention, calls = on_cpu(version)
    inputs = make_inputs(BASE, "cpu", torch.float32)
    odd = torch.zeros(2, 4, 24, 33)[..., 1:].copy_(inputs.q.detach())
    torch.testing.assert_close(attention(odd, inputs.k, inputs.v), attention(inputs.q, inputs.k, inputs.v))
    assert calls[0]["q"].stride(-2) % 8 == 0 and calls[0]["k"].data_ptr() == inputs.k.data_ptr()


@pytest.mark.parametrize("version", VERSIONS)
def test_band(on_cpu: Any, version: int) -> None:
    """Causal goes as causal, with no right bound beside it; unbounded is -1, or None for version 4."""
    attention, calls = on_cpu(version)
    unbounded = None if version == 4 else -1
    for causal, window, expected in (
        (True, None, (True, unbounded, unbounded)),
        (True, (5, 3), (True, 5, unbounded)),
        (False, (5, 3), (False, 5, 3)),
        (False, (None, 3), (False, unbounded, 3)),
        (False, (5, -1), (False, 5, unbounded)),
        (False, None, (False, unbounded, unbounded)),
        (False, (2**31, 2**40), (False, 2**30, 2**30)),  # sums with these fit in 32 bits
    ):
        run(attention, BASE, causal=causal, window=window)
        call = calls[-1]
        assert (call["causal"], call["window_size_left"], call["window_size_right"]) == expected
        assert call["softcap"] == 0.0 and call["softmax_scale"] == 32**-0.5


@pytest.mark.parametrize("version", VERSIONS)
def test_deterministic_reaches_the_backward(on_cpu: Any, version: int) -> None:
    for deterministic in (False, True):
        attention, calls = on_cpu(version, deterministic=deterministic)
        inputs = make_inputs(BASE, "cpu", torch.float32)
        attention(inputs.q, inputs.k, inputs.v).sum().backward()
        assert calls[-1]["deterministic"] is deterministic is attention.capabilities.deterministic


@pytest.mark.parametrize("version", VERSIONS)
def test_op_is_sound_and_compiles_whole(on_cpu: Any, version: int) -> None:
    attention, _ = on_cpu(version)
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    compiled = torch.compile(attention, fullgraph=True, backend="aot_eager")
    for tokens in (24, 40, 56):
        inputs = make_inputs(Case("compile", tokens, tokens, 32, layout="transposed"), "cpu", torch.float32)
        ids = (torch.arange(tokens, dtype=torch.int32) // 7).expand(2, tokens).contiguous()
        leaves = (inputs.q, inputs.k, inputs.v)
        for x in (*leaves, ids):
            torch._dynamo.mark_dynamic(x, 2 if x.ndim == 4 else 1)
        out, lse = compiled(*leaves, document_ids=ids, return_lse=True)
        expected = attention(*leaves, document_ids=ids, return_lse=True)
        torch.testing.assert_close((out, lse), expected)
        got, plain = (torch.autograd.grad(o, leaves, inputs.dout) for o in (out, expected[0]))
        torch.testing.assert_close(got, plain)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
    op = getattr(torch.ops.tilegpt, f"flash{version}").default
    inputs = make_inputs(BASE, "cpu", torch.float32)
    options = flattened(AttentionOptions(scale=0.25), None, [0])
    torch.library.opcheck(op, (inputs.q, inputs.k, inputs.v, *options))


@pytest.mark.parametrize("backend", [None, "aot_eager"])
@pytest.mark.parametrize("version", VERSIONS)
def test_ids_are_read_once_for_all_layers(on_cpu: Any, monkeypatch: Any, version: int, backend: str) -> None:
    """Forward and backward of three layers are one host synchronisation, compiled or not."""
    attention, calls = on_cpu(version)
    reads, find = [], flash_documents._find
    monkeypatch.setattr(flash_documents, "_find", lambda *ids: reads.append(ids) or find(*ids))

    def layers(x: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        for _ in range(3):
            x = attention(x, x, x, document_ids=ids)
        return x

    torch._dynamo.reset()
    net = torch.compile(layers, fullgraph=True, backend=backend) if backend else layers
    x = make_inputs(BASE, "cpu", torch.float32).q
    net(x, (torch.arange(24, dtype=torch.int32) // 7).expand(2, 24).contiguous()).sum().backward()
    assert len(calls) == 6 and len(reads) == 1


@pytest.mark.parametrize("documents", [False, True])
def test_dropout_is_a_function_of_the_seed(on_cpu: Any, documents: bool) -> None:
    """The backward has the forward's mask; the generator of the device is put back; a seed gives it again."""
    attention, calls = on_cpu(2)
    inputs = make_inputs(BASE, "cpu", torch.float32)
    ids = torch.arange(24, dtype=torch.int32).div(10, rounding_mode="floor").expand(2, 24).contiguous()
    options = {"dropout_p": 0.5, "document_ids": ids if documents else None}
    torch.manual_seed(3)
    out = attention(inputs.q, inputs.k, inputs.v, **options)
    after = torch.rand(1)
    dv = torch.autograd.grad(out, inputs.v, inputs.dout)[0]
    torch.testing.assert_close((out * inputs.dout).sum(), (inputs.v * dv).sum())  # out is linear in v
    torch.manual_seed(3)
    seed = int(torch.randint(0, 2**63 - 1, (), dtype=torch.int64))
    assert calls[-1]["rng_state"].tolist() == [seed, 0] and torch.equal(after, torch.rand(1))
    torch.manual_seed(3)
    assert torch.equal(out, attention(inputs.q, inputs.k, inputs.v, **options))
    assert not torch.equal(out, attention(inputs.q, inputs.k, inputs.v, **options))
    # Activation checkpointing runs the forward again, from the same state.
    torch.manual_seed(3)
    again = torch.utils.checkpoint.checkpoint(
        lambda *x: attention(*x, **options), inputs.q, inputs.k, inputs.v, use_reentrant=False
    )
    assert torch.equal(torch.autograd.grad(again, inputs.v, inputs.dout)[0], dv)


@pytest.mark.parametrize("version", VERSIONS)
def test_rows_without_keys(on_cpu: Any, version: int) -> None:
    """0 and -inf, whatever the library writes there, as naive has it; the backward stays finite."""
    attention, _ = on_cpu(version)
    naive = build("naive")
    for case, more in (
        (Case("no_key", 40, 24, 32), {}),
        (Case("no_key", 24, 40, 32, features=frozenset({"kv_lengths"}), blind=True), {}),
        (Case("no_key", 24, 40, 32, features=frozenset({"document_ids"}), blind=True), {}),
    ):
        out, lse = run(attention, case, **more)
        expected = run(naive, case, **more)
        torch.testing.assert_close((out, lse), expected)
        assert (lse == -torch.inf).any() and not out[lse == -torch.inf].any()


@pytest.mark.parametrize("version", VERSIONS)
def test_documents_that_cannot_be_told(on_cpu: Any, version: int) -> None:
    attention, _ = on_cpu(version)
    q = torch.randn(1, 2, 4, 32)
    cases = (
        (ids_of([1, 2, 2, 1]), True, "document 1 of row 0 comes back .* attention=tiled"),
        ((ids_of([2, 2, 1, 1]), ids_of([1, 1, 2, 2])), True, "another order .* attention=tiled"),
        (
            (ids_of([1, 1, 1, 2]), ids_of([1, 1, 2, 2])),
            True,
            "ends elsewhere on the diagonal .* attention=tiled",
        ),
    )
    for document_ids, causal, message in cases:
        with pytest.raises(ValueError, match=message):
            attention(q, q, q, document_ids=document_ids, causal=causal)
    # Where order is nothing, each document may end where it likes.
    options = {"document_ids": cases[2][0], "causal": False}
    torch.testing.assert_close(attention(q, q, q, **options), build("naive")(q, q, q, **options))


def test_version_2_has_no_wide_right_bound_for_more_queries_than_keys(on_cpu: Any) -> None:
    attention, _ = on_cpu(2)
    tall = Case("no_key", 40, 24, 32)
    for window in ((5, None), (None, 24), (5, 30)):
        with pytest.raises(UnsupportedAttention, match="needs a right bound below 24"):
            run(attention, tall, causal=False, window=window)
    for version, window in ((2, (None, 23)), (2, (24, None)), (2, (7, 9)), (3, (5, None)), (4, (5, 30))):
        options = {"causal": False, "window": window}
        torch.testing.assert_close(
            run(on_cpu(version)[0], tall, **options), run(build("naive"), tall, **options)
        )


def test_flash4_has_no_gradient_where_its_dq_is_wrong(on_cpu: Any) -> None:
    attention, _ = on_cpu(4)
    call = AttentionCall("training", "cpu", None, torch.float32, 1, 4, 4, 24, 24, 40, backward=True)
    assert any("multiple of 32" in reason for reason in attention.unsupported_reasons(call))
    assert not attention.unsupported_reasons(replace(call, backward=False))


def test_deterministic_algorithms_reach_the_library_and_refuse_what_has_none(monkeypatch):
    """deterministic=true trains with the deterministic backward of the library, if it has one."""
    asked = {"purpose": "training", "device": "cuda", "arch": (9, 0), "dtype": torch.bfloat16, "batch": 1}
    asked |= {"heads": 2, "kv_heads": 2, "tq": 64, "tk": 64, "head_dim": 256, "backward": True}
    call = AttentionCall(**asked)
    plain = AttentionOptions(scale=0.25), None, [0]
    reasons = {name: build(name).unsupported_reasons for name in ("flash2", "flash3", "flex", "cuda_fa2")}
    said = "no deterministic backward"
    assert not flash_lib._library_options(*plain).deterministic
    assert not any(said in reason for of in reasons.values() for reason in of(call))
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)
    assert flash_lib._library_options(*plain).deterministic
    assert any(reason == f"{said}: needs deterministic=false" for reason in reasons["flex"](call))
    above = "no deterministic backward above head dim 192: needs attention.deterministic=false and "
    assert any(reason.startswith(above) for reason in reasons["flash3"](call))
    assert not any(said in reason for name in ("flash2", "cuda_fa2") for reason in reasons[name](call))
