"""The forward of stage `tiled` on tensor cores, on a CPU: values against the formula in fp64, tiles, layouts,
races, who takes it. Tensor cores are imitated at their worst (mma_cpu.h); the rest is real."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from ops.cuda import plain, split_fp16, tiled
from ops.cuda.call import Call
from ops.cuda.split_fp16 import Tile
from ops.options import AttentionOptions
from scripts.accuracy import Problem, error_ratios, expected
from tests.grid import long_but
from tests.ops import cpu
from tests.ops.cpu import documents
from tests.ops.recorded import SHARED_BYTES

pytestmark = [
    pytest.mark.skipif(cpu.GXX is None, reason="no g++, which compiles the kernels for the CPU"),
    pytest.mark.sampled(5),
]


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


def _inputs(*shape: Any, **made: Any) -> tuple[Tensor, ...]:
    """q, k and v."""
    return cpu.inputs(*shape, **made)[:3]


def _call(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Call:
    return cpu.call_of(Problem(q, k, v, options), [0, 0])


def _judge(q: Tensor, k: Tensor, v: Tensor, tile: Tile | None = None, **options: Any) -> dict[str, float]:
    """The error ratios of out and lse."""
    call = _call(q, k, v, **options)
    out, lse = split_fp16.run_forward(q, k, v, call, tile) if tile else split_fp16.forward(q, k, v, call)
    return error_ratios({"out": out, "lse": lse}, *expected(Problem(q, k, v, options)), torch.float32)


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
    (
        (140, 200, 96),
        {},
        {"causal": False, "dropout_p": 0.2, "document_ids": (documents(70, 70), documents(70, 130))},
    ),
    ((70, 80, 128), {"heads": (2, 1)}, {"dropout_p": 0.1, "window": (50, 0), "softcap": 2.0}),
    ((33, 70, 96), {"cut": 3}, {"scale": -0.2}),
    ((70, 80, 96), {"cut": 3}, {"scale": 0.0}),
    ((50, 140, 128), {"magnitude": 8.0}, {}),
    ((70, 100, 64), {"magnitude": 100.0}, {}),  # scores of standard deviation 1e4
    ((65, 70, 7), {}, {}),
]


@pytest.mark.parametrize(
    ("shape", "made", "options"),
    long_but(_CASES, 0, 2, 3, 4, 5, 7, 8, 9, 10, 13),
    ids=[f"{x[0]}-{'-'.join((*x[1], *x[2]))}" for x in _CASES],
)
def test_values(shape: tuple[int, int, int], made: dict[str, Any], options: dict[str, Any]) -> None:
    if "lengths" in made:
        options = options | {"kv_lengths": torch.tensor(made["lengths"], dtype=torch.int32)}
    ratios = _judge(*_inputs(shape, **made), **options)
    assert max(ratios.values()) <= 1, ratios


# Each table's after the first, and what else the kernel is written for: 32 rows a warp, any terms of Q held.
_TILES = [(head_dim, tile) for head_dim, tiles in split_fp16._FORWARD.items() for tile in tiles[1:]]
_TILES += [(64, Tile(128, 32, 4, 2, held)) for held in (1, 2)] + [(128, Tile(192, 16, 12, 1, 0))]


@pytest.mark.long
@pytest.mark.parametrize(("head_dim", "tile"), _TILES, ids=str)
def test_every_tile(head_dim: int, tile: Tile) -> None:
    ratios = _judge(*_inputs((70, 90, head_dim)), tile=tile)
    assert max(ratios.values()) <= 1, ratios


def test_keys_beside_a_sink() -> None:
    """Of one key with nearly all of the weight, whose value is zero: what the others give has its bits."""
    q, k, v = _inputs((64, 200, 64))
    q[..., 0], k[..., 0], k[..., 0, 0] = 1.0, 0.0, 8 * 16.1  # exp(-16.1) is 1e-7
    v[..., 0, :] = 0.0
    exact, formula = expected(Problem(q, k, v, {"causal": False}))
    out, _ = split_fp16.forward(q, k, v, _call(q, k, v, causal=False))
    most = exact["out"].abs().amax(3)
    ours, theirs = (((x - exact["out"]).abs().amax(3) / most).max() for x in (out, formula["out"]))
    assert ours < 3 * theirs


def test_scores_do_not_drift() -> None:
    """lse of a single key is its score: errors of either sign, although tensor cores cut off towards zero."""
    q, k, v = _inputs((128, 1, 64), batch=4)
    q = 0.6 * q + 0.8 * k
    _, lse = split_fp16.forward(q, k, v, _call(q, k, v, causal=False, scale=1.0))
    exact = (q.double() @ k.double().mT)[..., 0]
    unit = exact.abs().log2().floor().exp2() * 2**-23
    error = (lse - exact) * exact.sign() / unit
    assert abs(error.mean()) < 0.15 and error.abs().max() < 2  # without what is added, -0.47


def _sums(x: Tensor) -> tuple[Tensor, Tensor]:
    """The terms of x, as k, as fp64: what they stand for, and both by themselves, times a power of two."""
    call = _call(x, x, x)
    found = split_fp16.largest(call, x, x, x)
    first, second = split_fp16.split("k", x, found, call).unflatten(3, (2, -1)).double().unbind(3)
    exponents = torch.frexp(found[1]).exponent[..., None, None]  # the largest is in 2^(n - 1) .. 2^n
    return torch.ldexp(first + second / 2048, exponents - 14), torch.stack((first, second))


@pytest.mark.parametrize("head_dim", [20, 33, 128])
def test_terms_add_up(head_dim: int) -> None:
    """To a unit in the last place, mostly to the last bit, from any strides; zeros beyond the head dim."""
    x = _inputs((40, 1, head_dim), (2, 2), cut=1)[0][:, :, ::3]
    for strided in (x, 1e-20 * x, 1e20 * x[:, :1].expand(2, 3, -1, -1)):
        sums, (first, second) = _sums(strided)
        off = (sums[..., :head_dim] / strided.double() - 1).abs()
        assert off.max() <= 2.0**-23 and (off == 0).float().mean() > 0.7
        assert not first[..., head_dim:].any() and not second[..., head_dim:].any()
        assert 2**13 <= first.abs().max() <= 2**14
        assert (second.abs() <= first.abs()).all()


def test_terms_at_the_ends_of_the_range() -> None:
    """Small numbers beside large ones lose bits; what is not finite reaches no other number."""
    full = 2 - 2.0**-23  # all 24 bits
    numbers = torch.tensor([1.0, full * 2.0**-26, full * 2.0**-40, 2.0**-48, 0.0])
    for factor in (1.0, 2.0**120, 2.0**-100):
        off = (_sums((numbers * factor).reshape(1, 1, 1, -1))[0][0, 0, 0, :5] / factor - numbers).abs()
        assert (off <= torch.maximum(2.0**-23 * numbers, torch.tensor(2.0**-49))).all()
    mixed = torch.cat((numbers, torch.tensor([torch.inf, -torch.inf, torch.nan]))).reshape(1, 1, 1, -1)
    sums = _sums(mixed)[0].flatten()
    assert torch.equal(sums[:5], _sums(mixed[..., :5])[0].flatten()[:5]) and sums[5:8].isnan().all()


def test_what_lies_beyond_the_lengths_does_not_count() -> None:
    """Whatever a cache holds there, results are as exact as without."""
    q, k, v = _inputs((33, 140, 64), batch=2)
    lengths = {"kv_lengths": torch.tensor([60, 0], dtype=torch.int32), "causal": False}
    before = _bits(q, k, v, **lengths)
    k[0, :, 60:], v[0, :, 60:], k[1], v[1] = 3e38, -3e38, torch.inf, 1e30
    assert all(torch.equal(a, b) for a, b in zip(before, _bits(q, k, v, **lengths), strict=True))


def test_each_head_of_keys_has_its_own_magnitudes() -> None:
    """Its query heads' with it: four heads on two."""
    size = torch.tensor([1e-9, 1e9])
    q, k, v = _inputs((40, 50, 20), (4, 2))
    q, k, v = q * size.repeat_interleave(2)[:, None, None], k * size[:, None, None], v / size[:, None, None]
    found = split_fp16.largest(_call(q, k, v), q, k, v, 3 * q)
    of_q = q.abs().amax((2, 3)).unflatten(1, (2, 2)).amax(2)
    assert torch.equal(found[:3], torch.stack((of_q, k.abs().amax((2, 3)), v.abs().amax((2, 3)))))
    assert torch.equal(found[3], (3 * q).abs().amax((2, 3)).unflatten(1, (2, 2)).amax(2))
    assert not split_fp16.largest(_call(q, k, v), q, k, v)[3].any()
    ratios = _judge(q, k, v)
    assert max(ratios.values()) <= 1, ratios


@pytest.mark.parametrize("magnitude", [100.0, 1000.0, 2e4])
def test_where_one_key_has_all_the_weight(magnitude: float) -> None:
    """out is that key's value, as by the formula, to the last bit or nearly so."""
    ratios = _judge(*_inputs((128, 128, 64), magnitude=magnitude))
    assert ratios["out"] <= 1, ratios


def test_nothing_but_zeros_and_small_scales() -> None:
    q, k, v = _inputs((20, 40, 64))
    for scale in (0.125, 1e-8, 1e-30):
        ratios = _judge(0 * q, 0 * k, v * 1e-36, scale=scale)
        assert ratios["out"] <= 1 and ratios["lse"] < 2, ratios  # of exp2(0) the imitation makes no 1


def _bits(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
    return split_fp16.forward(q, k, v, _call(q, k, v, **options))


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
    assert split_fp16.even(q) and split_fp16.even(turned[0]) and not split_fp16.even(odd[0])
    assert not split_fp16.even(q[..., :63])
    expected = _bits(q, k, v)
    for each in (odd, turned):
        assert all(torch.equal(a, b) for a, b in zip(_bits(*each), expected, strict=True))


def test_in_any_order(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Heads in groups, and with the shortest tiles of all at the end, give the same bits."""
    monkeypatch.setitem(split_fp16._FORWARD, 32, (Tile(64, 32, 4, 1, 2),))
    inputs = _inputs((130, 130, 16), (6, 6))  # three tiles of queries
    before = _bits(*inputs)
    request.getfixturevalue("small_groups")
    assert all(torch.equal(a, b) for a, b in zip(before, _bits(*inputs), strict=True))


class _Sanitizer(cpu.Sanitizer):
    """Of the kernel whose threads share memory."""

    def launch(self, *arguments: Any) -> None:
        if self.name not in ("tilegpt_split_fp16", "tilegpt_largest"):
            super().launch(*arguments)


def test_no_races(compiler: cpu.TensorCores, use: Callable[[Any], None]) -> None:
    """Three tiles of keys, Q in registers and in shared memory."""
    sanitizer = _Sanitizer(compiler)
    use(sanitizer)
    q, k, v = _inputs((20, 40, 32))
    split_fp16.run_forward(q, k, v, _call(q, k, v), Tile(64, 16, 4, 1, 1))
    assert sanitizer.reports == {"tilegpt_tiled_split_fp16_forward": ""}


@pytest.mark.parametrize(
    ("change", "usable"),
    [
        ({}, True),
        ({"dtype": torch.bfloat16}, False),
        ({"tokens": split_fp16.FEWEST_QUERIES - 1}, False),
        ({"arch": (7, 5)}, False),
        ({"head_dim": 136}, False),
        ({"on_gpu": False}, False),
    ],
    ids=lambda x: "-".join(x) if isinstance(x, dict) else "",
)
def test_who_takes_it(monkeypatch: pytest.MonkeyPatch, change: dict[str, Any], usable: bool) -> None:
    asked = {"dtype": torch.float32, "tokens": split_fp16.FEWEST_QUERIES, "arch": (8, 0), "head_dim": 128}
    asked |= {"on_gpu": True} | change
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: asked["arch"])
    monkeypatch.setattr(Tensor, "is_cuda", asked["on_gpu"])
    split_fp16._has_tensor_cores.cache_clear()
    q = torch.empty(1, 1, asked["tokens"], asked["head_dim"], dtype=asked["dtype"], device="meta")
    assert split_fp16.usable(q) is usable
    split_fp16._has_tensor_cores.cache_clear()


@pytest.mark.parametrize("fma", [0, 1])
def test_fma_units_can_be_asked_for(
    monkeypatch: pytest.MonkeyPatch, compiler: cpu.TensorCores, use: Callable[[Any], None], fma: int
) -> None:
    """Forward and backward go the same way."""
    sources: list[str] = []
    use(lambda source, *rest: sources.append(source) or compiler(source, *rest))
    monkeypatch.setattr(split_fp16, "usable", lambda _: True)
    monkeypatch.setattr(
        tiled.split_fp16_backward, "backward", lambda *call: sources.append("backward") or call[1:4]
    )
    q, k, v = _inputs((20, 40, 64))
    options = (AttentionOptions(scale=0.125), None, [0, fma])
    out, lse = tiled.tiled_forward(q, k, v, *options)
    assert sources == (
        ["ladder/tiled.cu"] if fma else [*["fp32/split_fp16.cu"] * 3, "fp32/tiled_split_fp16.cu"]
    )
    del sources[:]
    assert len(tiled.tiled_backward(out, q, k, v, out, lse, *options, False)) == 4
    assert sources == (["lib/delta.cu", *["ladder/tiled_backward.cu"] * 2] if fma else ["backward"])


@pytest.mark.parametrize("arch", SHARED_BYTES)
def test_a_tile_fits_everywhere(arch: tuple[int, int]) -> None:
    """In as many blocks as the tile is for."""
    for head_dim, tiles in split_fp16._FORWARD.items():
        tile = split_fp16.first_that_fits(tiles, head_dim, SHARED_BYTES[arch])
        assert tile.blocks * (tile.shared_bytes(head_dim) + 1024) <= SHARED_BYTES[arch] + 1024
