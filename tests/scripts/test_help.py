"""Every command says what it does at once: before torch, which takes seconds, is imported."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from scripts import evaluate, export, harness
from tests.running import ROOT

COMMANDS = [
    path
    for path in (
        ROOT / "train.py",
        *sorted((ROOT / "scripts").glob("*.py")),
    )
    if '__name__ == "__main__"' in path.read_text(encoding="utf-8")
]
CODE = """
import os, runpy, sys
sys.argv = [*sys.argv[1:], "--help"]
sys.path[0] = os.path.dirname(sys.argv[0])
try:
    runpy.run_path(sys.argv[0], run_name="__main__")
except SystemExit as stop:
    assert not stop.code, stop.code
assert not {"torch", "lightning", "matplotlib"} & set(sys.modules)
"""


STUDIES = [
    (ROOT / "scripts/study.py", path.stem) for path in (ROOT / "scripts/measure/studies").glob("[a-z]*.py")
]


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    "words",
    [*COMMANDS, *STUDIES],
    ids=lambda words: words.stem if isinstance(words, Path) else f"study {words[1]}",
)
def test_help_comes_before_anything_heavy(words: Path | tuple[Path, str]) -> None:
    path, *study = words if isinstance(words, tuple) else (words,)
    command = [sys.executable, "-c", CODE, str(path), *study]
    ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    assert path.name in ran.stdout and not ran.stderr


@pytest.mark.parametrize("command", [evaluate, export, harness], ids=lambda command: command.__name__)
def test_help_names_every_key(command: ModuleType) -> None:
    assert not [key for key in command.KEYS if f"{key}=" not in command.__doc__]


def test_a_program_of_another_command_names_it() -> None:
    ran = subprocess.run(
        [sys.executable, "-m", "scripts.measure.instruments.ladder"], cwd=ROOT, capture_output=True, text=True
    )
    assert ran.returncode == 1 and ran.stderr.startswith("scripts/roofline.py runs this")


def test_a_process_that_a_command_spawns_loads_its_file() -> None:
    """multiprocessing runs it again by path, without scripts/ among the places of imports."""
    again = "import runpy, sys; [runpy.run_path(path, run_name='__mp_main__') for path in sys.argv[1:]]"
    command = [sys.executable, "-c", again, *map(str, COMMANDS)]
    ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
