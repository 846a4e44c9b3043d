"""Implementations of attention as contestants of one point: the same tensors, each pass as it is timed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from attention import registry
from attention.base import Attention, AttentionCall, AttentionOptions
from scripts.accuracy import Part, Problem, Result, computed, error_ratios, expected
from scripts.measure.instruments.bench_points import DTYPES, Shape
from scripts.measure.instruments.kernels import Kernel, Verdict, profile, verdict
from scripts.measure.instruments.timing import Contestant

# Decode reads K and V once, so a cold L2 is the point: this many L2s of different caches go round.
COLD = 4
MOST_SETS = 256
# In fp64 512 MiB, of the scores or of the keys; above, two key heads of two batch rows stand for all.
JUDGED_WHOLE = 2**26


def call_of(shape: Shape, device: str, backward: bool = True) -> AttentionCall:
    """What a shape asks of an implementation."""
    dtype, sizes = getattr(torch, DTYPES[shape.dtype]), (shape.batch, shape.heads, shape.kv_heads)
    lengths = shape.tokens, shape.tokens, shape.head_dim
    return AttentionCall("call", device, None, dtype, *sizes, *lengths, shape.causal, backward=backward)


def usual(shape: Shape, cuda: bool, backward: bool = True) -> list[str]:
    """Who takes part in measuring a shape where nobody is named: all that can run it here, or, for a GPU
    where there is none, that declare it. On a CPU nothing that compiles kernels, which would be
    interpreted."""
    call = call_of(shape, "cuda" if cuda else "cpu", backward)
    if cuda and torch.cuda.is_available():
        return registry.supporting(replace(call, arch=torch.cuda.get_device_capability()))
    if cuda:
        every = registry.implementations()
        return [name for name in every if not registry.shared_instance(name).capabilities.reasons(call)]
    return [name for name in registry.supporting(call) if registry.declaration(name).compilation is None]


class Field:
    """A shape's tensors and everything that its contestants share; `sets` are q, k, v, more than one for
    decode on a GPU."""

    def __init__(self, shape: Shape, device: str):
        self.shape, self.device = shape, device
        self.options = shape.options(device)
        q, k, v, self.dout = shape.tensors(device)
        self.sets: list[tuple[Tensor, Tensor, Tensor]] = [(q, k, v)]
        self._expected: dict[torch.dtype | None, tuple[Result, Result]] = {}  # by operand_dtype
        if shape.decode:
            cold = COLD * torch.cuda.get_device_properties(0).L2_cache_size if device == "cuda" else 0
            number = min(MOST_SETS, max(2, -(-cold // shape.kv_bytes)))
            self.sets += [shape.tensors(device, seed)[:3] for seed in range(1, number)]

    def call(self, passed: str) -> AttentionCall:
        """What the contestants have to be able to do."""
        with torch.set_grad_enabled(passed in ("backward", "both")):
            return AttentionCall.of(*self._leaves(passed), AttentionOptions(**self.options))

    def _leaves(self, passed: str) -> list[Tensor]:
        backward = passed in ("backward", "both")
        return [x.detach().requires_grad_(backward) for x in self.sets[0]]

    def contestant(self, name: str, attention: Attention, passed: str) -> Contestant:
        """One call of the pass, from Python.

        The backward's forward is made anew for every call, untimed: a graph kept from one to the next would
        hold the memory of all contestants at once."""
        q, k, v = leaves = self._leaves(passed)

        wanted = [*leaves, *(x for x in self.options.values() if isinstance(x, Tensor) and x.requires_grad)]

        def forward(_: Any = None) -> Tensor:
            with torch.set_grad_enabled(passed in ("backward", "both")):
                return attention(q, k, v, **self.options)

        def backward(out: Tensor) -> Any:
            return torch.autograd.grad(out, wanted, self.dout)

        if passed == "backward":
            return Contestant(name, backward, prepare=forward)
        return Contestant(name, (lambda _: backward(forward())) if passed == "both" else forward)

    def decoder(self, name: str, attention: Attention) -> Contestant:
        """A call for each of the sets, in one CUDA graph on a GPU, as generation replays it.

        A single replay would add some microseconds of its own launch and of the events to a kernel that takes
        ten, and flushing the L2 in between would leave the flush's writes to be evicted in the timed call.
        Calls on different caches, together several L2s, find each its own cache gone from the L2, and share
        that overhead."""

        def calls(_: Any = None) -> None:
            with torch.no_grad():
                for q, k, v in self.sets:
                    attention(q, k, v, **self.options)

        run = captured(calls) if self.device == "cuda" else calls
        return Contestant(name, run, calls=len(self.sets))

    def profiled(self, name: str, attention: Attention, passed: str) -> tuple[list[Kernel], Verdict]:
        """The kernels of a call, and whether they are those asked for; backward without the forward's."""
        contestant = self.contestant(name, attention, passed)
        contestant.run(contestant.prepare())  # compiles and tunes
        prepared = [contestant.prepare()]
        found = profile(lambda: contestant.run(prepared.pop()), self.device, warm_up=0)
        ran = attention.resolve(self.call(passed))
        names = [kernel.name for kernel in found]
        return found, verdict(name, names, None if ran is attention else ran.name, ran.declaration)

    def errors(self, attention: Attention, passed: str) -> dict[str, float]:
        """Error ratios of the pass by scripts/accuracy.py; the reference is computed once for all."""
        q, k, v = self.sets[0]
        gradients = passed in ("backward", "both")
        s = self.shape
        whole = s.batch * s.heads * s.tokens * max(s.tq, s.head_dim) <= JUDGED_WHOLE
        problem = Problem(q, k, v, self.options, self.dout)
        part = Part.of(problem, None if whole else 2)
        operand_dtype = attention.declaration.operand_dtype
        known = self._expected.get(operand_dtype)
        if known is None or (gradients and "dq" not in known[0]):
            judged = problem if gradients else Problem(q, k, v, self.options)
            known = self._expected[operand_dtype] = expected(
                part.of_problem(judged), operand_dtype=operand_dtype
            )
        got = computed(attention, problem if gradients else Problem(q, k, v, self.options))
        return error_ratios({name: part.cut(name, x) for name, x in got.items()}, *known, q.dtype)


def captured(call: Callable[[], None]) -> Callable[[Any], None]:
    """The call as a CUDA graph; the function replays it, and keeps alive what the call reads: the graph has
    addresses alone, and what lies there once that is freed is anyone's."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        call()  # what is made at first use is made before the capture
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()

    def replay(_: Any = None, alive: Callable[[], None] = call) -> None:
        graph.replay()

    return replay
