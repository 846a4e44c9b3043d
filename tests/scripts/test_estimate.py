"""Predicted against measured on small models, and what estimate.py says of large ones and of mistakes."""

from __future__ import annotations

import gc
import re
import subprocess
import sys
from dataclasses import replace

import pytest

from attention.base import UnsupportedAttention
from attention.registry import shared_instance
from model.costs.gpus import GPUS, gpu_sheet
from model.costs.memory import peak
from model.costs.run import Run
from model.gpt import GPTConfig
from scripts.estimate import KINDS, main, parse, run_of, table, verdict
from scripts.memory import composed, memory_split, training_step
from tests.running import ROOT

pytestmark = pytest.mark.sampled(5)

GPT2 = ("model=gpt2", "data=synthetic", "seq_len=8192", "data.batch_size=4")
SMALL = ("data=synthetic", "data.corpus.vocab_size=300", "data.batch_size=2", "trainer.accelerator=cpu")
CONFIGS = {
    "gpt2 naive": "model=tiny attention=naive",
    "gpt2 naive bf16": "model=tiny attention=naive precision=bf16-mixed",
    "gpt2 sdpa checkpointed": "model=tiny attention=sdpa checkpointing=true",
    "gpt2 tiled, a large vocabulary": "model=tiny attention=tiled data.corpus.vocab_size=4000",
    "gpt2 sdpa, dropout": "model=char model.n_layer=2 attention=sdpa",
    "gpt2 sdpa, a window": "model=tiny attention=sdpa model.window=32",
    "naive, its dropout": "model=tiny model.n_layer=2 attention=naive model.attn_dropout=0.1 seq_len=512",
    "tiled, its dropout": "model=tiny model.n_layer=2 attention=tiled model.attn_dropout=0.1 seq_len=128",
    "llama naive checkpointed": "model=llama_tiny attention=naive checkpointing=true",
    "llama tiled bf16": "model=llama_tiny attention=tiled precision=bf16-mixed",
    "llama sdpa": "model=llama_tiny attention=sdpa",
    "few tokens": "model=tiny attention=sdpa seq_len=32 data.corpus.vocab_size=4000",
    "few tokens, untied": "model=tiny attention=sdpa seq_len=32 model.tie_embeddings=false",
    "in chunks": "model=tiny attention=tiled data.corpus.vocab_size=4000 model.loss_chunk=200",
    "in chunks, bf16": "model=tiny attention=sdpa data.corpus.vocab_size=4000 model.loss_chunk=64 "
    "precision=bf16-mixed checkpointing=true",
    "few tokens in chunks": "model=tiny seq_len=32 data.corpus.vocab_size=4000 model.loss_chunk=16",
    "gpt2 sdpa_math, accumulated": "model=tiny attention=sdpa_math tokens_per_step=1024",
}


@pytest.mark.parametrize("overrides", CONFIGS.values(), ids=CONFIGS)
def test_predicted_peaks_are_the_measured_ones(overrides: str) -> None:
    cfg = composed([*SMALL, *overrides.split()])
    split, predicted = memory_split(training_step(cfg)), peak(run_of(cfg, None))
    assert predicted.peak / 2**20 == pytest.approx(split["peak"], rel=0.1)
    for kind in ("parameters", "optimizer"):
        assert getattr(predicted, kind) / 2**20 == pytest.approx(split[kind], rel=0.001)


@pytest.mark.parametrize(
    "overrides",
    [
        "attention=sdpa data.document_mask=true",
        "attention=sdpa model.sparsity=local",
        "attention=sdpa model.position=t5",
        "attention=sdpa model.position=alibi data.document_mask=true",
        "attention=sdpa_math model.position=alibi",
        "attention=naive model.softcap=30",
        "attention=naive data.document_mask=true",
    ],
)
def test_what_attention_keeps_of_masks_and_softcaps_is_what_is_measured(overrides: str) -> None:
    # where the peak is before the backward, with all that attention keeps
    where = ["model=tiny", "model.n_layer=2", "seq_len=256", "compile=false", "data.corpus.vocab_size=20000"]
    cfg = composed([*SMALL, *where, *overrides.split()])
    split, predicted = memory_split(training_step(cfg)), peak(run_of(cfg, None))
    assert predicted.attention / 2**20 == pytest.approx(split["attention"], rel=0.005)


def test_a_table_for_a_gpu_that_is_not_here(capsys: pytest.CaptureFixture[str]) -> None:
    main([*GPT2, "attention=cuda_fa2", "gpu=h200"])
    out = capsys.readouterr().out
    rows = {line[:56].strip(): line[56:].split() for line in out.splitlines()}
    assert rows["lse, one layer"] == ["1.50", "MiB"]
    assert rows["naive attention's scores, one layer (fp32)"] == ["12,288.00", "MiB"]
    assert rows["KV cache of 4 x 8192 tokens, 12 layers"] == ["1,152.00", "MiB"]
    assert rows["logits"] == ["3,144.00", "MiB"]
    assert rows["attention forward, one layer: FLOPs"] == ["412.32", "GFLOP"]
    assert rows["attention forward, one layer: roofline time (compute)"] == ["0.42", "ms"]
    assert rows["shared memory per block: forward, 128 x 64"] == ["48.00", "KiB"]
    (total,) = (float(row[0].replace(",", "")) for name, row in rows.items() if name.startswith("peak ("))
    parts = [float(rows[f"at the peak: {kind}"][0].replace(",", "")) for kind in KINDS]
    assert sum(parts) == pytest.approx(total, abs=0.05)
    assert "fits:" in out and "grows as T\n" in out and "bf16-mixed, compiled, on h200" in out


def test_in_chunks_only_a_chunks_logits_are_there(capsys: pytest.CaptureFixture[str]) -> None:
    main([*GPT2, "attention=cuda_fa2", "gpu=h200", "model.loss_chunk=2048"])
    out = capsys.readouterr().out
    rows = {line[:56].strip(): line[56:].split() for line in out.splitlines()}
    assert rows["logits of one chunk"] == ["196.50", "MiB"]
    (most,) = (float(row[0].replace(",", "")) for name, row in rows.items() if name.startswith("peak ("))
    config = GPTConfig(vocab_size=50257, seq_len=8192)
    whole = Run(
        config, 4, shared_instance("cuda_fa2"), 2, compiled=True, workspace_bytes=GPUS["h200"].workspace_bytes
    )
    chunk = replace(whole, config=replace(config, loss_chunk=2048))
    assert most == pytest.approx(peak(chunk).peak / 2**20, abs=0.01)
    assert most < peak(whole).peak / 2**20 - 2000


def test_measured_beside_predicted(capsys: pytest.CaptureFixture[str]) -> None:
    main(["model=tiny", "model.n_layer=2", *SMALL, "seq_len=128", "attention=naive", "--measure"])
    out = capsys.readouterr().out
    lines = {line[:56].strip(): line[56:].split() for line in out.splitlines()}
    predicted, _, measured, ratio = next(row for name, row in lines.items() if name.startswith("peak ("))
    assert float(ratio) == pytest.approx(float(predicted) / float(measured), abs=0.01)
    assert 0.9 < float(ratio) < 1.1
    assert len(lines["kept by attention, one layer"]) == 4


def test_naive_attention_at_length_does_not_fit() -> None:
    config = GPTConfig(vocab_size=50304, seq_len=8192)
    said = verdict(Run(config, 4, shared_instance("naive"), 2, compiled=True), GPUS["l4"])
    assert said.startswith("does not fit: ") and "grows as T^2" in said
    assert "fits: " in verdict(Run(config, 4, shared_instance("triton"), 2, compiled=True), GPUS["h200"])


def test_the_table_puts_ratios_where_something_was_measured() -> None:
    lines = table([("peak (loss)", 20.0, "MiB"), ("logits", 3.0, "MiB")], {"peak": 10.0}).splitlines()
    assert lines[1].split() == ["peak", "(loss)", "20.00", "MiB", "10.00", "2.00"]
    assert lines[2].split() == ["logits", "3.00", "MiB"]


def test_shared_memory_comes_from_the_kernels_tables() -> None:
    def of(name: str, gpu: str, narrow: bool = True, head_dim: int = 64) -> dict[str, int]:
        sheet, value_bytes = GPUS[gpu], 2 if narrow else 4
        config = GPTConfig(64, n_head=12, n_embd=12 * head_dim)
        run = Run(config, 1, shared_instance(name), value_bytes, arch=sheet.arch)
        return run.attention.shared_memory(run.call, sheet.shared_bytes)

    # Q of 128 and two tiles each of K and V of 64, D = 64, 16 bits
    assert of("cuda_fa2", "h200")["forward, 128 x 64"] == 2 * 64 * (128 + 4 * 64)
    assert (
        max(of("cuda_fa2", "l4").values()) <= GPUS["l4"].shared_bytes < max(of("cuda_fa2", "h200").values())
    )
    assert set(of("cuda_tiled", "h200", False)) == {"forward", "backward"}
    assert all(0 < size <= GPUS["h200"].shared_bytes for size in of("triton", "h200").values())
    assert of("naive", "h200") == {}
    assert set(of("cuda_fa3", "h200")) == {"forward, 2 teams, 128 x 64", "backward, 128 x 128"}
    assert {"backward, 64 x 64", "backward, 64 x 96"} <= of("cuda_fa3", "h200", head_dim=192).keys()
    assert all(0 < size <= GPUS["h200"].shared_bytes for size in of("cuda_fa3", "h200", head_dim=96).values())


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["gpu=h300"], "gpu=h300: its datasheet is not known here. Known are a100"),
        (["model=gpt2", "model.n_head=7", "gpu=l4"], "does not divide into model.n_head=7"),
        (["seq_len=0", "gpu=l4"], "seq_len=0"),
        (["precision=16", "gpu=l4"], "choose auto, 32-true or bf16-mixed"),
        (["precision=fp8", "gpu=h200"], "what fp8 takes is not predicted"),
        (["attention=cuda_fa1", "gpu=h200"], "no backward: runs forward only"),
        (["model=gpt2", "model.n_head=3", "attention=cuda", "gpu=a100"], "no head dim 256"),
        (["attention=flash3", "gpu=a100"], "no sm_80"),
        (["ckpt=my-run"], "ckpt=my-run: no checkpoint is read here"),
        (["init_from=gpt2-xl"], "init_from=gpt2-xl: no weights are read here"),
        (["tokens_per_step=1000"], "tokens_per_step=1000 is not a multiple of the "),
        (["trainer.devices=abc"], "trainer.devices=abc: it needs to be a number of devices"),
        (["trainer=context_parallel", "trainer.strategy.context_parallel=0"], "context_parallel=0: it needs"),
        (["trainer.strategy=null"], "trainer.strategy=null: this training loop"),
        (["data.batch_size=null"], "data.batch_size=null: it needs"),
        (["seq_len=null"], "seq_len=null: it needs"),
        (["finetune=lora", "gpu=l4"], "finetune=lora: what adapters take is not predicted"),
        (["--fast"], "the only flag is --measure"),
        (["data.tokenizer.kind=char", "gpu=l4"], "once the corpus is read"),
    ],
)
def test_mistakes_are_said(arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main(arguments)
    assert stop.value.code == 1 and said in capsys.readouterr().err


def test_a_head_dim_that_only_the_stage_of_a_gpu_takes(capsys: pytest.CaptureFixture[str]) -> None:
    main(["model=gpt2", "model.n_head=3", "attention=cuda", "gpu=h200"])
    assert "fits: " in capsys.readouterr().out


def test_another_gpu_than_that_at_hand_cannot_be_measured(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["gpu=l4", "--measure", "trainer.accelerator=cpu"])
    assert "what is at hand is the CPU" in capsys.readouterr().err


def test_what_cannot_train_is_refused_wherever_it_is_installed() -> None:
    with pytest.raises(UnsupportedAttention, match="float32"):
        run_of(composed([*GPT2, "attention=flash2", "precision=32-true"]), GPUS["h200"])


def test_one_of_several_devices(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["model=gpt2", "data=synthetic", "attention=cuda", "gpu=h200", "trainer.devices=4"]
    main([*words, "trainer=fsdp2", "seq_len=1024"])
    said = capsys.readouterr().out
    assert "one of 4 devices that share parameters, gradients and optimiser state\n" in said
    assert re.search(r"at the peak: optimizer +237\.\d+ MiB", said)  # a quarter of both moments
    main([*words, "trainer=context_parallel", "seq_len=262144", "data.batch_size=1", "model.position=rope"])
    said = capsys.readouterr().out
    assert "optimiser state, 4 to a sequence\n" in said
    assert re.search(r"K and V of whole sequences, one layer +768\.00 MiB", said)
    for refused, why in (("seq_len=1022", "multiple of 8"), ("--measure", "on one device")):
        with pytest.raises(SystemExit):
            main([*words[:3], "trainer.devices=4", "trainer=context_parallel", refused])
        assert why in capsys.readouterr().err


def test_arguments() -> None:
    assert parse(["model=tiny", "gpu=l4", "--measure", "gpu=a100"]) == (True, "a100", ["model=tiny"])
    assert parse([]) == (False, None, [])


def test_help_answers_before_anything_heavy_is_imported() -> None:
    code = "import sys; from scripts.estimate import main; main(['--help']); print(sorted(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert "gpu=h200" in done.stdout
    assert "'torch'" not in done.stdout and "'hydra'" not in done.stdout


@pytest.mark.gpu
@pytest.mark.parametrize(
    "overrides",
    [
        "data.batch_size=8 attention=triton",
        "data.batch_size=4 attention=naive compile=false",
        "data.batch_size=4 attention=sdpa_flash compile=false checkpointing=true",
        "data.batch_size=4 attention=cuda_fa2 model.position=rope model.norm=rmsnorm model.mlp=swiglu",
        "data.batch_size=2 attention=sdpa_math precision=32-true compile=false",
        "data.batch_size=16 attention=triton model.loss_chunk=2048",
        "data.batch_size=16 attention=triton model.loss_chunk=2048 compile=false checkpointing=true",
    ],
)
def test_predicted_peaks_on_a_gpu(overrides: str) -> None:
    import torch

    torch._dynamo.reset()  # what compiled the models of tests before holds 0.9 GiB of them in cycles
    gc.collect()
    cfg = composed(["model=gpt2", "data=synthetic", "seq_len=1024", *overrides.split()])
    split = memory_split(training_step(cfg))
    predicted = peak(run_of(cfg, gpu_sheet(torch.cuda.get_device_name())))
    assert predicted.peak / 2**20 == pytest.approx(split["peak"], rel=0.1)
