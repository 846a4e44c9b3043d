"""What does training with products in fp8 gain in speed, and what does it cost in loss?

    python scripts/study.py fp8_training
    python scripts/study.py fp8_training --measured speed
    python scripts/study.py fp8_training --model gpt2_large --tokens 20e6
    python scripts/study.py fp8_training --measured loss seed=1

Speed: steps of GPT-2 XL on random tokens with precision=bf16-mixed and with fp8, in two processes on one GPU,
timed in turns; both models are on it at once (125 GiB with --batch 16). In fp8 the step is a CUDA graph, as
train.py's is. Loss: train.py with each precision on the same 50 million tokens of the Python sources that
this interpreter has installed, from the same weights, on as many GPUs as there are (DDP), one run after the
other, with a validation every twentieth of the run. Again: the run in bf16 on the same batches in
micro-batches of half as many rows, so that rounding alone differs. Without a GPU: a tiny model, whose
products in fp8 PyTorch emulates; its speed says nothing.

Rows. Point: measured ("speed" or "loss", that of "again" too), model, precision, seq_len, micro_batch,
tokens_per_step, devices, settings; of a loss also steps and text (a digest). Result of a speed: as of
instruments/training_point.py, with ms_by_round. Result of a loss: validation ([step, nats per token]), losses
([step, nats per token] of single steps), tokens_per_s (median; on several GPUs without a CUDA graph),
peak_mib, wall_s, corpus.
"""

from __future__ import annotations

import argparse
import csv
import functools
import statistics
import time
from pathlib import Path
from typing import Any

from scripts.measure.runner import Result, Run, parsed_with_overrides, parser, run_study
from scripts.measure.studies import Point, Report, Row, real_text, scaling

STUDY = "fp8_training"
GPU_S, ESTIMATED = 2940, True  # the three losses on four H100s: 1,141
PRECISIONS, MEASURED = ("bf16-mixed", "fp8"), ("speed", "loss", "again")
WARM_UP, STEPS = 10, 20  # of a speed
SPEED = ["data=synthetic", f"--warm-up={WARM_UP}", f"--steps={STEPS}", "--seconds=1e9", "--brief"]
LOSS = ["callbacks.checkpoints=null", "callbacks.samples=null"]
LOSS += ["optim.lr=3e-4", "schedule.warmup_steps=60", "data.val_fraction=0.005"]
VALIDATIONS = 20
USUAL: dict[str, dict[str, Any]] = {
    "cuda": {
        "model": "gpt2_xl",
        "batch": 16,
        "tokens": 50_000_000,
        "step_tokens": {"speed": 32768, "loss": 131072},
        "bytes": 150_000_000,
        "small": [],
        "vocab_size": 50304,
    },
    "cpu": {
        "model": "tiny",
        "batch": 4,
        "tokens": 6_000,
        "step_tokens": {"speed": 256, "loss": 256},
        "bytes": 2_000_000,
        "small": ["seq_len=64", "model.n_embd=1024", "model.n_layer=1"],
        "vocab_size": 320,
    },
}


def arguments(given: list[str] | None = None) -> argparse.Namespace:
    from scripts.measure.rows import positive

    made = parser(__doc__, STUDY)
    add = made.add_argument
    add("overrides", nargs="*", metavar="key=value", help="of the config of every run")
    add("--measured", nargs="+", choices=MEASURED, default=MEASURED, help="default: all three")
    add("--model", metavar="MODEL", help="a file of conf/model (default: gpt2_xl)")
    add("--batch", type=positive, help="rows of a micro-batch (default: 16)")
    add("--tokens", type=lambda text: positive(f"{float(text):.0f}"), help="of a loss (default: 50e6)")
    add("--timeout-s", type=positive, default=3600, help="of a run (default: 3600)")
    real_text.add_text(made)
    options = parsed_with_overrides(made, given)
    if any(word.startswith("data.batch_size=") for word in options.overrides):
        made.error("data.batch_size= is --batch here: the runs differ in it")
    if "again" in options.measured and (options.batch or 2) % 2:
        made.error(f"--measured again halves micro-batches: --batch is to be even, not {options.batch}")
    return options


class Plan:
    """Points, and the words of the config that each is a run of."""

    def __init__(self, options: argparse.Namespace, device: str, devices: int):
        self.options, self.device, self.devices = options, device, devices
        self.usual = USUAL[device]
        real_text.settle(options, self.usual, "model", "batch", "tokens", "bytes")
        self.shared = ["experiment=gpt2_124m", f"model={options.model}", *self.usual["small"]]

    @functools.cached_property
    def text(self) -> tuple[Path, dict[str, Any]]:
        """The folder of the text, and what is known of it; gathered when it is first asked for."""
        return real_text.gathered(self.options)

    def words(self, measured: str, precision: str, batch: int | None = None) -> list[str]:
        """Of a speed as instruments/training_point.py takes them, of a loss as train.py does."""
        tokens = self.usual["step_tokens"][measured]
        words = [*self.shared, f"data.batch_size={batch or self.options.batch}"]
        words += [f"precision={precision}", f"tokens_per_step={tokens}"]
        if measured == "speed":
            graphs = str(precision == "fp8" and self.device == "cuda").lower()
            words += [f"data.corpus.vocab_size={self.usual['vocab_size']}", f"cuda_graphs={graphs}"]
            return [*words, *SPEED, *self.options.overrides]
        steps = max(1, round(self.options.tokens / tokens))
        folder, _ = self.text
        words += ["data=text", f"data.path={folder / 'training'}", f"data.data_dir={folder.parent}"]
        words += [f"trainer={'ddp' if self.devices > 1 else 'default'}", f"trainer.devices={self.devices}"]
        words += [f"trainer.max_steps={steps}", f"trainer.val_check_interval={max(1, steps // VALIDATIONS)}"]
        words.append(f"data.tokenizer.vocab_size={self.usual['vocab_size']}")
        return [*words, *LOSS, *self.options.overrides]

    def points(self, measured: str) -> list[Point]:
        if measured == "again":
            return [self.point("loss", "bf16-mixed", self.options.batch // 2)]
        return [self.point(measured, precision) for precision in PRECISIONS]

    def point(self, measured: str, precision: str, batch: int | None = None) -> Point:
        words = [word for word in self.words(measured, precision, batch) if not word.startswith("--")]
        model, devices = self.options.model, self.devices if measured == "loss" else 1
        point = real_text.point_of(words, model, "auto", self.device, STUDY)
        own: Point = {"measured": measured, "precision": precision, "devices": devices}
        if measured == "speed":
            return point | own
        steps = [int(word.split("=")[1]) for word in words if word.startswith("trainer.max_steps=")]
        return point | real_text.text_of(self.text[1]) | own | {"steps": steps[-1]}


def measure(options: argparse.Namespace, run: Run) -> None:
    import torch

    plan = Plan(options, run.device, torch.cuda.device_count() if run.device == "cuda" else 1)
    if "speed" in options.measured:
        left = run.left(plan.points("speed"), "steps in turns, 2 to 4 min")
        if left:  # a ratio is of one command
            run.group(plan.points("speed"), lambda points: speeds(plan, points), said)
    losses = [point for of in MEASURED[1:] if of in options.measured for point in plan.points(of)]
    if losses:
        left = run.left(losses, f"train.py on {plan.devices} {run.device} device(s)")
        run.each(left, lambda point: trained(plan, point), said)


def speeds(plan: Plan, points: list[Point]) -> list[Result]:
    from scripts.measure.instruments.training_turns import ROUNDS, in_turns

    asked = {p["precision"]: [*plan.words("speed", p["precision"]), f"--rounds={ROUNDS}"] for p in points}
    found = in_turns(asked)
    for name, result in found.items():
        if result["status"] != "ok":  # a ratio takes both
            raise RuntimeError(f"{name}: {result['reason']}")
    return [found[point["precision"]] for point in points]


def trained(plan: Plan, point: Point) -> Result:
    """A run of train.py, from the metrics that it leaves."""
    began = time.monotonic()
    words = plan.words("loss", point["precision"], point["micro_batch"])
    with scaling.started(words, {}) as (process, folder):
        deadline = began + plan.options.timeout_s
        found = scaling.left_by(process, folder, "metrics.csv", deadline, plan.options.timeout_s)
        if isinstance(found, dict):
            return found
        rows = list(csv.DictReader(found.read_text().splitlines()))
    took = {"status": "ok", "reason": None, "wall_s": time.monotonic() - began}
    return took | of_metrics(rows) | {"corpus": plan.text[1]}


def of_metrics(rows: list[dict[str, str]]) -> Result:
    def column(name: str) -> list[list[float]]:
        return [[int(row["step"]), float(row[name])] for row in rows if row.get(name)]

    rates, peaks = column("perf/tokens_per_s"), column("perf/peak_mib")
    found: Result = {"validation": column("val/loss"), "losses": column("train/loss")}
    found["tokens_per_s"] = statistics.median(rate for _, rate in rates) if rates else None
    return found | {"peak_mib": max((peak for _, peak in peaks), default=None)}


def said(point: Point, result: Result) -> str:
    of = f"{point['model']} {point['precision']} {point['measured']}, micro-batches of {point['micro_batch']}"
    if result["status"] != "ok":
        return f"{of}: {result['status']}, {result['reason']}"
    if point["measured"] == "speed":
        return f"{of}: {result['ms_median']:.1f} ms a step, {result['tokens_per_s']:,.0f} tokens/s"
    last = f"{result['validation'][-1][1]:.4f} nats per token" if result["validation"] else "no validation"
    return f"{of}: {last} after {point['steps']:,} steps"


def report(rows: list[Row]) -> Report:
    from scripts.measure.report import fp8_training_report

    return fp8_training_report.report(rows)


def main() -> None:
    run_study(STUDY, arguments(), measure, report)
