"""What stands beside the code agrees with it: licence, citation, contributing, the workflow."""

from __future__ import annotations

import re

import yaml

from tests.compilers import PROJECT
from tests.running import ROOT

CONTRIBUTING = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")


def test_licence_and_version_are_the_same_everywhere() -> None:
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    licence = (ROOT / "LICENSE").read_text(encoding="utf-8")
    assert licence.startswith("MIT License\n") and PROJECT["license"] == citation["license"] == "MIT"
    assert (ROOT / PROJECT["license-files"][0]).is_file()
    authors = PROJECT["authors"][0]["name"]
    assert f" {authors}\n" in licence and citation["authors"] == [{"name": authors}]
    newest = re.search(r"^## (\S+),", (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), re.MULTILINE)[1]
    assert newest == citation["version"] == PROJECT["version"]


def test_the_workflow_runs_the_two_commands() -> None:
    workflow = yaml.safe_load((ROOT / ".github/workflows/tests.yml").read_text(encoding="utf-8"))
    (job,) = workflow["jobs"].values()
    commands = [step["run"] for step in job["steps"] if "run" in step]
    assert [command.split()[:2] for command in commands[-3:]] == [
        ["make", "train"],
        ["make", "test"],
        ["make", "test-long"],
    ]
    lowest = PROJECT["requires-python"].removeprefix(">=")
    assert job["strategy"]["matrix"]["python"][0] == lowest


def test_contributing_names_what_is_there() -> None:
    paths = set(re.findall(r"`((?:[\w.-]+/)+[\w.-]*)`", CONTRIBUTING))
    assert len(paths) > 15 and not {path for path in paths if not (ROOT / path).exists()}
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    named = set(re.findall(r"make ([a-z-]+)", CONTRIBUTING))
    assert {"test", "test-all", "lint", "test-gpu", "test-slow", "test-mistakes"} <= named <= targets
