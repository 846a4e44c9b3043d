"""Tables of attention_speed, from its rows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from attention import registry
from attention.base import PRODUCTS
from scripts.measure.instruments.speed_points import HEADS, SHORT, TOKENS, WINDOWS, fused
from scripts.measure.report.attention_report import ours_first
from scripts.measure.report.figures import thousands
from scripts.measure.rows import trusted
from scripts.measure.studies import Row, Table

PASSES = {"forward": "forward", "backward": "backward", "both": "forward + backward"}
ONE, MANY = "one sequence", f"{TOKENS:,} tokens"
MASKS = {True: "causal", False: "full"}


def order(name: str) -> tuple[bool, bool, str]:
    """Standard attention first, then ours, then the libraries."""
    return name != "standard", *ours_first(name)


def pick(rows: Sequence[Row], **wanted: Any) -> dict[str, Row]:
    """Rows whose points have these values (`passed` is the pass), by implementation; the newest of each."""
    found = {}
    for row in rows:
        point = row["point"] | {"passed": row["point"]["pass"]}
        if all(point.get(key, "") == value for key, value in wanted.items()):
            found[point["implementation"]] = row
    return {name: found[name] for name in sorted(found, key=order)}


def paper(
    tokens: int, head_dim: int, causal: bool, dtype: str = "bfloat16", features: str = ""
) -> dict[str, Any]:
    """The point of the papers' benchmarks: 16,384 tokens or one sequence, 2,048 wide."""
    return {
        "seq_len": tokens, "head_dim": head_dim, "causal": causal, "dtype": dtype, "features": features,
        "batch": max(1, TOKENS // tokens), "heads": TOKENS // 8 // head_dim,
    }  # fmt: skip


def cell(row: Row | None, show: Callable[[dict[str, Any]], str]) -> str:
    """A figure; "!" after one that is wrong beyond rounding or of other kernels; what there is instead."""
    if row is None:
        return ""
    result = row["result"]
    if result["status"] == "ok":
        return show(result) + ("" if trusted(result) else " !")
    slow = result["status"] == "error" and result.get("not_tried")
    return "slow" if slow else {"unsupported": "-"}.get(result["status"], result["status"])


def tflops(result: dict[str, Any]) -> str:
    return f"{result['tflops']:#.3g}".rstrip(".")


def ms(result: dict[str, Any]) -> str:
    return f"{result['ms_median']:#.3g}".rstrip(".")


def grid(
    title: str, columns: dict[str, dict[str, Row]], show: Callable[[dict[str, Any]], str]
) -> list[Table]:
    """A line an implementation that can do any of it, a column a selection of rows; nothing for no rows."""
    columns = {head: found for head, found in columns.items() if found}
    names = sorted({name for found in columns.values() for name in found}, key=order)
    lines = [[name, *(cell(found.get(name), show) for found in columns.values())] for name in names]
    lines = [line for line in lines if any(text not in ("", "-") for text in line[1:])]
    return [Table(title, [["", *columns], *lines])] if lines else []


def tables(rows: list[Row]) -> list[Table]:
    found = curves(rows)
    found += over_standard(rows) + hopper(rows) + masks(rows) + windowed(rows) + shorts(rows)
    return found + in_pytorch(rows) + traffic(rows)


def lengths(rows: Sequence[Row]) -> list[int]:
    return sorted({row["point"]["seq_len"] for row in rows})


def curves(rows: list[Row]) -> list[Table]:
    found = []
    for passed in ("forward", "backward"):
        for causal in (True, False):
            every = [row for row in rows if row["point"]["seq_len"] >= SHORT]
            columns = {
                thousands(n): pick(rows, passed=passed, **paper(n, 64, causal)) for n in lengths(every)
            }
            title = f"TFLOP/s, {passed}, {MASKS[causal]}, D = 64, {HEADS} heads, bf16, {MANY}; N ="
            found += grid(title, columns, tflops)
    small = [row for row in rows if row["point"]["dtype"] == "float32"]  # a CPU's
    for passed in PASSES if small else ():
        columns = {thousands(n): pick(small, passed=passed, causal=True, seq_len=n) for n in lengths(small)}
        found += grid(f"ms, {PASSES[passed]}, causal, fp32; N =", columns, ms)
    return found


def over_standard(rows: list[Row]) -> list[Table]:
    """Claim 3, and 8's factor on long sequences."""
    columns = {}
    for n in (1024, 2048, 4096, 16384):
        for causal in (True, False):
            for passed in ("forward", "both"):
                found = pick(rows, passed=passed, **paper(n, 64, causal))
                if took := timed(found.get("standard")):
                    faster = {
                        name: with_factor(row, took) for name, row in found.items() if name != "standard"
                    }
                    head = f"{thousands(n)} {MASKS[causal]} {passed}"
                    columns[head] = {"standard": found["standard"]} | faster
    title = "Claims 3 and 8: times as fast as standard attention (its own ms), D = 64, bf16"
    return grid(title, columns, lambda r: f"{r['factor']:.1f}x" if "factor" in r else ms(r))


def timed(row: Row | None) -> float | None:
    return row["result"]["ms_median"] if row and row["result"]["status"] == "ok" else None


def with_factor(row: Row, other: float) -> Row:
    """The row with how many times as fast it is as something that took `other` ms."""
    took = timed(row)
    return row | {"result": row["result"] | ({"factor": other / took} if took else {})}


def hopper(rows: list[Row]) -> list[Table]:
    """Claims 8 and 9: FlashAttention-1, 2 and the Hopper libraries, TFLOP/s and of the peak."""
    from model.costs.flops import peak_bf16_flops

    columns = {}
    for label, (n, d, dtype), passed in (
        ("2k, 64", (2048, 64, "bfloat16"), "forward"),
        ("2k, 128", (2048, 128, "bfloat16"), "forward"),
        ("16k, 128", (16384, 128, "float16"), "forward"),
        ("16k, 128", (16384, 128, "float16"), "backward"),
        ("16k, 256", (16384, 256, "float16"), "forward"),
    ):
        for causal in (True, False):
            found = pick(rows, passed=passed, **paper(n, d, causal, dtype))
            columns[f"{label} {MASKS[causal]} {passed}"] = {
                name: row for name, row in found.items() if fused(name)
            }

    peak = (peak_bf16_flops(rows[0]["machine"]["gpu"]) if rows and rows[0]["machine"]["gpu"] else None) or 0

    def show(result: dict[str, Any]) -> str:
        return tflops(result) + (f" {1e12 * result['tflops'] / peak:.0%}" if peak else "")

    title = "Claims 8 and 9: TFLOP/s, and of the dense 16-bit peak; N, D (bf16 at 2k, fp16 at 16k)"
    return grid(title, columns, show)


def masks(rows: list[Row]) -> list[Table]:
    """Claim 15: full over causal time, and the tiles that are computed."""
    found = []
    for passed in ("forward", "backward"):
        columns = {}
        for n in lengths(rows):
            causal, full = (pick(rows, passed=passed, **paper(n, 64, mask)) for mask in (True, False))
            columns[thousands(n)] = {
                name: with_factor(row, took)
                for name, row in causal.items()
                if (took := timed(full.get(name)))
            }
        title = f"Claim 15: full over causal time, {passed}, D = 64; N ="
        found += grid(title, columns, lambda result: f"{result['factor']:.2f}x")
    columns = {}
    for n in (n for n in lengths(rows) if n >= SHORT):
        counted = pick(rows, passed="forward", **paper(n, 64, True))
        columns[thousands(n)] = {k: row for k, row in counted.items() if "tile" in row["result"]}
    sizes = {
        name: "{} x {}".format(*row["result"]["tile"]) for of in columns.values() for name, row in of.items()
    }
    said = ", ".join(f"{name} {size}" for name, size in sizes.items())
    title = f"Claim 15: tiles computed of all, causal, of one head ({said}); N ="
    return found + grid(title, columns, in_tiles)


def in_tiles(result: dict[str, Any]) -> str:
    computed, every = result["tiles_computed"], result["tiles_all"]
    return f"{computed:,}/{every:,} {computed / every:.0%}"


def windowed(rows: list[Row]) -> list[Table]:
    """Claim 15: windows of N = 16k over the causal call without one."""
    found = []
    for passed in ("forward", "backward"):
        whole = pick(rows, passed=passed, **paper(16384, 64, True))
        columns = {}
        for window in WINDOWS:
            mine = pick(rows, passed=passed, **paper(16384, 64, True, features=f"window={window}"))
            columns[f"window {thousands(window)}"] = {
                name: with_factor(row, took) for name, row in mine.items() if (took := timed(whole.get(name)))
            }
        title = f"Claim 15: times as fast as causal without a window, {passed}, N = 16k, D = 64"
        found += grid(title, columns, lambda result: f"{result['factor']:.1f}x")
    return found


def at_short(rows: list[Row], passed: str, many: bool) -> dict[int, dict[str, Row]]:
    """N -> rows by implementation, of one sequence or of 16,384 tokens."""
    found = {}
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


def shorts(rows: list[Row]) -> list[Table]:
    """Claim 16: microseconds at short N."""
    found = []
    for many in (False, True):
        for passed in ("forward", "both"):
            for what, us in MEASURES.items():
                columns = {thousands(n): of for n, of in at_short(rows, passed, many).items()}
                title = f"Claim 16: us, {what}, {PASSES[passed]}, {MANY if many else ONE}, D = 64; N ="
                found += grid(title, columns, lambda result, us=us: f"{us(result):,.1f}")
    return found


def writes_scores(name: str) -> bool:
    return registry.declaration(name).writes_scores


def is_eager(name: str) -> bool:
    """Writes the scores out in PyTorch's own matrix products."""
    return writes_scores(name) and registry.declaration(name).kernels == PRODUCTS


def winners(rows: list[Row], passed: str, many: bool, what: str) -> dict[int, tuple[str, float, str, float]]:
    """N -> (fastest standard attention, its us, fastest that writes no scores, its us)."""
    found = {}
    for n, of in at_short(rows, passed, many).items():
        us = {name: MEASURES[what](row["result"]) for name, row in of.items() if trusted(row["result"])}
        written = min((name for name in us if is_eager(name)), key=us.get, default=None)
        tiled = min((name for name in us if not writes_scores(name)), key=us.get, default=None)
        if written and tiled:
            found[n] = written, us[written], tiled, us[tiled]
    return found


def beats(rows: list[Row], passed: str, many: bool, what: str, longest: int) -> list[str]:
    """Kernels that write no scores, with the largest N up to `longest`, that the formula in eager PyTorch is
    faster than; what launches a kernel for each tile is left out."""
    found: dict[str, int] = {}
    for n, of in at_short(rows, passed, many).items():
        us = {name: MEASURES[what](row["result"]) for name, row in of.items() if trusted(row["result"])}
        for name in us if n <= longest and "standard" in us else ():
            apart = writes_scores(name) or registry.declaration(name).launches_each_tile
            if not apart and us["standard"] < us[name]:
                found[name] = n
    return [f"{name} ({n:,})" for name, n in found.items()]


def crossover(found: dict[int, tuple[str, float, str, float]]) -> str:
    """From which N on standard attention never wins, in words."""
    wins = [n for n, (_, written, _, tiled) in found.items() if written < tiled]
    if not wins:
        return f"it never wins from N = {min(found):,} on"
    later = [n for n in found if n > max(wins)]
    which = ", ".join(f"{n:,} ({found[n][0]}, {found[n][3] / found[n][1]:.2f}x)" for n in wins)
    return f"it wins at N = {which}" + (f" and loses from {min(later):,} on" if later else "")


def in_pytorch(rows: list[Row]) -> list[Table]:
    """Claim 12."""
    wanted = {"batch": 1, "heads": 8, "seq_len": 2048, "dtype": "float16"}
    columns = {PASSES[passed]: pick(rows, passed=passed, **wanted) for passed in ("forward", "both")}
    return grid("Claim 12: ms, B = 1, H = 8, N = 2048, D = 64, causal, fp16", columns, ms)


def traffic(rows: list[Row]) -> list[Table]:
    """Claim 24: the scores, once over the memory's bandwidth, and the times."""
    mine = pick(rows, passed="forward", batch=1, heads=HEADS, seq_len=8192, head_dim=128, dtype="float16")
    copies = [row["result"]["copy_gb_per_s"] for row in mine.values() if "copy_gb_per_s" in row["result"]]
    if not copies:
        return []
    once = HEADS * 8192**2 * 2 / max(copies) / 1e6
    title = (
        "Claim 24: ms, B = 1, H = 32, N = 8192, D = 128, causal, fp16, forward; the scores once over "
        f"memory at {max(copies):,.0f} GB/s take {once:.2f} ms, four times at least {4 * once:.1f} ms"
    )
    return grid(title, {"ms": mine}, ms)
