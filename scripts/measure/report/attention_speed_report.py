"""Tables of attention_speed, from its rows."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

from attention import registry
from attention.base import MATMUL_KERNELS
from scripts.measure.instruments.speed_points import HEADS, SHORT, TOKENS, WINDOWS, fused
from scripts.measure.report.attention_report import ours_first
from scripts.measure.report.figures import thousands
from scripts.measure.report.tables import Record, cell_of, records, where
from scripts.measure.studies import Row, Table

PASSES = {"forward": "forward", "backward": "backward", "both": "forward + backward"}
ONE, MANY = "one sequence", f"{TOKENS:,} tokens"
MASKS = {True: "causal", False: "full"}


def order(name: str) -> tuple[bool, bool, str]:
    """Standard attention first, then ours, then the libraries."""
    return name != "standard", *ours_first(name)


def pick(rows: Sequence[Row], **wanted: Any) -> dict[str, Record]:
    """Rows whose fields have these values (`passed` is the pass), by implementation; the newest of each."""
    found = {r.implementation: r for r in where(records(rows), **wanted)}
    return {name: found[name] for name in sorted(found, key=order)}


def paper(
    tokens: int, head_dim: int, causal: bool, dtype: str = "bfloat16", features: str = ""
) -> dict[str, Any]:
    """The point of the papers' benchmarks: 16,384 tokens or one sequence, 2,048 wide."""
    return {
        "seq_len": tokens, "head_dim": head_dim, "causal": causal, "dtype": dtype, "features": features,
        "batch": max(1, TOKENS // tokens), "heads": TOKENS // 8 // head_dim,
    }  # fmt: skip


def tflops(r: Record) -> str:
    return f"{r.tflops:#.3g}".rstrip(".")


def ms(r: Record) -> str:
    return f"{r.ms_median:#.3g}".rstrip(".")


def grid(title: str, columns: dict[str, dict[str, Record]], show: Callable[[Record], str]) -> list[Table]:
    """A line an implementation that can do any of it, a column a selection of rows; nothing for no rows."""
    columns = {head: found for head, found in columns.items() if found}
    names = sorted({name for found in columns.values() for name in found}, key=order)
    lines = [[name, *(cell_of(found.get(name), show) for found in columns.values())] for name in names]
    lines = [line for line in lines if any(text not in ("", "-") for text in line[1:])]
    return [Table(title, [["", *columns], *lines])] if lines else []


def lengths(rows: Sequence[Row], least: int = 0) -> list[int]:
    return sorted({n for row in rows if (n := row["point"]["seq_len"]) >= least})


def tables(rows: Sequence[Row]) -> list[Table]:
    """The curves, and by claim."""
    rows, found = records(rows), []
    long = lengths(rows, SHORT)
    for passed, causal in itertools.product(("forward", "backward"), MASKS):
        columns = {thousands(n): pick(rows, passed=passed, **paper(n, 64, causal)) for n in long}
        title = f"TFLOP/s, {passed}, {MASKS[causal]}, D = 64, {HEADS} heads, bf16, {MANY}; N ="
        found += grid(title, columns, tflops)
    small = where(rows, dtype="float32")  # a CPU's
    for passed in PASSES if small else ():
        columns = {thousands(n): pick(small, passed=passed, causal=True, seq_len=n) for n in lengths(small)}
        found += grid(f"ms, {PASSES[passed]}, causal, fp32; N =", columns, ms)
    found += over_standard(rows) + hopper(rows) + masks(rows) + windowed(rows)
    for many, passed in itertools.product((False, True), ("forward", "both")):
        for what, us in MEASURES.items():  # claim 16
            columns = {thousands(n): of for n, of in at_short(rows, passed, many).items()}
            title = f"Claim 16: us, {what}, {PASSES[passed]}, {MANY if many else ONE}, D = 64; N ="
            found += grid(title, columns, lambda r, us=us: f"{us(r):,.1f}")
    wanted = {"batch": 1, "heads": 8, "seq_len": 2048, "dtype": "float16"}
    columns = {PASSES[passed]: pick(rows, passed=passed, **wanted) for passed in ("forward", "both")}
    found += grid("Claim 12: ms, B = 1, H = 8, N = 2048, D = 64, causal, fp16", columns, ms)
    return found + traffic(rows)


def timed(row: Row | None) -> float | None:
    return row["result"]["ms_median"] if row and row["result"]["status"] == "ok" else None


def faster(found: dict[str, Record], than: dict[str, float | None]) -> dict[str, Record]:
    """With how many times as fast they are as something that took so many ms; those that there is a time to
    compare with."""
    known = {name: (r, took) for name, r in found.items() if (took := than.get(name))}
    return {
        name: Record(r, factor=took / r.ms_median) if timed(r) else r for name, (r, took) in known.items()
    }


def over_standard(rows: list[Record]) -> list[Table]:
    """Claim 3, and 8's factor on long sequences."""
    columns = {}
    for n, causal, passed in itertools.product((1024, 2048, 4096, 16384), MASKS, ("forward", "both")):
        found = pick(rows, passed=passed, **paper(n, 64, causal))
        if took := timed(found.get("standard")):
            standard = {"standard": found.pop("standard")}
            columns[f"{thousands(n)} {MASKS[causal]} {passed}"] = standard | faster(
                found, dict.fromkeys(found, took)
            )
    title = "Claims 3 and 8: times as fast as standard attention (its own ms), D = 64, bf16"
    return grid(title, columns, lambda r: f"{r.factor:.1f}x" if "factor" in r else ms(r))


def hopper(rows: list[Record]) -> list[Table]:
    """Claims 8 and 9: FlashAttention-1, 2 and the Hopper libraries, TFLOP/s and of the peak."""
    from model.costs.flops import peak_bf16_flops

    columns = {}
    for (n, d, dtype, passed), causal in itertools.product(
        (
            (2048, 64, "bfloat16", "forward"),
            (2048, 128, "bfloat16", "forward"),
            (16384, 128, "float16", "forward"),
            (16384, 128, "float16", "backward"),
            (16384, 256, "float16", "forward"),
        ),
        MASKS,
    ):
        found = pick(rows, passed=passed, **paper(n, d, causal, dtype))
        head = f"{thousands(n)}, {d} {MASKS[causal]} {passed}"
        columns[head] = {name: r for name, r in found.items() if fused(name)}
    gpu = rows[0].machine["gpu"] if rows else None
    peak = (peak_bf16_flops(gpu) if gpu else None) or 0
    title = "Claims 8 and 9: TFLOP/s, and of the dense 16-bit peak; N, D (bf16 at 2k, fp16 at 16k)"
    return grid(title, columns, lambda r: tflops(r) + (f" {1e12 * r.tflops / peak:.0%}" if peak else ""))


def masks(rows: list[Record]) -> list[Table]:
    """Claim 15: full over causal time, and the tiles that are computed."""
    found = []
    for passed in ("forward", "backward"):
        columns = {}
        for n in lengths(rows):
            causal, full = (pick(rows, passed=passed, **paper(n, 64, mask)) for mask in MASKS)
            columns[thousands(n)] = faster(causal, {name: timed(r) for name, r in full.items()})
        title = f"Claim 15: full over causal time, {passed}, D = 64; N ="
        found += grid(title, columns, lambda r: f"{r.factor:.2f}x")
    columns = {}
    for n in lengths(rows, SHORT):
        counted = pick(rows, passed="forward", **paper(n, 64, True))
        columns[thousands(n)] = {name: r for name, r in counted.items() if "tile" in r}
    sizes = {name: "{} x {}".format(*r.tile) for of in columns.values() for name, r in of.items()}
    said = ", ".join(f"{name} {size}" for name, size in sizes.items())
    title = f"Claim 15: tiles computed of all, causal, of one head ({said}); N ="
    in_tiles = "{r.tiles_computed:,}/{r.tiles_all:,} {share:.0%}".format
    return found + grid(title, columns, lambda r: in_tiles(r=r, share=r.tiles_computed / r.tiles_all))


def windowed(rows: list[Record]) -> list[Table]:
    """Claim 15: windows of N = 16k over the causal call without one."""
    found = []
    for passed in ("forward", "backward"):
        whole = {n: timed(r) for n, r in pick(rows, passed=passed, **paper(16384, 64, True)).items()}
        columns = {}
        for window in WINDOWS:
            mine = pick(rows, passed=passed, **paper(16384, 64, True, features=f"window={window}"))
            columns[f"window {thousands(window)}"] = faster(mine, whole)
        title = f"Claim 15: times as fast as causal without a window, {passed}, N = 16k, D = 64"
        found += grid(title, columns, lambda r: f"{r.factor:.1f}x")
    return found


def at_short(rows: Sequence[Row], passed: str, many: bool) -> dict[int, dict[str, Record]]:
    """N -> rows by implementation, of one sequence or of 16,384 tokens."""
    rows, found = records(rows), {}
    for n in (n for n in lengths(rows) if n <= SHORT):
        wanted = {"heads": HEADS, "head_dim": 64, "causal": True, "dtype": "bfloat16", "features": ""}
        mine = pick(rows, passed=passed, seq_len=n, batch=TOKENS // n if many else 1, **wanted)
        if mine:
            found[n] = mine
    return found


MEASURES: dict[str, Callable[[dict[str, Any]], float]] = {
    "device": lambda result: 1e3 * result["ms_median"],
    "in a stream of calls": lambda result: result.get("stream_us", 1e3 * result["ms_median"]),
}


def writes_scores(name: str) -> bool:
    return registry.declaration(name).writes_scores


def is_eager(name: str) -> bool:
    """Writes the scores out in PyTorch's own matrix products."""
    return writes_scores(name) and registry.declaration(name).kernels == MATMUL_KERNELS


def winners(rows: list[Row], passed: str, many: bool, what: str) -> dict[int, tuple[str, float, str, float]]:
    """N -> (fastest standard attention, its us, fastest that writes no scores, its us)."""
    found = {}
    for n, of in at_short(rows, passed, many).items():
        us = {name: MEASURES[what](r) for name, r in of.items() if r.trusted}
        written = min((name for name in us if is_eager(name)), key=us.get, default=None)
        tiled = min((name for name in us if not writes_scores(name)), key=us.get, default=None)
        if written and tiled:
            found[n] = written, us[written], tiled, us[tiled]
    return found


def beats(rows: list[Row], passed: str, many: bool, what: str, longest: int, by: float = 1.1) -> list[str]:
    """Kernels that write no scores, with the largest N up to `longest`, that take more than `by` times as
    long as the formula in eager PyTorch; what launches a kernel for each tile is left out."""
    found: dict[str, int] = {}
    for n, of in at_short(rows, passed, many).items():
        us = {name: MEASURES[what](r) for name, r in of.items() if r.trusted}
        for name in us if n <= longest and "standard" in us else ():
            apart = writes_scores(name) or registry.declaration(name).launches_each_tile
            if not apart and by * us["standard"] < us[name]:
                found[name] = n
    return [f"{name} ({n:,})" for name, n in found.items()]


def crossover(found: dict[int, tuple[str, float, str, float]]) -> str:
    """In words, from which N on standard attention is never faster."""
    wins = [n for n, (_, written, _, tiled) in found.items() if written < tiled]
    if not wins:
        return f"standard attention is never faster from N = {min(found):,} on"
    later = [n for n in found if n > max(wins)]
    which = ", ".join(f"{n:,} ({found[n][0]}, {found[n][3] / found[n][1]:.2f}x)" for n in wins)
    return f"standard attention is faster at N = {which}" + (
        f", slower from {min(later):,} on" if later else ""
    )


def traffic(rows: list[Record]) -> list[Table]:
    """Claim 24: the scores, once over the memory's bandwidth, and the times."""
    mine = pick(rows, passed="forward", batch=1, heads=HEADS, seq_len=8192, head_dim=128, dtype="float16")
    copies = [r.copy_gb_per_s for r in mine.values() if "copy_gb_per_s" in r]
    if not copies:
        return []
    once = HEADS * 8192**2 * 2 / max(copies) / 1e6
    title = (
        "Claim 24: ms, B = 1, H = 32, N = 8192, D = 128, causal, fp16, forward; the scores once over "
        f"memory at {max(copies):,.0f} GB/s take {once:.2f} ms, four times at least {4 * once:.1f} ms"
    )
    return grid(title, {"ms": mine}, ms)
