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
import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from scripts.measure.rows import Kept, append, rows_file
from scripts.measure.studies import Report, Row, Table, rows_path

STUDY = "memory_estimate"
COMMAND = f"python scripts/study.py {STUDY}"
QUESTION = "Does a training step take the memory that was predicted, and do its parts add up to the peak?"
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
    command = [sys.executable, "-m", "scripts.study", STUDY, "--one", config]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S)
    except subprocess.TimeoutExpired:
        return {"status": "error", "reason": f"it took more than {TIMEOUT_S} s"}
    lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    if lines:
        return json.loads(lines[-1].removeprefix("RESULT "))
    said = done.stderr.strip().splitlines()[-1:] or ["nothing was said"]
    return {"status": "error", "reason": f"exit code {done.returncode}: {said[0]}"}


def one(config: str) -> dict[str, Any]:
    """Predicted, then measured, in this process."""
    from model.costs.memory import peak
    from scripts.estimate import chosen_gpu, run_of
    from scripts.measure.instruments.side_by_side import failure
    from scripts.memory import composed, disagreement, memory_split, training_step

    try:
        cfg = composed(config.split())
        gpu = chosen_gpu(None, cfg.trainer.accelerator, measure=True)
        most = peak(run_of(cfg, gpu))
        result: dict[str, Any] = {
            "predicted_mib": {name: getattr(most, name) / 2**20 for name in ("peak", *KINDS)},
            "fits_predicted": gpu is None or most.peak <= gpu.usable_bytes,
        }
        split = memory_split(training_step(cfg))
    except Exception as error:  # whatever it is, it is the point's result
        return failure(error)
    return {"status": "ok", **result, "memory_split": split, "disagreement": disagreement(split)}


def off(row: Row) -> float:
    """The predicted peak over the measured one, less 1."""
    result = row["result"]
    return result["predicted_mib"]["peak"] / result["memory_split"]["peak"] - 1


def report(rows: list[Row]) -> Report:
    done = [row for row in rows if row["result"]["status"] == "ok"]
    head = ["configuration", "peak, predicted", "measured", "off", "split off", *KINDS]
    lines = [head]
    for row in done:
        result = row["result"]
        split, foreseen = result["memory_split"], result["predicted_mib"]
        figures = [f"{foreseen['peak']:,.0f}", f"{split['peak']:,.0f}", f"{100 * off(row):+.1f}%"]
        figures.append(f"{100 * result['disagreement']:.2f}%")
        kinds = [f"{foreseen[kind]:,.0f} / {split[kind]:,.0f}" for kind in KINDS]
        lines.append([row["point"]["config"], *figures, *kinds])
    notes = []
    if done:
        near = sum(abs(off(row)) <= NEAR for row in done)
        sums = max(row["result"]["disagreement"] for row in done)
        farthest = max(map(abs, map(off, done)))
        notes.append(
            f"{near} of {len(done)} peaks are within {100 * NEAR:.0f}% of the prediction, the farthest off "
            f"by {100 * farthest:.1f}%. The parts, each found by itself, sum to the peak that PyTorch counts "
            f"within {100 * sums:.2f}% (allowed: {100 * ADDS_UP:.0f}%)."
        )
    notes += [
        f"{row['point']['config']}: {row['result']['status']}: {row['result'].get('reason')}"
        for row in rows
        if row["result"]["status"] != "ok"
    ]
    return Report(QUESTION, COMMAND, [Table("MiB; by kind predicted / measured", lines)], notes=notes)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--config", action="append", metavar="OVERRIDES", help="in the place of the six; may be repeated")
    add("--one", metavar="OVERRIDES", help="measure this one here and print its result as JSON")
    add("--fresh", action="store_true", help="measure again what has a row")
    add("--out", type=rows_file, help=f"rows go here (default: results/{STUDY}/<gpu or cpu>.jsonl)")
    options = parser.parse_args()
    if options.one:
        print("RESULT", json.dumps(one(options.one)), flush=True)
        return
    import torch

    from scripts.measure.report.printed import show

    configs = options.config or (CONFIGS if torch.cuda.is_available() else CPU_CONFIGS)
    for config in configs:
        if missing := {"attention", "model", "seq_len", "data.batch_size"} - {
            w.split("=")[0] for w in config.split()
        }:
            parser.error(f"--config {config!r} needs {', '.join(sorted(missing))} as well")
    out = options.out or rows_path(STUDY)
    points = Kept(out, options.fresh).todo(map(point, configs))
    print(f"{STUDY}: {len(points)} configurations, {AT_ONCE} at a time. Rows in {out}", flush=True)
    with ThreadPoolExecutor(AT_ONCE) as pool:
        for asked, result in zip(points, pool.map(lambda p: measured(p["config"]), points), strict=True):
            append(out, asked, result)
            print(f"{asked['config']}: {result['status']} {result.get('reason') or ''}".rstrip(), flush=True)
    show(report, out)
