"""CUDA graphs on a CPU, as far as lifetimes go: a graph has the addresses of what its kernels read and write.

A replay is right only while all is alive that was there before the capture; what the capture itself allocated
lives in the graph's own pool. Warm-up calls run, captured ones run too, replays look and do nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Stream:
    def wait_stream(self, other: Stream) -> None:
        pass


class Graph:
    """In the place of torch.cuda.CUDAGraph."""

    def __init__(self) -> None:
        self.outside: dict[int, StorageWeakRef] = {}
        self.replays = 0

    def replay(self) -> None:
        freed = sum(storage.expired() for storage in self.outside.values())
        assert not freed, f"{freed} of {len(self.outside)} tensors that the graph reads are freed"
        self.replays += 1


class Recording(TorchDispatchMode):
    """Notes what operators are given that no operator of the capture has made."""

    def __init__(self, graph: Graph):
        super().__init__()
        self.graph, self.own = graph, {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for x in tree_leaves((args, kwargs)):
            if isinstance(x, Tensor) and x.untyped_storage()._cdata not in self.own:
                storage = x.untyped_storage()
                self.graph.outside.setdefault(storage._cdata, StorageWeakRef(storage))
        out = func(*args, **(kwargs or {}))
        for x in tree_leaves(out):
            if isinstance(x, Tensor) and x.untyped_storage()._cdata not in self.graph.outside:
                self.own[x.untyped_storage()._cdata] = x  # its address is taken while the capture lasts
        return out


@contextmanager
def recorded(graph: Graph) -> Iterator[None]:
    with Recording(graph):
        yield


def fake_graphs(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(torch.cuda, "Stream", Stream)
    patch.setattr(torch.cuda, "current_stream", Stream)
    patch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
    patch.setattr(torch.cuda, "CUDAGraph", Graph)
    patch.setattr(torch.cuda, "graph", recorded)
