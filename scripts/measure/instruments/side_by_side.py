"""One point of the attention benchmark: contestants probed one by one, then timed in turns."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from attention.base import Attention
from scripts.measure.instruments.bench_points import Shape
from scripts.measure.instruments.contestants import Field
from scripts.measure.instruments.kernels import as_field
from scripts.measure.instruments.timing import (
    Clock,
    Probe,
    clean_up,
    copy_gb_per_s,
    probe,
    spread,
    synchronise,
)
from scripts.measure.machine import machine
from scripts.measure.rows import append
from scripts.measure.runner import DeviceLost, failure

HEAVY = 1 / 16  # of the device's memory: what takes more is timed with nothing else alive
SLOW = 20  # times the fastest: what takes more is timed by itself, as rounds are the same for all
MOST_HOST_US = 5e5  # tens of thousands of launches, which would take the profiler a minute

Results = dict[str, dict[str, Any]]  # of the contestants, by name


class Bench:
    """Measures points, and appends their rows to a file."""

    def __init__(self, attentions: dict[str, Attention], device: str, budget_s: float, out: Path):
        self.attentions, self.device, self.out = attentions, device, out
        machine()  # asked while the device is well
        self.copy_gb_per_s = copy_gb_per_s()
        self.clocks = {flush: Clock(budget_s, flush) for flush in (True, False)}
        self.memory_mib = torch.cuda.mem_get_info()[1] / 2**20 if device == "cuda" else None

    def measure(self, shape: Shape, passes: dict[str, list[str]]) -> dict[str, Results]:
        """Passes of a shape with their contestants, a row for each; the results by pass. Raises
        DeviceLost."""
        field, failed = None, {}
        measured: dict[str, Results] = {}
        try:
            field = Field(shape, self.device)
        except RuntimeError as error:
            failed = failure(error)
            failed["reason"] = f"the inputs: {failed['reason']}"
        for passed, names in passes.items():
            results: Results = {name: dict(failed) for name in names}
            measured[passed] = results
            try:
                if field is not None:
                    self.run(field, passed, results)
            finally:
                for name in names:
                    if results[name].get("status") == "ok" and "ms_median" not in results[name]:
                        continue  # interrupted between its probe and its times
                    if "status" in results[name]:
                        append(self.out, shape.point(name, passed), results[name])
        del field
        clean_up()
        return measured

    def run(self, field: Field, passed: str, results: Results) -> None:
        """Fill in the results of one pass."""
        probes: dict[str, Probe] = {}
        for name in results:
            self.attempt([name], results, lambda name=name: self.alone(field, passed, name, probes))
        for names in self.groups(probes):
            self.time(field, passed, names, probes, results)

    def alone(self, field: Field, passed: str, name: str, probes: dict[str, Probe]) -> Results:
        """What is not a time: memory, the host's part, kernels, errors; and about how long a call takes."""
        attention = self.attentions[name]
        attention.require(field.call(passed))
        probed = probe(field.contestant(name, attention, passed))
        result = {"peak_mib": probed.peak_mib, "host_us": probed.host_us}
        if probed.host_us > MOST_HOST_US:
            why = f"{name} was not profiled: the host takes {probed.host_us / 1e6:.1f} s to issue the call"
            result |= {"kernels": None, "kernels_ok": False, "verdict": why}
        else:
            found, said = field.profiled(name, attention, passed)
            result |= {"kernels": as_field(found), "kernels_ok": said.ok, "verdict": said.text}
        try:
            errors = field.errors(attention, passed)
            result |= {"error_ratio": max(errors.values(), default=None), "error_ratios": errors}
        except torch.OutOfMemoryError as error:  # too large to be judged is not too large to be timed
            result |= {"error_ratio": None, "error_reason": failure(error)["reason"]}
        clean_up()
        probes[name] = probed
        return {name: result}

    def groups(self, probes: dict[str, Probe]) -> list[list[str]]:
        """Who takes turns: all that are light; the slow and the large each by themselves."""
        fastest = min((probe.ms for probe in probes.values()), default=0)
        light = [
            name
            for name, probe in probes.items()
            if probe.ms <= SLOW * fastest
            and (self.memory_mib is None or probe.peak_mib <= HEAVY * self.memory_mib)
        ]
        return ([light] if light else []) + [[name] for name in probes if name not in light]

    def time(
        self, field: Field, passed: str, names: list[str], probes: dict[str, Probe], results: Results
    ) -> None:
        """The times of some contestants; if one of them fails in company, of each by itself."""
        if self.attempt(names, results, lambda: self.turns(field, passed, names, probes)):
            for name in names:
                self.rate(field.shape, passed, results[name])
        elif len(names) > 1:
            for name in names:
                self.time(field, passed, [name], probes, results)

    def turns(self, field: Field, passed: str, names: list[str], probes: dict[str, Probe]) -> Results:
        """Times of contestants in turn."""
        decode, timer = passed == "decode", "host clock"
        if decode:
            contestants = [field.decoder(name, self.attentions[name]) for name in names]
            before = [probe(contestant) for contestant in contestants]
        else:
            contestants = [field.contestant(name, self.attentions[name], passed) for name in names]
            before = [probes[name] for name in names]
        times = self.clocks[not decode].alternate(contestants, before)
        if self.device == "cuda":
            timer = f"one CUDA graph, {len(field.sets)} caches" if decode else "device events, L2 flushed"
        return {name: spread(ms) | {"timer": timer} for name, ms in zip(names, times, strict=True)}

    def attempt(self, names: list[str], results: Results, work: Callable[[], Results]) -> bool:
        """Whether `work` succeeds; adds what it gives, or how it failed, to the results of `names`."""
        try:
            done = work()
        except Exception as error:  # whatever a library raises is a row
            failed, done = failure(error), None
        if done is not None:
            for name in names:
                results[name] |= {"status": "ok", **done[name]}
            return True
        if len(names) == 1:
            results[names[0]] |= failed
        try:
            synchronise()
            clean_up()
        except RuntimeError as error:
            raise DeviceLost(f"{' or '.join(names)}: {failure(error)['reason']}") from None
        return False

    def rate(self, shape: Shape, passed: str, result: dict[str, Any]) -> None:
        """TFLOP/s, and for decode GB/s of K and V, beside what a copy moves."""
        ms = result["ms_median"]
        result["tflops"] = shape.flops(passed) / ms / 1e9
        if passed == "decode":
            result["gb_per_s"] = shape.kv_bytes / ms / 1e6
            result["copy_gb_per_s"] = self.copy_gb_per_s
            result["copy_fraction"] = result["gb_per_s"] / self.copy_gb_per_s
