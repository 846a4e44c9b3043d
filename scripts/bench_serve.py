"""How fast a model shape serves many requests by continuous batching over a paged KV cache, random weights:

    python scripts/bench_serve.py --model gpt2

Two workloads, a row each in results/serve/<gpu>.jsonl:

- prefix: requests that begin with the same tokens, with prefix caching and without it. `first_token_s` is the
  mean time until a request's first token, from when all requests are there.
- lengths: outputs of very different lengths. `of_ideal` compares the tokens/s with those of an ideal
  schedule, in which a waiting request takes a free slot at once, prompts take no time, and every step takes
  as long as one of a dense batch of that many slots. `memory_of_held` is the memory of the blocks that
  requests hold, when it was most, divided by that of the tokens in them.
"""

from __future__ import annotations

import argparse
import heapq
import random
import statistics
from collections.abc import Sequence
from typing import Any

if __name__ == "__main__" and not __package__:  # python scripts/<command>.py: see there
    import _checkout  # noqa: F401

from conf.command import user_errors

STUDY = "serve"


def arguments() -> argparse.Namespace:
    from scripts.measure.rows import choices, positive
    from scripts.measure.runner import parser

    made = parser(__doc__, STUDY, plots=False)
    add = made.add_argument
    models, attentions = (
        {"choices": choices(group), "metavar": group.upper()} for group in ("model", "attention")
    )
    add("--model", default="gpt2", help="a file of conf/model (default: gpt2)", **models)
    add("--attention", default="auto", help="a file of conf/attention", **attentions)
    add("--requests", type=positive, default=64)
    add("--prefix", type=positive, default=1024, help="tokens that prompts of `prefix` share")
    add("--suffix", type=positive, nargs=2, default=[64, 256], help="least and most of their own")
    add("--new", type=positive, nargs=2, default=[64, 2048], help="least and most new tokens of `lengths`")
    add("--slots", type=positive, default=16, help="rows of `lengths` that decode at once")
    add("--block", type=positive, default=16, help="tokens in a block")
    add("--repeat", type=positive, default=3, help="measured runs; the median counts")
    add("--set", nargs="*", default=[], metavar="KEY=VALUE", help="of the model's shape, as model.bias=false")
    options = made.parse_args()
    for name in ("suffix", "new"):
        least, most = getattr(options, name)
        if least > most:
            made.error(f"--{name} {least} {most}: the least comes first")
    if options.new[1] < 2:
        made.error("--new 1 1: first tokens have no decoding step to time; let the most be 2 or more")
    return options


def ideal_steps(lengths: Sequence[int], slots: int) -> int:
    """Steps until all requests have so many tokens, each in the first of `slots` that is free."""
    busy = [0] * slots
    for length in lengths:
        heapq.heapreplace(busy, busy[0] + length)
    return max(busy)


def tokens(count: int, seed: int) -> list[int]:
    return random.Random(seed).choices(range(50257), k=count)


def prefix(net: Any, options: argparse.Namespace, caching: bool) -> dict[str, Any]:
    """Medians over `repeat` runs after one that warms up."""
    from model.generation.engine import Pool
    from model.generation.serve import serve

    draw, shared = random.Random(0), tokens(options.prefix, 1)
    suffixes = [draw.randint(*options.suffix) for _ in range(options.requests)]
    prompts = [shared + tokens(count, 2 + i) for i, count in enumerate(suffixes)]
    pool = Pool(block=options.block, slots=options.requests, prefix_caching=caching)
    runs = [serve(net, prompts, 16, seed=seed, pool=pool) for seed in range(options.repeat + 1)][1:]
    means = [statistics.fmean(run.first_s) for run in runs]
    return {
        "status": "ok",
        "first_token_s": statistics.median(means),
        "first_token_s_all": [round(mean, 4) for mean in means],
        "prompt_tokens": sum(map(len, prompts)),
        "computed": runs[0].computed,
        "found": runs[0].found,
        "memory_of_held": runs[0].most_bytes / runs[0].held_bytes,
    }


def lengths(net: Any, options: argparse.Namespace) -> dict[str, Any]:
    """Medians over `repeat` runs after one that warms up."""
    from model.generation.engine import Pool
    from model.generation.generate import generate
    from model.generation.serve import serve

    draw = random.Random(0)
    new = [draw.randint(*options.new) for _ in range(options.requests)]
    prompts = [tokens(128, i) for i in range(options.requests)]
    pool = Pool(block=options.block, slots=options.slots)
    runs = [serve(net, prompts, new, seed=seed, pool=pool) for seed in range(options.repeat + 1)][1:]
    # so that the dense cache is as long as the mean row at its end; a first token takes no step
    most = max(2, sum(new) // len(new))
    dense = [generate(net, prompts[: options.slots], most, seed=seed) for seed in range(options.repeat + 1)][
        1:
    ]
    step_s = statistics.median(run.decode_s / (most - 1) for run in dense)
    speeds = [sum(new) / run.seconds for run in runs]
    ideal = sum(new) / (ideal_steps(new, options.slots) * step_s)
    return {
        "status": "ok",
        "tokens_per_s": statistics.median(speeds),
        "tokens_per_s_all": [round(speed, 1) for speed in speeds],
        "ideal_tokens_per_s": ideal,
        "of_ideal": statistics.median(speeds) / ideal,
        "dense_step_ms": 1000 * step_s,
        "memory_of_held": runs[0].most_bytes / runs[0].held_bytes,
        "most_mib": runs[0].most_bytes / 2**20,
    }


def points(options: argparse.Namespace, cuda: bool) -> list[dict[str, Any]]:
    point = {
        "study": STUDY,
        "implementation": options.attention,
        "model": " ".join([options.model, *options.set]),
        "dtype": "bfloat16" if cuda else "float32",
        "requests": options.requests,
        "block": options.block,
    }
    shared = {"pass": "prefix", "prefix": options.prefix, "suffix": options.suffix}
    return [
        *(point | shared | {"prefix_caching": caching} for caching in (True, False)),
        point | {"pass": "lengths", "new_tokens": options.new, "slots": options.slots},
    ]


def said(point: dict[str, Any], result: dict[str, Any]) -> str:
    if result["status"] != "ok":
        return f"{point['pass']}: {result['status']}, {result['reason']}"
    memory = f"blocks are {result['memory_of_held']:.2f}x the tokens held"
    if point["pass"] == "prefix":
        caching = "with" if point["prefix_caching"] else "without"
        return f"prefix, {caching} caching: first token after {result['first_token_s']:.3f} s; {memory}"
    speed, ratio = result["tokens_per_s"], result["of_ideal"]
    return f"lengths: {speed:,.0f} tokens/s, {ratio:.2f} of the schedule's ideal; {memory}"


@user_errors
def main() -> None:
    options = arguments()
    from scripts.bench_generate import build
    from scripts.measure.runner import Run

    run = Run(STUDY, options)
    left = run.left(points(options, run.device == "cuda"), f"{options.model}, attention={options.attention}")
    if left:
        context = max(options.prefix + options.suffix[1] + 16, 128 + options.new[1])
        net = build(options.model, options.attention, -(-context // 128) * 128, options.set)

        def measure(point: dict[str, Any]) -> dict[str, Any]:
            if point["pass"] == "prefix":
                return prefix(net, options, point["prefix_caching"])
            return lengths(net, options)

        run.each(left, measure, said)


if __name__ == "__main__":
    main()
