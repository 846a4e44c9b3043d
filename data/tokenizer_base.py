"""What every tokenizer can do."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from conf.values import UserError

EOT_TEXT = "<|endoftext|>"


def unknown_characters(unknown: set[str], known: int) -> UserError:
    """Of a tokenizer of `known` characters that is given others."""
    shown = ", ".join(map(repr, sorted(unknown)[:10])) + (", ..." if len(unknown) > 10 else "")
    return UserError(
        f"the char tokenizer does not know {shown}: it has only the {known} characters of its corpus. Leave "
        "them out of the text; a model that is trained from the start, without init_from, can have "
        "data.tokenizer.kind=byte or bpe"
    )


class Tokenizer:
    """Text to token ids and back.

    eot: the id that ends a document, or None. `encode` never produces it: text that happens to spell
    "<|endoftext|>" is ordinary text. `decode` writes it as that text and invalid UTF-8 as U+FFFD.
    """

    name: str
    vocab_size: int
    eot: int | None

    def encode_array(self, text: str) -> np.ndarray:
        """(n,) token ids, any integer dtype: the fast path."""
        raise NotImplementedError

    def encode(self, text: str) -> list[int]:
        return self.encode_array(text).tolist()

    def decode(self, ids: Sequence[int]) -> str:
        parts, start = [], 0
        ids = [int(i) for i in ids]
        for at, token in enumerate([*ids, self.eot]):
            if token == self.eot or at == len(ids):
                parts.append(self._decode_plain(ids[start:at]))
                start = at + 1
        return EOT_TEXT.join(parts)

    def _decode_plain(self, ids: list[int]) -> str:
        raise NotImplementedError

    def to_dict(self) -> dict[str, Any]:
        """JSON-plain; `tokenizer_from_dict` is its inverse."""
        return {"kind": self.name}
