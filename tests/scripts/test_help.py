"""Every command says what it does at once: before torch, which takes seconds, is imported."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.running import ROOT

INNER = ("ladder",)  # programs that other commands start
COMMANDS = [
    path
    for path in (
        ROOT / "train.py",
        *sorted((ROOT / "scripts").glob("*.py")),
        *(ROOT / "scripts/studies").glob("*.py"),
    )
    if '__name__ == "__main__"' in path.read_text(encoding="utf-8") and path.stem not in INNER
]
CODE = """
import runpy, sys
sys.argv = [sys.argv[1], "--help"]
try:
    runpy.run_path(sys.argv[0], run_name="__main__")
except SystemExit as stop:
    assert not stop.code, stop.code
assert not {"torch", "lightning", "matplotlib"} & set(sys.modules)
"""


@pytest.mark.parametrize("path", COMMANDS, ids=lambda path: path.stem)
def test_help_comes_before_anything_heavy(path: Path) -> None:
    command = [sys.executable, "-c", CODE, str(path)]
    ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    assert path.name in ran.stdout and not ran.stderr


def test_a_program_of_another_command_names_it() -> None:
    ran = subprocess.run([sys.executable, "scripts/ladder.py"], cwd=ROOT, capture_output=True, text=True)
    assert ran.returncode == 1 and ran.stderr.startswith("scripts/roofline.py runs this")
