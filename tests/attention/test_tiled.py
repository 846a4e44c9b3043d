"""What is special about tiled: its tiles, its running softmax, its memory, its ops."""

from __future__ import annotations

import itertools
from collections import Counter

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from attention.geometry import tile_kind, tiles
from attention.naive import NaiveAttention
from attention.tiled import TiledAttention, online_softmax_step
from ops.options import AttentionOptions, gathered

pytestmark = pytest.mark.sampled(3)


def test_tiles_of_a_causal_grid() -> None:
    """4 x 4 tiles: 6 full, 4 partial, 6 right of the band."""
    cut = tiles(64, 16)
    assert Counter(tile_kind(r, c, 0, (-1, 0)) for r in cut for c in cut) == {
        "full": 6,
        "partial": 4,
        "right_of_band": 6,
    }


@settings(max_examples=200, deadline=None, derandomize=True)
@given(
    st.integers(1, 12),
    st.integers(1, 12),
    st.integers(1, 5),
    st.integers(1, 5),
    st.integers(-1, 6),
    st.integers(-1, 6),
)
def test_tile_kinds_equal_the_mask(tq: int, tk: int, bq: int, bk: int, left: int, right: int) -> None:
    for rows in tiles(tq, bq):
        for cols in tiles(tk, bk):
            rel = [j - (i + tk - tq) for i in rows for j in cols]
            seen = [(right < 0 or r <= right) and (left < 0 or r >= -left) for r in rel]
            kind = tile_kind(rows, cols, tk - tq, (left, right))
            if kind == "partial":
                assert not all(seen)  # a mask for nothing
            else:
                assert all(seen) if kind == "full" else not any(seen)


def _start(rows: int, dim: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    zeros = torch.zeros(rows, 1, dtype=torch.float64)
    return zeros - torch.inf, zeros, torch.zeros(rows, dim, dtype=torch.float64)


def test_two_blocks_by_hand() -> None:
    """Scores [2, 5, 3] in blocks [2, 5] and [3]: the running sum, shifted by 5, is 1.19."""
    state = _start(1, 1)
    for block in ([2.0, 5.0], [3.0]):
        scores = torch.tensor([block], dtype=torch.float64)
        state = online_softmax_step(*state, scores, torch.ones(len(block), 1, dtype=torch.float64))
    assert state[0].item() == 5
    assert state[1].item() == pytest.approx(1.19, abs=5e-3)


@settings(max_examples=100, deadline=None, derandomize=True)
@given(st.integers(0, 10**6), st.integers(1, 5), st.integers(1, 4), st.booleans())
def test_running_state_is_that_of_the_prefix(seed: int, n_tiles: int, block: int, holes: bool) -> None:
    """After tile j, (m, l, O) are rowmax, rowsum and P V of the keys seen so far."""
    g = torch.Generator().manual_seed(seed)
    scores = 20 * torch.randn(3, n_tiles * block, generator=g, dtype=torch.float64)
    values = torch.randn(n_tiles * block, 2, generator=g, dtype=torch.float64)
    if holes:
        scores = scores.masked_fill(torch.rand(scores.shape, generator=g) < 0.5, -torch.inf)
    state = _start(3, 2)
    for cols in tiles(n_tiles * block, block):
        state = online_softmax_step(*state, scores[:, cols.start : cols.stop], values[cols.start : cols.stop])
        prefix = scores[:, : cols.stop]
        m = prefix.amax(-1, keepdim=True)
        p = torch.exp(prefix - m.masked_fill(m == -torch.inf, 0))
        torch.testing.assert_close(state[0], m)
        torch.testing.assert_close(state[1], p.sum(-1, keepdim=True))
        torch.testing.assert_close(state[2], p @ values[: cols.stop])


class LargestTensor(TorchDispatchMode):
    """The largest number of elements that any op returned."""

    largest = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for t in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(t, torch.Tensor):
                self.largest = max(self.largest, t.untyped_storage().nbytes() // t.element_size())
        return result


@pytest.mark.parametrize(
    "extras", [{}, {"dropout_p": 0.1, "softcap": 2.0, "window": (100, 0)}], ids=["plain", "all"]
)
def test_memory_is_linear(extras: dict) -> None:
    """No tensor of the forward or the backward is larger than the inputs once T is beyond a tile."""
    from attention.tiled import tiled_backward, tiled_forward

    for tokens in (256, 512, 1024):
        q, k, v, dout = (torch.randn(1, 2, tokens, 32) for _ in range(4))
        left, right = extras.get("window", (-1, 0))
        tensors = [None] * 7 + [torch.tensor(7)]
        plain = [0.2, left, right, extras.get("softcap", 0.0), extras.get("dropout_p", 0.0), [64, 64]]
        with LargestTensor() as mode:
            call = gathered((*tensors, *plain))
            out, lse = tiled_forward(q, k, v, *call)
            tiled_backward(dout, q, k, v, out, lse, *call, False)
        assert mode.largest <= max(q.numel(), 2 * 64 * 64)


def test_saves_only_what_is_linear() -> None:
    saved: list[int] = []
    q = torch.randn(1, 2, 512, 16, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t.numel()) or t, lambda t: t):
        TiledAttention(64, 64)(q, q, q, dropout_p=0.1)
    assert sum(saved) == 4 * q.numel() + 2 * 512 + 1  # q, k, v, out; lse; the seed


EXTRAS = {
    "kv_lengths": torch.tensor([0, 5], dtype=torch.int32),
    "alibi_slopes": torch.tensor([0.5, 0.25, 0.1, 0.05]),
    "bias": torch.randn(4, 1, 11, dtype=torch.float64, requires_grad=True),
    "document_ids": tuple((torch.arange(n) * 3 // n).to(torch.int32).expand(2, n) for n in (9, 11)),
    "relative_bias": torch.randn(4, 7, dtype=torch.float64, requires_grad=True),  # less than the distances
    "softcap": 2.0,
    "dropout_p": 0.3,
}


@pytest.mark.parametrize(
    "band", [{}, {"causal": False}, {"window": (2, 0)}, {"causal": False, "window": (1, 2)}]
)
def test_many_small_tiles_equal_the_reference(band: dict) -> None:
    """Tiles of 4 x 3: every option alone, in pairs, and all together, meets every kind of tile."""
    g = torch.Generator().manual_seed(0)
    leaves = [
        torch.randn(2, h, t, 8, generator=g, dtype=torch.float64) for h, t in ((4, 9), (2, 11), (2, 11))
    ]
    leaves = [x.requires_grad_() for x in leaves]
    for names in [n for size in (0, 1, 2, len(EXTRAS)) for n in itertools.combinations(EXTRAS, size)]:
        options = band | {name: EXTRAS[name] for name in names}
        inputs = [*leaves, *(EXTRAS[name] for name in names if name.endswith("bias"))]
        results = []
        for attention in (TiledAttention(4, 3), NaiveAttention()):
            torch.manual_seed(0)
            out, lse = attention(*leaves, return_lse=True, **options)
            results.append((out, lse, torch.autograd.grad(out.square().sum(), inputs)))
        torch.testing.assert_close(*results, msg=lambda words, names=names: f"{names}: {words}")


def test_other_documents_are_skipped() -> None:
    """Two documents of two tiles each: 3 tiles of the causal grid for either, 6 and not 10."""
    from attention.tiled import _TiledCall

    q = torch.randn(1, 1, 64, 8)
    ids = (torch.arange(64) // 32).to(torch.int32).view(1, -1)
    problem = _TiledCall.of(q, q, AttentionOptions(scale=1.0, document_ids=(ids, ids)), None, [16, 16])
    assert len(problem.visible_tiles()) == 6


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_queries_that_overlap(dtype: torch.dtype) -> None:
    """Windows of a row, one element apart: results as torch.compile expects them, with D innermost."""
    q = torch.randn(2, 3, 12).to(dtype).unfold(2, 8, 1).requires_grad_()  # (B, H, T, D)
    k = torch.randn(2, 3, 5, 8).to(dtype)
    out = TiledAttention()(q, k, k)
    (dq,) = torch.autograd.grad(out.sum(), q)
    assert out.stride() == dq.stride() == (120, 40, 8, 1)
    torch.testing.assert_close(out, NaiveAttention()(q, k, k))


def test_no_second_derivative() -> None:
    q = torch.randn(1, 1, 4, 4, requires_grad=True)
    (grad,) = torch.autograd.grad(TiledAttention()(q, q, q).square().sum(), q, create_graph=True)
    with pytest.raises(NotImplementedError, match="double backward"):
        grad.sum().backward()


@pytest.mark.parametrize("bias_grad", [False, True])
def test_opcheck(bias_grad: bool) -> None:
    q, k = torch.randn(2, 4, 9, 8), torch.randn(2, 2, 11, 8)
    bias, lengths = torch.randn(4, 1, 11), torch.tensor([0, 5], dtype=torch.int32)
    options = (None, bias, None, None, lengths, None, None, torch.tensor(3), 0.3, -1, 0, 2.0, 0.1, [4, 3])
    out, lse = torch.ops.tilegpt.tiled(q, k, k + 1, *options)
    torch.library.opcheck(
        torch.ops.tilegpt.tiled_backward.default,
        (torch.randn_like(out), q, k, k + 1, out, lse, *options, bias_grad),
    )
    bias.requires_grad_(bias_grad)
    leaves = (q.requires_grad_(), k.requires_grad_(), (k + 1).detach().requires_grad_())
    torch.library.opcheck(torch.ops.tilegpt.tiled.default, (*leaves, *options))


@pytest.mark.alone
@pytest.mark.gpu
def test_gpu_memory_is_linear() -> None:
    """Peak memory of forward and backward, beyond the inputs, from 1k to 16k tokens: it doubles with T."""
    attention, peaks_mib = TiledAttention(), []
    for tokens in (1024, 2048, 4096, 8192, 16384):
        q, k, v = (
            torch.randn(1, 4, tokens, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
            for _ in "qkv"
        )
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        attention(q, k, v).sum().backward()
        peaks_mib.append((torch.cuda.max_memory_allocated() - before) / 2**20)
    print(f"tiled, forward and backward, 4 heads of 64, bf16: {peaks_mib} MiB at 1k, 2k, 4k, 8k, 16k tokens")
    assert peaks_mib[-1] / peaks_mib[0] < 1.5 * 16, peaks_mib
