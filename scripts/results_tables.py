"""Reports, for results/README.md, of the measurements that are no module of scripts/studies."""

from __future__ import annotations

import re
from collections.abc import Callable

from scripts.studies import Report, Row, Table


def cells(markdown: str) -> list[list[str]]:
    """The lines of the tables in a text, their rules left out, with no markup of names."""
    lines = [line for line in markdown.splitlines() if re.match(r"\|(?!-)", line)]
    return [[cell.strip().replace("`", "") for cell in line.strip()[1:-1].split("|")] for line in lines]


def attention(rows: list[Row]) -> Report:
    from scripts.summary import block

    lines = cells(block(rows, "")) if any(row["result"]["status"] == "ok" for row in rows) else []
    title = (
        "bf16, causal: TFLOP/s forward / backward, for decode microseconds; bold: the fastest; !: not to be "
    )
    title += "trusted; -: refused"
    notes = ["Every shape is in the pictures of each pass and, with errors and kernels, in the rows."]
    question = "How fast is each implementation at each shape, all of them in one process?"
    tables = [Table(title, lines)] if len(lines) > 1 else []
    return Report(question, "python scripts/bench_attention.py", tables, notes=notes)


def ladder(rows: list[Row]) -> Report:
    from scripts.bench_ladder import HEADS, by_heads, table

    found = []
    for passed in ("forward", "backward"):
        for causal in (True, False):
            title = (
                f"{passed}, {'causal' if causal else 'full'}, batch 1, {HEADS[0]} heads, D = 128: ms, TFLOP/s"
            )
            found.append(Table(title, cells(table(rows, passed, causal))))
    title = "fa1 and fa2 by the number of heads, forward, full, 4,096 tokens"
    found.append(Table(title, cells(by_heads(rows, False))))
    question = "What does each stage of the CUDA ladder gain, beside PyTorch's kernels?"
    return Report(question, "python scripts/bench_ladder.py", [one for one in found if len(one.lines) > 1])


def training(rows: list[Row]) -> Report:
    peer = next((row for row in rows if row["point"]["implementation"] == "nanoGPT"), None)
    lines = [["", "tokens/s", "of nanoGPT's", "MFU", "ms a step (p10 to p90)", "peak MiB"]]
    for row in sorted(rows, key=lambda row: -row["result"].get("tokens_per_s", 0)):
        r, name = row["result"], row["point"]["implementation"]
        if r["status"] != "ok":
            lines.append([name, r["status"]])
            continue
        ratio = f"{r['tokens_per_s'] / peer['result']['tokens_per_s']:.3f}x" if peer else ""
        step = f"{r['ms_median']:.1f} ({r['ms_p10']:.1f} to {r['ms_p90']:.1f})"
        lines.append(
            [name, f"{r['tokens_per_s']:,.0f}", ratio, f"{r['mfu']:.1%}", step, f"{r['peak_mib']:,.0f}"]
        )
    p = rows[0]["point"]
    title = (
        f"{p['model']}, T = {p['seq_len']:,}, {p['tokens_per_step']:,} tokens a step, {p['dtype']}, compiled"
    )
    return Report(
        "How fast does GPT-2 124M train, beside nanoGPT on the same machine?",
        "python scripts/bench_train.py --nanogpt nanoGPT/model.py",
        [Table(title, lines)],
    )


def generation(rows: list[Row]) -> Report:
    lines = [["attention", "batch", "prompt", "new tokens", "tokens/s", "prefill tokens/s", "peak MiB"]]
    for row in rows:
        p, r = row["point"], row["result"]
        start = [p["implementation"], *(f"{p[key]:,}" for key in ("batch", "prompt", "new_tokens"))]
        found = [f"{r[key]:,.0f}" for key in ("tokens_per_s", "prefill_tokens_per_s", "peak_mib") if key in r]
        lines.append([*start, *(found if r["status"] == "ok" else [r["status"]])])
    title = f"{rows[0]['point']['model']}, {rows[0]['point']['dtype']}, a KV cache, compiled"
    question = "How fast is text generated?"
    return Report(question, "python scripts/bench_generate.py", [Table(title, lines)])


def parity(rows: list[Row]) -> Report:
    lines = [["attention", "loss", "less naive's", "standard error of seeds", "parity"]]
    for row in rows:
        p, r = row["point"], row["result"]
        name = p["implementation"]
        if r["status"] != "ok":
            lines.append([name, r["status"]])
            continue
        figures = (f"{r['loss']:.4f}", f"{r['difference']:+.1e}", f"{r['standard_error']:.1e}")
        lines.append([name, *figures, "yes" if r["parity"] else "no"])
    p = rows[0]["point"]
    title = f"The last {p['steps'] // 4} of {p['steps']} steps, {len(p['seeds'])} seeds, {p['dtype']}"
    alike = sum(bool(row["result"].get("parity")) for row in rows)
    notes = [f"{alike} of {len(rows)} train to the loss of `naive`, within what seeds differ by."]
    question = "Does a model train to the same loss whatever the implementation?"
    return Report(question, "python scripts/parity.py", [Table(title, lines)], notes=notes)


def characters(rows: list[Row]) -> Report:
    lines = [["attention", "best loss", "last loss", "ms a step", "seconds in all", "peak MiB"]]
    for row in rows:
        r = row["result"]
        figures = (f"{r[key]:,.{digits}f}" for key, digits in _CHARACTERS.items())
        lines.append([row["point"]["implementation"], *figures])
    return Report(
        "What loss does a small model of characters reach on Shakespeare, and how soon?",
        "python train.py experiment=shakespeare_char",
        [Table("Validation loss, nats a character", lines)],
    )


_CHARACTERS = {"best_val_loss": 4, "last_val_loss": 4, "ms_median": 2, "wall_s": 0, "peak_mib": 0}
REPORTS: dict[str, Callable[[list[Row]], Report]] = {
    "attention": attention,
    "cuda_ladder": ladder,
    "generate": generation,
    "gpt2_124m": training,
    "parity": parity,
    "shakespeare_char": characters,
}


def drawn_elsewhere(study: str, gpu: str, rows: list[Row]) -> list[str]:
    """Pictures of a study that others draw: part `results` of scripts/report.py, and scripts/plot.py."""
    if study == "attention":
        passes = dict.fromkeys(row["point"]["pass"] for row in rows)
        return [f"{gpu}.svg", *(f"{gpu}_{passed}.svg" for passed in passes)]
    return ["loss.svg"] if study == "shakespeare_char" else []
