"""A study in Weights & Biases: a run for each row, in a group named by the study, one for the picture."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

Row = dict[str, Any]


def log_point(row: Row, project: str, folder: Path = Path("runs")) -> None:
    """The point as the run's config, beside the machine; every number of the result as its summary. Offline
    where there is no key or no network, as model.training.loggers.wandb_logger says."""
    point, result = row["point"], row["result"]
    name = f"{point['study']}-{point['implementation']}-{point['seq_len']}-{row['key'][:8]}"
    run = _run(name, project, point["study"], {"point": point, "machine": row["machine"]}, folder)
    run.log(dict(_numbers(result)))
    run.summary.update({key: value for key, value in result.items() if isinstance(value, str | bool)})
    run.finish()


def log_picture(rows: list[Row], project: str, folder: Path = Path("runs")) -> None:
    """The picture of the study's rows, as the media of a run."""
    import wandb

    from scripts.measure.report.sweep_report import picture

    study = rows[0]["point"]["study"]
    run = _run(f"{study}-picture-{rows[-1]['run_id']}", project, study, {}, folder)
    with tempfile.TemporaryDirectory() as temporary:
        path = Path(temporary) / f"{study}.png"
        path.write_bytes(picture(rows, "png"))
        run.log({"picture": wandb.Image(str(path))})
        run.finish()


def _run(name: str, project: str, group: str, config: dict[str, Any], folder: Path) -> Any:
    from model.training.loggers import wandb_logger

    (folder / name).mkdir(parents=True, exist_ok=True)
    return wandb_logger(str(folder / name), config, project=project, group=group).experiment


def _numbers(result: dict[str, Any], prefix: str = "") -> list[tuple[str, float]]:
    """The numbers of a result; those of a part of it with the part's name before theirs."""
    found: list[tuple[str, float]] = []
    for key, value in result.items():
        if isinstance(value, dict):
            found += _numbers(value, f"{prefix}{key}/")
        elif isinstance(value, int | float) and not isinstance(value, bool):
            found.append((f"{prefix}{key}", value))
    return found
