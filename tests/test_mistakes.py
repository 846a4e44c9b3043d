"""The list of planted mistakes fits the code, and the command tells what is noticed from what is not."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest

from tests import mistakes
from tests.mistakes import Mistake
from tests.running import ROOT


@pytest.mark.parametrize("mistake", mistakes.mistakes(), ids=lambda mistake: mistake.name)
def test_each_is_there_once(mistake: Mistake, tmp_path: Path) -> None:
    copy = tmp_path / mistake.file
    copy.parent.mkdir(parents=True)
    copy.write_text(text := (ROOT / mistake.file).read_text(encoding="utf-8"), encoding="utf-8")
    with mistake.planted(tmp_path):
        assert copy.read_text(encoding="utf-8") != text
    assert copy.read_text(encoding="utf-8") == text
    files = [word for word in shlex.split(mistake.tests) if word.endswith(".py")]
    assert files and all((ROOT / file).is_file() for file in files)


def test_a_text_that_is_not_there_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("x = 1\nx = 1\n")
    for old, times in (("x = 1", 2), ("y", 0)):
        with (
            pytest.raises(ValueError, match=f"has '{old}' {times} times"),
            Mistake("m", "a.py", old, "", "", "").planted(tmp_path),
        ):
            pass


@pytest.mark.long
def test_what_is_noticed_and_what_is_not(tmp_path: Path, capfd: pytest.CaptureFixture, monkeypatch) -> None:
    noticed, unnoticed = (mistake.name for mistake in mistakes.mistakes()[:2])
    text = mistakes.LIST.read_text(encoding="utf-8")
    listed = [f"[{part}" for part in text.split("\n[")[1:3]]
    (tmp_path / "list.toml").write_text("\n".join([listed[0], listed[1].split("tests =")[0]]) + QUIET)
    monkeypatch.setattr(mistakes, "LIST", tmp_path / "list.toml")
    assert mistakes.main(["--jobs", "1", "--only", noticed, unnoticed]) == 1
    said = capfd.readouterr().out
    assert "1 of 2 mistakes are caught, 1 of them by make test." in said
    assert (
        f"s  {noticed}: " in said.split("NOT CAUGHT")[0]
        and f"s  {unnoticed}: " in said.split("NOT CAUGHT")[1]
    )


QUIET = 'tests = "tests/test_project.py"\n'
