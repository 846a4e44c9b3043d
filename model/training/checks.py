"""What a user set, checked before anything is built: one message for a mistake, with the key's name."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar

from conf.values import UserError, number, shown, switch, whole
from model.config import GPTConfig

T = TypeVar("T")

# Keys that go to libraries, or to several parts; what only one part of ours reads is checked by that part
# (GPTConfig, the datamodule, Sampling). Keys that a config lacks are passed over.
COUNTS = (
    "trainer.max_steps trainer.val_check_interval trainer.num_nodes callbacks.metrics.every "
    "callbacks.samples.every callbacks.progress.every callbacks.checkpoints.keep"
)
NULLS = {
    "tokens_per_step": "one micro-batch a device",
    "schedule.decay_steps": "the end of training",
    "callbacks.checkpoints.every": "at every validation",
}
FROM_ZERO = "optim.lr optim.eps optim.weight_decay"
PARTS = "schedule.min_factor schedule.decay_fraction"
# Of Lightning's names those that train replicas, in this process or in processes of the launcher.
STRATEGIES = ("auto", "single_device", "ddp", *(f"ddp_find_unused_parameters_{x}" for x in ("true", "false")))
SWITCHES = "checkpointing deterministic overwrite callbacks.profile"
GROUPS = ("attention", "model", "data", "optim", "schedule", "trainer")
# Arguments of Lightning's Trainer that are decided elsewhere -> where.
ELSEWHERE = {
    "accumulate_grad_batches": "tokens_per_step", "gradient_clip_val": "grad_clip",
    "gradient_clip_algorithm": "grad_clip (always by norm)", "precision": "precision",
    "deterministic": "deterministic", "logger": "logger=", "callbacks": "callbacks.*",
    "enable_checkpointing": "callbacks.checkpoints", "enable_progress_bar": "callbacks.progress",
    "default_root_dir": "name", "max_epochs": "trainer.max_steps", "max_time": "trainer.max_steps",
    "check_val_every_n_epoch": "trainer.val_check_interval",
    "min_steps": "trainer.max_steps", "min_epochs": "trainer.max_steps",
    "log_every_n_steps": "callbacks.metrics.every",
    "overfit_batches": "the data (to overfit, give a short text: data=text data.path=...)",
}  # fmt: skip


def check(config: Mapping[str, Any], resume_step: int | None, fixed: Mapping[str, Any]) -> None:
    """UserError for the first mistake. fixed: further arguments of the Trainer that train.py gives."""
    for group in GROUPS:
        if config.get(group) is None or config[group].keys() <= {"decode"}:
            raise UserError(f"a run needs {group}=: python train.py --help lists what there is.")
    _within_64_bits("", config)
    if resume_step is None:  # runs from before it was asked for go on
        _tokenizer(config)
    for key, value in _found(config, COUNTS):
        whole(key, value, 1)
    for key, null in NULLS.items():
        for _, value in _found(config, key):
            whole(key, value, 1, null=null)
    for key, value in _found(config, "seed schedule.warmup_steps"):
        whole(key, value, 0)
    for key, value in _found(config, FROM_ZERO):
        number(key, value, least=0)
    for key, value in _found(config, "grad_clip"):
        number(key, value, above=0, null="no clipping")
    _schedule(config)
    for key, value in _found(config, SWITCHES):
        switch(key, value)
    for key, others in (("compile", ("auto", "blocks")), ("cuda_graphs", ("auto",))):
        if not isinstance(config[key], bool) and config[key] not in others:
            *names, last = ("true", "false", *others)
            raise UserError(f"{key}={shown(config[key])}: choose {', '.join(names)} or {last}.")
    if config["optim"].get("fused") is not True:
        raise UserError(
            f"optim.fused={shown(config['optim'].get('fused'))}: gradients are clipped, and bad ones "
            "skipped, inside the fused AdamW kernel. Leave optim.fused=true."
        )
    for name, value in (config.get("callbacks") or {}).items():
        if value is True and name != "profile":
            raise UserError(
                f"callbacks.{name}=true: it is there unless it is null, and takes keys of its own."
            )
    _trainer(config["trainer"], resume_step, fixed)


def require_resumable(optimizer: Any) -> None:
    """UserError where checkpoints would be written that nothing takes up again: states are checked before
    they are loaded, and those of Adam are known."""
    from torch.optim import Adam

    if not isinstance(optimizer, Adam):
        raise UserError(
            f"optim._target_: a run cannot resume with {type(optimizer).__name__}; use torch.optim.AdamW, "
            "torch.optim.Adam or optim=muon."
        )


def _tokenizer(config: Mapping[str, Any]) -> None:
    kind, path = (_at(config, f"data.tokenizer.{key}") for key in ("kind", "path"))
    if kind not in ("file", ...) and path not in (None, ...):
        raise UserError(
            f"data.tokenizer.path={shown(path)} beside data.tokenizer.kind={shown(kind)}: a file takes "
            "data.tokenizer.kind=file."
        )


def _schedule(config: Mapping[str, Any]) -> None:
    for key, value in _found(config, PARTS):
        number(key, value, least=0)
        if value > 1:
            raise UserError(f"{key}={value}: it needs to be a number, at least 0 and at most 1.")
    warmup, decay = (_at(config, f"schedule.{name}_steps") for name in ("warmup", "decay"))
    if isinstance(decay, int) and isinstance(warmup, int) and decay < warmup:
        raise UserError(
            f"schedule.decay_steps={decay}: by then the learning rate is to have fallen, and it rises until "
            f"schedule.warmup_steps={warmup}. Use schedule.decay_steps={warmup} or more, or null for the end "
            "of training."
        )


def _within_64_bits(key: str, value: Any) -> None:
    """What tensors, seeds and files can hold; text may well look like a longer number. What others follow,
    as data.seed does seed, comes first."""
    if isinstance(value, Mapping | list):
        parts = value.items() if isinstance(value, Mapping) else enumerate(value)
        for name, part in sorted(parts, key=lambda item: isinstance(item[1], Mapping | list)):
            if name not in ("name", "path", "prompt", "runs_dir"):
                _within_64_bits(f"{key}.{name}".strip("."), part)
    elif isinstance(value, int):
        most = 2**64 - 1 if key.endswith("seed") else 2**63 - 1
        if abs(value) > most:
            raise UserError(f"{key}={value}: it needs to fit into 64 bits, at most {most}.")


def _trainer(trainer: Mapping[str, Any], resume_step: int | None, fixed: Mapping[str, Any]) -> None:
    for key in trainer:
        if key in ELSEWHERE:
            raise UserError(f"trainer.{key}: that is decided by {ELSEWHERE[key]}.")
        if key in fixed or key == "plugins":
            raise UserError(f"trainer.{key}: this training loop needs its own; leave it out.")
    profiler = trainer.get("profiler")
    if isinstance(profiler, str):  # its report goes to Lightning's log, which is off
        raise UserError(
            f"trainer.profiler={shown(profiler)}: nothing would be shown; use callbacks.profile=true."
        )
    strategy = trainer.get("strategy", "auto")
    # of Lightning's others, fsdp would clip by a norm of each rank's own shards, and ddp_spawn pickle the run
    if strategy is None or (isinstance(strategy, str) and strategy not in STRATEGIES):
        raise UserError(
            f"trainer.strategy={shown(strategy)}: this training loop knows replicas and FSDP2; choose "
            "trainer=ddp, fsdp2 or context_parallel."
        )
    limit = trainer.get("limit_val_batches", 1.0)
    number("trainer.limit_val_batches", limit, least=0)
    if isinstance(limit, float) and limit > 1:
        raise UserError(f"trainer.limit_val_batches={limit}: a part up to 1.0, or a whole number of batches.")
    for key in ("devices", "num_nodes"):
        if type(trainer.get(key)) is int and trainer[key] > 2**16:
            raise UserError(f"trainer.{key}={trainer[key]}: it needs to be at most {2**16}.")
    devices = trainer.get("devices")
    if type(devices) is int and devices < 1 and devices != -1:
        raise UserError(f"trainer.devices={devices}: it needs to be at least 1, or -1 or auto for all.")
    max_steps = trainer["max_steps"]
    if resume_step is not None and resume_step >= max_steps:
        raise UserError(
            f"That checkpoint is at step {resume_step} of trainer.max_steps={max_steps}: the run has "
            f"finished. Train on with trainer.max_steps={2 * resume_step}."
        )


def _found(config: Mapping[str, Any], keys: str) -> Iterator[tuple[str, Any]]:
    for key in keys.split():
        if (value := _at(config, key)) is not ...:
            yield key, value


def _at(config: Any, key: str) -> Any:
    """The value of a dotted key, `...` where there is none."""
    for part in key.split("."):
        config = config.get(part, ...) if isinstance(config, Mapping) else ...
    return config


def fits_objective(config: GPTConfig, mask_fraction: float | None) -> None:
    """UserError where the model cannot see what data.mask_fraction asks it to use."""
    if mask_fraction is not None and config.causal:
        raise UserError(
            f"data.mask_fraction={mask_fraction}: to fill a gap, a token has to see both sides of it, and "
            "with model.causal=true it sees one. Set model.causal=false, or data.mask_fraction=null."
        )


def called(key: str, function: Callable[..., T], *args: Any, **kwargs: Any) -> T:
    """`function(...)`; an argument of `key` that it does not take, or cannot use, is one message."""
    try:
        return function(*args, **kwargs)
    except (TypeError, ValueError, RuntimeError) as error:  # the last by torch's optimisers
        if isinstance(error, UserError):
            raise
        raise UserError(f"{key}: {error}") from error
