"""What fixes a GPT: its shapes and its function, as plain values that travel in checkpoints."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from conf.values import UserError, number, one_of, shown, switch, whole
from model.sparsity import PATTERNS

# A config may come from a file of others: what it sizes is at most so long, whatever its weights. A mask of
# blocks grows with the square of seq_len: 256 MiB for 2**21 tokens.
MOST, MOST_SPARSE = 2**24, 2**21


@dataclass(frozen=True)
class GPTConfig:
    """Everything that fixes the shapes and the function of a GPT. Plain values: it travels in checkpoints."""

    vocab_size: int
    seq_len: int = 1024
    n_layer: int = 12
    n_head: int = 12
    n_embd: int = 768
    n_kv_head: int | None = None  # None: as many as n_head (MHA); 1: MQA
    head_dim: int | None = None  # None: n_embd / n_head
    position: str = "learned"  # learned | rope | alibi | t5 | none
    max_positions: int | None = None  # that the weights know; None: seq_len
    rope_base: float = 10_000.0
    rope_scaling: list[Any] | None = None  # [linear, factor] or [llama3, factor, low, high, trained context]
    relative_buckets: int = 32  # with t5
    relative_distance: int = 128
    norm: str = "layernorm"  # layernorm | rmsnorm
    norm_eps: float | None = None  # None: 1e-5 for layernorm, 1e-6 for rmsnorm and QK-norm
    mlp: str = "gelu"  # gelu | swiglu
    mlp_hidden: int | None = None  # None: see `mlp_size`
    qk_norm: bool = False
    window: int | None = None  # keys a query looks back on besides its own; both ways when not causal
    sparsity: str | None = None  # a pattern of model/sparsity.py
    sparsity_blocks: int = 4
    softcap: float | None = None
    causal: bool = True
    tie_embeddings: bool = True
    bias: bool = True
    qkv_bias: bool | None = None  # of the projections to queries, keys and values; None: as bias
    dropout: float = 0.0
    attn_dropout: float = 0.0
    loss_chunk: int = 0  # tokens whose logits exist at a time in the loss; 0: all
    fp32_residual: bool = True  # under autocast; False: the residual stream is of autocast's dtype

    # What belongs to the training and not to the weights: with init_from, the new run's own is used.
    TRAINING: ClassVar[frozenset[str]] = frozenset({"dropout", "attn_dropout", "loss_chunk", "fp32_residual"})
    # What a resumed run, and one with init_from, may set to another value: no weight's shape depends on it.
    FREE: ClassVar[frozenset[str]] = TRAINING | {
        "rope_base",
        "rope_scaling",
        "window",
        "softcap",
        "causal",
    }

    def __post_init__(self) -> None:
        """UserError for a value that no model can have, wherever it comes from: conf/ or a checkpoint."""
        whole("seq_len", self.seq_len, 1, MOST if self.sparsity is None else MOST_SPARSE)
        for key in ("vocab_size", "n_layer", "n_head", "n_embd"):
            whole(f"model.{key}", getattr(self, key), 1, MOST)
        whole("model.n_kv_head", self.n_kv_head, 1, MOST, null="as many as model.n_head")
        whole("model.head_dim", self.head_dim, 1, MOST, null="model.n_embd / model.n_head")
        whole("model.mlp_hidden", self.mlp_hidden, 1, MOST, null="a multiple of model.n_embd")
        whole("model.max_positions", self.max_positions, 1, 2**31 - 1, null="seq_len")
        whole("model.window", self.window, 0, 2**31 - 1, null="no window")
        whole("model.loss_chunk", self.loss_chunk, 0)
        whole("model.sparsity_blocks", self.sparsity_blocks, 1, MOST)
        whole("model.relative_buckets", self.relative_buckets, 4, 2**12)
        whole("model.relative_distance", self.relative_distance, self.relative_buckets // 2 + 1, 2**16)
        if self.sparsity is not None:
            one_of("model.sparsity", self.sparsity, PATTERNS)
        number("model.rope_base", self.rope_base, above=0)
        number("model.norm_eps", self.norm_eps, above=0, null="1e-5 for layernorm and 1e-6 for rmsnorm")
        number("model.softcap", self.softcap, above=0, null="none")
        for key in ("dropout", "attn_dropout"):
            number(f"model.{key}", getattr(self, key), least=0, below=1)
        for key in ("qk_norm", "causal", "tie_embeddings", "bias", "fp32_residual"):
            switch(f"model.{key}", getattr(self, key))
        if self.qkv_bias is not None:
            switch("model.qkv_bias", self.qkv_bias)
        one_of("model.position", self.position, ("learned", "rope", "alibi", "t5", "none"))
        one_of("model.norm", self.norm, ("layernorm", "rmsnorm"))
        one_of("model.mlp", self.mlp, ("gelu", "swiglu"))
        if self.rope_scaling is not None:
            object.__setattr__(self, "rope_scaling", _rope_scaling(self.rope_scaling))
        if self.seq_len > self.positions:
            raise UserError(
                f"seq_len={self.seq_len} is beyond the {self.positions} positions that the weights know "
                f"(model.max_positions): use seq_len={self.positions}. With model.position=rope, "
                "model.max_positions=null goes beyond, at best with model.rope_scaling=[linear,2]."
            )
        if self.head_dim is None and self.n_embd % self.n_head:
            fits = [h for h in range(1, self.n_embd + 1) if self.n_embd % h == 0]
            near = sorted(sorted(fits, key=lambda h: abs(h - self.n_head))[:4])
            raise UserError(
                f"model.n_embd={self.n_embd} does not divide into model.n_head={self.n_head} heads: "
                f"choose n_head from {near}, another n_embd, or a head_dim."
            )
        if self.n_head % self.kv_heads:
            raise UserError(
                f"model.n_kv_head={self.n_kv_head} does not divide model.n_head={self.n_head}: "
                "every key/value head serves the same number of query heads."
            )
        if self.position == "rope" and self.head_size % 2:
            raise UserError(
                f"model.position=rope needs an even head dim, and it is {self.head_size}: change "
                "model.head_dim, or n_head and n_embd where that is null."
            )

    @property
    def head_size(self) -> int:
        """D, the head dim in effect."""
        return self.n_embd // self.n_head if self.head_dim is None else self.head_dim

    @property
    def positions(self) -> int:
        return self.seq_len if self.max_positions is None else self.max_positions

    @property
    def kv_heads(self) -> int:
        return self.n_head if self.n_kv_head is None else self.n_kv_head

    @property
    def padded_vocab_size(self) -> int:
        """V rounded up to a multiple of 64: full tiles for the tensor cores in the largest product of the
        model."""
        return -(-self.vocab_size // 64) * 64

    @property
    def mlp_size(self) -> int:
        """The MLP's hidden width: by default 4C; for SwiGLU 8C/3 rounded up to a multiple of 64, which keeps
        the parameter count of three matrices."""
        if self.mlp_hidden is not None:
            return self.mlp_hidden
        return 4 * self.n_embd if self.mlp == "gelu" else -(-8 * self.n_embd // 3 // 64) * 64

    @property
    def with_qkv_bias(self) -> bool:
        return self.bias if self.qkv_bias is None else self.qkv_bias

    def eps(self, norm: str) -> float:
        """Of a layernorm or rmsnorm."""
        return (1e-5 if norm == "layernorm" else 1e-6) if self.norm_eps is None else self.norm_eps

    @property
    def attention_options(self) -> dict[str, Any]:
        """The keyword arguments of the attention contract that the architecture fixes."""
        window = None
        if self.window is not None:
            window = (self.window, 0 if self.causal else self.window)
        return {"causal": self.causal, "window": window, "softcap": self.softcap}


def _rope_scaling(given: Any) -> list[Any]:
    """As a plain list, checked."""
    kinds = {"linear": ("factor",), "llama3": ("factor", "low", "high", "trained context")}
    kind, *numbers = [*given] if given and isinstance(given, Sequence) and type(given) is not str else [given]
    if not isinstance(kind, str) or kind not in kinds or len(numbers) != len(kinds[kind]):
        forms = " or ".join(f"[{', '.join((name, *words))}]" for name, words in kinds.items())
        raise UserError(f"model.rope_scaling={shown(given)}: it needs to be {forms}, or null for none.")
    for name, value in zip(kinds[kind], numbers, strict=True):
        number(f"model.rope_scaling: {name}", value, above=0)
    if kind == "llama3" and numbers[1] >= numbers[2]:
        raise UserError(f"model.rope_scaling={shown(given)}: low needs to be below high.")
    return [kind, *numbers]
