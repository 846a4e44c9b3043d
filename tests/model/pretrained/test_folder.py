"""Pretrained folders as our model: the same logits and text; what cannot be loaded is refused by name."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch

from attention.naive import NaiveAttention
from data.tokenizer_file import read_folder
from model.generation.generate import generate
from model.gpt import GPT, GPTConfig
from model.pretrained.architectures import from_theirs
from model.pretrained.folder import download, read_pretrained
from tests.pretrained import KINDS, LLAMA3, VOCABULARY, make_folder, make_model, tokens

pytestmark = pytest.mark.sampled(3)

transformers = pytest.importorskip("transformers")


def loaded(folder: Path, seq_len: int = 96) -> GPT:
    found = read_pretrained(str(folder))
    net = GPT(GPTConfig(**found.fields, seq_len=seq_len), NaiveAttention()).eval()
    found.load_into(net)
    return net


@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_the_logits_are_those_of_transformers(kind: str, tmp_path: Path) -> None:
    theirs = make_folder(tmp_path, kind)
    expected = theirs(tokens()).logits
    got = loaded(tmp_path)(tokens())[..., :VOCABULARY]
    assert float((got - expected).abs().max() / expected.abs().max()) < 2e-5


@pytest.mark.parametrize("kind", ["gpt2", "llama", "qwen3"])
def test_greedy_text_is_the_same(kind: str, tmp_path: Path) -> None:
    prompt = tokens(1, 8)
    theirs = make_folder(tmp_path, kind)
    theirs.generation_config.eos_token_id = None
    expected = theirs.generate(prompt, max_new_tokens=64, do_sample=False, pad_token_id=0)[0, 8:].tolist()
    got = generate(loaded(tmp_path), [prompt[0].tolist()], max_new_tokens=64, temperature=0.0)
    assert got.tokens[0] == expected


@pytest.mark.parametrize("kind", ["gpt2", "qwen2"])
def test_shards_are_one_model(kind: str, tmp_path: Path) -> None:
    make_folder(tmp_path / "one", kind)
    make_folder(tmp_path / "many", kind, shard="60KB")
    assert len(list((tmp_path / "many").glob("*.safetensors"))) > 3
    one, many = (loaded(tmp_path / name).state_dict() for name in ("one", "many"))
    assert one.keys() == many.keys() and all(torch.equal(one[name], many[name]) for name in one)


def test_shards_that_a_single_file_has_replaced_are_not_read(tmp_path: Path) -> None:
    """As transformers takes them: saving a model there again need not remove the index and the shards."""
    make_folder(tmp_path, "llama", shard="60KB")
    shards = list(tmp_path.glob("model-*.safetensors"))
    make_folder(tmp_path / "again", "llama")
    weights = loaded(tmp_path / "again").state_dict()
    (tmp_path / "again" / "model.safetensors").rename(tmp_path / "model.safetensors")
    for shard in shards:
        shard.write_bytes(b"older")
    found = loaded(tmp_path).state_dict()
    assert all(torch.equal(found[name], weights[name]) for name in weights)


def test_one_tensor_at_a_time_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is beyond the model is at most a shard: here a tensor, whose file the system maps."""
    import safetensors

    make_folder(tmp_path, "llama", shard="60KB")
    found, alive, most = read_pretrained(str(tmp_path)), [], []
    whole = safetensors.safe_open

    class Counting:
        def __init__(self, *args: Any) -> None:
            self.file = whole(*args)

        def __enter__(self) -> Counting:
            self.file.__enter__()
            return self

        def __exit__(self, *why: object) -> None:
            self.file.__exit__(*why)

        def get_tensor(self, key: str) -> torch.Tensor:
            import weakref

            tensor = self.file.get_tensor(key)
            alive.append(weakref.ref(tensor))
            most.append(sum(each().nbytes for each in alive if each() is not None))
            return tensor

    monkeypatch.setattr(safetensors, "safe_open", Counting)
    net = GPT(GPTConfig(**found.fields, seq_len=8), NaiveAttention())
    found.load_into(net)
    largest = 2 * VOCABULARY * 64 * 4  # the tensor before is let go of as the next one is there
    assert len(most) == sum(1 for _ in make_model("llama").state_dict()) and max(most) <= largest


def test_old_names_of_buffers_and_bare_prefixes_are_understood(tmp_path: Path) -> None:
    """As the Hub's gpt2 has them."""
    from safetensors.torch import load_file, save_file

    make_folder(tmp_path, "gpt2")
    expected = loaded(tmp_path).state_dict()
    file = tmp_path / "model.safetensors"
    bare = {name.removeprefix("transformer."): tensor for name, tensor in load_file(file).items()}
    save_file({**bare, "h.0.attn.bias": torch.ones(1, 1, 96, 96)}, file)
    got = loaded(tmp_path).state_dict()
    assert all(torch.equal(got[name], expected[name]) for name in expected)


def test_rope_as_it_was_written_before(tmp_path: Path) -> None:
    make_folder(tmp_path, "llama")
    now = read_pretrained(str(tmp_path)).fields
    rope = (config := json.loads((tmp_path / "config.json").read_text())).pop("rope_parameters")
    config["rope_theta"] = rope.pop("rope_theta")
    config["rope_scaling"] = {**rope, "type": rope.pop("rope_type")}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert read_pretrained(str(tmp_path)).fields == now
    assert now["rope_base"] == 5e5 and now["rope_scaling"] == ["llama3", 4.0, 1.0, 4.0, 32]


def test_of_two_kinds_of_rope_parameters_it_is_that_of_transformers(tmp_path: Path) -> None:
    make_folder(tmp_path, "llama")
    config(rope_scaling={"rope_type": "linear", "factor": 2.0}, rope_theta=2e4)(tmp_path)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    with torch.no_grad():
        expected, got = theirs(tokens()).logits, loaded(tmp_path)(tokens())[..., :VOCABULARY]
    assert float((got - expected).abs().max() / expected.abs().max()) < 2e-5


@pytest.mark.parametrize(
    "changes",
    [
        {"max_position_embeddings": 48},
        {"original_max_position_embeddings": 24},
        {"partial_rotary_factor": 1},
    ],
)
def test_what_config_json_says_elsewhere_is_read_as_transformers_reads_it(
    changes: dict[str, Any], tmp_path: Path
) -> None:
    make_folder(tmp_path, "llama")
    rope = {key: value for key, value in LLAMA3.items() if key != "original_max_position_embeddings"}
    config(rope_parameters=rope, **changes)(tmp_path)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    with torch.no_grad():
        expected, got = theirs(tokens(2, 40)).logits, loaded(tmp_path, 40)(tokens(2, 40))[..., :VOCABULARY]
    assert float((got - expected).abs().max() / expected.abs().max()) < 2e-5


@pytest.mark.parametrize("own", [True, False])
@pytest.mark.parametrize("kind", ["gpt2", "qwen2"])
def test_a_head_that_is_not_the_embedding_is_kept(kind: str, own: bool, tmp_path: Path) -> None:
    """As transformers does, although config.json says that they are tied."""
    from safetensors.torch import load_file, save_file

    make_folder(tmp_path, kind)
    weights = load_file(file := tmp_path / "model.safetensors")
    table = next(tensor for name, tensor in weights.items() if re.search("wte|embed_tokens", name))
    table.copy_(table.bfloat16())  # the same numbers in two dtypes are the same head
    head = table.flip(0) if own else table.bfloat16()
    save_file({**weights, "lm_head.weight": head}, file, {"format": "pt"})
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    with torch.no_grad():
        expected, got = theirs(tokens()).logits, (net := loaded(tmp_path))(tokens())[..., :VOCABULARY]
    assert net.config.tie_embeddings is not own
    assert float((got - expected).abs().max() / expected.abs().max()) < 2e-5


def test_a_window_that_config_json_leaves_out_is_that_of_transformers(tmp_path: Path) -> None:
    make_folder(tmp_path, "mistral")
    for given, window in ((..., 4095), (None, None), (8, 7)):
        config(sliding_window=given)(tmp_path)
        assert read_pretrained(str(tmp_path)).fields["window"] == window
    make_folder(tmp_path / "qwen", "qwen2", use_sliding_window=True, max_window_layers=0)
    config(sliding_window=..., layer_types=...)(tmp_path / "qwen")
    assert read_pretrained(str(tmp_path / "qwen")).fields["window"] == 4095


@pytest.mark.parametrize("sizes", [{"norm_eps": 10**400}, {"seq_len": 2**25}, {"relative_distance": 2**17}])
def test_sizes_that_no_model_has(sizes: dict[str, int]) -> None:
    with pytest.raises(ValueError, match=f"{next(iter(sizes))}=1?"):
        GPTConfig(vocab_size=1, **sizes)


@pytest.mark.parametrize("name", ["tokenizer.json", "chat_template.jinja"])
def test_text_that_is_none(name: str, llama: Path, tmp_path: Path) -> None:
    shutil.copytree(llama, tmp_path / "bad")
    (tmp_path / "bad" / name).write_bytes(b"\xff\xfe{")
    with pytest.raises(ValueError, match=f"its {name} is not UTF-8 text"):
        read_folder(tmp_path / "bad")


def config(**changes: Any) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        theirs = {**json.loads((folder / "config.json").read_text()), **changes}
        (folder / "config.json").write_text(json.dumps({k: v for k, v in theirs.items() if v is not ...}))

    return change


def truncated(folder: Path) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1000])


def pickled(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    torch.save({}, folder / "pytorch_model.bin")


def indexed(index: object) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        (folder / "model.safetensors").unlink()
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))

    return change


def written(name: str, text: str) -> Callable[[Path], None]:
    return lambda folder: (folder / name).write_text(text) and None


def reshaped(folder: Path) -> None:
    from safetensors.torch import load_file, save_file

    weights = load_file(folder / "model.safetensors")
    weights["model.norm.weight"] = torch.ones(3)
    save_file(weights, folder / "model.safetensors")


def quantised(folder: Path) -> None:
    from safetensors.torch import load_file, save_file

    weights = load_file(folder / "model.safetensors")
    weights["model.norm.weight"] = weights["model.norm.weight"].to(torch.int8)
    save_file(weights, folder / "model.safetensors")


BAD = {
    "no config": (lambda folder: (folder / "config.json").unlink(), "it has no config.json"),
    "no weights": (lambda folder: (folder / "model.safetensors").unlink(), "it has no model.safetensors"),
    "a pickle only": (pickled, "its weights are in pytorch_model.bin, a pickle, and reading that"),
    "a truncated shard": (truncated, "its model.safetensors is truncated or damaged"),
    "a missing shard": (indexed({"weight_map": {"a": "b.safetensors"}}), "it lacks b.safetensors, which"),
    "a shard elsewhere": (indexed({"weight_map": {"a": "../b"}}), "index.json names no files in it"),
    "an index of numbers": (indexed({"weight_map": {"a": 7}}), "index.json names no files in it"),
    "a damaged config": (written("config.json", "{"), "its config.json is damaged"),
    "a deep config": (written("config.json", "[" * 100_000), "its config.json is damaged"),
    "a list": (written("config.json", "[]"), "its config.json is no mapping"),
    "another architecture": (config(model_type="bert"), "its model_type is bert, and gpt2, llama,"),
    "a classifier": (config(architectures=["LlamaForSequenceClassification"]), "its architectures are"),
    "code of its own": (config(auto_map={"AutoModel": "evil.py"}), "its auto_map is"),
    "quantised": (config(quantization_config={"bits": 4}), "its quantization_config is"),
    "another activation": (config(hidden_act="gelu"), "its hidden_act is gelu, and our model can only"),
    "biases": (config(attention_bias=True), "its attention_bias is true, and our model can only be false"),
    "yarn": (config(rope_parameters={"rope_type": "yarn"}), "its rope_type is yarn, and default, linear"),
    "half a rope": (config(rope_parameters={"partial_rotary_factor": 0.5}), "its partial_rotary_factor"),
    "a rope of nothing": (config(rope_parameters={"rope_type": "linear"}), "model.rope_scaling: factor=null"),
    "no width": (config(hidden_size=...), "its config.json lacks hidden_size"),
    "text as a width": (config(hidden_size="64"), "model.n_embd=64: it needs to be a whole number"),
    "a true width": (config(hidden_size=True), "model.n_embd=true: it needs to be a whole number"),
    "endless layers": (config(num_hidden_layers=2**20), "its 30 tensors are not those of"),
    "too many layers": (config(num_hidden_layers=2**62), "model.n_layer=4611686018427387904: it"),
    "an index that is a list": (indexed([]), "index.json names no files"),
    "more layers": (config(num_hidden_layers=4), "its weights lack layers.3.input_layernorm.weight and 8"),
    "fewer layers": (config(num_hidden_layers=2), "its weights have layers.2.input_layernorm.weight and"),
    "another width": (config(intermediate_size=32), "and floating-point numbers of (32, 64) are needed"),
    "another shape": (reshaped, "its norm.weight is F32 of (3,), and floating-point numbers of (64,)"),
    "integers": (quantised, "its norm.weight is I8 of (64,)"),
    "control characters": (config(model_type="\x1b[2J"), r"its model_type is '\x1b[2J'"),
}  # fmt: skip


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("llama")
    make_folder(folder, "llama")
    return folder


@pytest.mark.parametrize("case", BAD)
def test_bad_folders_are_refused_in_one_line(case: str, llama: Path, tmp_path: Path) -> None:
    change, words = BAD[case]
    shutil.copytree(llama, tmp_path / "bad")
    change(tmp_path / "bad")
    with pytest.raises(ValueError) as caught:
        read_pretrained(str(tmp_path / "bad"))
    said = str(caught.value)
    assert words in said and said.startswith(f"init_from={tmp_path}/bad is refused: ")
    assert said.isprintable() and len(said) < 400 and said.endswith(".") and not said.endswith("..")


@pytest.mark.parametrize(
    ("kind", "changes", "words"),
    [
        (
            "gpt2",
            {"activation_function": "relu"},
            "its activation_function is relu, and our model can only be gelu_new",
        ),
        ("gpt2", {"scale_attn_by_inverse_layer_idx": True}, "its scale_attn_by_inverse_layer_idx is true"),
        (
            "qwen2",
            {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1, "layer_types": ...},
            "max_window_layers, give some layers a sliding window and others none",
        ),
        ("qwen3", {"layer_types": 3}, "its layer_types, or max_window_layers"),
        ("mistral", {"sliding_window": "8"}, "model.window=8: it needs to be a whole number"),
    ],
)
def test_options_that_our_model_lacks_are_named(kind: str, changes: dict, words: str, tmp_path: Path) -> None:
    make_folder(tmp_path, kind)
    config(**changes)(tmp_path)
    with pytest.raises(ValueError, match="is refused: ") as caught:
        read_pretrained(str(tmp_path))
    assert words in str(caught.value)


def test_a_hub_that_does_not_answer_is_said_in_one_line(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    import huggingface_hub

    def fails(*args: Any, **kwargs: Any) -> None:
        raise ConnectionError("no route to host\nand a long story")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fails)
    with pytest.raises(
        ValueError, match="init_from=org/model: there is no such folder or run, and the"
    ) as caught:
        download("org/model")
    assert str(caught.value).endswith("no route to host")
    with pytest.raises(ValueError, match="and it is no id of the Hub"):
        download("../../somewhere/else")


def test_what_is_downloaded_is_no_pickle(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from fnmatch import fnmatch

    import huggingface_hub

    make_folder(tmp_path, "gpt2")
    asked: dict[str, Any] = {}
    monkeypatch.setattr(
        huggingface_hub, "snapshot_download", lambda name, **options: asked.update(options) or str(tmp_path)
    )
    assert read_pretrained("org/model").folder == tmp_path
    names = [
        "pytorch_model.bin",
        "model.safetensors",
        "flax_model.msgpack",
        "modeling_evil.py",
        "tokenizer.json",
    ]
    names += ["model-00001-of-00002.safetensors", "model.safetensors.index.json", "consolidated.00.pth"]
    taken = [name for name in names if any(fnmatch(name, pattern) for pattern in asked["allow_patterns"])]
    assert taken == [names[1], names[4], *names[5:7]]


def test_every_option_of_the_model_comes_with_the_weights() -> None:
    """Whatever a preset or an experiment sets, but for what belongs to the training."""
    theirs = {"model_type": "gpt2", "vocab_size": 8, "n_layer": 1, "n_head": 1, "n_embd": 8, "n_positions": 4}
    _, found = from_theirs(theirs)
    assert set(found) == {field.name for field in fields(GPTConfig)} - {"seq_len", *GPTConfig.TRAINING}
    assert found["sparsity"] is None and found["max_positions"] == 4
