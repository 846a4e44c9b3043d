"""The criterion: what it lets pass, what it does not, and that a part of a call judges as the whole does."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from attention.base import UnsupportedAttention
from attention.naive import NaiveAttention
from attention.sdpa import SDPAAttention
from attention.tiled import TiledAttention
from ops.options import AttentionOptions
from scripts.accuracy import Part, Problem, expected, formula, judge, plain_softmax, spread
from tests.grid import CASES, Case, make_inputs

pytestmark = pytest.mark.sampled(4)

RECTANGLE = [case for case in CASES if case.group in ("feature", "pair", "heads", "no_key") and case.tq > 1]
RECTANGLE = [case for case in RECTANGLE if case.tq <= 256 and case.head_dim == 64]
GRADIENTS = {"out", "lse", "dq", "dk", "dv"}


def problem_of(case: Case, dtype: torch.dtype = torch.float32) -> Problem:
    inputs = make_inputs(case, "cpu", dtype)
    return Problem(inputs.q, inputs.k, inputs.v, inputs.options, inputs.dout)


@pytest.mark.parametrize("case", RECTANGLE, ids=lambda case: case.id)
def test_pieces_are_the_whole(case: Case) -> None:
    """Positions, masks, biases and the dropout mask of a piece are those of the specification."""
    problem = problem_of(case.fewer_heads)
    whole, _ = expected(problem, at_once=2**62)
    pieces, _ = expected(problem, at_once=2 * 4 * case.tk * 37)  # 37 queries, the last piece shorter
    assert pieces.keys() == whole.keys()
    for name, x in whole.items():
        torch.testing.assert_close(pieces[name], x, rtol=1e-12, atol=1e-12)


def test_the_plain_formula_in_pieces_errs_alike() -> None:
    """The tolerance does not depend on how long the sequence is for the memory in hand."""
    problem = problem_of(Case("test", 256, 256), torch.bfloat16)
    reference, plain = expected(problem, at_once=2**62)
    pieces = formula(problem, torch.bfloat16, plain_softmax, at_once=2 * 4 * 256 * 40)
    for name in GRADIENTS:
        error, error_in_pieces = (
            (x[name].double() - reference[name]).square().mean().sqrt() for x in (plain, pieces)
        )
        assert 0.7 * error < error_in_pieces < 1.3 * error, name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "features",
    [(), ("dropout", "gqa"), ("alibi", "bias"), ("document_ids", "kv_lengths"), ("bias_grad",)],
    ids="-".join,
)
def test_a_part_judges_as_the_whole(features: tuple[str, ...], dtype: torch.dtype) -> None:
    kv_heads = 2 if "gqa" in features else 4
    case = Case("test", 70, 90, batch=3, kv_heads=kv_heads, features=frozenset(features) - {"gqa"})
    if "kv_lengths" in features:
        case = Case("test", 70, 90, batch=2, features=frozenset(features))
    p = problem_of(case, dtype)
    ratios = judge(TiledAttention(16, 16), p.q, p.k, p.v, p.options, p.dout, heads=1)
    assert ratios.keys() == GRADIENTS | ({"dbias"} if "bias_grad" in features else set())
    assert all(0 < ratio <= 1 for ratio in ratios.values()), ratios
    forward = judge(TiledAttention(16, 16), p.q, p.k, p.v, p.options, heads=1)
    if "bias_grad" in features:  # which leaves the whole, and forward alone does not
        assert forward.keys() == {"out", "lse"} and max(forward.values()) <= 1
    else:
        assert forward == {name: pytest.approx(ratios[name]) for name in ("out", "lse")}


def test_a_part_is_first_and_last_rows_and_heads_spread_over_all() -> None:
    assert spread(5, 8) == [0, 1, 2, 3, 4] and spread(12, 3) == [0, 5, 11] and spread(12, 1) == [11]
    q, k = torch.randn(5, 8, 4, 2), torch.randn(5, 4, 4, 2)
    part = Part.of(Problem(q, k, k), 2)
    assert (part.rows, part.kv_heads, part.heads) == ([0, 4], [0, 3], [0, 1, 6, 7])
    assert torch.equal(part.cut("dq", q), q[[0, 4]][:, [0, 1, 6, 7]])
    assert torch.equal(part.cut("dk", k), k[[0, 4]][:, [0, 3]])


class Faulty(NaiveAttention):
    """Naive with one fault."""

    def __init__(self, fault: str):
        super().__init__("faulty")
        self.fault = fault

    def attend(self, q: Tensor, k: Tensor, v: Tensor, options: AttentionOptions, seed: Tensor | None):
        if self.fault == "scale":
            options = options._replace(scale=1.05 * options.scale)
        if self.fault == "top-left":  # of a rectangle: query i sees keys 0 .. i
            k, v = k[:, :, : q.shape[2]], v[:, :, : q.shape[2]]
        out, lse = super().attend(q, k, v, options, seed)
        if self.fault == "last head":
            out = torch.cat((out[:, :-1], 1.05 * out[:, -1:]), dim=1)
        if self.fault == "nan":
            out = out.masked_fill(torch.arange(q.shape[2]).view(-1, 1) == 5, torch.nan)
        if self.fault == "gradient":
            out = out + 0.05 * (v[:, :, :1] - v[:, :, :1].detach())
        return out, lse


@pytest.mark.parametrize("fault", ["scale", "top-left", "last head", "nan"])
def test_a_fault_shows(fault: str) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        p = problem_of(Case("test", 40, 90), dtype)
        assert judge(Faulty(fault), p.q, p.k, p.v, p.options, heads=1)["out"] > 1
        assert judge(NaiveAttention(), p.q, p.k, p.v, p.options, heads=1)["out"] <= 1


def test_a_fault_of_one_gradient_shows_there_alone() -> None:
    p = problem_of(Case("test", 40, 40))
    ratios = judge(Faulty("gradient"), p.q, p.k, p.v, p.options, p.dout)
    assert ratios.pop("dv") > 1 and all(ratio <= 1 for ratio in ratios.values())


def test_what_cannot_be_compared_and_what_cannot_run() -> None:
    p = problem_of(Case("test", 40, 40, features=frozenset({"dropout"})))
    state = torch.get_rng_state()
    assert judge(SDPAAttention(), p.q, p.k, p.v, p.options, p.dout) == {}
    ratios = judge(SDPAAttention(), p.q, p.k, p.v, {"causal": True}, p.dout)
    assert ratios.keys() == GRADIENTS - {"lse"} and max(ratios.values()) <= 1
    assert torch.equal(torch.get_rng_state(), state)
    with pytest.raises(UnsupportedAttention, match="softcap"):
        judge(SDPAAttention(), p.q, p.k, p.v, {"softcap": 2.0}, p.dout)


@pytest.mark.gpu
def test_long_calls_on_a_gpu_stay_within_bounded_memory() -> None:
    """Whole matrices of 16384 x 16384 would take 8 GiB in fp64, and autograd holds several."""
    q, k, v, dout = (
        torch.randn(2, heads, 16384, 64, device="cuda", dtype=torch.bfloat16) for heads in (4, 2, 2, 4)
    )
    state = torch.cuda.get_rng_state()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    ratios = judge(SDPAAttention("flash"), q, k, v, {}, dout, heads=1)
    assert ratios.keys() == GRADIENTS - {"lse"} and max(ratios.values()) <= 1, ratios
    assert torch.cuda.max_memory_allocated() - before < 4 * 2**30
    assert torch.equal(torch.cuda.get_rng_state(), state)
    options = {"dropout_p": 0.2}
    short = [x[:, :, :300] for x in (q, k, v)]
    assert max(judge(TiledAttention(), *short, options, dout[:, :, :300], heads=1).values()) <= 1
