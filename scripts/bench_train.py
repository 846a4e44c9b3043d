"""Measure the training speed of GPT-2 124M on random tokens, by attention, and, given its model.py, that of
nanoGPT:

    python scripts/bench_train.py --nanogpt ~/nanoGPT/model.py
    python scripts/bench_train.py --attention cuda sdpa_cudnn flash4 --seq-len 8192 --batch 8

Ours runs train.py's loader, loop and step, including clipping; nanoGPT runs its model with the step of its
train.py (instruments/training_peers.py). Each runs in a separate process, with batches of the same shape.
All compile at the same time and are then timed alternately, a fifth of the steps at a time, so that GPU
clocks and temperature are the same for all. The last column says whose attention kernels ran, as
attention=auto goes by what is installed. Rows go to results/gpt2_124m/<gpu>.jsonl.
"""

from __future__ import annotations

import argparse
import statistics
from pathlib import Path

if __name__ == "__main__" and not __package__:  # python scripts/<command>.py: see there
    import _checkout  # noqa: F401

from scripts.measure.instruments.training_turns import ROUNDS, in_turns

WARM_UP = 20


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    from scripts.measure.rows import choices, positive, rows_file

    parser.add_argument("--nanogpt", type=Path, help="model.py of a nanoGPT checkout, to run beside ours")
    parser.add_argument(
        "--attention",
        nargs="+",
        default=["auto"],
        choices=choices("attention"),
        metavar="ATTENTION",
        help="files of conf/attention, a contestant each",
    )
    parser.add_argument("--batch", type=positive, default=64, help="rows of a step, all in one micro-batch")
    parser.add_argument("--seq-len", type=positive, default=1024, help="tokens of context")
    parser.add_argument(
        "--steps",
        type=positive,
        default=80,
        help="steps; the first 20 do not count, the rest are five rounds",
    )
    parser.add_argument("--out", type=rows_file, help="rows go here (default: results/gpt2_124m/<gpu>.jsonl)")
    options = parser.parse_args()
    if options.steps < 40:
        parser.error(
            f"--steps {options.steps}: the first {WARM_UP} do not count, and {ROUNDS} rounds share the rest; "
            "give at least 40"
        )
    return options


def words_of(options: argparse.Namespace, attention: str | None) -> list[str]:
    """A contestant as instruments/training_point.py takes it: ours with this attention, else nanoGPT."""
    steps = options.steps - WARM_UP
    words = [f"seq_len={options.seq_len}", f"data.batch_size={options.batch}", "data=synthetic"]
    words += [f"tokens_per_step={options.batch * options.seq_len}", "experiment=gpt2_124m"]
    words += [f"--warm-up={WARM_UP}", f"--steps={steps}", "--seconds=1e9", f"--rounds={ROUNDS}"]
    return [*words, f"attention={attention}" if attention else f"--peer=nanogpt={options.nanogpt}"]


def main() -> None:
    options = arguments()
    import torch

    from scripts.measure.instruments.kernels import PLAIN, family
    from scripts.measure.rows import append
    from scripts.measure.runner import rows_path

    if not torch.cuda.is_available():
        raise SystemExit("bench_train.py needs a CUDA GPU: GPT-2 124M takes minutes a step on a CPU.")
    if options.nanogpt and not options.nanogpt.is_file():
        raise SystemExit(f"--nanogpt {options.nanogpt}: no such file.")  # before minutes of our own run
    out = options.out or rows_path("gpt2_124m")
    tokens = options.batch * options.seq_len
    asked = {f"tilegpt attention={name}": words_of(options, name) for name in options.attention}
    if options.nanogpt:
        asked["nanoGPT"] = words_of(options, None)
    results = in_turns(asked)
    found = {name: result for name, result in results.items() if result["status"] == "ok"}
    print(f"{'':<28} {'ms/step':>8} {'tokens/s':>9} {'MFU':>6} {'peak GiB':>9}  attention")
    for name, result in found.items():
        ms = result["ms_median"]
        point = {
            "study": "gpt2_124m",
            "implementation": name,
            "pass": "train",
            "model": "gpt2 model.bias=false",
        }
        point |= {"seq_len": options.seq_len, "micro_batch": options.batch, "tokens_per_step": tokens}
        append(out, point | {"dtype": "bf16-mixed", "compile": True, "features": "grad_clip=1"}, result)
        mfu = f"{100 * result['mfu']:.1f}%" if result["mfu"] else "-"
        # beside the matrix products that every model has
        ran = sorted(
            {label for kernel in result["kernels"] or () if (label := family(kernel)) not in (None, PLAIN)}
        )
        print(
            f"{name:<28} {ms:>8.2f} {1e3 * tokens / ms:>9,.0f} {mfu:>6} {result['peak_mib'] / 1024:>9.1f}  "
            f"{', '.join(ran) or PLAIN}"
        )
    first = next(iter(found), "")
    for name in list(found)[1:]:
        pairs = zip(found[first]["ms_by_round"], found[name]["ms_by_round"], strict=True)
        ratios = sorted(other / own for own, other in pairs)
        print(
            f"{first}: {statistics.median(ratios):.3f}x the speed of {name} ({ratios[0]:.3f} to "
            f"{ratios[-1]:.3f} in {ROUNDS} rounds)"
        )
    print(f"rows in {out}")
    if failed := [f"{name}: {result['reason']}" for name, result in results.items() if name not in found]:
        said = (
            "All contestants are on the GPU at once: where memory ran out, give fewer or a smaller --batch."
        )
        raise SystemExit("\n".join(["these failed and have no rows:", *failed, said]))


if __name__ == "__main__":
    main()
