"""The plain stages of ops/csrc on the CPU: g++ in the place of NVRTC (cpu.h), the same launches."""

from __future__ import annotations

import ctypes
import hashlib
import shutil
import subprocess
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

GXX = shutil.which("g++")
CSRC = Path(__file__).parents[2] / "ops" / "csrc"
HERE = Path(__file__).parent
# With FMA, as on the GPU; -O1, as most of the time goes into compiling.
OPTIONS = ("-std=c++17", "-O1", "-mfma", "-ffp-contract=fast", "-w", "-fPIC", "-shared")
SANITIZED = ("-fsanitize=thread", "-g", "-DTHREADS_OF_THE_SYSTEM", "-pthread")

_LAUNCH = """
extern "C" void launch(void (*kernel)(Params), const Params *p, const unsigned *grid, unsigned threads,
                       unsigned shared_bytes) {
    cpu::run_grid([=] { kernel(*p); }, grid, threads, shared_bytes);
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
    """Stands in for ops.nvrtc.kernel. Libraries are kept in `folder`.

    Args:
        change: of the text of a source, by its name, before it is compiled.
    """

    def __init__(self, folder: Path, change: Callable[[str, str], str] | None = None):
        self.folder, self.change = folder, change or (lambda name, text: text)
        self._libraries: dict[Path, ctypes.CDLL] = {}

    def __call__(
        self, source: str, name: str, defines: Mapping[str, int | str], device: torch.device
    ) -> Kernel:
        assert device.type == "cpu"
        library = self.build(source, defines)
        if library not in self._libraries:
            self._libraries[library] = ctypes.CDLL(str(library))
        return Kernel(self._libraries[library], name)

    def build(
        self, source: str, defines: Mapping[str, int | str], options: tuple[str, ...] = OPTIONS
    ) -> Path:
        """The shared library of `source`."""
        text = f'#include "cpu.h"\n{self.change(source, (CSRC / source).read_text())}{_LAUNCH}'
        flags = [*options, *(f"-D{name}={value}" for name, value in defines.items())]
        key = hashlib.sha256("\n".join([text, *flags]).encode()).hexdigest()[:16]
        library = self.folder / f"{Path(source).stem}-{key}.so"
        if not library.exists():
            unit = library.with_suffix(".cpp")
            unit.write_text(text)
            includes = [f"-I{HERE}", f"-I{CSRC}"]
            command = [GXX, *flags, *includes, str(unit), "-o", str(library)]
            done = subprocess.run(command, capture_output=True, text=True)
            if done.returncode:
                raise RuntimeError(f"{source}: {' '.join(command)}\n{done.stderr}")
        return library
