"""How much faster GPT-2 trains end to end: claim 4 of results/CLAIMS.md.

GPT-2 small and medium, T = 1,024, 65,536 tokens a step in micro-batches of 16 rows, bf16 autocast, fused
AdamW, gradients clipped, no dropout, random tokens: transformers' GPT2LMHeadModel with its eager attention,
which is the baseline, and with SDPA; our model with `standard`, naive attention as textbooks have it,
in bf16 (naive, the specification, is in fp32 inside: to compare with it would flatter), and with fused ones,
not compiled and compiled. 20 points, some 21 s each: 7 minutes of an H200.
"""

from __future__ import annotations

from scripts.measure.report import training
from scripts.measure.studies import Report, Row

EXPERIMENT = "speedup_end_to_end"
GPU_S = 413
SMALL = ("seq_len=64", "tokens_per_step=1024", "sweep.micro_tokens=512", "sweep.grid.model=[tiny]")
SMALL += ("data.corpus.vocab_size=64", "data.corpus.n_tokens=4096", "sweep.grid.compile=[false]")
SMALL += ("sweep.grid.attention=[standard,sdpa]", "model.bias=true", "optim.lr=3e-3", "sweep.seconds=1")


def report(rows: list[Row]) -> Report:
    found = {title.split(",")[0]: of for title, of in training.panels(rows).items()}
    eager = {
        title: training.fastest({k: r for k, r in of.items() if not k[1]}) for title, of in found.items()
    }
    fastest = {title: training.fastest(of) for title, of in found.items()}
    return training.report(EXPERIMENT, rows, panels=found, fastest=fastest, eager=eager)


def main() -> None:
    training.run(EXPERIMENT, __doc__, SMALL, report)
