"""What measures each folder of results/, what it takes, and one command for all of it."""

from __future__ import annotations

import re
import sys
from types import ModuleType, SimpleNamespace

import pytest

from conf.values import UserError
from scripts import study
from scripts.measure import runner
from scripts.measure.measurements import Measurement, command_of, measurement, measurements
from scripts.measure.rows import read
from tests.running import ROOT


def test_every_folder_of_results_has_a_command_and_a_time():
    found = measurements()
    assert {path.name for path in (ROOT / "results").iterdir() if path.is_dir()} <= found.keys()
    for name, each in found.items():
        assert each.gpu_s >= 0  # 0: a CPU measures it
        assert each.commands[0] == command_of(name)
        for command in each.commands:
            assert (ROOT / command.split()[1]).is_file()


def test_all_takes_no_options(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["study.py", "all", "--fresh"])
    with pytest.raises(SystemExit, match="all --fresh: all takes no options; leave them out"):
        study.main()


def test_the_list_of_studies_has_a_line_for_each(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["study.py", "--help"])
    study.main()
    listed = capsys.readouterr().out.splitlines()
    assert len(listed) > 25 and max(map(len, listed)) < 200


@pytest.mark.parametrize(
    ("gpu_s", "estimated", "said"),
    [(0, False, "no GPU"), (85, False, "85 s of one H200"), (780, True, "about 13 min of one H200")],
)
def test_a_time_is_said_with_its_unit(gpu_s, estimated, said):
    assert Measurement((), gpu_s, estimated).takes == said


def test_the_document_has_the_same_times():
    rows = re.findall(r"^\| (`.*?`) \| (.*?) \|", (ROOT / "docs" / "studies.md").read_text(), re.M)
    told = {}
    for names, times in rows[1:]:
        unit = 60 if "min" in times else 1
        seconds = [unit * int(number) for number in re.findall(r"\d+", times)]
        told |= dict(zip(re.findall(r"`(\w+)`", names), seconds, strict=True))
    assert told.pop("fp8_error") and len(told) > 15  # a study of one's own needs no row
    assert told.items() <= {name: each.gpu_s for name, each in measurements().items()}.items()


def test_all_runs_every_command_and_names_those_that_failed(monkeypatch, capsys):
    ran = []

    def run(words, cwd):
        ran.append(" ".join(["python", *words[1:]]))
        return SimpleNamespace(returncode="parity" in ran[-1])

    monkeypatch.setattr(study.subprocess, "run", run)
    monkeypatch.setattr(runner, "rows_path", lambda name: ROOT / "results" / name / "h200.jsonl")
    monkeypatch.setattr(sys, "argv", ["scripts/study.py", "all"])
    with pytest.raises(SystemExit, match=r"these failed:\npython scripts/parity.py$"):
        study.main()
    every = [command for each in measurements().values() for command in each.commands]
    assert ran == [command.replace("<gpu>", "h200") for command in every] and len(ran) > 20
    said = capsys.readouterr().out
    assert "numerics, 33 s of one H200: python scripts/study.py numerics\nnumerics: 0 s" in said
    assert "parity: failed after 0 s" in said


def test_what_nothing_measures_is_refused():
    with pytest.raises(ModuleNotFoundError):
        measurement("probe")


def test_the_study_to_copy_is_one(tmp_path, monkeypatch, capsys):
    """The file of docs/adding-a-study.md, as it stands there."""
    text = (ROOT / "docs" / "adding-a-study.md").read_text(encoding="utf-8")
    path, code = re.search(r"^```python\n# (\S+)\n(.*?)^```", text, flags=re.DOTALL | re.MULTILINE).groups()
    module = ModuleType(path.removesuffix(".py").replace("/", "."))
    exec(compile(code, path, "exec"), vars(module))
    module.LENGTHS = (8, 16)
    monkeypatch.setattr(sys, "argv", ["study.py", "--out", str(tmp_path / "cpu.jsonl")])
    module.main()
    said = capsys.readouterr().out
    assert "mask_cost: 8 points" in said and "[8/8" in said and re.search(r"^sdpa +16 ", said, re.M)
    assert len(list(read(tmp_path / "cpu.jsonl"))) == 8 and "naive" in (tmp_path / "cpu.svg").read_text()
    monkeypatch.setattr("importlib.import_module", lambda name: module)
    assert measurement("mask_cost") == Measurement(("python scripts/study.py mask_cost",), 5, True)
    del module.GPU_S
    with pytest.raises(UserError, match=r"studies\.mask_cost has no GPU_S: its seconds on"):
        measurement("mask_cost")
