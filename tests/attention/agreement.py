"""Does an implementation keep the contract in one call: does it refuse, or agree with the reference?

By the criterion of scripts/accuracy.py, of outputs and gradients (tests/attention/rounding.py). Where a call
is of few numbers their errors may be small by luck, so what exceeds the criterion is drawn again with other
values, and judged over all; what then exceeds it by less than twice, over many more: of two largest errors,
each met by a few rows in hundreds, eight draws may show but one.
"""

from __future__ import annotations

import re
import traceback
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from attention.base import Attention, AttentionCall, UnsupportedAttention
from attention.naive import attention_scores
from ops.options import AttentionOptions
from scripts.accuracy import Result, expected, seeded
from tests.attention.calls import Call, inputs_of
from tests.attention.rounding import definite, measure, problem_of
from tests.grid import Inputs
from tests.running import ROOT

DRAWS, MANY_DRAWS = 8, 64
# Documents make one row of a batch to these, and tiles of V are read across its rows' ends: 0 * NaN is NaN.
PACKED = ("flash3", "flash4")


class Fault(AssertionError):
    """`kind` tells one fault from another: "dq", "modified", "RuntimeError: ..."."""

    def __init__(self, kind: str, message: str):
        self.kind = kind
        super().__init__(f"{kind}: {message}")


def check(attention: Attention, call: Call, device: str) -> str | None:
    """None where the call ran and agrees, else the first line of the refusal; raises Fault."""
    inputs = inputs_of(call, device)
    try:
        got = _run(attention, call, inputs)
    except UnsupportedAttention as refusal:
        if not refusal.reasons or attention.name not in str(refusal):
            raise Fault("refusal", f"without a reason or a name: {refusal}") from refusal
        return refusal.reasons[0]
    except Fault:
        raise
    except Exception as error:
        if isinstance(error, ValueError) and str(error) and _ours(error):
            return str(error).split("\n")[0]
        raise Fault(summary(error), _causes(error)) from error
    asked = AttentionCall.of(inputs.q, inputs.k, inputs.v, AttentionOptions(**inputs.options))
    if call.mode == "grad" and (reasons := attention.unsupported_reasons(asked)):
        raise Fault("ran", f"though it declares {reasons}")
    if inputs.q.numel() == 0 or inputs.k.numel() == 0:
        if any(x.isnan().any() or x[x.isfinite()].any() for x in got.values()):
            raise Fault("empty", "without queries or keys all is 0, and lse -inf")
    elif call.dropout_p and not attention.resolve(asked).uses_our_dropout_mask:
        if not all(x.isfinite().all() for name, x in got.items() if name != "lse") and call.tame:
            raise Fault("dropout", "a library's own dropout gave NaN or infinities")
    elif call.poison:
        _check_poisoned(attention, call, device, inputs, got)
    else:
        _judge(attention, call, device, inputs, got)
    return None


def _ours(error: BaseException) -> bool:
    """Raised by attention/ or ops/, not by what they call."""
    *_, (frame, _) = traceback.walk_tb(error.__traceback__)
    file = Path(frame.f_code.co_filename)
    return any(file.is_relative_to(ROOT / part) for part in ("attention", "ops"))


def _causes(error: BaseException | None) -> str:
    """Its words and those of what it came from: a compiler's last error may say nothing itself."""
    words = []
    while error is not None:
        words.append(f"{type(error).__name__}: {error}"[:700])
        error = error.__cause__ or error.__context__
    return "\nfrom ".join(words)


def summary(error: BaseException) -> str:
    """The type and the first words, without numbers: the same for the same fault."""
    words = (str(error).strip() or "no message").split("\n")[0]
    return f"{type(error).__name__}: {re.sub(r'[0-9.]+', '#', words)[:100]}"


def _run(attention: Attention, call: Call, inputs: Inputs) -> Result:
    """out, lse where asked for and the gradients asked for; checks all that needs no reference."""
    given = {"q": inputs.q, "k": inputs.k, "v": inputs.v, "dout": inputs.dout}
    options = inputs.options
    given |= {name: x for name, x in options.items() if isinstance(x, Tensor)}
    if isinstance(options["document_ids"], tuple):
        given |= dict(zip(("q_ids", "k_ids"), options["document_ids"], strict=True))
    before = {name: _memory(x).clone() for name, x in given.items()}
    leaves = {name: x for name, x in given.items() if x.requires_grad}
    mode = {"grad": nullcontext, "no_grad": torch.no_grad, "inference": torch.inference_mode}[call.mode]

    def once() -> Result:
        with seeded(inputs.q.device) if call.dropout_p else nullcontext(), mode():
            result = attention(inputs.q, inputs.k, inputs.v, **options)
            got = dict(zip(("out", "lse"), result, strict=True)) if call.lse else {"out": result}
            _check_outputs(call, inputs, got, bool(leaves))
            if leaves and call.mode == "grad":
                # As a training step does: what nothing depends on has a gradient of zero, not none.
                grads = torch.autograd.grad(got["out"], list(leaves.values()), inputs.dout)
                for (name, x), grad in zip(leaves.items(), grads, strict=True):
                    if grad.shape != x.shape or grad.dtype != x.dtype:
                        raise Fault(f"d{name}", f"is {grad.dtype} {grad.shape}; needs {x.dtype} {x.shape}")
                    got[f"d{name}"] = grad
        return {name: x.detach() for name, x in got.items()}

    got = once()
    for name, x in given.items():
        if not torch.equal(_memory(x), before[name]):
            raise Fault("modified", f"{name}, or memory between its elements, was written to")
    if attention.capabilities.deterministic and call.seed % 8 == 0:
        again = once()
        for name, x in got.items():
            if not torch.equal(_memory(x.contiguous()), _memory(again[name].contiguous())):
                raise Fault(f"{name} differs", "from that of the same call, though declared deterministic")
    return got


def _memory(x: Tensor) -> Tensor:
    """All bytes of a tensor's storage, those between its elements too."""
    return torch.empty(0, dtype=torch.uint8, device=x.device).set_(x.untyped_storage())


def _check_outputs(call: Call, inputs: Inputs, got: dict[str, Tensor], wanted: bool) -> None:
    q, out = inputs.q, got["out"]
    needs = {"out": (q.shape, q.dtype), "lse": (q.shape[:3], torch.promote_types(q.dtype, torch.float32))}
    for name, x in got.items():
        if (x.shape, x.dtype) != needs[name] or x.device != q.device:
            raise Fault(name, f"is {x.dtype} {tuple(x.shape)} on {x.device}; needs {needs[name]}")
    if out.numel() and out.shape[3] > 1 and out.stride(3) != 1:
        raise Fault("strides", f"out has strides {out.stride()}; no implementation takes it as an input")
    if "lse" in got and got["lse"].requires_grad:
        raise Fault("lse", "requires a gradient, though it has none")
    if out.requires_grad != (wanted and call.mode == "grad"):
        raise Fault("out", f"requires_grad is {out.requires_grad}")


def _judge(attention: Attention, call: Call, device: str, inputs: Inputs, got: Result) -> None:
    operand_dtype = attention.declaration.operand_dtype
    draws = [measure(call, inputs, got, operand_dtype)]
    wrong, little = _exceeding(draws)
    for enough in (DRAWS, MANY_DRAWS):
        again = little or (enough == DRAWS and all(error < torch.inf for error, _ in wrong.values()))
        if not wrong or call.poison or not again:
            break
        for draw in range(len(draws), enough):
            inputs = inputs_of(call, device, draw)
            draws.append(measure(call, inputs, _run(attention, call, inputs), operand_dtype))
        wrong, little = _exceeding(draws)
    if (
        wrong and little and call.poison
    ):  # of few rows: of all, and over many draws, they are judged without it
        call = replace(call, poison="")
        inputs = inputs_of(call, device)
        return _judge(attention, call, device, inputs, _run(attention, call, inputs))
    if wrong:
        said = ", ".join(f"{name} {error:.3g} of {most:.3g} allowed" for name, (error, most) in wrong.items())
        raise Fault(" ".join(wrong) + " by less than twice" * little, f"errors: {said}")


def _exceeding(draws: list[dict[str, tuple[float, float]]]) -> tuple[dict[str, tuple[float, float]], bool]:
    """(the largest error, the most allowed) of the tensors that exceed it over all draws; and whether they do
    by less than twice. (Not of the lse: an error of all its rows would hide in the largest of many draws.)"""
    wrong = {}
    for name in draws[0]:
        if all(name in draw for draw in draws):
            error, most = (max(draw[name][side] for draw in draws) for side in (0, 1))
            if not error <= most:
                wrong[name] = error, most
    return wrong, "lse" not in wrong and all(error <= 2 * most for error, most in wrong.values())


def _check_poisoned(attention: Attention, call: Call, device: str, inputs: Inputs, got: Result) -> None:
    """One NaN or infinity in q, k or v reaches the rows that see it, and nothing of other heads and rows of
    the batch. Other rows of its head may have it too: 0 * NaN is NaN, and whether hidden keys are multiplied
    with weights of 0 is the implementation's choice."""
    options = {name: x for name, x in inputs.options.items() if name not in ("dropout_p", "return_lse")}
    q, k, v = definite(inputs.q, inputs.k, inputs.v, options)
    group = q.shape[1] // k.shape[1]
    bad_q, bad_k = ~q.isfinite().all(-1), ~(k.isfinite() & v.isfinite()).all(-1)  # (B, Hq, Tq), (B, Hkv, Tk)
    marked = [x.masked_fill(bad[..., None], torch.nan) for x, bad in ((q, bad_q), (k, bad_k))]
    sees = (
        attention_scores(*marked, AttentionOptions(**options | {"softcap": None})).isnan().any(-1)
    )  # (B, Hq, Tq)
    finite = got["out"].isfinite().all(-1)
    if call.poison[:3] == "nan" and (sees & finite).any():
        raise Fault("poison", f"{call.poison} does not reach {int((sees & finite).sum())} rows that see it")
    touched = bad_k.any(-1) | bad_q.any(-1).unflatten(1, (-1, group)).any(-1)  # (B, Hkv)
    if call.documents and attention.name in PACKED:
        touched = touched.any(0, keepdim=True).expand(touched.shape)
    in_heads = touched.repeat_interleave(group, 1)[..., None]  # (B, Hq, 1)
    free = sees | (in_heads & ~finite)
    clean = replace(inputs, **{name: getattr(inputs, name).detach().nan_to_num(0, 0, 0) for name in "qkv"})
    reference, _ = expected(problem_of(call, clean), 2**62)
    exempt = {"out": free[..., None], "lse": free, "dq": (free | in_heads)[..., None]}
    exempt |= dict.fromkeys(("dk", "dv"), touched[..., None, None])
    kept = {}
    for name, x in got.items():
        if name in exempt:
            kept[name] = torch.where(exempt[name], reference[name].to(x.dtype), x)
    _judge(attention, call, device, clean, kept)
