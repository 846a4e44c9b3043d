"""A few steps of training by a config, timed, with peak memory, losses and kernels:

    python scripts/training_point.py experiment=seqlen_scaling attention=triton seq_len=4096

The training step is train.py's own, compiled and accumulated as the config says; with --nanogpt MODEL.PY it
is nanoGPT's, on batches of the same shape. The last line is "RESULT " and a row's result as JSON, also where
memory ran out, the attention cannot, or something failed. scripts/sweep.py runs one of these for each point.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest import mock

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # for a checkout that is not installed

if TYPE_CHECKING:
    import torch


def arguments() -> argparse.Namespace:
    from scripts.rows import positive

    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("overrides", nargs="*", metavar="key=value", help="of the config, as train.py takes them")
    add("--warm-up", type=positive, default=5, help="steps before those that count (default: 5)")
    add("--steps", type=positive, default=20, help="steps that are timed, at most (default: 20)")
    add("--seconds", type=float, default=10, help="of timed steps; three in any case (default: 10)")
    add("--nanogpt", type=Path, metavar="MODEL.PY", help="measure nanoGPT in the place of ours")
    add("--until-eof", action="store_true", help="end when standard input does: with whoever holds it")
    return parser.parse_intermixed_args()


def end_with_input() -> None:
    """A sweep that is killed must leave no point behind that goes on beside the next one."""

    def wait() -> None:
        sys.stdin.buffer.read()
        os._exit(1)

    threading.Thread(target=wait, daemon=True).start()


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """A row's result. Raises whatever keeps the config from training."""
    began = time.perf_counter()
    import lightning

    from model import runtime
    from model.checks import check
    from scripts.sweep_points import composed
    from scripts.training_meter import Meter, resident_mib

    runtime.quiet()
    before_mib = resident_mib()
    cfg, _ = composed([*options.overrides, f"trainer.max_steps={options.warm_up + options.steps}"])
    if options.nanogpt:
        return nanogpt(options.nanogpt, cfg)
    if cfg.trainer.devices != 1 or cfg.trainer.num_nodes != 1:
        raise ValueError("a training point is measured on one device: leave trainer=default.")
    from omegaconf import OmegaConf

    check(OmegaConf.to_container(cfg, resolve=True), None, runtime.TRAINER)
    device = runtime.device(cfg.trainer.accelerator)
    precision = runtime.precision(cfg.precision, device)
    dtype = runtime.compute_dtype(precision)
    data, lit, ran = build(cfg, device, dtype)
    lasting = (options.warm_up, options.steps, options.seconds)
    meter = Meter(cfg.attention.name, ran, dtype, *lasting, before_mib)
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
    return {"status": "ok", "reason": None, **meter.result, "set_up_s": set_up_s}


def build(cfg: Any, device: torch.device, dtype: torch.dtype) -> tuple[Any, Any, str]:
    """Data, the model with its training step, and the name of the attention that runs. As train.py builds
    them, for training alone: an attention that cannot decode is no obstacle here."""
    import torch
    from hydra.utils import instantiate

    from conf.compose import build_attention
    from model import runtime
    from model.calls import attention_call, require
    from model.checks import called
    from model.gpt import GPT, GPTConfig
    from model.lit_gpt import LitGPT

    data = instantiate(cfg.data)
    data.prepare_data()
    data.setup()
    data.accumulate = runtime.accumulation(cfg.tokens_per_step, data.batch_size * cfg.seq_len, 1)
    config = called("model", GPTConfig, vocab_size=data.vocab_size, seq_len=cfg.seq_len, **cfg.model)
    attention = build_attention(cfg)
    facts = {"device": device, "dtype": dtype, "segments": data.document_mask}
    call = attention_call(config, "training", batch=data.batch_size, tokens=cfg.seq_len, **facts)
    require(attention, [call])
    torch.manual_seed(cfg.seed)
    lit = LitGPT(
        GPT(config, attention, checkpointing=cfg.checkpointing),
        instantiate(cfg.optim),
        instantiate(cfg.schedule),
        seed=cfg.seed,
        accumulate=data.accumulate,
        grad_clip=cfg.grad_clip,
        compile=device.type == "cuda" if cfg.compile == "auto" else cfg.compile,
    )
    return data, lit, attention.resolve(call).name


def nanogpt(path: Path, cfg: Any) -> dict[str, Any]:
    """The same of nanoGPT's GPT-2 124M, by scripts/bench_train.py; all of a step in one micro-batch."""
    import torch

    from model.flops import flops_per_token, peak_bf16_flops
    from model.gpt import GPTConfig
    from scripts import bench_train
    from scripts.timing import spread

    batch, tokens, model = cfg.data.batch_size, cfg.seq_len, cfg.model
    if (model.n_layer, model.n_head, model.n_embd, cfg.tokens_per_step) != (12, 12, 768, batch * tokens):
        raise ValueError("--nanogpt is GPT-2 124M with a step in one micro-batch: model=gpt2, and no less.")
    printed, words = io.StringIO(), ["nanogpt", str(path), str(batch), str(tokens), "60"]
    with contextlib.redirect_stdout(printed), mock.patch.object(sys, "argv", words):
        exec(bench_train.NANOGPT, {"__name__": "nanogpt"})  # this process is the fresh one that it needs
    found = bench_train.nanogpt_result(printed.getvalue())
    timed = spread(found.pop("ms")[2:])  # means of ten steps; the first two compile and warm up
    rate, peak = 1e3 * batch * tokens / timed["ms_median"], peak_bf16_flops(torch.cuda.get_device_name())
    flops = flops_per_token(GPTConfig(vocab_size=50304, seq_len=tokens, bias=False))
    mfu = flops * rate / peak if peak else None
    of = {"peak_of": "allocated on the GPU"}
    return {"status": "ok", "reason": None, **timed, "tokens_per_s": rate, "mfu": mfu, **found, **of}


def main() -> None:
    options = arguments()
    if options.until_eof:
        end_with_input()
    from scripts.side_by_side import failure

    try:
        result = measure(options)
    except Exception as error:  # whatever it is, it is the point's result
        result = failure(error)
    print("RESULT", json.dumps(result), flush=True)


if __name__ == "__main__":
    main()
