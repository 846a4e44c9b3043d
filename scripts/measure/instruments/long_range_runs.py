"""The runs of studies/long_range.py: a classifier trained on one of its tasks, timed as it trains."""

from __future__ import annotations

import functools
import hashlib
import itertools
import math
import os
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import lightning
import numpy as np
import torch
from torch import Tensor

from attention.base import Attention
from data.classification import ClassificationDataModule
from data.examples import Examples, draw
from data.listops import ListOps
from data.matching import Matching
from data.pathfinder import Pathfinder
from model.calls import attention_call, require
from model.classifier import Classifier, LitClassifier
from model.gpt import GPTConfig
from model.training import runtime
from model.training.schedules import warmup_stable_decay
from scripts.accuracy import judge
from scripts.measure.instruments import textbook
from scripts.measure.instruments.timing import MIB, clean_up, spread, synchronise
from scripts.measure.instruments.whole_model import kernels_of
from scripts.measure.studies import Point

WARM_UP = 5  # steps that are not timed
CLS_TOKENS = 1
MANY = 10_000  # examples that take as long to draw as processes take to start
# Expressions that fill about as much of a shorter context, for --lengths and for machines without a GPU.
FULL_LENGTHS, FULL_CONTEXT = (500, 2000), 2048


def implementation(name: str) -> Attention:
    """By name, the baseline with padding masked as a document of its own: every token sees itself."""
    return textbook.implementation(name, "document_ids", autocast=False)


def listops_of(seq_len: int) -> ListOps:
    """Long Range Arena's for 2,048 tokens; shorter expressions, in proportion, for fewer."""
    least, most = (min(tokens, tokens * seq_len // FULL_CONTEXT) for tokens in FULL_LENGTHS)
    return ListOps(max(4, least), max(4, min(most, seq_len - CLS_TOKENS)))


def matching_of(seq_len: int) -> Matching:
    return Matching(seq_len - CLS_TOKENS, gap=min(128, seq_len))


def pathfinder_of(seq_len: int) -> Pathfinder:
    return Pathfinder(math.isqrt(seq_len - CLS_TOKENS))


TASKS: dict[str, Callable[[int], Any]] = {"listops": listops_of, "matching": matching_of}
TASKS |= {"pathfinder": pathfinder_of}


@functools.cache
def examples(task: str, split: str, count: int, seq_len: int) -> Examples:
    """The same for every implementation and seed."""
    workers = min(16, os.cpu_count() or 1) if count >= MANY else 1
    return draw(TASKS[task](seq_len), split, count, seq_len, workers=workers)


def first_token_accuracy(train: Examples, test: Examples) -> float:
    """Of answering by the first token alone, the class most frequent with it in training: for ListOps the
    outermost operator."""
    first = [each.tokens[:, 0, CLS_TOKENS] for each in (train, test)]
    table = np.zeros((train.vocab_size, train.n_classes))
    np.add.at(table, (first[0], train.labels), 1)
    return float((table.argmax(1)[first[1]] == test.labels).mean())


def facts(train: Examples, test: Examples) -> dict[str, Any]:
    """What an accuracy is to be seen beside."""
    digest = hashlib.sha256(b"".join(x.tobytes() for e in (train, test) for x in (e.tokens, e.labels)))
    return {
        "majority": float(test.majority),
        "first_token": first_token_accuracy(train, test),
        "test_examples": len(test),
        "mean_length": float(test.lengths.mean()),
        "data": digest.hexdigest()[:12],
    }


class Watch(lightning.Callback):
    """Ends of steps, losses, and at the end of the last step peak memory and kernels.

    The kernels are those of one more forward and backward, whose gradients are thrown away. cap_s: seconds
    after the warm-up in which training ends, if the steps have not."""

    def __init__(self, asked: str, steps: int, cap_s: float | None = None):
        self.asked, self.steps, self.cap_s, self.began = asked, steps, cap_s, math.inf
        self.marks: list[Any] = []
        self.losses: list[float] = []
        self.result: dict[str, Any] = {}

    def on_train_start(self, trainer: lightning.Trainer, lit: Any) -> None:
        self.cuda = lit.device.type == "cuda"
        lit.listeners.append(lambda step, scalars: self.losses.append(scalars["train/loss"]))

    def on_train_batch_end(
        self, trainer: lightning.Trainer, lit: Any, outputs: Any, batch: dict[str, Tensor], index: int
    ) -> None:
        if self.cuda:
            self.marks.append(torch.cuda.Event(enable_timing=True))
            self.marks[-1].record()
        else:
            self.marks.append(time.perf_counter())
        if self.cuda and len(self.marks) == WARM_UP:
            torch.cuda.reset_peak_memory_stats()
        if len(self.marks) == WARM_UP:
            self.began = time.perf_counter()
        if self.done(len(self.marks)) < 1:
            return
        trainer.should_stop = True
        lit.flush()
        synchronise()
        if self.cuda:
            self.result["peak_mib"] = torch.cuda.max_memory_allocated() / MIB

        def both_passes() -> None:
            with trainer.precision_plugin.train_step_context():
                lit.net(**batch).backward()
            lit.net.zero_grad(set_to_none=True)

        self.result |= kernels_of(self.asked, both_passes, lit.device.type)

    def done(self, step: int) -> float:
        """The share of the run that is over at this step: by its steps, or by its time where that is more."""
        spent = max(0.0, time.perf_counter() - self.began)
        return max(step / self.steps, spent / self.cap_s if self.cap_s else 0.0)

    def loss(self) -> dict[str, Any]:
        """The first; the mean of the last 50; the curve, as means of ten equal parts."""
        n, last = len(self.losses), self.losses[-50:]
        parts = [self.losses[i * n // 10 : (i + 1) * n // 10] for i in range(10)]
        curve = [round(sum(part) / len(part), 4) for part in parts if part]
        return {"first": self.losses[0], "last": sum(last) / len(last), "curve": curve}

    def timed(self) -> dict[str, float]:
        """Of the steps after the warm-up; between the ends of steps, as the host runs ahead of a GPU."""
        pairs = itertools.pairwise(self.marks[min(WARM_UP, self.steps - 1) - 1 :])
        return spread([a.elapsed_time(b) if self.cuda else 1e3 * (b - a) for a, b in pairs])


def config_of(point: Point, vocab_size: int) -> GPTConfig:
    layers, heads, width = (point[key] for key in ("layers", "heads", "width"))
    shapes = {"n_layer": layers, "n_head": heads, "n_embd": width, "seq_len": point["seq_len"]}
    shapes |= {"qk_norm": point.get("qk_norm", False), "position": point.get("position", "learned")}
    return GPTConfig(vocab_size=vocab_size, **shapes, causal=False, tie_embeddings=False)


def measure(point: Point, test_examples: int, device: torch.device) -> dict[str, Any]:
    """A row's result: of a run that is to learn its accuracy, of any its speed. Raises whatever keeps it from
    training."""
    batch, steps = point["micro_batch"], point["steps"]
    learns = point["measured"] != "speed"
    count = point.get("train_examples") or (steps * batch if learns else batch)
    train = examples(point["task"], "train", count, point["seq_len"])
    test = examples(point["task"], "val", test_examples, point["seq_len"]) if learns else train
    attention = implementation(point["implementation"])
    config, dtype = config_of(point, train.vocab_size), getattr(torch, point["dtype"])
    shape = {"batch": batch * train.tokens.shape[1], "tokens": point["seq_len"], "document_ids": train.padded}
    require(attention, [attention_call(config, "training", **shape, device=device, dtype=dtype)])
    ratio = error_ratio(attention, config, train.padded, device, dtype)
    torch.manual_seed(point["seed"])
    net = Classifier(config, train.n_classes, attention, sequences=train.tokens.shape[1])
    if point["compile"]:
        torch._dynamo.reset()
        for block in net.transformer.h:  # once for all of them
            block.compile(dynamic=False)
    watch = Watch(point["implementation"], steps, point.get("cap_s"))
    began = time.perf_counter()
    trained = fit(
        point, net, ClassificationDataModule(train, test, batch_size=batch, seed=point["seed"]), watch
    )
    timed = watch.timed()
    return {
        "status": "ok",
        "reason": None,
        **trained,
        "loss": watch.loss(),
        **timed,
        "tokens_per_s": 1e3 * batch * train.tokens[0].size / timed["ms_median"],
        "wall_s": time.perf_counter() - began,
        "error_ratio": ratio,
        **(facts(train, test) if learns else {}),
        **(
            {"steps_done": len(watch.marks), "examples_seen": len(watch.marks) * batch} if watch.cap_s else {}
        ),
        **watch.result,
    }


def fit(point: Point, net: Classifier, data: ClassificationDataModule, watch: Watch) -> dict[str, Any]:
    """Train, and evaluate once at the end where accuracy is asked for."""
    optimizer = partial(torch.optim.AdamW, lr=point["lr"], betas=(0.9, 0.98), weight_decay=0.05, fused=True)
    steps, learns = point["steps"], point["measured"] != "speed"
    shape = {"warmup_steps": steps // 20, "decay_fraction": 0.3, "min_factor": 0.02}

    def schedule(step: int, max_steps: int) -> float:
        at = int(watch.done(step) * max_steps) if watch.cap_s else step
        return warmup_stable_decay(at, max_steps, **shape)

    trainer = lightning.Trainer(
        accelerator="gpu" if torch.cuda.is_available() else "cpu",
        devices=1,
        precision="bf16-mixed" if point["dtype"] == "bfloat16" else "32-true",
        max_steps=steps,
        val_check_interval=steps,
        limit_val_batches=1.0 if learns else 0,
        logger=False,
        callbacks=[watch],
        **runtime.TRAINER,
    )
    lit = LitClassifier(net, optimizer, schedule, seed=point["seed"])
    trainer.fit(lit, datamodule=data)
    if lit.fault:
        raise ArithmeticError(lit.fault.split(". ")[0])
    if learns and watch.cap_s:
        trainer.validate(lit, datamodule=data, verbose=False)
    seen = trainer.callback_metrics
    trained = {"accuracy": float(seen["val/accuracy"]), "val_loss": float(seen["val/loss"])} if learns else {}
    clean_up()
    return trained


@functools.cache
def _judged(name: str, shape: tuple[int, int, int], padded: bool, device: str, dtype: torch.dtype) -> float:
    heads, tokens, width = shape
    g = torch.Generator(device).manual_seed(0)
    like = {"generator": g, "device": device, "dtype": dtype}
    q, k, v, dout = (torch.randn(2, heads, tokens, width, **like) for _ in range(4))
    options: dict[str, Any] = {"causal": False}
    if padded:  # a third of one row is padding, none of the other
        at = torch.arange(tokens, device=device)
        options["document_ids"] = (at >= torch.tensor([[tokens * 2 // 3], [tokens]], device=device)).int()
    return max(judge(implementation(name), q, k, v, options, dout).values())


def error_ratio(
    attention: Attention, config: GPTConfig, padded: bool, device: torch.device, dtype: torch.dtype
) -> float:
    """Of the attention at this shape, forward and backward, by scripts/accuracy.py: at most 1 is right."""
    shape = (config.n_head, config.seq_len, config.head_size)
    return _judged(attention.name, shape, padded, device.type, dtype)
