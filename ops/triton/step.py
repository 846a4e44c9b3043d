"""Launches the kernels of a decoding step: one token a row through norms, products, attention and the choice.

Everything writes into buffers that the caller keeps, so that a step can be captured as one CUDA graph.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
from torch import Tensor

from ops.cache_view import CACHE_DTYPES, CachedTensor
from ops.options import AttentionOptions
from ops.order import multiprocessors
from ops.triton.decode import _tilegpt_decode_combine
from ops.triton.interpret import INTERPRETED, mend
from ops.triton.step_attention import _tilegpt_step_append, _tilegpt_step_attention
from ops.triton.step_choice import _tilegpt_step_finish, _tilegpt_step_race
from ops.triton.step_linear import _tilegpt_step_embed, _tilegpt_step_linear, _tilegpt_step_norm

if INTERPRETED:
    mend()

NORMS = {"layernorm": 1, "rmsnorm": 2}
ACTIVATIONS = {None: 0, "gelu": 1, "swiglu": 2}
# Query heads of a key head, and head dims, that a program of attention has registers for.
MOST_HEADS_PER_KV, MOST_HEAD_DIM = 8, 256
# Rows that a product takes one after another; beyond them libraries are faster (GPT-2 124M on an H200, us a
# step: 4 rows 341, by cuBLAS 422; 8 rows 583 and 457). Weights in 8 bits have to be made 16 for a library.
MOST_ROWS, MOST_ROWS_INT8 = 4, 8
_SHORT = 1024  # keys up to which many rows and heads are not split: combining would cost more than it saves
_CHOICES = 1024  # logits that one program looks at


@dataclass(frozen=True)
class Norm:
    """kind: layernorm or rmsnorm; weight (C,); bias (C,) or None."""

    kind: str
    weight: Tensor | None
    bias: Tensor | None
    eps: float


def _pdl(x: Tensor) -> dict[str, Any]:
    """A kernel begins while the one before it ends, and waits inside (sm_90 and newer)."""
    hopper = x.is_cuda and torch.cuda.get_device_capability(x.device)[0] >= 9
    return {"PDL": True, "launch_pdl": True} if hopper else {"PDL": False}


def linear_tile(n: int, k: int, sms: int, batch: int = 1) -> tuple[int, int, int, int]:
    """(rows of the weight in a tile, their padded length, warps, programs): a thread holds 32 numbers of each
    of two rows; for more than 4 rows of x, which it holds too, 16. Where one warp reads a row, a program a
    tile, of four rows where that gives a multiprocessor more than 16 programs (the interpreter needs few);
    else 16 warps a multiprocessor take one tile after another."""
    block_k = max(16, triton.next_power_of_2(k))
    warps = min(8, max(1, block_k // (1024 if batch <= MOST_ROWS else 512)))
    if warps == 1:
        rows = 64 if INTERPRETED else 2 if n <= 32 * sms else 4
        return rows, block_k, 1, triton.cdiv(n, rows)
    return 2, block_k, warps, min(triton.cdiv(n, 2), 16 // warps * sms)


def _linear(
    x: Tensor,
    norm: Norm | None,
    weight: Tensor,
    scale: Tensor | None,
    bias: Tensor | None,
    out: Tensor,
    **flags: Any,
) -> Tensor:
    (batch, n), k = out.shape, x.shape[1]
    flags = {"ACTIVATION": 0, "ADD": False} | flags
    block_n, block_k, warps, programs = linear_tile(n, k, multiprocessors(weight.device), batch)
    _tilegpt_step_linear[(programs,)](
        x, norm.weight if norm else None, norm.bias if norm else None, weight, scale, bias, out,
        norm.eps if norm else 0.0, N=n, K=k, B=batch, NORM=NORMS[norm.kind] if norm else 0,
        BLOCK_N=block_n, BLOCK_K=block_k, TURNS=triton.cdiv(n, block_n * programs), num_warps=warps,
        **flags, **_pdl(weight),
    )  # fmt: skip
    return out


def norm_linear(
    x: Tensor,
    norm: Norm,
    weight: Tensor,
    bias: Tensor | None,
    out: Tensor,
    activation: str | None = None,
    scale: Tensor | None = None,
) -> Tensor:
    """out (B, N) = activation(norm(x) weight^T + bias) for x (B, K) fp32 and weight (N, K); for swiglu (2N,
    K). With scale (N,) the weight is in 8 bits, (N, K / 4) int32: the words of an Int8Linear
    (model/generation/weights.py)."""
    return _linear(x, norm, weight, scale, bias, out, ACTIVATION=ACTIVATIONS[activation])


def add_linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor, scale: Tensor | None = None
) -> Tensor:
    """residual (B, N) fp32 += x weight^T + bias for x (B, K); weight and scale as for `norm_linear`."""
    return _linear(x, None, weight, scale, bias, residual, ADD=True)


def embed(token: Tensor, lengths: Tensor, wte: Tensor, wpe: Tensor | None, x: Tensor) -> None:
    """x (B, C) fp32 = wte[token] + wpe[lengths]; token (B, 1) and lengths (B,) int64."""
    width = x.shape[1]
    _tilegpt_step_embed[(len(x),)](
        token, lengths, wte, wpe, x, width, triton.next_power_of_2(width), **_pdl(x)
    )


def add_norm(x: Tensor, delta: Tensor | None, norm: Norm, out: Tensor) -> Tensor:
    """x (B, C) fp32 += delta, then out (B, C) = norm(x)."""
    width = x.shape[1]
    _tilegpt_step_norm[(len(x),)](
        x, delta, norm.weight, norm.bias, out, norm.eps, width, NORMS[norm.kind],
        triton.next_power_of_2(width), **_pdl(x),
    )  # fmt: skip
    return out


class Choice:
    """The choice of a token among `vocab_size`: greedy, or by a race of `noise` (B, vocab_size) at a
    temperature; see Sampling.

    state: token (B, 1), text (B, width) and its lengths (B,), or None twice; of the cache, lengths (B,), next
        lengths (B,) int32, and active (B,), 1 for rows that count on, or None: all do. Else int64."""

    def __init__(
        self, vocab_size: int, noise: Tensor | None, temperature: float, state: tuple[Tensor | None, ...]
    ):
        self.vocab_size, self.noise, self.temperature, self.state = vocab_size, noise, temperature, state
        self.programs, device = triton.cdiv(vocab_size, _CHOICES), state[0].device
        self.scores = torch.empty(len(state[0]), self.programs, device=device)
        self.tokens = torch.empty(len(state[0]), self.programs, dtype=torch.int32, device=device)

    def __call__(self, logits: Tensor) -> None:
        """By logits (B, V padded)."""
        token, text, *rest = self.state
        batch = len(token)
        _tilegpt_step_race[(self.programs, batch)](
            logits, self.scores, self.tokens, self.noise, self.temperature, logits.stride(0), self.vocab_size,
            self.noise is not None, _CHOICES, **_pdl(logits),
        )  # fmt: skip
        _tilegpt_step_finish[(batch,)](
            self.scores, self.tokens, token, text, *rest, self.programs, 0 if text is None else text.shape[1],
            triton.next_power_of_2(self.programs), **_pdl(token),
        )  # fmt: skip


class Attend:
    """Causal attention of one new token per row over a 16-bit or 32-bit cache, to which it appends the
    token.

    lengths (B,) int64: tokens in the cache before the new one. cache: a layer's keys (B, Hkv, capacity, D),
    or, with table (B, columns) int32, blocks of tokens (N, Hkv, block, D). rope (2, T, D/2) fp32, or None.
    options: window, softcap and alibi_slopes (H,) fp32 are read."""

    def __init__(
        self, lengths: Tensor, heads: int, cache: Tensor, table: Tensor | None, rope: Tensor | None,
        options: AttentionOptions,
    ):  # fmt: skip
        batch, (_, kv_heads, capacity, head_dim) = len(lengths), cache.shape
        self.table, self.columns, self.page = table, 0, 0
        if table is not None:
            self.columns, self.page = table.shape[1], capacity
            capacity *= self.columns
        self.lengths, self.rope, self.slopes = lengths, rope, options.alibi_slopes
        self.softcap, left = options.softcap or 0.0, options.band[0]
        self.heads, self.kv_heads, self.head_dim = heads, kv_heads, head_dim
        self.capacity, self.window_left = capacity, min(left, capacity)
        self.block_d, sms = max(16, triton.next_power_of_2(head_dim)), multiprocessors(cache.device)
        self.keys, self.warps, self.splits = attention_tile(
            batch * kv_heads, heads // kv_heads, capacity, self.block_d, sms
        )
        width = heads * head_dim
        self.out = torch.empty(batch, width, dtype=cache.dtype, device=cache.device)
        self.parts, self.statistics, self.lse = self.out, None, None
        if self.splits > 1:
            rows = self.splits, batch
            self.parts = torch.empty(*rows, width, device=cache.device)
            self.statistics = torch.empty(2, *rows, heads, device=cache.device)
            self.lse = torch.empty(batch, heads, device=cache.device)

    def __call__(
        self, qkv: Tensor, k_cache: Tensor, v_cache: Tensor, q_norm: Norm | None, k_norm: Norm | None
    ) -> Tensor:
        """(B, H D) of qkv (B, (H + 2 Hkv) D); keys and values go to the caches, of the shape given before."""
        (batch, width), dim = self.out.shape, self.head_dim
        _tilegpt_step_attention[(self.splits * batch * self.kv_heads,)](
            qkv, q_norm.weight if q_norm else None, k_norm.weight if k_norm else None, self.rope, self.slopes,
            k_cache, v_cache, self.table, self.lengths, self.parts, self.statistics, self.capacity,
            self.columns, 0 if self.rope is None else self.rope.shape[1], self.window_left, dim**-0.5,
            self.softcap, q_norm.eps if q_norm else 0.0, batch, self.heads, self.heads // self.kv_heads, dim,
            self.block_d, self.keys, self.page, self.splits, self.window_left >= 0, self.softcap > 0,
            num_warps=self.warps, **_pdl(qkv),
        )  # fmt: skip
        if self.splits > 1:
            _tilegpt_decode_combine[(batch * self.heads,)](
                self.parts, self.statistics, self.out, self.lse, width, dim, 0, self.heads, 1, self.splits,
                batch * self.heads, 1.0, dim, self.block_d, triton.next_power_of_2(self.splits),
                **_pdl(qkv),
            )  # fmt: skip
        return self.out


class Append:
    """Quantises the keys and values of one new token per row into a cache, QK-norm and rotary embedding done.

    lengths (B,) int64: tokens in the cache before the new one. cache: a layer's keys, quantised, dense or in
    blocks. rope (2, T, D/2) fp32, or None. The head dim is even."""

    def __init__(self, lengths: Tensor, heads: int, cache: CachedTensor, rope: Tensor | None):
        self.lengths, self.rope, self.heads = lengths, rope, heads
        _, self.kv_heads, self.capacity, self.head_dim = cache.shape
        self.page = 0 if cache.table is None else cache.data.shape[2]
        self.columns = 0 if cache.table is None else cache.table.shape[1]
        self.parts, self.largest = cache.scale.shape[2], CACHE_DTYPES[cache.dtype_name][1]

    def __call__(
        self, qkv: Tensor, k: CachedTensor, v: CachedTensor, q_norm: Norm | None, k_norm: Norm | None
    ) -> Tensor:
        """q (B, H, 1, D) of qkv (B, (H + 2 Hkv) D); keys and values go to a layer's k and v."""
        batch, dim = len(qkv), self.head_dim
        q = qkv.new_empty(batch, self.heads, 1, dim)
        _tilegpt_step_append[(batch * (self.heads + 2 * self.kv_heads),)](
            qkv, q_norm.weight if q_norm else None, k_norm.weight if k_norm else None, self.rope,
            k.data, v.data, k.scale, v.scale, k.table, self.lengths, q, self.capacity, self.columns,
            0 if self.rope is None else self.rope.shape[1], q_norm.eps if q_norm else 0.0, self.largest,
            self.heads, self.heads // self.kv_heads, dim, max(16, triton.next_power_of_2(dim // 2)),
            self.page, self.parts, not k.data.dtype.is_floating_point, num_warps=1, **_pdl(qkv),
        )  # fmt: skip
        return q


def attention_tile(
    programs: int, heads_per_kv: int, capacity: int, block_d: int, sms: int
) -> tuple[int, int, int]:
    """(keys of a tile, warps, parts of the keys) for `programs` rows and key heads."""
    short = capacity <= _SHORT
    warps, numbers = (8, 2048) if programs < sms and not short else (4, 1024)
    keys = min(256, max(16, numbers * warps // (heads_per_kv * block_d)))
    if programs >= 2 * sms or (short and programs >= sms):
        return keys, warps, 1
    return keys, warps, min(triton.cdiv(4 * sms, programs), triton.cdiv(capacity, keys), 128)
