"""The list of planted mistakes fits the code, and the command tells what is noticed from what is not."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from dataclasses import asdict
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
        changed = copy.read_text(encoding="utf-8")
        assert changed != text
        if copy.suffix == ".py":  # what cannot be read tests nothing
            compile(changed, copy, "exec")
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
def test_what_is_noticed_and_what_is_not(tmp_path: Path) -> None:
    """The same mistake twice: before a test that notices, and before one that reads no code."""
    first = mistakes.mistakes()[0]
    facts = {name: json.dumps(value) for name, value in asdict(first).items() if name != "name"}
    path = tmp_path / "list.toml"
    for name, tests in (("noticed", facts["tests"]), ("unnoticed", '"tests/test_project.py"')):
        with open(path, "a", encoding="utf-8") as file:
            file.writelines([f"[{name}]\n", *(f"{k} = {v}\n" for k, v in (facts | {"tests": tests}).items())])
    command = [sys.executable, "-m", "tests.mistakes", "--list", str(path), "--jobs", "1"]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 1, result.stderr
    noticed, unnoticed = (line.split() for line in result.stdout.splitlines()[:2])
    assert noticed[:2] == ["caught", "by"] and unnoticed[:2] == ["NOT", "CAUGHT"], result.stdout
    assert "1 of 2 mistakes are caught, 1 of them by make test." in result.stdout
