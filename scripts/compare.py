"""Two implementations give different losses: is the difference rounding error, or a bug, and in which one?

    python scripts/compare.py attention=triton against=sdpa batch=2 heads=12 seq_len=1024 dtype=bf16
    python scripts/compare.py ckpt=last text="def main():" attention=triton against=naive

Both implementations compute the same call, forward and backward, on random tensors or on the activations of
a trained model reading a text. Each is compared with the formula in fp64. The ratio is its largest error
divided by a limit, which follows from the error of the plain formula in the same dtype (scripts/accuracy.py).
Up to 1 the error is rounding error; above 1 it is a bug, and the worst entry is printed, with a hint from the
pattern of wrong entries. Each call runs twice, to show whether its results are bitwise reproducible.

Keys and their defaults: attention=auto, against=naive; device=auto, dtype=auto (bf16 on a GPU that supports
it, else fp32), seed=0; for random tensors batch=2, heads=4, kv_heads=heads, seq_len=512, head_dim=64,
causal=true, window (keys to the left), softcap, alibi=false, document_ids (documents per row).
With ckpt= (as for scripts/generate.py), the shapes are those of the model, and text= is cut to its context.
Exit code 0: rounding error only; 1: a bug; 2: the comparison was not possible, for the reason printed.
"""

from __future__ import annotations

import math
import sys
from typing import TYPE_CHECKING, Any

if __name__ == "__main__" and not __package__:  # python scripts/<command>.py: see there
    import _checkout  # noqa: F401


from conf import renames
from conf.values import UserError

if TYPE_CHECKING:
    from torch import Tensor

    from scripts.accuracy import Problem
    from scripts.measure.instruments.diagnosis import Finding

USUAL: dict[str, Any] = {
    "attention": "auto",
    "against": "naive",
    "device": "auto",
    "dtype": "auto",
    "seed": 0,
    "batch": 2,
    "heads": 4,
    "kv_heads": None,
    "seq_len": 512,
    "head_dim": 64,
    "causal": True,
    "window": None,
    "softcap": None,
    "alibi": False,
    "document_ids": None,
    "ckpt": None,
    "runs_dir": None,
    "text": None,
}
WHOLE = ("seed", "batch", "heads", "kv_heads", "seq_len", "head_dim", "window", "document_ids")
OPTIONS = ("causal", "window", "softcap", "alibi", "document_ids")
ANY_MODE = ("attention", "against", "device", "dtype", "seed")


def parse(arguments: list[str]) -> dict[str, Any]:
    """The keys as values. Raises UserError for an unknown key, a wrong value, or keys of both kinds."""
    given = dict(USUAL)
    for argument in renames.typed(arguments):
        key, equals, text = argument.partition("=")
        if key not in USUAL or not equals:
            raise UserError(f"{argument}: write key=value, where key is one of {', '.join(USUAL)}.")
        given[key] = text
        if key in WHOLE:
            least = 0 if key in ("seed", "window") else 1
            if not text.isascii() or not text.isdigit() or not least <= int(text) < 2**63:
                raise UserError(f"{key}={text}: it needs a whole number, at least {least}, below 2^63.")
            given[key] = int(text)
        elif key in ("causal", "alibi"):
            if text not in ("true", "false"):
                raise UserError(f"{key}={text}: it needs true or false.")
            given[key] = text == "true"
        elif key == "softcap":
            try:
                given[key] = float(text)
            except ValueError:
                raise UserError(f"softcap={text}: it needs a number.") from None
            if not 0 < given[key] < math.inf:
                raise UserError(f"softcap={text}: it needs a number above 0.")
    if given["heads"] % (given["kv_heads"] or 1):
        raise UserError(
            f"heads={given['heads']} kv_heads={given['kv_heads']}: heads has to be a multiple of kv_heads."
        )
    if (given["document_ids"] or 0) > given["seq_len"]:
        raise UserError(
            f"document_ids={given['document_ids']} seq_len={given['seq_len']}: a document has at least a "
            "token; give at most seq_len."
        )
    if (given["ckpt"] is None) != (given["text"] is None):
        raise UserError("ckpt= and text= go together: the model, and the text it reads.")
    shapes = [a for a in arguments if a.split("=")[0] not in (*ANY_MODE, "ckpt", "runs_dir", "text")]
    if given["ckpt"] is not None and shapes:
        raise UserError(f"{' '.join(shapes)}: with ckpt= the shapes are those of the model; leave this out.")
    return given


def random_problem(given: dict[str, Any], device: Any, dtype: Any) -> Problem:
    """The call that the keys describe, on normal random tensors."""
    import torch
    import torch.nn.functional as F

    from scripts.accuracy import Problem

    g = torch.Generator().manual_seed(given["seed"])
    batch, heads, tokens = given["batch"], given["heads"], given["seq_len"]
    kv_heads = given["kv_heads"] or heads

    def tensor(n: int) -> Tensor:
        return torch.randn(batch, n, tokens, given["head_dim"], generator=g).to(device, dtype)

    options: dict[str, Any] = {"causal": given["causal"], "softcap": given["softcap"]}
    if given["window"] is not None:
        options["window"] = (given["window"], 0 if given["causal"] else given["window"])
    if given["alibi"]:
        options["alibi_slopes"] = 2.0 ** (-8 * (torch.arange(heads, device=device) + 1) / heads)
    if given["document_ids"]:
        drawn = torch.rand(batch, tokens - 1, generator=g).argsort(1)  # behind which tokens a document ends
        ids = F.pad((drawn < given["document_ids"] - 1).cumsum(1), (1, 0))
        options["document_ids"] = ids.to(device, torch.int32)
    q, k, v, dout = tensor(heads), tensor(kv_heads), tensor(kv_heads), tensor(heads)
    return Problem(q, k, v, {name: x for name, x in options.items() if x is not None}, dout)


def table(findings: list[Finding]) -> Any:
    from rich.table import Table

    out = Table(box=None, pad_edge=False)
    for column in ("", "", "max error", "rms error", "ratio", "two calls"):
        justify = "right" if "error" in column or column == "ratio" else "left"
        out.add_column(column, justify=justify, no_wrap=True)
    for tensor in dict.fromkeys(finding.tensor for finding in findings):
        rows = [finding.row() for finding in findings if finding.tensor == tensor]
        for i, row in enumerate(rows):
            out.add_row(tensor if i == 0 else "", *row, end_section=i == len(rows) - 1)
    return out


def run(arguments: list[str]) -> bool:
    """Print the comparison of these words; True for a fault."""
    given = parse(arguments)
    from model.training.out_of_memory import out_of_memory_told

    remedy = (
        "give a shorter text=" if given["ckpt"] is not None else "give a smaller seq_len=, batch= or heads="
    )
    with out_of_memory_told(f"{remedy}, or implementations that do not store the scores, as naive does"):
        return compared(given)


def compared(given: dict[str, Any]) -> bool:
    """Print the comparison; True for a fault."""
    from omegaconf import OmegaConf
    from rich.console import Console

    from attention.base import AttentionCall, AttentionOptions
    from attention.checks import dtype_name
    from conf.compose import build_attention
    from scripts.generate import placement

    device, dtype = placement(given["device"], given["dtype"], "dtype")
    console = Console(highlight=False, soft_wrap=True)
    names = [given["attention"], given["against"]]
    if names[0] == names[1]:
        raise UserError(f"attention and against are both {names[0]}: name two implementations.")
    if given["ckpt"] is not None:
        from scripts.measure.instruments.compare_run import compare_run

        return compare_run(given, names, device, dtype, console)
    unnamed = OmegaConf.create({"attention": {"name": None}})
    attentions = [build_attention(unnamed, name) for name in names]
    problem = random_problem(given, device, dtype)
    for name, attention in zip(names, attentions, strict=True):
        if hasattr(attention, "choice"):
            chosen, why = attention.choice(
                AttentionCall.of(problem.q, problem.k, problem.v, AttentionOptions(**problem.options))
            )
            console.print(f"{name} -> {chosen} ({why})")
    asked = [f"{key}={given[key]}" for key in OPTIONS if given[key] not in (None, False)]
    shape = f"q {tuple(problem.q.shape)}, k and v {tuple(problem.k.shape)}, {dtype_name(dtype)}"
    console.print(", ".join([shape, *asked]) + "\n")
    from scripts.measure.instruments.diagnosis import MOST_SCORES, conclusion, examine

    findings = examine(names, attentions, problem, MOST_SCORES)
    console.print(table(findings))
    said, faulty = conclusion(names, findings)
    console.print("\n" + "\n".join(said))
    return faulty


def main() -> None:
    if {"-h", "--help"} & set(sys.argv[1:]):
        print(__doc__, end="")
        return
    from conf.command import user_errors

    try:
        faults = user_errors(run)(sys.argv[1:])
    except SystemExit as stop:  # 1 is a fault that was found
        raise SystemExit(2 if stop.code == 1 else stop.code) from None
    raise SystemExit(1 if faults else 0)


if __name__ == "__main__":
    main()
