"""A decoding step of few, full kernels (ops/triton/step.py), in place of GPT.forward and the choice.

The same function: pre-norm blocks, whatever positions, norm, MLP, heads and cache the model has. The residual
stream is kept in fp32, so that 16-bit logits are nearer to exact ones than those of GPT.forward.
"""

from __future__ import annotations

import importlib.util
from dataclasses import fields
from typing import Any

import torch
from torch import Tensor, nn

from attention.base import Attention, AttentionOptions, CachedTensor, CacheView
from conf.values import UserError
from model.config import GPTConfig
from model.generation.decode import Rows, Slots, compute_dtype
from model.generation.paged_cache import PagedCache
from model.generation.weights import Int8Linear
from model.gpt import GPT, MLP, Block, CausalSelfAttention
from model.kv_cache import KVCache

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
# Options of a model that the kernels compute, or that change nothing here. With any other that is not at its
# default, a new one too, a step is PyTorch's.
KNOWN = {
    "vocab_size", "seq_len", "n_layer", "n_head", "n_embd", "n_kv_head", "head_dim", "position",
    "max_positions", "rope_base", "rope_scaling", "relative_buckets", "relative_distance", "norm",
    "norm_eps", "mlp", "mlp_hidden", "qk_norm", "window", "sparsity", "sparsity_blocks", "softcap",
    "causal", "tie_embeddings", "bias", "qkv_bias", "dropout", "attn_dropout", "loss_chunk",
    "fp32_residual",
}  # fmt: skip


def unsupported_reasons(model: GPT, compute_dtype: torch.dtype) -> list[str]:
    """Why these kernels cannot do a step of `model`; empty where they can."""
    reasons, weight = [], model.transformer.wte.weight
    if importlib.util.find_spec("triton") is None:
        return ["triton is not installed"]
    from ops.triton.interpret import INTERPRETED

    if weight.device.type != "cuda" and not INTERPRETED:
        reasons.append(f"the model is on {weight.device.type}, the kernels need a GPU")
    if weight.dtype != compute_dtype or weight.dtype not in DTYPES:
        reasons.append(f"weights in {weight.dtype} computed in {compute_dtype}")
    products = [m for block in model.transformer.h for m in products_of(block)]
    if not all(map(is_plain, products)):
        reasons.append("its products are not plain linear layers")
    other = [each for each in fields(GPTConfig) if each.name not in KNOWN]
    other = [each.name for each in other if getattr(model.config, each.name) != each.default]
    return reasons + [f"the kernels do not compute model.{name}" for name in other]


def wants_fused(model: GPT, fused: bool | None) -> bool:
    """Whether a step is one of fused kernels: as asked, by default on a GPU where they can. Raises UserError
    where they are asked for and cannot."""
    if fused is False or (fused is None and model.device.type != "cuda"):
        return False
    reasons = unsupported_reasons(model, compute_dtype(model))
    if fused and reasons:
        raise UserError(f"fused=true: {'; '.join(reasons)}. fused=false decodes with PyTorch's kernels.")
    return not reasons


def products_of(block: Block) -> tuple[nn.Module, ...]:
    return block.attn.c_attn, block.attn.c_proj, block.mlp.c_fc, block.mlp.c_proj


def is_plain(product: nn.Module) -> bool:
    """Whether the kernels can read the weight of a product."""
    whole = type(product) is nn.Linear and type(product.weight.data) is Tensor
    return whole or type(product) is Int8Linear


def attends(config: GPTConfig, attention: Attention) -> bool:
    """Whether a fused step has an attention of its own, where `attention` is left to choose; else that is
    called between its kernels."""
    from ops.triton.step import MOST_HEAD_DIM, MOST_HEADS_PER_KV

    fits = config.n_head // config.kv_heads <= MOST_HEADS_PER_KV and config.head_size <= MOST_HEAD_DIM
    return attention.declaration.dispatches_to == "implementations" and fits and plain(config)


def plain(config: GPTConfig) -> bool:
    """Whether no mask or bias of a model's own goes to attention."""
    return config.sparsity is None and config.position != "t5"


def unquantised(cache: KVCache) -> bool:
    """Whether a cache holds keys and values as they are, dense or in blocks."""
    return type(cache) is KVCache or (isinstance(cache, PagedCache) and cache.kind == "auto")


def keys_of(side: Tensor | CachedTensor) -> tuple[Tensor, Tensor | None]:
    """A layer's keys, or values, and the table of their blocks, None of a dense cache."""
    return (side, None) if isinstance(side, Tensor) else (side.data, side.table)


class FusedStep:
    """One step of `model` over `cache` for `rows`: logits, choice, and feeding back, all on the device."""

    def __init__(self, model: GPT, cache: KVCache, rows: Slots):
        from ops.triton import step

        config, weight = model.config, model.transformer.wte.weight
        self.model, self.cache, self.rows, self.step = model, cache, rows, step
        batch = len(rows.index)
        self.x = torch.empty(batch, config.n_embd, device=weight.device)
        int8 = type(model.lm_head) is Int8Linear
        most = step.MOST_ROWS_INT8 if int8 else step.MOST_ROWS
        products = OwnProducts if batch <= most else LibraryProducts
        self.products = products(self.x, model)
        self.attend = self.append = None
        if not unquantised(cache) and plain(config) and config.head_size % 2 == 0:
            self.append = step.Append(cache.lengths, config.n_head, cache.k[0], model.rope)
        if unquantised(cache) and attends(config, cache.attention):
            self.attend = step.Attend(
                cache.lengths,
                config.n_head,
                *keys_of(cache.k[0]),
                model.rope,
                AttentionOptions(**config.attention_options, alibi_slopes=model.slopes),
            )
        self.choice = None
        own = self.attend is not None or self.append is not None
        if own and rows.sampling.top_k is None and rows.sampling.top_p is None:
            text = (rows.text, rows.lengths) if isinstance(rows, Rows) else (None, None)
            active = cache.active if isinstance(cache, PagedCache) else None
            state = rows.token, *text, cache.lengths, cache.next_lengths, active
            temperature = rows.sampling.temperature
            self.choice = step.Choice(config.vocab_size, rows.noise, temperature, state)

    def __call__(self) -> None:
        transformer, products = self.model.transformer, self.products
        wpe = transformer.wpe.weight if self.model.config.position == "learned" else None
        self.step.embed(self.rows.token, self.cache.lengths, transformer.wte.weight, wpe, self.x)
        for layer, block in enumerate(transformer.h):
            qkv = products.norm_linear(block.ln_1, block.attn.c_attn)
            products.add(block.attn.c_proj, self.attended(block.attn, qkv, layer))
            products.add(block.mlp.c_proj, products.norm_linear(block.ln_2, block.mlp.c_fc, block.mlp))
        logits = products.norm_linear(transformer.ln_f, self.model.lm_head)
        if self.choice is not None:
            self.choice(logits)
        else:
            self.rows.append(logits.unsqueeze(1))
            self.cache.advance()

    def attended(self, attn: CausalSelfAttention, qkv: Tensor, layer: int) -> Tensor:
        """Attention (B, C) of qkv (B, (H + 2 Hkv) D), whose keys and values go into the cache."""
        cache = self.cache
        if self.attend is None and self.append is None:
            rope = None if self.model.rope is None else self.model.rope[:, cache.positions]
            model = self.model
            of_all = rope, model.slopes, model.relative_bias(), None, model.block_mask(1, cache)
            return attn.attend(qkv.unsqueeze(1), *of_all, cache, layer).squeeze(1)
        norms = [
            as_norm(getattr(attn, name)) if attn.config.qk_norm else None for name in ("q_norm", "k_norm")
        ]
        k, v = cache.k[layer], cache.v[layer]
        if self.append is None:
            return self.attend(qkv, keys_of(k)[0], keys_of(v)[0], *norms)
        q, options = self.append(qkv, k, v, *norms), self.model.config.attention_options
        view = CacheView(k, v, cache.next_lengths)
        return cache.attention(q, view, None, alibi_slopes=self.model.slopes, **options).flatten(1)


def as_norm(module: nn.Module, dtype: torch.dtype | None = None) -> Any:
    """As ops/triton/step.py takes it; dtype: of its weight and bias, if another."""
    from ops.triton.step import Norm

    kind = "layernorm" if isinstance(module, nn.LayerNorm) else "rmsnorm"
    both = module.weight, getattr(module, "bias", None)
    return Norm(kind, *(x if x is None or dtype is None else x.to(dtype) for x in both), module.eps)


class OwnProducts:
    """The step's products for a few rows, by our own kernels, onto a residual stream x (B, C) fp32."""

    def __init__(self, x: Tensor, model: GPT):
        from ops.triton import step

        self.x, self.step, self.dtype = x, step, model.dtype
        # Beside weights in 8 bits the norms' are read as fp32: by as many numbers at once as x.
        dtype = torch.float32 if type(model.lm_head) is Int8Linear else None
        norms = [norm for block in model.transformer.h for norm in (block.ln_1, block.ln_2)]
        self.norms = {norm: as_norm(norm, dtype) for norm in (*norms, model.transformer.ln_f)}

    def norm_linear(self, norm: nn.Module, linear: nn.Module, mlp: MLP | None = None) -> Tensor:
        """linear(norm(x)), and the activation of `mlp`."""
        activation = None if mlp is None else "swiglu" if mlp.swiglu else "gelu"
        width = linear.out_features // (2 if activation == "swiglu" else 1)
        out = self.x.new_empty(len(self.x), width, dtype=self.dtype)
        weight, scale = weight_of(linear)
        return self.step.norm_linear(self.x, self.norms[norm], weight, linear.bias, out, activation, scale)

    def add(self, linear: nn.Module, x: Tensor) -> None:
        """The residual stream += linear(x)."""
        weight, scale = weight_of(linear)
        self.step.add_linear(x, weight, linear.bias, self.x, scale)


def weight_of(linear: nn.Module) -> tuple[Tensor, Tensor | None]:
    """The weight and its scale as the kernels of ops/triton/step.py take them."""
    return (linear.words, linear.scale) if type(linear) is Int8Linear else (linear.weight, None)


class LibraryProducts:
    """The same for many rows, by cuBLAS, with what stands between two products in one kernel."""

    def __init__(self, x: Tensor, model: GPT):
        from ops.triton import step

        self.x, self.dtype, self.step = x, model.dtype, step
        self.delta: Tensor | None = None  # of the residual stream, until the next norm reads it

    def _norm(self, norm: nn.Module) -> Tensor:
        out = torch.empty_like(self.x, dtype=self.dtype)
        delta, self.delta = self.delta, None
        return self.step.add_norm(self.x, delta, as_norm(norm), out)

    def norm_linear(self, norm: nn.Module, linear: nn.Linear, mlp: MLP | None = None) -> Tensor:
        x = self._norm(norm)
        if mlp is None:
            return linear(x)
        if mlp.swiglu or linear.bias is None or not x.is_cuda:
            return mlp.activate(linear(x))
        # cuBLASLt's epilogue has the tanh form
        return torch._addmm_activation(linear.bias, x, linear.weight.t(), use_gelu=True)

    def add(self, linear: nn.Linear, x: Tensor) -> None:
        self.delta = linear(x)
