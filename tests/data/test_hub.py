import re
import socket
import sys
import time
import types
from contextlib import nullcontext

import numpy as np
import pytest

from conf.values import UserError
from data import hub
from data import prepare as module
from data.hub import HubCorpus
from data.prepare import prepare
from data.storage import Unfinished, load_meta
from tests.data.conftest import some_text

STORIES = [some_text(i, 40) for i in range(400)]


@pytest.fixture
def dataset(monkeypatch):
    """A dataset with splits of its own; counts the rows that were read."""
    read = []
    splits = {"train": STORIES[:380], "validation": STORIES[380:390], "test": STORIES[390:], "none": []}

    def stream(dataset, config, revision, split):
        for text in splits[split]:
            read.append(split)
            yield {"text": text}

    monkeypatch.setattr(hub, "_stream", stream)
    monkeypatch.setattr(hub, "_reach", lambda url: None)
    return read


def sides(corpus):
    pieces = list(corpus.pieces())
    return tuple([piece.text for piece in pieces if piece.split == side] for side in ("train", "val"))


def test_the_dataset_s_own_validation_split_is_used(dataset):
    corpus = HubCorpus("stories", "a/b", val=["validation", "test"])
    assert sides(corpus) == (STORIES[:380], STORIES[380:])
    assert "own: validation+test" in corpus.split_rule


def test_else_a_hash_of_the_text_decides(dataset):
    train, val = sides(HubCorpus("stories", "a/b", val_fraction=0.1))
    assert sorted(train + val) == sorted(STORIES[:380]) and 20 <= len(val) <= 60
    assert not set(train) & set(val)


def test_limits(dataset, tmp_path, monkeypatch):
    assert [len(side) for side in sides(HubCorpus("s", "a/b", val=["test"], max_documents=7))] == [7, 7]
    monkeypatch.setattr(module, "CHUNK_CHARS", (1000, 1000))
    dataset.clear()
    counts = []
    for workers in (1, 2):
        corpus = HubCorpus("s", "a/b", val=["test"], max_tokens=5000)
        meta = load_meta(prepare(corpus, "byte", tmp_path / str(workers), workers=workers, quiet=True))
        counts.append(meta["splits"]["train"])
        assert 5000 <= meta["splits"]["train"]["tokens"] < 6500
        assert meta["splits"]["val"]["documents"] == 10
    assert counts[0] == counts[1]
    assert dataset.count("train") < 200  # the rest of the stream was never read
    for key in ("max_documents", "max_tokens"):
        with pytest.raises(ValueError, match=f"{key}=0"):
            HubCorpus("s", "a/b", **{key: 0})


def test_the_cuts_of_one_text_join_again_by_character(dataset, tmp_path):
    prepared = prepare(HubCorpus("s", "a/b", val=["validation", "test"]), "char", tmp_path, quiet=True)
    meta = load_meta(prepared)
    chars = np.array(list(meta["tokenizer_state"]["chars"]))
    val = np.fromfile(prepared / "val.bin", dtype="<u2")
    assert "".join(chars[val]) == "".join(STORIES[380:])


@pytest.mark.parametrize(
    ("options", "advice"),
    [
        ({"max_documents": 20}, ", or raise data.corpus.max_documents or data.corpus.val_fraction"),
        ({}, ", or raise data.corpus.val_fraction"),
        ({"val": ["none"]}, ""),
    ],
)
def test_a_validation_split_too_small_is_refused(dataset, tmp_path, options, advice):
    corpus = HubCorpus("s", "a/b", val_fraction=1e-9, **options)
    words = rf"val split of s has 0 tokens and needs 2 or more: give more text{re.escape(advice)}$"
    with pytest.raises(ValueError, match=words):
        prepare(corpus, "byte", tmp_path, quiet=True)


def test_a_stream_that_breaks_says_how_to_go_on(monkeypatch):
    def stream(*_):
        yield {"text": "a"}
        raise ConnectionResetError("peer went away")

    monkeypatch.setattr(hub, "_stream", stream)
    monkeypatch.setattr(hub, "_reach", lambda url: None)
    with pytest.raises(ValueError, match=r"ConnectionResetError: peer went away\. Run again to continue"):
        list(HubCorpus("s", "a/b").pieces())


@pytest.mark.parametrize("gone", ["the Hub", "gpt2's files"])
def test_without_the_network_finished_shards_are_kept(monkeypatch, tmp_path, gone):
    def stream(*_):
        yield from ({"text": text} for text in STORIES)
        raise ConnectionResetError("peer went away")

    monkeypatch.setattr(hub, "_stream", stream)
    monkeypatch.setattr(hub, "_reach", lambda url: None)
    monkeypatch.setattr(module, "CHUNK_CHARS", (1000, 1000))
    corpus = HubCorpus("s", "a/b")
    with pytest.raises(Unfinished, match="peer went away"):
        prepare(corpus, "byte", tmp_path, workers=1, quiet=True)
    shards = sorted(tmp_path.rglob("shards/*.json"))
    assert len(shards) > 10
    monkeypatch.setattr(hub, "_reach", lambda url: "no route to host")
    if gone == "gpt2's files":
        monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(tmp_path / "empty"))
        monkeypatch.setattr(module, "tokenizer_from_dict", lambda saved: hub.load_gpt2_encoding())
    with pytest.raises(Unfinished, match="no route to host"):
        prepare(corpus, "byte", tmp_path, workers=1, quiet=True)
    assert sorted(tmp_path.rglob("shards/*.json")) == shards


def test_load_dataset_is_asked_for_a_stream(monkeypatch):
    asked = {}

    def load_dataset(*args, **kwargs):
        asked.update(args=args, **kwargs)
        return []

    monkeypatch.setitem(sys.modules, "datasets", types.SimpleNamespace(load_dataset=load_dataset))
    monkeypatch.setattr(hub, "_reach", lambda url: None)
    assert list(HubCorpus("s", "a/b", config="c", revision="r").pieces()) == []
    assert asked == {"args": ("a/b", "c"), "revision": "r", "split": "train", "streaming": True}


def test_a_column_that_is_not_there_is_no_broken_stream(dataset):
    with pytest.raises(
        UserError, match=r"data\.corpus\.column=txt: a/b \(test\) has .* it has text$"
    ) as caught:
        list(HubCorpus("s", "a/b", column="txt", val=["test"]).pieces())
    assert not isinstance(caught.value, Unfinished)


@pytest.mark.parametrize("why", ["refused", "silent", "offline", "no such name"])
def test_without_the_hub_the_answer_comes_soon_and_names_the_choices(monkeypatch, tmp_path, why):
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        if why == "silent":
            server.listen()
            monkeypatch.setattr(hub, "PROBE_TIMEOUT_S", 0.3)
        endpoint = f"http://127.0.0.1:{server.getsockname()[1]}"
        if why == "no such name":
            endpoint = "https://hub.invalid"
        if why == "offline":
            monkeypatch.setenv("HF_HUB_OFFLINE", "1")
        monkeypatch.setenv("HF_ENDPOINT", endpoint)
        start = time.monotonic()
        with pytest.raises(ValueError, match=r"cannot be reached.*data=stdlib, or data=text data\.path="):
            prepare(HubCorpus("tinystories", "a/b"), "byte", tmp_path, quiet=True)
        assert time.monotonic() - start < hub.PROBE_TIMEOUT_S + 1


@pytest.mark.parametrize(("value", "offline"), [("0", False), ("false", False), ("", False), ("true", True)])
def test_offline_is_what_hugging_face_takes_for_it(monkeypatch, value, offline):
    monkeypatch.setattr(hub, "_reach", lambda url: None)
    monkeypatch.setenv("HF_HUB_OFFLINE", value)
    with pytest.raises(Unfinished, match="HF_HUB_OFFLINE is set") if offline else nullcontext():
        HubCorpus("tinystories", "a/b")._check_network()


def test_a_name_that_is_looked_up_for_ever_is_given_up(monkeypatch):
    monkeypatch.setattr(hub, "PROBE_TIMEOUT_S", 0.1)
    monkeypatch.setattr(hub.urllib.request, "urlopen", lambda *_, **__: time.sleep(3) or socket.socket())
    start = time.monotonic()
    assert hub._reach("https://example.invalid") == "no answer within 0.1 s"
    assert time.monotonic() - start < 1


def test_any_answer_of_a_server_counts_as_reached(monkeypatch):
    def answer(request, timeout):
        raise hub.urllib.error.HTTPError(request.full_url, 403, "no", {}, None)

    monkeypatch.setattr(hub.urllib.request, "urlopen", answer)
    assert hub._reach("https://example.invalid") is None
