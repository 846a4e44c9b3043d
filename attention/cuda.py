"""Our CUDA kernels, a ladder of stages from the formula to tensor cores (ops/README.md tells it; ops/csrc).

Each stage is an op of its own, tilegpt::cuda_naive and so on; tilegpt::cuda takes the best for a call.
"""

from __future__ import annotations

import importlib
import math
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor

from attention.base import (
    FEATURES,
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
    must_be_deterministic,
)
from attention.checks import arch_name, check_inputs
from attention.declaration import (
    accumulator_bytes,
    k_bytes,
    lse_bytes,
    padded_statistic_bytes,
    q_bytes,
    scores_bytes,
)
from conf.values import UserError
from ops.library import register_attention
from ops.nvrtc import missing

_BASIC_FEATURES = frozenset({"noncausal", "rectangular", "gqa", "lse"})
_SUPPORTED_FEATURES = frozenset(FEATURES) - {"alibi_rows", "bias", "bias_grad", "block_mask", "relative_bias"}
_DTYPES = LOW_PRECISION | {torch.float32}
_on_cuda = partial(Capabilities, devices=frozenset({"cuda"}), deterministic=True)


@dataclass(frozen=True)
class Stage:
    """`module` holds <stage>_forward and, where the stage has one, <stage>_backward."""

    module: str
    capabilities: Capabilities


_FORMULA = _on_cuda(features=_BASIC_FEATURES, dtypes=_DTYPES, min_arch=(7, 5), backward=False)
_TILED = _on_cuda(features=_SUPPORTED_FEATURES, dtypes=_DTYPES, min_arch=(7, 5), max_head_dim=128)
# Copies of 16 bytes: eight elements. Its dQ goes by atomics, unless asked otherwise.
_TENSOR_CORES = replace(
    _TILED,
    dtypes=LOW_PRECISION,
    min_arch=(8, 0),
    head_dim_multiple=8,
    deterministic=False,
    deterministic_on_request=True,
)
_FA2 = replace(_TENSOR_CORES, features=_SUPPORTED_FEATURES | {"block_mask"})
_HOPPER = replace(_FA2, min_arch=(9, 0), max_arch=(9, 0), max_head_dim=256)
_FORWARD_TENSOR_CORES = replace(_TENSOR_CORES, features=_BASIC_FEATURES, backward=False, deterministic=True)
STAGES = {
    "plain": Stage("ops.cuda.plain", replace(_FORMULA, backward=True)),
    "naive": Stage("ops.cuda.plain", _FORMULA),
    "rowwise": Stage("ops.cuda.plain", _FORMULA),
    "tiled": Stage("ops.cuda.tiled", _TILED),
    "wmma": Stage("ops.cuda.wmma", _FORWARD_TENSOR_CORES),
    "fa1": Stage("ops.cuda.tensor_cores", _FORWARD_TENSOR_CORES),
    "fa2": Stage("ops.cuda.tensor_cores", _FA2),
    "fa3": Stage("ops.cuda.hopper", _HOPPER),
}
_DECLARATION = Declaration(
    kernels=(Kernels("our CUDA kernels", r"^tilegpt_"),),
    compilation=Compilation(),
)
# How stage tiled multiplies in fp32.
PRODUCT_MODES = ("auto", "fma")
# Shared memory that a block may use, by architecture; all others have the minimum of sm_80 and newer.
_SHARED_BYTES = {(7, 5): 65_536, (8, 0): 166_912, (8, 7): 166_912}
_SHARED_BYTES |= dict.fromkeys(((9, 0), (10, 0), (10, 3), (11, 0)), 232_448)
_MIN_SHARED_BYTES = 101_376
# Of these, the bytes that rowwise does not use for scores.
_ROWWISE_OTHER_BYTES = 2_048


# The modules of the kernels are imported at the first call.
def _forward(stage: str | None, q: Tensor, *args: Any) -> tuple[Tensor, Tensor]:
    stage = stage or _best_stage_for(q, args[2])
    return getattr(importlib.import_module(STAGES[stage].module), f"{stage}_forward")(q, *args)


def _backward(stage: str | None, dout: Tensor, q: Tensor, *args: Any) -> tuple[Tensor, ...]:
    stage = stage or _best_stage_for(q, args[4])
    # a compiled call is not asked before it runs
    if not STAGES[stage].capabilities.backward:
        raise UnsupportedAttention(
            f"cuda_{stage}", ["no backward: runs forward only (attention=cuda has one)"]
        )
    *args, settings, bias_grad = args
    if must_be_deterministic():
        settings = [1, *settings[1:]]
    if settings and settings[0] and (reason := _nondeterminism_reason(stage, q.shape[3])):
        raise UnsupportedAttention(f"cuda_{stage}", [reason])
    backward = getattr(importlib.import_module(STAGES[stage].module), f"{stage}_backward")
    return backward(dout, q, *args, settings, bias_grad)


def _nondeterminism_reason(stage: str | None, head_dim: int) -> str | None:
    """Why fa3 has no deterministic backward at this head dim, if so: it takes fa2's."""
    fa2_max_head_dim = STAGES["fa2"].capabilities.max_head_dim
    if stage != "fa3" or not fa2_max_head_dim < head_dim <= STAGES["fa3"].capabilities.max_head_dim:
        return None
    return (
        f"no deterministic backward at head dim {head_dim}: needs at most {fa2_max_head_dim} "
        "(attention.deterministic)"
    )


def _check(stage: str | None, q: Tensor, k: Tensor, v: Tensor, options: AttentionOptions) -> None:
    """What Attention.forward checks; a compiled call comes here, once, while it is traced."""
    check_inputs(q, k, v, options)
    attention = CudaStage(stage) if stage else CudaAttention()
    call = AttentionCall.of(q, k, v, options)
    # A process that has compiled other head dims traces it as a symbol; kernels are made for a number.
    attention.require(replace(call, head_dim=int(call.head_dim)))


_OPS = {
    stage: register_attention(
        f"cuda_{stage}" if stage else "cuda",
        partial(_forward, stage),
        partial(_backward, stage),
        "CUDA",
        partial(_check, stage),
    )
    for stage in (None, *STAGES)
}


def best_stage(
    arch: tuple[int, int] | None, dtype: torch.dtype, head_dim: int, block_mask: bool = False
) -> str:
    """The best stage: fa3 on Hopper, fa2, or where neither can, tiled; but with a block mask, which that does
    not have, fa2."""
    for stage in ("fa3", "fa2"):
        capabilities = STAGES[stage].capabilities
        fits = head_dim <= capabilities.max_head_dim and head_dim % capabilities.head_dim_multiple == 0
        runs = (
            capabilities.min_arch
            <= (arch or STAGES["fa2"].capabilities.min_arch)
            <= (capabilities.max_arch or (99, 0))
        )
        if fits and runs and dtype in capabilities.dtypes:
            return stage
    return "fa2" if block_mask else "tiled"


def _best_stage_for(q: Tensor, options: AttentionOptions) -> str:
    return _best_stage_on(q.device.index, q.dtype, q.shape[3], options.block_mask is not None)


@cache
def _best_stage_on(device: int, dtype: torch.dtype, head_dim: int, block_mask: bool) -> str:
    return best_stage(torch.cuda.get_device_capability(device), dtype, head_dim, block_mask)


def _best(call: AttentionCall) -> str:
    return best_stage(call.arch, call.dtype, call.head_dim, "block_mask" in call.features)


def rowwise_max_keys(arch: tuple[int, int]) -> int:
    """The keys whose scores a block of `rowwise` has room for."""
    return (_SHARED_BYTES.get(arch, _MIN_SHARED_BYTES) - _ROWWISE_OTHER_BYTES) // 4


class CudaStage(Attention):
    """One stage of the ladder.

    Args:
        stage: plain, naive, rowwise, tiled, wmma, fa1, fa2 or fa3.
        deterministic: for fa2 and fa3: a backward that gives the same bits each time, by computing dQ in a
            second pass instead of by atomics; torch.use_deterministic_algorithms selects it too. The other
            stages are always deterministic.
        products: for tiled in fp32: auto uses tensor cores where they are faster, with three fp16 products
            for each fp32 product; fma uses FMA units.
    """

    def __init__(
        self, stage: str, deterministic: bool = False, products: str = "auto", name: str | None = None
    ):
        if stage not in STAGES:
            raise UserError(f"stage is {stage!r}; the ladder has {', '.join(STAGES)}")
        words = PRODUCT_MODES if stage == "tiled" else PRODUCT_MODES[:1]
        if products not in words:
            raise UserError(f"products is {products!r}; stage {stage} has {', '.join(words)}")
        super().__init__(name or f"cuda_{stage}")
        self.deterministic, self.products = deterministic, products
        capabilities = STAGES[stage].capabilities
        self.capabilities = replace(capabilities, deterministic=deterministic or capabilities.deterministic)
        tensor_cores = STAGES[stage].module not in ("ops.cuda.plain", "ops.cuda.tiled")
        scores = stage in ("plain", "naive")
        self.declaration = replace(_DECLARATION, writes_scores=scores, tensor_cores=tensor_cores)
        self.stage: str | None = stage

    def unsupported_reasons(self, call: AttentionCall) -> list[str]:
        reasons = super().unsupported_reasons(call)
        if call.backward and (self.deterministic or must_be_deterministic()):
            reasons += filter(None, [_nondeterminism_reason(self.stage, call.head_dim)])
        if self.stage == "rowwise" and call.arch and call.tk > (most := rowwise_max_keys(call.arch)):
            reasons.append(
                f"no {call.tk} keys: needs at most {most} on {arch_name(call.arch)}, whose scores fit into "
                "shared memory (seq_len)"
            )
        return reasons + [reason for reason in [missing()] if reason]

    def costs(self, call: AttentionCall, compiled: bool = False) -> Costs:
        """naive: the scores are written, read, written and read. plain: they are read twice more; in the
        backward, P and dS are written, dS is read twice and P once. All stages but naive keep lse, and in
        the backward have padded_lse and delta, a number a row each. Stages other than naive and plain also
        have an accumulator of dQ, where blocks of keys add to it by atomics; otherwise they compute dQ in a
        separate pass.

        tiled in fp32 splits each number of q, k, v and dout into two fp16 numbers, with rows padded to 32
        columns, and computes each product as three. Where a number of 4 bytes would be read once, it is read
        twice, written as two fp16 numbers, and these are read. In the forward, Q is split when it is read,
        and is read twice."""
        matrix = scores_bytes(call)
        if self.stage == "naive":
            return Costs(moved_bytes=(4 * matrix, 0), writes_scores=True)
        statistics = 2 * padded_statistic_bytes(call)
        if self.stage == "plain":
            moved = (6 * matrix, 5 * matrix)
            return Costs(lse_bytes(call), 2 * matrix + statistics, 0, moved, writes_scores=True)
        if self.stage == "tiled":
            if call.dtype != torch.float32:
                return Costs(lse_bytes(call), statistics, backward_matmuls=7)
            n_rows = call.batch * (call.heads * call.tq + call.kv_heads * call.tk)
            split_bytes = 4 * 2 * n_rows * math.ceil(call.head_dim / 32) * 32
            extra_traffic = (4 + 4 + 4 + 4 - 4) / 4  # bytes moved in addition, for one that is moved anyway
            moved = (
                int(extra_traffic * 2 * k_bytes(call) + q_bytes(call)),
                int(extra_traffic * 2 * (q_bytes(call) + k_bytes(call))),
            )
            return Costs(
                lse_bytes(call), statistics + split_bytes, 0, moved, backward_matmuls=7, split_matmuls=3
            )
        if self.deterministic or must_be_deterministic():
            return Costs(lse_bytes(call), statistics, backward_matmuls=7)
        return Costs(lse_bytes(call), statistics + accumulator_bytes(call) + self._head_bytes(call))

    def _head_bytes(self, call: AttentionCall) -> int:
        """dK and dV of each query head, where fa3 sums those of a group."""
        if self.stage != "fa3":
            return 0
        from ops.cuda.hopper_tiles import by_query_head

        group = call.heads // call.kv_heads
        growing = call.causal and "window" not in call.features  # each tile sees more than the last
        documents, block_mask = (name in call.features for name in ("document_ids", "block_mask"))
        of_each = by_query_head(call.tq, call.head_dim, group, growing, documents, block_mask)
        return 2 * group * k_bytes(call) if of_each else 0

    def forward_tile(self, call: AttentionCall) -> tuple[int, int] | None:
        if self.stage != "fa2":
            return None
        from ops.cuda.shared import fa2_tile

        tile = fa2_tile(call.head_dim)
        return tile.br, tile.bc

    def shared_memory(self, call: AttentionCall, max_bytes: int) -> dict[str, int]:
        from ops.cuda.shared import shared_memory

        arch = call.arch or STAGES["fa2"].capabilities.min_arch
        return shared_memory(self.stage, call.head_dim, call.dtype, arch, max_bytes, call.tk, call.backward)

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, options: AttentionOptions, dropout_seed: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        settings = [int(self.deterministic), PRODUCT_MODES.index(self.products)]
        return _OPS[self.stage](q, k, v, options, dropout_seed, settings)


class CudaAttention(CudaStage):
    """The best stage for each call, by the device, dtype, head dim and whether there is a block mask
    (`best_stage`).

    Args:
        deterministic: see CudaStage.
    """

    def __init__(self, deterministic: bool = False, name: str = "cuda"):
        super().__init__("tiled", deterministic, name=name)
        self.capabilities = replace(
            self.capabilities,
            features=_FA2.features,
            deterministic=deterministic,
            deterministic_on_request=True,
        )
        self.declaration = replace(self.declaration, dispatches_to="kernels")
        self.stage = None

    def unsupported_reasons(self, call: AttentionCall) -> list[str]:
        """fa3's where it is the best stage, as it takes wider heads than the others, and fa2's with a block
        mask, which tiled does not have."""
        by_fa3 = call.device == "cuda" and _best(call) == "fa3"
        if by_fa3 or "block_mask" in call.features:
            return self.resolve(call).unsupported_reasons(call)
        return super().unsupported_reasons(call)

    def choice(self, call: AttentionCall, *, compiled: bool = False) -> tuple[str, str]:
        """(stage, why) of what will run `call`. Raises UnsupportedAttention where none can."""
        self.require(call)
        name, why = f"cuda_{_best(call)}", "the best stage"
        if name == "cuda_tiled":
            why += f" but for cuda_fa2, {'; '.join(STAGES['fa2'].capabilities.reasons(call))}"
        return name, why

    def resolve(self, call: AttentionCall) -> Attention:
        return CudaStage(_best(call), self.deterministic)

    def costs(self, call: AttentionCall, compiled: bool = False) -> Costs:
        return self.resolve(call).costs(call, compiled)

    def forward_tile(self, call: AttentionCall) -> tuple[int, int] | None:
        return self.resolve(call).forward_tile(call)

    def shared_memory(self, call: AttentionCall, max_bytes: int) -> dict[str, int]:
        return self.resolve(call).shared_memory(call, max_bytes)
