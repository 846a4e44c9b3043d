"""The bench of attention_speed: side_by_side.py, and the host's time of short calls, tiles counted,
slow contestants left out at longer N."""

from __future__ import annotations

import gc
import statistics
import time
from typing import Any

from scripts.measure.instruments.bench_points import Shape
from scripts.measure.instruments.contestants import Field
from scripts.measure.instruments.side_by_side import Bench, Results
from scripts.measure.instruments.speed_points import SHORT, Asked
from scripts.measure.instruments.timing import Clock, Contestant, Probe, synchronise
from scripts.measure.rows import append

STREAM_MS = 8.0  # of calls one after the other, a round
STREAMED = (8, 200)  # calls in it, at least and at most
SETTLE = 3  # calls before: the host's caches are full of the contestant before, its autograd thread asleep
ROUNDS = 3
MOST = 40  # calls of a contestant: before each the device sleeps for milliseconds


class ShortClock(Clock):
    """At most MOST rounds."""

    def rounds(self, run_ms: list[float]) -> int:
        return min(MOST, super().rounds(run_ms))


class SpeedBench(Bench):
    """`slow_ms`: a contestant whose call took longer is left out at longer N of the same kind."""

    def __init__(self, *args: Any, slow_ms: float):
        super().__init__(*args)
        self.clocks = {True: ShortClock(self.clocks[True].budget_s)}
        self.slow_ms = slow_ms
        self.stopped: dict[Any, tuple[int, str, str]] = {}  # kind of point -> N, status, reason

    def point(self, asked: Asked, wanted: dict[str, list[str]]) -> None:
        """Measures `wanted`, passes of `asked` with contestants; a row for all, also for what is left out."""
        left: dict[str, list[str]] = {}
        for passed, names in wanted.items():
            for name in names:
                n, status, why = self.stopped.get(kind(asked, passed, name), (asked.shape.tokens, "", ""))
                if n < asked.shape.tokens:
                    result = {"status": status, "reason": f"not tried: {why}", "not_tried": True}
                    append(self.out, asked.shape.point(name, passed), result)
                else:
                    left.setdefault(passed, []).append(name)
        if left:
            for passed, results in self.measure(asked.shape, left).items():
                for name, result in results.items():
                    self.note(asked, passed, name, result)
        gc.freeze()  # what has been imported and compiled by now need not be gone through at every clean-up

    def note(self, asked: Asked, passed: str, name: str, result: dict[str, Any]) -> None:
        """Remembers what makes longer N hopeless."""
        n, status, why = asked.shape.tokens, "", ""
        if result["status"] == "oom":
            status, why = "oom", f"out of memory at N = {n:,}"
        elif result.get("ms_median", 0.0) > self.slow_ms:
            status, why = "error", f"a call took {result['ms_median']:.0f} ms at N = {n:,}"
        if status and not result.get("not_tried"):
            self.stopped.setdefault(kind(asked, passed, name), (n, status, why))

    def turns(self, field: Field, passed: str, names: list[str], probes: dict[str, Probe]) -> Results:
        found = super().turns(field, passed, names, probes)
        if field.shape.tokens <= SHORT and passed in ("forward", "both"):
            contestants = [field.contestant(name, self.attentions[name], passed) for name in names]
            for name, us in zip(names, streamed(contestants, [probes[name] for name in names]), strict=True):
                found[name]["stream_us"] = us
        return found

    def rate(self, shape: Shape, passed: str, result: dict[str, Any]) -> None:
        super().rate(shape, passed, result)
        result["copy_gb_per_s"] = self.copy_gb_per_s

    def _tile(self, field: Field, name: str) -> tuple[int, int] | None:
        """Queries and keys in a tile of the forward, of those that look at whole tiles."""
        call = field.call("forward")
        return self.attentions[name].resolve(call).forward_tile(call)

    def alone(self, field: Field, passed: str, name: str, probes: dict[str, Probe]) -> Results:
        found = super().alone(field, passed, name, probes)
        if passed == "forward" and (tile := self._tile(field, name)):
            computed, every = tiles(field.shape, *tile)
            found[name] |= {"tile": list(tile), "tiles_computed": computed, "tiles_all": every}
        return found


def kind(asked: Asked, passed: str, name: str) -> Any:
    """What points that differ in N have in common; of one sequence and of more are different kinds."""
    s = asked.shape
    short = s.batch == 1 and s.tokens <= SHORT
    return asked.part, s.head_dim, s.heads, s.causal, s.dtype, s.window, short, passed, name


def streamed(contestants: list[Contestant], probes: list[Probe]) -> list[float]:
    """Microseconds a call takes in a stream of calls, the device waited for at the end only: the larger of
    the device's time and the host's. Contestants alternate; the median of some rounds."""
    slowest = [max(probe.ms, probe.host_us / 1e3, 1e-3) for probe in probes]
    calls = [min(STREAMED[1], max(STREAMED[0], int(STREAM_MS / ms))) for ms in slowest]
    times: list[list[float]] = [[] for _ in contestants]
    for _ in range(ROUNDS):
        for contestant, n, kept in zip(contestants, calls, times, strict=True):
            for _ in range(SETTLE):
                contestant.run(contestant.prepare())
            synchronise()
            start = time.perf_counter()
            for _ in range(n):
                contestant.run(contestant.prepare())
            synchronise()
            kept.append(1e6 * (time.perf_counter() - start) / n)
    return [statistics.median(kept) for kept in times]


def tiles(shape: Shape, rows: int, cols: int) -> tuple[int, int]:
    """(tiles that hold a score that counts, all tiles) of one head, for tiles of `rows` queries by `cols`
    keys: 10 of 16 for a causal 4 x 4 grid."""
    n, left = shape.tokens, shape.window
    computed = 0
    for start in range(0, n, rows):
        end = min(start + rows, n)
        first = 0 if left is None else max(0, start - left)
        last = (end if shape.causal else n) - 1
        computed += last // cols - first // cols + 1
    return computed, -(-n // rows) * -(-n // cols)
