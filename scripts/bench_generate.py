"""Measure the speed of generation for a model shape, with random weights:

    python scripts/bench_generate.py --model gpt2 --batch 1 32 --prompt 128 --new 512

Prefill and decoding are timed separately. Set-up (compilation and graph capture) is not included in these
times; it is reported for the first call in a process and for a later one. Rows go to
results/generate/<gpu>.jsonl.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import statistics
from typing import Any

if __name__ == "__main__" and not __package__:  # python scripts/<command>.py: see there
    import _checkout  # noqa: F401

from conf.command import user_errors

STUDY = "generate"


def arguments() -> argparse.Namespace:
    from scripts.measure.rows import choices, positive
    from scripts.measure.runner import parser

    made = parser(__doc__, STUDY, plots=False)
    add = made.add_argument
    models, attentions = (
        {"choices": choices(group), "metavar": group.upper()} for group in ("model", "attention")
    )
    add("--model", default="gpt2", help="a file of conf/model (default: gpt2)", **models)
    add("--attention", default="auto", help="a file of conf/attention, for prefill and decode", **attentions)
    add("--batch", type=positive, nargs="+", default=[1], help="rows generated at once")
    add("--prompt", type=positive, default=128, help="tokens of the prompt")
    add("--new", type=positive, default=512, help="tokens to generate")
    add("--seq-len", type=positive, default=1024, help="context of the model")
    add("--weight-dtype", choices=("auto", "int8"), default="auto", help="as of scripts/generate.py")
    add("--no-cache", action="store_true", help="compute the whole context for every token")
    add("--compile", action="store_true", help="a decoding step of torch.compile, not of fused kernels")
    add("--no-fused", action="store_true", help="decode with PyTorch's own kernels (still one graph)")
    add("--repeat", type=positive, default=3, help="measured runs; the median counts")
    add("--set", nargs="*", default=[], metavar="KEY=VALUE", help="of the model's shape, as model.bias=false")
    options = made.parse_args()
    if options.new < 2:
        made.error(f"--new {options.new}: a first token has no decoding step to time; ask for 2 or more")
    if options.prompt > options.seq_len:  # of it generation would read the end alone
        made.error(
            f"--prompt {options.prompt}: the context has {options.seq_len} tokens; give a larger --seq-len"
        )
    if options.no_cache and options.compile:
        made.error("--no-cache --compile: what is compiled is a decoding step over a cache; leave one out")
    return options


def build(name: str, attention: str, seq_len: int, overrides: list[str]) -> Any:
    """A model of that shape with random weights, bf16 on a GPU and fp32 elsewhere. UserError for overrides
    that a row would name and this would not use, or that change what the row says under another name."""
    import torch

    from conf.compose import build_attention, composed
    from conf.values import UserError
    from model.gpt import GPT, GPTConfig
    from model.training.checks import called

    cfg = composed([f"model={name}", f"attention={attention}", *overrides])
    if others := [word for word in overrides if not word.lstrip("+~").startswith(("model.", "attention."))]:
        raise UserError(
            f"--set {' '.join(others)}: it takes keys of model and attention, as model.bias=false. "
            "Give the rest by options, as --model, --attention or --seq-len."
        )
    cuda = torch.cuda.is_available()
    torch.manual_seed(0)
    with torch.device("cuda" if cuda else "cpu"):
        config = called("model", GPTConfig, vocab_size=50257, seq_len=seq_len, **cfg.model)
        net = GPT(config, build_attention(cfg))
    return net.to(torch.bfloat16 if cuda else torch.float32).eval()


def measure(net: Any, batch: int, options: argparse.Namespace) -> dict[str, Any]:
    """Medians over `repeat` runs after one that warms up."""
    import torch

    from model.generation.generate import generate
    from scripts.measure.instruments.kernels import as_field, profile

    prompts = torch.randint(
        50257, (batch, options.prompt), generator=torch.Generator().manual_seed(1)
    ).tolist()
    how = {"kv_cache": not options.no_cache, "compile": options.compile}
    how["fused"] = False if options.no_fused else None
    runs = []
    for seed in range(options.repeat + 1):
        if torch.cuda.is_available():
            torch.cuda.reset_peak_memory_stats()
        runs.append(generate(net, prompts, options.new, seed=seed, **how))
    peak_mib = torch.cuda.max_memory_allocated() / 2**20 if torch.cuda.is_available() else None
    # the same call, stopped after three tokens of each row: every shape is one that was timed
    said = itertools.count(1)
    few = functools.partial(
        generate, net, prompts, options.new, on_token=lambda row, token: next(said) > 2 * batch, **how
    )
    found = profile(few, net.device.type, warm_up=0)
    timed = runs[1:]
    return {
        "status": "ok",
        "tokens_per_s": statistics.median(run.decode_tokens_per_s for run in timed),
        "tokens_per_s_all": [round(run.decode_tokens_per_s, 1) for run in timed],
        "prefill_tokens_per_s": statistics.median(run.prefill_tokens_per_s for run in timed),
        "setup_s": runs[0].setup_s,
        "setup_again_s": timed[-1].setup_s,
        "reencoded": timed[-1].reencoded,
        "peak_mib": peak_mib,
        "kernels": as_field(found),
        "kernels_from": "set-up, prefill and the first decoding steps",
    }


def points(options: argparse.Namespace, cuda: bool) -> list[dict[str, Any]]:
    weights = [] if options.weight_dtype == "auto" else [f"weight_dtype={options.weight_dtype}"]
    point = {
        "study": STUDY,
        "implementation": options.attention,
        "pass": "generate",
        "model": " ".join([options.model, *options.set, *weights]),
        "seq_len": options.seq_len,
        "prompt": options.prompt,
        "new_tokens": options.new,
        "dtype": "bfloat16" if cuda else "float32",
        "kv_cache": not options.no_cache,
        "compile": options.compile,
        "fused": cuda and not (options.compile or options.no_fused or options.no_cache),
    }
    return [point | {"batch": batch} for batch in options.batch]


def said(point: dict[str, Any], result: dict[str, Any]) -> str:
    if result["status"] != "ok":
        return f"{point['batch']} rows: {result['status']}, {result['reason']}"
    decode, prefill = result["tokens_per_s"], result["prefill_tokens_per_s"]
    again = result["reencoded"]
    more = f"; decoding encoded {again} full contexts again, which its speed includes" if again else ""
    return (
        f"{point['batch']} rows: decode {decode:,.0f} tokens/s, prefill {prefill:,.0f} tokens/s; "
        f"set-up {result['setup_s']:.1f} s, again {result['setup_again_s']:.2f} s{more}"
    )


@user_errors
def main() -> None:
    options = arguments()
    from model.generation.weights import quantise_weights
    from scripts.measure.runner import Run

    run = Run(STUDY, options)
    left = run.left(points(options, run.device == "cuda"), f"{options.model}, attention={options.attention}")
    if left:
        net = build(options.model, options.attention, options.seq_len, options.set)
        quantise_weights(net, options.weight_dtype)
        run.each(left, lambda point: measure(net, point["batch"], options), said)


if __name__ == "__main__":
    main()
