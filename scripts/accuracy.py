"""The one criterion of correctness, for scripts and tests alike.

The error of an implementation against the formula in fp64 may be at most twice (gradients: three times)
that of the plain formula in the same low precision on the same inputs, plus a floor from the rounding of the
output's dtype: the tolerance comes from the data. Gradients have two floors more, said where they are.
Where an implementation declares operands of fewer bits, the plain formula has q, k and v rounded to them.

Both formulas go over the queries in pieces, so that long sequences never hold a whole (Tq, Tk) matrix; and as
attention is independent per batch row and head, a few of them may stand for all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from attention import geometry
from attention.base import Attention, AttentionCall
from attention.naive import attention_probs, attention_scores
from ops.dropout import keep_mask, row_keys
from ops.options import AttentionOptions

Softmax = Callable[[Tensor], tuple[Tensor, Tensor]]  # scores -> probabilities, log-sum-exp
Result = dict[str, Tensor]  # of out, lse, dq, dk, dv and of biases those that were asked for
BIASES = ("bias", "relative_bias")

AT_ONCE = 2**24  # scores in one piece: 128 MiB in fp64, of which autograd holds about eight


@dataclass(frozen=True)
class Problem:
    """One call: q (B, Hq, Tq, D), k and v (B, Hkv, Tk, D), the keywords of `Attention.forward`, and for
    gradients dout (B, Hq, Tq, D)."""

    q: Tensor
    k: Tensor
    v: Tensor
    options: dict[str, Any] = field(default_factory=dict)
    dout: Tensor | None = None
    # Which batch rows and query heads these are of the whole call: the dropout mask depends on them.
    rows: list[int] | None = None
    heads: list[int] | None = None

    @property
    def learned(self) -> Result:
        """The biases with a gradient."""
        given = {name: self.options.get(name) for name in BIASES}
        learned = {name: x for name, x in given.items() if x is not None and x.requires_grad}
        return {} if self.dout is None else learned

    def leaves(self, dtype: torch.dtype) -> Result:
        """q, k and v, and biases with a gradient, in `dtype`, as the leaves of a graph of their own."""
        tensors = {"q": self.q, "k": self.k, "v": self.v} | self.learned
        return {
            name: x.detach().to(dtype).requires_grad_(self.dout is not None) for name, x in tensors.items()
        }


@dataclass(frozen=True)
class Part:
    """Some batch rows and some key heads, with the query heads that read them; of a whole call's tensors."""

    rows: list[int]
    kv_heads: list[int]
    heads: list[int]

    @classmethod
    def of(cls, problem: Problem, kv_heads: int | None) -> Part:
        """The first and the last row and `kv_heads` heads spread over all; everything for None, and for a
        bias with a gradient, which may be a sum over rows and heads."""
        (batch, heads), total = problem.q.shape[:2], problem.k.shape[1]
        if kv_heads is None or problem.learned:
            return cls(list(range(batch)), list(range(total)), list(range(heads)))
        group, chosen = heads // total, spread(total, kv_heads)
        return cls(spread(batch, 2), chosen, [h * group + g for h in chosen for g in range(group)])

    def cut(self, name: str, x: Tensor) -> Tensor:
        """The part of a tensor by its name, one of `Result` or an input."""
        if name in ("dbias", "drelative_bias"):
            return x  # judged whole, see `of`
        if name in ("bias", "block_mask"):  # broadcasts over dimensions of 1, and over those it lacks
            x = x[(None,) * (4 - x.ndim)]
            x = x if x.shape[0] == 1 else x[self.rows]
            return x if x.shape[1] == 1 else x[:, self.heads]
        heads = self.kv_heads if name in ("k", "v", "dk", "dv") else self.heads
        return x[self.rows][:, heads]  # (B, H, ...) -> (rows, heads, ...)

    def of_problem(self, problem: Problem) -> Problem:
        options = dict(problem.options)
        if (slopes := options.get("alibi_slopes")) is not None:
            slopes = slopes if slopes.ndim == 1 else slopes[self.rows]
            options["alibi_slopes"] = slopes[..., self.heads]
        if (bias := options.get("bias")) is not None and "bias" not in problem.learned:
            options["bias"] = self.cut("bias", bias)
        if (table := options.get("relative_bias")) is not None:
            options["relative_bias"] = table[self.heads] if "relative_bias" not in problem.learned else table
        if (mask := options.get("block_mask")) is not None:
            options["block_mask"] = self.cut("block_mask", mask)
        if (ids := options.get("document_ids")) is not None:
            pair = (ids, ids) if isinstance(ids, Tensor) else ids
            options["document_ids"] = tuple(each[self.rows] for each in pair)
        if (lengths := options.get("kv_lengths")) is not None:
            options["kv_lengths"] = lengths[self.rows]
        q, k, v = (self.cut(name, getattr(problem, name).detach()) for name in "qkv")
        dout = None if problem.dout is None else self.cut("dout", problem.dout)
        return Problem(q, k, v, options, dout, self.rows, self.heads)


def spread(total: int, most: int) -> list[int]:
    """At most `most` of range(total), the first and the last among them; a single one is the last."""
    if total <= most:
        return list(range(total))
    return [total - 1] if most == 1 else [i * (total - 1) // (most - 1) for i in range(most)]


def judge(
    attention: Attention,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    options: dict[str, Any],
    dout: Tensor | None = None,
    heads: int | None = None,
) -> dict[str, float]:
    """Error ratios, at most 1 where correct, of out, lse (where it can give one) and, with `dout`, of dq, dk,
    dv and of biases that are learned.

    The implementation computes the whole call; `heads` of its key heads, with their query heads, of two batch
    rows are compared (None: everything). Empty where there are no values to compare: a library's own dropout.

    Raises:
        UnsupportedAttention: the implementation cannot run the call.
    """
    problem = Problem(q, k, v, options, dout)
    got = computed(attention, problem)
    if not got:
        return {}
    part = Part.of(problem, heads)
    reference, plain = expected(part.of_problem(problem), operand_dtype=attention.declaration.operand_dtype)
    return error_ratios({name: part.cut(name, x) for name, x in got.items()}, reference, plain, q.dtype)


def computed(attention: Attention, problem: Problem) -> Result:
    """What an implementation gives for the whole call; nothing for a library's own dropout mask."""
    options = {name: value for name, value in problem.options.items() if name != "return_lse"}
    leaves = problem.leaves(problem.q.dtype)
    for name in BIASES:
        if options.get(name) is not None:
            options[name] = leaves.get(name, options[name].detach())
    with torch.set_grad_enabled(problem.dout is not None), seeded(problem.q.device):
        q, k, v = (leaves[name] for name in "qkv")
        call = AttentionCall.of(q, k, v, AttentionOptions(**options, return_lse=True))
        lse = not attention.unsupported_reasons(call)
        if not lse:
            call = AttentionCall.of(q, k, v, AttentionOptions(**options))
            attention.require(call)
        if "dropout" in call.features and not attention.resolve(call).uses_our_dropout_mask:
            return {}
        result = attention(q, k, v, **options, return_lse=lse)
        out = result[0] if lse else result
        got = {"out": out.detach()} | ({"lse": result[1].detach()} if lse else {})
        if problem.dout is not None:
            grads = torch.autograd.grad(out, list(leaves.values()), problem.dout.to(out.dtype))
            got |= {f"d{name}": grad for name, grad in zip(leaves, grads, strict=True)}
    return got


@contextmanager
def seeded(device: torch.device) -> Iterator[None]:
    """torch.manual_seed(0) for a while; the generators are left as they were."""
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        torch.manual_seed(0)
        yield


def dropout_seed(device: torch.device) -> Tensor:
    """What `Attention.forward` draws under `seeded`."""
    with seeded(device):
        return torch.randint(0, 2**63 - 1, (), dtype=torch.int64, device=device)


def expected(
    problem: Problem, at_once: int = AT_ONCE, operand_dtype: torch.dtype | None = None
) -> tuple[Result, Result]:
    """(the reference in fp64, the plain formula in the inputs' own dtype), `at_once` scores in a piece; the
    formula's q, k and v rounded to `operand_dtype`."""
    plain = with_operands(problem, operand_dtype)
    return (
        formula(problem, torch.float64, attention_probs, at_once),
        formula(plain, problem.q.dtype, plain_softmax, at_once),
    )


def with_operands(problem: Problem, operand_dtype: torch.dtype | None) -> Problem:
    """The problem with q, k and v rounded to `operand_dtype`, if any."""
    if operand_dtype is None:
        return problem
    return replace(problem, **{name: rounded(getattr(problem, name), operand_dtype) for name in "qkv"})


def rounded(x: Tensor, dtype: torch.dtype) -> Tensor:
    """x as `dtype`, of 8 bits, has it with one scale for all, in its own dtype."""
    scale = x.abs().amax().float().clamp_min(1e-30) / torch.finfo(dtype).max
    return ((x.float() / scale).to(dtype).float() * scale).to(x.dtype)


def plain_softmax(scores: Tensor) -> tuple[Tensor, Tensor]:
    """As one would write it in PyTorch: everything but the log-sum-exp in the scores' own precision."""
    lse = torch.logsumexp(scores.to(torch.promote_types(scores.dtype, torch.float32)), dim=-1)
    nothing = (scores == -torch.inf).all(dim=-1, keepdim=True)
    return torch.softmax(scores.masked_fill(nothing, 0), dim=-1).masked_fill(nothing, 0), lse.detach()


def formula(problem: Problem, dtype: torch.dtype, softmax: Softmax, at_once: int) -> Result:
    """softmax(Q K^T) V in `dtype`, piece by piece over the queries; gradients of keys, values and bias are
    summed over the pieces, in fp32 at least so that the sum rounds once."""
    leaves = problem.leaves(dtype)
    batch, heads, tq, _ = problem.q.shape
    wide = torch.promote_types(dtype, torch.float32)
    grads = {name: torch.zeros_like(x, dtype=wide) for name, x in leaves.items() if problem.dout is not None}
    outs, lses = [], []
    with torch.set_grad_enabled(problem.dout is not None):
        for piece in geometry.tiles(tq, max(1, at_once // (batch * heads * problem.k.shape[2]))):
            out, lse = _attend(problem, leaves, piece, softmax)
            outs.append(out.detach())
            lses.append(lse)
            if problem.dout is not None:
                dout = problem.dout[:, :, piece.start : piece.stop].to(dtype)
                for name, grad in zip(
                    leaves, torch.autograd.grad(out, list(leaves.values()), dout), strict=True
                ):
                    grads[name] += grad
    result = {"out": torch.cat(outs, dim=2), "lse": torch.cat(lses, dim=2)}
    return result | {f"d{name}": grad.to(dtype) for name, grad in grads.items()}


def _attend(problem: Problem, leaves: Result, piece: range, softmax: Softmax) -> tuple[Tensor, Tensor]:
    """(out, lse) of the queries in `piece`."""
    lengths, p = problem.options.get("kv_lengths"), problem.options.get("dropout_p", 0.0)
    k, v = (
        geometry.zero_beyond_lengths(leaves["k"], lengths),
        geometry.zero_beyond_lengths(leaves["v"], lengths),
    )
    probs, lse = softmax(_scores(problem, leaves, k, piece))
    if p > 0:
        batch, heads, _, tk = probs.shape
        device = probs.device
        b = torch.tensor(problem.rows or range(batch), device=device).view(-1, 1, 1, 1)
        h = torch.tensor(problem.heads or range(heads), device=device).view(1, -1, 1, 1)
        i = torch.arange(piece.start, piece.stop, device=device).view(1, 1, -1, 1)
        keys = row_keys(dropout_seed(device), b, h, i)
        probs = probs * keep_mask(keys, torch.arange(tk, device=device), p) / (1 - p)
    return probs @ v.repeat_interleave(problem.q.shape[1] // v.shape[1], dim=1), lse


def _scores(problem: Problem, leaves: Result, k: Tensor, piece: range) -> Tensor:
    """What goes into the softmax for the queries in `piece`, (B, Hq, |piece|, Tk). All queries at once are
    left to the specification; of a piece it makes the products, and the positions are added here."""
    options = {name: x for name, x in problem.options.items() if name not in ("dropout_p", "return_lse")}
    options["window"], ids = geometry.normalise_window(options.get("window")), options.get("document_ids")
    if ids is not None:
        ids = options["document_ids"] = (ids, ids) if isinstance(ids, Tensor) else ids
    options |= {name: leaves[name] for name in BIASES if name in leaves}
    bias, table = (options.get(name) for name in BIASES)
    tq, tk = problem.q.shape[2], k.shape[2]
    if len(piece) == tq:
        return attention_scores(leaves["q"], k, AttentionOptions(**options))
    rows = slice(piece.start, piece.stop)
    products = {name: options.get(name) for name in ("scale", "softcap")}
    scores = attention_scores(leaves["q"][:, :, rows], k, AttentionOptions(causal=False, **products))
    i = torch.arange(piece.start, piece.stop, device=k.device)
    j = torch.arange(tk, device=k.device)
    lengths = options.get("kv_lengths")
    rel = geometry.relative_positions(i, j, tq, tk, lengths)
    if (slopes := options.get("alibi_slopes")) is not None:
        scores = scores - slopes.to(scores.dtype).view(-1, scores.shape[1], 1, 1) * rel.abs()
    if bias is not None:
        per_query = bias.ndim >= 2 and bias.shape[-2] > 1
        scores = scores + (bias[..., rows, :] if per_query else bias).to(scores.dtype)
    if table is not None:
        reach = table.shape[1] // 2
        at = rel.squeeze(1).clamp(-reach, reach) + reach
        scores = scores + F.embedding(at, table.to(scores.dtype).T).permute(0, 3, 1, 2)
    if ids is not None:
        ids = (ids[0][:, rows], ids[1])
    band, blocks = AttentionOptions(**options).band, geometry.block_mask_of(options.get("block_mask"), i, j)
    return scores.masked_fill(~geometry.visible(rel, j, band, lengths, ids, blocks), -torch.inf)


def error_ratios(got: Result, reference: Result, plain: Result, dtype: torch.dtype) -> dict[str, float]:
    """The largest error over the largest allowed of each tensor: correct up to 1; inf for NaN or a wrong
    infinity."""
    return {
        name: error_ratio(x, reference[name], allowed(name, reference, plain, dtype))
        for name, x in got.items()
    }


def error_ratio(got: Tensor, reference: Tensor, allowed: float) -> float:
    finite = reference.isfinite()
    if not torch.equal(got.isfinite(), finite) or not torch.equal(got[~finite].double(), reference[~finite]):
        return torch.inf
    got, reference = got[finite].double(), reference[finite]
    return float((got - reference).abs().max() / allowed) if got.numel() else 0.0


def allowed(name: str, reference: Result, plain: Result, dtype: torch.dtype) -> float:
    """The largest error that the tensor `name` may have; `dtype` is that of the inputs."""
    gradient, exact = name.startswith("d"), reference[name]
    finite = exact.isfinite()
    exact, rounded = exact[finite], exact[finite].to(torch.float32 if name == "lse" else dtype)
    if exact.numel() == 0:
        return 0.0
    floor = 2 * float(((rounded + 0.3 - 0.3) - rounded).abs().max())
    if gradient and dtype == torch.float32:
        # A backward that recomputes P = exp(s - lse) inherits the rounding of an fp32 lse. It shows in fp32
        # only: without it four gradients of the grid on the CPU miss by 2% to 57% (three of sdpa, one of
        # tiled).
        lse = reference["lse"]
        floor += 2**-23 * float(lse.masked_fill(lse.isinf(), 0).abs().max() * exact.abs().max())
    if not exact.any():
        # Zero because dP - delta cancels (a single key): what is left is their rounding in fp32, where all
        # dtypes compute them (1.4e-6 at most on a CPU).
        floor = 1e-5
    return (3 if gradient else 2) * float((plain[name][finite].double() - exact).abs().max()) + floor
