"""softmax(Q K^T) V as textbooks and tutorials write it, in the precision of its inputs, and other ways to
keep what the backward needs: contestants of the studies.

They are no implementations to train with: the contract wants fp32 statistics, and these are here because they
have none. A GPU's matrix product sums in fp32 and rounds what it writes to the dtype of its inputs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import Tensor

from attention.base import Attention, Capabilities
from attention.naive import naive_attention


def exp_over_sum(scores: Tensor) -> Tensor:
    """exp(s) / sum exp(s): the definition, which overflows where exp(s) does."""
    p = torch.exp(scores)
    return p / p.sum(dim=-1, keepdim=True)


def shifted_exp_over_sum(scores: Tensor) -> Tensor:
    """The maximum of each row taken off first: the same function, and exp(s - max) is at most 1."""
    return exp_over_sum(scores - scores.amax(dim=-1, keepdim=True))


def torch_softmax(scores: Tensor) -> Tensor:
    """PyTorch's own: shifted by the maximum and in fp32 inside, rounded when written."""
    return torch.softmax(scores, dim=-1)


# name -> (softmax, whether the scale goes into q before the product, the dtype of scores and probabilities
# or None for that of q)
FORMULAS: dict[str, tuple[Callable[[Tensor], Tensor], bool, torch.dtype | None]] = {
    "formula_no_max": (exp_over_sum, False, None),
    "formula_max": (shifted_exp_over_sum, False, None),
    "formula_torch": (torch_softmax, False, None),
    "formula_scale_first": (torch_softmax, True, None),
    "formula_no_max_fp32": (exp_over_sum, False, torch.float32),
}
SAID = {
    "formula_no_max": "exp(s) / sum exp(s), all in 16 bits",
    "formula_max": "the same with the row's maximum taken off",
    "formula_torch": "scores in 16 bits, torch.softmax",
    "formula_scale_first": "scores in 16 bits of a q that is scaled first, torch.softmax",
    "formula_no_max_fp32": "exp(s) / sum exp(s) in fp32",
}


class Formula(Attention):
    """One of FORMULAS: all scores written out, the mask as -inf, probabilities kept by autograd."""

    capabilities: ClassVar[Capabilities] = Capabilities(features=frozenset({"noncausal"}))

    def __init__(self, formula: str, name: str | None = None):
        super().__init__(name or formula)
        self.softmax, self.scale_first, self.dtype = FORMULAS[formula]

    def attend(self, q: Tensor, k: Tensor, v: Tensor, *, causal: bool, scale: float, **options: Any):
        made = q.dtype
        if self.dtype is not None:
            q, k, v = (x.to(torch.promote_types(x.dtype, self.dtype)) for x in (q, k, v))
        scores = (q * scale) @ k.mT if self.scale_first else (q @ k.mT) * scale  # (B, H, T, T)
        if causal:
            tokens = q.shape[2]
            future = torch.ones(tokens, tokens, dtype=torch.bool, device=q.device).triu(1)
            scores = scores.masked_fill(future, -torch.inf)
        return (self.softmax(scores) @ v).to(made), None


class Compiled(Attention):
    """Another one under torch.compile, once for all shapes."""

    capabilities: ClassVar[Capabilities] = Formula.capabilities

    def __init__(self, attention: Attention, name: str):
        super().__init__(name)
        attend = attention.attend

        def out(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> Tensor:
            return attend(q, k, v, causal=causal, scale=scale, return_lse=False)[0]

        self.out = torch.compile(out, dynamic=True)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, *, causal: bool, scale: float, **options: Any):
        return self.out(q, k, v, causal, scale), None


class Checkpointed(Attention):
    """The specification (naive) under torch.utils.checkpoint: the backward runs the whole forward again, and
    writes all scores again."""

    capabilities: ClassVar[Capabilities] = Formula.capabilities

    def attend(self, q: Tensor, k: Tensor, v: Tensor, *, causal: bool, scale: float, **options: Any):
        from torch.utils.checkpoint import checkpoint

        def out(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return naive_attention(q, k, v, causal=causal, scale=scale)[0]

        return checkpoint(out, q, k, v, use_reentrant=False, preserve_rng_state=False), None
