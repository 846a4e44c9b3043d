"""Small texts, made here: the tests need no network and no file from outside."""

import random
from pathlib import Path

import pytest

from data import prepare

TEXT = "if else return yield attention is all you need while for import numpy as np café naïve λ"
WORDS = TEXT.split()


def some_text(seed: int, n_words: int) -> str:
    draw = random.Random(seed)
    return "".join(draw.choice(WORDS) + draw.choice(["\n", " ", " ", "  "]) for _ in range(n_words))


def write_folder(folder: Path, n_files: int = 30, n_words: int = 300) -> Path:
    folder.mkdir(parents=True)
    for i in range(n_files):
        (folder / f"{i:03d}.txt").write_text(some_text(i, n_words), encoding="utf-8")
    return folder


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """30 files of about 1.6 kB."""
    return write_folder(tmp_path / "texts")


@pytest.fixture
def book(tmp_path: Path) -> Path:
    """One file of 20,003 characters."""
    path = tmp_path / "book.txt"
    path.write_text(some_text(99, 6000)[:20_003], encoding="utf-8")
    return path


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.name != ".lock"}


def only(data_dir: Path) -> Path:
    (folder,) = data_dir.iterdir()
    return folder


@pytest.fixture
def small_chunks(monkeypatch):
    monkeypatch.setattr(prepare, "CHUNK_CHARS", (4000, 4000))
