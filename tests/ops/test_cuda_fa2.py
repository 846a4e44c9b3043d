"""Stage 6 of the CUDA ladder on a CPU, beyond the grid, in small: both backwards, every tile, blocks that see
no key, rows that do not begin at 16 bytes, races. Tensor cores are imitated (mma_cpu.h); the rest is real.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from attention import cuda
from attention.cuda import CudaStage
from ops import nvrtc
from ops.cuda import plain, tensor_cores
from ops.cuda.tensor_cores import BackwardTile, fa2_backward, fa2_forward
from ops.library import register_attention
from ops.options import AttentionOptions
from scripts.accuracy import Problem, computed, error_ratios, expected
from tests.grid import long_but
from tests.ops import cpu
from tests.ops.cpu import documents
from tests.ops.recorded import SHARED_BYTES

pytestmark = [
    pytest.mark.skipif(cpu.GXX is None, reason="no g++, which compiles the kernels for the CPU"),
    pytest.mark.sampled(6),
]

_OP = register_attention("on_cpu_fa2", partial(cuda._forward, "fa2"), partial(cuda._backward, "fa2"), "CPU")


class _OnCPU(CudaStage):
    """fa2 with all that it declares, in bf16 on CPU tensors."""

    def __init__(self, deterministic: bool):
        super().__init__("fa2", deterministic)
        here = {"devices": frozenset({"cpu"}), "dtypes": frozenset({torch.bfloat16})}
        self.capabilities = replace(self.capabilities, **here)


@pytest.fixture(scope="module")
def compiler(tmp_path_factory: pytest.TempPathFactory) -> cpu.TensorCores:
    return cpu.TensorCores(tmp_path_factory.mktemp("csrc"))


@pytest.fixture(autouse=True)
def use(monkeypatch: pytest.MonkeyPatch, compiler: cpu.TensorCores) -> Callable[[Any], None]:
    """Puts something in the place of NVRTC; at first `compiler`."""

    def use(kernel: Any) -> None:
        monkeypatch.setattr(nvrtc, "kernel", kernel)
        monkeypatch.setattr(plain, "_kernel", kernel)

    monkeypatch.setattr(cuda, "missing", lambda: None)
    monkeypatch.setitem(cuda._OPS, "fa2", _OP)
    monkeypatch.setattr(tensor_cores, "_shared_bytes", lambda _: SHARED_BYTES[9, 0])
    use(compiler)
    return use


_inputs = partial(cpu.inputs, dtype=torch.bfloat16)


def _judge(q: Tensor, k: Tensor, v: Tensor, dout: Tensor, **options: Any) -> dict[str, float]:
    """The error ratios of out, lse and the gradients, and of these once more for the deterministic way."""
    problem, ratios = Problem(q, k, v, options, dout), {}
    reference, plain_formula = expected(problem)
    for way in (True, False):
        got = computed(_OnCPU(deterministic=way), problem)
        assert got.keys() == reference.keys()
        judged = error_ratios(got, reference, plain_formula, q.dtype)
        ratios |= {f"{name}_deterministic" if way else name: ratio for name, ratio in judged.items()}
    return ratios


_DOCUMENTS = (documents(70, 1, 119), documents(80, 1, 60, 69))
CASES: list[tuple[tuple[int, int, int], dict[str, Any], dict[str, Any]]] = [
    ((97, 200, 32), {"heads": (2, 1)}, {"causal": False, "window": (30, 20)}),
    ((200, 90, 40), {"cut": 1}, {"window": (37, 0), "softcap": 1.5}),
    ((97, 90, 40), {"cut": 1}, {"window": (37, 0), "softcap": 1e7}),
    ((97, 90, 40), {"cut": 1}, {"window": (37, 0), "softcap": 1e-46}),  # 0 in fp32
    ((300, 70, 64), {"heads": (2, 2)}, {}),  # 230 rows that see no key, and whole blocks
    ((300, 70, 128), {"heads": (1, 1)}, {}),
    ((40, 150, 128), {"heads": (6, 2), "batch": 2}, {}),  # one tile of queries a head
    ((33, 190, 64), {"batch": 3, "lengths": [0, 100, 190]}, {"causal": False}),
    ((150, 140, 72), {"batch": 2, "lengths": [140, 77]}, {"alibi_slopes": torch.tensor([0.1])}),
    ((190, 210, 96), {}, {"causal": False, "dropout_p": 0.2, "document_ids": _DOCUMENTS}),
    # Tiles of one document, which compare no ids, up to its end and from its beginning.
    ((260, 340, 32), {}, {"causal": False, "document_ids": (documents(150, 110), documents(200, 140))}),
    ((260, 340, 32), {}, {"document_ids": (documents(70, 190), documents(90, 250))}),
    ((130, 140, 128), {"heads": (2, 1)}, {"dropout_p": 0.1, "window": (50, 0), "softcap": 2.0}),
    ((70, 150, 96), {"cut": 1}, {"scale": -0.2}),
    ((70, 80, 96), {"cut": 1}, {"scale": 0.0}),
    ((1, 3, 8), {}, {}),
    ((40, 70, 32), {"magnitude": 4.0}, {"softcap": 64.0}),
    ((40, 70, 32), {"magnitude": 4.0}, {"softcap": 65.0}),  # from there on with the series of tanh
]


def kept(*shape: int, empty: tuple[int, ...] = ()) -> Tensor:
    """A block mask (B or 1, H or 1, rows, columns) that keeps half; of heads that are `empty` nothing."""
    mask = torch.rand(shape, generator=torch.Generator().manual_seed(sum(shape))) < 0.5
    mask[:, list(empty)] = False
    return mask


_ONE_COLUMN = torch.tensor([[1, 0, 0], [1, 1, 0], [1, 0, 0]], dtype=torch.bool)[None, None]
SPARSE_CASES: list[tuple[tuple[int, int, int], dict[str, Any], dict[str, Any]]] = [
    ((300, 380, 64), {"heads": (4, 2)}, {"block_mask": kept(1, 4, 3, 3)}),
    ((300, 300, 128), {"heads": (2, 2)}, {"block_mask": _ONE_COLUMN}),
    ((260, 300, 128), {"heads": (2, 1)}, {"causal": False, "block_mask": kept(1, 1, 3, 3)}),
    ((150, 290, 64), {"heads": (4, 1)}, {"causal": False, "block_mask": kept(1, 4, 2, 3, empty=(0, 2))}),
    ((140, 200, 64), {"heads": (3, 1)}, {"block_mask": kept(1, 3, 2, 2, empty=(1, 2))}),
    ((140, 200, 32), {"heads": (2, 2)}, {"block_mask": kept(1, 2, 2, 2, empty=(0, 1))}),
    ((150, 300, 96), {"batch": 2, "lengths": [300, 140]}, {"block_mask": kept(2, 1, 2, 3)}),
    (
        (1, 300, 64),
        {"batch": 3, "lengths": [0, 100, 300], "heads": (2, 1)},
        {"block_mask": kept(3, 1, 1, 3)},
    ),
    (
        (300, 340, 32),
        {"heads": (2, 1)},
        {
            "block_mask": kept(1, 2, 3, 3),
            "document_ids": (documents(150, 150), documents(200, 140)),
            "window": (140, 0),
            "dropout_p": 0.1,
        },
    ),
    (
        (260, 340, 40),
        {"cut": 1},
        {"causal": False, "block_mask": kept(1, 1, 3, 3), "window": (90, 150), "softcap": 1.5},
    ),
]


@pytest.mark.parametrize(
    ("shape", "made", "options"),
    long_but(SPARSE_CASES, 0, 1, 3, 7),
    ids=[f"{x[0]}-{'-'.join(x[2])}" for x in SPARSE_CASES],
)
@pytest.mark.parametrize("shared_bytes", [232_448, pytest.param(101_376, marks=pytest.mark.long)])
def test_values_with_a_block_mask(
    shape: tuple[int, int, int],
    made: dict[str, Any],
    options: dict[str, Any],
    shared_bytes: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Lists of several tiles, of one and of none, of heads of a group that each have their own; where a block
    has less shared memory, one stage of Q and dO."""
    monkeypatch.setattr(tensor_cores, "_shared_bytes", lambda _: shared_bytes)
    test_values(shape, made, options)


@pytest.mark.parametrize(
    ("shape", "made", "options"),
    long_but(CASES, 1, 2, 3, 7, 8, 9, 10, 12),
    ids=[f"{x[0]}-{'-'.join(x[2])}" for x in CASES],
)
def test_values(shape: tuple[int, int, int], made: dict[str, Any], options: dict[str, Any]) -> None:
    q, k, v, dout = _inputs(shape, **made)
    if "lengths" in made:
        options = options | {"kv_lengths": torch.tensor(made["lengths"], dtype=torch.int32)}
    ratios = _judge(q, k, v, dout, **options)
    assert max(ratios.values()) <= 1, ratios


def _bits(shape: tuple[int, int, int], block_mask: Tensor | None, **made: Any) -> list[Tensor]:
    """out and the gradients of a causal call."""
    q, k, v, dout = (x.requires_grad_() for x in _inputs(shape, **made))
    out = _OnCPU(deterministic=True)(q, k, v, block_mask=block_mask)
    return [out, *torch.autograd.grad(out, (q, k, v), dout.detach())]


def test_scores_that_are_all_below_zero() -> None:
    """As integers, negative floats are below -inf (softmax.cuh, largest_scores)."""
    q, k, v, _ = cpu.inputs((140, 300, 64), dtype=torch.bfloat16)
    to_the_last = torch.arange(300).flip(0)
    q[..., 0], k[..., 0] = 80, -0.2 * to_the_last - 2 * (7 * to_the_last % 10)  # scores from -800 up
    problem = Problem(q, k, v, {"causal": False})
    ratios = error_ratios(computed(_OnCPU(False), problem), *expected(problem), q.dtype)
    assert ratios.keys() == {"out", "lse"} and max(ratios.values()) <= 1, ratios


def test_a_softcap_near_zero_leaves_scores_of_zero() -> None:
    """0 times scale / softcap is 0 where the quotient is beyond fp32."""
    q, k, v, _ = cpu.inputs((40, 50, 32), dtype=torch.bfloat16)
    out = _OnCPU(False)(q.zero_(), k, v, causal=False, softcap=1e-46, scale=50.0)
    assert torch.allclose(out.float(), v.float().mean(2, keepdim=True).expand_as(out), atol=1e-2)


@pytest.mark.long
@pytest.mark.parametrize("block_mask", [None, kept(1, 6, 3, 3)], ids=["", "block_mask"])
def test_in_any_order(request: pytest.FixtureRequest, block_mask: Tensor | None) -> None:
    """Heads in groups, and with the shortest tiles of all at the end, or the first at the beginning, give the
    same bits."""
    shape, heads = (270, 300, 32), {"heads": (6, 6)}  # three tiles of queries and of keys
    before = _bits(shape, block_mask, **heads)
    request.getfixturevalue("small_groups")
    assert all(torch.equal(a, b) for a, b in zip(before, _bits(shape, block_mask, **heads), strict=True))


@pytest.mark.long
@pytest.mark.parametrize(
    ("head_dim", "tile"),
    [(head_dim, tile) for head_dim, tiles in tensor_cores._BACKWARD.items() for tile in tiles],
    ids=str,
)
def test_every_tile(monkeypatch: pytest.MonkeyPatch, head_dim: int, tile: BackwardTile) -> None:
    """Of the forward and of dQ there is one each."""
    monkeypatch.setitem(tensor_cores._BACKWARD, head_dim, (tile,))
    ratios = _judge(*_inputs((140, 150, head_dim)))
    assert max(ratios.values()) <= 1, ratios


def _options(head_dim: int, deterministic: bool = False) -> tuple[object, ...]:
    """Causal, as the launch functions take it."""
    return AttentionOptions(scale=head_dim**-0.5), None, [int(deterministic)]


@pytest.mark.parametrize("changed", ["query", "keys"])
def test_the_future_changes_no_bit(changed: str) -> None:
    """Nor do later tokens any of dQ, nor earlier queries any of dK and dV."""
    at, (q, k, v, dout) = 120, _inputs((192, 192, 64))
    options = _options(64, deterministic=True)
    others = [x.clone() for x in (q, k, v, dout)]
    if changed == "query":  # one whose maximum is far above the others'
        others[0][:, :, at] = 4 * k[:, :, at - 1]
        others[3][:, :, at] = 1
    else:
        others[1][:, :, at:] = 3 * q[:, :, at:]
        others[2][:, :, at:] = 1
    results = []
    for a, b, c, d in ((q, k, v, dout), others):
        out, lse = fa2_forward(a, b, c, *options)
        results.append((out, lse, *fa2_backward(d, a, b, c, out, lse, *options, False)[:3]))
    for name, before, after in zip(("out", "lse", "dq", "dk", "dv"), *results, strict=True):
        assert not torch.equal(before, after), name
        if name in ("out", "lse", "dq"):
            assert torch.equal(before[:, :, :at], after[:, :, :at]), name
        elif changed == "query":
            assert torch.equal(before[:, :, at + 1 :], after[:, :, at + 1 :]), name


def _one_token(x: Tensor) -> Tensor:
    """The next row would begin at 2 bytes beyond a multiple of 16."""
    return x[:, :, :1].as_strided((1, 1, 1, 64), (64, 64, 65, 1))


def _overlapping(x: Tensor) -> Tensor:
    return x.flatten()[: 69 + 64].view(1, 1, -1).unfold(-1, 64, 1)


@pytest.mark.parametrize("layout", [_one_token, _overlapping])
def test_layouts(layout: Callable[[Tensor], Tensor]) -> None:
    q, k, v, dout = (layout(x) for x in _inputs((70, 70, 64)))
    results = []
    for a, b, c, d in ((q, k, v, dout), [x.contiguous() for x in (q, k, v, dout)]):
        out, lse = fa2_forward(a, b, c, *_options(64))
        results.append((out, lse, *fa2_backward(d, a, b, c, out, lse, *_options(64), False)[:3]))
    for strided, contiguous in zip(*results, strict=True):
        assert torch.equal(strided, contiguous)


class _Sanitizer(cpu.Sanitizer):
    """Of kernels whose threads share memory, each once."""

    def launch(self, *arguments: Any) -> None:
        if self.name not in self.reports and not self.name.endswith(("_prepare", "_finish")):
            super().launch(*arguments)


def _races(use: Callable[[Any], None], compiler: cpu.Compiler, *inputs: Tensor) -> set[str]:
    """The kernels of both ways in which the thread sanitizer finds a race."""
    sanitizer = _Sanitizer(compiler)
    use(sanitizer)
    q, k, v, dout = inputs
    out, lse = fa2_forward(q, k, v, *_options(q.shape[3]))
    for deterministic in (False, True):
        fa2_backward(dout, q, k, v, out, lse, *_options(q.shape[3], deterministic), False)
    assert sanitizer.reports.keys() == {
        f"tilegpt_fa2_{name}" for name in ("forward", "backward", "backward_dq")
    }
    return {name.removeprefix("tilegpt_fa2_") for name, said in sanitizer.reports.items() if said}


@pytest.mark.long
def test_no_races(compiler: cpu.TensorCores, use: Callable[[Any], None]) -> None:
    """Two tiles of keys, and of queries one of each head."""
    assert _races(use, compiler, *_inputs((20, 70, 32), (2, 1))) == set()


@pytest.mark.long
def test_no_races_where_blocks_see_no_key(
    compiler: cpu.TensorCores, use: Callable[[Any], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """And with one stage of Q and dO, where Q does not stay in registers."""
    monkeypatch.setattr(tensor_cores, "_shared_bytes", lambda _: SHARED_BYTES[8, 9])
    assert _races(use, compiler, *_inputs((140, 10, 96), (2, 1))) == set()


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(50))
def test_random_calls(monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    """On the shared memory of any architecture. Without gradients of 0: where rows see a single key,
    dP - delta cancels in the formula, and here up to the rounding of out."""
    draw, g = random.Random(seed), torch.Generator().manual_seed(seed)
    able = draw.choice([*SHARED_BYTES.values()])
    monkeypatch.setattr(tensor_cores, "_shared_bytes", lambda _: able)
    batch, kv_heads, group, head_dim = map(
        draw.choice, ([1, 2], [1, 2], [1, 2, 3], [32, 40, 64, 96, 104, 128])
    )
    mask_heads = draw.choice([1, group * kv_heads])
    tq, tk, sides = draw.choice([1, 17, 64, 129, 260]), draw.choice([3, 65, 128, 270]), [-1, 1, 7, 40]
    ids = tuple(torch.randint(3, (batch, t), generator=g).int().sort().values for t in (tq, tk))
    lengths = draw.choice([None, None, [draw.choice([0, tk // 2, tk]) for _ in range(batch)]])
    tiles = -(-tq // 128), -(-tk // 128)
    options = {
        "causal": draw.random() < 0.5,
        "scale": draw.choice([None, None, -0.1, 0.3]),
        "softcap": draw.choice([None, None, 1.5]),
        "dropout_p": draw.choice([0.0, 0.0, 0.2]),
        "window": draw.choice([None, (draw.choice(sides), draw.choice(sides))]),
        "alibi_slopes": draw.choice([None, None, torch.rand(group * kv_heads, generator=g)]),
        "document_ids": draw.choice([None, None, ids]),
        "kv_lengths": None if lengths is None else torch.tensor(lengths, dtype=torch.int32),
        "block_mask": draw.choice([None, torch.rand(1, mask_heads, *tiles, generator=g) < 0.5]),
    }
    shape, heads, unaligned = (tq, tk, head_dim), (group * kv_heads, kv_heads), draw.random() < 0.3
    q, k, v, dout = _inputs(shape, heads, batch, lengths, cut=int(unaligned))
    exact, _ = expected(Problem(q, k, v, options, dout))
    ratios = _judge(q, k, v, dout, **options)
    wrong = {name: ratio for name, ratio in ratios.items() if ratio > 1 and exact[name.split("_")[0]].any()}
    assert not wrong
