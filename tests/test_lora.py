"""finetune=lora: what trains, what a checkpoint holds, what it gives merged; resumed and refused."""

from __future__ import annotations

import contextlib
import copy
import hashlib
import shutil
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from omegaconf import OmegaConf
from safetensors.torch import load_file, save_file

from attention.naive import NaiveAttention
from conf.initial import adapters_of, finetuned
from conf.trained import load_model
from model.gpt import GPT, GPTConfig
from model.lora import Adapters, add_adapters
from model.pretrained.base_weights import write_base
from model.training.checkpoint import read_checkpoint, write_checkpoint
from tests.pretrained import make_folder
from tests.running import EXACT, SHORT, Result, rows, train_here, write_book

pytest.importorskip("peft")

QUICK = (*SHORT, "trainer.max_steps=6", "trainer.val_check_interval=3", "optim.lr=0.05")
LORA = ("init_from=gpt2", "finetune=lora", "finetune.rank=4", "finetune.dropout=0.1")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With a tiny GPT-2 in gpt2/, and run `a`, its adapters."""
    folder = tmp_path_factory.mktemp("lora")
    write_book(folder)
    make_folder(folder / "gpt2", "gpt2")
    result = start(folder, *LORA, "name=a")
    assert result.code == 0, result.err
    assert "LoRA of rank 4: 0.01M parameters train" in result.out
    return folder


def start(folder: Path, *overrides: str) -> Result:
    return train_here(folder, *QUICK, *overrides, tiny=False)


def ckpt(folder: Path, run: str = "a", step: int = 6) -> Path:
    return folder / f"runs/{run}/checkpoints/step-{step:08d}.ckpt"


def test_a_checkpoint_holds_the_adapters_alone(folder: Path) -> None:
    content = read_checkpoint(ckpt(folder))
    names = content["state_dict"]
    assert len(names) == 3 * 4 * 2 and all(".lora_A." in name or ".lora_B." in name for name in names)
    trained = sum(tensor.numel() for tensor in names.values())
    assert sum(x.numel() for x in content["optimizer_states"][0]["state"][0].values()) < trained
    whole = sum(tensor.numel() for tensor in load_model(str(ckpt(folder)), [])[0].state_dict().values())
    assert ckpt(folder).stat().st_size < whole * 4 < (folder / "runs/a/base.safetensors").stat().st_size * 1.5
    assert set(content["tilegpt"]["adapters"]) == {"rank", "alpha", "targets", "base"}


def with_adapters(folder: Path) -> GPT:
    """As the run has it: unmerged."""
    from safetensors.torch import load_file

    content = read_checkpoint(ckpt(folder))
    net = GPT(GPTConfig(**content["tilegpt"]["model"]), NaiveAttention())
    net.load_state_dict(load_file(folder / "runs/a/base.safetensors"), strict=False)
    add_adapters(net, Adapters.of_file(content["tilegpt"]["adapters"]), dropout=0.1)
    adapters = {name.removeprefix("net."): value for name, value in content["state_dict"].items()}
    missing, unexpected = net.load_state_dict(adapters, strict=False)
    assert not unexpected and not any("lora" in name for name in missing)
    return net.eval()


@torch.no_grad()
def test_merged_equals_unmerged_within_rounding(folder: Path) -> None:
    ids = torch.randint(280, (4, 16), generator=torch.Generator().manual_seed(1))
    merged, unmerged = load_model(str(ckpt(folder)), [])[0].eval()(ids), with_adapters(folder)(ids)
    assert torch.allclose(merged, unmerged, atol=1e-5 * float(unmerged.abs().max()))
    untouched = with_adapters(folder)
    for name, weight in untouched.named_parameters():
        if ".lora_B." in name:
            weight.zero_()
    assert not torch.allclose(merged, untouched(ids), atol=1e-2)


def test_the_loss_falls_and_the_base_stays(folder: Path) -> None:
    from safetensors.torch import load_file

    assert start(folder, "init_from=gpt2", "name=before", "trainer.max_steps=1", "optim.lr=0").code == 0
    losses = [float(row["val/loss"]) for row in rows(folder / "runs/a").values() if row.get("val/loss")]
    assert losses[-1] < losses[0]
    base = load_file(folder / "runs/a/base.safetensors")
    before = load_model(str(ckpt(folder, "before", 1)), [])[0].state_dict()
    assert all(torch.equal(base[name], before[name]) for name in base)


def test_it_resumes_bit_by_bit(folder: Path) -> None:
    assert start(folder, *LORA, "name=half", "trainer.max_steps=3", "schedule=constant").code == 0
    assert start(folder, *LORA, "name=once", "schedule=constant").code == 0
    assert train_here(folder, "ckpt=half", "trainer.max_steps=6", tiny=False).code == 0
    once, half = (rows(folder / "runs" / name) for name in ("once", "half"))
    assert [[once[step].get(key) for key in EXACT] for step in once] == [
        [half[step].get(key) for key in EXACT] for step in half
    ]
    ours, theirs = (read_checkpoint(ckpt(folder, name))["state_dict"] for name in ("once", "half"))
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_under_another_name_it_has_its_base_too(folder: Path) -> None:
    first = str(ckpt(folder, step=3))
    result = train_here(folder, f"ckpt={first}", "name=fork", "trainer.max_steps=5", tiny=False)
    assert result.code == 0, result.err
    assert load_model(str(ckpt(folder, "fork", 5)), [])[0].config.n_layer == 3


def test_a_base_that_an_attempt_without_a_checkpoint_left_is_replaced(tmp_path: Path) -> None:
    """As of a run that was killed early, whose name another init_from gets."""
    nets = [
        GPT(GPTConfig(vocab_size=9, seq_len=4, n_layer=1, n_head=1, n_embd=8), NaiveAttention()) for _ in "ab"
    ]
    written = [write_base(net, tmp_path) for net in nets]
    assert (
        written[1] == hashlib.sha256((tmp_path / "base.safetensors").read_bytes()).hexdigest() != written[0]
    )
    base, weights = load_file(tmp_path / "base.safetensors"), nets[1].state_dict()
    assert all(torch.equal(base[name], weights[name]) for name in base)


@pytest.mark.parametrize(("rank", "writes"), [("0", True), ("1", False)])
def test_one_process_of_a_machine_writes_the_base(
    rank: str, writes: bool, tmp_path: Path, monkeypatch
) -> None:
    monkeypatch.setenv("LOCAL_RANK", rank)
    net = GPT(GPTConfig(vocab_size=9, seq_len=4, n_layer=1, n_head=1, n_embd=8), NaiveAttention())
    asked = {"rank": 2, "alpha": 2.0, "targets": ["attn.c_proj"], "dropout": 0.0}
    cfg = OmegaConf.create({"finetune": asked, "trainer": {}, "data": {}})
    said = finetuned(cfg, net, tmp_path, Mock(), None, None, adapters_of(cfg, starts=True))["adapters"]
    assert bool(said["base"]) is writes and (tmp_path / "base.safetensors").exists() is writes


def test_adapters_of_a_finetuned_run_start_from_the_merged_weights(folder: Path) -> None:
    result = start(folder, "init_from=a", "name=again", "trainer.max_steps=1", "optim.lr=0")
    assert result.code == 0, result.err
    merged, again = (
        load_model(str(path), [])[0].state_dict() for path in (ckpt(folder), ckpt(folder, "again", 1))
    )
    assert all(torch.equal(merged[name], again[name]) for name in merged)


def test_an_export_is_merged(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from transformers import AutoModelForCausalLM

    from scripts import export

    with contextlib.chdir(folder):
        export.main(["ckpt=a", "to=out"])
    ids = torch.randint(280, (2, 16))
    with torch.no_grad():
        theirs = AutoModelForCausalLM.from_pretrained(folder / "out").eval()(ids).logits
        ours = load_model(str(ckpt(folder)), [])[0].eval()(ids)[..., :300]
    assert torch.allclose(theirs, ours, atol=1e-4)


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (("finetune=lora",), "finetune=lora trains beside weights that are there: give init_from="),
        ((*LORA, "finetune.rank=0"), "finetune.rank=0: it needs to be a whole number, at least 1"),
        ((*LORA, "finetune.alpha=-1"), "finetune.alpha=-1: it needs to be a number above 0"),
        (
            (*LORA, "finetune.dropout=1"),
            "finetune.dropout=1: it needs to be a number, at least 0 and below 1",
        ),
        ((*LORA, "finetune.targets=[lm_head]"), "it needs to be some of attn.c_attn, attn.c_proj, mlp.c_fc"),
        ((*LORA, "trainer=fsdp2"), "finetune=lora does not go with trainer=fsdp2"),
    ],
)
def test_mistakes_are_said(overrides: tuple[str, ...], words: str, folder: Path) -> None:
    result = start(folder, "name=bad", *overrides, "data.data_dir=unprepared")
    assert result.code == 1 and words in result.err and not (folder / "runs/bad").exists()
    # a corpus may take hours to download and prepare: what needs none of it is refused before
    assert not (folder / "unprepared").exists()


@pytest.mark.parametrize("change", ["finetune.rank=8", "finetune.targets=[mlp.c_fc]", "finetune=full"])
def test_other_adapters_do_not_resume(change: str, folder: Path) -> None:
    result = train_here(folder, "ckpt=a", "trainer.max_steps=8", change, tiny=False)
    assert result.code == 1 and "A saved run cannot resume with another finetune." in result.err


def test_the_base_has_to_be_the_run_s_own(folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder / "runs/a", tmp_path / "runs/a")
    base = tmp_path / "runs/a/base.safetensors"
    base.write_bytes(base.read_bytes()[:-4] + b"\0\0\0\1")
    with pytest.raises(ValueError, match=r"base.safetensors is damaged, or of another run"):
        load_model(str(ckpt(tmp_path)), [])
    base.unlink()
    with pytest.raises(ValueError, match=r"base.safetensors is not there: .* holds adapters alone"):
        load_model(str(ckpt(tmp_path)), [])


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda base: base.pop("transformer.wte.weight"), "its weights lack lm_head.weight"),
        (lambda base: base.update(more=torch.ones(1)), "its weights have more, not as the model of its"),
        (lambda base: base.update({"transformer.wte.weight": torch.ones(3)}), r"has the shape \(3,\)"),
        (lambda base: base.update({"transformer.wte.weight": torch.ones(3).int()}), "no tensor of floating"),
    ],
)
def test_a_base_of_somebody_else_is_held_to_the_model(
    change: Any, words: str, folder: Path, tmp_path: Path
) -> None:
    """Before the model is built, which a config of theirs may size."""
    shutil.copytree(folder / "runs/a", tmp_path / "runs/a")
    change(weights := load_file(tmp_path / "runs/a/base.safetensors"))
    save_file(weights, tmp_path / "runs/a/base.safetensors")
    content = copy.deepcopy(read_checkpoint(ckpt(tmp_path)))
    digest = hashlib.sha256((tmp_path / "runs/a/base.safetensors").read_bytes()).hexdigest()
    content["tilegpt"]["adapters"]["base"] = digest
    write_checkpoint(content, ckpt(tmp_path))
    with pytest.raises(ValueError, match=rf"base.safetensors is refused: .*{words}"):
        load_model(str(ckpt(tmp_path)), [])


FIELDS: dict[str, Any] = {"rank": 4, "alpha": 16.0, "targets": ["mlp.c_fc"], "base": ""}
ATTACKS: dict[str, tuple[Any, str]] = {
    "no mapping": (7, "its adapters is a int"),
    "other keys": ({"rank": 4}, "its adapters are not rank, alpha, targets and base"),
    "a path": ({**FIELDS, "base": ["/etc/passwd"]}, "its adapters.base is a list"),
    "other targets": ({**FIELDS, "targets": ["wte"]}, "finetune.targets="),
    "text as targets": ({**FIELDS, "targets": "mlp.c_fc"}, "finetune.targets="),
    "huge": ({**FIELDS, "rank": 2**40}, "finetune.rank=1099511627776"),
    "fewer": (FIELDS, "its weights have net.transformer"),
}  # fmt: skip


@pytest.mark.parametrize("attack", ATTACKS)
def test_adapters_of_somebody_else_are_held_to_the_model(attack: str, folder: Path, tmp_path: Path) -> None:
    value, words = ATTACKS[attack]
    content = copy.deepcopy(read_checkpoint(ckpt(folder)))
    content["tilegpt"]["adapters"] = value
    write_checkpoint(content, tmp_path / "evil.ckpt")
    with pytest.raises(ValueError, match=words) as caught:
        read_checkpoint(tmp_path / "evil.ckpt")
    assert str(caught.value).isprintable() and len(str(caught.value)) < 600
