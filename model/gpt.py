"""The GPT: GPT-2's block with attention left open. Reads in one sitting.

The block owns projections, rotary embedding and the order of things; the attention itself is an `Attention`
(attention/base.py), handed in from outside, parameter-free, shared by all layers. Weight names are GPT-2's.

Shapes: B batch, T tokens, C width, H query heads, Hkv key/value heads, D head dim, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint

from attention.base import MASK_BLOCK, Attention
from conf.values import UserError
from model.config import GPTConfig
from model.context_parallel import ContextParallel
from model.dropout import Dropout
from model.fp8 import Fp8Linear
from model.fp8 import gelu_mlp as fp8_gelu_mlp
from model.kv_cache import KVCache
from model.loss import IGNORE, chunked_loss, compute_dtype, fuses_loss
from model.relative import buckets_of_distances
from model.sparsity import pattern
from ops.linear import fuses, linear, pays
from ops.mlp import gelu_mlp


def alibi_slopes(n_head: int) -> Tensor:
    """Slopes (H,) fp32 of ALiBi (Press et al. 2022): a geometric sequence that starts at 2^(-8/H); where H is
    no power of two, the sequence of the power below, then every other one of the power above."""
    power = 2 ** math.floor(math.log2(n_head))
    slopes = [2 ** (-8 * (i + 1) / power) for i in range(power)]
    slopes += [2 ** (-4 * (2 * i + 1) / power) for i in range(n_head - power)]
    return torch.tensor(slopes)


def rope_table(seq_len: int, head_dim: int, base: float, scaling: list[Any] | None = None) -> Tensor:
    """Cosines and sines (2, T, D/2) fp32 of rotary embedding (Su et al. 2021, eq. 34).

    scaling: [linear, factor] divides all frequencies by `factor` (Chen et al. 2023); [llama3, factor, low,
    high, trained context] those that turn less than `low` times in the trained context, none that turn more
    than `high` times, and those between in part (Llama 3.1)."""
    frequencies = base ** (-torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim)
    if scaling is not None:
        kept = 0.0
        if scaling[0] == "llama3":
            low, high, trained = scaling[2:]
            kept = ((trained * frequencies / (2 * math.pi) - low) / (high - low)).clamp(0, 1)
        frequencies = frequencies * (kept + (1 - kept) / scaling[1])
    angles = torch.outer(torch.arange(seq_len, dtype=torch.float64), frequencies)
    return torch.stack((angles.cos(), angles.sin())).float()


def apply_rope(x: Tensor, rope: Tensor) -> Tensor:
    """Rotate the halves of x (B, T, H, D) by rope (2, T, D/2), or (2, B, T, D/2) where rows differ; in fp32,
    as bf16 angles lose the position after a few hundred tokens."""
    cos, sin = rope[0].unsqueeze(-2), rope[1].unsqueeze(-2)  # ([B,] T, 1, D/2)
    a, b = x.float().chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)


class RMSNorm(nn.RMSNorm):
    """RMSNorm whose gain takes the input's dtype: beside a bf16 input, as autocast leaves it, an fp32 gain
    would send torch to an unfused form."""

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.normalized_shape, self.weight.to(x.dtype), self.eps)


def make_norm(config: GPTConfig, width: int) -> nn.Module:
    if config.norm == "rmsnorm":
        return RMSNorm(width, eps=config.eps("rmsnorm"))
    return nn.LayerNorm(width, eps=config.eps("layernorm"), bias=config.bias)


def project(layer: nn.Module, x: Tensor, addend: Tensor | None = None) -> Tensor:
    """layer(x), plus addend where there is one: of a plain linear layer on many rows by ops/linear.py."""
    if type(layer) is nn.Linear and pays(x := x.to(compute_dtype(x)), layer.out_features):
        return linear(x, *in_dtype(x, layer.weight, layer.bias), addend)
    return layer(x) if addend is None else addend + layer(x)


def in_dtype(x: Tensor, *parameters: Tensor | None) -> list[Tensor | None]:
    return [p if p is None else p.to(x.dtype) for p in parameters]


def adds_directly(dropout: nn.Dropout, residual: Tensor) -> bool:
    """Whether a projection can be added to the residual stream as it is: of its dtype, with no dropout."""
    return residual.dtype == compute_dtype(residual) and not (dropout.training and dropout.p)


class CausalSelfAttention(nn.Module):
    """Projections, QK-norm, rotary and cache around an `Attention`, which owns no parameters."""

    def __init__(self, config: GPTConfig, attention: Attention):
        super().__init__()
        self.config = config
        self.attention = attention
        self.context_parallel: ContextParallel | None = None
        width, kv_width = config.n_head * config.head_size, config.kv_heads * config.head_size
        self.c_attn = nn.Linear(config.n_embd, width + 2 * kv_width, bias=config.with_qkv_bias)
        self.c_proj = nn.Linear(width, config.n_embd, bias=config.bias)
        self.dropout = Dropout(config.dropout)
        if config.qk_norm:
            self.q_norm = RMSNorm(config.head_size, eps=config.eps("rmsnorm"))
            self.k_norm = RMSNorm(config.head_size, eps=config.eps("rmsnorm"))

    def forward(self, x: Tensor, residual: Tensor, *options: Any) -> Tensor:
        """x, residual (B, T, C) -> residual + attention(x); options as in `attend`."""
        out = self.attend(project(self.c_attn, x), *options)
        if adds_directly(self.dropout, residual):
            return project(self.c_proj, out, residual)
        return residual + self.dropout(project(self.c_proj, out))

    def attend(
        self,
        qkv: Tensor,
        rope: Tensor | None = None,
        slopes: Tensor | None = None,
        relative_bias: Tensor | None = None,
        document_ids: Tensor | None = None,
        block_mask: Tensor | None = None,
        cache: KVCache | None = None,
        layer: int = 0,
    ) -> Tensor:
        """What lies between the projections: qkv (B, T, (H + 2 Hkv) D) -> (B, T, H*D)."""
        B, T, _ = qkv.shape
        H, Hkv, D = self.config.n_head, self.config.kv_heads, self.config.head_size
        q, k, v = qkv.split([H * D, Hkv * D, Hkv * D], dim=-1)
        q = q.view(B, T, H, D)  # (B, T, H*D) -> (B, T, H, D)
        k = k.view(B, T, Hkv, D)  # (B, T, Hkv*D) -> (B, T, Hkv, D)
        v = v.view(B, T, Hkv, D)
        if self.config.qk_norm:
            q, k = self.q_norm(q), self.k_norm(k)
        if rope is not None:
            q, k = apply_rope(q, rope), apply_rope(k, rope)
        # Under autocast, rotary and norms leave fp32 beside a bf16 v; the contract wants one dtype.
        q, k = q.to(v.dtype), k.to(v.dtype)
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)  # (B, H, T, D): views

        kv_lengths, attention, packed = None, self.attention, None
        if cache is not None:
            kv_lengths = cache.kv_lengths
            k, v = cache.update(layer, k, v)
            attention = cache.attention if cache.decoding else attention
        elif self.context_parallel is not None:
            attention = partial(self.context_parallel.attend, attention)
        elif rope is None and not self.config.qk_norm and qkv.requires_grad and torch.is_grad_enabled():
            packed = qkv  # with one gradient of its own
        out = attention(
            q,
            k,
            v,
            alibi_slopes=slopes,
            document_ids=document_ids,
            kv_lengths=kv_lengths,
            block_mask=block_mask,
            relative_bias=relative_bias,
            dropout_p=self.config.attn_dropout if self.training else 0.0,
            packed=packed,
            **self.config.attention_options,
        )
        return out.transpose(1, 2).reshape(B, T, H * D)  # (B, H, T, D) -> (B, T, H, D) -> (B, T, H*D)


class MLP(nn.Module):
    """GELU (GPT-2) or SwiGLU (Shazeer 2020), whose gate and value share `c_fc`."""

    def __init__(self, config: GPTConfig):
        super().__init__()
        self.swiglu = config.mlp == "swiglu"
        hidden = config.mlp_size
        self.c_fc = nn.Linear(config.n_embd, 2 * hidden if self.swiglu else hidden, bias=config.bias)
        self.c_proj = nn.Linear(hidden, config.n_embd, bias=config.bias)
        self.dropout = Dropout(config.dropout)

    def forward(self, x: Tensor, residual: Tensor) -> Tensor:
        """x, residual (B, T, C) -> residual + MLP(x)."""
        # not of layers that others have put in their place, adapters say, which compute more
        kinds = set() if self.swiglu else {type(self.c_fc), type(self.c_proj)}
        if kinds == {Fp8Linear} and self.training:
            return residual + self.dropout(fp8_gelu_mlp(self.c_fc, self.c_proj, x))
        if kinds == {nn.Linear} and fuses(x := x.to(compute_dtype(x)), self.c_fc.out_features):
            parameters = in_dtype(x, self.c_fc.weight, self.c_fc.bias, self.c_proj.weight, self.c_proj.bias)
            if adds_directly(self.dropout, residual):
                return gelu_mlp(x, *parameters, residual)
            return residual + self.dropout(gelu_mlp(x, *parameters))
        return residual + self.dropout(self.c_proj(self.activate(self.c_fc(x))))

    def activate(self, x: Tensor) -> Tensor:
        if self.swiglu:
            gate, value = x.chunk(2, dim=-1)
            return F.silu(gate) * value
        # the tanh form is GPT-2's own; in a compiled step it costs the same as erf
        return F.gelu(x, approximate="tanh")


class Block(nn.Module):
    """Pre-norm: x + attention(norm(x)), then x + mlp(norm(x))."""

    def __init__(self, config: GPTConfig, attention: Attention):
        super().__init__()
        self.ln_1 = make_norm(config, config.n_embd)
        self.attn = CausalSelfAttention(config, attention)
        self.ln_2 = make_norm(config, config.n_embd)
        self.mlp = MLP(config)

    def forward(self, x: Tensor, *args: Any) -> Tensor:
        x = self.attn(self.ln_1(x), x, *args)
        return self.mlp(self.ln_2(x), x)


class Unfilled(TorchFunctionMode):
    """Within it, weights are allocated but not initialised, for those that are loaded next: the random values
    of GPT-2 124M took 1.7 s of a core. device: of the weights."""

    def __init__(self, device: str | None = None):
        super().__init__()
        self.device = device

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(function, "__module__", None) == "torch.nn.init":
            return None
        weights = {"device": self.device} if function is torch.empty and self.device else {}
        return function(*args, **(kwargs or {}) | weights)


class GPT(nn.Module):
    """The decoder: `input_ids` (B, T) -> `logits` (B, T, V padded).

    `attention` computes every layer; `checkpointing` recomputes each block in backward (activations of one
    block instead of all)."""

    def __init__(self, config: GPTConfig, attention: Attention, checkpointing: bool = False):
        super().__init__()
        self.config = config
        self.checkpointing = checkpointing
        self.context_parallel: ContextParallel | None = None
        modules: dict[str, nn.Module] = {"wte": nn.Embedding(config.padded_vocab_size, config.n_embd)}
        if config.position == "learned":
            modules["wpe"] = nn.Embedding(config.positions, config.n_embd)
        if config.position == "t5":
            modules["relative_attention_bias"] = nn.Embedding(config.relative_buckets, config.n_head)
        modules["drop"] = Dropout(config.dropout)
        modules["h"] = nn.ModuleList(Block(config, attention) for _ in range(config.n_layer))
        modules["ln_f"] = make_norm(config, config.n_embd)
        self.transformer = nn.ModuleDict(modules)
        self.lm_head = nn.Linear(config.n_embd, config.padded_vocab_size, bias=False)
        if config.tie_embeddings:
            self.lm_head.weight = self.transformer.wte.weight
        # None of the tables is a weight: they follow from the config, and stay out of checkpoints.
        rope = self._rope_table() if config.position == "rope" else None
        self.register_buffer("rope", rope, persistent=False)
        slopes = alibi_slopes(config.n_head) if config.position == "alibi" else None
        self.register_buffer("slopes", slopes, persistent=False)
        buckets = None
        if config.position == "t5":
            of_distances = config.relative_buckets, config.relative_distance, config.causal
            buckets = torch.tensor(buckets_of_distances(*of_distances))
        self.register_buffer("buckets", buckets, persistent=False)  # (2 R + 1,), of the distances -R .. R
        kept = None
        if config.sparsity is not None:
            tiles = -(-config.seq_len // MASK_BLOCK)
            kept = pattern(config.sparsity, tiles, config.sparsity_blocks)[None, None]
        self.register_buffer("kept_tiles", kept, persistent=False)  # (1, 1, T / 128, T / 128)
        self.reset_parameters()

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> GPT:
        """`.to(dtype)` is for the weights. The tables stay fp32: bf16 keeps 8 bits of a sine or a slope."""
        super()._apply(fn, recurse)
        if self.rope is not None and self.rope.dtype != torch.float32:
            self.rope = self._rope_table().to(self.rope.device)
        if self.slopes is not None and self.slopes.dtype != torch.float32:
            self.slopes = alibi_slopes(self.config.n_head).to(self.slopes.device)
        return self

    @property
    def device(self) -> torch.device:
        return self.transformer.wte.weight.device

    @property
    def dtype(self) -> torch.dtype:
        """Of the weights, those apart that are quantised (generation/weights.py)."""
        return self.transformer.wte.weight.dtype

    def _rope_table(self) -> Tensor:
        config = self.config
        return rope_table(config.seq_len, config.head_size, config.rope_base, config.rope_scaling)

    def reset_parameters(self) -> None:
        """GPT-2's initialisation: N(0, 0.02), the projections back into the residual stream divided by
        sqrt(2 * layers), as each block adds two of them."""
        for name, module in self.named_modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                scaled = name.endswith("c_proj")
                std = 0.02 / math.sqrt(2 * self.config.n_layer) if scaled else 0.02
                nn.init.normal_(module.weight, std=std)
                if getattr(module, "bias", None) is not None:
                    nn.init.zeros_(module.bias)

    def forward(
        self,
        input_ids: Tensor,
        *,
        targets: Tensor | None = None,
        document_ids: Tensor | None = None,
        cache: KVCache | None = None,
        last: Tensor | None = None,
    ) -> Tensor:
        """Logits (B, T, V padded) of `input_ids` (B, T); with `targets` (B, T), the sum of the token losses
        instead.

        The loss is part of forward so that a compiled step fuses it and never holds the logits in fp32, and
        that `model.loss_chunk` can keep it from ever holding the logits of all tokens (model/loss.py).

        document_ids: (B, T) int32; tokens see their own document only.
        cache: extended by one token a row, or filled with the prompts that `cache.prefill` announced.
        last: (B,) or (B, n) positions; logits (B, 1 or n, V padded) of these alone, as generation needs no
            others.
        """
        T, spread = input_ids.shape[1], self.context_parallel
        if T > self.config.seq_len:
            raise UserError(
                f"{T} tokens are more than the model's context of {self.config.seq_len}: "
                "pass fewer, or train with a larger seq_len."
            )
        positions = cache.positions if cache is not None else None  # (B, 1) while decoding, else 0 .. T-1
        if spread is not None:
            positions = spread.positions(T, input_ids.device)  # (T,)
            document_ids = None if document_ids is None else spread.documents(document_ids)
        x = self.embed(input_ids, positions)
        rope = self.rope
        if rope is not None:
            rope = rope[:, :T] if positions is None else rope[:, positions]  # (2, T, D/2) or (2, B, 1, D/2)
        of_all = rope, self.slopes, self.relative_bias(), document_ids, self.block_mask(T, cache)
        for i, block in enumerate(self.transformer.h):
            if self.checkpointing and self.training:
                x = checkpoint(block, x, *of_all, use_reentrant=False)
            else:
                x = block(x, *of_all, cache, i)
        if cache is not None:
            cache.advance()
        return self.head(x, targets, last)

    def embed(self, input_ids: Tensor, positions: Tensor | None) -> Tensor:
        """What goes into the first block, (B, T, C), for tokens (B, T) at `positions`, (B, 1) or (T,); None
        is 0 to T - 1."""
        x = self.transformer.wte(input_ids)
        if self.config.position == "learned":
            wpe = self.transformer.wpe
            x = x + (wpe.weight[: input_ids.shape[1]] if positions is None else wpe(positions))
        if not self.config.fp32_residual:
            x = x.to(compute_dtype(x))  # half the bytes of every norm and residual, and of their gradients
        return self.transformer.drop(x)

    def relative_bias(self) -> Tensor | None:
        """What the attention of each layer adds to the scores by distance, (H, 2 R + 1); None but for t5."""
        if self.buckets is None:
            return None
        return self.transformer.relative_attention_bias(self.buckets).T.contiguous()

    def block_mask(self, tokens: int, cache: KVCache | None) -> Tensor | None:
        """The tiles that a call's queries and keys meet in, (1 or B, 1, Tq / 128, Tk / 128); while decoding
        each row's query has a row of them, by its position."""
        if self.kept_tiles is None or cache is None or cache.positions is None:
            tiles = -(-tokens // MASK_BLOCK)
            return None if self.kept_tiles is None else self.kept_tiles[:, :, :tiles, :tiles]
        rows = self.kept_tiles[0, 0, cache.positions[:, 0] // MASK_BLOCK]  # (B, T / 128)
        return rows[:, None, None, : -(-cache.capacity // MASK_BLOCK)]

    def head(self, x: Tensor, targets: Tensor | None, last: Tensor | None) -> Tensor:
        """Of the last block's output (B, T, C) what `forward` returns."""
        x = self.transformer.ln_f(x)
        if last is not None:
            rows = torch.arange(x.shape[0], device=x.device).unsqueeze(1)
            x = x[rows, last.view(x.shape[0], -1)]  # (B, T, C) -> (B, 1 or n, C)
        chunk = self.config.loss_chunk
        if targets is not None and (chunk or fuses_loss(x)):
            chunk = chunk or targets.numel()
            return chunked_loss(x, self.lm_head.weight, targets, self.config.vocab_size, chunk)
        logits = self.logits(x)
        return logits if targets is None else self.summed_loss(logits, targets)

    def logits(self, x: Tensor) -> Tensor:
        """(B, T, V padded) of what `ln_f` gives, (B, T, C), in any floating dtype."""
        return self.lm_head(x)

    def summed_loss(self, logits: Tensor, targets: Tensor) -> Tensor:
        """Cross-entropy in fp32 over the real vocabulary (the padding is not counted), in nats, summed over
        the targets (B, T) that are not IGNORE. A sum, because only the caller knows how many tokens a step
        has."""
        logits = logits[..., : self.config.vocab_size].flatten(0, 1)  # (B, T, Vp) -> (B*T, V), a view
        return F.cross_entropy(logits.float(), targets.flatten(), ignore_index=IGNORE, reduction="sum")

    def share_sequences(self, context_parallel: ContextParallel) -> None:
        """From now on `forward` takes this rank's share of each sequence, and no cache."""
        for module in (self, *(block.attn for block in self.transformer.h)):
            module.context_parallel = context_parallel

    def compile_blocks(self, **how: Any) -> None:
        """torch.compile, as `how` says, for the blocks, which share the code of the first, and for what comes
        before and after them: the time does not grow with the number of blocks."""
        for block in self.transformer.h:
            block.forward = torch.compile(block.forward, **how)
        self.embed = torch.compile(self.embed, **how)
        self.head = torch.compile(self.head, **how)

    def replace_attention(self, attention: Attention) -> None:
        """Compute with another implementation from now on: no weight depends on the choice."""
        for block in self.transformer.h:
            block.attn.attention = attention


def without_storage(config: GPTConfig) -> GPT:
    """The names and shapes of a model's weights, on the meta device; without the tables that none of these
    depends on, as a config from someone else may make them large. (Within torch.device("meta"), they would be
    on it too, for which PyTorch imports Dynamo: 2 s.)"""
    without: dict[str, Any] = {"sparsity": None}
    if config.position in ("rope", "alibi"):
        without["position"] = "none"
    with Unfilled("meta"):
        return GPT(replace(config, **without), nn.Identity())
