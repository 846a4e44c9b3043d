"""Calls of the attention contract drawn at random, for the property test and the fuzzer (tests/fuzz.py).

What kernels are specialised for is drawn by `kind_of_call`, and what is data to them by `vary`, so that many
calls share the compilation of one kind. Both ask `pick` for one of a sequence, which is hypothesis's
`draw(st.sampled_from(...))` or `random.Random.choice`; the simplest comes first.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor

from attention.base import Attention, AttentionCall
from tests.grid import EXPANDED, LAYOUTS, Inputs, laid_out

Pick = Callable[[Sequence[Any]], Any]
FAR = (2**31 - 1, 2**31, 2**40)  # window bounds that 32 bits hold just so, and do not
HUGE = 1e4
MAGNITUDES = ((1.0,) * 3,) * 5 + ((8.0, 8.0, 1.0), (1e-4,) * 3, (HUGE, 1.0, 1.0), (1.0, 1.0, HUGE))
SIZES = (1, 2, 3, 5, 16, 17, 31, 63, 64, 65, 127, 128, 129, 200, 255, 256, 257, 300)
POISONS = ("nan q", "nan k", "nan v", "inf q", "inf k", "inf v")


@dataclass(frozen=True)
class Call:
    """One call in plain values: its repr makes it again."""

    attention: str
    tq: int
    tk: int
    dtype: str = "float32"
    head_dim: int = 64
    batch: int = 1
    heads: int = 1
    kv_heads: int = 1
    causal: bool = True
    scale: float | None = None
    window: tuple[int | None, int | None] | None = None
    softcap: float | None = None
    alibi: str = ""  # dtype of the slopes
    slope: float = 0.5  # of the first head
    bias: tuple[int, ...] | None = None  # of the last dimensions of (B, Hq, Tq, Tk), 0 for a size of 1
    bias_dtype: str = "float32"
    bias_layout: str = "contiguous"
    bias_masks: str = ""  # -inf: "keys" here and there, "rows" of them
    documents: int = 0
    documents_return: bool = False  # ids in any order, A B A
    lengths: tuple[int, ...] | None = None  # kv_lengths
    dropout_p: float = 0.0
    lse: bool = False
    mode: str = "grad"  # no_grad, inference
    needs_grad: str = "qkvb"  # of these which require a gradient, b the bias
    layouts: tuple[str, str, str, str] = ("contiguous",) * 4  # of q, k, v, dout
    magnitudes: tuple[float, float, float] = (1.0, 1.0, 1.0)  # of q, k and v
    equal: str = ""  # of q, k, v those whose tokens are all alike
    poison: str = ""
    seed: int = 0

    @classmethod
    def parse(cls, text: str) -> Call:
        """From the repr of one. Raises ValueError for anything else."""
        node = ast.parse(text.strip(), mode="eval").body
        if not (isinstance(node, ast.Call) and ast.unparse(node.func) == "Call"):
            raise ValueError(f"got {text!r}; it needs Call(...), as the fuzzer prints it")
        given = [ast.literal_eval(x) for x in node.args]
        return cls(*given, **{x.arg: ast.literal_eval(x.value) for x in node.keywords})

    def __repr__(self) -> str:
        said = [(f.name, getattr(self, f.name), f.default) for f in fields(self)]
        return f"Call({', '.join(f'{name}={x!r}' for name, x, default in said if x != default)})"

    @property
    def grads(self) -> bool:
        return self.mode == "grad" and bool(
            set(self.needs_grad) & set("qkv" if self.bias is None else "qkvb")
        )

    @property
    def tame(self) -> bool:
        """Random values of ordinary size, no sums that cancel: what the criterion is made for as it is."""
        alike = self.equal or "one_token" in self.layouts[:3] or (self.bias and not self.bias[-1])
        return max(self.magnitudes) < HUGE and not alike


def kind_of_call(pick: Pick, attention: Attention, device: str, able: bool) -> Call:
    """What kernels are specialised for; with `able` what `attention` can run, if 40 tries find any."""
    for _ in range(40):
        call = _kind(pick, attention.name)
        if not able or not attention.unsupported_reasons(_described(call, device)):
            break
    return call


def usable(attention: Attention, device: str) -> bool:
    """Whether it runs anything at all here."""
    simple = (Call(attention.name, 128, 128, dtype, mode="no_grad") for dtype in ("float32", "float16"))
    return any(not attention.unsupported_reasons(_described(call, device)) for call in simple)


def _described(call: Call, device: str) -> AttentionCall:
    on = {
        "window": call.window is not None,
        "softcap": call.softcap is not None,
        "alibi": bool(call.alibi),
        "bias": call.bias is not None,
        "bias_grad": call.bias is not None and call.grads and "b" in call.needs_grad,
        "document_ids": call.documents > 0,
        "kv_lengths": call.lengths is not None,
        "dropout": call.dropout_p > 0,
        "lse": call.lse,
    }
    arch = torch.cuda.get_device_capability() if device == "cuda" else None
    shape = (call.batch, call.heads, call.kv_heads, call.tq, call.tk, call.head_dim)
    features = frozenset(name for name, is_on in on.items() if is_on)
    dtype = getattr(torch, call.dtype)
    return AttentionCall("call", device, arch, dtype, *shape, call.causal, features, call.grads)


def _kind(pick: Pick, name: str) -> Call:
    def sometimes(value: Any, other: Any = None) -> Any:
        return value if pick((False, False, False, True)) else other

    def layout(*more: str) -> str:
        plain = ("contiguous", "transposed")
        return pick((*plain, *plain, *plain, *LAYOUTS, "one_batch", "one_head", "one_token", *more))

    kv_heads, group = pick((1, 2, 3)), pick((1, 1, 2, 4, 7))
    tq, tk = pick(((2, 2), (2, 2), (2, 3), (2, 3), (1, 3)))  # a square, a rectangle, one query
    bias = sometimes(tuple(pick((1, 0)) for _ in range(pick((4, 4, 3, 2, 1, 0)))))
    low = ("bfloat16", "float16") * 2
    return Call(
        name,
        tq,
        tk,
        dtype=pick(("float32", *low, "float64")),
        head_dim=pick((64, 64, 32, 128, 128, 16, 96, 80, 40, 256, 8, 59, 1, 192, 111, 264)),
        batch=pick((1, 2, 3)),
        heads=kv_heads * group,
        kv_heads=kv_heads,
        causal=pick((True, True, False)),
        scale=pick((None,) * 6 + (0.3, 1.0, 0.0, -0.2, 1e-4)),
        window=sometimes(pick(((0, 0), (0, -1), (-1, 0), (0, None)))),
        softcap=sometimes(pick((1.5, 30.0, 0.1, 1e6))),
        alibi=sometimes(pick(("float32", "float32", "bfloat16", "float64")), ""),
        bias=bias,
        bias_dtype=pick(("float32", "bfloat16", "float16")),
        bias_layout=pick(("contiguous", "last_strided", "sliced", *EXPANDED)),
        bias_masks=pick(("", "", "keys", "rows")),
        documents=sometimes(1, 0),
        lengths=sometimes((0,)),
        dropout_p=sometimes(0.1, 0.0),
        lse=pick((False, True)),
        mode=pick(("grad",) * 6 + ("no_grad", "inference")),
        needs_grad=pick(("qkvb",) * 4 + ("qkv", "q", "k", "v", "kv", "qb", "b", "")),
        layouts=(layout(), layout(), layout(), layout("one", "last_strided")),
    )


def vary(pick: Pick, kind: Call, most: int) -> Call:
    """A call of this kind with other sizes (at most `most` tokens), values and limits."""
    sizes = [n for n in SIZES if n <= most]

    def tokens() -> int:
        return pick((pick(sizes), pick(range(1, most + 1)), pick(range(1, most + 1))))

    tk = tq = tokens()
    if most >= 300 and kind.batch * kind.heads <= 8 and pick((False,) * 99 + (True,)):
        tk = tq = pick(range(1000, 1101))
    if kind.tq != kind.tk:
        tq = 1 if kind.tq == 1 else tokens()
    window = kind.window
    if window is not None:
        bounds = (0, 1, 2, tk // 3, tk, tk + 5, *FAR)
        window = tuple(pick(bounds) if side == 0 else side for side in window)
    lengths = kind.lengths
    if lengths is not None:
        lengths = tuple(pick((tk, 0, 1, tk // 2, tk - 1, pick(range(tk + 1)))) for _ in range(kind.batch))
    call = replace(
        kind,
        tq=tq,
        tk=tk,
        window=window,
        lengths=lengths,
        documents=pick((1, 2, 3, 8)) if kind.documents else 0,
        documents_return=pick((False, False, False, True)) if kind.documents else False,
        slope=pick((0.5, 1.0, 0.0, 8.0, -0.25)) if kind.alibi else 0.5,
        dropout_p=pick((0.1, 0.5, 0.9, 1e-12)) if kind.dropout_p else 0.0,
        magnitudes=pick(MAGNITUDES),
        equal=pick(("", "", "", "", "q", "k", "v", "kv", "qkv")),
        poison=pick(("",) * 30 + POISONS),
        seed=pick(range(1000)),
    )
    if call.poison:
        call = replace(call, magnitudes=(1.0,) * 3, dropout_p=0.0)
    return pick((call,) * 250 + tuple(replace(call, **empty) for empty in EMPTY))


EMPTY = (
    {"batch": 0, "lengths": None},
    {"tq": 0},
    {"tk": 0, "lengths": None},
    {"heads": 0},
    {"kv_heads": 0},
    {"head_dim": 0},
)
EMPTY += ({"layouts": ("last_strided",) + ("contiguous",) * 3}, {"kv_heads": 5})


def inputs_of(call: Call, device: str, draw: int = 0) -> Inputs:
    """The tensors of a call, made on the CPU; another `draw` gives other values."""
    g = torch.Generator().manual_seed(call.seed + 1000 * draw)
    dtype, (b, h, tq, tk) = getattr(torch, call.dtype), (call.batch, call.heads, call.tq, call.tk)

    def tensor(name: str, heads: int, tokens: int, magnitude: float, layout: str) -> Tensor:
        x = torch.randn(b, heads, tokens, call.head_dim, generator=g) * magnitude
        if name in call.equal:
            x = x[:, :, :1].expand(x.shape)
        if call.poison[4:] == name and x.numel():
            x = x.contiguous()
            x.view(-1)[int(torch.randint(0, x.numel(), (), generator=g))] = float(call.poison[:3])
        return x.to(device, dtype)

    kv = call.kv_heads
    shapes = (("q", h, tq), ("k", kv, tk), ("v", kv, tk), ("dout", h, tq))
    made = [
        tensor(name, heads, tokens, size, layout)
        for (name, heads, tokens), size, layout in zip(
            shapes, (*call.magnitudes, 1.0), call.layouts, strict=True
        )
    ]
    options = _options(call, g, device)
    if (lengths := options["kv_lengths"]) is not None:
        beyond = torch.arange(tk, device=device).view(1, 1, tk, 1) >= lengths.view(-1, 1, 1, 1)
        for n in (1, 2):
            if call.layouts[n] not in EXPANDED:
                made[n] = made[n].masked_fill(beyond, torch.nan)
    q, k, v, dout = (laid_out(x, layout) for x, layout in zip(made, call.layouts, strict=True))
    for name, x in zip("qkv", (q, k, v), strict=True):
        x.requires_grad_(name in call.needs_grad)
    return Inputs(q, k, v, dout, options)


def _options(call: Call, g: torch.Generator, device: str) -> dict[str, Any]:
    b, h, tq, tk = call.batch, call.heads, call.tq, call.tk
    options: dict[str, Any] = {"causal": call.causal, "scale": call.scale, "window": call.window}
    options |= {"softcap": call.softcap, "dropout_p": call.dropout_p, "return_lse": call.lse}
    options |= dict.fromkeys(("alibi_slopes", "bias", "document_ids", "kv_lengths"))
    if call.alibi:
        slopes = call.slope * 0.7 ** torch.arange(h)
        options["alibi_slopes"] = slopes.repeat_interleave(2).to(device, getattr(torch, call.alibi))[::2]
    if call.bias is not None:
        options["bias"] = _bias(call, g, device)
    if call.documents:
        drawn = torch.randint(-1, call.documents - 1, (2, b, max(tq, tk)), generator=g, dtype=torch.int32)
        if not call.documents_return:  # in order, and on one diagonal
            drawn = drawn[:1].sort().values.expand(drawn.shape)
        q_ids, k_ids = (ids[:, max(tq, tk) - n :].to(device) for ids, n in zip(drawn, (tq, tk), strict=True))
        options["document_ids"] = k_ids if tq == tk else (q_ids, k_ids)
    if call.lengths is not None:
        options["kv_lengths"] = torch.tensor(call.lengths).int().repeat_interleave(2).to(device)[::2]
    return options


def _bias(call: Call, g: torch.Generator, device: str) -> Tensor:
    full = (call.batch, call.heads, call.tq, call.tk)[4 - len(call.bias) :]
    shape = tuple(n if on else 1 for n, on in zip(full, call.bias, strict=True))
    bias = torch.randn(shape, generator=g)
    if call.bias_masks == "keys":
        bias = bias.masked_fill(torch.rand(shape, generator=g) < 0.3, -torch.inf)
    elif call.bias_masks == "rows" and bias.ndim:
        bias = bias.masked_fill(torch.rand((*shape[:-1], 1), generator=g) < 0.3, -torch.inf)
    bias = bias.to(device, getattr(torch, call.bias_dtype))
    if bias.ndim == 4 and bias.numel():
        bias = laid_out(bias, call.bias_layout)
    return bias.detach().requires_grad_("b" in call.needs_grad)
