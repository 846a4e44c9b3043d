"""Launches the backward of stage `tiled` on tensor cores: csrc/fp32/split_fp16_backward.cu."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass

from torch import Tensor

from ops.cuda import plain
from ops.cuda.call import Call, padded
from ops.cuda.split_fp16 import TERMS, even, first_that_fits, largest, shared_bytes_of, split
from ops.library import empty_as, gradients


@dataclass(frozen=True)
class Tile:
    """Of one kernel: how many times 16 rows a pair of warps owns, the queries or keys of a tile and those
    multiplied at once (of dq 32), the warps of a block, blocks that are to share a multiprocessor, which
    bounds the registers, stages of tiles, and terms of a warp's own rows that stay in registers."""

    row_tiles: int
    other_tile: int
    at_once: int
    warps: int
    blocks: int = 1
    stages: int = 2
    own_terms: int = TERMS

    @property
    def own_tile(self) -> int:
        """Queries or keys that a block owns."""
        return 8 * self.warps * self.row_tiles

    @property
    def defines(self) -> dict[str, int]:
        return {name.upper(): int(value) for name, value in asdict(self).items()}

    def shared_bytes(self, head_dim: int) -> int:
        """What two tensors have of own rows outside of registers, what pairs of warps trade, and per stage a
        tile of two tensors and two numbers a row."""
        row = 2 * padded(head_dim)
        rest = 2 * (TERMS - self.own_terms) * self.own_tile * row
        traded = 4 * self.own_tile * self.other_tile
        return rest + traded + self.stages * self.other_tile * (2 * TERMS * row + 8)


_SMALL = Tile(1, 32, 32, 4, blocks=2)
_SMALLER = Tile(1, 32, 32, 4, blocks=2, stages=1)
# By the padded head dim: the first for whose blocks there is room; those behind it were not timed. One H200,
# 32 heads, N = 4096, causal and full, TFLOP/s: dkdv at D = 64 113, 116 (8 warps 110, 117; one row tile and
# three blocks 114, 113), at 128 116, 112 (both terms in registers 113, 107; 16 at once 110, 106; 8 warps
# 109, 107), at 96 118, 118 (one row tile 102, 102); dq at D = 64 111, 106 (tiles of 64 108, 112; 8 warps 103,
# 108), at 128 109, 107 (8 warps 93, 95; one stage 102, 99), at 96 103, 107 (one row tile 91, 89)
# with no term in registers, and with one as here 2% more. That the second warp of a pair multiplies dP for
# all of a tile before it waits for P was slower.
_DKDV = {
    32: (Tile(2, 32, 32, 4, blocks=3, own_terms=1), Tile(2, 32, 32, 4, blocks=3)),
    64: (Tile(2, 32, 32, 4, blocks=2, own_terms=1), _SMALL),
    96: (Tile(2, 32, 32, 4, blocks=2, own_terms=0), _SMALL, _SMALLER),
    128: (
        Tile(1, 32, 32, 4, blocks=2, own_terms=1),
        Tile(1, 32, 16, 4, blocks=2),
        Tile(1, 32, 16, 4, blocks=2, stages=1),
    ),
}
_DQ = {
    32: (Tile(2, 32, 32, 4, blocks=3),),
    64: (Tile(2, 32, 32, 4, blocks=2, own_terms=1), _SMALL),
    96: (Tile(2, 32, 32, 4, blocks=2, own_terms=1), _SMALL, _SMALLER),
    128: (Tile(1, 32, 32, 4, blocks=2, own_terms=1), Tile(1, 32, 32, 4, blocks=2, stages=1, own_terms=1)),
}


def backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, call: Call
) -> tuple[Tensor, Tensor, Tensor]:
    """dq, dk, dv in the layouts of q, k and v, all fp32."""
    head_dim, room = q.shape[3], shared_bytes_of(q.device)
    dkdv_tile, dq_tile = (first_that_fits(table[padded(head_dim)], head_dim, room) for table in (_DKDV, _DQ))
    return run_backward(dout, q, k, v, out, lse, call, dkdv_tile, dq_tile)


def run_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    call: Call,
    dkdv_tile: Tile,
    dq_tile: Tile,
) -> tuple[Tensor, Tensor, Tensor]:
    """As `backward`, in these tiles, of dK and dV and of dQ."""
    (batch, heads, tq, head_dim), (kv_heads, tk) = q.shape, k.shape[1:3]
    if dout.stride(3) != 1:  # out.sum() sends one number, expanded
        dout = empty_as(out).copy_(dout)
    dq, dk, dv = gradients(q, k, v, call.options)
    statistics = plain.delta(call, dout, out, lse, natural_log=True)
    found = largest(call, q, k, v, dout)
    terms = {name: split(name, x, found, call) for name, x in {"q": q, "k": k, "v": v, "dout": dout}.items()}
    params = call.params.bind(**terms, dq=dq, dk=dk, dv=dv)
    defines = call.defines | {"ALIGNED": 1, "SCALE_BEFORE_MAX": 0, "EVEN": int(even(dq, dk, dv))}

    def launch(source: str, name: str, blocks: int, tile: Tile, ranges: Tensor | None) -> None:
        params.bind(document_bounds=ranges)
        kernel = plain._kernel(source, name, defines | tile.defines, q.device)
        kernel.launch(blocks, 32 * tile.warps, params, tile.shared_bytes(head_dim))

    key_ranges = plain.document_ranges(call, dkdv_tile.own_tile, transposed=True)
    n_tiles = math.ceil(tk / dkdv_tile.own_tile)
    blocks = call.in_order(n_tiles, batch * kv_heads, terms["q"], over=heads // kv_heads)
    launch("fp32/split_fp16_backward.cu", "tilegpt_split_fp16_dkdv", blocks, dkdv_tile, key_ranges)
    query_ranges = plain.document_ranges(call, dq_tile.own_tile)
    n_tiles = math.ceil(tq / dq_tile.own_tile)
    blocks = call.in_order(n_tiles, batch * heads, terms["k"], times=heads // kv_heads)
    launch("fp32/split_fp16_backward_dq.cu", "tilegpt_split_fp16_dq", blocks, dq_tile, query_ranges)
    del statistics, found, terms, key_ranges, query_ranges  # alive until the last launch
    return dq, dk, dv
