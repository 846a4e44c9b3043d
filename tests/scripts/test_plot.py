"""Curves of runs: what is drawn, and what is refused in one message."""

import sys

import pytest

from scripts.plot import main

ROWS = "step,train/loss,val/loss\n1,5.0,\n2,4.0,4.5\n3,3.5,\n"


@pytest.fixture
def plot(tmp_path, monkeypatch):
    def plot(metrics: str, out: str = "loss.svg", run: str = "a", place: str = ".", title: str = "") -> str:
        (tmp_path / "a").mkdir(exist_ok=True)
        (tmp_path / "a" / "metrics.csv").write_text(metrics)
        monkeypatch.chdir(tmp_path / place)
        monkeypatch.setattr(sys, "argv", ["plot.py", run, "--out", out, "--title", title])
        main()
        return (tmp_path / place / out).read_text()

    return plot


@pytest.mark.parametrize(("run", "place"), [("a", "."), ("a/metrics.csv", "."), (".", "a"), ("../a", "a")])
def test_a_run_is_labelled_on_two_lines(plot, run, place):
    svg = plot(ROWS, run=run, place=place)
    assert "<!-- a -->" in svg and "<!-- best 4.5000 -->" in svg


def test_a_title_is_no_formula(plot):
    assert r"<!-- $\no of $5 -->" in plot(ROWS, title=r"$\no of $5")


def test_a_run_that_has_diverged_has_its_best_before(plot):
    svg = plot(ROWS + "4,nan,nan\n")
    assert "<!-- best 4.5000 -->" in svg and plot(ROWS + "4,nan,nan\n5,3.0,3.9\n").count("<!-- best 3.9") == 1


@pytest.mark.parametrize(
    ("metrics", "out", "words"),
    [
        ("step,train/loss,val/loss\n1,5.0,\n", "loss.svg", "a has no validation loss yet"),
        ("", "loss.svg", "a has no validation loss yet"),
        (ROWS.replace("4.5", "nan"), "loss.svg", "a has no finite validation loss"),
        (ROWS, "x.abc", r"--out x\.abc: .*\.pdf.*\.svg"),
        (ROWS, "x", "--out x: "),
        (ROWS.replace("4.5", "high"), "loss.svg", "cannot be read as a run's metrics"),
        (ROWS, "a/metrics.csv/x.svg", "cannot be written"),
    ],
)
def test_mistakes_are_one_message(plot, metrics, out, words):
    with pytest.raises(SystemExit, match=words) as stop:
        plot(metrics, out)
    assert isinstance(stop.value.code, str)  # goes to stderr, exit code 1
