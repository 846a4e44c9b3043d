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
SMALL = ("seq_len=64", "tokens_per_step=1024", "sweep.micro_tokens=512", "model.n_layer=2", "model.n_head=4")
SMALL += ("model.n_embd=128", "data.corpus.vocab_size=64", "data.corpus.n_tokens=4096")
SMALL += (
    "sweep.grid.compile=[false]",
    "sweep.grid.attention=[standard,sdpa]",
    "optim.lr=3e-3",
    "sweep.seconds=1",
)
WHERE = {False: "where nothing is compiled", True: "where both are compiled"}


def report(rows: list[Row]) -> Report:
    question = "How much faster does a short encoder without a causal mask train with fused attention?"
    panels = list(training.panels(rows).values())
    notes = [note for found in panels for note in compared(found)]
    times = [
        f"{factor:.2f}x {words}"
        for found in panels
        for compiled, words in WHERE.items()
        if (factor := gain(found, compiled))
    ]
    said = f"Fused: {', '.join(times)}." if times else ""
    return training.report(rows, question, "python scripts/study.py encoder_short", notes, said)


def gain(found: dict[tuple[str, bool], Row], compiled: bool) -> float | None:
    """The speed of the fastest fused over that of naive attention."""
    best = training.fastest({key: row for key, row in found.items() if key[1] == compiled})
    base = found.get(("standard", compiled))
    return training.speed(best) / training.speed(base) if best and base else None


def compared(found: dict[tuple[str, bool], Row]) -> list[str]:
    """Sentences: fused against naive attention, compiled and not; and fused ones among each other."""
    from scripts.measure.report.sweep_bars import kind, label

    notes = []
    for compiled, words in WHERE.items():
        mine = {key: row for key, row in found.items() if key[1] == compiled}
        best = training.fastest(mine)
        if times := gain(found, compiled):
            notes.append(f"{label(best)} trains {times:.2f}x as fast as naive attention, {words}.")
        fused = [row for (name, _), row in mine.items() if kind(name) in ("ours", "library")]
        if len(fused) > 1:
            slowest = min(fused, key=training.speed)
            times = training.speed(best) / training.speed(slowest)
            notes.append(f"Among the fused ones, {label(best)} is {times:.2f}x as fast as {label(slowest)}.")
    return notes


def main() -> None:
    training.run(EXPERIMENT, __doc__, SMALL, report)
