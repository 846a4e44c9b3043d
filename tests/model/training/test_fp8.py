"""Products in fp8: which layers have them, how near they come, exact resume, and what is refused."""

from __future__ import annotations

from pathlib import Path
from unittest import mock

import pytest
import torch

from conf.values import UserError
from model.training import fp8
from tests.model.training.test_lit_gpt import make_batch, make_net
from tests.running import rows, train_here

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """All layers of the tests' models count as large."""
    monkeypatch.setattr(fp8, "SMALLEST", 8)


def test_large_layers_are_converted_and_keep_weights_and_names(small: None) -> None:
    net = make_net(n_embd=32)
    before = dict(net.named_parameters())
    fp8.SMALLEST = 20  # K N / (K + N): c_attn 24, c_fc and c_proj of the MLP 25.6, the attention's c_proj 16
    fp8.convert(net, "fp8", 48)
    assert len(fp8.layers(net)) == 3 * 2 and type(net.lm_head) is torch.nn.Linear
    assert fp8.said(net) == ", fp8 products in attn.c_attn, mlp.c_fc, mlp.c_proj"
    after = dict(net.named_parameters())
    assert before.keys() == after.keys() and all(before[name] is after[name] for name in before)
    assert fp8.said(make_net()) == ""


def test_loss_and_gradients_are_those_of_bf16_within_rounding(small: None) -> None:
    """e4m3 has 4 significant bits, e5m2 3: products differ by some hundredths, beyond bf16's 1/256."""
    found = []
    for converts in (False, True):
        net = make_net(n_embd=32)
        if converts:
            fp8.convert(net, "fp8", 48)
        with torch.autocast("cpu", torch.bfloat16):
            loss = net(**make_batch())
        loss.backward()
        gradients = [p.grad.flatten() for p in net.transformer.h.parameters() if p.dim() == 2]
        found.append((loss.item(), torch.cat(gradients)))
    (loss, gradient), (fp8_loss, fp8_gradient) = found
    assert loss == pytest.approx(fp8_loss, rel=2e-3)
    error = ((gradient - fp8_gradient).norm() / gradient.norm()).item()
    assert 0.01 < error < 0.1


@pytest.mark.long
def test_a_run_resumes_with_the_same_bits_and_with_another_precision(small: None, tmp_path: Path) -> None:
    common = ["precision=fp8", "model.dropout=0.1", "tokens_per_step=128", "schedule=constant"]
    common += ["callbacks.samples={_target_: model.training.callbacks.Samples, tokens: 4}"]
    for name, steps in (("whole", 20), ("half", 10)):
        result = train_here(tmp_path, *common, f"name={name}", f"trainer.max_steps={steps}")
        assert result.code == 0 and "fp8 products in attn.c_attn" in result.out, result.err
    result = train_here(tmp_path, "ckpt=half", "trainer.max_steps=20", tiny=False)
    assert result.code == 0, result.err
    whole, half = (rows(tmp_path / "runs" / name) for name in ("whole", "half"))
    assert whole == half and len(whole) > 20
    result = train_here(tmp_path, "ckpt=half", "trainer.max_steps=21", "precision=32-true", tiny=False)
    assert result.code == 0 and "fp8 -> 32-true" in result.out and "fp8 products" not in result.out


def test_what_cannot_train_in_fp8_is_refused() -> None:
    with pytest.raises(UserError, match=r"no fp8 products on mps.*precision=32-true"):
        fp8.require(torch.device("mps"))
    with mock.patch.object(fp8, "HAS_TRITON", False), pytest.raises(UserError, match="pip install triton"):
        fp8.require(CUDA)
    fp8.require(CPU)
    with (
        mock.patch.object(fp8, "HAS_TRITON", True),
        mock.patch.object(torch.cuda, "get_device_capability", return_value=(8, 0)),
        mock.patch.object(torch.cuda, "get_device_name", return_value="A100"),
        pytest.raises(UserError, match=r"A100 has no fp8 .*8\.9.*precision=bf16-mixed"),
    ):
        fp8.require(CUDA)


def test_models_that_do_not_fit_are_refused(small: None) -> None:
    frozen = make_net(n_embd=32)
    frozen.transformer.wte.weight.requires_grad_(False)
    with pytest.raises(UserError, match="finetune=full"):
        fp8.convert(frozen, "fp8", 48)
    with pytest.raises(UserError, match=r"multiple of 16 tokens.* 40"):
        fp8.convert(make_net(n_embd=32), "fp8", 40)
    fp8.SMALLEST = 550
    with pytest.raises(UserError, match=r"at least 550.*model\.n_embd=768"):
        fp8.convert(make_net(n_embd=32), "fp8", 48)


@pytest.mark.gpu
def test_a_captured_step_in_fp8_resumes_with_the_same_bits(small: None, tmp_path: Path) -> None:
    common = ["trainer.accelerator=gpu", "precision=fp8", "compile=false", "schedule=constant"]
    for name, graphs, steps in (("plain", "false", 20), ("half", "true", 10)):
        words = [*common, f"name={name}", f"cuda_graphs={graphs}", f"trainer.max_steps={steps}"]
        result = train_here(tmp_path, *words)
        assert result.code == 0, result.err
    result = train_here(tmp_path, "ckpt=half", "trainer.max_steps=20", tiny=False)
    assert result.code == 0, result.err
    assert rows(tmp_path / "runs" / "plain") == rows(tmp_path / "runs" / "half")
