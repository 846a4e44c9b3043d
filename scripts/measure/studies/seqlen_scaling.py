"""What the context costs in training: claims 1, 2 and 4 of results/CLAIMS.md.

GPT-2 124M, 65,536 tokens a step, T = 1k to 64k, every attention, beside nanoGPT (--nanogpt MODEL.PY). Out of
memory is a row; a second one has the largest micro-batch that fits. Some 130 points, of which the refused
take 2 s, the others some 13: 25 minutes of a GPU. A sweep that was stopped goes on; with fewer
implementations it is shorter: sweep.grid.attention=[naive,sdpa_cudnn,triton,cuda].
"""

from __future__ import annotations

from scripts.measure.report import training
from scripts.measure.studies import Report, Row

Lines = dict[str, dict[int, list[Row]]]  # by implementation and length

EXPERIMENT = "seqlen_scaling"
SMALL = ("model=tiny", "model.n_layer=1", "tokens_per_step=1024", "data.corpus.vocab_size=64")
SMALL += ("data.corpus.n_tokens=4096", "sweep.grid.attention=[naive,sdpa]")
SMALL += ("sweep.grid.seq_len=[64,128,256]", "optim.lr=3e-3", "sweep.seconds=1")


def report(rows: list[Row]) -> Report:
    from scripts.measure.report import sweep_report

    question = "What does a longer context cost in training, and where does memory end?"
    panels = list(sweep_report.panels(sweep_report.points(rows)).values())
    notes = []
    for panel in panels:
        notes += [*against_nanogpt(panel), *where_memory_ends(sweep_report.lines(panel))]
    return training.report(rows, question, "python scripts/study.py seqlen_scaling", notes, finding(panels))


def finding(panels: list[list[Row]]) -> str:
    """The least and the most of nanoGPT's speed at any length, and where standard attention ends."""
    from scripts.measure.report.sweep_report import lines

    times = [(tokens, ratio) for panel in panels for tokens, (ratio, _) in of_nanogpts(panel).items()]
    if not times:
        return ""
    lengths, ratios = zip(*times, strict=True)
    said = f"The fastest is {min(ratios):.3f}x to {max(ratios):.3f}x nanoGPT's speed at T = "
    said += f"{min(lengths):,} to {max(lengths):,}"
    gone = [ends["naive"] for panel in panels if "naive" in (ends := out_of_memory(lines(panel)))]
    return said + (f"; naive is out of memory at {min(gone):,}." if gone else ".")


def of_nanogpts(panel: list[Row]) -> dict[int, tuple[float, str]]:
    """Length -> (the best speed as a multiple of nanoGPT's beside it, whose it is)."""
    from scripts.measure.report.sweep_report import beside, lines, works
    from scripts.measure.rows import trusted

    times: dict[int, tuple[float, str]] = {}
    for name, line in lines(panel).items():
        for tokens, rows in line.items():
            row = works(rows)
            if name == "nanoGPT" or row is None or not trusted(row["result"]):
                continue
            if peer := beside(row, panel):
                ratio = training.speed(row) / training.speed(peer)
                times[tokens] = max(times.get(tokens, (0.0, "")), (ratio, name))
    return times


def against_nanogpt(panel: list[Row]) -> list[str]:
    """The best implementation at each length."""
    if not (times := of_nanogpts(panel)):
        return []
    each = ", ".join(f"{name} {ratio:.3f}x at {tokens:,}" for tokens, (ratio, name) in sorted(times.items()))
    least = min(ratio for ratio, _ in times.values())
    return [f"The fastest is at least {least:.3f}x nanoGPT's speed at every length: {each}."]


def out_of_memory(by_name: Lines) -> dict[str, int]:
    """The least length at which one micro-batch does not fit, by name."""
    gone = {
        name: [tokens for tokens, rows in line.items() if rows[0]["result"]["status"] == "oom"]
        for name, line in by_name.items()
    }
    return {name: min(lengths) for name, lengths in gone.items() if lengths}


def where_memory_ends(by_name: Lines) -> list[str]:
    from scripts.measure.report.sweep_report import works

    notes = []
    for name, tokens in out_of_memory(by_name).items():
        fits = [tokens for tokens, rows in by_name[name].items() if works(rows)]
        most = f"; in smaller micro-batches it trains up to T = {max(fits):,}" if fits else ""
        notes.append(f"{name} is out of memory at T = {tokens:,} in one micro-batch{most}.")
    longest = max(tokens for line in by_name.values() for tokens in line)
    goes_on = [
        n for n, line in by_name.items() if longest in line and works(line[longest]) is line[longest][0]
    ]
    if notes and goes_on:
        notes.append(f"To T = {longest:,} in one micro-batch: {', '.join(sorted(goes_on))}.")
    return notes


def main() -> None:
    training.run(EXPERIMENT, __doc__, SMALL, report)
