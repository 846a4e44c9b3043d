"""Stage 5 of the CUDA ladder, beyond the grid: ragged shapes, groups, padded head dims, rows that do not
begin at 16 bytes. On a CPU in small tiles, with tensor cores imitated (mma_cpu.h); on a GPU at size.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from ops import nvrtc
from ops.cuda import tensor_cores
from ops.cuda.call import Call
from ops.cuda.tensor_cores import TeamTile, fa1_forward, fa1_tile, run_fa1
from ops.options import AttentionOptions
from scripts.accuracy import Problem, error_ratios, expected, judge
from tests.grid import Case, build, long_but
from tests.ops import cpu
from tests.ops.recorded import SHARED_BYTES, launches

pytestmark = pytest.mark.sampled(4)

on_cpu = pytest.mark.skipif(cpu.GXX is None, reason="no g++, which compiles the kernels for the CPU")


def _inputs(
    shape: tuple[int, int, int],
    heads: tuple[int, int],
    device: str,
    batch: int = 1,
    unaligned: bool = False,
    dtype: torch.dtype = torch.bfloat16,
) -> tuple[Tensor, ...]:
    """q, k and v; unaligned: each row begins 2 bytes beyond a multiple of 16."""
    (tq, tk, head_dim), g = shape, torch.Generator().manual_seed(7)
    extra = 8 if unaligned else 0
    made = (
        torch.randn(batch, h, t, head_dim + extra, generator=g).to(device, dtype)
        for h, t in ((heads[0], tq), (heads[1], tk), (heads[1], tk))
    )
    return tuple(x[..., 1 : 1 + head_dim] if unaligned else x for x in made)


def _options(scale: float, causal: bool) -> tuple[object, ...]:
    return AttentionOptions(causal, scale), None, [0]


class _Compiler(cpu.Compiler):
    """Of the sources without what is written in PTX: mma_cpu.h has it, in the place of CUDA's header."""

    def __init__(self, folder: Path):
        super().__init__(folder)
        for name in ("mma.cuh", "fa1.cu"):
            parts = (folder / name).read_text().split("\n\n")
            ours = [part for part in parts if "asm" not in part and "copy_rows<" not in part]
            (folder / name).write_text("\n\n".join(ours))
        header = folder / "attention.cuh"
        header.write_text(header.read_text().replace("<cuda_bf16.h>", '"mma_cpu.h"'))


@pytest.fixture(scope="module")
def compiler(tmp_path_factory: pytest.TempPathFactory) -> Iterator[_Compiler]:
    return _Compiler(tmp_path_factory.mktemp("csrc"))


def _ratios(q: Tensor, k: Tensor, v: Tensor, causal: bool, tile: TeamTile, scale: float) -> dict[str, float]:
    out, lse = run_fa1(q, k, v, Call(q, k, v, *_options(scale, causal)), tile)
    reference, plain = expected(Problem(q, k, v, {"causal": causal, "scale": scale}))
    return error_ratios({"out": out, "lse": lse}, reference, plain, q.dtype)


_CASES = [
    ((150, 210, 64), TeamTile(32, 64, 8, 1), {}),
    ((97, 40, 32), TeamTile(32, 64, 8, 1), {}),  # causal: 57 rows that see no key
    ((70, 200, 40), TeamTile(32, 128, 4, 1), {"unaligned": True}),
    ((33, 129, 128), TeamTile(32, 64, 8, 1), {}),
    ((97, 300, 128), TeamTile(32, 256, 8, 1), {}),
    ((97, 300, 128), TeamTile(16, 256, 12, 1), {}),  # three teams
    ((90, 150, 64), TeamTile(16, 128, 16, 1), {}),
    ((50, 70, 72), TeamTile(32, 64, 8, 1), {"scale": -0.3}),
    ((129, 129, 64), TeamTile(64, 128, 8, 1), {"scale": 3.0}),
]


@on_cpu
@pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])
@pytest.mark.parametrize(
    ("shape", "tile", "more"),
    long_but(_CASES, 0, 1, 2, 5, 7),
    ids=str,
)
def test_values_on_a_cpu(
    compiler: _Compiler,
    monkeypatch: pytest.MonkeyPatch,
    shape: tuple[int, int, int],
    tile: TeamTile,
    more: dict[str, float],
    causal: bool,
) -> None:
    monkeypatch.setattr(nvrtc, "kernel", compiler)
    q, k, v = _inputs(shape, (2, 1), "cpu", unaligned="unaligned" in more)
    ratios = _ratios(q, k, v, causal, tile, more.get("scale", shape[2] ** -0.5))
    assert max(ratios.values()) <= 1, ratios


@on_cpu
def test_no_races(compiler: _Compiler, monkeypatch: pytest.MonkeyPatch) -> None:
    sanitizer = cpu.Sanitizer(compiler)
    monkeypatch.setattr(nvrtc, "kernel", sanitizer)
    q, k, v = _inputs((100, 130, 32), (1, 1), "cpu")
    run_fa1(q, k, v, Call(q, k, v, *_options(0.2, True)), TeamTile(32, 64, 8, 1))
    assert sanitizer.reports == {"tilegpt_fa1_forward": ""}


@pytest.mark.parametrize(("arch", "keys"), [((8, 0), 128), ((8, 9), 64), ((9, 0), 256)], ids=str)
def test_tiles_fit(arch: tuple[int, int], keys: int) -> None:
    """The largest that fits, as the launch asks for it."""
    for head_dim in (8, 64, 96, 128):
        (launch,) = launches("fa1", Case("usual", 128, 128, head_dim), torch.bfloat16, arch)
        tile, defines = fa1_tile(head_dim, SHARED_BYTES[arch]), dict(launch.defines)
        assert launch.shared_bytes == tile.shared_bytes(head_dim) <= SHARED_BYTES[arch]
        assert (defines["BC"], launch.threads) == (tile.bc, 32 * tile.warps)
    assert tile.bc == keys


def test_one_block_a_head(monkeypatch: pytest.MonkeyPatch) -> None:
    """And scratch for whole tiles: 97 queries in tiles of 16, D = 40 as 64, and m and l."""
    seen = {}

    class Kernel:
        def launch(self, grid: int, threads: int, params: object, shared_bytes: int) -> None:
            seen.update(grid=grid, padded_tq=params.padded_tq, scratch=params.scratch)

    monkeypatch.setattr(nvrtc, "kernel", lambda *_: Kernel())
    monkeypatch.setattr(tensor_cores, "_shared_bytes", lambda _: SHARED_BYTES[9, 0])
    made: list[Tensor] = []
    empty = Tensor.new_empty
    monkeypatch.setattr(Tensor, "new_empty", lambda *a, **o: made.append(empty(*a, **o)) or made[-1])
    q, k, v = _inputs((97, 33, 40), (6, 2), "cpu", batch=3)
    out, lse = fa1_forward(q, k, v, *_options(1.0, True))
    assert (out.shape, lse.shape, lse.dtype) == (q.shape, (3, 6, 97), torch.float32)
    assert (seen["grid"], seen["padded_tq"]) == (18, 112)
    (scratch,) = (x for x in made if x.data_ptr() == seen["scratch"])
    assert scratch.numel() == 18 * 112 * (64 + 2) and scratch.dtype == torch.float32


@pytest.mark.gpu
@pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(
    ("shape", "heads", "unaligned"),
    [
        ((1000, 1300, 72), (8, 2), False),
        ((1300, 1000, 128), (4, 4), False),  # causal: 300 rows that see no key
        ((1000, 1300, 96), (4, 1), True),
        ((2048, 2048, 128), (150, 150), False),  # more heads than an H200 has multiprocessors
        ((777, 1, 8), (3, 1), True),
    ],
    ids=str,
)
def test_values_on_a_gpu(
    shape: tuple[int, int, int], heads: tuple[int, int], unaligned: bool, dtype: torch.dtype, causal: bool
) -> None:
    q, k, v = _inputs(shape, heads, "cuda", unaligned=unaligned, dtype=dtype)
    ratios = judge(build("cuda_fa1"), q, k, v, {"causal": causal}, heads=2)
    assert ratios.keys() == {"out", "lse"} and max(ratios.values()) <= 1, ratios


@pytest.mark.gpu
def test_same_bits_each_time() -> None:
    """A race would show: heads on every multiprocessor, a ragged end, two teams at their own pace."""
    attention, (q, k, v) = build("cuda_fa1"), _inputs((1000, 1300, 128), (140, 140), "cuda")
    with torch.no_grad():
        first = attention(q, k, v)
        assert all(torch.equal(first, attention(q, k, v)) for _ in range(200))
