"""A run on several ranks ends soon after one of them is lost, and says which.

Without this the others wait in a collective for as long as the process group's timeout, or fail with a
message about a socket. Here a thread of each rank writes into a store that all ranks have that the rank is
alive and what it is doing, and reads the same of the others.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import lightning as L
import torch.distributed as dist

from model.training.checkpoint import checkpoints_of, step_of
from model.training.runs import ckpt_of

LIMIT = 40.0  # seconds without a sign of life
PERIOD = 2.0  # seconds from one sign to the next
LOADING, TRAINING, OTHER = "loading", "training", "other"


class Peers(L.Callback):
    """The last of the callbacks: then a rank loads its next batch when all others of them are done.

    A rank is lost when its process has ended, or when for LIMIT seconds it has given no sign of life or has
    loaded a batch while this one trains on its own. One that hangs within a step cannot be told from one that
    computes: there the process group's own timeout holds."""

    def __init__(self) -> None:
        self._state, self._since = f"{OTHER} 0", 0.0
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None

    def setup(self, trainer: L.Trainer, lit: Any, stage: str) -> None:
        if trainer.world_size == 1 or self._thread is not None:
            return
        self._rank = trainer.global_rank
        self._others = [rank for rank in range(trainer.world_size) if rank != self._rank]
        self._run = Path(trainer.default_root_dir)
        self._checkpoints = trainer.strategy.checkpoint_io
        self._processes = getattr(trainer.strategy.launcher, "procs", [])  # of ranks 1, 2, ... if this is 0
        for thread in threading.enumerate():
            if thread.name == "child-process-observer":  # Lightning's, which kills them all without a word
                assert hasattr(thread, "_child_processes"), "Lightning's observer of processes has changed"
                thread._child_processes = []
        environment = trainer.strategy.cluster_environment
        self._address = environment.main_address, environment.main_port
        now = time.monotonic()
        self._read = now  # when the store was last read
        self._seen = dict.fromkeys(self._others, ("", ""))  # of each rank its last sign of life and state
        self._alive, self._changed = dict.fromkeys(self._others, now), dict.fromkeys(self._others, now)
        self._thread = threading.Thread(target=self._beat, name="peers", daemon=True)
        self._thread.start()
        threading.Thread(target=self._watch_store, name="peers' store", daemon=True).start()

    def on_train_batch_start(self, trainer: L.Trainer, *args: Any) -> None:
        self._enter(TRAINING, trainer)

    def on_train_batch_end(self, trainer: L.Trainer, *args: Any) -> None:
        self._enter(LOADING, trainer)

    def on_validation_start(self, trainer: L.Trainer, lit: Any) -> None:
        self._enter(OTHER, trainer)

    def on_validation_end(self, trainer: L.Trainer, lit: Any) -> None:
        self._enter(LOADING, trainer)

    def on_fit_end(self, trainer: L.Trainer, lit: Any) -> None:
        self._enter(OTHER, trainer)
        if self._thread is not None:
            trainer.strategy.barrier()  # nobody falls silent, or takes the store away, before all are here
            self._ended.set()

    def on_exception(self, trainer: L.Trainer, lit: Any, exception: BaseException) -> None:
        """Another rank is the cause where a collective failed: the thread finds it, and ends this process. An
        error of this rank's own is told to the others."""
        if self._thread is None:
            return
        if _of_a_collective(exception):
            self._thread.join(LIMIT + 5 * PERIOD)
        self._ended.set()
        if isinstance(exception, Exception):
            said = f"{type(exception).__name__}: {exception}".partition("\n")[0]
            with contextlib.suppress(RuntimeError):
                self._store().set(f"error {self._rank}", said[:300])

    def _enter(self, state: str, trainer: L.Trainer) -> None:
        self._state, self._since = f"{state} {trainer.global_step}", time.monotonic()

    def _store(self) -> dist.Store:
        """A connection of its own, as the process group's is taken while that waits for something."""
        host, port = self._address
        patience = timedelta(seconds=LIMIT)
        store = dist.TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=patience)
        return dist.PrefixStore(f"peers {os.environ.get('TORCHELASTIC_RESTART_COUNT', '')}", store)

    def _beat(self) -> None:
        """Give signs of life, and look for those of the others."""
        store, beats = None, 0
        while not self._ended.wait(PERIOD):
            beats += 1
            try:
                store = store or self._store()
                store.set(str(self._rank), f"{beats}|{self._state}")
                self._look(store)
            except RuntimeError:  # it is kept by rank 0, or by torchrun on the machine of rank 0
                self._lost(0, "the connection to it is gone")
            for rank, process in enumerate(self._processes, 1):
                if code := process.poll():
                    how = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
                    self._lost(rank, f"its process ended with {how}")

    def _look(self, store: dist.Store) -> None:
        now = time.monotonic()
        if now - self._read > LIMIT / 2:  # this process was stopped itself, and goes on now
            self._alive, self._changed = dict.fromkeys(self._others, now), dict.fromkeys(self._others, now)
        self._read = now
        for rank in self._others:
            if store.check([f"error {rank}"]):
                self._lost(rank, store.get(f"error {rank}").decode(errors="replace"))
            text = store.get(str(rank)).decode() if store.check([str(rank)]) else "|"
            (beat, _, state), (last_beat, last_state) = text.partition("|"), self._seen[rank]
            self._seen[rank] = beat, state
            if beat != last_beat:
                self._alive[rank] = now
            if state != last_state:
                self._changed[rank] = now
            if now - self._alive[rank] > LIMIT:
                self._lost(rank, f"it has given no sign of life for {LIMIT:.0f} s")
            name, _, step = state.partition(" ")
            waited_for = name == LOADING and self._state == f"{TRAINING} {step}"
            if waited_for and now - max(self._changed[rank], self._since) > LIMIT:
                self._lost(rank, f"it has been loading its next batch for {LIMIT:.0f} s")

    def _watch_store(self) -> None:
        """A store that does not answer keeps `_beat` waiting: then the rank that keeps it has stopped."""
        overdue = 0
        while not self._ended.wait(PERIOD):
            late = time.monotonic() - self._read > LIMIT + PERIOD
            overdue = overdue + 1 if late else 0
            if overdue > 1:  # after one it may be this process that was stopped
                self._lost(0, f"it has given no sign of life for {LIMIT:.0f} s")

    def _lost(self, rank: int, why: str) -> None:
        """Say it, and end this process, whatever its main thread waits for."""
        if self._ended.is_set():
            return
        self._ended.set()
        step = self._state.rpartition(" ")[2]
        self._checkpoints.wait(5 * PERIOD)  # all ranks have passed the step that is being written
        if self._rank == (0 if rank else 1):
            text = f"error: rank {rank} was lost after step {step}: {why}. {self._left()}\n"
            sys.stderr.write("".join(c if c.isprintable() or c == "\n" else ascii(c)[1:-1] for c in text))
            sys.stderr.flush()
        else:
            time.sleep(3 * PERIOD)  # the one that says it may need as long to notice
        for process in self._processes:
            process.kill()
        os._exit(1)

    def _left(self) -> str:
        saved = checkpoints_of(self._run / "checkpoints")
        if not saved:
            return "All ranks end here. Nothing had been saved yet: start again."
        return (
            f"All ranks end here. Saved: step {step_of(saved[0])}. Continue, on any number of devices: "
            f"python train.py {ckpt_of(self._run)} trainer.devices=..."
        )


def _of_a_collective(error: BaseException) -> bool:
    """By its class, or by the words of a RuntimeError, which gloo's are."""
    words = ("gloo", "nccl", "connection closed by peer", "connection reset", "broken pipe")
    said = isinstance(error, RuntimeError) and any(word in str(error).lower() for word in words)
    return said or isinstance(error, dist.DistError)
