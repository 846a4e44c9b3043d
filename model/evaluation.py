"""How well a model foresees a text: log-likelihoods of tokens, in windows of the trained context."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from attention.base import widest
from conf.values import UserError, whole
from model.calls import attention_call, require
from model.generation.blocks import BlockPool
from model.generation.decode import compute_dtype
from model.generation.paged_cache import PagedCache, paged_cache, paged_kinds
from model.gpt import GPT, IGNORE
from model.kv_cache import KVCache


class Window(NamedTuple):
    """Tokens [start, stop) of a text, each foretelling the next; those from `first` on are counted."""

    start: int
    first: int
    stop: int


class Score(NamedTuple):
    """The negative log-likelihood of `tokens` tokens, in nats."""

    nats: float
    tokens: int

    @property
    def perplexity(self) -> float:
        nats = self.nats / self.tokens
        return math.inf if nats > 709 else math.exp(nats)  # which is an error beyond all floats


def windows(tokens: int, context: int, stride: int) -> Iterator[Window]:
    """Each of so many tokens counted once: windows of at most `context`, `stride` further each time, in which
    a token, those of the first window apart, has at least context - stride before it."""
    first = 0
    for start in range(0, tokens, stride):
        stop = min(start + context, tokens)
        yield Window(start, first, stop)
        first = stop
        if stop == tokens:
            return


@torch.inference_mode()
def score(
    net: GPT,
    ids: Sequence[int],
    stride: int | None = None,
    batch: int = 8,
    cache_dtype: str = "auto",
    context: int | None = None,
) -> Score:
    """Of all tokens of `ids` but the first, which nothing foresees. stride: see `windows`; None: half the
    context. cache_dtype: of the keys and values that tokens see, as if each were decoded over a KV cache of
    that dtype. context: of a window; None: the trained one. UserError for a stride beyond the context, and a
    context beyond the trained one, for a text of less than two tokens, and for a model that sees what
    follows."""
    context = net.config.seq_len if context is None else context
    whole("context", context, 1, net.config.seq_len)
    stride = max(1, context // 2) if stride is None else stride
    whole("stride", stride, 1, context)
    whole("batch", batch, 1)
    if len(ids) < 2:
        raise UserError(f"the text has {len(ids)} tokens, and needs 2 or more")
    device, text, nats = net.device, torch.tensor(ids), 0.0
    cache = None if cache_dtype == "auto" else made_cache(net, batch, cache_dtype, context)
    alike = itertools.groupby(windows(len(ids) - 1, context, stride), key=lambda w: w.stop - w.start)
    with foreseeing(net):
        for _, group in alike:
            while rows := list(itertools.islice(group, batch)):
                x, targets = (torch.stack([text[w.start + i : w.stop + i] for w in rows]) for i in (0, 1))
                for row, w in zip(targets, rows, strict=True):
                    row[: w.first - w.start] = IGNORE
                if cache is not None:
                    starts = torch.zeros(len(rows), dtype=torch.int64, device=device)
                    cache.append(cache.table[: len(rows)], starts, x.shape[1], from_start=False)
                nats += float(net(x.to(device), targets=targets.to(device), cache=cache))
    return Score(nats, len(ids) - 1)


@contextmanager
def foreseeing(net: GPT) -> Iterator[None]:
    """`net` without dropout, and then as it was. UserError where it sees the tokens that it is to foresee."""
    if not net.config.causal:
        raise UserError("model.causal=false: a model that sees a token gives it no probability; use true.")
    if not net.training:  # to say so to each module takes 12 ms of 24 layers
        yield
        return
    net.eval()
    try:
        yield
    finally:
        net.train()


def made_cache(net: GPT, batch: int, cache_dtype: str, context: int) -> PagedCache:
    """Blocks for `batch` rows of `context` tokens. Raises UnsupportedAttention where the model's attention
    cannot read them."""
    attention, device, tokens = net.transformer.h[0].attn.attention, net.device, 16
    width = -(-context // tokens)
    how = {"batch": batch, "tokens": context, "device": device, "dtype": compute_dtype(net)}
    require(attention, [attention_call(net.config, "decode", **how, cache=paged_kinds(net, cache_dtype))])
    cache = paged_cache(net, batch, BlockPool(batch * width, tokens), attention, cache_dtype)
    cache.table.copy_(1 + torch.arange(batch * width).view(batch, width))
    return cache


class Prefix(KVCache):
    """The keys and values of rows whose tokens come in pieces: those of a piece see all before them by the
    attention that trains, with fewer queries than keys."""

    def __init__(self, net: GPT, batch: int, tokens: int) -> None:
        config, attention = net.config, net.transformer.h[0].attn.attention
        shape = config.n_layer, batch, config.kv_heads, tokens, config.head_size
        device = net.device
        super().__init__(*shape, attention=attention, dtype=compute_dtype(net), device=device)
        self.piece = slice(0, 0)

    @property
    def positions(self) -> Tensor:
        """(1, T)"""
        return torch.arange(self.piece.start, self.piece.stop, device=self.lengths.device).unsqueeze(0)

    kv_lengths = None

    def update(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Write k, v (B, Hkv, T, D) of a layer; return those up to the end of the piece."""
        held = self.k[layer], self.v[layer]
        for new, all_of in zip((k, v), held, strict=True):
            all_of[:, :, self.piece] = new
        return held[0][:, :, : self.piece.stop], held[1][:, :, : self.piece.stop]

    def advance(self) -> None:
        pass


@torch.no_grad()
def loss_in_pieces(net: GPT, input_ids: Tensor, targets: Tensor, piece: int) -> float:
    """The sum of the token losses of rows (B, T) whose forward pass takes `piece` tokens at a time: the same
    as net(input_ids, targets=targets), by other calls and with the memory of a piece beside that of the keys
    and values. Raises UnsupportedAttention where the model's attention cannot have fewer queries than keys,
    UserError for a model that sees what follows, or whose block masks are of whole rows."""
    if not net.config.causal or net.config.sparsity is not None:
        raise UserError("a loss in pieces needs a model with model.causal=true and no model.sparsity.")
    (batch, tokens), device = input_ids.shape, input_ids.device
    cache = Prefix(net, batch, tokens)
    how = {"batch": batch, "tokens": tokens, "device": device, "dtype": compute_dtype(net)}
    call = attention_call(net.config, "validation", **how)
    if piece < tokens:
        require(cache.attention, [replace(call, tq=piece, features=call.features | {"rectangular"})])
    nats = torch.zeros((), dtype=widest(device), device=device)
    for start in range(0, tokens, piece):
        cache.piece = slice(start, min(start + piece, tokens))
        nats += net(input_ids[:, cache.piece], targets=targets[:, cache.piece], cache=cache)
    return float(nats)


@torch.inference_mode()
def continuation(net: GPT, context: Sequence[int], answer: Sequence[int]) -> tuple[float, bool]:
    """The log-likelihood of `answer` behind `context`, of which as much as fits is seen, and whether greedy
    decoding gives it."""
    whole("the tokens of an answer", len(answer), 1, net.config.seq_len)
    if not context:
        raise UserError("an answer needs a context of one token or more")
    ids = [*context, *answer][-(net.config.seq_len + 1) :]
    x = torch.tensor([ids[:-1]], device=net.device)
    with foreseeing(net):
        logits = net(x)[0, -len(answer) :, : net.config.vocab_size].float()  # (T, Vp) -> (answer, V)
    targets: Tensor = torch.tensor(list(answer), device=x.device)
    likely = logits.log_softmax(-1).gather(-1, targets[:, None]).sum()
    return float(likely), bool((logits.argmax(-1) == targets).all())
