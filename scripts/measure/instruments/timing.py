"""Times of calls side by side: the contestants alternate, each round in an order of its own, so that clocks
and heat are the same for all.

On a GPU the device's own events count, the L2 is flushed before every call, and the device is kept busy until
the host has issued the whole call, so that the time is that of the kernels. On a CPU it is the wall clock.
"""

from __future__ import annotations

import gc
import random
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

MIB = 2**20
FLUSH_BYTES = 256 * MIB  # several times any L2
MOST_ROUNDS = 200
FEWEST_ROUNDS = 3
CYCLES_PER_US = 2000.0  # clocks are below 2 GHz
MOST_CYCLES = 20_000_000  # that the device sleeps while the host issues: some 10 ms
COMMON_US = 2000.0  # of a host's time: up to it all contestants find a GPU that has slept as long
SLOW_MS = 2000.0  # a call this long is not probed a third time


@dataclass
class Contestant:
    """What is timed is `run(prepare())`, without the `prepare`; it holds `calls` calls."""

    name: str
    run: Callable[[Any], Any]
    prepare: Callable[[], Any] = lambda: None
    calls: int = 1


@dataclass(frozen=True)
class Probe:
    """One call by itself: `peak_mib` is what was allocated at most during it, less what was before."""

    ms: float
    host_us: float  # until the host had issued it; on a CPU the call itself
    peak_mib: float | None


def synchronise() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def clean_up() -> None:
    """Give back what a failed or finished call left behind; on a CPU, where it is less scarce, what was made
    lately: all of a large heap takes 0.3 s."""
    if torch.cuda.is_available():
        gc.collect()
        torch.cuda.empty_cache()
    else:
        gc.collect(1)


def probe(contestant: Contestant) -> Probe:
    """One call after those that compile, tune and warm up."""
    ms = peak = None
    for call in range(3):
        state = contestant.prepare()
        synchronise()
        if torch.cuda.is_available():
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
        start = time.perf_counter()
        result = contestant.run(state)
        issued = time.perf_counter()
        synchronise()
        ms = 1e3 * (time.perf_counter() - start)
        if torch.cuda.is_available():
            peak = (torch.cuda.max_memory_allocated() - before) / MIB
        del state, result
        if call and ms > SLOW_MS:  # the first may have compiled
            break
    return Probe(ms / contestant.calls, 1e6 * (issued - start) / contestant.calls, peak)


class Clock:
    """Alternating timing, `budget_s` of measured time for each contestant."""

    def __init__(self, budget_s: float, flush: bool = True):
        self.budget_s = budget_s
        self.cuda = torch.cuda.is_available()
        self.junk = (
            torch.empty(FLUSH_BYTES, dtype=torch.uint8, device="cuda") if self.cuda and flush else None
        )

    def rounds(self, run_ms: list[float]) -> int:
        """How many rounds the budget allows, the same for all that alternate; one for runs that take all of
        it."""
        mean_ms = statistics.mean(run_ms)
        if mean_ms > 1e3 * self.budget_s:
            return 1
        return min(MOST_ROUNDS, max(FEWEST_ROUNDS, int(1e3 * self.budget_s / max(mean_ms, 1e-3))))

    def alternate(self, contestants: list[Contestant], probes: list[Probe]) -> list[list[float]]:
        """Milliseconds of every call of each contestant.

        The order is drawn anew in every round: in a fixed one the same contestant would always come after the
        one that heats the GPU most."""
        times: list[list[Any]] = [[] for _ in contestants]
        pairs = list(zip(probes, contestants, strict=True))
        cycles = sleeps([probe.host_us * contestant.calls for probe, contestant in pairs])
        rounds = self.rounds([probe.ms * contestant.calls for probe, contestant in pairs])
        drawn = random.Random(0)
        for warm in (True, False):
            for _ in range((FEWEST_ROUNDS if rounds > 1 else 0) if warm else rounds):
                for i in drawn.sample(range(len(contestants)), len(contestants)):
                    measured = self._once(contestants[i], cycles[i])
                    if not warm:
                        times[i].append(measured)
        synchronise()
        return [
            [_elapsed(measured) / contestant.calls for measured in kept]
            for contestant, kept in zip(contestants, times, strict=True)
        ]

    def _once(self, contestant: Contestant, cycles: int) -> Any:
        state = contestant.prepare()
        if not self.cuda:
            start = time.perf_counter()
            contestant.run(state)
            return 1e3 * (time.perf_counter() - start)
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda._sleep(cycles)
        if self.junk is not None:
            self.junk.zero_()
        start.record()
        contestant.run(state)
        end.record()
        return start, end


def sleeps(host_us: list[float]) -> list[int]:
    """Cycles that the device sleeps before a run of each contestant, until its host has issued it.

    The same for all, so that nobody finds a cooler GPU; but the thousands of launches of `tiled` are waited
    for by itself alone."""
    common = max((us for us in host_us if us <= COMMON_US), default=0.0)
    return [min(MOST_CYCLES, int(1.5 * CYCLES_PER_US * max(us, common))) for us in host_us]


def _elapsed(measured: Any) -> float:
    return measured if isinstance(measured, float) else measured[0].elapsed_time(measured[1])


def spread(times: list[float]) -> dict[str, float]:
    """Median, 10th and 90th percentile as a row names them."""
    ordered = sorted(times)
    tenth = len(ordered) // 10
    result = {
        "ms_median": statistics.median(ordered),
        "ms_p10": ordered[tenth],
        "ms_p90": ordered[-1 - tenth],
    }
    return result | {"n": len(ordered)}


def copy_gb_per_s() -> float:
    """What the memory does at best: a copy of 2 GiB (64 MiB on a CPU), bytes read and written per second."""
    cuda = torch.cuda.is_available()
    source = torch.ones(2**31 if cuda else 64 * MIB, dtype=torch.uint8, device="cuda" if cuda else "cpu")
    target = torch.empty_like(source)
    contestant = Contestant("copy", lambda _: target.copy_(source))
    times = Clock(0.05, flush=False).alternate([contestant], [probe(contestant)])[0]
    return 2 * source.numel() / statistics.median(times) / 1e6
