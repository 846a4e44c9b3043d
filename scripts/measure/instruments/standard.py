"""The contestants of attention_memory and attention_speed: every implementation of conf/attention, and
`standard`, the baseline of papers and tutorials: softmax(Q K^T / sqrt(D)) V in eager PyTorch, in 16 bits
where its inputs are.

attention=naive is the specification, in fp32 inside and with an lse: to compare with it would flatter.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from attention.base import Attention

# Those that write out the scores; cuda_rowwise has a row of them at a time.
MATERIALISED = ("standard", "naive", "sdpa_math", "cuda_naive")
EAGER = MATERIALISED[:3]  # in PyTorch's own matrix products


def known() -> list[str]:
    """All but `auto`, which is a choice among the others."""
    from scripts.measure.rows import choices

    return ["standard", *(name for name in choices("attention") if name != "auto")]


def contestants(names: list[str]) -> dict[str, Attention]:
    """Implementations by name."""
    from scripts.bench_attention import build
    from scripts.measure.instruments.textbook import Formula

    made = build([name for name in names if name != "standard"])
    return {name: made[name] if name in made else Formula("formula_torch", name) for name in names}
