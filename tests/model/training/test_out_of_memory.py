"""Out of memory in train.py: what was tried, what was predicted, what to lower; no traceback."""

from __future__ import annotations

import weakref
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from attention.registry import shared_instance
from conf.values import UserError
from model.config import GPTConfig
from model.costs.memory import peak
from model.costs.run import Run
from model.training.lit_gpt import LitGPT
from model.training.out_of_memory import is_out_of_memory, out_of_memory_told, remedies
from tests.running import train_here

CUDA = (
    "CUDA out of memory. Tried to allocate 20.00 MiB. GPU 0 has a total capacity of 23.69 GiB of which 5.81 "
    "MiB is free. Including non-PyTorch memory, this process has 23.67 GiB memory in use."
)


@pytest.mark.parametrize(
    ("error", "is_memory"),
    [
        (torch.OutOfMemoryError(CUDA), True),
        (MemoryError(), True),
        (RuntimeError("CUDA driver: CUDA_ERROR_OUT_OF_MEMORY"), True),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"), True),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), False),
    ],
)
def test_what_is_out_of_memory(error: Exception, is_memory: bool) -> None:
    assert is_out_of_memory(error) == is_memory


def test_what_a_command_says_that_predicts_nothing() -> None:
    with (
        pytest.raises(UserError, match=r"^Out of memory \(CUDA .*\): give less\.$"),
        out_of_memory_told("give less"),
    ):
        raise torch.OutOfMemoryError("CUDA has none.\nmore")
    with pytest.raises(RuntimeError, match="shapes"), out_of_memory_told("give less"):
        raise RuntimeError("shapes")


def test_what_to_lower_is_predicted() -> None:
    run = Run(GPTConfig(50304, 2048), 12, shared_instance("naive"), value_bytes=4)
    asked = peak(run).peak
    found = remedies(run, asked // 3, other=shared_instance("auto"))
    batch = "data.batch_size=3 tokens_per_step=24576"
    others = ["attention=auto", "checkpointing=true", "model.loss_chunk=2048", "seq_len=1024"]
    assert list(found) == [batch, *others]
    assert peak(found[batch]).peak <= asked // 3
    assert peak(replace(run, batch=4, accumulates=True)).peak > asked // 3
    assert all(peak(other).peak < 0.95 * asked for other in found.values())
    assert next(iter(remedies(run, capacity=0))).startswith("data.batch_size=1 ")
    assert next(iter(remedies(run, 0, 2**20))) == f"data.batch_size=1 tokens_per_step={2**20}"
    frugal = Run(GPTConfig(64, 1, loss_chunk=1), 1, shared_instance("tiled"), checkpointing=True)
    assert remedies(frugal, capacity=0) == {}


def test_what_a_model_refuses_is_not_proposed() -> None:
    class Unchunked(GPTConfig):
        def __post_init__(self) -> None:
            super().__post_init__()
            if self.loss_chunk:
                raise UserError("model.loss_chunk: not with this option.")

    of = {kind: Run(kind(50304, 2048), 12, shared_instance("naive")) for kind in (GPTConfig, Unchunked)}
    plain, refusing = (set(remedies(run, 0)) for run in of.values())
    assert plain - refusing == {"model.loss_chunk=2048"} and refusing


def test_on_a_gpu(tmp_path: Path) -> None:
    """At a step that has a checkpoint before it."""
    step = LitGPT.training_step

    def full(self: LitGPT, batch: dict, batch_idx: int) -> None:
        if self.global_step == 12:
            raise torch.OutOfMemoryError(CUDA)
        step(self, batch, batch_idx)

    with mock.patch.object(LitGPT, "training_step", full):
        result = train_here(tmp_path, "name=a")
    assert result.code == 1 and "Traceback" not in result.out + result.err
    first, second, *able, last = result.err.partition("error: ")[2].splitlines()
    assert first.startswith("out of memory on CPU, ")
    assert first.endswith("GPU 0 has a total capacity of 23.69 GiB of which 5.81 MiB is free.")
    assert second.startswith(
        "A step of 4 x 16 tokens with attention=naive is predicted to take 0.0 GiB (scripts"
    )
    assert [line.split()[0] for line in able] == ["data.batch_size=2", "checkpointing=true"]
    assert last == "Resume with one of these: python train.py ckpt=a ..."
    lower = ("data.batch_size=2", "tokens_per_step=64")
    assert train_here(tmp_path, "ckpt=a", *lower, tiny=False).code == 0


@pytest.mark.parametrize(
    ("overrides", "rows", "advice"),
    [
        ("data.batch_size=4 data.eval_batch_size=64", 64, ["data.eval_batch_size=4", "attention=auto"]),
        ("data.batch_size=4", 4, ["data.eval_batch_size=2", "attention=auto"]),
        ("data.batch_size=1 data.eval_batch_size=1 attention=sdpa", 1, ["a"]),
    ],
)
def test_while_validating(tmp_path: Path, overrides: str, rows: int, advice: list[str]) -> None:
    def validation_step(self: LitGPT, batch: dict, batch_idx: int) -> None:
        raise torch.OutOfMemoryError(CUDA)

    with mock.patch.object(LitGPT, "validation_step", validation_step):
        result = train_here(tmp_path, "name=a", *overrides.split())
    assert result.code == 1 and "Traceback" not in result.out + result.err
    assert f"That was while validating, {rows} x 16 tokens at once (data.eval_batch_size)" in result.err
    assert "A step of" not in result.err and "data.batch_size=" not in result.err
    assert [line.split()[0] for line in result.err.splitlines() if line.startswith("  ")] == advice


@pytest.mark.long
def test_the_next_job_of_a_sweep_has_all_the_memory(tmp_path: Path) -> None:
    init, step, models, alive = LitGPT.__init__, LitGPT.training_step, [], []

    def watched(self: LitGPT, *args: Any, **kwargs: Any) -> None:
        alive.append([model() is not None for model in models])
        models.append(weakref.ref(self))
        init(self, *args, **kwargs)

    def full(self: LitGPT, batch: dict, batch_idx: int) -> None:
        if len(models) == 1:
            raise torch.OutOfMemoryError(CUDA)
        step(self, batch, batch_idx)

    with mock.patch.object(LitGPT, "__init__", watched), mock.patch.object(LitGPT, "training_step", full):
        result = train_here(tmp_path, "seed=1,2,3", "trainer.max_steps=1", "-m")
    assert result.code == 1 and alive == [[], [False], [False, False]]
    assert [line.split()[-1] for line in result.out.splitlines()[-3:]] == ["failed", "done", "done"]


@pytest.mark.parametrize("tokenizer", ["data.tokenizer=byte", "tokens_per_step=256"])
def test_the_step_stays_what_it_was(tmp_path: Path, tokenizer: str) -> None:
    def full(self: LitGPT, batch: dict, batch_idx: int) -> None:
        raise torch.OutOfMemoryError(CUDA)

    with mock.patch.object(LitGPT, "training_step", full):
        result = train_here(tmp_path, tokenizer)
    assert result.code == 1 and "Traceback" not in result.out + result.err
    step = 256 if "256" in tokenizer else 64
    assert f"data.batch_size=2 tokens_per_step={step}" in result.err


def test_on_the_host(tmp_path: Path) -> None:
    with mock.patch("model.gpt.GPT", lambda *args, **kwargs: torch.empty(2**48)):
        result = train_here(tmp_path, "name=a")
    assert result.code == 1 and "Traceback" not in result.out + result.err
    assert "out of memory on CPU, " in result.err
    assert "GiB: can't allocate memory: you tried to allocate 1125899906842624 bytes" in result.err
    assert not list((tmp_path / "runs").iterdir())
