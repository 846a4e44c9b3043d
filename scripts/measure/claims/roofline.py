"""Claims 13, 26 and 27: traffic, rates and memories, from results/roofline."""

from __future__ import annotations

import math
import statistics
from typing import Any

from model.costs.gpus import gpu_sheet
from scripts.measure.claims import (
    Figures,
    NotMeasured,
    Results,
    Row,
    claim,
    command_of,
    listed,
    missing,
    name,
)
from scripts.measure.claims.tiles import counter, whole_tiles

TILE = ("tile.br", "tile.bc", "tile.warps", "tile.blocks")  # as the audit has it


def traffic(rows: list[Row], stage: str, *fields: str) -> dict[int, float]:
    """Bytes that ncu counted, by N. Raises NotMeasured with fewer than two lengths."""
    found = {row["point"]["seq_len"]: counter(row, *fields) for row in rows if name(row) == stage}
    found = {n: count for n, count in sorted(found.items()) if count is not None}
    if len(found) < 2:
        command = command_of("roofline")
        raise NotMeasured(f"no counters of {stage}'s traffic: run `{command}` where ncu may count")
    return found


def exponent(by_length: dict[int, float]) -> float:
    """Of N, fitted from 1k tokens on, below which launches and constants are most of it."""
    kept = {n: value for n, value in by_length.items() if n >= 1024}
    slope, _ = statistics.linear_regression([math.log(n) for n in kept], [math.log(v) for v in kept.values()])
    return slope


@claim(
    13,
    "Traffic to HBM is O(N D + N^2) in standard attention and O(N^2 D^2 / M) in tiles.",
    theirs="10-20x less memory access",
    # The formulas are of HBM: N^2 for both there, give or take 0.3 of an exponent (what is linear in N is
    # beside it); "10-20x" wherever it was counted.
    holds=lambda f: abs(f.naive - 2) <= 0.3 and abs(f.tiled - 2) <= 0.3 and f.sized == f.lengths,
    partly=lambda f: abs(f.naive - 2) <= 0.3 and f.most >= 10,
    differ=("implementation", *TILE),
    apart=("seq_len", "dtype"),
    figure="DRAM traffic {factors}",
    why="""
        Counted by ncu in fp32, causal, D = 128: DRAM traffic of the three kernels grows as N^{naive:.2f},
        that of `cuda_tiled` (FMA units) as N^{tiled:.2f} and not N^2, since the L2 keeps K and V. Between
        L2 and the multiprocessors the bytes do grow as N^{level_2:.2f}{by_rows}; D was not varied. The factor
        has no fixed size, it grows with N; {sized} of {lengths} lengths are within 10-20x. The three kernels
        write and read all N^2 scores, those too that the mask hides: without these the factors would be about
        half of that.
        """,
)
def traffic_to_memory(results: Results) -> Figures:
    stages = ("cuda_naive", "cuda_tiled")  # both in fp32, on FMA units
    wanted = {"passed": "forward", "head_dim": 128, "causal": True}
    rows = [
        row for row in results.ok("roofline", implementation=stages, **wanted) if "tile" not in row["point"]
    ]
    naive, tiled = (traffic(rows, stage, "dram_read_bytes", "dram_write_bytes") for stage in stages)
    tiles = whole_tiles(results)
    factors = {n: naive[n] / tiled[n] for n in naive if n in tiled}
    shown = {n: factor for n, factor in factors.items() if n >= 1024}
    return Figures(
        rows + tiles,
        naive=exponent(naive),
        tiled=exponent(tiled),
        level_2=exponent(traffic(rows, "cuda_tiled", "l2_bytes")),
        most=max(factors.values()),
        sized=sum(10 <= factor <= 20 for factor in shown.values()),
        lengths=len(shown),
        factors=listed("{1:.3g}x at {0:,}", shown.items()),
        by_rows=by_rows(tiles),
    )


def by_rows(tiles: list[Row]) -> str:
    """How the bytes between L2 and the multiprocessors fall as a tile of queries grows, in words."""
    found: dict[int, float] = {}
    for row in tiles:
        if (count := counter(row, "l2_bytes")) is not None:
            height = row["point"]["tile"]["br"]
            found[height] = min(count / 1e9, found.get(height, math.inf))
    if len(found) < 2:
        return ""
    words = " and fall with the rows of a tile of fa2, the M of the formula: "
    return words + listed("{1:.2f} GB with {0}", sorted(found.items()))


def ceilings(results: Results, *names: str) -> tuple[list[Row], dict[str, dict[str, Any]]]:
    rows = results.ok("roofline", implementation="ceiling", passed=names)
    found = {row["point"]["pass"]: row["result"] for row in rows}
    for which in names:
        if which not in found:
            raise missing("roofline", implementation="ceiling", passed=which)
    return rows, found


@claim(
    26,
    "A FLOP that is not of a matrix product costs many times more.",
    theirs="16x (A100), about 250x (H100)",
    # 16x is what an A100's datasheet says of fp32, 250x what an H100's says of exp: each held to its own.
    # In part within a factor of two.
    holds=lambda f: f.fma >= 16 and f.exp2 >= 250,
    partly=lambda f: f.fma >= 8 and f.exp2 >= 125,
    differ=("pass",),
    figure="{fma:.0f}x for fp32 FMA, {exp2:.0f}x for exp2",
    why="""
        Measured in one run, cuBLAS multiplies bf16 matrices of 8,192 x 8,192 at {cublas:.0f} TFLOP/s, beside
        {fma_rate:.0f} of FMAs in fp32 and {exp2_rate:.1f} T exp2 a second. The sources divide datasheets'
        peaks, of which that product reaches {of_sheet:.0%}: of this GPU that is {paper:.0f}x for fp32, and
        {paper_exp2:.0f}x for exp2, of which a multiprocessor starts 16 a clock beside 256 FLOPs in fp32.
        """,
)
def other_arithmetic(results: Results) -> Figures:
    """A tensor core's FLOPs a second over fp32's, and over exp2s a second."""
    rows, found = ceilings(results, "tensor_cublas", "fma", "exp2")
    cublas, fma, exp2 = (found[which]["value"] for which in ("tensor_cublas", "fma", "exp2"))
    sheet = gpu_sheet(rows[0]["machine"]["gpu"])
    paper = sheet.bf16_flops / sheet.fp32_flops
    ratios = {"fma": cublas / fma, "exp2": cublas / exp2, "paper": paper, "paper_exp2": 256 / 16 * paper}
    of_sheet = cublas * 1e12 / sheet.bf16_flops
    return Figures(rows, cublas=cublas, fma_rate=fma, exp2_rate=exp2, of_sheet=of_sheet, **ratios)


@claim(
    27,
    "Away from the cores memories get larger and slower, by these ratios.",
    theirs="""A100: registers 256 KB an SM, 1 cycle; shared memory 192 KB an SM, ~19 TB/s, ~30 cycles; L2
        40 MB, ~5 TB/s, ~200; HBM 80 GB, 2 TB/s, ~400""",
    # The sizes are of another GPU; what is claimed of memories are the four ratios between neighbours.
    holds=lambda f: f.right == 4,
    partly=lambda f: f.right >= 2,
    differ=("pass",),
    figure="""shared memory {fast}, {clocks[0]:.0f} clocks; L2 {level_2:.1f} TB/s, {clocks[1]:.0f}; DRAM
        {dram:.1f} TB/s, {clocks[2]:.0f}""",
    why="""
        Ratios between neighbours, and those of the A100's figures: {said}. {right} of {ratios} are within a
        factor of 1.5. DRAM is {over_a100:.1f}x an A100's 2 TB/s. Sizes, and registers, are not compared.

        The row of shared memory's bandwidth, {impossible:.0f} TB/s, is more than 128 bytes a clock of each
        multiprocessor and does not count.
        """,
)
def memories(results: Results) -> Figures:
    latencies = ("latency_shared", "latency_l2", "latency_dram")
    rows, found = ceilings(results, "shared_read", "l2_read", "dram_read", "fma", *latencies)
    shared, level_2, dram = (found[which]["value"] / 1e3 for which in ("shared_read", "l2_read", "dram_read"))
    # A multiprocessor reads 128 bytes of shared memory a clock, and computes 128 FMAs: half a byte a FLOP.
    possible = shared <= 1.15 * found["fma"]["value"] / 2
    clocks = [found[which]["per_clock"] for which in latencies]
    ratios = [
        ("L2 over DRAM in bandwidth", level_2 / dram, 5 / 2),
        ("L2 over shared memory in clocks", clocks[1] / clocks[0], 200 / 30),
        ("DRAM over L2 in clocks", clocks[2] / clocks[1], 400 / 200),
    ]
    if possible:
        ratios.append(("shared memory over L2 in bandwidth", shared / level_2, 19 / 5))
    return Figures(
        rows,
        right=sum(2 / 3 <= ours / theirs <= 3 / 2 for _, ours, theirs in ratios),
        ratios=len(ratios),
        said=listed("{} {:.1f}x ({:.1f}x)", ratios, "; "),
        fast=f"{shared:.0f} TB/s" if possible else "bandwidth not measured",
        impossible=None if possible else shared,
        clocks=clocks,
        level_2=level_2,
        dram=dram,
        over_a100=dram / 2,
    )
