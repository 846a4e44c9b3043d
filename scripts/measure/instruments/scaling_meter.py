"""A callback of train.py on any number of devices: times of steps, peak memory, losses, and how much of a
step is communication. Rank 0 writes them into the run's folder, as the result of a row.

    train.py trainer=ddp +callbacks.meter._target_=scripts.measure.instruments.scaling_meter.ScalingMeter
"""

from __future__ import annotations

import json
import math
import re
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import lightning
import torch

from model.lora import adapter_count
from model.training.profiling import Launch
from scripts.measure.instruments.kernels import PROFILER_OWN, as_field, counted, family
from scripts.measure.instruments.timing import synchronise
from scripts.measure.instruments.training_meter import Laps, rated

FILE = "meter.json"
WARM_UP = 5  # steps that are not timed; fewer where --limit-s leaves few steps
FEWEST = 3  # steps, of which one warms up
PROFILED = 3  # steps, after those that are timed; one where 3 would take a tenth of --limit-s
# NCCL's kernels; on a CPU gloo's operations, which run in threads of their own
COMMUNICATION = re.compile(r"^(ncclDevKernel|ncclKernel|gloo:)")


def covered(launches: Iterable[Launch]) -> float:
    """Microseconds in which at least one of them ran."""
    total, end = 0.0, -math.inf
    for launch in sorted(launches, key=lambda launch: launch.start):
        total += max(0.0, launch.start + launch.us - max(end, launch.start))
        end = max(end, launch.start + launch.us)
    return total


def communication(launches: list[Launch], steps: int, us: float) -> dict[str, Any]:
    """Of so many steps that took `us`: milliseconds a step in which the rank communicated, those of them in
    which it computed nothing, and the share of these in the step. A collective also takes the time for which
    it waits for the slowest rank."""
    computing = [launch for launch in launches if not COMMUNICATION.match(launch.name)]
    talking = [launch for launch in launches if COMMUNICATION.match(launch.name)]
    total = covered(talking)
    exposed = min(covered(launches) - covered(computing), total)  # a difference, which is rounded
    return {
        "communication_ms": total / 1e3 / steps,
        "exposed_ms": exposed / 1e3 / steps,
        "communication_share": exposed / us,
        "collectives": as_field(counted((launch.name, launch.us) for launch in talking)),
        "profiled_steps": steps,
    }


def launches_of(events: Iterable[Any], cuda: bool) -> list[Launch]:
    """Of a profiler's events the kernels; on a CPU PyTorch's operators and gloo's operations."""
    from torch.autograd import DeviceType

    wanted = DeviceType.CUDA if cuda else DeviceType.CPU
    return [
        Launch(event.name, event.time_range.start, event.time_range.elapsed_us())
        for event in events
        if event.device_type == wanted
        and not event.name.startswith((*PROFILER_OWN, "nccl:"))  # what was asked for, not its kernel
        and not (cuda and getattr(event, "is_user_annotation", False))
        and (cuda or event.name.startswith(("aten::", "gloo:")))
    ]


class ScalingMeter(lightning.Callback):
    """Times `steps` steps, or as many as `limit_s` seconds have room for, then with `profiled` profiles a few
    on rank 0."""

    def __init__(self, steps: int = 30, limit_s: float = 120, profiled: bool = True) -> None:
        self.steps, self.limit_s, self.profiled = steps, limit_s, PROFILED if profiled else 0
        self.losses: list[float] = []
        self.result: dict[str, Any] | None = None  # there once the steps are timed
        self.laps = Laps(min(WARM_UP, steps - 1), steps - min(WARM_UP, steps - 1), math.inf)

    def on_train_start(self, trainer: lightning.Trainer, lit: Any) -> None:
        self.cuda = lit.device.type == "cuda"
        lit.listeners.append(lambda step, scalars: self.losses.append(scalars["train/loss"]))
        self.laps.start(self.cuda)

    def on_train_batch_end(
        self, trainer: lightning.Trainer, lit: Any, outputs: Any, batch: dict[str, torch.Tensor], index: int
    ) -> None:
        if self.result is None:
            if self.laps.ended():
                self.result = self._timed(trainer, lit, batch)
                if self.profiled:
                    self._profile(trainer)
                else:
                    self._finish(trainer, {})
            elif len(self.laps.marks) == 2:
                self._shorten(trainer)
            return
        self.left -= 1
        if self.left == 0:
            self._finish(trainer, self._profile_result() if trainer.is_global_zero else {})

    def _shorten(self, trainer: lightning.Trainer) -> None:
        """By the time of the second step, as rank 0 took it: all ranks stop after the same step."""
        synchronise()
        begin, end = self.laps.marks[1]
        seconds = begin.elapsed_time(end) / 1e3 if self.cuda else end - begin
        room = trainer.strategy.broadcast(int(self.limit_s / seconds))
        self.steps = min(self.steps, max(FEWEST, room))
        self.profiled = min(self.profiled, PROFILED if room > 10 * PROFILED else 1)
        self.laps.warm_up = min(WARM_UP, self.steps // 3)
        self.laps.steps = self.steps - self.laps.warm_up

    def _timed(self, trainer: lightning.Trainer, lit: Any, batch: dict[str, torch.Tensor]) -> dict[str, Any]:
        lit.flush()
        if lit.fault:
            raise ArithmeticError(lit.fault.split(". ")[0])
        found = self.laps.result()
        # per device, all with equal shares
        mine = rated(lit.net.config, batch["targets"].numel(), found, adapter_count(lit.net))
        found |= mine | {"tokens_per_s": mine["tokens_per_s"] * trainer.world_size}
        most = torch.tensor(found["peak_mib"], device=lit.device)
        found["peak_mib"] = float(trainer.strategy.reduce(most, reduce_op="max"))  # of the fullest device
        return found | {"losses": self.losses[: self.steps], "steps": self.steps}

    def _profile(self, trainer: lightning.Trainer) -> None:
        from torch.profiler import ProfilerActivity, profile

        self.left = self.profiled
        if trainer.is_global_zero:
            self.profiler = profile(activities=[ProfilerActivity.CUDA if self.cuda else ProfilerActivity.CPU])
            self.profiler.start()
            self.began = time.perf_counter()

    def _profile_result(self) -> dict[str, Any]:
        synchronise()
        us = 1e6 * (time.perf_counter() - self.began)
        self.profiler.stop()
        launches = launches_of(self.profiler.events(), self.cuda)
        kernels = counted((launch.name, launch.us) for launch in launches if family(launch.name))
        return communication(launches, self.profiled, us) | {"kernels": as_field(kernels)}

    def _finish(self, trainer: lightning.Trainer, profile: dict[str, Any]) -> None:
        trainer.should_stop = True
        if trainer.is_global_zero:
            path = Path(trainer.default_root_dir) / FILE
            result = {"status": "ok", "reason": None, **self.result, **profile}
            path.write_text(json.dumps(result), encoding="utf-8")
