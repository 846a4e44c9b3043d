"""Our weights under the names of transformers' architectures, and a folder of safetensors as our weights.

Nothing is copied before the names, shapes and kinds of all tensors are known to be those that the model
needs; then one shard after another, one tensor at a time.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from conf.values import UserError
from model.config import GPTConfig
from model.gpt import GPT, without_storage
from model.training.untrusted import printable

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
FLOATS = {"F64", "F32", "F16", "BF16"}
# Buffers that older versions saved: masks, and the frequencies of rotary embedding.
BUFFERS = re.compile(r"h\.\d+\.attn\.(bias|masked_bias)|(layers\.\d+\.self_attn\.)?rotary_emb\.inv_freq")
LAYER = {
    "ln_1": ("input_layernorm",),
    "ln_2": ("post_attention_layernorm",),
    "attn.c_attn": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "attn.c_proj": ("self_attn.o_proj",),
    "attn.q_norm": ("self_attn.q_norm",),
    "attn.k_norm": ("self_attn.k_norm",),
    "mlp.c_fc": ("mlp.gate_proj", "mlp.up_proj"),
    "mlp.c_proj": ("mlp.down_proj",),
}
TOP = {"wte": "model.embed_tokens", "ln_f": "model.norm"}


@dataclass(frozen=True)
class Piece:
    """Rows [start, stop) of one of our tensors as a tensor of theirs."""

    name: str
    start: int
    stop: int
    transposed: bool = False

    def of(self, tensor: Tensor) -> Tensor:
        part = tensor[self.start : self.stop]
        return part.T if self.transposed else part


def pieces(config: GPTConfig, model_type: str) -> dict[str, list[Piece]]:
    """Our names -> the tensors of `model_type` that these are made of, from their first row on. GPT-2's are
    ours, its matrices transposed; the others have q, k and v apart, and the MLP's gate and value."""
    own = without_storage(config).state_dict()
    if config.tie_embeddings:
        del own["lm_head.weight"]
    found = {}
    for name, tensor in own.items():
        rows = config.vocab_size if name in ("transformer.wte.weight", "lm_head.weight") else tensor.shape[0]
        if model_type == "gpt2":
            matrix = re.search(r"\.(c_attn|c_proj|c_fc)\.weight$", name) is not None
            found[name] = [Piece(name, 0, rows, matrix)]
            continue
        path, _, kind = name.removeprefix("transformer.").rpartition(".")
        layer = re.fullmatch(r"h\.(\d+)\.(.+)", path)
        if layer is None:
            theirs = [TOP.get(path, path)]
        else:
            theirs = [f"model.layers.{layer[1]}.{part}" for part in LAYER[layer[2]]]
        starts = [0, *_ends(config, len(theirs), rows)]
        found[name] = [Piece(f"{t}.{kind}", *starts[i : i + 2]) for i, t in enumerate(theirs)]
    return found


def _ends(config: GPTConfig, parts: int, rows: int) -> list[int]:
    """The last rows of each of the parts of a tensor of `rows`: q, k and v, gate and value, or all of it."""
    q, kv = config.n_head * config.head_size, config.kv_heads * config.head_size
    return {1: [rows], 2: [rows // 2, rows], 3: [q, q + kv, rows]}[parts]


def theirs_of(net: GPT, model_type: str) -> Iterator[tuple[str, Tensor]]:
    """(their name, tensor), fp32, contiguous and on the CPU. GPT-2 has biases everywhere: zeros where we have
    none."""
    weights = net.state_dict()
    for name, parts in pieces(net.config, model_type).items():
        for piece in parts:
            yield piece.name, piece.of(weights[name]).cpu().float().contiguous()
        bias = re.sub(r"weight$", "bias", name)
        table = re.search(r"(wte|wpe|lm_head)\.weight$", name)
        if model_type == "gpt2" and not table and bias not in weights:
            yield bias, torch.zeros(weights[name].shape[0])


def shards_of(folder: Path) -> list[Path]:
    """The safetensors of a folder; the single file where it has an index, too, as transformers chooses: that
    is of weights which were there before. UserError where there are none, or the index names others."""
    if (folder / SINGLE).is_file():
        return [folder / SINGLE]
    index = folder / INDEX
    if index.is_file():
        content = read_json(index)
        named = content.get("weight_map") if isinstance(content, dict) else None
        names = set(named.values()) if isinstance(named, dict) and _all_text(named.values()) else set()
        if not names or any(Path(name).name != name for name in names):
            raise UserError(f"its {INDEX} names no files in it")
        if missing := sorted(name for name in names if not (folder / name).is_file()):
            raise UserError(f"it lacks {printable(missing[0])}, which its {INDEX} names")
        return [folder / name for name in sorted(names)]
    pickles = sorted(path.name for path in folder.iterdir() if path.suffix in (".bin", ".pt", ".pth"))
    if pickles:
        raise UserError(
            f"its weights are in {printable(pickles[0])}, a pickle, and reading that could run code. Have "
            "them as safetensors: save_pretrained of a model that you trust writes these"
        )
    raise UserError(f"it has no {SINGLE}")


def read_json(path: Path) -> Any:
    """UserError for a file that is no JSON of plain values."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise UserError(f"its {path.name} is damaged ({type(error).__name__})") from None


def _all_text(values: Any) -> bool:
    return all(isinstance(value, str) for value in values)


class Weights:
    """The tensors of a folder, of which only the headers have been read."""

    def __init__(self, folder: Path):
        from safetensors import SafetensorError, safe_open

        self.at: dict[str, tuple[Path, str, tuple[int, ...], str]] = {}  # name -> file, key, shape, kind
        for path in shards_of(folder):
            try:
                with safe_open(path, "pt") as file:
                    for key in file.keys():  # noqa: SIM118 - it is no mapping
                        tensor = file.get_slice(key)
                        self.at[_bare(key)] = path, key, tuple(tensor.get_shape()), tensor.get_dtype()
            except SafetensorError as error:
                raise UserError(f"its {path.name} is truncated or damaged ({str(error)[:80]})") from None

    def has_own_head(self) -> bool:
        """Whether a head is there that is not the embedding: transformers then ties none, whatever its
        config.json says."""
        from safetensors import safe_open

        both = []
        for name in ("lm_head.weight", "wte.weight", "embed_tokens.weight"):
            if name in self.at:
                path, key, *_ = self.at[name]
                with safe_open(path, "pt") as file:
                    both.append(file.get_tensor(key))
        if len(both) < 2 or both[0].shape != both[1].shape:
            return len(both) == 2
        parts = zip(*(each.split(4096) for each in both), strict=True)  # no copy of the whole in fp32
        return not all(torch.equal(a.float(), b.float()) for a, b in parts)

    def require(self, config: GPTConfig, model_type: str) -> None:
        """UserError unless these are the weights of that model, which is not built before."""
        if config.n_layer > len(self.at):
            raise UserError(f"its {len(self.at)} tensors are not those of {config.n_layer} layers")
        needed: dict[str, tuple[int, ...]] = {}
        own = without_storage(config).state_dict()
        for name, parts in pieces(config, model_type).items():
            needed |= {_bare(piece.name): tuple(piece.of(own[name]).shape) for piece in parts}
        extra = {name for name in self.at.keys() - needed.keys() if not BUFFERS.fullmatch(name)}
        extra -= {"lm_head.weight"} if config.tie_embeddings else set()
        for what, names in (("lack", needed.keys() - self.at.keys()), ("have", extra)):
            if names:
                more = f" and {len(names) - 1} more" if len(names) > 1 else ""
                raise UserError(
                    f"its weights {what} {printable(min(names))}{more}, not as its config.json says"
                )
        for name, shape in needed.items():
            _, _, found, kind = self.at[name]
            if found != shape or kind not in FLOATS:
                raise UserError(
                    f"its {name} is {kind} of {found}, and floating-point numbers of {shape} are needed"
                )

    def load_into(self, net: GPT, model_type: str) -> None:
        """Copy all into `net`, shard by shard; rows of the vocabulary's padding become 0."""
        from safetensors import safe_open

        own = net.state_dict()
        wanted: dict[Path, list[tuple[str, Tensor]]] = {}
        for name, parts in pieces(net.config, model_type).items():
            own[name][parts[-1].stop :].zero_()
            for piece in parts:
                path, key, *_ = self.at[_bare(piece.name)]
                wanted.setdefault(path, []).append((key, piece.of(own[name])))
        for path, targets in wanted.items():
            with safe_open(path, "pt") as file:
                for key, target in targets:
                    target.copy_(file.get_tensor(key))


def _bare(name: str) -> str:
    """Without the base model's prefix, which some files have and others lack."""
    return name.removeprefix("transformer.").removeprefix("model.")
