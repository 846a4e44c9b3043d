"""The command's host side: options, text that streams, the terminal. No checkpoint is needed."""

import os
import random
import re
import signal
import subprocess
import sys
import time
from contextlib import nullcontext
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import tokenizers
import torch
from omegaconf import OmegaConf
from tokenizers import decoders, models

from attention.auto import AutoAttention
from attention.base import UnsupportedAttention
from attention.naive import NaiveAttention
from conf.generation import convert, parse
from conf.trained import load_model
from data.tokenizer_file import JSONTokenizer
from data.tokenizers import ByteTokenizer
from model.generation.generate import generate
from model.generation.weights import Int8Linear, quantise_weights
from model.gpt import GPT, GPTConfig
from scripts.generate import decoding_attention, main, placement, read_prompts, run, smaller_model
from scripts.measure.instruments.streaming import TextStream
from tests.running import ROOT, train_here

BYTES = ByteTokenizer()


def stream(text: str | bytes, stops=()) -> tuple[list[str], TextStream]:
    tokens = list(text if isinstance(text, bytes) else text.encode())
    out = TextStream(BYTES.decode, stops)
    pieces = [out.feed(token) for token in tokens]
    return [*pieces, out.finish()], out


def test_characters_come_whole():
    pieces, out = stream("aé€😀b")
    assert "".join(pieces) == out.text == "aé€😀b"
    assert [p for p in pieces if p] == ["a", "é", "€", "😀", "b"]


@pytest.mark.parametrize(
    "junk", [b"\x80\x81a\xe2\x82", b"\xf0\x9f\x98", b"\xff" * 9 + b"ok", b"\xc3\xc3\xa9"]
)
def test_invalid_bytes_read_as_in_one_piece(junk):
    pieces, _ = stream(junk)
    assert "".join(pieces) == BYTES.decode(list(junk))


@cache
def spaces() -> JSONTokenizer:
    """As of Llama 2: a space is part of the word behind it, unknown characters are bytes, and the first space
    of what is decoded is stripped."""
    words = ["\u2581the", "\u2581quick", "\u2581fox", "s", "\u2581"]
    vocabulary = {
        token: i for i, token in enumerate(["<unk>", *(f"<0x{i:02X}>" for i in range(256)), *words])
    }
    library = tokenizers.Tokenizer(models.BPE(vocabulary, [], unk_token="<unk>", byte_fallback=True))
    steps = (
        decoders.Replace("\u2581", " "),
        decoders.ByteFallback(),
        decoders.Fuse(),
        decoders.Strip(" ", 1, 0),
    )
    library.decoder = decoders.Sequence(list(steps))
    return JSONTokenizer(library.to_str())


def test_spaces_that_a_decoder_strips_are_there() -> None:
    names = ["\u2581the", "\u2581quick", "\u2581fox", "s"]
    ids = [spaces()._id(name) for name in names]
    assert spaces().decode(ids) == "the quick foxs"
    out = TextStream(spaces().decode, ["k f"])
    assert [out.feed(token) for token in ids] == ["the", " quic", "", ""] and out.stopped
    out = TextStream(spaces().decode, (), ids[:1])
    assert [out.feed(token) for token in ids[1:]] == [" quick", " fox", "s"]


@pytest.mark.parametrize("seed", range(40))
def test_what_is_streamed_is_what_is_decoded(seed: int) -> None:
    """Characters of one to four bytes behind prompts: with bytes that are none, or between words by a decoder
    that makes all of a run of bytes U+FFFD while one character lacks a byte."""
    draw, words = random.Random(seed), seed % 2
    tokenizer = spaces() if words else BYTES

    def drawn() -> list[int]:
        if words and draw.random() < 0.5:
            return [draw.randrange(257, tokenizer.vocab_size)]
        junk = b"" if words or draw.random() < 0.8 else draw.randbytes(2)
        return [byte + words for byte in draw.choice("aé€😀").encode() + junk]

    tokens = [token for _ in range(60) for token in drawn()]
    prompt = [token for _ in range(draw.randrange(4)) for token in drawn()]
    out = TextStream(tokenizer.decode, (), prompt)
    said = "".join([*(out.feed(token) for token in tokens), out.finish()])
    assert tokenizer.decode(prompt) + said == tokenizer.decode(prompt + tokens)


def test_a_stop_string_is_held_back_and_left_out():
    pieces, out = stream("one\n \n\ntwo", ["\n\n"])
    assert "".join(pieces) == out.text == "one\n " and out.stopped
    pieces, out = stream("one EN", ["END", "\n"])
    assert pieces[-1] == "EN" and not out.stopped  # given out only once it cannot become END
    assert stream("ab€cd", ["€c", "bx"])[1].text == "ab"


def test_options_and_what_is_left_for_the_run():
    arguments = [
        "prompt=def f(x): # a=b",
        'stop=["\\n\\n", "END"]',
        "top_k=50",
        "seed=null",
        "attention.decode=naive",
    ]
    options, rest = parse([*arguments, "kv_cache=false", "temperature=0", "attention=tiled"])
    assert options["prompt"] == "def f(x): # a=b" and options["stop"] == ["\n\n", "END"]
    assert (options["top_k"], options["seed"], options["kv_cache"]) == (50, None, False)
    assert options["temperature"] == 0.0 and options["ckpt"] == "last"
    assert rest == ["attention.decode=naive", "attention=tiled"]
    assert convert("prompt", "null") == "null"
    assert parse(["stop=a b", "stop=c", "prompt="])[0]["stop"] == ["a b", "c"]


@pytest.mark.parametrize(
    ("typed", "stops"),
    [
        ("a b", ["a b"]), ('"a b"', ["a b"]), ("'a b'", ["a b"]), ("\\n\\n", ["\n\n"]), ('"\\n"', ["\n"]),
        ('["a b", "\\n"]', ["a b", "\n"]), ("[END", ["[END"]), ("a: b", ["a: b"]),
        ("5", ["5"]), ("it's", ["it's"]),
    ],
)  # fmt: skip
def test_stop_is_what_a_person_types(typed, stops):
    assert convert("stop", typed) == stops


@pytest.mark.parametrize(
    ("key", "text", "words"),
    [
        ("top_k", "1.5", "a whole number"),
        ("top_k", "true", "a whole number"),
        ("temperature", "hot", "a number"),
        ("kv_cache", "3", "true or false"),
        ("stop", "[1]", "text that is not empty"),
        ("num_samples", "null", "a value"),
        ("num_samples", "0", "from 1 to"),
        ("max_new_tokens", "100000000000", "from 1 to"),
        ("seed", "99999999999999999999999", "from 0 to"),
        ("temperature", "null", "a value"),
        ("device", "null", "a value"),
        ("ckpt", "null", "a value"),
    ],
)
def test_wrong_values_are_named(key, text, words):
    with pytest.raises(ValueError, match=words) as error:
        convert(key, text)
    assert f"{key}={text}" in str(error.value)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["prompt=a", "prompt_file=b"], "prompt=a and prompt_file=b: the prompts are one or the other"),
        (["draft_tokens=2"], "draft_tokens=2 is for speculate="),
        (["slots=2", "block=8"], "block=8, slots=2: only a paged cache reads that. Give cache=paged"),
        (["prompt_file=b", "cache=dense", "pool_tokens=9"], "pool_tokens=9: only a paged cache reads that"),
        (["prompt_file=b", "kv_cache=false", "chunk=9"], "chunk=9: only a paged cache reads that"),
        (["prompt_file=b", "speculate=ngram", "prefix_caching=false"], "or leave prefix_caching out"),
    ],
)
def test_a_key_that_nothing_reads_is_refused(arguments, words):
    with pytest.raises(ValueError, match=re.escape(words)):
        parse(arguments)


def test_keys_that_are_read_are_taken():
    for arguments in (["cache=paged", "slots=2"], ["prompt_file=b", "slots=2"], ["cache=paged", "prompt=a"]):
        assert parse(arguments)[1] == []
    assert parse(["speculate=ngram", "draft_tokens=2"])[0]["draft_tokens"] == 2
    assert parse(["prompt=a", "prompt_file=null"])[0]["prompt"] == "a"


def test_numbers_are_read_as_python_reads_them():
    assert convert("temperature", "1e-1") == 0.1 and convert("top_p", "null") is None
    assert convert("max_new_tokens", "010") == 10 and convert("seed", str(2**64 - 1)) == 2**64 - 1


def test_placement():
    assert placement("cpu", "auto") == (torch.device("cpu"), torch.float32)
    assert placement("cpu", "bf16") == (torch.device("cpu"), torch.bfloat16)
    with mock.patch.object(torch.backends.mps, "is_available", return_value=False):
        for device in ("tpu3", "cuda:99", "mps", "xpu", "meta", "cpu:1", ""):
            with pytest.raises(ValueError, match=f"device={device}:"):
                placement(device, "auto")
    with pytest.raises(ValueError, match="precision=int8"):
        placement("cpu", "int8")


def test_bf16_on_a_gpu_without_it():
    with (
        mock.patch.object(torch.cuda, "device_count", return_value=1),
        mock.patch.object(torch.cuda, "device", nullcontext),
        mock.patch.object(torch.cuda, "is_bf16_supported", return_value=False),
        mock.patch.object(torch.cuda, "get_device_name", return_value="Tesla T4"),
    ):
        assert placement("cuda", "auto")[1] == torch.float32
        assert placement("cuda", "fp16")[1] == torch.float16
        with pytest.raises(ValueError, match="precision=bf16: Tesla T4 has no bf16"):
            placement("cuda", "bf16")


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A folder with a run to generate from."""
    folder = tmp_path_factory.mktemp("trained")
    steps = ("trainer.max_steps=2", "trainer.val_check_interval=2")
    assert train_here(folder, "name=a", *steps).code == 0
    checkpoint = torch.load(folder / "runs/a/checkpoints/best.ckpt", weights_only=True)
    for name, value in {"nan": float("nan"), "big": 1e9}.items():
        checkpoint["state_dict"]["net.lm_head.weight"][3, 4] = value
        torch.save(checkpoint, folder / f"{name}.ckpt")
    return folder


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["num_samples=null"], "num_samples=null"),
        (["device=xpu"], "device=xpu"),
        (["attention=["], "attention=["),
        (
            ["attention=tiled", "attention.block_q=abc"],
            "attention.block_q=abc: it needs to be a whole number",
        ),
        (["attention=tiled", "attention.block_q=0"], "block_q = 0"),
        (["prompt_file=binary"], "prompt_file=binary is not UTF-8"),
        (["prompt_file=nowhere"], "prompt_file=nowhere: No such file or directory."),
        (["num_samples=60000", "max_new_tokens=1000000"], "for 60000 rows"),
        (["temperature=-1", "prompt=a"], "temperature=-1.0: it needs to be 0, which is greedy, or at least"),
        (["top_k=0"], "top_k=0: it needs to be at least 1"),
        (["top_p=2"], "top_p=2.0: it needs to be in (0, 1]"),
        (["temprature=1"], "no key temprature; did you mean temperature=...? Keys are ckpt, runs_dir, "),
        (["--num-samples", "3"], "no key --num-samples; did you mean num_samples=...?"),
        (["seq_len=5"], "no key seq_len. Keys are ckpt, "),
        (["prompt"], "prompt has no value: write prompt=..."),
        (["prompt_file="], "prompt_file= has no value: write prompt_file=..."),
        (["attention.decode="], "attention.decode= has no value"),
        (["weight_dtype=int4"], "weight_dtype=int4: choose one of auto, int8."),
        (["weight_dtype=null"], "weight_dtype=null: it needs a value"),
        (["ckpt=nan.ckpt"], "ckpt=nan.ckpt: 1 of "),
        (["ckpt=big.ckpt", "precision=fp16"], "precision=fp16: 1 of "),
        (["speculate=nan.ckpt", "prompt=a", "max_new_tokens=2"], "speculate=nan.ckpt: 1 of "),
        (
            ["speculate=nobody", "prompt=a", "max_new_tokens=2"],
            "speculate=nobody is neither a file nor a run",
        ),
        (["prompt=\udcff"], "prompt='\\udcff' is not UTF-8 text."),
    ],
)
def test_a_mistake_is_one_message(trained, arguments, words, monkeypatch, capsys):
    monkeypatch.chdir(trained)
    (trained / "binary").write_bytes(b"\x7fELF\xff\xfe")
    with pytest.raises(SystemExit) as stop:
        main(arguments)
    out, err = capsys.readouterr()
    assert stop.value.code == 1 and err.startswith("error: ") and words in err
    assert len(err.splitlines()) <= 2 and not out


def test_too_little_memory_is_one_message(trained, monkeypatch, capsys):
    monkeypatch.chdir(trained)
    monkeypatch.setattr("model.generation.generate.generate", mock.Mock(side_effect=MemoryError))
    with pytest.raises(SystemExit):
        main(["prompt=a", "max_new_tokens=2"])
    assert "error: Out of memory (MemoryError): ask for fewer num_samples=" in capsys.readouterr().err


@pytest.mark.long
def test_a_reader_that_has_seen_enough(trained):
    """As in `generate.py ... | head -c 1`."""
    read, write = os.pipe()
    os.close(read)
    command = [sys.executable, str(ROOT / "scripts" / "generate.py"), "max_new_tokens=3"]
    result = subprocess.run(command, stdout=write, stderr=subprocess.PIPE, cwd=trained, text=True)
    os.close(write)
    assert result.returncode == 128 + signal.SIGPIPE
    assert "Traceback" not in result.stderr and "BrokenPipe" not in result.stderr


def test_help_answers_at_once():
    start = time.perf_counter()
    command = [sys.executable, str(ROOT / "scripts" / "generate.py"), "--help"]
    out = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    script = "import sys; from scripts.generate import main; main(['--help']); print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, cwd=ROOT).stdout
    assert not {"hydra", "torch"} & set(loaded.splitlines()[-1].split())
    assert "temperature" in out and time.perf_counter() - start < 2


@pytest.fixture
def model() -> GPT:
    torch.manual_seed(0)
    return GPT(GPTConfig(vocab_size=257, seq_len=32, n_layer=1, n_head=2, n_embd=16), NaiveAttention())


def options(**changes) -> dict:
    return parse([f"{key}={value}" for key, value in {"max_new_tokens": 12, "seed": 3, **changes}.items()])[0]


CFG = SimpleNamespace(attention={"decode": None})


def test_a_prompt_is_a_line(tmp_path: Path) -> None:
    (tmp_path / "prompts").write_text("\ufeffone\x0ctwo\u2028three\r\n\nfour\n", encoding="utf-8", newline="")
    assert read_prompts(options(prompt_file=tmp_path / "prompts")) == ["one\x0ctwo\u2028three", "four"]


@pytest.mark.parametrize("shape", [{"position": "t5"}, {"position": "none", "sparsity": "local"}])
def test_models_that_drafts_cannot_be_checked_with(shape: dict, model: GPT) -> None:
    other = GPT(
        GPTConfig(vocab_size=257, seq_len=16, n_layer=1, n_head=2, n_embd=16, **shape), NaiveAttention()
    )
    with pytest.raises(ValueError, match=r"ckpt=last has model.position=t5 or .* leave speculate=ngram out"):
        smaller_model(other, BYTES, options(speculate="ngram"))
    assert smaller_model(model, BYTES, options(speculate="ngram")) is None


def test_rows_are_written_one_after_the_other(model, capsys, tmp_path):
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("a\n\nlonger prompt\n")
    result = run(model, BYTES, CFG, options(prompt_file=prompts, num_samples=2))
    out, err = capsys.readouterr()
    texts = ["a", "a", "longer prompt", "longer prompt"]
    kept = [[t for t in row if t != BYTES.eot] for row in result.tokens]
    rows = [text + BYTES.decode(row) for text, row in zip(texts, kept, strict=True)]
    assert out == ("\n" + "-" * 40 + "\n").join(rows) + "\n"
    assert "new tokens/s" in err and "found (4 rows, blocks of" in err and "seed 3" in err
    assert "re-encoded" not in err
    greedy = {"prompt_file": prompts, "temperature": 0}
    by_blocks = run(model, BYTES, CFG, options(**greedy, block=4, slots=1, chunk=3, prefix_caching="false"))
    dense = run(model, BYTES, CFG, options(**greedy, cache="dense"))
    assert by_blocks.tokens == dense.tokens and by_blocks.found == 0
    assert "decode" in capsys.readouterr().err


def test_drafts_by_a_run_or_by_ngrams(trained, monkeypatch, capsys):
    """The same greedy text; a run that drafts for itself is always right."""
    monkeypatch.chdir(trained)
    texts = []
    for how in ([], ["speculate=ngram"], ["speculate=a", "draft_tokens=3"]):
        main(["ckpt=a", "prompt=the theory", "max_new_tokens=9", "temperature=0", *how])
        out, err = capsys.readouterr()
        texts.append(out)
    assert texts[0] == texts[1] == texts[2]
    assert "6 of 6 drafted tokens accepted, 3 calls" in err


def test_weights_in_8_bits(trained, monkeypatch, capsys):
    """The text that the model has with them."""
    monkeypatch.chdir(trained)
    asked = ["ckpt=a", "prompt=the theory", "max_new_tokens=9", "temperature=0"]
    model, tokenizer, _ = load_model("a", [])
    quantise_weights(model, "int8")
    expected = generate(model, [tokenizer.encode("the theory")], 9, temperature=0.0).tokens[0]
    products, forward = [], Int8Linear.forward
    monkeypatch.setattr(Int8Linear, "forward", lambda *a: products.append(1) or forward(*a))
    for how in ([], ["cache=paged"], ["speculate=ngram"]):
        products.clear()
        main([*asked, "weight_dtype=int8", *how])
        assert products and capsys.readouterr().out == "the theory" + tokenizer.decode(expected) + "\n"


def test_what_cannot_be_paged_is_generated_densely(model, capsys, tmp_path):
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("a\nbc\n")
    cfg = SimpleNamespace(attention=OmegaConf.create({"name": "naive", "decode": "sdpa"}))
    run(model, BYTES, cfg, options(prompt_file=prompts, max_new_tokens=2))
    err = capsys.readouterr().err
    assert "cache=auto is dense: attention=sdpa has no paged cache: needs cache=dense." in err
    assert "2 rows, KV cache" in err


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ({"cache": "pages"}, "cache=pages: choose auto, dense or paged"),
        ({"cache": "paged", "kv_cache": "false"}, "cache=paged and kv_cache=false: a cache needs"),
        (
            {"cache_dtype": "int8", "compile": "true", "fused": "true", "kv_cache": "false"},
            "cache_dtype=int8, compile=true, fused=true and kv_cache=false: a cache needs kv_cache=true",
        ),
        ({"cache": "paged", "prompt": "twelve bytes", "pool_tokens": 16}, "a prompt of 5 beside them"),
        (
            {"speculate": "ngram", "kv_cache": "false", "compile": "true"},
            "speculate=ngram and kv_cache=false, compile=true: drafts are checked by",
        ),
        ({"cache_dtype": "int3"}, "cache_dtype=int3: choose one of auto, fp8, int8, int4"),
        ({"slots": 0}, "slots=0: it needs to be from 1"),
    ],
)
def test_a_cache_that_cannot_be_is_refused_before_the_prompt(asked, words, model, capsys):
    with pytest.raises(ValueError, match=words):
        run(model, BYTES, CFG, options(**asked))
    assert capsys.readouterr().out == ""


def test_past_the_context_it_says_so(model, capsys):
    run(model, BYTES, CFG, options(max_new_tokens=60, temperature=0, kv_cache="false"))
    assert "Past the trained context of 32 tokens" in capsys.readouterr().err


def test_a_stop_string_ends_the_row(model, capsys):
    free = run(model, BYTES, CFG, options(prompt="x", max_new_tokens=30))
    text = BYTES.decode(free.tokens[0])
    stop = next(c for c in text[3:] if c.isprintable() and c != "\ufffd" and c not in text[:3])
    capsys.readouterr()
    stopped = run(model, BYTES, CFG, options(prompt="x", max_new_tokens=30, stop=f'["{stop}"]'))
    assert capsys.readouterr().out == "x" + text.split(stop)[0] + "\n"
    assert len(stopped.tokens[0]) < 30


def test_auto_says_what_decodes_and_why(model, capsys):
    cfg = OmegaConf.create({"attention": {"name": "auto", "decode": None}})
    assert decoding_attention(cfg, model, 1, 32).name == "naive" and not capsys.readouterr().err
    model.replace_attention(AutoAttention())
    assert decoding_attention(cfg, model, 1, 32).name == "auto"
    assert "attention=auto decodes with sdpa: the fastest on cpu" in capsys.readouterr().err


class CannotDecode(NaiveAttention):
    def unsupported_reasons(self, call):
        return ["no kv_lengths"] if call.purpose == "decode" else []


@pytest.mark.parametrize("refused", ["prefill", "decode"])
def test_a_refusal_comes_before_the_prompt(refused, model, capsys):
    class Refuses(NaiveAttention):
        def unsupported_reasons(self, call):
            return ["no time"] if call.purpose == refused else []

    model.replace_attention(Refuses("odd"))
    cfg = OmegaConf.create({"attention": {"name": "odd", "decode": None}})
    with mock.patch("conf.compose.build_attention", return_value=Refuses("odd")):
        cfg.attention.decode = "odd"
        with pytest.raises(UnsupportedAttention, match=f"{refused}: no time"):
            run(model, BYTES, cfg, options(prompt="the prompt", max_new_tokens=3))
    assert capsys.readouterr() == ("", "")


def test_who_cannot_decode_is_named_with_who_will(model, capsys):
    cfg = OmegaConf.create({"attention": {"name": "odd", "decode": None}})
    assert decoding_attention(cfg, model, 1, 32).name == "naive"
    cfg.attention.decode = "tiled"
    assert decoding_attention(cfg, model, 1, 32).name == "tiled"
    cfg.attention.decode = None
    model.replace_attention(CannotDecode("odd"))
    chosen = decoding_attention(cfg, model, 1, 32)
    said = capsys.readouterr().err
    assert "attention=odd cannot decode" in said and "no kv_lengths" in said
    assert f"attention.decode={chosen.name} will" in said and chosen.name not in ("odd", "auto")
