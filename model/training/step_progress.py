"""How far a step is that takes long: which block the device computes, and about how long the rest takes."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from model.gpt import GPT

LONG_S = 10.0  # of a step, after which it says how far it is


class Mark(NamedTuple):
    """The device has computed `blocks` of the model's blocks in the forward, or in the backward as well, of
    a micro-batch of a step, when `event` has happened (None: the host computes)."""

    step: int
    micro: int
    backward: bool
    blocks: int
    event: Any


class StepProgress:
    """Watches the blocks of a model that is not compiled, without ever waiting for the device: the host runs
    ahead of it, and leaves an event behind each block. `say` gets a line about every `every_s` seconds of a
    step that takes long."""

    def __init__(self, net: GPT, micro_batches: int, say: Callable[[str], None], every_s: float):
        self.net, self.micro_batches, self.say, self.every_s = net, micro_batches, say, every_s
        self.marks: list[Mark] = []
        self.step = 0  # which the device computes
        self.seen = time.perf_counter(), 0  # when that was first seen, and how much of it was done by then
        self.blocks = len(net.transformer.h)
        self.hooks = [net.register_forward_pre_hook(lambda module, args: self._micro_batch())]
        self.hooks += [
            block.register_forward_hook(lambda module, args, out, i=i: self._forward(i, out))
            for i, block in enumerate(net.transformer.h)
        ]
        self.begin(0)
        self.ended = threading.Event()
        self.thread = threading.Thread(target=self._watch, name="step progress", daemon=True)
        self.thread.start()

    def begin(self, step: int) -> None:
        """The host begins a step."""
        self.queued, self.micro, self.forward = step, -1, 0
        self.marks = [mark for mark in self.marks if mark.step >= step - 2]

    def end(self) -> None:
        """Training has ended."""
        self.ended.set()
        self.thread.join()
        for hook in self.hooks:
            hook.remove()

    def _micro_batch(self) -> None:
        self.micro, self.forward = self.micro + self.net.training, 0

    def _forward(self, i: int, out: Tensor) -> None:
        if not (self.net.training and out.requires_grad) or i != self.forward:
            return  # the second forward of checkpointing has i < self.forward
        self.forward += 1
        self._mark(self.micro, False, i + 1)
        out.register_hook(lambda grad, micro=self.micro: self._mark(micro, True, self.blocks - 1 - i))

    def _mark(self, micro: int, backward: bool, blocks: int) -> None:
        event = torch.cuda.Event() if self.net.lm_head.weight.is_cuda else None
        if event is not None:
            event.record()
        self.marks.append(Mark(self.queued, micro, backward, blocks, event))

    def _watch(self) -> None:
        with contextlib.suppress(RuntimeError, OSError):  # of the device, of a pipe: training finds it too
            while not self.ended.wait(self.every_s):
                if line := self.line():
                    self.say(line)

    def line(self) -> str:
        """Where the device is, in a step that takes long; else "". Times follow from what has been computed
        since a step was first seen, which may be `every_s` after it began."""
        done = (mark for mark in reversed(self.marks) if mark.event is None or mark.event.query())
        at = next(done, None)
        if at is None:
            return ""
        # a backward has twice the FLOPs of a forward, three times with the forward that checkpointing repeats
        weight = 3 if self.net.checkpointing else 2
        whole = self.blocks * (1 + weight)
        part = at.micro * whole + (self.blocks + weight * at.blocks if at.backward else at.blocks)
        now = time.perf_counter()
        if at.step != self.step:
            self.step, self.seen = at.step, (now, part)
        since, before = self.seen
        last = at.backward and at.micro + 1 == self.micro_batches and at.blocks == self.blocks - 1
        if last or part == before:
            return ""
        each = (now - since) / (part - before)
        elapsed, left = each * part, each * (self.micro_batches * whole - part)
        if elapsed < LONG_S:
            return ""
        words = f"micro-batch {at.micro + 1}/{self.micro_batches}, " if self.micro_batches > 1 else ""
        words += f"{'backward' if at.backward else 'forward'} of {at.blocks}/{self.blocks} blocks"
        return f"step {at.step}: {words} in {elapsed:.0f} s, {left:.0f} s left"
