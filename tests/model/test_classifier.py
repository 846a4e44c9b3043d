"""The classifier: what its logits depend on, that it learns, and its accuracy by hand."""

from __future__ import annotations

from functools import partial
from typing import Any

import lightning as L
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from attention.naive import NaiveAttention
from attention.tiled import TiledAttention
from model.classifier import Classifier, LitClassifier
from model.gpt import GPTConfig
from model.training import runtime

SHAPES = {"vocab_size": 20, "seq_len": 12, "n_layer": 2, "n_head": 2, "n_embd": 16, "causal": False}


def make_net(attention: Any = None, sequences: int = 1, **changes: Any) -> Classifier:
    torch.manual_seed(0)
    config = GPTConfig(**{**SHAPES, **changes})
    return Classifier(config, 3, attention or NaiveAttention(), sequences=sequences)


def make_ids(*shape: int, seed: int = 1) -> Tensor:
    return torch.randint(20, shape, generator=torch.Generator().manual_seed(seed))


def stirred(net: Classifier) -> Classifier:
    """Weights large enough that everything shows in the logits."""
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.3)
    return net.double()


@pytest.mark.parametrize("position", ["learned", "rope", "alibi", "none"])
@pytest.mark.parametrize("attention", [NaiveAttention(), TiledAttention()], ids=["naive", "tiled"])
def test_padding_does_not_reach_the_logits(position: str, attention: Any) -> None:
    """Whatever it holds, and however much of it there is."""
    net, ids = stirred(make_net(attention, position=position)), make_ids(4, 1, 12)
    lengths = torch.tensor([[12], [7], [3], [1]], dtype=torch.int32)
    logits = net(ids, lengths=lengths)
    other = ids.clone()
    for row, length in enumerate(lengths.flatten().tolist()):
        other[row, :, length:] = 5
        alone = net(ids[row : row + 1, :, :length])
        torch.testing.assert_close(logits[row : row + 1], alone, rtol=1e-9, atol=1e-12)
    assert torch.equal(net(other, lengths=lengths), logits)
    assert (net(other) - logits)[1:].abs().max() > 1e-3  # without lengths it does


def test_every_token_of_a_sequence_reaches_the_logits() -> None:
    net, ids = stirred(make_net()), make_ids(1, 1, 12)
    logits = net(ids)
    for at in range(12):
        changed = ids.clone()
        changed[0, 0, at] = (ids[0, 0, at] + 1) % 20
        assert (net(changed) - logits).abs().max() > 1e-6


def test_a_pair_is_judged_by_product_and_distance() -> None:
    net, ids = stirred(make_net(sequences=2)), make_ids(3, 2, 12)
    assert net.lm_head.weight.shape == (3, 32)
    torch.testing.assert_close(net(ids), net(ids.flip(1)))
    single = stirred(make_net())
    single.lm_head = torch.nn.Identity()
    single.transformer.load_state_dict(net.transformer.state_dict())
    # without targets, whatever the head leaves: the first token's (B, 1, C)
    u, v = (single(ids[:, i : i + 1])[:, 0] for i in (0, 1))
    expected = F.linear(torch.cat((u * v, (u - v).abs()), 1), net.lm_head.weight, net.lm_head.bias)
    torch.testing.assert_close(net(ids), expected)


def test_the_loss_is_the_sum_over_targets_that_count() -> None:
    net, ids = make_net(), make_ids(4, 1, 12)
    targets = torch.tensor([0, -1, 2, 1])
    logits = net(ids)
    expected = -logits.log_softmax(-1)[[0, 2, 3], [0, 2, 1]].sum()
    torch.testing.assert_close(net(ids, targets=targets), expected)


def test_what_cannot_be_is_refused() -> None:
    with pytest.raises(ValueError, match=r"needs model\.causal=false"):
        make_net(causal=True)
    with pytest.raises(ValueError, match="sequences=3"):
        make_net(sequences=3)
    with pytest.raises(ValueError, match="13 tokens are more than the model's context of 12"):
        make_net()(make_ids(1, 1, 13))


class Parity(L.LightningDataModule):
    """The label of a sequence is whether its last token but padding is 2 or 3: a rule of one token."""

    def advance(self, samples: int) -> None:
        """Every epoch is the same."""

    def batch(self, seed: int, n: int = 32) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(seed)
        ids = torch.randint(4, 20, (n, 1, 12), generator=generator)
        lengths = torch.randint(4, 13, (n, 1), generator=generator, dtype=torch.int32)
        targets = torch.randint(2, (n,), generator=generator)
        ids[:, 0, 0] = 1
        ids[torch.arange(n), 0, lengths.flatten() - 1] = 2 + targets
        targets[-1] = -1
        return {"input_ids": ids, "targets": targets, "lengths": lengths}

    def loader(self, seeds: range) -> Any:
        return torch.utils.data.DataLoader([self.batch(seed) for seed in seeds], batch_size=None)

    def train_dataloader(self) -> Any:
        return self.loader(range(60))

    def val_dataloader(self) -> Any:
        return self.loader(range(100, 103))


def test_it_learns_a_rule_and_logs_the_accuracy() -> None:
    runtime.quiet()
    optimizer = partial(torch.optim.AdamW, lr=1e-2, fused=True)
    lit, data = LitClassifier(make_net(), optimizer, lambda step, steps: 1.0), Parity()
    trainer = L.Trainer(accelerator="cpu", max_steps=60, logger=False, **runtime.TRAINER)

    def validated() -> dict[str, float]:
        trainer.validate(lit, datamodule=data, verbose=False)
        return {name: float(value) for name, value in trainer.callback_metrics.items()}

    before = validated()
    trainer.fit(lit, datamodule=data)
    after = validated()
    assert before["val/accuracy"] < 0.7 and after["val/accuracy"] > 0.98
    assert after["val/loss"] < 0.1 < before["val/loss"]
    # by hand, of what the module would have to say of its own predictions
    batches = [data.batch(seed) for seed in range(100, 103)]
    with torch.no_grad():
        guesses = [lit.net(b["input_ids"], lengths=b["lengths"]).argmax(-1) for b in batches]
    right = sum(int((g[:-1] == b["targets"][:-1]).sum()) for g, b in zip(guesses, batches, strict=True))
    assert after["val/accuracy"] == pytest.approx(right / (3 * 31))
