"""Is tiled attention the same function, does it survive large inputs, and does what one asks for run?

    python scripts/study.py numerics                 all four parts
    python scripts/study.py numerics --part asked --attention sdpa triton

known      online softmax on two small answers, keys in different tiles           (claim 21)
tiles      errors against fp64 over sizes of tiles and precisions                  (claim 21)
stability  fp16 and bf16 with q and k scaled up: errors, NaN, infinities           (claim 25)
asked      backends asked for, and the kernels that ran                            (claim 20)

No model and no training: random q, k, v of 2 x 8 heads, 512 tokens, D = 64, causal. On an H200 about 35
seconds: nothing is timed, so that our kernels are compiled, by processes of their own, while what needs no
compilation is measured. On a CPU about a minute, with smaller tensors and fp32 where there are no 16-bit
kernels. Rows go to results/numerics/<gpu>.jsonl as they are measured; what has a row is left out the next
time.

The points have, beside the usual fields, `part`, one of the above. Results by part:

known      got, expected: {"sum": of exp(s - 5) over scores 2, 5, 3; "out"}; features: where the keys lie
tiles      max_error, epsilons (of the largest value); point: tile [queries, keys] or null, its own
stability  max_error, nan, inf, of out, and of the gradients max_error_gradients, nan_.., inf_..; the inputs'
           largest_product (q k) and largest_score (times scale); point: magnitude, the factor on q and k
asked      kernels, ran (families of them), as_asked, said (warnings); point: wants (what it asks for, or "")
"""

from __future__ import annotations

import argparse
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

from attention import registry
from scripts.measure.instruments.bench_points import DTYPES, Shape
from scripts.measure.instruments.compile_ahead import Task, compile_ahead, is_cached, is_slow_to_compile
from scripts.measure.rows import choices, key_of, positive
from scripts.measure.runner import Run, parser, run_study
from scripts.measure.studies import Point, Report

if TYPE_CHECKING:
    from scripts.measure.instruments.exactness import Measurement

STUDY = "numerics"
GPU_S = 33
PARTS = ("known", "tiles", "stability", "asked")
SIZES = {"cuda": (2, 8, 512), "cpu": (1, 2, 256)}  # batch, heads, tokens
SECONDS = {"cuda": 35, "cpu": 60}

Row = dict[str, Any]


def report(rows: list[Row]) -> Report:
    from scripts.measure.report import numerics_report

    return numerics_report.report(rows)


def arguments(given: list[str] | None = None) -> argparse.Namespace:
    made = parser(__doc__, STUDY)
    add = made.add_argument
    names = choices("attention")
    add("--part", nargs="+", choices=PARTS, default=PARTS, metavar="PART", help=", ".join(PARTS))
    others = "those that take seconds to compile at each kind of call"
    add("--attention", nargs="+", choices=names, metavar="NAME", help=f"default: all but auto and {others}")
    add("--tokens", type=positive, help="default: 512, on a CPU 256")
    return made.parse_args(given)


def measurements(options: argparse.Namespace, device: str) -> list[Measurement]:
    """The points asked for, the parts in turn."""
    from scripts.measure.instruments.asked import asked
    from scripts.measure.instruments.exactness import Setting, known, tiles
    from scripts.measure.instruments.stability import stability

    batch, heads, tokens = SIZES[device]
    every = registry.implementations()
    usual = [name for name in every if not is_slow_to_compile(registry.declaration(name))]
    built = {name: registry.build(name) for name in options.attention or usual}
    setting = Setting(device, batch, heads, options.tokens or tokens, built)
    of = {"known": known, "tiles": tiles, "stability": stability, "asked": asked}
    found = [each for part in options.part for each in of[part](setting)]
    return list({key_of(each.point): each for each in found}.values())  # on a CPU some asks are the same


def compiles(point: Point) -> bool:
    """Whether its implementation has kernels that may have to be compiled, seconds in all."""
    name = point["implementation"]
    return name.startswith("torch.compile") or is_cached(registry.declaration(name))


def to_compile(points: list[Point]) -> list[Task]:
    """Of each implementation and dtype the call with most kernels, a process for each."""
    shorts, found = {long: short for short, long in DTYPES.items()}, {}
    for point in sorted(points, key=lambda point: point["pass"] != "both"):
        name, dtype = point["implementation"], shorts.get(point["dtype"])
        if dtype and is_cached(registry.declaration(name)):
            heads, tokens = point["heads"], point["kv_len"]
            shape = Shape(point["batch"], heads, heads, tokens, point["head_dim"], True, dtype)
            found.setdefault((name, dtype), (shape, point["pass"]))
    return [(name, [call]) for (name, _), call in found.items()]


def measure(options: argparse.Namespace, run: Run) -> None:
    """What has no row yet, a row for each at once; what waits for kernels last."""
    every = measurements(options, run.device)
    call = {key_of(each.point): each.run for each in every}
    left = sorted(
        run.left([each.point for each in every], f"about {SECONDS[run.device]} s for all"), key=compiles
    )
    tasks = to_compile(left) if run.device == "cuda" else []
    with ThreadPoolExecutor(1) as beside:
        ready = beside.submit(compile_ahead, tasks) if tasks else None

        def result(point: Point) -> dict[str, Any]:
            if ready and compiles(point):
                ready.result()
            return call[key_of(point)]()

        run.each(left, result, lambda point, _: f"{point['part']}: {point['implementation']}")


def main() -> None:
    run_study(STUDY, arguments(), measure, report)
