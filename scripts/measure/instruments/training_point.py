"""A few steps of training by a config, timed, with peak memory, losses and kernels:

    python -m scripts.measure.instruments.training_point model=tiny attention=triton seq_len=4096

The training step is train.py's own, compiled and accumulated as the config says; with --peer it is that of
others, on batches of the same shape (instruments/training_peers.py). The last line is "RESULT " and a row's
result as JSON, also where memory ran out, the attention cannot, or something failed. scripts/sweep.py runs
one of these for each point.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from conf.values import UserError, compiled

if TYPE_CHECKING:
    import torch

    from model.config import GPTConfig


def arguments(given: list[str] | None = None) -> argparse.Namespace:
    from scripts.measure.rows import positive

    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("overrides", nargs="*", metavar="key=value", help="of the config, as train.py takes them")
    add("--warm-up", type=int, default=3, help="steps before those that count (default: 3; 0: all count)")
    add("--steps", type=positive, default=20, help="steps that are timed, at most (default: 20)")
    add("--seconds", type=float, default=5, help="of timed steps; three in any case (default: 5)")
    add("--rounds", type=positive, default=1, help="share the steps, with pauses between (default: 1)")
    add("--brief", action="store_true", help="times and peak alone: no kernels, no memory split")
    add("--piece", type=int, default=0, metavar="TOKENS",
        help="first the loss of the first batch, so many tokens at a time; the predicted peak")  # fmt: skip
    add("--peer", metavar="NAME", help="nanogpt=MODEL.PY, transformers_eager or transformers_sdpa for ours")
    return parser.parse_intermixed_args(given)


def measure(options: argparse.Namespace, ready: Callable[[], None]) -> dict[str, Any]:
    """A row's result; `ready` is called after the first step, and after those that are timed. Raises whatever
    keeps the config from training."""
    began = time.perf_counter()
    import lightning

    from model.training import runtime
    from model.training.checks import check
    from scripts.measure.instruments.training_meter import Laps, Meter
    from scripts.measure.sweep_points import composed

    runtime.quiet()
    cfg, _ = composed([*options.overrides, f"trainer.max_steps={options.warm_up + options.steps}"])
    laps = Laps(options.warm_up, options.steps, options.seconds, ready, options.rounds)
    if options.peer:
        from scripts.measure.instruments import training_peers

        sizes = cfg.data.batch_size, cfg.tokens_per_step or cfg.data.batch_size * cfg.seq_len
        return training_peers.measure(options.peer, config_of(cfg, data_of(cfg)), *sizes, laps)
    if cfg.trainer.devices != 1 or cfg.trainer.num_nodes != 1:
        raise UserError("a training point is measured on one device: leave trainer=default.")
    from omegaconf import OmegaConf

    check(OmegaConf.to_container(cfg, resolve=True), None, runtime.TRAINER)
    device = runtime.device(cfg.trainer.accelerator)
    precision = runtime.precision(cfg.precision, device)
    dtype = runtime.compute_dtype(precision)
    data, lit, ran = build(cfg, device, dtype)
    meter = Meter(cfg.attention.name, ran, dtype, laps, options.brief, options.piece)
    trainer = lightning.Trainer(
        accelerator=device.type,
        devices=1,
        precision=precision,
        deterministic=cfg.deterministic,
        max_steps=cfg.trainer.max_steps,
        limit_val_batches=0,
        logger=False,
        callbacks=[meter],
        **runtime.TRAINER,
    )
    began, set_up_s = time.perf_counter(), time.perf_counter() - began
    trainer.fit(lit, datamodule=data)
    if meter.result is None:
        raise ArithmeticError((lit.fault or "training stopped early").split(". ")[0])
    found = {"status": "ok", "reason": None, **meter.result, "set_up_s": set_up_s}
    return found | (predicted(cfg, lit, device, dtype) if options.piece else {})


def predicted(cfg: Any, lit: Any, device: torch.device, dtype: torch.dtype) -> dict[str, float]:
    """The peak of memory as model/costs/memory.py has it."""
    from omegaconf import OmegaConf

    from model.costs.memory import peak
    from model.training.out_of_memory import training_run

    config = OmegaConf.to_container(cfg, resolve=True)
    run = training_run(config, device, dtype, lit.net.transformer.h[0].attn.attention)
    return {"predicted_mib": peak(run).peak / 2**20}


def data_of(cfg: Any) -> Any:
    """The data module, prepared and set up."""
    from hydra.utils import instantiate

    data = instantiate(cfg.data)
    data.prepare_data()
    data.setup()
    return data


def config_of(cfg: Any, data: Any) -> GPTConfig:
    from model.config import GPTConfig
    from model.training.checks import called

    return called("model", GPTConfig, vocab_size=data.vocab_size, seq_len=cfg.seq_len, **cfg.model)


def build(cfg: Any, device: torch.device, dtype: torch.dtype) -> tuple[Any, Any, str]:
    """Data, the model with its training step, and the name of the attention that runs. As train.py builds
    them, for training alone: an attention that cannot decode is no obstacle here."""
    import torch
    from hydra.utils import instantiate

    from conf.compose import build_attention
    from model.calls import attention_call, require
    from model.gpt import GPT
    from model.lora import Adapters, add_adapters
    from model.training import fp8, graphs, runtime
    from model.training.lit_gpt import LitGPT

    data = data_of(cfg)
    data.set_accumulation(runtime.accumulation(cfg.tokens_per_step, data.batch_size * cfg.seq_len, 1))
    config = config_of(cfg, data)
    attention = build_attention(cfg)
    facts = {"device": device, "dtype": dtype, "document_ids": data.document_mask}
    call = attention_call(config, "training", batch=data.batch_size, tokens=cfg.seq_len, **facts)
    require(attention, [call])
    torch.manual_seed(cfg.seed)
    net = GPT(config, attention, checkpointing=cfg.checkpointing)
    if cfg.finetune.rank is not None:  # time and memory are those beside any weights
        asked = cfg.finetune
        add_adapters(net, Adapters(asked.rank, asked.alpha, list(asked.targets)), asked.dropout)
    fp8.convert(net, cfg.precision, data.batch_size * cfg.seq_len)
    lit = LitGPT(
        net,
        instantiate(cfg.optim),
        instantiate(cfg.schedule),
        seed=cfg.seed,
        accumulate=data.accumulate,
        grad_clip=cfg.grad_clip,
        compile=compiled(cfg.compile, device.type, cfg.precision),
        # with auto, steps stay as they are: their parts are measured
        cuda_graphs=graphs.wanted(cfg.cuda_graphs is True, device, 1, config, data.batch_size, cfg.precision),
    )
    return data, lit, attention.resolve(call).name


def child(request: dict[str, Any], ready: Callable[[], None]) -> dict[str, Any]:
    """For measure/worker.py."""
    return measure(arguments(request["words"]), ready)


def main() -> None:
    options = arguments()
    from scripts.measure.runner import attempt

    print("RESULT", json.dumps(attempt(measure, options, lambda: None)), flush=True)


if __name__ == "__main__":
    main()
