"""The training step: accumulation, clipping, skipped updates, seeds; values against plain PyTorch."""

from __future__ import annotations

import gc
import traceback
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import lightning as L
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from attention import geometry
from attention.naive import NaiveAttention
from attention.sdpa import SDPAAttention
from model.gpt import GPT, GPTConfig
from model.training import lit_gpt, runtime
from model.training.callbacks import Metrics
from model.training.checkpoint import read_checkpoint
from model.training.late import LateScalars
from model.training.lit_gpt import LitGPT
from model.training.muon import MuonAdamW
from model.training.seeds import seed_generators, step_seed
from tests.running import rows, train_here

Batch = dict[str, Tensor]
EPS = 1e-5  # larger than rounding: Adam makes a whole step of a gradient of 1e-9


class Given(L.LightningDataModule):
    """These batches."""

    def __init__(self, batches: list[Batch]):
        super().__init__()
        self.batches, self.consumed = batches, 0

    def advance(self, samples: int) -> None:
        self.consumed += samples

    def train_dataloader(self) -> Any:
        return torch.utils.data.DataLoader(self.batches, batch_size=None)


def make_net(**changes: Any) -> GPT:
    torch.manual_seed(0)
    config = {"vocab_size": 40, "seq_len": 8, "n_layer": 2, "n_head": 2, "n_embd": 16, **changes}
    return GPT(GPTConfig(**config), NaiveAttention())


def make_batch(rows: int = 6, seed: int = 1, ignored: bool = False) -> Batch:
    generator = torch.Generator().manual_seed(seed)
    ids, targets = torch.randint(40, (2, rows, 8), generator=generator)
    if ignored:  # 0, 1, 2, ... of them in a row: each micro-batch counts another number
        targets[torch.arange(8) < torch.arange(rows)[:, None]] = -1
    return {"input_ids": ids, "targets": targets}


def constant(step: int, max_steps: int) -> float:
    return 1.0


class BlindAdamW(torch.optim.AdamW):
    """As on a Mac: it takes grad_scale and found_inf, and reads neither."""

    grad_scale = found_inf = property(lambda self: None, lambda self, value: None)


def train(
    net: GPT, batches: list[Batch], lr: float = 1e-2, kind: type = torch.optim.AdamW, **settings: Any
) -> tuple[LitGPT, list[dict]]:
    """Train on the batches; the module, and loss and gradient norm of each step."""
    optimizer = partial(kind, lr=lr, betas=(0.9, 0.95), eps=EPS, weight_decay=0.1, fused=True)
    lit = LitGPT(net, optimizer, constant, **settings)
    seen: list[dict] = []

    def arrived(step: int, scalars: dict[str, float]) -> None:
        seen.append({"step": step, "loss": scalars["train/loss"], "norm": scalars["train/grad_norm"]})

    lit.listeners.append(arrived)
    runtime.quiet()
    trainer = L.Trainer(accelerator="cpu", max_steps=len(batches), logger=False, **runtime.TRAINER)
    trainer.fit(lit, datamodule=Given(batches))
    return lit, seen


def mean_loss(net: GPT, batch: Batch) -> Tensor:
    logits = net(batch["input_ids"])[..., :40].flatten(0, 1)
    return F.cross_entropy(logits, batch["targets"].flatten(), ignore_index=-1)


def reference(net: GPT, batches: list[Batch], lr: float, clip: float | None) -> list[tuple[float, float]]:
    """The same, as PyTorch's manual would have it."""
    matrices = [p for p in net.parameters() if p.dim() >= 2]
    rest = [p for p in net.parameters() if p.dim() < 2]
    groups = [{"params": matrices}, {"params": rest, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=lr, betas=(0.9, 0.95), eps=EPS, weight_decay=0.1)
    seen = []
    for batch in batches:
        loss = mean_loss(net, batch)
        optimizer.zero_grad()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(net.parameters(), clip or float("inf"))
        optimizer.step()
        seen.append((loss.item(), norm.item()))
    return seen


def assert_close(net: GPT, other: GPT, **tolerance: float) -> None:
    for (name, a), b in zip(net.named_parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(a, b, msg=name, **({"rtol": 1e-4, "atol": 2e-6} | tolerance))


@pytest.mark.parametrize("ignored", [False, True])
@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize("clip", [None, 0.5, 100.0])
def test_steps_are_those_of_one_big_batch_in_plain_pytorch(
    accumulate: int, ignored: bool, clip: float | None
) -> None:
    batches = [make_batch(seed=seed, ignored=ignored) for seed in range(3)]
    net, plain = make_net(), make_net()
    expected = reference(plain, batches, 1e-2, clip)
    lit, seen = train(net, batches, accumulate=accumulate, grad_clip=clip)
    assert [row["step"] for row in seen] == [1, 2, 3]
    for row, (loss, norm) in zip(seen, expected, strict=True):
        assert row["loss"] == pytest.approx(loss, rel=1e-5)
        assert row["norm"] == pytest.approx(norm, rel=1e-4) and (clip is None or (norm > clip) == (clip < 1))
    assert_close(net, plain)
    assert lit.trainer.datamodule.consumed == 18


def test_micro_batches_are_not_averaged_one_by_one() -> None:
    """The mean of the micro-batches' means is another number where they count unequally many targets."""
    batch = make_batch(ignored=True)
    _, seen = train(make_net(), [batch], accumulate=3)
    parts = [{key: value[i : i + 2] for key, value in batch.items()} for i in (0, 2, 4)]
    means = [mean_loss(make_net(), part).item() for part in parts]
    assert seen[0]["loss"] != pytest.approx(sum(means) / 3, rel=1e-4)


def test_a_step_without_a_target_has_no_loss_and_stops_nothing() -> None:
    empty = make_batch()
    empty["targets"][:] = -1
    lit, seen = train(make_net(), [make_batch(), empty, make_batch(), empty], accumulate=3)
    assert [torch.tensor(row["loss"]).isnan().item() for row in seen] == [False, True, False, True]
    assert [row["norm"] > 0 for row in seen] == [True, False, True, False]
    assert lit.fault is None and lit.global_step == 4 and lit.last_loss == seen[2]["loss"]
    assert all(p.isfinite().all() for p in lit.net.parameters())


def test_weight_decay_is_for_matrices() -> None:
    net = make_net(qk_norm=True)
    lit, _ = train(net, [make_batch()])
    decayed, rest = lit.trainer.optimizers[0].param_groups
    assert decayed["weight_decay"] == 0.1 and rest["weight_decay"] == 0.0
    names = {id(p): name for name, p in net.named_parameters()}
    assert all(
        name.endswith("weight") and "ln_" not in name for name in (names[id(p)] for p in decayed["params"])
    )
    assert {names[id(p)].split(".")[-2] for p in rest["params"]} == {
        "ln_1", "ln_2", "ln_f", "q_norm", "k_norm", "c_attn", "c_proj", "c_fc"
    }  # fmt: skip
    assert len(decayed["params"]) + len(rest["params"]) == len(names)


def test_a_gradient_that_is_not_finite_changes_nothing() -> None:
    net = make_net()
    lit, _ = train(net, [make_batch(seed=1), make_batch(seed=2)])
    optimizer = lit.trainer.optimizers[0]
    weights = [p.detach().clone() for p in net.parameters()]
    state = [{key: value.clone() for key, value in optimizer.state[p].items()} for p in net.parameters()]
    assert state[0].keys() == {"step", "exp_avg", "exp_avg_sq"} and state[0]["step"] == 2
    for value in (float("nan"), float("inf")):
        for parameter in net.parameters():
            parameter.grad = torch.ones_like(parameter)
        net.transformer.h[1].mlp.c_fc.weight.grad[3, 5] = value
        assert not lit._update().isfinite()
        for p, before, moments in zip(net.parameters(), weights, state, strict=True):
            assert torch.equal(p, before)
            assert all(torch.equal(optimizer.state[p][key], moments[key]) for key in moments)
    for parameter in net.parameters():
        parameter.grad = torch.ones_like(parameter)
    assert lit._update().isfinite()
    assert not any(torch.equal(p, before) for p, before in zip(net.parameters(), weights, strict=True))


@pytest.mark.parametrize("kinds", [(torch.optim.AdamW, BlindAdamW), (MuonAdamW, MuonAdamW)])
def test_a_device_whose_fused_kernel_neither_clips_nor_skips(
    kinds: tuple[type, type], monkeypatch: pytest.MonkeyPatch
) -> None:
    batches, nets = [make_batch(seed=seed) for seed in range(3)], (make_net(), make_net())
    train(nets[0], batches, kind=kinds[0], grad_clip=0.1)
    monkeypatch.setattr(lit_gpt, "CLIPS_APART", ("cpu",))
    lit, seen = train(nets[1], batches, kind=kinds[1], grad_clip=0.1)
    assert min(row["norm"] for row in seen) > 0.2
    assert_close(*nets)
    before = {name: p.detach().clone() for name, p in nets[1].named_parameters()}
    for parameter in nets[1].parameters():
        parameter.grad = torch.full_like(parameter, torch.nan)
    assert lit._update().isnan()
    assert all(torch.equal(p, before[name]) for name, p in nets[1].named_parameters())


class WithoutFp64(TorchDispatchMode):
    """As on a Mac: no operator makes a tensor of fp64."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        assert all(x.dtype != torch.float64 for x in tree_leaves(out) if isinstance(x, Tensor)), func
        return out


def test_training_and_validation_go_without_fp64(monkeypatch: pytest.MonkeyPatch) -> None:
    net, batches = make_net(position="t5"), [make_batch(ignored=True), make_batch()]
    net.replace_attention(SDPAAttention())
    lit = LitGPT(net, lambda groups: None, constant)
    lit.trainer = SimpleNamespace(num_val_batches=[2], max_steps=1, val_check_interval=1, world_size=1)
    for module in (lit_gpt, geometry):
        monkeypatch.setattr(module, "widest", lambda device: torch.float32)
    with WithoutFp64(), mock.patch.object(LitGPT, "log") as log:
        net(**batches[0]).backward()
        lit.on_validation_epoch_start()
        for i, batch in enumerate(batches):
            lit.validation_step(batch, i)
        lit.on_validation_epoch_end()
    both = {key: torch.cat([batch[key] for batch in batches]) for key in batches[0]}
    torch.testing.assert_close(log.call_args.args[1], mean_loss(net, both))


def test_the_schedule_scales_every_group_and_resets_each_step() -> None:
    lit, _ = train(make_net(), [make_batch()], lr=1e-2)
    lit.schedule = lambda step, max_steps: 0.25
    for parameter in lit.net.parameters():
        parameter.grad = torch.zeros_like(parameter)
    lit._set_rates(0.25)
    lit._set_rates(0.25)
    rates = [group["lr"] for group in lit.trainer.optimizers[0].param_groups]
    assert rates == pytest.approx([0.0025, 0.0025], rel=1e-7)
    lit._update()


def test_dropout_of_a_step_depends_on_seed_and_step_alone() -> None:
    """What a resumed run relies on: the generator's state before the step does not matter."""
    batches = [make_batch(seed=s) for s in range(3)]
    losses = []
    for disturb in (0, 5):
        net = make_net(dropout=0.3, attn_dropout=0.3)
        torch.rand(disturb)
        losses.append([row["loss"] for row in train(net, batches, accumulate=2)[1]])
    other = [row["loss"] for row in train(make_net(dropout=0.3), batches, accumulate=2, seed=1)[1]]
    assert losses[0] == losses[1] and losses[0][0] != other[0]


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_generators_are_seeded_as_by_pytorch_without_a_stack_for_each_device(device: str) -> None:
    """There a stack is formatted for each kind of device that is not in use, at every step."""
    draws = []
    for seed in (partial(torch.manual_seed, 5), partial(seed_generators, 5, torch.device(device))):
        torch.rand(3, device=device)
        with mock.patch("traceback.format_stack", wraps=traceback.format_stack) as formatted:
            seed()
        draws.append([torch.rand(8, device=where) for where in ("cpu", device)])
    assert all(map(torch.equal, *draws)) and not formatted.called


def test_a_step_calls_the_schedule_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Hydra's partial asks at each call whether it may call: a tenth of the host's time in a small step."""
    seen, set_rates = [], LitGPT._set_rates

    def seeing(lit: LitGPT, factor: float) -> None:
        seen.append(type(lit.schedule))
        set_rates(lit, factor)

    monkeypatch.setattr(LitGPT, "_set_rates", seeing)
    assert train_here(tmp_path, "trainer.max_steps=1").code == 0 and seen == [partial]


@pytest.fixture
def nothing_frozen(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(lit_gpt, "FREEZES_ON", ("cpu",))
    gc.unfreeze()
    yield
    gc.freeze()


def test_garbage_is_not_searched_for_in_what_the_first_step_made(
    monkeypatch: pytest.MonkeyPatch, nothing_frozen: None
) -> None:
    """Once: to count what is frozen takes 37 ms, to freeze it again would keep what later steps made."""
    seen, update = [], LitGPT._update
    monkeypatch.setattr(LitGPT, "_update", lambda lit: (seen.append(gc.get_freeze_count()), update(lit))[1])
    with mock.patch.object(gc, "freeze", wraps=gc.freeze) as freeze:
        train(make_net(), [make_batch()] * 3)
    assert seen[0] == 0 and min(seen[1:]) > 10_000 and gc.get_freeze_count() == 0
    assert freeze.call_count == 1


def test_a_run_that_fails_leaves_nothing_frozen(tmp_path: Path, nothing_frozen: None) -> None:
    counts = []

    def broken(lit: LitGPT, update: Any = LitGPT._update) -> Tensor:
        counts.append(gc.get_freeze_count())
        if len(counts) == 2:
            raise OSError("a mistake")
        return update(lit)

    with mock.patch.object(LitGPT, "_update", broken):
        assert train_here(tmp_path, "trainer.max_steps=3").code == 1
    assert counts[0] == 0 and counts[1] > 10_000 and gc.get_freeze_count() == 0


def test_on_a_cpu_nothing_is_frozen(nothing_frozen: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lit_gpt, "FREEZES_ON", ("cuda",))
    with mock.patch.object(gc, "freeze", wraps=gc.freeze) as freeze:
        train(make_net(), [make_batch()] * 3)
    assert not freeze.called


def test_what_others_froze_stays_frozen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lit_gpt, "FREEZES_ON", ("cpu",))
    gc.freeze()
    before = gc.get_freeze_count()
    train(make_net(), [make_batch()] * 3)
    assert gc.get_freeze_count() >= 0.99 * before > 10_000


def test_step_seed_is_pure_and_spreads() -> None:
    assert step_seed(1337, 5, 0) == step_seed(1337, 5, 0)
    seeds = {step_seed(s, step, rank) for s in (0, 1, 1337) for step in range(200) for rank in range(4)}
    assert len(seeds) == 3 * 200 * 4 and all(0 <= seed < 2**63 for seed in seeds)
    # the committed values: a checkpoint of today draws the same tomorrow
    assert [step_seed(1337, step, 0) for step in range(2)] == SEEDS


SEEDS = [8211097042691198833, 1165067788098164394]


def test_late_scalars_come_in_order_and_all_come() -> None:
    late = LateScalars(lag=2)
    assert late.push(1, torch.tensor([1.0, 2.0])) == [(1, [1.0, 2.0])]  # the CPU has nothing to wait for
    late.pending.extend([(2, torch.ones(1), None), (3, torch.zeros(1), None), (4, torch.ones(1), None)])
    assert late.take(keep=2) == [(2, [1.0])]
    assert late.take() == [(3, [0.0]), (4, [1.0])] and late.take() == []


def test_a_faulty_step_is_told_and_stops() -> None:
    lit = LitGPT(make_net(), lambda groups: None, constant)
    lit.trainer = trainer = L.Trainer(accelerator="cpu", logger=False, **runtime.TRAINER)
    lit._deliver([(3, [2.5, 1.0, 0.0, 0.0])])
    assert lit.fault is None and not trainer.should_stop
    lit._deliver([(4, [2.5, float("nan"), 1.0, 0.0])])
    assert trainer.should_stop and lit.fault.startswith("Step 4: the gradient norm is nan (loss 2.5000).")


def test_rates_are_between_arrivals(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps of 10 ms on a device that is two steps behind, a pause of a second after step 30: every row says
    10 ms, the one after the pause from its first arrival on."""
    lit, clock = LitGPT(make_net(), lambda groups: None, constant), [0.0]
    lit.settings, rows = [{"lr": 1.0}], {}
    trainer = mock.Mock(world_size=1, max_steps=50, loggers=[mock.Mock()], callback_metrics={"val/loss": 1.0})
    trainer.loggers[0].log_metrics = lambda row, step: rows.setdefault(step, row)
    monkeypatch.setattr("model.training.callbacks.time.perf_counter", lambda: clock[0])
    metrics = Metrics(every=10)
    metrics.on_train_start(trainer, lit)
    metrics.on_train_batch_start(trainer, lit, make_batch(), 0)
    for step in range(1, 51):
        clock[0] += 0.01
        lit.listeners[0](step, {"train/loss": 1.0})
        if step == 30:
            clock[0] += 1.0
            metrics.on_validation_end(trainer, lit)
    measured = {step: round(row["perf/step_ms"], 6) for step, row in rows.items() if "perf/step_ms" in row}
    assert measured == dict.fromkeys((10, 20, 30, 40, 50), 10.0)


def test_a_run_that_meets_a_nan_ends_with_good_weights(tmp_path: Path) -> None:
    """From the command line: one message, exit code 1, the step's weights those of the step before."""
    update, before = LitGPT._update, {}

    def poisoned(self: LitGPT) -> Tensor:
        if self.global_step == 12:
            before.update({name: value.clone() for name, value in self.state_dict().items()})
            self.net.lm_head.weight.grad[3, 3] = float("nan")
        return update(self)

    with mock.patch.object(LitGPT, "_update", poisoned):
        result = train_here(tmp_path, "name=a", "callbacks.metrics.every=10")
    assert result.code == 1 and "Traceback" not in result.err
    assert "error: Step 13: the gradient norm is nan (loss 2." in result.err
    assert "Lower optim.lr" in result.err and "Saved: step 13 (ckpt=a)." in result.err
    table = rows(tmp_path / "runs" / "a")
    assert max(table) == 13 and table[13]["train/grad_norm"] == "nan"  # logged out of turn
    saved = read_checkpoint(tmp_path / "runs/a/checkpoints/step-00000013.ckpt")["state_dict"]
    assert all(torch.equal(saved[name], value) for name, value in before.items())
    settings = ("optim.lr=1e-4", "optim.weight_decay=0.3", "optim.betas=[0.8,0.9]")
    assert train_here(tmp_path, "ckpt=a", *settings, tiny=False).code == 0
    table = rows(tmp_path / "runs" / "a")
    assert max(table) == 20 and float(table[20]["train/lr"]) < 1e-4  # the new ones count
    saved = read_checkpoint(tmp_path / "runs/a/checkpoints/step-00000020.ckpt")["optimizer_states"][0]
    assert [group["weight_decay"] for group in saved["param_groups"]] == [0.3, 0.0]
    assert {tuple(group["betas"]) for group in saved["param_groups"]} == {(0.8, 0.9)}


def test_a_single_process_is_told_to_lightning_and_those_of_torchrun_are_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("RANK", "GROUP_RANK", "TORCHELASTIC_RUN_ID", "SLURM_NTASKS"):
        monkeypatch.delenv(name, raising=False)
    one, two = (SimpleNamespace(devices=n, num_nodes=1) for n in (1, 2))
    assert [type(each).__name__ for each in runtime.alone(one)] == ["LightningEnvironment"]
    assert runtime.alone(two) == runtime.alone(SimpleNamespace(devices=1, num_nodes=2)) == []
    for name in ("RANK", "GROUP_RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "TORCHELASTIC_RUN_ID"):
        monkeypatch.setenv(name, "0")
    assert runtime.alone(one) == []
