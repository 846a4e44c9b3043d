"""Train a GPT with a chosen attention.

    python train.py attention=tiled model=gpt2 seq_len=2048 data=text data.path=book.txt logger=wandb
    python train.py ckpt=last trainer.max_steps=4000

This file only wires: it composes the config, builds the parts and calls fit.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import hydra
from omegaconf import DictConfig, OmegaConf

from conf.compose import build_attention, choices_of, plain, recompose, user_errors


@hydra.main(version_base="1.3", config_path="conf", config_name="config")
@user_errors
def main(cfg: DictConfig) -> None:
    """Everything heavy is imported below, so that --help and a mistyped choice answer at once."""
    from hydra.core.hydra_config import HydraConfig

    context = HydraConfig.get()
    choices, ckpt, resume_step, run = choices_of(context.runtime.choices), None, None, None
    if cfg.ckpt is not None:
        from model.checkpoint import read_checkpoint, resolve

        ckpt = Path(os.environ.setdefault("TILEGPT_CKPT", str(resolve(cfg.ckpt))))  # once, by rank 0
        checkpoint = read_checkpoint(ckpt)
        saved, resume_step = checkpoint["tilegpt"], checkpoint["global_step"]
        overrides = [o for o in context.overrides.task if not o.startswith("ckpt=")]
        cfg = recompose(saved, overrides)
        named = [key for key, choice in choices.items() if any(o.split("=")[0] == key for o in overrides)]
        choices = {**saved["choices"], **{key: choices[key] for key in named}}
        if not any(o.startswith("name=") for o in overrides):
            run = ckpt.parent.parent
    multirun = f"-{context.job.num}" if context.mode is not None and context.mode.name == "MULTIRUN" else ""
    run = Path(os.environ.setdefault("TILEGPT_RUN", str(run or new_run(cfg, choices, multirun))))
    try:
        train(cfg, choices, run, ckpt, resume_step)
    finally:
        os.environ.pop("TILEGPT_RUN", None)  # the next job of a sweep is another run
        os.environ.pop("TILEGPT_CKPT", None)


def new_run(cfg: DictConfig, choices: dict[str, Any], suffix: str) -> Path:
    """A folder of its own under runs/."""
    base = cfg.name or "-".join(
        str(part) for part in (choices.get("experiment") or choices["model"], choices["attention"]) if part
    )
    stamp = "" if cfg.name else time.strftime("-%Y%m%d-%H%M%S")
    run = Path("runs") / f"{base}{stamp}{suffix}"
    try:
        run.mkdir(parents=True)
    except FileExistsError:
        if any((run / "checkpoints").glob("*.ckpt")):
            raise ValueError(
                f"{run} holds a run already. Continue it with ckpt={run.name}, or choose another name=."
            ) from None
    return run


def train(
    cfg: DictConfig, choices: dict[str, Any], run: Path, ckpt: Path | None, resume_step: int | None
) -> None:
    import torch
    from hydra.utils import instantiate

    from model import runtime
    from model.calls import attention_call, require
    from model.checkpoint import VerifiedCheckpointIO
    from model.gpt import GPT, GPTConfig
    from model.lit_gpt import LitGPT
    from model.loggers import csv_logger

    runtime.quiet()
    device = runtime.device(cfg.trainer.accelerator)
    precision = runtime.precision(cfg.precision, device)
    compiled = device.type == "cuda" if cfg.compile == "auto" else bool(cfg.compile)

    data = instantiate(cfg.data)
    data.prepare_data()
    data.setup()
    config = GPTConfig(vocab_size=data.vocab_size, seq_len=cfg.seq_len, **cfg.model)

    attention = build_attention(cfg)
    facts = {
        "device": device,
        "dtype": runtime.compute_dtype(precision),
        "segments": bool(data.document_mask),
    }
    train_call, val_call, prefill_call, decode_call = (
        attention_call(config, purpose, batch=rows, tokens=cfg.seq_len, **facts)
        for purpose, rows in (
            ("training", data.batch_size),
            ("validation", data.eval_batch_size),
            ("prefill", 1),
            ("decode", 1),
        )
    )
    require(attention, [train_call, val_call, prefill_call])
    decoder = runtime.decoder(
        attention, decode_call, lambda name: build_attention(cfg, name), cfg.attention.decode
    )

    settings = {
        "run_dir": str(run),
        "config": OmegaConf.to_container(cfg, resolve=True),
        "resume_step": resume_step,
    }
    loggers = [csv_logger(**settings)]
    if cfg.logger._target_ != "model.loggers.csv_logger":
        loggers.append(instantiate(cfg.logger)(**settings))
    OmegaConf.save(cfg, run / "config.yaml")

    trainer = instantiate(
        cfg.trainer,
        precision=precision,
        deterministic=cfg.deterministic,
        default_root_dir=str(run),
        logger=loggers,
        callbacks=[instantiate(node) for node in cfg.callbacks.values() if node is not None],
        plugins=[VerifiedCheckpointIO()],
        **runtime.TRAINER,
    )
    data.accumulate = runtime.accumulation(
        cfg.tokens_per_step, data.batch_size * cfg.seq_len, trainer.num_devices * trainer.num_nodes
    )
    torch.manual_seed(cfg.seed)  # the initial weights: the same on every rank, whatever ran before
    net = GPT(config, attention, checkpointing=cfg.checkpointing)
    lit = LitGPT(
        net,
        instantiate(cfg.optim),
        instantiate(cfg.schedule),
        seed=cfg.seed,
        accumulate=data.accumulate,
        grad_clip=cfg.grad_clip,
        compile=compiled,
        decode_attention=decoder,
        travel={
            "schema": 1,
            "choices": choices,
            "config": plain(cfg),
            "model": vars(config),
            "tokenizer": data.tokenizer.to_dict() if data.tokenizer else None,
        },
    )
    print(runtime.summary(lit, data, trainer, precision, attention, train_call, run), flush=True)
    if ckpt is None:
        trainer.validate(lit, datamodule=data, verbose=False)
    trainer.fit(lit, datamodule=data, ckpt_path=str(ckpt) if ckpt else None, weights_only=True)
    runtime.finish(trainer, lit, run)


if __name__ == "__main__":
    main()
