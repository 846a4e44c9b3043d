"""The longest context that fits, measured: where standard attention ends and the fused go on.

For each implementation, without and with activation checkpointing, the largest T at which GPT-2 124M trains
on this GPU with one row at a time: real steps (training_point.py, two of them) in a process of their
own for each T. The prediction of costs/memory.py is the first guess, the peaks that are measured correct it,
and it ends where a T that does not fit is at most 3% above one that does. Steps are bf16 and, unless
--compile is given, not compiled: then the loss holds the logits in fp32, 600 KB a token, which a compiled
step does not, nor one that computes its loss --loss-chunk tokens at a time; predictions are in the rows. A
step that would take longer than --limit-s is not tried: memory is then not what ends that context, and a row
says so.

By default 4 implementations, 8 searches of 2 to 6 processes, 10 to 35 s each: about 13 minutes of an H200;
--attention naive triton: 5 minutes. About claims 1 and 2 of results/CLAIMS.md.

A row: point has implementation, seq_len, model, compile, checkpointing, micro_batch 1, and where it is not 0
loss_chunk; result has status (ok
fits, oom does not), peak_mib, ms_median, predicted_mib, and of the search predicted_longest, also
predicted_compiled; too_slow where it was not tried.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from scripts.measure.rows import Kept, append
from scripts.measure.runner import Run, failure, parser, run_study
from scripts.measure.studies import Point, Report, Row

if TYPE_CHECKING:
    from model.costs.gpus import GpuSheet
    from model.costs.run import Run

MIB = 2**20
STUDY = "longest_context"
GPU_S = 780
CHILD = "scripts.measure.instruments.training_point:child"
ATTENTIONS = ("naive", "sdpa_cudnn", "triton", "cuda")
WITHIN = 0.03  # how far apart what fits and what does not may stay
FIRST = 0.975  # of the prediction: most likely fits, and what is 3% longer does not
GIVEN = 0.985  # of a GPU's memory: the rest is the context's
RATE = 0.3  # of the GPU's bf16 peak, before a step has been timed


@dataclass(frozen=True)
class Search:
    """An implementation's search: what it asks next follows from the rows that are there."""

    attention: str
    checkpointing: bool
    compiled: bool
    run: Run  # at any T
    capacity: int  # bytes
    limit_s: float
    peak_flops: float

    def at(self, tokens: int) -> Run:
        from dataclasses import replace

        return replace(self.run, config=replace(self.run.config, seq_len=tokens))

    def predicted(self, tokens: int) -> int:
        """Bytes of the peak."""
        from model.costs.memory import peak

        return peak(self.at(tokens)).peak

    def longest(self, correction: float = 1.0) -> int:
        """The longest context predicted to fit, were peaks `correction` times the predicted ones."""
        from model.costs.memory import longest_context

        return longest_context(self.run, int(self.capacity / correction))

    def step_s(self, tokens: int, timed: dict[int, float]) -> float:
        """Seconds of a step: by FLOPs, from the longest that was timed, else from the GPU's peak."""
        from model.costs.roofline import step_work

        if not timed:
            return step_work(self.at(tokens)).flops / (RATE * self.peak_flops)
        known = max(timed)
        return timed[known] * step_work(self.at(tokens)).flops / step_work(self.at(known)).flops

    def next(self, results: dict[int, dict[str, Any]]) -> int | None:
        """The T to try, by the results of those that were; None where the search has ended."""
        fits = max((T for T, result in results.items() if result["status"] == "ok"), default=0)
        fails = min((T for T, result in results.items() if result["status"] == "oom"), default=0)
        if any(result["status"] not in ("ok", "oom") for result in results.values()):
            return None  # refused, broken, or too slow: memory does not end it
        if not results:
            return rounded(FIRST * self.longest())
        if not fits:
            return rounded(fails * 0.94 ** len(results)) or None  # in growing steps
        if fails and fails - fits <= max(WITHIN * fits, step_of(fits)):
            return None
        expected = self.longest(results[fits]["peak_mib"] * MIB / self.predicted(fits))
        asked = max((1 + WITHIN) * fits, min(FIRST * expected, 2 * fits))
        if fails and asked >= fails:
            asked = (fits * fails) ** 0.5
        return max(fits + step_of(fits), rounded(asked))


def step_of(tokens: float) -> int:
    """Lengths that are tried are its multiples."""
    return 1024 if tokens >= 65536 else 256 if tokens >= 16384 else 64


def rounded(tokens: float) -> int:
    return int(tokens) // step_of(tokens) * step_of(tokens)


def arguments() -> argparse.Namespace:
    from scripts.measure.rows import choices, positive

    made = parser(__doc__, STUDY)
    add = made.add_argument
    add("--attention", nargs="+", default=ATTENTIONS, choices=choices("attention"), metavar="ATTENTION",
        help=f"files of conf/attention (default: {' '.join(ATTENTIONS)})")  # fmt: skip
    add("--model", default="gpt2", choices=choices("model"), metavar="MODEL", help="a file of conf/model")
    add("--checkpointing", default="both", choices=("no", "yes", "both"), help="default: both")
    add("--compile", action="store_true", help="compiled steps, as train.py takes them by default")
    add("--loss-chunk", type=int, default=0, metavar="TOKENS",
        help="model.loss_chunk of the steps (default: 0, the loss of all tokens at once)")  # fmt: skip
    add("--limit-s", type=float, default=30, help="a step that would take longer is not tried (default: 30)")
    add("--timeout-s", type=positive, default=180, help="of a process (default: 180)")
    return made.parse_args()


def overrides(options: argparse.Namespace, attention: str, checkpointing: bool, tokens: int) -> list[str]:
    words = [f"model={options.model}", "data=synthetic", "schedule=constant", f"attention={attention}"]
    words += [f"checkpointing={str(checkpointing).lower()}", f"compile={str(options.compile).lower()}"]
    return [
        *words,
        "data.batch_size=1",
        f"model.loss_chunk={options.loss_chunk}",
        f"seq_len={tokens}",
        f"data.corpus.n_tokens={16 * max(tokens, 65536)}",
    ]


def search_of(
    options: argparse.Namespace, sheet: GpuSheet, capacity: int, attention: str, checkpointing: bool
) -> Search:
    """Raises UnsupportedAttention for what refuses."""
    from scripts.estimate import run_of
    from scripts.memory import composed

    run = run_of(composed(overrides(options, attention, checkpointing, 1024)), sheet)
    how = (attention, checkpointing, options.compile)
    return Search(*how, run, capacity, options.limit_s, sheet.bf16_flops)


def point_of(options: argparse.Namespace, attention: str, checkpointing: bool, tokens: int) -> Point:
    chunks = {"loss_chunk": options.loss_chunk} if options.loss_chunk else {}
    return {
        "study": STUDY,
        "implementation": attention,
        "pass": "train",
        "model": options.model,
        "seq_len": tokens,
        "micro_batch": 1,
        "tokens_per_step": tokens,
        "causal": True,
        "features": "",
        "dtype": "bf16-mixed",
        "compile": options.compile,
        "checkpointing": checkpointing,
        **chunks,
    }


def measured(options: argparse.Namespace, search: Search, tokens: int) -> dict[str, Any]:
    """Two steps in a process of their own; what takes too long is no error, but not for want of memory."""
    from scripts.measure.worker import once

    words = overrides(options, search.attention, search.checkpointing, tokens)
    short = ["--brief", "--warm-up=1", "--steps=1", "--seconds=0"]
    result = once(CHILD, {"words": [*words, *short]}, options.timeout_s)
    return result | ({"too_slow": True} if "timeout_s" in result else {})


def searched(
    options: argparse.Namespace, search: Search, known: dict[int, dict[str, Any]]
) -> Iterator[tuple[int, dict[str, Any]]]:
    """T and its result, as they are measured; those of `known` are not measured again."""
    from dataclasses import replace

    compiled = replace(search, run=replace(search.run, compiled=True))
    both = {"predicted_longest": search.longest(), "predicted_compiled": compiled.longest()}
    results = dict(known)
    while (tokens := search.next(results)) is not None:
        timed = {T: result["ms_median"] / 1e3 for T, result in results.items() if result["status"] == "ok"}
        takes = search.step_s(tokens, timed)
        if takes > search.limit_s and not timed:  # as long as the limit allows, to have a time and a peak
            tokens = rounded(0.9 * tokens * (search.limit_s / takes) ** 0.5)
            takes = search.step_s(tokens, timed)
        if takes > search.limit_s:
            why = f"not tried: a step would take some {takes:.0f} s, more than {search.limit_s:g}"
            result = {"status": "error", "reason": why, "too_slow": True, "predicted_step_s": takes}
        else:
            result = measured(options, search, tokens)
        results[tokens] = result | both | {"predicted_mib": search.predicted(tokens) / MIB}
        yield tokens, results[tokens]


def earlier(kept: Kept, point: Point) -> dict[int, dict[str, Any]]:
    """Results by T of the search that a point belongs to; errors are tried again, what was too slow not."""
    common = {key: value for key, value in point.items() if key not in ("seq_len", "tokens_per_step")}
    return {
        row["point"]["seq_len"]: row["result"]
        for row in kept.rows.values()
        if common.items() <= row["point"].items()
        and row["point"].get("loss_chunk") == point.get("loss_chunk")
        and (row["result"]["status"] != "error" or "too_slow" in row["result"])
    }


def report(rows: list[Row]) -> Report:
    from scripts.measure.report import longest_context_report

    return longest_context_report.report(rows)


def measure(options: argparse.Namespace, run: Run) -> None:
    import torch

    from attention.base import UnsupportedAttention
    from model.costs.gpus import gpu_sheet

    if run.device == "cpu":
        why = "there is no telling where a CPU's memory ends"
        raise SystemExit(f"longest_context needs a CUDA GPU: {why}. --plot-only prints.")
    sheet = gpu_sheet(torch.cuda.get_device_name())
    capacity = int(GIVEN * torch.cuda.get_device_properties(0).total_memory)
    ways = {"no": (False,), "yes": (True,), "both": (False, True)}[options.checkpointing]
    searches = [(name, way) for way in ways for name in options.attention]
    how = "compiled" if options.compile else "not compiled"
    how += f", the loss in chunks of {options.loss_chunk:,} tokens" if options.loss_chunk else ""
    run.start(len(searches), f"{options.model}, {how}: {len(searches)} searches, about 100 s of a GPU each")
    for name, way in searches:
        point, said = point_of(options, name, way, 1024), ""
        if not run.claim(point):
            run.say(f"{name}: by another process")
            continue
        try:
            search = search_of(options, sheet, capacity, name, way)
        except UnsupportedAttention as error:
            run.add(point, failure(error), f"{name}: unsupported")
            continue
        for tokens, result in searched(options, search, earlier(run.kept, point)):
            append(run.out, point_of(options, name, way, tokens), result)
            peak = f"peak {result['peak_mib']:,.0f} MiB" if result["status"] == "ok" else result["reason"]
            said = f"{name}{', checkpointing' * way} T={tokens:,}: {result['status']}, {peak}"
            print(said, flush=True)
        run.say(said or f"{name}: nothing left")


def main() -> None:
    run_study(STUDY, arguments(), measure, report)
