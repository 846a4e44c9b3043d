"""The runs of studies/long_context_quality.py: what is to be trained, train.py in processes of its
own, and the evaluation of their checkpoints."""

from __future__ import annotations

import argparse
import hashlib
import os
import shutil
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from conf.values import UserError
from data.storage import usable_cores
from scripts.measure.rows import key_of
from scripts.measure.worker import Worker

if TYPE_CHECKING:
    from numpy import ndarray as Array

BYTES_PER_TOKEN = 3.5  # of Python in a few thousand kinds of tokens, about: how much text a budget takes
TRAIN = "scripts.measure.worker:train"
POINT = "scripts.measure.instruments.training_point:child"
TIMED = {"cuda": 60, "cpu": 20}  # steps

Point = dict[str, Any]


@dataclass(frozen=True)
class Plan:
    """What is measured. overrides: of every run; steps: of each; tokens (D, span + 1): what is evaluated;
    corpus: of the rows."""

    study: str
    options: argparse.Namespace
    device: str
    seeds: list[int]
    overrides: list[str]
    steps: int
    tokens: Array
    corpus: dict[str, Any]

    @cached_property
    def losses(self) -> list[Point]:
        """The slowest first, and a run of every context before the second of any."""
        contexts = self.options.contexts
        return [self.point("loss", context, seed) for seed in self.seeds for context in reversed(contexts)]

    @cached_property
    def speeds(self) -> list[Point]:
        return [self.point("speed", context, self.seeds[0]) for context in self.options.contexts]

    def point(self, measured: str, context: int, seed: int) -> Point:
        """The `point` of a row."""
        found = self._fields(context, seed, self.options.step_tokens)
        parts = [self.corpus[part]["sha256"] for part in ("training", "evaluated")]
        return found | {
            "measured": measured,
            "tokens": self.steps * self.options.step_tokens,
            "text": hashlib.sha256(" ".join(parts).encode()).hexdigest()[:12],
        }

    def _fields(self, context: int, seed: int, step_tokens: int) -> dict[str, Any]:
        """With nothing in it of where the text lies."""
        from scripts.measure.sweep_points import composed, fields, settings

        cfg, chosen = composed([*self.overrides, *of_point(context, seed, step_tokens)])
        name = f"{chosen['model']} model.position={cfg.model.position}"
        said = settings(cfg, chosen)
        said = {key: value for key, value in said.items() if key not in ("data.path", "data.data_dir")}
        return fields(self.study, cfg, name, self.device) | {"settings": said}

    def words(self, point: Point) -> list[str]:
        """The overrides of a point's run."""
        return [*self.overrides, *of_point(point["seq_len"], point["seed"], self.options.step_tokens)]

    def name(self, point: Point) -> str:
        return f"long-context-{point['seq_len']}-{point['seed']}-{key_of(point)[:8]}"

    def checkpoints(self, point: Point) -> list[Path]:
        from model.training.checkpoint import checkpoints_of

        return checkpoints_of(self.options.work / "runs" / self.name(point) / "checkpoints")

    def final(self, point: Point) -> Path | None:
        """The checkpoint of the run's last step, if it is there."""
        found = [path for path in self.checkpoints(point) if path.stem == f"step-{self.steps:08d}"]
        return found[0] if found else None

    def said(self) -> str:
        """Text and budget in two lines."""
        corpus, span = self.corpus, self.tokens.shape[1] - 1
        training, lengths = corpus["training"], corpus["document_tokens"]
        return (
            f"training   {training['files']:,} documents, {training['bytes'] / 1e6:,.1f} MB, "
            f"{training['tokens']:,} tokens (a document: {lengths['p10']:,} {lengths['median']:,} "
            f"{lengths['p90']:,}; 10%, median, 90%); {corpus['passes']} pass(es), {self.steps:,} steps\n"
            f"evaluated  {len(self.tokens)} held-out documents, {span:,} targets of each, of "
            f"{len(corpus['held_out']['packages'])} packages or files that training has not"
        )


def of_point(context: int, seed: int, step_tokens: int) -> list[str]:
    return [f"seq_len={context}", f"data.batch_size={step_tokens // context}", f"seed={seed}"]


def planned(study: str, options: argparse.Namespace, device: str, seeds: list[int]) -> Plan:
    """Gathers and prepares the text, which takes a minute the first time, and counts what there is."""
    from hydra.utils import instantiate

    from data.prepare import prepare
    from data.storage import load_meta
    from data.tokenizers import tokenizer_from_dict
    from scripts.measure.instruments.long_documents import gather, installed, own
    from scripts.measure.instruments.loss_by_position import digest, evaluation_tokens
    from scripts.measure.instruments.same_tokens import TARGET
    from scripts.measure.sweep_points import composed

    prepared, longest = options.work.resolve() / "data" / "prepared", options.contexts[-1]
    wanted = (options.text, options.pattern, options.least_bytes, int(BYTES_PER_TOKEN * options.tokens))
    folder = prepared / f"long-documents-{hashlib.sha256(repr(wanted).encode()).hexdigest()[:12]}"
    files = own(options.text, options.pattern) if options.text else installed()
    manifest = gather(files, folder, *wanted[2:])
    overrides = [f"experiment={study}", *options.overrides]
    overrides += [f"data.path={folder / 'training'}", f"data.data_dir={prepared}"]
    data = instantiate(composed(overrides)[0].data)
    tokenised = prepare(data.corpus, data.tokenizer_spec, prepared)
    meta = load_meta(tokenised)
    n_tokens = meta["splits"]["train"]["tokens"]
    texts = [path.read_text(encoding="utf-8-sig") for path in sorted((folder / "held_out").iterdir())]
    tokenizer = tokenizer_from_dict(meta["tokenizer_state"])
    tokens = evaluation_tokens(texts, tokenizer, longest, options.documents)
    passes = max(1, round(options.tokens / n_tokens))
    # whole windows of the longest context in every pass, at any phase: no shorter one sees a token more often
    steps = passes * (n_tokens - 2 * longest) // options.step_tokens
    if steps < 1:
        raise UserError(
            f"the text has {n_tokens:,} training tokens, less than a step of {options.step_tokens:,}: "
            "give more text, or choose fewer --step-tokens."
        )
    corpus = manifest | {
        "training": manifest["training"] | {"tokens": n_tokens},
        "document_tokens": lengths(tokenised / "train.docs.bin"),
        "evaluated": {"documents": len(tokens), "targets": tokens[:, 1:].size, "sha256": digest(tokens)},
        "passes": passes,
    }
    overrides += [f"trainer.max_steps={steps}"]
    if not options.own_windows:
        overrides += [f"data._target_={TARGET}", f"+data.block={longest}"]
    return Plan(study, options, device, seeds, overrides, steps, tokens, corpus)


def lengths(ends: Path) -> dict[str, int]:
    """Tokens of a training document: the middle and both tails."""
    import numpy as np

    found = np.diff(np.fromfile(ends, dtype="<i8"), prepend=0)
    low, median, high = np.percentile(found, (10, 50, 90))
    return {"p10": int(low), "median": int(median), "p90": int(high)}


class Trainings:
    """Runs train.py and instruments/training_point.py in processes, which `stop` ends."""

    def __init__(self, plan: Plan, fresh: bool):
        self.plan, self.fresh = plan, fresh
        self.running: set[Worker] = set()
        threads = str(max(1, usable_cores() // plan.options.at_once))
        shared = {"TORCHINDUCTOR_COMPILE_THREADS": threads, "OMP_NUM_THREADS": threads}
        self.environment = {key: value for key, value in shared.items() if key not in os.environ}

    def train(self, point: Point) -> dict[str, Any]:
        """The run of a point, from its checkpoint where it has one. Of a row's result: how it ended, and how
        long it took beside the others; None where it went on from a checkpoint."""
        plan = self.plan
        name, began = plan.name(point), time.perf_counter()
        if self.fresh:
            shutil.rmtree(plan.options.work / "runs" / name, ignore_errors=True)
        goes_on = bool(plan.checkpoints(point))
        if plan.final(point) is None:
            target = [word for word in plan.overrides if word.startswith(("data._target_=", "+data.block="))]
            words = [f"ckpt={name}", *target] if goes_on else [f"name={name}", *plan.words(point)]
            result = self._trained(words)
            if result["status"] != "ok":
                return result
        wall_s = None if goes_on else time.perf_counter() - began
        times = {"wall_s": wall_s, "at_once": plan.options.at_once}
        return {"status": "ok", "reason": None, **times, "corpus": plan.corpus}

    def _trained(self, words: list[str]) -> dict[str, Any]:
        with Worker(TRAIN, self.plan.options.timeout, **self.environment) as run:
            self.running.add(run)
            try:
                return run.ask({"words": words, "folder": str(self.plan.options.work)})
            finally:
                self.running.discard(run)

    def stop(self) -> None:
        for run in list(self.running):
            run.process.kill()

    def speeds(self, points: list[Point]) -> Iterator[tuple[Point, dict[str, Any]]]:
        """Steps of the same configs, each in a process of its own: on a GPU their first steps, which compile,
        side by side; what is timed is alone."""
        steps = f"--steps={TIMED[self.plan.device]}"
        together = self.plan.options.at_once
        for at in range(0, len(points), together):
            batch = points[at : at + together]
            processes = [Worker(POINT, self.plan.options.timeout, len(batch) - 1) for _ in batch]
            try:
                for point, process in zip(batch, processes, strict=True):
                    process.start({"words": [*self.plan.words(point), steps]}, wait=len(batch) > 1)
                for process in processes:
                    process.ready()
                for point, process in zip(batch, processes, strict=True):
                    result = process.result()
                    if result["status"] == "ok":
                        result["train_s"] = point["tokens"] / result["tokens_per_s"]
                    yield point, result
            finally:
                for process in processes:
                    process.end()


def evaluation(plan: Plan, point: Point) -> dict[str, Any]:
    """Of a row's result: the losses of a finished run (instruments/loss_by_position.py)."""
    import torch

    from conf.trained import load_model
    from scripts.measure.instruments.loss_by_position import evaluate

    model, _, _ = load_model(str(plan.final(point)), [])
    device = torch.device(plan.device)
    batch = max(1, plan.options.step_tokens // point["seq_len"])
    result = evaluate(model.eval().to(device), plan.tokens, point["seq_len"], batch, device)
    result["parameters"] = sum(parameter.numel() for parameter in model.parameters())
    del model
    if device.type == "cuda":
        torch.cuda.empty_cache()  # for the runs beside this one
    return result
