"""One training point: its figures, and how it fails."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch

from scripts import bench_train, sweep_points, training_meter, training_point
from scripts.kernels import Kernel
from tests.scripts.studies import TINY


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same on every machine."""
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)


def test_nanogpt_is_measured_in_the_process_of_the_point(monkeypatch):
    printed = {
        "ms": [90.0, 80.0, 10.0, 11.0, 12.0],
        "peak_mib": 5.0,
        "kernel_names": ["flash", "gemm", "flash"],
    }
    seen = "import sys\nassert sys.argv[1:] == ['m.py', '64', '1024', '60']\n"
    script = f"{seen}print('RESULT', {json.dumps(printed)!r})"
    monkeypatch.setattr(bench_train, "NANOGPT", script)
    monkeypatch.setattr("torch.cuda.get_device_name", lambda: "NVIDIA H200")
    cfg, _ = sweep_points.composed(["experiment=seqlen_scaling", "data.batch_size=64"])
    result = training_point.nanogpt(Path("m.py"), cfg)
    assert (result["ms_median"], result["n"], result["kernels"]) == (11.0, 3, {"flash": 2, "gemm": 1})
    assert result["tokens_per_s"] == pytest.approx(65536e3 / 11) and "ms" not in result
    flops = 6 * (50304 * 768 + 12 * 12 * 768**2 + 25 * 768) + 12 * 12 * 768 * 1024  # 6 N + 12 L C T
    assert result["mfu"] == pytest.approx(flops * result["tokens_per_s"] / 989e12)
    cfg.data.batch_size = 32
    with pytest.raises(ValueError, match="a step in one micro-batch"):
        training_point.nanogpt(Path("m.py"), cfg)


def result_of(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture, *arguments: str
) -> dict[str, object]:
    """What a training point prints, run in this process."""
    short = ("--warm-up=1", "--steps=3", "--seconds=0")
    monkeypatch.setattr(sys, "argv", ["training_point.py", *TINY, "seq_len=16", *short, *arguments])
    training_point.main()
    line = capsys.readouterr().out.splitlines()[-1]
    assert line.startswith("RESULT ")
    return json.loads(line.removeprefix("RESULT "))


def test_a_point_that_accumulates(monkeypatch, capsys):
    result = result_of(monkeypatch, capsys, "attention=tiled", "data.batch_size=2")
    assert result["status"] == "ok" and result["n"] == 3 and result["warm_up"] == 1
    assert result["tokens_per_s"] == pytest.approx(
        128e3 / result["ms_median"]
    )  # four micro-batches of 2 x 16


@pytest.mark.parametrize(
    ("overrides", "status", "words"),
    [
        (("attention=sdpa_cudnn", "data.batch_size=8"), "unsupported", "cpu"),
        (("attention=naive", "data.batch_size=3"), "error", "tokens_per_step=128"),
        (("attention=naive", "optim.lr=nan"), "error", "optim.lr"),
        (("attention=naive", "trainer.devices=2"), "error", "one device"),
        (("attention=naive", "model.nlayer=2"), "error", "nlayer"),
    ],
)
def test_a_point_that_cannot(monkeypatch, capsys, overrides, status, words):
    result = result_of(monkeypatch, capsys, *overrides)
    assert result["status"] == status and words in result["reason"]


def test_a_point_without_memory(monkeypatch, capsys):
    def build(*_):
        raise RuntimeError(
            "[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes"
        )

    monkeypatch.setattr(training_point, "build", build)
    result = result_of(monkeypatch, capsys, "attention=naive", "data.batch_size=8")
    assert result["status"] == "oom" and "can't allocate memory" in result["reason"]


def test_fused_kernels_are_seen_beside_other_products():
    product = [Kernel("nvjet_sm90_tst", 9, 1.0)]
    flash = Kernel("pytorch_flash::flash_fwd_kernel", 1, 1.0)
    assert training_meter.of_step("sdpa_flash", [*product, flash], None).ok
    assert not training_meter.of_step("sdpa_flash", product, None).ok
    assert training_meter.of_step("naive", product, None).ok
    assert not training_meter.of_step("naive", [*product, flash], None).ok


@pytest.mark.gpu
def test_a_point_on_a_gpu(monkeypatch, capsys):
    """Compiled, in bf16, accumulated: the figures of a GPU are there, and the kernels are those asked for."""
    monkeypatch.undo()
    small = ("data.batch_size=2", "tokens_per_step=512", "seq_len=128", "model.n_head=1", "model.n_embd=64")
    result = result_of(monkeypatch, capsys, *small, "attention=triton")
    assert result["status"] == "ok", result["reason"]
    assert result["kernels_ok"] and any(name.startswith("_tilegpt_") for name in result["kernels"])
    assert result["peak_of"] == "allocated on the GPU" and result["memory_split_error"] <= 0.03
    assert result["peak_mib"] == pytest.approx(result["memory_split"]["peak"], rel=0.1)
    assert result["tokens_per_s"] == pytest.approx(512e3 / result["ms_median"])


def test_a_slow_step_is_neither_profiled_nor_split():
    meter = training_meter.Meter("tiled", "tiled", torch.float32, 1, 3, 1.0, 0.0)
    meter.cuda = True
    found = meter._kernels(None, None, 3.5) | meter._split(None, {}, None, 5.5)
    assert found["kernels"] is None and not found["kernels_ok"] and "3.5 s" in found["verdict"]
    assert found["memory_split"] is None and "too long" in found["memory_split_reason"]
