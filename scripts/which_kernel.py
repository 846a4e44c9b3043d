"""Show which kernels an attention implementation runs for a call, and whether they are the expected ones:

    python scripts/which_kernel.py attention=sdpa_cudnn batch=2 heads=16 seq_len=1024 head_dim=64 dtype=bf16
    python scripts/which_kernel.py attention=auto pass=decode seq_len=4096 kv_heads=8 features=kv_lengths

Keys and their defaults: attention=auto, batch=2, heads=16, kv_heads=heads, seq_len=1024 (for pass=decode:
keys in the cache), head_dim=64, causal=true, pass=both (forward, backward, both, decode),
dtype=bf16 (or fp16, fp32; on a CPU fp32), and features=, any of window, softcap, alibi, bias, bias_grad,
document_ids, kv_lengths, block_mask, relative_bias and dropout, joined by commas. attention.*=... sets an
option of the implementation. Exit code 1: a kernel ran that the implementation does not declare, or a key or
value is wrong; 2: the call was refused or had too little memory, for the reasons printed.
"""

from __future__ import annotations

import sys
from typing import Any

if __name__ == "__main__" and not __package__:  # python scripts/<command>.py: see there
    import _checkout  # noqa: F401


from conf import renames
from conf.values import UserError

USUAL = {
    "attention": "auto",
    "batch": "2",
    "heads": "16",
    "kv_heads": "",
    "seq_len": "1024",
    "head_dim": "64",
    "causal": "true",
    "pass": "both",
    "dtype": "",
    "features": "",
}
FEATURES = ("window", "softcap", "alibi", "bias", "bias_grad", "document_ids", "kv_lengths", "block_mask")
FEATURES += ("relative_bias", "dropout")


def parse(arguments: list[str]) -> tuple[dict[str, str], list[str]]:
    """The keys with their values, and the overrides of the implementation's options. Raises UserError."""
    given, overrides = dict(USUAL), []
    for argument in arguments:
        key, equals, value = argument.partition("=")
        if key.startswith("attention."):
            overrides.append(argument)
        elif key not in USUAL or not equals:
            raise UserError(f"{argument}: write key=value with a key of {', '.join(USUAL)}, or attention.*.")
        else:
            given[key] = value
    return given, overrides


def whole(given: dict[str, str], key: str) -> int:
    text = given[key]
    if not text.isascii() or not text.isdigit() or int(text) < 1:
        raise UserError(f"{key}={text}: it needs a whole number, at least 1.")
    return int(text)


def one_of(given: dict[str, str], key: str, known: Any) -> str:
    if given[key] not in known:
        raise UserError(f"{key}={given[key]}: choose {', '.join(known)}.")
    return given[key]


def extras(names: list[str], q: Any, k: Any) -> dict[str, Any]:
    """Options of `Attention.forward` that ask for the features named."""
    import torch

    from ops.options import MASK_BLOCK

    (batch, heads, tq, _), tk, device = q.shape, k.shape[2], q.device
    made: dict[str, Any] = {}
    if "window" in names:
        made["window"] = (max(1, tk // 4), 0)
    if "softcap" in names:
        made["softcap"] = 30.0
    if "alibi" in names:
        made["alibi_slopes"] = 2.0 ** (-8 * (torch.arange(heads, device=device) + 1) / heads)
    if {"bias", "bias_grad"} & set(names):
        bias = torch.randn(heads, tq, tk, device=device, dtype=q.dtype)
        made["bias"] = bias.requires_grad_("bias_grad" in names)
    if "document_ids" in names:  # two documents; the queries are the last of the keys
        ids = (torch.arange(tk, device=device) >= tk // 2).int().expand(batch, tk)
        made["document_ids"] = (ids[:, tk - tq :], ids)
    if "kv_lengths" in names:
        made["kv_lengths"] = torch.full((batch,), tk, dtype=torch.int32, device=device)
    if "block_mask" in names:  # of square tiles those by the diagonal, the queries being the last of the keys
        rows, columns = (torch.arange(-(-n // MASK_BLOCK), device=device) for n in (tq, tk))
        apart = rows.view(-1, 1) + len(columns) - len(rows) - columns
        made["block_mask"] = (apart.abs() < 2)[None, None]
    if "relative_bias" in names:  # as T5's, learned
        made["relative_bias"] = torch.randn(heads, 257, device=device).requires_grad_()
    if "dropout" in names:
        made["dropout_p"] = 0.1
    return made


def build(name: str, overrides: list[str]) -> Any:
    from conf.compose import build_attention, composed

    return build_attention(composed([f"attention={name}", *overrides]))


def report(field: Any, asked: str, attention: Any, passed: str) -> int:
    """Prints what ran; the exit code."""
    import torch

    call, cuda = field.call(passed), field.device == "cuda"
    print(f"{torch.cuda.get_device_name() if cuda else 'CPU'}: {call}")
    if hasattr(attention, "choice"):
        print("{} chose {}: {}".format(asked, *attention.choice(call)))
    found, said = field.profiled(asked, attention, passed)
    total = sum(kernel.us for kernel in found) or 1.0
    what = "kernel" if cuda else "operator (a CPU has no kernels)"
    print(f"\n{'share':>6} {'us':>10} {'launches':>8}  {what}")
    for kernel in found:
        print(f"{100 * kernel.us / total:>5.1f}% {kernel.us:>10.1f} {kernel.count:>8}  {kernel.name}")
    print(f"\n{said.text}")
    return 0 if said.ok else 1


def main() -> int:
    if {"-h", "--help"} & set(sys.argv[1:]):
        print(__doc__)
        return 0
    given, overrides = parse(sys.argv[1:])
    import torch

    from model.training.out_of_memory import out_of_memory_told
    from scripts.measure.instruments.bench_points import DTYPES, PASSES, Shape
    from scripts.measure.instruments.contestants import Field
    from scripts.measure.rows import choices

    cuda = torch.cuda.is_available()
    given["kv_heads"] = given["kv_heads"] or given["heads"]
    given["dtype"] = given["dtype"] or ("bf16" if cuda else "fp32")
    names = renames.typed(filter(None, given["features"].split(",")))
    if unknown := [name for name in names if name not in FEATURES]:
        raise UserError(f"features={','.join(unknown)}: choose of {', '.join(FEATURES)}.")
    passed, asked = one_of(given, "pass", PASSES), one_of(given, "attention", choices("attention"))
    sizes = [whole(given, key) for key in ("batch", "heads", "kv_heads", "seq_len", "head_dim")]
    if sizes[1] % sizes[2]:
        raise UserError(f"heads={sizes[1]} needs to be a multiple of kv_heads={sizes[2]}.")
    causal = one_of(given, "causal", ("true", "false")) == "true"
    shape = Shape(*sizes, causal, one_of(given, "dtype", DTYPES), decode=passed == "decode")
    attention = build(asked, overrides)
    try:
        with out_of_memory_told("give a smaller seq_len=, batch= or heads="):
            field = Field(shape, "cuda" if cuda else "cpu")
            field.options |= extras(names, *field.sets[0][:2])
            attention.require(field.call(passed))
            return report(field, asked, attention, passed)
    except UserError as refusal:
        print(f"error: {refusal}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    from conf.command import user_errors

    raise SystemExit(user_errors(main)())
