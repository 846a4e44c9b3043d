"""Claims 8, 9 and 10: generations of kernels beside each other, from results/attention_speed (before that is
measured results/cuda_ladder and results/attention) and results/cuda_ladder."""

from __future__ import annotations

import itertools
from typing import Any

from model.costs.gpus import gpu_sheet
from scripts.measure.claims import (
    Figures,
    NotMeasured,
    Results,
    Row,
    claim,
    listed,
    missing,
    ms,
    name,
    of,
    study,
)
from scripts.measure.rows import key_of


def tflops(row: Row) -> float:
    return row["result"]["tflops"]


def share(row: Row) -> float:
    """Of the GPU's peak in dense bf16, as its datasheet has it."""
    return tflops(row) * 1e12 / gpu_sheet(row["machine"]["gpu"]).bf16_flops


def first_measured(results: Results, *wanted: tuple[str, dict[str, Any]]) -> list[Row]:
    """Rows of the first of these (study, point) that were measured; raises what the first raises."""
    reason = None
    for of_study, point in wanted:
        try:
            return results.ok(of_study, **point)
        except NotMeasured as missed:
            reason = reason or missed
    raise reason or missing(wanted[0][0])


@claim(
    8,
    "FlashAttention-2 doubles 1: queries split over the warps instead of keys, and a grid over the sequence.",
    theirs="""forward at N = 2k (A100) 124 -> 230 TFLOP/s; utilisation 25-40% -> 50-73%; end to end 225
        TFLOP/s (72% MFU); about 9x over PyTorch's standard attention on long sequences""",
    # Their utilisation, 50% at least, is of what an A100's instructions reach: of the same instructions
    # (mma.sync) here. 9x over eager: without a mask, which eager has to add, and with.
    holds=lambda f: f.factor >= 230 / 124 and f.of_mma >= 0.5 and f.least_over >= 9,
    partly=lambda f: f.factor > 1,
    differ=("implementation",),
    apart=("study", "seq_len", "causal"),
    figure="fa2 {factor:.1f}x fa1, {times} eager, {of_mma:.0%} of mma.sync's rate",
    why="""
        Without a mask at N = {seq_len:,} (batch {batch}, {heads} heads, D = 128) fa1 and fa2 reach {rates}
        TFLOP/s; fa1 has a block for each of {blocks} heads, whatever N. fa2 is {over} the formula in eager
        PyTorch at N = {long:,}. Its best forward reaches {of_mma:.0%} of what its instructions, mma.sync,
        reach on this GPU ({mma:.0f} TFLOP/s), beside 50-73% of an A100, and {used:.0%} of the datasheet's
        peak, which takes wgmma; fa1's above is {first_of_mma:.0%}, beside 25-40%.

        End to end GPT-2 medium trains with fa2 at {mfu:.0%} MFU of that peak, T = 1,024; their 72% is of
        models of 1.3B parameters and more, not tested here.
        """,
)
def second_generation(results: Results) -> Figures:
    """Ours of both, written alike: fa1 (keys split over the warps, a block a head) and fa2."""
    full = {"passed": "forward", "head_dim": 128, "causal": False, "dtype": "bfloat16", "features": ""}
    both = {"implementation": ("cuda_fa1", "cuda_fa2")}
    rows = first_measured(
        results,
        ("attention_speed", full | both | {"seq_len": 2048}),
        ("cuda_ladder", full | both | {"seq_len": 4096, "heads": 32}),
    )
    first, second = (of(rows, implementation=which) for which in both["implementation"])
    p = first["point"]
    over, pairs = over_eager(results)
    top = best_of_fa2(results)
    ceiling = of(results.ok("roofline", implementation="ceiling", passed="tensor_mma"), passed="tensor_mma")
    mma = ceiling["result"]["value"]
    return Figures(
        [*rows, *pairs, ceiling],
        factor=ms(first) / ms(second),
        seq_len=p["seq_len"],
        batch=p["batch"],
        heads=p["heads"],
        blocks=p["batch"] * p["heads"],
        rates=f"{tflops(first):.0f} and {tflops(second):.0f}",
        least_over=min(over.values()),
        times=" to ".join(dict.fromkeys(f"{times:.0f}x" for times in sorted(over.values()))),
        over=listed("{1:.0f}x {0}", over.items(), " and "),
        long=pairs[0]["point"]["seq_len"],
        mma=mma,
        of_mma=tflops(top) / mma,
        first_of_mma=tflops(first) / mma,
        used=share(top),
        mfu=end_to_end(results),
    )


def best_of_fa2(results: Results) -> Row:
    """The forward of ours with most FLOPs a second, of the study attention."""
    return max(results.ok("attention", implementation="cuda_fa2", passed="forward"), key=tflops)


def end_to_end(results: Results) -> float | None:
    """The MFU that GPT-2 medium trains at with fa2, compiled; None where that was not measured."""
    try:
        rows = results.ok(
            "speedup_end_to_end", implementation="cuda", model="gpt2_medium", compile=True, seq_len=1024
        )
    except NotMeasured:
        return None
    (row,) = [row for row in rows if "tilegpt_fa2_forward" in row["result"]["kernels"]] or (None,)
    return row and row["result"]["mfu"]


def over_eager(results: Results) -> tuple[dict[str, float], list[Row]]:
    """How many times as fast as the formula in eager PyTorch fa2's forward is, by mask, and the rows: the
    longest N that both have, as the claim is of long sequences."""
    forward = {"passed": "forward", "dtype": "bfloat16", "features": ""}
    rows = first_measured(
        results,
        ("attention_speed", forward | {"implementation": ("standard", "cuda_fa2"), "head_dim": 64}),
        ("attention_speed", forward | {"implementation": ("standard", "cuda_fa2"), "seq_len": 2048}),
        ("attention", forward | {"implementation": ("naive", "cuda_fa2"), "seq_len": 1024}),
    )
    shapes: dict[tuple[Any, ...], dict[str, Row]] = {}
    for row in rows:
        shape = tuple(row["point"].get(key, 0) for key in ("seq_len", "batch", "heads", "head_dim", "causal"))
        shapes.setdefault(shape, {})[name(row)] = row
    both = {shape: pair for shape, pair in shapes.items() if len(pair) == 2}
    if not both:
        raise missing("attention_speed", implementation="standard")
    found, used = {}, []
    for shape, pair in sorted(both.items(), key=lambda item: item[0][-1]):
        if shape[0] == max(both)[0]:
            fused = pair["cuda_fa2"]
            eager = next(row for row in pair.values() if row is not fused)
            found["with a causal mask" if shape[-1] else "without a mask"] = ms(eager) / ms(fused)
            used += [eager, fused]
    return found, used


@claim(
    9,
    "FlashAttention-3 doubles 2 on Hopper.",
    theirs="""fp16 about 370 -> 740 TFLOP/s (75% of the peak, against 35%); fp8 about 1,200; the Hadamard
        transform makes fp8's error 2.6x smaller""",
    # "Doubles", 75% of the peak, and 1,200 TFLOP/s in fp8: never more than in part until that has rows.
    holds=lambda f: f.least >= 2 and f.used >= 0.75 and f.fp8,
    partly=lambda f: f.least > 1,
    differ=("implementation",),
    apart=("study", "head_dim", "dtype", "seq_len", "causal", "run"),
    figure="{least:.1f}x to {most:.1f}x, {used:.0%} of the peak",
    why="""
        FlashAttention-{version}{stands_in} over 2, at the shape where it is fastest by head dim: {said}. It
        reaches {used:.0%} of the peak. In fp8 `cuda_fp8` {fp8_said}; [30](#claim-30) has its error.

        `cuda_fa3`, ours by 3's methods, is over FlashAttention-2 of PyTorch in one process {ours} (forward).
        """,
)
def third_generation(results: Results) -> Figures:
    """FlashAttention-3, or 4 where 3 is not measured, over 2: by head dim, at the shape of its best forward
    in 16 bits of those that both have."""
    wanted = {"passed": "forward", "dtype": ("bfloat16", "float16"), "features": ""}
    wanted |= {"implementation": ("flash3", "flash4")}
    rows = first_measured(results, ("attention_speed", wanted), ("attention", wanted))
    newer, of_study = min(map(name, rows)), study(rows[0])
    older = {
        key_of(row["point"]): row for row in results.ok(of_study, **wanted | {"implementation": "flash2"})
    }
    pairs: dict[int, tuple[Row, Row]] = {}
    for row in sorted((row for row in rows if name(row) == newer), key=tflops):
        if beside := older.get(key_of(row["point"] | {"implementation": "flash2"})):
            pairs[row["point"]["head_dim"]] = beside, row
    if not pairs:
        raise missing(of_study, implementation="flash2")
    pairs = dict(sorted(pairs.items()))
    factors = [tflops(new) / tflops(old) for old, new in pairs.values()]
    beside, ours = our_third(results)
    try:
        fp8 = [max(results.ok("attention", implementation="cuda_fp8", passed="forward"), key=tflops)]
    except NotMeasured:
        fp8 = []
    said = [(dim, tflops(old), tflops(new)) for dim, (old, new) in pairs.items()]
    return Figures(
        [row for pair in pairs.values() for row in pair] + beside + fp8,
        ours=ours,
        least=min(factors),
        most=max(factors),
        fp8=any(tflops(row) >= 1200 for row in fp8),
        fp8_said=f"reaches {tflops(fp8[0]):,.0f} TFLOP/s" if fp8 else "has no rows of its speed yet",
        used=max(share(new) for _, new in pairs.values()),
        version=newer[-1],
        stands_in="" if newer == "flash3" else ", in the place of 3, which was not measured,",
        said=listed("D = {}: {:.0f} -> {:.0f} TFLOP/s", said, "; "),
    )


def our_third(results: Results) -> tuple[list[Row], str | None]:
    """Rows of cuda_fa3 and FlashAttention-2 at the same shapes, the factors by head dim; None for none."""
    try:
        rows = results.ok("hopper", implementation=("cuda_fa3", "sdpa_flash"), passed="forward")
    except NotMeasured:
        return [], None
    at = {(name(row), key_of(row["point"] | {"implementation": ""})): row for row in rows}
    found: dict[int, list[float]] = {}
    for (who, shape), row in at.items():
        if who == "cuda_fa3" and (beside := at.get(("sdpa_flash", shape))):
            found.setdefault(row["point"]["head_dim"], []).append(ms(beside) / ms(row))
    each = [(min(factors), max(factors), dim) for dim, factors in sorted(found.items())]
    return rows, listed("{:.1f}x to {:.1f}x at D = {}", each) or None


# The claim's own table, without a mask: batch 1, 32 heads, D = 128. Its third stage computes in fp32 on FMA
# units, so ours does too: not `cuda_tiled` as it comes, which takes tensor cores.
STAGES = {
    "cuda_naive": "naive",
    "cuda_rowwise": "rowwise",
    "cuda_tiled_fma": "tiled",
    "cuda_fa2": "fa2",
    "sdpa_cudnn": "sdpa_cudnn",
}
LENGTHS = (1024, 4096, 8192)
BESIDE = {"cublas": ("sdpa_math", "tiled"), "plain": ("cuda_plain", "naive")}  # the formula, and over whom


@claim(
    10,
    "Each stage of a ladder of CUDA kernels is several times faster than the one before.",
    theirs="""A100, batch 1, 32 heads, D = 128, ms at N = 1024 / 4096 / 8192: naive in 3 kernels 0.8 /
        12.4 / 49.2; fused by rows 0.6 / 8.8 / 34.1; tiled, fp32 0.4 / 4.2 / 15.8; FA2, fp16 0.12 / 0.9 /
        3.2; cuDNN, fp16 0.10 / 0.8 / 2.9; "3 to 7x\"""",
    # Both of what is claimed: each stage is faster than the one before at every N, and tiles in fp32 are
    # "3 to 7x" the three kernels. In part with one of the two.
    holds=lambda f: f.slowest_step > 1 and 3 <= f.least and f.most <= 7,
    partly=lambda f: f.slowest_step > 1 or (3 <= f.least and f.most <= 7),
    # As claimed: fp32 to the third stage, then 16 bits. Tiles on FMA units were timed in a run of their own.
    differ=("implementation", "dtype", "run"),
    apart=("seq_len",),
    figure="ms: {ours}",
    why="""
        Tiles in fp32 on FMA units are {least:.1f}x to {most:.1f}x the three kernels of naive: "3 to 7x" is
        {reproduced}. Each stage over the one before it: {said}. From naive to fa2 it is {whole:.0f}x at N =
        8192.

        Not faster at every N: {slower}.

        Of the formula in fp32 naive is not the fastest: with cuBLAS' products (SDPA's math) it takes {cublas}
        ms, of which the tiles are {least_cublas:.1f}x to {most_cublas:.1f}x.

        With a thread a score and no more (cuda_plain) it takes {plain} ms, over which naive is
        {least_plain:.1f}x to {most_plain:.1f}x.

        The figures claimed cannot be an A100's (see below).
        """,
)
def stages_of_the_ladder(results: Results) -> Figures:
    wanted = {"passed": "forward", "heads": 32, "head_dim": 128, "causal": False, "seq_len": LENGTHS}
    rows = results.ok("cuda_ladder", implementation=tuple(STAGES), **wanted)
    times = {
        stage: [ms(of(rows, implementation=which, seq_len=tokens)) for tokens in LENGTHS]
        for which, stage in STAGES.items()
    }

    def faster(before: str, after: str) -> tuple[str, float, float]:
        factors = [old / new for old, new in zip(times[before], times[after], strict=True)]
        return after, min(factors), max(factors)

    steps = [faster(before, after) for before, after in itertools.pairwise(times)]
    _, least, most = faster("naive", "tiled")
    beside: dict[str, Any] = dict.fromkeys(f"{at}{who}" for who in BESIDE for at in ("", "least_", "most_"))
    for who, (which, after) in BESIDE.items():
        try:
            more = results.ok("cuda_ladder", implementation=which, **wanted)
            times[who] = [ms(of(more, seq_len=tokens)) for tokens in LENGTHS]
        except NotMeasured:
            continue
        rows = [*rows, *more]
        beside |= zip((f"least_{who}", f"most_{who}"), faster(who, after)[1:], strict=True)
        beside[who] = " / ".join(f"{each:.3g}" for each in times.pop(who))
    return Figures(
        rows,
        **beside,
        slowest_step=min(low for _, low, _ in steps),
        least=least,
        most=most,
        reproduced="reproduced" if 3 <= least and most <= 7 else "not reproduced",
        said=listed("{} {:.1f}x to {:.1f}x", steps, "; "),
        whole=times["naive"][-1] / times["fa2"][-1],
        slower=", ".join(stage for stage, low, _ in steps if low <= 1) or None,
        ours=listed("{} {:.3g} / {:.3g} / {:.3g}", [(stage, *of_n) for stage, of_n in times.items()], "; "),
    )
