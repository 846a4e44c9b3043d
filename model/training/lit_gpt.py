"""One training step of a GPT under Lightning, in which the host never waits for the device.

Optimisation is manual: one batch of the loader is one optimiser step, `accumulate` micro-batches of it, so
that validation, checkpoints and resume fall on step boundaries and the loss is the mean of what the step has
seen.
"""

from __future__ import annotations

import gc
import math
from collections.abc import Callable, Iterable
from contextlib import ExitStack, nullcontext
from functools import partial
from typing import Any

import lightning as L
import numpy as np
import torch
from torch import Tensor

from attention.base import Attention, widest
from conf.values import UserError
from model.gpt import GPT, IGNORE
from model.training.graphs import StepGraph
from model.training.imports import uncollected
from model.training.late import LateScalars
from model.training.replicas import ReplicaStrategy
from model.training.seeds import seed_generators, step_seed
from model.training.sharding import replicated, shard, whole
from model.training.untrusted import require_run

Schedule = Callable[[int, int], float]
FREEZES_ON = ("cuda",)  # devices that wait for the host while Python's garbage collector searches
CLIPS_APART = ("mps",)  # devices whose fused AdamW reads neither grad_scale nor found_inf (torch 2.12)
# Batches of all validations of a run up to which validation is not compiled, if the model is small: compiling
# takes seconds, and an uncompiled batch some milliseconds more. The character model has 147 of them.
EAGER_BATCHES = 1000
LARGEST_WEIGHT = 1e4  # weights of trained models are below 100: one beyond this has exploded


class LitGPT(L.LightningModule):
    """Trains `net`.

    optimizer: parameter groups -> optimiser, which clips and skips on the device: an AdamW with `fused=True`,
    or MuonAdamW
    schedule: (step, max_steps) -> factor of the learning rate
    accumulate: micro-batches of a step; the loader's batch has `accumulate * B` rows
    compile: whether the model is compiled; "blocks": one block of it, whose code all share
    cuda_graphs: whether a step is captured, on one CUDA device (training/graphs.py)
    validates_eagerly: whether validation is not compiled, in a run with few batches of it (EAGER_BATCHES)
    decode_attention: the implementation that samples with a KV cache (None: the one that trains)
    checkpoint_metadata: plain values that every checkpoint carries under "tilegpt" (config, tokenizer, ...)
    """

    def __init__(
        self,
        net: GPT,
        optimizer: Callable[[list[dict[str, Any]]], torch.optim.Optimizer],
        schedule: Schedule,
        *,
        seed: int = 1337,
        accumulate: int = 1,
        grad_clip: float | None = 1.0,
        compile: bool | str = False,
        cuda_graphs: bool = False,
        validates_eagerly: bool = False,
        decode_attention: Attention | None = None,
        checkpoint_metadata: dict[str, Any] | None = None,
    ):
        super().__init__()
        self.automatic_optimization = False
        self.net = net
        self.make_optimizer = optimizer
        if isinstance(schedule, partial):  # Hydra's own asks once more at each call whether it may call
            schedule = partial(schedule.func, *schedule.args, **schedule.keywords)
        self.schedule = schedule
        self.seed = seed
        self.accumulate = accumulate
        self.grad_clip = grad_clip
        self.compile_net = compile
        self.cuda_graphs = cuda_graphs
        self.validates_eagerly, self.in_eager_validation = validates_eagerly, False
        self.step_graph: StepGraph | None = None
        self.frozen = False  # for the garbage collector, by this run
        self.shards: Any = None  # under FSDP2 the mesh of the ranks that share the parameters
        self.decode_attention = decode_attention
        self.checkpoint_metadata = checkpoint_metadata or {}
        # of a model that trains in part, checkpoints hold that part: the rest is there before they are read
        self.strict_loading = all(p.requires_grad for p in net.parameters())
        self.late = LateScalars()
        # Called with (step, scalars) when the scalars of a step have arrived on the host, in order.
        self.listeners: list[Callable[[int, dict[str, float]], None]] = []
        self.fault: str | None = None  # the message, once a gradient norm was not finite
        self.last_loss = 0.0  # of the newest step whose scalars have arrived
        self.stopping = False  # after a fault or a signal, at the end of the step under way
        self.stop_requested = False  # by a signal; travels with the step's scalars: all ranks stop alike
        self.val_sums: Tensor | None = None
        self.val_stops = LateScalars()  # of a validation's batches, whether a rank is asked to stop

    def configure_model(self) -> None:
        """Shard under FSDP2 and compile in place; `net.compile()` leaves every parameter's name alone."""
        if getattr(self, "_configured", False):
            return
        self._configured = True
        if self.device_mesh is not None:
            self.shards = shard(self.net, self.device_mesh, self.trainer.precision == "bf16-mixed")
        if self.compile_net:
            # LayerNorm's backward and its sums over rows in one kernel: a step of the character model, of
            # width 384, takes 5.15 ms on an H100, in two kernels 4.74. Wider ones have not been compared.
            narrow = self.net.config.n_embd <= 512
            options = {"triton.mix_order_reduction": False} if narrow else None
            compile = self.net.compile_blocks if self.compile_net == "blocks" else self.net.compile
            with uncollected():  # it imports Inductor
                from torch._dynamo import config

                # DDP's buckets would cut the compiled model: GPT-2 124M had 0.926x of perfect scaling on two
                # H100s, whole 0.971x. Its gradients are then averaged after the backward: 1.7 ms over NVLink.
                # Starting to average a block's gradients within the graph was tried: see commit 742a08a.
                config.optimize_ddp = False
                compile(dynamic=False, options=options)

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        whole = super().state_dict(*args, **kwargs)
        if self.strict_loading:
            return whole
        trained = {f"net.{name}" for name, p in self.net.named_parameters() if p.requires_grad}
        return {name: value for name, value in whole.items() if name in trained}

    def configure_optimizers(self) -> torch.optim.Optimizer:
        groups = self.parameter_groups()
        if self.device_mesh is not None and any(group.get("muon") for group in groups):
            raise UserError(
                "optim=muon needs whole matrices, and trainer=fsdp2 and context_parallel shard them: use "
                "trainer=ddp."
            )
        optimizer = self.make_optimizer(groups)
        self.settings = [
            {key: value for key, value in group.items() if key != "params"}
            for group in optimizer.param_groups
        ]
        return optimizer

    def parameter_groups(self) -> list[dict[str, Any]]:
        """Weight decay on matrices only: decaying gains and biases pulls norms towards zero for nothing. For
        Muon the matrices of the blocks come first, apart."""
        named = [(name, p) for name, p in self.net.named_parameters() if p.requires_grad]
        groups: list[dict[str, Any]] = [
            {"params": [p for _, p in named if p.dim() >= 2]},
            {"params": [p for _, p in named if p.dim() < 2], "weight_decay": 0.0},
        ]
        if getattr(getattr(self.make_optimizer, "func", None), "splits_hidden", False):
            hidden = [p for name, p in named if p.dim() == 2 and ".h." in name]
            apart = {id(p) for p in hidden}
            groups[0]["params"] = [p for p in groups[0]["params"] if id(p) not in apart]
            groups.insert(0, {"params": hidden, "muon": True})
        return [group for group in groups if group["params"]]

    def on_train_start(self) -> None:
        """A restored optimiser brings the settings it was saved with; the config of this run is what counts,
        and where the state depends on one, it has to be the same."""
        for group, settings in zip(self.optimizers().param_groups, self.settings, strict=True):
            for key in settings.keys() & group.keys() - {"lr", "betas", "eps", "weight_decay", "momentum"}:
                if group[key] != settings[key]:
                    raise UserError(
                        f"optim.{key} is another than the checkpoint's: its state goes on only as it began."
                    )
            group.update(settings)
        # What others have frozen stays theirs.
        self.freezes = self.device.type in FREEZES_ON and not gc.get_freeze_count()
        if self.cuda_graphs:
            self.step_graph = StepGraph(self._on_device, self.optimizers().optimizer)

    def on_after_batch_transfer(self, batch: dict[str, Tensor], dataloader_idx: int) -> dict[str, Tensor]:
        """Where ranks share each sequence, they read the same batch and keep their tokens of it."""
        spread = self.net.context_parallel
        return batch if spread is None else {name: spread.share(value) for name, value in batch.items()}

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        step, world = self.global_step, self.trainer.world_size
        seed_generators(step_seed(self.seed, step, self.global_rank), self.device)
        self._set_rates(self.schedule(step, self.trainer.max_steps))
        scalars = self._on_device(batch) if self.step_graph is None else self.step_graph(batch)
        if self.step_graph is not None and self.global_step == step:  # replayed, unseen by Lightning
            self.optimizers()._on_before_step()
            self.optimizers()._on_after_step()
        if self.stop_requested:
            scalars[3] = 1.0
        if world > 1:
            torch.distributed.all_reduce(scalars)
            scalars /= world
        spread = self.net.context_parallel
        self.trainer.datamodule.advance(batch["targets"].shape[0] * world // (spread.ranks if spread else 1))
        self._deliver(self.late.push(step + 1, scalars))

    def _on_device(self, batch: dict[str, Tensor]) -> Tensor:
        """All that the device does in a step: its loss, gradient norm, whether that is not finite, and a
        place for whether to stop, as one tensor."""
        world = self.trainer.world_size
        counted = (batch["targets"] != IGNORE).sum()
        if world > 1:
            torch.distributed.all_reduce(counted)
        # Every token of the global step weighs the same, also where micro-batches hold unequal numbers of
        # them; times the ranks, as DDP and FSDP average gradients.
        scale = world / counted.clamp(min=1)  # a step of chats may hold no answer
        total = torch.zeros((), device=self.device)
        for i, micro in enumerate(self._micro_batches(batch)):
            with self._no_sync(i < self.accumulate - 1):
                loss = self.net(**micro) * scale
                self.manual_backward(loss)
            total += loss.detach()
        if isinstance(self.trainer.strategy, ReplicaStrategy):
            self.trainer.strategy.average([p.grad for p in self.net.parameters() if p.grad is not None])
        norm = self._update()
        total = total / counted.clamp(max=1)  # of no target there is no loss: NaN, not the best one
        return torch.stack((total, norm, (~norm.isfinite()).float(), torch.zeros_like(total)))

    def _deliver(self, due: list[tuple[int, list[float]]]) -> None:
        """Hand the scalars that have arrived to the listeners; stop where they say so, on all ranks alike."""
        for step, (loss, norm, skipped, stop) in due:
            if skipped or not math.isnan(loss):  # else of a step without a target
                self.last_loss = loss
            if skipped and self.fault is None:
                self.fault = (
                    f"Step {step}: the gradient norm is {norm} (loss {loss:.4f}). The update was skipped: "
                    "the weights are those of the step before. Lower optim.lr, raise schedule.warmup_steps, "
                    "or try precision=32-true or another attention."
                )
            if self.fault or stop:
                self._stop()
            for listener in self.listeners:
                listener(step, {"train/loss": loss, "train/grad_norm": norm})

    def on_train_batch_end(self, outputs: Any, batch: dict[str, Tensor], batch_idx: int) -> None:
        """After that of the callbacks, and before Lightning asks whether to validate."""
        if self.global_step == self.trainer.max_steps:
            # a run ends with a validation, wherever its last step falls
            self.trainer.val_check_batch = self.global_step
        elif self.stopping:  # which has Lightning validate, and whoever sent the signal may not wait for it
            self.trainer.limit_val_batches = 0
        # The first step has imported and compiled: there is no garbage to look for.
        if self.freezes and not self.frozen:
            gc.freeze()
            self.frozen = True

    def flush(self) -> None:
        """Wait for the scalars still under way."""
        self._deliver(self.late.take())

    def exploded(self) -> str | None:
        """Why these weights, finite or not, are of no use; None where nothing says so."""
        largest = float(whole(torch.nn.utils.get_total_norm(list(self.net.parameters()), math.inf)))
        if not largest <= LARGEST_WEIGHT:
            return f"the largest weight is {largest:.1e}"
        uniform = math.log(self.net.config.vocab_size)
        if 2 * uniform < self.last_loss < math.inf:
            return f"the loss is {self.last_loss:.4g}, where uniform guessing has {uniform:.1f}"
        return None

    def request_stop(self) -> None:
        """The run is to end, on all ranks, after the step or validation whose scalars bring this along."""
        self.stop_requested = True

    def _stop(self) -> None:
        self.trainer.should_stop = self.stopping = True

    def on_validation_start(self) -> None:
        self.flush()

    def on_train_end(self) -> None:
        self.unfreeze()
        self.flush()

    def unfreeze(self) -> None:
        """What the run froze is garbage to look for again; for who calls `fit`, if that failed."""
        if self.frozen:
            gc.unfreeze()
            self.frozen = False

    def _micro_batches(self, batch: dict[str, Tensor]) -> Iterable[dict[str, Tensor]]:
        parts = {key: value.chunk(self.accumulate) for key, value in batch.items()}  # (A*B, T) -> A of (B, T)
        return ({key: part[i] for key, part in parts.items()} for i in range(self.accumulate))

    def _no_sync(self, skip: bool) -> Any:
        """Gradients of all but the last micro-batch stay on their rank."""
        if not skip or self.trainer.world_size == 1:
            return nullcontext()
        if self.device_mesh is not None:
            self.net.set_requires_gradient_sync(False)
            after = ExitStack()
            after.callback(self.net.set_requires_gradient_sync, True)
            return after
        return self.trainer.strategy.block_backward_sync()

    def _set_rates(self, factor: float) -> None:
        """As fp32, which is all that a captured step keeps of a learning rate: both compute the same bits."""
        for group, settings in zip(self.optimizers().param_groups, self.settings, strict=True):
            group["lr"] = float(np.float32(settings["lr"] * factor))

    def _update(self) -> Tensor:
        """Clip and step; returns the gradient norm before clipping, a device scalar.

        The fused AdamW kernel divides gradients by `grad_scale` as it reads them and does nothing where
        `found_inf` is set, its step counters included: clipping costs no pass of its own, and an update with
        a non-finite gradient is skipped without the host knowing."""
        optimizer = self.optimizers()
        grads = [p.grad for p in self.net.parameters() if p.grad is not None]
        norm = whole(torch.nn.utils.get_total_norm(grads))
        found_inf = (~norm.isfinite()).float()
        grad_scale = torch.ones_like(norm)
        if self.grad_clip is not None:
            grad_scale = torch.clamp(norm / self.grad_clip, min=1.0)
        if norm.device.type in CLIPS_APART:
            torch._foreach_div_(grads, grad_scale)
            grad_scale = torch.ones_like(norm)
            if found_inf:  # without gradients a step changes nothing
                optimizer.zero_grad(set_to_none=True)
        inner = optimizer.optimizer
        inner.found_inf, inner.grad_scale = (replicated(x, self.shards) for x in (found_inf, grad_scale))
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return norm

    def on_validation_epoch_start(self) -> None:
        self.val_sums = torch.zeros(2, dtype=widest(self.device), device=self.device)
        batches = sum(self.trainer.num_val_batches)
        batches *= 1 + self.trainer.max_steps // self.trainer.val_check_interval
        self.in_eager_validation = self.validates_eagerly and batches <= EAGER_BATCHES

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        counted = (batch["targets"] != IGNORE).sum()
        with torch.compiler.set_stance("force_eager") if self.in_eager_validation else nullcontext():
            loss = self.net(**batch)
        self.val_sums += torch.stack((loss, counted))
        if self.trainer.world_size == 1:
            if self.stop_requested:
                self._stop()
            return
        asked = torch.full((), float(self.stop_requested), device=self.device)
        torch.distributed.all_reduce(asked)
        self._deliver_stops(self.val_stops.push(batch_idx, asked))

    def _deliver_stops(self, due: list[tuple[int, Any]]) -> None:
        if any(asked for _, asked in due):
            self._stop()

    def on_validation_epoch_end(self) -> None:
        self._deliver_stops(self.val_stops.take())
        if self.trainer.world_size > 1:
            torch.distributed.all_reduce(self.val_sums)
        # logged by the Metrics callback: Lightning would log it one step early
        self.log("val/loss", (self.val_sums[0] / self.val_sums[1]).float(), logger=False)

    def on_validation_end(self) -> None:
        """After that of the callbacks: a signal may have come while a sample was generated."""
        if self.trainer.strategy.reduce_boolean_decision(self.stop_requested, all=False):
            self._stop()

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["tilegpt"] = dict(self.checkpoint_metadata)

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Before Lightning restores anything."""
        try:
            require_run(checkpoint, self)
        except ValueError as error:
            raise UserError(f"{self.trainer.ckpt_path} is refused: {error}.") from None
