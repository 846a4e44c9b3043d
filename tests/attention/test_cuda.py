"""What the stages of the CUDA ladder declare, and which of them attention=cuda takes. What they compute is
checked by test_grid.py, on a GPU, and by tests/ops."""

from __future__ import annotations

import sys
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from attention import cuda
from attention.base import AttentionCall, UnsupportedAttention
from attention.cuda import PRODUCT_MODES, STAGES, CudaAttention, CudaStage, rowwise_max_keys
from ops.options import AttentionOptions, flattened
from tests.grid import Case, build, make_inputs

CALL = AttentionCall("training", "cuda", (9, 0), torch.bfloat16, 2, 4, 4, 128, 128, 64, backward=True)


@pytest.fixture(autouse=True)
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where the compiler is there."""
    monkeypatch.setattr(cuda, "missing", lambda: None)


@pytest.mark.parametrize(
    ("name", "call", "reason"),
    [
        ("plain", {"arch": (7, 5), "dtype": torch.float32, "head_dim": 200, "kv_heads": 2}, None),
        ("plain", {"features": frozenset({"window"})}, "no window: "),
        ("plain", {"features": frozenset({"dropout"})}, "no dropout: "),
        ("plain", {"features": frozenset({"document_ids"})}, "no document_ids: "),
        ("naive", {"arch": (7, 5), "dtype": torch.float32, "backward": False}, None),
        ("naive", {"backward": False, "head_dim": 200, "tk": 100_000, "kv_heads": 2}, None),
        ("naive", {}, "no backward: "),
        ("rowwise", {"backward": False, "tk": 57_600}, None),
        ("rowwise", {"backward": False, "tk": 57_601}, "no 57601 keys: needs at most 57600 on sm_90"),
        ("rowwise", {"backward": False, "tk": 30_000, "arch": (8, 9)}, "at most 24832 on sm_89"),
        ("rowwise", {"backward": False, "features": frozenset({"window"})}, "no window: "),
        ("tiled", {"arch": (7, 5), "dtype": torch.float32, "head_dim": 59}, None),
        ("tiled", {"features": frozenset({"softcap", "dropout", "document_ids", "kv_lengths"})}, None),
        ("tiled", {"head_dim": 160}, "no head dim 160: needs at most 128"),
        ("tiled", {"features": frozenset({"bias"})}, "no bias: "),
        ("wmma", {"backward": False}, None),
        ("wmma", {}, "no backward: "),
        ("fa1", {"backward": False}, None),
        ("fa1", {"backward": False, "arch": (7, 5)}, "no sm_75: "),
        ("fa2", {"head_dim": 8, "tq": 1, "features": frozenset({"alibi", "window", "lse"})}, None),
        ("fa2", {"head_dim": 60}, "no head dim 60: needs at most 128, a multiple of 8"),
        ("fa2", {"dtype": torch.float32}, "no float32: "),
        ("fa2", {"device": "cpu", "arch": None}, "no cpu: "),
        ("fa2", {"features": frozenset({"block_mask", "kv_lengths"}), "kv_heads": 2}, None),
        ("fa3", {"features": frozenset({"block_mask", "kv_lengths"}), "head_dim": 256}, None),
        ("tiled", {"features": frozenset({"block_mask"})}, "no block_mask: needs model.sparsity=null"),
        ("fa3", {"arch": (10, 0)}, "no sm_100: needs a GPU from sm_90 to sm_90"),
        ("fa3", {"head_dim": 256}, None),
        ("fa3", {"head_dim": 264}, "no head dim 264: needs at most 256"),
    ],
)
def test_what_the_stages_do(name: str, call: dict[str, Any], reason: str | None) -> None:
    reasons = build(f"cuda_{name}").unsupported_reasons(replace(CALL, **call))
    assert (len(reasons) == 1 and reason in reasons[0]) if reason else reasons == []


def test_what_rowwise_has_room_for() -> None:
    """Where an architecture is not known, the least that there is from sm_80 up."""
    assert (
        rowwise_max_keys((7, 5))
        < rowwise_max_keys((12, 0))
        == rowwise_max_keys((8, 6))
        < rowwise_max_keys((8, 0))
    )


@pytest.mark.parametrize(
    ("call", "stage", "why"),
    [
        ({}, "fa3", "the best stage"),
        ({"arch": (10, 0)}, "fa2", "the best stage"),
        ({"arch": (7, 5)}, "tiled", "the best stage but for cuda_fa2, no sm_75: "),
        ({"dtype": torch.float32}, "tiled", "but for cuda_fa2, no float32: "),
        ({"head_dim": 59}, "tiled", "but for cuda_fa2, no head dim 59: "),
        ({"head_dim": 256}, "fa3", "the best stage"),
        ({"features": frozenset({"block_mask"})}, "fa3", "the best stage"),
        ({"features": frozenset({"block_mask"}), "arch": (8, 9)}, "fa2", "the best stage"),
    ],
)
def test_the_best_stage(call: dict[str, Any], stage: str, why: str) -> None:
    attention, asked = build("cuda"), replace(CALL, **call)
    name, said = attention.choice(asked)
    assert name == f"cuda_{stage}" and why in said
    chosen = attention.resolve(asked)
    assert (chosen.stage, chosen.name) == (stage, name) and chosen.unsupported_reasons(asked) == []


def test_what_a_block_mask_is_refused_with() -> None:
    """By what fa2 lacks, the only stage that has one on any GPU."""
    for change, said in (
        ({"head_dim": 256, "arch": (8, 0)}, "no head dim 256: needs at most 128"),
        ({"head_dim": 264}, "no head dim 264: needs at most "),
        ({"dtype": torch.float32}, "no float32: "),
    ):
        call = replace(CALL, features=frozenset({"block_mask"}), **change)
        (reason,) = build("cuda").unsupported_reasons(call)
        assert said in reason


def test_what_no_stage_does_is_refused() -> None:
    for change in (
        {"head_dim": 264},
        {"head_dim": 256, "arch": (10, 0)},
        {"features": frozenset({"bias"})},
        {"device": "cpu", "arch": None},
    ):
        call = replace(CALL, **change)
        with pytest.raises(UnsupportedAttention, match="attention=cuda cannot run"):
            build("cuda").choice(call)
        assert build("cuda_tiled").unsupported_reasons(call)


def test_what_the_backward_takes_with_grouped_heads() -> None:
    """fa3 has dK and dV of each query head under a causal mask, from a length on; fa2 has not."""
    grouped = replace(CALL, heads=8, kv_heads=2, tq=2048, tk=2048)
    values = 2 * 8 * 2048 * 64  # of q, and of dK of each query head
    others = 2 * 4 * values // 64 + 4 * values
    for call, more in ((grouped, 2 * 2 * values), (replace(grouped, causal=False), 0)):
        assert CudaStage("fa3").costs(call).transient_bytes == others + more
        assert CudaStage("fa2").costs(call).transient_bytes == others


def test_determinism_is_an_option() -> None:
    for name, deterministic in (("cuda", False), ("cuda_fa2", False), ("cuda_tiled", True)):
        assert build(name).capabilities.deterministic is deterministic
    assert CudaStage("fa2", deterministic=True).capabilities.deterministic
    assert CudaAttention(deterministic=True).resolve(CALL).capabilities.deterministic
    fa3, wide = CudaStage("fa3", deterministic=True), replace(CALL, head_dim=256)
    assert fa3.unsupported_reasons(CALL) == fa3.unsupported_reasons(replace(wide, backward=False)) == []
    assert "no deterministic backward at head dim 256" in fa3.unsupported_reasons(wide)[0]


def test_without_a_compiler_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda, "missing", lambda: "cuda-bindings is not installed: pip install it")
    for name in ("cuda", *(f"cuda_{stage}" for stage in STAGES)):
        reasons = build(name).unsupported_reasons(replace(CALL, backward=False))
        assert reasons == ["cuda-bindings is not installed: pip install it"]


def test_an_unknown_stage_is_named() -> None:
    with pytest.raises(
        ValueError, match="stage is 'fa4'; the ladder has plain, naive, rowwise, tiled, wmma, fa1, fa2, fa3"
    ):
        CudaStage("fa4")


def test_products_are_chosen_by_word(monkeypatch: pytest.MonkeyPatch) -> None:
    """fma reaches forward and backward, the latter beside a flag for determinism too."""
    tunings: list[list[int]] = []
    kernels = SimpleNamespace(
        tiled_forward=lambda q, k, v, *options: tunings.append(options[-1]),
        tiled_backward=lambda *call: tunings.append(call[-2]),
    )
    monkeypatch.setitem(sys.modules, "ops.cuda.tiled", kernels)
    monkeypatch.setitem(cuda._OPS, "tiled", lambda *call: cuda._forward("tiled", *call))
    q, asked = torch.zeros(1, 1, 8, 16), AttentionOptions(scale=1.0)
    for products in PRODUCT_MODES:
        CudaStage("tiled", products=products).attend(q, q, q, asked, None)
    torch.use_deterministic_algorithms(True)
    try:
        cuda._backward("tiled", q, q, tunings[1], False)
    finally:
        torch.use_deterministic_algorithms(False)
    assert tunings == [[0, 0], [0, 1], [1, 1]]
    with pytest.raises(ValueError, match="products is 'tf32'; stage tiled has auto, fma"):
        CudaStage("tiled", products="tf32")
    with pytest.raises(ValueError, match="products is 'fma'; stage fa2 has auto"):
        CudaStage("fa2", products="fma")


def test_warnings_alone_do_not_make_a_backward_deterministic(monkeypatch: pytest.MonkeyPatch) -> None:
    """Wide heads of fa3 have none, and their calls pass the checks then."""
    settings: list[list[int]] = []
    kernels = SimpleNamespace(fa3_backward=lambda *call: settings.append(call[-2]))
    monkeypatch.setitem(sys.modules, "ops.cuda.hopper", kernels)
    q, wide = torch.zeros(1, 1, 8, 192), replace(CALL, head_dim=192)
    try:
        torch.use_deterministic_algorithms(True, warn_only=True)
        assert CudaStage("fa3").unsupported_reasons(wide) == []
        cuda._backward("fa3", q, q, [0, 0], False)
        torch.use_deterministic_algorithms(True)
        with pytest.raises(UnsupportedAttention, match="no deterministic backward at head dim 192"):
            cuda._backward("fa3", q, q, [0, 0], False)
    finally:
        torch.use_deterministic_algorithms(False)
    assert settings == [[0, 0]]


@pytest.mark.parametrize(("strict", "deterministic"), [(False, 0), (False, 1), (True, 0)])
def test_options_reach_the_kernels(monkeypatch: pytest.MonkeyPatch, strict: bool, deterministic: int) -> None:
    """By the op's schema, forward and backward: causal is a right bound of 0, `settings` has determinism."""
    calls: dict[str, tuple[Any, ...]] = {}

    def forward(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *options: Any) -> tuple[torch.Tensor, ...]:
        calls["forward"] = options
        return torch.empty_like(q), q.new_zeros(q.shape[:3], dtype=torch.float32)

    def backward(dout: torch.Tensor, q: Any, k: Any, v: Any, *rest: Any) -> tuple[torch.Tensor, ...]:
        calls["backward"] = rest
        return *map(torch.ones_like, (q, k, v)), q.new_empty(0), q.new_empty(0)

    kernels = SimpleNamespace(fa2_forward=forward, fa2_backward=backward)
    monkeypatch.setitem(sys.modules, "ops.cuda.tensor_cores", kernels)
    library = torch.library.Library("tilegpt", "IMPL")  # the ops have CUDA kernels only
    try:
        for suffix, function in (("", cuda._forward), ("_backward", cuda._backward)):
            library.impl(f"cuda_fa2{suffix}", cuda.partial(function, "fa2"), "CPU")
        attention = CudaStage("fa2", deterministic=bool(deterministic))
        torch.use_deterministic_algorithms(strict)
        on_cpu = replace(attention.capabilities, devices=frozenset({"cpu"}))
        attention.capabilities = on_cpu
        q = torch.randn(1, 4, 8, 16, dtype=torch.bfloat16, requires_grad=True)
        lengths = torch.tensor([5], dtype=torch.int32)
        attention(q, q, q, window=(3, 0), softcap=2.0, kv_lengths=lengths).sum().backward()
    finally:
        torch.use_deterministic_algorithms(False)
        library._destroy()
    *tensors, scale, left, right, softcap, dropout_p, settings = calls["forward"]
    assert [x is None for x in tensors] == [True] * 4 + [False, True, True, True]
    assert (scale, left, right, softcap, dropout_p, list(settings)) == (
        0.25,
        3,
        0,
        2.0,
        0.0,
        [deterministic, 0],
    )
    _, _, *options, settings, bias_grad = calls["backward"]
    assert options[8:] == [0.25, 3, 0, 2.0, 0.0] and bias_grad is False
    assert list(settings) == [int(deterministic or strict), 0]
    assert torch.equal(q.grad, torch.full_like(q, 3))


@pytest.mark.parametrize("stage", [name for name, stage in STAGES.items() if not stage.capabilities.backward])
def test_what_has_no_backward_says_so(stage: str) -> None:
    with pytest.raises(UnsupportedAttention, match=f"cuda_{stage}.*\n.*no backward"):
        cuda._backward(stage, torch.empty(0), torch.empty(0))


@pytest.mark.parametrize(
    ("stage", "options", "said"),
    [
        ("fa1", {"kv_lengths": torch.tensor([8], dtype=torch.int32)}, "no kv_lengths: "),
        ("naive", {"left": 3}, "no window: "),
        ("fa2", {"dtype": torch.float32}, "no float32: "),
        ("fa2", {"head_dim": 100}, "no head dim 100: "),
        (None, {"head_dim": 256}, "no head dim 256: "),
        (None, {"head_dim": 59, "block_mask": torch.ones(1, 1, 1, 1, dtype=torch.bool)}, "no head dim 59: "),
        ("tiled", {"block_mask": torch.ones(1, 1, 1, 1, dtype=torch.bool)}, "no block_mask: "),
        ("fa2", {"kv_lengths": torch.tensor([8])}, "kv_lengths is torch.int64; it needs torch.int32"),
        ("fa2", {"v_tokens": 9}, "k and v need the same shape"),
    ],
)  # fmt: skip
def test_a_compiled_call_is_checked_as_it_is_traced(
    stage: str | None, options: dict[str, Any], said: str
) -> None:
    """By the op's fake too, as one can call the op itself."""
    dtype = options.get("dtype", torch.bfloat16)
    q, k, v = (
        torch.empty(1, 2, n, options.get("head_dim", 64), dtype=dtype)
        for n in (8, 8, options.get("v_tokens", 8))
    )
    window = (options["left"], -1) if "left" in options else None
    tensors = {name: options.get(name) for name in ("kv_lengths", "block_mask")}
    asked = AttentionOptions(True, 0.125, window, **tensors)
    with pytest.raises(ValueError, match=said):
        cuda._check(stage, q, k, v, asked)


@pytest.mark.gpu
@pytest.mark.parametrize("stage", ["fa1", "fa2"])
def test_compiled_it_is_refused_all_the_same(stage: str) -> None:
    q = torch.randn(1, 2, 8, 100, device="cuda", dtype=torch.bfloat16)
    with pytest.raises(Exception, match="no head dim 100"):
        torch.compile(CudaStage(stage), fullgraph=True)(q, q, q)


EVERYTHING = ("window", "softcap", "alibi", "document_ids", "kv_lengths", "dropout")


@pytest.mark.gpu
@pytest.mark.parametrize(
    "features", [(), EVERYTHING, (*EVERYTHING, "block_mask")], ids=["plain", "everything", "block_mask"]
)
@pytest.mark.parametrize("stage", STAGES)
def test_the_ops_are_as_pytorch_wants_them(
    stage: str, features: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Schema, fakes, autograd and dynamic shapes, forward and backward."""
    attention, of_stage = CudaStage(stage, deterministic=True), cuda._OPS[stage]
    op = getattr(torch.ops.tilegpt, f"cuda_{stage}").default
    if not attention.capabilities.features.issuperset(features):
        pytest.skip(f"cuda_{stage} has no {', '.join(features)}")
    trains, calls = attention.capabilities.backward, []
    monkeypatch.setitem(cuda._OPS, stage, lambda *call: calls.append(call) or of_stage(*call))
    case = Case("op", 40, 56, 32, kv_heads=2, features=frozenset(features))
    inputs = make_inputs(case, "cuda", torch.bfloat16)
    q, k, v = (x.detach().nan_to_num(0.5).requires_grad_(trains) for x in (inputs.q, inputs.k, inputs.v))
    attention(q, k, v, **inputs.options)
    call = (*calls[0][:3], *flattened(*calls[0][3:]))
    results = torch.library.opcheck(op, call)
    assert set(results.values()) == {"SUCCESS"} and len(results) == 4
    if trains:
        q, k, v, *options = (x.detach() if isinstance(x, torch.Tensor) else x for x in call)
        backward = getattr(torch.ops.tilegpt, f"cuda_{stage}_backward").default
        results = torch.library.opcheck(
            backward, (inputs.dout, q, k, v, *op(q, k, v, *options), *options, False)
        )
        assert set(results.values()) == {"SUCCESS"} and len(results) == 4
