"""The loss of a model at every position of held-out documents, each target given as much of what precedes it
as the model's context allows: for studies/long_context_quality.py.

D documents of `span` targets each; a document is led by the end-of-text token, so that its first token is a
target too. A model with a context of T tokens sees windows of T that move on by T / 8, and a target counts in
the window that gives it the most context: position p (0-based) has p + 1 tokens of it where p < T, and beyond
that from 7/8 T to T. So models of all contexts predict the same targets; the one whose T is `span` reads a
document in one window.
"""

from __future__ import annotations

import hashlib
import itertools
from typing import TYPE_CHECKING, Any

import numpy as np

from conf.values import UserError

if TYPE_CHECKING:
    import torch
    from numpy import ndarray as Array

    from data.tokenizer_base import Tokenizer
    from model.gpt import GPT


def evaluation_tokens(texts: list[str], tokenizer: Tokenizer, span: int, most: int) -> Array:
    """(D, span + 1) int64, the first tokens of those texts that have so many, at most `most` of them.

    Raises UserError where none has, or the tokenizer cannot mark the start of a document."""
    if tokenizer.eot is None:
        raise UserError("a document's start needs an end-of-text token: data.tokenizer.kind=bpe or byte.")
    rows: list[Array] = []
    for text in texts:
        tokens = tokenizer.encode_array(text)
        if len(tokens) >= span and len(rows) < most:
            rows.append(np.append(tokenizer.eot, tokens[:span]).astype(np.int64))
    if not rows:
        raise UserError(
            f"none of the {len(texts)} held-out documents has {span:,} tokens: choose shorter --contexts, or "
            "raise --least-bytes."
        )
    return np.stack(rows)


def digest(tokens: Array) -> str:
    return hashlib.sha256(tokens.astype("<i8").tobytes()).hexdigest()


def window_starts(span: int, context: int) -> Array:
    """Of the windows that a document is read in: every T / 8, the last one ends with the document."""
    return np.unique([*range(0, span - context, max(1, context // 8)), span - context])


def most_context(starts: Array, span: int, context: int) -> Array:
    """(span,) which window a position counts in: the first that reaches it."""
    return np.searchsorted(starts, np.arange(span) - context + 1)


def token_losses(model: GPT, tokens: Array, context: int, batch: int, device: torch.device) -> Array:
    """(D, windows, T) fp32, in nats: every target in every window, `batch` windows at once."""
    import torch
    import torch.nn.functional as F

    starts = window_starts(tokens.shape[1] - 1, context)
    every = [(document, start) for document in range(len(tokens)) for start in starts]
    found = np.empty((len(every), context), dtype=np.float32)
    bf16 = device.type == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False)
    with torch.inference_mode(), torch.autocast(device.type, torch.bfloat16, enabled=bf16):
        for at in range(0, len(every), batch):
            rows = np.stack([tokens[d, start : start + context + 1] for d, start in every[at : at + batch]])
            ids = torch.from_numpy(rows).to(device)
            logits = model(ids[:, :-1])[..., : model.config.vocab_size]  # (b, T, V)
            losses = F.cross_entropy(logits.flatten(0, 1).float(), ids[:, 1:].flatten(), reduction="none")
            found[at : at + batch] = losses.view(-1, context).cpu().numpy()
    return found.reshape(len(tokens), len(starts), context)


def edges(span: int) -> list[int]:
    """Of bins of positions, two an octave from 16 on: 0, 16, 24, 32, 48, ..., span."""
    inner = sorted(16 * 2**octave * part // 2 for octave in range(span.bit_length()) for part in (2, 3))
    return [0, *(edge for edge in inner if edge < span), span]


def binned(losses: Array) -> list[list[float]]:
    """[position, loss] of each bin: mean tokens of a document before the target, and mean loss over them.

    losses: (..., span), by position."""
    bounds = edges(losses.shape[-1])
    return [
        [(first + after + 1) / 2, round(float(losses[..., first:after].mean(dtype=np.float64)), 5)]
        for first, after in itertools.pairwise(bounds)
    ]


def evaluate(model: GPT, tokens: Array, context: int, batch: int, device: torch.device) -> dict[str, Any]:
    """Of a row's result, in nats per token: loss over all shared targets, loss_last_half over those in the
    second half of the documents, loss_by_position, loss_by_document; and of windows that follow each other,
    as in training, loss_chunked and loss_in_window, by the position in them."""
    every = token_losses(model, tokens, context, batch, device)
    span = tokens.shape[1] - 1
    starts = window_starts(span, context)
    window, position = most_context(starts, span, context), np.arange(span)
    losses = every[:, window, position - starts[window]]  # (D, span)
    chunks = every[:, starts % context == 0]
    return {
        "loss": float(losses.mean(dtype=np.float64)),
        "loss_last_half": float(losses[:, span // 2 :].mean(dtype=np.float64)),
        "loss_by_position": binned(losses),
        "loss_chunked": float(chunks.mean(dtype=np.float64)),
        "loss_in_window": binned(chunks),
        "loss_by_document": [round(float(loss), 5) for loss in losses.mean(axis=1, dtype=np.float64)],
    }
