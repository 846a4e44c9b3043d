"""How far an implementation may be from the reference in one random call (tests/attention/calls.py).

The criterion of scripts/accuracy.py, with what it takes for granted and random calls do not: that the plain
formula stays within its dtype, and that values are many and of ordinary size.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from attention import geometry
from attention.naive import attention_probs, attention_scores
from ops.options import AttentionOptions
from scripts.accuracy import (
    Problem,
    Result,
    allowed,
    error_ratio,
    expected,
    formula,
    plain_softmax,
    with_operands,
)
from tests.attention.calls import Call
from tests.grid import Inputs

EPS32 = 2.0**-23


def problem_of(call: Call, inputs: Inputs) -> Problem:
    options = {name: x for name, x in inputs.options.items() if name != "return_lse"}
    return Problem(inputs.q, inputs.k, inputs.v, options, inputs.dout if call.grads else None)


def measure(
    call: Call, inputs: Inputs, got: Result, operand_dtype: torch.dtype | None = None
) -> dict[str, tuple[float, float]]:
    """(error, allowed) of each tensor; `operand_dtype` as the implementation declares it."""
    problem, dtype = problem_of(call, inputs), inputs.q.dtype
    got = {name: x.cpu() for name, x in got.items()}
    both = expected(problem, 2**62, operand_dtype)
    reference, plain = ({name: x.cpu() for name, x in each.items()} for each in both)
    in_low_precision = with_operands(problem, operand_dtype)
    if dtype == torch.float16 and problem.dout is not None and _overflows(problem, reference):
        got = {name: x for name, x in got.items() if name not in ("dq", "dk", "dbias")}
    if not _finite_alike(got, plain, reference):
        plain = _plain_of_small_values(in_low_precision)  # dP beyond fp16
    if not _finite_alike(got, plain, reference):
        # Scores beyond fp16: fp32, as all accumulate in, says what is to be had.
        plain = formula(in_low_precision, torch.float32, plain_softmax, 2**62)
        plain = {name: x.cpu().to(x.dtype if name == "lse" else dtype) for name, x in plain.items()}
    cancelled = any(name in got and float(x.abs().amax()) < 1e-9 for name, x in reference.items())
    slack = {} if call.tame and not cancelled else _slack(problem, reference, call)
    found = {}
    for name, x in got.items():
        finite = reference[name][reference[name].isfinite()]
        most = float(finite.abs().max()) if finite.numel() else 0.0
        kept = torch.finfo(x.dtype)
        if most > kept.max or most * 0 != 0:
            continue  # nothing of this dtype is right
        error = error_ratio(x, reference[name], 1.0)
        if x.dtype == torch.float64:  # of which the reference is made itself
            may = 1e-10 * (1 + most)
        else:
            # A bias's gradient is of its own dtype.
            plain[name] = plain[name].double().clamp(-kept.max, kept.max).to(x.dtype)
            may = allowed(name, reference, plain, dtype if name == "lse" else x.dtype)
            if name == "lse":
                # All rows may have one lse (scores of about 0), which the rule's sum with 0.3 and the plain
                # formula round by luck to almost nothing. In fp32 (m + log2 l) ln 2 has the error of log2,
                # 2**-22 of it on a GPU (PTX, lg2.approx), and that of l, which is absolute. In 8 bits m is
                # 5 below the maximum at first, and log2 l above 5 (MAX_OFFSET, ops/csrc/lib/softmax.cuh).
                may = max(may, EPS32 * (1 + 2 * (most + (0 if operand_dtype is None else 5))))
        found[name] = error, may + slack.get(name, 0.0)
    return found


def _finite_alike(got: Result, plain: Result, reference: Result) -> bool:
    return all(torch.equal(plain[name].isfinite(), reference[name].isfinite()) for name in got)


def _plain_of_small_values(problem: Problem) -> Result:
    """The plain formula of V divided by a power of 2, and multiplied by it again: all but the lse and dV are
    linear in V, and the division rounds nothing."""
    factor = 2.0 ** math.frexp(float(problem.v.detach().nan_to_num(0, 0, 0).abs().max()))[1]
    small = formula(replace(problem, v=problem.v.detach() / factor), problem.q.dtype, plain_softmax, 2**62)
    linear = ("out", "dq", "dk", "dbias")
    return {name: (x.double() * factor if name in linear else x).cpu() for name, x in small.items()}


def _overflows(problem: Problem, reference: Result) -> bool:
    """Whether dS or `out` come near the end of the inputs' dtype, in which every fast backward has them: dS
    for dS K and dS^T Q, and `out` as it was saved, for its products with dout. V of 1e4 gives a dP of about
    1e4 sqrt(D), and fp16 ends at 65504. dS is the gradient of a bias of all scores."""
    end = 0.95 * torch.finfo(problem.q.dtype).max  # what P and delta are rounded by moves dS by less
    bias, shape = problem.options["bias"], (*problem.q.shape[:3], problem.k.shape[2])
    bias = problem.q.new_zeros(shape) if bias is None else bias.detach().expand(shape).clone()
    wider = replace(problem, options=problem.options | {"bias": bias.requires_grad_()})
    ds = formula(wider, torch.float64, attention_probs, 2**62)["dbias"]
    return max(float(ds.abs().max()), float(reference["out"].abs().max())) > end


def _slack(problem: Problem, reference: Result, call: Call) -> dict[str, float]:
    """What else rounding may bring about where values are of no ordinary kind, to first order: that of the
    scores in fp32, whose error is one of their exponentials; of P V, its sum, l and the division, half an ulp
    each; of dP and its row's sum in fp32, and of `out` in its own dtype, from which that sum is made. Where
    keys are alike these do not average out."""
    options = {name: x for name, x in problem.options.items() if name not in ("dropout_p", "return_lse")}
    q, k, v = definite(problem.q, problem.k, problem.v, options)
    p, _ = attention_probs(attention_scores(q, k, AttentionOptions(**options)))  # (B, Hq, Tq, Tk)
    kv_heads, group = k.shape[1], q.shape[1] // k.shape[1]
    wide_k, wide_v = (x.repeat_interleave(group, dim=1).abs() for x in (k, v))
    scale = abs(q.shape[3] ** -0.5 if options["scale"] is None else options["scale"])
    error = (q.abs() @ wide_k.transpose(-2, -1)).amax(-1, keepdim=True) * (
        4 * EPS32 * scale
    )  # (B, Hq, Tq, 1)
    capped = min(1.0, options["softcap"] or 1.0)  # whose derivative changes over this much
    # A sum of n numbers that are all alike rounds the same way many times over: n roundings, of a quarter of
    # an ulp on average, of partial sums that are half of the whole on average.
    alike = "v" in call.equal or call.layouts[2] == "one_token"
    summed = 2 + alike * k.shape[2] / 8
    slack = {"out": p * (error + summed * EPS32) @ wide_v, "lse": error}
    if problem.dout is not None:
        dout = problem.dout.detach().double().abs()
        dp = dout @ wide_v.transpose(-2, -1) / (1 - problem.options["dropout_p"])
        out = (dout * reference["out"].to(dout.device).abs()).sum(-1, keepdim=True)
        out = out * torch.finfo(problem.q.dtype).eps
        ds = p * ((dp + (p * dp).sum(-1, keepdim=True)) * (2 * error / capped + 4 * EPS32) + out)
        slack |= {"dq": ds @ wide_k * scale, "dv": (p * error).transpose(-2, -1) @ dout}
        slack |= {"dk": ds.transpose(-2, -1) @ q.abs() * scale}
        slack |= {name: slack[name].unflatten(1, (kv_heads, group)).sum(2) for name in ("dk", "dv")}
        if "bias" in problem.learned:
            slack["dbias"] = ds.sum_to_size(problem.options["bias"].shape)
    return {name: float(x.max()) for name, x in slack.items()}


def definite(q: Tensor, k: Tensor, v: Tensor, options: dict[str, Any]) -> tuple[Tensor, ...]:
    """q, k and v in fp64, blank beyond kv_lengths; `options` become those of attention_scores, in place."""
    ids = options["document_ids"]
    options["document_ids"] = (ids, ids) if isinstance(ids, Tensor) else ids
    options["window"] = geometry.normalise_window(options["window"])
    if options["bias"] is not None:
        options["bias"] = options["bias"].detach()
    k, v = (geometry.zero_beyond_lengths(x.detach(), options["kv_lengths"]) for x in (k, v))
    return q.detach().double(), k.double(), v.double()
