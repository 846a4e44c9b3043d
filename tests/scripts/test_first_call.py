"""The command that times the first call of the CUDA kernels."""

from __future__ import annotations

import subprocess
import sys
from unittest import mock

import pytest
import torch

from attention import registry
from scripts import first_call
from scripts.first_call import main
from tests.running import ROOT


def test_it_needs_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(sys, "argv", ["first_call.py"])
    with pytest.raises(SystemExit, match="needs a CUDA GPU"):
        main()


def test_a_head_dim_is_a_whole_number(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    monkeypatch.setattr(sys, "argv", ["first_call.py", "--head-dim", "0"])
    with pytest.raises(SystemExit):
        main()
    assert "--head-dim: 0 is no whole number, at least 1" in capsys.readouterr().err


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


def test_a_later_call_is_the_fastest_of_many(monkeypatch: pytest.MonkeyPatch) -> None:
    """400 times ten, of which one takes 10 us a call and the others 20, after 50 that do not count."""
    calls: list[bool] = []
    monkeypatch.setattr(registry, "build", lambda name: lambda q, k, v: calls.append(q.requires_grad))

    def clock() -> float:
        return len(calls) * 20e-6 - (1e-4 if len(calls) >= 1060 else 0.0)

    monkeypatch.setattr(first_call.time, "perf_counter", clock)
    assert first_call.call_us("tiled", 64, True, "cpu") == pytest.approx(10.0)
    assert calls == [True] * 4050


@pytest.mark.gpu
def test_every_kernel_is_compiled_and_then_loaded() -> None:
    command = [sys.executable, "scripts/first_call.py", "--attention", "cuda_naive", "--head-dim", "64"]
    said = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    names = [line.split()[0] for line in said.splitlines() if line.startswith("tilegpt_")]
    assert names == ["tilegpt_naive_scores", "tilegpt_naive_softmax", "tilegpt_naive_output"]
    assert "look-up and launch" in said
    (later,) = (line for line in said.splitlines() if line.startswith("cuda_naive"))
    assert 1 < float(later.split()[2]) < 1e4 and later.endswith(" us")
