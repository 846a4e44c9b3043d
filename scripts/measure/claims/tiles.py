"""Claim 29, and what other claims read of results/roofline: counters, and the rows of fa2's tiles."""

from __future__ import annotations

import itertools
from typing import Any

from scripts.measure.claims import Figures, NotMeasured, Results, Row, claim, command_of


def counter(row: Row, *fields: str) -> float | None:
    """The sum of what ncu counted; None where it did not."""
    counts = row["result"].get("counters") or {}
    return sum(counts[field] for field in fields) if all(field in counts for field in fields) else None


def tile_rows(results: Results) -> list[Row]:
    try:
        return [row for row in results.ok("roofline", implementation="cuda_fa2") if "tile" in row["point"]]
    except NotMeasured:
        return []


def whole_tiles(results: Results) -> list[Row]:
    """Those that spill no registers."""
    return [row for row in tile_rows(results) if not usage(row)["spilled_bytes"]]


def usage(row: Row) -> dict[str, Any]:
    """Registers, spills, shared memory and occupancy of the one kernel of a row."""
    (use,) = row["result"]["usage"].values()
    return use


@claim(
    29,
    "The size of a tile trades trips to shared memory against occupancy.",
    theirs="Br = 128, Bc = 64 typical of an A100, about 96 KB",
    # A trade-off: one tile gains more by its resident threads than its trips cost, another more by fewer
    # trips than its fewer threads cost, each a tenth at least; and the best tile is at neither end. In part
    # where both are so and an end is best all the same.
    holds=lambda f: min(f.by_threads, f.by_trips) >= 1.1 and f.inside,
    partly=lambda f: min(f.by_threads, f.by_trips) >= 1.1,
    # A thread's share of a tile is another where the warps are others: tiles of as many warps are compared.
    differ=("tile.br", "tile.bc", "tile.blocks"),
    apart=("tile.warps",),
    figure="{best} is best, {spread:.2f}x the worst of as many warps",
    why="""
        Of {tiles} tiles of fa2 with {warps} warps that spill no registers ({spilled} of all do, which says
        nothing of tiles) the fastest is {fastest}, the slowest {slowest}. The one with the fewest bytes from
        and to shared memory, {leanest}, moves {leanest_trips:.1f} GB and reaches {leanest_speed:.0%} of the
        fastest; that with most threads, {fullest}, moves {fullest_trips:.1f} GB and reaches
        {fullest_speed:.0%}.

        Of two tiles, one with more threads and more bytes than the other, the one with more gains most where
        {more_threads}, and the one with fewer where {fewer_trips}.

        {others}
        """,
)
def tiles(results: Results) -> Figures:
    command = f"{command_of('roofline')} --tiles"
    every, whole = tile_rows(results), whole_tiles(results)
    if not every:
        raise NotMeasured(f"no rows of tiles: run `{command}`")
    counted = [row for row in distinct(whole) if counter(row, "shared_bytes") is not None]
    if len(counted) < 2:
        raise NotMeasured(f"no two tiles that spill no registers, with counters: run `{command}`")
    most = warps(max(counted, key=speed))
    rows, others = ([row for row in counted if (warps(row) == most) == same] for same in (True, False))
    fastest, slowest, leanest = max(rows, key=speed), min(rows, key=speed), min(rows, key=trips)
    fullest = max(rows, key=lambda row: (threads(row), speed(row)))
    ends = [pick(others, key=speed) for pick in (max, min)] if len(others) > 1 else []
    pairs = [
        (lean, full)
        for lean, full in itertools.permutations(rows, 2)
        if trips(lean) < trips(full) and threads(lean) < threads(full)
    ]
    more_threads = max(pairs, default=None, key=lambda pair: speed(pair[1]) / speed(pair[0]))
    fewer_trips = max(pairs, default=None, key=lambda pair: speed(pair[0]) / speed(pair[1]))
    return Figures(
        counted,
        command=command,
        warps=most,
        others=f"With {warps(ends[0])} warps {faster(*ends)}." if ends else None,
        tiles=len(rows),
        spilled=len(every) - len(whole),
        best=size(fastest),
        spread=speed(fastest) / speed(slowest),
        inside=fastest not in (leanest, fullest),
        by_threads=speed(more_threads[1]) / speed(more_threads[0]) if pairs else 0.0,
        by_trips=speed(fewer_trips[0]) / speed(fewer_trips[1]) if pairs else 0.0,
        more_threads=faster(*reversed(more_threads)) if pairs else None,
        fewer_trips=faster(*fewer_trips) if pairs else None,
        fastest=said(fastest),
        slowest=said(slowest),
        leanest=said(leanest),
        leanest_trips=trips(leanest),
        leanest_speed=speed(leanest) / speed(fastest),
        fullest=said(fullest),
        fullest_trips=trips(fullest),
        fullest_speed=speed(fullest) / speed(fastest),
    )


def distinct(rows: list[Row]) -> list[Row]:
    """One of those that are a tile in as many resident blocks, whatever number was asked of the compiler."""
    found: dict[tuple[Any, ...], Row] = {}
    for row in rows:
        tile = row["point"]["tile"]
        found.setdefault((tile["br"], tile["bc"], tile["warps"], threads(row)), row)
    return list(found.values())


def speed(row: Row) -> float:
    return row["result"]["tflops"]


def warps(row: Row) -> int:
    return row["point"]["tile"]["warps"]


def trips(row: Row) -> float:
    """GB from and to shared memory."""
    return counter(row, "shared_bytes") / 1e9


def threads(row: Row) -> float:
    """Those that are resident, per cent of what a multiprocessor holds at most."""
    return usage(row)["occupancy_percent"]


def size(row: Row) -> str:
    return f"{row['point']['tile']['br']} x {row['point']['tile']['bc']}"


def said(row: Row) -> str:
    return f"{size(row)} ({usage(row)['shared_bytes'] / 1024:.0f} KiB, {threads(row):.0f}% of the threads)"


def faster(one: Row, other: Row) -> str:
    return f"{size(one)} is {speed(one) / speed(other):.2f}x as fast as {size(other)}"
