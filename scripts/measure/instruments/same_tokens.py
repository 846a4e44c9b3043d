"""Training windows of any length over the same tokens in the same order: for
studies/long_context_quality.py.

The order is that of data.tokens for windows of a block, the longest context of the study; each block is cut
into windows of T, which come one after the other in a batch. So runs of different contexts see the same
documents in every step, and differ in how far a token sees alone. Windows drawn one by one, as train.py does
it, give the shorter contexts batches of more documents, which by themselves make a better model.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from conf.values import UserError
from data.corpora import TextCorpus
from data.datamodule import TokenDataModule
from data.tokens import TokenFile, TrainWindows, Windows

TARGET = f"{__name__}.datamodule"  # for data._target_


class BlockWindows(Windows):
    """Endless: window i is part i % n of block i // n, where n windows make a block."""

    def __init__(
        self, file: TokenFile, seq_len: int, seed: int, document_mask: bool = False, *, block: int
    ) -> None:
        super().__init__(file, seq_len, document_mask)
        if block % seq_len:
            raise UserError(f"data.block={block}: it needs to be a multiple of seq_len={seq_len}.")
        self.blocks, self.parts = TrainWindows(file, block, seed), block // seq_len

    def starts(self, indices: np.ndarray) -> np.ndarray:
        blocks, parts = np.divmod(indices, self.parts)
        return self.blocks.starts(blocks) + parts * self.seq_len


class BlockDataModule(TokenDataModule):
    __qualname__ = TokenDataModule.__qualname__  # under which its state lies in a checkpoint

    def __init__(self, *arguments: Any, block: int, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.block = block

    def setup(self, stage: str | None = None) -> None:
        if self._files is None:
            super().setup(stage)
            self._train = BlockWindows(
                self._files["train"], self.seq_len, self.seed, self.document_mask, block=self.block
            )


def datamodule(
    tokenizer: dict[str, Any] | str | None = None,
    *,
    path: str,
    pattern: str,
    val_fraction: float,
    on_bad_encoding: str,
    **options: Any,
) -> BlockDataModule:
    """As data.datamodule.text_datamodule, with `block`."""
    corpus = TextCorpus(
        path=path, pattern=pattern, val_fraction=val_fraction, on_bad_encoding=on_bad_encoding
    )
    return BlockDataModule(corpus, tokenizer, **options)
