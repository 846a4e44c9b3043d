"""What the context costs in training: claims 1, 2 and 4 of results/CLAIMS.md.

GPT-2 124M, 65,536 tokens a step, T = 1k to 64k, every attention, beside nanoGPT (--nanogpt MODEL.PY). Out of
memory is a row; a second one has the largest micro-batch that fits. Some 130 points, of which the refused
take 2 s, the others some 13: 25 minutes of a GPU. A sweep that was stopped goes on; with fewer
implementations it is shorter: sweep.grid.attention=[naive,sdpa_cudnn,triton,cuda].
"""

from __future__ import annotations

from typing import Any

from scripts.measure.report import sweep_report, training
from scripts.measure.report.sweep_report import beside, lines, works
from scripts.measure.rows import trusted
from scripts.measure.studies import Report, Row

Lines = dict[str, dict[int, list[Row]]]  # by implementation and length

EXPERIMENT = "seqlen_scaling"
GPU_S, ESTIMATED = 2100, True
SMALL = ("model=tiny", "model.n_layer=1", "tokens_per_step=1024", "data.corpus.vocab_size=64")
SMALL += ("data.corpus.n_tokens=4096", "sweep.grid.attention=[naive,sdpa]")
SMALL += ("sweep.grid.seq_len=[64,128,256]", "optim.lr=3e-3", "sweep.seconds=1")


def report(rows: list[Row]) -> Report:
    panels = list(sweep_report.panels(sweep_report.points(rows)).values())
    best = [times for panel in panels for times in of_nanogpts(panel).items()]
    ends = [where_memory_ends(lines(panel)) for panel in panels]
    return training.report(
        EXPERIMENT,
        rows,
        panels=[(of_nanogpts(panel), end) for panel, end in zip(panels, ends, strict=True)],
        naive=[end["gone"]["naive"][0] for end in ends if "naive" in end["gone"]],
        lengths=[tokens for tokens, _ in best],
        ratios=[ratio for _, (ratio, _) in best],
    )


def of_nanogpts(panel: list[Row]) -> dict[int, tuple[float, str]]:
    """Length -> (the best speed as a multiple of nanoGPT's beside it, whose it is)."""
    times: dict[int, tuple[float, str]] = {}
    for name, line in lines(panel).items():
        for tokens, rows in line.items():
            row = works(rows)
            if name != "nanoGPT" and row and trusted(row["result"]) and (peer := beside(row, panel)):
                ratio = training.speed(row) / training.speed(peer)
                times[tokens] = max(times.get(tokens, (0.0, "")), (ratio, name))
    return dict(sorted(times.items()))


def where_memory_ends(by_name: Lines) -> dict[str, Any]:
    """gone: the least length at which one micro-batch does not fit, and the longest that fits in smaller ones
    (0: none), by name; longest: the longest tried; goes_on: who trains there in one micro-batch."""
    gone: dict[str, tuple[int, int]] = {}
    for name, line in by_name.items():
        oom = [tokens for tokens, rows in line.items() if rows[0]["result"]["status"] == "oom"]
        if oom:
            gone[name] = min(oom), max((tokens for tokens, rows in line.items() if works(rows)), default=0)
    longest = max(tokens for line in by_name.values() for tokens in line)
    able = {name: line[longest] for name, line in by_name.items() if longest in line}
    goes_on = sorted(name for name, rows in able.items() if works(rows) is rows[0])
    return {"gone": gone, "longest": longest, "goes_on": goes_on}


def main() -> None:
    training.run(EXPERIMENT, __doc__, SMALL, report)
