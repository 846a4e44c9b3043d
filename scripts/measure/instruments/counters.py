"""Nsight Compute's counters of our CUDA kernels: what is asked, and what it prints turned into numbers."""

from __future__ import annotations

import csv
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path

MOST_S = 150.0  # of one run of ncu

# What a row keeps, its metric (or, where ncu does not know that, the next) and what to multiply by. A
# sector is 32 bytes; a wavefront is one pass of 128 bytes through shared memory; mma.sync in 16 bits does
# 16 x 8 x 16 multiplications and additions.
METRICS: dict[str, tuple[tuple[str, ...], float]] = {
    "dram_read_bytes": (("dram__bytes_read.sum", "dram__bytes_op_read.sum"), 1),
    "dram_write_bytes": (("dram__bytes_write.sum", "dram__bytes_op_write.sum"), 1),
    "l2_bytes": (("lts__t_sectors_srcunit_tex.sum", "lts__t_sectors.sum"), 32),
    "ms": (("gpu__time_duration.sum",), 1e3),
    "occupancy_percent": (("sm__warps_active.avg.pct_of_peak_sustained_active",), 1),
    "l2_missed_bytes": (("lts__t_sectors_srcunit_tex_lookup_miss.sum",), 32),
    "load_bytes": (("l1tex__t_bytes_pipe_lsu_mem_global_op_ld.sum",), 1),
    "shared_bytes": (("l1tex__data_pipe_lsu_wavefronts_mem_shared.sum",), 128),
    "tensor_flops": (
        ("sm__inst_executed_pipe_tensor_op_hmma.sum", "sm__inst_executed_pipe_tensor.sum"),
        2 * 16 * 8 * 16,
    ),
    "ffma_flops": (("smsp__sass_thread_inst_executed_op_ffma_pred_on.sum",), 2),
    "fadd_flops": (("smsp__sass_thread_inst_executed_op_fadd_pred_on.sum",), 1),
    "fmul_flops": (("smsp__sass_thread_inst_executed_op_fmul_pred_on.sum",), 1),
}
QUICK = ("dram_read_bytes", "dram_write_bytes", "l2_bytes", "ms", "occupancy_percent")
DRAM = ("dram_read_bytes", "dram_write_bytes")  # in one pass
# Of a call, the kernels' shares of the time weigh these; the others are added up.
AVERAGED = ("occupancy_percent",)
# To bytes and seconds.
_PREFIXES = {"": 1.0, "K": 1e3, "M": 1e6, "G": 1e9, "T": 1e12}
_SECONDS = {"n": 1e-9, "u": 1e-6, "m": 1e-3, "": 1.0}
_METRIC = re.compile(r"\b(?:dram|lts|gpu|sm|smsp|l1tex|launch)__[\w.]+")

# What the ncu of this machine has said it does not know.
_unknown: set[str] = set()

Counts = dict[str, float]


class NoCounters(RuntimeError):
    """There are none, and why; `lasting`: as it will be for any other program."""

    def __init__(self, why: str, lasting: bool = False):
        super().__init__(why)
        self.lasting = lasting


def in_base_unit(text: str, unit: str) -> float | None:
    """A number as ncu prints it, in bytes, seconds or what is counted; None where it has none."""
    try:
        value = float(text.replace(",", ""))
    except ValueError:  # n/a, or nothing
        return None
    if found := re.fullmatch(r"([num]?)(?:second|s)", unit):
        return value * _SECONDS[found[1]]
    if found := re.fullmatch(r"([KMGT]?)(?:byte|inst|sector|cycle|request)s?", unit):
        return value * _PREFIXES[found[1]]
    return value


def parse(text: str) -> list[tuple[str, Counts]]:
    """(kernel, metric -> value in base units) of each launch, in order, from what `--csv --page raw` prints:
    a table with a line of units under its head, and lines of ncu's own before and after."""
    lines = [line for line in text.splitlines() if line.startswith('"')]
    if not lines or "Kernel Name" not in lines[0]:
        return []
    head, *rest = csv.reader(lines)
    units: dict[str, str] = {}
    found: list[tuple[str, Counts]] = []
    for fields in rest:
        row = dict(zip(head, fields, strict=False))
        if not row["ID"]:
            units = row
            continue
        values = {name: in_base_unit(row.get(name, ""), units.get(name, "")) for name in head if "__" in name}
        counts = {name: value for name, value in values.items() if value is not None}
        found.append((row["Kernel Name"], counts))
    return found


def gathered(launches: Iterable[Counts]) -> Counts:
    """METRICS of one call, from those of its launches; what not every launch has is left out."""
    kernels = []
    for counts in launches:
        kernel = {}
        for field, (names, scale) in METRICS.items():
            if (name := next((name for name in names if name in counts), None)) is not None:
                kernel[field] = counts[name] * scale
        kernels.append(kernel)
    whole = [field for field in METRICS if kernels and all(field in kernel for kernel in kernels)]
    total = {field: sum(kernel[field] for kernel in kernels) for field in whole if field not in AVERAGED}
    if total.get("ms"):
        for field in AVERAGED:
            if field in whole:
                total[field] = sum(kernel[field] * kernel["ms"] for kernel in kernels) / total["ms"]
    fp32 = [total.pop(f"{name}_flops", None) for name in ("ffma", "fadd", "fmul")]
    if None not in fp32:
        total["fp32_flops"] = sum(fp32)
    return total


def refusal(said: str) -> NoCounters | None:
    """Why ncu has counted nothing, by what it printed."""
    if "ERR_NVGPUCTRPERM" in said:
        return NoCounters("ncu may not read the counters here (ERR_NVGPUCTRPERM)", lasting=True)
    errors = re.findall(r"^==ERROR== (.+)", said, re.MULTILINE)
    if not errors:
        return None
    return NoCounters(f"ncu: {errors[0].strip()}", "Failed to initialize" in errors[0])


def unknown(said: str, asked: Iterable[str]) -> set[str]:
    """Of the metrics asked for, those that ncu fails to find, which it names as a pattern."""
    lines = [line.replace("\\", "") for line in said.splitlines() if "Failed to find metric" in line]
    named = {name.rstrip(".") for line in lines for name in _METRIC.findall(line)}
    return {name for name in asked if name in named or name.rpartition(".")[0] in named}


def command(metrics: Sequence[str], log: Path, program: Sequence[str], marked: bool = False) -> list[str]:
    """Caches are flushed before every launch, and clocks are left alone. Counted are our own kernels, or
    whatever is launched where the program has `marked` it, from torch.cuda.profiler.start() to stop()."""
    options = ["--csv", "--page", "raw", "--print-units", "base", "--metrics", ",".join(metrics)]
    options += ["--profile-from-start", "off"] if marked else ["--kernel-name", "regex:^tilegpt_"]
    options += ["--cache-control", "all", "--clock-control", "none"]
    return ["ncu", *options, "--target-processes", "all", "--log-file", str(log), *program]


def count(
    program: Sequence[str], quick: bool = False, marked: bool = False
) -> tuple[str, list[tuple[str, Counts]]]:
    """(what the program printed, its launches) under ncu, with the metrics that this ncu knows: all of
    METRICS, those of QUICK, or of `marked` launches (`command`) those of DRAM.

    Raises:
        NoCounters: there is no ncu, it may not count, the program failed, or it took too long.
    """
    if shutil.which("ncu") is None:
        raise NoCounters("there is no ncu on the PATH", lasting=True)
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "ncu.csv"
        fields = DRAM if marked else QUICK if quick else tuple(METRICS)
        while metrics := [name for field in fields for name in known(field)]:
            try:
                line = command(metrics, log, program, marked)
                done = subprocess.run(line, capture_output=True, text=True, timeout=MOST_S)
            except subprocess.TimeoutExpired:
                raise NoCounters(f"ncu took more than {MOST_S:g} s") from None
            text = log.read_text(encoding="utf-8", errors="replace") if log.is_file() else ""
            said = text + done.stdout + done.stderr
            if found := parse(text):
                return done.stdout, found
            if not (gone := unknown(said, metrics)):
                last = done.stderr.strip().splitlines()[-1:] or [f"exit code {done.returncode}"]
                raise refusal(said) or NoCounters(f"ncu counted nothing: {last[0]}")
            _unknown.update(gone)
    raise NoCounters("ncu knows none of the metrics")


def known(field: str) -> list[str]:
    """The metric to ask for; none where ncu has none of them."""
    return [name for name in METRICS[field][0] if name not in _unknown][:1]
