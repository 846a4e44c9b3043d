"""What every implementation of conf/attention keeps, whatever its kernel (numbers: test_grid.py)."""

from __future__ import annotations

import itertools
import pickle
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

from attention.base import (
    FEATURES,
    Attention,
    AttentionCall,
    AttentionOptions,
    CachedTensor,
    CacheView,
    UnsupportedAttention,
    quantise,
)
from ops.library import unpacked
from tests.attention.criterion import error_ratios, run_case
from tests.grid import CASES, CROSSED, NAMES, Case, build, make_inputs

pytestmark = pytest.mark.sampled(4)

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
OWN = ("naive", "tiled")  # in eager PyTorch, every option, any dtype


def capable(
    name: str, case: Case, device: str, dtype: torch.dtype | None = None
) -> tuple[Attention, torch.dtype]:
    """The implementation, and a dtype in which it runs `case` forward and backward; skips where there is
    none.
    """
    attention, reasons = build(name), []
    for candidate in (dtype,) if dtype else (torch.float32, torch.bfloat16):
        inputs = make_inputs(case, device, candidate)
        reasons = attention.unsupported_reasons(
            AttentionCall.of(inputs.q, inputs.k, inputs.v, AttentionOptions(**inputs.options))
        )
        if not reasons:
            return attention, candidate
    pytest.skip(f"{name} on {device}: {'; '.join(reasons)}")


@pytest.mark.parametrize("name", NAMES)
def test_leaves_no_trace_in_checkpoints(name: str) -> None:
    attention = build(name)
    assert isinstance(attention, Attention) and attention.name == name
    assert not list(attention.parameters()) and not list(attention.buffers()) and not attention.state_dict()
    assert not list(attention.children())


@pytest.mark.parametrize("name", NAMES)
def test_goes_through_pickle(name: str) -> None:
    """As with a model that torch.save writes whole."""
    attention = build(name)
    again = pickle.loads(pickle.dumps(attention))
    assert (again.name, again.declaration) == (name, attention.declaration)
    q = torch.randn(1, 2, 9, 16)
    if not attention.unsupported_reasons(AttentionCall.of(q, q, q, AttentionOptions())):
        assert torch.equal(again(q, q, q), attention(q, q, q))


@pytest.mark.parametrize("name", NAMES)
def test_undeclared_features_are_refused_all_at_once(name: str) -> None:
    attention = build(name)
    lacking = FEATURES.keys() - attention.capabilities.features
    call = AttentionCall(
        "training", "cpu", None, torch.float32, 1, 4, 2, 8, 9, 64, False, frozenset(FEATURES), True
    )
    reasons = attention.unsupported_reasons(call)
    assert all(any(feature in reason for reason in reasons) for feature in lacking), reasons
    if reasons:
        with pytest.raises(UnsupportedAttention) as refusal:
            attention.require(call)
        assert refusal.value.reasons == reasons and refusal.value.name == name
        assert all(reason in str(refusal.value) for reason in reasons)


@pytest.mark.parametrize("name", NAMES)
def test_unknown_devices_are_refused(name: str) -> None:
    call = AttentionCall("training", "abacus", None, torch.float32, 1, 4, 4, 8, 8, 64)
    assert build(name).unsupported_reasons(call)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("heads", "head_dim"), [((4, 2), 64), ((3, 3), 128), ((2, 1), 24)])
def test_the_gradient_of_packed_inputs(name: str, device: str, heads: tuple[int, int], head_dim: int) -> None:
    """Written in one piece or not, it is that of q, k and v; but for dQ, which some sum up in any order."""
    attention, dtype = capable(name, Case("packed", 200, 200, head_dim, 2, *heads), device)
    generator = torch.Generator().manual_seed(0)
    shape = 2, 200, (heads[0] + 2 * heads[1]) * head_dim
    qkv = torch.randn(shape, generator=generator).to(device, dtype).requires_grad_()

    def run(packed: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        out = attention(*unpacked(qkv, *heads), packed=packed)
        return out, *torch.autograd.grad(out, qkv, torch.ones_like(out))

    for ours, expected in zip(run(qkv), run(None), strict=True):
        torch.testing.assert_close(ours, expected)
    for other in (qkv.detach().clone(), qkv[:, :100]):
        for checked_before in (build(name), attention):
            with pytest.raises(ValueError, match="packed"):
                checked_before(*unpacked(qkv, *heads), packed=other)


@pytest.mark.parametrize("name", OWN)
def test_packed_inputs_that_are_leaves(name: str) -> None:
    """Have gradients of their own, what is detached has none; compiled, what is no view of `packed` is what
    counts."""
    qkv, attention = torch.randn(2, 20, 12 * 16), build(name)
    leaves = [x.detach().requires_grad_() for x in unpacked(qkv, 4, 4)]
    alone = torch.autograd.grad(attention(*leaves).sum(), leaves)
    packed = torch.autograd.grad(attention(*leaves, packed=qkv).sum(), leaves)
    torch.testing.assert_close(packed, alone)

    qkv.requires_grad_()
    for detached in range(3):
        views = [x.detach() if n == detached else x for n, x in enumerate(unpacked(qkv, 4, 4))]
        one, three = (torch.autograd.grad(attention(*views, packed=x).sum(), qkv) for x in (qkv, None))
        torch.testing.assert_close(one, three)
    qkv.requires_grad_(False)

    def doubled(qkv: torch.Tensor, packed: bool) -> torch.Tensor:
        q, k, v = unpacked(qkv, 4, 4)
        return attention(2 * q, k, v, packed=qkv if packed else None)

    torch._dynamo.reset()
    torch.testing.assert_close(torch.compile(doubled, backend="eager")(qkv, True), doubled(qkv, False))


def test_packed_inputs_are_one_when_compiled() -> None:
    attention, graphs = build("tiled"), CompileCounterWithBackend("eager")

    def run(qkv: torch.Tensor) -> torch.Tensor:
        return attention(*unpacked(qkv, 2, 1), packed=qkv)

    torch._dynamo.reset()
    compiled = torch.compile(run, backend=graphs, fullgraph=True)
    for learned in (True, False):
        compiled(torch.randn(1, 20, 64).requires_grad_(learned))
        assert any("_packed" in str(node.target) for node in graphs.graphs[-1].graph.nodes)


@pytest.mark.parametrize("name", ["tiled", "triton"])
def test_no_forward_mode_derivative(name: str) -> None:
    """Which would be lost, as zeros, below autograd."""
    q, attention = torch.randn(1, 2, 9, 16), build(name)
    with pytest.raises(NotImplementedError, match="no forward-mode derivative"):
        torch.func.jvp(lambda q: attention(q, q, q), (q,), (q,))


@pytest.mark.parametrize("name", ["tiled", "triton"])
def test_torch_func_differentiates_naive_alone(name: str) -> None:
    """PyTorch's own words would be of the inside of an op."""
    q, attention = torch.randn(1, 2, 9, 16), build(name)
    with pytest.raises(NotImplementedError, match=f"tilegpt::{name} has no derivative within torch.func"):
        torch.func.grad(lambda q: attention(q, q, q).sum())(q)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", NAMES)
def test_compiles_whole_with_dynamic_length(name: str, device: str) -> None:
    """One graph, forward and backward, for all lengths, and right by the criterion: compiled, an
    implementation may take another way than in eager mode, so the two need not agree to the last bit.
    """
    attention, dtype = capable(name, Case("compile", 64, 64), device)
    torch._dynamo.reset()
    # Its own count: in eager mode an implementation may compile by itself.
    graphs = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(attention, fullgraph=True, backend=graphs)
    for tokens in (64, 96, 128):
        case = Case("compile", tokens, tokens)
        inputs = make_inputs(case, device, dtype)
        leaves = inputs.leaves()
        for t in leaves.values():
            torch._dynamo.mark_dynamic(t, 2)
        out = compiled(*leaves.values())
        grads = torch.autograd.grad(out, list(leaves.values()), inputs.dout)
        got = {"out": out.detach()} | {f"d{x}": grad for x, grad in zip(leaves, grads, strict=True)}
        ratios = error_ratios(got, case, device, dtype)
        assert max(ratios.values()) <= 1, ratios
    assert graphs.frame_count == 1


@pytest.mark.parametrize("name", (*OWN, "triton"))
def test_compiles_with_every_option(name: str) -> None:
    attention = build(name)
    torch._dynamo.reset()
    features = frozenset(CROSSED) & attention.capabilities.features - {"gqa", "noncausal"}
    if "cpu" not in attention.capabilities.devices:
        pytest.skip(f"{name} does not run on a CPU here")
    inputs = make_inputs(Case("compile", 9, 12, 8, kv_heads=2, features=features), "cpu", torch.float32)
    compiled = torch.compile(attention, fullgraph=True, backend="aot_eager")
    torch.manual_seed(0)
    out, lse = compiled(inputs.q, inputs.k, inputs.v, return_lse=True, **inputs.options)
    torch.manual_seed(0)
    expected = attention(inputs.q, inputs.k, inputs.v, return_lse=True, **inputs.options)
    torch.testing.assert_close((out, lse), expected)
    out.sum().backward()


@pytest.mark.parametrize("name", NAMES)
def test_compiled_it_refuses_the_same(name: str) -> None:
    """In the same words, where only part of a function is compiled by the same error."""
    attention, q = build(name), torch.randn(1, 2, 40, 16)
    for options in ({"softcap": 2.0}, {"return_lse": True}, {"window": (-7, 0)}):
        torch._dynamo.reset()
        whole, parts = (torch.compile(attention, backend="eager", fullgraph=full) for full in (True, False))
        try:
            attention(q, q, q, **options)
        except ValueError as refusal:
            with pytest.raises(torch._dynamo.exc.Unsupported) as words:
                whole(q, q, q, **options)
            assert str(refusal).split("\n")[0].partition(" (")[0] in str(words.value)
            with pytest.raises(type(refusal)) as error:
                parts(q, q, q, **options)
            assert str(error.value) == str(refusal)
            return
        whole(q, q, q, **options)
    pytest.fail("the last one makes no sense")


@pytest.mark.parametrize("name", OWN)
def test_the_compiled_checks_are_in_no_graph(name: str) -> None:
    """But for guards: with them, too, one graph serves all lengths."""
    torch._dynamo.reset()
    attention, graphs = build(name), CompileCounterWithBackend("eager")
    compiled = torch.compile(attention, fullgraph=True, backend=graphs)
    for tokens in (64, 96, 128):
        q = torch.randn(1, 2, tokens, 8)
        torch._dynamo.mark_dynamic(q, 2)
        compiled(q, q, q)
    assert graphs.frame_count == 1
    attention._check_traced = lambda *call: None
    torch._dynamo.reset()
    torch.compile(attention, fullgraph=True, backend=graphs)(q, q, q)
    checked, unchecked = ([str(node.target) for node in graph.graph.nodes] for graph in graphs.graphs)
    assert checked == unchecked


def test_compiled_it_takes_a_number_of_numpy() -> None:
    torch._dynamo.reset()
    attention, q, scale = build("naive"), torch.randn(1, 2, 9, 8), np.float64(0.3)
    compiled = torch.compile(attention, backend="eager")
    torch.testing.assert_close(compiled(q, q, q, scale=scale), attention(q, q, q, scale=0.3))


def test_a_compiled_call_is_checked_again_once_determinism_is_asked_for() -> None:
    torch._dynamo.reset()
    attention, q = build("tiled"), torch.randn(1, 2, 9, 8, requires_grad=True)
    attention.capabilities = replace(attention.capabilities, deterministic=False)
    for call in (attention, torch.compile(attention, backend="eager")):
        for warn_only in (True, False):
            torch.use_deterministic_algorithms(True, warn_only=warn_only)
            try:
                if warn_only:
                    call(q, q, q)
                else:
                    with pytest.raises(UnsupportedAttention, match="no deterministic backward"):
                        call(q, q, q)
            finally:
                torch.use_deterministic_algorithms(False)


def test_a_compiled_call_on_a_cache_is_checked() -> None:
    torch._dynamo.reset()
    data, scale = quantise(torch.randn(1, 2, 16, 8), "int8")
    side = CachedTensor(data, scale.transpose(-2, -1).contiguous())
    q, view = torch.randn(1, 2, 1, 8), CacheView(side, side, torch.tensor([9], dtype=torch.int32))
    compiled = {name: torch.compile(build(name), backend="eager") for name in ("sdpa", "tiled")}
    torch.testing.assert_close(compiled["tiled"](q, view), build("naive")(q, view))
    with pytest.raises(UnsupportedAttention, match="no int8 cache"):
        compiled["sdpa"](q, view)
    with pytest.raises(ValueError, match="dropout_p with a CacheView"):
        compiled["tiled"](q, view, dropout_p=0.5)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", NAMES)
def test_one_query_sees_every_key(name: str, device: str) -> None:
    """Causal is aligned bottom-right: with Tq = 1 and Tk = 5 it changes nothing (top-left would show one
    key).
    """
    attention, dtype = capable(name, Case("decode", 1, 5), device)
    inputs = make_inputs(Case("decode", 1, 5), device, dtype)
    q, k, v = inputs.q, inputs.k, inputs.v
    weights = torch.softmax(q.double() @ k.double().transpose(-2, -1) / 8, dim=-1)
    tolerance = 1e-5 if dtype == torch.float32 else 3e-2
    torch.testing.assert_close(
        attention(q, k, v).double(), weights @ v.double(), atol=tolerance, rtol=tolerance
    )


RACES = [
    ("cpu", Case("race", 113, 113)),
    *(("cuda", Case("race", *shape)) for shape in ((113, 113), (1023, 1023, 128), (1, 8195, 128))),
]


@pytest.mark.parametrize(
    ("device", "case"),
    [pytest.param(*race, marks=[pytest.mark.gpu] * (race[0] == "cuda")) for race in RACES],
    ids=lambda part: part if isinstance(part, str) else part.id,
)
@pytest.mark.parametrize("name", NAMES)
def test_determinism_where_declared(name: str, device: str, case: Case) -> None:
    """The same call, bit for bit, forward and backward: also how a race in a kernel shows. One query against
    many keys is how a cache is read.
    """
    attention, dtype = capable(name, case, device, None if device == "cpu" else torch.bfloat16)
    inputs = make_inputs(case, device, dtype)
    leaves = (inputs.q, inputs.k, inputs.v)

    def call() -> tuple[torch.Tensor, ...]:
        out = attention(*leaves)
        if not attention.capabilities.deterministic:
            return (out,)
        return out, *torch.autograd.grad(out, leaves, inputs.dout)

    first = call()
    once = name == "triton"  # on a CPU: its interpreter takes one program after the other
    for _ in range(200 if device == "cuda" else 1 if once else 5):
        assert all(map(torch.equal, call(), first))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", NAMES)
def test_dropout_in_expectation(name: str, device: str) -> None:
    """The mean over many masks is the output without dropout; a seed gives the same mask again."""
    attention, dtype = capable(name, Case("dropout", 16, 16, 32, features=frozenset({"dropout"})), device)
    inputs = make_inputs(Case("dropout", 16, 16, 32), device, dtype)
    q, k, v = inputs.q.detach(), inputs.k.detach(), inputs.v.detach()
    # A call in triton's interpreter takes 0.1 s; its mask is naive's, by value, in tests/ops/test_library.py.
    n = 25 if name == "triton" and device == "cpu" else 400
    torch.manual_seed(0)
    draws = torch.stack([attention(q, k, v, dropout_p=0.3).double() for _ in range(n)])
    torch.manual_seed(0)
    assert torch.equal(attention(q, k, v, dropout_p=0.3).double(), draws[0])
    assert not torch.equal(draws[0], draws[1])
    error = (draws.mean(0) - attention(q, k, v).double()).abs()
    # Six standard errors of 16,384 means; a query with a single key varies as any other.
    rounding = 1e-5 if dtype == torch.float32 else 1e-2
    assert (error < 6 * draws.std(0) / n**0.5 + rounding).all()


GRADCHECKS = [
    (),
    *((f,) for f in CROSSED),
    *itertools.combinations(("softcap", "bias_grad", "dropout", "gqa"), 2),
]


@pytest.mark.parametrize("features", GRADCHECKS, ids="-".join)
@pytest.mark.parametrize("name", OWN)
def test_gradcheck(name: str, features: tuple[str, ...]) -> None:
    attention = build(name)
    if name == "tiled":
        attention.block_q, attention.block_k = 3, 2
    kv_heads = 1 if "gqa" in features else 2
    case = Case(
        "grad", 5, 7, 3, 2, 2, kv_heads, frozenset(features) - {"gqa"}, blind="kv_lengths" in features
    )
    inputs = make_inputs(case, "cpu", torch.float64)
    leaves = inputs.leaves()
    # NaN beyond kv_lengths has no finite difference.
    leaves = {n: x.detach().nan_to_num(0.5).requires_grad_() for n, x in leaves.items()}

    def function(*tensors: torch.Tensor) -> torch.Tensor:
        given = dict(zip(leaves, tensors, strict=True))
        options = inputs.options | ({"bias": given["bias"]} if "bias" in given else {})
        torch.manual_seed(0)
        return attention(given["q"], given["k"], given["v"], **options)

    assert torch.autograd.gradcheck(function, tuple(leaves.values()), fast_mode=True)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", NAMES)
def test_autocast_changes_nothing(name: str, device: str) -> None:
    """The inputs' dtype is the caller's decision, and fp32 inside stays fp32."""
    case = Case("autocast", 20, 20, 16)
    attention, dtype = capable(name, case, device, torch.float32)
    inputs = make_inputs(case, device, dtype)
    expected = attention(inputs.q, inputs.k, inputs.v)
    with torch.autocast(device, torch.bfloat16):
        out = attention(inputs.q, inputs.k, inputs.v)
    assert torch.equal(out, expected) and out.dtype == torch.float32
    torch.testing.assert_close(
        torch.autograd.grad(out, inputs.q, inputs.dout), torch.autograd.grad(expected, inputs.q, inputs.dout)
    )


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("name", NAMES)
def test_autocast_to_other_16_bits_changes_nothing(name: str, compiled: bool) -> None:
    attention, q = build(name), torch.randn(1, 2, 20, 16).half()
    if reasons := attention.unsupported_reasons(AttentionCall.of(q, q, q, AttentionOptions())):
        pytest.skip("; ".join(reasons))
    expected = attention(q, q, q)
    torch._dynamo.reset()
    call = torch.compile(attention, fullgraph=True, backend="eager") if compiled else attention
    with torch.autocast("cpu", torch.bfloat16):
        out = call(q, q, q)
    assert out.dtype == torch.float16 and torch.equal(out, expected)


def test_auto_runs_as_if_asked_for_by_name() -> None:
    """Dropout included: it draws what its choice draws, and nothing else."""
    inputs = make_inputs(Case("auto", 20, 20, 16), "cpu", torch.float32)
    auto = build("auto")
    chosen = auto.resolve(AttentionCall.of(inputs.q, inputs.k, inputs.v, AttentionOptions(dropout_p=0.5)))
    results = []
    for attention in (auto, build(chosen.name)):
        torch.manual_seed(0)
        results.append((attention(inputs.q, inputs.k, inputs.v, dropout_p=0.5), torch.rand(1)))
    assert torch.equal(results[0][0], results[1][0]) and torch.equal(results[0][1], results[1][1])


@pytest.mark.parametrize("name", OWN)
def test_no_keys_leave_the_bias_a_gradient(name: str) -> None:
    q, k, bias = torch.randn(1, 2, 3, 4), torch.randn(1, 2, 0, 4), torch.randn(2, 3, 1, requires_grad=True)
    out = build(name)(q, k, k, bias=bias)
    assert not out.any() and not torch.autograd.grad(out.sum(), bias)[0].any()


def test_the_criterion_can_fail() -> None:
    """A top-left causal mask, a forgotten rescale, a leaking NaN: the grid sees each."""
    naive = build("naive")
    plain = naive.attend

    def top_left(q, k, v, options, seed):
        band = (-1, q.shape[2] - k.shape[2])
        return plain(q, k, v, options._replace(causal=False, window=band), seed)

    def unscaled(q, k, v, options, seed):
        return plain(q, k, v, options._replace(scale=options.scale * 1.01), seed)

    def leaking(q, k, v, options, seed):
        out, lse = plain(q, k, v, options, seed)
        return out + 0 * v.sum(), lse

    by_id = {case.id: case for case in CASES}
    for broken, case in (
        (top_left, replace(by_id["shape-128x217-d64"], tq=217, tk=128)),
        (unscaled, by_id["shape-128x128-d64"]),
        (leaking, by_id["feature-113x203-d64-kv_lengths"]),
    ):
        naive.attend = broken
        assert max(run_case(naive, case, "cpu", torch.float32).values()) > 1, broken
        naive.attend = plain
        assert max(run_case(naive, case, "cpu", torch.float32).values()) <= 1


def test_sdpa_training_call_is_bare() -> None:
    """The hot path: one op, no masks, no copies."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class Ops(TorchDispatchMode):
        names: list[str] = []  # noqa: RUF012

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            self.names.append(str(func))
            return func(*args, **(kwargs or {}))

    q = torch.randn(2, 16, 4, 32).transpose(1, 2)
    with Ops() as ops:
        build("sdpa")(q, q, q)
    assert [name for name in ops.names if "detach" not in name] == [
        "aten._scaled_dot_product_flash_attention_for_cpu.default"
    ]
