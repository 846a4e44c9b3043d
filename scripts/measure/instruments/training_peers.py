"""A model of the same shape as others train it, on batches of the same shape: what our training points stand
beside.

nanogpt=MODEL.PY      nanoGPT's model and the step of its train.py, compiled, as its users run it
transformers_eager    the class of transformers that scripts/export.py writes (GPT-2, Llama, Qwen), with its
                      eager attention, not compiled
transformers_sdpa     the same with torch's scaled_dot_product_attention
transformers_tilegpt  the same with ours, attention/for_transformers.py: attn_implementation="tilegpt-auto"

All have random weights, no dropout, our vocabulary (a multiple of 64, which theirs need not be), and our
step: bf16 autocast on a GPU, micro-batches accumulated, gradients clipped, fused AdamW.
"""

from __future__ import annotations

import importlib.util
import itertools
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from conf.values import UserError
from model.config import GPTConfig
from model.pretrained.architectures import to_theirs

if TYPE_CHECKING:
    import torch

    from scripts.measure.instruments.training_meter import Laps

BATCHES = 16  # of random tokens, which take turns
# nanoGPT is GPT-2, our default: all but these, which it has too or which change no function, has to be so.
NANOGPT = {"vocab_size", "seq_len", "n_layer", "n_head", "n_embd", "bias", "loss_chunk", "fp32_residual"}
GPT2 = {each.name: each.default for each in fields(GPTConfig) if each.name not in NANOGPT}


@dataclass(frozen=True)
class Peer:
    """`name` in rows; `build`: config, path -> model; `loss`: model, inputs, targets -> mean loss;
    `attention`:
    the implementation of conf/attention whose memory its own takes."""

    name: str
    build: Callable[[GPTConfig, Path | None], torch.nn.Module]
    loss: Callable[[torch.nn.Module, torch.Tensor, torch.Tensor], torch.Tensor]
    attention: str
    compiled: bool = False


def nanogpt(config: GPTConfig, path: Path | None) -> torch.nn.Module:
    for key, value in GPT2.items():
        if getattr(config, key) != value:
            raise UserError(f"model.{key}={getattr(config, key)}: nanoGPT is GPT-2, with {key}={value}.")
    spec = importlib.util.spec_from_file_location("nanogpt_model", str(path))
    module = sys.modules["nanogpt_model"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    sizes = {"n_layer": config.n_layer, "n_head": config.n_head, "n_embd": config.n_embd}
    sizes |= {"block_size": config.seq_len, "vocab_size": config.padded_vocab_size}
    return module.GPT(module.GPTConfig(**sizes, dropout=0.0, bias=config.bias))


def transformers(implementation: str) -> Callable[[GPTConfig, Path | None], torch.nn.Module]:
    def build(config: GPTConfig, path: Path | None) -> torch.nn.Module:
        theirs = to_theirs(config, None, None) | {"vocab_size": config.padded_vocab_size}
        if (
            theirs["model_type"] == "gpt2" and not config.bias
        ):  # a file of zeros serves, training them does not
            raise UserError(
                "model.bias=false: transformers' GPT-2 has biases. Compare it with model.bias=true."
            )
        from transformers import AutoConfig, AutoModelForCausalLM
        from transformers.utils import logging

        if implementation.startswith("tilegpt-"):
            import attention.for_transformers  # noqa: F401

        logging.set_verbosity_error()
        own = AutoConfig.for_model(**theirs, use_cache=False)
        return AutoModelForCausalLM.from_config(own, attn_implementation=implementation)

    return build


def _shifted(model: torch.nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return model(input_ids=x, labels=x).loss  # transformers shifts the labels itself


PEERS = {
    "nanogpt": Peer("nanoGPT", nanogpt, lambda model, x, y: model(x, y)[1], "sdpa_flash", compiled=True),
    "transformers_eager": Peer("transformers eager", transformers("eager"), _shifted, "standard"),
    "transformers_sdpa": Peer("transformers SDPA", transformers("sdpa"), _shifted, "sdpa_flash"),
    "transformers_tilegpt": Peer("transformers tilegpt-auto", transformers("tilegpt-auto"), _shifted, "auto"),
}


def chosen(text: str) -> tuple[Peer, Path | None]:
    """A peer by its name, nanoGPT with =MODEL.PY after it. Raises UserError for what is none."""
    name, _, path = text.partition("=")
    if name not in PEERS:
        raise UserError(f"peer {name}: choose one of {', '.join(PEERS)}.")
    if name != "nanogpt" and path:
        raise UserError(f"peer {text}: {name} is installed or not; it takes no path.")
    if name == "nanogpt" and not Path(path).is_file():
        raise UserError(f"peer {text}: no such file. Give nanoGPT's: nanogpt=path/to/model.py.")
    return PEERS[name], Path(path) if path else None


def measure(text: str, config: GPTConfig, batch: int, tokens_per_step: int, laps: Laps) -> dict[str, Any]:
    """A row's result: steps of `tokens_per_step` in micro-batches of `batch` rows, timed by `laps`. Raises
    UserError for a model that the peer cannot be."""
    import torch

    from model.training.runtime import accumulation
    from scripts.measure.instruments.training_meter import rated

    peer, path = chosen(text)
    try:
        model = peer.build(config, path)
    except ImportError as error:
        return {"status": "unsupported", "reason": f"{error}: install it to run {peer.name} beside ours"}
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
    repeats = accumulation(tokens_per_step, batch * config.seq_len, 1)
    tokens = torch.randint(config.vocab_size, (BATCHES, 2, repeats, batch, config.seq_len))
    tokens = tokens.pin_memory() if device.type == "cuda" else tokens
    step = stepper(peer, model.to(device).train(), itertools.cycle(tokens))
    laps.start(device.type == "cuda")
    losses = [step()]
    while not laps.ended():
        losses.append(step())
    first, last = losses[0].item(), losses[-1].item()
    result = laps.result()
    result |= rated(config, tokens_per_step, result) | {"loss": {"first": first, "last": last}}
    return {"status": "ok", "reason": None, **result, **kernels(step, device.type)}


def stepper(
    peer: Peer,
    model: torch.nn.Module,
    batches: Iterator[torch.Tensor],
    lr: Callable[[int], float] = lambda _: 6e-4,
) -> Callable[[], torch.Tensor]:
    """A training step, which returns its loss. batches: of each step (2, micro-batches, rows, tokens), inputs
    and targets; lr: step -> learning rate."""
    import torch

    device = next(model.parameters()).device
    cuda = device.type == "cuda"
    matrices = [p for p in model.parameters() if p.dim() >= 2]
    others = [p for p in model.parameters() if p.dim() < 2]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=lr(0), betas=(0.9, 0.95), fused=True)
    if peer.compiled and cuda:
        model.compile()
    steps = itertools.count()

    def step() -> torch.Tensor:
        rate = lr(next(steps))
        for group in optimizer.param_groups:
            group["lr"] = rate
        inputs, targets = next(batches).to(device, non_blocking=True)
        total = torch.zeros((), device=device)
        for x, y in zip(inputs, targets, strict=True):
            with torch.autocast(device.type, torch.bfloat16, enabled=cuda):
                loss = peer.loss(model, x, y) / len(inputs)
            loss.backward()
            total += loss.detach()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return total

    return step


def kernels(step: Callable[[], Any], device: str) -> dict[str, Any]:
    """Those of one more step. A peer was asked for no kernel, so that none is expected."""
    from scripts.measure.instruments.kernels import as_field, family, profile

    found = [kernel for kernel in profile(step, device, warm_up=0) if family(kernel.name)]
    return {"kernels": as_field(found), "kernels_from": "a whole training step"}
