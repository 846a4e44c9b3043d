"""data=chat: text as transformers writes it, targets in answers alone, attention within a conversation."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from data.chat import ChatCorpus, answers_of, chat_datamodule, encode_chat, require_messages
from data.chat_template import encode_question, render
from data.prepare import prepare
from data.tokenizer_file import JSONTokenizer, read_folder
from data.tokens import NO_TARGET
from tests.pretrained import make_folder, make_tokenizer
from tests.running import train_here

pytest.importorskip("transformers")

CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + "
    "'<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
LLAMA3 = (
    "{{- bos_token }}\n{%- for message in messages %}\n    {{- '<|start|>' + message['role'] + "
    "'<|end|>\n\n' + message['content'] | trim + '<|eot|>' }}\n{%- endfor %}\n"
    "{%- if add_generation_prompt %}\n    "
    "{{- '<|start|>assistant<|end|>\n\n' }}\n{%- endif %}"
)
FORGETS = "{% for message in messages[-2:] %}{{ message['content'] }}{% endfor %}"
TALK = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "all you need?"},
    {"role": "assistant", "content": "attention"},
    {"role": "user", "content": "and é?"},
    {"role": "assistant", "content": "tiles of keys"},
]


def tokenizer_of(folder: Path, template: str) -> JSONTokenizer:
    make_tokenizer(folder, more=2)
    (folder / "chat_template.jinja").write_text(template)
    return JSONTokenizer.from_dict(read_folder(folder))


def write(path: Path, talks: list[Any]) -> Path:
    path.write_text("\n".join(json.dumps({"messages": talk}) for talk in talks))
    return path


GENERATION = CHATML.replace("{{ '<|im_start|>' +", "{% generation %}{{ '<|im_start|>' +").replace(
    "{% endfor %}", "{% endgeneration %}{{ {'b': 1, 'a': 2} | tojson(sort_keys=true) }}{% endfor %}", 1
)


@pytest.mark.parametrize("template", [CHATML, LLAMA3, GENERATION], ids=["chatml", "llama3", "generation"])
@pytest.mark.parametrize("ask", [False, True])
def test_the_text_is_that_of_transformers(template: str, ask: bool, tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    ours, theirs = tokenizer_of(tmp_path, template), AutoTokenizer.from_pretrained(tmp_path)
    text = theirs.apply_chat_template(TALK, tokenize=False, add_generation_prompt=ask)
    assert render(ours, TALK, ask) == text
    ids, begins = ours.encode_special(text)
    assert (
        ids.tolist() == theirs(text, add_special_tokens=False)["input_ids"] and (np.diff(begins) >= 0).all()
    )


def test_a_question_is_that_of_transformers(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    ours, theirs = tokenizer_of(tmp_path, LLAMA3), AutoTokenizer.from_pretrained(tmp_path)
    asked = theirs.apply_chat_template([TALK[1]], tokenize=False, add_generation_prompt=True)
    expected = theirs(asked, add_special_tokens=False)["input_ids"]
    assert encode_question(ours, TALK[1]["content"]) == expected and expected[0] == ours.eot


def test_the_targets_are_the_answers(tmp_path: Path) -> None:
    tokenizer = tokenizer_of(tmp_path, CHATML)
    text, places = answers_of(tokenizer, TALK)
    assert [text[start:stop] for start, stop in places] == [
        "attention<|im_end|>\n",
        "tiles of keys<|im_end|>\n",
    ]
    ids = encode_chat(tokenizer, TALK)
    learnt = ids < NO_TARGET
    assert tokenizer.decode((ids & (NO_TARGET - 1)).tolist()) == text
    assert tokenizer.decode(ids[learnt].tolist()) == "attention<|im_end|>\ntiles of keys<|im_end|>\n"


def test_batches_ask_for_answers_within_their_conversation(tmp_path: Path) -> None:
    tokenizer_of(tmp_path, CHATML)
    talks = [[{**m, "content": f"{m['content']} {i}"} for m in TALK] for i in range(40)]
    data = chat_datamodule(
        {"kind": "file", "path": str(tmp_path / "tokenizer.json")},
        path=str(write(tmp_path / "chats.jsonl", talks)),
        data_dir=tmp_path / "prepared", seq_len=256, batch_size=4, document_mask=True,
    )  # fmt: skip
    data.prepare_data()
    data.setup()
    assert data.meta["splits"]["train"]["documents"] == 36 and data.meta["splits"]["val"]["documents"] == 4
    assert data.vocab_size == 282
    batch = next(iter(data.train_dataloader()))
    asked, ids = batch["targets"], batch["input_ids"]
    assert int(ids.max()) < 282 and int(ids.min()) >= 0 and int(asked.min()) == -1
    for row, wanted, documents in zip(ids, asked, batch["document_ids"], strict=True):
        assert torch.equal(row[1:][wanted[:-1] >= 0], wanted[:-1][wanted[:-1] >= 0])
        same = documents[:-1] == documents[1:]
        assert (wanted[:-1][~same] == -1).all()
        said = data.tokenizer.decode(wanted[wanted >= 0].tolist())
        assert "user" not in said and "Be brief" not in said and ("tiles" in said or "attention" in said)
    val = next(iter(data.val_dataloader()))
    assert " 9<|im_end|>" in data.tokenizer.decode(val["input_ids"].flatten().tolist())


BAD = {
    "no JSON": ("{", "line 1 is no JSON"),
    "deep JSON": ("[" * 100_000, "line 1 is no JSON"),
    "a list": ("[]", "line 1 has no messages: it needs"),
    "no list": ('{"messages": 1}', "line 1 has no messages"),
    "text as a message": ('{"messages": ["hello"]}', "line 1 has no messages"),
    "an unknown role": ('{"messages": [{"role": "bot", "content": "a"}]}', "whose role is none of assistant"),
    "no text": ('{"messages": [{"role": "user", "content": [1]}]}', "a message without text as content"),
    "no answer": (
        '{"messages": [{"role": "user", "content": "a"}]}',
        "line 1 has no message of the assistant",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_lines_are_named(case: str, tmp_path: Path) -> None:
    line, words = BAD[case]
    (tmp_path / "chats.jsonl").write_text(line)
    with pytest.raises(ValueError, match=r"chats.jsonl, line 1 ") as caught:
        list(ChatCorpus(path=str(tmp_path)).pieces())
    assert words in str(caught.value)
    require_messages('{"messages": [{"role": "assistant", "content": ""}]}', "line 1")


TEMPLATES = {
    "it refuses": (
        "{{ raise_exception('no system message') }}",
        "not take a conversation: no system message",
    ),
    "it is no template": ("{% for %}", "not take a conversation: "),
    "it reaches for code": ("{{ ''.__class__.__mro__[1].__subclasses__() }}", "unsafe"),
    "it changes what it is given": ("{{ messages.append(1) }}", "unsafe"),
    "it forgets": (FORGETS, "writes earlier messages otherwise once later ones are there"),
}


@pytest.mark.parametrize("case", TEMPLATES)
def test_templates_that_do_not_serve_are_refused(case: str, tmp_path: Path) -> None:
    template, words = TEMPLATES[case]
    tokenizer = tokenizer_of(tmp_path, template)
    with pytest.raises(ValueError, match="the tokenizer's chat template ") as caught:
        answers_of(tokenizer, TALK)
    assert words in str(caught.value)


@pytest.mark.parametrize(
    ("talk", "template", "words"),
    [
        (TALK, TEMPLATES["it refuses"][0], "template does not take a conversation: no system message"),
        ([{"role": "assistant", "content": "ok \ud83d"}], CHATML, r"'\ud83d', half of a surrogate pair"),
    ],
)
def test_a_conversation_that_cannot_be_written_is_named(
    talk: list[Any], template: str, words: str, tmp_path: Path
) -> None:
    tokenizer_of(tmp_path, template)
    chats = write(tmp_path / "chats.jsonl", [talk] * 18)
    made = {"kind": "file", "path": str(tmp_path / "tokenizer.json")}
    with pytest.raises(ValueError, match=r"chats.jsonl:1: ") as caught:
        prepare(ChatCorpus(path=str(chats)), made, tmp_path / "out", quiet=True)
    assert words in str(caught.value)


def test_a_validation_without_an_answer_is_refused(tmp_path: Path) -> None:
    tokenizer_of(tmp_path, CHATML)
    asked = [{"role": "user", "content": "all you need? " * 40}, {"role": "assistant", "content": "ok"}]
    chats = write(tmp_path / "chats.jsonl", [asked] * 30)
    made = {"kind": "file", "path": str(tmp_path / "tokenizer.json")}
    options = {"path": str(chats), "seq_len": 32, "data_dir": tmp_path / "out"}
    data = chat_datamodule(made, max_val_tokens=64, **options)
    data.prepare_data()
    with pytest.raises(ValueError, match="the first 64 tokens of validation hold no answer: raise"):
        data.setup()
    chat_datamodule(made, **options).setup()


def test_a_tokenizer_without_a_template_is_refused(tmp_path: Path) -> None:
    make_tokenizer(tmp_path)
    with pytest.raises(ValueError, match="data=chat needs a tokenizer with a chat template: init_from="):
        encode_chat(JSONTokenizer.from_dict(read_folder(tmp_path)), TALK)


def test_a_model_is_finetuned_on_chats(tmp_path: Path) -> None:
    make_folder(tmp_path / "model", "qwen3")
    (tmp_path / "model/chat_template.jinja").write_text(CHATML)
    write(tmp_path / "chats.jsonl", [TALK] * 40)
    result = train_here(
        tmp_path, "init_from=model", "data=chat", "data.path=chats.jsonl", "name=a", "seq_len=64",
        "data.batch_size=4", "data.data_dir=prepared", "attention=naive", "trainer.accelerator=cpu",
        "optim.lr=1e-2", "trainer.max_steps=8", "trainer.val_check_interval=8", "callbacks.samples=null",
        tiny=False,
    )  # fmt: skip
    assert result.code == 0, result.err
    losses = [float(line.split()[-1]) for line in result.out.splitlines() if "validation loss" in line]
    assert len(losses) >= 2 and losses[-1] < 0.8 * losses[0]
    result = train_here(tmp_path, "ckpt=a", "trainer.max_steps=9", tiny=False)
    assert result.code == 0, result.err
    result = train_here(tmp_path, "data=chat", "data.path=chats.jsonl", "name=b", tiny=False)
    assert result.code == 1 and "data=chat needs a tokenizer with a chat template" in result.err
