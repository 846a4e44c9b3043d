"""The commands that compute with a trained model take a pretrained one as they take a run."""

from __future__ import annotations

import contextlib
import json
import math
import re
import sys
from pathlib import Path

import pytest
import torch

from conf import trained
from conf.trained import is_pretrained, load_model
from conf.values import UserError
from model.gpt import Unfilled
from scripts import compare, evaluate, generate, harness
from tests.pretrained import KINDS, make_folder

TEXT = "attention is all you need and some tiles of keys " * 4


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pretrained")
    make_folder(folder / "qwen", "qwen3")
    make_folder(folder / "small", "qwen3", num_hidden_layers=1)
    of_chats = (
        folder / "small/tokenizer_config.json"
    )  # as a base model and one for chats have the same tokens
    of_chats.write_text(json.dumps(json.loads(of_chats.read_text()) | {"chat_template": "{{ messages }}"}))
    (folder / "text.txt").write_text(TEXT)
    return folder


@pytest.fixture(autouse=True)
def _there(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)


def test_it_is_the_same_model() -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    net, tokenizer, cfg = load_model("qwen", ["attention=tiled"])
    theirs, ids = AutoModelForCausalLM.from_pretrained("qwen").eval(), tokenizer.encode(TEXT)
    assert ids == AutoTokenizer.from_pretrained("qwen")(TEXT)["input_ids"]
    assert (net.config.seq_len, cfg.attention.name) == (96, "tiled")
    with torch.no_grad():
        ours, other = net.eval()(torch.tensor([ids]))[..., :300], theirs(torch.tensor([ids])).logits
    assert torch.allclose(ours, other, atol=2e-5 * float(other.abs().max()))


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_of_it_is_left_unfilled(kind: str, tmp_path: Path) -> None:
    make_folder(tmp_path, kind)
    torch.use_deterministic_algorithms(True)  # which fills new memory with NaN
    try:
        with Unfilled():
            assert torch.nn.Linear(2, 2).weight.isnan().all()
        net = load_model(str(tmp_path), [])[0]
    finally:
        torch.use_deterministic_algorithms(False)
    assert all(weight.isfinite().all() for weight in net.state_dict().values())


@pytest.mark.parametrize("more", [(), ("speculate=small",), ("cache=paged", "attention.decode=naive")])
def test_it_generates_what_transformers_does(
    more: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained("qwen")
    prompt = tokenizer("attention is", return_tensors="pt")
    expected = AutoModelForCausalLM.from_pretrained("qwen").generate(
        **prompt, max_new_tokens=24, do_sample=False, pad_token_id=0
    )[0]
    words = ["ckpt=qwen", "prompt=attention is", "max_new_tokens=24", "temperature=0", "device=cpu", *more]
    generate.main(words)
    assert capsys.readouterr().out.rstrip("\n") == tokenizer.decode(expected, skip_special_tokens=True)


def test_it_answers_a_question(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    make_folder(tmp_path, "qwen3")
    words = [
        f"ckpt={tmp_path}",
        "prompt=keys?",
        "chat=true",
        "max_new_tokens=8",
        "temperature=0",
        "device=cpu",
    ]
    with pytest.raises(SystemExit):
        generate.main(words)
    assert "chat=true needs a model whose tokenizer has a chat template" in capsys.readouterr().err
    template = (
        "{% for m in messages %}<|endoftext|>{{ m.content }}{% endfor %}{{ '!' if add_generation_prompt }}"
    )
    (tmp_path / "chat_template.jinja").write_text(template)
    tokenizer, theirs = (
        AutoTokenizer.from_pretrained(tmp_path),
        AutoModelForCausalLM.from_pretrained(tmp_path),
    )
    ids = torch.tensor([tokenizer("<|endoftext|>keys?!")["input_ids"]])
    answer = theirs.generate(ids, max_new_tokens=8, do_sample=False, pad_token_id=0)[0, ids.shape[1] :]
    generate.main(words)
    assert capsys.readouterr().out.rstrip("\n") == f"keys?\n{tokenizer.decode(answer)}"


def test_a_text_begins_as_the_tokenizer_says(capsys: pytest.CaptureFixture[str]) -> None:
    """Most Llamas, and Mistral, have been trained with <s> before each text."""
    from transformers import AutoTokenizer

    make_folder(Path("begun"), "llama")
    path = Path("begun/tokenizer.json")
    start = "<|endoftext|>"
    single = [{"SpecialToken": {"id": start, "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}]
    rules = json.loads(path.read_text())
    rules["post_processor"]["single"] = single
    rules["post_processor"]["special_tokens"] = {start: {"id": start, "ids": [0], "tokens": [start]}}
    path.write_text(json.dumps(rules))
    net, tokenizer, _ = load_model("begun", [])
    ids = tokenizer.encode("attention is")
    assert ids == AutoTokenizer.from_pretrained("begun")("attention is")["input_ids"]
    assert ids[0] == 0 and tokenizer.encode_array("attention is").tolist() == ids[1:]
    with torch.no_grad():
        nats = float(net.eval()(torch.tensor([ids[:-1]]), targets=torch.tensor([ids[1:]])))
    Path("short.txt").write_text("attention is")
    evaluate.main(["ckpt=begun", "text=short.txt", "device=cpu"])
    bits = f"{nats / math.log(2) / 12:.4f} bits a byte"
    assert f"{bits} ({len(ids) - 1} tokens)" in capsys.readouterr().out
    assert harness.Answers(net, tokenizer).rolling("attention is") == pytest.approx(-nats, abs=1e-3)
    generate.main(["ckpt=begun", "prompt=attention is", "max_new_tokens=2", "device=cpu"])
    assert capsys.readouterr().out.startswith("attention is")
    rules["post_processor"]["special_tokens"][start]["ids"] = [10**6]
    path.write_text(json.dumps(rules))
    with pytest.raises(UserError, match=r"^ckpt=begun is refused: .* puts token 1000000 before a text, and"):
        load_model("begun", [])


def test_its_perplexity_in_windows(capsys: pytest.CaptureFixture[str]) -> None:
    net, tokenizer, _ = load_model("qwen", [])
    ids = torch.tensor([tokenizer.encode(TEXT)[:41]])
    with torch.no_grad():
        nats = float(net.eval()(ids[:, :-1], targets=ids[:, 1:]))
        pieces = [float(net(ids[:, i : i + 8], targets=ids[:, i + 1 : i + 9])) for i in range(0, 40, 8)]
    Path("begin.txt").write_text(tokenizer.decode(ids[0].tolist()))
    evaluate.main(["ckpt=qwen", "text=begin.txt", "device=cpu"])
    said = capsys.readouterr().out
    assert f"{nats / 40:.4f} nats a token" in said and "(40 tokens)" in said
    rest = ["ckpt=qwen", "text=begin.txt", "device=cpu", "context=8", "stride=8"]
    evaluate.main(rest)
    shorter = float(re.findall(r"perplexity ([\d.]+)", capsys.readouterr().out)[0])
    assert shorter == pytest.approx(math.exp(sum(pieces) / 40), abs=1e-3 * shorter)
    with contextlib.suppress(SystemExit):
        evaluate.main([*rest[:3], "context=97"])
    assert "context=97: it needs to be a whole number, at least 1 and at most 96" in capsys.readouterr().err


def test_attentions_are_compared_on_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["ckpt=qwen", f"text={TEXT}", "attention=tiled", "against=naive", "device=cpu"]
    monkeypatch.setattr(sys, "argv", ["compare.py", *words])
    with pytest.raises(SystemExit) as end:
        compare.main()
    assert not end.value.code and "(context 96)" in capsys.readouterr().out


def test_a_run_comes_first_and_a_name_alone_is_one(tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    (runs / "qwen/checkpoints").mkdir(parents=True)
    (runs / "org").mkdir()
    assert not any(is_pretrained(name, runs) for name in ("qwen", "qwen/best", "text.txt", "gpt2", "last"))
    assert not any(
        is_pretrained(name, runs) for name in (f"{runs}/a/b", "nobody/best", "x/y.ckpt", "../qwen/x", "a/b/c")
    )
    assert all(is_pretrained(name, runs) for name in ("small", "./small", "org/model", "Qwen/Qwen3-0.6B"))


def test_a_folder_called_last_is_not_what_last_means() -> None:
    make_folder(Path("last"), "llama")
    assert is_pretrained("./last", Path("runs")) and not is_pretrained("last", Path("runs"))


def test_wide_heads_have_a_shorter_context(monkeypatch: pytest.MonkeyPatch) -> None:
    """The table of a rotary embedding is as long as the context, and as wide as a head."""
    monkeypatch.setattr(trained, "TABLE", 24 * 40 + 23)
    net = load_model("qwen", [])[0]
    assert net.config.seq_len == 40 and net.rope.shape == (2, 40, 12)


def test_one_file_of_it_is_answered_with_the_folder() -> None:
    with pytest.raises(UserError, match=r"^ckpt=qwen/model.safetensors is one file .* ckpt=qwen, which"):
        load_model("qwen/model.safetensors", [])


def test_what_cannot_be_loaded_is_named_by_the_key(monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    make_folder(Path("bare"), "gpt2")
    Path("bare/tokenizer.json").unlink()
    with pytest.raises(UserError, match=r"^speculate=bare is refused: it has no tokenizer.json"):
        load_model("bare", [], key="speculate")
    make_folder(Path("long"), "llama", max_position_embeddings=2**24)
    assert load_model("long", [])[0].config.seq_len == 2**17
    asked: list[str] = []
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda name, **_: asked.append(name) or "qwen")
    assert load_model("Qwen/Qwen3-0.6B", [])[0].config.n_layer == 3 and asked == ["Qwen/Qwen3-0.6B"]

    def offline(name: str, **_: object) -> str:
        raise OSError("no network")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", offline)
    with pytest.raises(UserError, match=r"^ckpt=a/b: there is no such folder or run, .*: no network"):
        load_model("a/b", [])
