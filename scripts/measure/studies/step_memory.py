"""What a training step takes at batch 1 by its context: the README's picture.

GPT-2 124M, one sequence a step, T = 1k to 64k, bf16, not compiled: naive, whose scores are T x T in each
layer, beside tiled attention. Out of memory is a row. Steps of one sequence of random tokens teach little, so
that a loss may rise (!); memory does not depend on it. 21 points, about 2 minutes of an H200 with
twelve side by side (--together 12).
"""

from __future__ import annotations

from scripts.measure.report import sweep_report, training
from scripts.measure.report.attention_memory_report import exponent
from scripts.measure.studies import Report, Row

EXPERIMENT = "step_memory"
GPU_S = 135
SMALL = ("model=tiny", "model.n_layer=1", "data.corpus.vocab_size=64", "data.corpus.n_tokens=4096")
SMALL += ("sweep.grid.attention=[naive,sdpa]", "sweep.grid.seq_len=[64,128,256]", "optim.lr=3e-3")


def report(rows: list[Row]) -> Report:
    """How what grows with T grows, the peaks, and who is out of memory from which T on."""
    by_name = sweep_report.lines(sweep_report.points(rows))
    grown, peaks = (
        {line.name: line for line in sweep_report.drawn(by_name, value) if line.points}
        for value in (sweep_report.beyond_state, lambda result: result["peak_mib"])
    )
    powers = {name: exponent(line.points) for name, line in grown.items()}
    return training.report(EXPERIMENT, rows, powers=powers, peaks=peaks)


def main() -> None:
    training.run(EXPERIMENT, __doc__, SMALL, report)
