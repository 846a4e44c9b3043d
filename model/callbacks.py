"""What happens around the training step: metrics, progress, checkpoints, sample text, stopping.

None of it synchronises with the device between steps: numbers of a step arrive late, through `LateScalars`.
"""

from __future__ import annotations

import signal
import sys
import time
from pathlib import Path
from typing import Any

import lightning as L
import torch

from model.checkpoint import link, prune
from model.flops import flops_per_token, peak_bf16_flops

SCALARS = ("train/loss", "train/grad_norm", "train/skipped", "stop")


class Metrics(L.Callback):
    """Logs loss, gradient norm, learning rate, tokens/s, step time, MFU and peak memory every `every` steps.

    Time is wall time between the arrivals of late scalars, validation and checkpoints taken out. MFU is (6N +
    12LCT) tokens/s over the dense bf16 peak of the named GPU (model/flops.py); an unknown GPU has none.

    `faulty` is set when a gradient norm was not finite: the update was skipped on the device, and the run
    stops."""

    def __init__(self, every: int = 10):
        self.every = every
        self.last_train: dict[str, float] = {}
        self.faulty: str | None = None
        self.stopped = False
        self._mark: tuple[float, int] | None = None

    def on_train_start(self, trainer: L.Trainer, lit: Any) -> None:
        self._flops = flops_per_token(lit.net.config)
        name = torch.cuda.get_device_name(lit.device) if lit.device.type == "cuda" else ""
        self._peak = peak_bf16_flops(name)

    def on_train_batch_end(
        self, trainer: L.Trainer, lit: Any, outputs: Any, batch: dict[str, torch.Tensor], batch_idx: int
    ) -> None:
        self._tokens = batch["targets"].numel() * trainer.world_size
        self._take(trainer, lit, outputs["due"])
        if self._mark is None:  # the first step compiles; steps after a pause start a new interval
            self._mark = (time.perf_counter(), trainer.global_step)

    def _take(self, trainer: L.Trainer, lit: Any, due: list[tuple[int, list[float]]]) -> None:
        for step, values in due:
            scalars = dict(zip(SCALARS, values, strict=True))
            self.stopped = self.stopped or scalars.pop("stop") > 0
            skipped = scalars.pop("train/skipped") > 0
            self.last_train.update(scalars)
            if skipped and self.faulty is None:
                loss, norm = scalars["train/loss"], scalars["train/grad_norm"]
                self.faulty = (
                    f"Step {step}: the gradient norm is {norm} (loss {loss:.4f}). The update was skipped: "
                    "the weights are those of the step before. Lower optim.lr, raise "
                    "schedule.warmup_steps, or try precision=32-true or another attention."
                )
            if self.faulty or self.stopped:
                trainer.should_stop = True
            if step % self.every == 0 or skipped:
                self._log(trainer, lit, step, scalars)

    def _log(self, trainer: L.Trainer, lit: Any, step: int, scalars: dict[str, float]) -> None:
        row = dict(scalars)
        row["train/lr"] = lit.settings[0]["lr"] * lit.schedule(step - 1, trainer.max_steps)
        now = time.perf_counter()
        if self._mark is not None and trainer.global_step > self._mark[1]:
            seconds = (now - self._mark[0]) / (trainer.global_step - self._mark[1])
            row["perf/step_ms"] = 1e3 * seconds
            row["perf/tokens_per_s"] = self._tokens / seconds
            if self._peak is not None:
                row["perf/mfu"] = self._flops * self._tokens / seconds / (self._peak * trainer.world_size)
        self._mark = (now, trainer.global_step)
        if lit.device.type == "cuda":
            row["perf/peak_mib"] = torch.cuda.max_memory_allocated(lit.device) / 2**20
        self.last_train.update(row)
        for logger in trainer.loggers:
            logger.log_metrics(row, step)

    def flush(self, trainer: L.Trainer, lit: Any) -> None:
        """Read every scalar still under way: whoever saves or validates waits for the device anyway."""
        self._take(trainer, lit, lit.late.take())

    def pause(self) -> None:
        """Leave the time until the next step out of the rates."""
        self._mark = None

    def on_validation_start(self, trainer: L.Trainer, lit: Any) -> None:
        if trainer.state.fn == "fit":
            self.flush(trainer, lit)

    def on_validation_end(self, trainer: L.Trainer, lit: Any) -> None:
        self.pause()
        for logger in trainer.loggers:
            logger.log_metrics({"val/loss": float(trainer.callback_metrics["val/loss"])}, trainer.global_step)

    def on_train_end(self, trainer: L.Trainer, lit: Any) -> None:
        self.flush(trainer, lit)


class Interrupt(L.Callback):
    """Ctrl-C and SIGTERM end the run at the next step boundary, saved; a second one ends it at once.

    The flag travels with the step's scalars, so that under DDP all ranks stop at the same step. That replaces
    Lightning's own broadcast, which would synchronise host and device at every batch."""

    def __init__(self) -> None:
        self.received: int | None = None
        self._before: dict[int, Any] = {}

    def setup(self, trainer: L.Trainer, lit: Any, stage: str) -> None:
        loop = trainer.fit_loop.epoch_loop
        assert hasattr(loop, "_broadcast_sigterm_tensor"), "Lightning's epoch loop has changed"
        loop._broadcast_sigterm_tensor = lambda: None

    def on_train_start(self, trainer: L.Trainer, lit: Any) -> None:
        def handle(number: int, frame: Any) -> None:
            if self.received is not None:
                self._restore()
                raise KeyboardInterrupt
            self.received = number
            lit.stop_requested = True
            name = signal.Signals(number).name
            print(f"\n{name}: saving at the next step, then stopping. Again: stop at once.")

        for number in (signal.SIGINT, signal.SIGTERM):
            self._before[number] = signal.signal(number, handle)

    def _restore(self) -> None:
        while self._before:
            number, handler = self._before.popitem()
            signal.signal(number, handler)

    def on_train_end(self, trainer: L.Trainer, lit: Any) -> None:
        self._restore()

    def on_exception(self, trainer: L.Trainer, lit: Any, exception: BaseException) -> None:
        self._restore()


class Checkpoints(L.Callback):
    """`step-*.ckpt` every `every` steps, at each validation and at the end, the newest `keep` of them kept;
    `best.ckpt` by validation loss."""

    def __init__(self, every: int | None = None, keep: int = 2):
        self.every = every
        self.keep = keep
        self.best: float | None = None

    def setup(self, trainer: L.Trainer, lit: Any, stage: str) -> None:
        self.folder = Path(trainer.default_root_dir) / "checkpoints"
        if trainer.is_global_zero:
            for partial in self.folder.glob("*.partial"):  # left by a kill during a write
                partial.unlink()

    def state_dict(self) -> dict[str, Any]:
        return {"best": self.best}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.best = state["best"]

    def on_train_batch_end(self, trainer: L.Trainer, lit: Any, *args: Any) -> None:
        step = trainer.global_step
        if step >= trainer.max_steps:
            trainer.val_check_batch = step  # a run ends with a validation, wherever its last step falls
        validated_next = step % trainer.val_check_batch == 0  # and saved after that, with the result
        if trainer.should_stop:
            self.save(trainer, lit)  # first: whoever sent the signal may not wait
            if not validated_next:  # a validation of its own would be one that no other run has
                trainer.limit_val_batches = 0
        elif self.every and step % self.every == 0 and not validated_next:
            self.save(trainer, lit)

    def on_validation_end(self, trainer: L.Trainer, lit: Any) -> None:
        if trainer.state.fn != "fit":
            return
        loss = float(trainer.callback_metrics["val/loss"])
        improved = self.best is None or loss < self.best
        self.best = loss if improved else self.best
        path = self.save(trainer, lit)
        if improved and trainer.is_global_zero:
            link(path, self.folder / "best.ckpt")

    def save(self, trainer: L.Trainer, lit: Any) -> Path:
        for metrics in (c for c in trainer.callbacks if isinstance(c, Metrics)):
            metrics.flush(trainer, lit)
            metrics.pause()
        path = self.folder / f"step-{trainer.global_step:08d}.ckpt"
        trainer.save_checkpoint(path, weights_only=False)
        if trainer.is_global_zero:
            prune(path, self.keep)
        return path


class Samples(L.Callback):
    """Generated text at every `every`-th validation and at the end, in `samples.txt` and in W&B.

    prompt: what it continues; None starts a document (the end-of-text token, else a newline, else token 0).
    It draws from a generator of its own, so that training goes on as if nothing had been sampled."""

    def __init__(
        self, every: int = 1, tokens: int = 160, temperature: float = 0.8, prompt: str | None = None
    ):
        self.every = every
        self.tokens = tokens
        self.temperature = temperature
        self.prompt = prompt
        self.count = 0
        self.last: str | None = None

    def setup(self, trainer: L.Trainer, lit: Any, stage: str) -> None:
        """Encode the prompt before anything trains: one that the tokenizer does not know is a mistake now."""
        tokenizer = trainer.datamodule.tokenizer
        if tokenizer is None:
            return
        if self.prompt:
            self._tokens = tokenizer.encode(self.prompt)
        elif tokenizer.eot is not None:
            self._tokens = [tokenizer.eot]
        else:
            try:
                self._tokens = tokenizer.encode("\n")
            except ValueError:  # characters of a text without lines
                self._tokens = [0]

    def on_validation_end(self, trainer: L.Trainer, lit: Any) -> None:
        tokenizer = trainer.datamodule.tokenizer
        if trainer.state.fn != "fit" or tokenizer is None or lit.device_mesh is not None:
            return  # random tokens have no text; a sharded model generates from its checkpoint
        self.count += 1
        if not trainer.is_global_zero or not (
            trainer.global_step >= trainer.max_steps or self.count % self.every == 0
        ):
            return
        from model.generate import generate

        with lit.trainer.precision_plugin.forward_context():
            result = generate(
                lit.net,
                [self._tokens],
                self.tokens,
                decode_attention=lit.decode_attention,
                temperature=self.temperature,
                seed=lit.seed,
            )
        self.last = tokenizer.decode(result.tokens[0])
        with open(Path(trainer.default_root_dir) / "samples.txt", "a", encoding="utf-8") as file:
            file.write(f"--- step {trainer.global_step}\n{self.last}\n")
        for logger in trainer.loggers:
            if hasattr(logger, "log_text"):  # wandb
                logger.log_text("samples", columns=["step", "text"], data=[[trainer.global_step, self.last]])


class Progress(L.Callback):
    """One live line on a terminal, with rate and estimate; a plain line every `every` steps in a log file."""

    def __init__(self, every: int = 100):
        self.every = every
        self.bar: Any = None
        # on the host: to read Lightning's at every step would wait for the device
        self.val_loss: float | None = None

    def on_train_start(self, trainer: L.Trainer, lit: Any) -> None:
        self._start = (time.perf_counter(), trainer.global_step)
        if not trainer.is_global_zero or not sys.stdout.isatty():
            return
        from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

        self.bar = Progress(
            TextColumn("step {task.completed}/{task.total}"),
            BarColumn(),
            TextColumn("{task.fields[text]}"),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
        )
        self.bar.start()
        text = "compiling" if lit.compile_net else ""
        self.task = self.bar.add_task("", total=trainer.max_steps, completed=trainer.global_step, text=text)

    def on_train_batch_end(self, trainer: L.Trainer, lit: Any, *args: Any) -> None:
        step = trainer.global_step
        if self.bar is not None:
            self.bar.update(self.task, completed=step, text=self._text(trainer))
        elif trainer.is_global_zero and step % self.every == 0:
            elapsed = time.perf_counter() - self._start[0]
            left = elapsed / max(1, step - self._start[1]) * (trainer.max_steps - step)
            print(f"step {step}/{trainer.max_steps}  {self._text(trainer)}  {left:.0f} s left", flush=True)

    def _text(self, trainer: L.Trainer) -> str:
        now = next((c.last_train for c in trainer.callbacks if isinstance(c, Metrics)), {})
        parts = []
        if "train/loss" in now:
            parts.append(f"loss {now['train/loss']:.3f}")
        if self.val_loss is not None:
            parts.append(f"val {self.val_loss:.3f}")
        if "perf/tokens_per_s" in now:
            parts.append(f"{now['perf/tokens_per_s']:,.0f} tokens/s")
        return "  ".join(parts)

    def on_validation_end(self, trainer: L.Trainer, lit: Any) -> None:
        self.val_loss = float(trainer.callback_metrics["val/loss"])
        if trainer.is_global_zero:
            line = f"step {trainer.global_step}: validation loss {self.val_loss:.4f}"
            (self.bar.console.print if self.bar is not None else print)(line)

    def on_train_end(self, trainer: L.Trainer, lit: Any) -> None:
        if self.bar is not None:
            self.bar.stop()
            self.bar = None

    def on_exception(self, trainer: L.Trainer, lit: Any, exception: BaseException) -> None:
        self.on_train_end(trainer, lit)
