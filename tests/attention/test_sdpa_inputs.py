"""What SDPA's CUDA kernels need of their inputs and do not check: stood in for on a CPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from attention import sdpa
from attention.naive import NaiveAttention
from attention.sdpa import SDPAAttention
from tests.attention.test_sdpa import PLAIN
from tests.grid import laid_out


class _Fused(torch.autograd.Function):
    """A CUDA kernel's demands, of what it is given in forward and backward."""

    @staticmethod
    def forward(ctx: Any, *qkv: torch.Tensor) -> torch.Tensor:
        assert all(_aligned(x) for x in qkv)
        ctx.save_for_backward(*qkv)
        return qkv[0].clone()

    @staticmethod
    def backward(ctx: Any, dout: torch.Tensor) -> tuple[torch.Tensor, ...]:
        assert _aligned(dout)
        return dout.clone(), *map(torch.zeros_like, ctx.saved_tensors[1:])


def _aligned(x: torch.Tensor) -> bool:
    return x.data_ptr() % 16 == 0 and x.stride(-1) == 1 and not any(s % 8 for s in x.stride()[:-1])


@pytest.mark.parametrize("layout", ["odd", "packed"])
def test_kernels_get_rows_that_begin_at_16_bytes(layout: str, monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[torch.Tensor] = []

    def kernel(q: Any, k: Any, v: Any, *rest: Any, **options: Any) -> Any:
        given.extend((q, k, v))
        return _Fused.apply(q, k, v)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", kernel)
    monkeypatch.setattr(sdpa, "_reads_in_place", lambda q: True)
    tensors = [laid_out(torch.randn(2, 3, 5, 16, dtype=torch.bfloat16), layout) for _ in range(4)]
    q, k, v, dout = (x.requires_grad_() for x in tensors)
    out, _ = SDPAAttention("efficient").attend(q, k, v, PLAIN, None)
    dq, dk, _ = torch.autograd.grad(out, (q, k, v), dout)
    assert torch.equal(given[0], q) and torch.equal(dq, dout) and not dk.any()
    copied = {x.data_ptr() != y.data_ptr() for x, y in zip(given, (q, k, v), strict=True)}
    assert copied == {layout == "odd"}  # what can be read as it is, is


@pytest.mark.parametrize("compiled", [False, True])
def test_a_bias_alone_may_have_a_gradient(compiled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The backward of `efficient` reads an lse, which PyTorch keeps only where q, k or v has a gradient."""
    seen: list[bool] = []
    real = torch.nn.functional.scaled_dot_product_attention
    monkeypatch.setattr(sdpa, "_reads_in_place", lambda q: True)
    q, bias = torch.randn(2, 3, 5, 16), torch.randn(5, 5, requires_grad=True)

    def kernel(q: Any, *rest: Any, **options: Any) -> Any:
        seen.append(q.requires_grad)
        return real(q, *rest, **options)

    def gradient(attend: Any) -> torch.Tensor:
        out, _ = attend(q, q, q, PLAIN._replace(bias=bias), None)
        return torch.autograd.grad(out.square().sum(), bias)[0]

    expected = gradient(SDPAAttention("math").attend)
    if compiled:
        attend = torch.compile(SDPAAttention("auto").attend, fullgraph=True, backend="aot_eager")
    else:
        attend = SDPAAttention("auto").attend
        monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", kernel)
    torch.testing.assert_close(gradient(attend), expected)
    assert seen == ([] if compiled else [True])


@pytest.mark.parametrize(
    ("dtype", "options"),
    [
        (torch.float16, {"bias": torch.full((1,), 1e5)}),
        (torch.float16, {"relative_bias": torch.full((2, 3), -7e4)}),
        (torch.bfloat16, {"bias": 100 + torch.randn(300, 300, generator=torch.Generator().manual_seed(0))}),
        (
            torch.bfloat16,
            {
                "causal": False,
                "alibi_slopes": torch.tensor([3.0, 0.7]),
                "kv_lengths": torch.tensor([40], dtype=torch.int32),
            },
        ),
    ],
)
def test_what_is_added_to_scores_may_be_large(dtype: torch.dtype, options: dict[str, Any]) -> None:
    """In 16 bits, as SDPA takes it, its differences within a row would be lost, or it would overflow."""
    generator = torch.Generator().manual_seed(1)
    q, k, v = (torch.randn(1, 2, 300, 16, generator=generator).to(dtype) for _ in range(3))
    error = SDPAAttention("auto")(q, k, v, **options) - NaiveAttention()(q, k, v, **options)
    assert error.abs().max() < 0.02  # before: NaN, 2.7, 0.18 and 2.0
