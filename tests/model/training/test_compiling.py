"""What torch.compile compiles of a run, and what it leaves: which steps, which validations."""

from __future__ import annotations

import gc
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import torch

from attention.auto import AutoAttention
from attention.base import Attention
from attention.flex import FlexAttention
from attention.naive import NaiveAttention
from model.calls import attention_call
from model.gpt import GPT, GPTConfig
from model.training import runtime
from model.training.lit_gpt import LitGPT
from tests.model.training.test_lit_gpt import constant, make_batch, make_net
from tests.running import train_here

pytestmark = pytest.mark.sampled(3)


@pytest.mark.parametrize("asked", [True, "blocks"])
@pytest.mark.parametrize("n_embd", [32, 576])
def test_what_is_compiled_and_how(asked: bool | str, n_embd: int) -> None:
    """Narrow models without Inductor's mixed-order reduction, as the whole and by blocks."""
    config = GPTConfig(vocab_size=50, seq_len=16, n_layer=1, n_head=2, n_embd=n_embd)
    lit, seen = LitGPT(GPT(config, NaiveAttention()), partial(torch.optim.AdamW), constant, compile=asked), []
    method = "compile" if asked is True else "compile_blocks"
    with (
        mock.patch.object(LitGPT, "device_mesh", None),
        mock.patch.object(lit.net, method, lambda **how: seen.append(how)),
    ):
        lit.configure_model()
    options = {"triton.mix_order_reduction": False} if n_embd == 32 else None
    assert seen == [{"dynamic": False, "options": options}]
    assert not torch._dynamo.config.optimize_ddp  # DDP's buckets do not cut it


def test_train_asks_whether_validation_is_compiled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen, asked = [], []
    monkeypatch.setattr(runtime, "may_validate_eagerly", lambda *of: asked.append(of) or True)
    start = LitGPT.on_validation_epoch_start

    def seeing(lit: LitGPT) -> None:
        start(lit)
        seen.append(lit.in_eager_validation)

    monkeypatch.setattr(LitGPT, "on_validation_epoch_start", seeing)
    assert train_here(tmp_path, "trainer.max_steps=1").code == 0
    assert seen and all(seen) and asked[0][0] is False  # on a CPU, nothing is compiled


@pytest.mark.parametrize("method", ["compile", "compile_blocks"])
@pytest.mark.parametrize(
    ("may", "batches", "eagerly"), [(False, 7, False), (True, 7, True), (True, 48, False)]
)
def test_few_validations_are_not_compiled(method: str, may: bool, batches: int, eagerly: bool) -> None:
    """Of 21 validations in a run."""
    compiled: list[torch.fx.GraphModule] = []
    net, batch = make_net(), make_batch()
    expected = net.eval()(**batch)
    getattr(net, method)(backend=lambda graph, _: compiled.append(graph) or graph, dynamic=False)
    lit = LitGPT(net, partial(torch.optim.AdamW), constant, validates_eagerly=may)
    trainer = SimpleNamespace(num_val_batches=[batches], max_steps=5000, val_check_interval=250, world_size=1)
    with mock.patch.object(LitGPT, "trainer", trainer), torch.no_grad():
        lit.on_validation_epoch_start()
        lit.validation_step(batch, 0)
    assert bool(compiled) is not eagerly
    torch.testing.assert_close(lit.val_sums[0], expected.double())  # summed over the tokens
    before = len(compiled)
    net.train()(**batch)
    assert len(compiled) > before


@pytest.mark.parametrize(
    ("compiled", "attention", "rows", "may"),
    [
        ("blocks", NaiveAttention("naive"), 64, True),
        (True, NaiveAttention("naive"), 64, True),
        (True, AutoAttention(), 64, True),
        (False, NaiveAttention("naive"), 64, False),
        (True, NaiveAttention("naive"), 640, False),
        (True, FlexAttention(), 64, False),  # uncompiled, it computes all scores
    ],
)
def test_which_models_may_be_validated_uncompiled(
    compiled: bool | str, attention: Attention, rows: int, may: bool
) -> None:
    config = GPTConfig(vocab_size=65, seq_len=256, n_layer=6, n_head=6, n_embd=384)
    facts = {"device": torch.device("cpu"), "dtype": torch.float32}
    call = attention_call(config, "training", batch=rows, tokens=256, **facts)
    assert runtime.may_validate_eagerly(compiled, attention, call, config, rows) is may


@pytest.mark.parametrize(
    ("asked", "precision", "cpu", "cuda"),
    [
        (True, "auto", True, True),
        (False, "auto", False, False),
        ("auto", "auto", False, True),
        ("blocks", "auto", False, "blocks"),
        ("auto", "fp8", False, "blocks"),
        (True, "fp8", True, True),
    ],
)
def test_auto_and_blocks_compile_on_cuda(
    asked: bool | str, precision: str, cpu: bool, cuda: bool | str
) -> None:
    """Where Inductor's processes are started, if anything is compiled."""
    with mock.patch.object(runtime, "start_compilers") as start:
        assert runtime.begin_compiling(asked, torch.device("cpu"), precision) is cpu and not start.called
        assert runtime.begin_compiling(asked, torch.device("cuda", 0), precision) == cuda
        assert start.call_count == bool(cuda)


def test_what_compiling_imports_is_not_searched_for_garbage() -> None:
    lit, seen = LitGPT(make_net(), partial(torch.optim.AdamW), constant, compile=True), []
    with (
        mock.patch.object(LitGPT, "device_mesh", None),
        mock.patch.object(lit.net, "compile", lambda **kwargs: seen.append(gc.isenabled())),
    ):
        lit.configure_model()
    assert seen == [False] and gc.isenabled()
