import bz2
import glob
import gzip
import io
import lzma
import os
import shutil
import socket
import tarfile
import zipfile
from pathlib import Path

import pytest

from data import textfiles
from data.corpora import StdlibCorpus, SyntheticCorpus, TextCorpus, hash_split
from data.files import matches
from data.prepare import folder_of, prepare
from data.storage import load_meta
from tests.data.conftest import write_folder


def documents(corpus) -> dict[str, dict[str, str]]:
    """{split: {document: text}}, put together from the pieces."""
    found: dict[str, dict[str, str]] = {"train": {}, "val": {}}
    for piece in corpus.pieces():
        side = found[piece.split]
        side[piece.document] = side.get(piece.document, "") + piece.text
    return found


def test_stdlib_is_python_source_split_by_file():
    corpus = StdlibCorpus()
    found = documents(corpus)
    names = set(found["train"]) | set(found["val"])
    assert {"ast.py", "json/decoder.py", "asyncio/tasks.py"} <= names
    assert not any(part in StdlibCorpus.LEFT_OUT for name in names for part in name.split("/")[:-1])
    assert not set(found["train"]) & set(found["val"])
    assert 0.05 < len(found["val"]) / len(names) < 0.15
    assert "def loads(" in (found["train"] | found["val"])["json/__init__.py"]
    assert corpus.describe() == StdlibCorpus().describe()
    assert corpus.describe()["files"] == len(names)


def test_a_folder_is_split_by_file_and_read_whole(folder):
    found = documents(TextCorpus(path=str(folder)))
    assert len(found["train"]) + len(found["val"]) == 30 and 1 <= len(found["val"]) <= 8
    for name, text in (found["train"] | found["val"]).items():
        assert text == (folder / name).read_text(encoding="utf-8")


@pytest.mark.parametrize("n_files", [1, 9])
def test_few_files_are_each_cut_at_nine_tenths(tmp_path, n_files):
    texts = {f"{i}.txt": "αβγδε fghij\n" * (50 + i) for i in range(n_files)}
    for name, text in texts.items():
        (tmp_path / name).write_text(text, encoding="utf-8")
    found = documents(TextCorpus(path=str(tmp_path)))
    for name, text in texts.items():
        cut = int(0.9 * len(text))
        assert found["train"][name] == text[:cut]
        assert found["val"][name] == text[cut:]


def test_a_long_document_comes_in_parts_that_lose_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(textfiles, "PART_CHARS", 100)
    text = ("\r\n".join("λ" * (i % 37) + "x" * (i % 3) for i in range(300)) + "\ufefflast") * 2
    path = tmp_path / "a.txt"
    path.write_bytes(b"\xef\xbb\xbf" + text.encode())  # a byte order mark, Windows line ends
    plain = text.replace("\r\n", "\n")
    pieces = list(TextCorpus(path=str(path)).pieces())
    cut = int(len(plain) * 0.9)
    assert "".join(p.text for p in pieces if p.split == "train") == plain[:cut]
    assert "".join(p.text for p in pieces if p.split == "val") == plain[cut:]
    assert len(pieces) > 20
    assert [p.ends for p in pieces if p.split == "train"].count(True) == 1 and pieces[-1].ends


def test_globs_patterns_and_hidden_files(folder):
    (folder / "sub").mkdir()
    (folder / "sub" / "b.md").write_text("# b")
    (folder / ".hidden.md").write_text("no")
    assert list(TextCorpus(path=str(folder), pattern="**/*.md").files) == ["sub/b.md"]
    assert len(TextCorpus(path=f"{folder}/**/*.txt").files) == 30
    assert len(TextCorpus(path=f"{folder}/00*.txt").files) == 10


def test_a_hidden_file_that_is_named_is_read(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "h" / ".hid").mkdir(parents=True)
    for name in (".book.txt", "h/.hid/a.txt", "h/b.txt"):
        (tmp_path / name).write_text("text")
    for path, found in (
        (".book.txt", [".book.txt"]),
        ("h/.hid/*.txt", ["a.txt"]),
        ("h/.hid", ["a.txt"]),
        ("h", ["b.txt"]),
        (".", ["h/b.txt"]),
    ):
        assert list(TextCorpus(path=path).files) == found


def test_a_glob_means_what_globs_mean(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("a/b/c/x.txt", "a/b/y.txt", "a/.h/x.txt", "a/[b]/x.txt", "x.txt", ".x.txt", "d/b/x.md"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    patterns = [
        "**/*.txt",
        "**",
        "a/**",
        "*/**/x.*",
        "**/b/**/*.txt",
        "**/**/*",
        "a/**/../*",
        "[ad]/*/*",
        "./**/x.txt",
    ]
    for pattern in [*patterns, f"{tmp_path}/**/*.txt", "nowhere/**/*", "a/[[]b]/*", "x.txt/**"]:
        expected = {str(Path(p)) for p in glob.glob(pattern, recursive=True) if os.path.isfile(p)}
        found = {str(Path(p)) for p in matches(pattern) if os.path.isfile(p)}
        assert {os.path.normpath(p) for p in found} == {os.path.normpath(p) for p in expected}, pattern


def test_each_file_is_read_once_whatever_leads_to_it(tmp_path):
    """Two loops: a glob that goes round them has 2^40 paths to each file."""
    root, outside = write_folder(tmp_path / "root", n_files=3), write_folder(tmp_path / "outside", n_files=1)
    (root / "sub").mkdir()
    for link, target in (("a", "."), ("sub/b", ".."), ("far", outside), ("00.txt", "002.txt")):
        (root / link).symlink_to(target)
    os.link(root / "001.txt", root / "sub" / "hard.txt")
    own = ["000.txt", "001.txt", "002.txt"]
    assert list(TextCorpus(path=str(root)).files) == own
    for pattern in ("**/*.txt", "sub/../**/*.txt", "sub/b/**/*.txt"):
        corpus = TextCorpus(path=f"{root}/{pattern}")
        assert list(corpus.files) == [*own, "far/000.txt"], pattern
        assert corpus.size() == sum(
            path.stat().st_size for path in (*root.glob("0*.txt"), outside / "000.txt")
        ) - len((root / "002.txt").read_bytes())


def test_a_name_that_is_not_utf8_is_read(folder, tmp_path, monkeypatch):
    (folder / os.fsdecode(b"caf\xe9.txt")).write_text("bonjour " * 20)
    corpus = TextCorpus(path=str(folder))
    assert "caf\udce9.txt" in {piece.document for piece in corpus.pieces()}
    monkeypatch.setattr("data.prepare.NAMES_LISTED", 0)
    val = hash_split(list(corpus.files), 0.1) | {"caf\udce9.txt"}
    monkeypatch.setattr("data.corpora.hash_split", lambda *_: val)
    assert len(load_meta(prepare(corpus, "byte", tmp_path, workers=1, quiet=True))["val_documents"]) == 64


def test_the_same_files_elsewhere_are_the_same_corpus(folder, tmp_path):
    before = [TextCorpus(path=f"{folder}{rest}").describe() for rest in ("", "/**/*.txt", "/00*.txt")]
    moved = shutil.move(folder, tmp_path / "elsewhere")
    assert before == [TextCorpus(path=f"{moved}{rest}").describe() for rest in ("", "/**/*.txt", "/00*.txt")]
    assert before[0] == before[1] != before[2]


def make_socket(path):
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(path))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (os.mkfifo, "is a pipe"),
        (make_socket, "is a socket"),
        (lambda path: path.symlink_to("/dev/zero"), "is a character device"),
        (lambda path: path.symlink_to("gone"), "is a symbolic link that leads nowhere"),
        (lambda path: path.symlink_to(path.name), "is a symbolic link that leads nowhere"),
    ],
)
def test_what_is_no_file_is_named_and_never_opened(tmp_path, monkeypatch, make, message):
    monkeypatch.chdir(tmp_path)
    make(Path("it"))
    with pytest.raises(ValueError, match=rf"data\.path=it {message}: give a file with text"):
        TextCorpus(path="it").describe()
    Path("a.txt").write_text("text")
    assert list(TextCorpus(path="*").files) == list(TextCorpus(path=".", pattern="*").files) == ["a.txt"]


def packed(kind: str) -> bytes:
    stream, text = io.BytesIO(), "Call me Ishmael. Some years ago, never mind how long. " * 20
    if kind == "zip":
        with zipfile.ZipFile(stream, "w") as archive:
            archive.write(__file__)
        return stream.getvalue()
    if kind == "tar":
        with tarfile.open(fileobj=stream, mode="w") as archive:
            archive.add(__file__)
        return stream.getvalue()
    if kind.startswith("utf"):
        return text.encode(kind)
    return {"gzip": gzip, "bzip2": bz2, "xz": lzma}[kind].compress(text.encode())


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("utf-16", "it is UTF-16: convert it, as by iconv -f UTF-16 -t UTF-8"),
        ("utf-16-le", "it is UTF-16 without a byte order mark: .*UTF-16LE"),
        ("utf-16-be", "it is UTF-16 without a byte order mark: .*UTF-16BE"),
        ("utf-32", "it is UTF-32: convert"),
        ("gzip", "it is compressed by gzip: unpack it, as by gunzip -k"),
        ("bzip2", "compressed by bzip2"),
        ("xz", "compressed by xz"),
        ("zip", "a zip archive"),
        ("tar", "a tar archive: .*give the folder"),
    ],
)
def test_text_that_is_packed_or_encoded_otherwise_is_named(tmp_path, kind, message):
    (tmp_path / "book.txt").write_bytes(packed(kind))
    with pytest.raises(ValueError, match=rf"book\.txt cannot be read as text: .*{message}"):
        list(TextCorpus(path=str(tmp_path / "book.txt")).pieces())


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "no such file or folder"),
        (b"", "is empty"),
        (b"abc\0def", "NUL bytes"),
        ("näh".encode("latin-1") * 9, "not UTF-8"),
        ("cut short é".encode()[:-1], "not UTF-8"),
    ],
)
def test_files_that_are_no_text_are_refused(tmp_path, content, message):
    path = tmp_path / "a.txt"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ValueError, match=message) as caught:
        list(TextCorpus(path=str(path)).pieces())
    assert str(path) in str(caught.value)


def test_a_folder_without_matching_text_says_what_there_is(tmp_path):
    (tmp_path / "a.py").write_text("pass")
    with pytest.raises(ValueError, match=r"1 \.py.*data\.pattern='\*\*/\*\.py'"):
        TextCorpus(path=str(tmp_path)).describe()
    with pytest.raises(ValueError, match=r"data=text data\.path"):
        TextCorpus().describe()


def test_bad_encoding_is_skipped_and_counted_where_asked(folder):
    (folder / "bad.txt").write_bytes(b"\xff\xfe\xfa")
    (folder / "binary.txt").write_bytes(b"\0\0")
    with pytest.raises(ValueError, match=r"bad\.txt.*on_bad_encoding=skip"):
        list(TextCorpus(path=str(folder)).pieces())
    corpus = TextCorpus(path=str(folder), on_bad_encoding="skip")
    assert len({piece.document for piece in corpus.pieces()}) == 30
    assert corpus.skipped == ["bad.txt", "binary.txt"]
    only = TextCorpus(path=str(folder / "bad.txt"), on_bad_encoding="skip")
    with pytest.raises(ValueError, match="none of the 1 files"):
        list(only.pieces())


@pytest.mark.parametrize(
    "options", [{"on_bad_encoding": "ignore"}, {"val_fraction": 0.0}, {"val_fraction": 1.0}]
)
def test_options_out_of_range(options):
    with pytest.raises(ValueError, match=next(iter(options))):
        TextCorpus(path="x", **options)


def test_hash_split_always_leaves_both_sides_something():
    names = [f"n{i}" for i in range(2000)]
    val = hash_split(names, 0.1)
    assert 140 < len(val) < 260
    assert val == hash_split(names[::-1], 0.1)
    assert val & set(names[:50]) == hash_split(names[:50], 0.1)  # a file keeps its side when others come
    for few in (names[:2], names[:3]):
        for fraction in (1e-9, 1 - 1e-9):
            assert 0 < len(hash_split(few, fraction)) < len(few)


def test_the_key_follows_content_options_and_tokenizer(folder):
    def key(spec="byte", **options):
        return folder_of(TextCorpus(path=str(folder), **options), spec, "d")[0].name

    keys = [key(), key("char"), key(val_fraction=0.2), key({"kind": "bpe", "vocab_size": 300}), key("bpe")]
    assert key() == keys[0] and keys[0].startswith("text-byte-")
    path = folder / "007.txt"
    path.write_text(path.read_text(encoding="utf-8").swapcase(), encoding="utf-8")  # same size
    assert len({*keys, key()}) == 6


def test_a_large_file_is_recognised_without_reading_it_all(tmp_path, monkeypatch):
    monkeypatch.setattr(textfiles, "HASHED_WHOLE", 1 << 20)
    path = tmp_path / "big.txt"
    path.write_bytes(b"x" * (3 << 20))
    before = textfiles.content_hash(path)
    assert before == textfiles.content_hash(path) and before.startswith("ends:")
    with path.open("ab") as file:
        file.write(b"y")
    assert textfiles.content_hash(path) != before


def test_synthetic_tokens_are_reproducible_and_in_range():
    corpus = SyntheticCorpus(vocab_size=70_000, n_tokens=5000, seed=3, document_length=400)
    tokens, ends = corpus.tokens("train")
    assert tokens.dtype == "uint32" and len(tokens) == 5000 and 60_000 < tokens.max() < 70_000
    assert ends.tolist() == [*range(400, 5000, 400), 5000]
    assert (tokens == SyntheticCorpus(70_000, 5000, 3).tokens("train")[0]).all()
    assert len(corpus.tokens("val")[0]) == 500 and (tokens[:500] != corpus.tokens("val")[0]).any()
    assert SyntheticCorpus(n_tokens=100).tokens("train")[0].dtype == "uint16"
    with pytest.raises(ValueError, match="vocab_size=1"):
        SyntheticCorpus(vocab_size=1)
