"""Whole models for the studies of generation: one step as a call to time, and whether its kernels are those
that were asked for."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from torch import Tensor

from attention import registry
from attention.base import Attention
from model.generation.decode import Decoder, Rows, Sampling, dense_cache, encode
from model.generation.generate import advance
from model.gpt import GPT
from scripts.measure.instruments.contestants import captured
from scripts.measure.instruments.kernels import PLAIN, PLAIN_CPU, as_field, expected, family, profile
from scripts.measure.instruments.textbook import implementation
from scripts.measure.instruments.timing import Contestant

GREEDY = Sampling(temperature=0.0)
SPARE = 64  # tokens of room behind a text, for steps that are repeated before it is put back
EAGER_STEPS = 5  # issued one after the other, as generation does


def implementations(names: Iterable[str]) -> dict[str, Attention]:
    """By name, the baseline over a cache too: all of its capacity."""
    return {name: implementation(name, "rectangular", "kv_lengths") for name in names}


def right_kernels(asked: str, names: Iterable[str]) -> bool:
    """Whether the attention kernels among a whole model's are those of the implementation `asked`: fused ones
    of its own, or, where matrix products are its way, none of anybody's."""
    able = set(expected(registry.declaration(asked)))
    fused = {family(name) for name in names} - {None, PLAIN, PLAIN_CPU}
    return fused <= able and (bool(fused) or bool(able & {PLAIN, PLAIN_CPU}))


def kernels_of(asked: str, call: Callable[[], Any], device: str) -> dict[str, Any]:
    """What a row says of the kernels of a call that has run before."""
    found = profile(call, device, warm_up=0)
    return {"kernels": as_field(found), "kernels_ok": right_kernels(asked, [kernel.name for kernel in found])}


class Uncached:
    """The step that chooses a token after `tokens` by computing all of them anew: also a prefill of them."""

    def __init__(self, net: GPT, tokens: list[int]):
        self.net, self.length = net, len(tokens)
        self.rows = Rows([tokens], SPARE, net, GREEDY, 0)
        self.last = self.rows.prompt_lengths - 1

    def _step(self) -> None:
        self.rows.append(self.logits())

    def logits(self) -> Tensor:
        """(1, 1, V padded) after the tokens."""
        return self.net.forward(self.rows.prompts, last=self.last)

    def contestant(self) -> Contestant:
        """The work of the device: on a GPU one CUDA graph."""
        run = captured(self._step) if self.last.is_cuda else (lambda _: self._step())
        return Contestant("without the cache", run, prepare=self.rows.reset)

    def eager(self) -> Contestant:
        """The same as model/generation runs it, the host's part included, with the attention that the model
        has now."""

        def steps(_: Any) -> None:
            for _ in range(EAGER_STEPS):
                advance(self.net, self.rows, None, [1], self.length - 1)

        return Contestant("as generated", steps, prepare=self.rows.reset, calls=EAGER_STEPS)


class Cached:
    """The step that chooses a token after `tokens`, all but the last of them in a cache of `capacity`."""

    def __init__(self, net: GPT, attention: Attention, tokens: list[int], capacity: int):
        self.net = net
        self.rows = Rows([tokens], SPARE, net, GREEDY, 0)
        cache = dense_cache(net, 1, capacity, attention, "auto")
        self.decoder = Decoder(net, self.rows, cache, compile=False)
        self.held = self.rows.prompt_lengths - 1
        if len(tokens) > 1:
            encode(net, self.rows, [0], [0], [len(tokens) - 1], self.decoder.cache)

    def prepare(self) -> None:
        """Back to where the last token is about to be fed."""
        self.rows.reset()
        self.rows.token.copy_(self.rows.prompts[:, -1:])
        self.decoder.cache.set_lengths(self.held)

    def logits(self) -> Tensor:
        """(1, 1, V padded) after the tokens."""
        self.prepare()
        return self.net.forward(self.rows.token, cache=self.decoder.cache)

    def contestant(self) -> Contestant:
        return Contestant("with the cache", lambda _: self.decoder.step(), prepare=self.prepare)
