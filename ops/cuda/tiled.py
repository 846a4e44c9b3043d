"""Launches stage `tiled` of the CUDA ladder: fp32 by terms of fp16 on tensor cores where the call is one for
them (split_fp16.py), everything else on FMA units (plain.py).

The functions are those of register_attention in ops/library.py, where the options are said; tuning =
[deterministic, fma]: both ways are deterministic, and `fma` asks for FMA units.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from ops.cuda import plain, split_fp16, split_fp16_backward
from ops.cuda.call import Call


def _by_split_fp16(q: Tensor, tuning: Sequence[int]) -> bool:
    return split_fp16.usable(q) and not any(tuning[1:])


def tiled_forward(q: Tensor, k: Tensor, v: Tensor, *options: Any) -> tuple[Tensor, Tensor]:
    """out (B, Hq, Tq, D) in q's dtype and layout and lse (B, Hq, Tq) fp32."""
    if _by_split_fp16(q, options[-1]):
        return split_fp16.forward(q, k, v, Call(q, k, v, *options))
    return plain.tiled_forward(q, k, v, *options)


def tiled_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, *options: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """dq, dk, dv in the layouts of q, k and v, and nothing for the bias: it has none."""
    *of_call, _ = options
    if _by_split_fp16(q, of_call[-1]):
        gradients = split_fp16_backward.backward(dout, q, k, v, out, lse, Call(q, k, v, *of_call))
        return *gradients, q.new_empty(0)
    return plain.tiled_backward(dout, q, k, v, out, lse, *options)
