"""`python train.py --help`: each key with its comment and its allowed values, and how a value is quoted."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from conf.explain import HEADER, comments, explain
from data.corpora import TextCorpus
from data.tokenizers import DEFAULTS
from model.config import GPTConfig
from model.training import runtime
from model.training.checks import check
from tests.running import train_here, write_book


def help_of(monkeypatch: pytest.MonkeyPatch, columns: int, *overrides: str) -> dict[str, str]:
    """What the help says, by key=value, or by group=choice."""
    monkeypatch.setenv("COLUMNS", str(columns))
    text = explain([*overrides])
    assert max(map(len, text.splitlines())) <= columns and "_target_" not in text
    assert not any(line != line.rstrip() for line in text.splitlines())
    keys = text.partition("--hydra-help.")[2]  # the head has examples
    found = re.findall(r"^ {0,2}([\w.]+=\S*|callbacks.interrupt) +(\S.*(?:\n {30}.*)*)", keys, re.MULTILINE)
    return {key: " ".join(comment.split()) for key, comment in found}


@pytest.mark.parametrize(
    "overrides",
    [
        (),
        ("data=text", "attention=cuda_tiled", "model=llama_tiny", "logger=wandb", "schedule=wsd"),
        ("data=tinystories", "attention=sdpa", "trainer=ddp", "~callbacks", "experiment=gpt2_124m"),
        ("data=synthetic", "attention=tiled", "schedule=constant", "~logger"),
    ],
)
def test_every_key_is_explained(overrides: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    narrow, wide = (help_of(monkeypatch, columns, *overrides) for columns in (80, 120))
    assert narrow == wide
    keys = re.findall(r"^  ([a-z][\w.]*=\S*)", explain([*overrides]), flags=re.MULTILINE)
    assert len(keys) > 40 and set(keys) <= narrow.keys()


def test_what_a_newcomer_asks(monkeypatch: pytest.MonkeyPatch) -> None:
    said = help_of(monkeypatch, 80)
    assert "learned | rope | alibi | t5 | none (the word, not null)" in said["model.position=learned"]
    assert "devices x data.batch_size x seq_len; null: no accumulation" in said["tokens_per_step=null"]
    assert help_of(monkeypatch, 80, "data=text", "data.path='a b'")["data.val_fraction=0.1"]


def test_the_help_without_a_group(tmp_path: Path) -> None:
    result = train_here(tmp_path, "callbacks=null", "--help", tiny=False)
    assert result.code == 0 and "\ncallbacks=null " in result.out, result.err
    assert "\n  callbacks." not in result.out


def test_allowed_values_are_those_of_the_code(monkeypatch: pytest.MonkeyPatch) -> None:
    said = help_of(monkeypatch, 120, "data=text") | help_of(monkeypatch, 120, "attention=sdpa")

    def named(start: str) -> set[str]:
        text = next(comment for key, comment in said.items() if key.startswith(f"{start}="))
        return set(re.search(r"[\w-]+( \| [\w-]+)+", text)[0].split(" | "))

    def refused(call, *args, **kwargs) -> set[str]:
        with pytest.raises(ValueError) as error:
            call(*args, **kwargs)
        return set(re.findall(r"[\w-]+", str(error.value).split("choose")[-1].split("one of")[-1])) - {"or"}

    for key in ("position", "norm", "mlp"):
        assert named(f"model.{key}") == refused(GPTConfig, vocab_size=8, **{key: "zzz"})
    assert named("precision") == refused(runtime.precision, "zzz", None)
    assert named("data.tokenizer.kind") == set(DEFAULTS)
    config = {group: {"x": 1} for group in ("attention", "model", "data", "schedule", "trainer")}
    config |= {"optim": {"fused": True}, "compile": "zzz"}
    assert named("compile") == refused(check, config, None, {})
    for value in named("data.on_bad_encoding"):
        TextCorpus(path="book.txt", on_bad_encoding=value)
    for value in named("trainer.accelerator") - {"gpu", "cuda", "mps"}:
        assert runtime.device(value).type in ("cpu", "cuda", "mps")


def test_comments_are_read_from_the_yaml(tmp_path: Path) -> None:
    file = tmp_path / "some.yaml"
    file.write_text(
        "# header\n\na: 1 # one\nb: 'x # y'   # two # three\n# long,\n# and longer\nc: [1, 2]\n"
        "d:\n  e: ${a}  # nested\n  f: 2\n# of g\ng:\n  h: {i: 1}  # flow\n"
    )
    assert comments(file) == {
        "a": "one", "b": "two # three", "c": "long, and longer", "d.e": "nested", "g": "of g", "g.h": "flow"
    }  # fmt: skip


@pytest.mark.parametrize("number", [0, 1])
def test_the_quoting_that_it_shows_is_what_works_in_bash(number: int, tmp_path: Path) -> None:
    line = re.findall(r"^  python (train.py data=text .*)$", HEADER, flags=re.MULTILINE)[number]
    ran = subprocess.run(["bash", "-c", f"printf '%s\\0' {line}"], capture_output=True, text=True, check=True)
    *_, override = ran.stdout.rstrip("\0").split("\0")
    write_book(tmp_path).rename(tmp_path / ["my book (1).txt", "it's mine.txt"][number])
    result = train_here(tmp_path, override, "trainer.max_steps=1")
    assert result.code == 0, result.err


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("data.path=my book (1).txt", """quotes within quotes: 'data.path="my book (1).txt"'."""),
        ("data.path=b\u00fccher.txt", """quotes within quotes: 'data.path="b\u00fccher.txt"'."""),
        ("seq_len", "seq_len has no value: write seq_len=..."),
    ],
)
def test_a_value_without_its_quotes(override: str, words: str, tmp_path: Path) -> None:
    result = train_here(tmp_path, override)
    assert result.code == 1 and words in result.err and len(result.err.splitlines()) == 1
