"""Text files: recognised, checked and read in parts, whatever their size."""

from __future__ import annotations

import codecs
import hashlib
from collections.abc import Iterator
from pathlib import Path

from conf.values import UserError

PART_CHARS = 1 << 20  # a longer document comes in several parts, so that memory stays bounded
HASHED_WHOLE = 16 << 20  # bytes; a larger file is recognised by size, time and ends: launches stay quick

# How files that are no UTF-8 text begin: what they are, and what makes text of them.
BEGINNINGS = {
    b"\x1f\x8b": "compressed by gzip: unpack it, as by gunzip -k",
    b"BZh": "compressed by bzip2: unpack it, as by bunzip2 -k",
    b"\xfd7zXZ\0": "compressed by xz: unpack it, as by unxz -k",
    b"\x28\xb5\x2f\xfd": "compressed by zstd: unpack it, as by unzstd",
    b"\x04\x22\x4d\x18": "compressed by lz4: unpack it, as by unlz4",
    b"PK\3\4": "a zip archive (.docx and .epub are too): unpack it, as by unzip, and take out the text",
    b"7z\xbc\xaf": "a 7z archive: unpack it",
    b"Rar!": "a rar archive: unpack it",
    b"%PDF": "a PDF: take out its text, as by pdftotext",
    b"PAR1": "a parquet table: write its text column into a text file",
    b"SQLite": "a database: write its text into a text file",
    b"\xff\xfe\0\0": "UTF-32: convert it, as by iconv -f UTF-32 -t UTF-8",
    b"\0\0\xfe\xff": "UTF-32: convert it, as by iconv -f UTF-32 -t UTF-8",
    b"\xff\xfe": "UTF-16: convert it, as by iconv -f UTF-16 -t UTF-8",
    b"\xfe\xff": "UTF-16: convert it, as by iconv -f UTF-16 -t UTF-8",
}


def state_of(path: Path) -> tuple[int, ...] | None:
    """What differs once a file was written to or replaced; None for one that is gone."""
    try:
        facts = path.stat()
    except OSError:
        return None
    return facts.st_dev, facts.st_ino, facts.st_size, facts.st_mtime_ns


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
    """Characters of a UTF-8 text file as `read_parts` reads it. UserError says why a file is not text."""
    decoder, count, last, start = codecs.getincrementaldecoder("utf-8-sig")(), 0, "", None
    with path.open("rb") as file:
        while True:
            block = file.read(PART_CHARS)
            start = block if start is None else start
            try:
                if b"\0" in block:
                    raise UserError("it holds NUL bytes, so it is binary")
                text = decoder.decode(block, final=not block)
            except ValueError as error:
                reason = f"it is not UTF-8 ({error.reason})" if hasattr(error, "reason") else str(error)
                raise UserError(_kind(start) or reason) from error
            if not block:
                return count
            # universal newlines: "\r\n" is one character, also where two blocks meet inside it
            count += len(text) - (last + text).count("\r\n")
            last = "\r" if text.endswith("\r") else "" if text else last


def _kind(start: bytes) -> str | None:
    """What a file is that begins so and is not UTF-8."""
    for beginning, kind in BEGINNINGS.items():
        if start.startswith(beginning):
            return f"it is {kind}"
    if start[257:262] == b"ustar":
        return "it is a tar archive: unpack it, as by tar -xf, and give the folder"
    for order, zeros in (("BE", start[::2]), ("LE", start[1::2])):
        if zeros.count(0) > 0.4 * len(zeros) and start.count(0) < 0.6 * len(start):
            return (
                f"it is UTF-16 without a byte order mark: convert it, as by iconv -f UTF-16{order} -t UTF-8"
            )
    return None


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
                raise UserError(f"{path} became shorter while it was read")
            if text[-1] != "\n" and (room := stop - position - len(text)):
                text += file.readline(min(room, 1 << 16))  # end at a line, not inside a word
            split = "train" if position < cut else "val"
            position += len(text)
            yield split, text, position == stop
