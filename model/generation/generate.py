"""Text from a GPT: a prefill of the prompts, then one token a step that never leaves the device.

The context rule, a pure function of a row's own length: a row sees all of its tokens while they fit into
`seq_len`; the token that would not fit cuts the window to the last `seq_len // 2` tokens, re-encoded in one
prefill, and decoding goes on until it is full again. So text with and without the cache agrees past the
context too, and no row depends on its batch mates. Half: a re-encoding every seq_len / 2 tokens, and never
less than that to look back on. A prompt that is too long starts where the same rule has put the window.
"""

from __future__ import annotations

import functools
import math
import operator
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from attention.base import Attention
from conf.values import UserError, whole
from model.calls import attention_call, require
from model.generation.decode import Decoder, Rows, Sampling, at_least_1, compute_dtype, dense_cache, encode
from model.generation.fused import FusedStep, wants_fused
from model.generation.view_cache import cache_kinds
from model.gpt import GPT

OnToken = Callable[[int, int], bool | None]
LAG = 8  # tokens that the host reads behind a GPU: it never waits for a step, and launches at most 8 in vain


@dataclass(frozen=True)
class Generated:
    """What came of it. The rates leave setup_s (allocation, compilation, capture) out; prefill counts the
    prompts' tokens and ends with each row's first new one, decode counts the kept ones after it.

    tokens: the new ones of each row, up to and with the one it stopped at
    seed: what gives the same again
    cut, reencoded: prompts longer than the context; windows cut while decoding
    """

    tokens: list[list[int]]
    seed: int
    cut: int
    reencoded: int
    prefill_tokens: int
    setup_s: float
    prefill_s: float
    decode_s: float

    @property
    def prefill_tokens_per_s(self) -> float:
        return self.prefill_tokens / self.prefill_s

    @property
    def decode_tokens_per_s(self) -> float:
        decoded = sum(len(row) for row in self.tokens) - len(self.tokens)
        return decoded / self.decode_s if decoded else 0.0


def window_moves(length: int, seq_len: int) -> int:
    """How often the window of a row of `length` tokens was cut: 0 while they fit."""
    return max(0, -(-(length - seq_len) // window_stride(seq_len)))


def window_stride(seq_len: int) -> int:
    """How far a cut moves the start of the window: from `seq_len + 1` tokens, one too many, to half."""
    return seq_len + 1 - max(1, seq_len // 2)


def window_start(length: int, seq_len: int) -> int:
    """The first token that a row of `length` tokens sees."""
    return window_moves(length, seq_len) * window_stride(seq_len)


class Reader:
    """Hands the tokens to the host: late on a GPU, which copies a step's to pinned memory before an event."""

    def __init__(
        self, rows: int, device: torch.device, eot: int | None, on_token: OnToken | None, batch: int
    ):
        self.on_gpu = device.type == "cuda"
        # of at most `batch` tokens each: all that may be pending, and the next one
        self.host = deque(torch.empty(LAG + 1, batch, dtype=torch.int64, pin_memory=self.on_gpu))
        self.pending: deque[tuple[Sequence[int], Tensor, torch.cuda.Event | None]] = deque()
        self.tokens: list[list[int]] = [[] for _ in range(rows)]
        self.first = [0.0] * rows  # when the first of each was there
        self.stopped = [False] * rows
        self.eot, self.on_token = eot, on_token

    def push(self, rows: Sequence[int], token: Tensor) -> None:
        """Take the tokens (B, 1) of a step, each of the row that is named; of none at -1."""
        self.host.rotate()
        host = self.host[0][: len(rows)]
        host.copy_(token[:, 0], non_blocking=True)
        self.pending.append((rows, host, torch.cuda.current_stream().record_event() if self.on_gpu else None))
        self.read(LAG if self.on_gpu else 0)

    def read(self, lag: int = 0) -> None:
        """Wait for all but the last `lag` steps and give their tokens to the rows that have not stopped."""
        while len(self.pending) > lag:
            rows, host, copied = self.pending.popleft()
            if copied is not None:
                copied.synchronize()
            for row, token in zip(rows, host.tolist(), strict=True):
                if row >= 0 and not self.stopped[row]:
                    if not self.tokens[row]:
                        self.first[row] = time.perf_counter()
                    self.tokens[row].append(token)
                    asked = self.on_token is not None and self.on_token(row, token)
                    self.stopped[row] = bool(asked) or token == self.eot


def checked_prompts(prompts: Sequence[Sequence[int]], vocab_size: int, eot: int | None) -> list[list[int]]:
    """The prompts as lists; an empty one starts from the end-of-text token, as documents do."""
    try:
        prompts = [[*map(operator.index, prompt)] for prompt in prompts]
    except TypeError:  # of text, of one prompt alone, of numbers with a fraction
        raise UserError(
            f"prompts={ascii(prompts)[:60]}: they need to be a list of prompts, each a list of token ids; "
            "encode text by the tokenizer, and put a single prompt into a list."
        ) from None
    if not prompts:
        raise UserError(
            "there is no prompt: give at least one, which may be empty if the tokenizer has an end-of-text "
            "token."
        )
    checked = [prompt or ([] if eot is None else [eot]) for prompt in prompts]
    for i, prompt in enumerate(checked):
        if not prompt:
            raise UserError(
                f"prompt {i} is empty, and this tokenizer has no end-of-text token to start from: give it at "
                "least one character."
            )
        if not all(0 <= token < vocab_size for token in prompt):
            wrong = next(token for token in prompt if not 0 <= token < vocab_size)
            raise UserError(
                f"prompt {i} holds token {wrong}: ids go from 0 to {vocab_size - 1}; check the tokenizer."
            )
    return checked


def checked(
    model: GPT,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    eot: int | None = None,
    seed: int | None = None,
) -> tuple[Sampling, list[list[int]]]:
    """How tokens are drawn, and the prompts as `generate` takes them. Raises UserError."""
    if not model.config.causal:
        raise UserError(
            "model.causal=false: a model that sees the future cannot predict it; generate needs true."
        )
    at_least_1("max_new_tokens", max_new_tokens)
    whole("seed", seed, 0, 2**64 - 1, null="a fresh one")
    sampling = Sampling(temperature, top_k, top_p)
    prompts = checked_prompts(prompts, model.config.vocab_size, eot)
    require_finite(model)
    return sampling, prompts


def require_finite(model: GPT) -> None:
    """UserError where weights are NaN or infinite: of such logits, whatever they say, token 0 is largest."""
    if bad := not_finite(model):
        raise UserError(
            f"{len(bad)} of {len(numbers(model))} weight tensors hold NaN or infinity, {bad[0]} first: "
            "give a model whose weights are finite, from before it diverged or in bf16 or fp32."
        )


# Of models whose weights were all finite: where these lay, and how often they had been written.
FINITE: WeakKeyDictionary[GPT, list[tuple[int, int]]] = WeakKeyDictionary()


def not_finite(model: GPT) -> list[str]:
    """Names of the weights that hold NaN or infinity. On a CPU reading all takes as long as a token: they are
    read again only after they were written, as far as that can be seen (not through `.data`, nor by a CUDA
    graph)."""
    weights = numbers(model)
    seen = not any(each.is_inference() for each in weights.values())  # those have no versions
    state = [(each.data_ptr(), each._version) for each in weights.values()] if seen else None
    if seen and FINITE.get(model) == state:
        return []
    if torch.nn.utils.get_total_norm(weights.values(), math.inf).isfinite():  # all at once, with no copy
        if seen:
            FINITE[model] = state
        return []
    return [name for name, weight in weights.items() if not weight.isfinite().all()]


def numbers(model: GPT) -> dict[str, Tensor]:
    """The weights by name, and what is computed with in their place: scales, where they are quantised."""
    named = (*model.named_parameters(), *model.named_buffers())
    return {name: tensor for name, tensor in named if tensor.is_floating_point()}


def require_all(
    model: GPT,
    decoding: Attention | None,
    batch: int,
    tokens: int,
    capacity: int,
    kinds: frozenset[str] = frozenset(),
) -> None:
    """Refuse at start-up what the model's attention, or the one that decodes and reads a cache of `kinds`,
    cannot do."""
    own, device = model.transformer.h[0].attn.attention, model.device
    call = functools.partial(
        attention_call, model.config, batch=batch, device=device, dtype=compute_dtype(model)
    )
    require(own, [call("prefill", tokens=tokens)])
    if decoding is not None:
        require(decoding, [call("decode", tokens=capacity, cache=kinds)])


def require_cache(
    kv_cache: bool, cache_dtype: str, decode_attention: Attention | None, compile: bool, fused: bool | None
) -> None:
    """UserError where options are given that mean nothing without a cache."""
    given = {"cache_dtype": cache_dtype != "auto", "decode_attention": decode_attention is not None}
    given |= {"compile": compile, "fused": fused}
    if not kv_cache and (names := [name for name in given if given[name]]):
        raise UserError(
            f"kv_cache=False and {', '.join(names)}: they are of decoding over a cache, which needs "
            "kv_cache=True."
        )


def clock(device: torch.device) -> float:
    """Seconds, once the device is done."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


@torch.inference_mode()
def generate(
    model: GPT,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    *,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    seed: int | None = None,
    eot: int | None = None,
    on_token: OnToken | None = None,
    kv_cache: bool = True,
    decode_attention: Attention | None = None,
    compile: bool = False,
    cache_dtype: str = "auto",
    fused: bool | None = None,
) -> Generated:
    """`max_new_tokens` more tokens of every prompt, or as many as come before the row stops.

    temperature: 0 is greedy. top_k, top_p: candidates, the former first.
    seed: of a generator of its own; None takes a fresh one. A row's draws depend on its place in the batch.
    eot: a row stops after it; an empty prompt starts from it.
    on_token: called with (row, token) in order, a few steps late on a GPU; True stops the row.
    kv_cache: False computes the whole window for every token, to compare.
    decode_attention: decodes instead of the model's own attention.
    compile: compile the decoding step, with one compilation per batch size and cache capacity.
    cache_dtype: of keys and values in the cache: auto, the model's; fp8, int8 or int4, quantised as written.
        A prompt attends to its own as computed.
    fused: decode by our fused kernels, which also attend where the attention is left to choose; None: on a
        GPU, where they can; True: or raise UserError. Without effect beside `compile`.

    Device and dtype are the model's. Raises UserError, and UnsupportedAttention before anything runs."""
    config, device = model.config, model.device
    require_cache(kv_cache, cache_dtype, decode_attention, compile, fused)
    sampling, prompts = checked(model, prompts, max_new_tokens, temperature, top_k, top_p, eot, seed)
    lengths, kinds = [len(prompt) for prompt in prompts], cache_kinds(cache_dtype, config.head_size)
    # The last token is chosen, but never fed. 128: whole tiles, masks aligned to 16 bytes, few compilations.
    longest = min(config.seq_len, max(lengths) + max_new_tokens - 1)
    capacity = -(-longest // 128) * 128
    decoding = (decode_attention or model.transformer.h[0].attn.attention) if kv_cache else None
    require_all(model, decoding, len(prompts), longest, capacity, kinds)
    step = FusedStep if kv_cache and not compile and wants_fused(model, fused) else None
    training = model.training
    model.eval()
    try:
        with torch.cuda.device_of(model.transformer.wte.weight):
            times = [clock(device)]
            rows = Rows(prompts, max_new_tokens, model, sampling, seed)
            decoder = None
            if decoding is not None:
                cache = dense_cache(model, len(prompts), capacity, decoding, cache_dtype)
                decoder = Decoder(model, rows, cache, compile, step)
            reader = Reader(len(prompts), device, eot, on_token, len(prompts))
            if device.type == "cuda":
                encode_all(model, rows, decoder, lengths)  # compiles and loads kernels: set-up, not speed
            times.append(clock(device))
            times += [go_on(model, rows, decoder, reader, lengths, max_new_tokens), clock(device)]
    finally:
        model.train(training)
    return told(config.seq_len, lengths, reader.tokens, rows.seed, times)


def told(
    seq_len: int, lengths: list[int], tokens: list[list[int]], seed: int, times: list[float]
) -> Generated:
    """`times`: of the start, and of the ends of set-up, prefill and decoding, s."""
    return Generated(
        tokens=tokens,
        seed=seed,
        cut=sum(n > seq_len for n in lengths),
        reencoded=sum(map(functools.partial(moves, seq_len), lengths, tokens)),
        prefill_tokens=sum(n - window_start(n, seq_len) for n in lengths),
        setup_s=times[1] - times[0],
        prefill_s=times[2] - times[1],
        decode_s=times[3] - times[2],
    )


def go_on(
    model: GPT, rows: Rows, decoder: Decoder | None, reader: Reader, lengths: list[int], most: int
) -> float:
    """`most` tokens for every row, fewer where all stop before; gives when the first was there."""
    for step in range(most):
        advance(model, rows, decoder, lengths, step)
        reader.push(range(len(lengths)), rows.token)
        if step == 0:
            first = clock(rows.token.device)
        if all(reader.stopped):
            break
    reader.read()
    return first


def moves(seq_len: int, length: int, new: list[int]) -> int:
    """How often the window moved while `new` tokens came behind a prompt of `length`."""
    return window_moves(length + len(new) - 1, seq_len) - window_moves(length, seq_len)


def advance(model: GPT, rows: Rows, decoder: Decoder | None, lengths: list[int], step: int) -> None:
    """One token more for every row; the prompts had `lengths` tokens, and the host counts on from there."""
    seq_len = model.config.seq_len
    ends = [n + step for n in lengths]
    if decoder is None or step == 0:
        rows.draw()
        rows.append(encode_all(model, rows, decoder, ends))
        return
    moved = [
        row for row, end in enumerate(ends) if window_moves(end, seq_len) > window_moves(end - 1, seq_len)
    ]
    if moved:
        decoder.move(
            moved, [window_start(ends[row], seq_len) for row in moved], [ends[row] - 1 for row in moved]
        )
    decoder.step()


def encode_all(model: GPT, rows: Rows, decoder: Decoder | None, ends: list[int]) -> Tensor:
    """Logits (B, 1, V padded) after the windows of all rows, whose texts have `ends` tokens."""
    starts = [window_start(end, model.config.seq_len) for end in ends]
    return encode(model, rows, range(len(ends)), starts, ends, decoder.cache if decoder else None)
