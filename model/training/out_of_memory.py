"""Out of memory in a training run: what was predicted for it, and what to lower."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from attention.base import Attention, CostsNotDeclared
from conf.values import UserError, compiled
from model.config import GPTConfig
from model.costs.memory import peak
from model.costs.run import Run, shared_by

# of the host's and the devices' allocators, and of libraries whose workspaces found no room
WORDS = (
    "out of memory",
    "allocate memory",
    "bad alloc",
    "status alloc failed",
    "storage size calculation overflowed",
    "cublas status not initialized",
)
GIB = 2**30


def is_out_of_memory(error: BaseException) -> bool:
    said = str(error).lower().replace("_", " ")
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or any(words in said for words in WORDS)


@contextmanager
def out_of_memory_told(remedy: str) -> Iterator[None]:
    """Out of memory within is a UserError that ends in `remedy`: of commands that predict no memory."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        said = next(iter(str(error).splitlines()), type(error).__name__)
        raise UserError(f"Out of memory ({said}): {remedy}.") from error


@contextmanager
def out_of_memory_explained(
    config: Mapping[str, Any],
    device: torch.device,
    dtype: torch.dtype,
    run: Path,
    build: Callable[..., Attention],
) -> Iterator[None]:
    """Out of memory within is a UserError that says what to lower, each with the predicted peak.

    config: of the run, resolved; run: its folder, which may hold checkpoints; build: makes the chosen
    attention, or the one of a name"""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        raise UserError(_message(config, device, dtype, run, build, error)) from error


def training_run(
    config: Mapping[str, Any], device: torch.device, dtype: torch.dtype, attention: Attention
) -> Run:
    """What model/costs/memory.py predicts for; of a vocabulary that only the corpus knows, 257."""
    data, spec = config["data"], config["data"].get("tokenizer")
    spec = {"kind": spec} if isinstance(spec, str) else spec or {"kind": None, **data["corpus"]}
    known = {"bpe": spec.get("vocab_size"), "gpt2": 50257, None: spec.get("vocab_size")}
    vocabulary = known.get(spec["kind"]) or 257
    graph = compiled(config["compile"], device.type, config["precision"])
    micro = data["batch_size"] * config["seq_len"]
    return Run(
        GPTConfig(vocab_size=vocabulary, seq_len=config["seq_len"], **config["model"]),
        data["batch_size"],
        attention,
        value_bytes=2 if dtype == torch.bfloat16 else 4,
        device="cpu" if device.type == "cpu" else "cuda",
        arch=torch.cuda.get_device_capability(device) if device.type == "cuda" else None,
        compiled=bool(graph),
        checkpointing=config["checkpointing"],
        documents=bool(data.get("document_mask")),
        **shared_by(config["trainer"], config["tokens_per_step"], micro, one_graph=graph is True),
    )


def remedies(
    run: Run, capacity: int, step_tokens: int | None = None, other: Attention | None = None
) -> dict[str, Run]:
    """Overrides, and the run that they make: the smaller micro-batch that is predicted to fit, its step still
    of `step_tokens` (None: of one micro-batch), and what takes less memory with the same batch, the `other`
    attention among it where this one writes its scores out."""
    found, fewer = {}, [n for n in range(run.batch // 2, 0, -1) if run.batch % n == 0]
    if fewer:
        fits = [n for n in fewer if peak(replace(run, batch=n)).peak <= capacity]
        smaller = replace(run, batch=fits[0] if fits else 1, accumulates=True)
        found[f"data.batch_size={smaller.batch} tokens_per_step={step_tokens or run.tokens}"] = smaller
    if other is not None and run.costs.writes_scores:
        found[f"attention={other.name}"] = replace(run, attention=other)
    if not run.checkpointing:
        found["checkpointing=true"] = replace(run, checkpointing=True)
    if not run.config.loss_chunk:
        with suppress(UserError):  # of a model that refuses it
            found["model.loss_chunk=2048"] = replace(run, config=replace(run.config, loss_chunk=2048))
    if run.config.seq_len > 1:
        half = run.config.seq_len // 2
        found[f"seq_len={half}"] = replace(run, config=replace(run.config, seq_len=half))
    before = peak(run).peak
    return {keys: other for keys, other in found.items() if peak(other).peak < 0.95 * before}


def _validating(error: BaseException | None) -> bool:
    """Whether it was raised within a validation step: when it gets here, Lightning has forgotten."""
    at = error.__traceback__ if error else None
    while at and at.tb_frame.f_code.co_name != "validation_step":
        at = at.tb_next
    return at is not None


def _validation_remedies(run: Run, rows: int, other: Attention) -> list[str]:
    """What to do where a batch of `rows` to validate does not fit. No more rows than those of a training step
    take less than that, which keeps what the backward needs."""
    fewer = min(run.batch, rows // 2)
    lines = [f"  data.eval_batch_size={fewer}"] if fewer else []
    if run.costs.writes_scores:
        lines.append(f"  attention={other.name}")
    return lines or ["  a shorter seq_len, or a smaller model: model.n_layer, model.n_embd"]


def _message(
    config: Mapping[str, Any],
    device: torch.device,
    dtype: torch.dtype,
    folder: Path,
    build: Callable[..., Attention],
    error: BaseException,
) -> str:
    run, (name, capacity) = training_run(config, device, dtype, build()), _memory(device)
    # of what PyTorch says that which it tried, and what was free
    said = re.sub(r"^\[.*Allocator: ", "", (str(error) or "MemoryError").splitlines()[0])
    said = ". ".join(said.split(". ")[:3]).rstrip(".")
    happened = f"out of memory on {name}, {capacity / GIB:.1f} GiB: {said}."
    try:
        predicted = _gib(run)
    except CostsNotDeclared as undeclared:
        return f"{happened}\n{undeclared}"
    resumable = any(folder.glob("checkpoints/*.ckpt"))
    if _validating(error):
        rows = config["data"].get("eval_batch_size") or run.batch
        lines = [
            happened,
            f"That was while validating, {rows} x {run.config.seq_len} tokens at once (data.eval_batch_size) "
            f"with attention={run.attention.name}. What takes less:",
            *_validation_remedies(run, rows, build("auto")),
        ]
    else:
        lines = [happened, *_training_advice(config, run, capacity, predicted, build("auto"), resumable)]
    if resumable:
        from model.training.runs import ckpt_of  # which imports lightning

        lines.append(f"Resume with one of these: python train.py {ckpt_of(folder)} ...")
    return "\n".join(lines)


def _training_advice(
    config: Mapping[str, Any], run: Run, capacity: int, predicted: str, other: Attention, resumable: bool
) -> list[str]:
    """What a training step was predicted to take, and what takes less."""
    in_fp8 = config["precision"] == "fp8"
    shown = "in bf16" if in_fp8 else "scripts/estimate.py with the same overrides shows its parts"
    lines = [
        f"A step of {run.batch} x {run.config.seq_len} tokens with attention={run.attention.name} is "
        f"predicted to take {predicted} ({shown}). What takes less:",
    ]
    devices = torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1
    step_tokens = config["tokens_per_step"] or run.tokens * devices
    able = remedies(run, capacity, step_tokens, other)
    if resumable:  # which keeps its context
        able = {keys: other for keys, other in able.items() if not keys.startswith("seq_len=")}
    fit = {keys: other for keys, other in able.items() if peak(other).peak <= capacity} or able
    width = max(map(len, able), default=0)
    lines += [f"  {keys:<{width}}  {_gib(other):>12}" for keys, other in fit.items()]
    if not able:
        lines.append("  a smaller model: model.n_layer, model.n_embd")
    return lines


def _gib(run: Run) -> str:
    return f"{peak(run).peak / GIB:,.1f} GiB"


def _memory(device: torch.device) -> tuple[str, int]:
    """A device's name and the bytes of its memory."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device), torch.cuda.mem_get_info(device)[1]
    return device.type.upper(), os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
