"""The softmax of rows in three passes and in two (ops/csrc/bench/softmax.cu), and the kernels' counters."""

from __future__ import annotations

import ctypes
import json
import sys

import torch
from torch import Tensor

from ops import nvrtc
from scripts.measure.studies import Point

KERNELS = ("three_passes", "two_passes")
THREADS = 256  # of a block, as softmax.cu has it


class Params(ctypes.Structure):
    """struct Params of csrc/bench/softmax.cu, field by field."""

    _fields_ = [("x", ctypes.c_void_p), ("y", ctypes.c_void_p), ("columns", ctypes.c_int)]


DEFINES = {"PARAMS_BYTES": ctypes.sizeof(Params)}


def scores(point: Point) -> Tensor:
    """(rows, columns) in fp32, as spread as scores are."""
    generator = torch.Generator("cuda").manual_seed(0)
    return 4 * torch.randn(point["rows"], point["seq_len"], device="cuda", generator=generator)


def softmax(name: str, x: Tensor, out: Tensor) -> None:
    """The softmax of each row of x (rows, columns; fp32, contiguous, columns a multiple of 4) into out."""
    if name == "torch":
        torch.softmax(x, -1, out=out)
        return
    kernel = nvrtc.kernel("bench/softmax.cu", f"tilegpt_softmax_{name}", DEFINES, x.device)
    kernel.launch(x.shape[0], THREADS, Params(x.data_ptr(), out.data_ptr(), x.shape[1] // 4))


def counted(points: list[Point]) -> list[dict[str, float]]:
    """What ncu counts of each point, all of them launched by one program. Raises NoCounters."""
    from scripts.measure.instruments.counters import NoCounters, count, gathered

    _, launches = count([sys.executable, "-m", __name__, json.dumps(points)])
    if len(launches) != len(points):
        raise NoCounters(f"ncu counted {len(launches)} launches of {len(points)}")
    return [gathered([counts]) for _, counts in launches]


def main() -> None:
    if not sys.argv[1:2] or sys.argv[1].startswith("-"):
        raise SystemExit("python scripts/study.py softmax_passes runs this under Nsight Compute.")
    for point in json.loads(sys.argv[1]):
        x = scores(point)
        softmax(point["implementation"], x, torch.empty_like(x))
        torch.cuda.synchronize()


if __name__ == "__main__":
    main()
