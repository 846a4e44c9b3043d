"""Measure the host time of our kernels: of the first call in a process, of later calls, and of a launch.
Needs a GPU.

    python scripts/first_call.py                                   # every stage, head dims 64 and 128, bf16
    python scripts/first_call.py --attention cuda_fa2 triton --head-dim 128

Each stage runs forward, and backward if it has one: first in a process that finds no cached cubin and has to
compile, then in another that loads the cubin from disk. Times are per kernel, without imports; of Triton's
kernels there are none. A later call has one sequence of 256 tokens and 4 heads; its time is that of the
forward, without gradients and with, the smallest of 400 times ten calls.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

if __name__ == "__main__" and not __package__:  # python scripts/<command>.py: see there
    import _checkout  # noqa: F401


NOTHING = """
struct Params { char bytes[PARAMS_BYTES]; };
extern "C" __global__ void tilegpt_nothing(const __grid_constant__ Params p) {}
"""
LAUNCHES = 2000


def child(request: dict[str, Any], ready: Callable[[], None]) -> dict[str, Any]:
    """The kernels of one call, as this process loaded them: for measure/worker.py."""
    import torch

    from attention import registry
    from ops import nvrtc

    name, head_dim = request["attention"], request["head_dim"]
    attention = registry.build(name)
    backward = attention.capabilities.backward
    dtype = torch.bfloat16
    q = torch.randn(1, 4, 1024, head_dim, device="cuda", dtype=dtype, requires_grad=backward)
    attention(q, q, q).sum().backward() if backward else attention(q, q, q)
    torch.cuda.synchronize()
    facts = ("name", "load_ms", "registers", "spilled_bytes")
    kernels = [{fact: getattr(kernel, fact) for fact in facts} for kernel in nvrtc.loaded()]
    return {"status": "ok", "kernels": kernels}


def call_us(name: str, head_dim: int, backward: bool, device: str = "cuda") -> float:
    """Microseconds in which the host issues a forward; a GPU is not waited for."""
    import torch

    from attention import registry
    from scripts.measure.instruments.timing import synchronise

    attention = registry.build(name)
    q = torch.randn(1, 4, 256, head_dim, device=device, dtype=torch.bfloat16, requires_grad=backward)

    def seconds(calls: int) -> float:
        synchronise()
        began = time.perf_counter()
        for _ in range(calls):
            attention(q, q, q)
        return time.perf_counter() - began

    with torch.set_grad_enabled(backward):
        seconds(50)
        return 1e6 * min(seconds(10) for _ in range(400)) / 10


def launch_us(folder: Path) -> tuple[float, float]:
    """Microseconds of (a look-up, a look-up and a launch), of an empty kernel with the arguments of ours."""
    import torch

    from ops import nvrtc
    from ops.cuda.call import Call, Params
    from ops.options import AttentionOptions

    source = folder / "nothing.cu"
    source.write_text(NOTHING)
    q = torch.empty(1, 1, 1, 64, device="cuda", dtype=torch.bfloat16)
    defines = Call(q, q, q, AttentionOptions(scale=1.0)).defines
    params = Params()
    assert ctypes.sizeof(params) == defines["PARAMS_BYTES"]

    def look_up() -> nvrtc.Kernel:
        return nvrtc.kernel(str(source), "tilegpt_nothing", defines, q.device)

    def seconds(call: Any) -> float:
        call()
        torch.cuda.synchronize()
        began = time.perf_counter()
        for _ in range(LAUNCHES):
            call()
        return time.perf_counter() - began

    def fastest(call: Any) -> float:
        return 1e6 * min(seconds(call) for _ in range(5)) / LAUNCHES

    return fastest(look_up), fastest(lambda: look_up().launch(1, 128, params))


def main() -> None:
    from scripts.measure.rows import positive

    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    names = "cuda, cuda_* or triton (default: each stage)"
    parser.add_argument("--attention", nargs="+", metavar="NAME", help=names)
    parser.add_argument("--head-dim", nargs="+", type=positive, default=[64, 128], metavar="D")
    asked = parser.parse_args()
    import torch

    from attention import registry
    from attention.cuda import STAGES

    names = [f"cuda_{stage}" for stage in STAGES]
    asked.attention = asked.attention or names
    if unknown := set(asked.attention) - {*names, "cuda", "triton"}:
        known = ", ".join([*names, "cuda", "triton"])
        parser.error(f"--attention {' '.join(sorted(unknown))}: choose of {known}")
    if not torch.cuda.is_available():
        raise SystemExit("first_call.py needs a CUDA GPU: torch.cuda.is_available() is False.")
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}\n")
    print(f"{'kernel':32} {'D':>4} {'compiled':>10} {'from disk':>10}  registers  spilled")
    with tempfile.TemporaryDirectory() as cache:
        for name in asked.attention:
            for head_dim in asked.head_dim:
                compiled, stored = (run(name, head_dim, Path(cache) / f"{name}{head_dim}") for _ in range(2))
                for cold, warm in zip(compiled, stored, strict=True):
                    times = f"{cold['load_ms']:7.0f} ms {warm['load_ms']:7.1f} ms"
                    used = f"{cold['registers']:9}  {cold['spilled_bytes']:7}"
                    print(f"{cold['name']:32} {head_dim:4} {times}  {used}")
        os.environ["TILEGPT_CACHE"] = cache
        print(f"\n{'a later call':32} {'D':>4} {'forward':>10} {'with gradients':>16}")
        for name in asked.attention:
            gradients = (False, True)[: 1 + registry.build(name).capabilities.backward]
            for head_dim in asked.head_dim:
                us = (call_us(name, head_dim, backward) for backward in gradients)
                print(f"{name:32} {head_dim:4} " + "     ".join(f"{x:7.1f} us" for x in us), flush=True)
        print("\nlook-up {:.1f} us, look-up and launch {:.1f} us".format(*launch_us(Path(cache))))


def run(name: str, head_dim: int, cache: Path) -> list[dict[str, Any]]:
    """`child` in a process of its own, with this folder of cubins."""
    from scripts.measure.worker import once

    asked = {"attention": name, "head_dim": head_dim}
    result = once("scripts.first_call:child", asked, TILEGPT_CACHE=str(cache))
    if result["status"] != "ok":
        raise SystemExit(f"{name} failed: {result['reason']}")
    return result["kernels"]


if __name__ == "__main__":
    main()
