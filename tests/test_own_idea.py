"""docs/own-idea.md: its changes fit the sources, and in a copy of the project its commands pass."""

from __future__ import annotations

import os
import re
import shlex
import shutil
from pathlib import Path

import pytest

from tests.forks import Forks
from tests.running import ROOT

PAGE = (ROOT / "docs" / "own-idea.md").read_text(encoding="utf-8")
STEPS = PAGE.split("\n## ")[1:5]
FOLDERS = ("attention", "conf", "data", "model", "ops", "scripts", "tests")


def changes(step: str) -> list[tuple[str, str, str]]:
    """(file, old text, new text) of a step."""
    found = []
    for block in re.findall(r"^```diff\n(.*?)^```", step, flags=re.DOTALL | re.MULTILINE):
        for part in re.split(r"^(?=# )", block, flags=re.MULTILINE)[1:]:
            head, _, body = part.partition("\n")
            for hunk in body.split("@@\n"):
                lines = hunk.splitlines(keepends=True)
                old, new = ("".join(x[1:] for x in lines if x[0] in kept) for kept in (" -", " +"))
                found.append((head.removeprefix("# "), old, new))
    return found


def commands(step: str) -> list[list[str]]:
    blocks = re.findall(r"^```(\w*)\n(.*?)^```", step, flags=re.DOTALL | re.MULTILINE)
    return [shlex.split(line)[1:] for kind, block in blocks if not kind for line in block.splitlines()]


def test_the_changes_fit() -> None:
    every = [change for step in STEPS for change in changes(step)]
    assert len(every) == 13 and all(len(commands(step)) == 1 for step in STEPS)
    for file, old, new in every:
        assert (ROOT / file).read_text(encoding="utf-8").count(old) == 1 and old != new, (file, old)


def passes(python: Forks, place: Path, command: list[str]) -> bool:
    done = python(place, *command, "-x", "-q", "-p", "no:cacheprovider", "-m", "not gpu and not long")
    assert done.returncode in (0, 1), done.stdout[-3000:]  # others: no test, or none that could run
    return done.returncode == 0


@pytest.mark.long
def test_each_step_passes_its_tests(tmp_path: Path) -> None:
    """And none before its own change."""
    for folder in FOLDERS:
        shutil.copytree(ROOT / folder, tmp_path / folder, ignore=shutil.ignore_patterns("__pycache__"))
    for file in ("train.py", "pyproject.toml"):
        shutil.copy(ROOT / file, tmp_path)
    clean = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    no_gpu = {"CUDA_VISIBLE_DEVICES": "", "TRITON_INTERPRET": "1"}  # before triton is imported
    with Forks(clean | {"TILEGPT_COMMIT": "copy"} | no_gpu) as python:
        for step in STEPS:
            (command,) = commands(step)
            assert passes(python, tmp_path, command) == (step == STEPS[0]), "as the specification is so far"
            for file, old, new in changes(step):
                text = (tmp_path / file).read_text(encoding="utf-8")
                (tmp_path / file).write_text(text.replace(old, new), encoding="utf-8")
            assert passes(python, tmp_path, command), command
