"""Claims 17, 18, 23 and 38: what a KV cache saves and takes, from results/kv_cache and kv_cache_kinds."""

from __future__ import annotations

from scripts.measure.claims import Figures, NotMeasured, Results, Row, claim, listed, missing, of
from scripts.measure.report.steps import Steps, exponent, factors, halves


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
        What is allocated is the formula's within {off:.2%}, for every shape. A model of 32 heads has a
        cache smaller by {factors} KV heads. Llama-2-70B's is {eight:.2f} GB with the 8 KV heads that it
        has; 10.5 GB is about that of 64, {sixty_four:.2f} GB.
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
    return Figures(
        rows,
        off=max(abs(r["result"]["allocated_bytes"] / r["result"]["formula_bytes"] - 1) for r in rows),
        shrinks=all(abs(factor * heads / 32 - 1) <= 0.01 for heads, factor in smaller.items()),
        eight=eight,
        sixty_four=sixty_four,
        factors=listed("{1:.0f}x with {0}", smaller.items(), " and "),
    )


@claim(
    23,
    "The gains of a KV cache and of FlashAttention multiply in generation.",
    theirs="cache on and off x naive and tiled",
    # Multiplies: both together within 10% of the product; in part: half of it, and better than either alone.
    holds=lambda f: 0.9 <= f.stacking <= 1.1,
    partly=lambda f: f.stacking >= 0.5 and f.both > 1.02 * max(f.cache, f.tiled),
    differ=("kv_cache", "implementation", "seq_len", "capacity"),  # steps as in claim 17
    apart=("pass", "new_tokens"),
    figure="cache {cache:.1f}x, tiled {tiled:.1f}x, both {both:.1f}x",
    why="""
        Generating {longest:,} tokens from one (time of the device, integrated from steps), the cache saves
        {cache:.1f}x, {name} {tiled:.1f}x and both {both:.1f}x, {stacking:.2f} of the product: {name} is
        worth {tiled:.2f}x without the cache and {within:.2f}x with it. By itself a prefill of {longest:,}
        tokens is {prefill:.1f}x faster with {name}, a decoding step over as many {decode:.1f}x.

        By the clock, whole generations, both together are {clock}: there the host issues each kernel
        of a step without the cache, and a CUDA graph replays those with it.
        """,
)
def stacking(results: Results) -> Figures:
    rows, steps, longest = both_ways(results)
    whole = generations(results)
    four, (standard, tiled) = steps.four(longest), steps.names
    prefill, decode = (
        steps.per_token((standard, cached))[longest] / steps.per_token((tiled, cached))[longest]
        for cached in (False, True)
    )
    within = four[standard, True] / four[tiled, True]
    saved = factors(four, steps.names)
    said = {"longest": longest, "name": tiled, "within": within, "prefill": prefill, "decode": decode}
    clock = products(whole, steps.names)
    return Figures([*rows, *whole], **said, **saved, clock=clock or None)


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


@claim(
    38,
    "int8 and int4 halve and quarter a KV cache, which takes a kernel of one's own.",
    theirs="a quantised KV cache as a reason for a custom kernel",
    # The bytes with their scales (5% and 10% over a half and a quarter), faster than 16 bits over the longest
    # cache, and a loss within 1%; in part: the bytes.
    holds=lambda f: f.int8 <= 0.525 and f.int4 <= 0.275 and min(f.faster8, f.faster4) > 1 and f.loss <= 0.01,
    partly=lambda f: f.int8 <= 0.525 and f.int4 <= 0.275,
    differ=("cache",),
    apart=("pass",),
    figure="{int8:.2f} and {int4:.2f} of the bytes, {faster8:.2f}x and {faster4:.2f}x the speed",
    why="""
        Attention of one query a row over {tokens:,} tokens of {rows_of} rows, by our kernel, which reads the
        stored numbers: int8 takes {int8:.3f} of the bytes of 16 bits and is {faster8:.2f}x as fast, int4
        {int4:.3f} and {faster4:.2f}x. The loss of held-out text changes by {loss:.2%} at most.
        """,
)
def quantised(results: Results) -> Figures:
    dense = results.ok("kv_cache_kinds", passed="attention", block=None)
    tokens, batch = max((row["point"]["kv_len"], row["point"]["batch"]) for row in dense)
    longest = [row for row in dense if (row["point"]["kv_len"], row["point"]["batch"]) == (tokens, batch)]
    texts = results.ok("kv_cache_kinds", passed="loss")
    held, took = (
        {kind: of(longest, cache=kind)["result"][key] for kind in ("auto", "int8", "int4")}
        for key in ("bytes_per_token", "ms_median")
    )
    nats = {kind: of(texts, cache=kind)["result"]["nats"] for kind in ("auto", "int8", "int4")}
    return Figures(
        [*longest, *texts],
        tokens=tokens,
        rows_of=batch,
        int8=held["int8"] / held["auto"],
        int4=held["int4"] / held["auto"],
        faster8=took["auto"] / took["int8"],
        faster4=took["auto"] / took["int4"],
        loss=max(abs(x / nats["auto"] - 1) for x in nats.values()),
    )
