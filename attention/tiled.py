"""FlashAttention in plain PyTorch: the softmax computed online over tiles, the backward recomputed from lse.

Dao et al. 2022, FlashAttention (algorithms 1 and 4), with the loop order of FlashAttention-2 (Dao 2023): the
forward walks the keys for each tile of queries, the backward walks the queries for each tile of keys. What is
kept for the backward is q, k, v, out, lse and the dropout seed, so that memory grows as T and not as T^2.
Tiles that nobody sees (future, outside the window, other documents) are skipped, and only tiles on a boundary
are masked.

The document of a key is data, as is a block mask. On a CPU they are read, once per call; on a GPU reading
them would stop the queue, so that there all tiles that the band leaves are computed and masked.
`kv_lengths` is never read.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from attention.base import (
    CACHES,
    FEATURES,
    MATMUL_KERNELS,
    Attention,
    AttentionCall,
    AttentionOptions,
    CachedTensor,
    CacheView,
    Capabilities,
    Costs,
    Declaration,
)
from attention.declaration import lse_bytes, q_fp32_bytes
from attention.geometry import (
    bias_tile,
    block_mask_of,
    diagonal_sums,
    relative_bias_of,
    relative_positions,
    tile_kind,
    tiles,
    visible,
    zero_beyond_lengths,
)
from conf.values import UserError
from ops.dropout import keep_tile
from ops.library import empty_as, gradients, register_attention
from ops.options import MASK_BLOCK


def online_softmax_step(
    m: Tensor, total: Tensor, acc: Tensor, scores: Tensor, values: Tensor, factor: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """One more tile of keys: the running row maximum m, row sum and unnormalised P V of all keys seen so far.

    m, total (..., r, 1), starting at -inf and 0; acc (..., r, D), starting at 0; scores (..., r, c); values
    (..., c, D); factor (..., r, c) multiplies what reaches acc (dropout). Milakov and Gimelshein 2018,
    algorithm 3.
    """
    m_new = torch.maximum(m, scores.amax(dim=-1, keepdim=True))
    # A row that has seen no key yet has m = -inf; shifted by 0 it gives exp(-inf) = 0, and not NaN.
    shift = m_new.masked_fill(m_new == -torch.inf, 0)
    p = (scores - shift).exp_()
    rescale = (m - shift).exp_()
    total = total * rescale + p.sum(dim=-1, keepdim=True)
    acc = acc * rescale + (p if factor is None else p * factor) @ values
    return m_new, total, acc


@dataclass(frozen=True)
class _TiledCall:
    """What the loops over tiles share: which tiles are visible, and how their scores are computed.

    Matrices hold the queries of a key head's whole group, (B, Hkv, G * rows, ...), so that K and V are never
    repeated; masks and biases see them as (B, Hq, rows, ...).
    """

    q: Tensor
    k: Tensor | CachedTensor
    options: AttentionOptions
    document_ids: tuple[Tensor | None, Tensor | None]
    dropout_seed: Tensor | None
    tile_sizes: tuple[int, int]

    @classmethod
    def of(
        cls,
        q: Tensor,
        k: Tensor | CachedTensor,
        options: AttentionOptions,
        seed: Tensor | None,
        tile_sizes: list[int],
    ) -> _TiledCall:
        return cls(q, k, options, options.document_ids or (None, None), seed, tuple(tile_sizes))

    @property
    def dtype(self) -> torch.dtype:
        return torch.promote_types(self.q.dtype, torch.float32)

    def visible_tiles(self) -> list[tuple[range, range, bool]]:
        """(rows, cols, needs_mask) of each tile in which a query may see a key, row by row."""
        tq, tk = self.q.shape[2], self.k.shape[2]
        row_tiles, col_tiles = tiles(tq, self.tile_sizes[0]), tiles(tk, self.tile_sizes[1])
        shared, kept = self._shared_documents(row_tiles, col_tiles), self._kept_tiles(row_tiles, col_tiles)
        found = []
        for r, rows in enumerate(row_tiles):
            for c, cols in enumerate(col_tiles):
                if (shared is not None and not shared[r][c]) or (kept is not None and not kept[r][c]):
                    continue
                # The diagonal of shorter sequences is further left: what is right of it is so for them too.
                kind = tile_kind(rows, cols, tk - tq, self.options.band)
                if kind == "right_of_band" or (kind == "left_of_band" and self.options.kv_lengths is None):
                    continue
                options = self.options
                data_masks = options.kv_lengths is not None or options.block_mask is not None
                data_masks |= self.document_ids[0] is not None
                found.append((rows, cols, kind != "full" or data_masks))
        return found

    def _shared_documents(self, row_tiles: list[range], col_tiles: list[range]) -> list[list[bool]] | None:
        """For each tile, whether the id ranges of its queries and keys overlap in any sequence."""
        if self.document_ids[0] is None or self.q.device.type != "cpu":
            return None
        (q_low, q_high), (k_low, k_high) = (
            [
                torch.stack([reduce(ids[:, t.start : t.stop], 1) for t in cut])
                for reduce in (torch.amin, torch.amax)
            ]
            for ids, cut in ((self.document_ids[0], row_tiles), (self.document_ids[1], col_tiles))
        )  # each (tiles, B)
        overlap = (q_low[:, None] <= k_high[None]) & (
            k_low[None] <= q_high[:, None]
        )  # (row tiles, col tiles, B)
        return overlap.any(dim=-1).tolist()

    def _kept_tiles(self, row_tiles: list[range], col_tiles: list[range]) -> list[list[bool]] | None:
        """For each tile, whether the block mask keeps some of it in any sequence and head."""
        mask = self.options.block_mask
        if mask is None or self.q.device.type != "cpu":
            return None
        some = mask.flatten(0, 1).any(dim=0)
        rows, cols = (
            [slice(t.start // MASK_BLOCK, (t.stop - 1) // MASK_BLOCK + 1) for t in cut]
            for cut in (row_tiles, col_tiles)
        )
        return [[bool(some[r, c].any()) for c in cols] for r in rows]

    def rows_of(self, x: Tensor, rows: range) -> Tensor:
        """The rows of q, out or lse: (B, Hq, Tq, n) -> (B, Hkv, G * rows, n), in the accumulation's dtype."""
        x = x[:, :, rows.start : rows.stop].to(self.dtype)
        return x.reshape(x.shape[0], self.k.shape[1], -1, x.shape[-1])

    def cols_of(self, x: Tensor | CachedTensor, cols: range) -> Tensor:
        """The cols of k or v: (B, Hkv, Tk, D) -> (B, Hkv, cols, D)."""
        cached = isinstance(x, CachedTensor)
        x = x.tokens(cols.start, cols.stop) if cached else x[:, :, cols.start : cols.stop]
        x = x.to(self.dtype)
        return (
            x
            if self.options.kv_lengths is None
            else zero_beyond_lengths(x, self.options.kv_lengths - cols.start)
        )

    def per_head(self, x: Tensor, rows: range) -> Tensor:
        """(B, Hkv, G * rows, n) -> (B, Hq, rows, n)"""
        return x.view(x.shape[0], self.q.shape[1], len(rows), x.shape[-1])

    def scores(
        self, qs: Tensor, ks: Tensor, rows: range, cols: range, needs_mask: bool
    ) -> tuple[Tensor, Tensor | None]:
        """(scores (B, Hkv, G * rows, cols), tanh of the softcap or None); `qs` carries the scale already."""
        if len(rows) == 1 < qs.shape[2] and qs.is_cuda and self.q.dtype == torch.float32:
            # A row at a time: cuBLAS multiplies one row more exactly than the two of a group, whose error was
            # 1.09 of what scripts/accuracy.py allows (64 queries of 239 keys, H100). This copies K for each
            # row; on a CPU it took 13 times as long.
            s = (qs.unsqueeze(-2) @ ks.unsqueeze(2).transpose(-2, -1)).squeeze(-2)
        else:
            s = qs @ ks.transpose(-2, -1)
        tanh_score = None
        if self.options.softcap is not None:
            tanh_score = torch.tanh(s / self.options.softcap)
            s = self.options.softcap * tanh_score
        biases = self.options.alibi_slopes, self.options.bias, self.options.relative_bias
        if not needs_mask and all(bias is None for bias in biases):
            return s, tanh_score
        head_scores = self.per_head(s, rows)
        i, j, rel = self.positions(rows, cols)
        if self.options.alibi_slopes is not None:
            slopes = self.options.alibi_slopes.to(s.dtype).view(-1, head_scores.shape[1], 1, 1)
            head_scores = head_scores - slopes * rel.abs()
        if self.options.bias is not None:
            head_scores = head_scores + bias_tile(self.options.bias, rows, cols).to(s.dtype)
        if self.options.relative_bias is not None:
            head_scores = head_scores + relative_bias_of(self.options.relative_bias, rel, s.dtype)
        if needs_mask:
            document_ids = None
            if self.document_ids[0] is not None:
                document_ids = (
                    self.document_ids[0][:, rows.start : rows.stop],
                    self.document_ids[1][:, cols.start : cols.stop],
                )
            blocks = block_mask_of(self.options.block_mask, i, j)
            seen = visible(rel, j, self.options.band, self.options.kv_lengths, document_ids, blocks)
            head_scores = head_scores.masked_fill(~seen, -torch.inf)
        return head_scores.reshape(s.shape), tanh_score

    def positions(self, rows: range, cols: range) -> tuple[Tensor, Tensor, Tensor]:
        """Queries i and keys j of a tile (1-d), and rel, their distances (B or 1, 1, rows, cols)."""
        i, j = (torch.arange(n.start, n.stop, device=self.q.device) for n in (rows, cols))
        tq, tk = self.q.shape[2], self.k.shape[2]
        return i, j, relative_positions(i, j, tq, tk, self.options.kv_lengths)

    def dropout_factor(self, rows: range, cols: range) -> Tensor | None:
        """0 or 1 / (1 - p) for each probability of the tile, (B, Hkv, G * rows, cols)."""
        if self.options.dropout_p == 0:
            return None
        batch, heads = self.q.shape[:2]
        keep = keep_tile(self.dropout_seed, batch, heads, rows, cols, self.options.dropout_p)
        return keep.view(batch, self.k.shape[1], -1, len(cols)).to(self.dtype) / (1 - self.options.dropout_p)


def tiled_forward(
    q: Tensor, k: Tensor | CachedTensor, v: Tensor | CachedTensor, *op_args
) -> tuple[Tensor, Tensor]:
    """out (B, Hq, Tq, D), lse (B, Hq, Tq); `op_args` as in ops/library.py, settings = [block_q, block_k]."""
    call = _TiledCall.of(q, k, *op_args)
    batch, heads, tq, _ = q.shape
    out, lse = empty_as(q).zero_(), q.new_full((batch, heads, tq), -torch.inf, dtype=call.dtype)
    by_rows: dict[range, list[tuple[range, bool]]] = {}
    for rows, cols, needs_mask in call.visible_tiles():
        by_rows.setdefault(rows, []).append((cols, needs_mask))
    with torch.autocast(q.device.type, enabled=False):
        for rows, key_tiles in by_rows.items():
            qs = call.rows_of(q, rows) * call.options.scale
            acc = torch.zeros_like(qs)
            total = qs.new_zeros((*qs.shape[:3], 1))
            m = torch.full_like(total, -torch.inf)
            for cols, needs_mask in key_tiles:
                scores, _ = call.scores(qs, call.cols_of(k, cols), rows, cols, needs_mask)
                factor = call.dropout_factor(rows, cols)
                m, total, acc = online_softmax_step(m, total, acc, scores, call.cols_of(v, cols), factor)
            at = slice(rows.start, rows.stop)
            out[:, :, at] = call.per_head(acc / total.masked_fill(total == 0, 1), rows)
            lse[:, :, at] = call.per_head(m + total.log(), rows).squeeze(-1)
    return out, lse


def tiled_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, *op_args
) -> tuple[Tensor, ...]:
    """dq, dk, dv, dbias, and drelative_bias where there is one: P from lse, dS = P * (dP - rowsum(dO * O))
    (FlashAttention, section B.2)."""
    *op_args, bias_grad = op_args
    call = _TiledCall.of(q, k, *op_args)
    by_cols: dict[range, list[tuple[range, bool]]] = {}
    for rows, cols, needs_mask in call.visible_tiles():
        by_cols.setdefault(cols, []).append((rows, needs_mask))
    dq, dk, dv = (grad.zero_() for grad in gradients(q, k, v, call.options))
    if call.dtype != q.dtype:  # what is summed up
        dq = dq.to(call.dtype)
    bias, relative_bias = call.options.bias, call.options.relative_bias
    dbias = torch.zeros_like(bias, dtype=call.dtype) if bias_grad else None
    drelative = None
    if relative_bias is not None:
        drelative = relative_bias.new_zeros(relative_bias.shape, dtype=call.dtype)
    # A row without keys has lse = -inf and only scores of -inf: exp(-inf - 0) = 0.
    lse = lse.masked_fill(lse == -torch.inf, 0).unsqueeze(-1)
    delta = (dout.to(call.dtype) * out).sum(dim=-1, keepdim=True)  # (B, Hq, Tq, 1)
    with torch.autocast(q.device.type, enabled=False):
        for cols, query_tiles in by_cols.items():
            ks, vs = call.cols_of(k, cols), call.cols_of(v, cols)
            dks, dvs = torch.zeros_like(ks), torch.zeros_like(vs)
            for rows, needs_mask in query_tiles:
                qs, do = call.rows_of(q, rows) * call.options.scale, call.rows_of(dout, rows)
                scores, tanh_score = call.scores(qs, ks, rows, cols, needs_mask)
                p = (scores - call.rows_of(lse, rows)).exp_()
                dp = do @ vs.transpose(-2, -1)
                factor = call.dropout_factor(rows, cols)
                if factor is not None:
                    dp = dp * factor
                dvs += (p if factor is None else p * factor).transpose(-2, -1) @ do
                ds = p * (dp - call.rows_of(delta, rows))
                if bias_grad:
                    part = bias_tile(dbias, rows, cols)
                    part += call.per_head(ds, rows).sum_to_size(part.shape)
                if drelative is not None:
                    first = call.positions(rows, cols)[2][:, 0, -1:, 0]
                    drelative += diagonal_sums(call.per_head(ds, rows), first, drelative.shape[1] // 2)
                if tanh_score is not None:
                    ds = ds * (1 - tanh_score.square())
                dks += ds.transpose(-2, -1) @ qs
                dq[:, :, rows.start : rows.stop] += call.per_head(ds @ ks, rows) * call.options.scale
            dk[:, :, cols.start : cols.stop] = dks
            dv[:, :, cols.start : cols.stop] = dvs
    dbias = dbias.to(bias.dtype) if bias_grad else q.new_empty(0)
    grads = dq.to(q.dtype), dk, dv, dbias
    return grads if drelative is None else (*grads, drelative.to(relative_bias.dtype))


_tiled = register_attention("tiled", tiled_forward, tiled_backward)


class TiledAttention(Attention):
    """FlashAttention in plain PyTorch: every option, memory O(T), on CPU and CUDA.

    Args:
        block_q, block_k: queries and keys in a tile. 128 x 128 on one CPU thread, forward and backward: 31 ms
            (B=8 H=4 T=256 D=64), 84 ms (B=2 T=1024), 622 ms (B=1 T=4096; naive 6612 ms, SDPA 418 ms). Smaller
            tiles lose at 4096 (64 x 64: 1386 ms), larger ones at 256 (256 x 256: 46 ms).
    """

    capabilities: ClassVar[Capabilities] = Capabilities(
        features=frozenset(FEATURES), deterministic=True, caches=frozenset(CACHES)
    )

    declaration: ClassVar[Declaration] = Declaration(kernels=MATMUL_KERNELS, launches_each_tile=True)

    def __init__(self, block_q: int = 128, block_k: int = 128, name: str = "tiled"):
        super().__init__(name)
        if block_q < 1 or block_k < 1:
            raise UserError(
                f"block_q = {block_q}, block_k = {block_k}; tiles need at least one query and one key"
            )
        self.block_q, self.block_k = block_q, block_k

    def costs(self, call: AttentionCall, compiled: bool = False) -> Costs:
        """lse; in the backward dq in fp32 where q is not, and the tiles: five of scores and six of rows. With
        dropout eight of scores, as drawing its mask takes numbers of 64 bits."""
        rows, cols = min(call.tq, self.block_q), min(call.tk, self.block_k)
        scores, of_rows = rows * cols, max(rows, cols) * call.head_dim
        tiles = 8 if "dropout" in call.features else 5
        tile_bytes = 4 * call.batch * call.heads * (tiles * scores + 6 * of_rows)
        return Costs(lse_bytes(call), tile_bytes + (q_fp32_bytes(call) if call.dtype.itemsize == 2 else 0))

    def forward_tile(self, call: AttentionCall) -> tuple[int, int]:
        return self.block_q, self.block_k

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, options: AttentionOptions, dropout_seed: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        return _tiled(q, k, v, options, dropout_seed, [self.block_q, self.block_k])

    def attend_cached(self, q: Tensor, view: CacheView, options: AttentionOptions) -> tuple[Tensor, Tensor]:
        options = options._replace(kv_lengths=view.lengths)
        return tiled_forward(q, view.k, view.v, options, None, [self.block_q, self.block_k])
