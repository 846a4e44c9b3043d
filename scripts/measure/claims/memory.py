"""Claims 1, 2 and 11: what attention by itself allocates, from the study attention_memory. Standard attention
there is the formula in eager PyTorch in 16 bits, `standard`."""

from __future__ import annotations

from scripts.measure.claims import Figures, Results, Row, by_length, claim, listed, missing, name, of

STUDY = "attention_memory"
LEAN = ("sdpa_flash", "cuda_fa2", "triton", "flash4")
CLAIMED_TOTALS = {1024: 5, 4096: 66, 8192: 260}  # MB in all of one head in D = 128, fp32, by N


def near(ours: float, claimed: float) -> bool:
    """A figure within a tenth of the claimed one is that figure."""
    return abs(ours / claimed - 1) <= 0.1


def leanest(rows: list[Row], field: str = "peak_mib") -> Row:
    """The row with the least memory of those that keep no scores. Raises NotMeasured for none."""
    rows = [row for row in rows if name(row) in LEAN]
    if not rows:
        raise missing(STUDY, implementation=LEAN)
    return min(rows, key=lambda row: row["result"][field])


@claim(
    1,
    "Standard attention stores the N x N scores, tiled attention a statistic a row.",
    theirs="""B = 8, H = 32, N = 8192, fp16: 32 GiB against 8 MiB (4,096x). From N = 1k to 16k the one
        grows 1x 4x 16x 64x 256x, the other 1x 2x 4x 8x 16x""",
    # 32 GiB have to be there at least once, and the statistic is one fp32 number a row: 8 MiB.
    holds=lambda f: f.most >= 32 and near(f.kept, 8) and near(f.standard, 256) and near(f.tiled, 16),
    partly=lambda f: f.most >= 32 and near(f.kept, 8),
    differ=("implementation",),
    apart=("batch", "seq_len"),
    figure="{most:.0f} GiB against {kept:.1f} MiB",
    why="""
        At B = 8, H = 32, N = 8192 in fp16 the scores are {scores:.0f} GiB; standard attention allocates
        {most:.0f} GiB beyond its output, {matrices:.1f} matrices at a time, and cuda_fa2 {kept:.1f} MiB.
        From N = 1k to 16k what is beyond the output grows {standard:.0f}x and {tiled:.0f}x (batch 1, 12
        heads).
        """,
)
def scores_and_statistics(results: Results) -> Figures:
    """Stored: what is allocated beyond the output."""
    big = results.ok(STUDY, passed="forward", batch=8, heads=32, seq_len=8192)
    pair = [of(big, implementation=each) for each in ("standard", "cuda_fa2")]
    standard, tiled = (row["result"] for row in pair)
    grown, used = {}, [*pair]
    for each in ("standard", "cuda_fa2"):
        rows = results.ok(STUDY, passed="forward", batch=1, heads=12, implementation=each)
        ends = [of(rows, seq_len=n) for n in (1024, 16384)]
        small, large = (row["result"]["extra_mib"] for row in ends)
        grown[each], used = large / small, used + ends
    return Figures(
        used,
        scores=standard["scores_mib"] / 1024,
        most=standard["extra_mib"] / 1024,
        matrices=standard["extra_mib"] / standard["scores_mib"],
        kept=tiled["extra_mib"],
        standard=grown["standard"],
        tiled=grown["cuda_fa2"],
    )


@claim(
    2,
    "Attention's extra memory falls about 20x at N = 4k.",
    theirs="1.5x at N = 128, 2.3x at 256, 3.1x at 512, 5.6x at 1k, 10.5x at 2k, 20.3x at 4k",
    source="paper",
    # Memory in use is what one sees, so the inputs count on both sides: the smaller factor.
    holds=lambda f: f.whole >= 20.3,
    partly=lambda f: f.whole > 1,
    differ=("implementation",),
    apart=("seq_len",),
    figure="{whole:.1f}x at N = 4k",
    why="""
        Forward and backward (B = 16, H = 8, D = 64, fp16), standard over FlashAttention-2 of PyTorch: what a
        call allocates, {factors}; with the inputs on both sides, {wholes}. Over the leanest, {lean}, that is
        {leanest:.1f}x at N = 4,096.
        """,
)
def twenty_times_less(results: Results) -> Figures:
    rows = results.ok(STUDY, passed="both", batch=16, heads=8)
    pairs: dict[int, list[Row]] = {}
    for n in sorted({row["point"]["seq_len"] for row in rows}):
        # theirs is FlashAttention's, whose backward sums dQ in fp32: so that of PyTorch counts
        pairs[n] = [of(rows, implementation=which, seq_len=n) for which in ("standard", "sdpa_flash")]
    if 4096 not in pairs:
        raise missing(STUDY, passed="both", batch=16, heads=8, seq_len=4096)
    lean = leanest([row for row in rows if row["point"]["seq_len"] == 4096])
    standard, flash = pairs[4096]
    used = [row for pair in pairs.values() for row in pair] + ([] if lean is flash else [lean])
    factors, whole = ({n: over(*pair, inputs=also) for n, pair in pairs.items()} for also in (False, True))
    said = {"factors": by_length(factors), "wholes": by_length(whole), "lean": name(lean)}
    return Figures(used, whole=whole[4096], leanest=over(standard, lean, inputs=True), **said)


def over(more: Row, less: Row, inputs: bool = False) -> float:
    """How many times the memory; inputs: with those on both sides."""
    beside = more["result"]["inputs_mib"] if inputs else 0
    return (more["result"]["peak_mib"] + beside) / (less["result"]["peak_mib"] + beside)


@claim(
    11,
    "What a head's matrix of scores takes in naive attention, and all of it together (D = 128).",
    theirs="N = 1024: 4 MB, ~5 MB; 4096: 64 MB, ~66 MB; 8192: 256 MB, ~260 MB; 16384: 1 GB, out of memory",
    # The matrix, N^2 x 4 bytes, is theirs whoever computes it; the totals and the end are what can be wrong.
    # In part with one of the totals.
    holds=lambda f: f.right == 3 and not f.fits,
    partly=lambda f: f.right > 0,
    differ=("implementation", "run"),  # bytes, which do not vary between runs
    apart=("seq_len",),
    figure="{totals}",
    why="""
        A head's scores are N^2 x 4 bytes, {scores:,.0f} MiB at 8,192, as claimed. With q, k, v and out
        ({operands:,.0f} MiB there): {said}. Standard attention holds {matrices:.1f} matrices at its peak;
        {right} of the 3 totals are within a tenth of what some kernel takes.
        One head at 16,384 {end}: 1 GiB of scores fills no 80 GB card.
        """,
)
def one_head(results: Results) -> Figures:
    rows = results.rows(STUDY, passed="forward", heads=1, head_dim=128)
    totals: dict[str, dict[int, float]] = {}
    for row in rows:
        if row["result"]["status"] == "ok":
            total = row["result"]["peak_mib"] + row["result"]["inputs_mib"]
            totals.setdefault(name(row), {})[row["point"]["seq_len"]] = total
    at = totals.get("standard", {})
    if not CLAIMED_TOTALS.keys() <= at.keys():
        raise missing(STUDY, passed="forward", heads=1, head_dim=128)
    big = of(rows, implementation="standard", seq_len=8192)["result"]
    right = [any(near(of_n.get(n, 0), mb) for of_n in totals.values()) for n, mb in CLAIMED_TOTALS.items()]
    each = [(who, listed("{1:,.0f} MiB at {0:,}", sorted(of_n.items()))) for who, of_n in totals.items()]
    return Figures(
        rows,
        totals=listed("{1:,.0f} MiB at {0:,}", [(n, at[n]) for n in CLAIMED_TOTALS]),
        right=sum(right),
        fits=16384 in at,
        end="fits here" if 16384 in at else "ran out of memory here",
        scores=big["scores_mib"],
        operands=big["inputs_mib"] + big["outputs_mib"],
        matrices=big["extra_mib"] / big["scores_mib"],
        said=listed("{} {}", each, "; "),
    )
