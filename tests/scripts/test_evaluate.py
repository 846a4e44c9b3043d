"""scripts/evaluate.py on a trained run, and what the lm-evaluation-harness asks of it."""

from __future__ import annotations

import contextlib
import re
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import torch

from conf.trained import load_model
from model.evaluation import score
from model.generation.generate import generate
from model.generation.weights import quantise_weights
from scripts import evaluate, harness
from tests.running import train_here


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("evaluate")
    assert train_here(folder, "name=a", "trainer.max_steps=30").code == 0
    (folder / "other.txt").write_text("keys and tiles and some attention, né " * 5, encoding="utf-8")
    return folder


def said(folder: Path, capsys: pytest.CaptureFixture[str], *words: str) -> str:
    capsys.readouterr()
    with contextlib.chdir(folder), contextlib.suppress(SystemExit):
        evaluate.main(words)
    out, err = capsys.readouterr()
    return out + err


def test_the_figures_are_those_of_the_score(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    net, tokenizer, _ = load_model(str(folder / "runs/a/checkpoints/best.ckpt"), [])
    text = (folder / "other.txt").read_text(encoding="utf-8")
    for stride in (16, 4):
        found = score(net.eval(), tokenizer.encode(text), stride)
        out = said(
            folder, capsys, "ckpt=a", "text=other.txt", f"stride={stride}", "batch=3", "attention=tiled"
        )
        assert f"({found.tokens:,} tokens)" in out
        numbers = [float(number) for number in re.findall(r"\d+\.\d{4}", out)]
        nats = found.nats / found.tokens
        assert numbers == pytest.approx([found.perplexity, nats, nats / 0.693147], abs=2e-4)  # a byte a token
    assert 1 < found.perplexity < 257


def test_weights_in_8_bits(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    net, tokenizer, _ = load_model(str(folder / "runs/a/checkpoints/best.ckpt"), [])
    ids = tokenizer.encode((folder / "other.txt").read_text(encoding="utf-8"))
    before = score(net.eval(), ids).nats
    quantise_weights(net, "int8")
    found = score(net, ids)
    out = said(folder, capsys, "ckpt=a", "text=other.txt", "weight_dtype=int8")
    assert f"perplexity {found.perplexity:.4f}," in out
    assert found.nats != before and found.nats == pytest.approx(before, rel=0.01)


def test_of_a_first_character_the_predicted_bytes_count(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The second of é's, and three more."""
    (folder / "first.txt").write_text("é na", encoding="utf-8")
    out = said(folder, capsys, "ckpt=a", "text=first.txt")
    _, nats, bits = (float(number) for number in re.findall(r"\d+\.\d{4}", out))
    assert "(4 tokens)" in out and bits == pytest.approx(nats / 0.693147, abs=2e-4)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("ckpt=a",), "text=... has to be given"),
        (("ckpt=a", "text=gone.txt"), "text=gone.txt: No such file or directory"),
        (("ckpt=a", "text=bad.txt"), "text=bad.txt is not UTF-8 text"),
        (("ckpt=a", "text=other.txt", "stride=none"), "stride=none: it needs to be a whole number"),
        (
            ("ckpt=a", "text=other.txt", "stride=17"),
            "stride=17: it needs to be a whole number, at least 1 and at",
        ),
        (("ckpt=a", "text=other.txt", "weight_dtype=int4"), "weight_dtype=int4: choose one of auto, int8."),
        (("ckpt=a", "text=empty.txt"), "text=empty.txt: it has 0 tokens; a perplexity needs 2 or more"),
        (("ckpt=a", "text=other.txt", "strid=4"), "There is no key strid; did you mean stride?"),
        (("ckpt=a", "text=other.txt", "model.window=4"), "key model.window. This command has batch,"),
    ],
)
def test_mistakes_are_one_message(
    words: tuple[str, ...], message: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "bad.txt").write_bytes(b"\xff\xfe\x00")
    (folder / "empty.txt").touch()
    out = said(folder, capsys, *words)
    assert out.startswith("error: ") and message in out and out.count("\n") == 1


def test_too_little_memory_is_one_message(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.nn.Module, "to", mock.Mock(side_effect=torch.OutOfMemoryError("of 9 GiB")))
    out = said(folder, capsys, "ckpt=a", "text=other.txt")
    assert (
        out == "error: Out of memory (of 9 GiB): give a smaller batch= or context=, or another attention=.\n"
    )


def test_a_model_that_sees_what_follows_gives_no_perplexity(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train_here(folder, "name=both", "model.causal=false", "trainer.max_steps=1").code == 0
    out = said(folder, capsys, "ckpt=both", "text=other.txt")
    assert out.startswith("error: ckpt=both was trained with model.causal=false") and out.count("\n") == 1


@pytest.fixture(scope="module")
def answers(folder: Path) -> harness.Answers:
    net, tokenizer, _ = load_model(str(folder / "runs/a/checkpoints/best.ckpt"), [])
    return harness.Answers(net, tokenizer)


def test_the_likelihood_of_a_text_is_the_sum_of_those_of_its_answers(answers: harness.Answers) -> None:
    assert answers.loglikelihood("", "att is all")[0] == pytest.approx(
        answers.rolling("att is all"), rel=1e-6
    )
    parts = [answers.loglikelihood("att", " is")[0], answers.loglikelihood("att is", " all")[0]]
    assert sum(parts) == pytest.approx(answers.loglikelihood("att", " is all")[0], rel=1e-6)
    assert answers.loglikelihood("att ", "is")[0] == parts[0]


def test_answers_of_a_trained_model_are_likelier(answers: harness.Answers) -> None:
    assert answers.loglikelihood("all you", " need")[0] > answers.loglikelihood("all you", " zzzz")[0]
    greedy = answers.generate("all", [], 4)
    assert answers.loglikelihood("all", greedy)[1] and not answers.loglikelihood("all", "QQ")[1]


def test_text_ends_where_it_is_asked_to(answers: harness.Answers) -> None:
    whole = answers.generate("all you", [], 8)
    tokenizer = answers.tokenizer
    ids = tokenizer.encode("all you")
    assert whole == tokenizer.decode(
        generate(answers.net, [ids], max_new_tokens=8, temperature=0.0).tokens[0]
    )
    end = whole[3]
    assert answers.generate("all you", [end, "~~~"], 8) == whole[: whole.index(end)]
    assert answers.generate("", ["~~~"], 4)
    beyond = answers.generate("all you need is", [], 20)  # the trained context is 16
    assert len(tokenizer.encode("all you need is" + beyond)) >= 20 and beyond.startswith(
        answers.generate("all you need is", [], 1)
    )


def test_texts_that_are_empty_or_beyond_the_context(answers: harness.Answers) -> None:
    assert answers.rolling("") == 0.0 and answers.loglikelihood("all", "") == (0.0, True)
    text = "attentio" * 8
    halves = [answers.loglikelihood(text[:at], text[at : at + 8])[0] for at in range(8, 64, 8)]
    assert answers.loglikelihood(text[:8], text[8:])[0] == pytest.approx(sum(halves), rel=1e-5)


def test_the_harness_gets_its_own_class(answers: harness.Answers) -> None:
    pytest.importorskip("lm_eval")
    model = harness.harness_model(answers)
    request = SimpleNamespace(args=("all you", " need"))
    assert model.loglikelihood([request]) == [answers.loglikelihood("all you", " need")]
    assert model.loglikelihood_rolling([SimpleNamespace(args=("all you",))]) == [answers.rolling("all you")]
    request = SimpleNamespace(args=("all you", {"until": "e", "max_gen_toks": 8}))
    assert model.generate_until([request]) == [answers.generate("all you", ["e"], 8)]


def test_without_the_harness_it_is_said(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: object
) -> None:
    monkeypatch.setitem(__import__("sys").modules, "lm_eval", None)
    with pytest.raises(SystemExit):
        harness.main(["ckpt=a", "tasks=hellaswag"])
    assert capsys.readouterr().err == "error: lm_eval is not installed: pip install -e '.[eval]'.\n"
