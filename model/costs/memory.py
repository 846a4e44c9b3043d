"""The memory of a training step, predicted from its config alone: what is kept for backward, layer by layer,
and the peak among the moments of a step that can be it. Pure functions, tested against measured steps.

N = B T tokens, C the width, H heads of D, Hkv of them for keys, h the MLP's hidden width, V the vocabulary,
Vp padded; e bytes of a value in compute (2 under bf16 autocast, else 4). Parameters, gradients, optimiser
state, embeddings and the residual stream are fp32, always.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from conf.values import UserError
from model.config import GPTConfig
from model.costs.flops import parameter_count, score_matrix_bytes
from model.costs.memory_loss import head_bytes, loss_bytes, output_bytes

QUADRATIC, TILE = ("naive", "sdpa_math"), 128  # rows of a tile of `tiled`, and what fused kernels pad to


@dataclass(frozen=True)
class Run:
    """A training step: the model, rows of a micro-batch, the implementation of attention by its name,
    `value_bytes` e, whether it is compiled and checkpointed, whether gradients of micro-batches before are
    there (`accumulates`), and the bytes of libraries' workspaces."""

    config: GPTConfig
    batch: int
    attention: str = "sdpa"
    value_bytes: int = 4
    device: str = "cuda"
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
    def residual_bytes(self) -> int:  # 4 N C
        return 4 * self.tokens * self.config.n_embd

    @property
    def qkv_bytes(self) -> int:
        config = self.config
        return self.tokens * (config.n_head + 2 * config.kv_heads) * config.head_dim * self.value_bytes

    @property
    def hidden_bytes(self) -> int:  # N h e
        return self.tokens * self.config.mlp_hidden * self.value_bytes

    @property
    def quadratic(self) -> bool:  # scores are written out
        return family(self) in QUADRATIC


def family(run: Run) -> str:
    """The implementation whose memory a name's is: auto's choice is a fused one (on a CPU SDPA's). SDPA left
    alone takes its flash kernel, but the unfused maths for fp32 on CUDA and for dropout on a CPU."""
    if run.attention in ("auto", "sdpa", "sdpa_flash", "cuda"):
        if run.attention in ("auto", "sdpa") and run.device == "cuda" and run.value_bytes == 4:
            return "sdpa_math" if run.attention == "sdpa" else "cuda_tiled"
        if run.attention == "cuda":
            return "cuda_fa2" if run.value_bytes == 2 else "cuda_tiled"
        if run.device == "cpu":
            return "sdpa_math" if run.config.attn_dropout else "sdpa_cpu"
        return "triton" if run.attention == "auto" else "sdpa_flash"
    return "cuda_fa2" if run.attention == "cuda_fa3" else run.attention  # whose backward it has


def scores_bytes(run: Run) -> int:
    """A layer's scores in fp32, as naive attention writes them: 4 B H T^2."""
    return score_matrix_bytes(run.batch, run.config.n_head, run.config.seq_len, run.config.seq_len, 4)


def lse_bytes(run: Run) -> int:
    """The log of the softmax's denominator, 4 B H T: all that a fused implementation keeps of the scores."""
    return 4 * run.tokens * run.config.n_head


@dataclass(frozen=True)
class Own:
    """Bytes that an implementation of attention takes in a layer beyond q, k, v and out: `kept` for backward,
    and at most `transient` more during it, beyond dq, dk and dv."""

    kept: int
    transient: int


def attention_own(run: Run) -> Own:
    """M = 4 B H T^2, the scores in fp32.

    naive: exp(s - max) and the probabilities, which the division and P V keep, M each; q, k and v as the
    products take them, contiguous, fp32 and of all H heads; the mask, T^2 bytes; sum and lse. In backward dP
    and three of the division's products at once, when the copy of v has gone; compiled, dP alone. What is
    compiled under autocast has its backward products in 16 bits: of q, k and v as kept for them, and of P as
    exp(s - max) gives it again (after dropout as kept in 16 bits). Compiled layers share a mask.

    sdpa_math: the probabilities, and q, k, v scaled and copied, in fp32; in backward dP and dS, on a GPU one
    matrix more. SDPA of any kind takes a window as a mask of T^2 values of e bytes, ALiBi as H of them, and
    keeps its own out beside the one without rows that see nothing.

    tiled: lse; in backward dq in fp32 where q is not, and the tiles: five of scores and six of rows.

    fused kernels: lse; in backward the padded row statistics (lse2 and delta), and where blocks of keys add
    to dq by atomics, its fp32 accumulator, padded to tiles of 128 rows and 32 columns. flash-attn 2 writes dk
    and dv of GQA for each query head before it sums them, 3 and 4 in fp32. flex has dout times out.
    cuda_tiled in fp32 splits q, k, v and dout into two numbers of fp16 each, rows padded to 32 columns.
    """
    config, name, B, T = run.config, family(run), run.batch, run.config.seq_len
    H, D = config.n_head, config.head_dim
    M, lse, wide = scores_bytes(run), lse_bytes(run), run.residual_bytes
    if name == "naive":
        dropped = M // 4 if config.attn_dropout else 0  # which probabilities were kept, as bool
        if run.compiled:
            matrices = 2 * M if run.value_bytes == 4 else M + 2 * dropped
            return Own(matrices + 3 * run.width_bytes + T * T // config.n_layer + 2 * lse, M)
        return Own(2 * M + 3 * wide + T * T + 2 * lse + dropped, 4 * M - wide)
    masks = T * T * run.value_bytes * (H if config.position == "alibi" else int(config.window is not None))
    masks += run.width_bytes if masks else 0
    if name == "sdpa_math":
        mask = M // 4 if run.device == "cuda" else M
        kept = M + 3 * wide + masks + (M + mask if config.attn_dropout else 0)
        return Own(kept, M if run.compiled else (3 if run.device == "cuda" else 2) * M)
    if name == "tiled":
        tiles = 4 * B * H * min(T, TILE) * (5 * min(T, TILE) + 6 * D)
        return Own(lse, tiles + (wide if run.value_bytes == 2 else 0))
    if name == "sdpa_cpu":
        return Own(lse + masks, 0)
    padded = 4 * B * H * math.ceil(T / TILE) * TILE
    accumulator = padded * math.ceil(D / 32) * 32
    grouped = config.kv_heads < H
    if name in ("sdpa_flash", "flash2"):
        lse += masks if name == "sdpa_flash" else 0  # then the memory-efficient kernel's
        return Own(lse, padded + accumulator + (2 * run.width_bytes if grouped else 0))
    if name in ("flash3", "flash4"):
        return Own(lse, 2 * padded + accumulator + (8 * run.tokens * config.kv_heads * D if grouped else 0))
    if name in ("cuda_fa2", "sdpa_cudnn", "sdpa_efficient"):
        return Own(lse + (masks if name != "cuda_fa2" else 0), 2 * padded + accumulator)
    if name == "flex":
        return Own(lse, padded + run.width_bytes)
    split = 4 * 2 * run.tokens * (H + config.kv_heads) * math.ceil(D / 32) * 32
    return Own(lse, 2 * padded + (split if name == "cuda_tiled" and run.value_bytes == 4 else 0))  # or triton


def saved_by_layer(run: Run) -> dict[str, int]:
    """Bytes that one block keeps for backward, attention's own left out.

    - norms: their input, the residual stream, 4 N C each, and mean and 1 / deviation, 8 N (RMSNorm 4 N); a
      CPU's RMSNorm is unfused and keeps the normed input, 4 N C, too;
    - projections: the inputs of c_attn, N C e, and of c_proj, which is attention's out, N C e;
    - qkv: c_attn's output, which attention keeps views of; after rotary or QK-norm also the new q and k.
      Unfused attention keeps copies of its own instead. QK-norm keeps its input, which is part of c_attn's
      output, and 1 / deviation; unfused both in fp32 before and after too (in fp32 before is that view);
    - mlp: the input of c_fc, N C e; GELU its output and what it makes of it, 2 N h e; SwiGLU the gate and the
      value, silu(gate) and the product, 4 N h e, of which a compiled step computes silu again: 3 N h e;
    - dropout: a mask of a byte (compiled: none, drawn again; on a CPU of e bytes) for each value of two
      branches.
    """
    config, N, e = run.config, run.tokens, run.value_bytes
    unfused = run.device == "cpu" and not run.compiled
    statistics = 4 * N * (1 if config.norm == "rmsnorm" else 2)
    norms = 2 * (run.residual_bytes + statistics)
    if config.norm == "rmsnorm" and unfused:
        norms += 2 * run.residual_bytes
    turned = N * (config.n_head + config.kv_heads) * config.head_dim  # values of q and k
    qkv = run.qkv_bytes + (turned * e if config.qk_norm or config.position == "rope" else 0)
    if run.quadratic:
        qkv = run.qkv_bytes if config.qk_norm else 0
    if config.qk_norm:
        qkv += 4 * N * (config.n_head + config.kv_heads)
        qkv += (4 * turned * (1 if e == 4 else 2)) if unfused else 0
    hidden = 2 if config.mlp == "gelu" else 3 if run.compiled else 4
    mask = 0 if run.compiled or not config.dropout else 1 if run.device == "cuda" else e
    return {
        "norms": norms,
        "qkv": qkv,
        "projections": 2 * run.width_bytes,
        "mlp": run.width_bytes + hidden * run.hidden_bytes,
        "dropout": 2 * N * config.n_embd * mask,
    }


def cast_weight_bytes(run: Run) -> int:
    """The 16-bit copies of all matrices that autocast makes and keeps for the whole step; the loss in chunks
    lets go of the output embedding's."""
    if run.value_bytes == 4:
        return 0
    parts = parameter_count(run.config)
    output = 0 if run.config.loss_chunk else output_bytes(run) // 2
    return 2 * (parts["attention"] + parts["mlp"]) + output


def table_bytes(run: Run) -> int:
    """What is there besides weights and state: inputs and targets, int64, rotary angles, workspaces."""
    rope = 4 * run.config.seq_len * run.config.head_dim if run.config.position == "rope" else 0
    return 16 * run.tokens + rope + run.workspace_bytes


@dataclass(frozen=True)
class Moment:
    """What is alive at a moment of the step, in bytes, by the kinds of scripts/memory.py."""

    name: str
    parameters: int
    gradients: int
    optimizer: int
    activations: int
    attention: int
    other: int

    @property
    def peak(self) -> int:
        state = self.parameters + self.gradients + self.optimizer
        return state + self.activations + self.attention + self.other


def peak(run: Run) -> Moment:
    """The moment of a step at which most is alive; `moments` tells of them all."""
    return max(moments(run), key=lambda moment: moment.peak)


def moments(run: Run) -> list[Moment]:
    """Every moment of a step that may be its peak; Z = what a block keeps (checkpointed: its input, 4 N C).

    - loss, head: all layers' Z, the last norm's, and what model/costs/memory_loss.py tells of;
    - mlp l, attention l: going back through block l: Z of those up to it (checkpointed: their inputs, and all
      that block l keeps, computed again), the gradients of those after it, that of the residual stream, and
      what the MLP's or attention's backward takes on its way: for GELU one more N h e, for SwiGLU two; dq, dk
      and dv and attention's own. What the MLP kept has gone when attention's turn comes, except in a compiled
      step, which frees it later;
    - embedding: tied, the gradients of the whole table from input and output, and, where the latter is a
      transposed view, as a product in fp32 gives it, their sum;
    - update: all gradients.
    """
    config, N, e = run.config, run.tokens, run.value_bytes
    counts = {name: 4 * count for name, count in parameter_count(config).items()}
    parameters, L = sum(counts.values()), config.n_layer
    block = {name: counts[name] // L for name in ("attention", "mlp")}
    layer, own, table = saved_by_layer(run), attention_own(run), output_bytes(run)
    whole, cast = sum(layer.values()), cast_weight_bytes(run)
    embedded = N * config.n_embd * (1 if run.device == "cuda" else 4) if config.dropout else 0
    last = layer["norms"] // 2  # the norm before the output embedding
    found = []

    def at(name: str, gradients: int, activations: int, attention: int) -> None:
        gradients = parameters if run.accumulates else gradients
        state = (parameters, gradients, 2 * parameters, cast + embedded + activations, attention)
        found.append(Moment(name, *state, table_bytes(run)))

    def below(layers: int) -> tuple[int, int]:
        """(activations, attention's own) of the first so many blocks before the backward gets to them."""
        return (layers * run.residual_bytes, 0) if run.checkpointing else (layers * whole, layers * own.kept)

    kept, held = below(L)
    at("loss", 0, kept + last + loss_bytes(run), held)
    at("head", table, kept + last + head_bytes(run), held)
    d_stream = run.residual_bytes + (run.width_bytes if e == 2 else 0)
    mlp_way = run.hidden_bytes * (1 if config.mlp == "gelu" else 2)
    for index in range(L, 0, -1):
        kept, held = below(index - 1)
        if run.checkpointing:
            kept += run.residual_bytes
        done = table + (L - index) * (block["attention"] + block["mlp"])
        at(f"mlp {index}", done + block["mlp"] // 2, kept + whole + d_stream + mlp_way, held + own.kept)
        rest = whole - layer["norms"] // 2 + d_stream - (0 if run.compiled else layer["mlp"])
        if not run.quadratic:  # which at its peak has dv alone, and does not keep out
            rest += run.residual_bytes + run.qkv_bytes
        at(f"attention {index}", done + block["mlp"], kept + rest, held + own.kept + own.transient)
    tables = (1 if e == 2 or run.compiled or config.loss_chunk else 2) if config.tie_embeddings else 0
    at("embedding", parameters, run.residual_bytes + tables * table, 0)
    at("update", parameters, 0, 0)
    return found


def longest_context(run: Run, capacity: int, most: int = 2**24) -> int:
    """The largest seq_len, a multiple of 64 up to `most`, whose peak is at most `capacity` bytes; 0 where not
    even 64 is. By bisection: the peak grows with it."""
    low, high = 0, most // 64
    while low < high:
        middle = (low + high + 1) // 2
        longer = replace(run, config=replace(run.config, seq_len=64 * middle))
        low, high = (middle, high) if peak(longer).peak <= capacity else (low, middle - 1)
    return 64 * low
