"""The weights beside which adapters train: in the run's folder, once, under a hash that its checkpoints know.

Whoever reads such a checkpoint to compute with it gets the merged weights of a plain model.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from conf.values import UserError
from model.config import GPTConfig
from model.gpt import GPT, without_storage
from model.lora import Adapters
from model.training.checkpoint import CheckpointError, link, sync_folder
from model.training.untrusted import require_weights

BASE = "base.safetensors"


def write_base(net: GPT, run: Path) -> str:
    """The weights of a plain model into the run's folder, in place of those that an attempt without a
    checkpoint may have left; their sha256."""
    from safetensors.torch import save_file

    path = run / BASE
    weights = net.state_dict()
    if net.config.tie_embeddings:
        del weights["lm_head.weight"]
    partial = path.with_name(f".{BASE}.{os.getpid()}.partial")
    try:
        save_file({name: tensor.cpu().contiguous() for name, tensor in weights.items()}, partial)
        digest = _sha256(partial)
        os.replace(partial, path)  # by each machine, with the same content
    finally:
        partial.unlink(missing_ok=True)
    sync_folder(run)
    return digest


def load_base(net: GPT, ckpt: Path, adapters: Adapters, run: Path) -> None:
    """Those weights again, of the run that `ckpt` lies in; `run`, which goes on from it, gets them too."""
    weights = _read_base(ckpt, adapters, net.config)
    if not (run / BASE).exists():
        link(_run_of(ckpt) / BASE, run / BASE)
    net.load_state_dict(weights)


def plain_weights(checkpoint: Mapping[str, Any], path: Path) -> dict[str, Tensor]:
    """The weights of the plain model that the checkpoint at `path` is, adapters merged."""
    metadata = checkpoint["tilegpt"]
    weights = {name.removeprefix("net."): value for name, value in checkpoint["state_dict"].items()}
    if "adapters" not in metadata:
        return weights
    adapters = Adapters.of_file(metadata["adapters"])
    return adapters.merged(_read_base(path, adapters, GPTConfig(**metadata["model"])), weights)


def _read_base(ckpt: Path, adapters: Adapters, config: GPTConfig) -> dict[str, Tensor]:
    """CheckpointError where they are not there, or others."""
    from safetensors.torch import load_file

    path = _run_of(ckpt) / BASE
    if not path.is_file():
        raise CheckpointError(
            f"{path} is not there: {ckpt} holds adapters alone, and needs the {BASE} of its run beside its "
            "checkpoints/."
        )
    if _sha256(path) != adapters.base:
        raise CheckpointError(f"{path} is damaged, or of another run: its checksum is not the checkpoint's.")
    weights = load_file(path)
    if config.tie_embeddings and "transformer.wte.weight" in weights:
        weights["lm_head.weight"] = weights["transformer.wte.weight"]
    own = without_storage(config).state_dict()
    try:
        require_weights(weights, own)
    except UserError as error:
        raise CheckpointError(f"{path} is refused: {error}.") from None
    return weights


def _run_of(ckpt: Path) -> Path:
    """runs/a of runs/a/checkpoints/x.ckpt"""
    return ckpt.absolute().parent.parent


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
