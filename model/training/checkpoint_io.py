"""Checkpoints as Lightning saves and loads them: by checkpoint.py, written while training goes on.

Apart from that, as Lightning takes 2.4 s to import, which commands that read a checkpoint need not wait."""

from __future__ import annotations

import copy
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.plugins.io import CheckpointIO
from torch.utils._pytree import tree_leaves

from model.training.checkpoint import read_checkpoint, write_checkpoint

IN_BACKGROUND = 1 << 30  # bytes; of more there is no second copy in the host's memory


def on_host(checkpoint: dict[str, Any], spare: list[torch.UntypedStorage] | None = None) -> dict[str, Any]:
    """A copy that training does not change. Plain tensors are copied to the CPU, those that share a storage
    still do; what else there is, is copied as copy.deepcopy has it.

    spare: of the copy before, which is no longer read; this one takes the storages that fit, and leaves
    its own there. Copying into fresh memory takes many times as long, as each page has to be provided."""
    fitting: dict[int, list[torch.UntypedStorage]] = {}
    for storage in spare or ():
        fitting.setdefault(storage.nbytes(), []).append(storage)
    storages: dict[int, torch.UntypedStorage] = {}
    copies: dict[int, Any] = {}
    for tensor in filter(_is_plain, tree_leaves(checkpoint)):
        storage = tensor.untyped_storage()
        if storage._cdata not in storages:  # the key by which torch.save tells storages apart
            found, size = fitting.get(storage.nbytes()), storage.nbytes()
            storages[storage._cdata] = (found.pop() if found else torch.UntypedStorage(size)).copy_(storage)
        shape = tensor.storage_offset(), tensor.size(), tensor.stride()
        empty = torch.empty(0, dtype=tensor.dtype, device="cpu")
        copies[id(tensor)] = empty.set_(storages[storage._cdata], *shape)
    if spare is not None:
        spare[:] = storages.values()
    return copy.deepcopy(checkpoint, copies)


def _is_plain(leaf: Any) -> bool:
    is_strided = type(leaf) is torch.Tensor and leaf.layout == torch.strided
    return is_strided and not (leaf.is_conj() or leaf.is_neg())


class VerifiedCheckpointIO(CheckpointIO):
    """Lightning's way to checkpoint.py. A checkpoint of up to IN_BACKGROUND bytes is copied, and
    written while training goes on. What goes wrong then is raised by `check`, or by what is saved or awaited
    next.

    verified: a file that was checked before, of `step`."""

    def __init__(self, verified: Path | None = None, step: int | None = None):
        self.verified, self.step = verified, step
        self.writer = ThreadPoolExecutor(1, "checkpoints")
        self.writing: Future[None] | None = None
        self.spare: list[torch.UntypedStorage] = []  # of the copy that was written last

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None) -> None:
        try:
            self.teardown()  # one at a time
        except Exception:
            write_checkpoint(checkpoint, Path(path))  # where the one before failed, this one may not
            raise
        if sum(x.nbytes for x in filter(torch.is_tensor, tree_leaves(checkpoint))) > IN_BACKGROUND:
            write_checkpoint(checkpoint, Path(path))
        else:
            self.then(write_checkpoint, on_host(checkpoint, self.spare), Path(path))

    def then(self, function: Callable[..., None], *args: Any) -> None:
        """Call it when all is written, unless that fails."""
        before = self.writing

        def call() -> None:
            if before is not None:
                before.result()
            function(*args)

        self.writing = self.writer.submit(call)

    def check(self) -> None:
        """CheckpointError as soon as it is known that something cannot be written; waits for nothing."""
        if self.writing is not None and self.writing.done():
            self.teardown()

    def wait(self, seconds: float | None = None) -> None:
        """Until all is written or has failed, or the time is up."""
        if self.writing is not None:
            wait([self.writing], seconds)

    def teardown(self) -> None:
        """Wait until all is written. CheckpointError where it cannot be."""
        self.wait()  # an interrupt here leaves it to be awaited again
        writing, self.writing = self.writing, None
        if writing is not None:
            writing.result()

    def load_checkpoint(
        self, path: Any, map_location: Any = None, weights_only: bool | None = None
    ) -> dict[str, Any]:
        return read_checkpoint(Path(path), verified=Path(path) == self.verified, step=self.step)

    def remove_checkpoint(self, path: Any) -> None:
        Path(path).unlink(missing_ok=True)
