"""FlexAttention's own: gradients, how often it compiles, what it refuses.

Values on the grid: test_grid.py; tile lists and masks: test_flex_masks.py. PyTorch refuses gradients on a
CPU, though its dense form has them: here that refusal is lifted, to check them without a GPU.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from attention import flex
from attention.base import AttentionCall, UnsupportedAttention
from attention.flex import FlexAttention
from tests.attention.criterion import error_ratios, run_case
from tests.grid import Case, Inputs, build, make_inputs

pytestmark = pytest.mark.sampled(5)


@pytest.fixture(name="gradients_on_cpu")
def lift_refusal(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch.nn.attention.flex_attention as library

    monkeypatch.setattr(library, "_validate_device", lambda *tensors: None)


def arguments_of(case: Case, dtype: torch.dtype = torch.float32) -> tuple[Inputs, tuple]:
    """A case's inputs, and what FlexAttention.attend makes of them for `flex.flex`."""
    inputs = make_inputs(case, "cpu", dtype)
    asked = []

    def record(*arguments: object) -> tuple[Tensor, None]:
        asked.append(arguments)
        return torch.zeros_like(inputs.q), None

    with pytest.MonkeyPatch.context() as patch, torch.no_grad():
        patch.setattr(flex, "flex", record)
        FlexAttention()(inputs.q, inputs.k, inputs.v, **inputs.options)
    return inputs, (inputs.q, inputs.k, inputs.v, *asked[0][3:])


def run(arguments: tuple, run: Callable = flex._run, backend: str = "eager") -> Tensor:
    """As on CUDA, with a backend that generates no code."""
    out, _ = run(*arguments[:4], *arguments[5:], backend=backend)  # makes the lists of tiles itself
    return out


def forget() -> None:
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    for made in (flex._STATIC, flex._STATIC_COUNT, flex._RECENT._made):
        made.clear()
    flex._compiled.cache_clear()


def graphs() -> int:
    return torch._dynamo.utils.counters["stats"]["unique_graphs"]


FEATURES = [(), ("noncausal",), ("softcap",), ("alibi",), ("bias_grad",), ("document_ids",), ("kv_lengths",)]
FEATURES += [
    ("relative_bias",),
    ("relative_bias", "kv_lengths", "noncausal"),
    ("window", "noncausal"),
    ("kv_lengths", "alibi", "softcap"),
]
FEATURES += [("bias_grad", "softcap", "document_ids"), ("block_mask", "noncausal")]


@pytest.mark.parametrize("features", FEATURES, ids="-".join)
def test_gradients(features: tuple[str, ...], gradients_on_cpu: None) -> None:
    """Against naive; NaN beyond kv_lengths and rows without a key included."""
    blind = features == ("kv_lengths",)
    tokens = (150, 260) if "block_mask" in features else (40, 67)
    case = Case("grad", *tokens, 16, kv_heads=2, features=frozenset(features), blind=blind)
    inputs, arguments = arguments_of(case)
    leaves = list(inputs.leaves().values())
    expected = build("naive")(inputs.q, inputs.k, inputs.v, **inputs.options)
    wanted = torch.autograd.grad(expected, leaves, inputs.dout)
    q, k, v, numbers, *rest = arguments
    for limits in (numbers, numbers.tensors(2, q.device)):
        out, _ = flex.flex(q, k, v, limits, *rest)
        torch.testing.assert_close(out, expected)
        got = torch.autograd.grad(out, leaves, inputs.dout)
        torch.testing.assert_close(got, wanted, atol=2e-5, rtol=1e-5)


@pytest.mark.long
def test_one_compilation_for_all_lengths_and_limits(gradients_on_cpu: None) -> None:
    """As on CUDA, with a backend that asks nothing about a size: the first lengths, then all others, whatever
    the mask. Other batches, heads and scales, compiled before, change nothing.
    """
    forget()
    for other in (Case("other", 20, 30, 8, batch=3), Case("other", 20, 30, 32, heads=2, kv_heads=1)):
        run(arguments_of(other)[1])
    cases = [Case("compile", tq, tk, 16) for tq, tk in ((128, 128), (113, 203), (3, 300), (300, 40))]
    cases += [Case("compile", 50, 170, 16, features=frozenset({"window", "noncausal"}))]
    for case in cases:
        inputs, arguments = arguments_of(case)
        leaves = list(inputs.leaves().values())
        out = run(arguments, backend="aot_eager")
        expected = build("naive")(inputs.q, inputs.k, inputs.v, **inputs.options)
        torch.testing.assert_close(out, expected)
        got = torch.autograd.grad(out, leaves, inputs.dout)
        torch.testing.assert_close(
            got, torch.autograd.grad(expected, leaves, inputs.dout), atol=2e-5, rtol=1e-5
        )
    assert flex._compiled.cache_info().currsize == 3
    assert graphs() == 4 and not flex._STATIC
    for tq, tk in ((40, 50), (60, 90)):  # another kind of these sizes: lengths are known to vary
        run(arguments_of(Case("compile", tq, tk, 16, features=frozenset({"alibi"})))[1])
        assert graphs() == 5


def test_each_kind_of_call_has_its_own_kernel() -> None:
    _, base = arguments_of(Case("kind", 20, 30, 16))
    *rest, options = base
    heads_last = base[0].transpose(1, 2).contiguous().transpose(1, 2)
    others = [
        (*rest, options._replace(scale=2 * options.scale)),
        (heads_last, *base[1:]),
        arguments_of(Case("kind", 20, 30, 16, features=frozenset({"alibi"})))[1],
        arguments_of(Case("kind", 20, 30, 16, features=frozenset({"noncausal"})))[1],  # no mask
        arguments_of(Case("kind", 20, 30, 16, kv_heads=2))[1],
        arguments_of(Case("kind", 20, 30, 16), torch.bfloat16)[1],
    ]
    kinds = []

    def compiled(kind: tuple, backend: str) -> Callable:
        return lambda *arguments: (kinds.append(kind), None)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(flex, "_compiled", compiled)
        for arguments in (base, arguments_of(Case("kind", 21, 77, 16))[1], *others):
            run(arguments)
    assert kinds[0] == kinds[1]
    assert len(set(kinds)) == 1 + len(others)


@pytest.mark.long
def test_traced_in_one_graph_with_dynamic_length(gradients_on_cpu: None) -> None:
    """What test_contract.py asks on CUDA, where gradients are allowed."""
    attention = FlexAttention()
    attention.unsupported_reasons = lambda call: []
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    compiled = torch.compile(attention, fullgraph=True, backend="aot_eager")
    for tokens in (64, 96, 300):
        inputs = make_inputs(Case("compile", tokens, tokens, 16), "cpu", torch.float32)
        leaves = (inputs.q, inputs.k, inputs.v)
        for t in leaves:
            torch._dynamo.mark_dynamic(t, 2)
        out, expected = compiled(*leaves), build("naive")(*leaves)
        torch.testing.assert_close(out, expected)
        got = torch.autograd.grad(out, leaves, inputs.dout)
        wanted = torch.autograd.grad(expected, leaves, inputs.dout)
        torch.testing.assert_close(got, wanted, atol=2e-5, rtol=1e-5)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1


def test_the_limits_of_a_traced_window_are_symbols() -> None:
    """A mask may hold no expression of what varies (Inductor of torch 2.11: no attribute dtype)."""
    captured: list[Any] = []

    def backend(graph: torch.fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        (call,) = (node for node in graph.graph.nodes if node.target is torch.ops.higher_order.flex_attention)
        captured.append([x.meta["example_value"] for x in call.args[-1] if isinstance(x, torch.fx.Node)])
        return graph.forward

    torch._dynamo.reset()
    compiled = torch.compile(FlexAttention(), fullgraph=True, backend=backend)
    q = torch.randn(1, 1, 64, 16)
    for window in ((9, 5), (20, 11)):  # what has changed is dynamic
        compiled(q, q, q, causal=False, window=window)
    limits = [x for x in captured[1] if isinstance(x, torch.SymInt)]
    assert len(limits) == 2 and all(x.node.expr.is_Symbol for x in limits), limits


def test_made_in_validation_serves_training(gradients_on_cpu: None) -> None:
    """A tensor made in inference mode cannot be saved for a backward."""
    forget()
    with torch.inference_mode():
        for tokens in (30, 512):
            run(arguments_of(Case("inference", tokens, tokens, 16))[1])
        # Lengths that count no versions are not remembered.
        run(arguments_of(Case("inference", 20, 30, 16, features=frozenset({"kv_lengths"})))[1])
    (_, (limits, lists)) = flex._RECENT._made.popitem()[1]
    ((_, _, static),) = flex._STATIC.values()
    assert not any(t.is_inference() for t in (*limits, *lists, *static)) and not flex._RECENT._made


def _call(device: str = "cuda", **changes: object) -> AttentionCall:
    cuda = {"device": device, "arch": (9, 0) if device == "cuda" else None, "dtype": torch.bfloat16}
    shape = {"batch": 1, "heads": 4, "kv_heads": 4, "tq": 16_384, "tk": 16_384, "head_dim": 64}
    return AttentionCall("training", **(cuda | shape | {"backward": True} | changes))


SMALL = {"tq": 16, "tk": 16}


def test_refuses_to_run_uncompiled_on_long_inputs() -> None:
    attention = FlexAttention()
    assert attention.unsupported_reasons(_call()) == []
    assert attention.unsupported_reasons(_call("cpu", backward=False, tq=2048, tk=8192)) == []
    (reason,) = attention.unsupported_reasons(_call("cpu", backward=False, tq=2049, tk=8192))
    assert "67,141,632 scores" in reason and "seq_len" in reason
    long = torch.zeros(1, 1, 8193, 1)
    with pytest.raises(UnsupportedAttention, match="PyTorch makes them all"):
        attention(long, long, long)
    with torch._dynamo.config.patch(disable=True):
        assert "torch.compile" in attention.unsupported_reasons(_call())[0]


@pytest.mark.parametrize(
    ("call", "word"),
    [
        (_call("cpu", **SMALL), "no backward on a CPU"),
        (_call(dtype=torch.float32, features=frozenset({"lse"})), "no float32 on cuda: needs float16"),
        (
            _call("cpu", **SMALL, dtype=torch.float32, backward=False, features=frozenset({"lse"})),
            "no lse in float32",
        ),
        (_call(head_dim=8), "no head dim 8: needs at least 16"),
        (_call(head_dim=320), "no head dim 320: needs at most 256"),
        (_call(features=frozenset({"dropout"})), "no dropout"),
        (_call(arch=(7, 5)), "no sm_75"),
        (_call(dtype=torch.float64), "no float64"),
    ],
)
def test_refusals(call: AttentionCall, word: str) -> None:
    (reason,) = FlexAttention().unsupported_reasons(call)
    assert word in reason


def _cuda(case: Case) -> Inputs:
    return make_inputs(case, "cuda", torch.bfloat16)


@pytest.mark.alone
@pytest.mark.gpu
def test_memory_is_linear() -> None:
    """16,384 tokens, forward and backward: all scores of 8 heads would be 8.6 GB in fp32."""
    inputs = _cuda(Case("memory", 16_384, 16_384, batch=1, heads=8, kv_heads=8))
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    FlexAttention()(inputs.q, inputs.k, inputs.v).backward(inputs.dout)
    assert torch.cuda.max_memory_allocated() - before < 300 * 2**20


@pytest.mark.gpu
def test_decoding_in_a_cuda_graph_follows_kv_lengths() -> None:
    attention = FlexAttention()
    inputs = _cuda(Case("decode", 1, 700, features=frozenset({"kv_lengths"})))
    q, k, v = (t.detach().nan_to_num() for t in (inputs.q, inputs.k, inputs.v))
    lengths = torch.tensor([1, 700], dtype=torch.int32, device="cuda")
    with torch.no_grad():
        attention(q, k, v, kv_lengths=lengths)  # compiles
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = attention(q, k, v, kv_lengths=lengths)
        for now in ([1, 700], [650, 3], [129, 128]):
            lengths.copy_(torch.tensor(now, dtype=torch.int32))
            graph.replay()
            expected = build("naive")(q, k, v, kv_lengths=lengths)
            torch.testing.assert_close(out, expected, atol=2e-2, rtol=2e-2)


@pytest.mark.gpu
def test_no_synchronisation() -> None:
    attention = FlexAttention()
    inputs = _cuda(Case("sync", 300, 700, features=frozenset({"kv_lengths", "document_ids"})))

    def step() -> None:
        out = attention(inputs.q, inputs.k, inputs.v, **inputs.options)
        torch.autograd.grad(out, (inputs.q, inputs.k, inputs.v), inputs.dout)

    step()  # compiles
    inputs.options["kv_lengths"].add_(0)  # a new version: everything is made anew
    torch.cuda.set_sync_debug_mode("error")
    try:
        step()
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.gpu
def test_compiles_at_most_three_times_for_any_lengths() -> None:
    """The first lengths, then all others with fewer than 128 queries and with more: see attention/flex.py."""
    forget()
    for n, tq, tk in ((1, 128, 128), (2, 113, 203), (3, 300, 301), (3, 70, 1000), (3, 999, 999), (3, 17, 5)):
        assert max(run_case(FlexAttention(), Case("compile", tq, tk), "cuda", torch.bfloat16).values()) <= 1
        assert graphs() == n


@pytest.mark.gpu
@pytest.mark.parametrize("options", [{}, {"kv_lengths": torch.tensor([700] * 16, dtype=torch.int32)}])
def test_one_query_runs_the_decoding_kernel(options: dict) -> None:
    """For each batch and length, after others: its splits are reduced by kernels of their own."""
    attention = FlexAttention()
    options = {name: x.cuda() for name, x in options.items()}
    for batch, tk in ((1, 700), (16, 700), (16, 1024), (16, 1111)):
        inputs = _cuda(Case("decode", 1, tk, 128, batch=batch, heads=8, kv_heads=2))
        now = {name: x[:batch].clone() for name, x in options.items()}
        with torch.no_grad():
            attention(inputs.q, inputs.k, inputs.v, **now)  # compiles
            with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
                attention(inputs.q, inputs.k, inputs.v, **now)
        names = [event.key for event in profile.key_averages()]
        assert sum("flex_attention" in name for name in names) > 1, names


@pytest.mark.gpu
@pytest.mark.parametrize(
    "features", [(), ("document_ids",), ("window", "noncausal"), ("kv_lengths", "alibi")]
)
def test_inside_a_compiled_step(features: tuple[str, ...]) -> None:
    """Traced into the caller's graph and generated there, for a second pair of lengths too."""
    torch._dynamo.reset()  # all cases compile the same code object, which has a limit of eight
    compiled = torch.compile(FlexAttention(), fullgraph=True)
    for tq, tk in ((256, 256), (113, 203), (300, 400)):
        case = Case("step", tq, tk, features=frozenset(features))
        inputs = _cuda(case)
        leaves = inputs.leaves()
        out = compiled(inputs.q, inputs.k, inputs.v, **inputs.options)
        grads = torch.autograd.grad(out, list(leaves.values()), inputs.dout)
        got = {"out": out.detach()} | {f"d{x}": grad for x, grad in zip(leaves, grads, strict=True)}
        assert max(error_ratios(got, case, "cuda", torch.bfloat16).values()) <= 1
