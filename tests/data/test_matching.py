"""Pairs of excerpts: where they are from, how far apart, how many of each kind."""

import random

import pytest

from data.corpora import TextCorpus
from data.matching import Matching

FILES, LENGTH = 26, 60  # 26 files, each of its own letter and with digits that say where


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    root = tmp_path_factory.mktemp("letters")
    for i in range(FILES):
        letter = chr(ord("a") + i)
        (root / f"{letter}.txt").write_text("".join(letter + chr(48 + at) for at in range(LENGTH // 2)))
    (root / "short.txt").write_text("too short")
    return TextCorpus(path=str(root), val_fraction=0.3)


def examples(task, split, n=200):
    return [task.example(random.Random(f"{split} {i}"), split) for i in range(n)]


def letters(excerpt):
    return {chr(byte) for byte in excerpt.tolist() if byte >= 97}


def test_labels_say_whether_the_files_are_the_same(corpus):
    task = Matching(8, gap=4, corpus=corpus)
    seen = {"train": set(), "val": set()}
    for split, found in seen.items():
        drawn = examples(task, split)
        for (a, b), label in drawn:
            assert len(a) == len(b) == 8
            assert len(letters(a)) == len(letters(b)) == 1
            assert (letters(a) == letters(b)) == bool(label)
            found |= letters(a) | letters(b)
            if label:  # the digits count the pairs of bytes: 8 + 4 bytes on
                digits = [next(byte for byte in half.tolist() if byte < 97) for half in (a, b)]
                assert digits[1] - digits[0] == 6
        assert 70 < sum(label for _, label in drawn) < 130
    assert len(seen["train"]) > 10 and len(seen["val"]) > 2
    assert not seen["train"] & seen["val"]


def test_both_excerpts_of_a_pair_are_from_one_distribution_whatever_the_label(corpus):
    """Where a file's second excerpt may begin is no clue."""
    firsts = {label: set() for label in (0, 1)}
    for (_, b), label in examples(Matching(8, gap=4, corpus=corpus), "train", 2000):
        firsts[label].add(min(byte for byte in b.tolist() if byte < 97))
    assert firsts[0] == firsts[1]


def test_short_documents_are_left_out_and_too_few_refused(corpus):
    kept = Matching(8, gap=4, corpus=corpus).documents
    assert sum(map(len, kept.values())) == FILES
    with pytest.raises(ValueError, match="0 of the train documents have the 64 bytes of a pair"):
        Matching(30, gap=4, corpus=corpus).example(random.Random(0), "train")
    with pytest.raises(ValueError, match=r"matching\.excerpt=0"):
        Matching(0)
