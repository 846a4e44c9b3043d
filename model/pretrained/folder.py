"""A pretrained model in a folder, or on the Hugging Face Hub: checked whole before anything of it is used."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from conf.values import UserError
from model.config import GPTConfig
from model.gpt import GPT
from model.pretrained.architectures import Architecture, from_theirs
from model.pretrained.weights import Weights, read_json

# What is downloaded: no pickle, and of safetensors only those that transformers reads.
PATTERNS = [
    "config.json",
    "tokenizer*.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "model*.safetensors*",
]
HUB_ID = re.compile(r"[\w-][\w.-]*(/[\w-][\w.-]*)?", re.ASCII)


@dataclass(frozen=True)
class Pretrained:
    """A folder whose config.json and weights fit each other; `fields`: those of its `GPTConfig` but for
    seq_len."""

    folder: Path
    architecture: Architecture
    fields: dict[str, Any]
    weights: Weights

    def load_into(self, net: GPT) -> None:
        self.weights.load_into(net, self.architecture.model_type)


def read_pretrained(given: str, key: str = "init_from") -> Pretrained:
    """The model of a folder, or of an id of the Hub. UserError, which names it as `key`=`given`, where there
    is none, or something of it cannot be expressed, is damaged or no safetensors."""
    folder = Path(given) if Path(given).is_dir() else download(given, key)
    try:
        if not (folder / "config.json").is_file():
            raise UserError("it has no config.json")
        architecture, fields = from_theirs(read_json(folder / "config.json"))
        weights = Weights(folder)
        if fields["tie_embeddings"] and weights.has_own_head():
            fields["tie_embeddings"] = False
        weights.require(GPTConfig(**fields, seq_len=1), architecture.model_type)
    except UserError as error:
        raise UserError(f"{key}={given} is refused: {str(error).removesuffix('.')}.") from None
    return Pretrained(folder, architecture, fields, weights)


def download(given: str, key: str = "init_from") -> Path:
    """The folder of a model of the Hub, downloaded unless it is there already."""
    if not HUB_ID.fullmatch(given):
        raise UserError(f"{key}={given}: there is no such folder or run, and it is no id of the Hub.")
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(given, allow_patterns=PATTERNS))
    except Exception as error:  # of its own kinds, and of those of three libraries below it
        said = next(iter(str(error).splitlines()), "") or type(error).__name__
        raise UserError(
            f"{key}={given}: there is no such folder or run, and the Hugging Face Hub did not give it: "
            f"{said[:200]}"
        ) from None
