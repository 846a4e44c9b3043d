"""Will it fit, and how long will it take? Predicted from a config before anything runs.

    python scripts/estimate.py model=gpt2 seq_len=8192 data.batch_size=4 attention=triton gpu=h200
    python scripts/estimate.py model=tiny attention=naive --measure

It takes the overrides of train.py, but for ckpt= and init_from=, and gpu=, the GPU to predict for, which need
not be in this machine (default: the GPU of this machine, else the CPU). It prints what a training step takes:
attention's scores, what attention keeps for the backward, the peak memory by kind and at which point of the
step it occurs, FLOPs, bytes and time at the roofline, whether the step fits, and the longest context that
fits. With trainer=ddp, fsdp2 or context_parallel and trainer.devices=N, all of it is that of one of the
devices; the time for communication is left out.
With --measure, a step also runs on this machine, and the measured figures are printed beside the predicted.
The formulas, each with its derivation, are in model/costs/memory.py and model/costs/roofline.py.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

if __name__ == "__main__" and not __package__:  # python scripts/<command>.py: see there
    import _checkout  # noqa: F401


from conf.values import UserError, compiled

if TYPE_CHECKING:
    from omegaconf import DictConfig

    from model.costs.gpus import GpuSheet
    from model.costs.run import Run

MIB = 2**20
KINDS = ("parameters", "gradients", "optimizer", "activations", "attention", "other")
STEPS = 3  # that are timed


def main(arguments: Sequence[str]) -> None:
    if any(argument in ("-h", "--help") for argument in arguments):
        print(__doc__)
        return
    from conf.command import user_errors

    user_errors(estimate)(list(arguments))


def estimate(arguments: list[str]) -> None:
    from scripts.memory import composed

    measure, gpu, overrides = parse(arguments)
    cfg = composed(overrides)
    if measure and (cfg.trainer.devices != 1 or cfg.trainer.num_nodes != 1):
        raise UserError(
            "--measure runs a step on one device: leave it out, or trainer= and trainer.devices=."
        )
    if cfg.finetune.rank is not None:
        raise UserError(
            "finetune=lora: what adapters take is not predicted. Leave it out for training all weights; "
            "scripts/memory.py measures a step with adapters."
        )
    sheet = chosen_gpu(gpu, cfg.trainer.accelerator, measure)
    run = run_of(cfg, sheet)
    print(heading(run, sheet, cfg))
    measured = measurements(cfg, run, sheet) if measure else {}
    print(table([*memory_rows(run), *work_rows(run, sheet)], measured))
    print(verdict(run, sheet))


def parse(arguments: list[str]) -> tuple[bool, str | None, list[str]]:
    """(--measure, gpu=, the overrides of train.py)"""
    flags = [argument for argument in arguments if argument.startswith("-")]
    if unknown := [flag for flag in flags if flag != "--measure"]:
        raise UserError(f"{' '.join(unknown)}: the only flag is --measure; everything else is key=value.")
    gpus = [argument.removeprefix("gpu=") for argument in arguments if argument.startswith("gpu=")]
    others = [argument for argument in arguments if argument not in flags and not argument.startswith("gpu=")]
    return bool(flags), gpus[-1] if gpus else None, others


def chosen_gpu(name: str | None, accelerator: str, measure: bool) -> GpuSheet | None:
    """The sheet of the GPU asked for, else of that at hand; None: the CPU."""
    from model.costs.gpus import gpu_sheet

    if name is not None and not measure:
        return gpu_sheet(name)
    import torch

    here = torch.cuda.is_available() and accelerator != "cpu"
    at_hand = gpu_sheet(torch.cuda.get_device_name()) if here else None
    if name is not None and gpu_sheet(name) != at_hand:
        where = at_hand.name if at_hand else "the CPU"
        raise UserError(f"gpu={name} --measure: what is at hand is {where}. Leave gpu= or --measure out.")
    return at_hand


def run_of(cfg: DictConfig, gpu: GpuSheet | None) -> Run:
    """What train.py would run on this GPU (None: a CPU) with this config. Raises UserError for what it would
    refuse."""
    from omegaconf import OmegaConf

    from conf.compose import build_attention
    from model.context_parallel import require_divisible
    from model.costs.run import Run, devices_of, shared_by
    from model.training.checks import check
    from model.training.runtime import accumulation
    from scripts.memory import model_config

    check(OmegaConf.to_container(cfg, resolve=True), None, {})
    if cfg.precision not in ("auto", "32-true", "bf16-mixed"):
        raise UserError(
            f"precision={cfg.precision}: choose auto, 32-true or bf16-mixed; what fp8 takes is not predicted."
        )
    narrow = gpu is not None if cfg.precision == "auto" else cfg.precision == "bf16-mixed"
    graph = compiled(cfg.compile, "cuda" if gpu else "cpu", cfg.precision)
    config = model_config(cfg)
    micro_tokens = cfg.data.batch_size * cfg.seq_len
    shared = shared_by(cfg.trainer, cfg.tokens_per_step, micro_tokens, one_graph=graph is True)
    run = Run(
        config,
        cfg.data.batch_size,
        build_attention(cfg),
        value_bytes=2 if narrow else 4,
        device="cuda" if gpu else "cpu",
        arch=gpu.arch if gpu else None,
        compiled=bool(graph),
        checkpointing=cfg.checkpointing,
        workspace_bytes=gpu.workspace_bytes if gpu else 0,
        documents=cfg.data.document_mask,
        **shared,
    )
    if run.sequence_ranks > 1:
        require_divisible(run.config, run.sequence_ranks, run.shards)
    devices, ranks = devices_of(cfg.trainer)
    accumulation(cfg.tokens_per_step, micro_tokens, devices // ranks)
    _require(run)
    return run


def _require(run: Run) -> None:
    """UnsupportedAttention where the implementation says that it cannot train this, wherever it is
    installed."""
    from attention.base import UnsupportedAttention

    call, attention = run.call, run.attention
    if attention.declaration.dispatches_to == "kernels":  # which differ in what they can
        attention = attention.resolve(call)
    if reasons := attention.capabilities.reasons(call):
        raise UnsupportedAttention(run.attention.name, reasons, call)


def heading(run: Run, gpu: GpuSheet | None, cfg: DictConfig) -> str:
    from model.costs.flops import parameter_count

    config = run.config
    how = ["bf16-mixed" if run.value_bytes == 2 else "32-true"]
    how += ["compiled"] * run.compiled + ["checkpointed"] * run.checkpointing
    count = sum(parameter_count(config).values()) / 1e6
    return (
        f"{count:.1f}M parameters, {config.n_layer} layers, {config.n_head} heads of {config.head_size}, "
        f"width {config.n_embd}, vocabulary {config.vocab_size}\n"
        f"{run.batch} x {config.seq_len} tokens, attention={run.attention.name}, {', '.join(how)}, on "
        f"{gpu.name if gpu else 'a CPU'}{among(run)}"
    )


def among(run: Run) -> str:
    """What a device has of what several share."""
    if run.shards == 1:
        return ""
    spread = f", {run.sequence_ranks} to a sequence" if run.sequence_ranks > 1 else ""
    return f", one of {run.shards} devices that share parameters, gradients and optimiser state{spread}"


Row = tuple[str, float, str]  # what, predicted, unit


def memory_rows(run: Run) -> list[Row]:
    """What a step holds, in MiB. The kinds are those of scripts/memory.py, at the moment of the peak."""
    from attention.base import lse_bytes, scores_bytes
    from model.costs.flops import kv_cache_bytes, parameter_count, score_matrix_bytes
    from model.costs.memory import attention_kept, cast_weight_bytes, peak, saved_by_layer
    from model.costs.memory_loss import logits_bytes

    T, L = run.config.seq_len, run.config.n_layer
    call, most = run.call, peak(run)
    rows: list[Row] = [
        ("naive attention's scores, one head (fp32)", score_matrix_bytes(1, 1, T, T, 4) / MIB, "MiB"),
        ("naive attention's scores, one layer (fp32)", scores_bytes(call) / MIB, "MiB"),
        ("lse, one layer", lse_bytes(call) / MIB, "MiB"),
        ("kept by attention, one layer", attention_kept(run) / MIB, "MiB"),
        ("temporary in attention's backward", run.costs.transient_bytes / MIB, "MiB"),
    ]
    rows += [
        (f"kept by {name}, one layer", size / MIB, "MiB")
        for name, size in saved_by_layer(run).items()
        if size
    ]
    if run.whole_kv_bytes:
        rows.append(("K and V of whole sequences, one layer", run.whole_kv_bytes / MIB, "MiB"))
    rows += [
        ("gradients of all parameters", 4 * sum(parameter_count(run.config).values()) / MIB, "MiB"),
        ("16-bit copies of the weights", cast_weight_bytes(run) / MIB, "MiB"),
        ("logits of one chunk" if run.config.loss_chunk else "logits", logits_bytes(run) / MIB, "MiB"),
    ]
    rows += [(f"at the peak: {kind}", getattr(most, kind) / MIB, "MiB") for kind in KINDS]
    rows.append((f"peak ({most.name})", most.peak / MIB, "MiB"))
    cache = kv_cache_bytes(run.config, run.batch, T, run.value_bytes)
    return [*rows, (f"KV cache of {run.batch} x {T} tokens, {L} layers", cache / MIB, "MiB")]


def work_rows(run: Run, gpu: GpuSheet | None) -> list[Row]:
    """FLOPs and bytes of DRAM of attention and of the step; their time at the GPU's roofline; shared memory
    of our kernels' tiles."""
    from model.costs.roofline import attention_work, step_work

    forward, backward = attention_work(run)
    rows: list[Row] = []
    for name, work in {
        "attention forward, one layer": forward,
        "attention backward, one layer": backward,
        "step": step_work(run),
    }.items():
        rows += [
            (f"{name}: FLOPs", work.flops / 1e9, "GFLOP"),
            (f"{name}: DRAM", work.bytes / 1e9, "GB"),
        ]
        if gpu:
            bound = work.bound(gpu, run.value_bytes)
            rows.append((f"{name}: roofline time ({bound})", 1e3 * work.seconds(gpu, run.value_bytes), "ms"))
    if gpu:
        tiles = run.attention.shared_memory(run.call, gpu.shared_bytes)
        rows += [(f"shared memory per block: {name}", size / 1024, "KiB") for name, size in tiles.items()]
    return rows


def measurements(cfg: DictConfig, run: Run, gpu: GpuSheet | None) -> dict[str, float]:
    """What can be measured of the rows, by the beginnings of their names, on the device at hand; nothing,
    said, where memory runs out."""
    import statistics
    import time

    import torch

    from model.costs.memory import peak
    from scripts.memory import attention_alone, disagreement, memory_split, training_step

    try:
        step = training_step(cfg)
        split, alone = memory_split(step), attention_alone(step)
    except torch.OutOfMemoryError:
        foreseen = gpu is not None and peak(run).peak > gpu.usable_bytes
        print(f"measured: out of memory, {'as' if foreseen else 'not as'} predicted")
        return {}
    print(f"measured: the parts sum to the peak within {100 * disagreement(split):.2f}%")
    times = []
    for _ in range(STEPS):
        start = time.perf_counter()
        step.run()
        if step.device.type == "cuda":
            torch.cuda.synchronize(step.device)
        times.append(1e3 * (time.perf_counter() - start))
    found = {f"at the peak: {kind}": split[kind] for kind in KINDS}
    found |= {"kept by attention, one layer": alone["kept"], "peak": split["peak"]}
    return found | {
        "temporary in attention's backward": alone["backward"],
        "step: roofline time": statistics.median(times),
    }


def table(rows: list[Row], measured: dict[str, float]) -> str:
    """A line a row: what, predicted, and, where it was, measured, with the ratio."""
    lines = [f"{'':<56} {'predicted':>12}" + (f" {'':<6}{'measured':>12} {'ratio':>6}" if measured else "")]
    for name, value, unit in rows:
        line = f"{name:<56} {value:>12,.2f} {unit:<6}"
        got = next((x for known, x in measured.items() if name.startswith(known)), None)
        if got is not None:
            line += f"{got:>12,.2f}" + (f" {value / got:>6.2f}" if got >= 0.005 else "")
        lines.append(line.rstrip())
    return "\n".join(lines)


def verdict(run: Run, gpu: GpuSheet | None) -> str:
    """Whether it fits, and the longest context that does."""
    from model.costs.memory import longest_context, peak

    if gpu is None:
        return "gpu=<name> also predicts the time at that GPU's roofline, and whether the step fits."
    need, able = peak(run).peak, gpu.usable_bytes
    room = f"{need / 2**30:.1f} of {able / 2**30:.1f} GiB that {gpu.name} can give ({gpu.memory_gib} GiB)"
    longest = longest_context(run, able)
    growth = "T^2" if run.costs.writes_scores else "T"
    said = "fits" if need <= able else "does not fit"
    return (
        f"{said}: {room}; attention's memory grows as {growth}\n"
        f"longest context that fits with data.batch_size={run.batch}: {longest:,} tokens"
    )


if __name__ == "__main__":
    main(sys.argv[1:])
