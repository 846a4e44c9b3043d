"""Dropout of hidden states: nn.Dropout's where nothing is compiled, a hash of the position where it is."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from model.dropout import Dropout, keep_mask
from ops.dropout import GOLDEN, fmix32_

U32 = 2**32 - 1


@pytest.mark.parametrize("seed", [0, 1, -5, 2**31 - 1, -(2**31)])
@pytest.mark.parametrize("p", [0.0, 0.2, 0.5, 0.97])
def test_the_mask_is_the_documented_function(seed: int, p: float) -> None:
    row, column = torch.arange(130).unsqueeze(1), torch.arange(70)
    key = fmix32_((seed + GOLDEN * row) & U32)
    expected = fmix32_((key + GOLDEN * column) & U32) >= round(p * 2**32)
    assert torch.equal(keep_mask(torch.tensor(seed, dtype=torch.int32), 130, 70, p), expected)


def test_what_is_kept_does_not_depend_on_its_neighbours() -> None:
    """Frequencies of the whole, rows, columns, and of pairs next to each other, within 5 standard errors."""
    kept = torch.stack([keep_mask(torch.tensor(s, dtype=torch.int32), 512, 384, 0.2) for s in range(8)])
    kept = kept.double()
    for dims in ((0, 1, 2), (0, 2), (0, 1), 0):
        mean = kept.mean(dims)
        n = kept.numel() // mean.numel()
        assert ((mean - 0.8).abs() < (5 + (mean.numel() > 1)) * (0.16 / n) ** 0.5).all(), dims
    for a, b in (
        (kept[1:], kept[:-1]),
        (kept[:, 1:], kept[:, :-1]),
        (kept[..., 1:], kept[..., :-1]),
    ):
        both = (a * b).mean()
        assert abs(both - 0.64) < 5 * (0.64 * 0.36 / a.numel()) ** 0.5


def compiled(module: Dropout, checkpointing: bool):
    def run(x: Tensor) -> Tensor:
        return checkpoint(module, x, use_reentrant=False) if checkpointing else module(x)

    return torch.compile(run, fullgraph=True, dynamic=False, backend="aot_eager")


@pytest.mark.parametrize("checkpointing", [False, True])
def test_a_compiled_call_drops_and_its_gradient_the_same(checkpointing: bool) -> None:
    torch._dynamo.reset()
    run = compiled(Dropout(0.25), checkpointing)
    x = torch.ones(8, 64, 96, requires_grad=True)
    torch.manual_seed(1)
    first, second = run(x), run(x)
    assert first.detach().unique().tolist() == pytest.approx([0.0, 4 / 3])
    assert abs((first != 0).double().mean() - 0.75) < 5 * (0.1875 / x.numel()) ** 0.5
    assert not torch.equal(first, second)
    first.sum().backward()
    assert torch.equal(x.grad, first)
    torch.manual_seed(1)
    assert torch.equal(run(x), first)


def test_outside_of_training_and_uncompiled_it_is_torchs() -> None:
    torch._dynamo.reset()
    x = torch.randn(4, 8)
    module = Dropout(0.5)
    torch.manual_seed(0)
    found = module(x)
    torch.manual_seed(0)
    assert torch.equal(found, torch.nn.functional.dropout(x, 0.5))
    module.eval()
    assert torch.equal(module(x), x)
    assert torch.equal(compiled(module, False)(x), x)
