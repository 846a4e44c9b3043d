import os
import signal
import subprocess
import sys
import time
import weakref
from pathlib import Path

import numpy as np
import pytest

from data import prepare as module
from data import textfiles
from data.corpora import TextCorpus
from data.prepare import prepare
from data.storage import file_sha256, load_meta
from data.tokenizers import tokenizer_from_dict
from tests.data.conftest import contents, only, some_text

BPE = {"kind": "bpe", "vocab_size": 300}

# prepares argv[1] into argv[2] with argv[3] workers, in a dozen shards; each test adds lines
SCRIPT = """
import multiprocessing, os, signal, sys, time
from pathlib import Path
from data import prepare as module, storage
from data.corpora import TextCorpus
module.CHUNK_CHARS = (4000, 4000)
made = []
make = module._make_shard
def make_shard(chunk, stem):
    made.append(stem.name)
    return make(chunk, stem)
{lines}
if __name__ == "__main__":
    folder = module.prepare(TextCorpus(path=sys.argv[1]), {spec}, sys.argv[2], workers=int(sys.argv[3]))
    print("made", len(made), folder.name, flush=True)
"""


def start(texts: Path, out: Path, workers: int = 1, lines: str = "") -> subprocess.Popen:
    script = SCRIPT.format(lines=lines, spec=BPE)
    arguments = [sys.executable, "-c", script, str(texts), str(out), str(workers)]
    root = Path(__file__).parents[2]
    return subprocess.Popen(
        arguments, cwd=root, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=os.environ
    )


@pytest.mark.parametrize("spec", [BPE, "byte", "char"])
def test_the_tokens_are_the_documents_in_order(folder, tmp_path, spec, small_chunks):
    prepared = prepare(TextCorpus(path=str(folder)), spec, tmp_path / "out", quiet=True)
    assert set(contents(prepared)) == {"train.bin", "train.docs.bin", "val.bin", "val.docs.bin", "meta.json"}
    meta = load_meta(prepared, verify=True)
    tokenizer = tokenizer_from_dict(meta["tokenizer_state"])
    seen = {}
    for split, facts in meta["splits"].items():
        tokens = np.fromfile(prepared / f"{split}.bin", dtype=meta["dtype"])
        ends = np.fromfile(prepared / f"{split}.docs.bin", dtype="<i8")
        assert len(tokens) == facts["tokens"] == ends[-1] and len(ends) == facts["documents"]
        documents = [tokenizer.decode(part) for part in np.split(tokens, ends[:-1])]
        if tokenizer.eot is not None:
            assert (tokens[ends - 1] == tokenizer.eot).all() and (tokens == tokenizer.eot).sum() == len(ends)
        seen[split] = [document.removesuffix("<|endoftext|>") for document in documents]
        assert facts["bytes"] == sum(len(text.encode()) for text in seen[split])
    names = sorted(path.name for path in folder.iterdir())
    val = meta["val_documents"]
    assert seen["val"] == [(folder / name).read_text(encoding="utf-8") for name in val]
    assert seen["train"] == [(folder / n).read_text(encoding="utf-8") for n in names if n not in val]


def test_one_file_by_character_is_cut_as_nanogpt_cuts(book, tmp_path):
    prepared = prepare(TextCorpus(path=str(book)), "char", tmp_path / "out", quiet=True)
    meta, text = load_meta(prepared), book.read_text(encoding="utf-8")
    assert meta["splits"]["train"]["tokens"] == int(0.9 * 20_003) == 18_002
    assert meta["splits"]["val"]["tokens"] == 2001
    assert meta["vocab_size"] == len(set(text)) and meta["dtype"] == "<u2" and meta["eot"] is None
    codes = {char: i for i, char in enumerate(sorted(set(text)))}
    expected = np.array([codes[char] for char in text], dtype=np.uint16)
    written = [np.fromfile(prepared / f"{split}.bin", dtype="<u2") for split in ("train", "val")]
    np.testing.assert_array_equal(np.concatenate(written), expected)


def test_a_long_document_ends_once_however_many_parts_it_comes_in(book, tmp_path, monkeypatch):
    monkeypatch.setattr(textfiles, "PART_CHARS", 500)
    monkeypatch.setattr(module, "CHUNK_CHARS", (2000, 2000))
    prepared = prepare(TextCorpus(path=str(book)), "byte", tmp_path / "out", quiet=True)
    text = book.read_text(encoding="utf-8")
    for split, part in (("train", text[:18_002]), ("val", text[18_002:])):
        tokens = np.fromfile(prepared / f"{split}.bin", dtype="<u2")
        assert tokens.tolist() == [*part.encode(), 256]
        assert np.fromfile(prepared / f"{split}.docs.bin", dtype="<i8").tolist() == [len(tokens)]


def test_a_large_vocabulary_is_written_in_32_bits(tmp_path):
    path = tmp_path / "a.txt"
    points = [chr(c) for c in range(0x20, 0x11000) if not 0xD800 <= c < 0xE000]
    path.write_text("".join(points), encoding="utf-8")
    meta = load_meta(prepare(TextCorpus(path=str(path)), "char", tmp_path / "out", quiet=True))
    assert meta["vocab_size"] > 65_536 and meta["dtype"] == "<u4"
    assert meta["splits"]["train"]["files"]["train.bin"]["bytes"] == 4 * meta["splits"]["train"]["tokens"]


def test_where_the_usable_cores_are_not_said_it_is_prepared(folder, tmp_path, monkeypatch):
    monkeypatch.delattr(os, "sched_getaffinity")  # as on macOS
    assert load_meta(prepare(TextCorpus(path=str(folder)), "byte", tmp_path, quiet=True))


def test_the_second_time_nothing_is_done(folder, tmp_path, monkeypatch):
    corpus = TextCorpus(path=str(folder))
    first = prepare(corpus, "byte", tmp_path / "out", quiet=True)
    monkeypatch.setattr(module, "_build", lambda *_: pytest.fail("prepared again"))
    assert prepare(corpus, "byte", tmp_path / "out") == first


def test_what_a_kill_at_the_very_end_left_is_removed(folder, tmp_path, monkeypatch):
    corpus = TextCorpus(path=str(folder))
    monkeypatch.setattr(module, "_remove_parts", lambda folder: None)
    made = prepare(corpus, "byte", tmp_path / "out", quiet=True)
    monkeypatch.undo()
    assert (made / "shards").is_dir() and (made / "tokenizer.json").is_file()
    assert prepare(corpus, "byte", tmp_path / "out", quiet=True) == made
    assert not (made / "shards").exists() and not (made / "tokenizer.json").exists()


def test_bpe_learns_from_the_training_split_and_a_bounded_sample(folder, monkeypatch):
    learnt = []
    train = module.BPETokenizer.train
    monkeypatch.setattr(
        module.BPETokenizer,
        "train",
        lambda texts, size: train(learnt.append(list(texts)) or learnt[-1], size),
    )
    corpus = TextCorpus(path=str(folder))
    module._tokenizer(corpus, {"kind": "bpe", "vocab_size": 300, "sample_mb": 1}, folder)
    (folder / "tokenizer.json").unlink()
    assert learnt[0] == [piece.text for piece in corpus.pieces() if piece.split == "train"]
    module._tokenizer(corpus, {"kind": "bpe", "vocab_size": 300, "sample_mb": 0.02}, folder)
    assert 0.005e6 < sum(map(len, learnt[1])) < 0.03e6


def test_the_characters_are_gathered_piece_by_piece(folder):
    corpus = TextCorpus(path=str(folder))
    alive, most = weakref.WeakSet(), 0
    pieces = corpus.pieces

    def counted():
        nonlocal most
        for piece in pieces():
            alive.add(piece)
            most = max(most, len(alive))
            yield piece

    corpus.pieces = counted
    tokenizer = module._tokenizer(corpus, {"kind": "char"}, folder)
    assert tokenizer.chars == "".join(sorted(set("".join(piece.text for piece in pieces()))))
    assert most <= 2


def test_a_sample_is_spread_over_one_large_file_and_never_empty(tmp_path):
    path = tmp_path / "book.txt"
    path.write_text("".join(f"line {i} of a long book\n" for i in range(120_000)))
    corpus = TextCorpus(path=str(path))
    size = path.stat().st_size
    sample = list(module._sample(corpus, size / 4e6))
    assert 0.15 * size < sum(map(len, sample)) < 0.35 * size
    assert all(0.5 < len(block) / module.SAMPLE_CHARS < 1.5 for block in sample)
    assert sample == list(module._sample(corpus, size / 4e6))
    lines = [int(block.split("line ")[1].split()[0]) for block in sample]
    assert lines[0] < 60_000 < lines[-1]
    (only_block,) = module._sample(corpus, 1e-6)
    assert path.read_text().startswith(only_block) and len(only_block) > module.SAMPLE_CHARS / 2


def test_a_pool_gives_the_same_bytes(folder, tmp_path, small_chunks):
    corpus = TextCorpus(path=str(folder))
    one, two = (prepare(corpus, BPE, tmp_path / str(n), workers=n, quiet=True) for n in (1, 2))
    assert contents(one) == contents(two)


def test_killed_in_the_middle_of_a_write_and_continued(folder, tmp_path):
    dies = """
writes = 0
def _write(file, block, write=storage._write):
    global writes
    writes += 1
    if writes == 30:
        file.write(block[: len(block) // 2]); file.flush()
        os.kill(os.getpid(), signal.SIGKILL)
    write(file, block)
storage._write = _write
"""
    process = start(folder, tmp_path / "out", lines=dies)
    process.communicate(timeout=60)
    assert process.returncode == -signal.SIGKILL
    cut = only(tmp_path / "out")
    finished = len(list((cut / "shards").glob("*.json")))
    assert 3 <= finished <= 9 and not (cut / "meta.json").exists() and list((cut / "shards").glob(".*.tmp"))
    with pytest.raises(ValueError, match="is not prepared"):
        load_meta(cut)

    again = start(folder, tmp_path / "out", lines="module._make_shard = make_shard")
    undisturbed = start(folder, tmp_path / "whole", lines="module._make_shard = make_shard")
    made, made_undisturbed = (int(p.communicate(timeout=60)[0].split()[1]) for p in (again, undisturbed))
    assert made_undisturbed >= 10 and made == made_undisturbed - finished
    assert contents(cut) == contents(only(tmp_path / "whole"))


def test_workers_do_not_outlive_a_killed_parent(folder, tmp_path):
    dies = """
def advance(self, n_bytes):
    print(*[child.pid for child in multiprocessing.active_children()], flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
storage.Progress.advance = advance
"""
    process = start(folder, tmp_path / "out", workers=2, lines=dies)
    children = [int(pid) for pid in process.communicate(timeout=60)[0].split()]
    assert process.returncode == -signal.SIGKILL and len(children) >= 1
    deadline = time.monotonic() + 10
    while any(Path(f"/proc/{pid}/cmdline").exists() and alive(pid) for pid in children):
        assert time.monotonic() < deadline, "workers still run"
        time.sleep(0.05)
    process = start(folder, tmp_path / "out", workers=2)
    assert process.communicate(timeout=60)[1].startswith("prepared ") and process.returncode == 0


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] not in "ZX"
    except OSError:
        return False


def test_two_processes_at_once_prepare_it_once(folder, tmp_path):
    slow = """
def slowly(chunk, stem):
    time.sleep(0.1)
    return make_shard(chunk, stem)
module._make_shard = slowly
"""
    processes = [start(folder, tmp_path / "out", lines=slow) for _ in range(2)]
    results = [process.communicate(timeout=60) for process in processes]
    assert [process.returncode for process in processes] == [0, 0], results
    made = sorted(int(out.split()[1]) for out, _ in results)
    assert made[0] == 0 and made[1] >= 10
    assert sorted("waiting for it" in err for _, err in results) == [False, True]
    assert results[0][0].split()[2] == results[1][0].split()[2] == only(tmp_path / "out").name


def test_the_meta_says_what_went_in(folder, tmp_path, monkeypatch):
    (folder / "bad.txt").write_bytes(b"\xff\xff")
    corpus = TextCorpus(path=str(folder), on_bad_encoding="skip")
    prepared = prepare(corpus, "byte", tmp_path / "out", quiet=True)
    meta = load_meta(prepared)
    assert prepared.name == f"text-byte-{meta['key']}"
    assert meta["source"] == corpus.describe() and meta["tokenizer"] == {"kind": "byte"}
    assert meta["skipped"] == {"count": 1, "first": ["bad.txt"]}
    assert "relative path below 0.1" in meta["split_rule"]
    train = meta["splits"]["train"]["files"]["train.bin"]
    assert train["sha256"] == file_sha256(prepared / "train.bin")
    monkeypatch.setattr(module, "NAMES_LISTED", 5)
    many = load_meta(prepare(corpus, "byte", tmp_path / "other", quiet=True))
    assert len(meta["val_documents"]) == meta["splits"]["val"]["documents"]
    assert isinstance(many["val_documents"], str) and len(many["val_documents"]) == 64


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (
            b"abc",
            r"val split of text has 1 tokens and needs 2 or more: give more text, or raise data\.val_fr",
        ),
        (b"text\n" * 9999 + b"\xff", "a.txt cannot be read"),
    ],
)
def test_what_is_refused_leaves_no_folder(tmp_path, content, message, small_chunks):
    path = tmp_path / "a.txt"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=message):
        prepare(TextCorpus(path=str(path)), "char", tmp_path / "out", quiet=True)
    assert not list((tmp_path / "out").iterdir())


@pytest.mark.parametrize(
    "change",
    [
        lambda path: path.open("a").write("more\n"),
        lambda path: os.truncate(path, 10),
        lambda path: path.write_bytes(b"\xff" * path.stat().st_size),
        lambda path: path.unlink(),
        lambda path: os.replace(path.with_name("000.txt"), path),
    ],
    ids=["grows", "shrinks", "is another", "is gone", "is replaced"],
)
def test_a_file_that_is_written_to_while_it_is_prepared_is_noticed(
    folder, tmp_path, change, small_chunks, monkeypatch
):
    """Between the alphabet and the tokens."""
    corpus, tokenise = TextCorpus(path=str(folder)), module._tokenise

    def changing(*args):
        change(folder / "029.txt")
        return tokenise(*args)

    monkeypatch.setattr(module, "_tokenise", changing)
    with pytest.raises(ValueError, match=r"0(29|00)\.txt was written to while it was prepared: run again"):
        prepare(corpus, "char", tmp_path / "out", quiet=True)
    assert not list((tmp_path / "out").iterdir())


def test_a_worker_that_is_killed_is_reported(tmp_path):
    folder = tmp_path / "texts"
    folder.mkdir()
    for i in range(40):  # chunks enough for some to be left when the first one is done
        (folder / f"{i}.txt").write_text(some_text(i, 300), encoding="utf-8")
    kills = """
def advance(self, n_bytes):
    for child in multiprocessing.active_children():
        child.kill()
        child.join()
storage.Progress.advance = advance
"""
    process = start(folder, tmp_path / "out", workers=2, lines=kills)
    _, err = process.communicate(timeout=60)
    assert "Unfinished: a process that tokenises was killed" in err and "data.prepare_workers=1" in err
