"""Tokenizers behind one small interface: char, byte, bpe (trained here), gpt2, and those of a file.

Each is rebuilt from a JSON-plain dictionary, so that a checkpoint travels with its own.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np

from conf.values import UserError, number, shown, whole
from data.tokenizer_base import Tokenizer, unknown_characters
from data.tokenizer_file import JSONTokenizer, read_file

DEFAULTS: dict[str, dict[str, Any]] = {
    "char": {},
    "byte": {},
    "bpe": {"vocab_size": 2048, "sample_mb": 16},
    "gpt2": {},
    "file": {"path": None},
}


class CharTokenizer(Tokenizer):
    """One id per character of the corpus, in code point order, as nanoGPT does; no end-of-text token."""

    name, eot = "char", None

    def __init__(self, chars: str) -> None:
        if not isinstance(chars, str) or not chars:
            raise UserError("the char tokenizer needs at least one character")
        self.chars = "".join(sorted(set(chars)))
        self.vocab_size = len(self.chars)
        self._codes = np.frombuffer(self.chars.encode("utf-32-le"), dtype="<u4")

    def encode_array(self, text: str) -> np.ndarray:
        codes = np.frombuffer(text.encode("utf-32-le", "surrogatepass"), dtype="<u4")
        ids = np.searchsorted(self._codes, codes)
        known = self._codes[np.minimum(ids, self.vocab_size - 1)] == codes
        if not known.all():
            raise unknown_characters({chr(code) for code in codes[~known]}, self.vocab_size)
        return ids

    def _decode_plain(self, ids: list[int]) -> str:
        return "".join(self.chars[i] if 0 <= i < self.vocab_size else "\ufffd" for i in ids)

    def to_dict(self) -> dict[str, Any]:
        return {"kind": "char", "chars": self.chars}


class ByteTokenizer(Tokenizer):
    """UTF-8 bytes, and 256 ends a document."""

    name, vocab_size, eot = "byte", 257, 256

    def encode_array(self, text: str) -> np.ndarray:
        return np.frombuffer(text.encode(), dtype=np.uint8)

    def _decode_plain(self, ids: list[int]) -> str:
        return bytes(i for i in ids if 0 <= i < 256).decode("utf-8", errors="replace")


# The library takes more time for a letter of a longer word: 64,000 random letters of DNA without a space took
# 40 s, in parts of 1,000 a million of them takes 2 s.
LONGEST_WORD = 1000
_LONG = re.compile(rf"(?<!\S)\S{{{LONGEST_WORD},}}|(?<!\s)\s{{{LONGEST_WORD},}}")


def _in_parts(text: str) -> Iterator[str]:
    """The text, cut where more than LONGEST_WORD characters are without a space, or are nothing else."""
    start = 0
    for run in _LONG.finditer(text):
        for end in range(run.start() + LONGEST_WORD, run.end(), LONGEST_WORD):
            yield text[start:end]
            start = end
    yield text[start:]


class BPETokenizer(Tokenizer):
    """Byte-level BPE in the manner of GPT-2, trained on the corpus. The last id ends a document."""

    name = "bpe"

    def __init__(self, tokenizer: Any) -> None:
        self._bpe = tokenizer
        # outside the library's vocabulary: as its special token, text that spells it would be parsed
        self.eot = tokenizer.get_vocab_size()
        self.vocab_size = self.eot + 1

    @classmethod
    def train(cls, texts: Iterable[str], vocab_size: int) -> BPETokenizer:
        from tokenizers import pre_tokenizers, trainers

        bpe = cls._library()
        trainer = trainers.BpeTrainer(
            vocab_size=vocab_size - 1,
            initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
            show_progress=False,
        )
        # trains on all cores; said explicitly, or every later fork (a DataLoader's workers) prints a warning
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")
        bpe.train_from_iterator((part for text in texts for part in _in_parts(text)), trainer)
        return cls(bpe)

    @staticmethod
    def _library(*vocab_and_merges: Any) -> Any:
        from tokenizers import Tokenizer, decoders, models, pre_tokenizers

        bpe = Tokenizer(models.BPE(*vocab_and_merges))
        bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        bpe.decoder = decoders.ByteLevel()
        return bpe

    def encode_array(self, text: str) -> np.ndarray:
        return np.asarray(
            self._bpe.encode_batch_fast([text], add_special_tokens=False)[0].ids, dtype=np.int64
        )

    def _decode_plain(self, ids: list[int]) -> str:
        return self._bpe.decode([i for i in ids if 0 <= i < self.eot], skip_special_tokens=False)

    def to_dict(self) -> dict[str, Any]:
        return {"kind": "bpe", "vocab_size": self.vocab_size, "tokenizer": json.loads(self._bpe.to_str())}

    @classmethod
    def from_dict(cls, saved: dict[str, Any]) -> BPETokenizer:
        """The vocabulary and the merges are all that is read: how text is cut is for `_library` to say."""
        model = saved["tokenizer"]["model"]
        vocab, merges = model["vocab"], model["merges"]
        if not isinstance(vocab, dict):  # the library would take a string for the name of a file
            raise UserError("its vocabulary is no mapping")
        if sorted(vocab.values()) != list(range(len(vocab))):
            raise UserError("the ids of its vocabulary are not 0, 1, 2, ...")
        pairs = [tuple(pair.split(" ")) if isinstance(pair, str) else tuple(pair) for pair in merges]
        if odd := [pair for pair in pairs if len(pair) != 2 or not {*pair, "".join(pair)} <= vocab.keys()]:
            raise UserError(f"a merge is not of two tokens of its vocabulary: {odd[0]!r:.60}")
        return cls(cls._library(vocab, pairs))


class GPT2Tokenizer(Tokenizer):
    """GPT-2's own 50,257 tokens through tiktoken, which downloads 1.5 MB once and keeps them."""

    name, vocab_size, eot = "gpt2", 50257, 50256

    def __init__(self) -> None:
        from data.hub import load_gpt2_encoding

        self._encoding = load_gpt2_encoding()

    @property
    def ranks(self) -> dict[bytes, int]:
        """Token -> id, in the order of its merges."""
        tokens = self._encoding.token_byte_values()
        return {token: self._encoding.encode_single_token(token) for token in tokens}

    def encode_array(self, text: str) -> np.ndarray:
        return np.asarray(self._encoding.encode_ordinary(text), dtype=np.int64)

    def _decode_plain(self, ids: list[int]) -> str:
        return self._encoding.decode([i for i in ids if 0 <= i < self.eot], errors="replace")


def tokenizer_spec(spec: dict[str, Any] | str) -> dict[str, Any]:
    """The options that matter for this kind, with defaults: what identifies a tokenizer beside its corpus.

    A file is identified by its content, wherever it lies. Options of another kind are dropped (an override of
    `kind` alone leaves them behind); unknown ones are refused.
    """
    if not isinstance(spec, str | Mapping):
        raise UserError(f"data.tokenizer is {shown(spec)}; it has to be options, as data.tokenizer.kind=bpe")
    spec = {"kind": spec} if isinstance(spec, str) else dict(spec)
    kind = spec.pop("kind", None)
    if not isinstance(kind, str) or kind not in DEFAULTS:
        raise UserError(f"data.tokenizer.kind is {kind!r}; it has to be one of {', '.join(DEFAULTS)}")
    if unknown := sorted(set(spec) - {key for options in DEFAULTS.values() for key in options}):
        raise UserError(
            f"data.tokenizer has no option {', '.join(unknown)}; {kind} has {list(DEFAULTS[kind]) or 'none'}"
        )
    chosen = {"kind": kind} | {key: spec.get(key, value) for key, value in DEFAULTS[kind].items()}
    if kind == "bpe":
        whole("data.tokenizer.vocab_size", chosen["vocab_size"], 258, 1 << 20)  # 256 bytes, a merge, the end
        number("data.tokenizer.sample_mb", chosen["sample_mb"], above=0)
    if kind == "file":
        content = json.dumps(read_file(chosen["path"]), sort_keys=True)
        chosen["sha256"] = hashlib.sha256(content.encode()).hexdigest()
    return chosen


def tokenizer_from_dict(saved: dict[str, Any]) -> Tokenizer:
    """The tokenizer that `to_dict` described. UserError for an unknown kind, and for what `to_dict` does not
    write: the dictionary may come from a file of somebody else."""
    kind = saved.get("kind")
    try:
        if kind == "char":
            return CharTokenizer(saved["chars"])
        if kind == "byte":
            return ByteTokenizer()
        if kind == "bpe":
            return BPETokenizer.from_dict(saved)
        if kind == "json":
            return JSONTokenizer.from_dict(saved)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        said = f"{type(error).__name__}: {error}".splitlines()[0]
        raise UserError(f"a saved {kind} tokenizer is damaged ({said:.120})") from error
    if kind == "gpt2":
        return GPT2Tokenizer()
    raise UserError(f"a saved tokenizer has kind {kind!r:.40}; this version knows {', '.join(DEFAULTS)}")
