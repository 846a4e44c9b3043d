"""The backward computes P again from lse, tile by tile, instead of reading it: does that pay? (claim 22)

    python scripts/study.py backward_recompute
    python scripts/study.py backward_recompute --attention naive naive_compiled sdpa_flash --head-dim 64

Side by side on the same tensors, the backward of those that kept the probabilities (naive, standard, which is
the formula in 16 bits, eager and compiled, and SDPA's math) and of those that kept out and lse. And
naive_checkpointed: the formula's whole forward again in plain PyTorch, with all scores written again.

No model and no training: random tensors of 16,384 tokens, 1,024 wide, causal, N = 512 and 4k at D = 64 and 4k
at D = 128, in bf16; at D = 64 and N = 1k and 4k also in fp32. On an H200 some 240 seconds: up to 60 of
compilation, in processes side by side before anything is timed (each imports torch), 25 of Nsight Compute. On
a CPU a small version in half a minute. Rows go to results/backward_recompute/<gpu>.jsonl as a shape ends; one
that has all its rows is left out the next time, so that a run that was stopped loses the shape it was at.

Beside the fields of side_by_side.py (the time is the backward's) a row's result has: keeps (whether P
was kept), products and flops_done, kept_mib (out and what the forward saved, measured), and counters:
{"forward", "backward": {dram_read_bytes, dram_write_bytes, launches}} by ncu, with counters_from "ncu" or why
there are none; copy_gb_per_s, of a copy on this device. Bytes by the model are the report's.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from attention import registry
from scripts.measure.instruments.backward_work import FORMULAS, shared_instance
from scripts.measure.instruments.bench_points import Shape
from scripts.measure.instruments.compile_ahead import Task, compile_ahead, is_cached, is_slow_to_compile
from scripts.measure.rows import Kept, append, key_of, positive, read, seconds
from scripts.measure.runner import Run, parser, run_study
from scripts.measure.studies import Report

STUDY = "backward_recompute"
GPU_S = 240
LENGTHS = {64: (512, 4096), 128: (4096,)}
FP32_LENGTHS, CPU_LENGTHS, COUNTED_LENGTHS = (1024, 4096), (128, 256, 512), (4096,)
MOST_LAUNCHES = 2048  # tokens; above a launch for each tile makes seconds of the host's time
SECONDS = {"cuda": 150, "cpu": 30}

Row = dict[str, Any]
Work = list[tuple[Shape, list[str]]]


def report(rows: list[Row]) -> Report:
    from scripts.measure.report import backward_report

    return backward_report.report(rows)


def arguments(given: list[str] | None = None) -> argparse.Namespace:
    made = parser(__doc__, STUDY)
    add = made.add_argument
    names = sorted((*registry.names(), *FORMULAS))
    add(
        "--attention",
        nargs="+",
        choices=names,
        metavar="NAME",
        help=f"{', '.join(names)}, not one that chooses",
    )
    add("--head-dim", type=positive, nargs="+", help="default: 64 and 128")
    add("--seq-len", type=positive, nargs="+", help="default: see above")
    add("--tokens", type=positive, help="in all rows of a batch (default: 16,384; on a CPU 512)")
    add("--width", type=positive, help="heads times head dim (default: 1,024; on a CPU 128)")
    add("--dtype", choices=("bf16", "fp16", "fp32"), help="only this one")
    add(
        "--counted",
        type=positive,
        nargs="*",
        default=COUNTED_LENGTHS,
        help="N that ncu counts at D = 64, in bf16",
    )
    add("--budget", type=seconds, default=0.03, metavar="S", help="measured seconds a contestant and point")
    add("--no-compile", dest="compile", action="store_false", help="compile as kernels are met, not ahead")
    add("--no-ncu", dest="ncu", action="store_false", help="no counters")
    options = made.parse_args(given)
    for name in options.attention or ():
        if registry.declaration(name).dispatches_to == "implementations":
            made.error(f"--attention {name}: it runs another one; name that")
    return options


def work(options: argparse.Namespace, cuda: bool) -> Work:
    """Shapes with their contestants."""
    tokens, width = options.tokens or (16384 if cuda else 512), options.width or (1024 if cuda else 128)
    found: Work = []
    for dtype in ("bf16", "fp16", "fp32"):
        usual = {"bf16": LENGTHS, "fp32": {64: FP32_LENGTHS}} if cuda else {"fp32": {64: CPU_LENGTHS}}
        if dtype != (options.dtype or dtype) or (dtype not in usual and options.dtype is None):
            continue
        of_dtype = usual.get(dtype, LENGTHS)
        for head_dim in options.head_dim or of_dtype:
            for n in options.seq_len or of_dtype.get(head_dim, LENGTHS[64]):
                heads = max(1, width // head_dim)
                shape = Shape(max(1, tokens // n), heads, heads, n, head_dim, True, dtype, study=STUDY)
                mine = options.attention or usual_names(shape, cuda)
                if not options.attention and n > MOST_LAUNCHES:
                    mine = [name for name in mine if not shared_instance(name).declaration.launches_each_tile]
                found.append((shape, list(mine)))
    return found


def usual_names(shape: Shape, cuda: bool) -> list[str]:
    """Who trains here in this precision, but those that take seconds to compile and those that choose a
    kernel, beside those that they choose among."""
    from scripts.measure.instruments.contestants import usual

    found = [name for name in usual(shape, cuda) if not registry.declaration(name).dispatches_to]
    formulas = ["naive_checkpointed", *(["standard_compiled"] if cuda and shape.dtype != "fp32" else [])]
    return [*formulas, *(name for name in found if not is_slow_to_compile(registry.declaration(name)))]


def left(asked: Work, kept: Kept) -> Work:
    """Shapes that lack a row, with all their contestants: only times of one run compare."""
    return [
        (shape, names) for shape, names in asked if kept.todo(shape.point(name, "backward") for name in names)
    ]


def to_compile(lacking: Work) -> list[Task]:
    """Those whose kernels end up in a cache on disk, the shortest shape of each dtype and head dim; a process
    for each."""
    found: dict[tuple[str, str, int], Shape] = {}
    for shape, names in sorted(lacking, key=lambda each: each[0].tokens):
        for name in (name for name in names if is_cached(shared_instance(name).declaration)):
            found.setdefault((name, shape.dtype, shape.head_dim), shape)
    return [(name, [(shape, "both")]) for (name, _, _), shape in found.items()]


def measure(options: argparse.Namespace, run: Run) -> None:
    """Each shape, its contestants in turn, a row for each."""
    from scripts.measure.instruments.backward_bench import BackwardBench
    from scripts.measure.instruments.backward_work import contestants

    device = run.device
    asked = work(options, device == "cuda")
    lacking = left(asked, run.kept)
    takes = f"about {SECONDS[device]} s for all of them"
    run.start(len(lacking), f"{len(lacking)} of {len(asked)} shapes; {takes}")
    if lacking:
        with ThreadPoolExecutor(1) as beside:  # contestants import much
            tasks = to_compile(lacking) if device == "cuda" and options.compile else []
            ready = beside.submit(compile_ahead, tasks) if tasks else None
            made = contestants(list(dict.fromkeys(name for _, names in lacking for name in names)))
            if ready:
                ready.result()
        bench = BackwardBench(made, device, options.budget, run.out)
        run.shapes([(shape, {"backward": names}) for shape, names in lacking], bench.measure)
    if device == "cuda" and options.ncu:
        count(asked, options.counted, run.out)


def count(asked: Work, lengths: Sequence[int], out: Path) -> None:
    """ncu's counters into the rows that have none and are to have some: those rows once more, with them."""
    from scripts.measure.instruments.backward_work import NOT_YET, counted
    from scripts.measure.instruments.counters import NoCounters

    rows, points = read(out), {}
    for shape, names in asked:
        wanted = shape.tokens in lengths and shape.head_dim == 64 and shape.dtype == "bf16"
        for name in names if wanted else ():
            row = rows.get(key_of(shape.point(name, "backward")))
            fresh = row and row["result"].get("counters_from") == NOT_YET
            if fresh and not shared_instance(name).declaration.launches_each_tile:
                points[name, shape] = row["result"]
    if not points:
        return
    began = time.perf_counter()
    try:
        found = counted(list(points))
        said = (
            f"{sum(not isinstance(counts, str) for counts in found.values())} of {len(points)} points counted"
        )
    except (NoCounters, OSError) as error:  # times and the model are worth having without
        found, said = dict.fromkeys(points, str(error)), str(error)
    print(f"ncu: {said}, {time.perf_counter() - began:.0f} s", flush=True)
    for (name, shape), counts in found.items():
        there = not isinstance(counts, str)
        more = {"counters": counts if there else None, "counters_from": "ncu" if there else counts}
        append(out, shape.point(name, "backward"), points[name, shape] | more)


def main() -> None:
    run_study(STUDY, arguments(), measure, report)
