"""One call of our CUDA kernels: the options of ops/library.py as `Params` and defines (attention.cuh)."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch
from torch import Tensor

from ops.dropout import dropout_threshold
from ops.options import AttentionOptions
from ops.order import order

# Rows of padded_lse, delta and what else a backward keeps are padded to the largest tile of queries.
PADDED_TO = 128
ELEMENTS = {torch.float32: "float", torch.bfloat16: "bf16", torch.float16: "f16"}


def padded(head_dim: int) -> int:
    """The head dim as the kernels on tensor cores have it: a multiple of 32."""
    return -(-head_dim // 32) * 32


class Strides(ctypes.Structure):
    _fields_ = [(name, ctypes.c_longlong) for name in "bht"]


_POINTERS = (
    "q k v out lse dout dq dk dv padded_lse delta scratch "
    "alibi_slopes q_document_ids k_document_ids document_bounds kv_lengths seed block_mask kept"
)
_STRIDED = "q k v out dout dq dk dv block_mask kept"
_INTEGERS = "batch heads kv_heads tq tk padded_tq n_tiles heads_in_l2 tail window_left window_right"
_FLOATS = "scale softcap keep_scale"
_STRIDES = {name: f"{name}_stride" for name in _STRIDED.split()}  # the field that holds a tensor's strides


class Params(ctypes.Structure):
    """struct Params of csrc/lib/attention.cuh, field by field."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in _POINTERS.split()),
        *((name, Strides) for name in _STRIDES.values()),
        *((name, ctypes.c_int) for name in _INTEGERS.split()),
        *((name, ctypes.c_float) for name in _FLOATS.split()),
        ("dropout_threshold", ctypes.c_uint),
        ("lead", ctypes.c_int),
    ]

    def bind(self, **tensors: Tensor | None) -> Params:
        """Sets pointers, and strides where there is a field for them. The caller keeps the tensors alive."""
        for name, x in tensors.items():
            setattr(self, name, None if x is None else x.data_ptr())
            if x is not None and name in _STRIDES:
                setattr(self, _STRIDES[name], Strides(*x.stride()[:3]))
        return self


def check(q: Tensor, k: Tensor, v: Tensor) -> None:
    """What the kernels take for granted. Inside torch.compile nobody before has looked at the strides.

    Raises:
        ValueError: another dtype, or a last dimension that is not contiguous.
    """
    for x in (q, k, v):
        if x.dtype not in ELEMENTS:
            raise ValueError(f"attention=cuda got {x.dtype}; it needs float16, bfloat16 or float32")
        if x.stride(3) != 1 and x.shape[3] > 1:
            raise ValueError(
                f"attention=cuda got strides {x.stride()}; it needs a contiguous last dimension: "
                "call .contiguous()"
            )


class Call:
    """What forward and backward derive from q (B, Hq, Tq, D), k, v, normalised options and `settings`.

    `params`: all that does not depend on the kernel. `defines`: the specialisation, as far as all stages
    share it. `tensors`: what `params` points to.
    """

    def __init__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        options: AttentionOptions,
        seed: Tensor | None = None,
        settings: Sequence[int] = (),
    ):
        self.options = options
        slopes, kv_lengths, dropout_p = options.alibi_slopes, options.kv_lengths, options.dropout_p
        (left, right), softcap, self.settings = options.band, options.finite_softcap, settings
        q_ids, k_ids = options.document_ids or (None, None)
        if options.bias is not None:
            raise ValueError("attention=cuda takes no bias; attention=triton, flex, tiled and naive do")
        check(q, k, v)
        # the kernels step through these by one
        stepped = slopes, q_ids, k_ids, kv_lengths, options.block_mask
        contiguous = (None if x is None else x.contiguous() for x in stepped)
        slopes, q_ids, k_ids, kv_lengths, self.block_mask = contiguous
        slopes = None if slopes is None else slopes.float()
        self.tensors = (q, k, v, slopes, q_ids, k_ids, kv_lengths, seed)
        (batch, heads, tq, head_dim), (kv_heads, tk) = q.shape, k.shape[1:3]
        self.params = Params(
            batch=batch,
            heads=heads,
            kv_heads=kv_heads,
            tq=tq,
            tk=tk,
            # beyond these a bound says nothing, and sums with what is left stay within 32 bits
            window_left=min(left, tk),
            window_right=min(right, tq),
            scale=options.scale,
            softcap=softcap,
            keep_scale=1.0 / (1.0 - dropout_p),
            dropout_threshold=min(dropout_threshold(dropout_p), 2**32 - 1) if dropout_p > 0 else 0,
        ).bind(
            q=q,
            k=k,
            v=v,
            alibi_slopes=slopes,
            q_document_ids=q_ids,
            k_document_ids=k_ids,
            kv_lengths=kv_lengths,
            seed=seed,
        )
        self.defines: dict[str, int | str] = {
            "PARAMS_BYTES": ctypes.sizeof(Params),
            "ELEMENT": ELEMENTS[q.dtype],
            "HEAD_DIM": head_dim,
            "HEADS_PER_KV": heads // kv_heads,
            "HAS_LEFT": int(left >= 0),
            "HAS_RIGHT": int(right >= 0),
            "SOFTCAP": (softcap > 0) + (softcap > 64),
            "ALIBI": int(slopes is not None),
            "DOCUMENT_IDS": int(q_ids is not None),
            "LENGTHS": int(kv_lengths is not None),
            "DROPOUT": int(dropout_p > 0),
            "BLOCK_MASK": int(self.block_mask is not None),
        }

    @property
    def scale_before_max(self) -> int:
        """Whether the kernels on tensor cores scale the scores before anything else (scores.cuh)."""
        changes_scores = self.defines["SOFTCAP"] or self.defines["ALIBI"]
        return int(bool(changes_scores or self.params.scale <= 0))

    @property
    def growing(self) -> bool:
        """Whether tiles of queries see, and tiles of keys are seen by, evenly growing numbers of others."""
        return bool(self.defines["HAS_RIGHT"] and not self.defines["HAS_LEFT"])

    def in_order(self, n_tiles: int, n_heads: int, x: Tensor, **how: int) -> int:
        """Sets the order of a grid of n_tiles tiles of n_heads heads, by ops/order.py; gives its blocks."""
        found = order(x, n_heads, n_tiles, self.growing, block_mask=self.block_mask is not None, **how)
        self.params.n_tiles = n_tiles
        self.params.heads_in_l2, self.params.tail, self.params.lead = found
        return n_tiles * n_heads
