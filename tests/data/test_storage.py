"""A full disk, and files that were damaged after their preparation."""

import errno
import json
import os
import re
import shutil
import threading
import time
from pathlib import Path

import pytest

from data import storage
from data.corpora import TextCorpus
from data.prepare import prepare
from data.storage import load_meta, locked
from tests.data.conftest import contents

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
    assert not [
        path for path in (tmp_path / "out").rglob("*") if path.suffix == ".tmp" or path.name == "meta.json"
    ]
    assert len(list((tmp_path / "out").iterdir())) == (fails_at > 1)  # where a shard was finished
    cut = prepare(corpus, BPE, tmp_path / "out", quiet=True)
    whole = prepare(corpus, BPE, tmp_path / "whole", quiet=True)
    assert contents(cut) == contents(whole)


def test_other_errors_of_the_disk_are_not_called_full(folder, tmp_path, monkeypatch):
    def broken(file, block):
        raise OSError(errno.EIO, "broken")

    monkeypatch.setattr(storage, "_write", broken)
    with pytest.raises(OSError, match="broken"):
        prepare(TextCorpus(path=str(folder)), "byte", tmp_path, quiet=True)


@pytest.mark.parametrize("number", [errno.EACCES, errno.EROFS])
def test_a_folder_that_cannot_be_written_comes_with_its_key(folder, tmp_path, monkeypatch, number):
    monkeypatch.chdir(tmp_path)
    make = Path.mkdir

    def refused(path, *args, **kwargs):
        if path.name == "data":
            raise OSError(number, os.strerror(number), str(path))
        make(path, *args, **kwargs)

    monkeypatch.setattr(Path, "mkdir", refused)
    for data_dir, place in (("data/prepared", "data"), (tmp_path / "data", str(tmp_path / "data"))):
        said = f"data.data_dir={data_dir}: {place} cannot be written ({os.strerror(number)}). Choose a folder"
        with pytest.raises(ValueError, match=re.escape(said)):
            prepare(TextCorpus(path=str(folder)), "byte", data_dir, quiet=True)


def test_a_file_where_the_folder_is_to_be(folder, tmp_path):
    (tmp_path / "out").touch()
    for data_dir in (tmp_path / "out", tmp_path / "out" / "deeper"):
        with pytest.raises(
            ValueError, match=r"data\.data_dir=.*out cannot be written \(.*exists\)|Not a dir"
        ):
            prepare(TextCorpus(path=str(folder)), "byte", data_dir, quiet=True)


def test_text_that_may_not_be_read_comes_with_its_key(folder, tmp_path, monkeypatch):
    def refused(path):
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    monkeypatch.setattr("data.corpora.content_hash", refused)
    with pytest.raises(ValueError, match=r"000\.txt cannot be read \(Permission denied\): .*data\.path="):
        prepare(TextCorpus(path=str(folder)), "byte", tmp_path / "out", quiet=True)
    assert not (tmp_path / "out").exists()


def test_whoever_waited_for_one_that_failed_makes_the_folder_anew(tmp_path):
    folder, waited = tmp_path / "a", []

    def wait():
        with locked(folder, quiet=True):
            waited.append((folder / ".lock").exists())

    with locked(folder):
        thread = threading.Thread(target=wait)
        thread.start()
        time.sleep(0.2)
        shutil.rmtree(folder)
        assert not waited
    thread.join(10)
    assert waited == [True]


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
