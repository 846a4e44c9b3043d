"""Attention to a cache in place of k and v: every kind, by all that declare it, against the definition."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from attention.base import CACHES, CachedTensor, CacheView, UnsupportedAttention, quantise, raw
from attention.naive import NaiveAttention
from ops.cache_view import CACHE_DTYPES, dequantise
from scripts.accuracy import error_ratios
from tests.grid import NAMES, build

pytestmark = pytest.mark.sampled(4)

KINDS = (None, *CACHE_DTYPES)
READERS = [name for name in NAMES if build(name).capabilities.caches == frozenset(CACHES) and name != "naive"]
OPTIONS = {
    "plain": {},
    "window": {"window": (9, 0)},
    "alibi_softcap": {"alibi_slopes": torch.tensor([0.5, 0.25, 0.1, 0.02]), "softcap": 5.0},
}


def stored(x: Tensor, kind: str | None) -> tuple[Tensor, Tensor | None]:
    """(data, scale (B, Hkv, parts, T)) of x (B, Hkv, T, D)."""
    if kind is None:
        return x, None
    data, scale = quantise(x, kind)
    return data, scale.transpose(-2, -1).contiguous()


def paged(data: Tensor, scale: Tensor | None, table: Tensor, block: int) -> CachedTensor:
    """A dense cache cut into the blocks that `table` (B, n) names, each written by itself."""
    batch, heads, _, width = data.shape
    n = int(table.max()) + 1
    blocks = torch.zeros(n, heads, block, width, dtype=data.dtype, device=data.device)
    scales = None if scale is None else scale.new_zeros(n, heads, scale.shape[2], block)
    for row, j in itertools.product(range(batch), range(table.shape[1])):
        at = slice(j * block, (j + 1) * block)
        raw(blocks)[table[row, j]] = raw(data)[row, :, at]
        if scales is not None:
            scales[table[row, j]] = scale[row, :, :, at]
    return CachedTensor(blocks, scales, table)


def make(kind: str | None, block: int | None, tq: int, dtype: torch.dtype = torch.float32, **shape):
    """q, a view of up to 96 (`tokens`) tokens a row in whatever blocks, and what it holds as fp32 k and v."""
    g = torch.Generator().manual_seed(tq)
    batch, heads, kv_heads, dim = 3, shape.get("heads", 4), 2, shape.get("dim", 32)
    tokens = shape.get("tokens", 96)
    q, k, v = (
        torch.randn(batch, n, t, dim, generator=g).to(dtype)
        for n, t in ((heads, tq), (kv_heads, tokens), (kv_heads, tokens))
    )
    lengths = torch.tensor([tokens, tq, max(tq, tokens // 3 + 1)], dtype=torch.int32)
    sides, whole = [], []
    table = None
    if block is not None:
        table = 1 + torch.randperm(batch * tokens // block, generator=g).view(batch, -1).to(torch.int32)
    for x in (k, v):
        data, scale = stored(x, kind)
        whole.append(x.float() if scale is None else dequantise(data, scale.transpose(-2, -1)))
        sides.append(CachedTensor(data, scale) if block is None else paged(data, scale, table, block))
    return q, CacheView(*sides, lengths), *whole


@given(
    st.sampled_from(sorted(CACHE_DTYPES)),
    st.integers(0, 2**31),
    st.floats(1e-20, 1e20),
    st.sampled_from([2, 10, 64]),
)
def test_quantised_to_within_half_a_step(kind, seed, size, dim):
    x = torch.randn(5, dim, generator=torch.Generator().manual_seed(seed)) * size
    x[0] = 0
    data, scale = quantise(x, kind)
    parts = scale.shape[-1]
    largest = CACHE_DTYPES[kind][1]
    back = dequantise(data, scale)
    # bf16's rounding of a scale moves the ends of the range by 1 / 256 of it
    step = x.unflatten(-1, (parts, -1)).abs().amax(-1, keepdim=True) / largest
    off = (back - x).unflatten(-1, (parts, -1)).abs()
    allowed = step * (0.51 + largest / 256) if kind != "fp8" else off.new_full((), torch.inf)
    relative = x.unflatten(-1, (parts, -1)).abs() / 16 + step  # e4m3 rounds to a sixteenth
    assert (off <= torch.minimum(allowed, allowed if kind != "fp8" else relative)).all()
    assert not back[0].any()
    assert data.shape[-1] == (dim // 2 if kind == "int4" else dim)


@pytest.mark.parametrize("block", [None, 16], ids=["dense", "paged"])
@pytest.mark.parametrize("kind", KINDS)
def test_naive_reads_what_was_written(kind, block):
    for name, tq in itertools.product(OPTIONS, (1, 7)):
        q, view, k, v = make(kind, block, tq)
        assert torch.equal(torch.stack(view.tensors()), torch.stack((k, v)))
        out = NaiveAttention()(q, view, **OPTIONS[name])
        expected = NaiveAttention()(q, k, v, kv_lengths=view.lengths, **OPTIONS[name])
        torch.testing.assert_close(out, expected)


def cases():
    for name, kind, block in itertools.product(READERS, KINDS, (None, 16)):
        for options, tq in itertools.product(OPTIONS, (1, 7)):
            few = options == "plain" or (kind == "int4" and block and tq == 7)
            marks = [] if few or name == "tiled" else [pytest.mark.long]
            yield pytest.param(
                name, kind, block, options, tq, marks=marks, id=f"{name}-{kind}-{block}-{options}-{tq}"
            )


@pytest.mark.parametrize(("name", "kind", "block", "options", "tq"), list(cases()))
def test_readers_agree_with_the_specification(name, kind, block, options, tq):
    q, view, _, _ = make(kind, block, tq)
    out, lse = build(name)(q, view, return_lse=True, **OPTIONS[options])
    expected, expected_lse = NaiveAttention()(q, view, return_lse=True, **OPTIONS[options])
    torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(lse, expected_lse, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", READERS)
def test_sixteen_bits_and_odd_head_dims(name, kind):
    for dtype, dim in ((torch.float16, 40), (torch.bfloat16, 72)):
        q, view, k, v = make(kind, 32, 2, dtype, dim=dim)
        out = build(name)(q, view)
        exact = NaiveAttention()(q.double(), k.double(), v.double(), kv_lengths=view.lengths)
        plain = NaiveAttention()(q, k.to(dtype), v.to(dtype), kv_lengths=view.lengths)
        assert error_ratios({"out": out}, {"out": exact}, {"out": plain}, dtype)["out"] <= 1


@pytest.mark.gpu
@pytest.mark.parametrize("block", [None, 16, 64])
@pytest.mark.parametrize("kind", KINDS)
def test_the_tiles_of_a_gpu(kind, block):
    """Of a step and of a chunk, many tiles a row: by the criterion."""
    for tq in (1, 4, 60):
        q, view, k, v = make(kind, block, tq, torch.bfloat16, heads=8, dim=128, tokens=1344)
        sides = (CachedTensor(*(x if x is None else x.cuda() for x in side)) for side in (view.k, view.v))
        out = build("triton")(q.cuda(), CacheView(*sides, view.lengths.cuda())).cpu()
        exact = NaiveAttention()(q.double(), k.double(), v.double(), kv_lengths=view.lengths)
        plain = NaiveAttention()(q, k.bfloat16(), v.bfloat16(), kv_lengths=view.lengths)
        assert error_ratios({"out": out}, {"out": exact}, {"out": plain}, torch.bfloat16)["out"] <= 1


def test_others_refuse_and_say_what_to_change():
    q, view, _, _ = make("int8", 16, 1)
    for name in NAMES:
        attention = build(name)
        if attention.capabilities.caches:
            continue
        with pytest.raises(UnsupportedAttention) as error:
            attention(q, view)
        assert "no int8 cache: needs cache_dtype=auto" in str(error.value)
        assert "no paged cache: needs cache=dense" in str(error.value)
        assert "attention=naive and attention=tiled" in str(error.value)


def test_values_of_another_layout():
    """What takes one layout and one table, K's, refuses them; others read them."""
    q, view, _, _ = make("int4", 16, 1)
    v = view.v
    flipped = v._replace(data=v.data.flip(0), scale=v.scale.flip(0), table=len(v.data) - 1 - v.table)
    data = v._replace(data=v.data.transpose(1, 2).contiguous().transpose(1, 2))
    scale = v._replace(scale=v.scale.mT.contiguous().mT)
    expected = build("tiled")(q, view)
    for other, words in ((flipped, "two block tables"), (data, "one layout"), (scale, "one layout")):
        assert torch.equal(build("tiled")(q, view._replace(v=other)), expected)
        with pytest.raises(ValueError, match=words):
            build("triton")(q, view._replace(v=other))
    copied = v._replace(table=v.table.clone())
    assert torch.equal(build("triton")(q, view._replace(v=copied)), build("triton")(q, view))


@pytest.mark.parametrize("name", READERS)
@pytest.mark.parametrize("kind", [None, "int4"])
def test_a_table_and_lengths_of_any_strides(name, kind):
    q, view, _, _ = make(kind, 16, 1)
    expected = build(name)(q, view)
    lengths = torch.stack((view.lengths, view.lengths + 9), dim=1)[:, 0]
    table = view.k.table.t().contiguous().t()
    sides = (side._replace(table=table) for side in (view.k, view.v))
    assert torch.equal(build(name)(q, CacheView(*sides, lengths)), expected)
    one = CacheView(view.k, view.v, view.lengths[:1].expand(3))
    assert torch.equal(build(name)(q, one), build(name)(q, one._replace(lengths=one.lengths.contiguous())))


def test_blocks_of_one_token():
    """Their scales are contiguous with any last stride, as transposed ones have it."""
    q, view, _, _ = make("int4", 1, 1, tokens=24)
    turned = [x._replace(scale=x.scale[..., 0].clone()[:, :, None].mT) for x in view[:2]]
    assert view.k.scale.stride(3) == 1 < turned[0].scale.stride(3) and turned[0].scale.is_contiguous()
    outs = [build("triton")(q, view._replace(k=k, v=v)) for k, v in (view[:2], turned)]
    assert torch.equal(*outs)
    torch.testing.assert_close(outs[0], NaiveAttention()(q, view))


@pytest.mark.parametrize("name", ["auto", "sdpa", "flex", "tiled", "triton"])
def test_a_dense_cache_is_keys_and_values_with_lengths(name):
    q, view, k, v = make(None, None, 1)
    out = build(name)(q, view)
    torch.testing.assert_close(out, NaiveAttention()(q, k, v, kv_lengths=view.lengths))


def test_calls_that_make_no_sense():
    q, view, _, _ = make("int8", 16, 1)
    naive = NaiveAttention()
    for match, of, more in (
        ("kv_lengths with a CacheView", q, {"kv_lengths": view.lengths}),
        ("dropout_p with a CacheView", q, {"dropout_p": 0.5}),
        ("same batch and head dim", q[:2], {}),
        ("no gradient", q.clone().requires_grad_(), {}),
        ("dropout_p with a CacheView", q, {"dropout_p": -1}),
        ("softcap is -5", q, {"softcap": -5.0}),
        ("window is 5", q, {"window": 5}),
        (r"alibi_slopes is \(1,\)", q, {"alibi_slopes": torch.ones(1)}),
        (r"alibi_slopes is \(8,\)", q, {"alibi_slopes": torch.ones(8)}),
        ("v or packed with a CacheView", q, {"v": q}),
        ("v or packed with a CacheView", q, {"packed": q}),
    ):
        with pytest.raises(ValueError, match=match):
            naive(of, view, **more)
    with pytest.raises(ValueError, match="they need q's dtype"):
        naive(q.half(), make(None, 16, 1)[1])
    table = view.k._replace(table=view.k.table.long())
    with pytest.raises(ValueError, match=r"table of the keys is torch\.int64"):
        naive(q, view._replace(k=table))
    with pytest.raises(ValueError, match="lengths are"):
        naive(q, view._replace(lengths=view.lengths.long()))


def test_caches_whose_parts_do_not_fit():
    q, view, _, _ = make("int8", 16, 1)
    (data, scale, table), lengths = view.k, view.lengths
    for match, other in (
        ("4 bits with scales", CacheView(*[x._replace(scale=None) for x in view[:2]], lengths)),
        ("leave it out", view._replace(v=view.v._replace(data=data.float()))),
        ("scale of the keys is", view._replace(k=view.k._replace(scale=scale[..., :-1]))),
        ("scale of the values is", view._replace(v=view.v._replace(scale=scale.repeat(1, 1, 2, 1)))),
        ("scale of the keys is not on", view._replace(k=view.k._replace(scale=scale.to("meta")))),
        ("table of the values is not on", view._replace(v=view.v._replace(table=table.to("meta")))),
        ("table of the keys is", view._replace(k=view.k._replace(table=table[0]))),
        ("keys are", view._replace(k=view.k._replace(data=data[0]))),
        ("lengths are on meta", view._replace(lengths=lengths.to("meta"))),
    ):
        with pytest.raises(ValueError, match=match):
            NaiveAttention()(q, other)
    none = [x._replace(data=x.data[..., :0]) for x in view[:2]]
    with pytest.raises(ValueError, match="head dim need to be at least 1"):
        NaiveAttention()(q[..., :0], CacheView(*none, lengths))


@pytest.mark.parametrize("name", ["auto", "naive", "tiled"])
@pytest.mark.parametrize("kind", [None, "int8"])
def test_a_cache_without_room_or_queries(name, kind):
    """All is 0 and -inf, the lse of fp64 in fp64."""
    q, view, _, _ = make(kind, None, 1, torch.float64)
    sides = [x._replace(data=x.data[:, :, :0], scale=kind and x.scale[..., :0]) for x in view[:2]]
    for of, other in ((q, CacheView(*sides, 0 * view.lengths)), (q[:, :, :0], view)):
        out, lse = build(name)(of, other, return_lse=True)
        assert out.shape == of.shape and not out.any() and lse.dtype == torch.float64
        assert torch.equal(lse, torch.full(of.shape[:3], -torch.inf, dtype=torch.float64))
