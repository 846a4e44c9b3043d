"""How much of the compute and of the bandwidth prefill and decode use, whole models and part by part of a
layer (claims 14, 19 and 28):

    python scripts/study.py prefill_decode

GPT-2 small and XL and a 13B shape (40 layers, 5,120 wide, 40 heads: all of it, 26 GB), random weights, bf16:
prefill of 64 to 2,048 tokens, one row, and decode of 1, 8 and 64 rows that see 1,024 tokens. The parts of one
layer at some of these, and at the shape of claim 14's figures (BERT-large: 8 rows of 512 tokens, no mask).
45 s of one H200. Without a GPU: a small shape in fp32, seconds.

Rows of results/prefill_decode/<gpu>.jsonl, `pass` prefill or decode; `seq_len` new tokens a row that see
`kv_len`; each has the `ceilings` of its process: `tflops` of a cuBLAS product of 8192^3, `gb_per_s` of a
copy.

implementation parts    `parts` by name: `kind` (weights, standard, fused, pointwise), `times` in a layer,
                        `flops`, `elements` and `bytes` (operands read and results written once), `ms_median`,
                        `tflops`, `gb_per_s`; of fused ones `error_ratio`, `kernels_ok`. A graph of calls on
                        operands that together are several L2s gives the time: `cold`, where they are.
implementation triton   (or another) the whole model with that attention: `ms_median`, `tokens_per_s`,
                        `flops`, `bytes` (weights and the cache, once), `tflops`, `gb_per_s`
"""

from __future__ import annotations

import argparse
import gc
from typing import Any

from scripts.measure.report.prefill_decode_report import BERT
from scripts.measure.rows import choices, positive
from scripts.measure.runner import Run, parser, run_study
from scripts.measure.studies import Point, Report, Row

STUDY = "prefill_decode"
GPU_S = 43
# name: layers, width, heads
MODELS = {
    "gpt2": (12, 768, 12),
    "gpt2_medium": (24, 1024, 16),
    "gpt2_large": (36, 1280, 20),
    "gpt2_xl": (48, 1600, 25),
    "13b": (40, 5120, 40),
    BERT: (24, 1024, 16),
    "small": (2, 64, 4),
}
DEFAULT = ("gpt2", "gpt2_xl", "13b")
PREFILL, DECODE, CONTEXT = (64, 128, 256, 512, 1024, 2048), (1, 8, 64), 1024
PARTS_PREFILL, PARTS_DECODE = (64, 512, 2048), (1, 64)
CPU_PREFILL, CPU_DECODE, CPU_CONTEXT = (16, 64), (1, 4), 64


def arguments(given: list[str] | None = None) -> argparse.Namespace:
    made = parser(__doc__, STUDY)
    add = made.add_argument
    known = [name for name in MODELS if name != BERT]
    add("--models", nargs="+", choices=known, metavar="MODEL", help=f"of {', '.join(known)}")
    add(
        "--attention",
        nargs="+",
        choices=choices("attention"),
        metavar="NAME",
        help="fused ones beside the standard; the first is that of whole models (default: triton sdpa_cudnn; "
        "without a GPU sdpa)",
    )
    add("--prefill", type=positive, nargs="+", help="tokens of prompts")
    add("--decode", type=positive, nargs="+", metavar="ROWS", help="rows decoded at once")
    add("--context", type=positive, help="tokens that a decoded one sees")
    add("--no-whole", dest="whole", action="store_false", help="parts alone")
    return made.parse_args(given)


def fused_of(options: argparse.Namespace, cuda: bool) -> list[str]:
    return options.attention or (["triton", "sdpa_cudnn"] if cuda else ["sdpa"])


def points(options: argparse.Namespace, cuda: bool) -> list[Point]:
    """Parts first, then each model as a whole."""
    models = options.models or (DEFAULT if cuda else ("small",))
    prefill = options.prefill or (PREFILL if cuda else CPU_PREFILL)
    decode = options.decode or (DECODE if cuda else CPU_DECODE)
    context = options.context or (CONTEXT if cuda else CPU_CONTEXT)
    # all lengths of these where asked for by name
    few = options.prefill or (PARTS_PREFILL if cuda else CPU_PREFILL)
    rows = options.decode or (PARTS_DECODE if cuda else CPU_DECODE)
    names = fused_of(options, cuda)

    def of(model: str, implementation: str, phase: str, batch: int, tokens: int, keys: int) -> Point:
        layers, width, heads = MODELS[model]
        point = {"study": "prefill_decode", "implementation": implementation, "pass": phase, "model": model}
        point |= {"n_layer": 1 if implementation == "parts" else layers, "batch": batch}
        point |= {"heads": heads, "kv_heads": heads, "seq_len": tokens, "kv_len": keys}
        point |= {"head_dim": width // heads, "causal": model != BERT}
        point |= {"dtype": "bfloat16" if cuda else "float32"}
        return point | ({"fused": names} if implementation == "parts" else {})

    found = [of(BERT, "parts", "prefill", *((8, 512, 512) if cuda else (1, 64, 64)))]
    for model in models:
        found += [of(model, "parts", "prefill", 1, tokens, tokens) for tokens in few]
        found += [of(model, "parts", "decode", batch, 1, context) for batch in rows]
    for model in models if options.whole else ():
        found += [of(model, names[0], "prefill", 1, tokens, tokens) for tokens in prefill]
        found += [of(model, names[0], "decode", batch, 1, context) for batch in decode]
    return found


def measure(options: argparse.Namespace, run: Run) -> None:
    """Rows of all points that have none."""
    import torch

    asked = points(options, run.device == "cuda")
    models = ", ".join(dict.fromkeys(point["model"] for point in asked))
    left = run.left(asked, f"{models}; about 45 s of an H200 for all")
    if not left:
        return
    from scripts.measure.instruments.layer_times import Measuring

    with torch.inference_mode():
        context = max(point["kv_len"] for point in asked)
        measuring = Measuring(fused_of(options, run.device == "cuda"), run.device, context)
        gc.freeze()  # what is imported by now need not be gone through at every clean-up
        run.each(left, measuring.point, said)


def said(point: Point, result: dict[str, Any]) -> str:
    shape = f"{point['batch']} x {point['seq_len']} on {point['kv_len']}"
    took = f"{result['ms_median']:.3f} ms" if "ms_median" in result else result["status"]
    return f"{point['model']} {point['implementation']} {point['pass']} {shape}: {took}"


def report(rows: list[Row]) -> Report:
    from scripts.measure.report import prefill_decode_plot, prefill_decode_report

    return prefill_decode_report.report(rows, prefill_decode_plot.pictures)


def main(given: list[str] | None = None) -> None:
    run_study(STUDY, arguments(given), measure, report)
