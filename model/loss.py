"""Cross-entropy of a vocabulary too large to hold the logits of all tokens at once.

GPT-2's logits are 50,304 values a token: with their log-probabilities and gradients they are the greater part
of a long step's memory. Here those of `chunk` tokens exist at a time. As a loss that is summed knows its
gradient without knowing what comes after it, up to a factor, forward computes the gradients of a chunk while
its logits are there, and backward only multiplies: no product of the head is computed twice.

N tokens, C width, V vocabulary, Vp = V padded, n tokens of a chunk, e bytes of a value in compute.
"""

from __future__ import annotations

import importlib.util
from typing import Any

import torch
from torch import Tensor

import ops.triton.interpret  # noqa: F401  ops.triton names the folder of binaries before torch.compile does
from ops.linear import first_derivative_only, product

IGNORE = -1  # a target that is not counted: padding, or a prediction across a document boundary
HAS_TRITON = importlib.util.find_spec("triton") is not None


def compute_dtype(x: Tensor) -> torch.dtype:
    """That of products of x: autocast's, where it is on."""
    device = x.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x.dtype


def missing() -> str | None:
    """What keeps a GPU from the loss in one kernel, and how to have it; None where nothing does."""
    return None if HAS_TRITON else "no Triton: the loss reads its logits several times (pip install triton)"


def fuses_loss(x: Tensor) -> bool:
    """Whether the loss of x (..., C) has a kernel of its own: in 16 bits on a GPU, where Triton is
    installed."""
    return HAS_TRITON and x.is_cuda and compute_dtype(x) in (torch.bfloat16, torch.float16)


def chunked_loss(x: Tensor, weight: Tensor, targets: Tensor, vocab_size: int, chunk: int) -> Tensor:
    """F.cross_entropy(F.linear(x, weight)[..., :vocab_size], targets, ignore_index=IGNORE, reduction="sum")
    in fp32 (fp64 for fp64), in nats, the logits of `chunk` tokens at a time.

    x (..., C), weight (Vp, C), targets (...) int64 below vocab_size. The products are of autocast's dtype;
    the gradient of `weight` is summed over the chunks in its own."""
    dtype = compute_dtype(x)
    x, targets = x.flatten(0, -2), targets.flatten()  # (B, T, C) -> (N, C), (B, T) -> (N,)
    if torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad):
        return torch.ops.tilegpt.summed_loss(x, weight, targets, vocab_size, chunk, dtype)
    return _head_loss(x.to(dtype), weight, targets, vocab_size, chunk, False, False)[0]


class _Summed(torch.autograd.Function):
    """The loss; its gradients come with it."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        targets: Tensor,
        vocab_size: int,
        chunk: int,
        dtype: torch.dtype,
    ) -> Tensor:
        trains = ctx.needs_input_grad[1]  # not beside adapters
        loss, dx, dweight = _head_loss(x.to(dtype), weight, targets, vocab_size, chunk, True, trains)
        ctx.save_for_backward(dx, dweight)
        ctx.dtype = x.dtype
        return loss

    @staticmethod
    def backward(ctx: Any, dloss: Tensor) -> tuple[Tensor | None, ...]:
        subject = "The loss in chunks, and in 16 bits on a GPU, has"
        first_derivative_only(subject, "model.loss_chunk=0 has, with precision=32-true")
        dx, dweight = ctx.saved_tensors  # dx in x's own dtype before it is scaled: rounded once
        dweight = dweight * dloss if ctx.needs_input_grad[1] else None
        return dx.to(ctx.dtype, copy=True).mul_(dloss), dweight, None, None, None, None


# An op, as torch.compile does not cache what it has traced where it meets a torch.autograd.Function.
torch.library.define(
    "tilegpt::summed_loss",
    "(Tensor x, Tensor weight, Tensor targets, int vocab_size, int chunk, ScalarType dtype) -> Tensor",
)
torch.library.impl("tilegpt::summed_loss", "CompositeImplicitAutograd")(_Summed.apply)


# One opaque node to torch.compile, which would unroll the loop: hundreds of chunks, minutes of compilation.
@torch.library.custom_op(
    "tilegpt::head_loss",
    mutates_args=(),
    schema="(Tensor x, Tensor weight, Tensor targets, int vocab_size, int chunk, bool gradients, "
    "bool trains) -> (Tensor, Tensor, Tensor)",
)
def _head_loss(
    x: Tensor, weight: Tensor, targets: Tensor, vocab_size: int, chunk: int, gradients: bool, trains: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """The loss, with `gradients` its gradient by x (N, C) in x's dtype, and where weight (Vp, C) `trains`, by
    that in its own; in the place of what is not asked for an empty tensor. Computes in x's dtype."""
    loss, dx, dweight = (made.zero_() for made in _outputs(x, weight, gradients, trains))
    narrow = weight.to(x.dtype)
    for start in range(0, len(x), chunk):
        rows, wanted = x[start : start + chunk], targets[start : start + chunk]
        part, d = _softmax_loss(product(rows, narrow, True), wanted, vocab_size, gradients)
        loss += part
        if gradients:
            torch.mm(d, narrow, out=dx[start : start + chunk])
        if trains:
            _add_product(dweight, d.T, rows)
        del d  # or it would be there beside the next chunk's
    return loss, dx, dweight


def _softmax_loss(logits: Tensor, targets: Tensor, vocab_size: int, gradients: bool) -> tuple[Tensor, Tensor]:
    """The summed loss of logits (n, Vp), and its gradient by them, in their place: softmax - onehot, 0 in the
    padding and in rows that are not counted. On a GPU by one kernel of Triton, where that is installed.

    The padding takes part as exp(-inf): so all is aligned as Vp is, and its gradient is 0. What the target's
    column gets, p - 1, is computed in fp32: of a p in 16 bits near 1 nothing would be left."""
    if logits.is_cuda and logits.dtype != torch.float64 and HAS_TRITON:
        from ops.triton.cross_entropy import softmax_loss

        return softmax_loss(logits, targets, vocab_size, IGNORE, gradients).sum(), logits
    logits[:, vocab_size:] = -torch.inf
    log_p = torch.log_softmax(logits, -1, dtype=torch.promote_types(logits.dtype, torch.float32))
    left_out = (targets == IGNORE).unsqueeze(1)  # (n, 1)
    targets = targets.unsqueeze(1).masked_fill(left_out, 0)
    right = log_p.gather(1, targets)  # (n, 1)
    loss = -right.masked_fill(left_out, 0).sum()
    if gradients:
        torch.exp(log_p, out=logits).scatter_(1, targets, right.expm1().to(logits.dtype))
        logits.masked_fill_(left_out, 0)
    return loss, logits


def _add_product(total: Tensor, a: Tensor, b: Tensor) -> None:
    """total += a @ b; 16-bit products are added up in fp32 on a GPU, with no pass of their own."""
    if total.is_cuda and total.dtype == torch.float32 and a.dtype in (torch.bfloat16, torch.float16):
        torch.addmm(total, a, b, out_dtype=total.dtype, out=total)
    else:
        total += a @ b


def _outputs(x: Tensor, weight: Tensor, gradients: bool, trains: bool) -> tuple[Tensor, Tensor, Tensor]:
    loss = x.new_empty((), dtype=torch.promote_types(x.dtype, torch.float32))
    asked = ((x, gradients), (weight, trains))
    return loss, *(torch.empty_like(like) if wanted else like.new_empty(0) for like, wanted in asked)


@_head_loss.register_fake
def _(
    x: Tensor, weight: Tensor, targets: Tensor, vocab_size: int, chunk: int, gradients: bool, trains: bool
) -> tuple[Tensor, Tensor, Tensor]:
    return _outputs(x, weight, gradients, trains)
