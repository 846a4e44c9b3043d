"""Claim 37: what attention reaches of its instructions' peak, from results/attention and roofline."""

from __future__ import annotations

from model.costs.gpus import gpu_sheet
from scripts.measure.claims import Figures, Results, Row, claim, listed, of
from scripts.measure.claims.tiles import speed


@claim(
    37,
    "Attention on tensor cores reaches 50 to 70% of the peak.",
    theirs="50-70%",
    # A band, of the peak of the instructions that each uses: all shapes of both are within it. In part where
    # the best shape of each reaches it.
    holds=lambda f: min(f.mma[0], f.wgmma[0]) >= 0.5 and max(f.mma[1], f.wgmma[1]) <= 0.7,
    partly=lambda f: min(f.mma[1], f.wgmma[1]) >= 0.5,
    differ=(),
    apart=("implementation", "pass", "head_dim", "seq_len", "causal"),
    figure="mma.sync {mma[0]:.0%} to {mma[1]:.0%}, wgmma {wgmma[0]:.0%} to {wgmma[1]:.0%}",
    why="""
        Forwards in bf16 with as many heads of keys as of queries, with and without a causal mask.
        `cuda_fa2`, of the {mma_peak:.0f} TFLOP/s that mma.sync gives on this GPU: {fa2}. `cuda_fa3`, of the
        {wgmma_peak:.0f} that the datasheet has for dense bf16, as the rate of wgmma by itself was not
        measured: {fa3}. Of {shapes} shapes {inside} are within 50 to 70%, {below} below and {above} above it.
        """,
)
def of_the_peak(results: Results) -> Figures:
    ceiling = of(results.ok("roofline", implementation="ceiling", passed="tensor_mma"), passed="tensor_mma")
    peaks = {"cuda_fa2": ceiling["result"]["value"]}
    peaks["cuda_fa3"] = gpu_sheet(ceiling["machine"]["gpu"]).bf16_flops / 1e12
    wanted = {"passed": "forward", "dtype": "bfloat16", "features": ""}
    rows = {
        each: [row for row in results.ok("attention", implementation=each, **wanted) if plain(row)]
        for each in peaks
    }
    used = {each: [speed(row) / peaks[each] for row in rows[each]] for each in rows}
    every = [share for shares in used.values() for share in shares]
    return Figures(
        [*rows["cuda_fa2"], *rows["cuda_fa3"], ceiling],
        mma=(min(used["cuda_fa2"]), max(used["cuda_fa2"])),
        wgmma=(min(used["cuda_fa3"]), max(used["cuda_fa3"])),
        mma_peak=peaks["cuda_fa2"],
        wgmma_peak=peaks["cuda_fa3"],
        fa2=by_head_dim(rows["cuda_fa2"], peaks["cuda_fa2"]),
        fa3=by_head_dim(rows["cuda_fa3"], peaks["cuda_fa3"]),
        shapes=len(every),
        inside=sum(0.5 <= share <= 0.7 for share in every),
        below=sum(share < 0.5 for share in every),
        above=sum(share > 0.7 for share in every),
    )


def plain(row: Row) -> bool:
    return row["point"]["kv_heads"] == row["point"]["heads"]


def by_head_dim(rows: list[Row], peak: float) -> str:
    """From the slowest to the fastest shape of each head dim, which are named."""
    found: dict[int, list[Row]] = {}
    for row in sorted(rows, key=speed):
        found.setdefault(row["point"]["head_dim"], []).append(row)
    ends = [(dim, *at(same[0], peak), *at(same[-1], peak)) for dim, same in sorted(found.items())]
    return listed("D = {} {:.0%} ({}) to {:.0%} ({})", ends)


def at(row: Row, peak: float) -> tuple[float, str]:
    mask = "causal" if row["point"]["causal"] else "full"
    return speed(row) / peak, f"N = {row['point']['seq_len']:,}, {mask}"
