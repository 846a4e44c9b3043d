"""Stages 0 to 3 of the CUDA ladder on the CPU: values by the criterion, barriers by the thread sanitizer.

What launches is ops/cuda/plain.py as it is; only NVRTC is replaced, by g++ and cpu.h.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from attention.base import Attention
from attention.cuda import STAGES
from ops import nvrtc
from ops.cuda import plain
from ops.cuda.call import Call
from ops.cuda.plain import Tile
from ops.library import register_attention
from ops.options import AttentionOptions
from tests.attention.criterion import run_case
from tests.compilers import pinned
from tests.grid import CASES, Case, long_but
from tests.ops import cpu
from tests.ops.far import LAYOUTS, far, near

pytestmark = [
    pytest.mark.skipif(cpu.GXX is None, reason="no g++, which compiles the kernels for the CPU"),
    pytest.mark.sampled(5),
]


def _call(name: str, *args: Any) -> Any:
    return getattr(plain, name)(*args)


_OPS = {
    stage: register_attention(
        f"on_cpu_{stage}", partial(_call, f"{stage}_forward"), partial(_call, f"{stage}_backward"), "CPU"
    )
    for stage in ("plain", "naive", "rowwise", "tiled")
}


class OnCPU(Attention):
    """A stage of the ladder with all that it declares, in fp32 on CPU tensors."""

    def __init__(self, stage: str):
        super().__init__(f"cuda_{stage}")
        able = STAGES[stage].capabilities
        here = {"devices": frozenset({"cpu"}), "dtypes": frozenset({torch.float32})}
        self.capabilities, self.stage = replace(able, **here), stage

    def attend(self, q: Tensor, k: Tensor, v: Tensor, options: AttentionOptions, seed: Tensor | None) -> Any:
        return _OPS[self.stage](q, k, v, options, seed, [0])


@pytest.fixture(scope="module")
def compiler(tmp_path_factory: pytest.TempPathFactory) -> cpu.Compiler:
    return cpu.Compiler(tmp_path_factory.mktemp("csrc"))


@pytest.fixture(autouse=True)
def on_cpu(compiler: cpu.Compiler, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(plain, "_kernel", compiler)
    yield


def _cases() -> Iterator[Any]:
    """Those of the grid for which a minute has room: each set of features and each head dim compiles anew."""
    for case in CASES:
        stages = [stage for stage in _OPS if case.features <= STAGES[stage].capabilities.features]
        if not case.small or case.group == "empty" or case.head_dim > 160:
            continue
        # of one query and D = 128 comes the largest error of a sum
        if case.group == "feature" and (case.head_dim == 128) != (case.tq == 1):
            continue
        if case.group == "head_dim" and case.tq == case.tk:
            continue
        # of pairs with these, those where they meet in a line of a kernel
        meets = {"noncausal": {"window", "kv_lengths"}, "gqa": {"alibi"}}
        on = case.features | ({"gqa"} if case.kv_heads != case.heads else set())
        if case.group == "pair" and any(name in on and not met & on for name, met in meets.items()):
            continue
        for stage in stages:
            # a row is a block of 256 fibers
            slow = stage == "rowwise" and (case.tq * case.tk > 20_000 or case.group in ("heads", "feature"))
            if not slow and (stage != "tiled" or case.head_dim <= 128):
                quick = case.quick and case.group != "pair"
                yield pytest.param(
                    stage, case, id=f"{stage}-{case.id}", marks=[pytest.mark.long] * (not quick)
                )


@pytest.mark.parametrize(("stage", "case"), list(_cases()))
def test_values(stage: str, case: Case):
    ratios = run_case(OnCPU(stage), case.fewer_heads, "cpu", torch.float32)
    assert ratios and max(ratios.values()) <= 1, ratios
    assert ("dq" in ratios) == (stage in ("plain", "tiled"))


_TILES = {tile for table in (plain._FORWARD, plain._BACKWARD) for tiles in table.values() for tile in tiles}


@pytest.mark.parametrize("tile", long_but(sorted(_TILES | {Tile(4, 4, 8, 2)}, key=str), 0, 1), ids=str)
def test_every_tile_gives_the_values(tile: Tile, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(plain, "_FORWARD", {128: (tile,)})
    monkeypatch.setattr(plain, "_BACKWARD", {128: (tile,)})
    case = Case("tile", 113, 203, 40, features=frozenset({"window", "kv_lengths", "document_ids", "dropout"}))
    if tile.warps == 1:  # the backward works in pairs
        monkeypatch.setattr(plain, "_BACKWARD", {128: (Tile(2, tile.rows, tile.cols, 1),)})
    ratios = run_case(OnCPU("tiled"), case, "cpu", torch.float32)
    assert ratios and max(ratios.values()) <= 1, ratios


def _inputs(tq: int = 40, tk: int = 72, head_dim: int = 64) -> tuple[Tensor, ...]:
    g = torch.Generator().manual_seed(0)
    return tuple(torch.randn(1, 2, t, head_dim, generator=g) for t in (tq, tk, tk))


_CAUSAL = (AttentionOptions(scale=0.125), None, [0])


@pytest.mark.parametrize("layout", long_but([*LAYOUTS], 0))
@pytest.mark.parametrize("stage", _OPS)
def test_values_beyond_2_to_the_31_elements(stage: str, layout: str):
    results = []
    for tensors in (near(torch.float32, 136), far(near(torch.float32, 136), layout)):
        *leaves, dout = tensors
        backward = stage in ("plain", "tiled")
        leaves = [x.detach().requires_grad_(backward) for x in leaves]
        out = OnCPU(stage)(*leaves)
        grads = torch.autograd.grad(out, leaves, dout) if backward else ()
        results.append((out.detach(), *grads))
    for ours, theirs in zip(*results, strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("stage", _OPS)
def test_rows_that_begin_anywhere_give_the_same(stage: str):
    """Without a multiple of four to begin at there are no vectors; the sums are the same."""
    forward = getattr(plain, f"{stage}_forward")
    q, k, v = _inputs()
    odd = tuple(torch.nn.functional.pad(x, (1, 2))[..., 1:-2] for x in (q, k, v))
    assert plain._vector(q, k, v) == {"VECTOR": 1} and plain._vector(*odd) == {"VECTOR": 0}
    for ours, theirs in zip(forward(*odd, *_CAUSAL), forward(q, k, v, *_CAUSAL), strict=True):
        assert torch.equal(ours, theirs)


def test_in_any_order(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch):
    """Heads in groups, and with the shortest tiles of all at the end, give the same bits."""
    monkeypatch.setattr(plain, "_FORWARD", {64: (Tile(2, 4, 4, 1),)})
    monkeypatch.setattr(plain, "_BACKWARD", {64: (Tile(4, 4, 4, 1),)})
    g = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 6, t, 32, generator=g) for t in (80, 96, 96))  # three tiles of 32 rows

    def bits() -> tuple[Tensor, ...]:
        out, lse = plain.tiled_forward(q, k, v, *_CAUSAL)
        return out, lse, *plain.tiled_backward(q, q, k, v, out, lse, *_CAUSAL, False)

    before = bits()
    request.getfixturevalue("small_groups")
    assert all(torch.equal(a, b) for a, b in zip(before, bits(), strict=True))


@pytest.mark.parametrize("stage", ["plain", "tiled"])
def test_the_backward_gives_the_same_bits_each_time(stage: str):
    q, k, v = _inputs()
    forward, backward = (getattr(plain, f"{stage}_{passed}") for passed in ("forward", "backward"))
    out, lse = forward(q, k, v, *_CAUSAL)
    first, second = (backward(q, q, k, v, out, lse, *_CAUSAL, False) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_document_ranges():
    """The keys of the documents of each tile of queries, and the queries of those of each tile of keys;
    whether these are of one document."""
    q, k, v = _inputs(40, 72)
    k_ids = torch.tensor([0] * 20 + [1] * 30 + [2] * 20 + [5] * 2, dtype=torch.int32)[None]
    q_ids = torch.tensor([1] * 16 + [2] * 16 + [3] * 8, dtype=torch.int32)[None]
    call = Call(q, k, v, AttentionOptions(scale=0.125, document_ids=(q_ids, k_ids)))
    assert plain.document_ranges(call, 16).tolist() == [[[20, 50, 1], [50, 70, 1], [72, 0, 1]]]
    assert plain.document_ranges(call, 32).tolist() == [[[20, 70, 0], [72, 0, 1]]]
    assert plain.document_ranges(call, 32, transposed=True).tolist() == [
        [[0, 16, 0], [0, 32, 0], [16, 40, 0]]
    ]
    k_ids[0, 30] = 2  # a document within another
    assert plain.document_ranges(call, 16).tolist() == [[[20, 50, 0], [30, 70, 0], [72, 0, 1]]]


def test_errors():
    q, k, v = _inputs(head_dim=160)
    with pytest.raises(ValueError, match="head dim 160; it needs at most 128"):
        plain.tiled_forward(q, k, v, *_CAUSAL)
    q, k, v = _inputs(tq=64, tk=64)
    with pytest.raises(ValueError, match="contiguous last dimension"):
        plain.naive_forward(q.transpose(2, 3), k, v, *_CAUSAL)
    with pytest.raises(ValueError, match="takes no bias"):
        plain.tiled_forward(q, k, v, AttentionOptions(scale=0.125, bias=torch.zeros(64, 64)))


def _races(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changes: dict[str, tuple[str, str]]) -> set[str]:
    """The kernels of all stages in which the thread sanitizer finds a race."""
    sanitizer = cpu.Sanitizer(cpu.Compiler(tmp_path, changes))
    q, k, v = _inputs(40, 72)
    monkeypatch.setattr(plain, "_kernel", sanitizer)
    out, lse = plain.tiled_forward(q, k, v, *_CAUSAL)
    plain.tiled_backward(q, q, k, v, out, lse, *_CAUSAL, False)
    if not changes:
        plain.naive_forward(q[:, :, :8], k, v, *_CAUSAL)
        plain.rowwise_forward(q[:, :, :2], k, v, *_CAUSAL)
        out, lse = plain.plain_forward(q[:, :, :8], k[:, :, :8], v[:, :, :8], *_CAUSAL)
        plain.plain_backward(out, q[:, :, :8], k[:, :, :8], v[:, :, :8], out, lse, *_CAUSAL, False)
        ids = torch.zeros(1, 40, dtype=torch.int32), torch.zeros(1, 72, dtype=torch.int32)
        plain.document_ranges(Call(q, k, v, AttentionOptions(scale=0.125, document_ids=ids)), 64)
    assert len(sanitizer.reports) == (4 if changes else 15)
    return {name for name, said in sanitizer.reports.items() if said}


@pytest.mark.long  # 15 kernels, 10 s; two that have races are looked at below
def test_no_races(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    assert _races(tmp_path, monkeypatch, {}) == set()


@pytest.mark.long
def test_missing_barriers_are_caught(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    changes = {
        "tiled.cu": ("__syncthreads();  // V and P have arrived", "// V and P have arrived"),
        "tiled_backward.cu": ("__syncthreads();  // P is there for the other", "// P is there for the other"),
    }
    assert _races(tmp_path, monkeypatch, changes) == {"tilegpt_tiled_forward", "tilegpt_tiled_dkdv"}


@pinned("nvidia-cuda-nvrtc")
@pytest.mark.skipif(nvrtc.missing() is not None, reason=f"{nvrtc.missing()}")
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])
def test_nothing_spills(head_dim: int, backward: bool):
    """The plain causal kernels of an H200; two blocks share a multiprocessor of 65,536 registers, 228 KiB."""
    q = torch.empty(1, 1, 64, head_dim)
    tile = plain.tile(q, backward)
    defines = Call(q, q, q, *_CAUSAL).defines | tile.defines | {"VECTOR": 1}
    cubin = nvrtc.build("ladder/tiled_backward.cu" if backward else "ladder/tiled.cu", defines, "sm_90a")
    for name, used in cubin.kernels.items():
        assert used.spilled_bytes == 0 and used.registers * 32 * tile.warps * tile.blocks <= 65_536, name
    assert (tile.shared_bytes(head_dim, backward) + 1024) * tile.blocks <= 228 << 10
