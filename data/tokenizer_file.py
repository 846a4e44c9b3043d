"""Tokenizers of a file: tokenizer.json as Hugging Face has it, and what a run of ours keeps of its own.

Of tokenizer.json the library reads rules and vocabulary, which run no code; beside it lie, in files of JSON
and text, which tokens begin and end a document and how a chat is written.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import takewhile
from pathlib import Path
from typing import Any

import numpy as np

from conf.values import UserError, shown
from data.tokenizer_base import Tokenizer, unknown_characters

FIELDS = {"json": str, "vocab_size": int, "eos": str, "bos": str, "chat_template": str}


class JSONTokenizer(Tokenizer):
    """A tokenizer.json.

    vocab_size: that of the model it is for, which may have more tokens than the file; None: the file's.
    eos, bos: the tokens that end and begin a document; chat_template: as transformers has it.
    """

    name = "json"

    def __init__(
        self,
        text: str,
        vocab_size: int | None = None,
        eos: str | None = None,
        bos: str | None = None,
        chat_template: str | None = None,
    ) -> None:
        from tokenizers import Tokenizer as Library

        with _damaged():
            self._library = Library.from_str(text)
        self._library.no_truncation()
        self._library.no_padding()
        # text that spells a special token is ordinary text, as everywhere here
        self._library.encode_special_tokens = True
        own = 1 + max(self.vocabulary().values(), default=-1)
        self.vocab_size = own if vocab_size is None else vocab_size
        if own > self.vocab_size:
            raise UserError(f"its tokenizer has {own} tokens, and its model {self.vocab_size}")
        self.text, self.eos, self.bos, self.chat_template = text, eos, bos, chat_template
        self.eot, self.bos_id = (None if token is None else self._id(token) for token in (eos, bos))
        self.begin: list[int] = []  # what `encode` puts before each text

    def vocabulary(self) -> dict[str, int]:
        """Token -> id, special ones among them."""
        return self._library.get_vocab(with_added_tokens=True)

    @property
    def adds_tokens(self) -> bool:
        """Whether the library, asked to, adds tokens to a text."""
        return self._library.num_special_tokens_to_add(is_pair=False) > 0

    def begin_texts(self) -> None:
        """From now on `encode` puts before a text what the library does, such as <s>: models of others have
        been trained so. (Ours are not: `encode_array` gives what a corpus is made of.) UserError for a token
        that the model does not have."""
        if self.adds_tokens:
            with _damaged():
                encoded = self._library.encode("a", add_special_tokens=True)
            added = sum(takewhile(bool, encoded.special_tokens_mask))
            self.begin = encoded.ids[:added]
        if (most := max(self.begin, default=0)) >= self.vocab_size:
            raise UserError(
                f"its tokenizer puts token {most} before a text, and its model has {self.vocab_size}"
            )

    def encode(self, text: str) -> list[int]:
        return [*self.begin, *super().encode(text)]

    @contextmanager
    def _encoding(self, text: str) -> Iterator[None]:
        """UserError for a text that cannot be encoded within: of what a char tokenizer was exported to, it
        names the characters, as that has no token for what it does not know."""
        _require_unicode(text)
        try:
            with _damaged():
                yield
        except UserError:
            model = json.loads(self.text)["model"]
            unknown = set(text) - set("".join(self.vocabulary()))
            if model.get("type") == "WordLevel" and model.get("unk_token") == "" and unknown:
                raise unknown_characters(unknown, len(model["vocab"])) from None
            raise

    def _id(self, token: str) -> int:
        with _damaged():  # a surrogate is no text to it
            found = self._library.token_to_id(token)
        if found is None:
            raise UserError(f"its tokenizer has no token {token[:40]!r}")
        return found

    def encode_array(self, text: str) -> np.ndarray:
        with self._encoding(text):
            encoded = self._library.encode_batch_fast([text], add_special_tokens=False)[0]
        return np.asarray(encoded.ids, dtype=np.int64)

    def encode_special(self, text: str) -> tuple[np.ndarray, np.ndarray]:
        """(n,) ids of a text in which special tokens are meant, and (n,) where each begins in it."""
        self._library.encode_special_tokens = False
        try:
            with self._encoding(text):
                encoded = self._library.encode(text, add_special_tokens=False)
        finally:
            self._library.encode_special_tokens = True
        begins = np.asarray([begin for begin, _ in encoded.offsets], dtype=np.int64)
        return np.asarray(encoded.ids, dtype=np.int64), begins

    def _decode_plain(self, ids: list[int]) -> str:
        with _damaged():
            return self._library.decode([i for i in ids if i >= 0], skip_special_tokens=False)

    def to_dict(self) -> dict[str, Any]:
        special = {"eos": self.eos, "bos": self.bos, "chat_template": self.chat_template}
        return {"kind": self.name, "json": self.text, "vocab_size": self.vocab_size, **special}

    @classmethod
    def from_dict(cls, saved: dict[str, Any]) -> JSONTokenizer:
        for key, kind in FIELDS.items():
            if type(saved[key]) is not kind and (saved[key] is not None or key in ("json", "vocab_size")):
                raise UserError(f"its {key} is a {type(saved[key]).__name__}")
        return cls(saved["json"], *(saved[key] for key in FIELDS if key != "json"))


@contextmanager
def _damaged() -> Iterator[None]:
    """UserError for what the library raises about a file: a bare Exception, or a panic, which is none."""
    try:
        yield
    except (KeyboardInterrupt, SystemExit, GeneratorExit, MemoryError):
        raise
    except BaseException as error:
        raise UserError(f"its tokenizer.json is damaged ({str(error)[:80]})") from None


def _require_unicode(text: str) -> None:
    """JSON can spell half of a surrogate pair, which the library takes no text from."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        half = ascii(text[error.start])
        raise UserError(f"the text has {half}, half of a surrogate pair, which is no character") from None


def read_folder(folder: Path, vocab_size: int | None = None, name: str = "tokenizer.json") -> dict[str, Any]:
    """The `to_dict` of a pretrained model's tokenizer. UserError where it is damaged, or of more tokens than
    the `vocab_size` of the model. name: of its file, which another one than the model's may have."""
    path = folder / name
    if not path.is_file():
        raise UserError("it has no tokenizer.json; transformers' AutoTokenizer writes one by save_pretrained")
    settings = {**_read(folder / "special_tokens_map.json"), **_read(folder / "tokenizer_config.json")}
    template = settings.get("chat_template")
    if (apart := folder / "chat_template.jinja").is_file():
        template = _text(apart)
    if isinstance(template, list):  # of several, by name
        named = {each.get("name"): each.get("template") for each in template if isinstance(each, dict)}
        template = named.get("default")
    eos, bos = (_token(settings.get(f"{name}_token")) for name in ("eos", "bos"))
    template = template if isinstance(template, str) else None
    return JSONTokenizer(_text(path), vocab_size, eos, bos, template).to_dict()


def read_file(given: Any) -> dict[str, Any]:
    """What data.tokenizer.path names: a `to_dict` that a run has kept, or a tokenizer.json, by any name, with
    the files beside it that say what begins and ends a document and how a chat is written."""
    path = Path(given) if isinstance(given, str) else None
    if path is None or not path.is_file():
        raise UserError(
            f"data.tokenizer.path={shown(given)}: kind=file needs a tokenizer.json; give its place"
        )
    saved = _read(path)
    try:
        return saved if "kind" in saved else read_folder(path.parent, name=path.name)
    except UserError as error:
        raise UserError(f"data.tokenizer.path={given}: {error}") from None


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise UserError(f"its {path.name} is not UTF-8 text ({error.reason})") from None


def _read(path: Path) -> dict[str, Any]:
    """The mapping in a file of JSON; empty where there is no such file."""
    if not path.is_file():
        return {}
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise UserError(f"its {path.name} is damaged ({type(error).__name__})") from None
    if not isinstance(found, dict):
        raise UserError(f"its {path.name} is no mapping")
    return found


def _token(value: Any) -> str | None:
    """A special token, which is text or a mapping with its text."""
    value = value.get("content") if isinstance(value, dict) else value
    return value if isinstance(value, str) else None
