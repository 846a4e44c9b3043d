"""What a call of the CUDA ladder launches, as its launch functions ask for it, without a GPU: tensors have
no data, the architecture is named, and a runtime that compiles nothing notes each launch.

    python -m tests.ops.recorded fa2 --head-dim 64 128 --arch 90 --features window document_ids

compiles it and prints registers, spills, shared memory and how many blocks share a multiprocessor.
"""

from __future__ import annotations

import argparse
import importlib
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch

from attention import cuda
from ops import nvrtc
from tests.grid import Case, make_inputs

# What a block may use, and what a multiprocessor has (CUDA C++ programming guide, compute capabilities).
SHARED_BYTES = {(8, 0): 166_912, (8, 9): 101_376, (9, 0): 232_448}
SM_SHARED_BYTES = {(8, 0): 167_936, (8, 9): 102_400, (9, 0): 233_472}
SM_REGISTERS, SM_THREADS = 65_536, {(8, 0): 2048, (8, 9): 1536, (9, 0): 2048}
PROCESSORS = {(8, 0): 108, (8, 9): 128, (9, 0): 132}


@dataclass(frozen=True)
class Launch:
    """One launch. `shared_bytes` are dynamic; `early`: before the kernel that it follows has ended."""

    source: str
    name: str
    defines: tuple[tuple[str, int | str], ...]
    threads: int
    shared_bytes: int
    early: bool = False

    def __str__(self) -> str:
        on = (f"{name}={value}" for name, value in self.defines if value and name != "PARAMS_BYTES")
        return " ".join((self.name, *on, f"threads={self.threads}", f"shared={self.shared_bytes}"))


@dataclass(frozen=True)
class Compiled:
    """A launch, compiled: registers and bytes spilled of a thread, bytes of shared memory of a block, and how
    many blocks a multiprocessor has room for."""

    launch: Launch
    registers: int
    spilled_bytes: int
    shared_bytes: int
    blocks: int
    cubin: nvrtc.Cubin

    def __str__(self) -> str:
        return (
            f"{self.launch}: {self.registers} registers, {self.spilled_bytes} bytes spilled, "
            f"{self.shared_bytes} bytes of shared memory, {self.blocks} blocks"
        )


def compiled(launch: Launch, arch: tuple[int, int]) -> Compiled:
    """Registers go in eights, and a block costs 1 KiB of shared memory beside its own."""
    cubin = nvrtc.build(launch.source, dict(launch.defines), nvrtc.arch_of(arch))
    used = cubin.kernels[launch.name]
    shared = launch.shared_bytes + used.shared_bytes
    registers = -(-used.registers // 8) * 8 * launch.threads
    room = (
        SM_REGISTERS // registers,
        SM_SHARED_BYTES[arch] // (shared + 1024),
        SM_THREADS[arch] // launch.threads,
    )
    return Compiled(launch, used.registers, used.spilled_bytes, shared, min(room), cubin)


class _Recorder:
    """Stands for a Kernel."""

    def __init__(self, note: Callable[[int, int, bool], None]):
        self._note = note

    def launch(
        self, grid: Any, threads: int, params: Any, shared_bytes: int = 0, early: bool = False
    ) -> None:
        x, y, z = (grid, 1, 1) if isinstance(grid, int) else grid
        assert 0 < x < 2**31 and 0 < y < 2**16 and 0 < z < 2**16, grid
        self._note(threads, shared_bytes, early)


def _bare(x: Any) -> Any:
    """Tensors without their data, in the same strides."""
    if isinstance(x, (tuple, list)):
        return type(x)(map(_bare, x))
    if not isinstance(x, torch.Tensor):
        return x
    return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta")


def launches(stage: str, case: Case, dtype: torch.dtype, arch: tuple[int, int]) -> list[Launch]:
    """Those of `case` on `arch`, forward, and backward where `stage` has one, deterministic and not; of tiled
    by either kind of products."""
    found: list[Launch] = []

    def kernel(source: str, name: str, defines: dict[str, int | str], device: torch.device) -> _Recorder:
        def note(*launched: Any) -> None:
            found.append(Launch(source, name, tuple(defines.items()), *launched))

        return _Recorder(note)

    properties = SimpleNamespace(
        major=arch[0],
        minor=arch[1],
        multi_processor_count=PROCESSORS[arch],
        shared_memory_per_block_optin=SHARED_BYTES[arch],
        shared_memory_per_multiprocessor=SM_SHARED_BYTES[arch],
        L2_cache_size=50 << 20,
    )
    made, attention = make_inputs(case, "cpu", dtype), cuda.CudaStage(stage)
    hopper = importlib.import_module("ops.cuda.hopper")
    names = {each.module for each in cuda.STAGES.values()}
    names |= {"ops.cuda.split_fp16", "ops.cuda.split_fp16_backward"}
    modules = [importlib.import_module(name) for name in sorted(names)]
    given: dict[str, tuple[Any, ...]] = {}
    for function in (each for module in modules for each in vars(module).values()):
        if hasattr(function, "cache_clear"):  # what is remembered of another architecture
            function.cache_clear()

    def op(*arguments: Any) -> tuple[torch.Tensor, torch.Tensor]:
        given["options"] = arguments[3:]
        return torch.empty_like(arguments[0]), arguments[0].new_empty(arguments[0].shape[:3])

    with ExitStack() as stack, torch.no_grad():
        for owner, name, replacement in (
            (nvrtc, "kernel", kernel),
            *((module, "_kernel", kernel) for module in modules if hasattr(module, "_kernel")),
            (attention, "_check", lambda *_: None),
            # what only a driver can make
            (hopper, "tensor_map", lambda *_: bytes(128)),
            (torch.cuda, "get_device_capability", lambda *_: arch),
            (torch.cuda, "get_device_properties", lambda *_: properties),
            (torch.Tensor, "is_cuda", True),
            (torch, "is_autocast_enabled", lambda *_: False),
            (torch.Tensor, "data_ptr", lambda x: 256 + x.storage_offset() * x.element_size()),
        ):
            stack.enter_context(mock.patch.object(owner, name, replacement))
        stack.enter_context(mock.patch.dict(cuda._OPS, {stage: op}))
        q, k, v, dout = map(_bare, (made.q, made.k, made.v, made.dout))
        # By the class's own way from the contract's options to the op's.
        attention(q, k, v, **{name: _bare(option) for name, option in made.options.items()})
        *options, default = given["options"]
        able = cuda.STAGES[stage].capabilities
        other = [0, 1] if stage == "tiled" else [0, 0] if able.deterministic else [1, 0]
        for settings in dict.fromkeys((tuple(default), tuple(other))):
            out, lse = cuda._forward(stage, q, k, v, *options, settings)
            if able.backward and not (settings[0] and cuda._nondeterminism_reason(stage, q.shape[3])):
                cuda._backward(stage, dout, q, k, v, out, lse, *options, settings, False)
    return found


def main() -> None:
    """The command line: see the module."""
    parser = argparse.ArgumentParser(prog="python -m tests.ops.recorded")
    parser.add_argument("stage", choices=list(cuda.STAGES))
    parser.add_argument("--head-dim", nargs="+", type=int, default=[64, 128])
    parser.add_argument("--arch", nargs="+", default=["80", "89", "90"], choices=["80", "89", "90"])
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float16", "float32"])
    parser.add_argument("--features", nargs="*", default=[], help="window, document_ids, gqa, ...")
    asked = parser.parse_args()
    features, kv_heads = frozenset(asked.features) - {"gqa"}, 2 if "gqa" in asked.features else 4
    for arch, head_dim in ((arch, d) for arch in asked.arch for d in asked.head_dim):
        case, sm = (
            Case("asked", 128, 128, head_dim, kv_heads=kv_heads, features=features),
            (int(arch[0]), int(arch[1])),
        )
        for launch in dict.fromkeys(launches(asked.stage, case, getattr(torch, asked.dtype), sm)):
            print(f"sm_{arch} {compiled(launch, sm)}", flush=True)


if __name__ == "__main__":
    main()
