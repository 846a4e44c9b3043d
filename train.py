"""Train a GPT with a chosen attention.

    python train.py attention=tiled model=gpt2 seq_len=2048 data=text data.path=book.txt logger=wandb
    python train.py ckpt=last trainer.max_steps=4000
    python train.py init_from=gpt2 data=text data.path=book.txt seq_len=1024

This file only wires: it composes the config, builds the parts and calls fit.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import hydra
from hydra.core.utils import env_override
from omegaconf import DictConfig, OmegaConf

from conf.command import leave, user_errors
from conf.compose import build_attention, choices_of, one_length, swept, without_nulls
from conf.explain import explain
from conf.initial import Initial, adapters_of, finetuned, keep_tokenizer, read_initial
from conf.resume import changes, own_value, recompose, refuse_changes, split_ckpt
from conf.saved import admit, portable
from conf.values import UserError
from model.training.sweeps import Job, Sweep

if TYPE_CHECKING:
    import torch

    from model.config import GPTConfig

composing = ExitStack()  # what holds until the first job of this command line starts
sweep = Sweep()


@user_errors
def main() -> None:
    """Everything heavy is imported below, so that --help and a mistyped choice answer at once.

    With ckpt= the overrides are of that run's config, which may have keys that the default one lacks: Hydra's
    own command line comes in for new runs only."""
    arguments = sys.argv[1:]
    if {"-h", "--help"} & set(arguments):
        print(explain([argument for argument in arguments if not argument.startswith("-")]))
        return
    if any(argument.startswith("ckpt=") and argument != "ckpt=null" for argument in arguments):
        resume(arguments)
        return
    sweep.jobs.clear()
    flags = [argument for argument in arguments if argument in ("-m", "--multirun")]  # first, for argparse
    sys.argv[1:] = flags + [each for each in without_nulls(arguments) if each not in flags]
    with composing:
        # Hydra raises what it finds in the command line, for `user_errors` to say: to a mistyped key its own
        # message advises what fails
        sweeps = Path(str(own_value("runs_dir", sys.argv[1:])), "multirun.yaml")  # Hydra's, of a sweep
        composing.callback(lambda: sweeps.is_file() and sweeps.unlink())
        composing.enter_context(env_override({"HYDRA_FULL_ERROR": "1"}))
        try:
            fresh()
        finally:
            if sweep.jobs:
                print(f"\n{sweep.table()}")
    if sweep.failed:
        raise SystemExit(1)


@hydra.main(version_base="1.3", config_path="conf", config_name="config")
def fresh(cfg: DictConfig) -> None:
    from hydra.core.hydra_config import HydraConfig

    composing.close()
    context = HydraConfig.get()
    choices = choices_of(context.runtime.choices)
    if context.mode is None or context.mode.name != "MULTIRUN":
        start(cfg, choices, None, context.overrides.task)
        return
    with sweep.job(swept(sys.argv[1:], context.overrides.task)) as job:
        start(cfg, choices, job, context.overrides.task)


@user_errors
def start(cfg: DictConfig, choices: dict[str, Any], job: Job | None, overrides: list[str]) -> None:
    from model.training.imports import uncollected

    with uncollected():
        from model.training.resuming import NOTHING_TO_OVERWRITE
        from model.training.runs import Hold, new_run, run_folder, runs_folder

    if cfg.overwrite:
        raise UserError(NOTHING_TO_OVERWRITE)
    if job and (cfg.trainer.devices != 1 or cfg.trainer.num_nodes != 1):
        raise UserError(
            f"-m with trainer.devices={cfg.trainer.devices}: a sweep runs its jobs in one process, and "
            "several devices take a process each. Use trainer.devices=1, or one command per job."
        )
    runs = runs_folder(cfg.runs_dir)
    suffix, base = (job.suffix, job.name) if job else ("", "")
    initial = read_initial(cfg, runs, overrides)
    if initial and not base:
        base = f"{initial.name}-{choices['attention']}"
    with run_folder(lambda: new_run(cfg.name, choices, suffix, runs, base), Hold()) as run:
        if job:
            job.run = run
        if initial:
            keep_tokenizer(initial, cfg, run, overrides)
        train(cfg, choices, run, initial=initial)


def resume(arguments: list[str]) -> None:
    from model.training.imports import uncollected

    with uncollected():
        from model.training import runtime
        from model.training.checkpoint import read_header, resolve
        from model.training.resuming import run_from, take_over
        from model.training.runs import Hold, fixed_path, run_folder, runs_folder

    asked, overrides = split_ckpt(arguments)
    if any(override.startswith("init_from=") for override in overrides):
        raise UserError("init_from= cannot go with ckpt=: it starts a new run. Leave one of them out.")
    runs, overwrite = runs_folder(own_value("runs_dir", overrides)), own_value("overwrite", overrides)
    named = any(override.startswith("name=") for override in overrides)
    hold = Hold()  # from before a file is chosen: a run that has just ended would have newer ones
    find = partial(resolve, asked, runs) if named else partial(resolve, asked, runs, hold.take)
    with hold, fixed_path("TILEGPT_CKPT", find) as ckpt:
        header, step = read_header(ckpt)
        saved = admit(header, overrides)
        cfg, choices = recompose(saved, overrides)
        refuse_changes(saved, choices, cfg)
        name = cfg.name if named else None
        decide = partial(run_from, ckpt, step, name, choices, runs, overwrite, hold)
        with run_folder(decide, hold, step) as run:
            # what a file says of its place was true where it was written
            cfg.name, cfg.runs_dir, cfg.overwrite = run.name, str(runs), overwrite
            own = take_over(run, ckpt, step, overwrite)  # before anything that takes long

            def said() -> str:
                return runtime.resumed(run, ckpt, step, changes(saved, overrides, cfg, choices, step))

            train(cfg, choices, run, own, step, said)


def train(
    cfg: DictConfig,
    choices: dict[str, Any],
    run: Path,
    ckpt: Path | None = None,
    resume_step: int | None = None,
    resumed: Callable[[], str] | None = None,
    initial: Initial | None = None,
) -> None:
    from hydra.utils import instantiate
    from lightning.pytorch.utilities import rank_zero_only

    from model.training import runtime
    from model.training.checkpoint_io import VerifiedCheckpointIO
    from model.training.checks import called, check
    from model.training.loggers import MetricsCSV, csv_logger
    from model.training.out_of_memory import out_of_memory_explained
    from model.training.peers import Peers
    from model.training.profiling import Profile
    from model.training.resuming import drop_later

    runtime.quiet()
    config = OmegaConf.to_container(cfg, resolve=True)
    check(config, resume_step, runtime.TRAINER)
    one_length(cfg)
    if resumed is not None:
        runtime.say(resumed())
    device = runtime.device(cfg.trainer.accelerator, cfg.trainer.devices)
    precision = runtime.precision(cfg.precision, device)
    callbacks = [node for node in (cfg.get("callbacks") or {}).values() if node]
    trainer = instantiate(
        cfg.trainer,
        precision=precision,
        deterministic=cfg.deterministic,
        default_root_dir=str(run),
        logger=False,
        callbacks=[*(Profile() if node is True else instantiate(node) for node in callbacks), Peers()],
        plugins=[VerifiedCheckpointIO(ckpt and ckpt.absolute(), resume_step), *runtime.alone(cfg.trainer)],
        **runtime.TRAINER,
    )
    runtime.require_processes(trainer)
    dtype = runtime.compute_dtype(precision)
    explained = partial(out_of_memory_explained, config, device, dtype, run, partial(build_attention, cfg))
    with explained():
        data, lit, call = build(cfg, choices, device, dtype, trainer, run, ckpt, initial)

    if ckpt is not None:  # only now, when little is left that could be refused
        drop_later(run, ckpt, resume_step)
    settings = {"run_dir": str(run), "config": config, "resume_step": resume_step}
    loggers = [called("logger", instantiate(cfg.logger), **settings)] if cfg.get("logger") else []
    if not any(isinstance(logger, MetricsCSV) for logger in loggers):
        loggers.insert(0, csv_logger(**settings))
    trainer.loggers = loggers
    rank_zero_only(OmegaConf.save)(cfg, run / "config.yaml")

    runtime.say(runtime.summary(lit, data, trainer, precision, call, run), flush=True)
    with explained():
        runtime.fit(trainer, lit, data, ckpt)
    runtime.finish(trainer, lit, run)


def build(
    cfg: DictConfig,
    choices: dict[str, Any],
    device: torch.device,
    dtype: torch.dtype,
    trainer: Any,
    run: Path,
    ckpt: Path | None = None,
    initial: Initial | None = None,
) -> tuple[Any, Any, Any]:
    """Data, model, and the attention call that trains."""
    import torch
    from hydra.utils import instantiate

    from model.context_parallel import require_divisible
    from model.gpt import GPT, GPTConfig
    from model.training import fp8, graphs, runtime
    from model.training.checks import called, require_resumable
    from model.training.lit_gpt import LitGPT

    optimizer, schedule = instantiate(cfg.optim), instantiate(cfg.schedule)
    made = called("optim", optimizer, [torch.nn.Parameter(torch.zeros(1))])  # now, before data and model
    require_resumable(made)
    called("schedule", schedule, 0, cfg.trainer.max_steps)

    compiled = runtime.begin_compiling(cfg.compile, device, cfg.precision)  # now: it takes seconds
    # what can be refused without the corpus, which alone knows the vocabulary, is so before it is downloaded
    data = instantiate(cfg.data)
    config = called("model", GPTConfig, vocab_size=1, seq_len=cfg.seq_len, **cfg.model)
    devices = trainer.num_devices * trainer.num_nodes
    sequence_ranks = getattr(trainer.strategy, "sequence_ranks", 1)  # that share each sequence
    require_divisible(config, sequence_ranks, devices)
    micro_tokens = data.batch_size * cfg.seq_len
    data.set_accumulation(runtime.accumulation(cfg.tokens_per_step, micro_tokens, devices // sequence_ranks))
    make = partial(build_attention, cfg)
    facts = {"device": device, "dtype": dtype, "sequence_ranks": sequence_ranks}
    attention, decoder, call = runtime.attentions(make, cfg.attention.decode, config, data, **facts)
    adapters = adapters_of(cfg, starts=initial is not None or ckpt is not None)
    set_up(data, ckpt)
    config = replace(config, vocab_size=data.vocab_size)
    torch.manual_seed(cfg.seed)  # the initial weights: the same on every rank, whatever ran before
    net = GPT(config, attention, checkpointing=cfg.checkpointing)
    trained = finetuned(cfg, net, run, initial, ckpt, data.tokenizer, adapters)
    fp8.convert(net, cfg.precision, micro_tokens // sequence_ranks)
    rows = data.batch_size * data.accumulate
    as_graph = graphs.wanted(cfg.cuda_graphs, device, devices, config, rows, cfg.precision)
    lit = LitGPT(
        net,
        optimizer,
        schedule,
        seed=cfg.seed,
        accumulate=data.accumulate,
        grad_clip=cfg.grad_clip,
        compile=compiled,
        cuda_graphs=as_graph,
        validates_eagerly=runtime.may_validate_eagerly(compiled, attention, call, config, rows),
        decode_attention=decoder,
        checkpoint_metadata=metadata(cfg, choices, config, data.tokenizer) | trained,
    )
    return data, lit, call


def set_up(data: Any, ckpt: Path | None) -> None:
    """The corpus, prepared once; UserError where it is not that of the checkpoint to resume from."""
    from model.training.checkpoint import read_data

    data.prepare_data()
    data.setup()
    if ckpt is not None:
        data.require_same(*read_data(ckpt))


def metadata(cfg: DictConfig, choices: dict[str, Any], config: GPTConfig, tokenizer: Any) -> dict[str, Any]:
    """The plain values that every checkpoint carries."""
    return {
        "schema": 1,
        "choices": choices,
        "config": portable(cfg, choices),
        "model": vars(config),
        "tokenizer": tokenizer.to_dict() if tokenizer else None,
    }


if __name__ == "__main__":
    main()
    leave()
