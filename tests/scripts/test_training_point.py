"""One training point: its figures, and how it fails."""

from __future__ import annotations

import json
import sys

import pytest
import torch

from scripts.measure.instruments import training_meter, training_point
from scripts.measure.instruments.kernels import Kernel
from tests.scripts.studies import TINY

pytestmark = pytest.mark.usefixtures("on_a_cpu")


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


@pytest.mark.parametrize("documents", ["false", "true"])
def test_a_compiled_point_splits_its_memory(documents, monkeypatch, capsys):
    """Its attention is measured beside it, on documents only where the batch has some."""
    compile = torch.compile
    monkeypatch.setattr(torch, "compile", lambda f, **options: compile(f, **options | {"backend": "eager"}))
    asked = ("attention=tiled", "data.batch_size=2", "compile=true", f"data.document_mask={documents}")
    result = result_of(monkeypatch, capsys, *asked)
    assert result["memory_split"], result["memory_split_reason"]
    assert result["memory_split_error"] <= 0.03


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


@pytest.mark.parametrize(
    "said",
    [
        "[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes",
        "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
    ],
)
def test_a_point_without_memory(said, monkeypatch, capsys):
    def build(*_):
        raise RuntimeError(said)

    monkeypatch.setattr(training_point, "build", build)
    result = result_of(monkeypatch, capsys, "attention=naive", "data.batch_size=8")
    assert result["status"] == "oom" and said in result["reason"]


def test_fused_kernels_are_seen_beside_other_products():
    product = [Kernel("nvjet_sm90_tst", 9, 1.0)]
    flash = Kernel("pytorch_flash::flash_fwd_kernel", 1, 1.0)
    assert training_meter.of_step("sdpa_flash", [*product, flash], None).ok
    assert not training_meter.of_step("sdpa_flash", product, None).ok
    assert training_meter.of_step("naive", product, None).ok
    assert not training_meter.of_step("naive", [*product, flash], None).ok


def test_a_brief_point(monkeypatch, capsys):
    """Two steps, and nothing after them."""
    result = result_of(monkeypatch, capsys, "attention=naive", "data.batch_size=8", "--brief", "--steps=1")
    assert (result["status"], result["n"], result["warm_up"]) == ("ok", 1, 1)
    assert result["peak_mib"] >= 0  # of a process of its own more: this one has held other tests' tensors
    assert not {"kernels", "memory_split"} & result.keys()


def test_laps(monkeypatch):
    """The first step is set-up, after which `ready` may wait, as at the end; no step counts its time."""
    now, waited = [0.0], []
    monkeypatch.setattr("time.perf_counter", lambda: now[0])

    def ready() -> None:
        waited.append(now[0])
        now[0] += 100

    def ran(warm_up: int, steps: int, seconds: float, each: float) -> training_meter.Laps:
        laps = training_meter.Laps(warm_up, steps, seconds, ready)
        laps.start(False)
        for _ in range(50):
            now[0] += each
            if laps.ended():
                return laps
        raise AssertionError("no end")

    found = ran(1, 5, 1e9, 1.0).result()
    assert (found["n"], found["ms_median"], found["first_step_s"]) == (5, 1e3, 1.0) and waited == [1.0, 106.0]
    waited.clear()
    now[0], laps = 0.0, training_meter.Laps(1, 6, 1e9, ready, rounds=3)
    laps.start(False)
    for each in (9.0, 1.0, 1.0, 2.0, 2.0, 4.0, 4.0):
        now[0] += each
        last = laps.ended()
    assert last and laps.result()["ms_by_round"] == [1e3, 2e3, 4e3] and laps.spread()["ms_median"] == 2e3
    assert waited == [9.0, 111.0, 215.0, 323.0]  # after the first step, between rounds, at the end
    now[0], laps = 0.0, training_meter.Laps(1, 7, 1e9, ready, rounds=3)
    laps.start(False)
    while not laps.ended():
        now[0] += 1.0
    assert len(laps.result()["ms_by_round"]) == 3  # also where they do not divide the steps
    assert ran(2, 20, 2.5, 1.0).spread()["n"] == 3  # seconds, but three steps in any case
    assert ran(2, 20, 9.5, 1.0).spread()["n"] == 10
    assert ran(1, 20, 1.0, 25.0).spread()["n"] == 1  # unless they take very long
    alone = ran(0, 1, 0.0, 25.0).result()  # without a warm-up the first counts
    assert (alone["n"], alone["ms_median"], alone["first_step_s"]) == (1, 25e3, 25.0)


@pytest.mark.gpu
def test_a_point_on_a_gpu(monkeypatch, capsys):
    """Compiled, in bf16, accumulated: the figures of a GPU are there, and the kernels are those asked for."""
    small = ("data.batch_size=2", "tokens_per_step=512", "seq_len=128", "model.n_head=1", "model.n_embd=64")
    result = result_of(monkeypatch, capsys, *small, "attention=triton")
    assert result["status"] == "ok", result["reason"]
    assert result["kernels_ok"] and any(name.startswith("_tilegpt_") for name in result["kernels"])
    assert result["peak_of"] == "allocated on the GPU" and result["memory_split_error"] <= 0.03
    assert result["peak_mib"] == pytest.approx(result["memory_split"]["peak"], rel=0.1)
    assert result["tokens_per_s"] == pytest.approx(512e3 / result["ms_median"])


def test_a_slow_step_is_neither_profiled_nor_split():
    meter = training_meter.Meter("tiled", "tiled", torch.float32, training_meter.Laps(1, 3, 1.0))
    meter.cuda = True
    found = meter._kernels(None, None, 3.5) | meter._split(None, {}, None, 5.5)
    assert found["kernels"] is None and not found["kernels_ok"] and "3.5 s" in found["verdict"]
    assert found["memory_split"] is None and "too long" in found["memory_split_reason"]
