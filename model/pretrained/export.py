"""A model of ours as a folder that transformers loads, whole or not at all."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

from conf.values import UserError
from model.gpt import GPT
from model.pretrained.architectures import architecture_of, to_theirs
from model.pretrained.weights import SINGLE, theirs_of
from model.training.checkpoint import sync_folder


def export(net: GPT, folder: Path, files: dict[str, str], bos: int | None, eos: int | None) -> str:
    """Write config.json, generation_config.json, the weights in fp32 and `files` (name -> text); returns the
    name of the class that loads them. UserError where no architecture fits, or `folder` cannot be written."""
    from safetensors.torch import save_file

    architecture = architecture_of(net.config)
    config = to_theirs(net.config, bos, eos)
    generation: dict[str, Any] = {"bos_token_id": bos, "eos_token_id": eos, "pad_token_id": eos}
    texts = {**files, "config.json": _text(config), "generation_config.json": _text(generation)}
    if folder.exists():
        raise UserError(f"to={folder} is there already: give a folder that is not.")
    partial = folder.with_name(f".{folder.name}.{os.getpid()}.partial")
    try:
        partial.mkdir(parents=True)
        for name, text in texts.items():
            (partial / name).write_text(text, encoding="utf-8")
        weights = dict(theirs_of(net, architecture.model_type))
        save_file(weights, partial / SINGLE, metadata={"format": "pt"})
        for path in partial.iterdir():
            path.chmod(0o644)  # safetensors are made for their owner alone
            with path.open("rb") as file:
                os.fsync(file.fileno())
        os.rename(partial, folder)
        sync_folder(folder.parent)
    except OSError as error:
        raise UserError(f"to={folder} could not be written: {error.strerror or error}.") from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return architecture.cls


def _text(values: dict[str, Any]) -> str:
    return json.dumps(values, indent=2) + "\n"
