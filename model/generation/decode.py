"""The device's part of generation: the text of the rows, the choice of a token, a step as one CUDA graph."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Any

import torch
from torch import Tensor

from attention.base import Attention
from conf.values import UserError
from model.generation.view_cache import QuantisedCache
from model.gpt import GPT
from model.kv_cache import KVCache


def at_least_1(key: str, value: Any, null: str = "") -> None:
    """UserError unless `value` is an integer of 1 or more, also numpy's or a tensor's, or None where `null`
    says what that stands for."""
    if value is None and null:
        return
    try:
        able = not isinstance(value, bool) and operator.index(value) >= 1
    except TypeError:
        able = False
    if not able:
        also = f", or null for {null}" if null else ""
        raise UserError(f"{key}={value!r}: it needs to be at least 1, as a whole number{also}.")


def is_number(value: Any) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool)


@dataclass(frozen=True)
class Sampling:
    """How the next token is drawn: temperature 0 is greedy; top_k, then top_p cut the candidates."""

    temperature: float = 1.0
    top_k: int | None = None
    top_p: float | None = None

    def __post_init__(self) -> None:
        # below a thousandth, logits divided by it may overflow, and a tie of infinities is no choice
        hot = self.temperature
        if not is_number(hot) or (hot != 0 and not 1e-3 <= hot < float("inf")):
            raise UserError(
                f"temperature={hot!r}: it needs to be 0, which is greedy, or at least 0.001, as a number."
            )
        at_least_1("top_k", self.top_k, null="all tokens")
        if self.top_p is not None and not (is_number(self.top_p) and 0 < self.top_p <= 1):
            raise UserError(
                f"top_p={self.top_p!r}: it needs to be in (0, 1] as a number, or null for all tokens."
            )

    def choose(self, logits: Tensor, noise: Tensor | None) -> Tensor:
        """The next token (B, 1) by logits (B, V) and, unless greedy, exponential noise (B, top_k or V).

        argmax(p / E) with E ~ Exp(1) draws from p (an exponential race) without the host; in logarithms p
        need not be normalised."""
        if self.temperature == 0:
            return logits.argmax(dim=-1, keepdim=True)
        logits, tokens = self.candidates(logits)
        # the CPU's exponential can give 0, whose logarithm would make a NaN of a token ruled out
        choice = (logits - noise.clamp_min(1e-38).log()).argmax(dim=-1, keepdim=True)
        return choice if tokens is None else tokens.gather(-1, choice)

    def candidates(self, logits: Tensor) -> tuple[Tensor, Tensor | None]:
        """Logits (..., n) fp32 at the temperature, -inf of what is ruled out, and their tokens; None for all
        in order. Not for greedy choices."""
        logits, tokens = logits.float() / self.temperature, None
        if self.top_k is not None:
            logits, tokens = logits.topk(min(self.top_k, logits.shape[-1]))  # -> (..., k), descending
        elif self.top_p is not None:
            logits, tokens = logits.sort(descending=True)
        if self.top_p is not None:
            probs = logits.softmax(dim=-1)
            # the smallest set that reaches top_p: a token stays while those before it have not reached it
            logits = logits.masked_fill(probs.cumsum(dim=-1) - probs >= self.top_p, -torch.inf)
        return logits, tokens


class Slots:
    """The newest token of B rows on the device, and how the next one is drawn."""

    def __init__(self, batch: int, model: GPT, sampling: Sampling, seed: int | None):
        self.vocab_size, self.sampling = model.config.vocab_size, sampling
        device = model.device
        self.token = torch.zeros(batch, 1, dtype=torch.int64, device=device)  # the newest
        self.index = torch.arange(batch, device=device)
        # Its own generator: text drawn in the middle of a training run must not change the run.
        self.generator = torch.Generator(device)
        self.seed = self.generator.seed() if seed is None else seed
        candidates = min(sampling.top_k or self.vocab_size, self.vocab_size)
        self.noise = None if sampling.temperature == 0 else torch.empty(batch, candidates, device=device)
        self.reset()

    def reset(self) -> None:
        """The random numbers back to their start."""
        self.generator.manual_seed(self.seed)

    def draw(self) -> None:
        """New noise. Apart from `append`, as Dynamo takes no generator into a compiled step."""
        if self.noise is not None:
            self.noise.exponential_(generator=self.generator)

    def append(self, logits: Tensor) -> None:
        """Choose by logits (B, 1, V padded). The padding is sliced off: it cannot be chosen."""
        self.token.copy_(self.sampling.choose(logits[:, 0, : self.vocab_size], self.noise))

    def first(self, logits: Tensor) -> Tensor:
        """A token (R, 1) by logits (R, 1, V padded) for rows that have none yet."""
        noise = self.noise
        if noise is not None:
            noise = noise.new_empty(len(logits), noise.shape[1]).exponential_(generator=self.generator)
        return self.sampling.choose(logits[:, 0, : self.vocab_size], noise)


class Rows(Slots):
    """The text of B rows on the device, prompts included, each contiguous; one token longer a step."""

    def __init__(
        self, prompts: list[list[int]], max_new_tokens: int, model: GPT, sampling: Sampling, seed: int | None
    ):
        device = model.device
        batch, longest = len(prompts), max(map(len, prompts))
        self.prompts = to_device([p + [0] * (longest - len(p)) for p in prompts], device)  # (B, longest)
        self.prompt_lengths = to_device([len(p) for p in prompts], device)
        # A compiled step knows the width, and is compiled again for another: few of them.
        width = -(-(longest + max_new_tokens) // 1024) * 1024
        self.text = torch.zeros(batch, width, dtype=torch.int64, device=device)
        self.lengths = torch.zeros_like(self.prompt_lengths)
        super().__init__(batch, model, sampling, seed)

    def reset(self) -> None:
        """Back to the prompts, and the random numbers to their start."""
        super().reset()
        self.text[:, : self.prompts.shape[1]] = self.prompts
        self.lengths.copy_(self.prompt_lengths)

    def append(self, logits: Tensor) -> None:
        super().append(logits)
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
def compiled_decode_step() -> Callable[[GPT, KVCache, Rows], None]:
    # The option turns products with one row (those of decoding attention; at batch 1 some with weights)
    # into reductions that fuse with what is around them, as in gpt-fast.
    options = {"coordinate_descent_tuning": True}
    step = torch.compile(decode_step, fullgraph=True, dynamic=False, options=options)

    def advance(model: GPT, cache: KVCache, rows: Rows) -> None:
        # each batch size and capacity is a compilation of its own: more than Dynamo's 8 are no mistake here
        with torch._dynamo.config.patch(recompile_limit=256, accumulated_recompile_limit=1024):
            step(model, cache, rows)

    return advance


def encode(
    model: GPT, rows: Rows, which: Sequence[int], starts: list[int], ends: list[int], cache: KVCache | None
) -> Tensor:
    """Logits (R, 1, V padded) after tokens [start, end) of the rows `which`; the cache forgets what it had of
    them and holds these."""
    tokens, lengths, index = rows.window(which, starts, ends)
    if cache is not None:
        cache.prefill(lengths, index)
    return model.forward(tokens, cache=cache, last=lengths - 1)


def dense_cache(model: GPT, rows: int, capacity: int, attention: Attention, cache_dtype: str) -> KVCache:
    """What decoding fills: `rows` of up to `capacity` tokens, in the model's dtype or quantised."""
    config, device = model.config, model.device
    shape = config.n_layer, rows, config.kv_heads, capacity, config.head_size
    if cache_dtype == "auto":
        return KVCache(*shape, attention=attention, dtype=compute_dtype(model), device=device)
    return QuantisedCache(*shape, attention=attention, kind=cache_dtype, device=device)


class Decoder:
    """Decoding over a static cache. A step is forward, choice and feeding back, all on the device: on CUDA
    one graph, captured once and replayed for every token.

    The graph attends to the whole allocation, which is made to measure: graphs for shorter parts of it would
    at best halve the reads of an implementation that does not stop at `kv_lengths`, at a compilation each."""

    def __init__(
        self,
        model: GPT,
        rows: Rows,
        cache: KVCache,
        compile: bool = False,
        make_step: Callable[[GPT, KVCache, Rows], Callable[[], None]] | None = None,
    ):
        device = model.device
        self.model, self.rows, self.cache = model, rows, cache
        step = compiled_decode_step() if compile else decode_step
        make_step = make_step or functools.partial(functools.partial, step)
        self.advance = make_step(model, cache, rows)
        self.graph = self.capture() if device.type == "cuda" else None
        if compile and self.graph is None:
            self.warm_up(1)

    def warm_up(self, steps: int) -> None:
        for _ in range(steps):
            self.advance()
            self.cache.set_lengths(torch.zeros_like(self.cache.lengths))
            self.rows.reset()

    def capture(self) -> torch.cuda.CUDAGraph:
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            self.warm_up(2)  # compiling, loading modules, allocating workspaces: none may happen in a capture
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        # thread_local: a loader that pins memory in a thread of its own must not break the capture
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            self.advance()
        return graph

    def step(self) -> None:
        # The noise by itself: a graph that draws sets its generator by two more kernels each time.
        self.rows.draw()
        if self.graph is None:
            self.advance()
        else:
            self.graph.replay()

    def move(self, which: list[int], starts: list[int], ends: list[int]) -> None:
        """Re-encode the cut windows, all but the newest token, which the next step feeds as ever."""
        if starts == ends:  # half of a context of up to 3 is the newest token alone
            rows = to_device(which, self.rows.text.device)
            self.cache.set_lengths(torch.zeros_like(rows), rows)
        else:
            encode(self.model, self.rows, which, starts, ends, self.cache)


def compute_dtype(model: GPT) -> torch.dtype:
    """What attention runs in: autocast's dtype where it is on, the weights' else."""
    weight = model.transformer.wte.weight
    if torch.is_autocast_enabled(weight.device.type):
        return torch.get_autocast_dtype(weight.device.type)
    return weight.dtype
