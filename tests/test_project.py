"""What stands beside the code agrees with it: licence, citation, contributing, the workflow."""

from __future__ import annotations

import re

import pytest
import yaml

from tests import conftest
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


class Item:
    """What conftest.py asks of a collected test."""

    def __init__(self, nodeid: str, *marks: pytest.MarkDecorator):
        self.nodeid, self.marks = nodeid, {mark.name: mark.mark for mark in marks}

    def get_closest_marker(self, name: str) -> pytest.Mark | None:
        return self.marks.get(name)

    def add_marker(self, mark: pytest.MarkDecorator) -> None:
        self.marks[mark.name] = mark.mark


def test_a_sample_of_each_test_stays_in_make_test() -> None:
    one_in_3 = pytest.mark.sampled(3)
    names = [f"a.py::test_of_ten[{number}]" for number in range(10)] + [
        "a.py::test_of_one",
        "b.py::test_of_two[0]",
    ]
    items = [Item(name, one_in_3) for name in names]
    others = [Item("a.py::test_of_ten[cuda]", one_in_3, pytest.mark.gpu), Item("b.py::test_of_two[1]")]
    conftest._leave_a_sample([*items, *others])
    kept = [item.nodeid for item in items if "long" not in item.marks]
    assert len(kept) == 4 + 1 + 1 and kept[-2:] == names[-2:]
    assert all("long" not in item.marks for item in others)
    again = [Item(name, one_in_3) for name in reversed(names)]
    conftest._leave_a_sample(again)
    assert {item.nodeid for item in again if "long" not in item.marks} == set(kept)
