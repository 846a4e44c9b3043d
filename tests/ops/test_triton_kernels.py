"""What is particular to the Triton kernels: split keys, skipped tiles, documents, strides, head dims."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from attention.base import AttentionCall
from ops.library import unpacked
from scripts import accuracy
from scripts.accuracy import Problem, error_ratios
from tests.attention.criterion import run_case
from tests.grid import Case, build

pytestmark = pytest.mark.sampled(5)

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
# A multiple of every tile's sides.
TILE = 128


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest) -> str:
    call = AttentionCall("training", request.param, None, torch.float32, 1, 1, 1, 8, 8, 64, backward=True)
    if reasons := build("triton").unsupported_reasons(call):
        pytest.skip("; ".join(reasons))
    return request.param


def random(device: str, *shape: int, dtype: torch.dtype = torch.float16) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).to(device, dtype)


def computed(
    q: Tensor, k: Tensor, v: Tensor, dout: Tensor | None = None, **options: Any
) -> dict[str, Tensor]:
    """out and lse, and with dout the gradients."""
    leaves = [x.detach().requires_grad_(dout is not None) for x in (q, k, v)]
    out, lse = build("triton")(*leaves, return_lse=True, **options)
    found = {"out": out.detach(), "lse": lse}
    if dout is not None:
        found |= zip(("dq", "dk", "dv"), torch.autograd.grad(out, leaves, dout), strict=True)
    return found


@pytest.mark.parametrize("tq", [1, 5])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"window": (90, 0)},
        {"softcap": 2.0},
        {"kv_lengths": (300, 37)},
        {"causal": False},
        {"dropout_p": 0.3},
    ],
    ids=str,
)
def test_split_keys_are_the_plain_kernel(
    options: dict, tq: int, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Any number of parts, more than there are tiles included, and the kernel that does not split."""
    from ops.triton import attention

    q, k, v = random(device, 2, 4, tq, 64), random(device, 2, 2, 300, 64), random(device, 2, 2, 300, 64)
    if "kv_lengths" in options:
        options = {"kv_lengths": torch.tensor(options["kv_lengths"], dtype=torch.int32, device=device)}
    results, asked = {}, []
    for splits in (0, 1, 2, 3, 7, 16):
        monkeypatch.setattr(attention, "key_splits", lambda *a, n=splits: asked.append(n) or n)
        monkeypatch.setattr(attention, "_DECODE_ROWS", 64 if splits else 0)
        torch.manual_seed(3)
        results[splits] = computed(q, k, v, **options)
    assert asked == [1, 2, 3, 7, 16]
    for splits in asked:
        torch.testing.assert_close(results[splits]["out"], results[0]["out"], rtol=2e-3, atol=2e-3)
        torch.testing.assert_close(results[splits]["lse"], results[0]["lse"], rtol=1e-5, atol=1e-5)


def test_the_number_of_splits() -> None:
    from ops.triton.attention import _MOST_SPLITS, key_splits

    # 100 programs: 5 parts fill 500 of 2 x 264 slots, 2 parts 200 of 264.
    found = {programs: key_splits(programs, 264, 512) for programs in (8, 32, 64, 100, 264)}
    assert found == {8: 33, 32: 8, 64: 4, 100: 5, 264: 1}
    assert key_splits(programs=1, slots=264, n_tiles=3) == 3  # no more parts than tiles
    assert key_splits(programs=1, slots=1000, n_tiles=10**6) <= _MOST_SPLITS


@pytest.mark.parametrize("tq", [1, 200])
def test_lengths_of_nothing_and_of_all(tq: int, device: str) -> None:
    q, k, v = random(device, 3, 2, tq, 32), random(device, 3, 2, 200, 32), random(device, 3, 2, 200, 32)
    lengths = torch.tensor([0, 200, 77], dtype=torch.int32, device=device)
    k[0], v[0], k[2, :, 77:], v[2, :, 77:] = torch.nan, torch.inf, torch.nan, torch.inf
    got = computed(q, k, v, random(device, 3, 2, tq, 32), kv_lengths=lengths)
    assert not got["out"][0].any() and torch.all(got["lse"][0] == -torch.inf)
    assert not any(got[name][0].any() for name in ("dq", "dk", "dv"))
    assert not any(got[name][2, :, 77:].any() for name in ("dk", "dv"))
    whole = computed(q[1:2], k[1:2], v[1:2])
    torch.testing.assert_close(got["out"][1:2], whole["out"], rtol=2e-3, atol=2e-3)
    torch.testing.assert_close(got["lse"][1:2], whole["lse"])
    assert all(x.isfinite().all() for name, x in got.items() if name != "lse")


def test_other_documents_are_skipped(device: str) -> None:
    """A tile that is masked, and not skipped, multiplies its zeros with what lies there: NaN."""
    tq = 2 * TILE
    q, k, v, dout = (random(device, 1, 2, n, 64) for n in (tq, 3 * TILE, 3 * TILE, tq))
    ids = torch.arange(3 * TILE, device=device).div(TILE, rounding_mode="floor").int()[None]
    k[:, :, :TILE], v[:, :, :TILE] = torch.nan, torch.nan
    own = slice(TILE, 3 * TILE)
    got = computed(q, k, v, dout, causal=False, document_ids=(ids[:, -tq:].contiguous(), ids))
    alone = computed(q, k[:, :, own], v[:, :, own], dout, causal=False,
                     document_ids=(ids[:, -tq:].contiguous(), ids[:, own].contiguous()))  # fmt: skip
    for name in ("out", "lse", "dq"):
        torch.testing.assert_close(got[name], alone[name], rtol=2e-3, atol=2e-3)
    for name in ("dk", "dv"):
        torch.testing.assert_close(got[name][:, :, own], alone[name], rtol=2e-3, atol=2e-3)
        assert not got[name][:, :, :TILE].any()


@pytest.mark.filterwarnings("ignore:All-NaN slice:RuntimeWarning:triton.runtime.interpreter")
def test_other_queries_are_skipped(device: str) -> None:
    """The other way about: NaN in the queries of a document reaches no gradient of another's keys."""
    q, k, v, dout = (random(device, 1, 2, 2 * TILE, 64) for _ in range(4))
    ids = torch.arange(2 * TILE, device=device).div(TILE, rounding_mode="floor").int()[None]
    q[:, :, :TILE], dout[:, :, :TILE] = torch.nan, torch.nan
    got, own = computed(q, k, v, dout, document_ids=ids), slice(TILE, 2 * TILE)
    alone = computed(*(x[:, :, own] for x in (q, k, v, dout)))
    for name in alone:
        torch.testing.assert_close(got[name][:, :, own], alone[name], rtol=2e-3, atol=2e-3)


@pytest.mark.parametrize("causal", [False, True])
def test_tiles_of_one_document(causal: bool, device: str) -> None:
    """They compare no ids: up to a document's end, and from its beginning, which are within tiles."""
    q, k, v, dout = (random(device, 1, 1, n, 32) for n in (260, 340, 340, 260))
    ends = (70, 90) if causal else (150, 200)
    ids = tuple(
        (torch.arange(n, device=device) >= end).int()[None] for n, end in zip((260, 340), ends, strict=True)
    )
    problem = Problem(q, k, v, {"causal": causal, "document_ids": ids}, dout)
    ratios = error_ratios(accuracy.computed(build("triton"), problem), *accuracy.expected(problem), q.dtype)
    assert max(ratios.values()) <= 1, ratios


@pytest.mark.parametrize("chunk", [8, 64])
def test_ranges_of_documents(chunk: int, device: str) -> None:
    """Tiles of 4 over documents of 5, 3 and 8: the first two share no document with the rest."""
    from ops.triton.forward import _tilegpt_document_ranges

    def ranges(own: Tensor, other: Tensor) -> list[list[list[int]]]:
        n_tiles = own.shape[1] // 4
        found = torch.full((len(own), n_tiles, 3), -1, dtype=torch.int32, device=device)
        grid = (n_tiles * len(own),)
        _tilegpt_document_ranges[grid](own, other, found, own.shape[1], other.shape[1], n_tiles, 4, chunk)
        return found.tolist()

    packed = torch.tensor([[7] * 5 + [8] * 3 + [9] * 8, [3] * 16], dtype=torch.int32, device=device)
    alone = [[[0, 5, 1], [0, 8, 0], [8, 16, 1], [8, 16, 1]], [[0, 16, 1]] * 4]
    assert ranges(packed, packed) == alone
    within = packed.clone()
    within[0, 12] = 7  # of the first document: what is compared is wider, and not one document
    assert ranges(packed, within)[0] == [[0, 13, 0], [0, 13, 0], [8, 16, 0], [8, 16, 0]]
    # A document without a partner: no tile at all, first beyond end.
    other = torch.tensor([[8] * 6, [4] * 6], dtype=torch.int32, device=device)
    assert ranges(packed, other) == [[[6, 0, 0], [0, 6, 0], [6, 0, 0], [6, 0, 0]], [[6, 0, 0]] * 4]


@pytest.mark.long
def test_any_strides(device: str) -> None:
    """Of one projection, of a batch that is one row expanded, and at an address that TMA cannot load from."""
    qkv = random(device, 2, 70, 3, 4, 64)  # (B, T, 3, H, D)
    dout = random(device, 2, 4, 70, 64)
    one = qkv[:1].expand(2, -1, -1, -1, -1)
    odd = torch.empty(qkv.numel() + 1, dtype=qkv.dtype, device=device)[1:].view_as(qkv).copy_(qkv)
    for tensor in (qkv, one, odd):
        q, k, v = (x.transpose(1, 2) for x in tensor.unbind(2))
        got = computed(q, k, v, dout)
        expected = computed(*(x.contiguous() for x in (q, k, v)), dout)
        for name, x in expected.items():
            torch.testing.assert_close(got[name], x, rtol=2e-3, atol=2e-3)


@pytest.mark.parametrize("sparse", [False, True])
def test_in_any_order(sparse: bool, device: str, request: pytest.FixtureRequest) -> None:
    """Heads in groups, and with the shortest tiles of all at the end, or the first at the beginning, give the
    same bits."""
    q, k, v, dout = (random(device, 1, 6, 300, 64, dtype=dtype) for dtype in [torch.float16] * 4)
    mask = torch.ones(1, 6, 3, 3, dtype=torch.bool, device=device)
    mask[:, ::2, 2, 1] = False
    options = {"block_mask": mask} if sparse else {}
    before = computed(q, k, v, dout, **options)
    request.getfixturevalue("small_groups")
    after = computed(q, k, v, dout, **options)
    assert all(torch.equal(before[name], after[name]) for name in before)


@pytest.mark.parametrize("head_dim", [1, 16, 17, 33, 129, 255])
@pytest.mark.parametrize("tq", [1, 70])
def test_head_dims_beside_the_grid(head_dim: int, tq: int, device: str) -> None:
    for dtype in (torch.float16, torch.float32):
        batch = 8 if tq == 1 else 1  # the largest error of two numbers of lse is a matter of luck
        ratios = run_case(build("triton"), Case("head_dim", tq, 70, head_dim, batch, 2, 2), device, dtype)
        assert ratios and max(ratios.values()) <= 1, ratios


def _beside_naive(device: str, dtype: torch.dtype, head_dim: int = 32, **options: Any) -> float:
    """The largest difference of out and the gradients from naive's, which must be finite."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, 4, 128, head_dim, device=device).to(dtype).requires_grad_() for _ in range(3))
    dout = torch.randn(2, 4, 128, head_dim, device=device).to(dtype)
    results = []
    for name in ("triton", "naive"):
        out = build(name)(q, k, v, **options)
        results.append((out, *torch.autograd.grad(out, (q, k, v), dout)))
    assert all(x.isfinite().all() for x in results[0])
    return max(float((x - y).abs().max()) for x, y in zip(*results, strict=True))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("hidden", [-torch.inf, -1e10, torch.finfo(torch.float32).min])
def test_a_bias_that_hides_keys(hidden: float, dtype: torch.dtype, device: str) -> None:
    """A row's first tile wholly hidden, by infinity or by a number that only means it."""
    bias = torch.zeros(128, 128, device=device)
    bias[5, :64] = hidden
    assert _beside_naive(device, dtype, causal=False, bias=bias) < (1e-5 if dtype == torch.float32 else 0.1)


@pytest.mark.long
@pytest.mark.parametrize("device", DEVICES)
def test_the_gradient_of_a_bias_of_any_shape(device: str) -> None:
    """Summed over what it broadcasts over, over two tiles of queries, the last one short."""
    torch.manual_seed(0)
    q, k, v, dout = (torch.randn(2, 2, n, 16, device=device) for n in (72, 90, 90, 72))
    full = (2, 2, 72, 90)
    for ones in range(2**4):
        shape = tuple(1 if ones >> d & 1 else n for d, n in enumerate(full))
        while shape and shape[0] == 1 and ones & 8:  # some without their first dimensions
            shape = shape[1:]
        bias = torch.randn(shape, device=device, requires_grad=True)
        results = [
            torch.autograd.grad(build(name)(q, k, v, bias=bias), bias, dout) for name in ("triton", "naive")
        ]
        torch.testing.assert_close(*results, atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("device", DEVICES)
def test_options_of_any_stride(device: str) -> None:
    lengths = torch.tensor([33], dtype=torch.int32, device=device).expand(2)
    assert _beside_naive(device, torch.float32, kv_lengths=lengths) < 1e-5
    slopes = torch.rand(8, device=device)[::2]
    assert _beside_naive(device, torch.float32, alibi_slopes=slopes) < 1e-5


@pytest.mark.parametrize("device", DEVICES)
def test_fp32_tiles_in_parts(device: str) -> None:
    """Head dims above 64, whose tiles come as several; by pointers, as lengths want them."""
    lengths = torch.tensor([33, 128], dtype=torch.int32, device=device)
    assert _beside_naive(device, torch.float32, head_dim=104, kv_lengths=lengths) < 1e-5


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("softcap", [50.0, 1000.0])
def test_a_softcap_far_above_the_scores(softcap: float, device: str) -> None:
    """tanh near 0: Gemma 2's 50 erred 3.4 times as much as allowed in fp32."""
    assert _beside_naive(device, torch.float32, softcap=softcap) < 2e-5


@pytest.mark.parametrize("device", DEVICES)
def test_what_nobody_checked_inside_a_compiled_step(device: str) -> None:
    q = torch.randn(1, 2, 8, 16, device=device)
    op = torch.ops.tilegpt.triton
    options = (*[None] * 8, 0.25, -1, 0, 0.0, 0.0, [0])
    with pytest.raises(ValueError, match="contiguous last dimension"):
        op(q.transpose(2, 3), q, q, *options)
    with pytest.raises(ValueError, match="float64"):
        op(q.double(), q.double(), q.double(), *options)


@pytest.mark.parametrize("device", DEVICES)
def test_a_softcap_near_zero(device: str) -> None:
    """scale / softcap is beyond fp32, and the scores of a query of zeros, or of none, are 0."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 1, 66, 16, device=device) for _ in range(3))
    q[:, :, 5] = 0
    results = []
    for name in ("triton", "naive"):
        leaves = [x.clone().requires_grad_() for x in (q, k, v)]
        out = build(name)(*leaves, scale=1.0, softcap=1e-39)
        results.append((out, *torch.autograd.grad(out.square().sum(), leaves)))
    torch.testing.assert_close(*results, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("device", DEVICES)
def test_tokens_further_apart_than_32_bits_count(device: str) -> None:
    """Gradients that come so, as of a large batch that is laid out token by token; one token has no next."""
    q, k, v, dout = (random(device, 1, 2, 9, 16) for _ in range(4))
    options = {"kv_lengths": torch.tensor([9], dtype=torch.int32, device=device)}  # no descriptors
    step = 2**28  # 8 rows further is 2^31: in 32 bits that many elements before, of the same storage
    far = torch.empty(2**31 + 8 * step + 32, dtype=dout.dtype, device=device)
    far = far.as_strided(dout.shape, (32, 16, step, 1), 2**31).copy_(dout)
    before, after = (computed(q, k, v, given, **options) for given in (dout, far))
    assert all(torch.equal(before[name], after[name]) for name in before)
    one = [x[:, :, :1] for x in (q, k, v)]
    apart = [x.as_strided(x.shape, (32, 16, step, 1)) for x in (y.contiguous() for y in one)]
    assert torch.equal(computed(*apart)["out"], computed(*one)["out"])


@pytest.mark.parametrize("device", DEVICES)
def test_packed_rows_that_overlap(device: str) -> None:
    """Windows of a row, one element apart: the gradient has its channels innermost all the same."""
    rows = random(device, 2, 96 + 19, dtype=torch.float32)
    results = []
    for name in ("triton", "naive"):
        qkv = rows.unfold(1, 96, 1).requires_grad_()  # (B, T, (4 + 2) D)
        out = build(name)(*unpacked(qkv, 4, 1), packed=qkv if name == "triton" else None)
        results.append((out, *torch.autograd.grad(out.square().sum(), qkv)))
    torch.testing.assert_close(*results, atol=1e-5, rtol=1e-4)
