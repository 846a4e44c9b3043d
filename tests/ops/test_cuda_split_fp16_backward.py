"""The backward of stage `tiled` on tensor cores, on a CPU: values against the formula in fp64, tiles, races.
Tensor cores are imitated (mma_cpu.h); the rest is real."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from ops.cuda import plain, split_fp16, split_fp16_backward
from ops.cuda.split_fp16_backward import Tile
from scripts.accuracy import Problem, error_ratios, expected
from tests.grid import long_but
from tests.ops import cpu
from tests.ops.cpu import call_of, documents, inputs
from tests.ops.recorded import SHARED_BYTES

pytestmark = [
    pytest.mark.skipif(cpu.GXX is None, reason="no g++, which compiles the kernels for the CPU"),
    pytest.mark.sampled(5),
]

# For a CPU, in the place of the barrier of a pair of warps, which is written in PTX.
_PAIRS = """static struct Pairs {
    cpu::Barrier barriers[15];
    Pairs() {
        for (cpu::Barrier &each : barriers) each.expect(64);
    }
} pairs;
static void meet_in_pair(int pair) { pairs.barriers[pair].wait(); }"""


class Compiler(cpu.TensorCores):
    """Of split_fp16_backward.cuh without what is written in PTX."""

    def __init__(self, folder: Path):
        super().__init__(folder)
        source = folder / "split_fp16_backward.cuh"
        parts = source.read_text().split("\n\n")
        (at,) = (n for n, part in enumerate(parts) if "asm" in part)
        parts[at] = _PAIRS
        source.write_text("\n\n".join(parts))


@pytest.fixture(scope="module")
def compiler(tmp_path_factory: pytest.TempPathFactory) -> Compiler:
    return Compiler(tmp_path_factory.mktemp("csrc"))


@pytest.fixture(autouse=True)
def on_cpu(compiler: Compiler, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(plain, "_kernel", compiler)
    yield


def _problem(shape: tuple[int, int, int], options: dict[str, Any] | None = None, **made: Any) -> Problem:
    q, k, v, dout = inputs(shape, **made)
    return Problem(q, k, v, options or {}, dout)


def _judge(problem: Problem, *tiles: Tile) -> dict[str, float]:
    """The error ratios of the gradients; `tiles` are those of dK and dV and of dQ. out and lse are exact, but
    rounded to fp32."""
    q, k, v, dout = problem.q, problem.k, problem.v, problem.dout
    reference, formula = expected(problem)
    given = dout, q, k, v, reference["out"].float(), reference["lse"].float(), call_of(problem, [0])
    grads = (
        split_fp16_backward.run_backward(*given, *tiles) if tiles else split_fp16_backward.backward(*given)
    )
    got = dict(zip(("dq", "dk", "dv"), grads, strict=True))
    return error_ratios(got, reference, formula, torch.float32)


_CASES: list[tuple[tuple[int, int, int], dict[str, Any], dict[str, Any]]] = [
    ((130, 90, 20), {"cut": 1}, {"window": (37, 0), "softcap": 1.5}),
    ((70, 100, 33), {"heads": (2, 1)}, {"causal": False, "window": (30, 20), "scale": -0.2}),
    ((300, 70, 64), {}, {}),  # 230 rows that see no key, and whole blocks
    ((20, 70, 128), {"heads": (4, 2)}, {}),  # one tile of queries a head
    ((33, 140, 64), {"batch": 3, "lengths": [0, 60, 140]}, {"causal": False}),
    ((50, 100, 80), {"batch": 2, "lengths": [100, 37]}, {"alibi_slopes": torch.tensor([0.1])}),
    (
        (140, 200, 96),
        {},
        {"causal": False, "dropout_p": 0.2, "document_ids": (documents(70, 70), documents(70, 130))},
    ),
    ((70, 80, 128), {"heads": (2, 1)}, {"dropout_p": 0.1, "window": (50, 0), "softcap": 2.0}),
    ((1, 3, 7), {}, {}),
]


@pytest.mark.parametrize(
    ("shape", "made", "options"),
    long_but(_CASES, 0, 2, 4, 6, 7),
    ids=[f"{x[0]}-{'-'.join(x[2])}" for x in _CASES],
)
def test_values(shape: tuple[int, int, int], made: dict[str, Any], options: dict[str, Any]) -> None:
    if "lengths" in made:
        options = options | {"kv_lengths": torch.tensor(made["lengths"], dtype=torch.int32)}
    ratios = _judge(_problem(shape, **made, options=options))
    assert max(ratios.values()) <= 1, ratios


@pytest.mark.long
def test_rows_of_little_gradient() -> None:
    """Keys beside one with most of the weight, tokens of small dout, a channel of outliers: the error of each
    row, beside its own largest number, is of the order of that which the formula in fp32 makes."""
    q, k, v, dout = inputs((128, 128, 64))
    k[:, :, 0] = 8 * q.mean(2)
    q += 1.5 * q.mean(2, keepdim=True)
    k[..., 5] *= 30
    dout *= torch.logspace(-6, 0, 128)[:, None]
    problem = Problem(q, k, v, {"causal": False}, dout)
    reference, formula = expected(problem)
    given = dout, q, k, v, reference["out"].float(), reference["lse"].float(), call_of(problem, [0])
    for name, got in zip(("dq", "dk", "dv"), split_fp16_backward.backward(*given), strict=True):
        most = reference[name].abs().amax(3)
        ours, theirs = (((x - reference[name]).abs().amax(3) / most).max() for x in (got, formula[name]))
        assert ours < 5 * theirs, (name, ours, theirs)


def test_dropout_of_nearly_all() -> None:
    """dP is as large as it can be, times keep_scale."""
    q, k, v, dout = (torch.full((1, 1, t, 128), 1.9999) for t in (64, 2, 2, 64))
    v[:, :, 1] *= -1
    problem = Problem(q, k, v, {"causal": False, "dropout_p": 0.99}, dout)
    ratios = _judge(problem)
    assert max(ratios.values()) <= 1, ratios


def test_gradients_near_the_largest_of_fp32() -> None:
    """Of 2^120 or so, beyond which the 2^12 that P is multiplied by must not push dV."""
    q, k, v, dout = inputs((40, 50, 64))
    ratios = _judge(Problem(q, k, v, {}, dout * 2.0**116))
    assert max(ratios.values()) <= 1, ratios


# Each table's after the first, and what else the kernels are written for: terms of own rows in shared
# memory, tiles in one part or in two, other numbers of warps.
_PAIRS_OF_TILES = [
    (128, Tile(1, 32, 16, 4, blocks=2), Tile(1, 32, 32, 4, blocks=2, stages=1, own_terms=1)),
    (96, Tile(1, 32, 32, 4, blocks=2), Tile(1, 32, 32, 4, blocks=2)),
    (96, Tile(1, 32, 32, 4, blocks=2, stages=1), Tile(1, 32, 32, 4, blocks=2, stages=1)),
    (128, Tile(1, 32, 16, 4, blocks=2, stages=1), Tile(1, 32, 32, 4, stages=1)),
    (128, Tile(1, 16, 16, 8, own_terms=1), Tile(1, 32, 32, 8, stages=1, own_terms=1)),
    (64, Tile(2, 32, 16, 8), Tile(2, 64, 32, 8, stages=1)),
    (64, Tile(1, 32, 32, 4, blocks=2), Tile(1, 32, 32, 4, blocks=2)),
    (32, Tile(1, 32, 16, 12, stages=1), Tile(1, 32, 32, 4, own_terms=0)),
    (32, Tile(2, 32, 32, 4, blocks=3), Tile(2, 32, 32, 4, blocks=3)),
]


@pytest.mark.long
@pytest.mark.parametrize(("head_dim", "dkdv_tile", "dq_tile"), _PAIRS_OF_TILES, ids=str)
def test_other_tiles(head_dim: int, dkdv_tile: Tile, dq_tile: Tile) -> None:
    ratios = _judge(_problem((70, 80, head_dim)), dkdv_tile, dq_tile)
    assert max(ratios.values()) <= 1, ratios


def test_every_tile_is_tested() -> None:
    """The first of a table by `test_values`, all of whose head dims are on an H200."""
    others = {(split_fp16.padded(head_dim), tile) for head_dim, *tiles in _PAIRS_OF_TILES for tile in tiles}
    padded = {split_fp16.padded(shape[2]) for shape, *_ in _CASES}
    for table in (split_fp16_backward._DKDV, split_fp16_backward._DQ):
        assert padded == table.keys()
        assert {(head_dim, tile) for head_dim, tiles in table.items() for tile in tiles[1:]} <= others


@pytest.mark.parametrize("shared_bytes", SHARED_BYTES.values())
@pytest.mark.parametrize("table", [split_fp16_backward._DKDV, split_fp16_backward._DQ], ids=["dkdv", "dq"])
def test_tiles_fit(table: dict[int, tuple[Tile, ...]], shared_bytes: int) -> None:
    """As many blocks as the tile is for, but for dQ's at D = 128 on sm_89."""
    for head_dim, tiles in table.items():
        tile = split_fp16.first_that_fits(tiles, head_dim, shared_bytes)
        of_block = tile.shared_bytes(head_dim) + 1024
        blocks = 1 if tile == split_fp16_backward._DQ[128][0] and shared_bytes < 166_912 else tile.blocks
        assert blocks * of_block <= shared_bytes + 1024
    assert split_fp16.first_that_fits(tiles, head_dim, 1000) == tiles[-1]  # whose launch says what is missing


def _bits(*inputs: Tensor) -> tuple[Tensor, ...]:
    """The gradients of a causal call whose out and lse are some numbers."""
    q, k, v, dout = inputs
    call, lse = call_of(Problem(q, k, v, {}, dout), [0]), torch.full(q.shape[:3], 3.0)
    return split_fp16_backward.backward(dout, q, k, v, q.contiguous(), lse, call)


def _equal(before: tuple[Tensor, ...], after: tuple[Tensor, ...]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


# One pair of warps, 16 rows of a block.
_SMALL = Tile(1, 32, 16, 2), Tile(1, 32, 32, 2)


def _in_small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    for table, tile in zip((split_fp16_backward._DKDV, split_fp16_backward._DQ), _SMALL, strict=True):
        monkeypatch.setitem(table, 32, (tile,))


def test_in_any_order(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Heads in groups, and with the shortest tiles of all at the end, give the same bits."""
    _in_small_tiles(monkeypatch)
    tensors = inputs((40, 48, 32), (6, 6))  # three tiles of queries and of keys
    before = _bits(*tensors)
    request.getfixturevalue("small_groups")
    assert _equal(before, _bits(*tensors))


def test_layouts() -> None:
    """Rows that overlap, and one dout for all."""
    q, k, v, dout = (x.flatten()[: 39 + 64].view(1, 1, -1).unfold(-1, 64, 1) for x in inputs((40, 40, 64)))
    dout = dout[:, :, :1, :1].expand(dout.shape)
    assert _equal(_bits(q, k, v, dout), _bits(*(x.contiguous() for x in (q, k, v, dout))))


@pytest.mark.long
def test_no_races(compiler: Compiler, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the thread sanitizer, in blocks that meet two tiles, in dkdv of two heads."""
    sanitizer = cpu.Sanitizer(compiler)

    def kernel(source: str, *rest: Any) -> Any:
        return (sanitizer if source.startswith("fp32/split_fp16_backward") else compiler)(source, *rest)

    monkeypatch.setattr(plain, "_kernel", kernel)
    _in_small_tiles(monkeypatch)
    _bits(*inputs((20, 40, 32), (2, 1)))
    assert sanitizer.reports == {"tilegpt_split_fp16_dkdv": "", "tilegpt_split_fp16_dq": ""}
