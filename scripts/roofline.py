"""Roofline of the CUDA ladder: the GPU's ceilings, and the bytes and FLOPs of each stage.

    python scripts/roofline.py                       ceilings, then every stage from 512 to 16k tokens, causal
    python scripts/roofline.py --quick               three lengths, and only the counters of memory
    python scripts/roofline.py --tiles               fa2 with different tile sizes, at 4k tokens
    python scripts/roofline.py --plot-only           print the tables and draw the plots again, from the rows

Bytes, FLOPs and occupancy are counted by Nsight Compute if `ncu` is on the PATH and allowed to read the
counters; otherwise they are computed by costs/flops.py, and the row says so. naive, rowwise and tiled run in
fp32, fa1 and fa2 in bf16. Rows go to results/roofline/<gpu>.jsonl as they are measured; --fresh measures
again, with all counters, what has a row of --quick or of a run without ncu.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

if __name__ == "__main__" and not __package__:  # python scripts/<command>.py: see there
    import _checkout  # noqa: F401


from scripts.measure.instruments.bench_points import Shape
from scripts.measure.instruments.ladder import DTYPE, STAGES, Point, counted, measured
from scripts.measure.machine import ROOT
from scripts.measure.rows import Kept, append, positive
from scripts.measure.runner import attempt, parser, rows_path

LENGTHS = (512, 1024, 2048, 4096, 8192, 16384)
QUICK_LENGTHS = (1024, 4096, 16384)
BUDGET_S = 0.05  # of measured time a point
# fa2's tiles: queries, keys, warps of a block, blocks that are to share a multiprocessor.
TILES = [
    (br, bc, warps, blocks)
    for br in (64, 128, 256)
    for bc in (32, 64, 128)
    for warps in (4, 8)
    for blocks in (1, 2)
    # a warp has one or two rows of tensor cores' tiles; D = 128 leaves room for so many rows of Q, K and V
    if br // warps in (16, 32) and blocks * (br + 4 * bc) <= 900
]


def arguments(given: list[str] | None = None) -> argparse.Namespace:
    made = parser(__doc__, "roofline")
    add = made.add_argument
    add("--stages", nargs="+", choices=STAGES, default=STAGES, metavar="NAME", help=", ".join(STAGES))
    add("--seq-len", type=positive, nargs="+", help="default: 512 to 16,384; with --tiles 4,096")
    add("--head-dim", type=positive, default=128)
    add("--batch", type=positive, default=1)
    add("--heads", type=positive, default=32)
    mask = made.add_mutually_exclusive_group()
    mask.add_argument("--causal", action="store_true", default=True, help="the default")
    mask.add_argument("--full", dest="causal", action="store_false", help="without a mask")
    add("--quick", action="store_true", help="1k, 4k and 16k tokens; DRAM, L2, time and occupancy alone")
    add("--tiles", action="store_true", help="the study of fa2's tile in the place of the roofline")
    add("--no-ncu", dest="ncu", action="store_false", help="times and the model alone")
    add("--no-ceilings", dest="ceilings", action="store_false", help="those in the rows stand")
    options = made.parse_args(given)
    if options.tiles and options.stages not in (STAGES, ["cuda_fa2"]):
        made.error(f"--tiles --stages {' '.join(options.stages)}: tiles are fa2's: leave --stages out")
    return options


def points(options: argparse.Namespace) -> list[list[Point]]:
    """Those of each stage, which one run of ncu counts; or those of the tiles."""

    def shape(stage: str, tokens: int) -> Shape:
        heads = options.heads
        return Shape(options.batch, heads, heads, tokens, options.head_dim, options.causal, DTYPE[stage])

    if options.tiles:
        return [
            [Point("cuda_fa2", shape("cuda_fa2", tokens), tile) for tile in TILES]
            for tokens in options.seq_len or (4096,)
        ]
    lengths = options.seq_len or (QUICK_LENGTHS if options.quick else LENGTHS)
    return [[Point(stage, shape(stage, tokens)) for tokens in lengths] for stage in options.stages]


def measure_ceilings(out: Path, kept: Kept) -> None:
    from scripts.measure.instruments.ceilings import Ceilings
    from scripts.measure.instruments.timing import clean_up

    for name, call in Ceilings().all():
        point = {"study": "roofline", "implementation": "ceiling", "pass": name}
        if kept.done(point):
            continue
        result = attempt(lambda call=call: {"status": "ok"} | asdict(call()))
        clean_up()
        append(out, point, result)


def with_counters(result: dict[str, Any], counts: dict[str, Any] | str) -> dict[str, Any]:
    """A row's result with what ncu counted, or the reason why it did not."""
    if result["status"] != "ok":
        return result
    there = not isinstance(counts, str)
    result |= {
        "counters": counts if there else None,
        "counters_from": "ncu" if there else f"the model: {counts}",
    }
    moved = counts if there and "dram_read_bytes" in counts else result["model"]
    dram = moved["dram_read_bytes"] + moved.get("dram_write_bytes", 0)
    return result | {"gb_per_s": dram / result["ms_median"] / 1e6}


def measure(options: argparse.Namespace, out: Path) -> None:
    """Ceilings, then each stage: counters of all its points that have no row, then the points, a row for
    each."""
    from scripts.measure.instruments.counters import NoCounters
    from scripts.measure.instruments.timing import clean_up

    kept = Kept(out, options.fresh, options.missing)
    began, refused = time.perf_counter(), None if options.ncu else "--no-ncu"

    def say(text: str) -> None:
        print(f"[{time.perf_counter() - began:4.0f} s] {text}", flush=True)

    if options.ceilings and not options.tiles:
        measure_ceilings(out, kept)
        say("ceilings")
    for asked in points(options):
        mine = [point for point in asked if not kept.done(point.row())]
        if not mine:
            continue
        counts: list[dict[str, Any] | str] = [refused or ""] * len(mine)
        if refused is None:
            try:
                counts = counted(mine, options.quick)
                say(f"{mine[0].stage}: counted by ncu")
            except Exception as error:  # times and the model are worth having without
                counts = [str(error)] * len(mine)
                say(f"{mine[0].stage}: {error}; from the model")
                if isinstance(error, NoCounters) and error.lasting:
                    refused = str(error)
        for point, counters in zip(mine, counts, strict=True):
            result = with_counters(attempt(lambda point=point: measured(point, BUDGET_S)), counters)
            clean_up()
            append(out, point.row(), result)
            took = f"{result['ms_median']:.3f} ms" if result["status"] == "ok" else result["reason"]
            say(f"{point}: {took}")


def main() -> None:
    options = arguments()
    import torch

    from scripts.measure.report import printed, roofline_plot

    cuda = torch.cuda.is_available()
    if not (cuda or options.plot_only):
        raise SystemExit(
            "roofline.py needs a CUDA GPU: torch.cuda.is_available() is False. --plot-only draws."
        )
    out = options.out or (rows_path("roofline") if cuda else ROOT / "results" / "roofline" / "h200.jsonl")
    if not options.plot_only:
        measure(options, out)
    printed.show(roofline_plot.report, out)


if __name__ == "__main__":
    main()
