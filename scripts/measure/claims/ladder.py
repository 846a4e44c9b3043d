"""Claims 8 and 10: stages of the CUDA ladder beside each other, from results/attention_speed (before that is
measured results/cuda_ladder and results/attention) and results/cuda_ladder."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
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
)


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
    apart=("study", "seq_len", "head_dim", "causal"),
    figure="fa2 {factor:.1f}x fa1, {times} eager{mask}, {of_mma:.0%} of mma.sync's rate",
    why="""
        At {shape} fa1 and fa2 reach {rates} TFLOP/s; fa1 has a block for each of {blocks} heads, whatever N.

        Over the formula in eager PyTorch, at {long}, fa2 is {over}; the formula has to add the mask, whose
        tiles fa2 skips.

        Its best forward, at {best}, reaches {top:.0f} TFLOP/s: {of_mma:.0%} of what its instructions,
        mma.sync, reach on this GPU ({mma:.0f} TFLOP/s), beside 50-73% of an A100, and {used:.0%} of the
        datasheet's peak, which takes wgmma; fa1's above is {first_of_mma:.0%}, beside 25-40%.

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
    over, pairs = over_eager(results)
    best, trained = best_of_fa2(results), end_to_end(results)
    ceiling = of(results.ok("roofline", implementation="ceiling", passed="tensor_mma"), passed="tensor_mma")
    mma = ceiling["result"]["value"]
    mask, times = min(over.items(), key=lambda item: item[0] != UNMASKED)
    return Figures(
        [first, second, *pairs, best, ceiling, *trained],
        factor=ms(first) / ms(second),
        shape=shape(first),
        blocks=first["point"]["batch"] * first["point"]["heads"],
        rates=f"{tflops(first):.0f} and {tflops(second):.0f}",
        least_over=min(over.values()),
        times=f"{times:.0f}x",
        mask=f" {mask}",
        over=listed("{1:.0f}x as fast {0}", over.items(), " and "),
        long=shape(pairs[0], mask=False),
        best=shape(best),
        top=tflops(best),
        mma=mma,
        of_mma=tflops(best) / mma,
        first_of_mma=tflops(first) / mma,
        used=share(best),
        mfu=trained[0]["result"]["mfu"] if trained else None,
    )


UNMASKED, MASKED = "without a mask", "with a causal mask"


def shape(row: Row, mask: bool = True) -> str:
    """What a time is of, in words."""
    p = row["point"]
    said = f"N = {p['seq_len']:,} (batch {p['batch']}, {p['heads']} heads, D = {p['head_dim']}"
    return said + (f", {MASKED if p['causal'] else UNMASKED})" if mask else ")")


def best_of_fa2(results: Results) -> Row:
    """The forward of ours with most FLOPs a second, of the study attention."""
    return max(results.ok("attention", implementation="cuda_fa2", passed="forward"), key=tflops)


def end_to_end(results: Results) -> list[Row]:
    """GPT-2 medium trained with fa2, compiled; none where that was not measured."""
    try:
        rows = results.ok(
            "speedup_end_to_end", implementation="cuda", model="gpt2_medium", compile=True, seq_len=1024
        )
    except NotMeasured:
        return []
    return [row for row in rows if "tilegpt_fa2_forward" in row["result"]["kernels"]][-1:]


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
            found[MASKED if shape[-1] else UNMASKED] = ms(eager) / ms(fused)
            used += [eager, fused]
    return found, used


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
    # "Several times" is twice at least, as two steps make up the "3 to 7x" of tiles over the three kernels:
    # each stage that much over the one before at every N, and "3 to 7x"; in part: tiles are 3x and more.
    holds=lambda f: f.slowest_step >= 2 and f.least >= 3 and f.most <= 7,
    partly=lambda f: f.least >= 3,
    # As claimed: fp32 to the third stage, then 16 bits. Tiles on FMA units were timed in a run of their own.
    differ=("implementation", "dtype", "run"),
    apart=("seq_len", "causal"),
    figure="{several} of {steps} steps are 2x and more; ms: {ours}",
    why="""
        Tiles in fp32 on FMA units are {least:.1f}x to {most:.1f}x the three kernels of naive: "3 to 7x" is
        {reproduced}. Each stage over the one before it (fa2 and cuDNN in 16 bits): {said}; by the table
        claimed {claimed}. From naive to fa2 it is {whole:.0f}x at N = 8192.

        Not faster at every N, without a mask: {slower}.

        With a causal mask, which the table has not, rowwise, which skips the future, is {least_causal:.2f}x
        to {most_causal:.2f}x naive.

        Of the formula in fp32 naive is not the fastest: with cuBLAS' products (SDPA's math) it takes {cublas}
        ms, of which the tiles are {least_cublas:.1f}x to {most_cublas:.1f}x.

        With a thread a score and no more (cuda_plain) it takes {plain} ms, over which naive is
        {least_plain:.1f}x to {most_plain:.1f}x.

        The figures claimed cannot be an A100's (see below).
        """,
)
def stages_of_the_ladder(results: Results) -> Figures:
    from scripts.bench_ladder import CLAIMED

    wanted = {"passed": "forward", "heads": 32, "head_dim": 128, "causal": False, "seq_len": LENGTHS}
    rows = results.ok("cuda_ladder", implementation=tuple(STAGES), **wanted)
    times = {stage: at_lengths(rows, which) for which, stage in STAGES.items()}
    steps = [(after, *span(times[before], times[after])) for before, after in itertools.pairwise(times)]
    claimed = [(b, *span(CLAIMED[a], CLAIMED[b])) for a, b in itertools.pairwise(CLAIMED)]
    least, most = span(times["naive"], times["tiled"])
    beside: dict[str, Any] = dict.fromkeys(f"{at}{who}" for who in BESIDE for at in ("", "least_", "most_"))
    for who, (which, after) in BESIDE.items():
        try:
            more = results.ok("cuda_ladder", implementation=which, **wanted)
            taken = at_lengths(more, which)
        except NotMeasured:
            continue
        rows = [*rows, *more]
        beside |= zip((f"least_{who}", f"most_{who}"), span(taken, times[after]), strict=True)
        beside[who] = " / ".join(f"{each:.3g}" for each in taken)
    masked, causal = under_a_mask(results, wanted)
    return Figures(
        [*rows, *masked],
        **beside,
        least_causal=causal and causal[0],
        most_causal=causal and causal[1],
        slowest_step=min(low for _, low, _ in steps),
        several=sum(low >= 2 for _, low, _ in steps),
        steps=len(steps),
        least=least,
        most=most,
        reproduced="reproduced" if 3 <= least and most <= 7 else "not reproduced",
        said=listed("{} {:.1f}x to {:.1f}x", steps, "; "),
        claimed=listed("{1:.1f}x to {2:.1f}x", claimed),
        whole=times["naive"][-1] / times["fa2"][-1],
        slower=", ".join(stage for stage, low, _ in steps if low <= 1) or None,
        ours=listed("{} {:.3g} / {:.3g} / {:.3g}", [(stage, *of_n) for stage, of_n in times.items()], "; "),
    )


def at_lengths(rows: list[Row], which: str) -> list[float]:
    return [ms(of(rows, implementation=which, seq_len=tokens)) for tokens in LENGTHS]


def span(before: Sequence[float], after: Sequence[float]) -> tuple[float, float]:
    """The least and the most times as fast."""
    factors = [old / new for old, new in zip(before, after, strict=True)]
    return min(factors), max(factors)


def under_a_mask(results: Results, wanted: dict[str, Any]) -> tuple[list[Row], tuple[float, float] | None]:
    """Rows of naive and rowwise with a causal mask, and how many times as fast rowwise is; None for none."""
    names = ("cuda_naive", "cuda_rowwise")
    try:
        rows = results.ok("cuda_ladder", implementation=names, **wanted | {"causal": True})
        return rows, span(*(at_lengths(rows, which) for which in names))
    except NotMeasured:
        return [], None
