"""What a run leaves behind and says."""

from __future__ import annotations

from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
import yaml

from attention.naive import NaiveAttention
from conf.trained import load_model
from conf.values import UserError
from data.datamodule import text_datamodule
from model.gpt import GPT, GPTConfig
from model.training.checkpoint import read_checkpoint
from model.training.sweeps import Job, suffix
from tests.running import TINY, rows, train_here, write_book

pytestmark = pytest.mark.sampled(3)

WITH_SAMPLES = (*(o for o in TINY if o != "callbacks.samples=null"), "callbacks.samples.tokens=8")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("train")
    write_book(folder)
    return folder


@pytest.fixture(scope="module")
def run(folder: Path) -> tuple[Path, str]:
    result = train_here(folder, *WITH_SAMPLES, "name=a", "callbacks.progress.every=5", tiny=False)
    assert result.code == 0, result.err
    return folder / "runs" / "a", result.out


def test_the_files_of_a_run(run: tuple[Path, str]) -> None:
    path, _ = run
    assert {entry.name for entry in path.iterdir()} == {
        ".lock",
        "checkpoints",
        "config.yaml",
        "metrics.csv",
        "samples.txt",
    }
    assert [entry.name for entry in sorted((path / "checkpoints").iterdir())] == [
        "best.ckpt", "step-00000010.ckpt", "step-00000020.ckpt"
    ]  # fmt: skip
    config = yaml.safe_load((path / "config.yaml").read_text())
    assert config["seq_len"] == 16 and config["model"]["n_embd"] == 32
    samples = (path / "samples.txt").read_text()
    assert samples.startswith("--- step 10\n") and "\n--- step 20\n" in samples


def test_metrics(run: tuple[Path, str]) -> None:
    table = rows(run[0])
    assert list(table) == list(range(21))
    assert {step for step, row in table.items() if "val/loss" in row} == {0, 10, 20}
    assert float(table[0]["val/loss"]) == pytest.approx(5.545, abs=0.06)  # log 257
    assert float(table[20]["train/loss"]) < 3 and float(table[20]["val/loss"]) < 3
    assert float(table[1]["train/lr"]) == pytest.approx(1e-2 / 6)
    header = (run[0] / "metrics.csv").read_text().splitlines()[0].split(",")
    assert {"perf/step_ms", "perf/tokens_per_s"} <= set(header) and "perf/mfu" not in header


def test_what_is_said(run: tuple[Path, str]) -> None:
    _, out = run
    for line in (
        "0.04M parameters, 2 layers, 2 heads, width 32, context 16, vocabulary 257",
        "attention  naive", "64 tokens (1 x 4 x 16 on 1 device(s)), 20 steps", "no MFU", "run        runs/a",
        "step 10/20", "step 20: validation loss", "--- a sample", "best validation loss",
        "scripts/generate.py ckpt=a", "ckpt=a trainer.max_steps=40",
    ):  # fmt: skip
        assert line in out
    assert "rank" not in out.lower() and "litlogger" not in out.lower() and "warning" not in out.lower()


def test_the_validation_loss_is_the_mean_over_all_targets(run: tuple[Path, str], folder: Path) -> None:
    content = read_checkpoint(run[0] / "checkpoints" / "step-00000020.ckpt")
    net = GPT(GPTConfig(**content["tilegpt"]["model"]), NaiveAttention()).eval()
    net.load_state_dict({name.removeprefix("net."): value for name, value in content["state_dict"].items()})
    data = text_datamodule(
        {"kind": "byte"}, path=str(folder / "book.txt"), data_dir=folder / "p", seq_len=16, batch_size=3,
        max_val_tokens=128,
    )  # fmt: skip
    data.prepare_data()
    logits, targets = [], []
    for batch in data.val_dataloader():
        with torch.no_grad():
            logits.append(net(batch["input_ids"])[..., :257].flatten(0, 1))
        targets.append(batch["targets"].flatten())
    expected = F.cross_entropy(torch.cat(logits), torch.cat(targets), ignore_index=-1)
    assert float(rows(run[0])[20]["val/loss"]) == pytest.approx(expected.item(), rel=1e-5)


def test_the_same_run_twice_is_the_same(run: tuple[Path, str], folder: Path) -> None:
    """Sample text, its absence included, does not touch what is trained; nor do a logger or a name."""
    assert train_here(folder, "name=b", "logger=tensorboard").code == 0
    assert rows(folder / "runs" / "b") == rows(run[0])
    assert train_here(folder, "name=c", "seed=1").code == 0
    assert rows(folder / "runs" / "c")[1] != rows(run[0])[1]


def test_a_sweep_makes_a_run_of_each_job(folder: Path, tmp_path: Path) -> None:
    write_book(tmp_path)
    result = train_here(tmp_path, "seed=1337,2", "-m", "name=s", "trainer.max_steps=3")
    assert result.code == 0, result.err
    first, second = (rows(tmp_path / "runs" / name) for name in ("s-0-seed-1337", "s-1-seed-2"))
    assert list(first) == [0, 1, 2, 3] and first != second
    alone = train_here(tmp_path, "name=alone", "trainer.max_steps=3")
    assert alone.code == 0 and rows(tmp_path / "runs" / "alone") == first  # nothing is left of the job before
    assert "compare  " in alone.out and "compare  " not in result.out
    head, *table = (line.split() for line in result.out.splitlines()[-3:])
    assert head == ["run", "overrides", "val", "loss", "tokens/s", "status"]
    for line, name, table_rows in zip(table, ("seed=1337", "seed=2"), (first, second), strict=True):
        assert line[1] == name and line[-1] == "done" and int(line[3].replace(",", "")) > 0
        assert line[0] == f"s-{table.index(line)}-{name.replace('=', '-')}"
        assert float(line[2]) == pytest.approx(float(table_rows[3]["val/loss"]), abs=5e-5)


@pytest.mark.parametrize(
    ("end", "loss"), [("20,,2.0,", "-"), ("20,,2.0,\n20,1.5,,", "1.5000"), ("20,,2.0,\n20,nan,,", "nan")]
)
def test_a_loss_before_the_last_step_is_no_result(end: str, loss: str, tmp_path: Path) -> None:
    text = f"step,val/loss,train/loss,perf/tokens_per_s\n0,4.0,,\n10,,3.0,70\n10,2.5,,\n{end}\n"
    (tmp_path / "metrics.csv").write_text(text)
    assert Job([], "a", "", tmp_path, "done").results() == (loss, "70")


@pytest.mark.long
def test_two_sweeps_of_one_second(tmp_path: Path) -> None:
    (tmp_path / "more").mkdir()
    sweep = ("seed=1,2", "trainer.max_steps=1", f"--config-dir={tmp_path / 'more'}", "-m")
    with mock.patch("model.training.sweeps.time.strftime", return_value="now"):
        assert [train_here(tmp_path, *sweep).code for _ in range(2)] == [0, 0]
    names = {"now-0-seed-1", "now-1-seed-2"}
    names |= {f"{name}-2" for name in names}
    assert {path.name for path in (tmp_path / "runs").iterdir()} == names


@pytest.mark.parametrize(
    ("overrides", "name"),
    [
        (["optim.lr=0.001", "attention=cuda_fa2"], "-3-lr-0.001-attention-cuda_fa2"),
        (["data.path='a b/../c:d.txt'", "+trainer.x=null"], "-3-path-a-b-..-c-d.txt-x-null"),
        (["callbacks.samples.prompt=\u00e4/\u2603."], "-3-prompt"),
        (["data.path=" + 300 * "x"], "-3-path-" + 75 * "x"),
    ],
)
def test_names_of_a_sweep_are_names_of_folders(overrides: list[str], name: str) -> None:
    assert suffix(3, overrides) == name


def test_a_warm_up_that_does_not_end_is_said(tmp_path: Path) -> None:
    said = "warm-up    schedule.warmup_steps=5: the learning rate never reaches optim.lr\n"
    for steps, never in ((5, True), (6, False)):
        result = train_here(tmp_path, f"trainer.max_steps={steps}")
        assert result.code == 0 and (said in result.out) == never, result.out


def test_names_are_made_of_the_choices(tmp_path: Path) -> None:
    assert train_here(tmp_path, "trainer.max_steps=1", "attention=auto").code == 0
    (path,) = (tmp_path / "runs").iterdir()
    assert path.name.startswith("tiny-auto-20")


@pytest.mark.parametrize(
    "overrides",
    [
        ("data.document_mask=true", "model.position=rope"),
        ("attention=auto",),
        ("data.mask_fraction=0.15", "model.causal=false"),
        ("checkpointing=true", "model.dropout=0.1"),
        ("grad_clip=null", "schedule=wsd"),
        ("callbacks.progress=null", "callbacks.interrupt=null"),
        ("data.batch_size=3", "data.eval_batch_size=5", "data.num_workers=1"),
        ("trainer.max_steps=7", "trainer.val_check_interval=100"),
        ("deterministic=true",),
        pytest.param(("compile=true", "trainer.max_steps=2"), marks=pytest.mark.slow),  # half a minute
    ],
)
def test_settings_that_have_to_work(overrides: tuple[str, ...], folder: Path) -> None:
    name = "-".join(override.split("=")[0] for override in overrides)
    result = train_here(folder, f"name={name}", *overrides)
    assert result.code == 0, result.err
    table = rows(folder / "runs" / name)
    assert float(table[max(table)]["val/loss"]) < float(table[0]["val/loss"])  # it ends with a validation


def test_a_model_that_fills_gaps_resumes_exactly_and_is_not_asked_for_text(folder: Path) -> None:
    gaps = ("data.mask_fraction=0.15", "model.causal=false", "schedule=constant")
    for name, last in (("whole", 20), ("parts", 10)):
        assert train_here(folder, *gaps, f"name={name}", f"trainer.max_steps={last}").code == 0
    assert train_here(folder, "ckpt=parts", "trainer.max_steps=20", tiny=False).code == 0
    whole, parts = (rows(folder / "runs" / name)[20]["val/loss"] for name in ("whole", "parts"))
    assert whole == parts
    with pytest.raises(UserError, match="trained to fill gaps"):
        load_model("whole", [], str(folder / "runs"))


def test_random_tokens_need_no_text(tmp_path: Path) -> None:
    text = ("data=", "data.path", "data.tokenizer")
    settings = [override for override in WITH_SAMPLES if not override.startswith(text)]
    random = ("data=synthetic", "data.corpus.vocab_size=64", "data.corpus.n_tokens=4000")
    result = train_here(tmp_path, *settings, *random, "name=a", tiny=False)
    assert result.code == 0, result.err
    assert not (tmp_path / "runs/a/samples.txt").exists()
    assert read_checkpoint(tmp_path / "runs/a/checkpoints/step-00000020.ckpt")["tilegpt"]["tokenizer"] is None


@pytest.mark.parametrize("off", [("~callbacks",), ("callbacks=null", "logger=null", "experiment=null")])
def test_without_callbacks(off: tuple[str, ...], tmp_path: Path) -> None:
    bare = [override for override in TINY if not override.startswith("callbacks")]
    write_book(tmp_path)
    result = train_here(tmp_path, *bare, *off, "name=a", "trainer.max_steps=2", tiny=False)
    assert result.code == 0, result.err
    assert {path.name for path in (tmp_path / "runs" / "a").iterdir()} == {
        ".lock",
        "config.yaml",
        "metrics.csv",
    }


def test_a_run_goes_on_without_its_callbacks(tmp_path: Path) -> None:
    assert train_here(tmp_path, "name=a", "trainer.max_steps=2").code == 0
    nulls = ("callbacks=null", "logger=null")
    result = train_here(tmp_path, "ckpt=a", *nulls, "trainer.max_steps=4", tiny=False)
    assert result.code == 0, result.err
    kept = {path.name for path in (tmp_path / "runs" / "a" / "checkpoints").iterdir()}
    assert kept == {"best.ckpt", "step-00000002.ckpt"}
