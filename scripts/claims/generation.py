"""Claims 17, 18 and 23: what a KV cache saves and takes, from results/kv_cache."""

from __future__ import annotations

from scripts.claims import FAILS, HOLDS, IN_PART, Answer, Results, Row, answer, answers, missing, of
from scripts.studies.parts.steps import Steps, exponent, factors, halves

CLAIMED_GB = 10.5  # of Llama-2-70B at 4,096 tokens


def both_ways(results: Results) -> tuple[list[Row], Steps, int]:
    """The rows of steps, and the longest generation that all four ways have."""
    rows = results.ok("kv_cache", passed="step")
    steps = Steps(rows)
    whole = [new for new in steps.lengths if len(steps.names) == 2 and steps.four(new)]
    if not whole:
        raise missing("kv_cache", passed="step")
    return rows, steps, whole[-1]


@answers(17)
def linear_generation(results: Results) -> Answer:
    counts = results.ok("kv_cache", passed="count", new_tokens=100)
    without, within = (of(counts, kv_cache=cached)["result"]["kv_computations"] for cached in (False, True))
    rows, steps, longest = both_ways(results)
    tiled = steps.names[1]
    powers = [exponent(halves(steps.totals((tiled, cached)))[1]) for cached in (False, True)]
    factor = {
        new: four[tiled, False] / four[tiled, True]
        for new in steps.lengths
        if (four := steps.four(new)) is not None
    }
    first = next((new for new, times in factor.items() if times >= 5), None)
    # Theirs: 5,050 -> 100 computations, O(N^2) -> O(N) (within 0.2 of the exponents), and 5 times faster.
    counted, grows = (without, within) == (5050, 100), powers[0] >= 1.8 and powers[1] <= 1.2
    verdict = HOLDS if counted and grows and first else IN_PART if counted and factor[longest] > 1 else FAILS
    where = f"5x from {first:,} tokens on" if first else "5x at no length measured"
    why = (
        f"100 tokens take {without:,} computations of a key and a value without the cache and {within:,} "
        f"with it. With {tiled}, the whole time of the device grows with the exponents {powers[0]:.2f} and "
        f"{powers[1]:.2f} over the longer half of the lengths; the cache saves {factor[longest]:.1f}x at "
        f"{longest:,} tokens, {where}. The time is integrated from single steps."
    )
    figure = f"{without:,} -> {within:,}; {factor[longest]:.1f}x at {longest:,} tokens"
    return answer([*counts, *rows], figure, verdict, why)


@answers(18)
def size_of_the_cache(results: Results) -> Answer:
    rows = results.ok("kv_cache", passed="cache_bytes")
    off = max(abs(r["result"]["allocated_bytes"] / r["result"]["formula_bytes"] - 1) for r in rows)
    large = {
        heads: of(rows, model="Llama-2-70B", seq_len=4096, kv_heads=heads)["result"]["allocated_bytes"] / 1e9
        for heads in (8, 64)
    }
    by = {
        row["point"]["kv_heads"]: row["result"]["allocated_bytes"]
        for row in rows
        if row["point"]["model"] == "Llama-2-7B"
    }
    # 1% for the allocator's rounding; 5% of their figure covers GB as 10^9 and 4,000 tokens for 4,096.
    formula, figure = off <= 0.01, abs(large[8] / CLAIMED_GB - 1) <= 0.05
    verdict = HOLDS if formula and figure else IN_PART if formula else FAILS
    shrinks = " and ".join(f"{by[32] / size:.0f}x with {n}" for n, size in by.items() if n != 32)
    why = (
        f"What is allocated is the formula's within {off:.2%}, for every shape. A model of 32 heads has a "
        f"cache smaller by {shrinks} KV heads. Llama-2-70B's is {large[8]:.2f} GB with the 8 KV heads that "
        f"it has; {CLAIMED_GB} GB is about that of 64, {large[64]:.2f} GB."
    )
    return answer(rows, f"{large[8]:.2f} GB (8 KV heads), {large[64]:.2f} GB (64)", verdict, why)


@answers(23)
def stacking(results: Results) -> Answer:
    rows, steps, longest = both_ways(results)
    four, tiled = steps.four(longest), steps.names[1]
    saved = factors(four, steps.names)
    within = four[steps.names[0], True] / four[tiled, True]
    prefill, decode = (
        steps.per_token((steps.names[0], cached))[longest] / steps.per_token((tiled, cached))[longest]
        for cached in (False, True)
    )
    # Multiplies: both together within 10% of the product; in part: better than either by itself.
    multiplies = 0.9 <= saved["stacking"] <= 1.1
    better = saved["both"] > 1.02 * max(saved["cache"], saved["tiled"])
    verdict = HOLDS if multiplies else IN_PART if better else FAILS
    why = (
        f"Generating {longest:,} tokens from one (time of the device, integrated from steps), the cache "
        f"saves {saved['cache']:.1f}x, {tiled} {saved['tiled']:.1f}x and both {saved['both']:.1f}x, "
        f"{saved['stacking']:.2f} of the product: {tiled} is worth {saved['tiled']:.2f}x without the cache "
        f"and {within:.2f}x with it. By itself a prefill of {longest:,} tokens is {prefill:.1f}x faster with "
        f"{tiled}, a decoding step over as many {decode:.1f}x."
    )
    figure = f"cache {saved['cache']:.1f}x, tiled {saved['tiled']:.1f}x, both {saved['both']:.1f}x"
    return answer(rows, figure, verdict, why)
