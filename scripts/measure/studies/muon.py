"""Does Muon reach AdamW's loss with fewer tokens, and sooner?

    python scripts/study.py muon
    python scripts/study.py muon --seeds 5 --lrs 1e-3 2e-3 4e-3 8e-3 --steps 2000

A GPT of 13.8M parameters (T = 512, a vocabulary of 8,192) trains on the Python sources that this interpreter
has installed, 32,768 tokens a step, and is evaluated on whole packages that are held out, as in real_text.
First each optimiser trains with each of --lrs, with the first seed; later runs use the one with the lowest
held-out loss. Then AdamW trains with the other seeds, and Muon with all seeds: on as many tokens, and on
1 / 1.1, 1 / 1.25 and 1 / 1.5 of them, with the schedule shortened accordingly. The runs follow one another,
compiled: 32 to 45 s each on an H100, of which the steps take 8 to 13. Without a GPU: a tiny model for a few
steps.

Rows, one per run. Point: optimizer, lr, seed, share (tokens over those of the run), steps, text (a digest),
settings. Result: as of real_text; held_out has the seconds since the start of the run, too.
"""

from __future__ import annotations

import argparse
import math
import time
from typing import Any

from scripts.measure.runner import Result, Run, parsed_with_overrides, parser, run_study
from scripts.measure.studies import Point, Report, Row, real_text

STUDY, SEED = "muon", 1337
GPU_S, ESTIMATED = 780, True
OPTIMIZERS = ("adamw", "muon")
SHARES = (1.0, 1.1, 1.25, 1.5)
WORDS = ["experiment=long_context_quality", "seq_len=512", "data.batch_size=64", "schedule.warmup_steps=100"]
USUAL: dict[str, dict[str, Any]] = {
    "cuda": {"steps": 1000, "seeds": 3, "lrs": [1e-3, 2e-3, 4e-3], "bytes": 150_000_000, "small": []},
    "cpu": {
        "steps": 30,
        "seeds": 2,
        "lrs": [3e-3],
        "bytes": 2_000_000,
        "small": ["model=tiny", *real_text.TINY, "attention=sdpa"],
    },
}


def arguments(given: list[str] | None = None) -> argparse.Namespace:
    from scripts.measure.rows import positive

    made = parser(__doc__, STUDY)
    add = made.add_argument
    add("overrides", nargs="*", metavar="key=value", help="of the config of every run")
    add("--seeds", type=positive, help="runs of each (default: 3)")
    add("--lrs", type=float, nargs="+", metavar="LR", help="to choose from (default: 1e-3 2e-3 4e-3)")
    add("--steps", type=positive, help="of AdamW's runs (default: 1000)")
    add("--timeout-s", type=positive, default=300, help="of a run (default: 300)")
    real_text.add_text(made)
    return parsed_with_overrides(made, given)


class Plan:
    """Points, and the words of the config that each is a run of."""

    def __init__(self, options: argparse.Namespace, device: str):
        self.options, self.device = options, device
        usual = USUAL[device]
        real_text.settle(options, usual, "steps", "seeds", "lrs", "bytes")
        self.folder, self.corpus = real_text.gathered(options)
        self.shared = [*WORDS, *usual["small"], f"compile={'blocks' if device == 'cuda' else 'false'}"]
        self.shared += [f"data.path={self.folder / 'training'}", "data.val_fraction=0.001"]
        self.shared += [f"data.data_dir={self.folder.parent}", *options.overrides]

    def words(self, point: Point) -> list[str]:
        own = {"optim": point["optimizer"], "optim.lr": point["lr"], "seed": point["seed"]}
        own["trainer.max_steps"] = point["steps"]
        return [*self.shared, *(f"{key}={value}" for key, value in own.items())]

    def point(self, optimizer: str, lr: float, seed: int, share: float = 1.0) -> Point:
        own = {"optimizer": optimizer, "lr": lr, "share": share, "seed": seed}
        own["steps"] = math.floor(self.options.steps / share)
        words = self.words(own)
        return real_text.point_of(words, "char", "auto", self.device) | real_text.text_of(self.corpus) | own

    def choice(self) -> list[Point]:
        """Of the learning rates."""
        return [self.point(name, lr, SEED) for name in OPTIMIZERS for lr in self.options.lrs]

    def comparison(self, lrs: dict[str, float]) -> list[Point]:
        seeds = range(SEED, SEED + self.options.seeds)
        adamw = [self.point("adamw", lrs["adamw"], seed) for seed in seeds]
        fewest_first = sorted(SHARES, reverse=True)
        return adamw + [
            self.point("muon", lrs["muon"], seed, share) for share in fewest_first for seed in seeds
        ]


def measure(options: argparse.Namespace, run: Run) -> None:
    plan = Plan(options, run.device)

    def trained(point: Point) -> Result:
        from scripts.measure.worker import Worker

        until = time.time() + options.timeout_s
        asked = {"words": plan.words(point), "until": until, "nanogpt": None}
        with Worker(real_text.CHILD, options.timeout_s + 60) as worker:
            return worker.ask(asked | {"held_out": str(plan.folder / "held_out")})

    choice = plan.choice()
    run.each(run.left(choice, "to choose learning rates"), trained, said)
    run.kept.update()
    tried = [row for point in choice if (row := run.kept.row(point))]
    if len(tried) < len(choice):  # the best of some would be another
        print("another process tries the other learning rates: the same command goes on after it", flush=True)
        return
    lrs = best(tried)
    if set(lrs) == set(OPTIMIZERS):
        run.each(run.left(plan.comparison(lrs), "to compare"), trained, said)


def best(rows: list[Row]) -> dict[str, float]:
    """The learning rate of each optimiser with the lowest loss."""
    found: dict[str, tuple[float, float]] = {}
    for row in rows:
        if row["result"]["status"] == "ok":
            name, mine = row["point"]["optimizer"], (loss(row["result"]), row["point"]["lr"])
            found[name] = min(mine, found.get(name, mine))
    return {name: lr for name, (_, lr) in found.items()}


def loss(result: Result) -> float:
    return result["held_out"][-1]["loss"]


def said(point: Point, result: Result) -> str:
    of = f"{point['optimizer']} lr {point['lr']:g} seed {point['seed']}, {point['steps']:,} steps"
    if result["status"] != "ok":
        return f"{of}: {result['status']}, {result['reason']}"
    ended = "" if result["ended_by"] == "steps" else f", ended by time after {result['steps_done']:,} steps"
    return f"{of}: {loss(result):.4f} nats per held-out token{ended}"


def report(rows: list[Row]) -> Report:
    from scripts.measure.report import muon_report

    return muon_report.report(rows)


def main() -> None:
    run_study(STUDY, arguments(), measure, report)
