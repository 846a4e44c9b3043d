"""Text files: recognised, checked and read in parts, whatever their size."""

from __future__ import annotations

import codecs
import hashlib
from collections.abc import Iterator
from pathlib import Path

PART_CHARS = 1 << 20  # a longer document comes in several parts, so that memory stays bounded
HASHED_WHOLE = 16 << 20  # bytes; a larger file is recognised by size, time and ends: launches stay quick


def content_hash(path: Path) -> str:
    """sha256 of a file; of its size, time and ends where it is larger than `HASHED_WHOLE`."""
    stat = path.stat()
    with path.open("rb") as file:
        if stat.st_size <= HASHED_WHOLE:
            return hashlib.sha256(file.read()).hexdigest()
        digest = hashlib.sha256(f"{stat.st_size} {stat.st_mtime_ns}".encode())
        digest.update(file.read(1 << 20))
        file.seek(-(1 << 20), 2)
        digest.update(file.read())
    return "ends:" + digest.hexdigest()


def count_chars(path: Path) -> int:
    """Characters of a UTF-8 text file as `read_parts` reads it. ValueError says why a file is not text."""
    decoder, count, last = codecs.getincrementaldecoder("utf-8-sig")(), 0, ""
    with path.open("rb") as file:
        while block := file.read(PART_CHARS):
            if b"\0" in block:
                raise ValueError("it holds NUL bytes, so it is binary")
            try:
                text = decoder.decode(block)
            except UnicodeDecodeError as error:
                raise ValueError(f"it is not UTF-8 ({error.reason})") from error
            # universal newlines: "\r\n" is one character, also where two blocks meet inside it
            count += len(text) - (last + text).count("\r\n")
            last = "\r" if text.endswith("\r") else "" if text else last
        try:
            decoder.decode(b"", final=True)
        except UnicodeDecodeError as error:
            raise ValueError(f"it is not UTF-8 ({error.reason})") from error
    return count


def read_parts(path: Path, n_chars: int, cut: int) -> Iterator[tuple[str, str, bool]]:
    """(split, text, ends) of the first `cut` characters, a training document, and of the others, validation.

    A long document comes in several parts; `ends` says which is its last.
    """
    position = 0
    with path.open(encoding="utf-8-sig") as file:
        while position < n_chars:
            stop = cut if position < cut else n_chars
            text = file.read(min(PART_CHARS, stop - position))
            if not text:
                raise ValueError(f"{path} became shorter while it was being read: run again")
            if text[-1] != "\n" and (room := stop - position - len(text)):
                text += file.readline(min(room, 1 << 16))  # end at a line, not inside a word
            split = "train" if position < cut else "val"
            position += len(text)
            yield split, text, position == stop
