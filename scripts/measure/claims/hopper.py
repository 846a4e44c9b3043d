"""Claim 9: FlashAttention-3 and 4 beside FlashAttention-2 on Hopper, from results/attention_speed (before
that is measured results/attention) and results/hopper."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from scripts.measure.claims import Figures, NotMeasured, Results, Row, claim, listed, missing, ms, name, study
from scripts.measure.claims.ladder import first_measured, share, tflops
from scripts.measure.rows import key_of

LONG = 1024  # tokens; shorter sequences are told apart
Pair = tuple[Row, Row]  # what is compared with, and what is compared


@claim(
    9,
    "FlashAttention-3 doubles 2 on Hopper.",
    theirs="""fp16 about 370 -> 740 TFLOP/s (75% of the peak, against 35%); fp8 about 1,200; the Hadamard
        transform makes fp8's error 2.6x smaller""",
    # "Doubles" at every shape from N = 1k on, 75% of the peak, and 1,200 TFLOP/s in fp8: never more than in
    # part until that has rows. In part: faster at all of these shapes, and twice as fast at one.
    holds=lambda f: f.least >= 2 and f.used >= 0.75 and f.fp8,
    partly=lambda f: f.least > 1 and f.most >= 2,
    differ=("implementation",),
    apart=("study", "head_dim", "dtype", "seq_len", "batch", "kv_heads", "causal", "run"),
    figure="FlashAttention-{version} over 2, N >= 1k: {by_dim}; {used:.0%} of the peak",
    why="""
        FlashAttention-{version}{stands_in} over 2, both of the flash-attn libraries, forward in 16 bits, all
        {shapes} shapes without a window that both have from N = 1,024 on: {by_dim}.

        At shorter N it is {short}.

        At the shape where it is fastest by head dim: {said}; it reaches {used:.0%} of the peak. In fp8
        `cuda_fp8` {fp8_said}; [30](#claim-30) has its error.

        `cuda_fa3`, ours by 3's methods, over another build of 2, PyTorch's `sdpa_flash`, in one process
        (forward, bf16, N = 1k to 16k): {ours}.

        With fewer KV heads than heads: {grouped}.
        """,
)
def third_generation(results: Results) -> Figures:
    """FlashAttention-3, or 4 where 3 is not measured, over 2: at every shape in 16 bits that both have."""
    wanted = {"passed": "forward", "dtype": ("bfloat16", "float16"), "features": ""}
    wanted |= {"implementation": ("flash3", "flash4")}
    rows = first_measured(results, ("attention_speed", wanted), ("attention", wanted))
    newer, of_study = min(map(name, rows)), study(rows[0])
    older = results.ok(of_study, **wanted | {"implementation": "flash2"})
    every = paired(older, [row for row in rows if name(row) == newer and not is_grouped(row)])
    pairs = [pair for pair in every if tokens(pair) >= LONG]
    if not pairs:
        raise missing(of_study, implementation="flash2")
    short = [faster(pair) for pair in every if tokens(pair) < LONG]
    fastest = {dim: max(mine, key=lambda pair: tflops(pair[1])) for dim, mine in by(head_dim, pairs).items()}
    ours = our_third(results)
    squares = [pair for pair in ours if not is_grouped(pair[1])]
    try:
        fp8 = [max(results.ok("attention", implementation="cuda_fp8", passed="forward"), key=tflops)]
    except NotMeasured:
        fp8 = []
    said = [(dim, tflops(old), tflops(new)) for dim, (old, new) in fastest.items()]
    factors = [*map(faster, pairs)]
    return Figures(
        [row for pair in every + ours for row in pair] + fp8,
        least=min(factors),
        most=max(factors),
        shapes=len(pairs),
        by_dim=spans("{1} at D = {0}", by(head_dim, pairs)),
        short=span(short) if short else None,
        fp8=any(tflops(row) >= 1200 for row in fp8),
        fp8_said=f"reaches {tflops(fp8[0]):,.0f} TFLOP/s" if fp8 else "has no rows of its speed yet",
        used=max(share(new) for _, new in pairs),
        version=newer[-1],
        stands_in="" if newer == "flash3" else ", in the place of 3, which was not measured,",
        said=listed("D = {}: {:.0f} -> {:.0f} TFLOP/s", said, "; "),
        ours=spans("{1} at D = {0}", by(head_dim, squares)) or None,
        grouped=spans("{1} with {0}", by(heads, [pair for pair in ours if is_grouped(pair[1])])) or None,
    )


def our_third(results: Results) -> list[Pair]:
    """cuda_fa3 beside PyTorch's FlashAttention-2, without windows and documents; none where not measured."""
    wanted = {"passed": "forward", "features": ""}
    try:
        beside = results.ok("hopper", implementation="sdpa_flash", **wanted)
        return paired(beside, results.ok("hopper", implementation="cuda_fa3", **wanted))
    except NotMeasured:
        return []


def paired(older: Sequence[Row], newer: Sequence[Row]) -> list[Pair]:
    """By shape; the newest row of each, without what the other has not in the same run."""
    old, new = ({key_of(row["point"] | {"implementation": ""}): row for row in of} for of in (older, newer))
    both = [(old[shape], row) for shape, row in new.items() if shape in old]
    return [pair for pair in both if pair[0].get("run_id") == pair[1].get("run_id")]


def faster(pair: Pair) -> float:
    return ms(pair[0]) / ms(pair[1])


def tokens(pair: Pair) -> int:
    return pair[1]["point"]["seq_len"]


def head_dim(pair: Pair) -> int:
    return pair[1]["point"]["head_dim"]


def is_grouped(row: Row) -> bool:
    point = row["point"]
    return point.get("kv_heads", point.get("heads")) != point.get("heads")


def heads(pair: Pair) -> str:
    point = pair[1]["point"]
    return f"{point['heads']} heads, {point['kv_heads']} of K and V, D = {point['head_dim']}"


def by(what: Callable[[Pair], int | str], pairs: Sequence[Pair]) -> dict[int | str, list[Pair]]:
    found: dict[int | str, list[Pair]] = {}
    for pair in sorted(pairs, key=what):
        found.setdefault(what(pair), []).append(pair)
    return found


def spans(template: str, found: dict[int | str, list[Pair]]) -> str:
    return listed(template, [(of, span([*map(faster, pairs)])) for of, pairs in found.items()])


def span(factors: Sequence[float]) -> str:
    """In a sentence."""
    if len(factors) == 1:
        return f"{factors[0]:.2f}x (one shape)"
    return f"{min(factors):.2f}x to {max(factors):.2f}x"
