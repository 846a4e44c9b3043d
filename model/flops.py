"""Parameters, FLOPs and bytes of a GPT from its config alone: pure functions, tested against counted ones."""

from __future__ import annotations

from model.config import GPTConfig

# Dense bf16 peak in FLOP/s by the vendor's datasheet, keyed by a part of the device's name; longer names
# first, as 'H100 PCIe' contains 'H100'. An unknown GPU has no MFU rather than a wrong one.
PEAK_BF16_FLOPS = {
    "H100 PCIe": 756e12,
    "H100 NVL": 835e12,
    "GH200": 989e12,
    "H200": 989e12,
    "H100": 989e12,
    "H800": 989e12,
    "A100": 312e12,
    "A800": 312e12,
    "B200": 2250e12,
    "L40S": 362e12,
    "L4": 121e12,
    "A10G": 70e12,
    "RTX 4090": 165e12,
    "RTX 3090": 71e12,
}


def peak_bf16_flops(gpu_name: str) -> float | None:
    """Dense bf16 peak of the named GPU in FLOP/s, or None where it is not known."""
    words = gpu_name.replace("-", " ")
    if "Laptop" in words:  # the desktop part's name on another chip
        return None
    for name, peak in PEAK_BF16_FLOPS.items():
        if f" {name} " in f" {words} ":
            return peak
    return None


def parameter_count(config: GPTConfig) -> dict[str, int]:
    """Parameters by part; the values add up to what the model holds. Tied embeddings count once, as `wte`."""
    C, hidden, bias = config.n_embd, config.mlp_hidden, int(config.bias)
    kv_width = config.kv_heads * config.head_dim
    norm = C * (1 + (bias if config.norm == "layernorm" else 0))
    up = 2 * hidden if config.mlp == "swiglu" else hidden
    attention = (C + bias) * (C + 2 * kv_width) + (C + bias) * C
    attention += 2 * config.head_dim if config.qk_norm else 0
    mlp = (C + bias) * up + (hidden + bias) * C
    return {
        "wte": config.padded_vocab_size * C,
        "wpe": config.seq_len * C if config.position == "learned" else 0,
        "attention": config.n_layer * attention,
        "mlp": config.n_layer * mlp,
        "norms": (2 * config.n_layer + 1) * norm,
        "lm_head": 0 if config.tie_embeddings else config.padded_vocab_size * C,
    }


def flops_per_token(config: GPTConfig, seq_len: int | None = None) -> float:
    """Model FLOPs of forward and backward per token: 6N + 12LCT (PaLM, appendix B), N the parameters without
    position embeddings. Causality is not discounted, as is usual for MFU; an untied input embedding does no
    multiplication and is left out."""
    T = config.seq_len if seq_len is None else seq_len
    parts = parameter_count(config)
    N = sum(parts.values()) - parts["wpe"] - (0 if config.tie_embeddings else parts["wte"])
    return 6 * N + 12 * config.n_layer * config.n_embd * T


def attention_flops(
    batch: int, heads: int, tq: int, tk: int, head_dim: int, *, causal: bool = False, backward: bool = False
) -> float:
    """FLOPs of one attention: 4*B*H*Tq*Tk*D forward, halved when causal; backward 2.5 times forward, as five
    products stand against two."""
    forward = 4 * batch * heads * tq * tk * head_dim * (0.5 if causal else 1.0)
    return forward * (2.5 if backward else 1.0)


def kv_cache_bytes(config: GPTConfig, batch: int, tokens: int, bytes_per_value: int = 2) -> int:
    """Bytes of the KV cache: keys and values, per layer, kv head and head dim."""
    return 2 * config.n_layer * batch * config.kv_heads * config.head_dim * tokens * bytes_per_value


def score_matrix_bytes(batch: int, heads: int, tq: int, tk: int, bytes_per_value: int = 2) -> int:
    """Bytes of one layer's scores written out, which naive attention holds and tiled attention never does."""
    return batch * heads * tq * tk * bytes_per_value
