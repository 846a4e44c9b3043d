"""Our CUDA kernels at run time: compiled at first use, loaded once a device, launched on torch's stream.

`python -m ops.nvrtc --list` shows the cubins kept on disk, `--clear` removes them; what is compiled is logged
at level INFO (registers, spills, static shared memory, seconds).
"""

from __future__ import annotations

import argparse
import ctypes
import json
import threading
import time
from collections.abc import Mapping
from functools import cache
from typing import Any

import torch

from ops import nvrtc_cache
from ops.nvrtc_build import Cubin, CudaError, Usage, arch_of, build, compiler_version, missing

__all__ = ["Cubin", "CudaError", "Kernel", "Usage", "arch_of", "build", "kernel", "loaded", "missing"]

# Dynamic shared memory that a kernel may use without asking for more.
_PLAIN_SHARED_BYTES = 48 << 10
_REGISTERS = 1 << 16  # of a multiprocessor, since sm_75
_kernels: dict[tuple[Any, ...], Kernel] = {}
_loading = threading.RLock()


def kernel(source: str, name: str, defines: Mapping[str, int | str], device: torch.device) -> Kernel:
    """The kernel `name` of csrc/`source`, specialised by `defines`, on `device`.

    A second call is a look-up, so ask at every launch.

    Raises:
        CudaError: it cannot be compiled or loaded.
    """
    index = device.index if device.index is not None else _index(device)
    key = (source, name, index, *defines.items())
    found = _kernels.get(key)
    if found is None:
        with _loading:
            found = _kernels.get(key) or _load(source, name, tuple(defines.items()), index)
            _kernels[key] = found
    return found


def loaded() -> list[Kernel]:
    """The kernels that this process has used, in the order of their first calls."""
    return list(_kernels.values())


class Kernel:
    """A kernel on a device. What it takes: see Usage; `load_ms`: to have it compiled and loaded."""

    def __init__(self, name: str, label: str, function: Any, index: int, used: Usage, load_ms: float = 0.0):
        self.name, self.label, self.index, self.load_ms = name, label, index, load_ms
        self.registers, self.spilled_bytes = used.registers, used.spilled_bytes
        self.shared_bytes = used.shared_bytes
        self._function, self._allowed_bytes = function, _PLAIN_SHARED_BYTES - used.shared_bytes
        # Looked up once: a launch is to cost microseconds.
        self._launch, self._stream = _driver().cuLaunchKernel, torch._C._cuda_getCurrentRawStream

    def launch(
        self,
        grid: int | tuple[int, int, int],
        threads: int,
        params: ctypes.Structure,
        shared_bytes: int = 0,
        early: bool = False,
    ) -> None:
        """Launches `grid` blocks of `threads` on torch's current stream.

        Args:
            params: the kernel's one argument; it is copied, what it points to is not.
            shared_bytes: of dynamic shared memory.
            early: blocks may start while the stream's previous kernel ends (programmatic dependent launch,
                sm_90 and newer); the kernel waits by griddepcontrol.wait before it reads what that wrote.

        Raises:
            CudaError: the launch was refused. What goes wrong later shows at the next synchronisation.
        """
        if torch.cuda.current_device() != self.index:
            with torch.cuda.device(self.index):
                return self.launch(grid, threads, params, shared_bytes, early)
        if shared_bytes > self._allowed_bytes:
            self._allow(shared_bytes)
        x, y, z = (grid, 1, 1) if isinstance(grid, int) else grid
        # The kernel's one argument, by reference, in the driver's array of arguments.
        arguments = ctypes.c_void_p(ctypes.addressof(params))
        stream, by_reference = self._stream(self.index), ctypes.addressof(arguments)
        if early:
            config = _early_config()
            config.gridDimX, config.gridDimY, config.gridDimZ = x, y, z
            config.blockDimX, config.sharedMemBytes, config.hStream = threads, shared_bytes, stream
            launch, arguments_of = _driver().cuLaunchKernelEx, (config, self._function, by_reference, 0)
        else:
            launch = self._launch
            arguments_of = (self._function, x, y, z, threads, 1, 1, shared_bytes, stream, by_reference, 0)
        (status,) = launch(*arguments_of)
        # A thread that autograd started may have no context yet.
        if status and _bind(self.index):
            (status,) = launch(*arguments_of)
        if status:
            raise CudaError(self._refusal(status, (x, y, z), threads, shared_bytes))
        return None

    def _allow(self, shared_bytes: int) -> None:
        driver, total = _driver(), shared_bytes + self.shared_bytes
        limit = torch.cuda.get_device_properties(self.index).shared_memory_per_block_optin
        if total > limit:
            raise CudaError(
                f"{self.name} ({self.label}) needs {total:,} bytes of shared memory, and a block of "
                f"{torch.cuda.get_device_name(self.index)} has {limit:,}: choose smaller tiles, a smaller "
                "head dim or another attention"
            )
        _bind(self.index)
        attribute = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        _called(self.label, driver.cuFuncSetAttribute(self._function, attribute, shared_bytes))
        self._allowed_bytes = shared_bytes

    def _refusal(self, status: Any, grid: tuple[int, int, int], threads: int, shared_bytes: int) -> str:
        remedy = ""
        if threads * self.registers > _REGISTERS:
            remedy = f": {threads} threads of {self.registers} registers exceed {_REGISTERS}, launch fewer"
        elif max(grid[1:]) > 65_535 or min(grid) < 1:
            remedy = ": a grid is 1 to 2147483647 by 65535 by 65535 blocks"
        return (
            f"{self.name} ({self.label}) was not launched, {_words(status)}{remedy}; grid {grid}, "
            f"{threads} threads, {shared_bytes + self.shared_bytes:,} bytes of shared memory, "
            f"{self.registers} registers"
        )


def _index(device: torch.device) -> int:
    if device.type != "cuda":
        raise CudaError(
            f"our CUDA kernels got tensors on {device}; they need a CUDA device (trainer.accelerator)"
        )
    return torch.cuda.current_device()


def _load(source: str, name: str, defines: tuple[tuple[str, int | str], ...], index: int) -> Kernel:
    began = time.perf_counter()
    cubin, module = _module(source, defines, index)
    kernels = cubin.kernels
    if name not in kernels:
        raise CudaError(f"{source} has no kernel {name}; it has {', '.join(kernels)}")
    function = _called(cubin.label, _driver().cuModuleGetFunction(module, name.encode()))
    return Kernel(name, cubin.label, function, index, kernels[name], 1e3 * (time.perf_counter() - began))


@cache
def _module(source: str, defines: tuple[tuple[str, int | str], ...], index: int) -> tuple[Cubin, Any]:
    """The cubin and its module in the device's primary context, which is torch's. It stays loaded."""
    cubin = build(source, dict(defines), arch_of(torch.cuda.get_device_capability(index)))
    driver = _driver()
    relaxed = driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED
    with torch.cuda.device(index):
        _bind(index)
        # A first call may fall into the capture of a CUDA graph, which forbids to load anything otherwise.
        before = _called(cubin.label, driver.cuThreadExchangeStreamCaptureMode(relaxed))
        try:
            return cubin, _called(cubin.label, driver.cuModuleLoadData(cubin.code))
        finally:
            driver.cuThreadExchangeStreamCaptureMode(before)


@cache
def _driver() -> Any:
    compiler_version()  # says what is missing
    from cuda.bindings import driver

    return driver


_thread_local = threading.local()


def _early_config() -> Any:
    """This thread's launch configuration for blocks that start early; a launch sets all that differs."""
    if not hasattr(_thread_local, "early_config"):
        driver = _driver()
        config, attribute = driver.CUlaunchConfig(), driver.CUlaunchAttribute()
        attribute.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
        attribute.value.programmaticStreamSerializationAllowed = 1
        config.attrs, config.numAttrs, config.blockDimY, config.blockDimZ = [attribute], 1, 1, 1
        _thread_local.early_config = config
    return _thread_local.early_config


def _bind(index: int) -> bool:
    """Makes torch's context of the device current where this thread has none; whether it had none."""
    driver = _driver()
    if int(_called("", driver.cuCtxGetCurrent())):
        return False
    context = _called("", driver.cuDevicePrimaryCtxRetain(_called("", driver.cuDeviceGet(index))))
    _called("", driver.cuCtxSetCurrent(context))
    return True


def _called(label: str, answer: tuple[Any, ...]) -> Any:
    """What a driver function gives beside its status, which must be success."""
    status, *values = answer
    if status:
        raise CudaError(f"{label or 'the CUDA driver'}: {_words(status)}{_remedy(status.name)}")
    return values[0] if values else None


def _words(status: Any) -> str:
    found, words = _driver().cuGetErrorString(status)
    return f"{status.name}" + ("" if found else f" ({words.decode()})")


def _remedy(name: str) -> str:
    if any(word in name for word in ("IMAGE", "NO_BINARY", "PTX", "SOURCE", "NOT_SUPPORTED")):
        _, version = _driver().cuDriverGetVersion()
        driver, nvrtc = f"{version // 1000}.{version % 1000 // 10}", ".".join(map(str, compiler_version()))
        return (
            f". The driver runs CUDA {driver} and NVRTC {nvrtc} compiled the kernel: update the driver, "
            f"or install torch and cuda-bindings for CUDA {driver}"
        )
    return ". Free GPU memory" if "OUT_OF_MEMORY" in name else ""


def main(arguments: list[str] | None = None) -> None:
    """The command line: see the module."""
    parser = argparse.ArgumentParser(prog="python -m ops.nvrtc", description="The CUDA kernels kept on disk.")
    parser.add_argument("--list", action="store_true", help="what is there, the most recently used first")
    parser.add_argument("--clear", action="store_true", help="remove it")
    asked = parser.parse_args(arguments)
    if not (asked.list or asked.clear):
        parser.error("choose --list or --clear")
    if asked.list:
        paths = nvrtc_cache.entries()
        for path in paths:
            try:
                label = json.loads(path.read_bytes()[32:].split(b"\n", 1)[0])["label"]
            except (ValueError, KeyError):
                label = "damaged: will be built again"
            except OSError as error:  # another user's, or another process has just removed it
                label = f"cannot be read: {error.strerror}"
            size, last_used = nvrtc_cache._stat(path)
            used = time.strftime("%Y-%m-%d %H:%M", time.localtime(last_used))
            print(f"{used}  {size / 1024:7.1f} KiB  {label}")
        total = sum(nvrtc_cache._stat(path)[0] for path in paths) / 2**20
        bound = nvrtc_cache.bound_bytes() >> 20
        print(f"{len(paths)} cubins, {total:.1f} of {bound:,} MiB, in {nvrtc_cache.folder()}")
    if asked.clear:
        print(f"removed {nvrtc_cache.clear()} cubins from {nvrtc_cache.folder()}")


if __name__ == "__main__":
    main()
