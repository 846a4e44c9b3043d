"""Examples, their order and their batches."""

from dataclasses import dataclass
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from data.classification import ClassificationDataModule
from data.examples import CLS, PAD, SPECIAL, Shuffled, draw
from data.listops import ListOps


@dataclass
class Counting:
    """Pairs of sequences of 1 to `longest` tokens 0, 1, 2, ..., labelled by the first one's parity."""

    longest: int = 5
    least: int = 1
    name: str = "counting"
    sequences: int = 2
    n_tokens: int = 9
    n_classes: int = 2

    def example(self, rng, split):
        lengths = [rng.randint(self.least, self.longest) for _ in range(2)]
        return [list(range(length)) for length in lengths], lengths[0] % 2


def module(rank=0, world_size=1, **options):
    examples = {split: draw(Counting(), split, n, 6) for split, n in (("train", 10), ("test", 7))}
    options = {"batch_size": 4, "seed": 3} | options
    made = ClassificationDataModule(**examples, **options)
    if world_size > 1:
        part = {"rank": rank, "num_replicas": world_size}
        made.trainer = SimpleNamespace(distributed_sampler_kwargs=part)
    return made


def test_examples_hold_cls_tokens_and_padding():
    found = draw(Counting(), "train", 20, 6)
    assert found.tokens.shape == (20, 2, 6) and found.vocab_size == 11 and found.padded and len(found) == 20
    for tokens, length, label in zip(found.tokens, found.lengths, found.labels, strict=True):
        for row, n in zip(tokens, length, strict=True):
            assert row.tolist() == [CLS, *range(SPECIAL, SPECIAL + n - 1)] + [PAD] * (6 - n)
        assert label == (length[0] - 1) % 2
    assert found.majority == max(found.labels.mean(), 1 - found.labels.mean())


def test_an_example_is_a_function_of_seed_split_and_number():
    few, many = draw(Counting(), "train", 3, 6), draw(Counting(), "train", 9, 6)
    assert np.array_equal(few.tokens, many.tokens[:3])
    for other in (draw(Counting(), "val", 9, 6), draw(Counting(), "train", 9, 6, seed=1)):
        assert not np.array_equal(many.lengths, other.lengths)


def test_several_processes_draw_the_same():
    alone, shared = (draw(ListOps(5, 20), "train", 600, 24, workers=workers) for workers in (1, 2))
    for name in ("tokens", "lengths", "labels"):
        assert np.array_equal(getattr(alone, name), getattr(shared, name))


def test_what_is_too_long_is_refused():
    with pytest.raises(ValueError, match="counting has 6 tokens with its CLS, and seq_len is 5"):
        draw(Counting(least=5), "train", 1, 5)
    with pytest.raises(ValueError, match="the number of examples=0"):
        draw(ListOps(), "train", 0, 2048)


def test_lengths_are_given_where_there_is_padding():
    batch = draw(Counting(), "train", 9, 6).batch(np.arange(3))
    assert {name: (array.shape, array.dtype) for name, array in batch.items()} == {
        "input_ids": ((3, 2, 6), np.int64),
        "targets": ((3,), np.int64),
        "lengths": ((3, 2), np.int32),
    }
    assert set(draw(Counting(least=5), "train", 9, 6).batch(np.arange(3))) == {"input_ids", "targets"}


def test_an_epoch_has_every_example_once_in_an_order_of_its_own():
    examples = draw(Counting(), "train", 10, 6)
    examples.tokens[:, 0, 1] = np.arange(10)

    def order(seed, epoch):
        found = Shuffled(examples, seed).batch(np.arange(10) + 10 * epoch)["input_ids"]
        return found[:, 0, 1].tolist()

    assert sorted(order(0, 0)) == sorted(order(0, 1)) == list(range(10))
    assert order(0, 0) == order(0, 0) != order(0, 1) and order(0, 0) != order(1, 0)


def test_ranks_share_the_batches_and_training_goes_on_where_it_stopped():
    whole = [next(iter(module(batch_size=8).train_dataloader()))["input_ids"]]
    parts = [next(iter(module(rank, 2).train_dataloader()))["input_ids"] for rank in (0, 1)]
    assert torch.equal(torch.cat(parts), whole[0])
    stopped, batches = module(), iter(module().train_dataloader())
    stopped.load_state_dict({"consumed": 4})
    next(batches)
    assert torch.equal(next(iter(stopped.train_dataloader()))["targets"], next(batches)["targets"])
    assert stopped.state_dict() == {"consumed": 4}


def test_the_test_set_comes_whole_and_what_fills_the_last_batch_is_ignored():
    batches = list(module().val_dataloader())
    targets = torch.cat([batch["targets"] for batch in batches])
    expected = torch.from_numpy(draw(Counting(), "test", 7, 6).labels)
    assert torch.equal(targets[:7], expected) and targets[7:].tolist() == [-1]
