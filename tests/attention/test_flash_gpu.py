"""The real flash-attn library, where it is installed: what the grid and the contract's tests do not ask."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from attention.base import AttentionCall
from attention.flash_lib import FlashLibAttention
from attention.flash_versions import VERSIONS

pytestmark = pytest.mark.gpu


def capable(version: int, features: frozenset[str] = frozenset(), **options: Any) -> FlashLibAttention:
    attention = FlashLibAttention(version, **options)
    arch = torch.cuda.get_device_capability()
    call = AttentionCall(
        "training", "cuda", arch, torch.bfloat16, 2, 4, 4, 128, 128, 64, features=features, backward=True
    )
    if reasons := attention.unsupported_reasons(call):
        pytest.skip("; ".join(reasons))
    return attention


def projection(tokens: int = 128) -> tuple[torch.Tensor, ...]:
    """q, k, v (2, 4, T, 64) as in the model: views of one (B, T, 3C)."""
    g = torch.Generator("cuda").manual_seed(0)
    qkv = torch.randn(2, tokens, 3 * 256, dtype=torch.bfloat16, device="cuda", generator=g)
    qkv.requires_grad_()
    return tuple(x.view(2, tokens, 4, 64).transpose(1, 2) for x in qkv.split(256, dim=2))


def document_ids(tokens: int = 128) -> torch.Tensor:
    return (torch.arange(tokens, dtype=torch.int32, device="cuda") // 50).expand(2, tokens).contiguous()


@pytest.mark.parametrize("documents", [False, True])
def test_dropout_backward_has_the_forwards_mask(documents: bool) -> None:
    """For one mask out is linear in v: <out, dout> = <v, dv>. With another it would miss by tens.

    And the device's generator is put back.
    """
    attention = capable(2, frozenset({"dropout", "document_ids"}))
    q, k, v = projection()
    options = {"dropout_p": 0.5, "document_ids": document_ids() if documents else None}
    torch.manual_seed(1)
    state = torch.cuda.get_rng_state()
    out = attention(q, k, v, **options)
    assert torch.equal(torch.cuda.get_rng_state(), state)
    dout = torch.randn_like(out)
    dv = torch.autograd.grad(out, v, dout)[0]
    got, expected = ((a.double() * b.double()).sum() for a, b in ((out, dout), (v, dv)))
    assert abs(float(got - expected)) < 2
    torch.manual_seed(1)
    assert torch.equal(out, attention(q, k, v, **options))
    assert not torch.equal(out, attention(q, k, v, **options))


@pytest.mark.parametrize("version", VERSIONS)
def test_deterministic_backward(version: int) -> None:
    attention = capable(version, deterministic=True)
    q, k, v = projection(1024)
    out = attention(q, k, v)
    dout = torch.randn_like(out)
    first = torch.autograd.grad(out, (q, k, v), dout, retain_graph=True)
    for _ in range(50):
        again = torch.autograd.grad(out, (q, k, v), dout, retain_graph=True)
        assert all(map(torch.equal, first, again))


@pytest.mark.alone
@pytest.mark.parametrize("version", VERSIONS)
def test_nothing_is_copied(version: int) -> None:
    """Forward allocates out and lse; a copy of q alone would double that."""
    attention = capable(version)
    q, k, v = projection(2048)
    attention(q, k, v)  # compiled and loaded
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    out = attention(q, k, v)
    lse_bytes = 4 * out.numel() // 64
    assert torch.cuda.max_memory_allocated() - before <= 1.2 * (out.nbytes + lse_bytes)
    assert out.transpose(1, 2).is_contiguous()


@pytest.mark.parametrize("version", VERSIONS)
def test_documents_compile_and_are_refused_in_a_graph(version: int) -> None:
    attention = capable(version, frozenset({"document_ids"}))
    q, k, v = projection()
    compiled = torch.compile(attention, fullgraph=True)
    expected = attention(q, k, v, document_ids=document_ids())
    torch.testing.assert_close(compiled(q, k, v, document_ids=document_ids()), expected)
    alone = attention(*(x[:, :, :50] for x in (q, k, v)))
    torch.testing.assert_close(expected[:, :, :50], alone, atol=1e-2, rtol=1e-2)
    ids = document_ids()
    with pytest.raises(ValueError, match="CUDA graph"), torch.cuda.graph(torch.cuda.CUDAGraph()):
        attention(q.detach(), k.detach(), v.detach(), document_ids=ids)
