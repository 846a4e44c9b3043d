"""What a few steps of training take: a callback of Lightning, and the row's result that comes of it."""

from __future__ import annotations

import math
import resource
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import lightning
import torch

from conf.values import UserError
from model.config import GPTConfig
from model.costs.flops import flops_per_token, peak_bf16_flops
from model.evaluation import loss_in_pieces
from model.gpt import IGNORE
from model.lora import adapter_count
from scripts.measure.instruments.kernels import (
    PLAIN,
    PLAIN_CPU,
    Kernel,
    Verdict,
    as_field,
    family,
    profile,
    verdict,
)
from scripts.measure.instruments.timing import MIB, spread, synchronise
from scripts.measure.runner import failure
from scripts.memory import Step, disagreement, memory_split

FEWEST = 3  # steps that are timed, unless they take longer than LONGEST_S
LONGEST_S = 20  # of timed steps, and of those that the memory split takes: it is left out of what is slower
AHEAD = 2  # steps by which the host may be ahead of the device
SLOW_S = 3.0  # a step of a GPU that takes longer is one of a million launches, minutes for the profiler
SPLIT_STEPS = 4


def resident_mib() -> float:
    """The most memory that this process has had so far."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / (MIB if sys.platform == "darwin" else 1024)


class Laps:
    """Times steps: the first, which compiles and tunes; the rest of `warm_up`, which do not count either;
    then up to `steps`, or as many as `seconds` have room for. Without a warm-up the first counts, too.

    On a GPU a step's time is that between two events at the ends of steps, as the host runs ahead; the peak
    of memory is of all steps but the first, unless that counts. On a CPU it is that of the process, less what
    it had when this was made.

    ready: called when the first step has ended, and when times and peak are there, to wait for something;
    also between the `rounds` that share the steps."""

    def __init__(
        self,
        warm_up: int,
        steps: int,
        seconds: float,
        ready: Callable[[], None] = lambda: None,
        rounds: int = 1,
    ) -> None:
        self.warm_up, self.steps, self.seconds, self.ready = warm_up, steps, seconds, ready
        self.in_round = max(1, -(-steps // rounds))  # rounded up: no more rounds than that
        self.before_mib = resident_mib()
        self.marks: list[tuple[Any, Any]] = []  # beginning and end of each step

    def start(self, cuda: bool) -> None:
        self.cuda = cuda
        self.began = self.from_here = time.perf_counter()
        self.from_mark = self._mark()

    def ended(self) -> bool:
        """To be called at the end of each step; whether it was the last."""
        end = self._mark()
        self.marks.append((self.from_mark, end))
        self.from_mark, done = end, len(self.marks)
        if done == 1:
            synchronise()
            self.first_step_s = time.perf_counter() - self.began
            self.ready()
            if self.cuda and self.warm_up:
                torch.cuda.reset_peak_memory_stats()
            self.from_mark = self._mark()
        if self.cuda and done > AHEAD:
            self.marks[-1 - AHEAD][1].synchronize()
        if done <= self.warm_up:
            self.from_here = time.perf_counter()
            return False
        timed, spent = done - self.warm_up, time.perf_counter() - self.from_here
        few = timed < min(FEWEST, self.steps) and spent < LONGEST_S
        if timed >= self.steps or (spent > self.seconds and not few):
            return True
        if timed % self.in_round == 0:
            synchronise()
            self.ready()
            self.from_mark = self._mark()
        return False

    def _mark(self) -> Any:
        if not self.cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def spread(self) -> dict[str, float]:
        """Of the milliseconds of the steps that count, as a row names it."""
        return spread(self.milliseconds())

    def milliseconds(self) -> list[float]:
        synchronise()
        return [a.elapsed_time(b) if self.cuda else 1e3 * (b - a) for a, b in self.marks[self.warm_up :]]

    def by_round(self) -> list[float]:
        """The median of each round's milliseconds."""
        times, n = self.milliseconds(), self.in_round
        return [statistics.median(times[i : i + n]) for i in range(0, len(times), n)]

    def result(self) -> dict[str, Any]:
        """Times and the peak of memory."""
        if self.cuda:
            peak, of = torch.cuda.max_memory_allocated() / MIB, "allocated on the GPU"
        else:
            peak, of = resident_mib() - self.before_mib, "resident memory of the process above its start"
        found = {**self.spread(), "first_step_s": self.first_step_s, "warm_up": self.warm_up}
        if self.in_round < self.steps:
            found["ms_by_round"] = self.by_round()
        self.ready()
        return found | {"peak_mib": peak, "peak_of": of}


def rated(
    config: GPTConfig, tokens: int, result: dict[str, Any], adapters: int | None = None
) -> dict[str, Any]:
    """tokens/s of steps of so many tokens, and the MFU where the GPU's peak is known; `adapters` as for
    `flops_per_token`."""
    rate = 1e3 * tokens / result["ms_median"]
    fastest = peak_bf16_flops(torch.cuda.get_device_name()) if torch.cuda.is_available() else None
    flops = flops_per_token(config, adapters=adapters)
    return {"tokens_per_s": rate, "mfu": flops * rate / fastest if fastest else None}


class Meter(lightning.Callback):
    """Times steps of a trainer by `laps`. After them come, unless it is to be `brief`, a step that is
    profiled and those of the memory split; then training ends, and `result` is there.

    asked, ran: names of the attention, and of what it delegates to; dtype: what reaches it; piece: tokens in
    which the first batch's loss is computed a second time, before the steps; 0: it is not."""

    def __init__(
        self, asked: str, ran: str, dtype: torch.dtype, laps: Laps, brief: bool = False, piece: int = 0
    ):
        self.asked, self.ran, self.dtype, self.laps, self.brief = asked, ran, dtype, laps, brief
        self.piece, self.in_pieces = piece, {}
        self.losses: list[float] = []
        self.result: dict[str, Any] | None = None

    def on_train_start(self, trainer: lightning.Trainer, lit: Any) -> None:
        self.cuda = lit.device.type == "cuda"
        lit.listeners.append(lambda step, scalars: self.losses.append(scalars["train/loss"]))
        self.laps.start(self.cuda)

    def on_train_batch_start(
        self, trainer: lightning.Trainer, lit: Any, batch: dict[str, torch.Tensor], index: int
    ) -> None:
        if not self.piece or self.in_pieces:
            return
        config = lit.net.config
        if "document_ids" in batch or config.dropout or config.attn_dropout:
            raise UserError("--piece: a loss in pieces has no document_ids and no dropout. Leave these out.")
        synchronise()
        began = time.perf_counter()
        with trainer.precision_plugin.forward_context():
            nats = loss_in_pieces(lit.net.eval(), batch["input_ids"], batch["targets"], self.piece)
        lit.net.train()
        self.in_pieces = {
            "piece": self.piece,
            "loss_in_pieces": nats / int((batch["targets"] != IGNORE).sum()),
            "pieces_s": time.perf_counter() - began,
        }
        if self.cuda:
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        self.laps.start(self.cuda)

    def on_train_batch_end(
        self, trainer: lightning.Trainer, lit: Any, outputs: Any, batch: dict[str, torch.Tensor], index: int
    ) -> None:
        if self.laps.ended():
            self.result = self._finish(trainer, lit, batch)
            trainer.should_stop = True

    def _finish(self, trainer: lightning.Trainer, lit: Any, batch: dict[str, torch.Tensor]) -> dict[str, Any]:
        lit.flush()
        synchronise()
        if lit.fault:
            raise ArithmeticError(lit.fault.split(". ")[0])
        losses, found = list(self.losses), self.laps.result()
        found |= rated(lit.net.config, batch["targets"].numel(), found, adapter_count(lit.net))
        found["loss"] = {"first": losses[0], "last": losses[-1]}
        found["learns"] = math.isfinite(losses[-1]) and (len(losses) == 1 or losses[-1] < losses[0])
        found |= self.in_pieces
        if self.brief:
            return found
        step_s = found["ms_median"] / 1e3

        def step() -> None:
            with trainer.precision_plugin.train_step_context():
                lit.training_step(batch, 0)

        return found | self._kernels(lit, step, step_s) | self._split(lit, batch, step, step_s)

    def _kernels(self, lit: Any, step: Callable[[], None], step_s: float) -> dict[str, Any]:
        if self.cuda and step_s > SLOW_S:
            why = f"{self.asked} was not profiled: a step takes {step_s:.1f} s"
            return {"kernels": None, "kernels_ok": False, "verdict": why}
        found = profile(step, lit.device.type, warm_up=0)
        said = of_step(self.asked, found, self.ran)
        return {
            "kernels": as_field([kernel for kernel in found if family(kernel.name)]),
            "kernels_ok": said.ok,
            "verdict": said.text,
            "kernels_from": "a whole training step",
        }

    def _split(
        self, lit: Any, batch: dict[str, torch.Tensor], step: Callable[[], None], step_s: float
    ) -> dict[str, Any]:
        if SPLIT_STEPS * step_s > LONGEST_S:
            return {
                "memory_split": None,
                "memory_split_reason": f"{SPLIT_STEPS} more steps would take too long",
            }
        rows = batch["targets"].shape[0] // lit.accumulate
        watched = Step(lit.net, lit.optimizers().optimizer, step, lit.device, batch, rows, self.dtype)
        try:
            split = memory_split(watched)
        except Exception as error:  # the point stands without it
            return {"memory_split": None, "memory_split_reason": failure(error)["reason"]}
        return {"memory_split": split, "memory_split_error": disagreement(split)}


def of_step(asked: str, found: list[Kernel], ran: str | None) -> Verdict:
    """Whether a training step ran the attention asked for: its other matrix products are no evidence against
    a fused kernel."""
    names = [kernel.name for kernel in found if family(kernel.name)]
    fused = [name for name in names if family(name) not in (PLAIN, PLAIN_CPU)]
    return verdict(asked, fused or names, ran)
