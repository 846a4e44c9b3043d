"""Chats: JSON lines of messages, written out by the tokenizer's own template; the answers are learnt.

    {"messages": [{"role": "user", "content": "..."}, {"role": "assistant", "content": "..."}]}

A conversation is a document. In its tokens (32 bits) the top bit says that a token is nobody's target
(data/tokens.py): all but what the template writes for a message of the assistant.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from conf.values import UserError
from data.chat_template import Messages, has_template, render
from data.corpora import Encode, Piece, TextCorpus
from data.datamodule import TokenDataModule
from data.tokenizer_base import Tokenizer
from data.tokenizer_file import JSONTokenizer
from data.tokens import NO_TARGET

ANSWERS = "assistant"  # the role whose messages are learnt
OTHERS = ("system", "user", "tool")


def require_messages(line: str, where: str) -> None:
    """UserError unless it is a conversation with an answer."""
    try:
        conversation = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise UserError(f"{where} is no JSON ({error}): a line has to be one conversation") from None
    messages = conversation.get("messages") if isinstance(conversation, dict) else None
    if not isinstance(messages, list) or not all(isinstance(message, dict) for message in messages):
        raise UserError(
            f'{where} has no messages: it needs {{"messages": [{{"role": ..., "content": ...}}]}}'
        )
    for message in messages:
        if message.get("role") not in (ANSWERS, *OTHERS) or not isinstance(message.get("content"), str):
            known = ", ".join((ANSWERS, *OTHERS))
            raise UserError(
                f"{where} has a message without text as content, or whose role is none of {known}"
            )
    if not any(message["role"] == ANSWERS for message in messages):
        raise UserError(f"{where} has no message of the {ANSWERS}, and answers are what is learnt")


def answers_of(tokenizer: JSONTokenizer, messages: Messages) -> tuple[str, list[tuple[int, int]]]:
    """The text of a conversation, and the places in it between which the template writes an answer."""
    text, found = render(tokenizer, messages), []
    for i, message in enumerate(messages):
        if message["role"] == ANSWERS:
            before = render(tokenizer, messages[:i], ask=True)
            after = render(tokenizer, messages[: i + 1])
            if not (text.startswith(after) and after.startswith(before)):
                raise UserError(
                    "the tokenizer's chat template writes earlier messages otherwise once later ones are "
                    "there: which of its text is an answer cannot be said; give one answer a conversation"
                )
            found.append((len(before), len(after)))
    return text, found


def encode_chat(tokenizer: Tokenizer, messages: Messages) -> np.ndarray:
    """(n,) uint32 token ids of a conversation, with NO_TARGET where they are of no answer."""
    if not has_template(tokenizer):
        raise UserError(
            "data=chat needs a tokenizer with a chat template: init_from=<a model for chats>, or "
            "data.tokenizer.kind=file with chat_template.jinja beside its tokenizer.json"
        )
    text, answers = answers_of(tokenizer, messages)
    ids, begins = tokenizer.encode_special(text)
    learnt = np.zeros(len(ids), dtype=bool)
    for start, stop in answers:
        learnt |= (begins >= start) & (begins < stop)
    return np.where(learnt, ids, ids | NO_TARGET).astype(np.uint32)


def encode_line(tokenizer: Tokenizer, line: str) -> np.ndarray:
    return encode_chat(tokenizer, json.loads(line)["messages"])


@dataclass
class ChatCorpus(TextCorpus):
    """Conversations in JSON lines of the user's own: path, pattern as `TextCorpus` has them.

    val_fraction: one conversation in round(1 / val_fraction) is validation."""

    pattern: str = "**/*.jsonl"
    name: ClassVar[str] = "chat"
    targets: ClassVar[str] = "answers"
    encode: ClassVar[Encode] = staticmethod(encode_line)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.val_fraction > 0.5:
            raise UserError(
                f"data.val_fraction={self.val_fraction}: at most every second conversation can be "
                "validation; give 0.5 or less"
            )

    @property
    def split_rule(self) -> str:  # type: ignore[override]
        return f"by conversation: each {self._every}th is validation"

    @property
    def _every(self) -> int:
        return max(2, round(1 / self.val_fraction))

    def pieces(self) -> Iterator[Piece]:
        count = 0
        for name, path in self.files.items():
            for number, line in _lines(path):
                require_messages(line, f"{path}, line {number}")
                count += 1
                split = "train" if count % self._every else "val"
                yield Piece(f"{name}:{number}", split, line, ends=True)


def _lines(path: Path) -> Iterator[tuple[int, str]]:
    """Lines that are not empty, with their numbers."""
    try:
        with path.open(encoding="utf-8-sig") as file:
            yield from ((number, line) for number, line in enumerate(file, 1) if line.strip())
    except UnicodeDecodeError as error:
        raise UserError(f"{path} is not UTF-8 text ({error.reason}): give JSON lines") from None


def chat_datamodule(
    tokenizer: dict[str, Any] | str | None = None,
    *,
    path: str,
    pattern: str = ChatCorpus.pattern,
    val_fraction: float = ChatCorpus.val_fraction,
    **options: Any,
) -> TokenDataModule:
    """A `TokenDataModule` over the user's own conversations."""
    return TokenDataModule(
        ChatCorpus(path=path, pattern=pattern, val_fraction=val_fraction), tokenizer, **options
    )
