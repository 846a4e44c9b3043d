"""CUDA C++ to a cubin with NVRTC, in this process: no nvcc, no headers of torch, no driver, no GPU.

A source is a file of csrc/; one compilation is one specialisation, by defines. Cubins are kept on disk
(nvrtc_cache.py) under a hash of source, headers, defines, options, compiler and architecture.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import logging
import os
import re
import time
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

from ops import nvrtc_cache

log = logging.getLogger(__name__)
SOURCES = Path(__file__).parent / "csrc"
_FOLDERS = tuple(SOURCES / name for name in ("lib", "fp32"))  # where headers are
# Line numbers, for ncu and compute-sanitizer, change no instruction.
_OPTIONS = ("-std=c++17", "-lineinfo", "--ptxas-options=-v")
# What the sources include of CUDA itself.
_CUDA_HEADERS = ("cuda_bf16.h", "cuda_bf16.hpp", "cuda_fp16.h", "cuda_fp16.hpp")
_INSTALL = (
    "CUDA builds of torch for Linux bring along what is needed; elsewhere: pip install -e '.[cuda]', "
    "in the major version of torch.version.cuda"
)
_INCLUDE = re.compile(r'^\s*#\s*include\s*"([^"]+)"', re.MULTILINE)
_ENTRY = re.compile(r"Compiling entry function '(\w+)'")
_SPILLS = re.compile(r"(\d+) bytes spill (?:stores|loads)")


class CudaError(RuntimeError):
    """A kernel cannot be compiled, loaded or launched; the message says which, and what to do."""


@dataclass(frozen=True)
class Usage:
    """What one kernel takes: registers of a thread, bytes a thread spills, bytes of static shared memory."""

    registers: int
    spilled_bytes: int
    shared_bytes: int


@dataclass(frozen=True)
class Cubin:
    """One specialisation. `log` is the compiler's, `seconds` what it took; `label` names source, architecture
    and defines other than 0."""

    code: bytes
    log: str
    seconds: float
    label: str

    @property
    def kernels(self) -> dict[str, Usage]:
        """By name."""
        return usage(self.log)


def usage(log: str) -> dict[str, Usage]:
    """What ptxas says of each kernel. A function that is not inlined counts with the kernel above it."""
    _, *parts = _ENTRY.split(log)
    kernels = {}
    for name, text in zip(parts[::2], parts[1::2], strict=True):
        registers = re.search(r"Used (\d+) registers", text)
        shared = re.search(r"(\d+) bytes smem", text)
        kernels[name] = Usage(
            registers=int(registers[1]) if registers else 0,
            spilled_bytes=sum(map(int, _SPILLS.findall(text))),
            shared_bytes=int(shared[1]) if shared else 0,
        )
    return kernels


def missing() -> str | None:
    """What has to be installed before anything can be compiled, if anything."""
    try:
        found = importlib.util.find_spec("cuda.bindings")
    except ModuleNotFoundError:
        found = None
    return None if found else f"cuda-bindings is not installed: {_INSTALL}"


def build(source: str | Path, defines: Mapping[str, int | str], arch: str) -> Cubin:
    """The cubin of `source`, a file of csrc/ or a path, for `arch`, "sm_90a" say; kept on disk.

    Raises:
        CudaError: it does not compile, or there is no compiler.
    """
    source = SOURCES / source
    text, headers = _texts(source)
    options = [f"--gpu-architecture={arch}", *_OPTIONS]
    options += [f"-D{name}={value}" for name, value in sorted(defines.items())]
    facts = [source.name, text, headers, options, compiler_version(), _toolkit()[1]]
    key = hashlib.sha256(json.dumps(facts).encode()).hexdigest()
    if (stored := nvrtc_cache.read(key)) is not None:
        facts, code = stored.split(b"\n", 1)
        cubin = Cubin(code, **json.loads(facts))
        log.debug("%s: from disk", cubin.label)
        return cubin
    label = " ".join(
        (source.name, arch, *(f"{name}={value}" for name, value in defines.items() if value != 0))
    )
    began = time.perf_counter()
    code, said = _compile(label, source.name, text, headers, options)
    cubin = Cubin(code, said, round(time.perf_counter() - began, 3), label)
    for name, used in cubin.kernels.items():
        log.info(
            "%s (%s): %d registers, %d bytes spilled, %d bytes of static shared memory, %.2f s",
            *(name, label, used.registers, used.spilled_bytes, used.shared_bytes, cubin.seconds),
        )
    facts = {"log": said, "seconds": cubin.seconds, "label": label}
    nvrtc_cache.write(key, json.dumps(facts).encode() + b"\n" + code)
    return cubin


@cache
def compiler_version() -> tuple[int, ...]:
    """The version of NVRTC, (13, 0, 88) or (13, 0): that of its wheel, to spare loading it (30 ms) where the
    cubin is on disk, else what the library says. Raises CudaError where there is none."""
    if reason := missing():
        raise CudaError(reason)
    try:
        major = int(metadata.version("cuda-bindings").partition(".")[0])
        wheel = "nvidia-cuda-nvrtc" if major >= 13 else f"nvidia-cuda-nvrtc-cu{major}"
        return tuple(map(int, metadata.version(wheel).split(".")[:3]))
    except (metadata.PackageNotFoundError, ValueError):
        pass
    try:
        from cuda.bindings import nvrtc

        return _called(*nvrtc.nvrtcVersion())
    except (ImportError, OSError, RuntimeError) as error:
        raise CudaError(f"NVRTC cannot be loaded: {error}. {_INSTALL}") from error


def arch_of(capability: tuple[int, int]) -> str:
    """The architecture to compile for, from a device's compute capability: with wgmma and TMA on Hopper.

    A GPU newer than the compiler runs what is made for an older one of its generation.
    """
    if capability == (9, 0):
        return "sm_90a"
    compiler_version()
    from cuda.bindings import nvrtc

    wanted, known = 10 * capability[0] + capability[1], _called(*nvrtc.nvrtcGetSupportedArchs())
    supported = [arch for arch in known if arch <= wanted and arch // 10 == capability[0]]
    if not supported:
        version = ".".join(map(str, compiler_version()))
        raise CudaError(
            f"NVRTC {version} compiles for sm_{min(known)} to sm_{max(known)}, "
            f"not for sm_{wanted}: install another version of nvidia-cuda-nvrtc, or choose another attention"
        )
    return f"sm_{max(supported)}"


def _texts(source: Path) -> tuple[str, dict[str, str]]:
    """The text of a source, and those of the files that it includes, and these, by the name they go by."""
    if not source.is_file():
        there = sorted(str(path.relative_to(SOURCES)) for path in SOURCES.rglob("*.cu"))
        raise CudaError(f"{source} is not there: csrc has {', '.join(there)}")
    text, headers = source.read_text(encoding="utf-8"), {}
    todo = _INCLUDE.findall(text)
    while todo:
        name = todo.pop()
        folders = (source.parent, *_FOLDERS)
        path = next((at / name for at in folders if (at / name).is_file()), None)
        if name not in headers and path is not None:  # NVRTC names what is not found, with the line
            headers[name] = path.read_text(encoding="utf-8")
            todo += _INCLUDE.findall(headers[name])
    return text, dict(sorted(headers.items()))


@cache
def _toolkit() -> tuple[str | None, str]:
    """(the folder of cuda_bf16.h and cuda_fp16.h, what tells them from others), of the compiler's major
    version: from the wheels that torch depends on, else from an installed toolkit. Float kernels do without:
    (None, "")."""
    major = compiler_version()[0]
    spec = importlib.util.find_spec("nvidia")
    wheels = [Path(at) for at in spec.submodule_search_locations or ()] if spec else []
    folders = [at / part / "include" for at in wheels for part in (f"cu{major}", "cuda_runtime")]
    homes = [os.environ.get(name) for name in ("CUDA_HOME", "CUDA_PATH", "CONDA_PREFIX")]
    for home in (*homes, "/usr/local/cuda"):
        if home:
            folders += [Path(home) / "include", *Path(home).glob("targets/*/include")]
    for at in folders:
        if (at / _CUDA_HEADERS[0]).is_file() and _major(at) in (major, None):
            found = [(at / name).stat() for name in _CUDA_HEADERS if (at / name).is_file()]
            return str(at), str([(stat.st_size, stat.st_mtime_ns) for stat in found])
    return None, ""


def _major(folder: Path) -> int | None:
    """Of the CUDA that the headers in `folder` belong to; None where they do not say."""
    path = folder / "cuda.h"
    found = (
        re.search(r"#define CUDA_VERSION (\d+)", path.read_text(errors="replace")) if path.is_file() else None
    )
    return int(found[1]) // 1000 if found else None


def _no_cache() -> list[str]:
    """Without NVRTC's own cache, which came with 12.9: what it gives has no log. Ours has."""
    return ["--no-cache"] if compiler_version() >= (12, 9) else []


def _compile(
    label: str, name: str, text: str, headers: dict[str, str], options: list[str]
) -> tuple[bytes, str]:
    """(cubin, log) by NVRTC, however much of it is on disk."""
    from cuda.bindings import nvrtc

    folder = _toolkit()[0]
    given = [option.encode() for option in (*options, *_no_cache())] + (
        [f"-I{folder}".encode()] if folder else []
    )
    names, texts = [header.encode() for header in headers], [header.encode() for header in headers.values()]
    program = _called(*nvrtc.nvrtcCreateProgram(text.encode(), name.encode(), len(names), texts, names))
    try:
        (status,) = nvrtc.nvrtcCompileProgram(program, len(given), given)
        said = bytearray(_called(*nvrtc.nvrtcGetProgramLogSize(program)))
        _called(*nvrtc.nvrtcGetProgramLog(program, said))
        said = bytes(said).rstrip(b"\0\n ").decode(errors="replace")
        if status != nvrtc.nvrtcResult.NVRTC_SUCCESS:
            remedy = f" {_INSTALL}." if 'source file "cuda_' in said else ""
            raise CudaError(f"{label} does not compile ({status.name}):\n{said}\n{remedy}".rstrip())
        code = bytearray(_called(*nvrtc.nvrtcGetCUBINSize(program)))
        _called(*nvrtc.nvrtcGetCUBIN(program, code))
        return bytes(code), said
    finally:
        nvrtc.nvrtcDestroyProgram(program)


def _called(status: Any, *values: Any) -> Any:
    """What a function of the bindings gives beside its status, which must be success."""
    if int(status):
        raise CudaError(f"NVRTC says {status.name}")
    return values[0] if len(values) == 1 else values
