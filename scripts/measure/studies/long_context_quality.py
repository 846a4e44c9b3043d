"""What is a longer context worth, and what does it cost? One model, one budget of tokens, several contexts.

    python scripts/study.py long_context_quality              a GPU: 512, 1k, 2k, 4k, three seeds of each
    python scripts/study.py long_context_quality optim.lr=1e-3 --seeds 5 --tokens 80e6
    python scripts/study.py long_context_quality --text books/ --pattern '**/*.txt'

On a GPU: 12 runs of train.py with conf/experiment/long_context_quality.yaml (13.8M parameters, a vocabulary
of 8,192 that is trained on the text), each on about 40 million tokens of Python (140 MB), several at once,
then the speed of each context measured alone: about 6 minutes of an H200. Without one: a model of 0.9M
parameters, contexts of 64 to 512, two seeds, 1.5 million tokens, about 8 minutes of two cores.

The text is every Python source of 16 KiB or more that this interpreter has installed, or one of your own;
the held-out documents are of packages that training does not see (parts/long_documents.py). The
budget is whole passes over the training text, and every context sees the same tokens in the same steps, cut
into windows of its length (parts/same_tokens.py); with --own-windows each draws its windows by
itself, as train.py does. All contexts are evaluated on the same targets, each given as much of its document
as the context allows (parts/loss_by_position.py).

Rows, one per run and per speed, answer row 5 of results/CLAIMS.md. Point: measured ("loss" or "speed"),
seq_len, seed, tokens, micro_batch, tokens_per_step, model; text, a digest, and settings, what the
config that all runs share. Result of a loss, nats per token: loss, loss_last_half, loss_by_position and
loss_in_window ([position, loss] of each bin), loss_chunked, loss_by_document; parameters, corpus, wall_s
(beside the other runs: no measure of speed). Result of a speed: as of instruments/training_point.py
(tokens_per_s, ms_median, mfu, peak_mib, kernels), with train_s, what the budget of tokens takes at that
speed. A study that was killed resumes, its runs from their checkpoints.
"""

from __future__ import annotations

import argparse
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import TYPE_CHECKING, Any

from conf.values import UserError
from scripts.measure.machine import ROOT
from scripts.measure.runner import Run, parsed_with_overrides, parser, run_study

if TYPE_CHECKING:
    from scripts.measure.instruments.long_context_runs import Plan
    from scripts.measure.studies import Report, Row

STUDY = "long_context_quality"
GPU_S = 360
SEED = 1337  # the first; the others follow
# What is asked for where the command line says nothing: contexts, seeds, tokens, runs at once, overrides.
USUAL: dict[str, dict[str, Any]] = {
    "cuda": {"contexts": [512, 1024, 2048, 4096], "seeds": 3, "tokens": 40e6, "at_once": 4, "overrides": []},
    "cpu": {
        "contexts": [64, 128, 256, 512],
        "seeds": 2,
        "tokens": 1.5e6,
        "at_once": 1,
        "overrides": [
            "model=tiny",
            "data.tokenizer.vocab_size=1024",
            "optim.lr=3e-3",
            "schedule.warmup_steps=50",
        ],
    },
}
STEP_TOKENS = {"cuda": 32768, "cpu": 4096}


def arguments() -> argparse.Namespace:
    from scripts.measure.rows import positive

    made = parser(__doc__, STUDY)
    add = made.add_argument
    add("overrides", nargs="*", metavar="key=value", help="of the config of every run")
    add("--contexts", type=positive, nargs="+", metavar="T", help="(default: 512 1024 2048 4096)")
    add("--seeds", type=positive, help="runs of each context (default: 3)")
    add("--tokens", type=lambda text: positive(f"{float(text):.0f}"), help="of a run, about (default: 40e6)")
    add("--step-tokens", type=positive, help="of a step, at every context (default: 32768)")
    add("--documents", type=positive, default=256, help="held-out documents, at most (default: 256)")
    add("--least-bytes", type=positive, default=16384, help="of a document (default: 16384)")
    add("--text", help="a file, folder or glob of your own instead of Python sources")
    add("--pattern", default="**/*.txt", help="which files of that folder (default: **/*.txt)")
    add("--own-windows", action="store_true", help="every context draws its windows by itself")
    add("--at-once", type=positive, help="runs that train at the same time on the device (default: 4)")
    add("--timeout", type=positive, default=900, metavar="S", help="of a run (default: 900)")
    add("--work", type=Path, default=ROOT, help="where runs/ and data/prepared/ are (default: the checkout)")
    return parsed_with_overrides(made)


def settled(options: argparse.Namespace, device: str) -> argparse.Namespace:
    """With what the device usually does where the command line says nothing. UserError for contexts that no
    step or document holds a whole number of."""
    usual = USUAL[device]
    for key in ("contexts", "seeds", "tokens", "at_once"):
        if getattr(options, key) is None:
            setattr(options, key, usual[key])
    options.contexts = sorted(set(options.contexts))
    options.step_tokens = options.step_tokens or STEP_TOKENS[device]
    options.overrides = [*usual["overrides"], *options.overrides]
    odd = [context for context in options.contexts if options.step_tokens % context]
    odd = odd or [context for context in options.contexts if options.contexts[-1] % context]
    if odd:
        raise UserError(
            f"--contexts {odd[0]}: it has to divide the {options.step_tokens:,} tokens of a step and the "
            f"longest context, {options.contexts[-1]:,}."
        )
    return options


class Study:
    """Measures what has no row yet, and appends it."""

    def __init__(self, plan: Plan, run: Run, fresh: bool):
        self.plan, self.shared, self.fresh = plan, run, fresh
        left = run.left([*plan.losses, *plan.speeds])
        self.points = [point for point in left if run.claim(point)]

    def run(self) -> None:
        """Losses first, several runs at once; then the speeds, one at a time and nothing beside them."""
        from scripts.measure.instruments.long_context_runs import Trainings

        plan = self.plan
        losses = [point for point in self.points if point["measured"] == "loss"]
        trainings = Trainings(plan, self.fresh)
        with ThreadPoolExecutor(plan.options.at_once) as pool:
            try:
                pending = {pool.submit(trainings.train, point): point for point in losses}
                for future in as_completed(pending):
                    self.append(pending[future], self.evaluated(pending[future], future.result()))
            finally:
                pool.shutdown(wait=False, cancel_futures=True)
                trainings.stop()
        for point, result in trainings.speeds([p for p in self.points if p["measured"] == "speed"]):
            self.append(point, result)

    def evaluated(self, point: dict[str, Any], trained: dict[str, Any]) -> dict[str, Any]:
        from scripts.measure.instruments.long_context_runs import evaluation
        from scripts.measure.runner import failure

        if trained["status"] != "ok":
            return trained
        try:
            return trained | evaluation(self.plan, point)
        except Exception as error:  # whatever it is, it is the point's result
            return failure(error)

    def append(self, point: dict[str, Any], result: dict[str, Any]) -> None:
        self.shared.add(point, result, said(point, result))


def said(point: dict[str, Any], result: dict[str, Any]) -> str:
    """A row in a line."""
    head = f"T={point['seq_len']:,} " + (f"seed {point['seed']}" if point["measured"] == "loss" else "speed")
    if result["status"] != "ok":
        return f"{head}: {result['status']}, {result['reason']}"
    if point["measured"] == "loss":
        took = f", {result['wall_s']:.0f} s beside others" if result["wall_s"] else ""
        return f"{head}: {result['loss']:.4f} nats per token{took}"
    return f"{head}: {result['tokens_per_s']:,.0f} tokens/s alone, {result['train_s']:.0f} s for the budget"


def report(rows: list[Row]) -> Report:
    """Tables, picture and what they say, of the newest text that was studied."""
    from scripts.measure.report.long_context_report import report

    return report(rows)


def measure(options: argparse.Namespace, run: Run) -> None:
    from scripts.measure.instruments.long_context_runs import planned

    options = settled(options, run.device)
    print(
        f"{STUDY}: contexts {', '.join(map(str, options.contexts))}; {options.seeds} seeds, about "
        f"{options.tokens:,.0f} tokens a run, {options.at_once} at once",
        flush=True,
    )
    plan = planned(STUDY, options, run.device, [SEED + i for i in range(options.seeds)])
    print(plan.said(), flush=True)
    Study(plan, run, options.fresh).run()


def main() -> None:
    run_study(STUDY, arguments(), measure, report)
