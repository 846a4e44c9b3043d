"""Claims 13, 26, 27 and 29: traffic, rates, memories and tiles, from results/roofline."""

from __future__ import annotations

import math
import statistics
from typing import Any

from model.costs.gpus import gpu_sheet
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
    # The formulas are of HBM: N^2 for both there, give or take 0.3 of an exponent (what is linear in N is
    # beside it), N^2 and 1 / M also between L2 and the multiprocessors; "10-20x" wherever it was counted.
    in_dram = abs(grows - 2) <= 0.3 and abs(beyond_l2 - 2) <= 0.3
    sized = [factor for n, factor in shown.items() if 10 <= factor <= 20]
    verdict = (
        HOLDS if in_dram and len(sized) == len(shown) else IN_PART if max(factors.values()) > 1 else FAILS
    )
    said = ", ".join(f"{factor:.3g}x at {n:,}" for n, factor in shown.items())
    why = (
        "Counted by ncu in fp32, causal, D = 128: DRAM traffic of the three kernels grows as "
        f"N^{grows:.1f}, that of tiles as N^{beyond_l2:.2f} and not N^2, since the L2 keeps K and V: on "
        "this GPU their formula holds between L2 and the multiprocessors, where the bytes grow as "
        f"N^{within:.1f}{by_rows(results)}. The factor has no fixed size, it grows with N; {len(sized)} of "
        f"{len(shown)} lengths are within 10-20x."
    )
    return answer(rows, f"DRAM traffic {said}", verdict, why)


def by_rows(results: Results) -> str:
    """How the bytes between L2 and the multiprocessors fall as a tile of queries grows, in words."""
    try:
        rows = [row for row in results.ok("roofline", implementation="cuda_fa2") if "tile" in row["point"]]
    except NotMeasured:
        return ""
    found: dict[int, float] = {}
    for row in rows:
        if not _usage(row)["spilled_bytes"] and "l2_bytes" in (row["result"].get("counters") or {}):
            tile, count = row["point"]["tile"]["br"], row["result"]["counters"]["l2_bytes"] / 1e9
            found[tile] = min(count, found.get(tile, count))
    if len(found) < 2:
        return ""
    return " and fall with the rows of a tile of fa2, the M of the formula: " + ", ".join(
        f"{count:.2f} GB with {tile}" for tile, count in sorted(found.items())
    )


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
    sheet = gpu_sheet(rows[0]["machine"]["gpu"])
    paper = sheet.bf16_flops / sheet.fp32_flops
    # 16x is what an A100's datasheet says of fp32, 250x what an H100's says of exp: each held to its own.
    verdict = graded(min(fma / 16, exp2 / 250), 1, least=1 / 16)
    why = (
        f"Measured, cuBLAS multiplies matrices at {rate['tensor_cublas']['value']:.0f} TFLOP/s, beside "
        f"{rate['fma']['value']:.0f} of FMAs in fp32 and {rate['exp2']['value']:.1f} T exp2 a second. The "
        f"sources divide datasheets' peaks, which no matrix product reaches: for fp32 that is {paper:.0f}x "
        "of this GPU."
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
    ratios = {
        "L2 over DRAM in bandwidth": (level_2 / dram, 5 / 2),
        "L2 over shared memory in clocks": (clocks[1] / clocks[0], 200 / 30),
        "DRAM over L2 in clocks": (clocks[2] / clocks[1], 400 / 200),
    }
    if possible:
        ratios["shared memory over L2 in bandwidth"] = (shared / level_2, 19 / 5)
    # The sizes are of another GPU; what is claimed of memories are the ratios between neighbours, which count
    # as the claimed ones within a factor of 1.5 either way.
    right = [name for name, (ours, theirs) in ratios.items() if 2 / 3 <= ours / theirs <= 3 / 2]
    verdict = HOLDS if len(right) == 4 else IN_PART if right else FAILS
    fast = f"{shared:.0f} TB/s" if possible else "bandwidth not measured"
    figure = (
        f"shared memory {fast}, {clocks[0]:.0f} clocks; L2 {level_2:.1f} TB/s, {clocks[1]:.0f}; DRAM "
        f"{dram:.1f} TB/s, {clocks[2]:.0f}"
    )
    said = "; ".join(f"{name} {ours:.1f}x ({theirs:.1f}x)" for name, (ours, theirs) in ratios.items())
    why = (
        f"Ratios between neighbours, and those of the A100's figures: {said}. {len(right)} of {len(ratios)} "
        f"are within a factor of 1.5. DRAM is {dram / 2:.1f}x an A100's 2 TB/s."
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
        return {key: row["point"]["tile"][key] for key in ("br", "bc", "warps")}

    def said(row: Row) -> str:
        use = _usage(row)
        shared, threads = use["shared_bytes"] / 1024, use["occupancy_percent"]
        return f"{tile(row)['br']} x {tile(row)['bc']} ({shared:.0f} KiB, {threads:.0f}% of the threads)"

    spilled = [row for row in rows if _usage(row)["spilled_bytes"]]
    rows = [
        row for row in rows if row not in spilled and "shared_bytes" in (row["result"].get("counters") or {})
    ]
    if len(rows) < 2:
        raise NotMeasured(f"no two tiles that spill no registers, with counters: run `{command}`")
    fastest = max(rows, key=lambda row: row["result"]["tflops"])
    slowest = min(rows, key=lambda row: row["result"]["tflops"])
    leanest = min(rows, key=lambda row: row["result"]["counters"]["shared_bytes"])
    fullest = max(rows, key=lambda row: (_usage(row)["occupancy_percent"], row["result"]["tflops"]))
    speed = {id(row): row["result"]["tflops"] / fastest["result"]["tflops"] for row in (leanest, fullest)}
    trips = {id(row): row["result"]["counters"]["shared_bytes"] / 1e9 for row in (leanest, fullest)}
    # A trade-off: more resident threads cost more trips, and the best tile is at neither end. In part where
    # the one costs the other and an end of it is best all the same.
    dearer = trips[id(fullest)] > trips[id(leanest)] and leanest is not fullest
    inside = tile(fastest) not in (tile(leanest), tile(fullest))
    verdict = FAILS if not dearer else HOLDS if inside else IN_PART
    why = (
        f"Of {len(rows)} tiles of fa2 that spill no registers ({len(spilled)} others do, which says nothing "
        f"of tiles) the fastest is {said(fastest)}, the slowest {said(slowest)}. The one with the fewest "
        f"bytes from and to shared memory, {said(leanest)}, moves {trips[id(leanest)]:.1f} GB and reaches "
        f"{speed[id(leanest)]:.0%} of the fastest; that with most threads, {said(fullest)}, moves "
        f"{trips[id(fullest)]:.1f} GB and reaches {speed[id(fullest)]:.0%}."
    )
    spread = fastest["result"]["tflops"] / slowest["result"]["tflops"]
    figure = f"{tile(fastest)['br']} x {tile(fastest)['bc']} is best, {spread:.1f}x the worst"
    return answer(rows, figure, verdict, why, command)


def _usage(row: Row) -> dict[str, Any]:
    """Registers, spills, shared memory and occupancy of the one kernel of a row."""
    (use,) = row["result"]["usage"].values()
    return use
