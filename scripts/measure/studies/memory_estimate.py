"""Is the memory of a training step what was predicted, and does its split add up?

    python scripts/study.py memory_estimate                 six configurations, about 90 s of one H200
    python scripts/study.py memory_estimate --config "model=gpt2 seq_len=512 data.batch_size=2"

Each configuration, the overrides of a line of `CONFIGS`, has a process of its own, three at a time (what one
allocates, the others do not change). It asks costs/memory.py for the peak, by kind, before anything runs
(as scripts/estimate.py does), then takes steps and splits their peak (scripts/memory.py). The formulas were
derived from the code and checked on small models; none of these configurations was looked at for them.
Without a GPU: three small ones, by the allocations of the CPU.

Rows: results/memory_estimate/<gpu or cpu>.jsonl. `point`: implementation, model, seq_len, micro_batch, config
(the overrides); `result`: predicted_mib and memory_split (the peak, and by kind), disagreement (of the
split's sum with the peak that PyTorch counts, the largest of the two the base), fits_predicted.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from scripts.measure.report.pages import page
from scripts.measure.report.tables import Record, listed, records, where
from scripts.measure.runner import Run, parser, run_study
from scripts.measure.studies import Report, Row
from scripts.measure.worker import once

STUDY = "memory_estimate"
GPU_S = 95
KINDS = ("parameters", "gradients", "optimizer", "activations", "attention", "other")
NEAR, ADDS_UP = 0.10, 0.03  # what a prediction and a split may be off
AT_ONCE, TIMEOUT_S = 3, 240
CONFIGS = (
    "model=gpt2 data=synthetic seq_len=1024 data.batch_size=16 attention=triton",
    "model=gpt2 data=synthetic seq_len=1024 data.batch_size=8 attention=naive compile=false",
    "model=gpt2 data=synthetic seq_len=1024 data.batch_size=8 attention=naive",
    "model=gpt2 data=synthetic seq_len=4096 data.batch_size=8 attention=sdpa_flash compile=false "
    "checkpointing=true",
    "model=gpt2_medium data=synthetic seq_len=2048 data.batch_size=8 attention=cuda_fa2 model.norm=rmsnorm "
    "model.mlp=swiglu model.position=rope model.n_kv_head=4 model.bias=false",
    "model=gpt2 data=synthetic seq_len=2048 data.batch_size=4 attention=sdpa_math precision=32-true "
    "compile=false",
)
CPU_CONFIGS = tuple(
    f"model=tiny data=synthetic seq_len=128 data.batch_size=4 compile=false attention={name}"
    for name in ("naive", "tiled", "sdpa")
)


def point(config: str) -> dict[str, Any]:
    words = dict(word.split("=", 1) for word in config.split())
    shape = {"seq_len": int(words["seq_len"]), "micro_batch": int(words["data.batch_size"])}
    head = {"study": STUDY, "implementation": words["attention"], "pass": "train"}
    return head | {"model": words["model"], **shape, "config": config}


def measured(config: str) -> dict[str, Any]:
    """The result of a configuration, by a process of its own."""
    return once(f"{__name__}:child", {"config": config}, TIMEOUT_S)


def child(request: dict[str, Any], ready: Callable[[], None]) -> dict[str, Any]:
    """Predicted, then measured, in this process: for measure/worker.py."""
    from model.costs.memory import peak
    from scripts.estimate import chosen_gpu, run_of
    from scripts.memory import composed, disagreement, memory_split, training_step

    cfg = composed(request["config"].split())
    gpu = chosen_gpu(None, cfg.trainer.accelerator, measure=True)
    most = peak(run_of(cfg, gpu))
    result: dict[str, Any] = {
        "predicted_mib": {name: getattr(most, name) / 2**20 for name in ("peak", *KINDS)},
        "fits_predicted": gpu is None or most.peak <= gpu.usable_bytes,
    }
    split = memory_split(training_step(cfg))
    return {"status": "ok", **result, "memory_split": split, "disagreement": disagreement(split)}


def off(row: Row) -> float:
    """The predicted peak over the measured one, less 1."""
    result = row["result"]
    return result["predicted_mib"]["peak"] / result["memory_split"]["peak"] - 1


def report(rows: list[Row]) -> Report:
    done = where(records(rows), status="ok")

    def line(r: Record) -> str:
        split, foreseen = r.memory_split, r.predicted_mib
        kinds = [f"{foreseen[kind]:,.0f} / {split[kind]:,.0f}" for kind in KINDS]
        peaks = (
            f"{foreseen['peak']:,.0f}|{split['peak']:,.0f}|{100 * off(r):+.1f}%|{100 * r.disagreement:.2f}%"
        )
        return "|".join([r.config, peaks, *kinds])

    head = "|".join(["configuration|peak, predicted|measured|off|split off", *KINDS])
    return page(
        STUDY,
        [listed("MiB; for each kind: predicted / measured", head, done, line)],
        done=len(done),
        off=[abs(off(r)) for r in done],
        near=NEAR,
        sums=[r.disagreement for r in done],
        adds_up=ADDS_UP,
        failed=[r for r in records(rows) if r.status != "ok"],
    )


def arguments(given: list[str] | None = None) -> argparse.Namespace:
    made = parser(__doc__, STUDY)
    made.add_argument(
        "--config", action="append", metavar="OVERRIDES", help="in place of the six; repeatable"
    )
    options = made.parse_args(given)
    for config in options.config or ():
        there = {word.split("=")[0] for word in config.split()}
        if lacking := {"attention", "model", "seq_len", "data.batch_size"} - there:
            made.error(f"--config {config!r} needs {', '.join(sorted(lacking))} as well")
    return options


def measure(options: argparse.Namespace, run: Run) -> None:
    configs = options.config or (CONFIGS if run.device == "cuda" else CPU_CONFIGS)
    left = [p for p in run.left(map(point, configs), f"{AT_ONCE} at a time") if run.claim(p)]
    with ThreadPoolExecutor(AT_ONCE) as pool:
        for asked, result in zip(left, pool.map(lambda p: measured(p["config"]), left), strict=True):
            run.add(
                asked, result, f"{asked['config']}: {result['status']} {result.get('reason') or ''}".rstrip()
            )


def main() -> None:
    run_study(STUDY, arguments(), measure, report)
