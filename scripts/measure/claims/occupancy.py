"""Claims 32 to 36: where a layer's time goes, what bounds the threads at work, what a block holds and moves;
from results/prefill_decode, roofline and backward_recompute."""

from __future__ import annotations

from typing import Any

from scripts.measure.claims import Figures, Results, Row, claim, listed, missing, name
from scripts.measure.claims.intensity import layer_of
from scripts.measure.claims.tiles import counter, size, speed, tile_rows, usage
from scripts.measure.report.prefill_decode_report import BERT, layer_share, parts_of

REGISTERS, SHARED_BYTES, MOST_WARPS = 65536, 228 << 10, 64  # of a multiprocessor, sm_90
SAID = {"cuda_tiled": "cuda_tiled (FMA units)"}  # in these rows; as it comes it takes tensor cores


def blocks_by_registers(used: dict[str, Any]) -> int:
    """A warp gets its registers eight a thread at a time."""
    return REGISTERS // (-(-used["registers"] // 8) * 8 * used["threads"])


def stage(results: Results, implementation: str) -> dict[int, Row]:
    """The roofline's rows of a stage in its own tile, by N."""
    found = results.ok("roofline", implementation=implementation)
    rows = [row for row in found if "tile" not in row["point"] and "usage" in row["result"]]
    if not rows:
        raise missing("roofline", implementation=implementation)
    return {row["point"]["seq_len"]: row for row in sorted(rows, key=lambda row: row["point"]["seq_len"])}


@claim(
    32,
    "What is not a matrix product takes much of a Transformer's time and almost none of its FLOPs.",
    theirs="a V100, forward of a layer: 40% of the time, 0.02% of the FLOPs (elsewhere: products over 99.8%)",
    # Their 40% of the time; of the FLOPs what both figures allow. In part: a quarter of the time.
    holds=lambda f: f.time >= 0.4 and f.flops <= 0.002,
    partly=lambda f: f.time >= 0.25 and f.flops <= 0.01,
    differ=(),
    figure="{time:.0%} of the time, {flops:.2%} of the FLOPs",
    why="""
        A layer of BERT-large's shape with standard attention, 8 rows of 512 tokens, its parts timed one by
        one: softmax alone takes {softmax:.0%} of the time. With a fused attention in the place of its three
        parts what is no product takes {fused}. Ours counts 5 FLOPs for a score's softmax; their two figures
        differ by a factor of ten.
        """,
)
def not_products(results: Results) -> Figures:
    row = layer_of(results, model=BERT)
    parts = parts_of(row)
    flops, time = layer_share(parts, "standard")
    fused = [
        (1 - layer_share(parts, part)[1], part.removeprefix("attention, "))
        for part, found in parts.items()
        if found["kind"] == "fused"
    ]
    each = {
        part: found["times"] * found["ms_median"] for part, found in parts.items() if found["kind"] != "fused"
    }
    return Figures(
        [row],
        time=1 - time,
        flops=1 - flops,
        softmax=each["softmax"] / sum(each.values()),
        fused=listed("{:.0%} ({})", fused, " or ") or None,
    )


@claim(
    33,
    "A row of scores in shared memory limits the blocks that a multiprocessor holds.",
    theirs="32 KB at N = 8192 limits occupancy",
    # Limits: at N = 8192 fewer blocks than at the shortest N, by the compiler and by the counters; in part
    # where that takes longer rows.
    holds=lambda f: f.blocks[8192] < f.most and f.counted[8192] < 0.9 * max(f.counted.values()),
    partly=lambda f: min(f.blocks.values()) < f.most,
    differ=("seq_len",),
    figure="{at_8192} of {most} blocks at N = 8,192",
    why="""
        The row-wise stage, a block a query: {said}. A row of fp32 scores takes 4 N bytes of shared memory;
        while that is little, the limits are the threads of a multiprocessor ({by_threads} blocks) and its
        registers ({by_registers} blocks).
        """,
)
def row_of_scores(results: Results) -> Figures:
    rows = stage(results, "cuda_rowwise")
    if 8192 not in rows or len(rows) < 2:
        raise missing("roofline", implementation="cuda_rowwise", seq_len=8192)
    blocks = {n: usage(row)["blocks_per_sm"] for n, row in rows.items()}
    counted = {n: counter(row, "occupancy_percent") or 0.0 for n, row in rows.items()}
    each = [(blocks[n], counted[n], n) for n in rows]
    used = usage(rows[min(rows)])
    return Figures(
        rows.values(),
        blocks=blocks,
        counted=counted,
        most=max(blocks.values()),
        at_8192=blocks[8192],
        by_threads=32 * MOST_WARPS // used["threads"],
        by_registers=blocks_by_registers(used),
        said=listed("{} blocks and {:.0f}% of the warps at N = {:,}", each),
    )


@claim(
    34,
    "Registers bound the tiled stage's occupancy.",
    theirs="160 a thread: 409 threads, 12 warps, 18.75% of the warps",
    # Bound: by registers fewer blocks fit than by anything else, and no more than their share of the warps.
    # In part where shared memory allows no more either.
    holds=lambda f: f.by_registers < f.by_shared and f.occupancy <= 18.75,
    partly=lambda f: f.by_registers <= f.by_shared and f.occupancy <= 18.75,
    differ=("tile.blocks",),
    apart=("implementation", "tile.br", "tile.bc", "tile.warps"),
    figure="{registers} registers, {occupancy:.1f}% of the warps",
    why="""
        `cuda_tiled` (FMA units, fp32) has {registers} registers a thread: {by_registers} blocks of {threads}
        threads, {counted:.1f}% of the warps by the counters at N = {longest:,}. Its tiles take {shared:.0f}
        KiB of shared memory, which leaves room for {by_shared}.

        Whether more occupancy is faster is not decided. Compiled for more resident blocks, tiles of fa2 have
        this multiple of their speed: {pairs}. The registers that this leaves a thread, and what it spills,
        are part of it.
        """,
)
def registers(results: Results) -> Figures:
    rows = stage(results, "cuda_tiled")
    longest, row = max(rows.items())
    used, warps = usage(row), usage(row)["threads"] // 32
    by_registers = blocks_by_registers(used)
    pairs = of_more_blocks(results)
    sentence = "{} with {} warps {:.2f}x ({:.1f}% of the warps for {:.1f}%, "
    sentence += "{} registers a thread for {}, {:,} bytes spilled for {:,})"
    return Figures(
        [row, *(row for pair in pairs for row in pair)],
        registers=used["registers"],
        threads=used["threads"],
        by_registers=by_registers,
        by_shared=SHARED_BYTES // (used["shared_bytes"] + 1024),
        occupancy=100 * by_registers * warps / MOST_WARPS,
        counted=counter(row, "occupancy_percent"),
        longest=longest,
        shared=used["shared_bytes"] / 1024,
        pairs=listed(sentence, [beside(*pair) for pair in pairs]) or None,
    )


def of_more_blocks(results: Results) -> list[tuple[Row, Row]]:
    """All pairs of rows of one tile of fa2 in one run whose resident blocks differ: fewer, more."""
    found: dict[tuple[Any, ...], list[Row]] = {}
    for row in tile_rows(results):
        tile = row["point"]["tile"]
        found.setdefault((tile["br"], tile["bc"], tile["warps"], row.get("run_id")), []).append(row)
    pairs = []
    for rows in found.values():
        fewer, more = (pick(rows, key=lambda row: usage(row)["occupancy_percent"]) for pick in (min, max))
        if usage(fewer)["occupancy_percent"] < usage(more)["occupancy_percent"]:
            pairs.append((fewer, more))
    return pairs


def beside(fewer: Row, more: Row) -> tuple[Any, ...]:
    factor, warps = speed(more) / speed(fewer), more["point"]["tile"]["warps"]
    names = ("occupancy_percent", "registers", "spilled_bytes")
    return size(more), warps, factor, *(usage(row)[each] for each in names for row in (more, fewer))


@claim(
    35,
    "Tiled attention moves several times fewer bytes than standard attention.",
    theirs="N = 2048, d = 64, M = 96 KB, one head: O(N d + N^2) against O(N^2 d^2 / M)",
    # Several times: 3, against the formula in 16 bits compiled, too, and at their N; in part against eager.
    holds=lambda f: min(f.compiled, f.at_2048) >= 3,
    partly=lambda f: f.eager >= 3,
    differ=("implementation",),
    apart=("study",),
    figure="{eager:.0f}x eager, {compiled:.0f}x compiled",
    why="""
        Bytes from and to DRAM in a forward, counted, 4 rows of 4,096 tokens, 16 heads of 64, causal: {said}.
        At their N, 2,048, `cuda_tiled` (FMA units) moves {at_2048:.0f} times fewer than the three kernels of
        naive do (32 heads of 128), which write and read what the mask hides, too. Their figures are worked
        out for one head, whose scores an L2 holds, and not measured.
        """,
)
def bytes_moved(results: Results) -> Figures:
    rows = [row for row in results.ok("backward_recompute", kv_len=4096, head_dim=64) if forward_bytes(row)]
    moved = {name(row): forward_bytes(row) for row in rows}
    ours, standard = ("triton", "cuda_fa2", "sdpa_flash"), ("standard", "standard_compiled")
    if not set(standard) <= moved.keys() or not moved.keys() & set(ours):
        raise missing("backward_recompute", kv_len=4096, head_dim=64)
    tiled = max(moved[each] for each in ours if each in moved)
    names = [*standard, *(each for each in ours if each in moved)]
    short = [stage(results, each).get(2048) for each in ("cuda_naive", "cuda_tiled")]
    if None in short:
        raise missing("roofline", seq_len=2048)
    naive, tiles = (counter(row, "dram_read_bytes", "dram_write_bytes") for row in short)
    return Figures(
        [row for row in rows if name(row) in names] + short,
        at_2048=naive / tiles,
        eager=moved["standard"] / tiled,
        compiled=moved["standard_compiled"] / tiled,
        said=listed("{} {:.2f} GB", [(each, moved[each] / 1e9) for each in names]),
    )


def forward_bytes(row: Row) -> float:
    counts = (row["result"].get("counters") or {}).get("forward") or {}
    return counts.get("dram_read_bytes", 0) + counts.get("dram_write_bytes", 0)


@claim(
    36,
    "What a block holds is thousands of times smaller than a head's scores.",
    theirs="64 KiB (Q, K, V, S of one step) in place of 256 MB a head at N = 8192: 4,096x",
    # Theirs within a factor of two, by the largest of our tiles; in part: by the one in fp32, as theirs is.
    holds=lambda f: f.least >= 2048,
    partly=lambda f: f.fp32 >= 2048,
    differ=(),  # each stage by itself, beside scores of its own precision
    apart=("implementation",),
    figure="{fp32:,.0f}x in fp32, {least:,.0f}x and more in 16 bits",
    why="""
        Shared memory of a block, by the compiler, beside N^2 scores at N = 8,192 in the precision of the
        stage's inputs, which is half as much in 16 bits: {said}.
        """,
)
def payload(results: Results) -> Figures:
    rows = [stage(results, each).get(8192) for each in ("cuda_tiled", "cuda_fa1", "cuda_fa2")]
    if None in rows:
        raise missing("roofline", seq_len=8192)
    held = {name(row): usage(row)["shared_bytes"] for row in rows}
    scores = {name(row): 8192**2 * (4 if row["point"]["dtype"] == "float32" else 2) for row in rows}
    factors = {each: scores[each] / size for each, size in held.items()}
    return Figures(
        rows,
        fp32=factors["cuda_tiled"],
        least=min(factors.values()),
        said=listed(
            "{} {:.0f} KiB, {:,.0f}x",
            [(SAID.get(each, each), size / 1024, factors[each]) for each, size in held.items()],
        ),
    )
