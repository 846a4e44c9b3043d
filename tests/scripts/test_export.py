"""What scripts/export.py writes: transformers loads it with no code of ours, and init_from takes it back."""

from __future__ import annotations

import contextlib
import json
import shutil
from pathlib import Path

import pytest
import tokenizers
import tokenizers.processors
import torch

from conf.trained import load_model
from data.tokenizer_export import tokenizer_files
from data.tokenizer_file import JSONTokenizer
from model.config import GPTConfig
from model.generation.generate import generate
from model.gpt import GPT
from model.pretrained.architectures import architecture_of
from model.pretrained.export import export as export_model
from model.pretrained.folder import read_pretrained
from scripts import export
from tests.pretrained import make_folder
from tests.running import Result, train_here, write_book

pytestmark = pytest.mark.sampled(4)

transformers = pytest.importorskip("transformers")

TEXT = "attention is all you need and some tiles"
LLAMA = (
    "model.position=rope", "model.norm=rmsnorm", "model.mlp=swiglu", "model.bias=false",
    "model.tie_embeddings=false",
)  # fmt: skip
RUNS: dict[str, tuple[str, ...]] = {
    "gpt2": ("data.tokenizer.kind=byte",),
    "nobias": ("data.tokenizer.kind=char", "model.bias=false"),
    "llama": (*LLAMA, "data.tokenizer.kind=bpe", "data.tokenizer.vocab_size=280", "model.n_kv_head=1"),
    "scaled": (*LLAMA, "data.tokenizer.kind=byte", "model.rope_scaling=[llama3,4,1,4,8]"),
    "mistral": (*LLAMA, "data.tokenizer.kind=byte", "model.window=6", "model.head_dim=24"),
    "qwen2": (*LLAMA, "data.tokenizer.kind=byte", "model.qkv_bias=true", "model.window=6"),
    "qwen3": (*LLAMA, "data.tokenizer.kind=byte", "model.qk_norm=true", "model.norm_eps=1e-5"),
}  # fmt: skip
CLASSES = {
    "gpt2": "GPT2LMHeadModel", "nobias": "GPT2LMHeadModel", "llama": "LlamaForCausalLM",
    "scaled": "LlamaForCausalLM", "mistral": "MistralForCausalLM", "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}  # fmt: skip


def run_export(folder: Path, capsys: pytest.CaptureFixture[str], *words: str) -> Result:
    code = 0
    with contextlib.chdir(folder):
        try:
            export.main(words)
        except SystemExit as stop:
            code = stop.code or 0
    said = capsys.readouterr()
    return Result(code, said.out, said.err)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("export")
    write_book(folder)
    for name, settings in RUNS.items():
        result = train_here(
            folder, f"name={name}", "trainer.max_steps=4", "seq_len=32", "optim.lr=0.05", *settings
        )
        assert result.code == 0, result.err
    return folder


@pytest.mark.parametrize("name", RUNS)
def test_transformers_loads_the_same_model(
    name: str, folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    result = run_export(folder, capsys, f"ckpt={name}", f"to=out/{name}")
    assert (result.code, result.err) == (0, "") and CLASSES[name] in result.out
    out = folder / "out" / name
    monkeypatch.setattr("transformers.dynamic_module_utils.get_class_from_dynamic_module", None)
    theirs, loading = transformers.AutoModelForCausalLM.from_pretrained(out, output_loading_info=True)
    assert type(theirs).__name__ == CLASSES[name] and theirs.dtype == torch.float32
    assert not any(loading.values())
    ours, tokenizer, _ = load_model(str(folder / f"runs/{name}/checkpoints/best.ckpt"), [])
    ids = torch.tensor([tokenizer.encode(TEXT[:32])])
    with torch.no_grad():
        expected, got = ours.eval()(ids)[..., : tokenizer.vocab_size], theirs.eval()(ids).logits
    assert float((got - expected).abs().max() / expected.abs().max()) < 2e-5


@pytest.mark.parametrize("name", RUNS)
def test_weights_come_back_bit_by_bit(name: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_export(folder, capsys, f"ckpt={name}", f"to=back/{name}")
    found = read_pretrained(str(folder / "back" / name))
    net = GPT(GPTConfig(**found.fields, seq_len=32), torch.nn.Identity())
    found.load_into(net)
    ours = load_model(str(folder / f"runs/{name}/checkpoints/best.ckpt"), [])[0]
    before, after = ours.state_dict(), net.state_dict()
    for key, tensor in after.items():
        expected = before[key] if key in before else torch.zeros_like(tensor)  # GPT-2 has biases everywhere
        rows = ours.config.vocab_size if key in ("transformer.wte.weight", "lm_head.weight") else None
        assert torch.equal(tensor[:rows], expected[:rows]), key
    assert before.keys() <= after.keys()


@pytest.mark.parametrize("name", ["gpt2", "nobias", "llama"])
def test_the_tokenizer_gives_the_same_ids_and_text(
    name: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_export(folder, capsys, f"ckpt={name}", f"to=tokenizer/{name}")
    theirs = transformers.AutoTokenizer.from_pretrained(folder / "tokenizer" / name)
    tokenizer = load_model(str(folder / f"runs/{name}/checkpoints/best.ckpt"), [])[1]
    assert (
        theirs(TEXT)["input_ids"] == tokenizer.encode(TEXT) and theirs.decode(tokenizer.encode(TEXT)) == TEXT
    )
    assert theirs.eos_token_id == tokenizer.eot and len(theirs) == tokenizer.vocab_size
    if tokenizer.eot is not None:
        assert theirs("all<|endoftext|>")["input_ids"][-1] == tokenizer.eot
        assert theirs("né\n\t~")["input_ids"] == tokenizer.encode("né\n\t~")


def test_who_reads_the_tokenizer_of_a_qwen2_is_said(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """AutoTokenizer takes Qwen's, which composes characters and leaves out what it does not know."""
    result = run_export(folder, capsys, "ckpt=qwen2", "to=tokenizer/qwen2")
    assert "load the tokenizer by PreTrainedTokenizerFast.from_pretrained" in result.out
    theirs = transformers.PreTrainedTokenizerFast.from_pretrained(folder / "tokenizer/qwen2")
    tokenizer = load_model(str(folder / "runs/qwen2/checkpoints/best.ckpt"), [])[1]
    assert theirs("a\u0301 12")["input_ids"] == tokenizer.encode("a\u0301 12")
    assert "AutoTokenizer" not in run_export(folder, capsys, "ckpt=qwen3", "to=tokenizer/qwen3").out


def test_greedy_text_is_the_same(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_export(folder, capsys, "ckpt=llama", "to=greedy")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder / "greedy")
    ours, tokenizer, _ = load_model(str(folder / "runs/llama/checkpoints/best.ckpt"), [])
    prompt = tokenizer.encode("attention")
    got = generate(ours.eval(), [prompt], max_new_tokens=20, temperature=0.0).tokens[0]
    options = {"max_new_tokens": 20, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    assert theirs.generate(torch.tensor([prompt]), **options)[0, len(prompt) :].tolist() == got


def test_ranks_of_tiktoken_become_merges() -> None:
    """GPT-2's vocabulary is known by ranks alone, and not here: those of a BPE of its kind are."""
    from data.tokenizer_export import _byte_level, byte_letters, of_ranks
    from data.tokenizers import BPETokenizer

    bpe = BPETokenizer.train(["some tiles of keys, né, attention is all you need " * 50], 330)
    model = bpe.to_dict()["tokenizer"]["model"]
    bytes_of = {letter: byte for byte, letter in byte_letters().items()}
    ranks = {bytes(bytes_of[letter] for letter in token): i for token, i in model["vocab"].items()}
    vocabulary, merges = of_ranks(ranks)
    assert vocabulary == model["vocab"] and merges == [tuple(pair) for pair in model["merges"]]
    assert _byte_level(vocabulary, merges, words=True).encode(TEXT).ids == bpe.encode(TEXT)


def test_the_card_says_how_it_was_trained(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_export(folder, capsys, "ckpt=llama", "to=card")
    card = (folder / "card/README.md").read_text()
    assert card.startswith("---\nlibrary_name: transformers\n") and "# llama\n" in card
    for row in ("| steps | 4 |", "| tokens | 512 |", "| context | 32 |", "| attention | naive |"):
        assert row in card
    assert "| best validation loss | " in card and "| started from | random weights |" in card


def test_a_pretrained_model_goes_through_us_unchanged(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Down to its config, its tokenizer and its chat template."""
    make_folder(folder / "theirs", "llama", architectures=["LlamaForCausalLM"])
    (folder / "theirs/chat_template.jinja").write_text("{{ messages }}")
    shape = ("init_from=theirs", "data=text", "data.path=book.txt", "attention=naive", "seq_len=16")
    one = ("trainer.max_steps=1", "trainer.accelerator=cpu", "optim.lr=0", "callbacks.samples=null")
    assert train_here(folder, "name=through", *shape, *one, tiny=False).code == 0
    run_export(folder, capsys, "ckpt=through", "to=ours")
    from safetensors.torch import load_file

    before, after = (load_file(folder / name / "model.safetensors") for name in ("theirs", "ours"))
    assert before.keys() == after.keys() and all(torch.equal(before[key], after[key]) for key in before)
    theirs, ours = (json.loads((folder / name / "config.json").read_text()) for name in ("theirs", "ours"))
    assert {key: theirs.get(key) for key in ours} == ours
    for name in ("tokenizer.json", "chat_template.jinja"):
        assert (folder / "theirs" / name).read_bytes() == (folder / "ours" / name).read_bytes()


def test_a_tokenizer_that_adds_tokens_adds_none_here(tmp_path: Path) -> None:
    """As ours does not, in training either."""
    library = tokenizers.Tokenizer(tokenizers.models.WordLevel({"<s>": 0, "a": 1, "b": 2}, unk_token="b"))
    library.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    library.add_special_tokens(["<s>"])
    library.post_processor = tokenizers.processors.TemplateProcessing("<s> $A", None, [("<s>", 0)])
    ours = JSONTokenizer(library.to_str(), bos="<s>")
    for name, text in tokenizer_files(ours, 8).items():
        (tmp_path / name).write_text(text, encoding="utf-8")
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    assert theirs("a b")["input_ids"] == ours.encode("a b") == [1, 2] and theirs.bos_token_id == 0


BASE = {"vocab_size": 64, "seq_len": 16, "n_layer": 1, "n_head": 4, "n_embd": 32}
ROPE = {"position": "rope", "norm": "rmsnorm", "mlp": "swiglu", "bias": False}


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"softcap": 30.0}, r"the closest, gpt2, does not fit model.softcap=30.0 \(needs null\)"),
        ({"sparsity": "local"}, r"gpt2, does not fit model.sparsity=local \(needs null\)"),
        ({"position": "alibi"}, r"gpt2, does not fit model.position=alibi \(needs learned\)"),
        ({"n_kv_head": 2}, r"gpt2, does not fit model.n_kv_head=2 \(needs n_head\)"),
        ({**ROPE, "bias": True}, r"qwen2, does not fit model.bias=true \(needs false\)"),
        ({**ROPE, "causal": False}, r"llama, does not fit model.causal=false \(needs true\)"),
        (
            {**ROPE, "qk_norm": True, "qkv_bias": True},
            r"qwen2, does not fit model.qk_norm=true \(needs false\)",
        ),
    ],
)
def test_options_that_no_architecture_has_are_named(options: dict, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        architecture_of(GPTConfig(**{**BASE, **options}))


def test_a_model_that_does_not_fit_writes_nothing(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert train_here(folder, "name=capped", "trainer.max_steps=2", "model.softcap=20").code == 0
    result = run_export(folder, capsys, "ckpt=capped", "to=capped")
    assert result.code == 1 and "does not fit model.softcap=20 (needs null)" in result.err
    assert not (folder / "capped").exists()


def test_the_weights_are_fp32_and_the_model_stays_as_it_is(tmp_path: Path) -> None:
    net = GPT(GPTConfig(**{**BASE, **ROPE}), torch.nn.Identity()).to(torch.bfloat16)
    export_model(net, tmp_path / "model", {}, None, None)
    assert net.dtype == torch.bfloat16
    found = read_pretrained(str(tmp_path / "model"))
    assert {kind for *_, kind in found.weights.at.values()} == {"F32"}


def test_it_is_whole_or_not_there(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    before = sorted(folder.iterdir())

    def full(*args: object, **kwargs: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("safetensors.torch.save_file", full)
    result = run_export(folder, capsys, "ckpt=gpt2", "to=full")
    assert (
        result.code == 1 and result.err == "error: to=full could not be written: No space left on device.\n"
    )
    monkeypatch.undo()
    (folder / "full").mkdir()
    result = run_export(folder, capsys, "ckpt=gpt2", "to=full")
    assert result.code == 1 and "to=full is there already" in result.err
    shutil.rmtree(folder / "full")
    assert sorted(folder.iterdir()) == before


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ((), "to=... has to be given"),
        (("to=",), "to has no value: write to=..."),
        (("to=a", "ckp=b"), "There is no key ckp; did you mean ckpt?"),
        (("to=a", "ckpt=nobody"), "ckpt=nobody is neither a file nor a run"),
    ],
)
def test_mistakes_are_said(
    words: tuple[str, ...], said: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    result = run_export(folder, capsys, *words)
    assert result.code == 1 and said in result.err and result.err.count("\n") == 1
