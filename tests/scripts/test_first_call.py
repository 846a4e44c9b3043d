"""The command that times the first call of the CUDA kernels."""

from __future__ import annotations

import subprocess
import sys
from unittest import mock

import pytest
import torch

from scripts.first_call import main
from tests.running import ROOT


def test_it_needs_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(sys, "argv", ["first_call.py"])
    with pytest.raises(SystemExit, match="needs a CUDA GPU"):
        main()


def test_help_waits_for_nothing_and_a_wrong_name_is_said(capsys: pytest.CaptureFixture) -> None:
    code = "import sys; sys.argv = ['first_call.py', '--help']; from scripts.first_call import main\n"
    code += "try: main()\nfinally: print('torch' in sys.modules)"
    said = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout
    assert said.startswith("usage: first_call.py") and said.endswith("False\n")
    with mock.patch.object(sys, "argv", ["first_call.py", "--attention", "tiled"]), pytest.raises(SystemExit):
        main()
    assert "--attention tiled: choose of cuda_plain, " in capsys.readouterr().err


@pytest.mark.gpu
def test_every_kernel_is_compiled_and_then_loaded() -> None:
    command = [sys.executable, "scripts/first_call.py", "--attention", "cuda_naive", "--head-dim", "64"]
    said = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    names = [line.split()[0] for line in said.splitlines() if line.startswith("tilegpt_")]
    assert names == ["tilegpt_naive_scores", "tilegpt_naive_softmax", "tilegpt_naive_output"]
    assert "look-up and launch" in said
