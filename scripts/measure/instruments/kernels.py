"""Which kernels a call ran, by the profiler, and whether they are what was asked for: those that the
implementation declares (attention/declaration.py).

On a GPU the evidence is the kernels' own names. A CPU has none, so there it is the operators of PyTorch that
took the time.
"""

from __future__ import annotations

import functools
import os
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from attention import registry
from attention.base import MATMUL_KERNELS, Declaration

PLAIN, PLAIN_CPU = (kernels.label for kernels in MATMUL_KERNELS)

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


@functools.cache
def families() -> dict[str, str]:
    """Label -> pattern of all kernels that an implementation declares. Matrix products come last: kernels of
    their own have names that speak of products too."""
    every = [kernels for name in registry.names() for kernels in registry.declaration(name).kernels]
    own = [kernels for kernels in every if kernels not in MATMUL_KERNELS]
    return {kernels.label: kernels.pattern for kernels in (*own, *MATMUL_KERNELS)}


def family(name: str) -> str | None:
    """The label of the kernels that a name belongs to; None for helpers (fills, copies, sums). Whole names
    and shortened ones give the same."""
    return next((label for label, pattern in families().items() if re.search(pattern, name)), None)


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


def expected(declared: Declaration) -> tuple[str, ...]:
    """The labels of what an implementation may run."""
    return tuple(kernels.label for kernels in declared.kernels)


def verdict(
    asked: str, names: Iterable[str], ran: str | None = None, declared: Declaration | None = None
) -> Verdict:
    """Whether kernels of these names are what `asked` stands for.

    ran: what it delegated to, where it does (auto). declared: by what ran; left out, by the implementation of
    its name. Matrix products beside a fused kernel are a pass that fell back to the formula, so they are not
    what was asked for either.
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
    known = (ran or asked) in registry.names()
    able = expected(registry.declaration(ran or asked) if known or declared is None else declared)
    if not able:
        return Verdict(False, f"{asking}, ran {what}; what it should run is not in its declaration")
    if not by_family.keys() <= set(able) or (len(by_family) > 1 and by_family.keys() & {PLAIN, PLAIN_CPU}):
        usual = " or ".join(label for label in able if label != PLAIN_CPU) or PLAIN_CPU
        return Verdict(False, f"{asking}, but ran {what}, where {usual} was to run")
    return Verdict(True, f"{asking}, ran {what}")
