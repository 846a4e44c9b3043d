"""The command line of sweeps: mistakes are named before anything runs, and help is instant."""

from __future__ import annotations

import subprocess
import sys

import pytest

from scripts import sweep
from tests.scripts.studies import TINY


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["experiment=quickstart"], ["experiment=quickstart", "seqlen_scaling_tiny"]),
        ([], ["experiment=... has to be given: choose one of", "seqlen_scaling_tiny"]),
        ([*TINY, "attention=naive"], ["attention=naive", "sweep.grid.attention=[...]"]),
        ([*TINY, "data.batch_size=3"], ["data.batch_size=3", "sweep.micro_tokens"]),
        ([*TINY, "sweep.grid.seq_len=[48]"], ["sweep.micro_tokens=128", "seq_len=48"]),
        ([*TINY, "sweep.grid.seq_len=[0]"], ["seq_len=0: it needs to be a whole number, at least 1"]),
        ([*TINY, "data.seq_len=8"], ["data.seq_len=8 beside seq_len=", "leave data.seq_len out"]),
        ([*TINY, "sweep.grid.attention=[]"], ["sweep.grid.attention", "--nanogpt"]),
        ([*TINY, "sweep.grid.seq_len=[]"], ["the grid has no points", "sweep.grid"]),
        (
            [*TINY, "sweep.grid.seq_len=[16]", "--plot-only"],
            ["x.jsonl has no rows: measure first, without --plot-only"],
        ),
        ([*TINY, "--nanogpt=nowhere.py"], ["nanogpt=nowhere.py", "no such file"]),
        ([*TINY, "--peer=megatron"], ["megatron", "transformers_eager"]),
        ([*TINY, "--together=0"], ["--together", "at least 1"]),
        ([*TINY, "sweep.grid.attention=[foo]"], ["foo"]),
    ],
    ids=str,
)
def test_mistakes_are_named(arguments, words, monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(sys, "argv", ["sweep.py", *arguments, f"--out={tmp_path / 'x.jsonl'}"])
    with pytest.raises(SystemExit) as stop:
        sweep.main()
    err = capsys.readouterr().err
    assert stop.value.code in (1, 2) and all(word in err for word in words), err
    assert not (tmp_path / "x.jsonl").exists()


@pytest.mark.parametrize("script", ["sweep", "measure.instruments.training_point"])
def test_help_imports_nothing_heavy(script):
    watch = (
        "import runpy, sys\n"
        f"sys.argv = ['{script}.py', '--help']\n"
        f"try: runpy.run_module('scripts.{script}', run_name='__main__')\n"
        "except SystemExit as stop: assert not stop.code\n"
        "assert not {'torch', 'lightning', 'hydra', 'matplotlib'} & sys.modules.keys()"
    )
    done = subprocess.run([sys.executable, "-c", watch], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "key=value" in done.stdout
