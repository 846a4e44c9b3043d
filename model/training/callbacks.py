"""What a run says of itself: metrics, sample text, progress. (training/saving.py: what it leaves behind.)

None of it synchronises with the device between steps: numbers of a step arrive late, through `LitGPT`.
"""

from __future__ import annotations

import re
import sys
import time
from pathlib import Path
from typing import Any

import lightning as L
import torch

from conf.values import shown, whole
from model.costs.flops import flops_per_token, peak_bf16_flops
from model.lora import adapter_count
from model.training.step_progress import StepProgress


class Metrics(L.Callback):
    """Logs loss, gradient norm, learning rate, tokens/s, step time, MFU and peak memory every `every` steps.

    Time is wall time between the arrivals of late scalars, validation and checkpoints taken out. MFU is (6N +
    12LHDT) tokens/s, with LoRA about 4N, over the dense bf16 peak of the named GPU (costs/flops.py); an
    unknown GPU has none. Peak memory is that since training began."""

    def __init__(self, every: int = 10):
        self.every = every
        self.last: dict[str, float] = {}
        self._mark: tuple[float, int] | None = None  # when which step arrived, to measure from

    def on_train_start(self, trainer: L.Trainer, lit: Any) -> None:
        adapters = adapter_count(lit.net)
        self._flops, self._peak = flops_per_token(lit.net.config, adapters=adapters), None
        if lit.device.type == "cuda":
            self._peak = peak_bf16_flops(torch.cuda.get_device_name(lit.device))
            torch.cuda.reset_peak_memory_stats(lit.device)  # a job of a sweep must not show another's
        lit.listeners.append(lambda step, scalars: self._arrive(trainer, lit, step, scalars))

    def on_train_batch_start(
        self, trainer: L.Trainer, lit: Any, batch: dict[str, torch.Tensor], batch_idx: int
    ) -> None:
        self._tokens = batch["targets"].numel() * trainer.world_size

    def _arrive(self, trainer: L.Trainer, lit: Any, step: int, scalars: dict[str, float]) -> None:
        now = time.perf_counter()
        self.last.update(scalars)
        if step % self.every == 0 or lit.fault:
            row = scalars | {"train/lr": lit.settings[0]["lr"] * lit.schedule(step - 1, trainer.max_steps)}
            if self._mark is not None:
                row |= self._rates((now - self._mark[0]) / (step - self._mark[1]), trainer.world_size)
            if lit.device.type == "cuda":
                row["perf/peak_mib"] = torch.cuda.max_memory_allocated(lit.device) / 2**20
            self.last.update(row)
            for logger in trainer.loggers:
                logger.log_metrics(row, step)
            self._mark = (now, step)
        elif self._mark is None:  # the first to arrive after compiling or a pause
            self._mark = (now, step)

    def _rates(self, seconds: float, devices: int) -> dict[str, float]:
        rates = {"perf/step_ms": 1e3 * seconds, "perf/tokens_per_s": self._tokens / seconds}
        if self._peak is not None:
            rates["perf/mfu"] = self._flops * self._tokens / seconds / (self._peak * devices)
        return rates

    def on_validation_end(self, trainer: L.Trainer, lit: Any) -> None:
        self._mark = None
        for logger in trainer.loggers:
            logger.log_metrics({"val/loss": float(trainer.callback_metrics["val/loss"])}, trainer.global_step)

    def on_save_checkpoint(self, trainer: L.Trainer, lit: Any, checkpoint: dict[str, Any]) -> None:
        self._mark = None


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
        self.prompt = None if prompt is None else shown(prompt)  # 123 is text, too
        self.last: str | None = None

    def setup(self, trainer: L.Trainer, lit: Any, stage: str) -> None:
        """Everything that sampling could object to, before anything trains."""
        from model.generation.decode import Sampling

        # now: a validation that is made up for comes before this callback's on_train_start
        self.path = Path(trainer.default_root_dir) / "samples.txt"
        tokenizer = trainer.datamodule.tokenizer
        # random tokens have no text, a model that sees the future none to continue, and a sharded one
        # generates from its checkpoint
        self.able = tokenizer is not None and lit.net.config.causal and lit.device_mesh is None
        whole("callbacks.samples.tokens", self.tokens, 1)
        Sampling(temperature=self.temperature)
        if self.able:
            self._start = self._encoded(tokenizer)

    def _encoded(self, tokenizer: Any) -> list[int]:
        if self.prompt:
            return tokenizer.encode(self.prompt)
        if tokenizer.eot is not None:
            return [tokenizer.eot]
        try:
            return tokenizer.encode("\n")
        except ValueError:  # the characters of a text without lines
            return [0]

    def on_train_start(self, trainer: L.Trainer, lit: Any) -> None:
        """Of a run that is continued, leave the samples up to its step."""
        if trainer.is_global_zero and self.path.exists():
            parts = re.split(r"^(?=--- step \d+$)", self.path.read_text(encoding="utf-8"), flags=re.MULTILINE)
            kept = [part for part in parts if part and int(part.split()[2]) <= trainer.global_step]
            self.path.write_text("".join(kept), encoding="utf-8")

    def on_validation_end(self, trainer: L.Trainer, lit: Any) -> None:
        step = trainer.global_step
        due = step >= trainer.max_steps or (step // trainer.val_check_interval) % self.every == 0
        if trainer.state.fn != "fit" or not self.able or not due or not trainer.is_global_zero:
            return
        from model.generation.generate import generate

        # or blocks compiled to train would be compiled for each layer
        eager = torch.compiler.set_stance("force_eager")
        with eager, lit.trainer.precision_plugin.forward_context():
            result = generate(
                lit.net,
                [self._start],
                self.tokens,
                decode_attention=lit.decode_attention,
                temperature=self.temperature,
                seed=lit.seed,
            )
        self.last = trainer.datamodule.tokenizer.decode(result.tokens[0])
        with open(self.path, "a", encoding="utf-8") as file:
            file.write(f"--- step {step}\n{self.last}\n")
        for logger in trainer.loggers:
            if hasattr(logger, "log_text"):  # wandb
                logger.log_text("samples", columns=["step", "text"], data=[[step, self.last]])


class Progress(L.Callback):
    """One live line on a terminal, with rate and estimate; a plain line every `every` steps in a log file. On
    one device, a step that takes long and is not compiled says how far it is."""

    def __init__(self, every: int = 100):
        self.every = every
        self.bar: Any = None
        self.within: StepProgress | None = None
        # on the host: to read Lightning's at every step would wait for the device
        self.val_loss: float | None = None

    def on_train_start(self, trainer: L.Trainer, lit: Any) -> None:
        self._start = self._first = (time.perf_counter(), trainer.global_step)
        terminal = sys.stdout.isatty()
        if not (lit.compile_net or lit.cuda_graphs or trainer.world_size > 1):
            self.within = StepProgress(lit.net, lit.accumulate, self._say, 1 if terminal else 10)
        if not trainer.is_global_zero or not terminal:
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

    def on_train_batch_start(self, trainer: L.Trainer, lit: Any, *args: Any) -> None:
        if self.within is not None:
            self.within.begin(trainer.global_step + 1)

    def _say(self, line: str) -> None:
        """In place of the live line, or below the others."""
        if self.bar is not None:
            self.bar.update(self.task, text=line)
        else:
            print(line, flush=True)

    def on_train_batch_end(self, trainer: L.Trainer, lit: Any, *args: Any) -> None:
        step, now = trainer.global_step, time.perf_counter()
        if step == self._start[1] + 1:
            if lit.compile_net and trainer.is_global_zero:
                print(f"the first step took {now - self._start[0]:.1f} s, including compilation")
            self._first = now, step
        if self.bar is not None:
            self.bar.update(self.task, completed=step, text=self._text(trainer))
        elif trainer.is_global_zero and step % min(self.every, -(-trainer.max_steps // 10)) == 0:
            # the first step is no measure of the others: it compiles
            since, before = self._first if step > self._first[1] else self._start
            left = (now - since) / (step - before) * (trainer.max_steps - step)
            print(f"step {step}/{trainer.max_steps}  {self._text(trainer)}  {left:.0f} s left", flush=True)

    def _text(self, trainer: L.Trainer) -> str:
        now = next((c.last for c in trainer.callbacks if isinstance(c, Metrics)), {})
        parts = []
        if "train/loss" in now:
            parts.append(f"loss {now['train/loss']:.3f}")
        if self.val_loss is not None:
            parts.append(f"val {self.val_loss:.3f}")
        if "perf/tokens_per_s" in now:
            parts.append(f"{now['perf/tokens_per_s']:,.0f} tokens/s")
        return "  ".join(parts)

    def on_validation_start(self, trainer: L.Trainer, lit: Any) -> None:
        self._val_start = self._val_said = time.perf_counter()

    def on_validation_batch_end(
        self, trainer: L.Trainer, lit: Any, outputs: Any, batch: Any, batch_idx: int, *args: Any
    ) -> None:
        """How far a long validation is: on a terminal each second, in a log file each ten."""
        now = time.perf_counter()
        if not trainer.is_global_zero or now - self._val_said < (10 if self.bar is None else 1):
            return
        self._val_said, done, total = now, batch_idx + 1, int(trainer.num_val_batches[0])
        left = (now - self._val_start) / done * (total - done)
        text = f"validation, {done}/{total} batches, {left:.0f} s left"
        self._say(text if self.bar is not None else f"step {trainer.global_step}: {text}")

    def on_validation_end(self, trainer: L.Trainer, lit: Any) -> None:
        self.val_loss = float(trainer.callback_metrics["val/loss"])
        if trainer.is_global_zero:
            line = f"step {trainer.global_step}: validation loss {self.val_loss:.4f}"
            (self.bar.console.print if self.bar is not None else print)(line)

    def on_train_end(self, trainer: L.Trainer, lit: Any) -> None:
        if self.within is not None:
            self.within.end()
            self.within = None
        if self.bar is not None:
            self.bar.stop()
            self.bar = None

    def on_exception(self, trainer: L.Trainer, lit: Any, exception: BaseException) -> None:
        self.on_train_end(trainer, lit)
