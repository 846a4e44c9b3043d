"""How does training scale over the GPUs of one machine, by DDP, FSDP2 and context parallelism?

    python scripts/study.py scaling
    python scripts/study.py scaling --gpus 1 2 --model gpt2 --trainer ddp    some of the points

1, 2, 4 and 8 GPUs, as many as there are. DDP and FSDP2: GPT-2 124M and XL at T = 1,024, 65,536 tokens a GPU
and step. Context parallelism: GPT-2 124M with rotary positions, one row of T = 256k, 512k and 1M a step, from
512k on with activation checkpointing. bf16, compiled, random tokens, 30 steps each, fewer where they would
take longer than --limit-s. The losses on several GPUs are compared with those of one GPU that takes as many
tokens a step, by gradient accumulation.

Each point is a run of train.py. The first 5 steps do not count. 3 more steps are profiled on rank 0: from its
trace come the time in which NCCL's kernels run, and the part of it in which no other kernel does, which is
the share of communication in the step. A collective waits for the slowest rank, and its time includes that.

Perfect scaling is n times the mean of what the GPUs do alone: two H100s of one machine differed by 1.6%. A
point of one GPU runs on each of them, side by side, and its speed is their mean.

--rounds 5 runs the points of a model and length in turn, five times: the result is that of the run of median
speed, with the time of a step in each (ms_by_run), and the ratios are medians over the rounds; the first
round is profiled. One GPU with the tokens of several, for their losses, runs once.

Without a GPU: a tiny model on 1, 2 and 4 processes with gloo (--gpus 1 2 4 8: 8 too), which share the cores.
There communication is the time of gloo's operations, and the share the part of it in which the rank runs no
operator of PyTorch.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

from scripts.measure.machine import ROOT
from scripts.measure.rows import choices, positive
from scripts.measure.runner import Result, Run, parser, run_study
from scripts.measure.studies import Point, Report, Row

STUDY = "scaling"
GPU_S, ESTIMATED = 1500, True
COUNTS = (1, 2, 4, 8)
TRAINERS = ("ddp", "fsdp2", "context_parallel")
SAID = "said.txt"
METER = "scripts.measure.instruments.scaling_meter.ScalingMeter"
STEADY = {"data": "synthetic", "schedule": "constant", "schedule.warmup_steps": 5, "optim.lr": 6e-4}
WITHOUT = ("trainer.limit_val_batches=0", "callbacks.checkpoints=null", "callbacks.samples=null")


@dataclass(frozen=True)
class Size:
    """models: for DDP and FSDP2, with the rows of a micro-batch; rows: of `seq_len` tokens a device and step;
    long_model: for context parallelism, at `lengths`, beyond `whole` with checkpointing."""

    models: dict[str, int]
    seq_len: int
    rows: int
    long_model: str
    lengths: tuple[int, ...]
    whole: int
    settings: dict[str, Any]


LARGE = Size(
    {"gpt2": 64, "gpt2_xl": 16},
    1024,
    64,
    "gpt2",
    (2**18, 2**19, 2**20),
    2**18,
    {"experiment": "gpt2_124m", **STEADY},
)
SMALL = Size({"tiny": 4}, 64, 8, "tiny", (256, 512), 256, {**STEADY, "data.corpus.vocab_size": 64})


def arguments(given: list[str] | None = None) -> argparse.Namespace:
    made = parser(__doc__, STUDY)
    add = made.add_argument
    add("--gpus", type=positive, nargs="+", metavar="N", help="numbers of GPUs, on a CPU of processes")
    add("--model", nargs="+", metavar="MODEL", help="of DDP and FSDP2: gpt2, gpt2_xl (default: both)")
    add("--seq-len", type=positive, nargs="+", metavar="T", help="of context parallelism (default: all)")
    add("--trainer", nargs="+", default=TRAINERS, choices=TRAINERS, help="default: all")
    add("--attention", default="auto", choices=choices("attention"), metavar="ATTENTION",
        help="a file of conf/attention (default: auto)")  # fmt: skip
    add("--steps", type=positive, default=30, help="of each point (default: 30)")
    add("--rounds", type=positive, default=1, help="of runs, the points in turn (default: 1)")
    add("--limit-s", type=float, default=90, help="of the steps of a point; 3 in any case (default: 90)")
    add("--timeout-s", type=positive, default=1200, help="of a point (default: 1200)")
    options = made.parse_args(given)
    if options.steps < 3:
        made.error(f"--steps {options.steps}: it takes at least 3, of which one warms up")
    return options


def points(options: argparse.Namespace, cuda: bool, devices: int) -> list[Point]:
    """Those of at most so many devices; what runs on one is shared by DDP and FSDP2."""
    size, counts = LARGE if cuda else SMALL, sorted(set(options.gpus or [n for n in COUNTS if n <= devices]))
    common = {"study": STUDY, "implementation": options.attention, "pass": "train", "steps": options.steps}
    common |= {"dtype": "bf16-mixed" if cuda else "32-true", "compile": cuda, "causal": True}
    found: list[Point] = []

    def add(trainer: str, n: int, **of: Any) -> None:
        found.append(common | {"trainer": trainer if n > 1 else "default", "devices": n} | of)

    replicas = [trainer for trainer in options.trainer if trainer != "context_parallel"]
    for model in (options.model or size.models) if replicas else ():
        of = {"model": model, "seq_len": size.seq_len, "micro_batch": size.models.get(model, 1)}
        of |= {"settings": size.settings}
        for n in counts:
            tokens = n * size.rows * size.seq_len
            add("default", 1, tokens_per_step=tokens, **of)
            for trainer in replicas if n > 1 else ():
                add(trainer, n, tokens_per_step=tokens, **of)
    for tokens in (options.seq_len or size.lengths) if len(replicas) < len(options.trainer) else ():
        of = {"model": size.long_model, "seq_len": tokens, "micro_batch": 1, "tokens_per_step": tokens}
        of |= {"settings": {**size.settings, "model.position": "rope"}, "checkpointing": tokens > size.whole}
        for n in counts:
            add("context_parallel", n, **of)
    return [point for point in found if point["devices"] <= devices]


def words(point: Point, limit_s: float, profiled: bool = True) -> list[str]:
    """A point's overrides of train.py."""
    from scripts.measure.instruments.scaling_meter import PROFILED

    found = [f"{key}={value}" for key, value in point["settings"].items()]
    found += [f"{key}={point[key]}" for key in ("model", "seq_len", "tokens_per_step", "trainer")]
    found += [f"attention={point['implementation']}", f"data.batch_size={point['micro_batch']}"]
    found += [f"trainer.devices={point['devices']}", f"trainer.max_steps={point['steps'] + PROFILED}"]
    found += [f"checkpointing={str(point.get('checkpointing', False)).lower()}", *WITHOUT]
    found += [f"data.corpus.n_tokens={max(10_000_000, 16 * point['seq_len'])}"]
    meter = (
        f"_target_: {METER}, steps: {point['steps']}, limit_s: {limit_s}, profiled: {str(profiled).lower()}"
    )
    return [*found, f"+callbacks.meter={{{meter}}}"]


def measured(point: Point, options: argparse.Namespace, gpus: list[str], profiled: bool = True) -> Result:
    """What train.py's run of a point gives; where the point is of one device, its runs on each of `gpus`
    (empty on a CPU), side by side. They end with this call."""
    places = [{"CUDA_VISIBLE_DEVICES": gpu} for gpu in gpus]
    if not gpus:
        places = [{"OMP_NUM_THREADS": "1"}]  # a core a process, at any number
    elif point["devices"] > 1:
        places = [{"CUDA_VISIBLE_DEVICES": ",".join(gpus)}]
    deadline = time.monotonic() + options.timeout_s
    with contextlib.ExitStack() as stack:
        asked = words(point, options.limit_s, profiled)
        runs = [stack.enter_context(started(asked, place)) for place in places]
        return mean([ended(*run, deadline, options.timeout_s) for run in runs])


@contextlib.contextmanager
def started(asked: list[str], place: dict[str, str]) -> Iterator[tuple[subprocess.Popen[bytes], Path]]:
    """A run of train.py, and the folder where it says and writes things. SIGTERM ends it, too."""
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    with tempfile.TemporaryDirectory() as folder, (Path(folder) / SAID).open("wb") as said:
        own = [f"runs_dir={folder}", "name=run"]
        command = [sys.executable, str(ROOT / "train.py"), *asked, *own]
        of: dict[str, Any] = {"cwd": ROOT, "env": os.environ | place, "start_new_session": True}
        process = subprocess.Popen(command, stdout=said, stderr=subprocess.STDOUT, **of)
        try:
            yield process, Path(folder)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            signal.signal(signal.SIGTERM, before)


def left_by(
    process: subprocess.Popen[bytes], folder: Path, name: str, deadline: float, timeout_s: int
) -> Path | Result:
    """The file of this name in the run's folder, once the run has ended; or how the run failed."""
    try:
        process.wait(max(0.0, deadline - time.monotonic()))
    except subprocess.TimeoutExpired:
        why = f"timeout: the point took longer than {timeout_s} s"
        return {"status": "error", "reason": why, "timeout_s": timeout_s}
    found = folder / "run" / name
    if process.returncode == 0 and found.is_file():
        return found
    return failed((folder / SAID).read_text(errors="replace"), process.returncode)


def ended(process: subprocess.Popen[bytes], folder: Path, deadline: float, timeout_s: int) -> Result:
    from scripts.measure.instruments.scaling_meter import FILE

    found = left_by(process, folder, FILE, deadline, timeout_s)
    if isinstance(found, dict):
        return found
    nccl = {key: value for key, value in os.environ.items() if key.startswith("NCCL_")}
    return json.loads(found.read_text()) | ({"environment": nccl} if nccl else {})


def mean(runs: list[Result]) -> Result:
    """The first, with the mean speed of all, each of which had a device; or the first that failed."""
    wrong = [result for result in runs if result["status"] != "ok"]
    if wrong or len(runs) == 1:
        return (wrong or runs)[0]
    of_each = {key: [result[key] for result in runs] for key in runs[0]}
    found = {key: statistics.mean(of_each[key]) for key in ("tokens_per_s", "mfu")}
    found |= {key: statistics.harmonic_mean(of_each[key]) for key in ("ms_median", "ms_p10", "ms_p90")}
    return runs[0] | found | {"ms_by_device": of_each["ms_median"], "peak_mib": max(of_each["peak_mib"])}


def failed(said: str, code: int) -> Result:
    """By what the run printed: that memory ran out, its refusal, else its last line."""
    lines = [line.strip() for line in said.splitlines() if line.strip()] or [f"exit code {code}"]
    memory = next((line for line in lines if "out of memory" in line.lower()), None)
    told = next((line for line in lines if line.startswith("error: ")), lines[-1])
    return {"status": "oom" if memory else "error", "reason": (memory or told)[:300]}


def said(point: Point, result: Result) -> str:
    of = f"{point['model']} T={point['seq_len']:,} {point['trainer']} on {point['devices']}"
    of += f", {point['tokens_per_step']:,} tokens a step"
    if result["status"] != "ok":
        return f"{of}: {result['status']}, {result['reason']}"
    of += f": {result['tokens_per_s']:,.0f} tokens/s"
    share = result.get("communication_share")
    return of if share is None else f"{of}, communication alone {share:.1%} of a step"


def measure(options: argparse.Namespace, run: Run) -> None:
    import torch

    cuda = run.device == "cuda"
    devices = torch.cuda.device_count() if cuda else max(options.gpus or [4])
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(devices)))).split(",")
    gpus = visible[: min(devices, max(options.gpus or [devices]))] if cuda else []
    left = run.left(points(options, cuda, devices), f"1 to 3 min each, on {devices} {run.device} device(s)")
    if options.rounds == 1:
        run.each(left, lambda point: measured(point, options, gpus), said)
        return
    for _, group in groupby(left, lambda point: (point["model"], point["seq_len"])):
        run.group(list(group), lambda mine: in_turn(mine, options, gpus), said)


def in_turn(points: list[Point], options: argparse.Namespace, gpus: list[str]) -> list[Result]:
    """Each point's run of median speed of `options.rounds`, with what was profiled in the first, or the first
    that failed; one run of one GPU with the tokens of several, of which only the losses serve."""
    runs: list[list[Result]] = [[] for _ in points]
    alone = min((point["tokens_per_step"] for point in points if point["devices"] == 1), default=0)
    for at in range(options.rounds):
        for point, found in zip(points, runs, strict=True):
            again = at == 0 or point["devices"] > 1 or point["tokens_per_step"] == alone
            if again and all(result["status"] == "ok" for result in found):
                found.append(measured(point, options, gpus, profiled=at == 0))
                print(f"run {at + 1} of {options.rounds}: {said(point, found[-1])}", flush=True)
    return [middle(found) for found in runs]


def middle(runs: list[Result]) -> Result:
    if failed := [result for result in runs if result["status"] != "ok"]:
        return failed[0]
    ms = [result["ms_median"] for result in runs]
    return runs[0] | runs[ms.index(statistics.median_low(ms))] | {"ms_by_run": ms}


def report(rows: list[Row]) -> Report:
    from scripts.measure.report import scaling_report

    return scaling_report.report(rows)


def main() -> None:
    run_study(STUDY, arguments(), measure, report)
