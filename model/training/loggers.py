"""Where metrics go: a CSV file that survives a resume, Weights & Biases that works without an account or a
network."""

from __future__ import annotations

import csv
import os
import secrets
import socket
from argparse import Namespace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from lightning.pytorch.loggers import Logger
from lightning.pytorch.utilities import rank_zero_only

from conf.values import UserError
from model.training.checkpoint import sync_folder


class MetricsCSV(Logger):
    """`metrics.csv` with a row per logged step, flushed as it is written.

    Lightning's CSVLogger deletes the file when it reopens a folder; here a resumed run cuts the rows after
    `resume_step` and goes on. A metric that turns up later gets a column of its own."""

    def __init__(self, path: str, resume_step: int | None = None):
        super().__init__()
        self.path = Path(path)
        self.columns: list[str] = ["step"]
        self._rewrite(resume_step)

    @property
    def name(self) -> str:
        return "csv"

    @property
    def version(self) -> str:
        return ""

    @rank_zero_only
    def _rewrite(self, upto: int | None) -> None:
        rows: list[dict[str, str]] = []
        if self.path.exists() and upto is not None:
            with open(self.path, newline="", encoding="utf-8") as file:
                reader = csv.DictReader(file)
                # a row that a kill cut short has no value in its last columns
                rows = [
                    r
                    for r in reader
                    if r["step"].isascii()
                    and r["step"].isdecimal()
                    and int(r["step"]) <= upto
                    and None not in r.values()
                ]
                self.columns = list(reader.fieldnames or self.columns)
        self._write(rows)

    def _write(self, rows: list[dict[str, Any]]) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        partial = self.path.with_suffix(".partial")
        with open(partial, "w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, self.columns, restval="")
            writer.writeheader()
            writer.writerows(rows)
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, self.path)
        sync_folder(self.path.parent)

    @rank_zero_only
    def save(self) -> None:
        """Rows written so far survive a power cut, as the checkpoint that comes after them does."""
        with open(self.path, "rb") as file:
            os.fsync(file.fileno())

    @rank_zero_only
    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        row = {"step": step, **{key: float(value) for key, value in metrics.items()}}
        new = [key for key in row if key not in self.columns]
        if new:
            with open(self.path, newline="", encoding="utf-8") as file:
                rows = list(csv.DictReader(file))
            self.columns += new
            self._write(rows)
        with open(self.path, "a", newline="", encoding="utf-8") as file:
            csv.DictWriter(file, self.columns, restval="").writerow(row)

    @rank_zero_only
    def log_hyperparams(self, params: dict[str, Any] | Namespace, *args: Any, **kwargs: Any) -> None:
        """The run's config.yaml holds them."""


def csv_logger(run_dir: str, config: dict[str, Any], resume_step: int | None = None) -> Logger:
    return MetricsCSV(f"{run_dir}/metrics.csv", resume_step)


def tensorboard_logger(run_dir: str, config: dict[str, Any], resume_step: int | None = None) -> Logger:
    from lightning.pytorch.loggers import TensorBoardLogger

    purge = None if resume_step is None else resume_step + 1  # hides what a killed run logged after that
    return TensorBoardLogger(run_dir, name="tensorboard", version="", purge_step=purge)


def wandb_logger(
    run_dir: str,
    config: dict[str, Any],
    resume_step: int | None = None,
    *,
    project: str = "tilegpt",
    entity: str | None = None,
    offline: bool | None = None,
    group: str | None = None,
    tags: list[str] | None = None,
) -> Logger:
    """Weights & Biases, config and all. offline=None: offline where there is no key or the server cannot be
    reached, saying how to upload the run later. A key that is not one raises UserError before anything
    trains."""
    import wandb
    from lightning.pytorch.loggers import WandbLogger

    if rank_zero_only.rank != 0:
        return WandbLogger(offline=True)  # the run is the first rank's
    try:
        why = _why_offline()
        if offline is False and why:
            raise UserError(f"logger.offline=false, but {why}")
        if offline is None and why:
            print(f"W&B logs offline: {why}. Upload later with: wandb sync {run_dir}/wandb/offline-run-*")
        name, own = Path(run_dir).name, _own_id(Path(run_dir), resume_step)
        run = wandb.init(  # now, so that a wrong key is found before training
            project=project, entity=entity, name=name, id=own, resume="allow", group=group, tags=tags,
            # absolute: W&B's service is a process of its own, and stays in the folder where it began
            dir=Path(run_dir).absolute(), mode="offline" if offline or why else "online", config=config,
            reinit="finish_previous", settings=wandb.Settings(init_timeout=30),
        )  # fmt: skip
    except (wandb.errors.Error, ValueError) as error:
        raise UserError(
            f"W&B did not start: {str(error).rstrip('.')}. Check the key (wandb login), log offline "
            "(logger.offline=true), or to a file alone (logger=csv)."
        ) from error
    run.define_metric("trainer/global_step")
    run.define_metric("*", step_metric="trainer/global_step", step_sync=True)
    return WandbLogger(experiment=run)


def _own_id(run: Path, resume_step: int | None) -> str:
    """What a run is to W&B, kept in its folder, so that it goes on there after a resume. By their names, runs
    of the same name in two folders would become one."""
    file = run / "wandb_id.txt"
    kept = file.read_text(encoding="utf-8").strip() if resume_step is not None and file.is_file() else ""
    if not kept:
        # a run that was logged before there were such files was known by its name
        old = resume_step is not None and (run / "wandb").is_dir()
        kept = run.name if old else secrets.token_hex(8)
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(kept, encoding="utf-8")
    return kept


def _why_offline() -> str | None:
    """What keeps W&B from its server, None where nothing does; raises for a key that cannot be one."""
    import wandb

    if (mode := os.environ.get("WANDB_MODE", "online")) != "online":
        return f"WANDB_MODE is {mode}"
    if not wandb.login(prompt=False, verify=False):
        return "there is no API key (wandb login)"
    server = urlsplit(os.environ.get("WANDB_BASE_URL", "https://api.wandb.ai"))
    port = server.port or (80 if server.scheme == "http" else 443)
    try:
        socket.create_connection((server.hostname, port), timeout=3).close()
    except OSError:
        return f"{server.hostname}:{port} cannot be reached"
    return None
