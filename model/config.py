"""What fixes a GPT: its shapes and its function, as plain values that travel in checkpoints."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from conf.values import UserError, number, one_of, switch, whole


@dataclass(frozen=True)
class GPTConfig:
    """Everything that fixes the shapes and the function of a GPT. Plain values: it travels in checkpoints."""

    vocab_size: int
    seq_len: int = 1024
    n_layer: int = 12
    n_head: int = 12
    n_embd: int = 768
    n_kv_head: int | None = None  # None: as many as n_head (MHA); 1: MQA
    position: str = "learned"  # learned | rope | alibi | none
    rope_base: float = 10_000.0
    norm: str = "layernorm"  # layernorm | rmsnorm
    mlp: str = "gelu"  # gelu | swiglu
    qk_norm: bool = False
    window: int | None = None  # keys a query looks back on besides its own; both ways when not causal
    softcap: float | None = None
    causal: bool = True
    tie_embeddings: bool = True
    bias: bool = True
    dropout: float = 0.0
    attn_dropout: float = 0.0
    loss_chunk: int = 0  # tokens whose logits exist at a time in the loss; 0: all

    def __post_init__(self) -> None:
        """UserError for a value that no model can have, wherever it comes from: conf/ or a checkpoint."""
        whole("seq_len", self.seq_len, 1)
        for key in ("vocab_size", "n_layer", "n_head", "n_embd"):
            whole(f"model.{key}", getattr(self, key), 1)
        whole("model.n_kv_head", self.n_kv_head, 1, null="as many as model.n_head")
        whole("model.window", self.window, 0, null="no window")
        whole("model.loss_chunk", self.loss_chunk, 0)
        number("model.rope_base", self.rope_base, above=0)
        number("model.softcap", self.softcap, above=0, null="none")
        for key in ("dropout", "attn_dropout"):
            number(f"model.{key}", getattr(self, key), least=0, below=1)
        for key in ("qk_norm", "causal", "tie_embeddings", "bias"):
            switch(f"model.{key}", getattr(self, key))
        one_of("model.position", self.position, ("learned", "rope", "alibi", "none"))
        one_of("model.norm", self.norm, ("layernorm", "rmsnorm"))
        one_of("model.mlp", self.mlp, ("gelu", "swiglu"))
        if self.n_embd % self.n_head:
            fits = [h for h in range(1, self.n_embd + 1) if self.n_embd % h == 0]
            near = sorted(sorted(fits, key=lambda h: abs(h - self.n_head))[:4])
            raise UserError(
                f"model.n_embd={self.n_embd} does not divide into model.n_head={self.n_head} heads: "
                f"choose n_head from {near} or another n_embd."
            )
        if self.n_head % self.kv_heads:
            raise UserError(
                f"model.n_kv_head={self.n_kv_head} does not divide model.n_head={self.n_head}: "
                "every key/value head serves the same number of query heads."
            )
        if self.position == "rope" and self.head_dim % 2:
            raise UserError(
                f"model.position=rope needs an even head dim, n_embd / n_head is {self.head_dim}: "
                "change model.n_head or model.n_embd."
            )

    @property
    def head_dim(self) -> int:
        return self.n_embd // self.n_head

    @property
    def kv_heads(self) -> int:
        return self.n_head if self.n_kv_head is None else self.n_kv_head

    @property
    def padded_vocab_size(self) -> int:
        """V rounded up to a multiple of 64: full tiles for the tensor cores in the largest product of the
        model."""
        return -(-self.vocab_size // 64) * 64

    @property
    def mlp_hidden(self) -> int:
        """4C; for SwiGLU 8C/3 rounded up to a multiple of 64, which keeps the parameter count of three
        matrices."""
        return 4 * self.n_embd if self.mlp == "gelu" else -(-8 * self.n_embd // 3 // 64) * 64

    @property
    def attention_options(self) -> dict[str, Any]:
        """The keyword arguments of the attention contract that the architecture fixes."""
        window = None
        if self.window is not None:
            window = (self.window, 0 if self.causal else self.window)
        return {"causal": self.causal, "window": window, "softcap": self.softcap}
