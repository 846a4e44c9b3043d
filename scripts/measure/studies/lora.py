"""What do LoRA's adapters save in memory and time, compared with training all weights?

GPT-2 124M, T = 1,024, 65,536 tokens a step in one micro-batch, bf16, compiled, rank 8 in all four matrices of
a block. The weights are random: time and memory do not depend on them. Two points, 48 s of an H200.
"""

from __future__ import annotations

from scripts.measure.report import training
from scripts.measure.studies import Report, Row

EXPERIMENT = "lora"
GPU_S = 48
SMALL = ("seq_len=64", "tokens_per_step=1024", "sweep.micro_tokens=512", "model=tiny", "sweep.seconds=1")
SMALL += ("data.corpus.vocab_size=64", "data.corpus.n_tokens=4096", "sweep.grid.attention=[sdpa]")


def report(rows: list[Row]) -> Report:
    """Memory and speed of adapters, relative to all weights."""
    found = {"LoRA" in title: training.fastest(of) for title, of in training.panels(rows).items()}
    return training.report(EXPERIMENT, rows, full=found.get(False), adapters=found.get(True))


def main() -> None:
    training.run(EXPERIMENT, __doc__, SMALL, report)
