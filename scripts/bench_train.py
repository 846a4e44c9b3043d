"""Training speed of GPT-2 124M on random tokens, ours and, given its model.py, nanoGPT's beside it:

    python scripts/bench_train.py --nanogpt ~/nanoGPT/model.py

Ours is train.py itself, with its loader, logging and clipping; nanoGPT's is its model and the step of its
train.py, as instruments/training_peers.py runs it. Each has a process of its own, both have batches of the
same shape. A row each goes to results/gpt2_124m/<gpu>.jsonl.
"""

from __future__ import annotations

import argparse
import csv
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

if not __package__:  # python scripts/<command>.py: see there
    import _checkout  # noqa: F401

from scripts.measure.machine import ROOT

POINT = "scripts.measure.instruments.training_point:child"


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    from scripts.measure.rows import choices, positive, rows_file

    parser.add_argument("--nanogpt", type=Path, help="model.py of a nanoGPT checkout, to run beside ours")
    parser.add_argument(
        "--attention",
        default="auto",
        choices=choices("attention"),
        metavar="ATTENTION",
        help="a file of conf/attention, for ours",
    )
    parser.add_argument("--batch", type=positive, default=64, help="rows of a step, all in one micro-batch")
    parser.add_argument("--seq-len", type=positive, default=1024, help="tokens of context")
    parser.add_argument("--steps", type=positive, default=80, help="steps; the first 20 do not count")
    parser.add_argument("--out", type=rows_file, help="rows go here (default: results/gpt2_124m/<gpu>.jsonl)")
    options = parser.parse_args()
    if options.steps < 40:
        parser.error(f"--steps {options.steps}: of fewer than 40, none would be left to count")
    return options


def ours(options: argparse.Namespace) -> dict[str, Any]:
    """Times of ten steps each, and peak memory, from the run's own metrics."""
    from scripts.measure.instruments.timing import spread

    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, str(ROOT / "train.py"), "experiment=gpt2_124m", "data=synthetic"]
        command += [f"attention={options.attention}", f"seq_len={options.seq_len}", "name=bench"]
        command += [f"data.batch_size={options.batch}", f"tokens_per_step={options.batch * options.seq_len}"]
        command += [
            f"trainer.max_steps={options.steps}",
            "trainer.limit_val_batches=1",
            "~callbacks.checkpoints",
        ]
        subprocess.run(command, check=True, cwd=folder, stdout=sys.stderr)
        with open(Path(folder) / "runs" / "bench" / "metrics.csv", newline="") as file:
            rows = [row for row in csv.DictReader(file) if row.get("perf/step_ms")]
    blocks = [float(row["perf/step_ms"]) for row in rows]
    return {
        **spread(blocks[2:-1]),  # without those that compile and the one that ends with a validation
        "peak_mib": max(float(row["perf/peak_mib"]) for row in rows),
        **attention_kernels(options),
    }


def nanogpt(options: argparse.Namespace) -> dict[str, Any]:
    """The same of nanoGPT, a step at a time. Raises RuntimeError where it fails."""
    from scripts.measure.worker import once

    sizes = [f"seq_len={options.seq_len}", f"data.batch_size={options.batch}"]
    sizes += [f"tokens_per_step={options.batch * options.seq_len}"]
    words = ["experiment=seqlen_scaling", *sizes, "--warm-up=20", "--seconds=1e9"]
    words += [f"--steps={options.steps - 20}", f"--peer=nanogpt={options.nanogpt}"]
    result = once(POINT, {"words": words})
    if result["status"] != "ok":
        raise RuntimeError(f"nanoGPT: {result['reason']}")
    return result


def attention_kernels(options: argparse.Namespace) -> dict[str, Any]:
    """What the attention of our run runs at its shape. train.py has a process of its own, so the call is made
    again here, by itself."""
    from attention import registry
    from scripts.measure.instruments.bench_points import Shape
    from scripts.measure.instruments.contestants import Field
    from scripts.measure.instruments.kernels import as_field
    from scripts.measure.instruments.timing import clean_up

    attention = registry.build(options.attention)
    field = Field(Shape(options.batch, 12, 12, options.seq_len, 64, True, "bf16"), "cuda")
    found, said = field.profiled(options.attention, attention, "both")
    del field
    clean_up()  # the GPU is another process's next
    how = "attention by itself, forward and backward at this shape, after the run"
    return {"kernels": as_field(found), "kernels_ok": said.ok, "verdict": said.text, "kernels_from": how}


def main() -> None:
    options = arguments()
    import torch

    from model.costs.flops import flops_per_token, peak_bf16_flops
    from model.gpt import GPTConfig
    from scripts.measure.rows import append
    from scripts.measure.runner import rows_path

    if not torch.cuda.is_available():
        raise SystemExit("bench_train.py needs a CUDA GPU: GPT-2 124M takes minutes a step on a CPU.")
    if options.nanogpt and not options.nanogpt.is_file():
        raise SystemExit(f"--nanogpt {options.nanogpt}: no such file.")  # before minutes of our own run
    gpu = torch.cuda.get_device_name()
    out = options.out or rows_path("gpt2_124m")
    flops = flops_per_token(GPTConfig(vocab_size=50304, seq_len=options.seq_len, bias=False))
    tokens, peak = options.batch * options.seq_len, peak_bf16_flops(gpu)
    contestants = {f"tilegpt attention={options.attention}": ours}
    if options.nanogpt:
        contestants["nanoGPT"] = nanogpt
    speeds = []
    print(f"{'':<28} {'ms/step':>8} {'tokens/s':>9} {'MFU':>6} {'peak GiB':>9}")
    for name, run in contestants.items():
        measured = run(options)
        ms = measured["ms_median"]
        result = {"status": "ok", "tokens_per_s": 1e3 * tokens / ms}
        result |= {"mfu": flops * result["tokens_per_s"] / peak if peak else None, **measured}
        point = {
            "study": "gpt2_124m",
            "implementation": name,
            "pass": "train",
            "model": "gpt2 model.bias=false",
        }
        point |= {"seq_len": options.seq_len, "micro_batch": options.batch, "tokens_per_step": tokens}
        append(out, point | {"dtype": "bf16-mixed", "compile": True, "features": "grad_clip=1"}, result)
        speeds.append(result["tokens_per_s"])
        mfu = f"{100 * result['mfu']:.1f}%" if peak else "-"
        print(
            f"{name:<28} {ms:>8.2f} {speeds[-1]:>9,.0f} {mfu:>6} {result['peak_mib'] / 1024:>9.1f}",
            flush=True,
        )
    if len(speeds) == 2:
        print(f"ratio {speeds[0] / speeds[1]:.3f}")
    print(f"rows in {out}")


if __name__ == "__main__":
    main()
