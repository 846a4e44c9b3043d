"""Learning rates: their values at the corners."""

from __future__ import annotations

import pytest

from model.training.schedules import constant, cosine, warmup_stable_decay


def test_warmup_is_linear_and_never_zero() -> None:
    for schedule in (
        lambda s: cosine(s, 100, warmup_steps=4, min_factor=0.1),
        lambda s: warmup_stable_decay(s, 100, warmup_steps=4, decay_fraction=0.2, min_factor=0.0),
        lambda s: constant(s, 100, warmup_steps=4),
    ):
        assert [schedule(s) for s in range(5)] == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0])


def test_cosine() -> None:
    def factor(step: int, **changes: int) -> float:
        return cosine(step, 110, **{"warmup_steps": 10, "min_factor": 0.1, **changes})

    assert factor(10) == 1.0
    assert factor(60) == pytest.approx(0.55)  # half way
    assert factor(35) == pytest.approx(0.1 + 0.9 * 0.5 * (1 + 0.5**0.5))
    assert factor(110) == pytest.approx(0.1) and factor(500) == pytest.approx(0.1)
    assert factor(30, decay_steps=30) == pytest.approx(0.1)
    assert factor(20, decay_steps=30) == pytest.approx(0.55)
    assert cosine(0, 1, warmup_steps=0, min_factor=0.0) == 1.0
    assert cosine(5, 10, warmup_steps=100, min_factor=0.0) == pytest.approx(6 / 101)  # warm-up beyond the end


def test_warmup_stable_decay() -> None:
    def factor(step: int) -> float:
        return warmup_stable_decay(step, 100, warmup_steps=10, decay_fraction=0.2, min_factor=0.1)

    assert {factor(step) for step in range(10, 81)} == {1.0}
    assert factor(90) == pytest.approx(0.55)
    assert factor(100) == pytest.approx(0.1) and factor(200) == pytest.approx(0.1)


def test_constant() -> None:
    assert constant(0, 10, warmup_steps=0) == 1.0 == constant(10**6, 10, warmup_steps=3)
