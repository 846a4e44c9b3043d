"""Classification of sequences, or of pairs: the GPT's blocks without the causal mask, and a head."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from attention.base import Attention
from conf.values import UserError
from model.gpt import GPT, IGNORE, GPTConfig
from model.training.lit_gpt import LitGPT


class Head(nn.Linear):
    """First tokens (B * S, 1, C) of the S sequences of each example -> logits (B, n_classes).

    A pair u, v is judged by (u * v, |u - v|), the same in either order: by u and v themselves a match is an
    exclusive or, whose gradient is zero where training begins."""

    def __init__(self, width: int, n_classes: int, sequences: int) -> None:
        super().__init__(width * sequences, n_classes)
        self.sequences = sequences
        nn.init.normal_(self.weight, std=0.02)  # as the GPT's
        nn.init.zeros_(self.bias)

    def forward(self, x: Tensor) -> Tensor:
        u, *others = x.view(-1, self.sequences, x.shape[-1]).unbind(1)  # (B * S, 1, C) -> S of (B, C)
        for v in others:
            u = torch.cat((u * v, (u - v).abs()), dim=-1)
        return super().forward(u)


class Classifier(GPT):
    """`input_ids` (B, S, T), S = 1 or 2 sequences an example -> logits (B, n_classes), read off the first
    token of each sequence (BERT's CLS), which sees all others of its own.

    The head over the vocabulary gives way to one over the classes; everything else is the GPT's."""

    def __init__(
        self,
        config: GPTConfig,
        n_classes: int,
        attention: Attention,
        *,
        sequences: int = 1,
        checkpointing: bool = False,
    ) -> None:
        if config.causal:
            raise UserError(
                "model.causal=true: the first token of a classifier has to see all others, so it needs "
                "model.causal=false."
            )
        if sequences not in (1, 2):
            raise UserError(f"sequences={sequences}: a classifier judges 1 sequence, or 2 that make a pair.")
        super().__init__(config, attention, checkpointing)
        self.lm_head = Head(config.n_embd, n_classes, sequences)

    def logits(self, x: Tensor) -> Tensor:
        """(B, n_classes) of (B * S, 1, C): what changes the logits of tokens does not change these."""
        return self.lm_head(x)

    def forward(
        self, input_ids: Tensor, *, targets: Tensor | None = None, lengths: Tensor | None = None
    ) -> Tensor:
        """Logits (B, n_classes); with `targets` (B,), the sum of the losses of those that are not IGNORE
        instead, in nats.

        lengths: (B, S) how many tokens of each sequence count, from its first on. The padding behind them is
        a document of its own to the attention: nothing of it reaches the logits, whatever it holds."""
        ids = input_ids.flatten(0, 1)  # (B, S, T) -> (B * S, T)
        document_ids = None
        if lengths is not None:
            at = torch.arange(ids.shape[1], device=ids.device)
            document_ids = (at >= lengths.flatten().unsqueeze(1)).int()  # (B * S, T)
        first = torch.zeros(len(ids), dtype=torch.int64, device=ids.device)
        logits = super().forward(ids, document_ids=document_ids, last=first)
        if targets is None:
            return logits
        return F.cross_entropy(logits.float(), targets, ignore_index=IGNORE, reduction="sum")


class LitClassifier(LitGPT):
    """LitGPT's training step on a Classifier; validation logs val/accuracy beside val/loss."""

    def on_validation_epoch_start(self) -> None:
        super().on_validation_epoch_start()
        self.right = torch.zeros_like(self.val_sums[0])

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        inputs, targets = {k: v for k, v in batch.items() if k != "targets"}, batch["targets"]
        logits = self.net(**inputs).float()
        loss = F.cross_entropy(logits, targets, ignore_index=IGNORE, reduction="sum")
        self.val_sums += torch.stack((loss, (targets != IGNORE).sum()))
        self.right += (logits.argmax(dim=-1) == targets).sum()  # IGNORE is no class

    def on_validation_epoch_end(self) -> None:
        super().on_validation_epoch_end()
        if self.trainer.world_size > 1:
            torch.distributed.all_reduce(self.right)
        self.log("val/accuracy", (self.right / self.val_sums[1]).float(), logger=False)
