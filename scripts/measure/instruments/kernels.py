"""Which kernels a call ran, by the profiler, and whether they are what was asked for.

On a GPU the evidence is the kernels' own names. A CPU has none, so there it is the operators of PyTorch that
took the time.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

# What a name says, first match first; on whole names and on shortened ones alike.
PLAIN, PLAIN_CPU = "matrix products", "matrix products on the CPU"
FAMILIES: dict[str, str] = {
    "our Triton kernels": r"^_tilegpt_",
    "our CUDA kernels": r"^tilegpt_",
    "cuDNN": r"cudnn",
    "FlashAttention-4": r"kernel_cutlass.*flash|flash_?attn_?cute",
    "FlashAttention-3": r"FlashAttn(Fwd|Bwd)",
    "FlashAttention-2 in PyTorch": r"\bpytorch_flash::",
    "FlashAttention-2": r"\bflash::",
    "memory-efficient attention": r"fmha_cutlass|PyTorchMemEffAttention",
    "FlexAttention": r"^triton_.*flex_",
    "PyTorch's flash attention for CPUs": r"_scaled_dot_product_flash_attention_for_cpu",
    PLAIN: r"gemm|gemv|gemmk|nvjet|splitkreduce|\bdot_kernel",
    PLAIN_CPU: r"^aten::(b|m|badd|add)mm(_out)?$|^aten::mv$",
}
_SDPA = ("FlashAttention-2 in PyTorch", "memory-efficient attention", "cuDNN", PLAIN)
_CPU_FLASH = "PyTorch's flash attention for CPUs"
# What an implementation may run, by the beginning of its name: the longest that fits counts.
EXPECTED: dict[str, tuple[str, ...]] = {
    "naive": (PLAIN, PLAIN_CPU),
    "standard": (PLAIN, PLAIN_CPU),  # instruments/standard.py
    "tiled": (PLAIN, PLAIN_CPU),
    "sdpa": (*_SDPA, _CPU_FLASH, PLAIN_CPU),
    "sdpa_flash": ("FlashAttention-2 in PyTorch", _CPU_FLASH),
    "sdpa_cudnn": ("cuDNN",),
    "sdpa_efficient": ("memory-efficient attention",),
    "sdpa_math": (PLAIN, PLAIN_CPU),
    "flex": ("FlexAttention", PLAIN_CPU),  # of flex on a CPU there is no kernel
    "triton": ("our Triton kernels",),
    "cuda": ("our CUDA kernels",),
    "flash2": ("FlashAttention-2",),
    "flash3": ("FlashAttention-3",),
    "flash4": ("FlashAttention-4",),
}

# Operators that allocate or look at a tensor otherwise, and compute nothing.
MOVES_NOTHING = r"^aten::(empty|as_strided|_?(unsafe_)?view|_?reshape|expand|transpose|permute|slice|select|"
MOVES_NOTHING += r"unsqueeze|squeeze|detach|alias|unbind|t$|to$)"
PROFILER_OWN = ("Activity Buffer Request", "Buffer Flush", "Command Buffer Full")


@dataclass(frozen=True)
class Kernel:
    """A kernel (on a CPU: an operator) of a profiled call; `us` of device time in all its launches."""

    name: str
    count: int
    us: float


@dataclass(frozen=True)
class Verdict:
    """Whether what ran is what was asked for, in a line."""

    ok: bool
    text: str


def short(name: str) -> str:
    """A kernel's name without its parameters, and at most 100 characters of the rest."""
    name = name.removeprefix("void ").strip()
    # the parameter list: a parenthesis at the end that is not (anonymous namespace), nor inside <>
    depth = 0
    for i, character in enumerate(name):
        if character in "<>":
            depth += 1 if character == "<" else -1
        elif character == "(" and depth == 0 and not name.startswith(("(anonymous", "(Device"), i):
            name = name[:i].rstrip()
            break
    return name if len(name) <= 100 else name[:97] + "..."


def family(name: str) -> str | None:
    """The key of FAMILIES that a name belongs to; None for helpers (fills, copies, sums)."""
    for label, pattern in FAMILIES.items():
        if re.search(
            pattern, name, 0 if label in ("FlashAttention-3", "our CUDA kernels") else re.IGNORECASE
        ):
            return label
    return None


def profile(call: Callable[[], Any], device: str, warm_up: int = 1) -> list[Kernel]:
    """The kernels of one call on "cuda", or the operators on another device, by first appearance.

    `warm_up` calls go before it: what compiles, tunes or initialises is no part of the call.
    """
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # nothing of the profiler's own on the terminal
    import torch
    from torch.autograd import DeviceType
    from torch.profiler import ProfilerActivity

    cuda = device == "cuda"
    for _ in range(warm_up):
        call()
    wait = torch.cuda.synchronize if cuda else (lambda: None)
    wait()
    with torch.profiler.profile(activities=[ProfilerActivity.CUDA if cuda else ProfilerActivity.CPU]) as seen:
        call()
        wait()
    events = sorted(seen.events(), key=lambda event: event.time_range.start)
    if cuda:
        return counted(
            (_demangled(event.name), event.time_range.elapsed_us())
            for event in events
            if event.device_type == DeviceType.CUDA
            and event.name not in PROFILER_OWN
            and not getattr(event, "is_user_annotation", False)
        )
    operators = counted((event.name, event.self_cpu_time_total) for event in events)
    operators = [operator for operator in operators if not re.search(MOVES_NOTHING, operator.name)]
    least = 0.02 * sum(operator.us for operator in operators)  # wrappers take next to no time themselves
    return [operator for operator in operators if family(operator.name) or operator.us >= least]


def _demangled(name: str) -> str:
    import torch

    return torch._C._demangle(name) if name.startswith("_Z") else name


def counted(calls: Iterable[tuple[str, float]]) -> list[Kernel]:
    """Launches, whole names and microseconds, gathered by short name."""
    found: dict[str, Kernel] = {}
    for name, us in calls:
        name = short(name)
        before = found.get(name, Kernel(name, 0, 0.0))
        found[name] = Kernel(name, before.count + 1, before.us + us)
    return list(found.values())


def as_field(kernels: list[Kernel]) -> dict[str, int]:
    """What a row of results/ keeps: launches by name, by first appearance."""
    return {kernel.name: kernel.count for kernel in kernels}


def verdict(asked: str, names: Iterable[str], ran: str | None = None) -> Verdict:
    """Whether kernels of these names are what `asked` stands for.

    ran: what it delegated to, where it does (auto). Matrix products beside a fused kernel are a pass that
    fell back to the formula, so they are not what was asked for either.
    """
    names = list(names)
    by_family: dict[str, str] = {}
    for name in names:
        if (label := family(name)) is not None:
            by_family.setdefault(label, name)
    asking = f"asked for {asked}" + (f", which chose {ran}" if ran not in (None, asked) else "")
    what = " and ".join(f"{label} ({name})" for label, name in by_family.items())
    if not by_family:
        most = f": {', '.join(names[:3])}" if names else ""
        return Verdict(False, f"{asking}, ran no attention kernel that is known here{most}")
    prefix = max((key for key in EXPECTED if (ran or asked).startswith(key)), key=len, default=None)
    if prefix is None:
        return Verdict(
            False, f"{asking}, ran {what}; what it should run is not written in instruments/kernels.py"
        )
    expected = EXPECTED[prefix]
    if not by_family.keys() <= set(expected) or (
        len(by_family) > 1 and by_family.keys() & {PLAIN, PLAIN_CPU}
    ):
        usual = " or ".join(label for label in expected if label != PLAIN_CPU)
        return Verdict(False, f"{asking}, but ran {what}, where {usual} was to run")
    return Verdict(True, f"{asking}, ran {what}")
