"""The CUDA kernel for one query a row over an int8 or int4 cache, on the CPU: tensor cores are imitated
(mma_cpu.h), and its parts are combined here: Triton's interpreter cuts off what a GPU rounds to bf16."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from attention.base import AttentionOptions, CachedTensor, CacheView, quantise
from attention.naive import NaiveAttention
from ops import nvrtc
from ops.cuda.attend_cache import KERNEL, TILES, BytesTile, defines, fill, reads
from scripts.accuracy import error_ratios
from tests.attention.test_cache_view import make
from tests.compilers import pinned
from tests.ops import cpu
from tests.ops.recorded import Launch, compiled
from tests.ops.test_cuda_compile import BUDGETS, sass

pytestmark = pytest.mark.sampled(4)

on_a_cpu = pytest.mark.skipif(cpu.GXX is None, reason="no g++, which compiles the kernels for the CPU")
OPTIONS = AttentionOptions(scale=128**-0.5)
# All warps of a block have tiles, and more than their rings hold.
SMALL = {kind: replace(tile, warps=2, stages=2) for kind, tile in TILES.items()}


@pytest.fixture(scope="module")
def compiler(tmp_path_factory: pytest.TempPathFactory) -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(nvrtc, "kernel", cpu.TensorCores(tmp_path_factory.mktemp("csrc")))
        yield


imitated = pytest.mark.usefixtures("compiler")


def attend(
    q: Tensor, view: CacheView, tile: BytesTile, options: AttentionOptions = OPTIONS, splits: int = 3
) -> tuple[Tensor, Tensor]:
    """out and lse."""
    parts = torch.full((splits, *q.shape), torch.nan)
    statistics = torch.full((2, splits, *q.shape[:3]), torch.nan)
    fill(parts, statistics, q, view, options, tile)
    maxima, totals = statistics
    most = maxima.amax(dim=0)
    weights = (maxima - most).exp()
    total = (totals * weights).sum(dim=0)
    out = (parts * weights.unsqueeze(-1)).sum(dim=0) / total.unsqueeze(-1)
    return out.to(q.dtype), most + total.log()


def ratios(
    q: Tensor, view: CacheView, tile: BytesTile, window: tuple[int, int] | None = None
) -> dict[str, float]:
    """Against naive's reading of the same cache."""
    options = OPTIONS._replace(window=window)
    assert reads(q, view, options)
    got = attend(q, view, tile, options)
    k, v = view.tensors()
    more = {"kv_lengths": view.lengths, "window": window, "return_lse": True}
    exact = NaiveAttention()(q.double(), k.double(), v.double(), **more)
    plain = NaiveAttention()(q, k.to(q.dtype), v.to(q.dtype), **more)
    names = ("out", "lse")
    return error_ratios(*(dict(zip(names, x, strict=True)) for x in (got, exact, plain)), q.dtype)


@on_a_cpu
@imitated
@pytest.mark.parametrize("block", [None, 16, 48])
@pytest.mark.parametrize("kind", TILES)
def test_values(kind: str, block: int | None) -> None:
    for heads, window in ((8, None), (2, (70, 0)), (16, None)):
        q, view, _, _ = make(
            kind, block, 1, torch.bfloat16, heads=heads, dim=128, tokens=480 if block else 472
        )
        found = ratios(q, view, SMALL[kind], window)
        assert max(found.values()) <= 1, (heads, window, found)


def one_row(kind: str, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, CacheView]:
    sides = []
    for x in (k, v):
        data, scale = quantise(x, kind)
        sides.append(CachedTensor(data, scale.transpose(-2, -1).contiguous()))
    return q.bfloat16(), CacheView(*sides, torch.tensor([k.shape[2]], dtype=torch.int32))


@pytest.mark.parametrize("kind", TILES)
def test_only_one_layout_and_table_are_read(kind: str) -> None:
    """Those of K are all that the kernel is told."""
    q, view, _, _ = make(kind, 16, 1, torch.bfloat16, heads=8, dim=128)
    v = view.v
    assert reads(q, view, OPTIONS)
    assert reads(q, view._replace(v=v._replace(table=v.table.clone())), OPTIONS)
    data = v.data.transpose(1, 2).contiguous().transpose(1, 2)
    for other in ({"data": data}, {"table": v.table.flip(1)}, {"table": None}):
        assert not reads(q, view._replace(v=v._replace(**other)), OPTIONS)
    wide = [x._replace(scale=x.scale.float()) for x in view[:2]]  # of which it would read halves
    assert not reads(q, CacheView(*wide, view.lengths), OPTIONS)


def small_weights(kind: str) -> tuple[Tensor, CacheView]:
    """One key has the largest score by 13, and hundreds with values 1,000 times as large add up to as much:
    none may be rounded to 0 because of it. Halves of the channels differ by a factor of 10."""
    g = torch.Generator().manual_seed(3)
    q, k, v = (torch.randn(1, 1, t, 128, generator=g) for t in (1, 512, 512))
    along = q / q.norm()
    k = k - (k * along).sum(-1, keepdim=True) * along
    k[0, 0, 100] += along[0, 0, 0] * 13 * 128**0.5 / q.norm()
    v = v.abs() * 1e3
    v[0, 0, 100] *= 1e-3
    v[..., 64:] *= 10
    return one_row(kind, q, k, v)


@on_a_cpu
@imitated
@pytest.mark.parametrize("kind", TILES)
def test_small_weights_beside_a_large_one(kind: str) -> None:
    found = ratios(*small_weights(kind), SMALL[kind])
    assert max(found.values()) <= 1, found


MISTAKES = {
    "waits for one tile too few": ("cp_async_wait_group<STAGES - 2>", "cp_async_wait_group<STAGES - 1>"),
    "weights relative to no tile's largest": (
        "largest = row_largest(largest);\n        const float inverse",
        "largest = 800.0f;\n        const float inverse",
    ),
}


@on_a_cpu
@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_shows(mistake: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    compiler, (old, new) = cpu.TensorCores(tmp_path), MISTAKES[mistake]
    source = tmp_path / "attend_cache.cu"
    text = source.read_text()
    assert old in text
    source.write_text(text.replace(old, new))
    monkeypatch.setattr(nvrtc, "kernel", compiler)
    found = ratios(*small_weights("int8"), SMALL["int8"])
    assert not max(found.values()) <= 1, found


@on_a_cpu
@imitated
@pytest.mark.parametrize("kind", TILES)
def test_what_is_not_finite_shows(kind: str) -> None:
    q, k, v = (torch.ones(1, 1, t, 128) for t in (1, 64, 64))
    for x in (q, k, v):
        before = x[0, 0, 0, 5].clone()
        x[0, 0, 0, 5] = torch.nan
        bf16, view = one_row(kind, q, k, v)
        assert attend(bf16, view, SMALL[kind])[0].isnan().any()
        x[0, 0, 0, 5] = before


@on_a_cpu
@imitated
def test_what_lies_beyond_a_length_is_not_read() -> None:
    q, view, _, _ = make("int8", None, 1, torch.bfloat16, dim=128, tokens=160)
    for side in (view.k, view.v):
        for row, length in enumerate(view.lengths):
            side.scale[row, :, :, length:] = torch.nan
    assert attend(q, view, SMALL["int8"])[0].isfinite().all()


def test_other_calls_are_left_to_triton() -> None:
    q, view, _, _ = make("int8", None, 1, torch.bfloat16, dim=128)
    assert reads(q, view, OPTIONS)
    assert not reads(q.float(), view, OPTIONS)
    assert not reads(q, view, OPTIONS._replace(softcap=5.0))
    assert not reads(q, view, OPTIONS._replace(alibi_slopes=torch.ones(4)))
    assert reads(q.half(), view, OPTIONS)
    # channels that are not neighbours, whose addresses the kernel is not told
    assert not reads(q.repeat_interleave(2, dim=3)[..., ::2], view, OPTIONS)
    k, v = (x._replace(data=x.data.repeat_interleave(2, dim=3)[..., ::2]) for x in view[:2])
    assert not reads(q, CacheView(k, v, view.lengths), OPTIONS)
    for other in (
        make("int4", None, 1, torch.float16, dim=128),
        make("fp8", None, 1, torch.bfloat16, dim=128),
        make("int8", None, 2, torch.bfloat16, dim=128),
        make("int8", 8, 1, torch.bfloat16, dim=128),
        make("int8", None, 1, torch.bfloat16, dim=64),
        make("int8", None, 1, torch.bfloat16, dim=128, tokens=90),
        make("int8", None, 1, torch.bfloat16, dim=128, heads=32),
    ):
        assert not reads(*other[:2], OPTIONS)


@pytest.mark.skipif(nvrtc.missing() is not None, reason=str(nvrtc.missing()))
@pinned("nvidia-cuda-nvrtc")
@pytest.mark.parametrize("block", [None, 16])
@pytest.mark.parametrize("kind", TILES)
def test_fits_on_hopper(kind: str, block: int | None) -> None:
    q, view, _, _ = make(kind, block, 1, torch.bfloat16, heads=8, dim=128)
    tile, budget = TILES[kind], BUDGETS[KERNEL[1]]
    of = defines(q, view, OPTIONS, tile)
    launch = Launch(*KERNEL, tuple(of.items()), 32 * tile.warps, tile.shared_bytes(of))
    made = compiled(launch, (9, 0))
    assert made.registers <= budget.registers and made.spilled_bytes <= budget.spilled_bytes, made
    assert made.blocks >= tile.programs, made
    found = set(sass(made.cubin, KERNEL[1]))
    assert found.issuperset(budget.has) and not found & set(budget.has_not), found
