"""Claims 17, 18 and 23: what a KV cache saves and takes, from results/kv_cache."""

from __future__ import annotations

from scripts.measure.claims import Figures, NotMeasured, Results, Row, claim, listed, missing, of
from scripts.measure.report.steps import Steps, exponent, factors, halves, integrated


def both_ways(results: Results) -> tuple[list[Row], Steps, int]:
    """The rows of steps, and the longest generation that all four ways have."""
    rows = results.ok("kv_cache", passed="step")
    steps = Steps(rows)
    whole = [new for new in steps.lengths if len(steps.names) == 2 and steps.four(new)]
    if not whole:
        raise missing("kv_cache", passed="step")
    return rows, steps, whole[-1]


@claim(
    17,
    "A KV cache makes generation O(N) instead of O(N^2).",
    theirs="100 tokens: 5,050 -> 100 computations of K and V; generation 5-10x faster",
    # Theirs: 5,050 -> 100 computations, O(N^2) -> O(N) (within 0.2 of the exponents), and 5 times faster; all
    # of it with either attention, or in part: the counts, and some time saved.
    holds=lambda f: (f.without, f.within) == (5050, 100) and f.linear and f.five_times,
    partly=lambda f: (f.without, f.within) == (5050, 100) and f.saved > 1,
    # A step without a cache is of all tokens; with one it is of one token, over a cache of some capacity.
    differ=("kv_cache", "seq_len", "capacity"),
    apart=("pass", "implementation", "new_tokens"),
    figure="{without:,} -> {within:,}; {times} at {longest:,} tokens",
    why="""
        100 tokens take {without:,} computations of a key and a value without the cache and {within:,} with
        it. In time of the device, integrated from single steps, it saves at {longest:,} tokens {said};
        exponents are of the longer half of the lengths.

        By the clock, whole generations: {clock}, as the host issues every kernel of a step without the
        cache, and a CUDA graph replays one with it.

        {issued}
        """,
)
def linear_generation(results: Results) -> Figures:
    counts = results.ok("kv_cache", passed="count", new_tokens=100)
    without, within = (of(counts, kv_cache=cached)["result"]["kv_computations"] for cached in (False, True))
    rows, steps, longest = both_ways(results)
    whole = generations(results)
    saved, first, powers = {}, {}, {}
    for name in steps.names:
        factor = {n: four[name, False] / four[name, True] for n in steps.lengths if (four := steps.four(n))}
        saved[name], first[name] = factor[longest], next((n for n, x in factor.items() if x >= 5), None)
        powers[name] = [exponent(halves(steps.totals((name, cached)))[1]) for cached in (False, True)]
    five = {
        name: f"5x from {n:,} tokens on" if n else "5x at no length measured" for name, n in first.items()
    }
    said = [(saved[name], name, five[name], *powers[name]) for name in first]
    sentence = "{:.1f}x with {} ({}; exponents of the time {:.2f} without and {:.2f} with it)"
    return Figures(
        [*counts, *rows, *whole],
        without=without,
        within=within,
        longest=longest,
        saved=max(saved.values()),
        linear=all(before >= 1.8 and after <= 1.2 for before, after in powers.values()),
        five_times=all(first.values()),
        times=listed("{1:.1f}x with {0}", saved.items()),
        said=listed(sentence, said, " and "),
        clock=by_the_clock(whole) or None,
        issued=as_issued(whole, steps),
    )


def generations(results: Results) -> list[Row]:
    """Whole ones, by the clock."""
    try:
        return results.ok("kv_cache", passed="generate")
    except NotMeasured:
        return []


def by_way(rows: list[Row]) -> dict[tuple[int, str, bool], float]:
    """Seconds by (tokens, attention, with the cache)."""
    keys = ("new_tokens", "implementation", "kv_cache")
    return {tuple(row["point"][key] for key in keys): row["result"]["seconds"] for row in rows}


def by_the_clock(rows: list[Row]) -> str:
    """What the cache saves of whole generations; "" without them."""
    seconds = by_way(rows)
    said: dict[int, list[str]] = {}
    for (new, name, cached), took in sorted(seconds.items()):
        if cached and (new, name, False) in seconds:
            said.setdefault(new, []).append(f"{seconds[new, name, False] / took:.1f}x with {name}")
    return listed("{:,} tokens {}", [(new, " and ".join(each)) for new, each in said.items()], "; ")


def as_issued(rows: list[Row], steps: Steps) -> str | None:
    """How whole generations without the cache compare with the sum of their steps as the host issues them,
    and how often each was run."""
    said = []
    for row in rows:
        new, which = row["point"]["new_tokens"], row["point"]["implementation"]
        alike = None if row["point"]["kv_cache"] else integrated(steps.eager.get(which, {}), new)
        if alike:
            said.append((row["result"]["seconds"] / alike, new, which, row["result"].get("n", 1)))
    if not said:
        return None
    each = listed("{:.2f}x at {:,} tokens with {} (n = {})", said)
    cold = "; with n = 1 it is a first, cold run, and what the cache saves may be overstated by as much"
    alone = any(runs == 1 for *_, runs in said)
    return (
        f"Over the sum of their steps as the host issues them, those without the cache take {each}"
        f"{cold if alone else ''}."
    )


@claim(
    18,
    "What a KV cache takes, and how far GQA and MQA shrink it.",
    theirs="""2 x kv_heads x head_dim x bytes a token and layer; 8 to 32x smaller; Llama-2-70B at 4,096
        tokens: 10.5 GB""",
    # Three things are said: the formula (1% for the allocator's rounding), the shrinking as heads are fewer,
    # and a size (5% covers GB as 10^9 and 4,000 tokens for 4,096).
    holds=lambda f: f.off <= 0.01 and f.shrinks and abs(f.eight / 10.5 - 1) <= 0.05,
    partly=lambda f: f.off <= 0.01 or f.shrinks or abs(f.eight / 10.5 - 1) <= 0.05,
    differ=("kv_heads",),
    apart=("model",),
    figure="""smaller by {factors} KV heads of 32; Llama-2-70B {eight:.2f} GB with its 8, {sixty_four:.2f}
        with 64""",
    why="""
        What is allocated is the formula's within {rest:.2%} for {alike} of {shapes} shapes. A model of 32
        heads has a cache smaller by {factors} KV heads. Llama-2-70B's is {eight:.2f} GB with the 8 KV heads
        that it has; 10.5 GB is about that of 64, {sixty_four:.2f} GB.

        Beyond 1% is {beyond}: these are the allocator's blocks, of which one that is not split leaves up to
        1 MiB unused.
        """,
)
def size_of_the_cache(results: Results) -> Figures:
    rows = results.ok("kv_cache", passed="cache_bytes")
    eight, sixty_four = (
        of(rows, model="Llama-2-70B", seq_len=4096, kv_heads=heads)["result"]["allocated_bytes"] / 1e9
        for heads in (8, 64)
    )
    small = [row for row in rows if row["point"]["model"] == "Llama-2-7B"]
    by = {row["point"]["kv_heads"]: row["result"]["allocated_bytes"] for row in small}
    smaller = {heads: by[32] / size for heads, size in by.items() if heads != 32}
    off = [row["result"]["allocated_bytes"] / row["result"]["formula_bytes"] - 1 for row in rows]
    more = [
        (row["point"]["model"], row["point"]["kv_heads"], by * row["result"]["formula_bytes"] / 2**20, by)
        for row, by in zip(rows, off, strict=True)
        if abs(by) > 0.01
    ]
    return Figures(
        rows,
        off=max(map(abs, off)),
        rest=max((abs(by) for by in off if abs(by) <= 0.01), default=0.0),
        alike=len(rows) - len(more),
        shapes=len(rows),
        beyond=listed("{} with {} KV heads ({:.1f} MiB, {:.2%})", more) or None,
        shrinks=all(abs(factor * heads / 32 - 1) <= 0.01 for heads, factor in smaller.items()),
        eight=eight,
        sixty_four=sixty_four,
        factors=listed("{1:.0f}x with {0}", smaller.items(), " and "),
    )


@claim(
    23,
    "The gains of a KV cache and of FlashAttention multiply in generation.",
    theirs="cache on and off x naive and tiled",
    # Multiply: at every length at which each gains by itself (2%), both together are within 10% of the
    # product; in part: at least half of it, and better than either alone.
    holds=lambda f: f.least >= 0.9 and f.most <= 1.1,
    partly=lambda f: f.least >= 0.5 and f.over_either > 1.02,
    differ=("kv_cache", "implementation", "seq_len", "capacity"),  # steps as in claim 17
    apart=("pass", "new_tokens"),
    figure="both over the product: {trend}",
    why="""
        Generating tokens from one (time of the device, integrated from steps), at all lengths at which
        each gains by itself: {gains}. At {longest:,} tokens {name} is worth {tiled:.2f}x without the cache
        and {within:.2f}x with it; by itself a prefill of as many is {prefill:.1f}x faster with {name}, a
        decoding step over them {decode:.1f}x.

        Where one of them gains nothing, no product of gains can be judged: {elsewhere}.

        By the clock, whole generations, both together are {clock}: there the host issues each kernel
        of a step without the cache, and a CUDA graph replays those with it.

        {issued}
        """,
)
def stacking(results: Results) -> Figures:
    rows, steps, longest = both_ways(results)
    whole = generations(results)
    standard, tiled = steps.names
    saved = {n: factors(four, steps.names) for n in steps.lengths if (four := steps.four(n))}
    gaining = {n: each for n, each in saved.items() if min(each["cache"], each["tiled"]) > 1.02}
    if not gaining:
        raise missing("kv_cache", passed="step")
    prefill, decode = (
        steps.per_token((standard, cached))[longest] / steps.per_token((tiled, cached))[longest]
        for cached in (False, True)
    )
    four, ratios = steps.four(longest), [each["stacking"] for each in gaining.values()]
    gain = "{:,} tokens, the cache {:.2f}x, " + tiled + " {:.2f}x, both {:.2f}x"
    parts = [(n, each["cache"], each["tiled"], each["both"]) for n, each in gaining.items()]
    rest = [(each["stacking"], n, each["cache"]) for n, each in saved.items() if n not in gaining]
    return Figures(
        [*rows, *whole],
        least=min(ratios),
        most=max(ratios),
        over_either=min(each["both"] / max(each["cache"], each["tiled"]) for each in gaining.values()),
        trend=listed("{1:.2f} at {0:,} tokens", [(n, each["stacking"]) for n, each in gaining.items()]),
        gains=listed(gain, parts, "; "),
        elsewhere=listed("{:.2f} at {:,} tokens (the cache {:.2f}x)", rest) or None,
        longest=longest,
        name=tiled,
        tiled=saved[longest]["tiled"],
        within=four[standard, True] / four[tiled, True],
        prefill=prefill,
        decode=decode,
        clock=products(whole, steps.names) or None,
        issued=as_issued(whole, steps),
    )


def products(whole: list[Row], names: tuple[str, str]) -> str:
    """Both gains together over their product, of whole generations; "" without them."""
    seconds = by_way(whole)
    said = []
    for new in sorted({new for new, *_ in seconds}):
        four = [seconds.get((new, name, cached)) for name in names for cached in (False, True)]
        if all(four):
            plain, cache, tiled, both = four
            parts = plain / cache, plain / tiled, plain / both
            said.append((parts[2] / parts[0] / parts[1], *parts, new))
    return listed("{:.2f} of the product ({:.1f}x by {:.2f}x, {:.1f}x) at {:,} tokens", said)
