"""A call of each implementation as a CUDA graph: nothing in it waits for the host or depends on it."""

from __future__ import annotations

import pytest
import torch

from tests.attention.test_contract import capable
from tests.grid import NAMES, Case, Inputs, make_inputs


@pytest.mark.gpu
@pytest.mark.parametrize("name", NAMES)
def test_captured_in_a_cuda_graph(name: str) -> None:
    """Forward and backward in one graph, replayed on new data, are what eager gives."""
    case = Case("graph", 128, 128)
    attention, dtype = capable(name, case, "cuda", torch.bfloat16)
    inputs, new = make_inputs(case, "cuda", dtype), make_inputs(Case("graphs", 128, 128), "cuda", dtype)

    def call(given: Inputs) -> tuple[torch.Tensor, ...]:
        leaves = (given.q, given.k, given.v)
        out = attention(*leaves)
        return out, *torch.autograd.grad(out, leaves, given.dout)

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            call(inputs)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = call(inputs)
    with torch.no_grad():
        for old, fresh in zip(vars(inputs).values(), vars(new).values(), strict=True):
            if isinstance(old, torch.Tensor):
                old.copy_(fresh)
    graph.replay()
    expected = call(new)
    if attention.capabilities.deterministic:
        assert all(map(torch.equal, found, expected))
    torch.testing.assert_close(found, expected)
