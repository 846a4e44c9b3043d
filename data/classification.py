"""The LightningDataModule of a classification of sequences: examples (data/examples.py) as batches."""

from __future__ import annotations

from typing import Any

import lightning
import torch
from torch.utils.data import DataLoader, IterableDataset

from conf.values import whole
from data.datamodule import Cursor, TrainStream, ValBatches
from data.examples import Examples, Shuffled


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
