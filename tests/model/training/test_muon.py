"""Muon for matrices beside AdamW for the rest: torch's own numbers, clipping, skipping, and who gets what."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import Tensor, nn

from model.training.muon import MuonAdamW, orthogonalised
from tests.model.training.test_lit_gpt import make_net
from tests.running import rows, train_here

SETTINGS = {"lr": 0.02, "betas": (0.9, 0.95), "weight_decay": 0.1, "fused": True}
SHAPES = [(24, 8), (24, 8), (8, 24), (16, 16)]


def leaves() -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(4)
    return [nn.Parameter(torch.randn(shape, generator=generator)) for shape in [*SHAPES, (8,), (40, 8)]]


def optimiser(parameters: list[nn.Parameter], **changes: object) -> MuonAdamW:
    hidden, others = parameters[: len(SHAPES)], parameters[len(SHAPES) :]
    return MuonAdamW([{"params": hidden, "muon": True}, {"params": others}], **{**SETTINGS, **changes})


def gradients(parameters: list[nn.Parameter], seed: int, scale: float = 1.0) -> None:
    generator = torch.Generator().manual_seed(seed)
    for p in parameters:
        p.grad = torch.randn(p.shape, generator=generator) * scale


def test_each_part_is_torchs_own() -> None:
    """torch.optim.Muon a matrix at a time, within bf16's rounding of an update; AdamW's bits."""
    ours, theirs = leaves(), leaves()
    own = optimiser(ours)
    muon = torch.optim.Muon(theirs[:4], lr=0.02, weight_decay=0.1, adjust_lr_fn="match_rms_adamw")
    adamw = torch.optim.AdamW(theirs[4:], **SETTINGS)
    for seed in range(4):
        gradients(ours, seed)
        gradients(theirs, seed)
        before = [p.detach().clone() for p in theirs]
        for each in (own, muon, adamw):
            each.step()
        for i, (a, b, old) in enumerate(zip(ours, theirs, before, strict=True)):
            if i >= len(SHAPES):
                assert torch.equal(a, b)
            else:
                assert (a - b).norm() <= 0.02 * (b - old).norm(), i
                a.data.copy_(b.data)


def test_a_rate_in_a_tensor_as_a_captured_step_has_it_gives_the_same_bits() -> None:
    numbers, tensors = leaves(), leaves()
    one, two = optimiser(numbers), optimiser(tensors)
    for step in range(1, 5):
        rate = float(torch.tensor(0.01 * step / 7))
        for own, parameters, lr in ((one, numbers, rate), (two, tensors, torch.tensor(rate))):
            gradients(parameters, step)
            for group in own.param_groups:
                group["lr"] = lr
            own.step()
    assert all(torch.equal(a, b) for a, b in zip(numbers, tensors, strict=True))


def test_updates_are_about_orthogonal() -> None:
    matrices = torch.randn(3, 64, 16, generator=torch.Generator().manual_seed(1))
    values = torch.linalg.svdvals(orthogonalised(matrices).float())
    assert values.min() > 0.6 and values.max() < 1.3


def test_gradients_are_scaled_and_bad_ones_skipped_without_a_trace() -> None:
    clipped, plain = leaves(), leaves()
    one, two = optimiser(clipped), optimiser(plain)
    one.found_inf, one.grad_scale = torch.zeros(()), torch.tensor(4.0)
    for seed in range(2):
        gradients(clipped, seed, 4.0)
        gradients(plain, seed)
        one.step()
        two.step()
    assert all(torch.equal(a, b) for a, b in zip(clipped, plain, strict=True))

    def everything() -> list[Tensor]:
        moments = [value for p in clipped for value in one.state[p].values()]
        return [tensor.detach().clone() for tensor in (*clipped, *moments)]

    before = everything()
    clipped[1].grad[3, 3] = torch.nan
    one.found_inf = torch.ones(())
    one.step()
    assert all(torch.equal(a, b) for a, b in zip(everything(), before, strict=True))


def test_embeddings_and_vectors_are_adamws() -> None:
    from model.training.lit_gpt import LitGPT

    net = make_net()
    lit = LitGPT(net, partial(MuonAdamW, **SETTINGS), lambda step, steps: 1.0)
    hidden, others, vectors = lit.parameter_groups()
    names = {id(p): name for name, p in net.named_parameters()}
    assert hidden["muon"] and {names[id(p)].split(".")[-2] for p in hidden["params"]} == {
        "c_attn",
        "c_proj",
        "c_fc",
    }
    assert all(".wte." in names[id(p)] or ".wpe." in names[id(p)] for p in others["params"])
    assert vectors["weight_decay"] == 0.0 and all(p.dim() == 1 for p in vectors["params"])
    assert sum(len(group["params"]) for group in (hidden, others, vectors)) == len(names)


@pytest.mark.parametrize("momentum", [-0.1, 1.0])
def test_a_momentum_that_is_none_is_refused(momentum: float) -> None:
    with pytest.raises(ValueError, match="momentum"):
        optimiser(leaves(), momentum=momentum)


def test_a_run_resumes_bit_for_bit_and_learns(tmp_path) -> None:
    words = ("optim=muon", "model.dropout=0.1", "schedule=constant", "tokens_per_step=128")
    assert train_here(tmp_path, *words, "name=whole").code == 0
    assert train_here(tmp_path, *words, "name=cut", "trainer.max_steps=10").code == 0
    result = train_here(tmp_path, "ckpt=cut", "trainer.max_steps=20", tiny=False)
    assert result.code == 0, result.err
    whole = rows(tmp_path / "runs" / "whole")
    assert whole == rows(tmp_path / "runs" / "cut")
    assert float(whole[20]["train/loss"]) < float(whole[1]["train/loss"]) - 1
    result = train_here(tmp_path, "ckpt=cut", "optim=adamw", "trainer.max_steps=30", tiny=False)
    assert result.code == 1 and "another optim (there muon, asked adamw)" in result.err
    assert "Traceback" not in result.err
