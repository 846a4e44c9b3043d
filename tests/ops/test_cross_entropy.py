"""The loss and its gradient in one kernel, against the formula in fp64."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.compilers import pinned
from tests.running import ROOT

pytest.importorskip("triton")
from ops.triton.cross_entropy import softmax_loss
from ops.triton.interpret import INTERPRETED

IGNORE = -1
DEVICES = [
    pytest.param("cpu", marks=pytest.mark.skipif(not INTERPRETED, reason="Triton's interpreter is off")),
    pytest.param("cuda", marks=pytest.mark.gpu),
]
# the interpreter cuts off what does not fit into bf16
ROUNDING = {
    torch.float32: 2e-7,
    torch.bfloat16: 2**-7,
    torch.float16: 2**-11,
}


def problem(n: int, vocab: int, padded: int, dtype: torch.dtype, device: str) -> tuple[Tensor, Tensor]:
    """Logits (n, padded) with NaN in the padding, and targets, of which every fifth is not counted."""
    generator = torch.Generator().manual_seed(n + vocab)
    logits = torch.randn(n, padded, generator=generator).mul(4).to(dtype)
    logits[:, vocab:] = torch.nan
    targets = torch.randint(vocab, (n,), generator=generator)
    targets[::5] = IGNORE
    return logits.to(device), targets.to(device)


def exact(logits: Tensor, targets: Tensor, vocab: int) -> tuple[Tensor, Tensor]:
    leaf = logits.double()[:, :vocab].requires_grad_()
    losses = F.cross_entropy(leaf, targets, ignore_index=IGNORE, reduction="none")
    return losses.detach(), torch.autograd.grad(losses.sum(), leaf)[0]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", ROUNDING, ids=str)
@pytest.mark.parametrize(
    ("vocab", "padded", "block"),
    [(50, 64, 64), (65, 128, 64), (65, 128, None), (1000, 1024, 256), (128, 128, 64), (1, 16, 16)],
)
def test_losses_and_gradients(
    vocab: int, padded: int, block: int | None, dtype: torch.dtype, device: str
) -> None:
    """One block and several, the last of them in part padding; the gradient is rounded once."""
    logits, targets = problem(11, vocab, padded, dtype, device)
    losses, gradient = exact(logits, targets, vocab)
    before = logits.clone()
    found = softmax_loss(logits, targets, vocab, IGNORE, False, block)
    torch.testing.assert_close(found.double(), losses, rtol=1e-6, atol=1e-6)
    assert torch.equal(logits.nan_to_num(), before.nan_to_num())  # without gradients it only reads
    assert torch.equal(softmax_loss(logits, targets, vocab, IGNORE, True, block), found)
    error = (logits[:, :vocab].double() - gradient).abs()
    assert (error <= ROUNDING[dtype] * gradient.abs() + 2e-7).all()
    assert not logits[:, vocab:].any() and not logits[::5].any()


def test_it_runs_on_the_device_of_the_logits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not on the current one, to whose stream scripts/evaluate.py device=cuda:1 came."""
    current: list[Tensor] = []
    launched: list[list[Tensor]] = []

    @contextlib.contextmanager
    def device_of(x: Tensor) -> Iterator[None]:
        current.append(x)
        yield
        current.pop()

    kernel = mock.MagicMock()
    kernel.__getitem__.return_value = lambda *args, **how: launched.append([*current])
    monkeypatch.setattr(torch.cuda, "device_of", device_of)
    monkeypatch.setattr("ops.triton.cross_entropy._tilegpt_cross_entropy", kernel)
    logits, targets = problem(4, 50, 64, torch.bfloat16, "cpu")
    softmax_loss(logits, targets, 50, IGNORE, True)
    assert len(launched) == 1 and launched[0][0] is logits


@pytest.mark.parametrize("device", DEVICES)
def test_what_is_impossible_adds_nothing(device: str) -> None:
    """Columns of -inf, as many as share a maximum and more, in the first block and in the rest."""
    logits, targets = problem(4, 100, 112, torch.float32, device)
    logits[:, 8:24] = logits[:, 72:100] = -torch.inf
    targets[:] = torch.tensor([0, IGNORE, 30, 70])
    losses, gradient = exact(logits, targets, 100)
    found = softmax_loss(logits, targets, 100, IGNORE, True, 64)
    torch.testing.assert_close(found.double(), losses, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(logits[:, :100].double(), gradient, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("device", DEVICES)
def test_a_sure_model_has_a_gradient(device: str) -> None:
    """p - 1 of a p that bf16 rounds to 1, and no overflow of large logits."""
    logits = torch.zeros(3, 64, dtype=torch.bfloat16, device=device)
    logits[2] = -3e4
    logits[:, 7] = torch.tensor([12, 14, 3e4])
    targets = torch.full((3,), 7, device=device)
    losses, gradient = exact(logits, targets, 50)
    found = softmax_loss(logits, targets, 50, IGNORE, True)
    # a p near 1, and so its logarithm, is known to a few roundings of fp32
    torch.testing.assert_close(found.double(), losses, rtol=1e-6, atol=2**-22)
    torch.testing.assert_close(logits[:, :50].double(), gradient, rtol=0.01, atol=2**-22)
    assert (logits[:2, 7] < 0).all()


COMPILED = """
from triton import compile
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from ops.triton.cross_entropy import BLOCK, GROUP, WARPS, _tilegpt_cross_entropy

for rest in (0, 2048, BLOCK):  # of a vocabulary of 65,536, GPT-2's, one of 32,000
    constants = {"IGNORE": -1, "GRADIENTS": True, "BLOCK": BLOCK, "REST": rest, "GROUP": GROUP}
    types = {"logits_ptr": "*bf16", "targets_ptr": "*i64", "losses_ptr": "*fp32"}
    types |= dict.fromkeys(("stride", "vocab_size", "padded"), "i32") | dict.fromkeys(constants, "constexpr")
    source = ASTSource(_tilegpt_cross_entropy, types, constants)
    compile(source, GPUTarget("cuda", 90, 32), {"num_warps": WARPS})
"""


@pinned("triton")
def test_the_compiler_takes_what_the_interpreter_runs() -> None:
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    subprocess.run([sys.executable, "-c", COMPILED], cwd=ROOT, env=environment, check=True)
