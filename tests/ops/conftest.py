"""A tiny CUDA source with two kernels, and an empty folder for cubins."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from ops import nvrtc_cache, order
from ops.cuda import hopper_tiles

HEADER = "#define OFFSET 0.5f\n"
SOURCE = """
#include "tiny.cuh"
struct Params { float *out; float value; int n; };

extern "C" __global__ void __launch_bounds__(128) tilegpt_fill(const __grid_constant__ Params p) {
    int i = blockIdx.x * 128 + threadIdx.x;
    if (i < p.n) p.out[i] = p.value * FACTOR + OFFSET;
}

// Backwards through dynamic shared memory, and 512 static bytes.
extern "C" __global__ void __launch_bounds__(128) tilegpt_reverse(const __grid_constant__ Params p) {
    extern __shared__ float row[];
    __shared__ float first[128];
    for (int i = threadIdx.x; i < p.n; i += 128) row[i] = p.out[i];
    first[threadIdx.x] = p.value;
    __syncthreads();
    for (int i = threadIdx.x; i < p.n; i += 128) p.out[i] = row[p.n - 1 - i] * first[127 - threadIdx.x];
}
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache, and a memory that has not warned yet."""
    monkeypatch.setenv("TILEGPT_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("TILEGPT_CACHE_MIB", raising=False)
    nvrtc_cache._cannot_write.cache_clear()
    return tmp_path / "cache"


@pytest.fixture
def small_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    """An L2 for one head, and four blocks at a time on a CPU: six heads of three tiles leave two each for the
    end."""
    monkeypatch.setattr(order, "HEADS_IN_L2_BYTES", 1)
    monkeypatch.setattr(order, "_BLOCKS", 1)
    assert order.order(torch.empty(1, 6, 3, 16), 6, 3, growing=True) == (1, 2, 0)


@pytest.fixture
def many_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tiles of cuda_fa3's forward that calls with many keys take, also for few."""
    for limit in ("_FOUR_KEYS", "_LONG_KEYS", "_SHORT_KEYS"):
        monkeypatch.setattr(hopper_tiles, limit, 0)
    monkeypatch.setattr(hopper_tiles, "_FEW_KEYS", dict.fromkeys(hopper_tiles._FEW_KEYS, 0))


@pytest.fixture
def source(tmp_path: Path, folder: Path) -> Path:
    """tiny.cu, which takes FACTOR; tiny.cuh lies beside it."""
    pytest.importorskip("cuda.bindings", reason="cuda-bindings is not installed (pip install -e '.[cuda]')")
    (tmp_path / "tiny.cuh").write_text(HEADER)
    (tmp_path / "tiny.cu").write_text(SOURCE)
    return tmp_path / "tiny.cu"
