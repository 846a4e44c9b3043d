"""Every block of memory that runs through an allocator, in order, and what it was for.

On CUDA the caching allocator's own history tells (torch.cuda.memory._snapshot), on a CPU PyTorch's profiler
(profile_memory); both see what operators allocate inside. A CPU keeps no statistic of its peak: there it is
the largest sum of live blocks.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from conf.values import UserError

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from model.gpt import GPT

PARTS = ("parameters", "gradients", "optimizer", "activations", "attention", "other")
USUAL = "activations"  # what a block is of which nothing is said
BLOCK = 512  # the caching allocator rounds up to these bytes


def storages(tensors: Any) -> dict[int, int]:
    """Bytes of the distinct storages of the tensors, by address."""
    found = (x.untyped_storage() for x in tensors if x is not None)
    return {storage.data_ptr(): storage.nbytes() for storage in found if storage.nbytes()}


@dataclass
class Event:
    """A block allocated or freed, or a mark: from here on blocks are of `kind`, no more so, the block at
    `address` is of `kind`, or just that a point was reached."""

    what: str  # alloc | free | begin | end | kind | point
    address: int = 0
    size: int = 0
    kind: str = USUAL
    counted: bool = False  # the block's presence at the peak is counted


@dataclass
class Block:
    size: int
    kind: str
    counted: bool = False


class Ledger:
    """Live bytes by kind over the events of a step, from `base` on: `peak`, `at_peak` by kind, and
    `counted_at_peak` blocks; `usual_at_peak`: how many blocks of each size of which nothing is said.

    A block's kind is that of the innermost window it was allocated in, or what a mark says of it at any time
    later, also if the peak was before the mark."""

    def __init__(self, events: list[Event], base: dict[str, int]):
        live, counted = dict.fromkeys(PARTS, 0) | base, 0
        usual: Counter[int] = Counter()
        self.at_peak, self.peak, self.counted_at_peak = dict(live), sum(live.values()), 0
        self.usual_at_peak: Counter[int] = Counter()
        total = self.peak
        for size, block in self._changes(events):
            sign = 1 if size > 0 else -1
            live[block.kind] += size
            counted += sign * block.counted
            usual[block.size] += sign * (block.kind == USUAL)
            total += size
            if total > self.peak:
                self.at_peak, self.peak, self.counted_at_peak = dict(live), total, counted
                self.usual_at_peak = usual.copy()

    @staticmethod
    def _changes(events: list[Event]) -> list[tuple[int, Block]]:
        """(bytes, block) of each allocation and, negative, each free, in order."""
        windows: list[str] = []
        alive: dict[int, Block] = {}
        changes = []
        for event in events:
            if event.what == "begin":
                windows.append(event.kind)
            elif event.what == "end":
                windows.remove(event.kind)
            elif event.what == "alloc":
                block = alive[event.address] = Block(event.size, windows[-1] if windows else USUAL)
                changes.append((block.size, block))
            elif event.what == "free":  # one that was there before counts among the rest
                block = alive.pop(event.address, None) or Block(event.size, "other")
                changes.append((-block.size, block))
            elif event.what == "kind" and event.address in alive:
                block = alive[event.address]
                block.kind, block.counted = event.kind, event.counted
        return changes


@dataclass(frozen=True)
class Halves:
    """Bytes: the most before a point, what was live at it, the most after it; sizes of the blocks live at
    it."""

    before: int
    at: int
    after: int
    blocks: tuple[int, ...] = field(default=(), compare=False)

    @classmethod
    def of(cls, events: list[Event]) -> Halves:
        total, most, at, before = 0, 0, 0, 0
        alive: dict[int, int] = {}
        blocks: tuple[int, ...] = ()
        for event in events:
            if event.what == "alloc":
                alive[event.address] = event.size
                total += event.size
            elif event.what == "free":
                total -= alive.pop(event.address, 0)
            most = max(most, total)
            if event.what == "point":
                before, at, most = most, total, total
                blocks = tuple(sorted(alive.values()))
        return cls(before, at, most, blocks)


def recorder_of(device: torch.device) -> CpuRecorder | CudaRecorder:
    if device.type not in ("cpu", "cuda"):
        raise UserError(f"memory on {device.type} cannot be recorded: use trainer.accelerator=cpu or gpu.")
    return CudaRecorder(device) if device.type == "cuda" else CpuRecorder()


@dataclass
class CpuRecorder:
    """Allocations as PyTorch's profiler reports them; marks are named ranges among them."""

    marks: list[Event] = field(default_factory=list)

    def __enter__(self) -> CpuRecorder:
        from torch.profiler import ProfilerActivity, profile

        self.profile = profile(activities=[ProfilerActivity.CPU], profile_memory=True)
        self.profile.__enter__()
        return self

    def __exit__(self, *exc: Any) -> None:
        self.profile.__exit__(*exc)

    def mark(self, event: Event) -> None:
        from torch.profiler import record_function

        with record_function(f"tilegpt mark {len(self.marks)}"):
            self.marks.append(event)

    def events(self) -> list[Event]:
        from torch._C._profiler import _EventType

        found = []
        for node in _walk(self.profile.profiler.kineto_results.experimental_event_tree()):
            if node.tag == _EventType.Allocation:
                size = node.extra_fields.alloc_size
                event = Event("alloc" if size > 0 else "free", node.extra_fields.ptr, abs(size))
                found.append((node.start_time_ns, event))
            elif node.name.startswith("tilegpt mark "):
                found.append((node.start_time_ns, self.marks[int(node.name.rpartition(" ")[2])]))
        return [event for _, event in sorted(found, key=lambda pair: pair[0])]


def _walk(nodes: Any) -> Iterator[Any]:
    stack = list(nodes)
    while stack:
        node = stack.pop()
        yield node
        stack += node.children


@dataclass
class CudaRecorder:
    """Allocations by the caching allocator's history; a mark knows how many of them came before it."""

    device: torch.device
    marks: list[tuple[int, Event]] = field(default_factory=list)
    most: int = 1_000_000  # entries of the history

    def __enter__(self) -> CudaRecorder:
        import torch

        torch.cuda.synchronize(self.device)
        torch.cuda.memory._record_memory_history(
            "all", context=None, max_entries=self.most, clear_history=True
        )
        self.before = self._count()
        return self

    def __exit__(self, *exc: Any) -> None:
        import torch

        index = torch.cuda.current_device() if self.device.index is None else self.device.index
        self.trace = torch.cuda.memory._snapshot()["device_traces"][index]
        torch.cuda.memory._record_memory_history(enabled=None)

    def _count(self) -> int:
        """Blocks handed out and taken back since the process began."""
        import torch

        stats = torch.cuda.memory.memory_stats(self.device)
        return stats["allocation.all.allocated"] + stats["allocation.all.freed"]

    def mark(self, event: Event) -> None:
        self.marks.append((self._count() - self.before, event))

    def events(self) -> list[Event]:
        names = {"alloc": "alloc", "free_completed": "free"}
        blocks = [
            Event(names[entry["action"]], entry["addr"], -(-entry["size"] // BLOCK) * BLOCK)
            for entry in self.trace
            if entry["action"] in names
        ]
        numbered = [(i + 1, event) for i, event in enumerate(blocks)] + self.marks
        return [event for _, event in sorted(numbered, key=lambda pair: pair[0])]


@dataclass
class Peak:
    bytes: int = 0


@contextmanager
def peak_of(device: torch.device) -> Iterator[Peak]:
    """The most bytes allocated within: on CUDA all that there were, by the allocator's statistic; on a CPU
    beyond what there was before."""
    import torch

    peak = Peak()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        yield peak
        torch.cuda.synchronize(device)
        peak.bytes = torch.cuda.max_memory_allocated(device)
    else:
        with recorder_of(device) as recorder:
            yield peak
        peak.bytes = Ledger(recorder.events(), {}).peak


@dataclass
class Step:
    """A training step on tensors that are there: `run()` is forward, backward, update, gradients set to
    None. `training_step` makes one from a config."""

    net: GPT
    optimizer: torch.optim.Optimizer
    run: Callable[[], Any]
    device: torch.device
    inputs: dict[str, Tensor] = field(default_factory=dict)  # a batch, of one or more micro-batches
    batch: int = 1
    dtype: torch.dtype | None = None  # that reaches attention
