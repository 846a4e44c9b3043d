"""A full disk, and files that were damaged after their preparation."""

import errno
import json
import os
from pathlib import Path

import pytest

from data import storage
from data.corpora import TextCorpus
from data.prepare import prepare
from data.storage import load_meta
from tests.data.conftest import contents, only

BPE = {"kind": "bpe", "vocab_size": 300}


@pytest.mark.parametrize("fails_at", [1, 20, 60])
def test_a_full_disk_leaves_nothing_half_written(folder, tmp_path, monkeypatch, fails_at, small_chunks):
    corpus, writes = TextCorpus(path=str(folder)), []

    def full(file, block):
        writes.append(1)
        if len(writes) >= fails_at:
            file.write(block[: len(block) // 2])
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        file.write(block)

    with monkeypatch.context() as patch:
        patch.setattr(storage, "_write", full)
        with pytest.raises(ValueError, match=r"disk is full.*No space left.*data\.data_dir"):
            prepare(corpus, BPE, tmp_path / "out", quiet=True)
    cut = only(tmp_path / "out")
    assert not list(cut.rglob("*.tmp")) and not (cut / "meta.json").exists()
    prepare(corpus, BPE, tmp_path / "out", quiet=True)
    whole = prepare(corpus, BPE, tmp_path / "whole", quiet=True)
    assert contents(cut) == contents(whole)


def test_other_errors_of_the_disk_are_not_called_full(folder, tmp_path, monkeypatch):
    def broken(file, block):
        raise OSError(errno.EIO, "broken")

    monkeypatch.setattr(storage, "_write", broken)
    with pytest.raises(OSError, match="broken"):
        prepare(TextCorpus(path=str(folder)), "byte", tmp_path, quiet=True)


def damage_cut(prepared: Path) -> None:
    os.truncate(prepared / "train.bin", 1000)


def damage_alter(prepared: Path) -> None:
    with (prepared / "val.bin").open("r+b") as file:
        file.write(b"\x07")


def damage_missing(prepared: Path) -> None:
    (prepared / "train.docs.bin").unlink()


def damage_meta(prepared: Path) -> None:
    os.truncate(prepared / "meta.json", 100)


def damage_schema(prepared: Path) -> None:
    meta = json.loads((prepared / "meta.json").read_text())
    (prepared / "meta.json").write_text(json.dumps(meta | {"schema": 0}))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (damage_cut, r"train\.bin has 1,000 bytes instead of"),
        (damage_alter, r"val\.bin was altered"),
        (damage_missing, r"train\.docs\.bin is missing"),
        (damage_meta, r"meta\.json is damaged"),
        (damage_schema, "has schema 0"),
    ],
)
def test_damage_is_refused_with_the_remedy(folder, tmp_path, damage, message):
    corpus = TextCorpus(path=str(folder))
    prepared = prepare(corpus, "byte", tmp_path / "out", quiet=True)
    damage(prepared)
    with pytest.raises(ValueError, match=message + r".*delete .*text-byte-\w+ and run again"):
        prepare(corpus, "byte", tmp_path / "out")


def test_large_files_are_hashed_on_demand(folder, tmp_path, monkeypatch):
    prepared = prepare(TextCorpus(path=str(folder)), "byte", tmp_path / "out", quiet=True)
    damage_alter(prepared)
    monkeypatch.setattr(storage, "ALWAYS_HASHED", 10)
    load_meta(prepared)
    with pytest.raises(ValueError, match="was altered"):
        load_meta(prepared, verify=True)
