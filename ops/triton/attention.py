"""Launches the Triton kernels: the two functions behind torch.ops.tilegpt.triton (ops/library.py)."""

from __future__ import annotations

import functools
from typing import Any

import torch
import triton
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from ops.dropout import threshold
from ops.triton import configs
from ops.triton.backward import (
    _tilegpt_attention_backward_dkdv,
    _tilegpt_attention_backward_dq,
    _tilegpt_attention_delta,
)
from ops.triton.configs import DecodeTile, Tile
from ops.triton.decode import _tilegpt_decode_combine, _tilegpt_decode_split
from ops.triton.forward import _tilegpt_attention_forward, _tilegpt_segment_ranges
from ops.triton.interpret import INTERPRETED, mend_dot

if INTERPRETED:
    mend_dot()

# K and V of the heads that run side by side should stay in half of an H200's 50 MB of L2.
_L2_BYTES = 24 << 20
# Rows of lse and delta in the backward are padded to the largest tile.
_PAD = 128
# Queries of a group, as rows of one tile, up to which the keys are split instead of the queries.
_DECODE_ROWS = 64
# The combining kernel holds all parts of a row in registers.
_MOST_SPLITS = 128


def _arch(x: Tensor) -> tuple[int, int]:
    return torch.cuda.get_device_capability(x.device) if x.is_cuda else (9, 0)


def _block_d(head_dim: int) -> int:
    return max(16, triton.next_power_of_2(head_dim))


def _describable(*tensors: Tensor) -> bool:
    """TMA needs 16-byte aligned addresses and strides."""
    return all(
        x.data_ptr() % 16 == 0
        and all(
            n == 1 or stride * x.element_size() % 16 == 0
            for n, stride in zip(x.shape[:3], x.stride()[:3], strict=True)
        )
        for x in tensors
    )


def _described(x: Tensor, block: int, block_d: int) -> TensorDescriptor:
    # the stride of a dimension of one entry means nothing, but has to be a multiple of 16 bytes
    strides = [16 if n == 1 else s for n, s in zip(x.shape[:3], x.stride()[:3], strict=True)]
    return TensorDescriptor(x, list(x.shape), [*strides, 1], [1, 1, block, block_d])


def _grouped(k: Tensor, group: int) -> int:
    """How many query heads run side by side."""
    return max(1, _L2_BYTES // (2 * k.shape[2] * k.shape[3] * k.element_size())) * group


class _Call:
    """What forward and backward derive from the options of ops/library.py."""

    def __init__(self, q: Tensor, k: Tensor, *options: Any):
        (
            slopes,
            bias,
            q_segments,
            k_segments,
            self.kv_lengths,
            self.seed,
            scale,
            left,
            right,
            softcap,
            dropout_p,
            _,
        ) = options
        self.slopes = slopes
        self.bias = bias
        if bias is not None:
            self.bias = bias.expand(q.shape[0], q.shape[1], q.shape[2], k.shape[2])
        self.bias_strides = (0, 0, 0, 0) if bias is None else self.bias.stride()
        self.q_segments = None if q_segments is None else q_segments.contiguous()
        self.k_segments = None if k_segments is None else k_segments.contiguous()
        # beyond T a bound says nothing, and 32 bits hold what is left
        longest = q.shape[2] + k.shape[2]
        self.left, self.right = min(left, longest), min(right, longest)
        self.scale, self.softcap = scale, softcap
        self.keep_scale = 1.0 / (1.0 - dropout_p)
        self.threshold = threshold(dropout_p) if dropout_p > 0 else 0
        self.flags = {
            "D": q.shape[3],
            "BLOCK_D": _block_d(q.shape[3]),
            "GROUP": q.shape[1] // k.shape[1],
            "HAS_LEFT": left >= 0,
            "HAS_RIGHT": right >= 0,
            "SOFTCAP": softcap > 0,
            "DROPOUT": dropout_p > 0,
        }
        # the scale goes into the exponential's FMA; a maximum commutes with a positive scale only
        late = scale > 0 and softcap == 0 and slopes is None and bias is None
        self.precision = {"SCALE_LATE": late, "EXACT": q.dtype == torch.float32}
        self.masked = left >= 0 or right >= 0

    def tensors(self, ranges: Tensor | None) -> tuple[Any, ...]:
        return (self.slopes, self.bias, self.q_segments, self.k_segments, ranges, self.kv_lengths, self.seed)

    def numbers(self) -> tuple[Any, ...]:
        # an unsigned threshold of 2**31 and more would change the argument's type
        signed = self.threshold - (1 << 32) if self.threshold >= 1 << 31 else self.threshold
        return (self.left, self.right, self.scale, self.softcap, signed, self.keep_scale)

    def ranges(self, block: int, transposed: bool) -> Tensor | None:
        """Which keys each tile of queries can see by their documents, or with `transposed` the reverse."""
        if self.q_segments is None:
            return None
        own, other = (self.k_segments, self.q_segments) if transposed else (self.q_segments, self.k_segments)
        (batch, n_own), n_other = own.shape, other.shape[1]
        n_tiles = triton.cdiv(n_own, block)
        ranges = torch.empty((batch, n_tiles, 2), dtype=torch.int32, device=own.device)
        chunk = min(2048, triton.next_power_of_2(n_other))
        _tilegpt_segment_ranges[(n_tiles, batch)](own, other, ranges, n_own, n_other, n_tiles, block, chunk)
        return ranges


def forward(q: Tensor, k: Tensor, v: Tensor, *options: Any) -> tuple[Tensor, Tensor]:
    """out (B, Hq, Tq, D) in q's dtype and layout, lse (B, Hq, Tq) fp32; options as in ops/library.py."""
    call = _Call(q, k, *options)
    facts = _arch(q), 8 * q.element_size(), call.flags["BLOCK_D"]
    if q.shape[2] * call.flags["GROUP"] <= _DECODE_ROWS:
        return run_decode(q, k, v, call, configs.decode_tile(*facts))
    return run_forward(q, k, v, call, configs.forward_tile(*facts, call.masked))


def run_forward(q: Tensor, k: Tensor, v: Tensor, call: _Call, tile: Tile) -> tuple[Tensor, Tensor]:
    batch, heads, tq, _ = q.shape
    tk, block_d = k.shape[2], call.flags["BLOCK_D"]
    out = torch.empty_like(q)
    lse = q.new_empty((batch, heads, tq), dtype=torch.float32)
    # cp.async with zero-fill keeps out what is parked beyond a length; a descriptor knows only Tk
    desc = tile.desc and call.kv_lengths is None and _describable(q, k, v)
    even = tk % tile.n == 0 and call.kv_lengths is None
    n_tiles = triton.cdiv(tq, tile.m)
    args = (q, k, v)
    if desc:
        args = (
            _described(q, tile.m, block_d),
            _described(k, tile.n, block_d),
            _described(v, tile.n, block_d),
        )
    _tilegpt_attention_forward[(n_tiles * batch * heads,)](
        *args, out, lse, *call.tensors(call.ranges(tile.m, False)),
        *q.stride()[:3], *k.stride()[:3], *v.stride()[:3], *out.stride()[:3], *call.bias_strides,
        heads, tq, tk, n_tiles, batch * heads, _grouped(k, call.flags["GROUP"]), *call.numbers(),
        **call.flags, **call.precision, BLOCK_M=tile.m, BLOCK_N=tile.n,
        EVEN_K=even, DESC=desc, num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
    return out, lse


@functools.cache
def _sms(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 4


def _splits(programs: int, slots: int, n_tiles: int) -> int:
    """Into how many parts the keys are split: the fewest within 97% of the best use of whole waves of `slots`."""
    most = max(1, min(n_tiles, triton.cdiv(2 * slots, programs), _MOST_SPLITS))
    use = [programs * s / (triton.cdiv(programs * s, slots) * slots) for s in range(1, most + 1)]
    return next(s for s, u in enumerate(use, 1) if u >= 0.97 * max(use))


def run_decode(q: Tensor, k: Tensor, v: Tensor, call: _Call, tile: DecodeTile) -> tuple[Tensor, Tensor]:
    (batch, heads, tq, head_dim), (kv_heads, tk) = q.shape, k.shape[1:3]
    out = torch.empty_like(q)
    lse = q.new_empty((batch, heads, tq), dtype=torch.float32)
    slots = tile.programs * _sms(q.device)
    splits = _splits(batch * kv_heads, slots, triton.cdiv(tk, tile.n))
    desc = tile.desc and call.kv_lengths is None and _describable(k, v)
    block_d = call.flags["BLOCK_D"]
    args = (_described(k, tile.n, block_d), _described(v, tile.n, block_d)) if desc else (k, v)
    to, to_lse = out, lse
    if splits > 1:
        to = q.new_empty((splits, batch, heads, tq, head_dim), dtype=torch.float32)
        to_lse = q.new_empty((2, splits, batch, heads, tq), dtype=torch.float32)
    pdl = tile.pdl and splits > 1
    launch = {"launch_pdl": True} if pdl else {}
    _tilegpt_decode_split[(splits, batch * kv_heads)](
        q, *args, to, to_lse, *call.tensors(None),
        *q.stride()[:3], *k.stride()[:3], *v.stride()[:3], *out.stride()[:3], *call.bias_strides,
        kv_heads, tq, tk, splits, *call.numbers(),
        **call.flags, EXACT=call.precision["EXACT"], BLOCK_M=max(16, triton.next_power_of_2(tq * call.flags["GROUP"])), BLOCK_N=tile.n,
        SPLIT=splits > 1, DESC=desc, PDL=pdl, num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
    if splits > 1:
        n_rows = batch * heads * tq
        _tilegpt_decode_combine[(n_rows,)](
            to, to_lse, out, lse, *out.stride()[:3], heads, tq, splits, n_rows, call.keep_scale,
            head_dim, block_d, triton.next_power_of_2(splits), pdl, num_warps=4 if splits <= 32 else 8, **launch,
        )  # fmt: skip
    return out, lse


def backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, *options: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """dq, dk, dv in the layouts of q, k, v, and nothing for the bias (it has no gradient here)."""
    *options, bias_grad = options
    assert not bias_grad, "declared in the capabilities"
    call = _Call(q, k, *options)
    facts = _arch(q), 8 * q.element_size(), call.flags["BLOCK_D"], call.masked
    tiles = configs.dkdv_tile(*facts), configs.dq_tile(*facts)
    return *run_backward(dout, q, k, v, out, lse, call, *tiles), q.new_empty(0)


def run_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    call: _Call,
    dkdv: Tile,
    dq_tile: Tile,
) -> tuple[Tensor, Tensor, Tensor]:
    (batch, heads, tq, _), (kv_heads, tk) = q.shape, k.shape[1:3]
    block_d, group = call.flags["BLOCK_D"], call.flags["GROUP"]
    if dout.stride(3) != 1:  # out.sum() sends one number, expanded
        dout = torch.empty_like(out).copy_(dout)
    dq, dk, dv = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
    padded = triton.cdiv(tq, _PAD) * _PAD
    lse2, delta = q.new_empty((2, batch, heads, padded), dtype=torch.float32)
    delta_block = 64
    _tilegpt_attention_delta[(padded // delta_block, batch * heads)](
        out, dout, lse, delta, lse2, *out.stride()[:3], *dout.stride()[:3], heads, tq, padded,
        call.flags["D"], block_d, delta_block, call.precision["EXACT"],
    )  # fmt: skip
    describable = call.kv_lengths is None and _describable(q, k, v, dout)
    strides = (*q.stride()[:3], *k.stride()[:3], *v.stride()[:3], *dout.stride()[:3])

    def arguments(tile: Tile) -> tuple[Any, ...]:
        if not (tile.desc and describable):
            return q, k, v, dout, lse2, delta
        rows, cols = (lambda x: _described(x, tile.m, block_d)), (lambda x: _described(x, tile.n, block_d))
        return rows(q), cols(k), cols(v), rows(dout), lse2, delta

    tile, n_tiles = dkdv, triton.cdiv(tk, dkdv.n)
    _tilegpt_attention_backward_dkdv[(n_tiles * batch * kv_heads,)](
        *arguments(tile), dk, dv, *call.tensors(call.ranges(tile.n, True)),
        *strides, *dk.stride()[:3], *dv.stride()[:3], *call.bias_strides,
        kv_heads, tq, tk, padded, n_tiles, batch * kv_heads,
        max(1, _grouped(q, group) // (group * group)), *call.numbers(),
        **call.flags, **call.precision, BLOCK_M=tile.m, BLOCK_N=tile.n,
        DESC=tile.desc and describable, num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
    tile, n_tiles = dq_tile, triton.cdiv(tq, dq_tile.m)
    _tilegpt_attention_backward_dq[(n_tiles * batch * heads,)](
        *arguments(tile), dq, *call.tensors(call.ranges(tile.m, False)),
        *strides, *dq.stride()[:3], *call.bias_strides,
        heads, tq, tk, padded, n_tiles, batch * heads, _grouped(k, group), *call.numbers(),
        **call.flags, **call.precision, BLOCK_M=tile.m, BLOCK_N=tile.n,
        EVEN_K=tk % tile.n == 0 and call.kv_lengths is None, DESC=tile.desc and describable, num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
    return dq, dk, dv
