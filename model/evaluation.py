"""How well a model foresees a text: log-likelihoods of tokens, in windows of the trained context."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from conf.values import UserError, whole
from model.calls import attention_call, require
from model.generation.blocks import BlockPool
from model.generation.decode import compute_dtype
from model.generation.paged_cache import PagedCache, paged_cache, paged_kinds
from model.gpt import GPT, IGNORE


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
        return math.exp(self.nats / self.tokens)


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
    net: GPT, ids: Sequence[int], stride: int | None = None, batch: int = 8, cache_dtype: str = "auto"
) -> Score:
    """Of all tokens of `ids` but the first, which nothing foresees. stride: see `windows`; None: half the
    context. cache_dtype: of the keys and values that tokens see, as if each were decoded over a KV cache of
    that dtype. UserError for a stride beyond the context, and for a text of less than two tokens."""
    context = net.config.seq_len
    stride = max(1, context // 2) if stride is None else stride
    whole("stride", stride, 1, context)
    if len(ids) < 2:
        raise UserError(f"the text has {len(ids)} tokens, and needs 2 or more")
    device, text, nats = net.lm_head.weight.device, torch.tensor(ids), 0.0
    cache = None if cache_dtype == "auto" else made_cache(net, batch, cache_dtype)
    alike = itertools.groupby(windows(len(ids) - 1, context, stride), key=lambda w: w.stop - w.start)
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


def made_cache(net: GPT, batch: int, cache_dtype: str) -> PagedCache:
    """Blocks for `batch` rows of the whole context. Raises UnsupportedAttention where the model's attention
    cannot read them."""
    attention, device, tokens = net.transformer.h[0].attn.attention, net.lm_head.weight.device, 16
    width = -(-net.config.seq_len // tokens)
    how = {"batch": batch, "tokens": net.config.seq_len, "device": device, "dtype": compute_dtype(net)}
    require(attention, [attention_call(net.config, "decode", **how, cache=paged_kinds(net, cache_dtype))])
    cache = paged_cache(net, batch, BlockPool(batch * width, tokens), attention, cache_dtype)
    cache.table.copy_(1 + torch.arange(batch * width).view(batch, width))
    return cache


@torch.inference_mode()
def continuation(net: GPT, context: Sequence[int], answer: Sequence[int]) -> tuple[float, bool]:
    """The log-likelihood of `answer` behind `context`, of which as much as fits is seen, and whether greedy
    decoding gives it."""
    whole("the tokens of an answer", len(answer), 1, net.config.seq_len)
    if not context:
        raise UserError("an answer needs a context of one token or more")
    ids = [*context, *answer][-(net.config.seq_len + 1) :]
    x = torch.tensor([ids[:-1]], device=net.lm_head.weight.device)
    logits = net(x)[0, -len(answer) :, : net.config.vocab_size].float()  # (T, Vp) -> (answer, V)
    targets: Tensor = torch.tensor(list(answer), device=x.device)
    likely = logits.log_softmax(-1).gather(-1, targets[:, None]).sum()
    return float(likely), bool((logits.argmax(-1) == targets).all())
