"""Asked for and run: what PyTorch takes where one believes to have asked for a kernel. A part of the study
`numerics`.

The implementations of conf/attention are asked too: they run as asked or refuse. What shows the difference
is the profiler's list of kernels (kernels.py) and nothing else; `said` are the warnings that came.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from attention import registry
from attention.base import Attention
from scripts.measure.instruments.bench_points import DTYPES, Shape
from scripts.measure.instruments.contestants import Field
from scripts.measure.instruments.exactness import HEAD_DIM, Measurement, Setting
from scripts.measure.instruments.kernels import PLAIN, PLAIN_CPU, as_field, expected, family, profile

FLASH, EFFICIENT = SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION
CUDNN, MATH = SDPBackend.CUDNN_ATTENTION, SDPBackend.MATH
# The implementation that each backend stands for.
OF = {FLASH: "sdpa_flash", EFFICIENT: "sdpa_efficient", CUDNN: "sdpa_cudnn", MATH: "sdpa_math"}
ABOUT = "attention|sdp|kernel|backend"  # what a warning that says what runs would speak of
FLAG = "flash_attention_2"  # of transformers: what is said to give FlashAttention-3 on Hopper


@dataclass(frozen=True)
class Ask:
    """A call as people write it. `wants` is the implementation whose kernels its author has in mind, ""
    where the choice is left to PyTorch; `backends` those that sdpa_kernel() gets."""

    name: str
    wants: str
    backends: tuple[SDPBackend, ...] = ()
    dtype: str = ""  # that of the setting: fp16, on a CPU fp32
    head_dim: int = HEAD_DIM
    mask: bool = False
    dropout_p: float = 0.0
    layout: str = "contiguous"  # or "transposed", with the tokens innermost
    call: str = "sdpa"  # or another of CALLS

    @property
    def features(self) -> str:
        on = {"mask": self.mask, "dropout": self.dropout_p > 0, self.layout: self.layout != "contiguous"}
        return ",".join(name for name, used in on.items() if used)


ASKS = (
    Ask("SDPA", ""),
    Ask("SDPA", "", dtype="float32"),
    Ask("SDPA", "", dtype="float64"),
    Ask("SDPA", "", mask=True),
    Ask("SDPA", "", dropout_p=0.1),
    Ask("SDPA", "", head_dim=256),
    Ask("SDPA", "", head_dim=512),
    Ask("SDPA", "", layout="transposed"),
    *(Ask(f"sdpa_kernel({b.name})", OF[b], (b,)) for b in OF),
    Ask("sdpa_kernel(FLASH_ATTENTION)", "sdpa_flash", (FLASH,), dtype="float32"),
    Ask("sdpa_kernel(FLASH_ATTENTION)", "sdpa_flash", (FLASH,), mask=True),
    Ask("sdpa_kernel(FLASH_ATTENTION)", "sdpa_flash", (FLASH,), head_dim=512),
    Ask("sdpa_kernel(FLASH_ATTENTION)", "sdpa_flash", (FLASH,), dropout_p=0.1),
    Ask("sdpa_kernel([FLASH_ATTENTION, MATH])", "sdpa_flash", (FLASH, MATH)),
    Ask("sdpa_kernel([FLASH_ATTENTION, MATH])", "sdpa_flash", (FLASH, MATH), dtype="float32"),
    Ask("sdpa_kernel([FLASH_ATTENTION, MATH])", "sdpa_flash", (FLASH, MATH), mask=True),
    Ask("sdpa_kernel([FLASH_ATTENTION, MATH])", "sdpa_flash", (FLASH, MATH), dropout_p=0.1),
    Ask("sdpa_kernel([FLASH_ATTENTION, MATH])", "sdpa_flash", (FLASH, MATH), layout="transposed"),
    Ask("enable_flash_sdp(True)", "sdpa_flash"),
    Ask("enable_flash_sdp(True)", "sdpa_flash", mask=True),
    Ask("softmax(Q K^T) V", "naive", call="formula"),
    Ask("torch.compile of softmax(Q K^T) V", "naive", call="compiled"),
    Ask(f"GPT2Model({FLAG})", "flash2", call="transformers"),
)


def asked(setting: Setting) -> Iterator[Measurement]:
    """Every ask, then every implementation, forward and, where it has one, backward."""
    home = "float16" if setting.device == "cuda" else "float32"
    for ask in ASKS:
        dtype = ask.dtype or home
        more = {"head_dim": ask.head_dim, "features": ask.features, "wants": ask.wants, "causal": False}
        point = setting.point("asked", ask.name, "forward", dtype, **more)
        yield Measurement(point, partial(run, ask, setting, dtype))
    for name, attention in setting.attentions.items():
        passed = setting.passes(attention, home)
        point = setting.point("asked", name, passed, home, wants=name)
        yield Measurement(point, partial(implementation, setting, name, attention, passed, home))


def run(ask: Ask, setting: Setting, dtype: str) -> dict[str, Any]:
    """What an ask ran; a refusal of PyTorch's is a result too, `refused`."""
    q, k, v = tensors(ask, setting, dtype)
    call, always = CALLS[ask.call], torch.is_warn_always_enabled()
    with sdpa_kernel(list(ask.backends)) if ask.backends else nullcontext(), torch.no_grad():
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            torch.set_warn_always(True)  # some come once in a process
            try:
                call(ask, q, k, v)
            except (RuntimeError, ImportError) as error:
                if isinstance(error, torch.OutOfMemoryError):
                    raise
                return {"status": "unsupported", "reason": str(error).splitlines()[0]}
            finally:
                torch.set_warn_always(always)
        kernels = profile(partial(call, ask, q, k, v), setting.device)
    told = (str(each.message).split(" (Triggered internally")[0] for each in caught)
    said = list(dict.fromkeys(text for text in told if re.search(ABOUT, text, re.IGNORECASE)))
    names = [kernel.name for kernel in kernels]
    ran = list(dict.fromkeys(label for name in names if (label := family(name))))
    if ask.call == "transformers":  # a model's own products are no evidence against its attention
        ran = [label for label in ran if label not in (PLAIN, PLAIN_CPU)] or ran
    as_asked = set(ran) <= set(expected(registry.declaration(ask.wants))) and bool(ran) if ask.wants else None
    return {"status": "ok", "kernels": as_field(kernels), "ran": ran, "as_asked": as_asked, "said": said}


def tensors(ask: Ask, setting: Setting, dtype: str) -> list[Tensor]:
    g = torch.Generator(setting.device).manual_seed(0)
    shape = (setting.batch, setting.heads, setting.tokens, ask.head_dim)
    like = {"generator": g, "device": setting.device, "dtype": getattr(torch, dtype)}
    if ask.layout == "transposed":
        return [torch.randn(*shape[:2], shape[3], shape[2], **like).mT for _ in range(3)]
    return [torch.randn(shape, **like) for _ in range(3)]


def sdpa(ask: Ask, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """F.scaled_dot_product_attention; the mask is the triangle that is_causal would be."""
    mask = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool, device=q.device).tril() if ask.mask else None
    if ask.name.startswith("enable_flash_sdp"):
        torch.backends.cuda.enable_flash_sdp(True)  # as it is from the start: it does not force anything
    return F.scaled_dot_product_attention(q, k, v, mask, ask.dropout_p)


def formula(ask: Ask, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return plain(q, k, v)


def compiled(ask: Ask, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.compile(plain)(q, k, v)


def plain(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """softmax(Q K^T) V in one line."""
    return (q @ k.transpose(-2, -1) * q.shape[-1] ** -0.5).softmax(-1) @ v


def transformers(ask: Ask, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """A layer of Hugging Face's GPT-2 with the flag, over hidden states of q's numbers. Raises ImportError
    without the package that the flag asks for."""
    from transformers import GPT2Config, GPT2Model

    x = q.transpose(1, 2).flatten(2)  # (batch, tokens, heads * head_dim)
    sizes = {"n_layer": 1, "n_head": q.shape[1], "n_embd": x.shape[2], "n_positions": x.shape[1]}
    model = GPT2Model(GPT2Config(**sizes, attn_implementation=FLAG)).to(x.device, x.dtype)
    return model.eval()(inputs_embeds=x).last_hidden_state


CALLS: dict[str, Callable[..., Tensor]] = {"sdpa": sdpa, "formula": formula, "compiled": compiled}
CALLS |= {"transformers": transformers}


def implementation(
    setting: Setting, name: str, attention: Attention, passed: str, dtype: str
) -> dict[str, Any]:
    """What an implementation of conf/attention ran, causal; it raises where it refuses."""
    of = {long: short for short, long in DTYPES.items()}[dtype]
    heads = setting.heads
    field = Field(Shape(setting.batch, heads, heads, setting.tokens, HEAD_DIM, True, of), setting.device)
    attention.require(field.call(passed))
    kernels, said = field.profiled(name, attention, passed)
    ran = list(dict.fromkeys(label for kernel in kernels if (label := family(kernel.name))))
    return {
        "status": "ok",
        "kernels": as_field(kernels),
        "ran": ran,
        "as_asked": said.ok,
        "verdict": said.text,
    }
