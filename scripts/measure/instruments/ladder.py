"""The stages of the CUDA ladder as points of the roofline: calls, what they launch, what they should move.

As a program it is what Nsight Compute runs: one call of each point given, and no other kernel of ours.
"""

from __future__ import annotations

import contextlib
import json
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

from model.costs.flops import (
    AttentionSize,
    Gpu,
    Traffic,
    fa1_traffic,
    naive_traffic,
    tiled_traffic,
)
from scripts.measure.instruments.bench_points import Shape

STAGES = ("cuda_naive", "cuda_rowwise", "cuda_tiled", "cuda_fa1", "cuda_fa2")
# fp32 is what the stages without tensor cores are for.
DTYPE = dict.fromkeys(STAGES[:3], "fp32") | dict.fromkeys(STAGES[3:], "bf16")


@dataclass(frozen=True)
class Point:
    """One call: a stage at a shape, fa2 perhaps with another tile: queries, keys, warps, blocks."""

    stage: str
    shape: Shape
    tile: tuple[int, int, int, int] | None = None

    def row(self) -> dict[str, Any]:
        """What identifies it in results/roofline."""
        point = self.shape.point(self.stage, "forward") | {"study": "roofline"}
        names = ("br", "bc", "warps", "blocks")
        return point | ({"tile": dict(zip(names, self.tile, strict=True))} if self.tile else {})

    def __str__(self) -> str:
        tile = " tile " + " x ".join(map(str, self.tile)) if self.tile else ""
        return f"{self.stage} {self.shape}{tile}"


@dataclass(frozen=True)
class Launch:
    """A launch as it was made: `shared_bytes` with what is static, `defines` as far as they are not 0."""

    name: str
    defines: dict[str, str]
    threads: int
    registers: int
    spilled_bytes: int
    shared_bytes: int

    def blocks(self, properties: Any) -> int:
        """That share a multiprocessor. Registers go in eights, and a block costs 1 KiB of shared memory
        beside its own."""
        registers = -(-max(1, self.registers) // 8) * 8 * self.threads
        room = (
            properties.regs_per_multiprocessor // registers,
            properties.shared_memory_per_multiprocessor // (self.shared_bytes + 1024),
            properties.max_threads_per_multi_processor // self.threads,
        )
        return min(room)

    def usage(self, properties: Any) -> dict[str, Any]:
        """What a row keeps of it. `occupancy_percent`: of the threads that a multiprocessor has room for."""
        blocks = self.blocks(properties)
        return {
            "registers": self.registers,
            "spilled_bytes": self.spilled_bytes,
            "shared_bytes": self.shared_bytes,
            "threads": self.threads,
            "blocks_per_sm": blocks,
            "occupancy_percent": 100 * blocks * self.threads / properties.max_threads_per_multi_processor,
        }


@contextlib.contextmanager
def recorded() -> Iterator[list[Launch]]:
    """The launches of our kernels while this lasts."""
    from ops import nvrtc

    seen: list[Launch] = []
    plain = nvrtc.Kernel.launch

    def launch(
        kernel: Any, grid: Any, threads: int, params: Any, shared_bytes: int = 0, early: bool = False
    ) -> None:
        plain(kernel, grid, threads, params, shared_bytes, early)
        defines = dict(re.findall(r"(\w+)=(\w+)", kernel.label))
        shared = kernel.shared_bytes + shared_bytes
        seen.append(Launch(kernel.name, defines, threads, kernel.registers, kernel.spilled_bytes, shared))

    nvrtc.Kernel.launch = launch
    try:
        yield seen
    finally:
        nvrtc.Kernel.launch = plain


def prepared(point: Point) -> Callable[[], Any]:
    """A forward of the point on tensors of its own, on a GPU."""
    q, k, v, _ = point.shape.tensors("cuda")
    causal = point.shape.causal
    if point.tile is None:
        from attention.cuda import CudaStage

        stage = point.stage.removeprefix("cuda_")
        # the roof over the stages without tensor cores is that of FMA units
        attention = CudaStage(stage, products="fma" if stage == "tiled" else "auto")
        return lambda: attention(q, k, v, causal=causal)
    from ops.cuda.call import Call
    from ops.cuda.tensor_cores import Tile, run_forward
    from ops.options import AttentionOptions

    options = AttentionOptions(causal, q.shape[3] ** -0.5)
    return lambda: run_forward(q, k, v, Call(q, k, v, options), Tile(*point.tile))


def modelled(point: Point, launches: list[Launch], properties: Any) -> Traffic:
    """The traffic model's answer for a call that launched these."""
    s = point.shape
    value_bytes = 4 if s.dtype == "fp32" else 2
    size = AttentionSize(s.batch, s.heads, s.kv_heads, s.tq, s.tokens, s.head_dim, s.causal, value_bytes)
    l1_bytes = properties.shared_memory_per_multiprocessor  # about what is left of both
    gpu = Gpu(properties.multi_processor_count, properties.L2_cache_size, l1_bytes)
    at_once = {each.name: each.blocks(properties) * gpu.multiprocessors for each in launches}
    if point.stage == "cuda_naive":
        strip = int(launches[0].defines["STRIP"])
        blocks = (at_once[f"tilegpt_naive_{step}"] for step in ("softmax", "output"))
        return naive_traffic(size, gpu, strip, *blocks)
    (main,) = (each for each in launches if each.name == f"tilegpt_{point.stage[5:]}_forward")
    blocks, defines = at_once[main.name], main.defines
    if point.stage == "cuda_rowwise":
        return tiled_traffic(size, gpu, 1, 1, blocks, grouped_bytes=0)
    if point.stage == "cuda_tiled":
        warps, rows, cols = (int(defines[name]) for name in ("WARPS", "ROWS", "COLS"))
        return tiled_traffic(size, gpu, 4 * rows * warps, 8 * cols, blocks)
    br, bc = int(defines["BR"]), int(defines["BC"])
    if point.stage == "cuda_fa1":
        return fa1_traffic(size, gpu, br, bc, blocks)
    return tiled_traffic(size, gpu, br, bc, blocks)


def measured(point: Point, budget_s: float) -> dict[str, Any]:
    """Time, memory, launches and the model of one point, as a row keeps them."""
    import torch

    from scripts.measure.instruments.timing import Clock, Contestant, probe, spread

    properties = torch.cuda.get_device_properties(0)
    with torch.no_grad():
        call = prepared(point)
        with recorded() as launches:
            call()
        contestant = Contestant(str(point), lambda _: call())
        probed = probe(contestant)
        times = spread(Clock(budget_s).alternate([contestant], [probed])[0])
    traffic = modelled(point, launches, properties)
    names = [each.name for each in launches]
    return {
        "status": "ok",
        **times,
        "tflops": point.shape.flops("forward") / times["ms_median"] / 1e9,
        "peak_mib": probed.peak_mib,
        "kernels": {name: names.count(name) for name in names},
        "usage": {each.name: each.usage(properties) for each in launches},
        "model": {
            "dram_read_bytes": traffic.dram_read,
            "dram_write_bytes": traffic.dram_write,
            "l2_bytes": traffic.l2,
        },
    }


def program(points: list[Point]) -> list[str]:
    """The command that calls each of these once."""
    return [sys.executable, "-m", __name__, json.dumps([asdict(point) for point in points])]


def counted(points: list[Point], quick: bool) -> list[dict[str, Any] | str]:
    """For each point what ncu has counted, or why it has not; `by_kernel` where a call has several. All come
    from one program, as ncu is slow to start.

    Raises:
        NoCounters: for none of them.
    """
    from scripts.measure.instruments.counters import count, gathered

    said, launches = count(program(points), quick)
    found: list[dict[str, Any] | str] = []
    for line in said.splitlines():
        if line.startswith('{"launched"'):
            answer = json.loads(line)
            number = answer["launched"]
            mine, launches = launches[:number], launches[number:]
            counts: dict[str, Any] = gathered(of_it for _, of_it in mine)
            if counts and number > 1:
                counts["by_kernel"] = {name: gathered([of_it]) for name, of_it in mine}
            found.append(counts or answer["reason"] or "ncu has no launch of it")
    return found + ["the program ended before it"] * (len(points) - len(found))


def main() -> None:
    if not sys.argv[1:2] or sys.argv[1].startswith("-"):
        raise SystemExit(
            "scripts/roofline.py runs this under Nsight Compute, with its points as JSON: see its --help."
        )
    import torch

    from scripts.measure.instruments.timing import clean_up
    from scripts.measure.runner import failure

    for asked in json.loads(sys.argv[1]):
        point = Point(asked["stage"], Shape(**asked["shape"]), asked["tile"] and tuple(asked["tile"]))
        reason, launches = None, []
        try:
            with torch.no_grad(), recorded() as launches:
                prepared(point)()
                torch.cuda.synchronize()
        except Exception as error:  # the next point may do better
            reason = failure(error)["reason"]
        clean_up()
        print(json.dumps({"launched": len(launches), "reason": reason}), flush=True)


if __name__ == "__main__":
    main()
