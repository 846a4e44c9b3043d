"""How fast is attention by itself, from N = 32 to 64k? Claims 3, 8, 9, 12, 15, 16 and 24.

    python scripts/study.py attention_speed                        one H200, about 340 s
    python scripts/study.py attention_speed --part claims short    less of it
    python scripts/study.py attention_speed --attention standard cuda_fa2 triton sdpa_flash

Every implementation of conf/attention and standard attention (instruments/standard.py), all of a shape
side by side on the same tensors (instruments/side_by_side.py), their kernels and errors looked at. Parts:

claims   the shapes of claims 8 and 9 (D = 128 and 256), 12 (tiles in PyTorch) and 24 (scores of 8192 x 8192)
curve    D = 64, 32 heads, bf16, N = 512 to 64k, 16,384 tokens; without a mask too at 1k, 2k, 4k and 16k
short    N = 32 to 512, one sequence (forward, and both passes) and 16,384 tokens (forward): device time, and
         time in a stream of calls
windows  a causal window of 256, 1k and 4k keys in N = 16k

Kernels are compiled beforehand, in processes side by side with nothing that is timed. flex compiles for each
shape and takes part in some. What takes over --slow-ms at one N is not tried at longer ones. Without a GPU:
N = 32 to 512 in fp32 (results/attention_speed/cpu.jsonl).

Rows: results/attention_speed/<gpu>.jsonl, as those of results/attention (ms_median of the device, tflops,
error_ratio, kernels, peak_mib), and: `not_tried`; `stream_us`, a call's wall time in a stream of calls (N <=
512, forward and both); `tile`, `tiles_computed`, `tiles_all` (forward, one head, where the tile is known);
`copy_gb_per_s`, of the same process.
"""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from attention import registry
from scripts.measure.instruments.compile_ahead import Task, compile_ahead, is_cached
from scripts.measure.instruments.speed_points import PARTS, STUDY, Asked, asked, compiles_each_shape, small
from scripts.measure.rows import choices, positive, seconds
from scripts.measure.runner import Run, parser, run_study
from scripts.measure.studies import Report, Row

if TYPE_CHECKING:
    from scripts.measure.instruments.bench_points import Shape

GPU_S = 340
CHUNKS = 10  # processes for what compiles at every shape


def report(rows: list[Row]) -> Report:
    from scripts.measure.report import attention_speed_plots

    return attention_speed_plots.report(rows)


def on_cpu() -> list[str]:
    """Who can run the shapes of a CPU there."""
    from scripts.measure.instruments.contestants import usual

    return usual(next(small())[0], cuda=False)


def to_compile(points: list[Asked]) -> list[Task]:
    """Implementations with the calls that make each of their kernels once: all shapes where each has
    its own, else one of each kind, as short as can be."""
    calls: dict[str, dict[Any, tuple[Shape, str]]] = {}
    for point in sorted(points, key=lambda point: point.shape.tokens):
        s = point.shape
        for passed, names in point.passes.items():
            for name in (name for name in names if is_cached(registry.declaration(name))):
                kind = s.head_dim, s.causal, s.dtype, s.window is None
                every = s if compiles_each_shape(name) else kind
                calls.setdefault(name, {}).setdefault((every, passed), (s, passed))
    found = []
    for name, kinds in calls.items():
        chunks = CHUNKS if compiles_each_shape(name) else 1
        found += [(name, list(kinds.values())[i::chunks]) for i in range(chunks)]
    return [(name, chunk) for name, chunk in found if chunk]


def measure(options: argparse.Namespace, run: Run) -> None:
    from scripts.measure.instruments.speed_bench import SpeedBench

    cuda = run.device == "cuda"
    names = options.attention or (registry.implementations() if cuda else on_cpu())
    points = asked(options.part, names, cuda, options.longest)
    left = [(point, wanted) for point in points if (wanted := point.shape.lacking(point.passes, run.kept))]
    takes = "about 340 s of an H200, flash-attn and all," if cuda else "a minute"
    run.start(
        len(left), f"{len(left)} of {len(points)} shapes of up to {len(names)} contestants; {takes} for all"
    )
    if not left:
        return
    if cuda and not options.no_compile:
        compile_ahead(to_compile([point for point, _ in left]))
    slow_ms = options.slow_ms or (60.0 if cuda else 2000.0)
    made = {name: registry.build(name) for name in names}
    bench = SpeedBench(made, run.device, options.budget, run.out, slow_ms=slow_ms)
    for point in points:
        for passed, name in ((passed, name) for passed, mine in point.passes.items() for name in mine):
            if row := run.kept.row(point.shape.point(name, passed)):
                bench.note(point, passed, name, row["result"])
    asked_of = {id(point.shape): point for point, _ in left}
    run.shapes(
        [(p.shape, wanted) for p, wanted in left], lambda shape, of: bench.point(asked_of[id(shape)], of)
    )


def arguments() -> argparse.Namespace:
    made = parser(__doc__, STUDY)
    add = made.add_argument
    add("--part", nargs="+", choices=PARTS, default=list(PARTS), metavar="PART", help=", ".join(PARTS))
    add("--attention", nargs="+", choices=choices("attention"), metavar="NAME", help="default: all but auto")
    add("--longest", type=positive, metavar="N", help="leave out longer sequences")
    add("--slow-ms", type=float, help="no longer N after a call of this length (default: 60; on a CPU 2000)")
    add("--budget", type=seconds, default=0.02, metavar="S", help="measured seconds a contestant and point")
    add("--no-compile", action="store_true", help="compile as kernels are met, not ahead")
    return made.parse_args()


def main() -> None:
    run_study(STUDY, arguments(), measure, report)
