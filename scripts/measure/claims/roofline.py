"""Claims 13, 26, 27 and 29: traffic, rates, memories and tiles, from results/roofline."""

from __future__ import annotations

import math
import statistics
from typing import Any

from scripts.measure.claims import (
    FAILS,
    HOLDS,
    IN_PART,
    Answer,
    NotMeasured,
    Results,
    Row,
    answer,
    answers,
    command_of,
    graded,
    missing,
)

DRAM = ("dram_read_bytes", "dram_write_bytes")


def traffic(rows: list[Row], stage: str, *fields: str) -> dict[int, float]:
    """Bytes that ncu counted, by N. Raises NotMeasured with fewer than two lengths."""
    found = {}
    for row in rows:
        counts = row["result"].get("counters") or {}
        if row["point"]["implementation"] == stage and all(field in counts for field in fields):
            found[row["point"]["seq_len"]] = sum(counts[field] for field in fields)
    if len(found) < 2:
        raise NotMeasured(
            f"no counters of {stage}'s traffic: run `{command_of('roofline')}` where ncu may count"
        )
    return dict(sorted(found.items()))


def exponent(by_length: dict[int, float]) -> float:
    """Of N, fitted from 1k tokens on, below which launches and constants are most of it."""
    kept = {n: value for n, value in by_length.items() if n >= 1024}
    slope, _ = statistics.linear_regression([math.log(n) for n in kept], [math.log(v) for v in kept.values()])
    return slope


@answers(13)
def traffic_to_memory(results: Results) -> Answer:
    stages = ("cuda_naive", "cuda_tiled", "cuda_fa2")
    wanted = {"passed": "forward", "head_dim": 128, "causal": True}
    rows = [
        row for row in results.ok("roofline", implementation=stages, **wanted) if "tile" not in row["point"]
    ]
    naive, tiled = (traffic(rows, stage, *DRAM) for stage in stages[:2])  # both in fp32
    level_2 = traffic(rows, "cuda_tiled", "l2_bytes")
    factors = {n: naive[n] / tiled[n] for n in naive if n in tiled}
    shown = {n: factors[n] for n in factors if n >= 1024}
    grows, beyond_l2, within = exponent(naive), exponent(tiled), exponent(level_2)
    # Both orders: N^2 for the scores in DRAM, N^2 for tiles where they are counted (between L2 and the
    # multiprocessors), a fifth of an exponent for what is linear in N beside them; and 10x less from 4k on.
    orders = abs(grows - 2) <= 0.3 and abs(within - 2) <= 0.2
    saves = min(factor for n, factor in factors.items() if n >= 4096) >= 10
    verdict = HOLDS if orders and saves else IN_PART if max(factors.values()) > 1 else FAILS
    said = ", ".join(f"{factor:.0f}x at {n:,}" for n, factor in shown.items())
    why = (
        f"Counted by ncu in fp32, causal, D = 128: DRAM traffic of the three kernels grows as N^{grows:.1f}, "
        f"that of tiles as N^{beyond_l2:.1f}, since the L2 keeps K and V; between L2 and the "
        f"multiprocessors, where the formula applies, as N^{within:.1f}. The factor has no fixed size: it "
        "grows with N."
    )
    return answer(rows, f"DRAM traffic {said}", verdict, why)


def ceilings(results: Results, *names: str) -> tuple[list[Row], dict[str, dict[str, Any]]]:
    rows = results.ok("roofline", implementation="ceiling", passed=names)
    found = {row["point"]["pass"]: row["result"] for row in rows}
    for name in names:
        if name not in found:
            raise missing("roofline", implementation="ceiling", passed=name)
    return rows, found


@answers(26)
def other_arithmetic(results: Results) -> Answer:
    """A tensor core's FLOPs a second over fp32's, and over exp2s a second."""
    rows, rate = ceilings(results, "tensor_cublas", "fma", "exp2")
    fma, exp2 = (rate["tensor_cublas"]["value"] / rate[name]["value"] for name in ("fma", "exp2"))
    # 16x is what an A100's datasheet says of fp32, 250x what an H100's says of exp: each held to its own.
    verdict = graded(min(fma / 16, exp2 / 250), 1, least=1 / 16)
    why = (
        f"cuBLAS multiplies matrices at {rate['tensor_cublas']['value']:.0f} TFLOP/s, beside "
        f"{rate['fma']['value']:.0f} of FMAs in fp32 and {rate['exp2']['value']:.1f} T exp2 a second, all "
        "measured; the sources divide datasheets' peaks, which no matrix product reaches."
    )
    return answer(rows, f"{fma:.0f}x for fp32 FMA, {exp2:.0f}x for exp2", verdict, why)


@answers(27)
def memories(results: Results) -> Answer:
    latencies = ("latency_shared", "latency_l2", "latency_dram")
    rows, found = ceilings(results, "shared_read", "l2_read", "dram_read", "fma", *latencies)
    shared, level_2, dram = (found[name]["value"] / 1e3 for name in ("shared_read", "l2_read", "dram_read"))
    # A multiprocessor reads 128 bytes of shared memory a clock, and computes 128 FMAs: half a byte a FLOP.
    possible = shared <= 1.15 * found["fma"]["value"] / 2
    clocks = [found[name]["per_clock"] for name in latencies]
    ordered = level_2 > dram and clocks == sorted(clocks) and (not possible or shared > level_2)
    # The order of all; their sizes, of another GPU, are not expected.
    verdict = (HOLDS if possible else IN_PART) if ordered else FAILS
    fast = f"{shared:.0f} TB/s" if possible else "bandwidth not measured"
    figure = (
        f"shared memory {fast}, {clocks[0]:.0f} clocks; L2 {level_2:.1f} TB/s, {clocks[1]:.0f}; DRAM "
        f"{dram:.1f} TB/s, {clocks[2]:.0f}"
    )
    why = (
        f"L2 gives {level_2 / dram:.1f}x DRAM's bandwidth and answers {clocks[2] / clocks[1]:.1f}x sooner; a "
        f"load from shared memory takes {clocks[0]:.0f} clocks. DRAM is {dram / 2:.1f}x an A100's 2 TB/s."
    )
    if not possible:
        why += (
            f" The row of shared memory's bandwidth, {shared:.0f} TB/s, is more than 128 bytes a clock of "
            "each multiprocessor and does not count."
        )
    return answer(rows, figure, verdict, why)


@answers(29)
def tiles(results: Results) -> Answer:
    command = f"{command_of('roofline')} --tiles"
    try:
        rows = [row for row in results.ok("roofline", implementation="cuda_fa2") if "tile" in row["point"]]
    except NotMeasured:
        rows = []
    if not rows:
        raise NotMeasured(f"no rows of tiles: run `{command}`")

    def tile(row: Row) -> dict[str, int]:
        return row["point"]["tile"]

    def occupancy(row: Row) -> float:
        (use,) = row["result"]["usage"].values()
        return use["occupancy_percent"]

    def said(row: Row) -> str:
        (use,) = row["result"]["usage"].values()
        shared, threads = use["shared_bytes"] / 1024, use["occupancy_percent"]
        return f"{tile(row)['br']} x {tile(row)['bc']} ({shared:.0f} KiB, {threads:.0f}% of the threads)"

    fastest = max(rows, key=lambda row: row["result"]["tflops"])
    slowest = min(rows, key=lambda row: row["result"]["tflops"])
    largest = max(rows, key=lambda row: (tile(row)["br"] * tile(row)["bc"], row["result"]["tflops"]))
    fullest = max(rows, key=lambda row: (occupancy(row), row["result"]["tflops"]))
    speed = {id(row): row["result"]["tflops"] / fastest["result"]["tflops"] for row in (largest, fullest)}
    # A trade-off: neither end of it is the best. In part where one of the two ends is.
    ends = sum(speed[id(row)] < 1 for row in (largest, fullest))
    verdict = (FAILS, IN_PART, HOLDS)[ends] if largest is not fullest else (FAILS, HOLDS)[ends > 0]
    why = (
        f"Of {len(rows)} tiles of fa2 the fastest is {said(fastest)}, the slowest {said(slowest)}. The "
        f"largest, {said(largest)}, reaches {speed[id(largest)]:.0%} of it; that with most threads, "
        f"{said(fullest)}, {speed[id(fullest)]:.0%}."
    )
    spread = fastest["result"]["tflops"] / slowest["result"]["tflops"]
    figure = f"{tile(fastest)['br']} x {tile(fastest)['bc']} is best, {spread:.1f}x the worst"
    return answer(rows, figure, verdict, why, command)
