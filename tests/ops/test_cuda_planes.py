"""The forward of stage `tiled` on tensor cores, on a CPU: values against the formula in fp64, tiles, layouts,
races, who takes it. Tensor cores are imitated at their worst (mma_cpu.h); the rest is real."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from attention.geometry import diagonal_band
from ops.cuda import plain, planes, tiled
from ops.cuda.call import Call
from ops.cuda.planes import Tile
from scripts.accuracy import Problem, dropout_seed, error_ratios, expected
from tests.ops import cpu
from tests.ops.recorded import SHARED_BYTES

pytestmark = pytest.mark.skipif(cpu.GXX is None, reason="no g++, which compiles the kernels for the CPU")


@pytest.fixture(scope="module")
def compiler(tmp_path_factory: pytest.TempPathFactory) -> cpu.TensorCores:
    return cpu.TensorCores(tmp_path_factory.mktemp("csrc"))


@pytest.fixture(autouse=True)
def use(compiler: cpu.TensorCores, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[Any], None]]:
    """Puts something in the place of NVRTC; at first `compiler`."""

    def use(kernel: Any) -> None:
        monkeypatch.setattr(plain, "_kernel", kernel)

    use(compiler)
    yield use


def _inputs(
    shape: tuple[int, int, int],
    heads: tuple[int, int] = (1, 1),
    batch: int = 1,
    lengths: list[int] | None = None,
    cut: int = 0,
    magnitude: float = 1.0,
) -> tuple[Tensor, ...]:
    """q, k and v. Keys and values beyond `lengths` are NaN; rows begin at `cut` of longer ones; q and k are
    of `magnitude`."""
    (tq, tk, head_dim), g = shape, torch.Generator().manual_seed(7)
    made = []
    for h, t, size in ((heads[0], tq, magnitude), (heads[1], tk, magnitude), (heads[1], tk, 1.0)):
        x = size * torch.randn(batch, h, t, head_dim + 2 * cut, generator=g)
        made.append(x[..., cut : cut + head_dim])
    for b, length in enumerate(lengths or []):
        made[1][b, :, length:] = made[2][b, :, length:] = torch.nan
    return tuple(made)


def _call(q: Tensor, k: Tensor, v: Tensor, **o: Any) -> Call:
    left, right = diagonal_band(o.get("causal", True), o.get("window"))
    tensors = (o.get("alibi_slopes"), None, *(o.get("segments") or (None, None)), o.get("kv_lengths"))
    scale, dropout_p = o.get("scale", q.shape[3] ** -0.5), o.get("dropout_p", 0.0)
    numbers = (scale, left, right, o.get("softcap", 0.0), dropout_p, [0, 0])
    return Call(q, k, v, *tensors, dropout_seed(q.device), *numbers)


def _judge(q: Tensor, k: Tensor, v: Tensor, tile: Tile | None = None, **options: Any) -> dict[str, float]:
    """The error ratios of out and lse."""
    call = _call(q, k, v, **options)
    out, lse = planes.run_forward(q, k, v, call, tile) if tile else planes.forward(q, k, v, call)
    return error_ratios({"out": out, "lse": lse}, *expected(Problem(q, k, v, options)), torch.float32)


def _ids(*runs: int) -> Tensor:
    """Documents of these lengths, one after the other."""
    return torch.repeat_interleave(torch.arange(len(runs)), torch.tensor(runs)).int()[None]


_CASES: list[tuple[tuple[int, int, int], dict[str, Any], dict[str, Any]]] = [
    ((135, 150, 64), {"heads": (2, 1)}, {}),
    ((1, 239, 64), {}, {}),  # the longest sums, and no other rows that err
    ((1, 239, 128), {}, {}),
    ((40, 100, 128), {"heads": (4, 2)}, {"causal": False}),
    ((130, 90, 20), {"cut": 1}, {"window": (37, 0), "softcap": 1.5}),
    ((70, 100, 33), {"heads": (2, 1)}, {"causal": False, "window": (30, 20)}),
    ((300, 70, 64), {}, {}),  # 230 rows that see no key, and whole blocks
    ((33, 140, 64), {"batch": 3, "lengths": [0, 60, 140]}, {"causal": False}),
    ((150, 140, 80), {"batch": 2, "lengths": [140, 77]}, {"alibi_slopes": torch.tensor([0.1])}),
    ((90, 100, 96), {}, {"causal": False, "dropout_p": 0.2, "segments": (_ids(40, 1, 49), _ids(60, 9, 31))}),
    ((70, 80, 128), {"heads": (2, 1)}, {"dropout_p": 0.1, "window": (50, 0), "softcap": 2.0}),
    ((33, 70, 96), {"cut": 3}, {"scale": -0.2}),
    ((70, 80, 96), {"cut": 3}, {"scale": 0.0}),
    ((50, 140, 128), {"magnitude": 8.0}, {}),
    ((70, 100, 64), {"magnitude": 100.0}, {}),  # scores of standard deviation 1e4
    ((65, 70, 7), {}, {}),
]


@pytest.mark.parametrize(
    ("shape", "made", "options"), _CASES, ids=[f"{x[0]}-{'-'.join((*x[1], *x[2]))}" for x in _CASES]
)
def test_values(shape: tuple[int, int, int], made: dict[str, Any], options: dict[str, Any]) -> None:
    if "lengths" in made:
        options = options | {"kv_lengths": torch.tensor(made["lengths"], dtype=torch.int32)}
    ratios = _judge(*_inputs(shape, **made), **options)
    assert max(ratios.values()) <= 1, ratios


# Each table's after the first, and what else the kernel is written for: 32 rows a warp, any planes of Q held.
_TILES = [(head_dim, tile) for head_dim, tiles in planes._FORWARD.items() for tile in tiles[1:]]
_TILES += [(64, Tile(128, 32, 4, 2, held)) for held in (0, 2)] + [(128, Tile(192, 16, 12, 1, 0))]


@pytest.mark.parametrize(("head_dim", "tile"), _TILES, ids=str)
def test_every_tile(head_dim: int, tile: Tile) -> None:
    ratios = _judge(*_inputs((70, 90, head_dim)), tile=tile)
    assert max(ratios.values()) <= 1, ratios


@pytest.mark.parametrize("head_dim", [20, 33, 128])
def test_planes_add_up(head_dim: int) -> None:
    """To every bit, from any strides; zeros beyond the head dim."""
    x = _inputs((40, 1, head_dim), (2, 2), cut=1)[0][:, :, ::3]
    for strided in (x, x[:, :1].expand(2, 3, -1, -1)):
        split = planes.split(strided, _call(x, x, x)).unflatten(3, (3, -1)).double()
        assert torch.equal(split.sum(3)[..., :head_dim], strided.double())
        assert not split[..., head_dim:].any()
        assert (split[..., 1:, :head_dim].abs() <= 2**-8 * split[..., :-1, :head_dim].abs()).all()


def test_planes_at_the_ends_of_the_range() -> None:
    """Exact from 2^-110 on, below to half of bf16's least number; NaN where bf16 would be infinite."""
    full = 2 - 2.0**-23  # all 24 bits
    numbers = [
        full * 2.0**-110,
        full * 2.0**-111,
        2.0**-149,
        3.38e38,
        3.4e38,
        torch.inf,
        -torch.inf,
        torch.nan,
    ]
    x = torch.tensor(numbers).reshape(1, 1, 1, -1)
    sums = planes.split(x, _call(x, x, x)).unflatten(3, (3, -1)).double().sum(3)[..., : x.shape[3]]
    off = (sums - x.double()).abs().flatten()
    assert off[0] == off[3] == 0 and (off[1:3] <= 2.0**-134).all() and off[1] > 0
    assert sums.flatten()[4:].isnan().all()


def _bits(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
    return planes.forward(q, k, v, _call(q, k, v, **options))


def test_powers_of_two_change_no_mantissa() -> None:
    """Neither in the scores, where they cancel, nor in values, large or small."""
    q, k, v = _inputs((20, 40, 64))
    out, lse = _bits(q, k, v)
    for exponent in (-60, 100):
        scaled, same = _bits(q * 2.0**-exponent, k * 2.0**exponent, v * 2.0**exponent)
        assert torch.equal(scaled, out * 2.0**exponent) and torch.equal(same, lse)


@pytest.mark.parametrize(("name", "value"), [("k", torch.inf), ("k", torch.nan), ("k", 3.0), ("v", 3.0)])
def test_a_key_reaches_those_who_see_it(name: str, value: float) -> None:
    q, k, v = _inputs((70, 70, 64))
    before, _ = _bits(q, k, v)
    (k if name == "k" else v)[:, :, 50] = value
    after, _ = _bits(q, k, v)
    assert torch.equal(before[:, :, :50], after[:, :, :50])
    assert (after[:, :, 50:].isfinite() == (value == 3)).all() and not torch.equal(before, after)


def test_rows_that_begin_anywhere_give_the_same() -> None:
    """Two numbers at a time or one, read and written; transposed heads and tokens too."""
    q, k, v = _inputs((20, 40, 64), (2, 2))
    odd = tuple(torch.nn.functional.pad(x, (1, 2))[..., 1:-2] for x in (q, k, v))
    turned = tuple(x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v))
    assert planes.even(q) and planes.even(turned[0]) and not planes.even(odd[0])
    assert not planes.even(q[..., :63])
    expected = _bits(q, k, v)
    for each in (odd, turned):
        assert all(torch.equal(a, b) for a, b in zip(_bits(*each), expected, strict=True))


def test_in_any_order(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Heads in groups, and with the shortest tiles of all at the end, give the same bits."""
    monkeypatch.setitem(planes._FORWARD, 32, (Tile(64, 32, 4, 1, 3),))
    inputs = _inputs((130, 130, 16), (6, 6))  # three tiles of queries
    before = _bits(*inputs)
    request.getfixturevalue("small_groups")
    assert all(torch.equal(a, b) for a, b in zip(before, _bits(*inputs), strict=True))


_PRODUCT = "for (int product = 0; product < PRODUCTS; product++)"


@pytest.mark.parametrize(
    ("source", "right", "wrong"),
    [
        ("planes.cuh", _PRODUCT, "for (int product : {1, 2, 3, 4, 5})"),  # without x2 y0
        ("planes.cuh", _PRODUCT, "for (int product : {0, 1, 3, 4, 5})"),  # without x1 y1
        ("planes.cuh", _PRODUCT, "for (int product : {0, 1, 2, 3, 5})"),  # without x0 y1
        ("split.cuh", "p1 = pack(low, high);", "p1 = 0;"),
        ("softmax.cuh", "rows.l[t][half] *= rescale;", "rows.l[t][half] *= 1.0f;"),
        ("tiled_planes.cu", "first + row < p.tq", "first + row < p.tq - 1"),
        ("tiled_planes.cu", "wait_for_all_but<0>();", ""),
    ],
    ids=["x2 y0", "x1 y1", "x0 y1", "plane", "rescale", "last row", "wait"],
)
def test_mistakes_are_caught(
    tmp_path: Path, use: Callable[[Any], None], source: str, right: str, wrong: str
) -> None:
    use(cpu.TensorCores(tmp_path, {source: (right, wrong)}))
    ratios = _judge(*_inputs((70, 150, 64), magnitude=4.0))
    assert max(ratios.values()) > 1, ratios


class _Sanitizer(cpu.Sanitizer):
    """Of the kernel whose threads share memory."""

    def launch(self, *arguments: Any) -> None:
        if self.name != "tilegpt_planes":
            super().launch(*arguments)


@pytest.mark.parametrize("barrier", [True, False], ids=["as it is", "without the barrier"])
def test_races(tmp_path: Path, use: Callable[[Any], None], barrier: bool) -> None:
    """Three tiles of keys, Q in registers and in shared memory. None as it is."""
    landed = "__syncthreads();  // this tile has landed"
    changes = {} if barrier else {"tiled_planes.cu": (landed, "// this tile has landed")}
    sanitizer = _Sanitizer(cpu.TensorCores(tmp_path, changes))
    use(sanitizer)
    q, k, v = _inputs((20, 40, 32))
    planes.run_forward(q, k, v, _call(q, k, v), Tile(64, 16, 4, 1, 1))
    assert bool(sanitizer.reports["tilegpt_tiled_planes_forward"]) != barrier


@pytest.mark.parametrize(
    ("change", "usable"),
    [
        ({}, True),
        ({"dtype": torch.bfloat16}, False),
        ({"tokens": planes.FEWEST_QUERIES - 1}, False),
        ({"arch": (7, 5)}, False),
        ({"head_dim": 136}, False),
        ({"on_gpu": False}, False),
    ],
    ids=lambda x: "-".join(x) if isinstance(x, dict) else "",
)
def test_who_takes_it(monkeypatch: pytest.MonkeyPatch, change: dict[str, Any], usable: bool) -> None:
    asked = {"dtype": torch.float32, "tokens": planes.FEWEST_QUERIES, "arch": (8, 0), "head_dim": 128}
    asked |= {"on_gpu": True} | change
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: asked["arch"])
    monkeypatch.setattr(Tensor, "is_cuda", asked["on_gpu"])
    planes._has_tensor_cores.cache_clear()
    q = torch.empty(1, 1, asked["tokens"], asked["head_dim"], dtype=asked["dtype"], device="meta")
    assert planes.usable(q) is usable
    planes._has_tensor_cores.cache_clear()


@pytest.mark.parametrize("fma", [0, 1])
def test_fma_units_can_be_asked_for(
    monkeypatch: pytest.MonkeyPatch, compiler: cpu.TensorCores, use: Callable[[Any], None], fma: int
) -> None:
    """Forward and backward go the same way."""
    sources: list[str] = []
    use(lambda source, *rest: sources.append(source) or compiler(source, *rest))
    monkeypatch.setattr(planes, "usable", lambda _: True)
    monkeypatch.setattr(
        tiled.planes_backward, "backward", lambda *call: sources.append("backward") or call[1:4]
    )
    q, k, v = _inputs((20, 40, 64))
    options = (*[None] * 6, 0.125, -1, 0, 0.0, 0.0, [0, fma])
    out, lse = tiled.tiled_forward(q, k, v, *options)
    assert sources == (["tiled.cu"] if fma else ["planes.cu", "planes.cu", "tiled_planes.cu"])
    del sources[:]
    assert len(tiled.tiled_backward(out, q, k, v, out, lse, *options, False)) == 4
    assert sources == (["delta.cu", *["tiled_backward.cu"] * 2] if fma else ["backward"])


@pytest.mark.parametrize("arch", SHARED_BYTES)
def test_a_tile_fits_everywhere(arch: tuple[int, int]) -> None:
    for head_dim, tiles in planes._FORWARD.items():
        assert (
            planes.first_that_fits(tiles, head_dim, SHARED_BYTES[arch]).shared_bytes(head_dim)
            <= SHARED_BYTES[arch]
        )
