"""The LightningDataModule: text on one side, batches of token windows on the other."""

from __future__ import annotations

import hashlib
import json
import shutil
import warnings
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

from torch.utils.data import DataLoader

from conf.values import UserError, number, shown, switch, whole
from data.corpora import Corpus, SyntheticCorpus, TextCorpus
from data.prepare import folder_of, prepare
from data.storage import load_meta
from data.stream import StreamingDataModule, TrainStream, ValBatches
from data.tokenizer_base import Tokenizer
from data.tokenizers import tokenizer_from_dict
from data.tokens import Masking, TokenFile, TrainWindows, ValWindows


class TokenDataModule(StreamingDataModule):
    """Prepares a corpus once and serves windows of it.

    corpus: one of data.corpora or data.hub.
    tokenizer: {"kind": ..., options}, see `data.tokenizers.DEFAULTS`; not used by synthetic data.
    seq_len: tokens a window.
    batch_size: rows of a micro-batch on each rank; eval_batch_size: the same for validation.
    seed: names the order of the windows.
    document_mask: batches hold `document_ids`, see `data.tokens.Windows`.
    mask_fraction: the fraction of tokens to predict, of those that `data.tokens.Masking` hides; None: each
        token predicts the next. The vocabulary has one token more, which stands for hidden ones.
    max_val_tokens: validation reads at most about this many.
    pin_memory: None pins where there is a GPU.
    prepare_workers: processes that tokenise; None: one per core.
    verify: hash large token files too when they are opened.

    After `setup`: vocab_size, tokenizer (None for synthetic), train_tokens and val_tokens (counts), meta, and
    fingerprint, a hash of the tokens themselves.

    Batches: {"input_ids": (B, T) int64, "targets": (B, T) int64, -1 where ignored} and, with document_mask,
    "document_ids": (B, T) int32. A validation batch can hold no target at all: sum the losses, and divide by
    the number of targets of all batches.
    """

    def __init__(
        self,
        corpus: Corpus | SyntheticCorpus,
        tokenizer: dict[str, Any] | str | None = None,
        *,
        seq_len: int,
        batch_size: int = 16,
        eval_batch_size: int | None = None,
        seed: int = 0,
        data_dir: str | Path = "data/prepared",
        num_workers: int = 0,
        document_mask: bool = False,
        mask_fraction: float | None = None,
        max_val_tokens: int | None = None,
        pin_memory: bool | None = None,
        prepare_workers: int | None = None,
        verify: bool = False,
    ) -> None:
        super().__init__(seed, pin_memory)
        sizes = {
            "seq_len": seq_len,
            "data.batch_size": batch_size,
            "data.eval_batch_size": batch_size if eval_batch_size is None else eval_batch_size,
        }
        for name, value in sizes.items():
            whole(name, value, 1)
        whole("data.num_workers", num_workers, 0)
        whole("data.max_val_tokens", max_val_tokens, 1, null="all of them")
        whole("data.prepare_workers", prepare_workers, 1, null="one a core")
        switch("data.document_mask", document_mask)
        switch("data.verify", verify)
        number("data.mask_fraction", mask_fraction, above=0, below=1, null="each token predicts the next")
        if not isinstance(data_dir, str | Path):
            raise UserError(f"data.data_dir={shown(data_dir)}: it needs to be a folder.")
        self.corpus, self.tokenizer_spec = corpus, tokenizer or "bpe"
        self.seq_len, self.batch_size = seq_len, batch_size
        self.eval_batch_size = sizes["data.eval_batch_size"]
        self.data_dir, self.num_workers, self.document_mask = Path(data_dir), num_workers, document_mask
        self.mask_fraction = mask_fraction
        self.max_val_tokens, self.prepare_workers, self.verify = max_val_tokens, prepare_workers, verify
        self._files, self._restored = None, None
        self._folder, self._made = None, []  # and the folders that were prepared here

    @cached_property
    def tokenizer(self) -> Tokenizer | None:
        """Made when asked for: training on prepared gpt2 tokens needs no vocabulary, so no download.

        `meta["tokenizer_state"]` is its dictionary, for checkpoints.
        """
        self.setup()
        state = self.meta.get("tokenizer_state")
        return state and tokenizer_from_dict(state)

    def prepare_data(self) -> None:
        if not isinstance(self.corpus, SyntheticCorpus):
            self._folder = prepare(
                self.corpus, self.tokenizer_spec, self.data_dir, self.prepare_workers, made=self._made
            )

    def setup(self, stage: str | None = None) -> None:
        if self._files is not None:
            return
        files = self._synthetic() if isinstance(self.corpus, SyntheticCorpus) else self._prepared()
        masking = None
        if self.mask_fraction is not None:
            masking = Masking(self.mask_fraction, self.vocab_size, self.seed)
            self.vocab_size += 1
        self._train = TrainWindows(files["train"], self.seq_len, self.seed, self.document_mask, masking)
        self._val = ValWindows(files["val"], self.seq_len, self.document_mask, self.max_val_tokens, masking)
        if not self._val.has_targets():
            raise self._without_targets()
        self.train_tokens, self.val_tokens = len(files["train"]), len(files["val"])
        self._files = files
        if self._restored:
            self._check_same(self._restored)

    def _without_targets(self) -> UserError:
        sought = "answer" if getattr(self.corpus, "targets", "all") == "answers" else "target"
        read = self._val.n_windows * self.seq_len
        if read < len(self._val.file):
            return UserError(
                f"the first {read} tokens of validation hold no {sought}: raise data.max_val_tokens or "
                "seq_len"
            )
        return UserError(f"validation holds no {sought}: give more text")

    def _prepared(self) -> dict[str, TokenFile]:
        # only the first process of a machine has prepared: the others find the folder by themselves
        folder = self._folder or folder_of(self.corpus, self.tokenizer_spec, self.data_dir)[0]
        self.meta = load_meta(folder, self.verify)
        self.vocab_size = self.meta["vocab_size"]
        splits = self.meta["splits"]
        hashes = [facts["sha256"] for split in splits.values() for facts in split["files"].values()]
        self.fingerprint = hashlib.sha256(" ".join(hashes).encode()).hexdigest()
        return {
            split: TokenFile(
                folder / f"{split}.bin", self.meta["dtype"], facts["tokens"], folder / f"{split}.docs.bin"
            )
            for split, facts in splits.items()
        }

    def _synthetic(self) -> dict[str, TokenFile]:
        corpus = self.corpus
        self.meta = {"corpus": corpus.name, **vars(corpus)}
        self.vocab_size = corpus.vocab_size
        self.fingerprint = hashlib.sha256(json.dumps(self.meta, sort_keys=True).encode()).hexdigest()
        return {split: TokenFile.from_array(*corpus.tokens(split)) for split in ("train", "val")}

    def train_dataloader(self) -> DataLoader:
        self.setup()
        stream = TrainStream(self._train, self._cursor, self.batch_size, self.accumulate, *self._ranks())
        return self._loader(stream, self.num_workers)

    def val_dataloader(self) -> DataLoader:
        self.setup()
        # Lightning's doubt about a length and several workers: there are none here
        warnings.filterwarnings("ignore", message="Your `IterableDataset` has `__len__` defined")
        return self._loader(ValBatches(self._val, self.eval_batch_size, *self._ranks()))

    def state_dict(self) -> dict[str, Any]:
        return {"consumed": self.consumed, **self._order()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continues behind the samples consumed. UserError where the data or its order is another."""
        self._restored = dict(state_dict)
        self._cursor.consumed = int(state_dict["consumed"])
        if self._files is not None:
            self._check_same(self._restored)

    def _order(self) -> dict[str, Any]:
        """What window i depends on, beside i."""
        self.setup()
        return {"fingerprint": self.fingerprint, "seed": self.seed, "seq_len": self.seq_len}

    def _check_same(self, state: dict[str, Any]) -> None:
        for name in ("seed", "seq_len"):
            if state[name] != (here := getattr(self, name)):
                raise UserError(
                    f"the {name} of the data is not the checkpoint's: {here} here, {state[name]} there, so "
                    "the windows would be others. Continue with the same data settings, or start a new run"
                )
        if state["fingerprint"] != self.fingerprint:
            raise self._changed()

    def _changed(self) -> UserError:
        path = getattr(self.corpus, "path", None)
        return UserError(
            f"data{f'.path={path}' if path else f'={self.corpus.name}'}: the text has changed since the "
            "checkpoint was written. Give its own text, wherever it is now, or start a new run without ckpt="
        )

    def require_same(self, state: dict[str, Any], tokenizer: dict[str, Any] | None) -> None:
        """UserError unless text and tokenizer are those of a checkpoint, wherever the text lies; equal ids
        of other characters are noticed. A glob's files once had other names, and validation other files."""
        self.setup()
        try:
            older = replace(self.corpus, whole_names=True) if hasattr(self.corpus, "whole_names") else None
            other = older and state["fingerprint"] != self.fingerprint
            if other and older.files.keys() != self.corpus.files.keys():
                self.corpus, self._files = older, None
                vars(self).pop("tokenizer", None)
                self.prepare_data()
                self.setup()
            self._check_same(state)
            here = self.tokenizer and self.tokenizer.to_dict()
            if tokenizer != here and (tokenizer and tokenizer_from_dict(tokenizer).to_dict()) != here:
                raise self._changed()
        except ValueError:  # nothing stays of an attempt that failed
            for folder in self._made:
                shutil.rmtree(folder, ignore_errors=True)
            raise


def text_datamodule(
    tokenizer: dict[str, Any] | str | None = None,
    *,
    path: str,
    pattern: str = TextCorpus.pattern,
    val_fraction: float = TextCorpus.val_fraction,
    on_bad_encoding: str = "refuse",
    **options: Any,
) -> TokenDataModule:
    """A `TokenDataModule` over the user's own text, its options where a command line reaches them."""
    corpus = TextCorpus(
        path=path, pattern=pattern, val_fraction=val_fraction, on_bad_encoding=on_bad_encoding
    )
    return TokenDataModule(corpus, tokenizer, **options)
