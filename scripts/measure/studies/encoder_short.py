"""What fused attention brings a short encoder: claim 6 of results/CLAIMS.md.

BERT-large's shape (24 layers, 1,024 wide, 16 heads), not causal, N = 512, 65,536 tokens a step in
micro-batches of 32 rows, bf16. Baselines: `standard`, naive attention as textbooks have it, in bf16,
not compiled, and compiled, where Inductor fuses the softmax (naive, the specification, is in fp32 inside: to
compare with it would flatter). Each token sees the one that it is to predict: the study is of speed. 12
points, some 23 s each: 4.5 minutes of an H200.
"""

from __future__ import annotations

from scripts.measure.report import training
from scripts.measure.studies import Report, Row

EXPERIMENT = "encoder_short"
GPU_S = 270
SMALL = ("seq_len=64", "tokens_per_step=1024", "sweep.micro_tokens=512", "model.n_layer=2", "model.n_head=4")
SMALL += ("model.n_embd=128", "data.corpus.vocab_size=64", "data.corpus.n_tokens=4096")
SMALL += (
    "sweep.grid.compile=[false]",
    "sweep.grid.attention=[standard,sdpa]",
    "optim.lr=3e-3",
    "sweep.seconds=1",
)


def report(rows: list[Row]) -> Report:
    """The fused against naive attention, not compiled and compiled, and among each other."""
    ways = [
        (compiled, training.fused(mine), mine.get(("standard", compiled)))
        for found in training.panels(rows).values()
        for compiled in (False, True)
        for mine in [{key: row for key, row in found.items() if key[1] == compiled}]
    ]
    return training.report(EXPERIMENT, rows, ways=ways)


def main() -> None:
    training.run(EXPERIMENT, __doc__, SMALL, report)
