"""What feeds a training loop: batches of windows, for each rank its own, from where a run has come to."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import lightning
import numpy as np
import torch
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from conf.values import switch, whole
from data.tokens import TrainWindows, ValWindows, Windows

Batch = dict[str, torch.Tensor]
# Steps of fewer tokens are read several at a time, about so many tokens: otherwise numpy's calls take
# longer than their work.
AT_ONCE = 1 << 17


class Cursor:
    """How many samples the run has consumed: shared by the data module and its stream."""

    consumed: int = 0


class TrainStream(IterableDataset):
    """Endless steps of `accumulate` micro-batches of B rows, stacked to (accumulate * B, T).

    Row b of micro-step m (counted over the run, `accumulate` of them a step) on rank r of R is sample
    consumed + (m * R + r) * B + b: R ranks see what one rank of R * B rows would. `consumed` is read when an
    iterator is made. Worker w of W makes steps w, w + W, ..., and the DataLoader takes from its workers in
    turn: the order is that of no workers at all.
    """

    def __init__(
        self,
        windows: TrainWindows,
        cursor: Cursor,
        batch_size: int,
        accumulate: int,
        rank: int,
        world_size: int,
    ) -> None:
        self.windows, self.cursor, self.batch_size = windows, cursor, batch_size
        self.accumulate, self.rank, self.world_size = accumulate, rank, world_size

    def __iter__(self) -> Iterator[Batch]:
        return self._batches(self.cursor.consumed)  # not a generator itself: that would read the cursor later

    def _batches(self, consumed: int) -> Iterator[Batch]:
        worker = get_worker_info()
        first, stride = (worker.id, worker.num_workers) if worker else (0, 1)
        rows, size = np.arange(self.batch_size), self.accumulate * self.batch_size
        steps = max(1, AT_ONCE // (size * self.windows.seq_len))
        for step in itertools.count(first, steps * stride):
            these = step + stride * np.arange(steps)[:, None]
            micro_steps = these * self.accumulate + np.arange(self.accumulate)  # (steps, A)
            starts = consumed + (micro_steps * self.world_size + self.rank) * self.batch_size
            read = _tensors(self.windows, (starts[..., None] + rows).ravel())  # (steps, A, B) -> (steps*A*B,)
            yield from (
                {name: x[i * size : (i + 1) * size] for name, x in read.items()} for i in range(steps)
            )


class ValBatches(IterableDataset):
    """Rank r of R reads windows r, r + R, ...; all make as many batches, filled up with ignored windows.

    Iterable although it has a length: to a map-style dataset Lightning would add a distributed sampler.
    """

    def __init__(self, windows: ValWindows, batch_size: int, rank: int, world_size: int) -> None:
        self.windows, self.batch_size, self.rank, self.world_size = windows, batch_size, rank, world_size

    def __len__(self) -> int:
        return -(-self.windows.n_windows // (self.world_size * self.batch_size))

    def __iter__(self) -> Iterator[Batch]:
        for i in range(len(self)):
            rows = np.arange(i * self.batch_size, (i + 1) * self.batch_size)
            yield _tensors(self.windows, rows * self.world_size + self.rank)


def _tensors(windows: Windows, indices: np.ndarray) -> Batch:
    return {name: torch.from_numpy(array) for name, array in windows.batch(indices).items()}


class StreamingDataModule(lightning.LightningDataModule):
    """What data modules share whose training loader resumes: `consumed`, in samples over all ranks, is where
    its next `iter` starts, and the state to be saved; a batch holds `accumulate` micro-batches. Whoever
    trains tells both: `advance` after each step, and `set_accumulation`, once, before.

    seed: names the order; pin_memory: None pins where there is a GPU."""

    def __init__(self, seed: int, pin_memory: bool | None) -> None:
        super().__init__()
        whole("data.seed", seed, 0)
        switch("data.pin_memory", pin_memory, null="true where there is a GPU")
        self.seed = seed
        self.pin_memory = torch.cuda.is_available() if pin_memory is None else pin_memory
        self._cursor, self._accumulate = Cursor(), 1

    @property
    def consumed(self) -> int:
        return self._cursor.consumed

    @property
    def accumulate(self) -> int:
        return self._accumulate

    def advance(self, samples: int) -> None:
        """So many more samples, of all ranks together, have been trained on."""
        self._cursor.consumed += int(samples)

    def set_accumulation(self, micro_batches: int) -> None:
        """A batch of the training loader is to hold so many micro-batches."""
        self._accumulate = micro_batches

    def _ranks(self) -> tuple[int, int]:
        """Which part of the data is read here, of how many: ranks that share each sequence read the same."""
        parts = (self.trainer and self.trainer.distributed_sampler_kwargs) or {"rank": 0, "num_replicas": 1}
        return parts["rank"], parts["num_replicas"]

    def _loader(self, dataset: IterableDataset, num_workers: int = 0) -> DataLoader:
        # a generator of its own: without one, every iter() draws from torch's global generator
        generator = torch.Generator().manual_seed(self.seed % 2**63)
        return DataLoader(
            dataset, batch_size=None, num_workers=num_workers, pin_memory=self.pin_memory, generator=generator
        )
