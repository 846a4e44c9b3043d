"""Launches the stages of the CUDA ladder without tensor cores: plain, naive, rowwise and tiled (csrc/ladder).

The functions are those of register_attention in ops/library.py, where the options are said.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from ops import nvrtc
from ops.cuda.call import PADDED_TO, Call, Params
from ops.library import empty_as, gradients

# Where kernels come from; tests put the CPU in its place.
_kernel: Callable[..., Any] = nvrtc.kernel
_THREADS = 256  # of a block of plain, naive and rowwise
_RANGE_THREADS = 512  # of document_ranges
_STRIP = 8  # queries of a thread of naive: 16 is 3% slower, 4 15%
_WARPS = 8  # of a block of naive and delta
# What a block may use on an H200, for tensors on a CPU.
_SHARED_BYTES = 232_448


@dataclass(frozen=True)
class Tile:
    """Of `tiled`: the warps of a block, the rows and columns of a thread's part of S (4 or 8), how many
    blocks are to share a multiprocessor, which bounds the registers, and how far S = Q K^T is unrolled."""

    warps: int
    rows: int
    cols: int
    blocks: int
    unroll: int = 1

    @property
    def defines(self) -> dict[str, int]:
        return {name.upper(): value for name, value in asdict(self).items()}

    def tokens(self, backward: bool) -> int:
        """Queries (backward: or keys) that a block owns. In the backward two warps share theirs."""
        return 4 * self.rows * self.warps // (2 if backward else 1)

    def shared_bytes(self, head_dim: int, backward: bool) -> int:
        padded, outer, inner = -(-head_dim // 32) * 32, self.tokens(backward), 8 * self.cols
        if backward:  # two tiles of each kind
            return 8 * ((outer + inner) * padded + outer * inner)
        return 4 * ((outer + 2 * inner) * padded + outer * inner)


# By the largest head dim: the first that fits into a block's shared memory. One H200, fp32, 32 heads,
# N = 4096, causal and full, ms: D = 64 forward 2.08, 3.58 (4 x 8 with two blocks 1.89, 3.84, with three
# 2.01, 3.76), backward 6.46, 12.8; D = 128 forward 4.01, 7.07 (not unrolled 4.15, 7.26; 8 warps 4.17, 6.94;
# 8 x 4: 4.93, 7.82), backward 14.7, 28.1 (8 x 4: 15.7, 27.5).
_FORWARD = {
    64: (Tile(4, 8, 8, 2), Tile(4, 8, 4, 2), Tile(2, 8, 4, 2)),
    128: (Tile(4, 4, 8, 2, 8), Tile(4, 4, 4, 2), Tile(2, 4, 4, 2)),
}
_BACKWARD = {
    64: (Tile(4, 8, 8, 2), Tile(4, 8, 4, 2)),
    128: (Tile(4, 4, 8, 2), Tile(2, 8, 4, 2), Tile(2, 4, 4, 2)),
}


def tile(q: Tensor, backward: bool) -> Tile:
    """The tile for q's head dim on q's device."""
    head_dim, max_bytes = q.shape[3], _SHARED_BYTES
    if q.is_cuda:
        max_bytes = torch.cuda.get_device_properties(q.device).shared_memory_per_block_optin
    table = _BACKWARD if backward else _FORWARD
    for largest, tiles in table.items():
        if head_dim <= largest:
            fitting = (each for each in tiles if each.shared_bytes(head_dim, backward) <= max_bytes)
            return next(fitting, tiles[-1])  # the launch of the last says what is missing
    raise ValueError(f"attention=cuda_tiled got head dim {head_dim}; it needs at most {max(table)}")


def _vector(*tensors: Tensor) -> dict[str, int]:
    """Whether all rows begin at multiples of four elements."""
    even = all(
        x.data_ptr() % (4 * x.element_size()) == 0
        and x.shape[3] % 4 == 0
        and all(n == 1 or stride % 4 == 0 for n, stride in zip(x.shape[:3], x.stride()[:3], strict=True))
        for x in tensors
    )
    return {"VECTOR": int(even)}


def _outputs(q: Tensor) -> tuple[Tensor, Tensor]:
    return empty_as(q), q.new_empty(q.shape[:3], dtype=torch.float32)


def plain_forward(q: Tensor, k: Tensor, v: Tensor, *of_call: Any) -> tuple[Tensor, Tensor]:
    """out and lse; options as in ops/library.py. Takes 4 B Hq Tq Tk bytes for the scores."""
    call = Call(q, k, v, *of_call)
    out, lse = _outputs(q)
    scratch = q.new_empty((*lse.shape, k.shape[2]), dtype=torch.float32)
    call.params.bind(out=out, lse=lse, scratch=scratch)
    _a_thread_each(call, {"scores": scratch, "softmax": lse, "output": out})
    return out, lse


def plain_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, *of_call: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """As tiled_backward. Takes 8 B Hq Tq Tk bytes, for P and dS."""
    *of_call, _ = of_call
    call = Call(q, k, v, *of_call)
    if dout.stride(3) != 1:
        dout = empty_as(out).copy_(dout)
    dq, dk, dv = gradients(q, k, v, call.options)
    statistics = delta(call, dout, out, lse, natural_log=True)
    scratch = q.new_empty((2, *lse.shape, k.shape[2]), dtype=torch.float32)
    call.params.bind(dq=dq, dk=dk, dv=dv, scratch=scratch)
    _a_thread_each(call, {"dscores": scratch[0], "dq": dq, "dkdv": dk})
    del statistics  # alive until the last launch
    return dq, dk, dv, q.new_empty(0)


def _a_thread_each(call: Call, steps: dict[str, Tensor]) -> None:
    """Launches kernels of csrc/ladder/plain.cu: a thread for each number of the tensor that a step makes."""
    defines = call.defines | {"VECTOR": 0}
    for step, made in steps.items():
        kernel = _kernel("ladder/plain.cu", f"tilegpt_plain_{step}", defines, made.device)
        kernel.launch(math.ceil(made.numel() / _THREADS), _THREADS, call.params)


def naive_forward(q: Tensor, k: Tensor, v: Tensor, *of_call: Any) -> tuple[Tensor, Tensor]:
    """out and lse; options as in ops/library.py. Takes 4 B Hq Tq Tk bytes for the scores."""
    call = Call(q, k, v, *of_call)
    (batch, heads, tq, head_dim), tk = q.shape, k.shape[2]
    out, lse = _outputs(q)
    scratch = q.new_empty((batch, heads, tq, tk), dtype=torch.float32)
    params = call.params.bind(out=out, lse=lse, scratch=scratch)
    params.n_tiles = math.ceil(tk / 32)
    defines = call.defines | _vector(q, k, v, out) | {"STRIP": _STRIP}
    at_once = _THREADS // math.ceil(head_dim / 4)
    grids = {
        "scores": batch * heads * math.ceil(tq / (_WARPS * _STRIP)) * params.n_tiles,
        "softmax": batch * heads * tq,
        "output": batch * heads * math.ceil(tq / (at_once * _STRIP)),
    }
    for step, grid in grids.items():
        _kernel("ladder/naive.cu", f"tilegpt_naive_{step}", defines, q.device).launch(grid, _THREADS, params)
    return out, lse


def rowwise_forward(q: Tensor, k: Tensor, v: Tensor, *of_call: Any) -> tuple[Tensor, Tensor]:
    """out and lse; options as in ops/library.py."""
    call = Call(q, k, v, *of_call)
    batch, heads, tq, _ = q.shape
    out, lse = _outputs(q)
    params = call.params.bind(out=out, lse=lse)
    kernel = _kernel(
        "ladder/rowwise.cu", "tilegpt_rowwise_forward", call.defines | _vector(q, k, v, out), q.device
    )
    kernel.launch(batch * heads * tq, _THREADS, params, shared_bytes=4 * k.shape[2])
    return out, lse


def tiled_forward(q: Tensor, k: Tensor, v: Tensor, *of_call: Any) -> tuple[Tensor, Tensor]:
    """out and lse; options as in ops/library.py."""
    call, choice = Call(q, k, v, *of_call), tile(q, backward=False)
    (batch, heads, tq, head_dim), queries = q.shape, choice.tokens(backward=False)
    out, lse = _outputs(q)
    ranges = document_ranges(call, queries)
    params = call.params.bind(out=out, lse=lse, document_bounds=ranges)
    blocks = call.in_order(math.ceil(tq / queries), batch * heads, k, times=heads // k.shape[1])
    defines = call.defines | _vector(q, k, v, out) | choice.defines
    kernel = _kernel("ladder/tiled.cu", "tilegpt_tiled_forward", defines, q.device)
    shared = choice.shared_bytes(head_dim, backward=False)
    kernel.launch(blocks, 32 * choice.warps, params, shared)
    return out, lse


def tiled_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, *of_call: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """dq, dk, dv in the layouts of q, k and v, and nothing for the bias: it has none."""
    *of_call, _ = of_call
    call, choice = Call(q, k, v, *of_call), tile(q, backward=True)
    (batch, heads, tq, head_dim), (kv_heads, tk) = q.shape, k.shape[1:3]
    if dout.stride(3) != 1:  # out.sum() sends one number, expanded
        dout = empty_as(out).copy_(dout)
    dq, dk, dv = gradients(q, k, v, call.options)
    statistics = delta(call, dout, out, lse, natural_log=True)
    params = call.params.bind(dq=dq, dk=dk, dv=dv)
    defines = call.defines | _vector(q, k, v, dout, dq, dk, dv) | choice.defines
    rows, shared = choice.tokens(backward=True), choice.shared_bytes(head_dim, backward=True)

    def launch(name: str, blocks: int, ranges: Tensor | None) -> None:
        params.bind(document_bounds=ranges)
        kernel = _kernel("ladder/tiled_backward.cu", name, defines, q.device)
        kernel.launch(blocks, 32 * choice.warps, params, shared)

    key_ranges = document_ranges(call, rows, transposed=True)
    blocks = call.in_order(math.ceil(tk / rows), batch * kv_heads, q, over=heads // kv_heads)
    launch("tilegpt_tiled_dkdv", blocks, key_ranges)
    query_ranges = document_ranges(call, rows)
    blocks = call.in_order(math.ceil(tq / rows), batch * heads, k, times=heads // kv_heads)
    launch("tilegpt_tiled_dq", blocks, query_ranges)
    del statistics, key_ranges, query_ranges  # alive until the last launch
    return dq, dk, dv, q.new_empty(0)


def delta(call: Call, dout: Tensor, out: Tensor, lse: Tensor, natural_log: bool) -> Tensor:
    """(padded_lse, delta), (2, B, Hq, padded Tq) fp32, bound in `call.params`: see csrc/lib/delta.cu."""
    batch, heads, tq, _ = out.shape
    padded = math.ceil(tq / PADDED_TO) * PADDED_TO
    statistics = out.new_empty((2, batch, heads, padded), dtype=torch.float32)
    params = call.params.bind(dout=dout, out=out, lse=lse, padded_lse=statistics[0], delta=statistics[1])
    params.padded_tq = padded
    defines = {name: call.defines[name] for name in ("PARAMS_BYTES", "ELEMENT", "HEAD_DIM")}
    defines |= {"NATURAL_LOG": int(natural_log), "VECTOR": 0}
    kernel = _kernel("lib/delta.cu", "tilegpt_delta", defines, out.device)
    kernel.launch(batch * heads * padded // _WARPS, 32 * _WARPS, params)
    return statistics


def document_ranges(call: Call, rows: int, transposed: bool = False) -> Tensor | None:
    """(B, tiles, 3): first and end of the keys of the documents of each tile of `rows` queries, and whether
    all is one document; `transposed`: of the queries of those of each tile of keys. None without any. See
    csrc/lib/document_ranges.cu."""
    own, other = call.tensors[4:6]
    if own is None:
        return None
    if transposed:
        own, other = other, own
    (batch, n_own), n_other = own.shape, other.shape[1]
    n_tiles = math.ceil(n_own / rows)
    ranges = torch.empty((batch, n_tiles, 3), dtype=torch.int32, device=own.device)
    params = Params(tq=n_own, tk=n_other, n_tiles=n_tiles)
    params.bind(q_document_ids=own, k_document_ids=other, document_bounds=ranges)
    defines = {"PARAMS_BYTES": call.defines["PARAMS_BYTES"], "ELEMENT": "float", "TILE": rows}
    kernel = _kernel("lib/document_ranges.cu", "tilegpt_document_ranges", defines, own.device)
    kernel.launch(n_tiles * batch, _RANGE_THREADS, params)
    return ranges
