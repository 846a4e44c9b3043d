"""Claim 38: a KV cache of 8 and 4 bits, from results/kv_cache_kinds."""

from __future__ import annotations

from collections.abc import Callable

from scripts.measure.claims import Figures, Results, Row, claim, listed, missing, ms, name, of

STUDY = "kv_cache_kinds"
KINDS = ("auto", "int8", "int4")  # auto: 16 bits
READER = "triton"  # our kernel, which reads the numbers as they are stored
Shapes = dict[tuple[int, int], tuple[float, ...]]


@claim(
    38,
    "int8 and int4 halve and quarter a KV cache, which takes a kernel of one's own.",
    theirs="a quantised KV cache as a reason for a custom kernel",
    # The bytes with their scales (5% and 10% over a half and a quarter), a loss within 1%, attention faster
    # than over 16 bits in every shape, the whole step behind the longest prompt for each number of rows, in
    # one run, and no such gain without a kernel that reads the stored numbers. In part: the bytes.
    holds=lambda f: (
        (f.int8 <= 0.525 and f.int4 <= 0.275 and f.loss <= 0.01)
        and (f.attention > 1 and f.longest > 1 and f.one_run and f.needed)
    ),
    partly=lambda f: f.int8 <= 0.525 and f.int4 <= 0.275,
    differ=("cache", "implementation", "run"),
    apart=("pass", "batch", "prompt", "kv_len"),
    figure="{int8:.2f} and {int4:.2f} of the bytes; attention {range8} and {range4}, steps {steps} as fast",
    why="""
        With its scales int8 takes {int8:.3f} of the bytes of 16 bits, int4 {int4:.3f}. Attention of one query
        a row by our kernel, which reads the numbers as they are stored, over itself on 16 bits: {shapes}.
        Whole steps of gpt2 over those with 16 bits: {whole}; {slower} of {every} are slower. The loss of
        held-out bytes changes by {loss:.2%} at most, that of one small model (4 layers, a context of 128,
        {trained} steps, one seed).

        The steps with 16 bits are of another run and other code{other_run}: whether whole steps gain is not
        decided.

        Not tested{untested}: attention that dequantises such a cache and calls SDPA, so whether it takes a
        kernel of one's own.
        """,
)
def quantised(results: Results) -> Figures:
    read, texts, steps = (
        results.ok(STUDY, passed=passed, cache=KINDS, block=None)
        for passed in ("attention", "loss", "generate")
    )
    ours = [row for row in read if name(row) == READER]
    attention = faster(ours, ("batch", "kv_len"), ms)
    whole = faster(steps, ("batch", "prompt"), lambda row: 1 / row["result"]["tokens_per_s"])
    longest = max(prompt for _, prompt in whole)
    held, nats = (
        {kind: of(rows, cache=kind)["result"][key] for kind in KINDS}
        for rows, key in ((ours, "bytes_per_token"), (texts, "nats"))
    )
    each8, each4 = ([pair[i] for pair in attention.values()] for i in (0, 1))
    every = [factor for pair in whole.values() for factor in pair]
    needed = takes_a_kernel(read)
    one_run = len({row.get("run_id") for row in steps}) == 1
    return Figures(
        [*read, *texts, *steps],
        int8=held["int8"] / held["auto"],
        int4=held["int4"] / held["auto"],
        attention=min(each8 + each4),
        longest=min(factor for (_, prompt), pair in whole.items() if prompt == longest for factor in pair),
        one_run=one_run,
        needed=needed,
        loss=max(abs(x / nats["auto"] - 1) for x in nats.values()),
        trained=texts[0]["point"]["steps"],
        range8=between(each8),
        range4=between(each4),
        steps=between(every),
        shapes=said(attention),
        whole=said(whole),
        slower=sum(factor < 1 for factor in every),
        every=len(every),
        other_run=None if one_run else "",
        untested="" if needed is None else None,
    )


def faster(rows: list[Row], shape: tuple[str, str], time: Callable[[Row], float]) -> Shapes:
    """How many times as fast as 16 bits int8 and int4 are, by shape: rows of a batch, and tokens. Raises
    NotMeasured where a shape has not all three."""
    times = {(*(row["point"][key] for key in shape), row["point"]["cache"]): time(row) for row in rows}
    found = {}
    for batch, tokens in dict.fromkeys(where[:2] for where in times):
        for kind in KINDS:
            if (batch, tokens, kind) not in times:
                raise missing(STUDY, cache=kind, **dict(zip(shape, (batch, tokens), strict=True)))
        plain, *quantised = (times[batch, tokens, kind] for kind in KINDS)
        found[batch, tokens] = tuple(plain / took for took in quantised)
    return found


def takes_a_kernel(rows: list[Row]) -> bool | None:
    """Whether what reads int8 and int4 by other means than our kernel is nowhere faster than that is on 16
    bits; None where nothing else reads them."""
    plain = {
        (row["point"]["batch"], row["point"]["kv_len"]): ms(row)
        for row in rows
        if name(row) == READER and row["point"]["cache"] == "auto"
    }
    others = [row for row in rows if name(row) != READER and row["point"]["cache"] != "auto"]
    slower = [ms(row) >= plain[row["point"]["batch"], row["point"]["kv_len"]] for row in others]
    return all(slower) if slower else None


def said(shapes: Shapes) -> str:
    each = [(batch, tokens, *factors) for (batch, tokens), factors in shapes.items()]
    return listed("{} x {:,} tokens {:.2f}x with int8 and {:.2f}x with int4", each, "; ")


def between(factors: list[float]) -> str:
    return f"{min(factors):.2f} to {max(factors):.2f}x"
