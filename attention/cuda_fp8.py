"""Attention in fp8 on Hopper, forward only (Shah et al. 2024, section 3.3): our CUDA kernel of stage fa3 with
operands of 8 bits (ops/csrc/ladder/fp8.cu). Inputs and output have 16 bits."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from attention.base import (
    LOW_PRECISION,
    Attention,
    AttentionCall,
    AttentionOptions,
    Capabilities,
    Compilation,
    Costs,
    Declaration,
    Kernels,
    UnsupportedAttention,
    lse_bytes,
)
from attention.checks import check_inputs
from attention.declaration import k_bytes
from conf.values import UserError
from ops.library import register_attention
from ops.nvrtc import missing

SCALES, QK_DTYPES = ("block", "tensor"), ("e4m3", "int8")


def _forward(q: Tensor, *args: Any) -> tuple[Tensor, Tensor]:
    from ops.cuda.fp8 import fp8_forward

    return fp8_forward(q, *args)


def _backward(*args: Any) -> tuple[Tensor, ...]:
    raise UnsupportedAttention("cuda_fp8", ["no backward: runs forward only (attention=cuda has one)"])


def _check(q: Tensor, k: Tensor, v: Tensor, options: AttentionOptions) -> None:
    check_inputs(q, k, v, options)
    call = AttentionCall.of(q, k, v, options)
    CudaFp8().require(replace(call, head_dim=int(call.head_dim)))


_OP = register_attention("cuda_fp8", _forward, _backward, "CUDA", _check)


class CudaFp8(Attention):
    """v and the probabilities in e4m3, q and k in 8 bits too; sums in fp32 (of int8: int32).

    Args:
        hadamard: whether q and k are multiplied by an orthogonal Hadamard matrix first, which spreads
            outliers and changes no score.
        scales: block: one for each 64 queries and each tile of keys of a head; tensor: one for all of q, and
            one for all of k. Each head of v has one.
        qk_dtype: what q and k are rounded to. int8: integers, in even steps, finer than those of e4m3 where
            the transform leaves no outliers; e4m3 is a little faster.
    """

    capabilities = Capabilities(
        features=frozenset({"noncausal", "rectangular", "gqa", "lse", "window", "document_ids"}),
        dtypes=LOW_PRECISION,
        devices=frozenset({"cuda"}),
        min_arch=(9, 0),
        max_arch=(9, 0),
        max_head_dim=256,
        head_dim_multiple=8,
        backward=False,
        deterministic=True,
    )
    declaration = Declaration(
        kernels=(Kernels("our CUDA kernels", r"^tilegpt_"),),
        compilation=Compilation(),
        operand_dtype=torch.float8_e4m3fn,
    )

    def __init__(
        self, hadamard: bool = True, scales: str = "block", qk_dtype: str = "int8", name: str = "cuda_fp8"
    ):
        for option, given, known in (("scales", scales, SCALES), ("qk_dtype", qk_dtype, QK_DTYPES)):
            if given not in known:
                raise UserError(f"{option} is {given!r}; cuda_fp8 has {', '.join(known)}")
        super().__init__(name)
        self.settings = [int(hadamard), SCALES.index(scales), QK_DTYPES.index(qk_dtype)]

    def unsupported_reasons(self, call: AttentionCall) -> list[str]:
        return super().unsupported_reasons(call) + [reason for reason in [missing()] if reason]

    def reasons_against_auto(self, call: AttentionCall) -> list[str]:
        return ["multiplies in 8 bits: choose it by name"]

    def costs(self, call: AttentionCall, compiled: bool = False) -> Costs:
        """q, k and v in 8 bits are written and read, and v in 16 bits is read once more."""
        from ops.cuda.fp8 import scratch_bytes

        copies = scratch_bytes(call.batch, call.heads, call.kv_heads, call.tq, call.tk, call.head_dim)
        return Costs(lse_bytes(call), copies, moved_bytes=(2 * copies + k_bytes(call), 0))

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, options: AttentionOptions, dropout_seed: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        return _OP(q, k, v, options, dropout_seed, self.settings)
