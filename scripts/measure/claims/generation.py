"""Claims 17, 18 and 23: what a KV cache saves and takes, from results/kv_cache."""

from __future__ import annotations

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
    missing,
    of,
)
from scripts.measure.report.steps import Steps, exponent, factors, halves

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
    saved, first, powers = {}, {}, {}
    for name in steps.names:
        factor = {n: four[name, False] / four[name, True] for n in steps.lengths if (four := steps.four(n))}
        saved[name], first[name] = factor[longest], next((n for n, x in factor.items() if x >= 5), None)
        powers[name] = [exponent(halves(steps.totals((name, cached)))[1]) for cached in (False, True)]
    # Theirs: 5,050 -> 100 computations, O(N^2) -> O(N) (within 0.2 of the exponents), and 5 times faster; all
    # of it with either attention, or in part: the counts, and some time saved.
    grows = all(before >= 1.8 and after <= 1.2 for before, after in powers.values())
    counted = (without, within) == (5050, 100)
    verdict = HOLDS if counted and grows and all(first.values()) else FAILS
    verdict = IN_PART if verdict == FAILS and counted and max(saved.values()) > 1 else verdict
    said = " and ".join(
        f"{saved[name]:.1f}x with {name} ({f'5x from {n:,} tokens on' if n else '5x at no length measured'}; "
        f"exponents of the time {powers[name][0]:.2f} without and {powers[name][1]:.2f} with it)"
        for name, n in first.items()
    )
    why = (
        f"100 tokens take {without:,} computations of a key and a value without the cache and {within:,} "
        f"with it. In time of the device, integrated from single steps, it saves at {longest:,} tokens "
        f"{said}; exponents are of the longer half of the lengths. {by_the_clock(results)}"
    )
    times = ", ".join(f"{factor:.1f}x with {name}" for name, factor in saved.items())
    figure = f"{without:,} -> {within:,}; {times} at {longest:,} tokens"
    return answer([*counts, *rows], figure, verdict, why.strip())


def by_the_clock(results: Results) -> str:
    """What the cache saves of whole generations, in a sentence; "" without them."""
    try:
        rows = results.ok("kv_cache", passed="generate")
    except NotMeasured:
        return ""
    seconds = {
        (p["new_tokens"], p["implementation"], p["kv_cache"]): row["result"]["seconds"]
        for row in rows
        for p in [row["point"]]
    }
    said: dict[int, list[str]] = {}
    for (new, name, cached), took in sorted(seconds.items()):
        if cached and (new, name, False) in seconds:
            said.setdefault(new, []).append(f"{seconds[new, name, False] / took:.1f}x with {name}")
    each = "; ".join(f"{new:,} tokens {' and '.join(factors)}" for new, factors in said.items())
    why = "the host issues every kernel of a step without the cache, and a CUDA graph replays one with it"
    return f"By the clock, whole generations: {each}, as {why}." if each else ""


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
    smaller = {heads: by[32] / size for heads, size in by.items() if heads != 32}
    # Three things are said: the formula (1% for the allocator's rounding), the shrinking as heads are fewer,
    # and a size (5% covers GB as 10^9 and 4,000 tokens for 4,096).
    shrinks = all(abs(factor * heads / 32 - 1) <= 0.01 for heads, factor in smaller.items())
    right = (off <= 0.01, shrinks, abs(large[8] / CLAIMED_GB - 1) <= 0.05)
    verdict = HOLDS if all(right) else IN_PART if any(right) else FAILS
    factors = " and ".join(f"{factor:.0f}x with {n}" for n, factor in smaller.items())
    why = (
        f"What is allocated is the formula's within {off:.2%}, for every shape. A model of 32 heads has a "
        f"cache smaller by {factors} KV heads. Llama-2-70B's is {large[8]:.2f} GB with the 8 KV heads that "
        f"it has; {CLAIMED_GB} GB is about that of 64, {large[64]:.2f} GB."
    )
    llama = f"Llama-2-70B {large[8]:.2f} GB with its 8, {large[64]:.2f} with 64"
    return answer(rows, f"smaller by {factors} KV heads of 32; {llama}", verdict, why)


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
