"""Text from a GPT: a prefill of the prompts, then one token a step that never leaves the device.

The context rule, a pure function of a row's own length: a row sees all of its tokens while they fit into `seq_len`;
the token that would not fit cuts the window to the last `seq_len // 2` tokens, re-encoded in one prefill, and
decoding goes on until it is full again. So text with and without the cache agrees past the context too, and no row
depends on its batch mates. Half: a re-encoding every seq_len / 2 tokens, and never less than that to look back on.
"""

from __future__ import annotations

import functools
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from attention.base import Attention
from model.calls import attention_call, require
from model.gpt import GPT
from model.kv_cache import KVCache

OnToken = Callable[[int, int], bool | None]
LAG = 8  # tokens that the host reads behind a GPU: it never waits for a step, and launches at most 8 in vain


@dataclass(frozen=True)
class Sampling:
    """How the next token is drawn: temperature 0 is greedy; top_k, then top_p cut the candidates."""

    temperature: float = 1.0
    top_k: int | None = None
    top_p: float | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.temperature < float("inf"):
            raise ValueError(f"temperature={self.temperature}: it needs to be at least 0; 0 is greedy.")
        if self.top_k is not None and self.top_k < 1:
            raise ValueError(f"top_k={self.top_k}: it needs to be at least 1, or null for all tokens.")
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise ValueError(f"top_p={self.top_p}: it needs to be in (0, 1], or null for all tokens.")

    def choose(self, logits: Tensor, noise: Tensor | None) -> Tensor:
        """The next token (B, 1) by logits (B, V) and, unless greedy, exponential noise (B, top_k or V).

        argmax(p / E) with E ~ Exp(1) draws from p (the exponential race), and needs no host; in logarithms p need
        not be normalised."""
        if self.temperature == 0:
            return logits.argmax(dim=-1, keepdim=True)
        logits, tokens = logits.float() / self.temperature, None
        if self.top_k is not None:
            logits, tokens = logits.topk(noise.shape[1])  # (B, V) -> (B, k), descending
        elif self.top_p is not None:
            logits, tokens = logits.sort(descending=True)
        if self.top_p is not None:
            probs = logits.softmax(dim=-1)
            # the smallest set that reaches top_p: a token stays while those before it have not reached it
            logits = logits.masked_fill(probs.cumsum(dim=-1) - probs >= self.top_p, -torch.inf)
        # the CPU's exponential can give 0, whose logarithm would make a NaN of a token ruled out
        choice = (logits - noise.clamp_min(1e-38).log()).argmax(dim=-1, keepdim=True)
        return choice if tokens is None else tokens.gather(-1, choice)


@dataclass(frozen=True)
class Generated:
    """tokens: the new ones of each row, up to and with the one it stopped at. seed: what gives the same again.
    cut: prompts longer than the context; reencoded: windows cut while decoding. setup_s: allocation, compilation,
    capture; outside both rates, which count the prompts' tokens and the kept ones (each row's first is prefill's)."""

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


class Rows:
    """The text of B rows on the device, prompts included, each contiguous; grown by one token a row a step."""

    def __init__(
        self, prompts: list[list[int]], max_new_tokens: int, model: GPT, sampling: Sampling, seed: int | None
    ):
        self.vocab_size, self.sampling = model.config.vocab_size, sampling
        device = model.lm_head.weight.device
        batch, longest = len(prompts), max(map(len, prompts))
        self.prompts = to_device([p + [0] * (longest - len(p)) for p in prompts], device)  # (B, longest)
        self.prompt_lengths = to_device([len(p) for p in prompts], device)
        self.text = torch.zeros(batch, longest + max_new_tokens, dtype=torch.int64, device=device)
        self.lengths = torch.zeros_like(self.prompt_lengths)
        self.token = torch.zeros(batch, 1, dtype=torch.int64, device=device)  # the newest
        self.index = torch.arange(batch, device=device)
        # Its own generator: text drawn in the middle of a training run must not change the run.
        self.generator = torch.Generator(device)
        self.seed = self.generator.seed() if seed is None else seed
        candidates = min(sampling.top_k or self.vocab_size, self.vocab_size)
        self.noise = None if sampling.temperature == 0 else torch.empty(batch, candidates, device=device)
        self.reset()

    def reset(self) -> None:
        """Back to the prompts, and the random numbers to their start."""
        self.generator.manual_seed(self.seed)
        self.text[:, : self.prompts.shape[1]] = self.prompts
        self.lengths.copy_(self.prompt_lengths)

    def draw(self) -> None:
        """New noise. Apart from `append`, as Dynamo takes no generator into a compiled step."""
        if self.noise is not None:
            self.noise.exponential_(generator=self.generator)

    def append(self, logits: Tensor) -> None:
        """Choose by logits (B, 1, V padded). The padding is sliced off: it cannot be chosen."""
        self.token.copy_(self.sampling.choose(logits[:, 0, : self.vocab_size], self.noise))
        self.text[self.index, self.lengths] = self.token[:, 0]
        self.lengths.add_(1)

    def window(
        self, rows: Sequence[int], starts: list[int], ends: list[int]
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Right-padded tokens [start, end) of some rows: (R, T), their lengths (R,), the rows (R,)."""
        device, lengths = self.text.device, [end - start for start, end in zip(starts, ends, strict=True)]
        index, first, count = to_device([list(rows), starts, lengths], device)
        columns = first.unsqueeze(1) + torch.arange(max(lengths), device=device)  # (R, T)
        columns = columns.clamp_max(self.text.shape[1] - 1)  # padding: any token will do, causality hides it
        return self.text[index.unsqueeze(1), columns], count, index


def to_device(values: list, device: torch.device) -> Tensor:
    """int64, without waiting for the device."""
    return torch.tensor(values, pin_memory=device.type == "cuda").to(device, non_blocking=True)


def decode_step(model: GPT, cache: KVCache, rows: Rows) -> None:
    # `forward`, not the call: a model compiled for training is compiled for other shapes
    rows.append(model.forward(rows.token, cache=cache))


@functools.cache
def compiled_decode_step(batch: int) -> Callable[[GPT, KVCache, Rows], None]:
    # At batch 1 this also turns products with one row into reductions over the weights, as in gpt-fast.
    options = {"coordinate_descent_tuning": True} if batch == 1 else None
    return torch.compile(decode_step, fullgraph=True, dynamic=False, options=options)


def encode(
    model: GPT, rows: Rows, which: Sequence[int], starts: list[int], ends: list[int], cache: KVCache | None
) -> Tensor:
    """Logits (R, 1, V padded) after tokens [start, end) of the rows `which`; the cache forgets what it had of them
    and holds these."""
    tokens, lengths, index = rows.window(which, starts, ends)
    if cache is not None:
        cache.prefill(lengths, index)
    return model.forward(tokens, cache=cache, last=lengths - 1)


class Decoder:
    """Prefill and decode over a static cache. A step is forward, choice and feeding back, all on the device: on
    CUDA one graph, captured once and replayed for every token.

    The graph attends to the whole allocation, made to measure: graphs for shorter parts of it would at best halve
    the reads of an implementation that does not stop at `kv_lengths` by itself, at a compilation each."""

    def __init__(self, model: GPT, rows: Rows, capacity: int, attention: Attention, compile: bool):
        config, weight = model.config, model.lm_head.weight
        device = weight.device
        self.model, self.rows = model, rows
        self.cache = KVCache(
            config.n_layer,
            len(rows.index),
            config.kv_heads,
            -(-capacity // 128) * 128,  # whole tiles, and masks aligned to 16 bytes
            config.head_dim,
            attention=attention,
            dtype=compute_dtype(model),
            device=device,
        )
        self.advance = compiled_decode_step(len(rows.index)) if compile else decode_step
        self.graph = self.capture() if device.type == "cuda" else None
        if compile and self.graph is None:
            self.warm_up(1)

    def _step(self) -> None:
        self.rows.draw()
        self.advance(self.model, self.cache, self.rows)

    def warm_up(self, steps: int) -> None:
        for _ in range(steps):
            self._step()
            self.cache.set_lengths(torch.zeros_like(self.cache.lengths))
            self.rows.reset()

    def capture(self) -> torch.cuda.CUDAGraph:
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            self.warm_up(
                2
            )  # compiles, loads modules, allocates workspaces: nothing of it may happen in the capture
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        if self.rows.noise is not None:
            graph.register_generator_state(self.rows.generator)
        with torch.cuda.graph(graph):
            self._step()
        self.rows.reset()  # the seed again: capturing may advance the generator
        return graph

    def step(self) -> None:
        if self.graph is None:
            self._step()
        else:
            self.graph.replay()

    def move(self, which: list[int], starts: list[int], ends: list[int]) -> None:
        """Re-encode the cut windows, all but the newest token, which the next step feeds as ever."""
        if starts == ends:  # half of a context of up to 3 is the newest token alone
            rows = to_device(which, self.rows.text.device)
            self.cache.set_lengths(torch.zeros_like(rows), rows)
        else:
            encode(self.model, self.rows, which, starts, ends, self.cache)


class Reader:
    """Hands the tokens to the host, late on a GPU, where each is copied to pinned memory behind its own event."""

    def __init__(
        self, batch: int, max_new_tokens: int, device: torch.device, eot: int | None, on_token: OnToken | None
    ):
        self.on_gpu = device.type == "cuda"
        self.host = torch.empty(max_new_tokens, batch, dtype=torch.int64, pin_memory=self.on_gpu)
        self.pending: deque[tuple[Tensor, torch.cuda.Event | None]] = deque()
        self.tokens: list[list[int]] = [[] for _ in range(batch)]
        self.stopped = [False] * batch
        self.eot, self.on_token = eot, on_token

    def push(self, step: int, token: Tensor) -> bool:
        """Take the tokens (B, 1) of a step; True when every row is known to have stopped."""
        slot = self.host[step]
        slot.copy_(token[:, 0], non_blocking=True)
        self.pending.append((slot, torch.cuda.current_stream().record_event() if self.on_gpu else None))
        self.read(LAG if self.on_gpu else 0)
        return all(self.stopped)

    def read(self, lag: int = 0) -> None:
        """Wait for all but the last `lag` steps and give their tokens to the rows that have not stopped."""
        while len(self.pending) > lag:
            slot, copied = self.pending.popleft()
            if copied is not None:
                copied.synchronize()
            for row, token in enumerate(slot.tolist()):
                if not self.stopped[row]:
                    self.tokens[row].append(token)
                    asked = self.on_token is not None and self.on_token(row, token)
                    self.stopped[row] = bool(asked) or token == self.eot


def compute_dtype(model: GPT) -> torch.dtype:
    """What attention runs in: autocast's dtype where it is on, the weights' else."""
    weight = model.lm_head.weight
    if torch.is_autocast_enabled(weight.device.type):
        return torch.get_autocast_dtype(weight.device.type)
    return weight.dtype


def checked_prompts(prompts: Sequence[Sequence[int]], vocab_size: int, eot: int | None) -> list[list[int]]:
    """The prompts as lists; an empty one starts from the end-of-text token, as documents do."""
    if not prompts:
        raise ValueError(
            "there is no prompt: give at least one, which may be empty if the tokenizer has an eot."
        )
    checked = [list(prompt) or ([] if eot is None else [eot]) for prompt in prompts]
    for i, prompt in enumerate(checked):
        if not prompt:
            raise ValueError(
                f"prompt {i} is empty and there is no eot to start from: give at least one token."
            )
        if not all(0 <= token < vocab_size for token in prompt):
            wrong = next(token for token in prompt if not 0 <= token < vocab_size)
            raise ValueError(
                f"prompt {i} holds token {wrong}: ids go from 0 to {vocab_size - 1}; check the tokenizer."
            )
    return checked


def require_all(model: GPT, decoding: Attention | None, batch: int, tokens: int) -> None:
    """Refuse at start-up what the model's attention, or the one that decodes, cannot do."""
    own, where = model.transformer.h[0].attn.attention, {"device": model.lm_head.weight.device}
    where |= {"batch": batch, "tokens": tokens, "dtype": compute_dtype(model)}
    require(own, [attention_call(model.config, "prefill", **where)])
    if decoding is not None:
        require(decoding, [attention_call(model.config, "decode", **where)])


def clock(device: torch.device) -> float:
    """Seconds, once the device is done."""
    if device.type == "cuda":
        torch.cuda.synchronize()
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
) -> Generated:
    """`max_new_tokens` more tokens of every prompt, or as many as come before the row stops.

    temperature: 0 is greedy. top_k, top_p: candidates, the former first.
    seed: of a generator of its own; None takes a fresh one. A row's draws depend on its place in the batch.
    eot: a row stops after it; an empty prompt starts from it.
    on_token: called with (row, token) in order, a few steps late on a GPU; stops the row when it returns True.
    kv_cache: False computes the whole window for every token, to compare.
    decode_attention: decodes instead of the model's own attention.
    compile: compile the decoding step, with one compilation per batch size and cache capacity.

    Device and dtype are the model's. Raises ValueError, and UnsupportedAttention before anything runs."""
    config, device = model.config, model.lm_head.weight.device
    if not config.causal:
        raise ValueError(
            "model.causal=false: a model that sees the future cannot predict it; generate needs true."
        )
    if max_new_tokens < 1:
        raise ValueError(f"max_new_tokens={max_new_tokens}: it needs to be at least 1.")
    sampling = Sampling(temperature, top_k, top_p)
    prompts = checked_prompts(prompts, config.vocab_size, eot)
    lengths = [len(prompt) for prompt in prompts]
    # The last token is chosen, but never fed.
    capacity = min(config.seq_len, max(lengths) + max_new_tokens - 1)
    decoding = (decode_attention or model.transformer.h[0].attn.attention) if kv_cache else None
    require_all(model, decoding, len(prompts), capacity)

    training = model.training
    model.eval()
    try:
        with torch.cuda.device_of(model.lm_head.weight):
            times = [clock(device)]
            rows = Rows(prompts, max_new_tokens, model, sampling, seed)
            decoder = None if decoding is None else Decoder(model, rows, capacity, decoding, compile)
            reader = Reader(len(prompts), max_new_tokens, device, eot, on_token)
            times.append(clock(device))
            for step in range(max_new_tokens):
                advance(model, rows, decoder, lengths, step)
                done = reader.push(step, rows.token)
                if step == 0:
                    times.append(clock(device))
                if done:
                    break
            reader.read()
            times.append(clock(device))
    finally:
        model.train(training)
    return Generated(
        tokens=reader.tokens,
        seed=rows.seed,
        cut=sum(n > config.seq_len for n in lengths),
        reencoded=sum(
            window_moves(n + len(new) - 1, config.seq_len) - window_moves(n, config.seq_len)
            for n, new in zip(lengths, reader.tokens, strict=True)
        ),
        prefill_tokens=sum(n - window_start(n, config.seq_len) for n in lengths),
        setup_s=times[1] - times[0],
        prefill_s=times[2] - times[1],
        decode_s=times[3] - times[2],
    )


def advance(model: GPT, rows: Rows, decoder: Decoder | None, lengths: list[int], step: int) -> None:
    """One token more for every row, whose prompts had `lengths` tokens. The host knows all lengths by counting."""
    seq_len = model.config.seq_len
    ends = [n + step for n in lengths]
    starts = [window_start(n, seq_len) for n in ends]
    if decoder is None or step == 0:
        cache = decoder.cache if decoder else None
        rows.draw()
        rows.append(encode(model, rows, range(len(ends)), starts, ends, cache))
        return
    moved = [row for row, end in enumerate(ends) if starts[row] != window_start(end - 1, seq_len)]
    if moved:
        decoder.move(moved, [starts[row] for row in moved], [ends[row] - 1 for row in moved])
    decoder.step()
