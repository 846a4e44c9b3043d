"""Implementations beside each other tensor by tensor: what errs by more than rounding, where its wrong
entries lie, and what that suggests."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from attention.base import Attention
    from scripts.accuracy import Part, Problem, Result

MOST_FAULTS = 5  # that are explained
MANY = 2  # times the plain formula's rms error: more is no rounding of a few entries
MOST_SCORES = 2**28  # beyond, two key heads of two rows stand for all


@dataclass(frozen=True)
class Finding:
    """What one implementation makes of one tensor."""

    name: str
    tensor: str
    max_error: float
    rms_error: float
    ratio: float
    same_bits: bool | None = None  # of two calls; None for the plain formula
    fault: str | None = None

    def row(self) -> list[str]:
        ratio = f"{self.ratio:.2f}" if self.ratio <= 1 else f"[red]{self.ratio:.3g}[/red]"
        bits = "" if self.same_bits is None else "same" if self.same_bits else "[yellow]differ[/yellow]"
        return [self.name, f"{self.max_error:.1e}", f"{self.rms_error:.1e}", ratio, bits]


def examine(names: list[str], attentions: list[Attention], problem: Problem, most: int) -> list[Finding]:
    """Each implementation, and the plain formula, tensor by tensor against fp64; `most` scores in all."""
    from scripts.accuracy import Part, allowed, computed, error_ratio, expected

    scores = problem.q.shape[0] * problem.q.shape[1] * problem.q.shape[2] * problem.k.shape[2]
    part = Part.of(problem, None if scores <= most else 2)
    reference, plain = expected(part.of_problem(problem))
    limits = {name: allowed(name, reference, plain, problem.q.dtype) for name in reference}
    all_limits = {None: limits}
    for operand_dtype in {each.declaration.operand_dtype for each in attentions} - {None}:
        rounded = expected(part.of_problem(problem), operand_dtype=operand_dtype)
        all_limits[operand_dtype] = {name: allowed(name, *rounded, problem.q.dtype) for name in reference}
    findings = [
        Finding("plain formula", name, *errors(plain[name], x), error_ratio(plain[name], x, limits[name]))
        for name, x in reference.items()
    ]
    for name, attention in zip(names, attentions, strict=True):
        first, second = computed(attention, problem), computed(attention, problem)
        limits = all_limits[attention.declaration.operand_dtype]
        for tensor, whole in first.items():
            got, exact = part.cut(tensor, whole), reference[tensor]
            ratio = error_ratio(got, exact, limits[tensor])
            fault = None if ratio <= 1 else explain(tensor, got, reference, limits[tensor], part)
            same = torch.equal(whole.nan_to_num(), second[tensor].nan_to_num())
            findings.append(Finding(name, tensor, *errors(got, exact), ratio, same, fault))
    return findings


def errors(got: Tensor, reference: Tensor) -> tuple[float, float]:
    """(largest, root mean square) over what is finite in the reference."""
    error = (got.double() - reference)[reference.isfinite()]
    return (float(error.abs().max()), float(error.square().mean().sqrt())) if error.numel() else (0.0, 0.0)


def conclusion(names: list[str], findings: list[Finding]) -> tuple[list[str], bool]:
    """Sentences, and whether one of the two is at fault."""
    said, faulty = [], False
    for name in names:
        own = [finding for finding in findings if finding.name == name]
        ordered = sorted(own, key=lambda finding: -finding.ratio)
        faults = [finding for finding in ordered if finding.fault]
        said += [
            f"[red]BUG[/red] in {name}: the error of {finding.tensor} is {finding.ratio:.3g} times what "
            f"rounding explains. {finding.fault}"
            for finding in faults[:MOST_FAULTS]
        ]
        if len(faults) > MOST_FAULTS:
            said.append(f"{name}: also wrong in {', '.join(f.tensor for f in faults[MOST_FAULTS:])}.")
        if not own:
            said.append(f"{name}: it draws its own dropout mask, so there are no values to compare.")
        elif not faults:
            worst = ordered[0]
            said.append(
                f"{name}: only rounding error, at most {worst.ratio:.2f} of the limit (in {worst.tensor})."
            )
        plain = {finding.tensor: finding.rms_error for finding in findings if finding.name == "plain formula"}
        # Of the output alone: dP - delta cancels, and flash kernels take delta from an output that is rounded
        # (4 times the plain formula's rms in dq, SDPA in bf16 on a trained model's activations).
        for finding in (f for f in own if f.tensor.endswith("out") and not f.fault):
            if 0 < MANY * plain[finding.tensor] < finding.rms_error:
                said.append(
                    f"[yellow]DOUBTFUL[/yellow] {name}: no single error of {finding.tensor} is too large, "
                    f"but the rms is {finding.rms_error / plain[finding.tensor]:.1f} times that of the plain "
                    "formula: compare again with dtype=fp32."
                )
        if differ := [finding.tensor for finding in own if finding.same_bits is False]:
            said.append(
                f"{name}: {', '.join(differ)} differ between two calls with the same inputs, as from sums in "
                "a varying order: two runs with the same seed diverge."
            )
        faulty |= bool(faults)
    if not any("BUG" in sentence or "DOUBTFUL" in sentence for sentence in said):
        said.append("If the losses of the two differ, the difference is rounding error.")
    return said, faulty


def explain(tensor: str, got: Tensor, reference: Result, limit: float, part: Part) -> str:
    """Where the worst entry is, and what the pattern of wrong entries suggests."""
    exact = reference[tensor]
    error = (got.double() - exact).abs().nan_to_num(torch.inf, torch.inf)
    error = error.masked_fill(got.double() == exact, 0)  # an infinity that is right
    wrong = error > limit
    at = [int(i) for i in torch.unravel_index(error.argmax(), error.shape)]
    names = ("b", "h", "j" if tensor in ("dk", "dv") else "i", "d")[: len(at)]
    heads = part.kv_heads if tensor in ("dk", "dv") else part.heads
    shown = [part.rows[at[0]], heads[at[1]], *at[2:]] if exact.ndim in (3, 4) and tensor != "dbias" else at
    where = ", ".join(f"{n}={i}" for n, i in zip(names, shown, strict=True))
    share = 100 * float(wrong.double().mean())
    text = f"{share:.3g}% of the entries are wrong; the worst is ({where}): "
    text += f"{float(got[tuple(at)]):.4g} where {float(exact[tuple(at)]):.4g} is right."
    return " ".join([text, *suggestions(tensor, got, wrong, reference, heads)])


def suggestions(tensor: str, got: Tensor, wrong: Tensor, reference: Result, heads: list[int]) -> list[str]:
    """Sentences about where the wrong entries lie and where not."""
    found = []
    if not got.isfinite().all() and reference[tensor].isfinite().all():
        found.append("It contains NaN or infinity: overflow, 0 * inf, or uninitialised memory.")
    if tensor == "dbias":
        return found
    by_head = wrong.flatten(2).any(2).any(0)
    if not by_head.all():
        bad = [heads[i] for i in by_head.nonzero().flatten().tolist()]
        found.append(f"Only in heads {', '.join(map(str, bad))}: check how heads are indexed.")
    if not wrong.flatten(1).any(1).all():
        found.append("Only in some batch rows: check their strides, document ids and lengths.")
    by_token = wrong.any(-1) if wrong.ndim == 4 else wrong  # (B, H, T)
    lse = reference["lse"]
    if by_token.shape == lse.shape and lse[by_token].isinf().all():
        found.append("Only in rows without a visible key, which must give 0.")
    bad = by_token.flatten(0, 1).any(0).nonzero().flatten()
    first, last, length = int(bad[0]), int(bad[-1]), by_token.shape[2]
    tiles = [str(n) for n in (16, 32, 64, 128, 256) if n < length and first >= (length - 1) // n * n]
    if tiles:
        found.append(
            f"Only from position {first} on, in the last tile of {' or '.join(tiles)}: check the bounds of "
            "partial tiles."
        )
    elif (first, last) != (0, length - 1):
        found.append(f"Only at positions {first} to {last} of {length}: check masks and tile borders.")
    if wrong.ndim == 4:
        dims = wrong.flatten(0, 2).any(0).nonzero().flatten()
        if (ends := (int(dims[0]), int(dims[-1]))) != (0, wrong.shape[3] - 1):
            found.append(
                f"Only in dimensions {ends[0]} to {ends[1]} of {wrong.shape[3]}: check the padding of D."
            )
    if float(wrong.double().mean()) > 0.2:
        found.append(
            "Nearly all entries are wrong: check scale, mask and softmax."
            if tensor in ("out", "lse")
            else "Nearly all entries are wrong: a wrong factor, or a missing term of the gradient."
        )
    return found
