"""Corpora: where text comes from, who is in validation, and how to recognise the same source again.

A corpus yields `Piece`s of documents in a fixed order. Nothing here tokenises; nothing holds a whole corpus
in memory.
"""

from __future__ import annotations

import hashlib
import os
import sysconfig
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from platform import python_version
from typing import Any, ClassVar

import numpy as np

from conf.values import UserError, number, shown, whole
from data.files import each_once, find_text
from data.textfiles import content_hash, count_chars, read_parts, state_of
from data.tokenizer_base import Tokenizer


@dataclass(frozen=True)
class Piece:
    """Part of a document: `ends` says whether the document is complete after it."""

    document: str
    split: str  # "train" or "val"
    text: str
    ends: bool


Encode = Callable[[Tokenizer, str], np.ndarray]


def encode_text(tokenizer: Tokenizer, text: str) -> np.ndarray:
    """(n,) token ids of a piece's text: what a corpus does unless it says otherwise."""
    return tokenizer.encode_array(text)


class Corpus:
    """What `prepare` needs of a source of text.
    `skipped` names files that the last whole `pieces()` left out; `max_tokens` bounds the training split.
    """

    name: str
    split_rule: str
    max_tokens: int | None = None
    skipped: list[str]
    KEYS: ClassVar[str] = "data.corpus"  # where its options are in a config
    targets: ClassVar[str] = "all"  # or answers: tokens say themselves whether they are targets
    encode: ClassVar[Encode] = staticmethod(encode_text)

    def describe(self) -> dict[str, Any]:
        """JSON-plain facts that identify source and split: they go into the key of the prepared folder."""
        raise NotImplementedError

    def pieces(self) -> Iterator[Piece]:
        """Every piece of every document, always in the same order."""
        raise NotImplementedError

    def size(self) -> int | None:
        """About how many bytes of text there are, or None where only reading would tell."""
        return None

    def changed(self) -> list[str]:
        """Files that were written to since `describe` read them."""
        return []


def unit_hash(text: str) -> float:
    """A stable pseudo-random number in [0, 1) for a text: the same on every machine and in every run."""
    # a file's name that is not UTF-8 has surrogates
    encoded = text.encode(errors="surrogatepass")
    return int.from_bytes(hashlib.blake2b(encoded, digest_size=8).digest(), "big") / 2**64


def hash_split(names: list[str], val_fraction: float) -> set[str]:
    """The names in validation: about `val_fraction` of them, at least one, and never all of two or more."""
    val = {name for name in names if unit_hash(name) < val_fraction}
    by_hash = sorted(names, key=unit_hash)
    if not val:
        return {by_hash[0]}
    return val - {by_hash[-1]} if len(val) == len(names) > 1 else val


@dataclass
class FileCorpus(Corpus):
    """Text files as documents; see `StdlibCorpus` and `TextCorpus` for where they lie.

    val_fraction: about this share of the files is validation (a hash of the relative path decides); with
    fewer than `MIN_FILES_TO_SPLIT` files, this share of the characters of each, taken from its end.
    """

    val_fraction: float = 0.1
    on_bad_encoding: str = "refuse"
    skipped: list[str] = field(default_factory=list, init=False, repr=False)
    MIN_FILES_TO_SPLIT: ClassVar[int] = 10

    def __post_init__(self) -> None:
        number(f"{self.KEYS}.val_fraction", self.val_fraction, above=0, below=1)
        if self.on_bad_encoding not in ("skip", "refuse"):
            raise UserError(
                f"{self.KEYS}.on_bad_encoding is {shown(self.on_bad_encoding)}; it has to be skip or refuse"
            )

    @cached_property
    def files(self) -> dict[str, Path]:
        """Non-empty files by relative name, sorted by it: listed once, so that key, split and text agree."""
        return each_once(self._find())

    def _find(self) -> dict[str, Path]:
        raise NotImplementedError

    @property
    def split_rule(self) -> str:  # type: ignore[override]
        if len(self.files) >= self.MIN_FILES_TO_SPLIT:
            return f"by file: blake2b of the relative path below {self.val_fraction:g} is validation"
        return f"by characters: the last {self.val_fraction:g} of each file is validation"

    def describe(self) -> dict[str, Any]:
        return dict(self._facts)

    def changed(self) -> list[str]:
        return [str(path) for path, state in self._states.items() if state_of(path) != state]

    @cached_property
    def _states(self) -> dict[Path, tuple[int, ...] | None]:
        return {path: state_of(path) for path in self.files.values()}

    @cached_property
    def _facts(self) -> dict[str, Any]:
        """Hashes the files: once, as they are listed once; noted before, so that no change is missed."""
        files, _ = self.files, self._states
        listing = [[name, path.stat().st_size, content_hash(path)] for name, path in files.items()]
        return {
            "corpus": self.name,
            "files": len(files),
            "files_sha256": hashlib.sha256(repr(listing).encode()).hexdigest(),
            "on_bad_encoding": self.on_bad_encoding,
            "split_rule": self.split_rule,
        }

    def pieces(self) -> Iterator[Piece]:
        files, skipped = self.files, []
        by_file = len(files) >= self.MIN_FILES_TO_SPLIT
        val = hash_split(list(files), self.val_fraction) if by_file else set()
        for name, path in files.items():
            try:
                n_chars = count_chars(path)
            except ValueError as error:
                if self.on_bad_encoding == "refuse":
                    raise UserError(
                        f"{path} cannot be read as text: {error}. Give UTF-8 text files, or leave such files "
                        "out with data.on_bad_encoding=skip"
                    ) from error
                skipped.append(name)
                continue
            # int(), as nanoGPT cuts: 1,003,854 of tinyshakespeare's 1,115,394 characters
            cut = int(n_chars * (1 - self.val_fraction)) if not by_file else 0 if name in val else n_chars
            yield from (Piece(name, *part) for part in read_parts(path, n_chars, cut))
        self.skipped = skipped
        if len(skipped) == len(files):
            raise UserError(
                f"none of the {len(files)} files is UTF-8 text, such as {skipped[0]}: give text files"
            )

    def size(self) -> int:
        return sum(path.stat().st_size for path in self.files.values())


@dataclass
class StdlibCorpus(FileCorpus):
    """The running interpreter's standard library, its own .py files: Python source with no download."""

    on_bad_encoding: str = "skip"
    name: ClassVar[str] = "stdlib"
    # tables of code points, generated help texts and test data teach a model no Python
    LEFT_OUT: ClassVar[frozenset[str]] = frozenset(
        (
            "test",
            "tests",
            "idle_test",
            "encodings",
            "pydoc_data",
            "site-packages",
            "dist-packages",
            "__pycache__",
        )
    )

    def _find(self) -> dict[str, Path]:
        root = Path(sysconfig.get_path("stdlib"))
        found = {}
        for folder, folders, names in os.walk(root):
            folders[:] = [name for name in folders if name not in self.LEFT_OUT]  # site-packages can be huge
            paths = (Path(folder) / name for name in names if name.endswith(".py"))
            found |= {path.relative_to(root).as_posix(): path for path in paths if path.stat().st_size}
        if not found:
            raise UserError(
                f"no .py files of the standard library in {root}: choose data=text data.path=<file>"
            )
        return found

    def describe(self) -> dict[str, Any]:
        return super().describe() | {"python": python_version()}


@dataclass
class TextCorpus(FileCorpus):
    """UTF-8 text of the user's own.

    path: a file, a folder (searched recursively) or a glob such as "src/**/*.py". Whichever it is, a file is
    read once, and named from the folder on, or from where the glob's first wildcard is: the same files at
    another place are the same corpus.
    pattern: which files of a folder; hidden ones in it are left out, unless they are what `path` names.
    whole_names: a glob's files are named as they were once, by all of their path, which decides who is in
    validation: for runs from then.
    on_bad_encoding: "refuse" or "skip" (and count) files that are not UTF-8 text.
    """

    path: str = ""
    pattern: str = "**/*.txt"
    whole_names: bool = False
    name: ClassVar[str] = "text"
    KEYS: ClassVar[str] = "data"

    def __post_init__(self) -> None:
        super().__post_init__()
        if not isinstance(self.pattern, str) or not self.pattern or Path(self.pattern).is_absolute():
            raise UserError(
                f"data.pattern is {shown(self.pattern)!r}; it has to be a glob within the folder data.path, "
                "such as '**/*.txt'"
            )
        if self.path is not None:
            self.path = str(self.path)  # a command line's 1984 is a number

    def _find(self) -> dict[str, Path]:
        if not self.path:
            raise UserError("no path given: say which text, as in data=text data.path=book.txt")
        return find_text(self.path, self.pattern, self.whole_names)


@dataclass
class SyntheticCorpus:
    """Random tokens for benchmarks: no text, no tokenizer, no disk.

    n_tokens: length of the training split; validation has a tenth, at least 2.
    document_length: tokens a document, for measuring the document mask; None is one endless document.
    """

    vocab_size: int = 50304
    n_tokens: int = 10_000_000
    seed: int = 0
    document_length: int | None = None
    name: ClassVar[str] = "synthetic"

    def __post_init__(self) -> None:
        whole("data.corpus.vocab_size", self.vocab_size, 2, 1 << 31)
        whole("data.corpus.n_tokens", self.n_tokens, 2)
        whole("data.corpus.seed", self.seed, 0)
        whole("data.corpus.document_length", self.document_length, 2, null="one endless document")

    def tokens(self, split: str) -> tuple[np.ndarray, np.ndarray]:
        """(n,) tokens, uniformly random, and the ends of the documents among them."""
        n = self.n_tokens if split == "train" else max(2, self.n_tokens // 10)
        dtype = np.uint16 if self.vocab_size <= 1 << 16 else np.uint32
        stream = np.random.default_rng([self.seed, split == "val"])
        length = self.document_length or n
        ends = np.append(np.arange(length, n, length, dtype=np.int64), n)
        return stream.integers(self.vocab_size, size=n, dtype=dtype), ends
