"""Cross-entropy and its gradient in place of the logits, in one kernel: a row of logits comes from memory
once, and its gradient goes there once.

Each program has a row, and its second pass over it finds the row in L2: 100 KB of GPT-2's vocabulary in bf16,
26 MB for the two blocks of each multiprocessor. Written with PyTorch's own functions the same is six passes,
and compiled by Inductor two readings of the logits and one writing.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ops.triton.interpret import INTERPRETED, mend

if INTERPRETED:
    mend()

BLOCK, WARPS = 8192, 16


@triton.jit
def _tilegpt_cross_entropy(
    logits_ptr,
    targets_ptr,
    losses_ptr,
    stride,
    vocab_size,
    padded,
    IGNORE: tl.constexpr,
    GRADIENTS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Row r of the logits (n, padded): losses[r] = -log softmax(row)[target], or 0 where that is IGNORE; with
    GRADIENTS the row becomes softmax(row) - onehot(target), or 0. Columns from vocab_size on are padding,
    whose gradient is 0."""
    LOG2E: tl.constexpr = 1.4426950408889634
    row = tl.program_id(0).to(tl.int64)
    logits_ptr += row * stride
    target = tl.load(targets_ptr + row)
    counted = target != IGNORE
    # before the first reduction: after it another warp may have written the gradient there
    at_target = tl.load(logits_ptr + tl.where(counted, target, 0)).to(tl.float32)
    columns = tl.arange(0, BLOCK)
    full = vocab_size // BLOCK * BLOCK  # up to there without masks: instructions count here
    highest = float("-inf")
    total = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, full, BLOCK):
        x = tl.load(logits_ptr + start + columns).to(tl.float32)
        highest, total = _seen(x, highest, total)
    if full < vocab_size:
        # loads are masked by `padded`, of which alignment is known: by vocab_size they would be of 2 bytes
        x = tl.load(logits_ptr + full + columns, full + columns < padded, 0.0).to(tl.float32)
        highest, total = _seen(tl.where(full + columns < vocab_size, x, float("-inf")), highest, total)
    log2_total = tl.log2(tl.sum(total, 0))
    log2_p = (at_target - highest) * LOG2E - log2_total
    tl.store(losses_ptr + row, tl.where(counted, -log2_p / LOG2E, 0.0))
    if GRADIENTS:
        log2_total = tl.where(counted, log2_total, float("inf"))  # of a row that is not counted all p are 0
        dtype = logits_ptr.dtype.element_ty
        for start in range(0, full, BLOCK):
            x = tl.load(logits_ptr + start + columns).to(tl.float32)
            tl.store(logits_ptr + start + columns, tl.exp2((x - highest) * LOG2E - log2_total).to(dtype))
        if full < padded:
            x = tl.load(logits_ptr + full + columns, full + columns < padded, 0.0).to(tl.float32)
            d = tl.exp2((x - highest) * LOG2E - log2_total)
            d = tl.where(full + columns < vocab_size, d, 0.0)
            tl.store(logits_ptr + full + columns, d.to(dtype), full + columns < padded)
        tl.debug_barrier()  # whoever wrote p there is done
        tl.store(logits_ptr + target, (tl.exp2(log2_p) - 1).to(dtype), counted)


@triton.jit
def _seen(x, highest, total):
    """The highest of what was seen and x, and, by lanes, the sum of its exponentials below that."""
    LOG2E: tl.constexpr = 1.4426950408889634
    higher = tl.maximum(highest, tl.max(x, 0))
    return higher, total * tl.exp2((highest - higher) * LOG2E) + tl.exp2((x - higher) * LOG2E)


def softmax_loss(
    logits: Tensor,
    targets: Tensor,
    vocab_size: int,
    ignore: int,
    gradients: bool,
    block: int | None = None,
    warps: int | None = None,
) -> Tensor:
    """The losses (n,) fp32 of logits (n, Vp), whose rows are contiguous; with `gradients` the logits become
    their gradients."""
    n, padded = logits.shape
    block = block or min(BLOCK, triton.next_power_of_2(padded))  # a short row is the work of few warps
    warps = warps or max(1, block * WARPS // BLOCK)
    losses = logits.new_empty(n, dtype=torch.float32)
    _tilegpt_cross_entropy[(n,)](
        logits, targets, losses, logits.stride(0), vocab_size, padded,
        IGNORE=ignore, GRADIENTS=gradients, BLOCK=block, num_warps=warps,
    )  # fmt: skip
    return losses
