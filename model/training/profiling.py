"""What the steps of a run spend their time on, by class of kernel: `callbacks.profile=true`."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning as L
import torch

# Class -> pattern of names of kernels, or on a CPU of operators; the first that matches counts.
CLASSES = {
    "rounding to fp8": r"fp8_(amax|round|quantise|linear|gelu_mlp)",
    "loss": r"cross_entropy|log_softmax|nll_loss|softmax_online|head_loss",
    "attention": r"tilegpt_|flash|fmha|sdpa|scaled_dot_product|cudnn|aten::_softmax|softmax_warp"
    r"|tilegpt::(?!product|linear|gelu)",
    "matrix products": r"nvjet|gemm|gemv|cutlass|cublas|splitK|xmma|tilegpt::(product|linear)"
    r"|aten::(b|add|badd|_scaled_)?mm\b",
    "optimiser": r"multi_tensor_apply|FusedOptimizer|LpNorm|_fused_adam|_foreach|baddbmm",
    "norms and residuals": r"norm|aten::add_?$",
    "GELU, SwiGLU": r"gelu|silu",
    "embedding": r"embedding|index_select",
    "copies, casts, fills": r"memcpy|memset|copy|fill|zero|cat\b|fused_cat|aten::clone",
    "between devices": r"nccl|c10d",
}
OTHER = "other elementwise"
PROFILER_OWN = ("Activity Buffer Request", "Buffer Flush", "Command Buffer Full", "ProfilerStep")
WAIT, STEPS = 10, 3  # steps before those that are profiled, which compile and warm up, and how many these are
MOST_EVENTS = 200_000  # allocations of the snapshot


def class_of(name: str) -> str:
    return next((c for c, pattern in CLASSES.items() if re.search(pattern, name, re.IGNORECASE)), OTHER)


@dataclass(frozen=True)
class Launch:
    """A kernel that ran, from `start` for `us`; on a CPU an operator's own time."""

    name: str
    start: float
    us: float


@dataclass(frozen=True)
class Share:
    """Of a class or a kernel: launches and milliseconds a step."""

    name: str
    launches: float
    ms: float


def shares(launches: Iterable[Launch], steps: int, by_class: bool = True) -> list[Share]:
    """Longest first."""
    found: dict[str, list[float]] = {}
    for launch in launches:
        found.setdefault(class_of(launch.name) if by_class else launch.name, []).append(launch.us)
    each = [Share(name, len(us) / steps, sum(us) / 1e3 / steps) for name, us in found.items()]
    return sorted(each, key=lambda share: -share.ms)


def idle_ms(launches: Sequence[Launch], steps: int) -> float:
    """Milliseconds a step between the first launch and the end of the last in which nothing ran."""
    idle, end = 0.0, launches[0].start if launches else 0.0
    for launch in sorted(launches, key=lambda launch: launch.start):
        idle += max(0.0, launch.start - end)
        end = max(end, launch.start + launch.us)
    return idle / 1e3 / steps


def table(launches: Sequence[Launch], steps: int, device: str) -> str:
    """By class, and the 20 longest kernels, in Markdown."""
    classes, kernels = shares(launches, steps), shares(launches, steps, by_class=False)[:20]
    if device == "cuda":
        classes.append(Share("nothing runs", 0, idle_ms(launches, steps)))
    total = sum(share.ms for share in classes) or 1.0
    lines = [f"Mean of {steps} steps on {device}.", ""]
    lines += ["| class | launches | ms a step | share |", "|---|---|---|---|"]
    lines += [f"| {s.name} | {s.launches:.0f} | {s.ms:.2f} | {s.ms / total:.1%} |" for s in classes]
    lines += [f"| all | {sum(s.launches for s in classes):.0f} | {total:.2f} | |", ""]
    lines += ["| longest | class | launches | ms a step |", "|---|---|---|---|"]
    lines += [f"| `{s.name[:90]}` | {class_of(s.name)} | {s.launches:.0f} | {s.ms:.2f} |" for s in kernels]
    return "\n".join(lines) + "\n"


def draw(launches: Sequence[Launch], steps: int, device: str, path: Path) -> None:
    """The classes as bars."""
    from matplotlib.figure import Figure

    classes = shares(launches, steps)[::-1]
    if device == "cuda":
        classes.insert(0, Share("nothing runs", 0, idle_ms(launches, steps)))
    figure = Figure(figsize=(7.2, 0.6 + 0.34 * len(classes)), layout="constrained")
    axes = figure.subplots()
    bars = axes.barh([share.name for share in classes], [share.ms for share in classes], color="#0072B2")
    axes.bar_label(bars, fmt="%.2f", padding=3)
    axes.set_xlabel(f"ms a step on {device}")
    axes.margins(x=0.12)
    figure.savefig(path)


class Profile(L.Callback):
    """Profiles a few steps after the first ten, and leaves in `profile/` of the run: step.md and step.svg,
    the time by class of kernel; trace.json.gz, for ui.perfetto.dev; and on a GPU memory.pickle, for
    pytorch.org/memory_viz."""

    def on_train_start(self, trainer: L.Trainer, lit: Any) -> None:
        self.folder = Path(trainer.default_root_dir) / "profile"
        self.first, self.profiler = trainer.global_step + WAIT, None
        self.last = min(self.first + STEPS, trainer.max_steps)
        if self.first >= trainer.max_steps and trainer.is_global_zero:
            print(
                f"callbacks.profile=true: nothing is profiled, as that begins after {WAIT} steps, and "
                f"{trainer.max_steps - trainer.global_step} are to come. Set trainer.max_steps to "
                f"{self.first + STEPS} or more.",
                flush=True,
            )

    def on_train_batch_start(self, trainer: L.Trainer, lit: Any, *args: Any) -> None:
        if trainer.global_step != self.first or not trainer.is_global_zero:
            return
        from torch.profiler import ProfilerActivity, profile

        self.cuda = lit.device.type == "cuda"
        activities = [ProfilerActivity.CPU]
        if self.cuda:
            activities.append(ProfilerActivity.CUDA)
            torch.cuda.synchronize()
            torch.cuda.memory._record_memory_history(max_entries=MOST_EVENTS)
        self.profiler = profile(activities=activities)
        self.profiler.start()

    def on_train_batch_end(self, trainer: L.Trainer, lit: Any, *args: Any) -> None:
        if self.profiler is None or trainer.global_step < self.last:
            return
        if self.cuda:
            torch.cuda.synchronize()
        self.profiler.stop()
        self._leave(self.last - self.first)
        self.profiler = None

    def _leave(self, steps: int) -> None:
        self.folder.mkdir(exist_ok=True)
        self.profiler.export_chrome_trace(str(self.folder / "trace.json.gz"))
        if self.cuda:
            torch.cuda.memory._dump_snapshot(str(self.folder / "memory.pickle"))
            torch.cuda.memory._record_memory_history(enabled=None)
        launches, device = launches_of(self.profiler.events(), self.cuda), "cuda" if self.cuda else "cpu"
        text = table(launches, steps, device)
        (self.folder / "step.md").write_text(text, encoding="utf-8")
        draw(launches, steps, device, self.folder / "step.svg")
        print(f"{text}\nprofile      {self.folder}", flush=True)


def launches_of(events: Iterable[Any], cuda: bool) -> list[Launch]:
    """Of a profiler's events those that take a device's time: kernels, on a CPU operators by themselves."""
    from torch.autograd import DeviceType

    wanted = DeviceType.CUDA if cuda else DeviceType.CPU
    found = []
    for event in events:
        own = event.name.startswith(PROFILER_OWN) or getattr(event, "is_user_annotation", False)
        us = event.time_range.elapsed_us() if cuda else event.self_cpu_time_total
        if event.device_type == wanted and not own and us > 0:
            found.append(Launch(event.name, event.time_range.start, us))
    return found
