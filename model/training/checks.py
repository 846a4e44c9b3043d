"""What a user set, checked before anything is built: one message for a mistake, with the key's name."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

T = TypeVar("T")

# (kind, least value: included for a whole number or "from", excluded for "above"; may it be null; keys). Keys
# that a config lacks are passed over; what depends on several is checked by those who know.
NUMBERS: tuple[tuple[str, float, bool, str], ...] = (
    (
        "whole",
        1,
        False,
        "seq_len model.n_layer model.n_head model.n_embd data.batch_size data.eval_batch_size",
    ),
    ("whole", 1, False, "trainer.max_steps trainer.val_check_interval trainer.num_nodes"),
    ("whole", 1, False, "callbacks.metrics.every callbacks.samples.every callbacks.samples.tokens"),
    ("whole", 1, False, "callbacks.progress.every callbacks.checkpoints.keep"),
    ("whole", 1, True, "tokens_per_step model.n_kv_head data.max_val_tokens data.prepare_workers"),
    ("whole", 1, True, "schedule.decay_steps callbacks.checkpoints.every"),
    ("whole", 0, False, "seed data.num_workers schedule.warmup_steps model.loss_chunk"),
    ("whole", 0, True, "model.window"),
    ("from", 0, False, "optim.lr optim.eps optim.weight_decay schedule.min_factor schedule.decay_fraction"),
    ("from", 0, False, "model.dropout model.attn_dropout callbacks.samples.temperature"),
    ("above", 0, False, "model.rope_base"),
    ("above", 0, True, "grad_clip model.softcap"),
)
SWITCHES = (
    "checkpointing deterministic overwrite data.document_mask data.verify model.bias model.qk_norm "
    "model.causal model.tie_embeddings"
)
GROUPS = ("attention", "model", "data", "optim", "schedule", "trainer")
# Arguments of Lightning's Trainer that are decided elsewhere -> where.
ELSEWHERE = {
    "accumulate_grad_batches": "tokens_per_step", "gradient_clip_val": "grad_clip",
    "gradient_clip_algorithm": "grad_clip (always by norm)", "precision": "precision",
    "deterministic": "deterministic", "logger": "logger=", "callbacks": "callbacks.*",
    "enable_checkpointing": "callbacks.checkpoints", "enable_progress_bar": "callbacks.progress",
    "default_root_dir": "name", "max_epochs": "trainer.max_steps", "max_time": "trainer.max_steps",
    "check_val_every_n_epoch": "trainer.val_check_interval",
}  # fmt: skip


def check(config: Mapping[str, Any], resume_step: int | None, fixed: Mapping[str, Any]) -> None:
    """ValueError for the first mistake. fixed: further arguments of the Trainer that train.py gives."""
    for group in GROUPS:
        if config.get(group) is None or config[group].keys() <= {"decode"}:
            raise ValueError(f"a run needs {group}=: python train.py --help lists what there is.")
    _within_64_bits("", config)
    for kind, least, null, keys in NUMBERS:
        for key in keys.split():
            _number(key, _at(config, key), kind, least, null)
    for key in SWITCHES.split():
        if not isinstance(value := _at(config, key), bool) and value is not ...:
            raise ValueError(f"{key}={_shown(value)}: choose true or false.")
    if not isinstance(config["compile"], bool) and config["compile"] != "auto":
        raise ValueError(f"compile={_shown(config['compile'])}: choose true, false or auto.")
    if config["optim"].get("fused") is not True:
        raise ValueError(
            f"optim.fused={_shown(config['optim'].get('fused'))}: gradients are clipped, and bad ones "
            "skipped, inside the fused AdamW kernel. Leave optim.fused=true."
        )
    _trainer(config["trainer"], resume_step, fixed)


def _within_64_bits(key: str, value: Any) -> None:
    """What tensors, seeds and files can hold; text may well look like a longer number."""
    if isinstance(value, Mapping | list):
        for name, part in value.items() if isinstance(value, Mapping) else enumerate(value):
            if name not in ("name", "path", "prompt", "runs_dir"):
                _within_64_bits(f"{key}.{name}".strip("."), part)
    elif isinstance(value, int):
        most = 2**64 - 1 if key.endswith("seed") else 2**63 - 1
        if abs(value) > most:
            raise ValueError(f"{key}={value}: it needs to fit into 64 bits, at most {most}.")


def _trainer(trainer: Mapping[str, Any], resume_step: int | None, fixed: Mapping[str, Any]) -> None:
    for key in trainer:
        if key in ELSEWHERE:
            raise ValueError(f"trainer.{key}: that is decided by {ELSEWHERE[key]}.")
        if key in fixed or key == "plugins":
            raise ValueError(f"trainer.{key}: this training loop needs its own; leave it out.")
    limit = trainer.get("limit_val_batches", 1.0)
    _number("trainer.limit_val_batches", limit, "from", 0, False)
    if isinstance(limit, float) and limit > 1:
        raise ValueError(
            f"trainer.limit_val_batches={limit}: a part up to 1.0, or a whole number of batches."
        )
    for key in ("devices", "num_nodes"):
        if type(trainer.get(key)) is int and trainer[key] > 2**16:
            raise ValueError(f"trainer.{key}={trainer[key]}: it needs to be at most {2**16}.")
    max_steps = trainer["max_steps"]
    if resume_step is not None and resume_step >= max_steps:
        raise ValueError(
            f"That checkpoint is at step {resume_step} of trainer.max_steps={max_steps}: the run has "
            f"finished. Train on with trainer.max_steps={2 * resume_step}."
        )


def _number(key: str, value: Any, kind: str, least: float, null: bool) -> None:
    if value is ... or (value is None and null):
        return
    types = int if kind == "whole" else int | float
    good = isinstance(value, types) and not isinstance(value, bool) and math.isfinite(value)
    if not good or value < least or (kind == "above" and value == least):
        needs = {"whole": "a whole number, at least", "from": "a number, at least", "above": "a number above"}
        raise ValueError(
            f"{key}={_shown(value)}: it needs to be {needs[kind]} {least:g}{', or null' if null else ''}."
        )


def _at(config: Any, key: str) -> Any:
    """The value of a dotted key, `...` where there is none."""
    for part in key.split("."):
        config = config.get(part, ...) if isinstance(config, Mapping) else ...
    return config


def _shown(value: Any) -> str:
    """As it was typed."""
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def called(key: str, function: Callable[..., T], *args: Any, **kwargs: Any) -> T:
    """`function(...)`; an argument of `key` that it does not take, or cannot use, is one message."""
    try:
        return function(*args, **kwargs)
    except TypeError as error:
        raise ValueError(f"{key}: {error}") from error
