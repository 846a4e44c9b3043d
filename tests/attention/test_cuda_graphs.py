"""A call of each implementation as a CUDA graph, and on a stream of its own: nothing in it waits for the host
or runs elsewhere."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from attention.base import Attention
from tests.attention.test_contract import capable
from tests.grid import NAMES, Case, Inputs, make_inputs

DOCUMENTS = frozenset({"document_ids"})


def run(attention: Attention, given: Inputs) -> tuple[Tensor, ...]:
    leaves = (given.q, given.k, given.v)
    out = attention(*leaves, **given.options)
    return out, *torch.autograd.grad(out, leaves, given.dout)


def tensors(given: Inputs) -> Iterator[Tensor]:
    everything = (*vars(given).values(), *given.options.values())
    return (x for x in everything if isinstance(x, Tensor))


@pytest.mark.gpu
@pytest.mark.parametrize("features", [frozenset(), DOCUMENTS], ids=["plain", "documents"])
@pytest.mark.parametrize("name", NAMES)
def test_captured_in_a_cuda_graph(name: str, features: frozenset[str]) -> None:
    """Forward and backward in one graph, replayed on new data, are what eager gives."""
    if features and name.startswith("flash"):
        pytest.skip("the flash-attn library needs the number of documents on the host")
    case = Case("graph", 128, 128, features=features)
    attention, dtype = capable(name, case, "cuda", torch.bfloat16)
    inputs = make_inputs(case, "cuda", dtype)
    new = make_inputs(Case("graphs", 128, 128, features=features), "cuda", dtype)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            run(attention, inputs)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = run(attention, inputs)
    with torch.no_grad():
        for old, fresh in zip(tensors(inputs), tensors(new), strict=True):
            old.copy_(fresh)
    graph.replay()
    expected = run(attention, new)
    if attention.capabilities.deterministic:
        assert all(map(torch.equal, found, expected))
    torch.testing.assert_close(found, expected)


@pytest.mark.gpu
@pytest.mark.parametrize("name", NAMES)
def test_first_call_on_a_new_stream(name: str) -> None:
    """With documents, behind a sleep and copies on that stream: what ran on another would read zeros."""
    case = Case("stream", 128, 128, features=DOCUMENTS)
    attention, dtype = capable(name, case, "cuda", torch.bfloat16)
    inputs, late = (make_inputs(case, "cuda", dtype) for _ in range(2))
    expected = run(attention, inputs)
    with torch.no_grad():
        for x in tensors(late):
            x.zero_()
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):
        torch.cuda._sleep(200_000_000)  # cycles: a tenth of a second
        with torch.no_grad():
            for x, value in zip(tensors(late), tensors(inputs), strict=True):
                x.copy_(value)
        found = run(attention, late)
    torch.cuda.synchronize()
    torch.testing.assert_close(found, expected)
