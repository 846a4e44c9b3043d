"""The memory of a training step, predicted from its config alone: what is kept for backward, layer by layer,
and the peak among the moments of a step that can be it. Pure functions, tested against measured steps; the
letters are those of costs/run.py. What attention costs, its implementation says (attention/base.py).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from model.config import MOST_SPARSE
from model.costs.flops import gathered_whole, parameter_count
from model.costs.memory_loss import head_bytes, loss_bytes, loss_computes_gradients, output_bytes
from model.costs.run import Run


def attention_kept(run: Run) -> int:
    """Bytes that a layer's attention keeps for backward beyond q, k, v and out, its share of what layers
    share among them."""
    return run.costs.saved_bytes + run.costs.kept_per_model_bytes // run.config.n_layer


def saved_by_layer(run: Run) -> dict[str, int]:
    """Bytes that one block keeps for backward, attention's own left out.

    - norms: their input, the residual stream (`Run.residual_bytes`), and mean and 1 / deviation, 8 N
      (RMSNorm 4 N); a CPU's RMSNorm is unfused and keeps the normed input, 4 N C, too;
    - projections: the inputs of c_attn, N C e, and of c_proj, which is attention's out, N H D e;
    - qkv: c_attn's output, which attention keeps views of; after rotary or QK-norm also the new q and k.
      Unfused attention keeps copies of its own instead. QK-norm keeps its input, which is part of c_attn's
      output, and 1 / deviation; unfused both in fp32 before and after too (in fp32 before is that view);
    - mlp: the input of c_fc, N C e; GELU its output and what it makes of it, 2 N h e; SwiGLU the gate and the
      value, silu(gate) and the product, 4 N h e, of which a compiled step computes silu again: 3 N h e;
    - where devices share sequences, q and K and V of the whole sequence in their place, and out of each of
      the two calls, N H D e, beside both as one;
    - dropout: a mask of a byte (compiled: none, drawn again; on a CPU of e bytes) for each value of two
      branches.
    """
    config, N, e = run.config, run.tokens, run.value_bytes
    unfused = run.device == "cpu" and not run.compiled
    statistics = 4 * N * (1 if config.norm == "rmsnorm" else 2)
    if unfused and run.residual_bytes == run.width_bytes:
        statistics = 2 * N * e  # LayerNorm's on a CPU are of its input's dtype
    norms = 2 * (run.residual_bytes + statistics)
    if config.norm == "rmsnorm" and unfused:
        norms += 2 * run.residual_bytes
    turned = N * (config.n_head + config.kv_heads) * config.head_size  # values of q and k
    qkv = run.qkv_bytes + (turned * e if config.qk_norm or config.position == "rope" else 0)
    if run.sequence_ranks > 1:
        own_q = run.heads_bytes if config.qk_norm or config.position == "rope" else run.qkv_bytes
        qkv = own_q + run.whole_kv_bytes + run.heads_bytes
    if run.costs.writes_scores:
        qkv = run.qkv_bytes if config.qk_norm else 0
    if config.qk_norm:
        qkv += 4 * N * (config.n_head + config.kv_heads)
        qkv += (4 * turned * (1 if e == 4 else 2)) if unfused else 0
    hidden = 2 if config.mlp == "gelu" else 3 if run.compiled else 4
    mask = 0 if run.compiled or not config.dropout else 1 if run.device == "cuda" else e
    return {
        "norms": norms,
        "qkv": qkv,
        "projections": run.width_bytes + run.heads_bytes,
        "mlp": run.width_bytes + hidden * run.hidden_bytes,
        "dropout": 2 * N * config.n_embd * mask,
    }


def cast_weight_bytes(run: Run) -> int:
    """The 16-bit copies of all matrices that autocast makes and keeps for the whole step; with FSDP2, which
    gathers the others in 16 bits, of the output embedding alone. The loss in chunks lets go of this one."""
    if run.value_bytes == 4:
        return 0
    parts = parameter_count(run.config)
    output = 0 if loss_computes_gradients(run) else output_bytes(run) // 2
    return (2 * (parts["attention"] + parts["mlp"]) if run.shards == 1 else 0) + output


def table_bytes(run: Run) -> int:
    """What is there besides weights and state: inputs and targets, int64, rotary angles, workspaces."""
    rope = 4 * run.config.seq_len * run.config.head_size if run.config.position == "rope" else 0
    return 16 * run.tokens + rope + run.workspace_bytes


@dataclass(frozen=True)
class MemorySnapshot:
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


def peak(run: Run) -> MemorySnapshot:
    """What is alive when a step takes most; `memory_snapshots` has all that can be it."""
    return max(memory_snapshots(run), key=lambda snapshot: snapshot.peak)


def memory_snapshots(run: Run) -> list[MemorySnapshot]:
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

    Where devices share the state, `fully_sharded` says what of it is there.
    """
    config, N, e = run.config, run.tokens, run.value_bytes
    counts = {name: 4 * count for name, count in parameter_count(config).items()}
    parameters, L = sum(counts.values()), config.n_layer
    block = {name: counts[name] // L for name in ("attention", "mlp")}
    layer, own, table = saved_by_layer(run), run.costs, output_bytes(run)
    own_kept = attention_kept(run)
    whole, cast = sum(layer.values()), cast_weight_bytes(run)
    embedded = N * config.n_embd * (1 if run.device == "cuda" else 4) if config.dropout else 0
    last = layer["norms"] // 2  # the norm before the output embedding
    found = []

    def at(name: str, gradients: int, activations: int, attention: int) -> None:
        gradients = parameters if run.accumulates and run.shards == 1 else gradients
        state = (parameters, gradients, 2 * parameters, cast + embedded + activations, attention)
        found.append(MemorySnapshot(name, *state, table_bytes(run)))

    def below(layers: int) -> tuple[int, int]:
        """(activations, attention's own) of the first so many blocks before the backward gets to them."""
        return (layers * run.residual_bytes, 0) if run.checkpointing else (layers * whole, layers * own_kept)

    kept, held = below(L)
    at("loss", 0, kept + last + loss_bytes(run), held)
    at("head", table, kept + last + head_bytes(run), held)
    d_stream = run.residual_bytes + (run.width_bytes if e == 2 else 0)
    way = max(own.transient_bytes + run.whole_kv_bytes, 3 * run.whole_kv_bytes)
    mlp_way = run.hidden_bytes * (1 if config.mlp == "gelu" else 2)
    for index in range(L, 0, -1):
        kept, held = below(index - 1)
        if run.checkpointing:
            kept += run.residual_bytes
        done = table + (L - index) * (block["attention"] + block["mlp"])
        at(f"mlp {index}", done + block["mlp"] // 2, kept + whole + d_stream + mlp_way, held + own_kept)
        rest = whole - layer["norms"] // 2 + d_stream - (0 if run.compiled else layer["mlp"])
        if not own.writes_scores:  # which at its peak has dv alone, and does not keep out
            rest += run.residual_bytes + run.qkv_bytes
        at(f"attention {index}", done + block["mlp"], kept + rest, held + own_kept + way)
    tables = (1 if e == 2 or run.compiled or config.loss_chunk else 2) if config.tie_embeddings else 0
    at("embedding", parameters, run.residual_bytes + tables * table, 0)
    at("update", parameters, 0, 0)
    return fully_sharded(run, found) if run.shards > 1 else found


def fully_sharded(run: Run, snapshots: list[MemorySnapshot]) -> list[MemorySnapshot]:
    """The moments of a step of which each of n devices holds a part of the state (FSDP2): of the parameters,
    their gradients and both of Adam's moments; and besides, where all is gathered at once, all parameters
    until the end of the backward, the matrices in e bytes, and these in the forward a second time, as they
    came from the other devices; all gradients, the matrices' in e bytes, with micro-batches before in fp32 as
    well; and copies in fp32 on their way there (reduction), first of those in no block, then of the others.
    Else, with g the matrices of a block in e bytes:

    - until the end of the backward all that is in no block, gathered, and the gradient of the embedding;
    - block l: its g, the g of the block before, gathered meanwhile, its own gradients in e bytes, and the
      whole gradients of block l + 1 in fp32, under way to the other devices;
    - with micro-batches before, the whole gradients in fp32 of what has not been reduced yet."""
    counts, n, L = parameter_count(run.config), run.shards, run.config.n_layer
    parameters, block = 4 * sum(counts.values()), 4 * (counts["attention"] + counts["mlp"]) // L
    root, g, table = parameters - L * block, block * run.value_bytes // 4, output_bytes(run)
    held = root if run.accumulates else table  # gradients of what is in no block
    whole, found = gathered_whole(run.config), []
    if whole:
        reductions = ("reduction of embeddings", "reduction of matrices")
        snapshots = [*snapshots, *(replace(snapshots[-1], name=name) for name in reductions)]
    for snapshot in snapshots:
        moment, _, number = snapshot.name.partition(" ")
        index = int(number) if number.isdigit() else 0
        gathered, gradients = root, parameters if run.accumulates else snapshot.gradients
        if moment == "update":
            gathered, gradients = 0, parameters // n
        elif moment == "reduction":
            reduced = L * (block if run.accumulates else g)
            first = number == "of embeddings"
            gathered = L * g if first else 0
            gradients = reduced + (2 * root if first else root // n + L * block)
        elif whole:
            gathered += L * g * (2 if moment == "loss" else 1)
            computed = min(max(snapshot.gradients - table, 0), L * block)
            if run.accumulates:
                gradients += computed // 2 if run.value_bytes == 2 else 0
            else:
                gradients -= computed - computed * run.value_bytes // 4
        elif index:
            done = L - index
            left = index * block if run.accumulates else 0
            gathered += g * (1 + (index > 1))
            own = snapshot.gradients - table - done * block
            moving = block if done else 0
            gradients = held + left + done * block // n + own * run.value_bytes // 4 + moving
        elif moment == "embedding":
            gradients = L * block // n + 2 * root
        state = {"parameters": parameters // n + gathered, "optimizer": 2 * parameters // n}
        found.append(replace(snapshot, gradients=gradients, **state))
    return found


def longest_context(run: Run, capacity: int, most: int = 2**24) -> int:
    """The largest seq_len, a multiple of 64 up to `most` that the config allows (or this, if it is less),
    whose peak is at most `capacity` bytes; 0 where there is none. By bisection: the peak grows with it."""
    if run.config.sparsity is not None:
        most = min(most, MOST_SPARSE)
    if run.config.max_positions is not None:
        most = min(most, run.config.max_positions)
    step = min(64, most)
    low, high = 0, most // step
    while low < high:
        middle = (low + high + 1) // 2
        longer = replace(run, config=replace(run.config, seq_len=step * middle))
        low, high = (middle, high) if peak(longer).peak <= capacity else (low, middle - 1)
    return step * low
