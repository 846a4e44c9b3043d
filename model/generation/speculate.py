"""Speculative decoding: a draft of the next tokens, which the model checks in one call (Leviathan et al.
2023, algorithm 1).

A drafted token is kept with probability min(1, p / q), where p is the model's probability of it and q the
draft's. Instead of the first that is not kept, one is drawn from max(0, p - q); if all are kept, one more is
drawn from p. So the text has the distribution that it has without a draft. With temperature 0 both are
distributions of a single token, and the text is the greedy one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from attention.base import Attention
from conf.values import UserError
from model.generation.blocks import BlockPool
from model.generation.decode import Sampling, at_least_1, to_device
from model.generation.generate import (
    Generated,
    OnToken,
    checked,
    clock,
    not_finite,
    require_all,
    told,
    window_start,
)
from model.generation.paged_cache import paged_cache, paged_kinds
from model.gpt import GPT

BLOCK = 16  # tokens; a row's blocks are its own
LONGEST = 3  # n-gram that is looked for, then shorter ones


@dataclass(frozen=True)
class Speculated(Generated):
    """drafted, accepted: tokens; calls: of the model, for all rows."""

    drafted: int
    accepted: int
    calls: int


class Context:
    """A model, and what its cache holds of the texts of some rows, of at most `tokens` each."""

    def __init__(self, model: GPT, rows: int, tokens: int, attention: Attention, cache_dtype: str):
        self.model, self.seq_len = model, model.config.seq_len
        self.columns = -(-min(tokens, self.seq_len) // BLOCK)
        blocks = BlockPool(rows * self.columns, BLOCK)
        self.cache = paged_cache(model, rows, blocks, attention, cache_dtype)
        self.starts, self.held = [0] * rows, [0] * rows

    def room(self, length: int) -> int:
        """Tokens that may follow a text of `length` before its window moves."""
        return self.seq_len - (length - window_start(length, self.seq_len))

    def forget(self, row: int, length: int) -> None:
        """What the cache holds behind the first `length` tokens of a row's text."""
        self.held[row] = max(0, min(self.held[row], length - self.starts[row]))

    def read(self, rows: Sequence[int], texts: list[list[int]], asked: list[int]) -> Tensor:
        """Logits (R, max(asked), V) after each of the last `asked` tokens of the texts of `rows`, which have
        not changed since the last call but for their last `asked` tokens."""
        parts, begins = [], []
        for row, text, count in zip(rows, texts, asked, strict=True):
            start = window_start(len(text) - count + 1, self.seq_len)
            held = min(self.held[row], len(text) - count - start) if start == self.starts[row] else 0
            parts.append(text[start + held :])
            begins.append(held)
            self.starts[row], self.held[row] = start, len(text) - start
        device, longest, most = self.cache.table.device, max(map(len, parts)), max(asked)
        columns = range(-(-(max(begins) + longest) // BLOCK))
        own = [[1 + row * self.columns + at if at < self.columns else 0 for at in columns] for row in rows]
        table = to_device(own, device).to(torch.int32)
        self.cache.append(table, to_device(begins, device), longest, not any(begins))
        padded = to_device([part + [0] * (longest - len(part)) for part in parts], device)
        last = [
            [min(len(part) - count + at, len(part) - 1) for at in range(most)]
            for part, count in zip(parts, asked, strict=True)
        ]
        logits = self.model.forward(padded, cache=self.cache, last=to_device(last, device))
        return logits[..., : self.model.config.vocab_size]


class NGrams:
    """Drafts what followed the last tokens of a text where these stood in it before."""

    def __init__(self, rows: int):
        self.ends: list[dict[tuple[int, ...], int]] = [{} for _ in range(rows)]
        self.known = [1] * rows

    def __call__(
        self, rows: Sequence[int], texts: list[list[int]], counts: list[int]
    ) -> tuple[list[list[int]], None]:
        return [self.draft(*each) for each in zip(rows, texts, counts, strict=True)], None

    def draft(self, row: int, text: list[int], count: int) -> list[int]:
        ends = self.ends[row]
        for end in range(self.known[row], len(text)):
            ends.update({tuple(text[end - n : end]): end for n in range(1, min(LONGEST, end) + 1)})
        self.known[row] = len(text)
        for n in range(min(LONGEST, len(text)), 0, -1):
            if end := ends.get(tuple(text[-n:])):
                return text[end : end + count]
        return []


class SmallerModel:
    """Drafts what another model draws."""

    def __init__(self, context: Context, sampling: Sampling, generator: torch.Generator):
        self.context, self.sampling, self.generator = context, sampling, generator

    def __call__(
        self, rows: Sequence[int], texts: list[list[int]], counts: list[int]
    ) -> tuple[list[list[int]], Tensor | None]:
        """The drafts, and the distributions (R, K, V) that they were drawn from."""
        for row, text in zip(rows, texts, strict=True):  # what was drafted last may not have been kept
            self.context.forget(row, len(text) - 1)
        drafts: list[list[int]] = [[] for _ in rows]
        drawn_from = []
        for _ in range(max(counts)):
            longer = [text + draft for text, draft in zip(texts, drafts, strict=True)]
            logits = self.context.read(rows, longer, [1] * len(rows))
            drawn_from.append(probabilities(logits[:, 0], self.sampling))
            for draft, token in zip(drafts, draw(drawn_from[-1], self.generator).tolist(), strict=True):
                draft.append(token)
        drafts = [draft[:count] for draft, count in zip(drafts, counts, strict=True)]
        return drafts, torch.stack(drawn_from, 1) if drawn_from else None


def probabilities(logits: Tensor, sampling: Sampling) -> Tensor:
    """What the next token is drawn from, (..., V) fp32, by logits (..., V)."""
    if sampling.temperature == 0:
        return F.one_hot(logits.argmax(-1), logits.shape[-1]).float()
    values, tokens = sampling.candidates(logits)
    p = values.softmax(-1)
    return p if tokens is None else torch.zeros_like(logits, dtype=p.dtype).scatter(-1, tokens, p)


def draw(p: Tensor, generator: torch.Generator) -> Tensor:
    """Tokens (R,) by weights (R, V), by an exponential race as in Sampling.choose."""
    return (p / torch.empty_like(p).exponential_(generator=generator).clamp_min(1e-38)).argmax(-1)


def accept(
    p: Tensor, q: Tensor, drafts: Tensor, counts: Tensor, generator: torch.Generator
) -> tuple[Tensor, Tensor]:
    """How many drafted tokens are kept, (R,), and the token that follows them, (R,).

    p: (R, K + 1, V) the model's distributions; q: (R, K, V) those that drafts (R, K) were drawn from, of
    which counts (R,) are there."""
    at, k = drafts.unsqueeze(-1), drafts.shape[1]
    u = torch.rand(drafts.shape, generator=generator, device=p.device)
    kept = u * q.gather(-1, at).squeeze(-1) < p[:, :k].gather(-1, at).squeeze(-1)
    kept &= torch.arange(k, device=p.device) < counts.unsqueeze(1)
    kept = kept.long().cumprod(1).sum(1)
    rows = torch.arange(len(p), device=p.device)
    # What was drafted and not kept may not come by the other way; behind the last draft nothing was.
    less = F.pad(q, (0, 0, 0, 1))[rows, kept] * (kept < counts).unsqueeze(1)
    return kept, draw((p[rows, kept] - less).clamp_min(0), generator)


class Texts:
    """The rows' texts, and where each stops."""

    def __init__(
        self, prompts: list[list[int]], most: int, eot: int | None, on_token: OnToken | None, drafts: int
    ):
        self.texts, self.new = [list(prompt) for prompt in prompts], [[] for _ in prompts]
        self.most, self.eot, self.on_token, self.drafts = most, eot, on_token, drafts
        self.stopped = [False] * len(prompts)

    def unfinished(self) -> list[int]:
        return [row for row, new in enumerate(self.new) if len(new) < self.most and not self.stopped[row]]

    def wanted(self, row: int, room: int) -> int:
        """Tokens to draft: one more than what is kept of them is chosen."""
        return min(self.drafts, room, self.most - len(self.new[row]) - 1)

    def add(self, row: int, tokens: list[int]) -> None:
        for token in tokens:
            self.texts[row].append(token)
            self.new[row].append(token)
            asked = self.on_token is not None and self.on_token(row, token)
            if asked or token == self.eot:
                self.stopped[row] = True
                return


class Speculation:
    """The calls, and what came of the drafts."""

    def __init__(self, context: Context, drafter: NGrams | SmallerModel, texts: Texts, sampling: Sampling):
        self.context, self.drafter, self.texts, self.sampling = context, drafter, texts, sampling
        self.drafted = self.accepted = self.calls = 0

    def step(self, rows: list[int], generator: torch.Generator) -> None:
        """At least one token more for each of `rows`."""
        texts, device = [self.texts.texts[row] for row in rows], generator.device
        wanted = [
            self.texts.wanted(row, self.context.room(len(t))) for row, t in zip(rows, texts, strict=True)
        ]
        drafts, q = self.drafter(rows, texts, wanted)
        counts = [len(draft) for draft in drafts]
        read = [text + draft for text, draft in zip(texts, drafts, strict=True)]
        logits = self.context.read(rows, read, [count + 1 for count in counts])
        p, k = probabilities(logits, self.sampling), max(counts)
        tokens = (
            to_device([draft + [0] * (k - len(draft)) for draft in drafts], device).view(len(rows), k).long()
        )
        q = F.one_hot(tokens, p.shape[-1]).float() if q is None else q
        kept, following = accept(p, q, tokens, to_device(counts, device), generator)
        for row, draft, n, token in zip(rows, drafts, kept.tolist(), following.tolist(), strict=True):
            self.texts.add(row, [*draft[:n], token])
            self.accepted += n
        self.drafted += sum(counts)
        self.calls += 1


def require_drafts(model: GPT, draft: GPT | None, draft_tokens: int) -> None:
    at_least_1("draft_tokens", draft_tokens)
    if draft is not None and draft.config.vocab_size != model.config.vocab_size:
        raise UserError(
            f"The model that drafts has {draft.config.vocab_size} tokens, the other "
            f"{model.config.vocab_size}: give one with the same tokenizer, or speculate=ngram."
        )
    # NaN is neither accepted nor replaced by the model's own choice: the text would be of token 0
    if draft is not None and (bad := not_finite(draft)):
        raise UserError(
            f"The model that drafts has NaN or infinity in {bad[0]}: give one whose weights are finite, or "
            "speculate=ngram."
        )


@torch.inference_mode()
def speculate(
    model: GPT,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    *,
    draft: GPT | None = None,
    draft_tokens: int = 4,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    seed: int | None = None,
    eot: int | None = None,
    on_token: OnToken | None = None,
    decode_attention: Attention | None = None,
    cache_dtype: str = "auto",
) -> Speculated:
    """As `generate`, checking up to `draft_tokens` tokens a call that `draft` proposes, or without it n-grams
    of the text so far. Raises UserError, and UnsupportedAttention before anything runs."""
    sampling, prompts = checked(model, prompts, max_new_tokens, temperature, top_k, top_p, eot, seed)
    require_drafts(model, draft, draft_tokens)
    device, contexts = model.device, []
    tokens = max(map(len, prompts)) + max_new_tokens + draft_tokens
    models = [model] if draft is None else [model, draft]
    training = [each.training for each in models]
    times = [clock(device)]
    for each in models:
        attention = decode_attention or each.transformer.h[0].attn.attention
        kinds, seq_len = paged_kinds(each, cache_dtype), each.config.seq_len
        require_all(each, attention, len(prompts), seq_len, seq_len, kinds)
        contexts.append(Context(each, len(prompts), tokens, attention, cache_dtype))
    generator = torch.Generator(device)
    seed = generator.seed() if seed is None else seed
    generator.manual_seed(seed)
    texts = Texts(prompts, max_new_tokens, eot, on_token, draft_tokens)
    drafter = NGrams(len(prompts)) if draft is None else SmallerModel(contexts[1], sampling, generator)
    work = Speculation(contexts[0], drafter, texts, sampling)
    for each in models:
        each.eval()
    times.append(clock(device))
    try:
        with torch.cuda.device_of(model.transformer.wte.weight):  # Triton launches on the current device
            while rows := texts.unfinished():
                work.step(rows, generator)
                times += [clock(device)] * (work.calls == 1)
    finally:
        for each, was in zip(models, training, strict=True):
            each.train(was)
    times.append(clock(device))
    whole = told(model.config.seq_len, [len(prompt) for prompt in prompts], texts.new, seed, times)
    return Speculated(**vars(whole), drafted=work.drafted, accepted=work.accepted, calls=work.calls)
