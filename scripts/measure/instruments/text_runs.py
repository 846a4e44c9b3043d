"""The runs of studies/real_text.py: a model trained on the text until its steps or its time are over, and
evaluated on held-out documents as it trains."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import lightning
import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from data.tokens import IGNORE, Masking
from scripts.measure.instruments import training_peers, training_point
from scripts.measure.instruments.loss_by_position import digest, evaluation_tokens
from scripts.measure.sweep_points import composed

EVALUATIONS = 10  # over a run, beside those before and after it
DOCUMENTS = 128  # that are held out, at most
ROWS = 16  # evaluated at a time

Scores = dict[str, float]


class Course:
    """How a run went: `losses` by step, `held_out` by the step after which the model was evaluated; over once
    `until`, in seconds of time.time(), has come."""

    def __init__(self, steps: int, until: float, evaluate: Callable[[], Scores]):
        self.steps, self.until, self.evaluate = steps, until, evaluate
        self.losses: list[float] = []
        self.began = time.perf_counter()
        self.held_out: dict[int, Scores] = {0: self.scores()}
        self.every = max(1, steps // EVALUATIONS)

    def after(self, step: int) -> bool:
        """Whether the run is over with this step."""
        over = step >= self.steps or time.time() > self.until
        if over or step % self.every == 0:
            self.held_out[step] = self.scores()
        return over

    def scores(self) -> Scores:
        """With the seconds since the start, and those that the evaluation took of them."""
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()
        asked = time.perf_counter()
        found = self.evaluate()  # waits for the device
        now = time.perf_counter()
        return found | {"s": round(now - self.began, 3), "took": round(now - asked, 3)}

    def result(self) -> dict[str, Any]:
        done = max(self.held_out)
        ended = "steps" if done >= self.steps else "time"
        said = {"status": "ok", "reason": None, "ended_by": ended, "steps_done": done}
        held_out = [{"step": step, **scores} for step, scores in self.held_out.items()]
        return said | {"losses": [round(loss, 4) for loss in self.losses], "held_out": held_out}


class Watch(lightning.Callback):
    """Tells the course of our own run."""

    def on_train_start(self, trainer: lightning.Trainer, lit: Any) -> None:
        lit.listeners.append(lambda step, scalars: self.course.losses.append(scalars["train/loss"]))

    def on_train_batch_end(self, trainer: lightning.Trainer, lit: Any, *_: Any) -> None:
        trainer.should_stop = self.course.after(trainer.global_step)


def child(request: dict[str, Any], ready: Callable[[], None]) -> dict[str, Any]:
    """For measure/worker.py. words: of the config; until: see Course; held_out: a folder; nanogpt: its
    model.py, None: ours."""
    from model.training import graphs, runtime

    runtime.quiet()
    cfg, _ = composed(request["words"])
    device = runtime.device(cfg.trainer.accelerator)
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
    precision = runtime.precision(cfg.precision, device)
    data, lit, _ = training_point.build(cfg, device, runtime.compute_dtype(precision))
    rows = data.batch_size * data.accumulate
    lit.cuda_graphs = graphs.wanted(cfg.cuda_graphs, device, 1, lit.net.config, rows, cfg.precision)
    texts = [path.read_text(encoding="utf-8-sig") for path in sorted(Path(request["held_out"]).iterdir())]
    tokens = evaluation_tokens(texts, data.tokenizer, cfg.seq_len, DOCUMENTS)
    masking = data.mask_fraction and Masking(data.mask_fraction, data.vocab_size - 1, cfg.seed)
    held_out = torch.from_numpy(tokens).to(device)
    if masking:
        x = tokens[:, :-1]
        held_out = torch.stack([torch.from_numpy(y).to(device) for y in masking(x, x, np.arange(len(x)))])
    peer = None
    net = lit.net.to(device)
    if request["nanogpt"]:
        peer, path = training_peers.chosen(f"nanogpt={request['nanogpt']}")
        peer = replace(peer, compiled=lit.compile_net)
        net, ours = peer.build(net.config, path).to(device), net
        net.load_state_dict(ours.state_dict())  # names and shapes are GPT-2's in both
    evaluate = partial(scores, net, held_out, data.vocab_size, peer)
    course = Course(cfg.trainer.max_steps, request["until"], evaluate)
    began = time.perf_counter()
    if peer:
        train_peer(peer, net, course, data, cfg)
    else:
        train_ours(lit, course, data, precision, device)
    found = {"wall_s": time.perf_counter() - began, "parameters": sum(p.numel() for p in net.parameters())}
    evaluated = {"documents": len(tokens), "targets": tokens[:, 1:].size, "sha256": digest(tokens)}
    corpus = {"tokens": data.train_tokens, "vocab_size": data.vocab_size, "sha256": data.fingerprint}
    return course.result() | found | {"evaluated": evaluated, "training": corpus}


def train_ours(lit: Any, course: Course, data: Any, precision: str, device: torch.device) -> None:
    from model.training import runtime

    watch = Watch()
    watch.course = course
    trainer = lightning.Trainer(
        accelerator=device.type,
        devices=1,
        precision=precision,
        max_steps=course.steps,
        limit_val_batches=0,
        logger=False,
        callbacks=[watch],
        **runtime.TRAINER,
    )
    trainer.fit(lit, datamodule=data)
    if lit.fault:
        raise ArithmeticError(lit.fault.split(". ")[0])


def train_peer(peer: Any, net: torch.nn.Module, course: Course, data: Any, cfg: Any) -> None:
    """The peer's step on the batches that ours has, at the same learning rates."""
    from hydra.utils import instantiate

    schedule, steps = instantiate(cfg.schedule), course.steps
    batches = of_steps(iter(data.train_dataloader()), data.accumulate)
    lr = partial(rate, cfg.optim.lr, schedule, steps)
    step, losses = training_peers.stepper(peer, net.train(), batches, lr), []
    for number in itertools.count(1):
        losses.append(step())
        if course.after(number):
            break
    course.losses = torch.stack(losses).tolist()


def rate(peak: float, schedule: Callable[[int, int], float], steps: int, step: int) -> float:
    return peak * schedule(step, steps)


def of_steps(batches: Iterator[dict[str, Tensor]], accumulate: int) -> Iterator[Tensor]:
    """Batches as stepper takes them: (2, A, B, T) of inputs and targets (A * B, T)."""
    for batch in batches:
        yield torch.stack([batch[key].unflatten(0, (accumulate, -1)) for key in ("input_ids", "targets")])


@torch.no_grad()
def scores(net: torch.nn.Module, held_out: Tensor, vocabulary: int, peer: Any) -> Scores:
    """nats per target of held-out documents; of masked tokens also the share that is predicted. held_out:
    (D, T + 1) tokens, or (2, D, T), inputs with hidden tokens and targets."""
    masked = held_out.dim() == 3
    inputs, targets = held_out if masked else (held_out[:, :-1], held_out[:, 1:])
    sums = torch.zeros(3, dtype=torch.float64, device=inputs.device)
    net.eval()
    for x, y in zip(inputs.split(ROWS), targets.split(ROWS), strict=True):
        with torch.autocast(x.device.type, torch.bfloat16, enabled=x.is_cuda):
            logits = net(x, y.contiguous())[0] if peer else net(x)
        logits, y = logits[..., :vocabulary].flatten(0, 1).float(), y.flatten()
        loss = F.cross_entropy(logits, y, ignore_index=IGNORE, reduction="sum")
        right = (logits.argmax(-1) == y).sum()
        sums += torch.stack((loss.double(), right.double(), (y != IGNORE).sum().double()))
    net.train()
    loss, right, count = sums.tolist()
    return {"loss": loss / count} | ({"accuracy": right / count} if masked else {})
