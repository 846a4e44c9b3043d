"""The stages of ops/csrc on the CPU: g++ in the place of NVRTC (cpu.h, mma_cpu.h), the same launches."""

from __future__ import annotations

import atexit
import ctypes
import hashlib
import re
import shutil
import struct
import subprocess
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ops.cuda.attend_cache import CacheLaunch
from ops.cuda.call import _POINTERS, Call, Params
from ops.cuda.hopper import BackwardLaunch, Launch
from ops.options import AttentionOptions
from scripts.accuracy import Problem, dropout_seed

GXX = shutil.which("g++")
CSRC = Path(__file__).parents[2] / "ops" / "csrc"
HERE = Path(__file__).parent
# With FMA, as on the GPU, for which g++ wants -fexpensive-optimizations; -Og, as most of the time goes into
# compiling.
_OPTIONS = ("-std=c++17", "-Og", "-fexpensive-optimizations", "-pipe", "-mfma", "-ffp-contract=fast", "-w")
# A kernel takes 0.19 s with gold, 0.22 with ld.
_LIBRARY = ("-fPIC", "-shared", *(("-fuse-ld=gold",) if shutil.which("ld.gold") else ()))
_SANITIZED = ("-fsanitize=thread", "-DTHREADS_OF_THE_SYSTEM", "-pthread", "-rdynamic")

_LAUNCH = """
static void (*of_the_grid)(Params);
static Params argument;
extern "C" const char *launch(void (*kernel)(Params), const Params *p, const unsigned *grid, unsigned threads,
                       unsigned shared_bytes) {
    of_the_grid = kernel, argument = *p;
    return cpu::run_grid([] { of_the_grid(argument); }, grid, threads, shared_bytes);
}
"""


# The same for a kernel that takes a struct Launch.
_LAUNCH_MAPS = """
static void (*with_maps)(Launch);
static Launch maps;
extern "C" const char *launch_maps(void (*kernel)(Launch), const char *given, const unsigned *grid,
                                   unsigned threads, unsigned shared_bytes) {
    with_maps = kernel;
    memcpy(&maps, given, sizeof maps);
    return cpu::run_grid([] { with_maps(maps); }, grid, threads, shared_bytes);
}
"""


# A program that reads the Params, gives each pointer a megabyte of zeros and launches; 66 is a race.
_MAIN = """
#include <dlfcn.h>
#include <stdio.h>
int main(int, char **words) {
    Params p;
    if (fread(&p, sizeof p, 1, stdin) != 1) return 1;
    for (int i = 0; i < POINTERS; ++i)
        if (((void **)&p)[i]) ((void **)&p)[i] = calloc(1, 1 << 20);
    const unsigned grid[] = {(unsigned)atoi(words[1]), (unsigned)atoi(words[2]), (unsigned)atoi(words[3])};
    launch((void (*)(Params))dlsym(RTLD_DEFAULT, words[6]), &p, grid, atoi(words[4]), atoi(words[5]));
}
"""


@cache
def _precompiled(*flags: str) -> str:
    """A folder with cpu.h as g++ keeps what it has read, which is most of what a kernel takes to compile."""
    folder = Path(tempfile.mkdtemp(prefix="cpu_h"))
    atexit.register(shutil.rmtree, folder)
    command = [GXX, *_OPTIONS, *flags, "-x", "c++-header", HERE / "cpu.h", "-o", folder / "cpu.h.gch"]
    subprocess.run(command, check=True)
    return str(folder)


def _key(source: str, flags: list[str]) -> str:
    """A name for a specialisation."""
    return hashlib.sha256(" ".join([source, *flags]).encode()).hexdigest()[:16]


@dataclass(frozen=True)
class Kernel:
    library: ctypes.CDLL
    name: str

    def launch(
        self,
        grid: int | tuple[int, int, int],
        threads: int,
        params: ctypes.Structure,
        shared_bytes: int = 0,
        early: bool = False,
    ) -> None:
        x, y, z = (grid, 1, 1) if isinstance(grid, int) else grid
        assert min(x, y, z) > 0 and max(y, z) <= 65_535 and threads % 32 == 0 and shared_bytes <= 232_448
        kernel = ctypes.cast(getattr(self.library, self.name), ctypes.c_void_p)
        size = (ctypes.c_uint * 3)(x, y, z)
        maps = isinstance(params, Launch | BackwardLaunch | CacheLaunch)
        launch = self.library.launch_maps if maps else self.library.launch
        launch.restype = ctypes.c_char_p
        fault = launch(kernel, ctypes.byref(params), size, threads, shared_bytes)
        assert fault is None, f"{self.name} {fault.decode()}, with {shared_bytes} bytes of shared memory"


class Compiler:
    """Stands in for ops.nvrtc.kernel.

    Args:
        folder: for sources and libraries.
        changes: mistakes to plant, (old, new) by the name of a source or header.
    """

    def __init__(self, folder: Path, changes: Mapping[str, tuple[str, str]] | None = None):
        self.folder = folder
        self._libraries: dict[str, ctypes.CDLL] = {}
        for path in CSRC.glob("*/*.cu*"):
            text = path.read_text()
            if path.name in (changes or {}):
                old, new = changes[path.name]
                assert text.count(old) == 1, f"{path.name} has {old!r} {text.count(old)} times"
                text = text.replace(old, new)
            (folder / path.name).write_text(text)

    def __call__(
        self, source: str, name: str, defines: Mapping[str, int | str], device: torch.device
    ) -> Kernel:
        assert device.type == "cpu"
        source = Path(source).name
        flags = [f"-D{define}={value}" for define, value in defines.items()]
        key = _key(source, flags)
        if key not in self._libraries:
            library = self.compile(source, _LAUNCH, key, _LIBRARY, flags)
            self._libraries[key] = ctypes.CDLL(str(library))
        return Kernel(self._libraries[key], name)

    def compile(self, source: str, more: str, key: str, kind: tuple[str, ...], flags: list[str]) -> Path:
        """What g++ makes of `source` with `more` text after it; `kind` is _LIBRARY or _SANITIZED."""
        unit, result = self.folder / f"{key}.cpp", self.folder / key
        unit.write_text(f'#include "cpu.h"\n#include "{Path(source).name}"\n{more}')
        folders = (f"-I{folder}" for folder in (_precompiled(*kind), HERE))
        command = [GXX, *_OPTIONS, *kind, *flags, *folders, str(unit), "-o", str(result)]
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode == 0, f"{source}: {' '.join(command)}\n{done.stderr}"
        return result


# The one load that is written in PTX amid C++: where to, and from where.
_LOAD = re.compile(
    r'asm volatile\("ld\.shared\.v4\.u32 .*?: "=r"\((\w+)\.x\).*?: "r"\((.*?)\)\n *: "memory"\)', re.S
)


class TensorCores(Compiler):
    """Of the sources without what is written in PTX: mma_cpu.h has it, in the place of CUDA's header."""

    def __init__(self, folder: Path):
        super().__init__(folder)
        for name in ("mma.cuh", "bytes.cuh", "fa1.cu"):
            text, loads = _LOAD.subn(r"\1 = load_shared(\2)", (folder / name).read_text())
            assert loads == (name == "mma.cuh"), f"{name} loads {loads} times by hand"
            # What asks for the architecture has C++ for none.
            parts = (part for part in text.split("\n\n") if "asm" not in part or "__CUDA_ARCH__" in part)
            (folder / name).write_text("\n\n".join(parts))
        header = folder / "attention.cuh"
        text = header.read_text().replace("<cuda_bf16.h>", '"mma_cpu.h"')
        header.write_text(
            text.replace("typedef float element;", '#include "mma_cpu.h"\ntypedef float element;')
        )

    def compile(self, source: str, more: str, *rest: Any) -> Path:
        takes_launch = " Launch " in (self.folder / Path(source).name).read_text()
        return super().compile(source, more + (_LAUNCH_MAPS if takes_launch else ""), *rest)


class WmmaCores(TensorCores):
    """Of stage wmma: wmma_cpu.h has what wmma.cuh writes in PTX."""

    def __init__(self, folder: Path):
        super().__init__(folder)
        header = folder / "wmma.cuh"
        before, ptx, _ = header.read_text().partition("// In PTX.")
        assert ptx
        header.write_text(f'{before}#include "wmma_cpu.h"\n')


class HopperCores(TensorCores):
    """Of the stages for Hopper too: hopper_cpu.h has what hopper.cuh writes in PTX."""

    def __init__(self, folder: Path):
        super().__init__(folder)
        header = folder / "hopper.cuh"
        text = header.read_text().partition("// Of each N that a tile may have")[0]
        include = '#include "mma.cuh"'
        header.write_text(_without_asm(text).replace(include, f'{include}\n#include "hopper_cpu.h"'))


def _without_asm(text: str) -> str:
    """Without the functions that are, or call, what hopper_cpu.h has."""
    kept, at = [], 0
    begin = re.compile(r"^(template <[^\n]*>\s+)?__device__ __forceinline__ [^;{]*\{", re.MULTILINE)
    for found in begin.finditer(text):
        end, depth = found.end(), 1
        while depth:
            depth += {"{": 1, "}": -1}.get(text[end], 0)
            end += 1
        body = text[found.start() : end]
        if "asm" in body or "mbarrier_try_wait" in body:
            kept.append(text[at : found.start()])
            at = end
    return "".join([*kept, text[at:]])


def tensor_map(x: Tensor, rows: int, columns: int = 64) -> bytes:
    """In the place of ops/cuda/hopper.py's: cpu::Box of hopper_cpu.h."""
    made = struct.pack(
        "=Q7q2i", x.data_ptr(), *x.shape[::-1], *(x.stride(axis) for axis in (2, 1, 0)), rows, columns
    )
    return made.ljust(128, b"\0")


def inputs(
    shape: tuple[int, int, int],
    heads: tuple[int, int] = (1, 1),
    batch: int = 1,
    lengths: list[int] | None = None,
    cut: int = 0,
    magnitude: float = 1.0,
    dtype: torch.dtype = torch.float32,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """q, k (both of `magnitude`), v and dout for (Tq, Tk, D). Keys and values beyond `lengths` are NaN; each
    row begins `cut` elements into a longer one."""
    (tq, tk, head_dim), g = shape, torch.Generator().manual_seed(7)
    kinds = ((heads[0], tq, magnitude), (heads[1], tk, magnitude), (heads[1], tk, 1.0), (heads[0], tq, 1.0))
    made = [size * torch.randn(batch, h, t, head_dim + 2 * cut, generator=g) for h, t, size in kinds]
    q, k, v, dout = (x.to(dtype)[..., cut : cut + head_dim] for x in made)
    for b, length in enumerate(lengths or []):
        k[b, :, length:] = v[b, :, length:] = torch.nan
    return q, k, v, dout


def documents(*runs: int) -> Tensor:
    """Ids (1, T) of documents of these lengths, one after the other."""
    return torch.repeat_interleave(torch.arange(len(runs)), torch.tensor(runs)).int()[None]


def call_of(problem: Problem, settings: list[int]) -> Call:
    """As the launch functions take it."""
    q, o = problem.q, problem.options
    options = AttentionOptions(**{"scale": q.shape[3] ** -0.5} | o)
    return Call(q, problem.k, problem.v, options, dropout_seed(q.device), settings)


class Sanitizer:
    """Stands in for ops.nvrtc.kernel too: runs each launch by itself under the thread sanitizer, on zeros.

    `reports`: what it said, by the kernel's name; nothing where no race was found.
    """

    def __init__(self, compiler: Compiler):
        self.compiler, self.reports = compiler, {}
        self._programs: dict[str, Path] = {}

    def __call__(
        self, source: str, name: str, defines: Mapping[str, int | str], device: torch.device
    ) -> Sanitizer:
        flags = [f"-D{define}={value}" for define, value in defines.items()]
        key = _key(source, flags) + ".sanitized"
        if key not in self._programs:
            more = _LAUNCH + _MAIN.replace("POINTERS", str(len(_POINTERS.split())))
            self._programs[key] = self.compiler.compile(source, more, key, _SANITIZED, flags)
        self.name, self.program = name, self._programs[key]
        return self

    def launch(
        self, grid: int | tuple[int, int, int], threads: int, params: Params, shared_bytes: int = 0
    ) -> None:
        x, y, z = (grid, 1, 1) if isinstance(grid, int) else grid
        command = [str(self.program), *map(str, (x, y, z, threads, shared_bytes)), self.name]
        done = subprocess.run(command, input=bytes(params), capture_output=True, timeout=60)
        said = done.stderr.decode()
        assert done.returncode == 0 or "data race" in said, said
        self.reports[self.name] = self.reports.get(self.name, "") + said
