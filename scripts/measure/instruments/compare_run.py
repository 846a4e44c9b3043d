"""Two implementations in a trained model: `python scripts/compare.py ckpt=... text=...`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from rich.table import Table
from torch import Tensor

from attention.base import FEATURES, Attention, Capabilities
from attention.checks import dtype_name
from attention.naive import attention_scores, naive_attention
from conf.values import UserError
from model.gpt import GPT
from ops.options import AttentionOptions
from scripts.accuracy import Problem, plain_softmax
from scripts.measure.instruments.diagnosis import MOST_SCORES, Finding, conclusion, examine


class ExactAttention(Attention):
    """In fp64 inside: what a model computes when attention adds no error of its own."""

    capabilities: ClassVar[Capabilities] = Capabilities(features=frozenset(FEATURES))

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, options: AttentionOptions, dropout_seed: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        out, lse = naive_attention(q.double(), k.double(), v.double(), options, dropout_seed)
        return out.to(q.dtype), lse


class PlainAttention(Attention):
    """The plain formula, everything in the inputs' dtype: how much rounding may matter."""

    capabilities: ClassVar[Capabilities] = Capabilities(features=frozenset(FEATURES) - {"dropout"})

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, options: AttentionOptions, dropout_seed: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        with torch.autocast(q.device.type, enabled=False):
            p, lse = plain_softmax(attention_scores(q, k, options))
            return p @ v.repeat_interleave(q.shape[1] // v.shape[1], dim=1), lse


@dataclass(frozen=True)
class Pass:
    """One forward and backward: mean loss in nats per token, logits (T, V), gradient by parameter."""

    loss: float
    logits: Tensor
    grads: dict[str, Tensor]

    def same_bits(self, other: Pass) -> bool:
        same = all(torch.equal(grad, other.grads[name]) for name, grad in self.grads.items())
        return same and torch.equal(self.logits, other.logits)

    def gradient_error(self, exact: Pass) -> tuple[float, str]:
        """Of all parameters together, relative to the norm; and the parameter that is furthest off."""
        off = {name: (grad - exact.grads[name]).norm() for name, grad in self.grads.items()}
        norms = {name: grad.norm().clamp(min=1e-30) for name, grad in exact.grads.items()}
        total = torch.stack(list(off.values())).norm() / torch.stack(list(norms.values())).norm()
        return float(total), max(off, key=lambda name: float(off[name] / norms[name]))


def run_pass(model: GPT, attention: Attention, ids: Tensor, dtype: torch.dtype) -> Pass:
    """The model on ids (T + 1,), as it trains but without dropout: autocast around fp32 weights."""
    model.replace_attention(attention)
    with torch.autocast(ids.device.type, dtype, enabled=dtype != torch.float32):
        logits = model(ids[None, :-1])  # (1, T, V padded)
        loss = model.summed_loss(logits, ids[None, 1:]) / (len(ids) - 1)
    names, params = zip(*model.named_parameters(), strict=True)
    grads = torch.autograd.grad(loss, params)
    logits = logits[0, :, : model.config.vocab_size].detach().float()
    return Pass(float(loss.detach()), logits, dict(zip(names, grads, strict=True)))


@contextmanager
def recorded(attention: Attention) -> Iterator[list[Problem]]:
    """The calls that reach `attention`, layer by layer, with the gradients of their outputs."""
    problems: list[Problem] = []

    def keep(module: Any, args: tuple[Tensor, ...], options: dict[str, Any], out: Tensor) -> None:
        layer = len(problems)
        problems.append(Problem(*(x.detach() for x in args), options | {"packed": None}))  # no view any more

        def with_gradient(dout: Tensor) -> None:
            problems[layer] = replace(problems[layer], dout=dout)

        out.register_hook(with_gradient)

    hook = attention.register_forward_hook(keep, with_kwargs=True)
    try:
        yield problems
    finally:
        hook.remove()


def compare_run(
    given: dict[str, Any], names: list[str], device: torch.device, dtype: torch.dtype, console: Any
) -> bool:
    """Print the comparison; True for a fault."""
    from conf.compose import build_attention
    from conf.trained import load_model

    model, tokenizer, cfg = load_model(given["ckpt"], [], given["runs_dir"])
    tokens = tokenizer.encode(given["text"])
    if len(tokens) < 2:
        raise UserError(f"text={given['text']!r} has {len(tokens)} tokens: a loss needs at least two.")
    ids = torch.tensor(tokens[: model.config.seq_len + 1], device=device)
    model = model.to(device).eval()
    attentions = [build_attention(cfg, name) for name in names]
    exact_attention = ExactAttention("fp64")
    with recorded(exact_attention) as problems:
        exact = run_pass(model, exact_attention, ids, dtype)
    console.print(
        f"{len(ids) - 1} of the text's {len(tokens) - 1} predictions (context {model.config.seq_len}), "
        f"{model.config.n_layer} layers, {dtype_name(dtype)}\n"
        f"Loss {exact.loss:.6f} with attention in fp64. Differences from it:\n"
    )
    passes = {
        name: (run_pass(model, attention, ids, dtype), run_pass(model, attention, ids, dtype))
        for name, attention in zip(
            ["plain formula", *names], [PlainAttention("plain"), *attentions], strict=True
        )
    }
    console.print(losses_table(passes, exact))
    for name in names:
        console.print(
            f"{name}: the largest gradient error is that of {passes[name][0].gradient_error(exact)[1]}"
        )
    findings: list[Finding] = []
    for layer, problem in enumerate(problems):
        found = examine(names, attentions, problem, MOST_SCORES)
        findings += [replace(f, tensor=f"layer {layer} {f.tensor}") for f in found]
    console.print("\nattention on these activations: the largest ratio of each layer")
    console.print(layers_table(names, findings, len(problems)))
    said, faulty = conclusion(names, findings)
    console.print("\n" + "\n".join(said))
    return faulty


def losses_table(passes: dict[str, tuple[Pass, Pass]], exact: Pass) -> Table:
    """Loss, logits and gradients of each implementation against those with attention in fp64."""
    table = Table(box=None, pad_edge=False)
    table.add_column("", no_wrap=True)
    for column in ("loss", "difference", "logits, rms", "same token", "gradients"):
        table.add_column(column, justify="right")
    table.add_column("two calls")
    for name, (one, two) in passes.items():
        agree = (one.logits.argmax(-1) == exact.logits.argmax(-1)).double().mean()
        table.add_row(
            name,
            f"{one.loss:.6f}",
            f"{one.loss - exact.loss:+.1e}",
            f"{float((one.logits - exact.logits).square().mean().sqrt()):.1e}",
            f"{100 * float(agree):.1f}%",
            f"{one.gradient_error(exact)[0]:.1e}",
            "same" if one.same_bits(two) else "[yellow]differ[/yellow]",
        )
    return table


def layers_table(names: list[str], findings: list[Finding], layers: int) -> Table:
    table = Table(box=None, pad_edge=False)
    table.add_column("layer", justify="right")
    for name in names:
        table.add_column(name)
    for layer in range(layers):
        row = []
        for name in names:
            own = [f for f in findings if f.name == name and f.tensor.startswith(f"layer {layer} ")]
            if not own:
                row.append("-")
                continue
            worst = max(own, key=lambda finding: finding.ratio)
            text = f"{worst.ratio:.2f} {worst.tensor.split()[-1]}"
            row.append(text if worst.ratio <= 1 else f"[red]{text}[/red]")
        table.add_row(str(layer), *row)
    return table
