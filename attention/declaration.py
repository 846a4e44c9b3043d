"""What an implementation declares beside its capabilities: its origin, the kernels that prove that it ran,
and what a call costs. Measurements, estimates and reports use these, not lists of names."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch

from attention.call import AttentionCall
from conf.values import UserError


@dataclass(frozen=True)
class Kernels:
    """Kernels of one kind: `pattern` is searched for in their demangled names (on a CPU, of operators)."""

    label: str
    pattern: str


MATRIX_PRODUCTS = Kernels("matrix products", r"(?i)gemm|gemv|gemmk|nvjet|splitkreduce|\bdot_kernel")
MATRIX_PRODUCTS_CPU = Kernels("matrix products on the CPU", r"(?i)^aten::(b|m|badd|add)mm(_out)?$|^aten::mv$")
# What naive attention in PyTorch runs. Seen beside a fused kernel, they mean that a pass fell back to it.
MATMUL_KERNELS = (MATRIX_PRODUCTS, MATRIX_PRODUCTS_CPU)


@dataclass(frozen=True)
class Compilation:
    """When kernels are compiled: at the first call of each `kind` of call, or of each `shape`; `on_disk`:
    whether another process finds them in a cache; `by_torch`: by torch.compile, without which all scores are
    computed."""

    each: Literal["kind", "shape"] = "kind"
    on_disk: bool = True
    by_torch: bool = False


@dataclass(frozen=True)
class Declaration:
    """Properties of an implementation.

    origin: ours, PyTorch's or another library's;
    kernels: those that it may run, which also prove that it ran;
    writes_scores: whether all scores are usually in memory at once (`Costs` has this for a single call);
    writes_masks: whether masks other than causal are tensors of Tq x Tk; others skip masked tiles;
    tensor_cores: whether 16-bit products are computed on tensor cores;
    operand_dtype: to which q, k and v are rounded before the products; None: they are not rounded. With a
        dtype, the error is measured against the formula on inputs rounded to it (scripts/accuracy.py), and
        `auto` never chooses the implementation;
    launches_each_tile: whether each tile takes one or more launches, thousands for long sequences;
    dispatches_to: what it chooses from for each call: its own kernels, or all other implementations;
    compilation: when kernels are compiled; None if they are precompiled."""

    origin: Literal["ours", "PyTorch", "library"] = "ours"
    kernels: tuple[Kernels, ...] = ()
    writes_scores: bool = False
    writes_masks: bool = False
    tensor_cores: bool = True
    operand_dtype: torch.dtype | None = None
    launches_each_tile: bool = False
    dispatches_to: Literal["", "kernels", "implementations"] = ""
    compilation: Compilation | None = None


@dataclass(frozen=True)
class Costs:
    """What a layer's call costs beyond its tensors: q, k, v and out, and in the backward dout, dq, dk and dv.

    saved_bytes: kept for the backward beyond q, k, v and out; with all scores in memory, this includes copies
    that are kept instead of q, k and v;
    transient_bytes: the most during the backward beyond those kept and dq, dk, dv;
    kept_per_model_bytes: kept once for all layers;
    moved_bytes: read from and written to DRAM in (forward, backward), beyond each of these tensors, and lse,
    once;
    writes_scores: whether all scores are in memory at once, and the products include masked keys;
    backward_matmuls: matrix products over the scores in the backward: four if the probabilities were kept,
    five if they are recomputed once, seven if they are recomputed both for dQ and for dK and dV;
    split_matmuls: how many 16-bit products on tensor cores replace each fp32 product; 0: fp32 is not split.
    """

    saved_bytes: int = 0
    transient_bytes: int = 0
    kept_per_model_bytes: int = 0
    moved_bytes: tuple[int, int] = (0, 0)
    writes_scores: bool = False
    backward_matmuls: int = 5
    split_matmuls: int = 0


class CostsNotDeclared(UserError):
    """Nothing can be predicted for an implementation that does not declare its costs."""

    def __init__(self, name: str, kind: type):
        super().__init__(
            f"attention={name} does not declare its costs, so nothing can be predicted for it: give "
            f"{kind.__name__} a method `costs` (attention/base.py), or choose another implementation."
        )


def scores_bytes(call: AttentionCall) -> int:
    """A layer's scores in fp32: 4 B H Tq Tk."""
    return 4 * call.batch * call.heads * call.tq * call.tk


def lse_bytes(call: AttentionCall) -> int:
    """The log of the softmax's denominator, 4 B H Tq: all that a fused implementation keeps of the scores."""
    return 4 * call.batch * call.heads * call.tq


def q_bytes(call: AttentionCall) -> int:
    """q, and out: B H Tq D values of the call's dtype."""
    return call.batch * call.heads * call.tq * call.head_dim * call.dtype.itemsize


def k_bytes(call: AttentionCall) -> int:
    """k, and v: B Hkv Tk D values of the call's dtype."""
    return call.batch * call.kv_heads * call.tk * call.head_dim * call.dtype.itemsize


def q_fp32_bytes(call: AttentionCall) -> int:
    """q in fp32."""
    return 4 * call.batch * call.heads * call.tq * call.head_dim


def padded_statistic_bytes(call: AttentionCall, tile: int = 128) -> int:
    """A number in fp32 for each query, rows padded to whole tiles."""
    return 4 * call.batch * call.heads * math.ceil(call.tq / tile) * tile


def accumulator_bytes(call: AttentionCall, tile: int = 128) -> int:
    """dQ in fp32, to which blocks of keys add by atomics: rows padded to whole tiles, columns to 32."""
    return padded_statistic_bytes(call, tile) * math.ceil(call.head_dim / 32) * 32
