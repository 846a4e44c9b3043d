"""ListOps: nested lists of digits under MIN, MAX, MED and SM, to be evaluated from their tokens.

`[MAX 2 9 [MIN 4 7 ] 0 ]` is 9. The task and the way expressions are drawn are those of Long Range Arena (Tay
et al. 2020, after Nangia and Bowman 2018): lists of 2 to 10 arguments, each of them a list with probability
1/4 down to depth 10, else a digit; expressions of 500 to 2000 tokens are kept.
"""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar

from conf.values import whole

OPERATORS: dict[str, Callable[[Sequence[int]], int]] = {
    "[MIN": min,
    "[MAX": max,
    "[MED": lambda values: int(statistics.median(values)),  # of an even number: the mean of the middle, down
    "[SM": lambda values: sum(values) % 10,
}
WORDS = (*"0123456789", *OPERATORS, "]")
_OPENING = {10 + i: function for i, function in enumerate(OPERATORS.values())}
_CLOSE = len(WORDS) - 1
_LIST_P = 0.25  # that an argument is a list


def parse(text: str) -> list[int]:
    """Tokens, indices into WORDS, of words with spaces between them."""
    return [WORDS.index(word) for word in text.split()]


def value_of(tokens: Sequence[int]) -> int:
    """What an expression comes to, 0 to 9."""
    open_lists: list[tuple[int, list[int]]] = [(-1, [])]
    for token in tokens:
        if token in _OPENING:
            open_lists.append((token, []))
            continue
        if token == _CLOSE:
            operator, values = open_lists.pop()
            token = _OPENING[operator](values)
        open_lists[-1][1].append(token)
    return open_lists[0][1][0]


@dataclass(frozen=True)
class ListOps:
    """The task for data.examples: one sequence, 10 classes. `min_length` to `max_length` tokens."""

    min_length: int = 500
    max_length: int = 2000
    max_depth: int = 10
    max_args: int = 10
    name: ClassVar[str] = "listops"
    sequences: ClassVar[int] = 1
    n_classes: ClassVar[int] = 10
    n_tokens: ClassVar[int] = len(WORDS)

    def __post_init__(self) -> None:
        whole("listops.max_depth", self.max_depth, 1)
        whole("listops.max_args", self.max_args, 2)
        whole("listops.min_length", self.min_length, 1)
        whole("listops.max_length", self.max_length, max(4, self.min_length))

    def example(self, rng: random.Random, split: str) -> tuple[tuple[list[int]], int]:
        """(tokens, value); the splits differ by their seeds alone."""
        while True:
            tokens: list[int] = []
            if self._extend(tokens, rng.random, 1) and len(tokens) >= self.min_length:
                return (tokens,), value_of(tokens)

    def _extend(self, tokens: list[int], draw: Callable[[], float], depth: int) -> bool:
        """Append a list at this depth; False once there are too many tokens."""
        tokens.append(10 + int(draw() * len(OPERATORS)))
        for _ in range(2 + int(draw() * (self.max_args - 1))):
            if depth < self.max_depth and draw() < _LIST_P:
                if not self._extend(tokens, draw, depth + 1):
                    return False
            else:
                tokens.append(int(draw() * 10))
        tokens.append(_CLOSE)
        return len(tokens) <= self.max_length
