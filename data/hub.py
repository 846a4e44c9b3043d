"""What comes over the network: Hugging Face datasets and GPT-2's vocabulary. Without it: a quick answer."""

from __future__ import annotations

import hashlib
import http.client
import os
import tempfile
import threading
import urllib.error
import urllib.request
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

from conf.values import UserError, number, whole
from data.corpora import Corpus, Piece, unit_hash
from data.storage import Unfinished

PROBE_TIMEOUT_S = 5.0
HF_TRUE = ("1", "ON", "YES", "TRUE")  # what Hugging Face's libraries take for a yes: 0 and false are none
OFFLINE_CHOICES = "data=stdlib, or data=text data.path=<your file or folder>"


def _reach(url: str) -> str | None:
    """Why `url` cannot be reached, or None if it can.

    In a thread with a deadline: the timeout of a connection does not cover the look-up of its name.
    """
    outcome: list[str | None] = [f"no answer within {PROBE_TIMEOUT_S:g} s"]

    def ask() -> None:
        try:
            urllib.request.urlopen(
                urllib.request.Request(url, method="HEAD"), timeout=PROBE_TIMEOUT_S
            ).close()
            outcome[0] = None
        except urllib.error.HTTPError:  # an answer, if not the one hoped for
            outcome[0] = None
        except (OSError, ValueError, http.client.HTTPException) as error:
            outcome[0] = str(getattr(error, "reason", error))

    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    thread.join(PROBE_TIMEOUT_S)
    return outcome[0]


@dataclass
class HubCorpus(Corpus):
    """A text dataset of the Hugging Face Hub, streamed: nothing but the tokens stays on disk.

    dataset, config, revision, column: as `datasets.load_dataset` names them.
    train, val: splits of the dataset; without `val`, about `val_fraction` of the documents of `train`, chosen
    by a hash of their text.
    max_documents: at most so many documents of each of these splits.
    max_tokens: stop after about so many training tokens, at the end of a shard.

    A preparation that was interrupted reads the stream anew but tokenises only what is missing.
    """

    name: str
    dataset: str
    config: str | None = None
    revision: str | None = None
    column: str = "text"
    train: list[str] = field(default_factory=lambda: ["train"])
    val: list[str] = field(default_factory=list)
    val_fraction: float = 0.005
    max_documents: int | None = None
    max_tokens: int | None = None
    skipped: list[str] = field(default_factory=list, init=False, repr=False)

    def __post_init__(self) -> None:
        for key in ("max_documents", "max_tokens"):
            whole(f"data.corpus.{key}", getattr(self, key), 1, null="no limit")
        if not self.val:
            number("data.corpus.val_fraction", self.val_fraction, above=0, below=1)

    @property
    def split_rule(self) -> str:  # type: ignore[override]
        if self.val:
            return f"the dataset's own: {'+'.join(self.val)} is validation"
        return f"by document: blake2b of the text below {self.val_fraction:g} is validation"

    def describe(self) -> dict[str, Any]:
        facts = {
            key: value for key, value in vars(self).items() if key not in ("name", "skipped", "val_fraction")
        }
        return {"corpus": self.name, **facts, "split_rule": self.split_rule}

    def pieces(self) -> Iterator[Piece]:
        # validation first: `max_tokens` ends the training split early
        for split in (*self.val, *self.train):
            for index, text in enumerate(islice(self._texts(split), self.max_documents)):
                if text:
                    yield Piece(f"{split}:{index}", self._side(split, text), text, ends=True)

    def _side(self, split: str, text: str) -> str:
        if self.val:
            return "val" if split in self.val else "train"
        return "val" if unit_hash(text) < self.val_fraction else "train"

    def _texts(self, split: str) -> Iterator[str]:
        self._check_network()
        try:
            for row in _stream(self.dataset, self.config, self.revision, split):
                if self.column not in row:
                    raise UserError(
                        f"data.corpus.column={self.column}: {self.dataset} ({split}) has no such column; it "
                        f"has {', '.join(map(str, row))}"
                    )
                yield row[self.column]
        except UserError:
            raise
        except Exception as error:  # datasets raises whatever its transport raises
            raise Unfinished(
                f"reading {self.column!r} of {self.dataset} ({split}) from the Hugging Face Hub failed: "
                f"{type(error).__name__}: {error}. Run again to continue (finished shards are kept), or work "
                f"offline: {OFFLINE_CHOICES}"
            ) from error

    def _check_network(self) -> None:
        offline = [
            name
            for name in ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE")
            if os.environ.get(name, "").upper() in HF_TRUE
        ]
        endpoint = os.environ.get("HF_ENDPOINT", "https://huggingface.co")
        reason = f"{offline[0]} is set" if offline else _reach(endpoint)
        if reason:
            raise Unfinished(
                f"data={self.name} is streamed from the Hugging Face Hub, and {endpoint} cannot be reached "
                f"({reason}). Connect this machine, or work offline: {OFFLINE_CHOICES}"
            )


def _stream(dataset: str, config: str | None, revision: str | None, split: str) -> Iterable[dict[str, Any]]:
    from datasets import load_dataset

    return load_dataset(dataset, config, revision=revision, split=split, streaming=True)


_GPT2_FILES = [
    f"https://openaipublic.blob.core.windows.net/gpt-2/encodings/main/{name}"
    for name in ("vocab.bpe", "encoder.json")
]


def load_gpt2_encoding() -> Any:
    """tiktoken's gpt2 encoding. Unfinished where it was never downloaded and cannot be now."""
    import tiktoken

    kept = os.environ.get("TIKTOKEN_CACHE_DIR") or os.environ.get("DATA_GYM_CACHE_DIR")
    folder = Path(kept or Path(tempfile.gettempdir()) / "data-gym-cache")
    cached = all((folder / hashlib.sha1(url.encode()).hexdigest()).exists() for url in _GPT2_FILES)
    # tiktoken downloads without any timeout, so ask first
    reason = None if cached else _reach(_GPT2_FILES[0])
    try:
        if reason is None:
            return tiktoken.get_encoding("gpt2")
    except (OSError, ValueError) as error:
        reason = f"{type(error).__name__}: {error}"
    raise Unfinished(
        f"the gpt2 tokenizer needs a one-time download of 1.5 MB, which failed ({reason}). Connect this "
        "machine, or set TIKTOKEN_CACHE_DIR to a folder that has the files, or work offline with "
        "data.tokenizer.kind=bpe, byte or char"
    )
