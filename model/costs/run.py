"""What is predicted: a training step by its config, its micro-batch and its attention.

N = B T tokens, C the width, H heads of D, Hkv of them for keys, h the MLP's hidden width, V the vocabulary,
Vp padded; e bytes of a value in compute (2 under bf16 autocast, else 4). Parameters, gradients, optimiser
state and embeddings are fp32, always; the residual stream with model.fp32_residual.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from attention.base import Attention, AttentionCall, Costs
from conf.values import UserError, shown
from model.calls import attention_call
from model.config import GPTConfig
from model.context_parallel import require_ranks

_OF_THE_YAML = {"_target_", "gradient_as_bucket_view"}  # of trainer=ddp


def devices_of(trainer: Mapping[str, Any]) -> tuple[int, int]:
    """(devices, those of them that share each sequence) by the config of a trainer. trainer.devices=auto: the
    GPUs of this machine, or one device."""
    devices, strategy = trainer["devices"], trainer["strategy"]
    if devices in ("auto", -1, "-1"):
        devices = torch.cuda.device_count() or 1
    elif isinstance(devices, str) and "," in devices:
        devices = len([word for word in devices.split(",") if word])
    try:
        n = int(devices) if isinstance(devices, int | str) else len(devices)
    except (TypeError, ValueError):
        raise UserError(
            f"trainer.devices={shown(devices)}: it needs to be a number of devices, or auto for all of them."
        ) from None
    n *= trainer["num_nodes"]
    ranks = 1 if isinstance(strategy, str) else strategy.get("context_parallel", 1)
    require_ranks(ranks)
    return n, n if ranks == "all" else ranks


def shared_by(
    trainer: Mapping[str, Any], step_tokens: int | None, micro_tokens: int, one_graph: bool
) -> dict[str, Any]:
    """`shards`, `sequence_ranks` and `accumulates` of a Run, by the config of a trainer, tokens_per_step, the
    tokens of a micro-batch, and whether the model is compiled as one graph."""
    (n, ranks), strategy = devices_of(trainer), trainer["strategy"]
    kind = strategy if isinstance(strategy, str) else strategy["_target_"].rpartition(".")[2]
    sharded = kind == "FSDP2Strategy"
    # as ReplicaStrategy decides
    averages = one_graph and kind == "ReplicaStrategy" and not set(strategy) - _OF_THE_YAML
    buckets = n > 1 and not sharded and not averages
    accumulates = (step_tokens or 0) > micro_tokens * (n // ranks) or buckets
    return {"shards": n if sharded else 1, "sequence_ranks": ranks, "accumulates": accumulates}


@dataclass(frozen=True)
class Run:
    """A training step of one device: the model, rows of a micro-batch, the implementation of attention,
    `value_bytes` e, the device and, where known, its compute capability, whether the step is compiled and
    checkpointed, whether gradients of micro-batches before are there (`accumulates`; in the buckets of
    DistributedDataParallel they always are), the bytes of libraries' workspaces, and the devices that share
    parameters, gradients and optimiser state (`shards`: FSDP2) and each sequence (`sequence_ranks`: context
    parallelism), and whether tokens see their own document only (`documents`: data.document_mask)."""

    config: GPTConfig
    batch: int
    attention: Attention
    value_bytes: int = 4
    device: str = "cuda"
    arch: tuple[int, int] | None = None
    compiled: bool = False
    checkpointing: bool = False
    accumulates: bool = False
    workspace_bytes: int = 0
    shards: int = 1
    sequence_ranks: int = 1
    documents: bool = False

    def __post_init__(self) -> None:
        if self.batch < 1:
            raise UserError(f"data.batch_size={self.batch}: it needs to be at least 1.")
        if self.value_bytes not in (2, 4):
            raise UserError(f"value_bytes={self.value_bytes}: 4 for 32-true or 2 for bf16-mixed.")

    @property
    def tokens(self) -> int:
        return self.batch * self.config.seq_len // self.sequence_ranks

    @property
    def width_bytes(self) -> int:  # N C e
        return self.tokens * self.config.n_embd * self.value_bytes

    @property
    def residual_bytes(self) -> int:
        """4 N C; N C e without model.fp32_residual, except that eager norms, but for LayerNorm on a CPU, make
        an input in fp32 that they keep."""
        keeps_it = self.compiled or (self.device == "cpu" and self.config.norm == "layernorm")
        narrow = keeps_it and not self.config.fp32_residual
        return self.width_bytes if narrow else 4 * self.tokens * self.config.n_embd

    @property
    def qkv_bytes(self) -> int:
        config = self.config
        return self.tokens * (config.n_head + 2 * config.kv_heads) * config.head_size * self.value_bytes

    @property
    def heads_bytes(self) -> int:  # N H D e
        return self.tokens * self.config.n_head * self.config.head_size * self.value_bytes

    @property
    def whole_kv_bytes(self) -> int:
        """K and V of whole sequences, which each of the devices that share these gathers; else 0."""
        if self.sequence_ranks == 1:
            return 0
        config = self.config
        return 2 * self.batch * config.seq_len * config.kv_heads * config.head_size * self.value_bytes

    @property
    def hidden_bytes(self) -> int:  # N h e
        return self.tokens * self.config.mlp_size * self.value_bytes

    @property
    def call(self) -> AttentionCall:
        """A layer's call of attention; where devices share sequences, the larger of its two calls."""
        dtype = torch.bfloat16 if self.value_bytes == 2 else torch.float32
        facts = {"tokens": self.config.seq_len, "device": torch.device("cpu"), "dtype": dtype}
        facts["document_ids"] = self.documents
        call = attention_call(self.config, "training", batch=self.batch, **facts)
        if self.sequence_ranks > 1:
            call = replace(call, tq=call.tq // (2 * self.sequence_ranks))
        return replace(call, device=self.device, arch=self.arch)

    @property
    def costs(self) -> Costs:
        """Of a layer's attention. Raises CostsNotDeclared where the implementation says nothing of them."""
        costs = self.attention.costs(self.call, self.compiled)
        return costs if self.sequence_ranks == 1 else replace(costs, saved_bytes=2 * costs.saved_bytes)
