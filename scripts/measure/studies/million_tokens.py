"""Does one row of 1,048,576 tokens train on one GPU, with the loss that it has in pieces?

A training step of GPT-2 124M with rotary positions, activation checkpointing and the loss in chunks, bf16,
not compiled. Before it, the same weights' loss of that row is computed in pieces of 32k tokens, each of which
sees the keys and values of those before. One step, 240 s of an H200.

result has, beside what every sweep measures, loss_in_pieces, piece (tokens), pieces_s, and predicted_mib, the
peak that model/costs/memory.py predicts.
"""

from __future__ import annotations

from scripts.measure.report import sweep_report, training
from scripts.measure.studies import Report, Row

EXPERIMENT = "million_tokens"
GPU_S = 240
SMALL = (
    "model=tiny",
    "seq_len=512",
    "model.loss_chunk=64",
    "sweep.grid.attention=[naive,sdpa]",
    "sweep.piece=128",
)
SMALL += ("data.corpus.vocab_size=64", "data.corpus.n_tokens=4096")


def report(rows: list[Row]) -> Report:
    """Whether both losses are the same, and the peak the predicted one."""
    found = [row for row in sweep_report.points(rows) if "loss_in_pieces" in row["result"]]
    longest = max(found, key=lambda row: row["point"]["seq_len"], default=None)
    return training.report(EXPERIMENT, rows, row=longest)


def main() -> None:
    training.run(EXPERIMENT, __doc__, SMALL, report)
