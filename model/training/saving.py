"""When a run saves, and when it stops before its end."""

from __future__ import annotations

import math
import os
import signal
import sys
from pathlib import Path
from typing import Any

import lightning as L

from model.training.checkpoint import CheckpointError, link, link_best, prune
from model.training.runs import ckpt_of


class Checkpoints(L.Callback):
    """`step-*.ckpt` every `every` steps, at each validation and at the end, the newest `keep` of them kept;
    `best.ckpt` by validation loss. Weights that have exploded push out no others."""

    def __init__(self, every: int | None = None, keep: int = 2):
        self.every = every
        self.keep = keep
        self.best: float | None = None
        self.best_step: int | None = None
        self.pending = False  # saved at a step whose validation is still to come
        self.saved: int | None = None
        self.good: int | None = None  # the newest step that was saved with weights that had not exploded
        self.withheld: str | None = None  # why the weights at a fault were not saved

    def setup(self, trainer: L.Trainer, lit: Any, stage: str) -> None:
        self.folder = Path(trainer.default_root_dir) / "checkpoints"
        if trainer.is_global_zero:
            for partial in self.folder.glob("*.partial"):  # left by a kill during a write
                partial.unlink()

    def state_dict(self) -> dict[str, Any]:
        names = ("best", "best_step", "pending", "good")
        return {name: getattr(self, name) for name in names}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.best, self.best_step, self.pending = state["best"], state["best_step"], state["pending"]
        self.good = state.get("good")

    def on_train_start(self, trainer: L.Trainer, lit: Any) -> None:
        if self.best is not None and trainer.is_global_zero:
            link_best(self.folder, self.best_step)
        if self.best is not None and not (self.folder / "best.ckpt").exists():
            self.best = None  # a run that goes on under another name finds its own
        if self.good is not None and not self._path(self.good).exists():
            self.good = None
        if self.pending:  # as Lightning's epoch loop does it
            self.pending = False
            trainer.validating = True
            loop = trainer.fit_loop.epoch_loop.val_loop
            loop.restarting = False  # else it goes on behind the batches of the validation before
            loop.run()
            trainer.training = True

    def on_train_batch_end(self, trainer: L.Trainer, lit: Any, *args: Any) -> None:
        trainer.strategy.checkpoint_io.check()
        step = trainer.global_step
        if step >= trainer.max_steps:  # saved after the validation that a run ends with, or in `on_train_end`
            return
        validates = trainer.limit_val_batches > 0
        validated_next = validates and step % trainer.val_check_batch == 0  # and saved then, with the result
        if lit.stopping:  # without that validation
            self.pending = validated_next
            self.save(trainer)
        elif self.every and step % self.every == 0 and not validated_next:
            self.save(trainer)

    def on_validation_batch_end(self, trainer: L.Trainer, lit: Any, *args: Any) -> None:
        """Whoever sent a signal may not wait for the end of the validation."""
        if lit.stopping and not lit.fault and self.saved != trainer.global_step:
            self.pending = True
            self.save(trainer)
            self.pending = False

    def on_validation_end(self, trainer: L.Trainer, lit: Any) -> None:
        if trainer.state.fn != "fit":
            return
        loss = float(trainer.callback_metrics["val/loss"])
        improved = math.isfinite(loss) and (self.best is None or loss < self.best)
        if improved:
            self.best, self.best_step = loss, trainer.global_step
        path = self.save(trainer)
        if improved and trainer.is_global_zero and self.withheld is None:
            trainer.strategy.checkpoint_io.then(link, path, self.folder / "best.ckpt")

    def on_train_end(self, trainer: L.Trainer, lit: Any) -> None:
        if self.saved != trainer.global_step and self.withheld is None:  # a run without validation
            self.save(trainer)
        trainer.strategy.checkpoint_io.teardown()  # while Interrupt handles signals, before Peers' barrier

    def on_exception(self, trainer: L.Trainer, lit: Any, exception: BaseException) -> None:
        """What is being written ends before the run's folder is let go of."""
        try:
            trainer.strategy.checkpoint_io.teardown()
        except CheckpointError as error:
            exception.add_note(f"A checkpoint could not be written: {error}")

    def save(self, trainer: L.Trainer) -> Path:
        lit, path = trainer.lightning_module, self._path(trainer.global_step)
        lit.flush()  # metrics.csv holds every step that a checkpoint knows of
        for logger in trainer.loggers:
            logger.save()
        exploded = lit.exploded()
        if exploded and lit.fault:
            self.withheld = exploded
            return path
        if not exploded:
            self.good = trainer.global_step
        trainer.save_checkpoint(path, weights_only=False)
        self.saved = trainer.global_step
        if trainer.is_global_zero:
            good = None if self.good is None else self._path(self.good)
            trainer.strategy.checkpoint_io.then(prune, path, self.keep, good)
        return path

    def after_fault(self) -> str:
        """What the run that a fault stopped leaves behind."""
        run = self.folder.parent
        if self.withheld is None:
            return f" Saved: step {self.saved} ({ckpt_of(run)})."
        said = f" The weights had exploded ({self.withheld}) and were not saved."
        if self.good is None:
            return f"{said} No checkpoint of this run has good ones: start again."
        return f"{said} The last good ones are of step {self.good}: {ckpt_of(run, self._path(self.good))}."

    def _path(self, step: int | None) -> Path:
        return self.folder / f"step-{step or 0:08d}.ckpt"


class Interrupt(L.Callback):
    """Ctrl-C, SIGTERM and SIGHUP end the run at the next step boundary, saved; within a validation it is
    saved at once and ends with the validation. A second signal ends it at once.

    The flag travels with the scalars of each step and of each batch of a validation, so that under DDP all
    ranks stop at the same one. That replaces Lightning's own broadcast, which would synchronise host and
    device at every batch."""

    def __init__(self) -> None:
        self.received: int | None = None
        self._before: dict[int, Any] = {}

    def setup(self, trainer: L.Trainer, lit: Any, stage: str) -> None:
        loop = trainer.fit_loop.epoch_loop
        assert hasattr(loop, "_broadcast_sigterm_tensor"), "Lightning's epoch loop has changed"
        loop._broadcast_sigterm_tensor = lambda: None

    def on_train_start(self, trainer: L.Trainer, lit: Any) -> None:
        saves = any(isinstance(callback, Checkpoints) for callback in trainer.callbacks)

        def handle(number: int, frame: Any) -> None:
            if self.received is not None:
                self._restore()
                raise KeyboardInterrupt
            self.received = number
            lit.request_stop()
            if trainer.is_global_zero:
                what = _announced(saves, trainer.validating)
                _say(f"\n{signal.Signals(number).name}: {what}. Again: stop at once.")

        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:  # as nohup has it
                self._before[number] = signal.signal(number, handle)

    def _restore(self) -> None:
        while self._before:
            number, handler = self._before.popitem()
            signal.signal(number, handler)

    def on_train_end(self, trainer: L.Trainer, lit: Any) -> None:
        self._restore()

    def on_exception(self, trainer: L.Trainer, lit: Any, exception: BaseException) -> None:
        self._restore()


def _announced(saves: bool, validating: bool) -> str:
    if not saves:
        when = "when the validation ends" if validating else "at the next step"
        return f"stopping {when}, without a checkpoint (callbacks.checkpoints=null)"
    if validating:
        return "saving now, then stopping when the validation ends"
    return "saving at the next step, then stopping"


def _say(text: str) -> None:
    """Print, also from a signal's handler, and where the terminal may have gone: then nothing written from
    now on is seen, or fails."""
    try:
        print(text, flush=True)
    except RuntimeError:  # the signal came while something else was printed
        pass
    except OSError:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        for stream in (sys.__stdout__, sys.__stderr__):
            os.dup2(nowhere, stream.fileno())
