"""Other ways to write softmax(Q K^T) V than attention=standard, and other ways to keep what the backward
needs: contestants of the studies.

They are no implementations to train with: the contract wants fp32 statistics, and these are here because they
have none. A GPU's matrix product sums in fp32 and rounds what it writes to the dtype of its inputs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from attention import registry
from attention.base import (
    Attention,
    AttentionCall,
    Capabilities,
    Compilation,
    Costs,
    Declaration,
    lse_bytes,
    scores_bytes,
)
from attention.declaration import k_bytes, q_bytes
from attention.naive import NaiveAttention, naive_attention
from attention.standard import StandardAttention, standard_attention, torch_softmax
from ops.options import AttentionOptions

BASELINE = "standard"  # of the papers


def exp_over_sum(scores: Tensor) -> Tensor:
    """exp(s) / sum exp(s): the definition, which overflows where exp(s) does."""
    p = torch.exp(scores)
    return p / p.sum(dim=-1, keepdim=True)


def shifted_exp_over_sum(scores: Tensor) -> Tensor:
    """The maximum of each row taken off first: the same function, and exp(s - max) is at most 1."""
    return exp_over_sum(scores - scores.amax(dim=-1, keepdim=True))


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


class Formula(StandardAttention):
    """One of FORMULAS: all scores in memory, the mask as -inf, probabilities kept by autograd."""

    def __init__(self, formula: str, name: str | None = None):
        super().__init__(name=name or formula)
        self.softmax, self.scale_first, self.dtype = FORMULAS[formula]

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, options: AttentionOptions, dropout_seed: Tensor | None
    ) -> tuple[Tensor, None]:
        made = q.dtype
        if self.dtype is not None:
            q, k, v = (x.to(torch.promote_types(x.dtype, self.dtype)) for x in (q, k, v))
        out = standard_attention(q, k, v, options, self.softmax, self.scale_first)
        return out.to(made), None


def implementation(name: str, *features: str, **options: Any) -> Attention:
    """One of conf/attention; the baseline with `features` that it does not declare, as it is right with them
    only where every query sees a key and what lies beyond `kv_lengths` is finite. `options` are the
    baseline's."""
    if name != BASELINE:
        return registry.build(name)
    made = registry.build(name, **options)
    made.capabilities = replace(made.capabilities, features=made.capabilities.features | set(features))
    return made


class Compiled(Attention):
    """Another one under torch.compile, once for all shapes."""

    capabilities: ClassVar[Capabilities] = StandardAttention.capabilities

    def __init__(self, attention: Attention, name: str):
        super().__init__(name)
        attend = attention.attend
        self.declaration = replace(attention.declaration, compilation=Compilation())

        def out(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> Tensor:
            return attend(q, k, v, AttentionOptions(causal, scale), None)[0]

        self.out = torch.compile(out, dynamic=True)

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, options: AttentionOptions, dropout_seed: Tensor | None
    ) -> tuple[Tensor, None]:
        return self.out(q, k, v, options.causal, options.scale), None

    def costs(self, call: AttentionCall, compiled: bool = False) -> Costs:
        """The products of the formula; what Inductor keeps and moves of it is not foreseen."""
        return Costs(saved_bytes=scores_bytes(call), writes_scores=True, backward_matmuls=4)


class Checkpointed(Attention):
    """The specification (naive) under torch.utils.checkpoint: the backward runs the whole forward again, and
    writes all scores again."""

    capabilities: ClassVar[Capabilities] = StandardAttention.capabilities
    declaration: ClassVar[Declaration] = NaiveAttention.declaration

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, options: AttentionOptions, dropout_seed: Tensor | None
    ) -> tuple[Tensor, None]:
        from torch.utils.checkpoint import checkpoint

        def out(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return naive_attention(q, k, v, options)[0]

        return checkpoint(out, q, k, v, use_reentrant=False, preserve_rng_state=False), None

    def costs(self, call: AttentionCall, compiled: bool = False) -> Costs:
        """Nothing kept; the backward runs the forward again as far as something is kept of it: not P V, which
        reads the scores once."""
        own = NaiveAttention().costs(call)
        forward, backward = own.moved_bytes
        tensors = 2 * (q_bytes(call) + k_bytes(call)) + lse_bytes(call)
        again = forward - scores_bytes(call) + tensors
        return replace(own, saved_bytes=0, moved_bytes=(forward, backward + again), backward_matmuls=5)
