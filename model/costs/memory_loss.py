"""The memory of the loss and of the output embedding, in the letters of costs/run.py; n the tokens
whose logits exist at a time, all N of them or model.loss_chunk."""

from __future__ import annotations

from model.costs.run import Run


def tokens_at_once(run: Run) -> int:
    """n"""
    return min(run.config.loss_chunk or run.tokens, run.tokens)


def logits_bytes(run: Run) -> int:
    """n Vp e"""
    return tokens_at_once(run) * run.config.padded_vocab_size * run.value_bytes


def output_bytes(run: Run) -> int:
    """The gradient of the output embedding, 4 Vp C."""
    return 4 * run.config.padded_vocab_size * run.config.n_embd


def fused_loss(run: Run) -> bool:
    """Whether the loss is the kernel that writes its gradient over the logits (model/loss.py)."""
    return run.device == "cuda" and run.value_bytes == 2


def loss_computes_gradients(run: Run) -> bool:
    """Whether the loss computes its gradients as it goes, model.loss_chunk tokens, or all, at a time."""
    return bool(run.config.loss_chunk) or fused_loss(run)


def loss_bytes(run: Run) -> int:
    """The most that is alive in the loss beyond what the blocks and the last norm keep: the input of the
    output embedding, N C e, and the fp32 log-probabilities, their gradient and that of the logits, 12 N V;
    compiled: the logits, which their gradient replaces.

    Where the loss computes its gradients (model/loss.py), that input in fp32 too, as the last norm leaves it,
    unless compiled; its gradient, N C e; that of the output embedding, and its copy of e bytes; and for a
    chunk the logits and in fp32 their log-probabilities and, where e is 2, themselves: n Vp (e + 4 + 4); or
    later their gradient and its product, e Vp C, which adds to the output embedding's. In one kernel the
    logits alone."""
    if not loss_computes_gradients(run):
        return run.width_bytes + (
            logits_bytes(run) if run.compiled else 12 * run.tokens * run.config.vocab_size
        )
    logits, output, narrow = logits_bytes(run), output_bytes(run), run.value_bytes == 2
    fp32 = 4 * tokens_at_once(run) * run.config.padded_vocab_size
    held = 2 * run.width_bytes + output
    if narrow:
        held += output // 2 + (0 if run.compiled else run.residual_bytes)
    if fused_loss(run):
        return held + logits
    return held + max(logits + fp32 * (1 + narrow), logits + output * run.value_bytes // 4)


def head_bytes(run: Run) -> int:
    """The most beyond what the blocks and the last norm keep while the backward passes the output embedding,
    whose gradient is a parameter's: the gradient of the logits, and that of the embedding's input; eager, the
    embedding's in 16 bits before it is in fp32. Where the loss has computed them, both gradients before they
    are scaled, and that of the input scaled, 4 N C."""
    if loss_computes_gradients(run):
        return output_bytes(run) + run.width_bytes + run.residual_bytes
    narrow = output_bytes(run) // 2 if run.value_bytes == 2 and not run.compiled else 0
    return logits_bytes(run) + 2 * run.width_bytes + narrow
