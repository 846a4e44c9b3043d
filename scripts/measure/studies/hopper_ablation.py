"""What does each idea of our Hopper kernel bring? attention=cuda_fa3 without one idea at a time:

    python scripts/study.py hopper_ablation

Forward: without overlap in a warp group (INTRA_GROUP_OVERLAP = 0); where warp groups take turns, without
that (ping-pong, PINGPONG = 0), and without both; where a block has two teams of two warp groups, with one of
four; with a block for each tile of queries instead of a persistent kernel, and launched only when the kernel
before has ended (EARLY_LAUNCH). Backward: without products that are a tile late (LATE_DQ, LATE_DK); with a
dQ that is cleared before, where it is not, and the other way round (STORES_FIRST_DQ); with the halves of
tiles computed in which no key is visible (SKIPS); with warp groups that begin a tile together (BEGINS_LATER
= 0), where they do not; the last two of the forward. In bf16, 16,384 tokens of width 2,048. On an H200 a
minute; it needs a Hopper GPU.

A row of results/hopper_ablation/<gpu>.jsonl has the idea that is left out (`without`, "" for none), the time
(device events, L2 flushed), and `difference`: the largest from the kernel with all ideas, over its largest
number; a forward that differs is an error.
"""

from __future__ import annotations

import argparse
from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from statistics import geometric_mean
from typing import Any

from ops.cuda.hopper_tiles import _FOUR, forward_tile
from scripts.measure.instruments.bench_points import TOKENS, WIDTH, Shape
from scripts.measure.report.pages import page
from scripts.measure.report.tables import Record, records, where
from scripts.measure.runner import Run, parser, run_study
from scripts.measure.studies import Point, Report, Row, Table

STUDY, GPU_S, ESTIMATED = "hopper_ablation", 60, False
HEAD_DIMS, LENGTHS = (64, 128), (1024, 4096, 16384)
BUDGET_S = 0.1
EARLY, TEAMS = "early launch", "teams"
FORWARD: dict[str, dict[str, int]] = {
    "": {},
    "ping-pong": {"PINGPONG": 0},
    "overlap": {"INTRA_GROUP_OVERLAP": 0},
    "ping-pong and overlap": {"PINGPONG": 0, "INTRA_GROUP_OVERLAP": 0},
    TEAMS: {},  # its tile has them
    "persistence": {"PERSISTENT": 0},
    EARLY: {"EARLY_LAUNCH": 0},
}
LATE, STORED, CLEARED = "late products", "storing the first dQ", "clearing dQ"
SKIPPED, LATER = "skipping hidden halves of tiles", "the second group's later begin"
BACKWARD: dict[str, dict[str, int]] = {
    "": {},
    LATE: {},  # its tile has them
    STORED: {"STORES_FIRST_DQ": 0},
    CLEARED: {"STORES_FIRST_DQ": 1},
    SKIPPED: {"SKIPS": 0},
    LATER: {"BEGINS_LATER": 0},
    "persistence": {"PERSISTENT": 0},
    EARLY: {"EARLY_LAUNCH": 0},
}
NOT_SUMMARISED = (TEAMS, STORED, CLEARED, SKIPPED, LATER, EARLY)  # of some calls alone, or of 1% at most
SHOWN = {LATE: "delayed dQ and dK"}  # where a name in the rows is not the one in reports
ALLOWED = 2**-6  # of a gradient's largest number: late products take P as it was rounded


def arguments(given: list[str] | None = None) -> argparse.Namespace:
    return parser(__doc__, STUDY).parse_args(given)


def shapes() -> list[Shape]:
    return [
        Shape(TOKENS // t, WIDTH // d, WIDTH // d, t, d, causal, "bf16", study=STUDY)
        for d in HEAD_DIMS
        for causal in (True, False)
        for t in LENGTHS
    ]


def points(shape: Shape) -> dict[str, list[Point]]:
    """Those of a shape, by pass. At D = 128 a causal mask hides halves of tiles, and without one a warp group
    begins later."""
    tile = forward_tile(shape.head_dim, shape.tokens, defaultdict(int, HAS_RIGHT=shape.causal))
    missing = [name for name in FORWARD if "ping-pong" in name and not tile.ping_pong]
    missing += [TEAMS] * (tile.teams == 1)
    first = STORED if shape.tokens <= LENGTHS[0] else CLEARED
    wide = [SKIPPED if shape.causal else LATER] if shape.head_dim == 128 else []
    backward = ["", LATE, first, *wide, "persistence", EARLY]
    names = {"forward": [name for name in FORWARD if name not in missing], "backward": backward}
    return {at: [shape.point("cuda_fa3", at) | {"without": name} for name in of] for at, of in names.items()}


def measure(options: argparse.Namespace, run: Run) -> None:
    """The variants of a shape and a pass in turns."""
    import torch

    work = [(shape, of) for shape in shapes() for of in points(shape).values()]
    run.left([point for _, of in work for point in of], "about a minute")
    groups = [(shape, left) for shape, of in work if (left := run.kept.todo(of))]
    if groups and not (run.device == "cuda" and torch.cuda.get_device_capability() == (9, 0)):
        raise SystemExit(f"{STUDY} measures kernels for Hopper (sm_90), and torch sees no such GPU here.")
    for shape, left in groups:
        run.group(
            left,
            lambda mine, shape=shape: timed(shape, mine),
            lambda point, _, shape=shape: f"{shape} {point['pass']} without {point['without'] or 'nothing'}",
        )


def variants(shape: Shape, passed: str) -> Callable[[str], tuple[Any, ...]]:
    """A function of the name of what is left out, which runs the pass once and gives its results."""
    from ops.cuda import hopper
    from ops.cuda.call import Call
    from ops.options import AttentionOptions

    q, k, v, dout = shape.tensors("cuda")
    options = AttentionOptions(shape.causal, shape.head_dim**-0.5), None, [0]
    out, lse = hopper.fa3_forward(q, k, v, *options)
    defines = Call(q, k, v, *options).defines
    forward = hopper.forward_tile(shape.head_dim, shape.tokens, defines)
    backward = hopper.backward_tile(shape.head_dim, defines)

    def run(without: str) -> tuple[Any, ...]:
        call = Call(q, k, v, *options)
        if passed == "forward":
            tile = _FOUR if without == TEAMS else forward  # as many warp groups, on as many keys
            return hopper.run_forward(q, call, tile, **FORWARD[without])
        tile = replace(backward, late_dq=False, late_dk=False) if without == LATE else backward
        return hopper.run_backward(dout, q, k, v, out, lse, call, tile, **BACKWARD[without])[:3]

    return run


def timed(shape: Shape, of: list[Point]) -> list[dict[str, Any]]:
    from scripts.measure.instruments.timing import Clock, Contestant, probe, spread

    passed = of[0]["pass"]
    run = variants(shape, passed)
    whole = run("")
    differences = [max(map(difference, run(point["without"]), whole)) for point in of]
    contestants = [Contestant(name, lambda _, name=name: run(name)) for name in (p["without"] for p in of)]
    times = Clock(BUDGET_S).alternate(contestants, [probe(each) for each in contestants])
    results = []
    for worst, took in zip(differences, times, strict=True):
        found = {"status": "ok", "difference": worst, **spread(took)}
        found["tflops"] = shape.flops(passed) / found["ms_median"] / 1e9
        if not worst <= (0.0 if passed == "forward" else ALLOWED):
            found = {"status": "error", "reason": f"differs by {worst:.2e} of the largest number"}
        results.append(found)
    return results


def difference(x: Any, y: Any) -> float:
    """The largest, over the largest of y."""
    return float((x.float() - y.float()).abs().max() / y.float().abs().max())


def report(rows: list[Row]) -> Report:
    """A table and a picture of each pass; nothing is measured."""
    found = where(records(rows), trusted=True)
    tables, pictures, means = [], {}, []
    for passed in ("forward", "backward"):
        mine = where(found, passed=passed)
        if mine:
            lines, kept = ratios(mine)
            tables.append(Table(f"Speed without an idea, relative to the kernel with all; {passed}", lines))
            pictures[passed] = picture([row for row in rows if row["point"]["pass"] == passed], mine)
            every = {name: of for name, of in kept.items() if name not in NOT_SUMMARISED}
            means += [(passed, name, geometric_mean(of)) for name, of in every.items()]
    return page(STUDY, tables, pictures, means=means)


def panels(found: list[Record]) -> dict[str, dict[str, dict[float, float]]]:
    """TFLOP/s by head dim and mask, what is left out, and T."""
    panels: dict[str, dict[str, dict[float, float]]] = {}
    for r in sorted(found, key=lambda r: (r.head_dim, not r.causal, r.seq_len)):
        title = f"D = {r.head_dim}, {'causal' if r.causal else 'no mask'}"
        panels.setdefault(title, {}).setdefault(r.without, {})[r.seq_len] = r.tflops
    return panels


def ratios(found: list[Record]) -> tuple[list[list[str]], dict[str, list[float]]]:
    """The table's lines, and the ratios by what is left out."""
    every: dict[str, list[float]] = {}
    lines = [["", "without", *(f"T = {t:,}" for t in LENGTHS)]]
    for title, of in panels(found).items():
        whole = of.get("", {})
        for name, line in of.items():
            if name:
                mine = {t: line[t] / whole[t] for t in line if t in whole}
                shown = SHOWN.get(name, name)
                every.setdefault(shown, []).extend(mine.values())
                lines.append([title, shown, *(f"{mine[t]:.2f}" if t in mine else "" for t in LENGTHS)])
    return lines, every


def picture(rows: list[Row], found: list[Record]) -> str:
    from scripts.measure.report.figures import Line, panel, panels_of, svg

    shown, names = panels(found), [*FORWARD, LATE, STORED, CLEARED, SKIPPED, LATER]
    said = (
        f"cuda_fa3, {found[0].passed}, with all its ideas and without one, bf16, 16,384 tokens, width 2,048"
    )
    figure, axes = panels_of(rows, said, len(shown))
    for axis, (title, of) in zip(axes, shown.items(), strict=True):
        drawn = [
            Line(f"without {SHOWN.get(name, name)}" if name else "cuda_fa3", line, place=names.index(name))
            for name, line in of.items()
        ]
        panel(axis, drawn, title, "T, tokens", "TFLOP/s", log_y=False, bottom=0)
    return svg(figure, rows)


def main() -> None:
    run_study(STUDY, arguments(), measure, report)
