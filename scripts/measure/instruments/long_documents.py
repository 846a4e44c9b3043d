"""Long documents for studies/long_context_quality.py: the Python sources of the packages that this
interpreter has installed, or a text of the user's own, with whole packages held out.

Files come in the order of the sha256 of their contents, which depends on nothing else; each content counts
once. Left out is what is no UTF-8 text, shorter than `least_bytes`, or longer than `MOST_BYTES`: tables of
figures. Held out are whole packages, as a package's files repeat each other; of their files those are dropped
whose lines training mostly has (a vendored copy, a fork).
"""

from __future__ import annotations

import hashlib
import json
import shutil
import sys
import sysconfig
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from conf.values import UserError
from data.corpora import TextCorpus, unit_hash
from data.storage import locked, write_atomically

MOST_BYTES = 1 << 19
THREADS = 16  # that read and copy: a file at a time mostly waits
HELD_OUT = 0.08  # of the bytes; no package in it has more than a quarter of that
KNOWN_LINES = 0.5  # a held-out document may share this part of its lines with the training text
LINE_CHARS = 20  # of the lines that count for that: shorter ones are everywhere


@dataclass(frozen=True)
class Document:
    """group: the package, of whose documents all are in training or all held out."""

    group: str
    sha256: str
    path: Path
    n_bytes: int


def installed() -> Iterator[tuple[str, Path]]:
    """(package, file) of every .py file of the standard library and of what is installed beside it."""
    folders = [path for path in sys.path if Path(path).name in ("site-packages", "dist-packages")]
    folders += [sysconfig.get_path(name) for name in ("purelib", "platlib")]
    for root in dict.fromkeys(map(Path, folders)):
        for path in root.rglob("*.py"):
            yield path.relative_to(root).parts[0].removesuffix(".py"), path
    root = Path(sysconfig.get_path("stdlib"))
    for path in root.rglob("*.py"):
        first = path.relative_to(root).parts[0]
        if first not in ("site-packages", "dist-packages"):
            yield first.removesuffix(".py"), path


def own(path: str, pattern: str) -> Iterator[tuple[str, Path]]:
    """(file, file) of a text of the user's own: each document is a group of its own."""
    yield from TextCorpus(path=path, pattern=pattern).files.items()


def document_of(group: str, path: Path, least_bytes: int) -> Document | None:
    """None where it is no text, or none of the asked length."""
    try:
        if not least_bytes <= path.stat().st_size <= MOST_BYTES:
            return None
        content = path.read_bytes()
        content.decode()
    except (OSError, UnicodeDecodeError):
        return None
    return (
        None if b"\0" in content else Document(group, hashlib.sha256(content).hexdigest(), path, len(content))
    )


def documents(files: Iterable[tuple[str, Path]], least_bytes: int) -> list[Document]:
    """Those to choose from, by sha256. Of files with one content the group that is last in order of its
    `unit_hash` counts: the last to be held out."""
    found: dict[str, Document] = {}
    with ThreadPoolExecutor(THREADS) as pool:
        read = list(pool.map(lambda file: document_of(*file, least_bytes), files))
    for document in filter(None, read):
        group = document.group
        twin = found.get(document.sha256)
        if twin is None or unit_hash(group) > unit_hash(twin.group):
            found[document.sha256] = document
    return [found[sha256] for sha256 in sorted(found)]


def held_out_groups(found: list[Document], share: float) -> list[str]:
    """Packages in the order of a hash of their names, large ones passed over, up to `share` of the bytes.

    Raises UserError where there is nothing to hold out."""
    sizes: dict[str, int] = {}
    for document in found:
        sizes[document.group] = sizes.get(document.group, 0) + document.n_bytes
    total, chosen, taken = sum(sizes.values()), [], 0
    most = max(share * total / 4, min(sizes.values(), default=0))
    for group in sorted(sizes, key=unit_hash):
        if taken < share * total and sizes[group] <= most and len(chosen) < len(sizes) - 1:
            chosen.append(group)
            taken += sizes[group]
    if not chosen:
        raise UserError(
            f"{len(sizes)} documents or packages of the asked length were found; it takes two, one to train "
            "on and one to hold out: lower --least-bytes, or give --text a folder of long files."
        )
    return chosen


def lines_of(document: Document) -> set[int]:
    """Hashes of its lines, as equal in this process alone."""
    lines = (line.strip() for line in document.path.read_bytes().splitlines())
    return {hash(line) for line in lines if len(line) >= LINE_CHARS}


def unknown(held_out: list[Document], training: list[Document]) -> list[Document]:
    """Of the documents held out those that training has not, by their lines."""
    known: set[int] = set()
    for document in training:
        known |= lines_of(document)
    kept = []
    for document in held_out:
        lines = lines_of(document)
        if len(lines & known) <= KNOWN_LINES * len(lines):
            kept.append(document)
    return kept


def facts(chosen: list[Document]) -> dict[str, Any]:
    """Files, bytes, and one digest of all contents."""
    digest = hashlib.sha256("\n".join(document.sha256 for document in chosen).encode())
    return {
        "files": len(chosen),
        "bytes": sum(document.n_bytes for document in chosen),
        "sha256": digest.hexdigest(),
    }


def gather(
    files: Iterable[tuple[str, Path]], folder: Path, least_bytes: int, most_bytes: int
) -> dict[str, Any]:
    """Copies training documents, up to `most_bytes` of them, and those held out, to folders of `folder`.

    Returns the manifest: facts of both, the packages held out, what was found. It is written last: a folder
    that has one is complete and is returned as it is. Of processes that share a study one gathers, and the
    others wait for it."""
    manifest = folder / "manifest.json"
    if not manifest.is_file():
        with locked(folder):
            if not manifest.is_file():
                write_atomically(manifest, [_gathered(files, folder, least_bytes, most_bytes)])
    return json.loads(manifest.read_text(encoding="utf-8"))


def _gathered(files: Iterable[tuple[str, Path]], folder: Path, least_bytes: int, most_bytes: int) -> bytes:
    """Copies the documents; the manifest."""
    found = documents(files, least_bytes)
    groups = held_out_groups(found, HELD_OUT)
    aside = [document for document in found if document.group in set(groups)]
    rest, n_bytes = [], 0
    for document in found:
        if document.group not in set(groups) and n_bytes < most_bytes:
            rest.append(document)
            n_bytes += document.n_bytes
    kept = unknown(aside, rest)
    if not kept:
        raise UserError(
            f"all {len(aside)} held-out documents mostly repeat the training text: give another --text."
        )
    for name, chosen in (("training", rest), ("held_out", kept)):
        shutil.rmtree(folder / name, ignore_errors=True)
        (folder / name).mkdir(parents=True)
        with ThreadPoolExecutor(THREADS) as pool:
            copied = [(document.path, folder / name / f"{document.sha256[:16]}.txt") for document in chosen]
            list(pool.map(lambda paths: shutil.copyfile(*paths), copied))
    result = {
        "found": facts(found) | {"packages": len({document.group for document in found})},
        "training": facts(rest),
        "held_out": facts(kept) | {"packages": groups, "repeats_left_out": len(aside) - len(kept)},
        "least_bytes": least_bytes,
    }
    return json.dumps(result, indent=1).encode()
