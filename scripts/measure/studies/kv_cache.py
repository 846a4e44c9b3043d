"""Generation with and without a KV cache, by standard and by tiled attention (claims 17, 18 and 23):

    python scripts/study.py kv_cache

GPT-2 124M with a context of 4,096 and random weights, bf16, one row. 45 s of one H200, ten of them whole
generations without a cache, whose steps the host issues one by one. Without a GPU: two layers, 64 wide, up
to 64 tokens, seconds.

Rows of results/kv_cache/<gpu>.jsonl, by `pass`; `kv_cache` says whether there is one:

count        keys and values computed in generating `new_tokens` from one token, counted by a hook on every
             layer's projection: `kv_computations` of a layer, and `formula`
cache_bytes  a cache as allocated: `allocated_bytes` (what its tensors asked the allocator for, not the blocks
             that they got), and `formula_bytes`
step         one token chosen after `seq_len` tokens, in a cache of `capacity`: `ms_median` of the device (one
             CUDA graph on a GPU), the contestants of a length in turns; without the cache also `eager_ms`, as
             model/generation/generate.py issues it. A step without the cache is a prefill of its tokens.
generate     `new_tokens` from one token by model/generation/generate.py: `seconds`, set-up left out

A time that the report calls integrated is the sum of steps: without the cache over all lengths, between the
measured ones by a power law; with it the step at half the length times the number, as such a step is linear
in the tokens held. `error_ratio` judges the logits of a step by the criterion of scripts/accuracy.py, against
the standard formula in higher precision.
"""

from __future__ import annotations

import argparse
import copy
import functools
import statistics
import time
from typing import Any

from scripts.measure.report.kv_cache_report import report
from scripts.measure.rows import choices, positive
from scripts.measure.runner import Run, parser, run_study
from scripts.measure.studies import Point

STUDY = "kv_cache"
GPU_S = 44
LENGTHS = (1, 32, 128, 256, 512, 1024, 2048, 4096)
WHOLE = (100, 512)
CPU_LENGTHS, CPU_WHOLE = (1, 8, 16, 32, 64), (8, 32)
CPU_MODEL = ["model.n_layer=2", "model.n_embd=64", "model.n_head=4"]
COUNTED = (10, 100)
# name: layers, query heads, head dim, tokens, and heads of keys and values: MHA, GQA, MQA
CACHES = {
    "Llama-2-70B": (80, 64, 128, 4096, (64, 8, 1)),
    "Llama-2-7B": (32, 32, 128, 4096, (32, 4, 1)),
    "GPT-2 124M": (12, 12, 64, 1024, (12, 4, 1)),
}
CPU_TOKENS = 32  # of a cache without a GPU
SECONDS = 45  # of an H200
BUDGET_S = 0.15  # of measured time a step
VOCABULARY = 50257


def arguments(given: list[str] | None = None) -> argparse.Namespace:
    made = parser(__doc__, STUDY)
    add = made.add_argument
    add("--model", default="gpt2", choices=choices("model"), metavar="MODEL", help="a file of conf/model")
    add(
        "--attention",
        nargs=2,
        choices=["standard", *choices("attention")],
        metavar=("STANDARD", "TILED"),
        help="the two compared (default: standard triton; without a GPU standard sdpa)",
    )
    add("--lengths", type=positive, nargs="+", help="tokens that steps are timed after")
    add("--whole", type=positive, nargs="*", help="tokens of whole generations")
    return made.parse_args(given)


def points(options: argparse.Namespace, cuda: bool) -> list[Point]:
    """All points in the order of measuring; those of a length one after the other."""
    names = options.attention or ["standard", "triton" if cuda else "sdpa"]
    lengths = sorted(set(options.lengths or (LENGTHS if cuda else CPU_LENGTHS)))
    whole = options.whole if options.whole is not None else (WHOLE if cuda else CPU_WHOLE)
    found: list[Point] = []
    for new, cached in ((new, cached) for new in COUNTED for cached in (False, True)):
        of = {"implementation": "naive", "pass": "count", "prompt": 1, "new_tokens": new}
        found.append({"study": "kv_cache"} | of | {"kv_cache": cached})
    for model, (layers, heads, dim, tokens, kinds) in CACHES.items():
        of = {"implementation": "cache", "pass": "cache_bytes", "model": model, "n_layer": layers, "batch": 1}
        of |= {"heads": heads, "head_dim": dim, "seq_len": tokens if cuda else CPU_TOKENS}
        found += [{"study": "kv_cache"} | of | {"kv_heads": kind, "dtype": "bfloat16"} for kind in kinds]
    model = options.model if cuda else " ".join([options.model, *CPU_MODEL])
    net = {"model": model, "context": max([*lengths, *whole, 2]), "batch": 1}
    net |= {"dtype": "bfloat16" if cuda else "float32", "compile": False}
    for length in lengths:
        for name in names:
            step = {"study": "kv_cache", "implementation": name, "pass": "step"} | net
            found.append(step | {"kv_cache": False, "seq_len": length, "capacity": None})
            for seen in dict.fromkeys((length, max(1, length // 2))):
                found.append(step | {"kv_cache": True, "seq_len": seen, "capacity": capacity_of(length)})
    for new, name, cached in ((new, name, cached) for new in whole for name in names for cached in (0, 1)):
        of = {"study": "kv_cache", "implementation": name, "pass": "generate"} | net
        found.append(of | {"kv_cache": bool(cached), "prompt": 1, "new_tokens": new})
    return list({str(point): point for point in found}.values())


def capacity_of(tokens: int) -> int:
    """As model/generation/generate.py allocates."""
    return -(-tokens // 128) * 128


class Measuring:
    """The model that steps and generations are timed with."""

    def __init__(self, options: argparse.Namespace, some: Point):
        import torch

        from scripts.bench_generate import build
        from scripts.measure.instruments.timing import Clock
        from scripts.measure.instruments.whole_model import implementations

        self.device = "cuda" if torch.cuda.is_available() else "cpu"
        overrides = [] if self.device == "cuda" else CPU_MODEL
        self.net = build(options.model, "naive", some["context"], overrides)
        self.attentions = implementations([*(options.attention or ()), "standard", "sdpa", "triton"])
        self.exact = copy.deepcopy(self.net).to(torch.float32 if self.device == "cuda" else torch.float64)
        g = torch.Generator().manual_seed(0)
        self.text = torch.randint(VOCABULARY, (some["context"],), generator=g).tolist()
        self.clock = Clock(BUDGET_S if self.device == "cuda" else 0.01)
        self.judged: dict[int, Any] = {}

    def steps(self, wanted: list[Point]) -> list[dict[str, Any]]:
        """The steps of a length: each by itself first, then all in turns."""
        from scripts.measure.instruments.timing import clean_up, probe, spread
        from scripts.measure.runner import failure

        results, alive = [], []
        for point in wanted:
            try:
                contestant, result = self.prepared(point)
                alive.append((contestant, probe(contestant), result))
            except Exception as error:  # whatever fails is a row
                result = failure(error)
            results.append(result)
        try:
            times = self.clock.alternate([each[0] for each in alive], [each[1] for each in alive])
            for (_, probed, result), ms in zip(alive, times, strict=True):
                result |= {"status": "ok"} | spread(ms) | {"peak_mib": probed.peak_mib}
        except Exception as error:
            for _, _, result in alive:
                result |= failure(error)
        self.judged.clear()
        alive.clear()
        clean_up()
        return results

    def prepared(self, point: Point) -> tuple[Any, dict[str, Any]]:
        """A step to time; its kernels, its errors and, without the cache, its time as generation has it."""
        from scripts.measure.instruments.timing import probe
        from scripts.measure.instruments.whole_model import Cached, Uncached, kernels_of

        name, tokens = point["implementation"], self.text[: point["seq_len"]]
        result: dict[str, Any] = {}
        self.net.replace_attention(self.attentions[name])
        if point["kv_cache"]:
            step = Cached(self.net, self.attentions[name], tokens, point["capacity"])
        else:
            step = Uncached(self.net, tokens)
            result["eager_ms"] = statistics.median(probe(step.eager()).ms for _ in range(2))
        result["error_ratio"] = self.error_ratio(step.logits(), tokens)
        return step.contestant(), result | kernels_of(name, step.logits, self.device)

    def error_ratio(self, logits: Any, tokens: list[int]) -> float:
        """Of the logits, by scripts/accuracy.py: the standard formula in this precision sets what is allowed,
        and in a higher one what is right."""
        from scripts.accuracy import error_ratios
        from scripts.measure.instruments.whole_model import Uncached

        if len(tokens) not in self.judged:
            before = self.net.transformer.h[0].attn.attention
            self.net.replace_attention(self.attentions["standard"])
            plain = Uncached(self.net, tokens).logits()[..., :VOCABULARY]
            self.net.replace_attention(before)
            self.judged[len(tokens)] = Uncached(self.exact, tokens).logits()[..., :VOCABULARY].double(), plain
        exact, plain = self.judged[len(tokens)]
        got, dtype = {"out": logits[..., :VOCABULARY]}, logits.dtype
        return error_ratios(got, {"out": exact}, {"out": plain}, dtype)["out"]

    def whole(self, point: Point) -> dict[str, Any]:
        """A generation by model/generation; the median of what two seconds allow, at most three runs."""
        import torch

        from model.generation.generate import generate

        name, new = point["implementation"], point["new_tokens"]
        self.net.replace_attention(self.attentions[name])
        for power in range(new.bit_length()):  # what compiles or loads at some length does so before
            for length in {min(new, n) for n in (2**power, 2**power + 1, 2**power + 2**power // 2)}:
                self.net.forward(torch.tensor([self.text[:length]], device=self.device))
        # the same kernels with and without
        how = {"temperature": 0.0, "kv_cache": point["kv_cache"], "fused": False}
        generate(self.net, [self.text[:1]], min(8, new), **how)
        runs, began = [], time.perf_counter()
        while not runs or (len(runs) < 3 and time.perf_counter() - began < 2):
            runs.append(generate(self.net, [self.text[:1]], new, **how))
        seconds = [run.prefill_s + run.decode_s for run in runs]
        median = statistics.median(seconds)
        rates = {"tokens_per_s": new / median, "setup_s": runs[-1].setup_s, "n": len(runs)}
        return {"status": "ok", "seconds": median, "seconds_all": seconds} | rates


def measure(options: argparse.Namespace, run: Run) -> None:
    """Rows of all points that have none; steps of one length together, in turns."""
    import torch

    from scripts.measure.instruments.cache_counts import cache_bytes, counted

    takes = f"{options.model}, one row; about {SECONDS} s of an H200 for all, seconds without a GPU"
    left = run.left(points(options, run.device == "cuda"), takes)
    groups: dict[Any, list[Point]] = {}
    for point in left:
        groups.setdefault(length_of(point) if point["pass"] == "step" else str(point), []).append(point)
    made = functools.cache(lambda: Measuring(options, next(p for p in left if "context" in p)))

    def results(mine: list[Point]) -> list[dict[str, Any]]:
        one = {"count": counted, "cache_bytes": cache_bytes}
        with torch.inference_mode():
            if mine[0]["pass"] == "step":
                return made().steps(mine)
            return [
                one[point["pass"]](point) if point["pass"] in one else made().whole(point) for point in mine
            ]

    for mine in groups.values():
        run.group(mine, results, said)


def said(point: Point, result: dict[str, Any]) -> str:
    tokens = point.get("new_tokens") or point["seq_len"]
    return f"{point['pass']} {point['implementation']}, {tokens} tokens: {result['status']}"


def length_of(point: Point) -> int:
    """The capacity that a step's tokens need: steps of one are timed in turns."""
    return point["capacity"] or capacity_of(point["seq_len"])


def main(given: list[str] | None = None) -> None:
    run_study(STUDY, arguments(given), measure, report)
