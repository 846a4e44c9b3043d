"""Classification of sequences, or of pairs of them: examples drawn once, and batches of them.

Example i of a split is a pure function of (seed, split, i), and the order of training one of (the run's seed,
i).
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import lightning
import numpy as np
import torch
from torch.utils.data import DataLoader, IterableDataset

from data.datamodule import Cursor, TrainStream, ValBatches
from data.options import whole
from data.tokens import IGNORE, mix, permute

PAD, CLS = 0, 1  # before the tokens of the task
SPECIAL = 2


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

    def batch(self, indices: np.ndarray) -> dict[str, np.ndarray]:
        n = len(self.examples)
        epochs, positions = np.divmod(indices.astype(np.uint64), np.uint64(n))
        keys = mix(mix(np.full(1, self.seed % 2**64, dtype=np.uint64)) ^ epochs)
        return self.examples.batch(permute(positions, n, keys).astype(np.int64))


def draw(task: Task, split: str, count: int, seq_len: int, seed: int = 0) -> Examples:
    """`count` examples of a split. ValueError where one is longer than seq_len, its CLS counted."""
    whole("the number of examples", count, 1)
    tokens = np.full((count, task.sequences, seq_len), PAD, dtype=np.uint16)
    lengths, labels = np.empty((count, task.sequences), dtype=np.int32), np.empty(count, dtype=np.int64)
    tokens[:, :, 0] = CLS
    for i in range(count):
        sequences, labels[i] = task.example(random.Random(f"{seed} {split} {i}"), split)
        for s, drawn in enumerate(sequences):
            lengths[i, s] = length = len(drawn) + 1
            if length > seq_len:
                raise ValueError(
                    f"an example of {task.name} has {length} tokens with its CLS, and seq_len is {seq_len}: "
                    "raise seq_len, or draw shorter ones"
                )
            tokens[i, s, 1:length] = np.asarray(drawn, dtype=np.uint16) + SPECIAL
    return Examples(tokens, lengths, labels, task.n_tokens + SPECIAL, task.n_classes)


class ClassificationDataModule(lightning.LightningDataModule):
    """Batches of `train` in an order that `seed` names, and of `test` in their own.

    `consumed`, in examples over all ranks, is where the next iteration of the training loader starts; whoever
    trains advances it, as with data.datamodule.TokenDataModule."""

    def __init__(
        self,
        train: Examples,
        test: Examples,
        *,
        batch_size: int,
        eval_batch_size: int | None = None,
        seed: int = 0,
        pin_memory: bool | None = None,
    ) -> None:
        super().__init__()
        whole("batch_size", batch_size, 1)
        whole("eval_batch_size", eval_batch_size, 1, null="batch_size")
        self.train, self.test, self.batch_size, self.seed = train, test, batch_size, seed
        self.eval_batch_size = eval_batch_size or batch_size
        self.pin_memory = torch.cuda.is_available() if pin_memory is None else pin_memory
        self.accumulate = 1  # micro-batches of a batch
        self._cursor = Cursor()

    @property
    def consumed(self) -> int:
        return self._cursor.consumed

    @consumed.setter
    def consumed(self, examples: int) -> None:
        self._cursor.consumed = int(examples)

    def _ranks(self) -> tuple[int, int]:
        return (self.trainer.global_rank, self.trainer.world_size) if self.trainer else (0, 1)

    def _loader(self, dataset: IterableDataset) -> DataLoader:
        # a generator of its own: without one, every iter() draws from torch's global generator
        generator = torch.Generator().manual_seed(self.seed % 2**63)
        return DataLoader(dataset, batch_size=None, pin_memory=self.pin_memory, generator=generator)

    def train_dataloader(self) -> DataLoader:
        order = Shuffled(self.train, self.seed)
        return self._loader(
            TrainStream(order, self._cursor, self.batch_size, self.accumulate, *self._ranks())
        )

    def val_dataloader(self) -> DataLoader:
        return self._loader(ValBatches(self.test, self.eval_batch_size, *self._ranks()))

    def state_dict(self) -> dict[str, Any]:
        return {"consumed": self.consumed}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.consumed = state_dict["consumed"]
