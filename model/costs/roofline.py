"""FLOPs, bytes of DRAM and time at the roofline of attention and of a training step, from a config alone."""

from __future__ import annotations

import math
from dataclasses import astuple, dataclass, replace

from attention.base import MASK_BLOCK
from model.costs.flops import AttentionSize, attention_flops, flops_per_token, parameter_count
from model.costs.gpus import GpuSheet
from model.costs.memory import cast_weight_bytes, saved_by_layer
from model.costs.memory_loss import output_bytes
from model.costs.run import Run
from model.sparsity import kept_share, pattern


@dataclass(frozen=True)
class Work:
    """FLOPs, and bytes to and from DRAM. `split` of the FLOPs, in fp32, are made of products of 16 bits on
    tensor cores, `halves` FLOPs of these."""

    flops: float
    bytes: float
    split: float = 0.0
    halves: float = 0.0

    def __add__(self, other: Work) -> Work:
        return Work(*map(sum, zip(astuple(self), astuple(other), strict=True)))

    def times(self, number: float) -> Work:
        return Work(*(number * each for each in astuple(self)))

    def compute_seconds(self, gpu: GpuSheet, value_bytes: int) -> float:
        """What the arithmetic takes at best."""
        return (self.flops - self.split) / gpu.flops(value_bytes) + self.halves / gpu.flops(2)

    def seconds(self, gpu: GpuSheet, value_bytes: int) -> float:
        """At best: the larger of what the arithmetic and what the memory takes."""
        return max(self.compute_seconds(gpu, value_bytes), self.bytes / gpu.bandwidth)

    def bound(self, gpu: GpuSheet, value_bytes: int) -> str:
        compute = self.compute_seconds(gpu, value_bytes) >= self.bytes / gpu.bandwidth
        return "compute" if compute else "bandwidth"


def attention_size(run: Run) -> AttentionSize:
    config = run.config
    shape = run.batch, config.n_head, config.kv_heads, config.seq_len, config.seq_len, config.head_size
    return AttentionSize(*shape, config.causal, run.value_bytes)


def visible_share(run: Run) -> float:
    """The share of the T^2 scores that the config lets queries see, those of documents uncounted: 1/2 where
    causal, of a window its band, and of model.sparsity the kept ones of the tiles that these touch. Where
    masks other than causal are tensors, no product skips what they hide."""
    config, T = run.config, run.config.seq_len
    pairs = T**2 / (2 if config.causal else 1)
    skips = not run.attention.declaration.writes_masks
    if config.window is not None and skips:
        window = min(config.window, T)
        band = T * (window + 1) - window * (window + 1) / 2  # a query and those up to `window` before it
        pairs = min(pairs, band if config.causal else 2 * band - T)
    if config.sparsity is not None and skips:
        kept = pattern(config.sparsity, -(-T // MASK_BLOCK), config.sparsity_blocks)
        reach = len(kept) if config.window is None else -(-config.window // MASK_BLOCK)
        near = kept.new_ones(kept.shape).triu(-reach).tril(reach)
        pairs *= kept_share(kept & near, config.causal) / kept_share(near, config.causal)
    return pairs / T**2


def attention_work(run: Run) -> tuple[Work, Work]:
    """Forward and backward of one layer: q, k, v in, out and lse out; backward those and dout in, dq, dk and
    dv out; and what the implementation moves beyond. With all scores in memory no product skips what is
    masked. Devices that share sequences have equal parts of it."""
    if run.sequence_ranks > 1:
        forward, backward = attention_work(replace(run, sequence_ranks=1))
        return forward.times(1 / run.sequence_ranks), backward.times(1 / run.sequence_ranks)
    size, own = attention_size(run), run.costs
    shape = size.batch, size.heads, size.tq, size.tk, size.head_dim
    share = 1.0 if own.writes_scores else visible_share(run)
    read = size.compulsory_bytes + own.moved_bytes[0]
    back = size.compulsory_bytes + 2 * (size.q_bytes + size.k_bytes) + own.moved_bytes[1]
    flops = attention_flops(*shape) * share
    flops_back = attention_flops(*shape, backward=not own.writes_scores) * share
    flops_back *= 2 if own.writes_scores else 1
    split, halves = int(own.split_matmuls > 0), own.split_matmuls
    return (
        Work(flops, read, split * flops, halves * flops),
        Work(flops_back, back, split * flops_back, halves * flops_back),
    )


def step_work(run: Run) -> Work:
    """One forward and backward of a micro-batch and one update. FLOPs: 6 N for each token of the matrices (2
    N more for those of blocks that checkpointing runs twice), and attention's. Bytes, at least: what is kept
    for backward, written and read; the logits and their gradient, the same; weights, read by forward and
    twice by backward; gradients, parameters and both moments, of its own shard, written and read;
    attention's. In chunks the loss reads and writes its weight's gradient with each. What devices send each
    other is left out."""
    config, L = run.config, run.config.n_layer
    forward, backward = attention_work(run)
    parameters = 4 * sum(parameter_count(config).values())
    kept = L * sum(saved_by_layer(run).values())
    weights = 3 * (cast_weight_bytes(replace(run, shards=1)) or parameters)
    dense = flops_per_token(config, seq_len=0) * run.tokens
    own = forward.times(L) + backward.times(L)
    logits = run.tokens * config.padded_vocab_size * run.value_bytes
    moved = 2 * kept + 4 * logits + weights + 8 * parameters // run.shards
    if config.loss_chunk:
        moved += math.ceil(run.tokens / config.loss_chunk) * 2 * output_bytes(run)
    if run.checkpointing:
        blocks = parameter_count(config)["attention"] + parameter_count(config)["mlp"]
        own += forward.times(L)
        dense += 2 * blocks * run.tokens
    return own + Work(dense, moved)
