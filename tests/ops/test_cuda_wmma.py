"""Stage wmma of the CUDA ladder, beyond the grid: ragged shapes, groups, padded head dims, rows that do not
begin at 16 bytes. On a CPU with tensor cores imitated (wmma_cpu.h); on a GPU at size."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from ops import nvrtc
from ops.cuda.wmma import shared_bytes, wmma_forward
from ops.options import AttentionOptions
from scripts.accuracy import Problem, error_ratios, expected, judge
from tests.grid import Case, build, long_but
from tests.ops import cpu
from tests.ops.recorded import SHARED_BYTES, launches

pytestmark = pytest.mark.sampled(4)

on_cpu = pytest.mark.skipif(cpu.GXX is None, reason="no g++, which compiles the kernels for the CPU")
CASES = [
    ((150, 210, 64), (2, 1), 0, None),
    ((97, 40, 32), (1, 1), 0, None),  # causal: 57 rows that see no key
    ((70, 200, 40), (2, 2), 1, None),  # rows that begin 2 bytes beyond a multiple of 16
    ((33, 129, 128), (1, 1), 0, None),
    ((50, 70, 72), (1, 1), 0, -0.3),
    ((129, 129, 64), (1, 1), 0, 3.0),
]


@pytest.fixture(scope="module")
def compiler(tmp_path_factory: pytest.TempPathFactory) -> cpu.WmmaCores:
    return cpu.WmmaCores(tmp_path_factory.mktemp("csrc"))


@on_cpu
@pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])
@pytest.mark.parametrize(("shape", "heads", "cut", "scale"), long_but(CASES, 0, 1, 2, 4), ids=str)
def test_values_on_a_cpu(
    compiler: cpu.WmmaCores,
    monkeypatch: pytest.MonkeyPatch,
    shape: tuple[int, int, int],
    heads: tuple[int, int],
    cut: int,
    scale: float | None,
    causal: bool,
) -> None:
    monkeypatch.setattr(nvrtc, "kernel", compiler)
    q, k, v, _ = cpu.inputs(shape, heads, cut=cut, dtype=torch.bfloat16)
    options = {"causal": causal, "scale": scale or shape[2] ** -0.5}
    out, lse = wmma_forward(q, k, v, AttentionOptions(**options), None, [0])
    reference, plain = expected(Problem(q, k, v, options))
    ratios = error_ratios({"out": out, "lse": lse}, reference, plain, q.dtype)
    assert ratios.keys() == {"out", "lse"} and max(ratios.values()) <= 1, ratios


@on_cpu
def test_no_races(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sanitizer = cpu.Sanitizer(cpu.WmmaCores(tmp_path))
    monkeypatch.setattr(nvrtc, "kernel", sanitizer)
    q, k, v, _ = cpu.inputs((100, 130, 32), dtype=torch.bfloat16)
    wmma_forward(q, k, v, AttentionOptions(causal=True, scale=0.2), None, [0])
    assert sanitizer.reports == {"tilegpt_wmma_forward": ""}


@pytest.mark.parametrize("arch", SHARED_BYTES, ids=str)
def test_the_tile_fits(arch: tuple[int, int]) -> None:
    for head_dim in (8, 64, 96, 128):
        (launch,) = launches("wmma", Case("usual", 128, 128, head_dim), torch.bfloat16, arch)
        assert launch.shared_bytes == shared_bytes(head_dim) <= SHARED_BYTES[arch]


@pytest.mark.gpu
@pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(
    "shape", [(1000, 1300, 72), (1300, 1000, 128), (1000, 1300, 96), (777, 1, 8)], ids=str
)
def test_values_on_a_gpu(shape: tuple[int, int, int], dtype: torch.dtype, causal: bool) -> None:
    """The same bits a hundred times: a race would show."""
    tq, tk, head_dim = shape
    q = torch.randn(2, 8, tq, head_dim, device="cuda", dtype=dtype)
    k, v = (torch.randn(2, 2, tk, head_dim, device="cuda", dtype=dtype) for _ in range(2))
    attention = build("cuda_wmma")
    ratios = judge(attention, q, k, v, {"causal": causal}, heads=2)
    assert ratios.keys() == {"out", "lse"} and max(ratios.values()) <= 1, ratios
    with torch.no_grad():
        first = attention(q, k, v, causal=causal)
        assert all(torch.equal(first, attention(q, k, v, causal=causal)) for _ in range(100))
