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
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

from attention import registry
from scripts.measure.instruments.bench_points import DTYPES, Shape
from scripts.measure.instruments.compile_ahead import (
    Task,
    compile_ahead,
    is_cached,
    is_slow_to_compile,
)
from scripts.measure.rows import Kept, append, choices, key_of, positive, rows_file
from scripts.measure.studies import Point, Report, rows_path

if TYPE_CHECKING:
    from scripts.measure.instruments.exactness import Measurement

PARTS = ("known", "tiles", "stability", "asked")
SIZES = {"cuda": (2, 8, 512), "cpu": (1, 2, 256)}  # batch, heads, tokens
SECONDS = {"cuda": 35, "cpu": 60}

Row = dict[str, Any]


def report(rows: list[Row]) -> Report:
    """Tables, pictures and findings of the rows; nothing is measured."""
    from scripts.measure.report.numerics_report import finding, notes, pictures, tables

    question = "Is tiled attention exact, is it stable in 16 bits, and does what one asks for run?"
    command = "python scripts/study.py numerics"
    return Report(question, command, tables(rows), pictures(rows), notes(rows), finding(rows))


def arguments(given: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    names = choices("attention")
    add("--part", nargs="+", choices=PARTS, default=PARTS, metavar="PART", help=", ".join(PARTS))
    others = "those that take seconds to compile at each kind of call"
    add("--attention", nargs="+", choices=names, metavar="NAME", help=f"default: all but auto and {others}")
    add("--tokens", type=positive, help="default: 512, on a CPU 256")
    add("--fresh", action="store_true", help="measure again what has a row")
    add("--plot-only", action="store_true", help="print from the rows, measure nothing")
    add("--out", type=rows_file, help="rows go here (default: results/numerics/<gpu>.jsonl)")
    return parser.parse_args(given)


def measurements(options: argparse.Namespace, device: str) -> list[Measurement]:
    """The points asked for, the parts in turn."""
    from scripts.measure.instruments.asked import asked
    from scripts.measure.instruments.exactness import Setting, known, tiles
    from scripts.measure.instruments.stability import stability

    batch, heads, tokens = SIZES[device]
    every = registry.contestants()
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


def measure(options: argparse.Namespace, device: str, out: Path) -> None:
    """What has no row yet, a row for each at once; what waits for kernels last."""
    from scripts.measure.instruments.side_by_side import failure
    from scripts.measure.instruments.timing import clean_up, synchronise

    every = measurements(options, device)
    left = {key_of(point) for point in Kept(out, options.fresh).todo(each.point for each in every)}
    work = sorted(
        (each for each in every if key_of(each.point) in left), key=lambda each: compiles(each.point)
    )
    print(f"{len(work)} of {len(every)} points to measure: about {SECONDS[device]} s for all of them")
    tasks = to_compile([each.point for each in work]) if device == "cuda" else []
    began = time.perf_counter()
    with ThreadPoolExecutor(1) as beside:
        ready = beside.submit(compile_ahead, tasks) if tasks else None
        for done, each in enumerate(work, 1):
            if ready and compiles(each.point):
                ready.result()
            try:
                result = each.run()
                synchronise()
            except Exception as error:  # whatever a library raises is a row
                result = failure(error)
                clean_up()
            append(out, each.point, result)
            if done % 20 == 0 or done == len(work):
                rate = done / (time.perf_counter() - began)
                said = f"[{done}/{len(work)}] {each.point['part']}: {60 * rate:.0f} points/min"
                print(f"{said}, {(len(work) - done) / rate:.0f} s left", flush=True)


def main() -> None:
    options = arguments()
    import torch

    from scripts.measure.report.printed import show

    out = options.out or rows_path("numerics")
    if not options.plot_only:
        measure(options, "cuda" if torch.cuda.is_available() else "cpu", out)
    show(report, out)
