"""fa3's backward on the CPU: values with every option, and that a missing wait shows. Tensor cores, TMA and
mbarriers are imitated (mma_cpu.h, hopper_cpu.h); the rest is real. out and lse are the reference's."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from attention import cuda
from attention.cuda import CudaStage
from ops import nvrtc
from ops.cuda import hopper, plain
from ops.library import register_attention
from scripts.accuracy import Problem, computed, error_ratios, expected
from tests.grid import long_but
from tests.ops import cpu
from tests.ops.cpu import documents
from tests.ops.test_cuda_fa2 import CASES, SPARSE_CASES, kept

pytestmark = [
    pytest.mark.skipif(cpu.GXX is None, reason="no g++, which compiles the kernels for the CPU"),
    pytest.mark.sampled(6),
]

_REFERENCE: dict[str, Tensor] = {}  # of the call at hand


def _forward(q: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    return _REFERENCE["out"].to(q.dtype), _REFERENCE["lse"].float()


_OP = register_attention("on_cpu_fa3", _forward, hopper.fa3_backward, "CPU")
_OWN = register_attention("on_cpu_fa3_alone", hopper.fa3_forward, hopper.fa3_backward, "CPU")
WIDE: list[tuple[tuple[int, int, int], dict[str, Any], dict[str, Any]]] = [
    ((150, 200, 256), {"heads": (2, 1)}, {}),
    ((200, 190, 192), {}, {"causal": False, "window": (60, 50)}),
    ((90, 150, 160), {"batch": 2, "lengths": [150, 77]}, {"causal": False}),
    ((140, 150, 256), {}, {"softcap": 2.0, "dropout_p": 0.1}),
    ((300, 70, 200), {}, {}),  # whole tiles of queries that see no key
]
# By three warp groups.
_THREE: list[tuple[tuple[int, int, int], dict[str, Any], dict[str, Any]]] = [
    ((150, 200, 192), {"heads": (2, 1)}, {}),
    ((40, 150, 136), {"heads": (6, 2), "batch": 2}, {}),
    ((300, 310, 192), {}, {"causal": False}),
    ((300, 70, 192), {}, {}),  # whole tiles of queries that see no key
    ((700, 700, 160), {"heads": (2, 1)}, {"causal": False}),
]
_TILES: list[tuple[tuple[int, int, int], dict[str, Any], dict[str, Any]]] = [
    ((1100, 1100, 64), {"heads": (2, 1)}, {}),
    ((700, 900, 128), {"heads": (2, 1)}, {"causal": False}),
    ((700, 900, 96), {"heads": (2, 1)}, {"causal": False}),
    ((700, 700, 64), {"heads": (2, 2)}, {"window": (150, 0)}),
    ((800, 600, 96), {}, {"causal": False, "document_ids": (documents(300, 1, 499), documents(200, 400))}),
]
WIDE_SPARSE: list[tuple[tuple[int, int, int], dict[str, Any], dict[str, Any]]] = [
    ((300, 300, 192), {"heads": (2, 1)}, {"block_mask": kept(1, 2, 3, 3)}),
    ((150, 290, 256), {"heads": (4, 2)}, {"causal": False, "block_mask": kept(1, 4, 2, 3, empty=(0, 2))}),
    (
        (260, 300, 160),
        {"batch": 2, "lengths": [300, 140]},
        {"block_mask": kept(2, 1, 3, 3), "dropout_p": 0.1},
    ),
]


class _OnCPU(CudaStage):
    """fa3's backward, in bf16 on CPU tensors."""

    def __init__(self) -> None:
        super().__init__("fa2")
        here = {"devices": frozenset({"cpu"}), "dtypes": frozenset({torch.bfloat16}), "max_head_dim": 256}
        self.capabilities = replace(self.capabilities, **here)


@pytest.fixture(scope="module")
def compiler(tmp_path_factory: pytest.TempPathFactory) -> cpu.HopperCores:
    return cpu.HopperCores(tmp_path_factory.mktemp("csrc"))


@pytest.fixture(autouse=True)
def use(monkeypatch: pytest.MonkeyPatch, compiler: cpu.HopperCores) -> Iterator[None]:
    monkeypatch.setattr(cuda, "missing", lambda: None)
    monkeypatch.setitem(cuda._OPS, "fa2", _OP)
    monkeypatch.setattr(hopper, "tensor_map", cpu.tensor_map)
    monkeypatch.setattr(nvrtc, "kernel", compiler)
    monkeypatch.setattr(plain, "_kernel", compiler)
    torch.use_deterministic_algorithms(True, warn_only=True)  # what is allocated is filled with NaN
    yield
    torch.use_deterministic_algorithms(False)


def _ratios(shape: tuple[int, int, int], made: dict[str, Any], options: dict[str, Any]) -> dict[str, float]:
    q, k, v, dout = cpu.inputs(shape, dtype=torch.bfloat16, **made)
    if "lengths" in made:
        options = options | {"kv_lengths": torch.tensor(made["lengths"], dtype=torch.int32)}
    problem = Problem(q, k, v, options, dout)
    reference, plain_formula = expected(problem)
    _REFERENCE.update(reference)
    return error_ratios(computed(_OnCPU(), problem), reference, plain_formula, q.dtype)


@pytest.mark.parametrize(
    ("shape", "made", "options"),
    long_but(CASES + WIDE, 1, 7, 11, 12, len(CASES), len(CASES) + 2),
    ids=[f"{x[0]}-{'-'.join(x[2])}" for x in CASES + WIDE],
)
def test_values(shape: tuple[int, int, int], made: dict[str, Any], options: dict[str, Any]) -> None:
    ratios = _ratios(shape, made, options)
    assert max(ratios.values()) <= 1, ratios


@pytest.mark.parametrize(
    ("shape", "made", "options"), long_but(_THREE, 0, 1), ids=[f"{x[0]}-{'-'.join(x[2])}" for x in _THREE]
)
def test_values_by_three_warp_groups(
    shape: tuple[int, int, int], made: dict[str, Any], options: dict[str, Any]
) -> None:
    test_values(shape, made, options)


@pytest.mark.parametrize(
    ("shape", "made", "options"), long_but([CASES[1], CASES[7], SPARSE_CASES[0]], 0), ids=str
)
def test_values_where_dq_is_cleared(
    shape: tuple[int, int, int],
    made: dict[str, Any],
    options: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As it is for more keys than these."""
    monkeypatch.setattr(hopper, "stores_first_dq", lambda *_: False)
    test_values(shape, made, options)


# (Tk, D, options) of 260 queries, where a warp group skips the first or with a window also the last of them.
_SKIPPING: list[tuple[int, int, dict[str, Any]]] = [
    (261, 96, {"window": (2, 0)}),
    (260, 96, {}),
    (260, 128, {}),
    (230, 112, {"causal": False, "window": (90, 10)}),
    (260, 128, {"block_mask": torch.eye(3, dtype=torch.bool)[None, None]}),
]


def _id_of_skipping(case: tuple[int, int, dict[str, Any]]) -> str:
    return "-".join([*map(str, case[:2]), *case[2]])


@pytest.mark.parametrize("case", _SKIPPING, ids=_id_of_skipping)
def test_values_where_a_warp_group_skips_queries(
    case: tuple[int, int, dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With 261 keys, one less would be one too many."""
    tk, head_dim, options = case
    run, asked = hopper.run_backward, []

    def both(*arguments: Any) -> tuple[Tensor, ...]:
        """The gradients; dK and dV are the same bits if nothing is skipped."""
        skipping, computing = run(*arguments), run(*arguments, SKIPS=0)
        asked.append(all(map(torch.equal, skipping[1:3], computing[1:3])))
        return skipping

    monkeypatch.setattr(hopper, "run_backward", both)
    ratios = _ratios((260, tk, head_dim), {}, options)
    assert max(ratios.values()) <= 1, ratios
    assert asked == [True]


@pytest.mark.parametrize("case", _SKIPPING, ids=_id_of_skipping)
def test_what_a_warp_group_skips_is_skipped(
    case: tuple[int, int, dict[str, Any]], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A wrong dS in its place shows."""
    compiler, (tk, head_dim, options) = cpu.HopperCores(tmp_path), case
    path, old = tmp_path / "fa3_backward_consumer.cuh", "ds16[x / 4][x % 4] = 0;"
    text = path.read_text()
    assert text.count(old) == 1
    path.write_text(text.replace(old, old.replace("0;", "0x3f803f80;")))  # 1, twice
    monkeypatch.setattr(nvrtc, "kernel", compiler)
    ratios = _ratios((260, tk, head_dim), {}, options)
    assert ratios["dq"] > 1, ratios


@pytest.mark.parametrize(("head_dim", "causal"), [(96, False), (72, True), (112, False), (32, True)])
def test_values_of_fewer_columns(head_dim: int, causal: bool) -> None:
    """D up to 32, and from 72 to 112; up to 96 with V in registers."""
    ratios = _ratios((150, 170, head_dim), {"heads": (2, 1)}, {"causal": causal})
    assert max(ratios.values()) <= 1, ratios


# Shape, what is made, options; the forward's warp groups and keys.
_MANY_KEYS: list[tuple[tuple[int, int, int], dict[str, Any], dict[str, Any], tuple[int, int]]] = [
    ((260, 300, 128), {"heads": (2, 1)}, {}, (3, 80)),
    ((400, 400, 128), {}, {"window": (150, 0)}, (3, 64)),
    ((260, 300, 72), {}, {"causal": False}, (3, 96)),
    ((260, 300, 96), {"heads": (2, 1)}, {}, (3, 96)),
    ((300, 260, 88), {"batch": 2, "lengths": [260, 77]}, {"alibi_slopes": torch.arange(1, 2) / 9}, (3, 96)),
    ((400, 400, 96), {}, {"window": (150, 0), "softcap": 3.0}, (3, 96)),
    ((400, 300, 160), {"batch": 2, "lengths": [300, 140]}, {}, (3, 64)),
    ((300, 320, 64), {}, {"causal": False}, (3, 128)),
    ((520, 530, 64), {"heads": (2, 1)}, {}, (4, 64)),
    ((260, 300, 32), {"heads": (2, 1)}, {"dropout_p": 0.1}, (3, 128)),
]


@pytest.mark.usefixtures("many_keys")
@pytest.mark.parametrize(
    ("shape", "made", "options", "tile"),
    long_but(_MANY_KEYS, 0, 1, 4, 8),
    ids=[f"{x[0]}-{'-'.join(x[2])}" for x in _MANY_KEYS],
)
def test_values_with_the_tiles_for_many_keys(
    shape: tuple[int, int, int],
    made: dict[str, Any],
    options: dict[str, Any],
    tile: tuple[int, int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Three or four warp groups, which skip what others see."""
    used = []
    run_forward = hopper.run_forward
    monkeypatch.setattr(hopper, "run_forward", lambda *x: used.append(x[2]) or run_forward(*x))
    monkeypatch.setitem(cuda._OPS, "fa2", _OWN)
    test_values(shape, made, options)
    assert [(each.warp_groups, each.bc) for each in used] == [tile]


@pytest.mark.parametrize(
    ("shape", "made", "options"),
    long_but(SPARSE_CASES + WIDE_SPARSE, 0, 1, 3, 7, len(SPARSE_CASES)),
    ids=[f"{x[0]}-{'-'.join(x[2])}" for x in SPARSE_CASES + WIDE_SPARSE],
)
def test_values_with_a_block_mask(
    shape: tuple[int, int, int],
    made: dict[str, Any],
    options: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Forward and backward."""
    monkeypatch.setitem(cuda._OPS, "fa2", _OWN)
    test_values(shape, made, options)


@pytest.mark.parametrize(
    ("shape", "made", "options"),
    long_but(CASES + WIDE + _TILES, 1, 7, 11, len(CASES + WIDE), len(CASES + WIDE) + 1),
    ids=[f"{x[0]}-{'-'.join(x[2])}" for x in CASES + WIDE + _TILES],
)
def test_values_of_both(
    shape: tuple[int, int, int],
    made: dict[str, Any],
    options: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Forward and backward, where a block has several tiles of queries: those that follow at once, and those
    between which keys are skipped."""
    monkeypatch.setitem(cuda._OPS, "fa2", _OWN)
    test_values(shape, made, options)


_GROUPED = [
    CASES[6],
    WIDE[0],
    _THREE[0],
    SPARSE_CASES[0],
    SPARSE_CASES[8],
    ((260, 300, 96), {"heads": (4, 2)}, {"dropout_p": 0.1, "alibi_slopes": torch.arange(4) / 9}),
    ((150, 140, 64), {"heads": (4, 2), "batch": 2, "lengths": [140, 77]}, {}),
]


@pytest.mark.parametrize(
    ("shape", "made", "options"), long_but(_GROUPED, 0), ids=[f"{x[0]}-{'-'.join(x[2])}" for x in _GROUPED]
)
def test_values_by_query_head(
    shape: tuple[int, int, int],
    made: dict[str, Any],
    options: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(hopper, "by_query_head", lambda *_: True)
    test_values(shape, made, options)


# (file, the wait and what follows it, shape, options): with a window dQ is not a tile late; at D = 64 dK
# is read from where a later tile's dS will be.
_DQ_SPACE = "mbarrier_wait(layout.barrier(DQ_EMPTY + group), dq_pipe.parity ^ 1);\n        dq_pipe"
_FOR_DO = "mbarrier_wait(layout.barrier(DO_FULL + q_pipe.index), q_pipe.parity);\n            wgmma_fence();"
_NOT_LATE: dict[str, Any] = {"window": (150, 0)}
_SHAPE, _SEVERAL = (200, 230, 96), (200, 700, 64)
_WAITS: dict[str, tuple[str, str, tuple[int, int, int], dict[str, Any]]] = {
    "of dQ's space": ("scores", _DQ_SPACE, _SHAPE, {}),
    "of dQ's space, with a window": ("scores", _DQ_SPACE, _SHAPE, _NOT_LATE),
    "for dO": ("consumer", _FOR_DO, _SHAPE, {}),
    "for dO, with a window": ("consumer", _FOR_DO, _SHAPE, _NOT_LATE),
    "for both groups' dS": (
        "consumer",
        "await_ds();\n        wgmma_fence();\n        multiply_dq(ds_pipe.index);",
        _SHAPE,
        _NOT_LATE,
    ),
    "for both groups' dS of the tile before": (
        "consumer",
        "await_ds();\n                wgmma_fence();",
        _SHAPE,
        {},
    ),
    "for both groups' last dS": (
        "consumer",
        "await_ds();\n            wgmma_fence();\n            multiply_dq(ds_pipe.index ^ 1);",
        _SHAPE,
        {},
    ),
    "for dK, sent from dS's buffer": (
        "consumer",
        "if (PADDED_D == 64 && first) await_sent();  // dK",
        _SEVERAL,
        {},
    ),
}


def plant(file: str, old: str, new: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The kernels are compiled from a copy of the sources, with `new` in the one place of `old`."""
    compiler, path = cpu.HopperCores(tmp_path), tmp_path / f"{file}.cuh"
    text = path.read_text()
    assert text.count(old) == 1
    path.write_text(text.replace(old, new))
    monkeypatch.setattr(nvrtc, "kernel", compiler)
    monkeypatch.setattr(plain, "_kernel", compiler)


@pytest.mark.parametrize("wait", [pytest.param(each, marks=pytest.mark.long) for each in _WAITS])
def test_a_missing_wait_shows(wait: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    file, old, shape, options = _WAITS[wait]
    plant(f"fa3_backward_{file}", old, ";" + old.partition(";")[2], monkeypatch, tmp_path)
    with pytest.raises(AssertionError, match=r"wrong: |waits for an mbarrier|not fenced"):
        ratios = _ratios(shape, {}, options)
        assert all(ratio <= 1 for ratio in ratios.values()), f"wrong: {ratios}"


@pytest.mark.long
def test_a_tile_released_before_its_end_shows(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """To which head dK and dV of a tile go is read again in the end."""
    old = "finish(loop_over_queries());\n            tiles.done();"
    new = "const bool has = loop_over_queries();\n            tiles.done();\n            finish(has);"
    plant("fa3_backward_consumer", old, new, monkeypatch, tmp_path)
    ratios = _ratios((700, 700, 64), {"heads": (2, 2)}, {"window": (150, 0)})
    assert any(ratio > 1 for ratio in ratios.values())


# (file, what is there, what is there instead).
_FENCES = {
    "of dS": ("fa3_backward_scores", "{ fence_proxy_async(), __syncwarp(); }", "{ __syncwarp(); }"),
    "of dQ, which comes after it": (
        "fa3_backward_consumer",
        "if (!first) stage_dq(layout, dq_pipe, dq);\n            share_ds(first);",
        "share_ds(first);\n            if (!first) stage_dq(layout, dq_pipe, dq);",
    ),
    "of dV": ("fa3_backward_consumer", "fence_proxy_async();\n        await_sent();", "await_sent();"),
    "of O": (
        "fa3_consumer",
        "stage_output(to, o, warp, lane);\n        fence_proxy_async();",
        "stage_output(to, o, warp, lane);",
    ),
}


@pytest.mark.parametrize("fence", _FENCES)
def test_a_missing_fence_shows(fence: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    plant(*_FENCES[fence], monkeypatch, tmp_path)
    monkeypatch.setitem(cuda._OPS, "fa2", _OWN)
    with pytest.raises(AssertionError, match="not fenced"):
        _ratios((200, 230, 96), {}, {})
