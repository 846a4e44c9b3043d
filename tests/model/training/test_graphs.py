"""Steps as one CUDA graph: when, and the same bits as without, also resumed."""

from __future__ import annotations

from pathlib import Path
from unittest import mock

import pytest
import torch

from conf.values import UserError
from model.config import GPTConfig
from model.training.graphs import WARM_UP, StepGraph, small, wanted
from tests.running import rows, train_here

CHAR = GPTConfig(vocab_size=65, seq_len=256, n_layer=6, n_head=6, n_embd=384)
GPT2 = GPTConfig(vocab_size=50304)


def test_auto_captures_small_steps_on_one_gpu() -> None:
    cuda, cpu = torch.device("cuda"), torch.device("cpu")
    assert wanted("auto", cuda, 1, CHAR, 64, "auto") and not wanted("auto", cuda, 1, GPT2, 64, "auto")
    assert not wanted("auto", cpu, 1, CHAR, 64, "auto") and not wanted("auto", cuda, 2, CHAR, 64, "auto")
    assert wanted(True, cuda, 1, GPT2, 64, "auto") and not wanted(False, cuda, 1, CHAR, 64, "auto")
    assert wanted("auto", cuda, 1, GPT2, 64, "fp8") and not wanted("auto", cuda, 2, GPT2, 64, "fp8")
    assert small(CHAR, 64) and small(GPT2, 8) and not small(GPT2, 32)  # 1, 7 and 28 TFLOP


@pytest.mark.parametrize(("device", "devices"), [("cpu", 1), ("cuda", 2)])
def test_what_cannot_be_captured_is_refused(device: str, devices: int) -> None:
    with pytest.raises(UserError, match=r"cuda_graphs=true: .* one CUDA device.*cuda_graphs=auto or false"):
        wanted(True, torch.device(device), devices, CHAR, 64, "auto")


@pytest.mark.parametrize(
    ("error", "told"), [(torch.OutOfMemoryError, None), (RuntimeError, "cuda_graphs=false")]
)
def test_memory_that_runs_out_in_a_capture_is_no_refusal(
    error: type[Exception], told: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def step(batch: dict[str, torch.Tensor]) -> torch.Tensor:
        raise error("why")

    for name in ("Stream", "CUDAGraph", "graph"):
        monkeypatch.setattr(torch.cuda, name, mock.MagicMock())
    torch.cuda.graph.return_value.__exit__.return_value = False  # it lets the error pass
    captured = StepGraph(step, mock.MagicMock(param_groups=[]))
    captured.calls = WARM_UP
    with pytest.raises(UserError if told else error, match=told or "why"):
        captured({})


@pytest.mark.gpu
@pytest.mark.parametrize("optim", ["adamw", "muon"])
def test_a_captured_step_computes_the_same_bits_and_resumes(optim: str, tmp_path: Path) -> None:
    """Dropout of both kinds, accumulation, learning rates that change; validation in between."""
    common = ["trainer.accelerator=gpu", "precision=bf16-mixed", "compile=false", "schedule=constant"]
    common += ["model.dropout=0.1", "model.attn_dropout=0.1", "tokens_per_step=128", f"optim={optim}"]
    for name, graphs, steps in (("plain", "false", 20), ("graph", "true", 20), ("half", "true", 10)):
        words = [*common, f"name={name}", f"cuda_graphs={graphs}", f"trainer.max_steps={steps}"]
        result = train_here(tmp_path, *words)
        assert result.code == 0, result.err
    assert WARM_UP < 10 and "a step one CUDA graph" in result.out
    result = train_here(tmp_path, "ckpt=half", "trainer.max_steps=20", tiny=False)
    assert result.code == 0, result.err
    plain, graph, half = (rows(tmp_path / "runs" / name) for name in ("plain", "graph", "half"))
    assert plain == graph == half and len(plain) > 20
