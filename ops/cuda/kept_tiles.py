"""Launches csrc/lib/kept_tiles.cu, which lists the tiles that a block mask keeps, for stages fa2 and fa3."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ops import nvrtc
from ops.cuda.call import Call, Params
from ops.options import MASK_BLOCK

_THREADS = 256
_SHARED_DEFINES = ("PARAMS_BYTES", "HAS_LEFT", "HAS_RIGHT", "DOCUMENT_IDS", "LENGTHS", "BLOCK_MASK")


def kept_tiles(
    call: Call,
    own: int,
    other: int,
    transposed: bool = False,
    counter: Tensor | None = None,
    early: bool = False,
) -> Tensor | None:
    """(B, Hq, tiles, 1 + most tiles of a list) int32: for each tile of `own` queries the tiles of `other`
    keys that it visits; `transposed`: for each tile of `own` keys the tiles of `other` queries. Strides are 0
    where all batch rows or heads share. None without a block mask. `call.params` has the documents' ranges of
    the same tiles. `counter` (1,) int32 becomes 0. `early`: beside the end of the kernel before, of which it
    reads nothing. See the kernel for the entries."""
    mask = call.block_mask
    if mask is None:
        return None
    n_own, n_other = call.params.tq, call.params.tk
    if transposed:
        n_own, n_other = n_other, n_own
    by_row = call.defines["LENGTHS"] or call.defines["DOCUMENT_IDS"]
    batch, heads = call.params.batch if by_row else mask.shape[0], mask.shape[1]
    shape = batch, heads, math.ceil(n_own / own), 1 + math.ceil(n_other / other)
    kept = torch.empty(shape, dtype=torch.int32, device=mask.device)
    params = Params.from_buffer_copy(call.params)
    params.heads, params.n_tiles = heads, shape[2]
    params.bind(block_mask=mask.expand(batch, -1, -1, -1), kept=kept, scratch=counter)
    defines = {name: call.defines[name] for name in _SHARED_DEFINES} | {"ELEMENT": "float"}
    defines |= {"OWN_TILE": own, "OTHER_TILE": other, "MASK_BLOCK": MASK_BLOCK, "TRANSPOSED": int(transposed)}
    kernel = nvrtc.kernel("lib/kept_tiles.cu", "tilegpt_kept_tiles", defines, mask.device)
    kernel.launch(math.prod(shape[:3]), _THREADS, params, early=early)
    return kept.expand(call.params.batch, call.params.heads, -1, -1)
