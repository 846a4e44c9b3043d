"""What is predicted: a training step by its config, its micro-batch and its attention.

N = B T tokens, C the width, H heads of D, Hkv of them for keys, h the MLP's hidden width, V the vocabulary,
Vp padded; e bytes of a value in compute (2 under bf16 autocast, else 4). Parameters, gradients, optimiser
state and embeddings are fp32, always; the residual stream with model.fp32_residual.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from attention.base import Attention, AttentionCall, Costs
from conf.values import UserError
from model.calls import attention_call
from model.config import GPTConfig


@dataclass(frozen=True)
class Run:
    """A training step: the model, rows of a micro-batch, the implementation of attention, `value_bytes` e,
    the device and, where known, its compute capability, whether the step is compiled and checkpointed,
    whether gradients of micro-batches before are there (`accumulates`), and the bytes of libraries'
    workspaces."""

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

    def __post_init__(self) -> None:
        if self.batch < 1:
            raise UserError(f"data.batch_size={self.batch}: it needs to be at least 1.")
        if self.value_bytes not in (2, 4):
            raise UserError(f"value_bytes={self.value_bytes}: 4 for 32-true or 2 for bf16-mixed.")

    @property
    def tokens(self) -> int:
        return self.batch * self.config.seq_len

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
    def hidden_bytes(self) -> int:  # N h e
        return self.tokens * self.config.mlp_size * self.value_bytes

    @property
    def call(self) -> AttentionCall:
        """A layer's call of attention."""
        dtype = torch.bfloat16 if self.value_bytes == 2 else torch.float32
        facts = {"tokens": self.config.seq_len, "device": torch.device("cpu"), "dtype": dtype}
        call = attention_call(self.config, "training", batch=self.batch, **facts)
        return replace(call, device=self.device, arch=self.arch)

    @property
    def costs(self) -> Costs:
        """Of a layer's attention. Raises CostsNotDeclared where the implementation says nothing of them."""
        return self.attention.costs(self.call, self.compiled)
