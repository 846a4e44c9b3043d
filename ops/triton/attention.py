"""Launches the Triton kernels: the two functions behind torch.ops.tilegpt.triton (ops/library.py)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from ops.dropout import dropout_threshold
from ops.library import empty_as, gradients, rows_aligned
from ops.options import MASK_BLOCK, AttentionOptions
from ops.order import multiprocessors, order
from ops.triton import configs
from ops.triton.autotune import fastest
from ops.triton.backward import _tilegpt_attention_backward_dkdv, _tilegpt_attention_delta
from ops.triton.backward_dq import _tilegpt_attention_backward_dq
from ops.triton.configs import DecodeTile, Tile
from ops.triton.decode import _tilegpt_decode_combine, _tilegpt_decode_split
from ops.triton.forward import (
    _tilegpt_attention_forward,
    _tilegpt_document_ranges,
    _tilegpt_kept_blocks,
)
from ops.triton.interpret import INTERPRETED, mend

if INTERPRETED:
    mend()

# Rows of lse and delta in the backward are padded to the largest tile.
_PAD = 128
# Queries of a group, as rows of one tile, up to which the keys are split instead of the queries.
_DECODE_ROWS = 64
# The combining kernel holds all parts of a row in registers.
_MOST_SPLITS = 128


def _check(*tensors: Tensor) -> None:
    """What the kernels take for granted. Inside torch.compile nobody before has looked at the strides."""
    for x in tensors:
        if x.dtype not in (torch.float16, torch.bfloat16, torch.float32):
            raise ValueError(f"attention=triton got {x.dtype}; it needs float16, bfloat16 or float32")
        if (x.stride(3) != 1 and x.shape[3] > 1) or _far_apart(x):
            raise ValueError(
                f"attention=triton got strides {x.stride()}; it needs a contiguous last dimension and tokens "
                "less than 2**24 elements apart: call .contiguous()"
            )


def _far_apart(x: Tensor) -> bool:
    """Whether a tile's rows of x (B, H, T, D), at most 128, are further apart than 32 bits count."""
    return x.stride(2) >= 2**24 and x.shape[2] > 1


def _describable(*tensors: Tensor) -> bool:
    """TMA needs 16-byte aligned addresses and strides."""
    return all(map(rows_aligned, tensors))


def _described(x: Tensor, block: int, block_d: int) -> TensorDescriptor:
    (batch, heads, tokens, head_dim), (b, h, t, _) = x.shape, x.stride()
    # the stride of a dimension of one entry means nothing, but has to be a multiple of 16 bytes
    strides = [b if batch > 1 else 16, h if heads > 1 else 16, t if tokens > 1 else 16, 1]
    return TensorDescriptor(x, [batch, heads, tokens, head_dim], strides, [1, 1, block, block_d])


def _kept_from(dropout_p: float) -> int:
    """The dropout mask's threshold as a signed number: 2**31 and more would change the argument's type, and
    compile anew."""
    kept_from = min(dropout_threshold(dropout_p), 2**32 - 1) if dropout_p > 0 else 0
    return kept_from - ((kept_from >> 31) << 32)


class _Call:
    """What forward and backward derive from normalised options; `settings` as of the op."""

    def __init__(
        self,
        q: Tensor,
        k: Tensor,
        options: AttentionOptions,
        seed: Tensor | None = None,
        settings: Sequence[int] = (),
    ):
        self.bias, self.seed, table = options.bias, seed, options.relative_bias
        (left, right), softcap = options.band, options.finite_softcap
        scale, dropout_p = options.scale, options.dropout_p
        if self.bias is not None:
            self.bias = self.bias.expand(*q.shape[:3], k.shape[2])
        # the kernels step through these by one
        stepped = options.alibi_slopes, options.kv_lengths, *(options.document_ids or (None, None))
        stepped = (None if x is None else x.contiguous() for x in stepped)
        self.slopes, self.kv_lengths, self.q_ids, self.k_ids = stepped
        self.relative_bias = None if table is None else table.float().contiguous()
        self.reach = 0 if table is None else table.shape[1] // 2
        self.bias_strides = (0, 0, 0, 0) if self.bias is None else self.bias.stride()
        self.block_mask = options.block_mask
        # beyond T a bound says nothing, and 32 bits hold what is left
        longest = q.shape[2] + k.shape[2]
        self.keep_scale = 1.0 / (1.0 - dropout_p)
        band = min(left, longest), min(right, longest)
        self.numbers = (*band, scale, softcap, _kept_from(dropout_p), self.keep_scale)
        self.heads_per_kv = q.shape[1] // k.shape[1]
        self.block_d = max(16, triton.next_power_of_2(q.shape[3]))
        self.exact = q.dtype == torch.float32
        self.flags = {
            "D": q.shape[3],
            "BLOCK_D": self.block_d,
            "HEADS_PER_KV": self.heads_per_kv,
            "HAS_LEFT": left >= 0,
            "HAS_RIGHT": right >= 0,
            "SOFTCAP": (softcap > 0) + (softcap > 64),
            "DROPOUT": dropout_p > 0,
            "EXACT": self.exact,
            "REACH": self.reach,
            "SLOPES_B": q.shape[1] if self.slopes is not None and self.slopes.ndim == 2 else 0,
        }
        self.biased = self.bias is not None or table is not None
        plain_scores = softcap == 0 and self.slopes is None and not self.biased
        # the scale goes into the exponential's FMA; a maximum commutes with a positive scale only
        self.scale_late = plain_scores and scale > 0
        self.masked = left >= 0 or right >= 0
        self.growing = right >= 0 > left
        self.has_options = not plain_scores or dropout_p > 0
        self.has_options |= self.q_ids is not None or self.kv_lengths is not None
        arch = torch.cuda.get_device_capability(q.device) if q.is_cuda else (9, 0)
        self.device_facts = arch, 8 * q.element_size(), self.block_d
        self.autotune = bool(settings and settings[0])
        self.shape = None
        if self.autotune:  # what a measured choice holds for
            described = self.kv_lengths is None and _describable(q, k)
            sparse = options.block_mask is not None
            self.shape = (q.device, q.dtype, described, sparse, *q.shape, *k.shape[1:3])

    def tile(self, kind: str, run: Any, bias_with_grad: str = "") -> Tile:
        """The table's tile for the kernel `kind` (configs.tile has `bias_with_grad`); with autotuning the
        fastest in `run(tile)`."""
        sparse = self.block_mask is not None
        tile = configs.tile(kind, *self.device_facts, self.masked, self.has_options, bias_with_grad, sparse)
        if not self.autotune or INTERPRETED:
            return tile
        key = (kind, bias_with_grad, self.shape, self.masked, self.has_options, *self.flags.values())
        return fastest(key, list(dict.fromkeys([tile, *configs.candidates(kind, *self.device_facts)])), run)

    def order(self, x: Tensor, n_heads: int, n_tiles: int, **how: int) -> tuple[int, int, int]:
        """`heads_in_l2`, `tail` and `lead` of a grid of n_tiles tiles of n_heads heads: see ops/order.py."""
        return order(x, n_heads, n_tiles, self.growing, block_mask=self.block_mask is not None, **how)

    def even(self, tk: int, block: int) -> bool:
        """Whether no tile of keys that a loop meets ends beyond Tk."""
        return self.kv_lengths is None and tk % (block if self.block_mask is None else MASK_BLOCK) == 0

    def tensors(self, ranges: Tensor | None, *blocks: Tensor | None) -> tuple[Any, ...]:
        biases = self.slopes, self.bias, self.relative_bias
        return *biases, self.q_ids, self.k_ids, ranges, *blocks, self.kv_lengths, self.seed

    def kept_blocks(self, tq: int, tk: int, transposed: bool = False) -> tuple[Tensor | None, list[int]]:
        """(B or 1, H or 1, rows, 1 + columns) int32: how many blocks of a row of the block mask are kept, and
        which; its first three strides, 0 where all batch rows or heads share. Rows are blocks of queries, or
        of keys where `transposed`. Blocks outside the band are left out."""
        mask = self.block_mask
        if mask is None:
            return None, [0, 0, 0]
        mask = mask.transpose(2, 3) if transposed else mask
        lengths = self.kv_lengths
        batch = mask.shape[0] if lengths is None else lengths.shape[0]
        mask = mask.expand(batch, *mask.shape[1:]).view(torch.uint8)
        _, heads, n_rows, n_columns = mask.shape
        kept = mask.new_empty((batch, heads, n_rows, 1 + n_columns), dtype=torch.int32)
        _tilegpt_kept_blocks[(batch * heads * n_rows,)](
            mask, kept, lengths, *mask.stride(), heads, n_rows, n_columns, tq, tk, *self.numbers[:2],
            transposed, self.flags["HAS_LEFT"], self.flags["HAS_RIGHT"], MASK_BLOCK,
            min(1024, triton.next_power_of_2(n_columns)),
        )  # fmt: skip
        strides = [
            stride if n > 1 else 0 for n, stride in zip(kept.shape[:2], kept.stride()[:2], strict=True)
        ]
        return kept, [*strides, kept.stride(2)]

    def ranges(self, block: int, transposed: bool = False) -> Tensor | None:
        """(B, tiles, 3): first and end of the keys of each query tile's documents, and whether all is one;
        `transposed`: of queries for key tiles."""
        if self.q_ids is None:
            return None
        own, other = self.q_ids, self.k_ids
        if transposed:
            own, other = other, own
        (batch, n_own), n_other = own.shape, other.shape[1]
        n_tiles = triton.cdiv(n_own, block)
        ranges = torch.empty((batch, n_tiles, 3), dtype=torch.int32, device=own.device)
        chunk = min(2048, triton.next_power_of_2(n_other))
        _tilegpt_document_ranges[(n_tiles * batch,)](
            own, other, ranges, n_own, n_other, n_tiles, block, chunk
        )
        return ranges


def _blocks_in_bias(options: AttentionOptions, q: Tensor, k: Tensor) -> AttentionOptions:
    """For few queries: the block mask as a bias of -inf, (1 or B, 1 or Hq, Tq, Tk)."""
    if options.block_mask is None:
        return options
    i, j = (torch.arange(x.shape[2], device=q.device) // MASK_BLOCK for x in (q, k))
    seen = options.block_mask[:, :, i][..., j]
    bias = q.new_zeros(()) if options.bias is None else options.bias
    return options._replace(bias=torch.where(seen, bias, -torch.inf), block_mask=None)


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    options: AttentionOptions,
    seed: Tensor | None,
    settings: Sequence[int],
) -> tuple[Tensor, Tensor]:
    """out (B, Hq, Tq, D) in q's dtype and layout, lse (B, Hq, Tq) fp32; options as in ops/library.py, and
    settings = [autotune]."""
    _check(q, k, v)
    few = q.shape[2] * q.shape[1] // k.shape[1] <= _DECODE_ROWS
    call = _Call(q, k, _blocks_in_bias(options, q, k) if few else options, seed, settings)
    if few:
        full = k.shape[0] * k.shape[1] >= 0.9 * multiprocessors(q.device)
        desc = call.kv_lengths is None and _describable(k, v)
        tile = configs.decode_tile(*call.device_facts, full, desc)
        return run_decode(q, k, v, call, tile)
    return run_forward(q, k, v, call, call.tile("forward", lambda tile: run_forward(q, k, v, call, tile)))


def run_forward(q: Tensor, k: Tensor, v: Tensor, call: _Call, tile: Tile) -> tuple[Tensor, Tensor]:
    batch, heads, tq, _ = q.shape
    tk = k.shape[2]
    out = empty_as(q)
    lse = q.new_empty((batch, heads, tq), dtype=torch.float32)
    # cp.async with zero-fill keeps out what is parked beyond a length; a descriptor knows only Tk
    desc = tile.desc and call.kv_lengths is None and _describable(q, k, v)
    args = (q, k, v)
    if desc:
        args = tuple(_described(x, n, call.block_d) for x, n in ((q, tile.m), (k, tile.n), (v, tile.n)))
    n_tiles = triton.cdiv(tq, tile.m)
    blocks, block_strides = call.kept_blocks(tq, tk)
    _tilegpt_attention_forward[(n_tiles * batch * heads,)](
        *args, out, lse, *call.tensors(call.ranges(tile.m), blocks),
        *q.stride()[:3], *k.stride()[:3], *v.stride()[:3], *out.stride()[:3], *call.bias_strides,
        *block_strides, heads, tq, tk, n_tiles, batch * heads,
        *call.order(k, batch * heads, n_tiles, times=call.heads_per_kv), *call.numbers,
        **call.flags, SCALE_LATE=call.scale_late, EVEN_K=call.even(tk, tile.n), MASK_BLOCK=MASK_BLOCK,
        DESC=desc, BLOCK_M=tile.m, BLOCK_N=tile.n, num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
    return out, lse


def key_splits(programs: int, slots: int, n_tiles: int) -> int:
    """Into how many parts the keys are split: the fewest within 97% of the best use of waves of `slots`."""
    most_splits = max(1, min(n_tiles, triton.cdiv(2 * slots, programs), _MOST_SPLITS))
    use = [programs * s / (triton.cdiv(programs * s, slots) * slots) for s in range(1, most_splits + 1)]
    return next(s for s, u in enumerate(use, 1) if u >= 0.97 * max(use))


def run_decode(q: Tensor, k: Tensor, v: Tensor, call: _Call, tile: DecodeTile) -> tuple[Tensor, Tensor]:
    (batch, heads, tq, head_dim), (kv_heads, tk) = q.shape, k.shape[1:3]
    out = empty_as(q)
    lse = q.new_empty((batch, heads, tq), dtype=torch.float32)
    splits = key_splits(batch * kv_heads, tile.programs * multiprocessors(q.device), triton.cdiv(tk, tile.n))
    args = tuple(_described(x, tile.n, call.block_d) for x in (k, v)) if tile.desc else (k, v)
    to, to_lse = out, lse
    if splits > 1:
        to = q.new_empty((splits, batch, heads, tq, head_dim), dtype=torch.float32)
        to_lse = q.new_empty((2, splits, batch, heads, tq), dtype=torch.float32)
    pdl = tile.pdl and splits > 1
    _tilegpt_decode_split[(splits * batch * kv_heads,)](
        q, *args, to, to_lse, *call.tensors(None),
        *q.stride()[:3], *k.stride()[:3], *v.stride()[:3], *out.stride()[:3], *call.bias_strides,
        kv_heads, tq, tk, splits, *call.numbers,
        **call.flags, SPLIT=splits > 1, DESC=tile.desc, PDL=pdl,
        BLOCK_M=max(16, triton.next_power_of_2(tq * call.heads_per_kv)), BLOCK_N=tile.n,
        num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
    if splits > 1:
        n_rows = batch * heads * tq
        _tilegpt_decode_combine[(n_rows,)](
            to, to_lse, out, lse, *out.stride()[:3], heads, tq, splits, n_rows, call.keep_scale,
            head_dim, call.block_d, triton.next_power_of_2(splits), pdl,
            num_warps=4 if splits <= 32 else 8, **({"launch_pdl": True} if pdl else {}),
        )  # fmt: skip
    return out, lse


def backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, *options: Any
) -> tuple[Tensor, ...]:
    """dq, dk, dv in the layouts of q, k, v, and the gradients of a bias and a relative bias."""
    *options, bias_grad = options
    _check(q, k, v)
    call = _Call(q, k, *options)
    if dout.stride(3) != 1 or _far_apart(dout):  # out.sum() sends one number, expanded
        dout = empty_as(out).copy_(dout)
    statistics = run_delta(dout, out, lse, call)
    problem = (dout, q, k, v, *statistics, call)
    dq, dk, dv = gradients(q, k, v, options[0])
    run_dkdv(*problem, dk, dv, call.tile("dkdv", lambda tile: run_dkdv(*problem, dk, dv, tile)))
    bias_with_grad = options[0].bias if bias_grad else None
    name = "relative_bias" if call.relative_bias is not None else "bias" if bias_grad else ""
    tile = call.tile("dq", lambda tile: run_dq(*problem, dq, tile, bias_with_grad), name)
    dbias, by_distance = run_dq(*problem, dq, tile, bias_with_grad)
    grads = dq, dk, dv, q.new_empty(0) if dbias is None else _bias_gradient(dbias, bias_with_grad)
    if by_distance is None:
        return grads
    return *grads, _table_gradient(by_distance, call.reach).to(options[0].relative_bias.dtype)


def run_delta(dout: Tensor, out: Tensor, lse: Tensor, call: _Call) -> tuple[Tensor, Tensor]:
    """(padded_lse, delta), (B, Hq, Tq padded) fp32 each: see the kernel."""
    batch, heads, tq, head_dim = out.shape
    padded = triton.cdiv(tq, _PAD) * _PAD
    padded_lse, delta = out.new_empty((2, batch, heads, padded), dtype=torch.float32)
    block = 64
    _tilegpt_attention_delta[(padded // block * batch * heads,)](
        out, dout, lse, delta, padded_lse, *out.stride()[:3], *dout.stride()[:3], heads, tq, padded,
        head_dim, call.block_d, block, call.exact or call.biased,
    )  # fmt: skip
    return padded_lse, delta


def _inputs(
    q: Tensor, k: Tensor, v: Tensor, dout: Tensor, call: _Call, tile: Tile
) -> tuple[bool, tuple[Any, ...]]:
    """(whether by descriptors, the kernel's q, k, v and dout)."""
    if not tile.desc or call.kv_lengths is not None or not _describable(q, k, v, dout):
        return False, (q, k, v, dout)
    blocks = (tile.m, tile.n, tile.n, tile.m)
    return True, tuple(_described(x, n, call.block_d) for x, n in zip((q, k, v, dout), blocks, strict=True))


def run_dkdv(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    padded_lse: Tensor,
    delta: Tensor,
    call: _Call,
    dk: Tensor,
    dv: Tensor,
    tile: Tile,
) -> None:
    """dk and dv, written."""
    tq, (batch, kv_heads, tk, _) = q.shape[2], k.shape
    desc, args = _inputs(q, k, v, dout, call, tile)
    n_tiles = triton.cdiv(tk, tile.n)
    blocks, block_strides = call.kept_blocks(tq, tk, transposed=True)
    _tilegpt_attention_backward_dkdv[(n_tiles * batch * kv_heads,)](
        *args, padded_lse, delta, dk, dv, *call.tensors(call.ranges(tile.n, transposed=True), blocks),
        *q.stride()[:3], *k.stride()[:3], *v.stride()[:3], *dout.stride()[:3], *dk.stride()[:3],
        *dv.stride()[:3], *call.bias_strides, *block_strides,
        kv_heads, tq, tk, padded_lse.shape[2], n_tiles, batch * kv_heads,
        *call.order(q, batch * kv_heads, n_tiles, over=call.heads_per_kv), *call.numbers,
        **call.flags, SCALE_LATE=call.scale_late, DESC=desc, MASK_BLOCK=MASK_BLOCK,
        BLOCK_M=tile.m, BLOCK_N=tile.n, num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip


def run_dq(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    padded_lse: Tensor,
    delta: Tensor,
    call: _Call,
    dq: Tensor,
    tile: Tile,
    bias_with_grad: Tensor | None = None,
) -> tuple[Tensor | None, Tensor | None]:
    """dq, written, and what adds up to the gradients of `bias_with_grad`, a bias, and of a relative bias: see
    the kernel."""
    (batch, heads, tq, _), tk = q.shape, k.shape[2]
    dbias = by_distance = None
    desc, args = _inputs(q, k, v, dout, call, tile)
    n_tiles = triton.cdiv(tq, tile.m)
    rows = cols = False
    if bias_with_grad is not None:
        _, _, rows, cols = (n > 1 for n in _four(bias_with_grad))
        whole = bias_with_grad.shape == (batch, heads, tq, tk)
        shape = batch, heads, tq if rows else n_tiles, tk if cols else 1
        dbias = padded_lse.new_zeros(shape, dtype=bias_with_grad.dtype if whole else torch.float32)
    if call.relative_bias is not None:
        shape = configs.by_distance_shape(tile, tq, call.reach)
        by_distance = padded_lse.new_zeros(batch, heads, *shape)
    blocks, block_strides = call.kept_blocks(tq, tk)
    _tilegpt_attention_backward_dq[(n_tiles * batch * heads,)](
        *args, padded_lse, delta, dq, dbias, by_distance, *call.tensors(call.ranges(tile.m), blocks),
        *q.stride()[:3], *k.stride()[:3], *v.stride()[:3], *dout.stride()[:3], *dq.stride()[:3],
        *call.bias_strides, *block_strides, heads, tq, tk, padded_lse.shape[2], n_tiles, batch * heads,
        *call.order(k, batch * heads, n_tiles, times=call.heads_per_kv), *call.numbers,
        **call.flags, SCALE_LATE=call.scale_late, EVEN_K=call.even(tk, tile.n), MASK_BLOCK=MASK_BLOCK,
        BIAS_ROWS=rows, BIAS_COLS=cols,
        DESC=desc, BLOCK_M=tile.m, BLOCK_N=tile.n, num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
    return dbias, by_distance


def _four(bias: Tensor) -> tuple[int, ...]:
    """The shape of a bias that broadcasts to (B, Hq, Tq, Tk), in four dimensions."""
    return (1,) * (4 - bias.ndim) + tuple(bias.shape)


def _bias_gradient(dbias: Tensor, bias: Tensor) -> Tensor:
    """dbias (B, H, Tq or tiles, Tk or 1) summed up to the shape of `bias`."""
    if _four(bias)[2] == 1:
        dbias = dbias.sum(2, keepdim=True)
    return torch.empty_like(bias).copy_(dbias.sum_to_size(_four(bias)).view(bias.shape))


def _table_gradient(by_distance: Tensor, reach: int) -> Tensor:
    """(H, 2 reach + 1) of (B, H, rows, 2 side + 1): summed up, what lies beyond `reach` as at `reach`."""
    sums = by_distance.sum((0, 2))
    beyond = sums.shape[1] // 2 - reach
    left, right = sums[:, : beyond + 1].sum(1), sums[:, -beyond - 1 :].sum(1)
    return torch.cat((left[:, None], sums[:, beyond + 1 : -beyond - 1], right[:, None]), 1)
