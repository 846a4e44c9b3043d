import json
import re
import time
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from conf.values import UserError
from data import hub
from data.tokenizer_export import tokenizer_files
from data.tokenizer_file import JSONTokenizer, read_file
from data.tokenizers import BPETokenizer, ByteTokenizer, CharTokenizer, tokenizer_from_dict, tokenizer_spec
from tests.data.conftest import some_text

TEXT = some_text(0, 4000)
BPE = BPETokenizer.train([TEXT], 300)


def test_char_is_one_id_per_code_point_in_order():
    tokenizer = CharTokenizer("hello, wörld λ🙂")
    assert tokenizer.vocab_size == len(set("hello, wörld λ🙂")) and tokenizer.eot is None
    assert tokenizer.chars == "".join(sorted(set("hello, wörld λ🙂")))
    assert tokenizer.encode("h🙂") == [tokenizer.chars.index("h"), tokenizer.chars.index("🙂")]
    assert tokenizer.decode(tokenizer.encode("world λ")) == "world λ"


def test_char_names_what_it_does_not_know():
    """Also as the tokenizer.json that it is exported to."""
    exported = JSONTokenizer(tokenizer_files(CharTokenizer("abc"), 8)["tokenizer.json"])
    encoders = CharTokenizer("abc").encode, exported.encode, exported.encode_special
    for encode in encoders:
        with pytest.raises(ValueError, match=r"does not know 'X', 'é'.*only the 3 characters"):
            encode("aXbéX")
    assert CharTokenizer("abc").encode("") == exported.encode("") == []


@settings(max_examples=60, deadline=None)
@given(text=st.text(st.characters(codec="utf-8"), max_size=60))
def test_byte_and_bpe_take_any_text_and_give_it_back(text):
    for tokenizer in (ByteTokenizer(), BPE):
        ids = tokenizer.encode(text)
        assert tokenizer.decode(ids) == text
        assert all(0 <= i < tokenizer.vocab_size and i != tokenizer.eot for i in ids)


def test_byte_ids_are_utf8_and_256_ends_a_document():
    tokenizer = ByteTokenizer()
    assert (tokenizer.vocab_size, tokenizer.eot) == (257, 256)
    assert tokenizer.encode("aé") == [97, 0xC3, 0xA9]
    assert tokenizer.decode([97, 0xC3, 256, 0xA9, 98]) == "a\ufffd<|endoftext|>\ufffdb"


def test_bpe_compresses_and_keeps_its_last_id_for_the_end():
    assert BPE.vocab_size == 300 and BPE.eot == 299
    assert len(BPE.encode(TEXT)) < 0.5 * len(TEXT.encode())
    ids = BPE.encode("a<|endoftext|>b")
    assert BPE.eot not in ids and BPE.decode([*ids, BPE.eot]) == "a<|endoftext|>b<|endoftext|>"
    assert BPE.decode([BPE.encode("é")[0], 9999]) in ("\ufffd", "é")


def test_bpe_training_is_deterministic():
    assert BPETokenizer.train([TEXT], 300).to_dict() == BPE.to_dict()


@pytest.mark.parametrize("text", ["ACGT" * 2000, "a " + "x" * 1000 + " b", " " * 3500 + "y", TEXT, ""])
def test_bpe_is_never_trained_on_a_word_of_any_length(monkeypatch, text):
    """64,000 letters without a space took the library 40 s."""
    seen = []

    class Library:
        def train_from_iterator(self, texts, trainer):
            seen.extend(texts)

        def get_vocab_size(self):
            return 299

    monkeypatch.setattr(BPETokenizer, "_library", Library)
    BPETokenizer.train([text], 300)
    assert "".join(seen) == text and (text is not TEXT or seen == [TEXT])
    assert all(len(word) <= 1000 for part in seen for word in re.findall(r"\S+|\s+", part))


def test_a_tokenizer_survives_json():
    for tokenizer in (BPE, ByteTokenizer(), CharTokenizer(TEXT)):
        again = tokenizer_from_dict(json.loads(json.dumps(tokenizer.to_dict())))
        assert type(again) is type(tokenizer) and again.to_dict() == tokenizer.to_dict()
        assert (again.name, again.vocab_size, again.eot) == (
            tokenizer.name,
            tokenizer.vocab_size,
            tokenizer.eot,
        )
        np.testing.assert_array_equal(again.encode_array(TEXT), tokenizer.encode_array(TEXT))
    with pytest.raises(ValueError, match="'sentencepiece'"):
        tokenizer_from_dict({"kind": "sentencepiece"})


def test_specs_keep_what_matters_and_refuse_the_rest():
    assert tokenizer_spec("byte") == {"kind": "byte"}
    # `data.tokenizer.kind=char` leaves the options of bpe behind
    assert tokenizer_spec({"kind": "char", "vocab_size": 2048, "sample_mb": 16}) == {"kind": "char"}
    assert tokenizer_spec({"kind": "bpe"}) == {"kind": "bpe", "vocab_size": 2048, "sample_mb": 16}
    for bad, message in [
        ({"kind": "word"}, "'word'; it has to be one of char, byte, bpe, gpt2"),
        ({"kind": "bpe", "vocabulary": 9}, "no option vocabulary"),
        ({"kind": "bpe", "vocab_size": 100}, "=100: it needs to be a whole number, at least 258"),
        ({"kind": "bpe", "sample_mb": 0}, "sample_mb=0"),
        ({}, "kind is None"),
    ]:
        with pytest.raises(ValueError, match=message):
            tokenizer_spec(bad)


def test_gpt2_without_a_network_answers_soon_and_says_what_else_there_is(tmp_path, monkeypatch):
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(hub, "_GPT2_FILES", ["http://127.0.0.1:9/vocab.bpe"])
    start = time.monotonic()
    with pytest.raises(ValueError, match=r"one-time download.*data\.tokenizer\.kind=bpe, byte or char"):
        tokenizer_from_dict({"kind": "gpt2"})
    assert time.monotonic() - start < 10


def test_gpt2_saves_only_its_name(monkeypatch):
    class Encoding:
        def encode_ordinary(self, text):
            return [ord(char) for char in text]

        def decode(self, ids, errors):
            return "".join(map(chr, ids))

    monkeypatch.setattr(hub, "load_gpt2_encoding", Encoding)
    tokenizer = tokenizer_from_dict({"kind": "gpt2"})
    assert tokenizer.to_dict() == {"kind": "gpt2"}
    assert (tokenizer.vocab_size, tokenizer.eot) == (50257, 50256)
    assert tokenizer.decode([*tokenizer.encode("ab"), 50256, 99]) == "ab<|endoftext|>c"


@pytest.mark.parametrize(
    ("saved", "words"),
    [
        ({"kind": "bpe"}, "a saved bpe tokenizer is damaged"),
        ({"vocab": {"a": 5}, "merges": []}, "ids of its vocabulary are not 0, 1, 2"),
        ({"vocab": "vocab.json", "merges": "merges.txt"}, "no mapping"),  # the library would open these files
        ({"vocab": {"a": 0}, "merges": [["a", "b"]]}, "not of two tokens of its vocabulary"),
        ({"vocab": {"a": 0}, "merges": 5}, "damaged"),
        ({"kind": "char", "chars": ["a"]}, "at least one character"),
        ({"kind": ["byte"]}, "has kind"),
    ],
)
def test_a_saved_tokenizer_that_is_none(saved: dict, words: str) -> None:
    if "kind" not in saved:
        saved = {"kind": "bpe", "tokenizer": {"model": saved}}
    with pytest.raises(ValueError, match=words):
        tokenizer_from_dict(saved)


def test_of_a_saved_bpe_only_vocabulary_and_merges_are_read() -> None:
    tokenizer = BPETokenizer.train(["a text that is trained on, a text"], 270)
    saved = tokenizer.to_dict()
    saved["tokenizer"]["normalizer"] = {"type": "Replace", "pattern": {"Regex": "t"}, "content": "x"}
    saved["tokenizer"]["model"]["dropout"] = 0.9
    assert tokenizer_from_dict(saved).to_dict() == tokenizer.to_dict()


_FILE: dict[str, Any] = {
    **dict.fromkeys(("truncation", "padding", "normalizer", "pre_tokenizer", "post_processor", "decoder")),
    "version": "1.0",
    "added_tokens": [],
    "model": {"type": "WordLevel", "vocab": {"a": 0, "b": 1}, "unk_token": "a"},
}


@pytest.mark.parametrize(
    "change",
    [
        {"pre_tokenizer": {"type": "FixedLength", "length": 0}},  # a panic, which is no Exception
        {"decoder": {"type": "Strip", "content": "a", "start": 9, "stop": 9}},
        {"model": {"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "none"}},
        {"normalizer": {"type": "Precompiled", "precompiled_charsmap": "AAAA"}},
    ],
    ids=lambda change: next(iter(change)),
)
def test_a_file_that_the_library_cannot_do_with_is_said_to_be_damaged(change: dict[str, Any]) -> None:
    with pytest.raises(UserError, match=r"its tokenizer.json is damaged \("):
        tokenizer = JSONTokenizer(json.dumps(_FILE | change))
        tokenizer.decode(tokenizer.encode("q"))
    assert JSONTokenizer(json.dumps(_FILE)).encode("b") == [1]


def test_a_file_is_the_one_that_is_named(tmp_path) -> None:
    """Also beside another tokenizer.json, and where there is none."""
    for name, words in (("tokenizer.json", "ab"), ("large.json", "abc")):
        model = {"type": "WordLevel", "vocab": {word: i for i, word in enumerate(words)}, "unk_token": "a"}
        special = {"id": 0, "content": "a", "special": True}
        flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
        text = json.dumps(_FILE | {"model": model, "added_tokens": [special | flags]})
        (tmp_path / name).write_text(text)
        (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "a"}')
    for _ in range(2):
        assert tokenizer_from_dict(read_file(str(tmp_path / "large.json"))).vocab_size == 3
        (tmp_path / "tokenizer.json").unlink(missing_ok=True)
