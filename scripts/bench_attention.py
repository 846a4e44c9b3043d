"""Time every implementation of conf/attention that supports a shape, all on the same tensors:

    python scripts/bench_attention.py                           the FlashAttention papers' shapes
    python scripts/bench_attention.py --pass decode             one query, and a cache of 1k to 128k tokens
    python scripts/bench_attention.py --attention triton sdpa_cudnn --head-dim 128 --seq-len 4096 --causal
    python scripts/bench_attention.py --plot-only --out results/attention/h200.jsonl
                                                                draw the plots again, from the rows

TFLOP/s count 4 B H T T D FLOPs for the forward (half of that with a causal mask) and 2.5 times as many for
the backward. A row holds the time, the kernels that ran, the error against fp64 and the peak memory; calls
that run out of memory or are refused get a row with the reason. Rows are appended to
results/attention/<gpu>.jsonl as they are measured. After a kill, the same command resumes, as long as the
machine and the sources are the same.
"""

from __future__ import annotations

import argparse

if __name__ == "__main__" and not __package__:  # python scripts/<command>.py: see there
    import _checkout  # noqa: F401


from scripts.measure.instruments.bench_points import DTYPES, PASSES, points, sparse
from scripts.measure.rows import choices, key_of, positive, read, seconds
from scripts.measure.runner import Run, parser


def arguments() -> argparse.Namespace:
    made = parser(__doc__, "attention")
    add = made.add_argument
    names = choices("attention")
    add("--attention", nargs="+", choices=names, metavar="NAME", help="contestants (default: all but auto)")
    add(
        "--pass",
        dest="passes",
        nargs="+",
        choices=PASSES,
        default=["forward", "backward"],
        metavar="PASS",
        help=f"of {', '.join(PASSES)} (default: forward backward)",
    )
    add("--seq-len", type=positive, nargs="+", help="tokens; for decode those in the cache")
    add("--head-dim", type=positive, nargs="+", help="default: 64 128 256; for decode 128")
    add("--batch", type=positive, nargs="+", help="default: 16,384 tokens in all; for decode 1 and 16")
    add("--heads", type=positive, help="default: 2,048 / head dim; for decode 32")
    add("--kv-heads", type=positive, help="default: as many as heads; for decode 8 of 32")
    mask = made.add_mutually_exclusive_group()
    mask.add_argument("--causal", action="store_true", default=None, help="only causal (default: both)")
    mask.add_argument("--full", dest="causal", action="store_false", help="only without a mask")
    add("--window", type=positive, help="keys that a query sees to its left")
    add("--documents", type=positive, metavar="N", help="rows of documents of N tokens each, by document_ids")
    add(
        "--sparsity",
        type=sparse,
        nargs="+",
        metavar="PATTERN[:BLOCKS]",
        help="of model/sparsity.py, and dense: local:8, say",
    )
    add("--relative-bias", type=positive, metavar="R", help="learned, by distances up to R; T5's has 128")
    add("--kv-lengths", action="store_true", help="decode: with the lengths of a cache, which is full")
    add("--short", action="store_true", help="lengths from 32 on as well")
    add("--dtype", choices=DTYPES, help="default: bf16; on a CPU fp32")
    add("--budget", type=seconds, default=0.2, metavar="S", help="measured seconds a contestant and point")
    options = made.parse_args()
    if options.heads and options.kv_heads and options.heads % options.kv_heads:
        made.error(f"--heads {options.heads} is no multiple of --kv-heads {options.kv_heads}")
    of_squares = {"--documents": options.documents, "--sparsity": options.sparsity}
    of_squares |= {"--relative-bias": options.relative_bias, "--full": options.causal is False}
    if "decode" in options.passes and (given := [name for name, value in of_squares.items() if value]):
        made.error(f"{', '.join(given)}: --pass decode has none of it: ask for other passes alone")
    if options.short and (options.seq_len or options.passes == ["decode"]):
        made.error("--short adds lengths to the usual ones of a square: leave out --seq-len, or --short")
    if options.kv_lengths and options.passes != ["decode"]:
        made.error("--kv-lengths is for --pass decode alone")
    return options


def measure(options: argparse.Namespace, run: Run) -> set[str]:
    """Measures what is missing; the keys of all points asked for."""
    from attention import registry

    names = options.attention or registry.implementations()
    asked = list(points(options, run.device == "cuda"))
    if uneven := [shape for shape, _ in asked if shape.heads % shape.kv_heads]:
        raise SystemExit(f"{uneven[0]}: the heads need to be a multiple of --kv-heads.")
    todo = {
        shape: left
        for shape, passes in asked
        if (left := shape.lacking(dict.fromkeys(passes, names), run.kept))
    }
    total = sum(map(len, todo.values()))
    there = sum(len(passes) for _, passes in asked) - total
    run.start(
        len(todo), f"{total} points of up to {len(names)} contestants" + (f", {there} kept" if there else "")
    )
    if todo:
        from scripts.measure.instruments.side_by_side import Bench

        built = {name: registry.build(name) for name in names}
        run.shapes(list(todo.items()), Bench(built, run.device, options.budget, run.out).measure)
    return {
        key_of(shape.point(name, passed)) for shape, passes in asked for passed in passes for name in names
    }


def main() -> None:
    options = arguments()
    from scripts.measure.report import attention_report, printed

    run = Run("attention", options)
    out = run.out
    keys = None if options.plot_only else measure(options, run)
    rows = read(out)
    if not rows:
        raise SystemExit(f"{out} has no rows: measure first, without --plot-only.")
    shown = [row for key, row in rows.items() if keys is None or key in keys]
    doubts = [f"{words} [{', '.join(at)}]" for words, at in attention_report.doubts(shown).items()]
    printed.say(attention_report.tables(shown), doubts)
    printed.draw(attention_report.pictures(list(rows.values())), out)
    print(f"rows in {out}")


if __name__ == "__main__":
    main()
