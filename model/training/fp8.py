"""precision=fp8: which linear layers of the blocks have products in fp8 (model/fp8.py), forward and backward.

There is no state to save, as scales come from the tensors themselves, and a resumed run computes the same
bits. Weights, their gradients and the optimiser stay fp32, all other activations bf16. The head stays in
bf16, as its product is part of the loss (model/loss.py); so do validation and generation, which compute what
the finished weights will.
"""

from __future__ import annotations

import torch
from torch import nn

from conf.values import UserError
from model.fp8 import Fp8Linear
from model.loss import HAS_TRITON

CAPABILITY = 8, 9  # of the first GPUs with fp8 products
STEP = 16  # sizes of fp8 products are multiples of it
# A layer of K inputs and N outputs is converted from this K N / (K + N) on. Per token, fp8 saves time in
# proportion to K N, and costs time in proportion to K + N: its input and the gradient of its output are
# rounded. On an H100, GPT-2 124M is 1.021 times as fast as in bf16 with its layers of 576 and 614 converted,
# 1.005 times with those of 384, too; GPT-2 medium 1.163 times without its layers of 512, 1.159 with them.
SMALLEST = 550


def require(device: torch.device) -> None:
    """UserError where there are no fp8 products, before anything is built."""
    if device.type not in ("cuda", "cpu"):
        raise UserError(f"precision=fp8: there are no fp8 products on {device.type}. Use precision=32-true.")
    if device.type == "cuda" and not HAS_TRITON:
        raise UserError("precision=fp8 rounds with Triton kernels on a GPU: pip install triton.")
    if device.type == "cuda" and torch.cuda.get_device_capability(device) < CAPABILITY:
        raise UserError(
            f"precision=fp8: {torch.cuda.get_device_name(device)} has no fp8 products (it takes compute "
            "capability 8.9: Ada, Hopper or newer). Use precision=bf16-mixed."
        )


def convert(net: nn.Module, precision: str, tokens: int) -> None:
    """For precision=fp8, give the large linear layers of the blocks products in fp8; weights and names stay.
    tokens: of a micro-batch, over which the products for the gradients of weights sum. UserError where no
    layer is large enough, `tokens` is no multiple of 16, or only adapters train."""
    if precision != "fp8":
        return
    import ops.fp8  # noqa: F401  registers the operators, before anything is compiled

    if not all(parameter.requires_grad for parameter in net.parameters()):
        raise UserError("precision=fp8 trains all weights: use finetune=full, or precision=bf16-mixed.")
    if tokens % STEP:
        raise UserError(
            f"precision=fp8 needs a multiple of {STEP} tokens in a micro-batch: data.batch_size * seq_len is "
            f"{tokens}."
        )

    def large(layer: nn.Linear) -> bool:
        k, n = layer.in_features, layer.out_features
        return k % STEP == n % STEP == 0 and k * n >= SMALLEST * (k + n)

    for layer in net.transformer.h.modules():
        if type(layer) is nn.Linear and large(layer):
            layer.__class__ = Fp8Linear
    if not layers(net):
        raise UserError(
            "precision=fp8: no linear layer of the blocks is large enough to gain from it: of K inputs and N "
            f"outputs, multiples of {STEP} with K N / (K + N) of at least {SMALLEST}. Use "
            "precision=bf16-mixed, or a model of model.n_embd=768 or more."
        )


def layers(net: nn.Module) -> list[Fp8Linear]:
    """Those with fp8 products."""
    return [layer for layer in net.modules() if isinstance(layer, Fp8Linear)]


def said(net: nn.Module) -> str:
    """Which layers of each block, for the start of a run; empty without fp8."""
    converted = layers(net)
    names = [name for name, layer in net.transformer.h[0].named_modules() if layer in converted]
    return f", fp8 products in {', '.join(names)}" if names else ""
