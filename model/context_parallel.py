"""Context parallelism: the tokens of a sequence are spread over several ranks.

The sequence is cut into 2n chunks for n ranks, and rank r holds chunks r and 2n - 1 - r (a zigzag). Under a
causal mask the first sees little and the second much, together the same on every rank. Everything but
attention treats each token by itself. For attention every rank gathers K and V of the whole sequence and
makes two rectangular calls, one a chunk, each against the keys up to the chunk's end: the contract's
bottom-right alignment makes both of them plain causal calls, so any implementation with `rectangular` can do
them. In backward the gradients of K and V are summed over the ranks, each of which gets those of its own
tokens (a reduce-scatter).
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from attention.base import Attention
from conf.values import UserError, shown
from model.config import GPTConfig


def require_ranks(given: Any) -> None:
    """UserError unless trainer.strategy.context_parallel can be the devices that share a sequence."""
    if given != "all" and (type(given) is not int or given < 1):
        raise UserError(
            f"trainer.strategy.context_parallel={shown(given)}: it needs to be a number of devices that "
            "share each sequence, or all."
        )


def require_divisible(config: GPTConfig, ranks: int, devices: int) -> None:
    """UserError where `devices` cannot form groups of `ranks`, or such a group cannot share a sequence."""
    given = f"trainer=context_parallel spreads each sequence over {ranks} devices"
    if devices % ranks:
        fits = ", ".join(str(n) for n in range(1, devices + 1) if devices % n == 0)
        raise UserError(
            f"{given}, and there are {devices}: trainer.strategy.context_parallel needs to "
            f"divide that number ({fits}), or to be all."
        )
    if ranks == 1:
        return
    if not config.causal:
        raise UserError(f"{given}, which needs model.causal=true: use trainer=fsdp2 or ddp.")
    if config.sparsity is not None:
        raise UserError(f"{given}, which does not go with model.sparsity: use trainer=fsdp2 or ddp.")
    if config.seq_len % (2 * ranks):
        lower = config.seq_len // (2 * ranks) * 2 * ranks
        near = " or ".join(str(n) for n in (lower, lower + 2 * ranks) if n)
        raise UserError(
            f"{given}, in two chunks each, so seq_len={config.seq_len} needs to be a multiple of "
            f"{2 * ranks}: use {near}."
        )


# the names behind are those of older versions of torch, which newer ones warn of
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class ContextParallel:
    """What one rank of `group` does with its share of every sequence.

    T is the length of the whole sequence, n the number of ranks, t = T / n that of a share of two chunks."""

    def __init__(self, group: dist.ProcessGroup):
        self.group, self.rank, self.ranks = group, dist.get_rank(group), dist.get_world_size(group)

    def share(self, x: Tensor) -> Tensor:
        """This rank's tokens of x (B, T): (B, t)."""
        chunks = x.chunk(2 * self.ranks, dim=1)
        return torch.cat((chunks[self.rank], chunks[-1 - self.rank]), dim=1)

    def positions(self, tokens: int, device: torch.device) -> Tensor:
        """Where the `tokens` (t) of this rank are in the sequence: (t,)."""
        return self.share(torch.arange(tokens * self.ranks, device=device)[None])[0]

    def whole(self, x: Tensor) -> Tensor:
        """The whole sequence (..., T, D) of every rank's x (..., t, D), in its order."""
        shares = self.gather(x.contiguous()).unflatten(-2, (2, -1))  # (n, ..., t, D) -> (n, ..., 2, t/2, D)
        early, late = shares.unbind(-3)  # (n, ..., t/2, D): chunks 0 .. n-1, and 2n-1 .. n
        return torch.cat((*early.unbind(), *late.flip(0).unbind()), dim=-2)

    def gather(self, x: Tensor) -> Tensor:
        """x of every rank, (n, *x.shape); the gradient is the sum of theirs for this rank's."""
        return _Gather.apply(x, self.group)

    def documents(self, document_ids: Tensor) -> tuple[Tensor, Tensor]:
        """Document ids (B, t) of this rank's tokens as a pair: of the queries (B, t), of all keys (B, T)."""
        return document_ids, self.whole(document_ids.unsqueeze(-1)).squeeze(-1)

    def attend(
        self,
        attention: Attention,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        document_ids: tuple[Tensor, Tensor] | None,
        **options: Any,
    ) -> Tensor:
        """`attention` of the whole sequence for this rank's queries: q (B, Hq, t, D), k and v (B, Hkv, t, D)
        -> (B, Hq, t, D)."""
        k, v = self.whole(torch.stack((k, v)))  # (2, B, Hkv, T, D)
        chunk, outs = q.shape[2] // 2, []
        for half, index in enumerate((self.rank, 2 * self.ranks - 1 - self.rank)):
            mine, seen = slice(half * chunk, (half + 1) * chunk), slice(0, (index + 1) * chunk)
            ids = None
            if document_ids is not None:
                ids = document_ids[0][:, mine], document_ids[1][:, seen]
            outs.append(attention(q[:, :, mine], k[:, :, seen], v[:, :, seen], document_ids=ids, **options))
        return torch.cat(outs, dim=2)


class _Gather(torch.autograd.Function):
    """All-gather, whose transpose is a reduce-scatter."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        out = x.new_empty((dist.get_world_size(group) * x.shape[0], *x.shape[1:]))
        _all_gather(out, x, group=group)
        return out.unflatten(0, (-1, x.shape[0]))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        own = grad.new_empty(grad.shape[1:])
        _reduce_scatter(own, grad.flatten(0, 1).contiguous(), group=ctx.group)
        return own, None
