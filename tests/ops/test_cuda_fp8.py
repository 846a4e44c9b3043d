"""Attention in fp8: values on the CPU, where tensor cores, TMA and mbarriers are imitated (hopper_cpu.h),
what the Hadamard transform does to its error, and what ptxas makes of it."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from attention.base import AttentionOptions, UnsupportedAttention
from attention.cuda_fp8 import CudaFp8
from conf.values import UserError
from ops import nvrtc
from ops.cuda import fp8, hopper, plain
from ops.cuda.call import Call
from scripts.accuracy import Problem, computed, error_ratios, expected
from tests.attention.criterion import run_case
from tests.grid import CASES as GRID
from tests.grid import Case, long_but
from tests.ops import cpu
from tests.ops.in_flight import overwritten
from tests.ops.recorded import Launch, compiled
from tests.ops.test_cuda_compile import BUDGETS, sections

pytestmark = pytest.mark.sampled(6)

SHAPES = [
    # Tq, Tk, D; heads; options
    ((130, 200, 128), (2, 1), {"causal": False}),
    ((70, 330, 128), (1, 1), {}),
    ((200, 300, 128), (1, 1), {"window": (100, 0)}),
    ((150, 150, 64), (2, 2), {}),
    ((100, 300, 256), (1, 1), {}),
    ((90, 150, 96), (1, 1), {"causal": False}),
    ((150, 150, 128), (1, 1), {"document_ids": cpu.documents(40, 60, 50)}),
    ((200, 70, 128), (1, 1), {}),  # rows that see no key
]
CASES = [("e4m3", *shape) for shape in SHAPES] + [("int8", *SHAPES[each]) for each in (2, 4)]


@pytest.fixture(scope="module")
def compiler(tmp_path_factory: pytest.TempPathFactory) -> cpu.HopperCores:
    if cpu.GXX is None:
        pytest.skip("no g++, which compiles the kernels for the CPU")
    return cpu.HopperCores(tmp_path_factory.mktemp("csrc"))


@pytest.fixture
def on_cpu(monkeypatch: pytest.MonkeyPatch, compiler: cpu.HopperCores) -> None:
    for owner, name, value in (
        (nvrtc, "kernel", compiler),
        (plain, "_kernel", compiler),
        (hopper, "tensor_map", cpu.tensor_map),
        (hopper, "multiprocessors", lambda _: 2),
        (CudaFp8, "unsupported_reasons", lambda *_: []),
    ):
        monkeypatch.setattr(owner, name, value)
    run = lambda of, q, k, v, options, seed: fp8.fp8_forward(q, k, v, options, seed, of.settings)  # noqa: E731
    monkeypatch.setattr(CudaFp8, "attend", run)


@pytest.mark.usefixtures("on_cpu")
@pytest.mark.parametrize(("qk_dtype", "shape", "heads", "options"), long_but(CASES, 1, 4, 6, 9))
def test_values(
    qk_dtype: str, shape: tuple[int, int, int], heads: tuple[int, int], options: dict[str, Any]
) -> None:
    q, k, v, _ = cpu.inputs(shape, heads, dtype=torch.bfloat16)
    problem, attention = Problem(q, k, v, options), CudaFp8(qk_dtype=qk_dtype)
    got = computed(attention, problem)
    ratios = error_ratios(got, *expected(problem, operand_dtype=torch.float8_e4m3fn), q.dtype)
    assert ratios.keys() == {"out", "lse"} and max(ratios.values()) <= 1, ratios


@pytest.mark.usefixtures("on_cpu")
def test_scores_that_are_all_below_zero() -> None:
    """In e4m3: as integers, negative floats are below -inf (softmax.cuh, largest_scores)."""
    q, k, v, _ = cpu.inputs((70, 70, 64), (1, 1), dtype=torch.bfloat16)
    problem = Problem(q.abs(), -(2 * k.abs()), v, {"causal": False})
    got = computed(CudaFp8(qk_dtype="e4m3"), problem)
    ratios = error_ratios(got, *expected(problem, operand_dtype=torch.float8_e4m3fn), q.dtype)
    assert max(ratios.values()) <= 1, ratios
    # and where they grow by 80 from each tile of keys to the one before, which comes after it
    q, k, v, _ = cpu.inputs((70, 600, 64), (1, 1), dtype=torch.bfloat16)
    q[..., 0], k[..., 0] = 80, -8 * torch.arange(1, 5).repeat_interleave(192)[:600]
    lse = CudaFp8(qk_dtype="e4m3")(q, k, v, causal=False, return_lse=True)[1]
    exact = (q.double() @ k.double().mT / 8).logsumexp(-1)
    assert torch.allclose(lse.double(), exact, rtol=0.05)


@pytest.mark.sampled(4)
@pytest.mark.usefixtures("on_cpu")
@pytest.mark.parametrize("qk_dtype", ["e4m3", "int8"])
@pytest.mark.parametrize("factors", [(0, 1, 1), (1, 0, 1), (1e-13, 1e-13, 1), (1, 1, 1e-37)], ids=str)
def test_small_numbers_and_zeros_under_a_mask(factors: tuple[float, float, float], qk_dtype: str) -> None:
    inputs = cpu.inputs((70, 70, 64), (1, 1), dtype=torch.bfloat16)[:3]
    q, k, v = (x * factor for x, factor in zip(inputs, factors, strict=True))
    out = CudaFp8(qk_dtype=qk_dtype)(q, k, v)
    exact = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    assert (out - exact).abs().max() <= max(0.06 * float(exact.abs().max()), 1e-33)


@pytest.mark.usefixtures("on_cpu")
@pytest.mark.parametrize("qk_dtype", ["e4m3", "int8"])
def test_a_nan_reaches_the_rows_that_see_it(qk_dtype: str) -> None:
    attention = CudaFp8(qk_dtype=qk_dtype)
    q, k, v, _ = cpu.inputs((70, 70, 64), (1, 1), dtype=torch.bfloat16)
    for of, row in ((q, 67), (k, 3)):
        poisoned = of.clone()
        poisoned[0, 0, row, 5] = torch.nan
        out = attention(*(poisoned if x is of else x for x in (q, k, v)))
        assert out[0, 0, 67].isnan().all()
        if of is q:  # a scale is of 64 queries
            assert torch.equal(out[0, 0, :64], attention(q, k, v)[0, 0, :64])


def _error_of_scores(hadamard: int, one_scale: int, integers: int, inputs: tuple[Tensor, ...]) -> float:
    q, k, _ = (x.double() for x in inputs)
    exact = torch.logsumexp(q @ k.mT / math.sqrt(q.shape[3]), -1)
    options = AttentionOptions(causal=False, scale=q.shape[3] ** -0.5)
    _, lse = fp8.fp8_forward(*inputs, options, None, [hadamard, one_scale, integers])
    return float((lse.double() - exact).square().mean().sqrt())


@pytest.mark.long
@pytest.mark.usefixtures("on_cpu")
def test_the_hadamard_transform_takes_the_outliers_error() -> None:
    """On the source's inputs, N(0, 1), and N(0, 100) added to one number of a thousand; of lse, where the
    rounding of P and V has no part."""
    g = torch.Generator().manual_seed(0)
    usual, outliers = (torch.randn(3, 1, 1, 320, 128, generator=g) for _ in range(2))
    x = tuple((usual + 10 * outliers * (torch.rand(usual.shape, generator=g) < 0.001)).bfloat16())
    errors = {each: _error_of_scores(*each, x) for each in ((0, 1, 0), (0, 0, 0), (1, 0, 0), (1, 0, 1))}
    assert errors[1, 0, 0] < 0.6 * min(errors[0, 1, 0], errors[0, 0, 0]), errors
    assert errors[1, 0, 1] < 0.6 * errors[1, 0, 0], errors


@pytest.mark.usefixtures("on_cpu")
def test_the_copies_in_8_bits_are_the_inputs() -> None:
    """q and k, with one scale and no transform; v, transposed, in the order of its keys."""
    q, k, v, _ = cpu.inputs((70, 150, 96), (2, 1), dtype=torch.bfloat16)
    seen: list[Any] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fp8, "run_forward", lambda q, call, tile, operands, **_: seen.extend((call, operands)))
        fp8.fp8_forward(q, k, v, AttentionOptions(causal=False, scale=1.0), None, [0, 1, 0])
    _, ((q8, *_), (k8, *_), (v8, *_)) = seen
    for of8, x in ((q8, q), (k8, k)):
        numbers = of8.view(torch.float8_e4m3fn).float()
        assert numbers.shape[3] == 128 and not numbers[..., 96:].any() and numbers.abs().max() == 448
        _assert_rounded(numbers[..., :96], x.float())
    of16 = torch.tensor([token % 4 // 2 * 8 + token // 4 * 2 + token % 2 for token in range(16)])
    keys = (torch.arange(0, 192, 16)[:, None] + of16).flatten()
    turned = v8.view(torch.float8_e4m3fn).float()[0, 0, :96].T
    whole = torch.zeros(192, 96)
    whole[:150] = v[0, 0].float()
    _assert_rounded(turned, whole[keys])


@pytest.mark.usefixtures("on_cpu")
def test_batch_rows_have_copies_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = cpu.inputs((70, 250, 64), (2, 1), batch=3, dtype=torch.bfloat16)[:3]
    seen: list[Any] = []
    monkeypatch.setattr(fp8, "run_forward", lambda q, call, tile, operands, **_: seen.append(operands))
    for given in (inputs, *zip(*(x.split(1) for x in inputs), strict=True)):
        fp8.fp8_forward(*given, AttentionOptions(causal=False, scale=1.0), None, [1, 0, 0])
    whole, *rows = ([x.view(torch.uint8) for x, *_ in operands] for operands in seen)
    assert all(torch.equal(x, torch.cat(of_rows)) for x, *of_rows in zip(whole, *rows, strict=True))


def test_more_batch_rows_than_a_grid_has_are_refused() -> None:
    q = torch.zeros(65_536, 1, 1, 64, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match=r"got 65,536 batch rows; it takes at most 65,535"):
        fp8.fp8_forward(q, q, q, AttentionOptions(causal=False, scale=1.0), None, [1, 0, 0])


def _assert_rounded(numbers: Tensor, x: Tensor) -> None:
    """Each is x, scaled so that the largest is 448, within half a step of e4m3."""
    scaled = x * (448 / x.abs().max())
    assert ((numbers - scaled).abs() <= (scaled.abs() / 16).clamp_min(2**-10) * 1.001).all()


@pytest.mark.parametrize(("head_dim", "spilled"), [(128, 104), (256, 96)])
@pytest.mark.parametrize("right", [0, 1])
@pytest.mark.parametrize("integers", [0, 1])
def test_compiles_for_hopper_with_few_spills(head_dim: int, spilled: int, right: int, integers: int) -> None:
    if fault := nvrtc.missing():
        pytest.skip(fault)
    tile, meta = fp8._TILES[head_dim], partial(torch.empty, dtype=torch.bfloat16, device="meta")
    q = meta(1, 2, 256, head_dim)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.Tensor, "data_ptr", lambda _: 256)
        call = Call(q, q, q, AttentionOptions(causal=bool(right), scale=1.0))
    of_fa3 = tuple((hopper.forward_defines(call, tile, head_dim) | {"INT8": integers}).items())
    made = compiled(
        Launch("ladder/fa3.cu", "tilegpt_fa3_forward", of_fa3, 384, tile.shared_bytes(head_dim)), (9, 0)
    )
    assert made.spilled_bytes <= spilled and made.shared_bytes <= 232_448, made
    (sass,) = (part for part in sections(made.cubin.code) if part.startswith(".text.tilegpt_fa3_forward"))
    assert "GMMA" in sass and not overwritten(sass)
    rounding = call.defines | tile.defines(head_dim) | {"INT8": integers, "HADAMARD": 1, "SCALES_GIVEN": 0}
    of_rounding = tuple(rounding.items())
    for name, threads in (("tilegpt_fp8_rows", tile.bc * head_dim // 64), ("tilegpt_fp8_values", 256)):
        made, most = compiled(Launch("ladder/fp8.cu", name, of_rounding, threads, 0), (9, 0)), BUDGETS[name]
        assert made.registers <= most.registers and made.spilled_bytes <= most.spilled_bytes, made


def test_a_write_to_what_wgmma_reads_is_found() -> None:
    lines = """.L_x_1:
        /*0010*/ WARPGROUP.DEPBAR.LE gsb0, 0x0 ;
        /*0020*/ MOV R40, R60 ;
        /*0030*/ QGMMA.64x128x32.F32.E4M3.E4M3 R120, R40, gdesc[UR24], R120, gsb0 ;
        /*0040*/ WARPGROUP.DEPBAR.LE gsb0, 0x1 ;
        /*0050*/ F2FP.SATFINITE.E4M3.F32.PACK_AB_MERGE_C {}, R27, R26, RZ ;
        /*0060*/ @P0 BRA `(.L_x_1) ;
        /*0070*/ EXIT ;"""
    assert not overwritten(lines.format("R44"))
    ((product, write),) = overwritten(lines.format("R41"))
    assert product.startswith("QGMMA") and write.startswith("F2FP")


@pytest.mark.gpu
@pytest.mark.parametrize("case", GRID, ids=lambda case: case.id)
def test_e4m3_on_a_gpu(case: Case) -> None:
    """What tests/attention/test_grid.py asks of the numbers that cuda_fp8 has unless told otherwise. Over 40
    keys lse in fp16 has 1.07 of the error that is allowed: too few for the rounding of K to average out."""
    for dtype in (torch.bfloat16, torch.float16):
        if dtype == torch.float16 and case.id == "no_key-250x40-d128":
            pytest.xfail("lse over 40 keys")
        ratios = run_case(CudaFp8(qk_dtype="e4m3"), case, "cuda", dtype) or {}
        assert all(ratio <= 1 for ratio in ratios.values()), (dtype, ratios)


def test_what_is_refused() -> None:
    with pytest.raises(UserError, match=r"scales is 'row'; cuda_fp8 has block, tensor"):
        CudaFp8(scales="row")
    x = torch.zeros(1, 1, 8, 64, dtype=torch.bfloat16)
    with pytest.raises(UserError, match=r"qk_dtype is 'int4'; cuda_fp8 has e4m3, int8"):
        CudaFp8(qk_dtype="int4")
    with pytest.raises(UnsupportedAttention, match=r"cuda_fp8"):
        CudaFp8()(x, x, x)


def test_scratch_is_what_is_allocated(monkeypatch: pytest.MonkeyPatch, compiler: cpu.HopperCores) -> None:
    monkeypatch.setattr(nvrtc, "kernel", compiler)
    q, k, v, _ = cpu.inputs((130, 200, 96), (2, 1), dtype=torch.bfloat16)
    held: list[int] = []

    def keep(q: Tensor, call: Call, tile: Any, operands: Any, **_: int) -> None:
        held.extend(x.nbytes for x, *_ in operands)

    monkeypatch.setattr(fp8, "run_forward", keep)
    fp8.fp8_forward(q, k, v, AttentionOptions(causal=False, scale=1.0), None, [1, 0, 0])
    scales = 4 * (2 * 3 + 2 * 2 + 1)
    assert fp8.scratch_bytes(1, 2, 1, 130, 200, 96) == sum(held) + scales
