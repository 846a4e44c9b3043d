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
SMALL = ("seq_len=64", "tokens_per_step=1024", "sweep.micro_tokens=512", "sweep.grid.model=[tiny]")
SMALL += ("data.corpus.vocab_size=64", "data.corpus.n_tokens=4096", "sweep.grid.compile=[false]")
SMALL += ("sweep.grid.attention=[standard,sdpa]", "model.bias=true", "optim.lr=3e-3", "sweep.seconds=1")
# What is compared with, and what that says.
EAGER, STANDARD = ("transformers eager", False), ("standard", True)
AGAINST = {
    EAGER: "Hugging Face's with its eager attention",
    ("transformers SDPA", False): "Hugging Face's with SDPA",
    STANDARD: "ours with standard attention, compiled too, which is what attention alone brings",
}


def report(rows: list[Row]) -> Report:
    question = "How much faster does GPT-2 train than Hugging Face's, and what of that is attention?"
    panels = training.panels(rows)
    notes = [note for title, found in panels.items() if (note := compared(title, found))]
    each = "; ".join(words for title, found in panels.items() if (words := gains(title, found)))
    said = f"{each}." if each else ""
    return training.report(rows, question, "python scripts/study.py speedup_end_to_end", notes, said)


def times(found: dict[tuple[str, bool], Row]) -> dict[tuple[str, bool], float]:
    """The speed of the fastest over what it is held against."""
    best = training.fastest(found)
    return {
        key: training.speed(best) / training.speed(found[key]) for key in AGAINST if best and key in found
    }


def gains(title: str, found: dict[tuple[str, bool], Row]) -> str:
    """Over the whole of the baseline, and by attention alone, where both are known."""
    factors = times(found)
    if not {EAGER, STANDARD} <= factors.keys():
        return ""
    whole, alone = factors[EAGER], factors[STANDARD]
    return f"{title.split(',')[0]}: {whole:.2f}x its eager speed, {alone:.2f}x by attention alone"


def compared(title: str, found: dict[tuple[str, bool], Row]) -> str:
    """A sentence about the fastest and what it is held against."""
    from scripts.measure.report.sweep_bars import label

    best = training.fastest(found)
    if best is None:
        return ""
    each = [f"{factor:.2f}x {AGAINST[key]}" for key, factor in times(found).items()]
    plain, standard = training.fastest({k: row for k, row in found.items() if not k[1]}), ("standard", False)
    if plain and standard in found:
        alone = training.speed(plain) / training.speed(found[standard])
        each.append(f"and {alone:.2f}x where neither is compiled ({label(plain)})")
    said = f"{title.split(',')[0]}: {label(best)} trains {training.speed(best):,.0f} tokens/s"
    return f"{said}: {', '.join(each)}." if each else f"{said}."


def main() -> None:
    training.run(EXPERIMENT, __doc__, SMALL, report)
