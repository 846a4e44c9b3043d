"""The parts of a transformer's layer as calls to time, each with its FLOPs and the elements that it has to
read and write."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from attention.base import Attention
from model.costs.flops import attention_flops

Call = Callable[[], Tensor]
# FLOPs of an element. Softmax: scale, subtract the maximum, exp, sum, divide. Norm: mean, subtract, square,
# sum, multiply, gain and offset. GELU in its tanh form. An exp or a tanh counts as one.
SOFTMAX, NORM, GELU, RESIDUAL = 5, 7, 8, 1


@dataclass(frozen=True)
class Layer:
    """A call of a layer: `batch` rows of `tokens` new tokens that see `keys` tokens, themselves included."""

    batch: int
    tokens: int
    keys: int
    width: int
    heads: int
    causal: bool = True

    @property
    def head_dim(self) -> int:
        return self.width // self.heads


@dataclass(frozen=True)
class Part:
    """`elements`: operands read once and results written once, whatever an implementation does; `times`: how
    often a layer has it; `make(like)`: a call on operands of its own."""

    name: str
    kind: str  # weights (a product with a weight matrix) | standard | fused (both attention) | pointwise
    flops: float
    elements: int
    make: Callable[[Mapping[str, Any]], Call]
    times: int = 1

    def work(self, value_bytes: int) -> dict[str, float]:
        """What a row says of it besides the time."""
        work = {"kind": self.kind, "times": self.times, "flops": self.flops, "elements": self.elements}
        return work | {"bytes": value_bytes * self.elements}


def linear(name: str, rows: int, wide: int, out: int) -> Part:
    """x (rows, wide) times a weight (out, wide)."""

    def make(like: Mapping[str, Any]) -> Call:
        x, weight = torch.randn(rows, wide, **like), torch.randn(out, wide, **like)
        return lambda: F.linear(x, weight)

    return Part(name, "weights", 2.0 * rows * wide * out, rows * wide + wide * out + rows * out, make)


def attention_inputs(layer: Layer, like: Mapping[str, Any]) -> tuple[Tensor, Tensor, Tensor]:
    """q (B, H, T, D), k and v (B, H, K, D), contiguous, so that no product of standard attention copies."""
    shape = layer.batch, layer.heads
    return (
        torch.randn(*shape, layer.tokens, layer.head_dim, **like),
        torch.randn(*shape, layer.keys, layer.head_dim, **like),
        torch.randn(*shape, layer.keys, layer.head_dim, **like),
    )


def standard_attention(layer: Layer) -> list[Part]:
    """Q K^T, softmax and P V in eager PyTorch. The softmax is a kernel for the scale, one for a causal mask
    and one for itself, where one could do; the products skip nothing that is masked."""
    pairs = layer.batch * layer.heads * layer.tokens * layer.keys
    product = 2.0 * pairs * layer.head_dim
    rows = layer.batch * layer.heads * (layer.tokens + layer.keys) * layer.head_dim
    shape = layer.batch, layer.heads, layer.tokens, layer.keys

    def scores(like: Mapping[str, Any]) -> Call:
        q, k, _ = attention_inputs(layer, like)
        return lambda: q @ k.mT

    def softmax(like: Mapping[str, Any]) -> Call:
        s, scale = torch.randn(*shape, **like), layer.head_dim**-0.5
        if not layer.causal or layer.tokens == 1:
            return lambda: torch.softmax(s * scale, dim=-1)
        future = torch.ones(shape[2:], dtype=torch.bool, device=like["device"]).triu(1)
        return lambda: torch.softmax((s * scale).masked_fill_(future, -torch.inf), dim=-1)

    def weighted(like: Mapping[str, Any]) -> Call:
        p, v = torch.rand(*shape, **like), attention_inputs(layer, like)[2]
        return lambda: p @ v

    return [
        Part("QK^T", "standard", product, rows + pairs, scores),
        Part("softmax", "standard", float(SOFTMAX * pairs), 2 * pairs, softmax),
        Part("PV", "standard", product, rows + pairs, weighted),
    ]


def fused_attention(layer: Layer, name: str, attention: Attention) -> Part:
    """All of it in one call: q, k and v read, the output written."""
    shape = layer.batch, layer.heads, layer.tokens, layer.keys, layer.head_dim
    causal = layer.causal and layer.tokens > 1
    elements = 2 * layer.batch * layer.heads * (layer.tokens + layer.keys) * layer.head_dim

    def make(like: Mapping[str, Any]) -> Call:
        q, k, v = attention_inputs(layer, like)
        return lambda: attention(q, k, v, causal=layer.causal)

    return Part(f"attention, {name}", "fused", attention_flops(*shape, causal=causal), elements, make)


def pointwise(name: str, operands: int, shape: tuple[int, int], flops: int, times: int = 1) -> Part:
    """`operands` read, one result written, all of (rows, width)."""
    number = shape[0] * shape[1]

    def make(like: Mapping[str, Any]) -> Call:
        x, y = torch.randn(*shape, **like), torch.randn(*shape, **like) if operands == 2 else None
        gain, offset = torch.ones(shape[1], **plain(like)), torch.zeros(shape[1], **plain(like))
        if y is not None:
            return lambda: x + y
        if name == "GELU":
            return lambda: F.gelu(x, approximate="tanh")
        return lambda: F.layer_norm(x, shape[1:], gain, offset)

    return Part(name, "pointwise", float(flops * number), (operands + 1) * number, make, times)


def plain(like: Mapping[str, Any]) -> dict[str, Any]:
    """Without the generator, for what is not drawn."""
    return {key: value for key, value in like.items() if key != "generator"}


def layer_parts(layer: Layer, fused: Mapping[str, Attention]) -> list[Part]:
    """In the order of a layer: GPT-2's, with biases left out; attention both ways."""
    rows, width = layer.batch * layer.tokens, layer.width
    return [
        pointwise("norm", 1, (rows, width), NORM, 2),
        linear("QKV projection", rows, width, 3 * width),
        *standard_attention(layer),
        *(fused_attention(layer, name, attention) for name, attention in fused.items()),
        linear("output projection", rows, width, width),
        linear("MLP up", rows, width, 4 * width),
        pointwise("GELU", 1, (rows, 4 * width), GELU),
        linear("MLP down", rows, 4 * width, width),
        pointwise("residual", 2, (rows, width), RESIDUAL, 2),
    ]
