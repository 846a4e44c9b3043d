"""What the datasheets say of GPUs: what an estimate has to know of a machine that need not be at hand."""

from __future__ import annotations

from dataclasses import dataclass

from conf.values import UserError
from model.costs.flops import product


@dataclass(frozen=True)
class GpuSheet:
    """memory_gib as sold; bytes per second of DRAM; dense FLOP/s in fp32 (no tensor cores) and bf16; bytes of
    shared memory that a block may use; compute capability."""

    name: str
    memory_gib: float
    bandwidth: float
    fp32_flops: float
    bf16_flops: float
    shared_bytes: int
    arch: tuple[int, int]

    def flops(self, value_bytes: int) -> float:
        return self.bf16_flops if value_bytes == 2 else self.fp32_flops

    @property
    def usable_bytes(self) -> int:
        """92% of the memory: what is sold is not all given (ECC, the context: 22.0 of 24 GiB on an L4, 139.8
        of 141 on an H200), and blocks of odd sizes leave holes."""
        return int(0.92 * self.memory_gib * 2**30)

    @property
    def workspace_bytes(self) -> int:
        """cuBLAS's, one for each of the threads of forward and backward, in PyTorch's default sizes."""
        return 2 * (32 * 2**20 if self.arch[0] >= 9 else 8_519_680)


_SHARED = {
    (8, 0): 166_912,
    (8, 6): 101_376,
    (8, 9): 101_376,
    (9, 0): 232_448,
    (10, 0): 232_448,
    (12, 0): 101_376,
}
# name: GiB, GB/s, TFLOP/s in fp32 and in bf16 with fp32 accumulation, dense, compute capability
_SHEETS = {
    "b200": (180, 8000, 75, 2250, (10, 0)),
    "h200": (141, 4800, 67, 989, (9, 0)),
    "gh200": (96, 4000, 67, 989, (9, 0)),
    "gh200-144g": (144, 4900, 67, 989, (9, 0)),
    "h100": (80, 3350, 67, 989, (9, 0)),
    "h100-nvl": (94, 3900, 60, 835, (9, 0)),
    "h100-pcie": (80, 2000, 51, 756, (9, 0)),
    "a100": (80, 2039, 19.5, 312, (8, 0)),
    "a100-40gb": (40, 1555, 19.5, 312, (8, 0)),
    "a100-pcie": (80, 1935, 19.5, 312, (8, 0)),
    "a100-pcie-40gb": (40, 1555, 19.5, 312, (8, 0)),
    "a10g": (24, 600, 31.2, 70, (8, 6)),
    "l40s": (48, 864, 91.6, 362, (8, 9)),
    "l4": (24, 300, 30.3, 121, (8, 9)),
    "rtx-5090": (32, 1792, 104.8, 209.5, (12, 0)),
    "rtx-4090": (24, 1008, 82.6, 165.2, (8, 9)),
    "rtx-3090": (24, 936, 35.6, 71, (8, 6)),
}
GPUS = {
    name: GpuSheet(name, gib, gb * 1e9, fp32 * 1e12, bf16 * 1e12, _SHARED[arch], arch)
    for name, (gib, gb, fp32, bf16, arch) in _SHEETS.items()
}


def gpu_sheet(name: str) -> GpuSheet:
    """The sheet of a GPU by its name here, however written: h200, "RTX 4090", "NVIDIA H100 80GB HBM3". Raises
    UserError, with the list, for one that is not in it."""
    found = product(name, GPUS)
    if found is None:
        raise UserError(f"gpu={name}: its datasheet is not known here. Known are {', '.join(sorted(GPUS))}.")
    return GPUS[found]
