"""Train a GPT with a chosen attention.

    python train.py attention=tiled model=gpt2 seq_len=2048 data=text data.path=book.txt logger=wandb
    python train.py ckpt=last trainer.max_steps=4000

This file only wires: it composes the config, builds the parts and calls fit.
"""

from __future__ import annotations

import itertools
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import hydra
from omegaconf import DictConfig, OmegaConf

from conf.compose import build_attention, choices_of, plain, recompose, refuse_changes, user_errors


@user_errors
def main() -> None:
    """Everything heavy is imported below, so that --help and a mistyped choice answer at once.

    With ckpt= the overrides are of that run's config, which may have keys that the default one lacks: Hydra's
    own command line comes in for new runs only."""
    arguments = sys.argv[1:]
    if any(argument.startswith("ckpt=") and argument != "ckpt=null" for argument in arguments):
        resume(arguments)
    else:
        fresh()


@hydra.main(version_base="1.3", config_path="conf", config_name="config")
@user_errors
def fresh(cfg: DictConfig) -> None:
    from hydra.core.hydra_config import HydraConfig

    context = HydraConfig.get()
    choices, suffix = choices_of(context.runtime.choices), ""
    if context.mode is not None and context.mode.name == "MULTIRUN":
        if cfg.trainer.devices != 1 or cfg.trainer.num_nodes != 1:
            raise ValueError(
                f"-m with trainer.devices={cfg.trainer.devices}: a sweep runs its jobs in one process, and "
                "several devices take a process each. Use trainer.devices=1, or one command per job."
            )
        suffix = f"-{context.job.num}"
    with fixed_path("TILEGPT_RUN", lambda: new_run(cfg, choices, suffix)) as run:
        train(cfg, choices, run, None, None)


def resume(arguments: list[str]) -> None:
    from model.checkpoint import read_checkpoint, resolve

    if flags := [argument for argument in arguments if argument.startswith("-")]:
        raise ValueError(
            f"{' '.join(flags)} cannot go with ckpt=: that continues one run, by its own config."
        )
    asked = [argument.removeprefix("ckpt=") for argument in arguments if argument.startswith("ckpt=")][-1]
    overrides = [argument for argument in arguments if not argument.startswith("ckpt=")]
    with fixed_path("TILEGPT_CKPT", lambda: resolve(asked)) as ckpt:
        checkpoint = read_checkpoint(ckpt)
        saved, step = checkpoint["tilegpt"], checkpoint["global_step"]
        cfg, choices = recompose(saved, overrides)
        refuse_changes(saved, choices, cfg)
        renamed = any(override.startswith("name=") for override in overrides)
        own = ckpt.parent.parent
        with fixed_path("TILEGPT_RUN", lambda: new_run(cfg, choices, "") if renamed else own) as run:
            train(cfg, choices, run, ckpt, step)


@contextmanager
def fixed_path(variable: str, decide: Callable[[], Path]) -> Iterator[Path]:
    """A path decided once, by the first process: under DDP the others run this command line again, and
    find it in the environment."""
    path = os.environ.get(variable) or str(decide())
    os.environ[variable] = path
    try:
        yield Path(path)
    except BaseException:
        with suppress(OSError):
            Path(path).rmdir()  # the folder of a run that came to nothing; no other is empty
        raise
    finally:
        os.environ.pop(variable, None)  # the next job of a sweep is another run


def new_run(cfg: DictConfig, choices: dict[str, Any], suffix: str) -> Path:
    """A folder of its own under runs/."""
    base = cfg.name or "-".join(
        str(part) for part in (choices.get("experiment") or choices["model"], choices["attention"]) if part
    )
    if not cfg.name:
        base += time.strftime("-%Y%m%d-%H%M%S")
    for number in itertools.count(1):
        run = Path("runs") / f"{base}{suffix}{'' if number == 1 else f'-{number}'}"
        try:
            run.mkdir(parents=True)
        except FileExistsError:
            if not cfg.name:
                continue  # another run of this second
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
    runtime.check_steps(cfg.trainer, cfg.callbacks, resume_step)
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
    runtime.say(runtime.summary(lit, data, trainer, precision, attention, train_call, run), flush=True)
    if ckpt is None:
        trainer.validate(lit, datamodule=data, verbose=False)
    trainer.fit(lit, datamodule=data, ckpt_path=str(ckpt) if ckpt else None, weights_only=True)
    runtime.finish(trainer, lit, run)


if __name__ == "__main__":
    main()
