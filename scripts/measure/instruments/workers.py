"""Peak memory of calls, each implementation in a process of its own.

A peak is the most that was allocated during a call less what was before it: bytes that tensors take, not
what the caching allocator holds, so a process can measure one length after the other with nothing left over
from the one before (a start costs seconds: torch, a CUDA context). The call before the one that counts
compiles, tunes and allocates workspaces, which stay. Nor does a neighbour on the GPU change what a process
allocates; it could only make it run out. So processes share a GPU under a cap each, a share of its memory; a
call that hits the cap is no result and waits until it has the GPU to itself, but for the CUDA contexts of
the others that wait (about half a GiB each).
"""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from scripts.measure.worker import Worker

if TYPE_CHECKING:
    from attention.base import Attention
    from scripts.measure.instruments.bench_points import Shape

WARM_MS = 1000.0  # after a call of this length, at the length before, there is no other one to warm up
PROFILED_MS = 2000.0  # of calls as long as this no kernels are recorded
MIB = 2**20


class Gauge:
    """Measures peaks of one implementation; remembers what its last call took."""

    def __init__(self, name: str, attention: Attention, device: str):
        self.name, self.attention, self.device = name, attention, device
        self.ms = 0.0

    def measure(self, shape: Shape, passed: str, brief: bool = False) -> dict[str, Any]:
        """A row's result; `ms` is the wall time of the call, to know what a longer one would take. brief: one
        call and no figures, for what it compiles."""
        from scripts.measure.runner import failure

        try:
            return {"status": "ok", **(self._called if brief else self._measured)(shape, passed)}
        except Exception as error:  # whatever a library raises is a row
            return failure(error)
        finally:
            self._clean_up()

    def _called(self, shape: Shape, passed: str) -> dict[str, Any]:
        from scripts.measure.instruments.contestants import Field
        from scripts.measure.instruments.timing import synchronise

        field = Field(shape, self.device)
        self.attention.require(field.call(passed))
        field.contestant(self.name, self.attention, passed).run(None)
        synchronise()
        return {}

    def _measured(self, shape: Shape, passed: str) -> dict[str, Any]:
        import torch

        from scripts.measure.instruments.allocations import peak_of
        from scripts.measure.instruments.contestants import Field
        from scripts.measure.instruments.timing import synchronise

        field = Field(shape, self.device)
        self.attention.require(field.call(passed))
        contestant = field.contestant(self.name, self.attention, passed)
        if self.ms < WARM_MS:
            contestant.run(None)
            self._clean_up()
        before = torch.cuda.memory_allocated() if self.device == "cuda" else 0
        with peak_of(torch.device(self.device)) as peak:
            start = time.perf_counter()
            out = contestant.run(None)
            synchronise()
            self.ms = 1e3 * (time.perf_counter() - start)
        del out
        result = {"peak_mib": (peak.bytes - before) / MIB, **sizes(shape, passed), "ms": self.ms}
        result["extra_mib"] = result["peak_mib"] - result["outputs_mib"]
        return result | self._kernels(field, passed)

    def _clean_up(self) -> None:
        """A CPU's blocks are counted from the call on: there nothing is left to be in the way."""
        from scripts.measure.instruments.timing import clean_up

        if self.device == "cuda":
            clean_up()

    def _kernels(self, field: Any, passed: str) -> dict[str, Any]:
        from scripts.measure.instruments.kernels import as_field

        if self.ms > PROFILED_MS:
            return {}
        try:
            found, said = field.profiled(self.name, self.attention, passed)
        except RuntimeError as error:  # the peak stands
            return {"kernels": None, "verdict": f"not profiled: {next(iter(str(error).splitlines()), '')}"}
        return {"kernels": as_field(found), "kernels_ok": said.ok, "verdict": said.text}


def sizes(shape: Shape, passed: str) -> dict[str, float]:
    """Computed MiB: q, k, v (and dout); what a call has to give: out (and dq, dk, dv); all scores of all
    heads in the dtype of the inputs, and in fp32; the row statistics in fp32."""
    value = 4 if shape.dtype == "fp32" else 2
    queries = shape.batch * shape.heads * shape.tq
    q, kv, scores = queries * shape.head_dim * value, shape.kv_bytes, queries * shape.tokens
    both = passed == "both"
    return {
        "inputs_mib": (q + kv + both * q) / MIB,
        "outputs_mib": (q + both * (q + kv)) / MIB,
        "scores_mib": scores * value / MIB,
        "scores_fp32_mib": 4 * scores / MIB,
        "lse_mib": 4 * queries / MIB,
    }


class Measurer:
    """The process of one implementation, started at the first question."""

    def __init__(self, name: str):
        self.name = name
        self.worker: Worker | None = None

    def ask(self, shape: Shape, passed: str, cap: float | None = None, brief: bool = False) -> dict[str, Any]:
        """cap: the fraction of the GPU's memory that the process may have; None is all of it. brief: see
        `Gauge.measure`."""
        if self.worker is None:  # one of many processes: it compiles by itself
            self.worker = Worker(f"{__name__}:child", TORCHINDUCTOR_COMPILE_THREADS="1")
        asked = {"name": self.name, "shape": dataclasses.asdict(shape), "pass": passed}
        return self.worker.ask(asked | {"cap": cap, "brief": brief})

    def close(self) -> None:
        if self.worker is not None:
            self.worker.end()
            self.worker = None


@functools.cache
def gauge(name: str) -> Gauge:
    import torch

    from scripts.measure.instruments.backward_work import contestants

    return Gauge(name, contestants([name])[name], "cuda" if torch.cuda.is_available() else "cpu")


def child(request: dict[str, Any], ready: Callable[[], None]) -> dict[str, Any]:
    """For measure/worker.py."""
    import torch

    from scripts.measure.instruments.bench_points import Shape

    if torch.cuda.is_available():
        torch.cuda.set_per_process_memory_fraction(request["cap"] or 1.0)
    return gauge(request["name"]).measure(Shape(**request["shape"]), request["pass"], request["brief"])
