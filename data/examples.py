"""Examples of a classification of sequences, or of pairs of them, drawn once.

Example i of a split is a pure function of (seed, split, i), and the order of training one of (the run's seed,
i).
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from multiprocessing import get_context
from typing import Any, Protocol

import numpy as np

from conf.values import UserError, whole
from data.tokens import IGNORE, mix, permute

PAD, CLS = 0, 1  # before the tokens of the task
SPECIAL = 2
_PART = 512  # examples that a worker draws at a time


class Task(Protocol):
    """How examples are drawn, see data/listops.py and data/matching.py: of `sequences` sequences each, with
    tokens below `n_tokens` and a label below `n_classes`."""

    name: str
    sequences: int
    n_tokens: int
    n_classes: int

    def example(self, rng: random.Random, split: str) -> tuple[Sequence[Any], int]:
        """(the tokens of each sequence, the label)."""
        ...


@dataclass(frozen=True)
class Examples:
    """N examples of S sequences, each of these a CLS, its tokens and padding.

    tokens (N, S, T) uint16, lengths (N, S) int32 with the CLS and without the padding, labels (N,) int64;
    vocab_size counts PAD and CLS."""

    tokens: np.ndarray
    lengths: np.ndarray
    labels: np.ndarray
    vocab_size: int
    n_classes: int

    def __len__(self) -> int:
        return len(self.labels)

    @property
    def n_windows(self) -> int:
        """As data.datamodule.ValBatches asks."""
        return len(self)

    @property
    def padded(self) -> bool:
        return bool((self.lengths < self.tokens.shape[2]).any())

    @property
    def majority(self) -> float:
        """The accuracy of always saying the most frequent class."""
        return np.bincount(self.labels).max() / len(self)

    def batch(self, indices: np.ndarray) -> dict[str, np.ndarray]:
        """input_ids (B, S, T) int64, targets (B,) int64 and, where there is padding, lengths (B, S) int32.
        Indices beyond the last example give one whose target is ignored."""
        rows = np.minimum(indices, len(self) - 1)
        targets = np.where(indices < len(self), self.labels[rows], IGNORE)
        batch = {"input_ids": self.tokens[rows].astype(np.int64), "targets": targets}
        return batch | ({"lengths": self.lengths[rows]} if self.padded else {})


@dataclass(frozen=True)
class Shuffled:
    """Examples without end: an order of its own in each epoch, which (seed, epoch) gives."""

    examples: Examples
    seed: int

    @property
    def seq_len(self) -> int:
        """Tokens of an example."""
        return self.examples.tokens[0].size

    def batch(self, indices: np.ndarray) -> dict[str, np.ndarray]:
        n = len(self.examples)
        epochs, positions = np.divmod(indices.astype(np.uint64), np.uint64(n))
        keys = mix(mix(np.full(1, self.seed % 2**64, dtype=np.uint64)) ^ epochs)
        return self.examples.batch(permute(positions, n, keys).astype(np.int64))


def draw(task: Task, split: str, count: int, seq_len: int, seed: int = 0, workers: int = 1) -> Examples:
    """`count` examples of a split, by `workers` processes. UserError where one is longer than seq_len, its
    CLS counted."""
    whole("the number of examples", count, 1)
    tokens = np.full((count, task.sequences, seq_len), PAD, dtype=np.uint16)
    lengths, labels = np.empty((count, task.sequences), dtype=np.int32), np.empty(count, dtype=np.int64)
    tokens[:, :, 0] = CLS
    for i, (sequences, label) in enumerate(_all_drawn(task, split, count, seed, workers)):
        labels[i] = label
        for s, drawn in enumerate(sequences):
            lengths[i, s] = length = len(drawn) + 1
            if length > seq_len:
                raise UserError(
                    f"an example of {task.name} has {length} tokens with its CLS, and seq_len is {seq_len}: "
                    "raise seq_len, or draw shorter ones"
                )
            tokens[i, s, 1:length] = drawn + SPECIAL
    return Examples(tokens, lengths, labels, task.n_tokens + SPECIAL, task.n_classes)


Drawn = tuple[list[np.ndarray], int]


def _all_drawn(task: Task, split: str, count: int, seed: int, workers: int) -> Iterator[Drawn]:
    parts = [range(first, min(first + _PART, count)) for first in range(0, count, _PART)]
    draw_part = partial(_draw_part, task, split, seed)
    if workers == 1:
        yield from itertools.chain.from_iterable(map(draw_part, parts))
        return
    with ProcessPoolExecutor(workers, get_context("spawn")) as pool:
        yield from itertools.chain.from_iterable(pool.map(draw_part, parts))


def _draw_part(task: Task, split: str, seed: int, numbers: range) -> list[Drawn]:
    drawn = (task.example(random.Random(f"{seed} {split} {i}"), split) for i in numbers)
    return [([np.asarray(tokens, dtype=np.uint16) for tokens in of], label) for of, label in drawn]
