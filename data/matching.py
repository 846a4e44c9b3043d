"""Matching of documents, byte by byte: does the second excerpt go on in the first one's file, or is it from
another?

The sources of the running Python's standard library are the documents, split into training and test by file,
so that no file is in both. The excerpts are of one length, `gap` bytes apart where they are of one file: the
words at the cut do not give it away.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from functools import cached_property
from typing import ClassVar

import numpy as np

from conf.values import UserError, whole
from data.corpora import FileCorpus, StdlibCorpus


@dataclass(frozen=True)
class Matching:
    """The task for data.examples: two sequences of `excerpt` bytes, 2 classes, 1 where they belong
    together."""

    excerpt: int
    gap: int = 128
    corpus: FileCorpus = field(default_factory=StdlibCorpus)
    name: ClassVar[str] = "matching"
    sequences: ClassVar[int] = 2
    n_classes: ClassVar[int] = 2
    n_tokens: ClassVar[int] = 256

    def __post_init__(self) -> None:
        whole("matching.excerpt", self.excerpt, 1)
        whole("matching.gap", self.gap, 0)

    @property
    def passage(self) -> int:
        """Bytes that a matching pair takes."""
        return 2 * self.excerpt + self.gap

    @cached_property
    def documents(self) -> dict[str, list[np.ndarray]]:
        """split -> documents that have room for a pair, (n,) uint8 each. UserError where fewer than two have
        it."""
        found: dict[str, list[np.ndarray]] = {"train": [], "val": []}
        text: list[str] = []
        for piece in self.corpus.pieces():
            text.append(piece.text)
            if piece.ends:
                document = np.frombuffer("".join(text).encode(), dtype=np.uint8)
                if len(document) >= self.passage:
                    found[piece.split].append(document)
                text.clear()
        for split, documents in found.items():
            if len(documents) < 2:
                raise UserError(
                    f"{len(documents)} of the {split} documents have the {self.passage} bytes of a pair, and "
                    "two are needed: take shorter excerpts, or more text"
                )
        return found

    def example(self, rng: random.Random, split: str) -> tuple[tuple[np.ndarray, np.ndarray], int]:
        """(excerpts, label); each label half of the time, and both excerpts of a pair from the same
        distribution whatever the label."""
        documents = self.documents[split]
        label, first, other = rng.randrange(2), *rng.sample(range(len(documents)), 2)
        start = self._start(rng, documents[first])
        second = start
        if not label:
            second = self._start(rng, documents[other])
        a = documents[first][start : start + self.excerpt]
        b = documents[first if label else other][second : second + self.passage][-self.excerpt :]
        return (a, b), label

    def _start(self, rng: random.Random, document: np.ndarray) -> int:
        return rng.randrange(len(document) - self.passage + 1)
