import contextlib
import itertools
import os
import pickle
import shutil
from types import SimpleNamespace

import lightning
import pytest
import torch

from data import prepare, stream
from data.corpora import SyntheticCorpus, TextCorpus
from data.datamodule import TokenDataModule, text_datamodule
from data.textfiles import content_hash
from tests.data.conftest import write_folder


@pytest.fixture(scope="module")
def prepared(tmp_path_factory):
    """(path of the texts, data_dir), prepared once."""
    root = tmp_path_factory.mktemp("data")
    path = str(write_folder(root / "texts"))
    TokenDataModule(TextCorpus(path=path), "byte", seq_len=8, data_dir=root / "out").prepare_data()
    return path, root / "out"


@pytest.fixture
def make(prepared):
    def make_module(rank=0, world_size=1, consumed=0, **options):
        path, data_dir = prepared
        options = {"seq_len": 16, "batch_size": 4, "seed": 5} | options
        module = TokenDataModule(TextCorpus(path=path), "byte", data_dir=data_dir, **options)
        if world_size > 1:
            part = {"rank": rank, "num_replicas": world_size}
            module.trainer = SimpleNamespace(distributed_sampler_kwargs=part)
        module.advance(consumed)
        return module

    return make_module


def take(loader, n):
    iterator = iter(loader)
    return [next(iterator) for _ in range(n)]


def rows(batches):
    return torch.cat([batch["input_ids"] for batch in batches])


def test_shapes_types_and_attributes(make):
    module = make(document_mask=True)
    (batch,) = take(module.train_dataloader(), 1)
    assert {name: (tuple(t.shape), t.dtype) for name, t in batch.items()} == {
        "input_ids": ((4, 16), torch.int64),
        "targets": ((4, 16), torch.int64),
        "document_ids": ((4, 16), torch.int32),
    }
    assert module.vocab_size == 257 and module.tokenizer.name == "byte"
    assert module.train_tokens == module.meta["splits"]["train"]["tokens"]
    assert module.val_tokens == module.meta["splits"]["val"]["tokens"]
    assert len(module.fingerprint) == 64 and module.fingerprint == ready(make()).fingerprint


def ready(module):
    module.prepare_data()
    module.setup("fit")
    module.setup("validate")
    return module


def test_a_launch_hashes_the_source_once(make, monkeypatch):
    hashed = []
    monkeypatch.setattr("data.corpora.content_hash", lambda path: hashed.append(path) or content_hash(path))
    ready(make())
    assert len(hashed) == 30
    ready(make()).corpus.describe()
    make().setup()  # as a process that did not prepare
    assert len(hashed) == 90


def test_without_a_mask_targets_are_the_next_inputs(make):
    (batch,) = take(make().train_dataloader(), 1)
    assert set(batch) == {"input_ids", "targets"}
    assert torch.equal(batch["input_ids"][:, 1:], batch["targets"][:, :-1])


@pytest.mark.parametrize("consumed", [0, 12])
def test_workers_change_nothing(make, consumed):
    alone = take(make(consumed=consumed).train_dataloader(), 7)
    with_workers = take(make(consumed=consumed, num_workers=2).train_dataloader(), 7)
    for a, b in zip(alone, with_workers, strict=True):
        assert torch.equal(a["input_ids"], b["input_ids"]) and torch.equal(a["targets"], b["targets"])


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("world_size", [1, 2])
def test_steps_that_are_read_at_once_are_those_read_one_by_one(make, monkeypatch, num_workers, world_size):
    def steps():
        module = make(world_size - 1, world_size, consumed=8, num_workers=num_workers)
        module.set_accumulation(2)
        return rows(take(module.train_dataloader(), 11))

    monkeypatch.setattr(stream, "AT_ONCE", 3 * 2 * 4 * 16)  # three steps
    three = steps()
    monkeypatch.setattr(stream, "AT_ONCE", 1)
    assert torch.equal(steps(), three)


def test_the_stream_continues_behind_what_was_consumed(make):
    whole = rows(take(make(seq_len=64).train_dataloader(), 600))  # several epochs
    assert module_windows(make(seq_len=64)) < 1000
    for k in (0, 1, 4, 1000):
        module = make(seq_len=64, consumed=k)
        assert torch.equal(rows(take(module.train_dataloader(), 5)), whole[k : k + 20])


def module_windows(module):
    module.setup()
    return module._train.n_windows


def test_one_loader_continues_too(make):
    module = make()
    loader = module.train_dataloader()
    whole = rows(take(loader, 4))
    iterator = iter(loader)
    module.advance(8)  # after iter(): this iterator stays where it is
    assert torch.equal(next(iterator)["input_ids"], whole[:4])
    assert torch.equal(rows(take(loader, 2)), whole[8:])


@pytest.mark.parametrize("consumed", [0, 24])
def test_ranks_together_are_one_process_with_larger_batches(make, consumed):
    one = take(make(consumed=consumed, batch_size=6).train_dataloader(), 4)
    two = [take(make(r, 2, consumed, batch_size=3).train_dataloader(), 4) for r in range(2)]
    three = [take(make(r, 3, consumed, batch_size=2).train_dataloader(), 4) for r in range(3)]
    for step, whole in enumerate(one):
        for ranks in (two, three):
            assert torch.equal(whole["input_ids"], rows(batches[step] for batches in ranks))


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_step_holds_its_micro_batches_in_order(make, world_size):
    for rank in range(world_size):
        micro = rows(take(make(rank, world_size, batch_size=2).train_dataloader(), 12))
        module = make(rank, world_size, batch_size=2, num_workers=2)
        module.set_accumulation(3)
        steps = take(module.train_dataloader(), 4)
        assert steps[0]["input_ids"].shape == (6, 16) and torch.equal(rows(steps), micro)


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_validation_covers_every_token_once_over_all_ranks(make, world_size):
    modules = [make(r, world_size, eval_batch_size=5) for r in range(world_size)]
    loaders = [module.val_dataloader() for module in modules]
    batches = [list(loader) for loader in loaders]
    assert {len(b) for b in batches} == {len(loader) for loader in loaders} == {len(batches[0])}
    targets = torch.cat([b["targets"] for b in itertools.chain(*batches)])
    tokens = modules[0]._files["val"].tokens
    counted = torch.bincount(targets[targets >= 0], minlength=257)
    assert torch.equal(counted, torch.bincount(torch.from_numpy(tokens[1:].astype("int64")), minlength=257))
    assert all(b["targets"].shape == (5, 16) for b in itertools.chain(*batches))


def test_validation_stops_at_its_limit(make):
    batches = list(make(max_val_tokens=100).val_dataloader())
    assert sum((b["targets"] >= 0).sum() for b in batches) == 96


@pytest.mark.parametrize("num_workers", [0, 2])
def test_loaders_never_touch_the_global_generator(make, num_workers):
    module = make(num_workers=num_workers)
    before = torch.get_rng_state()
    take(module.train_dataloader(), 2)
    list(module.val_dataloader())
    assert torch.equal(before, torch.get_rng_state())


def test_state_travels_and_refuses_other_data(make, tmp_path):
    module = make(consumed=36)
    state = pickle.loads(pickle.dumps(module.state_dict()))
    assert state == {"consumed": 36, "fingerprint": module.fingerprint, "seed": 5, "seq_len": 16}
    resumed = make()
    resumed.load_state_dict(state)
    assert resumed.consumed == 36
    for options, message in [
        ({"seed": 6}, "seed of the data is not the checkpoint's: 6 here, 5 there"),
        ({"seq_len": 8}, "seq_len"),
    ]:
        early, late = make(**options), make(**options)
        early.load_state_dict(state)
        with pytest.raises(ValueError, match=message):
            early.setup()
        late.setup()
        with pytest.raises(ValueError, match=message):
            late.load_state_dict(state)
    other = write_folder(tmp_path / "texts", n_files=12)
    module = TokenDataModule(TextCorpus(path=str(other)), "byte", data_dir=tmp_path / "o", seq_len=16, seed=5)
    ready(module)
    with pytest.raises(ValueError, match=r"data\.path=.*texts: the text has changed since"):
        module.load_state_dict(state)


def test_a_corpus_is_known_by_its_content_and_its_tokenizer(tmp_path):
    def module(path, tokenizer="char", **options):
        corpus = TextCorpus(path=str(path), **options)
        return ready(TokenDataModule(corpus, tokenizer, data_dir=tmp_path / "out", seq_len=16))

    def known(before, after):
        after.require_same(before.state_dict(), before.tokenizer.to_dict())

    book, same, moved = (tmp_path / name for name in ("book.txt", "same.txt", "moved"))
    book.write_text("abcd" * 500)
    same.write_text("bcde" * 500)
    old = module(book)
    with pytest.raises(ValueError, match=r"data\.path=.*same\.txt: the text has changed since"):
        known(old, module(same))
    assert module(same).state_dict() == old.state_dict()  # the ids are equal, their characters are not
    write_folder(moved)
    known(
        module(moved, {"kind": "bpe", "vocab_size": 300}),
        module(f"{moved}/*", {"kind": "bpe", "vocab_size": 300}),
    )
    # a run from when a glob's files had the whole path for a name: other files were validation
    before = module(f"{moved}/*.txt", whole_names=True)
    after = module(f"{moved}/*.txt")
    assert after.fingerprint != before.fingerprint
    known(before, after)
    assert after.fingerprint == before.fingerprint and after.state_dict() == before.state_dict()
    shutil.move(book, moved / "000.txt")
    with pytest.raises(ValueError, match="has changed since"):
        known(before, module(f"{moved}/*.txt"))


def test_what_another_process_prepared_outlives_a_refused_resume(tmp_path, monkeypatch):
    """The other one has the lock when this one asks for the same folder."""
    texts = [write_folder(tmp_path / name, n_files=n) for name, n in (("old", 11), ("new", 12))]
    old, ours, theirs = (
        text_datamodule("byte", path=str(path), seq_len=8, data_dir=tmp_path / "out", prepare_workers=1)
        for path in (texts[0], texts[1], texts[1])
    )
    old.prepare_data()
    state, tokenizer = old.state_dict(), old.tokenizer.to_dict()

    @contextlib.contextmanager
    def locked(*args, lock=prepare.locked):
        monkeypatch.setattr(prepare, "locked", lock)
        theirs.prepare_data()
        with lock(*args):
            yield

    monkeypatch.setattr(prepare, "locked", locked)
    ours.prepare_data()
    for module, stays in ((ours, True), (theirs, False)):
        with pytest.raises(ValueError, match="the text has changed"):
            module.require_same(state, tokenizer)
        assert module._folder.exists() == stays


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"seq_len": 0}, "seq_len=0"),
        ({"batch_size": 0}, "batch_size=0"),
        ({"eval_batch_size": 0}, "eval_batch_size=0"),
        ({"num_workers": -1}, "num_workers=-1"),
    ],
)
def test_sizes_out_of_range(make, options, message):
    with pytest.raises(ValueError, match=message):
        make(**options)


def test_too_short_and_not_prepared(make, prepared, tmp_path):
    with pytest.raises(ValueError, match=r"seq_len=100000 needs 100001"):
        make(seq_len=100_000).setup()
    unprepared = TokenDataModule(TextCorpus(path=prepared[0]), "byte", data_dir=tmp_path, seq_len=8)
    with pytest.raises(ValueError, match="is not prepared"):
        unprepared.setup()


def test_synthetic_needs_no_tokenizer_and_no_disk(tmp_path):
    corpus = SyntheticCorpus(vocab_size=100, n_tokens=2000, document_length=30)
    options = {"seq_len": 64, "batch_size": 2, "data_dir": tmp_path / "none", "document_mask": True}
    module = TokenDataModule(corpus, **options)
    module.prepare_data()
    (batch,) = take(module.train_dataloader(), 1)
    assert batch["input_ids"].max() < 100 and batch["document_ids"].max() >= 2
    assert (module.vocab_size, module.tokenizer, module.train_tokens) == (100, None, 2000)
    assert not (tmp_path / "none").exists()
    again = ready(TokenDataModule(corpus, num_workers=2, **options))
    assert again.fingerprint == module.fingerprint
    assert torch.equal(take(again.train_dataloader(), 1)[0]["input_ids"], batch["input_ids"])


def test_gpt2_tokens_train_without_the_vocabulary(make, monkeypatch):
    module = make()
    module.setup()
    module.meta["tokenizer_state"] = {"kind": "gpt2"}
    monkeypatch.setattr("data.hub.load_gpt2_encoding", lambda: pytest.fail("downloaded"))
    take(module.train_dataloader(), 1)


def test_text_datamodule(prepared):
    path, data_dir = prepared
    module = text_datamodule("byte", path=path, seq_len=16, data_dir=data_dir)
    assert isinstance(module, TokenDataModule) and ready(module).meta["source"]["files"] == 30


class Probe(lightning.LightningModule):
    """Counts what Lightning feeds it."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(()))
        self.seen = []

    def training_step(self, batch, _):
        self.seen.append(batch["input_ids"])
        self.trainer.datamodule.advance(len(batch["input_ids"]))
        return self.weight * 0.0

    def validation_step(self, batch, _):
        pass

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def test_a_trainer_takes_it_as_endless_and_resumes_exactly(make, tmp_path):
    def fit(steps, ckpt_path=None):
        module, probe = make(), Probe()
        trainer = lightning.Trainer(
            max_steps=steps,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            accelerator="cpu",
            val_check_interval=3,
            check_val_every_n_epoch=None,
            num_sanity_val_steps=1,
        )
        trainer.fit(probe, module, ckpt_path=ckpt_path, weights_only=True)
        assert trainer.num_training_batches == float("inf")
        return trainer, torch.cat(probe.seen)

    _, whole = fit(7)
    first, start = fit(3)
    first.save_checkpoint(tmp_path / "a.ckpt")
    _, rest = fit(7, str(tmp_path / "a.ckpt"))
    assert len(start) == 12 and torch.equal(torch.cat([start, rest]), whole)


def test_importing_the_parts_loads_nothing_heavy():
    code = (
        "import sys, data.corpora, data.hub, data.prepare, data.tokens, data.tokenizers; print(*sys.modules)"
    )
    loaded = set(os.popen(f"{os.sys.executable} -c '{code}'").read().split())
    assert "data.prepare" in loaded
    assert not loaded & {"torch", "lightning", "datasets", "tokenizers", "tiktoken", "hydra", "rich", "model"}
