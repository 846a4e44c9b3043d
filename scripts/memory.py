"""Measure the peak memory of a training step, and which kinds of tensors were allocated at the peak.

    python scripts/memory.py model=tiny attention=tiled data=synthetic data.batch_size=4

It takes the overrides of train.py, runs one step on this machine and prints its `memory_split`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

if __name__ == "__main__" and not __package__:  # python scripts/<command>.py: see there
    import _checkout  # noqa: F401

from conf.values import UserError, compiled, whole
from scripts.measure.instruments.allocations import PARTS, Event, Ledger, Step, peak_of, recorder_of, storages
from scripts.measure.instruments.memory_alone import alone, attention_alone, owned  # noqa: F401

if TYPE_CHECKING:
    from omegaconf import DictConfig
    from torch import Tensor

    from attention.base import Attention
    from model.config import GPTConfig

MIB = 2**20
AGREE = 0.03  # how far the parts may sum up to something else than the peak


def memory_split(step: Step) -> dict[str, float]:
    """The peak of one step and its parts, in MiB: `parameters`, `gradients`, `optimizer`, `activations`,
    `attention`, `other` and `peak`. The parts are what was alive at the moment of the peak; each is found by
    itself, none is the rest of the others, and they sum to the peak within AGREE (see `disagreement`).

    - parameters, optimizer: the bytes of the tensors; gradients: the blocks that ended as a parameter's
      gradient (at the peak not all of them need be there);
    - attention: blocks allocated during the calls of an `Attention` and during their backwards, less those of
      out, dq, dk and dv, which every implementation has to give: scores, probabilities, lse, copies;
    - activations: blocks that the rest of forward and backward allocated: what is saved for backward, 16-bit
      copies of the weights under autocast, logits, gradients on their way;
    - other: what lay there before beside parameters and optimiser state (inputs, tables, workspaces), and
      what the update takes on its way.

    A compiled step has no calls to watch. Its `attention` are blocks of the sizes that the implementation,
    compiled by itself on q, k, v of the model's shapes, keeps for backward, for each layer whose backward had
    not begun, as far as the step has such blocks: compiled as a whole it may keep fewer. What attention takes
    on its way is among the activations there.

    Takes two steps to warm up (optimiser state, workspaces, compilation) and two that are measured, of which
    the first, unwatched, gives the peak. Raises torch.OutOfMemoryError as the step does.

        split = memory_split(training_step(cfg))    # cfg as train.py composes it
    """
    for _ in range(2):
        step.run()
    with peak_of(step.device) as peak:
        step.run()
    base = _there_before(step)
    recorder = recorder_of(step.device)
    compiled = step.net._compiled_call_impl is not None
    with recorder, _watched(step, recorder, calls=not compiled):
        step.run()
    ledger = Ledger(recorder.events(), base)
    parts = dict(ledger.at_peak)
    if compiled:
        layers = step.net.config.n_layer - ledger.counted_at_peak
        if step.net.checkpointing:
            layers = min(layers, 1)
        own = owned(ledger.usual_at_peak, alone(step)[1], max(layers, 0))
        parts["attention"] += own
        parts["activations"] -= own
    # a CPU's recorder knows of no block that was there before
    total = peak.bytes + (0 if step.device.type == "cuda" else sum(base.values()))
    return {name: parts[name] / MIB for name in PARTS} | {"peak": total / MIB}


def disagreement(split: dict[str, float]) -> float:
    """By how much of the peak the parts sum up to something else: at most AGREE, or the split is not to be
    believed."""
    return abs(sum(split[name] for name in PARTS) / split["peak"] - 1)


def _there_before(step: Step) -> dict[str, int]:
    """Bytes by kind before the step."""
    import torch

    state = (x for each in step.optimizer.state.values() for x in each.values())
    state = (x for x in state if isinstance(x, torch.Tensor) and x.device.type == step.device.type)
    found = {
        "parameters": sum(storages(step.net.parameters()).values()),
        "optimizer": sum(storages(state).values()),
    }
    if step.device.type == "cuda":
        other = torch.cuda.memory_allocated(step.device) - sum(found.values())
    else:
        other = sum(storages([*step.net.buffers(), *step.inputs.values()]).values())
    return found | {"other": other}


@contextmanager
def _watched(step: Step, recorder: Any, calls: bool) -> Iterator[None]:
    """Marks for the recorder: gradients of parameters, the update, and the `calls` of attention."""
    from attention.base import Attention

    def is_of(kind: str, x: Tensor) -> None:
        recorder.mark(Event("kind", x.untyped_storage().data_ptr(), kind=kind))

    def window(what: str, kind: str) -> Callable[..., None]:
        return lambda *_: recorder.mark(Event(what, kind=kind))

    def forward_ends(_: Attention, inputs: tuple[Tensor, ...], options: dict[str, Any], out: Any) -> None:
        is_of("activations", out)
        recorder.mark(Event("end", kind="attention"))
        wanted = [x for x in inputs if x.requires_grad]
        if not wanted or not out.requires_grad:
            return
        left = [len(wanted)]

        def gradients(number: int, grad: Tensor) -> None:
            if left[0]:
                is_of("activations", grad)
                left[0] = max(0, left[0] - number)
                if not left[0]:
                    recorder.mark(Event("end", kind="attention"))

        out.register_hook(window("begin", "attention"))
        for x in wanted:
            x.register_hook(partial(gradients, 1))
        packed = options.get("packed")
        if packed is not None and packed.requires_grad:  # its gradient may come in the place of theirs
            packed.register_hook(partial(gradients, len(wanted)))

    def is_gradient(p: Tensor) -> None:
        address = p.grad.untyped_storage().data_ptr()
        recorder.mark(Event("kind", address, kind="gradients", counted=id(p) in of_layers))

    of_layers = {id(block.attn.c_attn.weight) for block in step.net.transformer.h}
    learnt = [p for p in step.net.parameters() if p.requires_grad]
    hooks = [p.register_post_accumulate_grad_hook(is_gradient) for p in learnt]
    hooks.append(step.optimizer.register_step_pre_hook(window("begin", "other")))
    hooks.append(step.optimizer.register_step_post_hook(window("end", "other")))
    for module in {m for m in step.net.modules() if isinstance(m, Attention)} if calls else ():
        hooks.append(module.register_forward_pre_hook(window("begin", "attention")))
        hooks.append(module.register_forward_hook(forward_ends, with_kwargs=True))
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def training_step(cfg: DictConfig) -> Step:
    """The step that train.py would run with this config, on random tokens, on the device that it would take:
    the same model, adapters, precision, compilation, clipping and optimiser. Of the micro-batches of a step
    the first two: later ones meet the same memory. UserError for a step that several devices share."""
    import torch
    from hydra.utils import instantiate

    from conf.compose import build_attention
    from model.calls import attention_calls, require
    from model.gpt import GPT
    from model.lora import Adapters, add_adapters
    from model.training import fp8, runtime
    from model.training.lit_gpt import LitGPT

    if cfg.trainer.devices != 1 or cfg.trainer.num_nodes != 1:
        raise UserError(
            f"trainer.devices={cfg.trainer.devices} trainer.num_nodes={cfg.trainer.num_nodes}: a step on one "
            "device is measured here. Leave trainer= out; scripts/estimate.py predicts what each of several "
            "takes."
        )
    device = runtime.device(cfg.trainer.accelerator, cfg.trainer.devices)
    precision = runtime.precision(cfg.precision, device)
    dtype, config, batch = runtime.compute_dtype(precision), model_config(cfg), cfg.data.batch_size
    attention = build_attention(cfg)
    facts = {"device": device, "dtype": dtype, "document_ids": cfg.data.document_mask}
    require(attention, [attention_calls(config, batch, batch, **facts)["training"]])
    torch.manual_seed(cfg.seed)
    net = GPT(config, attention, checkpointing=cfg.checkpointing)
    if (asked := cfg.finetune).rank is not None:  # memory is that beside any weights
        add_adapters(net, Adapters(asked.rank, asked.alpha, list(asked.targets)), asked.dropout)
    net.to(device).train()
    fp8.convert(net, cfg.precision, batch * config.seq_len)
    compile = compiled(cfg.compile, device.type, cfg.precision)
    if compile:
        (net.compile_blocks if compile == "blocks" else net.compile)(dynamic=False)
    lit = LitGPT(net, instantiate(cfg.optim), instantiate(cfg.schedule))
    optimizer = lit.configure_optimizers()
    tokens = torch.randint(config.vocab_size, (2, batch, config.seq_len), device=device)
    micro = {"input_ids": tokens[0], "targets": tokens[1]}
    if cfg.data.document_mask:
        micro["document_ids"] = torch.zeros_like(tokens[0], dtype=torch.int32)
    repeats = min(2, runtime.accumulation(cfg.tokens_per_step, batch * config.seq_len, 1))

    def run() -> None:
        with torch.autocast(device.type, torch.bfloat16, enabled=precision == "bf16-mixed"):
            for _ in range(repeats):
                (net(**micro) / (tokens[1].numel() * repeats)).backward()
            norm = torch.nn.utils.get_total_norm([p.grad for p in net.parameters() if p.requires_grad])
            optimizer.found_inf = (~norm.isfinite()).float()
            optimizer.grad_scale = torch.ones_like(norm)
            if cfg.grad_clip is not None:
                optimizer.grad_scale = torch.clamp(norm / cfg.grad_clip, min=1.0)
            optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return Step(net, optimizer, run, device, micro, batch, dtype)


def model_config(cfg: DictConfig) -> GPTConfig:
    """The model of a config of train.py, whose batch size is checked too; its vocabulary is that of the
    corpus, as far as the config says."""
    from model.config import GPTConfig
    from model.training.checks import called

    whole("data.batch_size", cfg.data.batch_size, 1)
    return called("model", GPTConfig, vocab_size=vocabulary(cfg), seq_len=cfg.seq_len, **cfg.model)


def vocabulary(cfg: DictConfig) -> int:
    """Entries of the tokenizer that the config names, before any corpus is read (a trained one may end up
    with fewer); data=synthetic says them itself. UserError for kind=char, which the corpus decides."""
    masks = cfg.data.get("mask_fraction") is not None  # one token more
    if cfg.data.tokenizer is None:
        return cfg.data.corpus.vocab_size + masks
    kind = cfg.data.tokenizer.kind
    if kind == "char":
        raise UserError(
            "data.tokenizer.kind=char: the vocabulary is known once the corpus is read. Use data=synthetic "
            "data.corpus.vocab_size=65, or as many as there will be."
        )
    return ({"gpt2": 50257, "byte": 257}.get(kind) or cfg.data.tokenizer.vocab_size) + masks


def table(split: dict[str, float]) -> str:
    rows = [f"{name:<12} {mib:>10,.1f} MiB {100 * mib / split['peak']:>5.1f}%" for name, mib in split.items()]
    return "\n".join([*rows, f"the parts sum to the peak within {100 * disagreement(split):.2f}%"])


def composed(overrides: list[str]) -> DictConfig:
    """The config that train.py would have with these overrides. UserError where it would take the model, or
    all of the config, from a file, which is not read here."""
    from conf import compose

    if flags := [word for word in overrides if word.startswith("-")]:
        raise UserError(f"{' '.join(flags)}: there are no flags here; everything is key=value.")
    if several := compose.swept(overrides, overrides):  # Hydra would advise a flag
        raise UserError(f"{' '.join(several)}: one config at a time. Give one value, or a list in brackets.")
    cfg = compose.composed(overrides)
    if cfg.ckpt is not None:
        raise UserError(
            f"ckpt={cfg.ckpt}: no checkpoint is read here, and its config is needed. Leave ckpt= out, and "
            "give the overrides that the run was started with: the config.yaml in its folder has the values."
        )
    if cfg.init_from is not None:
        raise UserError(
            f"init_from={cfg.init_from}: no weights are read here, and the architecture that they bring is "
            "needed. Leave init_from= out, and set that by model= and its keys, as model=gpt2_xl does for "
            "gpt2-xl; for a run of yours, the config.yaml in its folder has the values."
        )
    return cfg


def main(arguments: list[str]) -> None:
    if any(argument in ("-h", "--help") for argument in arguments):
        print(__doc__)
        return
    from conf.command import user_errors

    user_errors(lambda: print(table(memory_split(training_step(composed(arguments))))))()


if __name__ == "__main__":
    main(sys.argv[1:])
