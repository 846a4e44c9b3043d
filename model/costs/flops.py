"""Parameters, FLOPs and bytes of a GPT from its config alone: pure functions, tested against counted ones."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from dataclasses import dataclass

from model.config import GPTConfig

# Dense bf16 peak in FLOP/s by the vendor's datasheet. An unknown GPU has no MFU rather than a wrong one.
PEAK_BF16_FLOPS = {
    "H100 PCIe": 756e12,
    "H100 NVL": 835e12,
    "GH200": 989e12,
    "H200": 989e12,
    "H100": 989e12,
    "H800": 989e12,
    "A100": 312e12,
    "A100 PCIe": 312e12,
    "A800": 312e12,
    "A800 PCIe": 312e12,
    "B200": 2250e12,
    "L40S": 362e12,
    "L4": 121e12,
    "A10G": 70e12,
    "RTX 5090": 209.5e12,
    "RTX 4090": 165e12,
    "RTX 3090": 71e12,
}

# Words of a name, beside those of the product, that make it no other one: Ti, D, NVL, PCIe, MIG, Laptop do.
BESIDE = re.compile(r"nvidia|geforce|gpu|sxm\d?|hbm3e?|(24|32|40|48|80|94|96|120|141|180|480)gb|144g")

WHOLE_BYTES = 2**30  # of fp32 parameters; FSDP2 gathers larger models block by block


def peak_bf16_flops(gpu_name: str) -> float | None:
    """Dense bf16 peak of the named GPU in FLOP/s, or None where it is not known."""
    return PEAK_BF16_FLOPS.get(product(gpu_name, PEAK_BF16_FLOPS))


def product(gpu_name: str, known: Iterable[str]) -> str | None:
    """Which of the `known` a GPU is by its name, however written; None for another one."""
    words = _words(gpu_name)
    found = [name for name in known if _words(name) <= words]
    best = max(found, key=lambda name: len(_words(name)), default=None)
    beside = words - _words(best or "")
    return best if all(BESIDE.fullmatch(word) for word in beside) else None


def _words(name: str) -> set[str]:
    return set(re.findall(r"[a-z0-9.]+", name.lower()))


def parameter_count(config: GPTConfig) -> dict[str, int]:
    """Parameters by part; the values add up to what the model holds. Tied embeddings count once, as `wte`."""
    C, hidden, bias = config.n_embd, config.mlp_size, int(config.bias)
    width, kv_width = config.n_head * config.head_size, config.kv_heads * config.head_size
    norm = C * (1 + (bias if config.norm == "layernorm" else 0))
    up = 2 * hidden if config.mlp == "swiglu" else hidden
    attention = (C + int(config.with_qkv_bias)) * (width + 2 * kv_width) + (width + bias) * C
    attention += 2 * config.head_size if config.qk_norm else 0
    mlp = (C + bias) * up + (hidden + bias) * C
    return {
        "wte": config.padded_vocab_size * C,
        "wpe": config.positions * C if config.position == "learned" else 0,
        "relative_bias": config.relative_buckets * config.n_head if config.position == "t5" else 0,
        "attention": config.n_layer * attention,
        "mlp": config.n_layer * mlp,
        "norms": (2 * config.n_layer + 1) * norm,
        "lm_head": 0 if config.tie_embeddings else config.padded_vocab_size * C,
    }


def gathered_whole(config: GPTConfig) -> bool:
    """Whether FSDP2 gathers all parameters at the start of a step and keeps them until its backward ends."""
    return 4 * sum(parameter_count(config).values()) <= WHOLE_BYTES


def flops_per_token(config: GPTConfig, seq_len: int | None = None, adapters: int | None = None) -> float:
    """Model FLOPs of forward and backward per token: 6N + 12LHDT (PaLM, appendix B), N the parameters without
    position embeddings. Causality is not discounted, as is usual for MFU; an untied input embedding does no
    multiplication and is left out.

    adapters: LoRA's parameters, where they alone train. The N then have no gradient, 4N + 6 adapters, and the
    weights of q, k and v in the first layer pass none on, as nothing below them trains: 2 less of each.
    """
    T = config.seq_len if seq_len is None else seq_len
    parts = parameter_count(config)
    positions = parts["wpe"] + parts["relative_bias"]
    N = sum(parts.values()) - positions - (0 if config.tie_embeddings else parts["wte"])
    if adapters is None:
        weights = 6 * N
    else:
        first = config.n_embd * config.head_size * (config.n_head + 2 * config.kv_heads)
        weights = 4 * N - 2 * first + 6 * adapters
    return weights + 12 * config.n_layer * config.n_head * config.head_size * T


def attention_flops(
    batch: int, heads: int, tq: int, tk: int, head_dim: int, *, causal: bool = False, backward: bool = False
) -> float:
    """FLOPs of one attention: 4*B*H*Tq*Tk*D forward, halved when causal; backward 2.5 times forward, as five
    products stand against two."""
    forward = 4 * batch * heads * tq * tk * head_dim * (0.5 if causal else 1.0)
    return forward * (2.5 if backward else 1.0)


def kv_cache_bytes(config: GPTConfig, batch: int, tokens: int, bytes_per_value: int = 2) -> int:
    """Bytes of the KV cache: keys and values, per layer, kv head and head dim."""
    return 2 * config.n_layer * batch * config.kv_heads * config.head_size * tokens * bytes_per_value


def score_matrix_bytes(batch: int, heads: int, tq: int, tk: int, bytes_per_value: int = 2) -> int:
    """Bytes of one layer's scores, all of which naive attention holds and tiled attention never does."""
    return batch * heads * tq * tk * bytes_per_value


@dataclass(frozen=True)
class Gpu:
    """What the traffic model knows of a GPU: multiprocessors, bytes of L2, and of L1 on each."""

    multiprocessors: int = 132
    l2_bytes: int = 50 << 20
    l1_bytes: int = 224 << 10


@dataclass(frozen=True)
class AttentionSize:
    """The shape of an attention; `value_bytes` of an element of q, k, v and out."""

    batch: int
    heads: int
    kv_heads: int
    tq: int
    tk: int
    head_dim: int
    causal: bool
    value_bytes: int = 2

    @property
    def q_bytes(self) -> int:
        """Of q, and of out."""
        return self.batch * self.heads * self.tq * self.head_dim * self.value_bytes

    @property
    def k_bytes(self) -> int:
        """Of k, and of v."""
        return self.batch * self.kv_heads * self.tk * self.head_dim * self.value_bytes

    @property
    def lse_bytes(self) -> int:
        return 4 * self.batch * self.heads * self.tq

    @property
    def compulsory_bytes(self) -> int:
        """q, k and v read once, out and lse written once: what no implementation can do without."""
        return 2 * (self.q_bytes + self.k_bytes) + self.lse_bytes


@dataclass(frozen=True)
class Traffic:
    """Bytes of a forward: read from and written to DRAM while it runs; both ways between L2 and the
    multiprocessors."""

    dram_read: float
    dram_write: float
    l2: float

    def __add__(self, other: Traffic) -> Traffic:
        dram = self.dram_read + other.dram_read, self.dram_write + other.dram_write
        return Traffic(*dram, self.l2 + other.l2)


def missed(walked: float, cache: float) -> float:
    """Share of reads that miss where `walked` bytes go round and round through a cache of `cache` bytes that
    replaces lines at random: 0 if they fit, else the m > 0 with 1 - m = exp(-m walked / cache), as a line has
    to survive m walked replacements until its turn comes again."""
    low, high = 0.0, 1.0
    if walked <= cache:
        return low
    for _ in range(50):
        middle = (low + high) / 2
        if 1 - math.exp(-middle * walked / cache) > middle:
            low = middle
        else:
            high = middle
    return high


def kernel_traffic(reads: float, writes: float, l2: float, gpu: Gpu) -> Traffic:
    """One kernel that reads and writes so many bytes beyond the L2. What it writes gets to DRAM when newer
    lines need the room: at its end the L2 holds the last of both, and the written share of that is not there
    yet. (A profiler counts as long as the kernel runs.)"""
    left = gpu.l2_bytes * writes / max(1.0, reads + writes)
    return Traffic(reads, max(0.0, writes - left), l2)


def naive_traffic(
    size: AttentionSize, gpu: Gpu, strip: int, softmax_blocks: int, output_blocks: int
) -> Traffic:
    """ladder/naive.cu, from cold caches in each of its three kernels; a thread owns `strip` queries. S is
    4 Tq Tk bytes a head, written, read and written, and read, masked or not; to which add:

    - scores: blocks walk the keys of a head before they turn to the next 8 strips of its queries, so its K
      comes from DRAM once, if it fits in the L2 with the rows of S that are written meanwhile;
    - softmax: walks each row three times, `softmax_blocks` rows at a time on the GPU. The second and third
      walk are reads from L2 if these rows overflow the L1s, and all of them from DRAM if they overflow the
      L2, whose oldest lines go first (an H200 reads S 1.01 times at 4k tokens, 3.00 times at 16k);
    - output: `output_blocks` blocks at a time, head after head, walk V in step: V comes once for each wave
      that a head's blocks take.
    """
    size_of_row, heads = 4 * size.tk, size.batch * size.heads
    matrix, rows = heads * size.tq * size_of_row, 8 * strip
    tiles = math.ceil(size.tq / rows)
    token = size.head_dim * size.value_bytes

    again = (tiles - 1) * missed(size.tk * token + rows * size_of_row, gpu.l2_bytes)
    reads = size.q_bytes + size.k_bytes * (1 + again)
    from_l2 = heads * math.ceil(size.tk / 32) * tiles * (32 + rows) * token
    scores = kernel_traffic(reads, matrix, from_l2 + matrix, gpu)

    walked = min(softmax_blocks, heads * size.tq) * size_of_row
    again = 2 * missed(walked / gpu.multiprocessors, gpu.l1_bytes)
    reads, writes = matrix * (1 + again * (walked > gpu.l2_bytes)), matrix + size.lse_bytes
    softmax = kernel_traffic(reads, writes, matrix * (1 + again) + writes, gpu)

    rows = strip * (256 // math.ceil(size.head_dim / 4))
    blocks = heads * math.ceil(size.tq / rows)
    walked = size.tk * token + min(output_blocks, blocks) * rows * size_of_row
    again = (math.ceil(blocks / heads / output_blocks) - 1) * missed(walked, gpu.l2_bytes)
    from_l2 = matrix + blocks * size.tk * token
    output = kernel_traffic(matrix + size.k_bytes * (1 + again), size.q_bytes, from_l2 + size.q_bytes, gpu)
    return scores + softmax + output


def keys_walked(size: AttentionSize, br: int, bc: int) -> int:
    """Keys that the tiles of `br` queries of one head read, in tiles of `bc`, those beyond a causal mask left
    out."""
    total = 0
    for start in range(0, size.tq, br):
        seen = min(size.tk, min(start + br, size.tq) + size.tk - size.tq) if size.causal else size.tk
        total += min(size.tk, math.ceil(max(0, seen) / bc) * bc)
    return total


def tiled_traffic(
    size: AttentionSize, gpu: Gpu, br: int, bc: int, blocks: int, grouped_bytes: int = 24 << 20
) -> Traffic:
    """One fused kernel, a block for each `br` queries: tiled.cu and fa2.cu; rowwise.cu with br = bc = 1 and
    nothing grouped.

    q, k and v come from DRAM once, out and lse are written once: K and V are read again for every tile of
    queries, Tq / br times, but from L2, as the heads that run side by side are as many as have
    `grouped_bytes` of K and V (one at least). Should these outgrow the L2, each wave of `blocks` blocks reads
    them again from DRAM.
    """
    token, heads = size.head_dim * size.value_bytes, size.batch * size.heads
    group = size.heads // size.kv_heads
    at_once = min(heads, group * max(1, grouped_bytes // (2 * size.tk * token)))
    waves = math.ceil(math.ceil(size.tq / br) * at_once / blocks)
    again = (waves - 1) * missed(math.ceil(at_once / group) * 2 * size.tk * token, gpu.l2_bytes)
    reads, writes = size.q_bytes + 2 * size.k_bytes * (1 + again), size.q_bytes + size.lse_bytes
    from_l2 = size.q_bytes + heads * keys_walked(size, br, bc) * 2 * token
    return kernel_traffic(reads, writes, from_l2 + writes, gpu)


def fa1_traffic(size: AttentionSize, gpu: Gpu, br: int, bc: int, blocks: int) -> Traffic:
    """ladder/fa1.cu: a block a head, which brings `bc` keys and values at a time and takes all queries that
    see them past these, `br` at a time. A query brings its row of q, and carries O, m and l in fp32, 4 D + 8
    bytes, from each step to the next; the last writes out and lse.

    min(heads, `blocks`) heads run side by side. Rows of theirs that overflow the L2 go to DRAM and come back
    from there at every step.
    """
    token, state, heads = size.head_dim * size.value_bytes, 4 * size.head_dim + 8, size.batch * size.heads
    at_once = min(heads, blocks)
    kv = 2 * size.k_bytes * size.heads // size.kv_heads  # by each query head
    reads, writes = size.q_bytes + 2 * size.k_bytes, size.q_bytes + size.lse_bytes
    both_ways = kv + writes
    for start in range(0, size.tk, bc):
        first = max(0, start - (size.tk - size.tq)) // br * br if size.causal else 0
        rows = max(0, size.tq - first)
        share = missed(at_once * rows * (token + state), gpu.l2_bytes)
        both_ways += heads * rows * token
        if start:  # what these bring from the step before
            reads += heads * rows * share * (state + token)
            writes += heads * rows * share * state
            both_ways += heads * rows * 2 * state
    return kernel_traffic(reads, writes, both_ways, gpu)
