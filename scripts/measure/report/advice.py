"""The table of attention/README.md: the fastest implementations for each kind of call."""

from __future__ import annotations

from attention.auto import SHORT
from scripts.measure.report.ranking import Class
from scripts.measure.report.tables import markdown

MOST = 4  # names in a cell
SITUATIONS = {
    "training": "training",
    "forward": "forward only",
    "decode": "decoding",
    "compiled decode": "decoding in a compiled step",
}
MASKS = {"causal": "causal", "full": "no mask", "masked": "window or other mask"}


def table(ranks: dict[Class, dict[str, float]]) -> str:
    """Markdown, a row for each kind of call and head dim: the fastest, then the others by relative time."""
    lines = [["GPU, dtype", "pass and mask", "head dim", f"T up to {SHORT:,}", f"T above {SHORT:,}"]]
    for arch, bits, workload, mask, dim in dict.fromkeys(key[:5] for key in ranks):
        decode = workload in ("decode", "compiled decode")
        seen = ("with `kv_lengths`" if mask == "masked" else "a full cache") if decode else MASKS[mask]
        by_length = [_cell(ranks.get((arch, bits, workload, mask, dim, length))) for length in (SHORT, None)]
        what = [f"sm_{arch[0]}{arch[1]}, {bits} bits", f"{SITUATIONS[workload]}, {seen}"]
        lines.append([*what, "any" if dim is None else f"up to {dim}", *by_length])
    return markdown(lines)


def _cell(names: dict[str, float] | None) -> str:
    if not names:
        return ""
    first, *others = list(names)[:MOST]
    return ", ".join([f"**{first}**", *(f"{name} {names[name] / names[first]:.2f}x" for name in others)])
