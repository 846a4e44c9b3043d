"""What a GPU gives at most, measured: arithmetic, bandwidths and latencies (ops/csrc/bench/ceilings.cu)."""

from __future__ import annotations

import ctypes
import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ops import nvrtc
from scripts.measure.instruments.timing import Clock, Contestant, copy_gb_per_s, probe

BUDGET_S = 0.02
# Of ceilings.cu.
THREADS, CHAINS = 256, 8
MATRIX = 8192  # rows and columns of cuBLAS's product
LINE = 128
# Of memory that the L2's latency and bandwidth are measured in, and DRAM's latency.
L2_BYTES, DRAM_BYTES = 4 << 20, 1 << 30
# How often the unit that a block of the grid reads at once is walked, for the bandwidth over what is walked.
WALKED = (1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 16)


class Params(ctypes.Structure):
    """struct Params of csrc/bench/ceilings.cu, field by field."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("data", "cycles", "sink")),
        ("size", ctypes.c_longlong),
        ("steps", ctypes.c_int),
        ("a", ctypes.c_float),
        ("b", ctypes.c_float),
    ]


DEFINES = {"PARAMS_BYTES": ctypes.sizeof(Params)}


@dataclass(frozen=True)
class Ceiling:
    """`value` in `unit`; `per_clock`: FLOPs, results or bytes of a multiprocessor, or clocks of a latency.
    `mib`: what was walked, where that decides."""

    value: float
    unit: str
    per_clock: float | None = None
    mib: float | None = None


def _milliseconds(call: Callable[[], Any], flush: bool = False) -> float:
    contestant = Contestant("ceiling", lambda _: call())
    return statistics.median(Clock(BUDGET_S, flush).alternate([contestant], [probe(contestant)])[0])


class Ceilings:
    """The measurements: `all` gives each by name, as a call, so that what fails is the only one missing."""

    def __init__(self) -> None:
        self.device = torch.device("cuda", torch.cuda.current_device())
        self.properties = torch.cuda.get_device_properties(self.device)
        self.processors = self.properties.multi_processor_count
        self.cycles = torch.zeros(32 * self.processors, dtype=torch.int64, device=self.device)
        self.sink = torch.zeros(1, device=self.device)

    def all(self) -> Iterator[tuple[str, Callable[[], Ceiling]]]:
        warp, thread = THREADS // 32 * CHAINS, THREADS * CHAINS
        yield "tensor_mma", partial(self.rate, "mma", warp * 4096, 4, 8192, 1e12, "TFLOP/s")
        yield "tensor_cublas", self.cublas
        yield "fma", partial(self.rate, "fma", thread * 2, 8, 32768, 1e12, "TFLOP/s")
        yield "exp2", partial(self.rate, "exp2", thread, 8, 4096, 1e12, "T/s")
        yield "shared_read", partial(self.rate, "shared", thread * 16, 4, 4096, 1e9, "GB/s")
        yield "dram_read", self.dram
        yield "dram_copy", lambda: Ceiling(copy_gb_per_s(), "GB/s")
        for number in WALKED:
            yield f"read_{number}", partial(self.l2, number)
        yield "l2_read", partial(self.l2, 1)
        yield "latency_shared", partial(self.latency, "chase_shared", None, 65536)
        yield "latency_l2", partial(self.latency, "chase", L2_BYTES, 65536)
        yield "latency_dram", partial(self.latency, "chase", DRAM_BYTES, 16384)

    def launch(self, name: str, blocks: int, steps: int, data: int | None = None, size: int = 0) -> None:
        """tilegpt_ceiling_<name>, with blocks of 256 threads; the chases have one thread."""
        params = Params(data, self.cycles.data_ptr(), self.sink.data_ptr(), size, steps, 0.999, 0.001)
        kernel = nvrtc.kernel("bench/ceilings.cu", f"tilegpt_ceiling_{name}", DEFINES, self.device)
        kernel.launch(blocks, 1 if name.startswith("chase") else THREADS, params)

    def clocks(self, blocks: int) -> float:
        """Of the last launch: of its slowest block, as those that share a multiprocessor begin together and
        the scheduler serves some of them first."""
        return float(self.cycles[:blocks].max().item())

    def rate(self, name: str, of_block: int, per_sm: int, steps: int, scale: float, unit: str) -> Ceiling:
        """`of_block`: what a block does in a step; `per_sm` blocks share a multiprocessor."""
        blocks = per_sm * self.processors
        ms = _milliseconds(lambda: self.launch(name, blocks, steps))
        per_clock = per_sm * of_block * steps / self.clocks(blocks)
        return Ceiling(blocks * of_block * steps / ms * 1e3 / scale, unit, per_clock)

    def cublas(self) -> Ceiling:
        like: dict[str, Any] = {"device": self.device, "dtype": torch.bfloat16}
        a, b = (torch.randn(MATRIX, MATRIX, **like) for _ in range(2))
        out = torch.empty_like(a)
        ms = _milliseconds(lambda: torch.matmul(a, b, out=out))
        return Ceiling(2 * MATRIX**3 / ms / 1e9, "TFLOP/s")

    def read(self, number: int, per_sm: int, steps: int) -> Ceiling:
        """Walks `number` times what the grid reads at once, `steps` times over."""
        blocks = per_sm * self.processors
        walked = number * blocks * THREADS * CHAINS * 16
        data = torch.ones(walked // 8, dtype=torch.int64, device=self.device)
        ms = _milliseconds(lambda: self.launch("read", blocks, steps, data.data_ptr(), walked // 16))
        return Ceiling(steps * walked / ms / 1e6, "GB/s", mib=walked / 2**20)

    def dram(self) -> Ceiling:
        return self.read(128, 8, 1)  # 4 GiB on an H200

    def l2(self, number: int) -> Ceiling:
        """8 MiB on an H200, and its multiples."""
        return self.read(number, 2, max(4, 128 // number))

    def latency(self, name: str, walked: int | None, steps: int) -> Ceiling:
        """Of a load, over `walked` bytes in no order, in DRAM cold: misses of the TLB are part of it."""
        start, chain = (None, None) if walked is None else self.chain(walked)
        ms = _milliseconds(lambda: self.launch(name, 1, steps, start), flush=walked == DRAM_BYTES)
        del chain  # alive until here
        mib = None if walked is None else walked / 2**20
        return Ceiling(1e6 * ms / steps, "ns", self.clocks(1) / steps, mib)

    def chain(self, walked: int) -> tuple[int, Tensor]:
        """The address where a chain through all lines of `walked` bytes begins, and its memory."""
        order = torch.randperm(walked // LINE, device=self.device)
        chain = torch.zeros(walked // LINE, LINE // 8, dtype=torch.int64, device=self.device)
        chain[order, 0] = chain.data_ptr() + LINE * order.roll(-1)
        return chain.data_ptr() + LINE * int(order[0]), chain
