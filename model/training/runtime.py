"""Decisions made once at start-up, and what is said at the start and the end of a run."""

from __future__ import annotations

import logging
import os
import shlex
import signal
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.plugins.environments import (
    LightningEnvironment,
    SLURMEnvironment,
    TorchElasticEnvironment,
)
from lightning.pytorch.accelerators import CUDAAccelerator
from lightning.pytorch.utilities import rank_zero_only

from attention.base import Attention, AttentionCall, UnsupportedAttention
from conf.values import UserError, compiled, is_first
from model import loss
from model.calls import attention_calls, require
from model.config import GPTConfig
from model.costs.flops import flops_per_token, parameter_count, peak_bf16_flops
from model.lora import adapter_count
from model.training import fp8, graphs
from model.training.callbacks import Samples
from model.training.checks import fits_objective
from model.training.imports import start_compilers
from model.training.runs import ckpt_of
from model.training.saving import Checkpoints, Interrupt
from ops import mlp

# What Lightning would do a second time: we have our own progress, checkpoints, order of data and step.
TRAINER = {
    "max_epochs": -1,
    "check_val_every_n_epoch": None,
    "num_sanity_val_steps": 0,
    "enable_progress_bar": False,
    "enable_model_summary": False,
    "enable_checkpointing": False,
    "use_distributed_sampler": False,
    "inference_mode": False,
}

say = rank_zero_only(print)  # what every rank finds out, one tells


def quiet() -> None:
    """Leave the terminal to what the user asked for: Lightning's advertisements and notes on its own
    internals go."""
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", module=r"lightning\..*")
    # Lightning wraps DDP on a side stream, and torch says so once on every rank.
    warnings.filterwarnings("ignore", message="The AccumulateGrad node's stream does not match")
    # The only call that averages many tensors as one operation, deprecated with nothing in its place (2.13).
    warnings.filterwarnings("ignore", message="`torch.distributed.all_reduce_coalesced` will be deprecated")
    # FSDP2 warns of operations in place on a block's output, where the residual stream has none.
    warnings.filterwarnings("ignore", message=r"FSDP2-wrapped module .* returned a view tensor")


def device(accelerator: str, devices: Any = 1) -> torch.device:
    """The device that Lightning's `accelerator` and `devices` will mean for this process; a CUDA device is
    made the current one."""
    if accelerator in ("auto", "gpu", "cuda") and torch.cuda.is_available():
        if devices == "auto":
            devices = CUDAAccelerator.auto_device_count()
        indices = CUDAAccelerator.parse_devices(devices)
        if not indices:
            raise UserError(f"trainer.devices={devices}: it needs to name at least one device.")
        rank = int(os.environ.get("LOCAL_RANK") or os.environ.get("SLURM_LOCALID") or 0)
        index = indices[rank % len(indices)]
        torch.cuda.set_device(index)
        return torch.device("cuda", index)
    if accelerator in ("auto", "gpu", "mps") and torch.backends.mps.is_available():
        return torch.device("mps")
    if accelerator in ("auto", "cpu"):
        return torch.device("cpu")
    raise UserError(
        f"trainer.accelerator={accelerator}: no such device is visible here. Use trainer.accelerator=cpu."
    )


def alone(trainer: Any) -> list[LightningEnvironment]:
    """The plugin that says that this process is the only one, where it is. Lightning looks around for what
    else may have started processes, and imports MPI where that is installed, which takes 0.4 s."""
    others = TorchElasticEnvironment.detect() or SLURMEnvironment.detect()
    single = trainer.devices in (1, "1") and trainer.num_nodes == 1
    return [LightningEnvironment()] if single and not others else []


def require_processes(trainer: Any) -> None:
    """UserError where torchrun or Slurm has started another number of processes than there are devices: each
    would train the same run on its own, or a part of every step would be missing."""
    environment = trainer._accelerator_connector.cluster_environment
    if not isinstance(environment, TorchElasticEnvironment | SLURMEnvironment):
        return
    started, nodes, devices = environment.world_size(), trainer.num_nodes, trainer.num_devices
    if started == nodes * devices:
        return
    given = f"{started} process(es), and trainer.num_nodes={nodes} x trainer.devices={devices} needs one each"
    one = "" if nodes * devices > 1 or started == 1 else ", and trainer=ddp or fsdp2"
    if isinstance(environment, TorchElasticEnvironment):
        raise UserError(f"torchrun has started {given}. Set --nnodes and --nproc-per-node to them{one}.")
    raise UserError(
        f"Slurm has {given}. Start train.py by srun, with --nodes and --ntasks-per-node equal to them{one}; "
        "SLURM_JOB_NAME=interactive python train.py ... leaves Slurm's tasks aside."
    )


def precision(asked: str, on: torch.device) -> str:
    """What Lightning is given: `asked`; for auto bf16-mixed on a CUDA device that has bf16 and 32-true
    elsewhere; for fp8 bf16-mixed, which is what surrounds the fp8 products."""
    if asked not in ("auto", "32-true", "bf16-mixed", "fp8"):
        raise UserError(f"precision={asked}: choose auto, 32-true, bf16-mixed or fp8.")
    native = on.type != "cuda" or torch.cuda.is_bf16_supported(including_emulation=False)
    if asked == "bf16-mixed" and not native:
        raise UserError(
            f"precision=bf16-mixed: {torch.cuda.get_device_name(on)} has no bf16 (it takes compute "
            "capability 8.0). Use precision=32-true."
        )
    if asked == "auto":
        return "bf16-mixed" if on.type == "cuda" and native else "32-true"
    if asked == "fp8":
        fp8.require(on)
        return "bf16-mixed"
    return asked


def begin_compiling(asked: bool | str, on: torch.device, precision: str) -> bool | str:
    """Whether the model is compiled, or "blocks" (see conf.values.compiled); for a CUDA device, the processes
    that compile are started."""
    how = compiled(asked, on.type, precision)
    if how and on.type == "cuda":
        start_compilers()
    return how


def may_validate_eagerly(
    compiled: bool | str, attention: Attention, call: AttentionCall, config: GPTConfig, rows: int
) -> bool:
    """Whether validation may be left uncompiled, although the model is compiled: where a step of so many rows
    is small, and attention does not itself rely on torch.compile."""
    kernels = attention.resolve(call).declaration.compilation
    return bool(compiled) and graphs.small(config, rows) and not (kernels and kernels.by_torch)


def compute_dtype(precision: str) -> torch.dtype:
    """The dtype that reaches attention."""
    return torch.bfloat16 if precision == "bf16-mixed" else torch.float32


def accumulation(tokens_per_step: int | None, micro_tokens: int, devices: int) -> int:
    """Micro-batches of a step: tokens_per_step / (micro_tokens * devices), which has to come out even.
    Devices that share each sequence count as one."""
    if tokens_per_step is None:
        return 1
    at_once = micro_tokens * devices
    if tokens_per_step < at_once or tokens_per_step % at_once:
        lower = max(at_once, tokens_per_step // at_once * at_once)
        raise UserError(
            f"tokens_per_step={tokens_per_step} is not a multiple of the {at_once} tokens that {devices} "
            f"device(s) process at once (data.batch_size * seq_len * devices): use {lower} or "
            f"{lower + at_once}, or another data.batch_size."
        )
    return tokens_per_step // at_once


def attentions(
    build: Callable[..., Attention],
    decode: str | None,
    config: GPTConfig,
    data: Any,
    **facts: Any,
) -> tuple[Attention, Attention, AttentionCall]:
    """What trains, what decodes, and the call that trains. UnsupportedAttention where one of them cannot,
    UserError where the model does not fit what the data has it predict.

    build: the chosen implementation, or the one of a name; facts: device, dtype, sequence_ranks"""
    fits_objective(config, data.mask_fraction)
    facts["document_ids"] = data.document_mask
    calls = attention_calls(config, data.batch_size, data.eval_batch_size, **facts)
    attention = build()
    require(attention, [call for purpose, call in calls.items() if purpose != "decode"])
    return attention, decoder(attention, calls["decode"], build, decode), calls["training"]


def decoder(
    attention: Attention, call: AttentionCall, build: Callable[[str], Attention], asked: str | None
) -> Attention:
    """The implementation that decodes: `asked` (attention.decode), else the same one where it can, else auto;
    said where it is another than the one that trains."""
    if asked is not None:
        chosen = build(asked)
        if reasons := chosen.unsupported_reasons(call):
            raise UnsupportedAttention(asked, [f"decode: {reason}" for reason in reasons])
        return chosen
    reasons = attention.unsupported_reasons(call)
    if not reasons:
        return attention
    say(
        f"attention={attention.name} cannot decode ({'; '.join(reasons)}): attention.decode=auto decodes "
        "instead."
    )
    return build("auto")


def summary(lit: Any, data: Any, trainer: Any, precision: str, call: AttentionCall, run: Path) -> str:
    """What is about to run, in a few lines."""
    config, attention = lit.net.config, lit.net.transformer.h[0].attn.attention
    where = device_name(call.device)
    total = sum(parameter_count(config).values())
    devices, ranks = trainer.num_devices * trainer.num_nodes, getattr(trainer.strategy, "sequence_ranks", 1)
    tokens = data.batch_size * data.seq_len * data.accumulate * devices // ranks
    chosen = attention.name
    if hasattr(attention, "choice"):
        name, why = attention.choice(call)
        chosen = f"{attention.name} -> {name} ({why})"
    peak, flops = peak_bf16_flops(where), flops_per_token(config, adapters=adapter_count(lit.net))
    mfu = (
        f"MFU = {flops / 1e9:.3f} GFLOP/token * tokens/s / {peak / 1e12:.0f} TFLOP/s"
        if peak
        else f"no MFU: the bf16 peak of '{where}' is not known"
    )
    return (
        f"model      {total / 1e6:.2f}M parameters, {config.n_layer} layers, {config.n_head} heads, width "
        f"{config.n_embd}, context {config.seq_len}, vocabulary {config.vocab_size}\n"
        f"attention  {chosen}\n"
        f"data       {data.train_tokens:,} training and {data.val_tokens:,} validation tokens\n"
        f"step       {tokens:,} tokens ({data.accumulate} x {data.batch_size} x {data.seq_len} on "
        f"{devices} device(s){f', {ranks} to a sequence' if ranks > 1 else ''}), {trainer.max_steps} steps\n"
        f"machine    {where}, {precision}{fp8.said(lit.net)}{', compiled' if lit.compile_net else ''}"
        f"{', a step one CUDA graph' if lit.cuda_graphs else ''}; {mfu}\n"
        f"run        {run}"
        + never_warm(lit.schedule, trainer.max_steps)
        + "".join(f"\nslower     {reason}" for reason in slower(call.device, precision))
    )


def never_warm(schedule: Any, max_steps: int) -> str:
    """A line where the warm-up lasts as long as the run, which may be meant, as in a trial of a few steps."""
    warmup = getattr(schedule, "keywords", {}).get("warmup_steps", 0)
    if warmup < max_steps:
        return ""
    return f"\nwarm-up    schedule.warmup_steps={warmup}: the learning rate never reaches optim.lr"


def slower(device: str, precision: str) -> list[str]:
    """What would be faster on this machine, and what is missing for it."""
    if device != "cuda" or precision == "32-true":
        return []
    return [reason for reason in (loss.missing(), mlp.missing()) if reason]


def resumed(run: Path, ckpt: Path, step: int, changes: list[str]) -> str:
    """What a run resumes from, and what differs from the config that is saved there."""
    differs = "\n           ".join(changes) or "nothing (the saved config is used unchanged)"
    return f"resumes    {run} at step {step}, from {ckpt}\nchanged    {differs}"


def device_name(kind: str) -> str:
    return torch.cuda.get_device_name() if kind == "cuda" else kind.upper()


def fit(trainer: Any, lit: Any, data: Any, ckpt: Path | None) -> None:
    """Train from the beginning, which is validated first, or from a checkpoint."""
    if ckpt is None:
        trainer.validate(lit, datamodule=data, verbose=False)
    try:
        trainer.fit(lit, datamodule=data, ckpt_path=str(ckpt.absolute()) if ckpt else None, weights_only=True)
    finally:
        lit.unfreeze()


def finish(trainer: Any, lit: Any, run: Path) -> None:
    """The last words of a run: its result, where things lie, what to do next; exit code 1 after a fault, 128
    + the signal's number after one. That is the code of the first process on each machine: where another one
    ends with a code, torchrun ends all on its machine, also those that still have something to say."""
    if not (trainer.is_global_zero or is_first()):
        return
    again = ckpt_of(run)
    callbacks = {type(callback): callback for callback in trainer.callbacks}
    samples, interrupt, checkpoints = (callbacks.get(kind) for kind in (Samples, Interrupt, Checkpoints))
    if lit.fault:
        raise UserError(lit.fault + (checkpoints.after_fault() if checkpoints else ""))
    if lit.stopping and trainer.global_step < trainer.max_steps:
        goes_on = f", saved. Continue: python train.py {again}" if checkpoints else ""
        say(f"Stopped at step {trainer.global_step}{goes_on}")
        received = interrupt.received if interrupt else None
        raise SystemExit(128 + (received or signal.SIGTERM))  # another rank's signal is most likely that
    if not trainer.is_global_zero:
        return
    if samples is not None and samples.last is not None:
        print(f"\n--- a sample\n{samples.last}\n---\n")
    if checkpoints is not None and checkpoints.best is not None:
        print(f"best validation loss {checkpoints.best:.4f}")
    print(f"metrics      {run}/metrics.csv")
    if samples is not None and samples.last is not None:
        print(f"samples      {run}/samples.txt")
    if checkpoints is not None:
        print(f"checkpoints  {run}/checkpoints")
        if trainer.datamodule.tokenizer is not None and lit.net.config.causal:
            print(f"generate     python scripts/generate.py {again}")
        print(f"train on     python train.py {again} trainer.max_steps={2 * trainer.max_steps}")
    given = sys.argv[1:]
    # with ckpt= the command line does not say what it goes on with; a sweep compares already
    if not any(word.startswith("ckpt=") or word in ("-m", "--multirun") for word in given):
        own = [word for word in given if not word.startswith(("attention=", "attention.", "name="))]
        tiled = lit.net.transformer.h[0].attn.attention.name == "tiled" or lit.device.type == "mps"
        other = "naive" if tiled else "tiled"  # both do every option; tiled is for CUDA and CPU
        print(f"compare      python train.py attention={other} {shlex.join(own)}".rstrip())
