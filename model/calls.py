"""The attention calls a GPT is going to make, known before any tensor exists, so that what an implementation
cannot do is refused at start-up with every reason."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from attention.base import Attention, AttentionCall, UnsupportedAttention
from model.config import GPTConfig


def attention_call(
    config: GPTConfig,
    purpose: str,
    *,
    batch: int,
    tokens: int,
    device: torch.device,
    dtype: torch.dtype,
    document_ids: bool = False,
    cache: frozenset[str] = frozenset(),
) -> AttentionCall:
    """The call of every layer for `purpose`: training | validation | prefill | decode.

    tokens: T of the input; for decode, the capacity of the cache that one query token looks at.
    cache: what decoding reads in place of k and v (attention/call.py), if it does."""
    features = {
        "window": config.window is not None,
        "softcap": config.softcap is not None,
        "alibi": config.position == "alibi",
        "relative_bias": config.position == "t5",
        "gqa": config.kv_heads != config.n_head,
        "noncausal": not config.causal,
        "document_ids": document_ids and purpose in ("training", "validation"),
        "block_mask": config.sparsity is not None,
        "dropout": config.attn_dropout > 0 and purpose == "training",
        "kv_lengths": purpose == "decode",
        "rectangular": purpose == "decode",
    }
    return AttentionCall(
        purpose=purpose,
        device=device.type,
        arch=torch.cuda.get_device_capability(device) if device.type == "cuda" else None,
        dtype=dtype,
        batch=batch,
        heads=config.n_head,
        kv_heads=config.kv_heads,
        tq=1 if purpose == "decode" else tokens,
        tk=tokens,
        head_dim=config.head_size,
        causal=config.causal,
        features=frozenset(name for name, used in features.items() if used),
        backward=purpose == "training",
        cache=cache if purpose == "decode" else frozenset(),
    )


def attention_calls(
    config: GPTConfig, batch: int, eval_batch: int, sequence_ranks: int = 1, **facts: Any
) -> dict[str, AttentionCall]:
    """Purpose -> call, of everything that training does; `facts` as above. Where ranks share a sequence, the
    larger of the two calls that each makes (model/context_parallel.py)."""
    rows = {"training": batch, "validation": eval_batch, "prefill": 1, "decode": 1}
    calls = {
        purpose: attention_call(config, purpose, batch=number, tokens=config.seq_len, **facts)
        for purpose, number in rows.items()
    }
    if sequence_ranks > 1:
        chunk = config.seq_len // (2 * sequence_ranks)
        calls |= {purpose: replace(calls[purpose], tq=chunk) for purpose in ("training", "validation")}
    return calls


def require(attention: Attention, calls: list[AttentionCall]) -> None:
    """Raise UnsupportedAttention with the reasons of all calls that `attention` cannot make, each once."""
    purposes: dict[str, list[str]] = {}
    for call in calls:
        for reason in attention.unsupported_reasons(call):
            purposes.setdefault(reason, []).append(call.purpose)
    if purposes:
        reasons = [f"{', '.join(asked)}: {reason}" for reason, asked in purposes.items()]
        raise UnsupportedAttention(attention.name, reasons)
