"""Claim 39: how often a softmax reads its row, from results/softmax_passes."""

from __future__ import annotations

from scripts.measure.claims import Figures, Results, claim, listed, missing, ms, name, of


@claim(
    39,
    "The three-pass softmax reads its row three times, the two-pass (online) softmax twice.",
    theirs="3 and 2 reads; one pass is impossible for the softmax alone, possible for attention",
    # Bytes asked of global memory within 5% of 3 and 2 reads at every length; in part: a third fewer.
    holds=lambda f: f.off <= 0.05,
    partly=lambda f: abs(f.saved - 1.5) <= 0.15,
    differ=("implementation",),
    apart=("seq_len",),
    figure="{three:.2f} and {two:.2f} reads",
    why="""
        Counted at the L1, rows of {shortest:,} to {longest:,} scores in fp32. In time the pass less saves
        {said}: a short row's second and third read come from a cache.
        """,
)
def passes(results: Results) -> Figures:
    rows = results.ok("softmax_passes")
    reads = {
        kind: [row["result"]["reads"] for row in rows if name(row) == kind and row["result"].get("counters")]
        for kind in ("three_passes", "two_passes")
    }
    if not all(reads.values()):
        raise missing("softmax_passes")
    three, two = (
        max(of_kind, key=lambda x, n=n: abs(x / n - 1))
        for of_kind, n in zip(reads.values(), (3, 2), strict=True)
    )
    lengths = sorted({row["point"]["seq_len"] for row in rows})
    times = [
        (
            n,
            ms(of(rows, seq_len=n, implementation="three_passes"))
            / ms(of(rows, seq_len=n, implementation="two_passes")),
        )
        for n in lengths
    ]
    return Figures(
        rows,
        three=three,
        two=two,
        off=max(abs(three / 3 - 1), abs(two / 2 - 1)),
        saved=three / two,
        shortest=lengths[0],
        longest=lengths[-1],
        said=listed("{1:.2f}x at {0:,}", times),
    )
