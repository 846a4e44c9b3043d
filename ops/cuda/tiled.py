"""Launches stage `tiled` of the CUDA ladder: fp32 by terms of fp16 on tensor cores where the call is one for
them (split_fp16.py), everything else on FMA units (plain.py).

The functions are those of register_attention in ops/library.py, where the options are said; settings =
[deterministic, fma]: both ways are deterministic, and `fma` asks for FMA units.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from ops.cuda import plain, split_fp16, split_fp16_backward
from ops.cuda.call import Call
from ops.options import AttentionOptions


def _by_split_fp16(q: Tensor, settings: Sequence[int]) -> bool:
    return split_fp16.usable(q) and not any(settings[1:])


def tiled_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    options: AttentionOptions,
    seed: Tensor | None,
    settings: Sequence[int],
) -> tuple[Tensor, Tensor]:
    """out (B, Hq, Tq, D) in q's dtype and layout and lse (B, Hq, Tq) fp32."""
    if _by_split_fp16(q, settings):
        return split_fp16.forward(q, k, v, Call(q, k, v, options, seed, settings))
    return plain.tiled_forward(q, k, v, options, seed, settings)


def tiled_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    options: AttentionOptions,
    seed: Tensor | None,
    settings: Sequence[int],
    bias_grad: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """dq, dk, dv in the layouts of q, k and v, and nothing for the bias: it has none."""
    if _by_split_fp16(q, settings):
        call = Call(q, k, v, options, seed, settings)
        return *split_fp16_backward.backward(dout, q, k, v, out, lse, call), q.new_empty(0)
    return plain.tiled_backward(dout, q, k, v, out, lse, options, seed, settings, bias_grad)
