"""Expressions: their values by known answers and by Python, and how they are drawn."""

import random
import statistics
from collections import Counter

import pytest

from data.listops import WORDS, ListOps, parse, value_of

SMALL = ListOps(min_length=5, max_length=120)
PYTHON = {"[MIN": "min([", "[MAX": "max([", "[MED": "median([", "[SM": "digit([", "]": "]),"}


def drawn(task, n, split="train"):
    examples = (task.example(random.Random(f"{split} {i}"), split) for i in range(n))
    return [(tokens, label) for (tokens,), label in examples]


def by_python(tokens):
    """The same by Python's own parser."""
    source = "".join(PYTHON.get(WORDS[token], f"{WORDS[token]},") for token in tokens)
    known = {"median": lambda v: int(statistics.median(v)), "digit": lambda v: sum(v) % 10}
    return eval(source, known)[0]


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("[MAX 2 9 [MIN 4 7 ] 0 ]", 9),
        ("[MIN 4 7 ]", 4),
        ("[SM 9 9 9 ]", 7),
        ("[MED 1 2 ]", 1),  # 1.5, down
        ("[MED 9 1 5 ]", 5),
        ("[SM [MED 8 3 9 ] [MAX 0 [SM 6 6 ] ] ]", 0),
        ("7", 7),
    ],
)
def test_known_answers(text, value):
    assert value_of(parse(text)) == value


def test_values_are_those_of_python():
    examples = drawn(SMALL, 200)
    assert [label for _, label in examples] == [by_python(tokens) for tokens, _ in examples]
    assert max(map(len, (tokens for tokens, _ in examples))) > 60  # nested ones among them


def test_lengths_arguments_and_depth_are_those_asked_for():
    depths, arguments = Counter(), Counter()
    for tokens, _ in drawn(ListOps(min_length=40, max_length=90, max_depth=3, max_args=6), 50):
        assert 40 <= len(tokens) <= 90
        open_lists = []
        for token in tokens:
            if WORDS[token] == "]":
                arguments[open_lists.pop()] += 1
            if open_lists and WORDS[token][0] != "]":
                open_lists[-1] += 1
            if WORDS[token] == "]" and open_lists:
                open_lists[-1] += 1
            if WORDS[token].startswith("["):
                if open_lists:
                    open_lists[-1] -= 1  # counted when it closes
                open_lists.append(0)
                depths[len(open_lists)] += 1
        assert not open_lists
    assert set(arguments) == {2, 3, 4, 5, 6} and set(depths) == {1, 2, 3}


def test_balance_and_the_rules_of_long_range_arena():
    """All four operators at the root alike, all ten values, none of them more than a quarter; three quarters
    of the arguments that could be a list are digits."""
    examples = drawn(ListOps(), 200)
    lengths = [len(tokens) for tokens, _ in examples]
    assert min(lengths) >= 500 and max(lengths) <= 2000 and 900 < statistics.mean(lengths) < 1150
    roots = Counter(WORDS[tokens[0]] for tokens, _ in examples)
    assert set(roots) == {"[MIN", "[MAX", "[MED", "[SM"} and min(roots.values()) > 30
    values = Counter(label for _, label in examples)
    assert set(values) == set(range(10)) and max(values.values()) < 50


def test_splits_and_repetition():
    assert drawn(SMALL, 5) == drawn(SMALL, 5) != drawn(SMALL, 5, "val")


@pytest.mark.parametrize(("key", "value"), [("max_args", 1), ("max_depth", 0), ("max_length", 499)])
def test_what_makes_no_sense_is_refused(key, value):
    with pytest.raises(ValueError, match=rf"listops.{key}={value}"):
        ListOps(**{key: value})
