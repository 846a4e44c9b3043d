"""The loss in chunks: the same numbers as all at once, and never the logits of all tokens."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from attention.naive import NaiveAttention
from conf.resume import refuse_changes
from conf.saved import SavedRun, plain
from conf.values import UserError
from model.gpt import GPT, GPTConfig
from model.loss import IGNORE, chunked_loss
from scripts.measure.instruments.allocations import recorder_of
from scripts.memory import composed

TINY: dict[str, Any] = {"vocab_size": 50, "seq_len": 16, "n_layer": 2, "n_head": 4, "n_embd": 32}
V, PADDED, C = 50, 64, 24  # of `problem`


def build(**changes: Any) -> GPT:
    torch.manual_seed(0)
    return GPT(GPTConfig(**{**TINY, **changes}), NaiveAttention())


def batch(rows: int = 3, length: int = 15, seed: int = 1) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    ids, targets = torch.randint(50, (2, rows, length), generator=generator)
    targets[0, :5] = targets[2, 7] = IGNORE
    return {"input_ids": ids, "targets": targets}


def gradients(net: GPT, *batches: dict[str, Tensor]) -> tuple[list[float], dict[str, Tensor]]:
    losses = []
    for each in batches:
        loss = net(**each) / 40
        loss.backward()
        losses.append(loss.item())
    return losses, {name: p.grad for name, p in net.named_parameters()}


def problem(dtype: torch.dtype, n: int = 37, scale: float = 1.0) -> tuple[Tensor, Tensor, Tensor]:
    """x (n, C), weight (PADDED, C) and targets (n,), some of which are not counted."""
    generator = torch.Generator().manual_seed(2)
    x, weight = (torch.randn(rows, C, generator=generator, dtype=dtype) * scale for rows in (n, PADDED))
    targets = torch.randint(V, (n,), generator=generator)
    targets[::9] = IGNORE
    return x.requires_grad_(), weight.requires_grad_(), targets


def plain_loss(x: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    logits = F.linear(x, weight)[:, :V]
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return F.cross_entropy(logits, targets, ignore_index=IGNORE, reduction="sum")


@pytest.mark.parametrize("chunk", [1, 7, 16, 45, 1000])
@pytest.mark.parametrize(
    "changes", [{}, {"tie_embeddings": False, "norm": "rmsnorm"}], ids=["tied", "untied"]
)
def test_a_model_has_the_same_loss_and_gradients(chunk: int, changes: dict[str, Any]) -> None:
    """3 x 15 tokens, some not counted, 14 columns of padding; two micro-batches add up."""
    batches = batch(), batch(seed=5)
    losses, grads = gradients(build(loss_chunk=chunk, **changes), *batches)
    expected, plain = gradients(build(**changes), *batches)
    assert losses == pytest.approx(expected, rel=1e-6)
    assert grads.keys() == plain.keys()
    for name, grad in grads.items():
        torch.testing.assert_close(grad, plain[name], rtol=1e-5, atol=1e-7, msg=name)
    assert not grads["lm_head.weight" if changes else "transformer.wte.weight"][V:].any()  # padding's


@pytest.mark.parametrize("chunk", [1, 5, 37, 64])
def test_it_is_the_formula_in_fp64(chunk: int) -> None:
    x, weight, targets = problem(torch.float64)
    loss, expected = chunked_loss(x, weight, targets, V, chunk), plain_loss(x, weight, targets)
    torch.testing.assert_close(loss, expected, rtol=1e-14, atol=0)
    found, right = (torch.autograd.grad(each / 3, (x, weight)) for each in (loss, expected))
    torch.testing.assert_close(found, right, rtol=1e-12, atol=1e-14)
    with torch.no_grad():
        assert torch.equal(chunked_loss(x, weight, targets, V, chunk), loss)


@pytest.mark.parametrize("scale", [0.3, 1.0], ids=["unsure", "sure"])
def test_autocast_loses_no_more_than_all_at_once(scale: float) -> None:
    """Errors against fp64 of the 16-bit products' own inputs; where the model is sure of the right token its
    gradient is p - 1, of a p near 1."""
    n = 640
    x, weight, targets = problem(torch.float32, n, scale)
    if scale == 1:
        best = F.linear(x, weight)[:, :V].argmax(1)
        targets = torch.where(targets == IGNORE, targets, best)
    exact = tuple(each.detach().bfloat16().double().requires_grad_() for each in (x, weight))
    right = torch.autograd.grad(plain_loss(*exact, targets) / n, exact)
    errors = []
    for chunk in (n, 64, 0):
        with torch.autocast("cpu", torch.bfloat16):
            loss = chunked_loss(x, weight, targets, V, chunk) if chunk else plain_loss(x, weight, targets)
        found = torch.autograd.grad(loss / n, (x, weight))
        assert [grad.dtype for grad in found] == [torch.float32] * 2
        errors.append([(a - b).norm() / b.norm() for a, b in zip(found, right, strict=True)])
    whole, chunks, plain = torch.tensor(errors)
    assert (whole <= 1.05 * plain).all() and (chunks <= 1.05 * plain).all()


def test_without_a_target_that_counts_there_is_no_loss() -> None:
    x, weight, targets = problem(torch.float32)
    loss = chunked_loss(x, weight, torch.full_like(targets, IGNORE), V, 8)
    assert loss == 0 and not any(grad.any() for grad in torch.autograd.grad(loss, (x, weight)))


def test_backward_can_be_had_again_but_not_differentiated() -> None:
    x, weight, targets = problem(torch.float32)
    loss = chunked_loss(x, weight, targets, V, 8)
    one, two = (torch.autograd.grad(f * loss, (x, weight), retain_graph=True) for f in (1, 2))
    torch.testing.assert_close([2 * grad for grad in one], list(two), rtol=0, atol=0)
    with pytest.raises(NotImplementedError, match=r"no second derivative .*model\.loss_chunk=0 has"):
        torch.autograd.grad(loss, x, create_graph=True)


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("narrow", [True, False])
def test_nothing_of_all_tokens_and_the_vocabulary_is_ever_made(training: bool, narrow: bool) -> None:
    """Of 240 tokens, 16 at a time, and 4,992 entries, no block is as large as a byte for each; all at once
    one of 4 bytes for each is."""
    sizes = []
    for chunk in (16, 0):
        net, most = (
            build(vocab_size=4990, seq_len=120, n_embd=16, loss_chunk=chunk).train(training),
            240 * 4992,
        )
        recorder = recorder_of(torch.device("cpu"))
        with (
            recorder,
            torch.autocast("cpu", torch.bfloat16, enabled=narrow),
            torch.set_grad_enabled(training),
        ):
            loss = net(**batch(rows=3, length=80))
            if training:
                loss.backward()
        sizes.append(max(event.size for event in recorder.events() if event.what == "alloc"))
    assert sizes[0] < most and sizes[1] >= 4 * 240 * 4990


def test_it_compiles_whole_however_many_chunks() -> None:
    graphs: list[int] = []

    def backend(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        from torch._dynamo.backends.debugging import aot_eager

        graphs.append(sum(len(m.graph.nodes) for m in graph.modules() if isinstance(m, torch.fx.GraphModule)))
        return aot_eager(graph, inputs)

    x, weight, targets = problem(torch.float32)
    right = torch.autograd.grad(plain_loss(x, weight, targets), (x, weight))
    for chunk in (1, 100):
        step = torch.compile(chunked_loss, fullgraph=True, dynamic=False, backend=backend)
        found = torch.autograd.grad(step(x, weight, targets, V, chunk), (x, weight))
        torch.testing.assert_close(found, right, rtol=1e-5, atol=1e-5)
    assert graphs[0] == graphs[1]


def test_the_op_is_whole() -> None:
    x, weight, targets = problem(torch.float32)
    for wanted in ((True, True), (True, False), (False, False)):
        inputs = (x.detach(), weight.detach(), targets, V, 8, *wanted)
        torch.library.opcheck(torch.ops.tilegpt.head_loss.default, inputs)


def test_logits_and_frozen_weights_are_as_before() -> None:
    net, plain = build(loss_chunk=4), build()
    ids = batch()["input_ids"]
    assert torch.equal(net(ids), plain(ids))
    for p in net.parameters():
        p.requires_grad_(False)
    net.transformer.ln_f.weight.requires_grad_()
    net(**batch()).backward()
    plain(**batch()).backward()
    torch.testing.assert_close(
        net.transformer.ln_f.weight.grad, plain.transformer.ln_f.weight.grad, rtol=1e-5, atol=1e-5
    )
    assert net.lm_head.weight.grad is None


def test_a_frozen_head_has_no_gradient_made() -> None:
    """As beside adapters: nothing of its size in fp32 comes to be."""
    sizes = []
    for frozen in (True, False):
        net = build(vocab_size=4990, n_embd=64, loss_chunk=8)
        net.lm_head.weight.requires_grad_(not frozen)
        recorder = recorder_of(torch.device("cpu"))
        with recorder, torch.autocast("cpu", torch.bfloat16):
            net(**batch()).backward()
        sizes.append(max(event.size for event in recorder.events() if event.what == "alloc"))
    assert sizes[0] < 4 * net.lm_head.weight.numel() <= sizes[1]


@pytest.mark.parametrize("value", ["-1", "2.5", "many", "null", "true"])
def test_what_is_no_number_of_tokens_is_refused(value: str) -> None:
    chunk = composed([f"model.loss_chunk={value}"]).model.loss_chunk
    with pytest.raises(UserError, match=rf"model.loss_chunk={value}: .* a whole number, at least 0"):
        GPTConfig(**TINY, loss_chunk=chunk)


def test_a_run_may_change_it_as_it_goes_on() -> None:
    saved = SavedRun({"data": "stdlib"}, plain(composed([])))
    refuse_changes(saved, saved.choices, composed(["model.loss_chunk=64"]))
    with pytest.raises(ValueError, match=r"model\.n_embd"):
        refuse_changes(saved, saved.choices, composed(["model.loss_chunk=64", "model.n_embd=64"]))
