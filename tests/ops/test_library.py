"""The ops of ops/library.py are whole: schema, fakes, autograd, compilation, checkpointing, CUDA graphs."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from attention.base import AttentionCall
from ops.library import unpacked
from tests.grid import build

pytestmark = pytest.mark.sampled(5)

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
TUNING = {"tiled": [4, 8], "triton": [0]}
NAMES = list(TUNING)
BATCH, HEADS, KV_HEADS, TQ, TK, D = 2, 2, 1, 20, 33, 16


def available(name: str, device: str) -> None:
    """Registers the op; skips where it does not run."""
    call = AttentionCall(
        "training", device, None, torch.float32, BATCH, HEADS, KV_HEADS, TQ, TK, D, backward=True
    )
    if reasons := build(name).unsupported_reasons(call):
        pytest.skip(f"{name} on {device}: {'; '.join(reasons)}")


def inputs(device: str, tq: int = TQ) -> tuple[Tensor, Tensor, Tensor]:
    """q, k, v in the layout of a model, (B, T, H, D) underneath."""
    generator = torch.Generator().manual_seed(0)
    shapes = ((BATCH, tq, HEADS, D), (BATCH, TK, KV_HEADS, D), (BATCH, TK, KV_HEADS, D))
    return tuple(torch.randn(s, generator=generator).to(device).transpose(1, 2) for s in shapes)


def option_sets(name: str, device: str, tq: int = TQ) -> dict[str, list[Any]]:
    """Positional options of the op: none, and all that it has; with a bias whose gradient is asked for."""
    slopes = torch.tensor([0.5, 0.125], device=device)
    bias = torch.randn(HEADS, 1, TK, generator=torch.Generator().manual_seed(1)).to(device)
    q_ids, k_ids = (
        (torch.arange(n, device=device) // 12).int().expand(BATCH, n).contiguous() for n in (tq, TK)
    )
    lengths = torch.tensor([TK, 17], dtype=torch.int32, device=device)
    blocks = torch.ones(BATCH, 1, 1, 1, dtype=torch.bool, device=device)
    table = torch.randn(HEADS, 11, generator=torch.Generator().manual_seed(2)).to(device)
    seed = torch.tensor(1234567890123, device=device)
    scale, settings = D**-0.5, TUNING[name]
    sets = {
        "plain": [None] * 8 + [scale, -1, 0, 0.0, 0.0, settings],
        "all": [
            slopes,
            bias,
            q_ids,
            k_ids,
            lengths,
            blocks,
            table,
            seed,
            scale,
            15,
            2,
            1.5,
            0.3,
            settings,
        ],
    }
    learned = [*sets["all"][1:6], table.T.clone().T.requires_grad_(), *sets["all"][7:]]  # of any strides
    sets["relative_bias"] = [None, *learned]
    sets["bias_grad"] = [None, bias.clone().requires_grad_(), *sets["plain"][2:]]
    return sets


SETS = ("plain", "all", "bias_grad", "relative_bias")
OPTIONS = [(name, which) for name, which in itertools.product(NAMES, SETS)]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("name", "which", "tq"),
    [(*each, TQ) for each in OPTIONS] + [(*each, 97) for each in OPTIONS if each[0] == "triton"],
)
def test_forward_op(name: str, which: str, tq: int, device: str) -> None:
    """20 queries of 2 heads are what triton splits the keys for, 97 are not."""
    available(name, device)
    tensors = [x.requires_grad_() for x in inputs(device, tq)]
    op = getattr(torch.ops.tilegpt, name).default
    results = torch.library.opcheck(op, (*tensors, *option_sets(name, device, tq)[which]))
    assert set(results.values()) == {"SUCCESS"} and len(results) == 4


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("name", "which"), OPTIONS)
def test_backward_op(name: str, which: str, device: str) -> None:
    available(name, device)
    tensors, options = inputs(device), option_sets(name, device)[which]
    options = [x.detach() if isinstance(x, Tensor) else x for x in options]
    forward, backward = (getattr(torch.ops.tilegpt, n).default for n in (name, f"{name}_backward"))
    out, lse = forward(*tensors, *options)
    args = (torch.randn_like(out), *tensors, out, lse, *options, which == "bias_grad")
    results = torch.library.opcheck(backward, args)
    assert set(results.values()) == {"SUCCESS"} and len(results) == 4


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("name", "which"), OPTIONS)
def test_packed_ops(name: str, which: str, device: str) -> None:
    """The gradient of qkv, in one tensor, is bitwise that of q, k and v side by side."""
    available(name, device)
    qkv = torch.randn(BATCH, TK, (HEADS + 2 * KV_HEADS) * D, device=device).requires_grad_()
    options, counts = option_sets(name, device, TK)[which], (HEADS, KV_HEADS)
    learned = [x for x in options if isinstance(x, Tensor) and x.requires_grad]
    op, packed = (getattr(torch.ops.tilegpt, n).default for n in (name, f"{name}_packed"))
    outs = op(*unpacked(qkv, *counts), *options), packed(qkv, *options, *counts)
    dout = torch.randn_like(outs[0][0])
    plain, ours = (torch.autograd.grad(out, [qkv, *learned], dout) for out, _ in outs)
    for ours_of, plain_of in zip((*ours, *outs[1]), (*plain, *outs[0]), strict=True):
        assert torch.equal(ours_of, plain_of) and ours_of.stride() == plain_of.stride()
    assert set(torch.library.opcheck(packed, (qkv, *options, *counts)).values()) == {"SUCCESS"}
    options = [x.detach() if isinstance(x, Tensor) else x for x in options]
    out, lse = (x.detach() for x in outs[1])
    args = (dout, qkv.detach(), out, lse, *options, *counts, which == "bias_grad")
    backward = getattr(torch.ops.tilegpt, f"{name}_packed_backward").default
    assert set(torch.library.opcheck(backward, args).values()) == {"SUCCESS"}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", NAMES)
def test_no_second_derivative(name: str, device: str) -> None:
    available(name, device)
    q, k, v = (x.requires_grad_() for x in inputs(device))
    (dq,) = torch.autograd.grad(build(name)(q, k, v).square().sum(), q, create_graph=True)
    with pytest.raises(NotImplementedError, match=f"tilegpt::{name} has no second derivative"):
        dq.sum().backward()


def gradients(run: Any, device: str) -> tuple[Tensor, ...]:
    """out, dq, dk, dv of `run(q, k, v)` from the same seed."""
    leaves = tuple(x.requires_grad_() for x in inputs(device))
    torch.manual_seed(7)
    out = run(*leaves)
    return out, *torch.autograd.grad(out.square().sum(), leaves)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", ("naive", *NAMES))
def test_checkpointing_keeps_the_dropout_mask(name: str, device: str) -> None:
    """What is recomputed for the backward drops what the forward dropped."""
    if name != "naive":
        available(name, device)
    attention = build(name)

    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attention(q, k, v, dropout_p=0.4)

    def recomputed(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return checkpoint(run, q, k, v, use_reentrant=False)

    plain, again = gradients(run, device), gradients(recomputed, device)
    assert all(map(torch.equal, plain, again))
    assert not torch.equal(plain[0], gradients(lambda *x: attention(*x), device)[0])


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", NAMES)
def test_own_implementations_drop_the_same(name: str, device: str) -> None:
    """One mask for all, by value."""
    available(name, device)
    reference = build("naive")
    expected = gradients(lambda *x: reference(*x, dropout_p=0.4), device)
    got = gradients(lambda *x: build(name)(*x, dropout_p=0.4), device)
    for ours, theirs in zip(got, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


@pytest.mark.gpu
@pytest.mark.parametrize("name", NAMES)
def test_dropout_in_a_cuda_graph(name: str) -> None:
    """Each replay draws a seed of its own, as each eager call does."""
    available(name, "cuda")
    q, k, v = inputs("cuda")
    attention = build(name)
    attention(q, k, v, dropout_p=0.5)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = attention(q, k, v, dropout_p=0.5)
    draws = []
    for _ in range(2):
        graph.replay()
        draws.append(out.clone())
    assert not torch.equal(*draws) and draws[0].isfinite().all()
