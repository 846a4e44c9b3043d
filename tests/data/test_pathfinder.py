"""Pathfinder: what a picture holds, and that neither distance nor the number of pixels gives the label."""

from __future__ import annotations

import numpy as np
import pytest

from conf.values import UserError
from data.examples import SPECIAL, draw
from data.pathfinder import Pathfinder

COUNT = 400


@pytest.fixture(scope="module")
def drawn():
    """(pictures (N, 32, 32), labels (N,)), the positions of the dots' centres (N, 2, 2)."""
    found = draw(Pathfinder(), "train", COUNT, 1025)
    assert found.vocab_size == 3 + SPECIAL and (found.lengths == 1025).all()
    pictures = found.tokens[:, 0, 1:].reshape(-1, 32, 32).astype(int) - SPECIAL
    centres = []
    for picture in pictures:  # the first dot is the one whose pixel comes first
        rows, columns = np.nonzero(picture == 2)
        far = (rows - rows[0]) ** 2 + (columns - columns[0]) ** 2 > 8  # beyond a dot of 3 x 3
        centres.append([(rows[at].mean(), columns[at].mean()) for at in (~far, far)] if far.any() else None)
    return pictures, found.labels, centres


def test_pictures_have_two_dots_and_dashes(drawn):
    pictures, labels, centres = drawn
    assert set(np.unique(pictures)) == {0, 1, 2}
    assert all(9 <= (picture == 2).sum() <= 18 for picture in pictures)
    assert 0.42 < labels.mean() < 0.58
    assert sum(each is None for each in centres) < COUNT / 20  # dots that touch


@pytest.mark.parametrize("what", ["distance", "ink"])
def test_what_needs_no_path_does_not_give_the_label(drawn, what):
    pictures, labels, centres = drawn
    kept = [i for i, each in enumerate(centres) if each is not None]
    ink = [(pictures[i] == 1).sum() for i in kept]
    distance = [np.hypot(*np.subtract(*centres[i])) for i in kept]
    by, mine = np.asarray(distance if what == "distance" else ink, dtype=float), labels[kept]
    best = max(max((mine == (by > cut)).mean(), (mine == (by <= cut)).mean()) for cut in np.unique(by))
    assert best < 0.62  # of 400 examples the best of some dozens of cuts reaches 0.56 by chance


def test_the_same_example_for_the_same_seed_and_others_for_another():
    tasks = [
        draw(Pathfinder(20, 2), split, 8, 401, seed=seed)
        for split, seed in (("train", 0), ("train", 0), ("val", 0))
    ]
    assert (tasks[0].tokens == tasks[1].tokens).all() and not (tasks[0].tokens == tasks[2].tokens).all()
    with pytest.raises(UserError, match=r"pathfinder\.size"):
        Pathfinder(8)
