"""What attention takes by itself, at the shapes of a training step."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from scripts.measure.instruments.allocations import Event, Halves, Step, recorder_of

MIB = 2**20


def attention_alone(step: Step) -> dict[str, float]:
    """Attention by itself on random q, k, v of the step's shapes, compiled and under autocast where the step
    is, in MiB: `kept` for backward beside q, k, v and out; `forward`, the most that a forward takes beyond q,
    k, v and out; `backward`, the most that a backward takes beyond what was kept and dq, dk and dv."""
    halves, kept, gradients = alone(step)
    out = halves.at - sum(kept)
    found = {
        "kept": sum(kept),
        "forward": halves.before - out,
        "backward": halves.after - halves.at - gradients,
    }
    return {name: max(0, size) / MIB for name, size in found.items()}


def alone(step: Step) -> tuple[Halves, list[int], int]:
    """(memory before and after the end of attention's forward, sizes of the blocks that it keeps, bytes of
    dq, dk and dv)"""
    import torch

    config, attention = step.net.config, step.net.transformer.h[0].attn.attention
    B, T, D = step.batch, config.seq_len, config.head_size
    heads = (config.n_head, config.kv_heads, config.kv_heads)
    like = {"dtype": step.dtype, "device": step.device}
    qkv = [torch.randn(B, T, H, D, **like).transpose(1, 2).requires_grad_() for H in heads]
    dout = torch.randn_like(qkv[0])
    options = config.attention_options | {"alibi_slopes": step.net.slopes, "dropout_p": config.attn_dropout}
    options["relative_bias"], options["block_mask"] = step.net.relative_bias(), step.net.block_mask(T, None)
    ids = step.inputs.get("document_ids")
    options["document_ids"] = None if ids is None else ids[:B]
    call = torch.compile(attention, dynamic=False) if step.net._compiled_call_impl is not None else attention
    narrow = step.dtype == torch.bfloat16

    def run(between: Callable[[], None]) -> None:
        # what is compiled under autocast has its backward under autocast, too, and keeps less for it
        with torch.autocast(step.device.type, torch.bfloat16, enabled=narrow):
            out = call(*qkv, **options)
            between()
            torch.autograd.grad(out, qkv, dout)

    run(lambda: None)
    recorder = recorder_of(step.device)
    with recorder:
        run(lambda: recorder.mark(Event("point")))
    halves = Halves.of(recorder.events())
    kept = list(halves.blocks)
    if kept:
        kept.remove(min(kept, key=lambda size: abs(size - dout.nbytes)))  # out, as the allocator rounds it
    return halves, kept, sum(x.nbytes for x in qkv)


def owned(there: Counter[int], kept: list[int], layers: int) -> int:
    """Bytes of the blocks that are attention's: those of the sizes that one layer keeps, at most as many as
    so many layers have, and as are there."""
    return sum(size * min(layers * count, there[size]) for size, count in Counter(kept).items())
