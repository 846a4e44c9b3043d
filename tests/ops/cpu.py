"""The plain stages of ops/csrc on the CPU: g++ in the place of NVRTC (cpu.h), the same launches."""

from __future__ import annotations

import ctypes
import hashlib
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from ops.cuda.call import _POINTERS, Params

GXX = shutil.which("g++")
CSRC = Path(__file__).parents[2] / "ops" / "csrc"
HERE = Path(__file__).parent
# With FMA, as on the GPU; -Og, as most of the time goes into compiling.
_OPTIONS = ("-std=c++17", "-Og", "-pipe", "-mfma", "-ffp-contract=fast", "-w")
_LIBRARY = ("-fPIC", "-shared")
_SANITIZED = ("-fsanitize=thread", "-DTHREADS_OF_THE_SYSTEM", "-pthread")

_LAUNCH = """
static void (*of_the_grid)(Params);
static Params argument;
extern "C" void launch(void (*kernel)(Params), const Params *p, const unsigned *grid, unsigned threads,
                       unsigned shared_bytes) {
    of_the_grid = kernel, argument = *p;
    cpu::run_grid([] { of_the_grid(argument); }, grid, threads, shared_bytes);
}
"""


# A program that reads the Params, gives each pointer a megabyte of zeros and launches; 66 is a race.
_MAIN = """
#include <stdio.h>
int main(int, char **words) {
    Params p;
    if (fread(&p, sizeof p, 1, stdin) != 1) return 1;
    for (int i = 0; i < POINTERS; ++i)
        if (((void **)&p)[i]) ((void **)&p)[i] = calloc(1, 1 << 20);
    const unsigned grid[] = {(unsigned)atoi(words[1]), (unsigned)atoi(words[2]), (unsigned)atoi(words[3])};
    launch(KERNEL, &p, grid, atoi(words[4]), atoi(words[5]));
}
"""


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
    ) -> None:
        x, y, z = (grid, 1, 1) if isinstance(grid, int) else grid
        assert min(x, y, z) > 0 and max(y, z) <= 65_535 and threads % 32 == 0 and shared_bytes <= 232_448
        kernel = ctypes.cast(getattr(self.library, self.name), ctypes.c_void_p)
        size = (ctypes.c_uint * 3)(x, y, z)
        self.library.launch(kernel, ctypes.byref(params), size, threads, shared_bytes)


class Compiler:
    """Stands in for ops.nvrtc.kernel.

    Args:
        folder: for sources and libraries.
        changes: mistakes to plant, (old, new) by the name of a source or header.
    """

    def __init__(self, folder: Path, changes: Mapping[str, tuple[str, str]] | None = None):
        self.folder = folder
        self._libraries: dict[str, ctypes.CDLL] = {}
        for path in [*CSRC.glob("*.cu"), *CSRC.glob("*.cuh")]:
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
        flags = [f"-D{define}={value}" for define, value in defines.items()]
        key = hashlib.sha256(" ".join([source, *flags]).encode()).hexdigest()[:16]
        if key not in self._libraries:
            library = self.compile(source, _LAUNCH, key, [*_LIBRARY, *flags])
            self._libraries[key] = ctypes.CDLL(str(library))
        return Kernel(self._libraries[key], name)

    def compile(self, source: str, more: str, key: str, flags: list[str]) -> Path:
        """What g++ makes of `source` with `more` text after it."""
        unit, result = self.folder / f"{key}.cpp", self.folder / key
        unit.write_text(f'#include "cpu.h"\n#include "{source}"\n{more}')
        command = [GXX, *_OPTIONS, *flags, f"-I{HERE}", str(unit), "-o", str(result)]
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode == 0, f"{source}: {' '.join(command)}\n{done.stderr}"
        return result


class Sanitizer:
    """Stands in for ops.nvrtc.kernel too: runs each launch by itself under the thread sanitizer, on zeros.

    `reports`: what it said, by the kernel's name; nothing where no race was found.
    """

    def __init__(self, compiler: Compiler):
        self.compiler, self.reports = compiler, {}

    def __call__(
        self, source: str, name: str, defines: Mapping[str, int | str], device: torch.device
    ) -> Sanitizer:
        flags = [f"-D{define}={value}" for define, value in defines.items()]
        self.name = name
        more = _LAUNCH + _MAIN.replace("KERNEL", name).replace("POINTERS", str(len(_POINTERS.split())))
        self.program = self.compiler.compile(source, more, f"{name}.sanitized", [*_SANITIZED, *flags])
        return self

    def launch(
        self, grid: int | tuple[int, int, int], threads: int, params: Params, shared_bytes: int = 0
    ) -> None:
        x, y, z = (grid, 1, 1) if isinstance(grid, int) else grid
        command = [str(self.program), *map(str, (x, y, z, threads, shared_bytes))]
        done = subprocess.run(command, input=bytes(params), capture_output=True, timeout=60)
        said = done.stderr.decode()
        assert done.returncode == 0 or "data race" in said, said
        self.reports[self.name] = said
