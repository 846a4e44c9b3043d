"""Claim 39: how often a softmax reads its row, from results/softmax_passes."""

from __future__ import annotations

from collections.abc import Callable

from scripts.measure.claims import Figures, Results, Row, claim, listed, missing, ms, name

NEEDED = {"three_passes": 3, "two_passes": 2}  # reads of a row


@claim(
    39,
    "The three-pass softmax reads its row three times, the two-pass (online) softmax twice.",
    theirs="3 and 2 reads; one pass is impossible for the softmax alone, possible for attention",
    # Within 5% of 3 and 2 reads at every length, by what the kernels load, which they are written for, and by
    # what comes from DRAM, which a cache can spare; in part: from DRAM at the longest row.
    holds=lambda f: f.off <= 0.05 and f.off_dram <= 0.05,
    partly=lambda f: f.off_longest <= 0.05,
    differ=("implementation",),
    apart=("seq_len",),
    figure="""{long_three:.2f} and {long_two:.2f} reads from DRAM at N = {longest:,}, {short_three:.2f} and
        {short_two:.2f} at {shortest:,}""",
    why="""
        The kernels are ours, written with three and two loads of each score, so that the {three:.2f} and
        {two:.2f} reads counted at the L1 could hardly be others. From DRAM come {from_dram}: a short row's
        second and third read come from a cache. In fp32 the two-pass kernel is {said} as
        fast as the other.
        """,
)
def passes(results: Results) -> Figures:
    rows = [row for row in results.ok("softmax_passes") if name(row) in NEEDED]
    counted = {(row["point"]["seq_len"], name(row)): row for row in rows if row["result"].get("counters")}
    lengths = sorted({n for n, _ in counted if all((n, kind) in counted for kind in NEEDED)})
    if not lengths:
        raise missing("softmax_passes")

    def of_both(read: Callable[[Row], float]) -> dict[int, tuple[float, float]]:
        return {n: tuple(read(counted[n, kind]) for kind in NEEDED) for n in lengths}

    loads, dram, times = of_both(lambda row: row["result"]["reads"]), of_both(from_dram), of_both(ms)
    shortest, longest = lengths[0], lengths[-1]
    three, two = max(loads.values(), key=off)
    return Figures(
        rows,
        three=three,
        two=two,
        off=max(map(off, loads.values())),
        off_dram=max(map(off, dram.values())),
        off_longest=off(dram[longest]),
        long_three=dram[longest][0],
        long_two=dram[longest][1],
        short_three=dram[shortest][0],
        short_two=dram[shortest][1],
        shortest=shortest,
        longest=longest,
        from_dram=listed("{1:.2f} and {2:.2f} at {0:,}", [(n, *both) for n, both in dram.items()]),
        said=listed("{1:.2f}x at {0:,}", [(n, slow / fast) for n, (slow, fast) in times.items()]),
    )


def off(reads: tuple[float, float]) -> float:
    """How far these are from what each kernel needs, as a share of it."""
    return max(abs(read / needed - 1) for read, needed in zip(reads, NEEDED.values(), strict=True))


def from_dram(row: Row) -> float:
    """How often DRAM gave the rows, whose scores have four bytes."""
    point = row["point"]
    return row["result"]["counters"]["dram_read_bytes"] / (4 * point["seq_len"] * point["rows"])
