"""Rows as an H200 might give them for attention_memory and attention_speed, made up from simple formulas."""

from __future__ import annotations

import zlib
from typing import Any

from attention import registry
from scripts.measure.instruments import speed_points
from scripts.measure.instruments.workers import sizes
from scripts.measure.studies import attention_memory
from tests.scripts.studies import row_of

GPU_MIB = 139 * 1024
KNOWN = sorted(registry.implementations(), key=lambda name: (name != "standard", name))


def _trains(name: str) -> bool:
    return registry.shared_instance(name).capabilities.backward


def memory_rows(names: list[str] | None = None) -> list[dict[str, Any]]:
    """Peaks: outputs and a row statistic; of what writes scores out, so many matrices of them more."""
    copies = {"standard": 2, "naive": 6, "sdpa_math": 5, "cuda_naive": 4}
    found = []
    for task in attention_memory.tasks(names or KNOWN, [2**n for n in range(9, 17)], True):
        for shapes in task.series:
            before = None
            for shape in shapes:
                of = sizes(shape, task.passed)
                extra = of["lse_mib"] * (1 if task.passed == "forward" else 2)
                extra += copies.get(task.name, 0) * of["scores_mib"] * (1 if task.passed == "forward" else 2)
                peak = of["outputs_mib"] + extra
                result: dict[str, Any] = {
                    "status": "ok",
                    "peak_mib": peak,
                    "extra_mib": extra,
                    "ms": 1.0,
                    **of,
                }
                if (task.passed == "both" and not _trains(task.name)) or task.name == "flash3":
                    result = {"status": "unsupported", "reason": "no backward"}
                elif before == "oom" or peak > GPU_MIB:
                    result = {"status": "oom", "reason": "CUDA out of memory"}
                before = result["status"]
                found.append(row_of(shape.point(task.name, task.passed), result))
    return found


def speed_rows(names: list[str] | None = None) -> list[dict[str, Any]]:
    """Times: FLOPs at a rate, a launch, and the scores' trips over memory where they are in memory."""
    found = []
    names = names or KNOWN
    for asked in speed_points.asked(list(speed_points.PARTS), names, True):
        for passed, mine in asked.passes.items():
            for name in mine:
                found.append(row_of(asked.shape.point(name, passed), _timed(asked.shape, passed, name)))
    return found


def _timed(shape: Any, passed: str, name: str) -> dict[str, Any]:
    if name == "flash3" or (passed != "forward" and not _trains(name)):
        return {"status": "unsupported", "reason": "no"}
    written = registry.declaration(name).writes_scores
    rate = 80.0 if written else 250.0 + zlib.crc32(name.encode()) % 400
    launches = 5 if written else 9
    ms = shape.flops(passed) / rate / 1e9 + launches / 1e3
    if written:
        ms += 8 * sizes(shape, passed)["scores_mib"] * 2**20 / 4e12 * 1e3
    if ms > 300:
        return {"status": "error", "reason": "not tried: a call took 100 ms at N = 8,192", "not_tried": True}
    result = {"status": "ok", "ms_median": ms, "tflops": shape.flops(passed) / ms / 1e9, "error_ratio": 0.5}
    result |= {"kernels_ok": True, "verdict": "", "copy_gb_per_s": 4200.0}
    if shape.tokens <= speed_points.SHORT and passed != "backward":
        result["stream_us"] = max(1e3 * ms, 30.0 if written else 40.0)
    if passed == "forward" and name in ("tiled", "cuda_fa2", "triton"):
        from scripts.measure.instruments.speed_bench import tiles

        computed, every = tiles(shape, 128, 64)
        result |= {"tile": [128, 64], "tiles_computed": computed, "tiles_all": every}
    return result
