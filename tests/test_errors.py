"""A user's mistake ends within seconds as one message on stderr that says what to do; no stack trace."""

from __future__ import annotations

import gzip
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from lightning.pytorch.utilities import rank_zero_only

from conf import command
from conf.values import UserError
from tests.running import ROOT, finish, start, start_nodes, train_here, write_book

# Overrides that do not go with those of a tiny run, which are of data=text.
ALONE = ("ckpt=", "data=synthetic", "data=stdlib", "data=tinystories")
CASES: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    # name: (overrides, words of the message)
    "attention unknown": (
        ("attention=flash99",),
        ("no attention=flash99; did you mean flash4? Choose one of auto, ", "tiled"),
    ),
    "nothing like it": (("attention=zzz",), ("no attention=zzz. Choose one of auto, ",)),
    "model unknown": (("model=gpt9",), ("no model=gpt9; did you mean gpt2? Choose one of char, ", "tiny")),
    "data unknown": (("data=mybook",), ("mybook", "stdlib")),
    "experiment unknown": (("experiment=none_such",), ("none_such", "quickstart")),
    "key unknown": (("optim.learning_rate=1",), ("learning_rate",)),
    "group unknown": (("attn=tiled",), ("attn",)),
    "value of another kind": (("trainer.max_steps=many",), ("max_steps", "many")),
    "override without a value": (("seq_len",), ("seq_len",)),
    "head width": (("model.n_head=5",), ("model.n_embd=32", "model.n_head=5", "[1, 2, 4, 8]")),
    "kv heads": (("model.n_kv_head=3",), ("model.n_kv_head=3",)),
    "position": (("model.position=polar",), ("model.position=polar", "rope")),
    "dropout": (("model.dropout=1.5",), ("model.dropout=1.5", "at least 0 and below 1")),
    "seq_len 0": (("seq_len=0",), ("seq_len",)),
    "batch_size 0": (("data.batch_size=0",), ("batch_size",)),
    "corpus too short": (("seq_len=8192",), ("seq_len", "8192", "5401")),
    "no file": (("data.path=nowhere.txt",), ("nowhere.txt",)),
    "empty file": (("data.path=empty.txt",), ("empty.txt",)),
    "binary file": (("data.path=binary.txt",), ("binary.txt", "UTF-8")),
    "folder without text": (("data.path=folder",), ("folder",)),
    "chats for validation alone": (
        ("data=chat", "data.path=book.txt", "data.val_fraction=0.75"),
        ("data.val_fraction=0.75: at most every second conversation",),
    ),
    "no path": (("data=text", "~data.path"), ("path",)),
    "tokenizer unknown": (("data.tokenizer.kind=words",), ("words", "bpe")),
    "vocabulary in words": (
        ("data.tokenizer.kind=bpe", "data.tokenizer.vocab_size=abc"),
        ("data.tokenizer.vocab_size=abc", "a whole number, at least 258"),
    ),
    "sample in words": (
        ("data.tokenizer.kind=bpe", "data.tokenizer.sample_mb=abc"),
        ("data.tokenizer.sample_mb=abc", "a number above 0"),
    ),
    "a tokenizer's file beside another kind": (
        ("data.tokenizer.path=gone.json",),
        ("data.tokenizer.path=gone.json beside data.tokenizer.kind=", "takes data.tokenizer.kind=file"),
    ),
    "no options but a number": (("data.tokenizer=5",), ("data.tokenizer", "5")),
    "pattern of another folder": (
        ("data.path=folder", "data.pattern=/abs/*.txt"),
        ("data.pattern is '/abs/*.txt'", "within the folder data.path"),
    ),
    "no pattern": (("data.path=folder", "data.pattern=''"), ("data.pattern is ''", "such as '**/*.txt'")),
    "a part in words": (("data.val_fraction=abc",), ("data.val_fraction=abc", "above 0 and below 1")),
    "a part too large": (("data.val_fraction=1",), ("data.val_fraction=1", "above 0 and below 1")),
    "no random tokens": (
        ("data=synthetic", "data.corpus.n_tokens=null"),
        ("data.corpus.n_tokens=null", "a whole number, at least 2"),
    ),
    "documents in words": (
        ("data=synthetic", "data.corpus.document_length=abc"),
        ("data.corpus.document_length=abc", "or null for one endless document"),
    ),
    "part of the standard library": (
        ("data=stdlib", "data.corpus.val_fraction=abc"),
        ("data.corpus.val_fraction=abc",),
    ),
    "documents of the hub": (
        ("data=tinystories", "data.corpus.max_documents=abc"),
        ("data.corpus.max_documents=abc", "or null for no limit"),
    ),
    "no folder for the tokens": (("data.data_dir=null",), ("data.data_dir=null",)),
    "tokens_per_step": (
        ("tokens_per_step=100",),
        ("tokens_per_step=100", "data.batch_size * seq_len * devices", "64", "128"),
    ),
    "tokens_per_step too small": (("tokens_per_step=32",), ("tokens_per_step=32", "64")),
    "accelerator": (("trainer.accelerator=gpu",), ("trainer.accelerator=gpu", "trainer.accelerator=cpu")),
    "accelerator unknown": (("trainer.accelerator=abacus",), ("trainer.accelerator=abacus",)),
    "precision unknown": (("precision=fp16",), ("precision=fp16", "bf16-mixed")),
    "dropout in attention": (
        ("attention=sdpa_flash", "model.attn_dropout=0.1"),
        ("attention=sdpa_flash", "training", "model.attn_dropout=0"),
    ),
    "kernel of another device": (("attention=sdpa_cudnn",), ("attention=sdpa_cudnn", "cuda")),
    "decoder": (("attention.decode=nothing",), ("nothing", "naive")),
    "decoder of another device": (("attention.decode=sdpa_cudnn",), ("sdpa_cudnn", "decode")),
    "checkpoint": (("ckpt=yesterday",), ("ckpt=yesterday", "runs/")),
    "no run yet": (("ckpt=last",), ("no run under runs/",)),
    "checkpoint and a flag": (("ckpt=last", "-m"), ("-m", "ckpt=")),
    "steps": (("trainer.max_steps=0",), ("max_steps",)),
    "validation never": (("trainer.val_check_interval=0",), ("val_check_interval",)),
    "validation in part of an epoch": (
        ("trainer.val_check_interval=0.5",),
        ("val_check_interval=0.5", "a whole number"),
    ),
    "metrics never": (("callbacks.metrics.every=0",), ("callbacks.metrics.every=0", "at least 1")),
    "devices": (
        ("trainer.devices=0",),
        ("trainer.devices=0: it needs to be at least 1, or -1 or auto for all",),
    ),
    "devices below all": (("trainer.devices=-2",), ("trainer.devices=-2: it needs",)),
    "devices without end": (("trainer.devices=1099511627776",), ("trainer.devices=", "at most 65536")),
    "a strategy that shards otherwise": (
        ("trainer.strategy=fsdp", "trainer.devices=2"),
        ("trainer.strategy=fsdp", "choose trainer=ddp, fsdp2 or context_parallel"),
    ),
    "a strategy that pickles the run": (("trainer.strategy=ddp_spawn",), ("trainer.strategy=ddp_spawn",)),
    "an optimiser without a way back": (
        ("optim._target_=torch.optim.SGD", "~optim.betas", "~optim.eps"),
        ("optim._target_: a run cannot resume with SGD", "use torch.optim.AdamW"),
    ),
    "an optimiser of two kinds": (("+optim.foreach=true",), ("optim: ", "`fused` and `foreach`")),
    "uphill": (("optim=muon", "+optim.maximize=true"), ("maximize", "Muon minimises")),
    "optimiser": (("optim.lr=-1",), ("optim.lr=-1", "at least 0")),
    "no clipping is null": (("grad_clip=0",), ("grad_clip=0", "above 0, or null")),
    "clipping below 0": (("grad_clip=-1",), ("grad_clip=-1", "above 0, or null")),
    "compile": (("compile=no",), ("compile=no: choose true, false, auto or blocks",)),
    "compile as a number": (("compile=1",), ("compile=1: choose true, false, auto or blocks",)),
    "a switch": (("checkpointing=no",), ("checkpointing=no: choose true or false",)),
    "gaps that a causal model is to fill": (
        ("data.mask_fraction=0.15",),
        ("data.mask_fraction=0.15", "Set model.causal=false"),
    ),
    "no fraction": (("data.mask_fraction=1.5",), ("data.mask_fraction=1.5", "above 0 and below 1")),
    "a switch of the data": (("data.document_mask=off",), ("data.document_mask=off: choose true or false",)),
    "a switch of the model": (("model.causal=null",), ("model.causal=null: choose true or false",)),
    "fused": (("optim.fused=false",), ("optim.fused=false", "optim.fused=true")),
    "learning rate in words": (("optim.lr=abc",), ("optim.lr=abc: it needs to be a number, at least 0",)),
    "optimiser's argument": (("+optim.nope=1",), ("optim: ", "'nope'")),
    "optimiser's own check": (("optim.betas=[1.5,0.9]",), ("beta",)),
    "schedule's argument": (("+schedule.nope=1",), ("schedule: ", "'nope'")),
    "model's argument": (("+model.nope=1",), ("model: ", "'nope'")),
    "data's argument": (("+data.nope=1",), ("'nope'",)),
    "trainer's argument": (("+trainer.nope=1",), ("'nope'",)),
    "logger's argument": (("+logger.nope=1",), ("'nope'",)),
    "tokens_per_step in words": (("tokens_per_step=abc",), ("tokens_per_step=abc", "whole", "or null")),
    "half a layer": (
        ("model.n_layer=2.5",),
        ("model.n_layer=2.5: it needs to be a whole number, at least 1",),
    ),
    "warm-up": (("schedule.warmup_steps=-1",), ("schedule.warmup_steps=-1", "at least 0")),
    "decay in percent": (
        ("schedule=wsd", "schedule.decay_fraction=20"),
        ("schedule.decay_fraction=20: it needs to be a number, at least 0 and at most 1",),
    ),
    "a last learning rate above the first": (
        ("schedule.min_factor=1.5",),
        ("schedule.min_factor=1.5: it needs to be a number, at least 0 and at most 1",),
    ),
    "decay before warm-up": (
        ("schedule.decay_steps=4",),
        ("schedule.decay_steps=4: ", "until schedule.warmup_steps=5. Use schedule.decay_steps=5 or more"),
    ),
    **{
        f"beyond 64 bits: {key}": ((f"{key}={1 << 64}",), (f"{key}={1 << 64}: it needs to fit into 64 bits",))
        for key in ("seed", "seq_len", "tokens_per_step", "grad_clip", "trainer.max_steps", "data.batch_size")
    },
    "a seed that the data follows": ((f"seed={1 << 64}",), (f"error: seed={1 << 64}: ",)),
    "beyond a float": (("optim.lr=1" + "0" * 400,), ("it needs to fit into 64 bits",)),
    "steps of 64 bits": (("trainer.max_steps=9223372036854775808",), ("at most 9223372036854775807",)),
    "random tokens beyond 64 bits": (
        ("data=synthetic", f"data.corpus.n_tokens={1 << 64}"),
        ("data.corpus.n_tokens=", "it needs to fit into 64 bits"),
    ),
    "a width beyond any model": ((f"model.n_embd={1 << 62}",), (f"model.n_embd={1 << 62}: it needs to be",)),
    "a width beyond any memory": (
        (f"model.head_dim={1 << 24}", "model.n_head=1024"),
        ("out of memory", "scripts/estimate.py"),
    ),
    "a pipe": (
        ("data.path=pipe",),
        ("data.path=pipe is a pipe: give a file with text in it, a folder or a glob",),
    ),
    "a device": (("data.path=/dev/zero",), ("data.path=/dev/zero is a character device: give a file",)),
    "UTF-16": (("data.path=utf16.txt",), ("utf16.txt cannot be read as text: it is UTF-16: convert it",)),
    "gzip": (("data.path=book.txt.gz",), ("book.txt.gz cannot be read as text: it is compressed by gzip",)),
    "a file where the tokens are to be": (
        ("data.data_dir=empty.txt",),
        ("data.data_dir=empty.txt: empty.txt/", "cannot be written (", "with data.data_dir=<folder>"),
    ),
    "accumulation": (("+trainer.accumulate_grad_batches=2",), ("accumulate_grad_batches", "tokens_per_step")),
    "clipping by the trainer": (("+trainer.gradient_clip_val=1",), ("gradient_clip_val", "by grad_clip")),
    "steps at least": (("+trainer.min_steps=5",), ("trainer.min_steps: ", "by trainer.max_steps")),
    "epochs at least": (("+trainer.min_epochs=1",), ("trainer.min_epochs: ", "by trainer.max_steps")),
    "logging by the trainer": (("+trainer.log_every_n_steps=5",), ("by callbacks.metrics.every",)),
    "overfitting": (
        ("+trainer.overfit_batches=1",),
        ("trainer.overfit_batches: ", "by the data (to overfit, give a short text"),
    ),
    "sanity steps": (("+trainer.num_sanity_val_steps=2",), ("trainer.num_sanity_val_steps", "leave it out")),
    "progress bar": (("+trainer.enable_progress_bar=true",), ("enable_progress_bar", "callbacks.progress")),
    "a length of the data's own": (
        ("data.seq_len=8",),
        ("data.seq_len=8 beside seq_len=16", "Set seq_len=8, and leave data.seq_len out"),
    ),
    "seed of the data": (("data.seed=abc",), ("data.seed=abc: it needs to be a whole number, at least 0",)),
    "half a seed": (("data.seed=1.5",), ("data.seed=1.5: it needs to be a whole number",)),
    "pinned memory": (("data.pin_memory=abc",), ("data.pin_memory=abc: choose true or false, or null",)),
    "seq_len in words": (("seq_len=abc",), ("seq_len=abc", "a whole number")),
    "seed in words": (("seed=abc",), ("seed=abc", "a whole number")),
    "nothing kept": (("callbacks.checkpoints.keep=0",), ("callbacks.checkpoints.keep=0", "at least 1")),
    "validation of less": (("trainer.limit_val_batches=-1",), ("limit_val_batches=-1", "at least 0")),
    "two whole validations": (("trainer.limit_val_batches=2.0",), ("limit_val_batches=2.0", "up to 1.0")),
    "a group of null": (("attention=null",), ("a run needs attention=",)),
    "null in a sweep": (("callbacks=null,default", "-m"), ("no group can be null", "~callbacks")),
    "no attention": (("~attention",), ("a run needs attention=",)),
    "key mistyped": (("model.n_hed=3",), ("no key model.n_hed; did you mean n_head?", "n_layer")),
    "key of a group": (("batch_size=4",), ("no key batch_size; did you mean data.batch_size?",)),
    "key of two groups": (
        ("finetune=lora", "dropout=0.1"),
        ("no key dropout; did you mean finetune.dropout or model.dropout?",),
    ),
    "argument of Lightning": (
        ("trainer.accumulate_grad_batches=4",),
        ("no key trainer.accumulate_grad_batches: that is decided by tokens_per_step.",),
    ),
    "profile without a report": (
        ("+trainer.profiler=simple",),
        ("trainer.profiler=simple: nothing would be shown; use callbacks.profile=true.",),
    ),
    "a class that is not there": (
        ("attention._target_=attention.naive.Naiv",),
        ("Error locating target 'attention.naive.Naiv': ", "No module named 'attention.naive.Naiv'"),
    ),
    "a module that is not there": (
        ("attention._target_=attention.minee.Mine",),
        ("Error locating target 'attention.minee.Mine': ModuleNotFoundError: No module named",),
    ),
    "name with a slash": (("name=a/b",), ("name=a/b", "without slashes")),
    "name of the newest run": (("name=last",), ("name=last", "the newest run")),
    "name of the folder above": (("name=..",), ("name=..",)),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("errors")
    write_book(folder)
    (folder / "empty.txt").touch()
    (folder / "binary.txt").write_bytes(bytes(range(128, 256)) * 100)
    (folder / "utf16.txt").write_text("Call me Ishmael. " * 500, encoding="utf-16")
    (folder / "book.txt.gz").write_bytes(gzip.compress(b"Call me Ishmael. " * 500))
    os.mkfifo(folder / "pipe")
    (folder / "folder").mkdir()
    (folder / "folder" / "image.png").write_bytes(b"\x89PNG")
    return folder


@pytest.mark.parametrize("case", CASES)
def test_one_message(case: str, folder: Path) -> None:
    overrides, words = CASES[case]
    tiny = not any(override.startswith(ALONE) for override in overrides)
    result = train_here(folder, *overrides, tiny=tiny)
    assert result.code in (1, 2), result.out
    assert "Traceback" not in result.err + result.out
    for word in words:
        assert word in result.err, result.err
    # a refused call: its purposes, each with a reason or two
    assert len(result.err.strip().splitlines()) <= 8, result.err


@pytest.mark.parametrize(
    ("mistake", "word"),
    [
        ("attention=sdpa_cudnn", "runs on cuda"),
        ("tokens_per_step=100", "use 64"),
        ("model.n_head=5", "n_head=5"),
    ],
)
def test_what_does_not_need_the_corpus_is_refused_before_it(mistake: str, word: str, tmp_path: Path) -> None:
    result = train_here(tmp_path, mistake)
    assert result.code == 1 and word in result.err and "prepared" not in result.out
    assert not (tmp_path / "prepared").exists()
    assert train_here(tmp_path, "trainer.max_steps=1").code == 0 and (tmp_path / "prepared").exists()


def test_bf16_on_a_gpu_without_it() -> None:
    from model.training import runtime

    cuda = torch.device("cuda")
    for native, asked, expected in (
        (True, "auto", "bf16-mixed"), (False, "auto", "32-true"), (True, "bf16-mixed", "bf16-mixed"),
        (False, "32-true", "32-true"),
    ):  # fmt: skip
        with mock.patch.object(torch.cuda, "is_bf16_supported", return_value=native):
            assert runtime.precision(asked, cuda) == expected
    with (
        mock.patch.object(torch.cuda, "is_bf16_supported", return_value=False),
        mock.patch.object(torch.cuda, "get_device_name", return_value="Tesla T4"),
        pytest.raises(ValueError, match=r"Tesla T4 has no bf16 .*Use precision=32-true"),
    ):
        runtime.precision("bf16-mixed", cuda)
    assert runtime.precision("auto", torch.device("cpu")) == "32-true"


def test_a_run_with_a_tokenizer_file_that_it_does_not_read_goes_on(tmp_path: Path) -> None:
    with mock.patch("model.training.checks._tokenizer"):  # it is from before
        old = train_here(tmp_path, "name=a", "data.tokenizer.path=x.json", "trainer.max_steps=1")
    assert old.code == 0 and train_here(tmp_path, "ckpt=a", "trainer.max_steps=2", tiny=False).code == 0


def test_a_name_that_is_taken_and_a_failed_start_that_is_not(tmp_path: Path) -> None:
    assert train_here(tmp_path, "name=a", "data.path=nowhere.txt").code == 1
    assert train_here(tmp_path, "name=a", "trainer.max_steps=2").code == 0  # nothing was in it yet
    before = (tmp_path / "runs/a/metrics.csv").read_bytes()
    result = train_here(tmp_path, "name=a")
    assert result.code == 1
    assert "runs/a holds a run already" in result.err and "ckpt=a" in result.err and "name=" in result.err
    assert (tmp_path / "runs/a/metrics.csv").read_bytes() == before


@pytest.mark.parametrize(
    "mistake",
    [
        ("model.n_head=5",),
        ("logger=wandb", "logger.offline=false"),  # after the files were opened
        (
            "callbacks.samples={_target_: model.training.callbacks.Samples, prompt: \u00e4\u2603}",
            "data.tokenizer.kind=char",
        ),
    ],
)
def test_a_failed_start_leaves_no_folder(
    mistake: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    assert train_here(tmp_path, *mistake).code == 1
    assert not list((tmp_path / "runs").glob("*"))


def test_what_was_there_before_stays(tmp_path: Path) -> None:
    notes = tmp_path / "runs" / "a" / "notes.txt"
    notes.parent.mkdir(parents=True)
    notes.touch()
    assert train_here(tmp_path, "name=a", "model.n_head=5").code == 1 and notes.exists()


def test_a_fault_of_the_program_keeps_its_trace(tmp_path: Path) -> None:
    from model.training.lit_gpt import LitGPT

    def broken(self: LitGPT, batch: dict, batch_idx: int) -> None:
        torch.zeros(2).reshape(3) if batch_idx else int("three")

    with mock.patch.object(LitGPT, "training_step", broken):
        result = train_here(tmp_path, "name=a")
    assert result.code == 1 and "Traceback" in result.err and "in broken" in result.err


def test_metrics_of_a_run_that_broke_stay(tmp_path: Path) -> None:
    from model.training.lit_gpt import LitGPT

    def broken(self: LitGPT, batch: dict, batch_idx: int) -> None:
        raise UserError("out of paper")

    with mock.patch.object(LitGPT, "training_step", broken):
        result = train_here(tmp_path, "name=a")
    assert result.code == 1 and "error: out of paper" in result.err
    assert (tmp_path / "runs" / "a" / "metrics.csv").read_text().count("\n") == 2


def test_a_sweep_goes_on_after_a_refused_job(tmp_path: Path) -> None:
    result = train_here(tmp_path, "model.n_head=5,2", "name=s", "trainer.max_steps=1", "-m")
    assert result.code == 1
    assert "model.n_head=5" in result.err and "job 0 failed" in result.err
    assert result.out.splitlines()[-2].split() == ["-", "model.n_head=5", "-", "-", "failed"]
    assert [path.name for path in (tmp_path / "runs").iterdir()] == ["s-1-n_head-2"]
    assert train_here(tmp_path, "attention=naive,flash99", "-m").code == 1  # before the first job
    assert [path.name for path in (tmp_path / "runs").iterdir()] == ["s-1-n_head-2"]
    assert train_here(tmp_path, "name=t", "trainer.max_steps=1").code == 0  # and that was that sweep


def test_processes_of_a_launcher_agree_by_name(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from model.training.runs import new_run

    monkeypatch.chdir(tmp_path)
    choices = {"model": "tiny", "attention": "auto"}
    for settings in (
        {"TORCHELASTIC_RUN_ID": "none", "WORLD_SIZE": "2"},
        {"SLURM_JOB_ID": "7", "SLURM_NTASKS": "4"},
    ):
        with mock.patch.dict("os.environ", settings):
            with pytest.raises(ValueError, match=r"torchrun, srun.*name="):
                new_run(None, choices)
            assert new_run("a", choices) == new_run("a", choices) == Path("runs/a")
    Path("runs/a/checkpoints").mkdir()
    Path("runs/a/checkpoints/step-00000005.ckpt").touch()  # which the first rank took over
    with pytest.raises(ValueError, match="holds a run already"):
        new_run("a", choices)
    with mock.patch.object(rank_zero_only, "rank", 1):
        assert new_run("a", choices) == Path("runs/a")
    with mock.patch.dict("os.environ", {"SLURM_JOB_ID": "7", "SLURM_NTASKS": "1"}):
        assert new_run(None, choices).name.startswith("tiny-auto-")


@pytest.mark.parametrize(
    ("environment", "said"),
    [
        ({"LOCAL_RANK": "0"}, "error: no such thing\n"),
        ({"LOCAL_RANK": "0", "SLURM_PROCID": "3"}, "error: no such thing\n"),  # torchrun, started by Slurm
        ({"SLURM_PROCID": "1"}, ""),
        ({"LOCAL_RANK": "1"}, "error of process 1: no such thing\n"),  # nobody has ended it meanwhile
    ],
    ids=str,
)
def test_one_of_several_processes_says_what_is_wrong(
    environment: dict[str, str], said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    def refuse() -> None:
        raise UserError("no such thing")

    for name in ("LOCAL_RANK", "SLURM_PROCID"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(command, "PATIENCE", 0.01)
    before = signal.getsignal(signal.SIGTERM)
    try:
        with pytest.raises(SystemExit, match="1"):
            command.user_errors(refuse)()
    finally:
        signal.signal(signal.SIGTERM, before)
    assert capsys.readouterr().err == said


@pytest.mark.parametrize(
    ("tasks", "devices", "words"),
    [
        (2, ("trainer=default",), "Slurm has 2 process(es), and trainer.num_nodes=1 x trainer.devices=1"),
        (1, ("trainer=ddp", "trainer.devices=2"), "Slurm has 1 process(es)"),
        (4, ("trainer=ddp", "trainer.devices=2", "trainer.num_nodes=1"), "--ntasks-per-node equal to them"),
    ],
)
def test_slurm_with_another_number_of_processes_is_refused(
    tasks: int, devices: tuple[str, ...], words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of which each would train the same run alone, or a part of every step would be missing."""
    step = {"JOB_ID": 7, "JOB_NAME": "train", "NTASKS": tasks, "NTASKS_PER_NODE": tasks, "NNODES": 1}
    for name, value in (step | {"PROCID": 0, "LOCALID": 0, "NODEID": 0, "NODELIST": "localhost"}).items():
        monkeypatch.setenv(f"SLURM_{name}", str(value))
    result = train_here(tmp_path, "name=a", *devices)
    assert result.code == 1 and result.err.startswith("error: ") and words in result.err
    assert not list((tmp_path / "runs").glob("a/*.csv"))


@pytest.mark.long
@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("attention=typo", "There is no attention=typo"),
        ("data.path=nowhere.txt", "nowhere.txt"),
        ("trainer.devices=4", "devices"),
        (
            "trainer=default",
            "torchrun has started 2 process(es), and trainer.num_nodes=1 x trainer.devices=1",
        ),
    ],
)
def test_torchrun_tells_a_mistake_once(override: str, words: str, tmp_path: Path) -> None:
    more = [
        "name=a",
        "trainer=ddp",
        override,
        *(["trainer.devices=1"] if override == "trainer=default" else []),
    ]
    (node,) = start_nodes(tmp_path, 1, *more, processes=2)
    result = finish(node)
    said = [line for line in result.err.splitlines() if line.startswith("error")]
    assert result.code == 1 and len(said) == 1 and words in said[0], result.err


@pytest.mark.parametrize(
    ("devices", "rank", "index"),
    [(1, None, 0), ([1], None, 1), ([1, 3], "1", 3), ("auto", "2", 2), ("2,", None, 2)],
)
def test_every_rank_asks_its_own_gpu(
    devices: Any, rank: str | None, index: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    from model.training import runtime

    monkeypatch.delenv("LOCAL_RANK", raising=False)
    if rank is not None:
        monkeypatch.setenv("LOCAL_RANK", rank)
    with (
        mock.patch.object(torch.cuda, "is_available", return_value=True),
        mock.patch.object(torch.cuda, "device_count", return_value=4),
        mock.patch.object(torch.cuda, "set_device") as current,
    ):
        assert runtime.device("auto", devices) == torch.device("cuda", index)
    current.assert_called_once_with(index)


def test_a_reader_that_has_seen_enough(tmp_path: Path) -> None:
    """As in `train.py --help | head -0`."""
    read, write = os.pipe()
    os.close(read)
    result = subprocess.run(
        [sys.executable, str(ROOT / "train.py"), "--help"], stdout=write, stderr=subprocess.PIPE, cwd=tmp_path
    )
    os.close(write)
    assert (result.returncode, result.stderr) == (128 + signal.SIGPIPE, b"")


def test_bf16_on_the_cpu_runs(tmp_path: Path) -> None:
    result = train_here(tmp_path, "name=a", "precision=bf16-mixed", "trainer.max_steps=2", "attention=sdpa")
    assert result.code == 0 and "bf16-mixed" in result.out, result.err


@pytest.mark.long
def test_a_hub_out_of_reach_is_told_in_seconds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hub"))
    begin = time.monotonic()
    result = finish(start(tmp_path, "data=shakespeare", "data.data_dir=prepared", "name=a", tiny=False), 60)
    assert result.code == 1 and "Traceback" not in result.err, result.err
    assert "data=text data.path=" in result.err
    assert time.monotonic() - begin < 30


def test_a_fault_of_ours_keeps_its_stack_trace(tmp_path: Path) -> None:
    """Only what a user can mend is put into one message."""
    from model.training.lit_gpt import LitGPT

    def broken(self: LitGPT, batch: dict, batch_idx: int) -> None:
        raise RuntimeError("a bug")

    with mock.patch.object(LitGPT, "training_step", broken):
        result = train_here(tmp_path, "name=a")
    assert result.code == 1 and "RuntimeError: a bug" in result.err


def test_a_command_leaves_by_its_threads_and_exit_handlers_and_takes_nothing_apart() -> None:
    code = """
import atexit, sys, time
from concurrent.futures import ThreadPoolExecutor
from conf.command import leave
class Large:
    def __del__(self): print("taken apart", flush=True)
large = Large()
atexit.register(print, "handler")
print("result")
print("warning", file=sys.stderr, end="")
ThreadPoolExecutor().submit(lambda: (time.sleep(0.2), print("thread")))
leave()
"""
    result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert (result.returncode, result.stdout, result.stderr) == (0, "result\nthread\nhandler\n", "warning")
