"""The benchmarks' command lines, and the names of the files their rows go to."""

import argparse
import sys
from importlib import import_module

import pytest

from scripts.measure import rows
from scripts.measure.machine import ROOT, command, gpu_slug
from scripts.measure.rows import rows_file


@pytest.mark.parametrize(
    ("name", "slug"),
    [
        ("NVIDIA H200", "h200"),
        ("NVIDIA H100 80GB HBM3", "h100-80gb-hbm3"),
        ("NVIDIA A100-SXM4-40GB", "a100-sxm4-40gb"),
        ("NVIDIA GeForce RTX 4090", "geforce-rtx-4090"),
        ("Tesla T4", "tesla-t4"),
        ("AMD Instinct / MI300X", "amd-instinct-mi300x"),
    ],
)
def test_gpu_slug(name, slug):
    assert gpu_slug(name) == slug


@pytest.mark.parametrize(
    ("script", "arguments", "words"),
    [
        ("bench_generate", "--model gptx", ("--model", "'gptx'", "gpt2")),
        ("bench_generate", "--attention foo", ("--attention", "'foo'", "naive")),
        ("bench_generate", "--batch 1 0", ("--batch", "0 is no whole number, at least 1")),
        ("bench_generate", "--new many", ("--new", "many is no whole number")),
        ("bench_train", "--attention foo", ("--attention", "'foo'", "naive")),
        ("bench_train", "--batch -1", ("--batch", "at least 1")),
        ("bench_train", "--batch 0", ("--batch", "at least 1")),
        ("bench_train", "--steps 30", ("--steps 30", "40")),
    ],
)
def test_a_wrong_argument_is_named(script, arguments, words, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", [f"{script}.py", *arguments.split()])
    with pytest.raises(SystemExit) as stop:
        import_module(f"scripts.{script}").arguments()
    err = capsys.readouterr().err
    assert stop.value.code == 2 and all(word in err for word in words), err


def test_what_cannot_be_a_file_of_rows_is_said_before_measuring(tmp_path):
    taken = tmp_path / "taken"
    taken.write_text("")
    assert rows_file(str(tmp_path / "new" / "h200.jsonl")) == tmp_path / "new" / "h200.jsonl"
    assert rows_file(str(taken)) == taken  # rows are appended
    for wrong in (taken / "h200.jsonl", tmp_path):
        with pytest.raises(argparse.ArgumentTypeError, match="is in the way: name a new file"):
            rows_file(str(wrong))


def test_rows_name_no_folder_of_this_machine(tmp_path, monkeypatch):
    script = ROOT / "scripts" / "bench_attention.py"
    monkeypatch.syspath_prepend(script.parent)  # as Python does for a script
    monkeypatch.setattr(sys, "argv", [str(script), "--causal", "--out", str(tmp_path), "--fresh", "--out=x"])
    assert command().split()[1:] == ["scripts/bench_attention.py", "--causal", "--fresh"]
    monkeypatch.setattr(sys, "argv", [f"{ROOT}/scripts/study.py numerics", "--fresh"])
    assert command().split()[1:] == ["scripts/study.py", "numerics", "--fresh"]
    monkeypatch.syspath_prepend(tmp_path / "site")
    result = {
        "status": "unsupported",
        "reason": f"{tmp_path}/site/library/kernels.so is missing",
        "ms": [1.5],
    }
    row = rows.append(tmp_path / "rows.jsonl", {"study": "x"}, result)
    assert row["result"] == result | {"reason": "library/kernels.so is missing"}
