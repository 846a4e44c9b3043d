"""How fast does a 1B Llama of transformers train with our attention in place of its SDPA?

The shape of Llama 3.2 1B, random weights, a row of T = 8,192 tokens a step, bf16 autocast, fused AdamW,
gradients clipped, not compiled: transformers' class with its SDPA, the same with
attn_implementation="tilegpt-auto", and our own model. 3 points, 63 s of an H200.
"""

from __future__ import annotations

from scripts.measure.report import training
from scripts.measure.studies import Report, Row

EXPERIMENT = "transformers_llama"
GPU_S = 63
SMALL = (
    "seq_len=64",
    "tokens_per_step=1024",
    "sweep.micro_tokens=512",
    "model=llama_tiny",
    "sweep.seconds=1",
)
SMALL += ("model.qk_norm=false", "data.corpus.vocab_size=64", "data.corpus.n_tokens=4096", "optim.lr=3e-3")


def report(rows: list[Row]) -> Report:
    """Each relative to transformers with its SDPA."""
    found = next(iter(training.panels(rows).values()), {})
    base, *others = [
        found.get((name, False)) for name in ("transformers SDPA", "transformers tilegpt-auto", "auto")
    ]
    return training.report(EXPERIMENT, rows, base=base, swapped=others[0], own=others[1])


def main() -> None:
    training.run(EXPERIMENT, __doc__, SMALL, report)
