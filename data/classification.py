"""The LightningDataModule of a classification of sequences: examples (data/examples.py) as batches."""

from __future__ import annotations

from typing import Any

from torch.utils.data import DataLoader

from conf.values import whole
from data.examples import Examples, Shuffled
from data.stream import StreamingDataModule, TrainStream, ValBatches


class ClassificationDataModule(StreamingDataModule):
    """Batches of `train` in an order that `seed` names, and of `test` in their own."""

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
        super().__init__(seed, pin_memory)
        whole("batch_size", batch_size, 1)
        whole("eval_batch_size", eval_batch_size, 1, null="batch_size")
        self.train, self.test, self.batch_size = train, test, batch_size
        self.eval_batch_size = eval_batch_size or batch_size

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
        self._cursor.consumed = int(state_dict["consumed"])
