"""python train.py init_from=...: a pretrained folder, or a run, on other data; what cannot be is refused
before anything is written."""

from __future__ import annotations

import contextlib
import io
import json
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from conf.initial import Initial
from conf.trained import load_model
from data.storage import Unfinished
from data.tokenizer_export import tokenizer_files
from data.tokenizers import ByteTokenizer, CharTokenizer
from model.training.checkpoint import read_checkpoint
from tests.pretrained import make_folder, make_tokenizer
from tests.running import SHORT, Result, train_here, write_book

pytest.importorskip("transformers")

QUICK = (*SHORT, "trainer.max_steps=4", "trainer.val_check_interval=4")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With a tiny Llama 3 in pretrained/, a GPT-2 in gpt2/, and run `a`, which started from the first."""
    folder = tmp_path_factory.mktemp("init")
    write_book(folder)
    (folder / "other.txt").write_text("some other tiles of other keys, " * 200)
    make_folder(folder / "pretrained", "llama")
    make_folder(folder / "gpt2", "gpt2")
    result = start(folder, "init_from=pretrained", "name=a")
    assert result.code == 0, result.err
    own = ("model.n_layer=1", "model.n_embd=32", "model.causal=false", "data.tokenizer.kind=byte")
    assert start(folder, "name=masked", *own, "data.mask_fraction=0.3", "trainer.max_steps=1").code == 0
    return folder


def start(folder: Path, *overrides: str) -> Result:
    return train_here(folder, *QUICK, *overrides, tiny=False)


def test_it_starts_from_these_weights(folder: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    assert start(folder, "init_from=pretrained", "name=still", "optim.lr=0", "trainer.max_steps=1").code == 0
    net, tokenizer, _ = load_model(str(folder / "runs/still/checkpoints/step-00000001.ckpt"), [])
    theirs = AutoModelForCausalLM.from_pretrained(folder / "pretrained").eval()
    text = "attention is all you need"
    ids = tokenizer.encode(text)
    assert (
        ids == AutoTokenizer.from_pretrained(folder / "pretrained")(text)["input_ids"] and tokenizer.eot == 0
    )
    assert tokenizer.decode([*ids, 0, 299, 40]) == f"{text}<|endoftext|>{tokenizer.decode([40])}"
    with torch.no_grad():
        expected, got = theirs(torch.tensor([ids[:16]])).logits, net.eval()(torch.tensor([ids[:16]]))
    assert torch.allclose(got[..., :300], expected, atol=1e-4)


def test_the_run_resumes_without_what_it_started_from(folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder / "runs", tmp_path / "runs")
    write_book(tmp_path)
    result = train_here(tmp_path, "ckpt=a", "trainer.max_steps=6", tiny=False)
    assert result.code == 0, result.err and "step-00000006.ckpt" in str(list(tmp_path.rglob("step-*")))
    refused = train_here(tmp_path, "ckpt=a", "init_from=pretrained", tiny=False)
    assert refused.code == 1 and "init_from= cannot go with ckpt=" in refused.err


def test_a_run_goes_on_with_other_data(folder: Path) -> None:
    result = start(folder, "init_from=a", "name=b", "data.path=other.txt", "optim.lr=0", "model.dropout=0.1")
    assert result.code == 0, result.err
    before, after = (read_checkpoint(folder / f"runs/{run}/checkpoints/step-00000004.ckpt") for run in "ab")
    assert all(torch.equal(after["state_dict"][name], value) for name, value in before["state_dict"].items())
    assert after["tilegpt"]["tokenizer"] == before["tilegpt"]["tokenizer"]
    assert after["tilegpt"]["model"] == {**before["tilegpt"]["model"], "dropout": 0.1}


def test_a_run_of_ours_gives_its_trained_tokenizer(folder: Path) -> None:
    own = ("model.n_layer=1", "model.n_embd=32", "data.tokenizer.vocab_size=270")
    assert start(folder, "name=own", *own).code == 0
    result = start(folder, "init_from=own/best", "data.path=other.txt", "name=own-b", "trainer.max_steps=1")
    assert result.code == 0, result.err
    header = read_checkpoint(folder / "runs/own-b/checkpoints/step-00000001.ckpt")["tilegpt"]
    assert header["tokenizer"]["kind"] == "bpe" and header["model"]["vocab_size"] == 270


def test_another_tokenizer_has_to_have_the_same_tokens(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own = ("model.n_layer=1", "model.n_embd=32", "trainer.max_steps=1")
    assert start(folder, "name=bytes", *own, "data.tokenizer.kind=byte").code == 0
    same, other = folder / "same", folder / "foreign"
    for place, tokenizer in ((same, ByteTokenizer()), (other, CharTokenizer("".join(map(chr, range(257)))))):
        place.mkdir()
        files = tokenizer_files(tokenizer, 16)
        for name in files if place == same else ["tokenizer.json"]:
            (place / name).write_text(files[name])
    begin = ("init_from=bytes", "data.tokenizer.kind=file", "trainer.max_steps=1")
    result = start(folder, *begin, "name=other", f"data.tokenizer.path={other}/tokenizer.json")
    assert result.code == 1 and "was trained with another tokenizer than the data has" in result.err
    result = start(folder, *begin, "name=same", f"data.tokenizer.path={same}/tokenizer.json")
    assert result.code == 0 and "could not be compared" not in result.out, result.err

    def gone() -> None:
        raise Unfinished("no network")

    monkeypatch.setattr("data.hub.load_gpt2_encoding", gone)
    initial = Initial("gpt2-run", {"vocab_size": 257}, {"kind": "gpt2"}, lambda net: None)
    net = SimpleNamespace(config=SimpleNamespace(vocab_size=257))
    with contextlib.redirect_stdout(io.StringIO()) as out:
        initial.load_into(net, {}, ByteTokenizer())
    assert "could not be compared with the one of init_from" in out.getvalue()


def test_positions_beyond_seq_len_are_kept(folder: Path) -> None:
    result = start(folder, "init_from=gpt2", "name=g", "trainer.max_steps=1")
    assert result.code == 0, result.err
    net = load_model(str(folder / "runs/g/checkpoints/step-00000001.ckpt"), [])[0]
    assert net.transformer.wpe.weight.shape == (96, 64) and net.config.seq_len == 16


def test_the_run_is_named_after_what_it_starts_from(folder: Path) -> None:
    assert start(folder, "init_from=gpt2", "trainer.max_steps=1").code == 0
    assert (folder / "runs/gpt2-naive").is_dir()


def test_beyond_the_trained_context_only_when_asked(folder: Path) -> None:
    result = start(folder, "init_from=pretrained", "seq_len=128", "name=long")
    assert result.code == 1 and "seq_len=128 is beyond the 96 positions that the weights know" in result.err
    assert not (folder / "runs/long").exists()
    longer = (
        "seq_len=128",
        "model.max_positions=null",
        "model.rope_scaling=[linear,2]",
        "trainer.max_steps=1",
    )
    assert start(folder, "init_from=pretrained", "name=long", *longer).code == 0
    net = load_model(str(folder / "runs/long/checkpoints/step-00000001.ckpt"), [])[0]
    assert net.rope.shape[1] == 128 and net.config.rope_scaling == ["linear", 2]
    result = start(folder, "init_from=gpt2", "name=long2", *longer)
    assert result.code == 1 and "seq_len=128 is beyond the 96 positions" in result.err


REFUSED = {
    "architecture": (["init_from=pretrained", "model=gpt2"], "brings its architecture: leave model out"),
    "a shape": (["init_from=pretrained", "model.n_layer=2"], "leave model.n_layer out"),
    "another vocabulary": (["init_from=pretrained", "data.tokenizer.kind=byte"], "tokens, and the data 257"),
    "a tokenizer that is trained": (
        ["init_from=pretrained", "data.tokenizer.vocab_size=300"],
        "init_from=pretrained brings its tokenizer, and none is trained: leave data.tokenizer.vocab_size out",
    ),
    "a mask that it lacks": (
        ["init_from=pretrained", "model.causal=false", "data.mask_fraction=0.2"],
        "data.mask_fraction=0.2 adds a mask token, which it was not trained with; leave that out",
    ),
    "no mask for one that has it": (["init_from=masked"], "one is the mask of data.mask_fraction=0.3"),
    "a file of it": (
        ["init_from=pretrained/model.safetensors"],
        "one file of a model: give its folder, init_from=pretrained, which",
    ),
    "nothing there": (["init_from=../nowhere/at/all"], "there is no such folder or run"),
    "a pickle": (["init_from=pickle"], "a pickle, and reading that could run code"),
    "a truncated shard": (["init_from=short"], "is truncated or damaged"),
    "a tokenizer that does not fit": (["init_from=large"], "tokenizer has 320 tokens, and its model 300"),
    "no tokenizer": (["init_from=mute"], "it has no tokenizer.json"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_bad_input_is_one_message_and_nothing_is_written(case: str, folder: Path) -> None:
    for name in ("pickle", "short", "large", "mute"):
        if not (folder / name).exists():
            shutil.copytree(folder / "pretrained", folder / name)
    (folder / "pickle/model.safetensors").unlink(missing_ok=True)
    (folder / "pickle/pytorch_model.bin").touch()
    file = folder / "short/model.safetensors"
    file.write_bytes(file.read_bytes()[:5000])
    make_tokenizer(folder / "large", more=40)
    (folder / "mute/tokenizer.json").unlink(missing_ok=True)
    before = sorted(folder.glob("runs/*"))
    overrides, words = REFUSED[case]
    result = start(folder, "name=bad", *overrides)
    assert result.code == 1 and words in result.err
    *others, last = result.err.splitlines()
    assert last.startswith("error: ") and all(line.startswith("prepared ") for line in others)
    assert sorted(folder.glob("runs/*")) == before


def test_random_tokens_need_its_vocabulary(folder: Path) -> None:
    words = "init_from=a", "data=synthetic", "seq_len=16", "trainer.accelerator=cpu", "name=bad"
    result = train_here(folder, *words, tiny=False)
    assert result.code == 1 and "and the data 50304: set data.corpus.vocab_size=300." in result.err


def test_a_hub_that_does_not_answer(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    result = start(folder, "init_from=org/model", "name=bad")
    assert result.code == 1 and "the Hugging Face Hub did not give it" in result.err
    assert result.err.count("\n") == 1 and not (folder / "runs/bad").exists()


def test_the_tokenizer_of_a_file_is_known_by_its_content(folder: Path) -> None:
    """For a model trained from the start, with somebody's tokenizer."""
    shutil.copytree(folder / "gpt2", folder / "moved", dirs_exist_ok=True)
    own = ("model.n_layer=1", "model.n_embd=32", "trainer.max_steps=1", "data.tokenizer.kind=file")
    for place in ("gpt2", "moved"):
        result = start(folder, f"name=file-{place}", *own, f"data.tokenizer.path={place}/tokenizer.json")
        assert result.code == 0, result.err
    prepared = [json.loads(path.read_text()) for path in (folder / "prepared").glob("*-file-*/meta.json")]
    assert sum(meta["vocab_size"] == 280 for meta in prepared) == 1
    result = start(folder, "name=none", *own, "data.tokenizer.path=gone.json")
    assert (
        result.code == 1 and "data.tokenizer.path=gone.json: kind=file needs a tokenizer.json" in result.err
    )
