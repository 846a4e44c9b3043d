"""Reports, for results/README.md, of the measurements that are no module of measure/studies."""

from __future__ import annotations

import math
import re
from collections.abc import Callable

from scripts.measure.instruments.bench_points import DTYPES
from scripts.measure.rows import trusted
from scripts.measure.studies import Report, Row, Table


def cells(markdown: str) -> list[list[str]]:
    """The lines of the tables in a text, their rules left out, with no markup of names."""
    lines = [line for line in markdown.splitlines() if re.match(r"\|(?!-)", line)]
    return [[cell.strip().replace("`", "") for cell in line.strip()[1:-1].split("|")] for line in lines]


def attention(rows: list[Row]) -> Report:
    from scripts.measure.report.summary import block

    lines = cells(block(rows, "")) if any(row["result"]["status"] == "ok" for row in rows) else []
    title = (
        "bf16, causal: TFLOP/s forward / backward, for decode microseconds; bold: the fastest; !: not to be "
    )
    title += "trusted; -: refused"
    notes = ["Every shape is in the pictures of each pass and, with errors and kernels, in the rows."]
    question = "How fast is each implementation at each shape, all of them in one process?"
    tables = [Table(title, lines)] if len(lines) > 1 else []
    return Report(question, "python scripts/bench_attention.py", tables, notes=notes, found=_fastest(rows))


def _fastest(rows: list[Row]) -> str:
    """The fastest, and the fastest of ours, at the longest T with the wider heads of docs/measuring.md."""
    from scripts.measure.report.attention_report import is_peer
    from scripts.measure.report.summary import IN_TABLE, shown

    panels = [(key, panel) for key, panel in shown(rows).items() if key[2] == IN_TABLE[-1]]
    panels = [(key[0], panel) for key, panel in panels if key[0] in ("forward", "backward")]
    longest = max((t for _, panel in panels for line in panel.values() for t in line), default=0)
    speeds: dict[str, dict[str, float]] = {}
    for passed, panel in panels:
        for name, line in panel.items():
            if longest in line and trusted(line[longest]["result"]):
                speeds.setdefault(name, {})[passed] = line[longest]["result"]["tflops"]
    both = {name: of for name, of in speeds.items() if len(of) == 2}
    ours = {name: of for name, of in both.items() if not is_peer(name)}
    if not ours:
        return ""
    said = []
    for words, of in (("fastest", both), ("fastest of ours", ours)):
        name = max(of, key=lambda name: of[name]["forward"])
        said.append(f"{words} {name}, {of[name]['forward']:.0f} / {of[name]['backward']:.0f} TFLOP/s")
    return f"D = {IN_TABLE[-1]}, T = {longest:,}, forward / backward: {'; '.join(said)}."


def ladder(rows: list[Row]) -> Report:
    from scripts.bench_ladder import HEADS, by_heads, table

    tables = []
    for passed in ("forward", "backward"):
        for causal in (True, False):
            title = (
                f"{passed}, {'causal' if causal else 'full'}, batch 1, {HEADS[0]} heads, D = 128: ms, TFLOP/s"
            )
            tables.append(Table(title, cells(table(rows, passed, causal))))
    title = "fa1 and fa2 by the number of heads, forward, full, 4,096 tokens"
    tables.append(Table(title, cells(by_heads(rows, False))))
    question = "What does each stage of the CUDA ladder gain, beside PyTorch's kernels?"
    tables = [one for one in tables if len(one.lines) > 1]
    return Report(question, "python scripts/bench_ladder.py", tables, found=_stages(rows))


def _stages(rows: list[Row]) -> str:
    """The first, the tiled and the last stage, and cuDNN, at the longest N that all have."""
    from scripts.bench_ladder import HEAD_DIM, HEADS

    names = {"cuda_naive": "naive", "cuda_tiled": "tiled", "cuda_fa2": "fa2", "sdpa_cudnn": "cuDNN"}
    dtypes = {dtype: short for short, dtype in DTYPES.items()}
    at: dict[int, dict[str, Row]] = {}
    for row in rows:
        p = row["point"]
        shape = (p["pass"], p["causal"], p["heads"], p["head_dim"]) == ("forward", True, HEADS[0], HEAD_DIM)
        if shape and row["result"]["status"] == "ok":
            at.setdefault(p["seq_len"], {})[p["implementation"]] = row
    full = [tokens for tokens, of in at.items() if names.keys() <= of.keys()]
    if not full:
        return ""
    each = [
        f"{word} {row['result']['ms_median']:.3g} ms ({dtypes[row['point']['dtype']]})"
        for name, word in names.items()
        for row in [at[max(full)][name]]
    ]
    return f"Forward at N = {max(full):,}: {', '.join(each)}."


def hopper(rows: list[Row]) -> Report:
    """cuda_fa3 beside the fastest libraries, by pass, head dim and mask."""
    tables, pictures, found = [], {}, []
    for name in ("forward", "backward"):
        lines, ratios, pictures[name] = _hopper([row for row in rows if row["point"]["pass"] == name], name)
        tables.append(Table(f"TFLOP/s, {name}", lines))
        mean = math.exp(sum(map(math.log, ratios)) / len(ratios)) if ratios else 0.0
        found.append(
            f"{name} {mean:.2f}x in the mean of {len(ratios)}, {min(ratios, default=0):.2f}x at the least"
        )
    return Report(
        "How fast is our kernel for Hopper beside FlashAttention-4 and cuDNN, in one process?",
        "python scripts/bench_attention.py --attention cuda_fa3 flash4 sdpa_cudnn sdpa_flash "
        "--head-dim 64 128 --seq-len 1024 2048 4096 8192 16384 --out results/hopper/h200.jsonl",
        tables,
        pictures,
        found=f"Of the best of the others in each shape: {'; '.join(found)}.",
    )


def _hopper(rows: list[Row], name: str) -> tuple[list[list[str]], list[float], str]:
    """The table of a pass, our speed over the best of the others' by shape, and the picture."""
    from scripts.measure.report.figures import Line, panel, panels_of, svg

    speeds: dict[tuple[int, bool], dict[str, dict[float, float]]] = {}
    for row in sorted(rows, key=lambda row: (row["point"]["head_dim"], row["point"]["seq_len"])):
        p, r = row["point"], row["result"]
        if trusted(r):
            of = speeds.setdefault((p["head_dim"], p["causal"]), {})
            of.setdefault(p["implementation"], {})[p["seq_len"]] = r["tflops"]
    lengths = sorted({t for of in speeds.values() for line in of.values() for t in line})
    lines, ratios = [["", *(f"T = {t:,}" for t in lengths)]], []
    figure, axes = panels_of(
        rows, f"{name.capitalize()} on Hopper, bf16, 16,384 tokens, width 2,048", len(speeds)
    )
    for axis, ((d, causal), of) in zip(axes, speeds.items(), strict=True):
        title, ours = f"D = {d}, {'causal' if causal else 'full'}", of.get("cuda_fa3", {})
        peers = {t: max(of[name].get(t, 0.0) for name in of if name != "cuda_fa3") for t in ours}
        lines += [
            [f"{title}: {name}", *(f"{line.get(t, 0):.0f}" for t in lengths)] for name, line in of.items()
        ]
        each = [ours[t] / peers[t] for t in ours if peers[t]]
        lines.append([f"{title}: ours / best", *(f"{ratio:.2f}" for ratio in each)])
        ratios += each
        drawn = [Line(name, line, place) for place, (name, line) in enumerate(sorted(of.items()))]
        panel(axis, drawn, title, "T, tokens", "TFLOP/s", log_y=False)
    return lines, ratios, svg(figure, rows)


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
        found=_best_speed(rows),
    )


def _best_speed(rows: list[Row]) -> str:
    """The fastest of ours, beside nanoGPT."""
    done = [row for row in rows if row["result"]["status"] == "ok"]
    speeds = {row["point"]["implementation"]: row["result"]["tokens_per_s"] for row in done}
    peer = speeds.pop("nanoGPT", None)
    if not speeds:
        return ""
    best = max(speeds, key=speeds.__getitem__)
    of = f", {speeds[best] / peer:.3f}x nanoGPT's" if peer else ""
    return f"{speeds[best]:,.0f} tokens/s{of} ({best})."


def generation(rows: list[Row]) -> Report:
    lines = [["attention", "batch", "prompt", "new tokens", "tokens/s", "prefill tokens/s", "peak MiB"]]
    for row in rows:
        p, r = row["point"], row["result"]
        start = [p["implementation"], *(f"{p[key]:,}" for key in ("batch", "prompt", "new_tokens"))]
        found = [f"{r[key]:,.0f}" for key in ("tokens_per_s", "prefill_tokens_per_s", "peak_mib") if key in r]
        lines.append([*start, *(found if r["status"] == "ok" else [r["status"]])])
    model, question = rows[0]["point"]["model"], "How fast is text generated?"
    title = f"{model}, {rows[0]['point']['dtype']}, a KV cache, compiled"
    done = [row for row in rows if row["result"]["status"] == "ok"]
    speeds = {row["point"]["batch"]: row["result"]["tokens_per_s"] for row in done}
    each = [f"{speed:,.0f} tokens/s in batches of {batch}" for batch, speed in sorted(speeds.items())]
    said = f"{model}: {', '.join(each)}." if each else ""
    return Report(question, "python scripts/bench_generate.py", [Table(title, lines)], found=said)


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
    best = min((row["result"] for row in rows), key=lambda result: result["best_val_loss"])
    return Report(
        "What loss does a small model of characters reach on Shakespeare, and how soon?",
        "python train.py experiment=shakespeare_char",
        [Table("Validation loss, nats a character", lines)],
        found=f"Validation loss {best['best_val_loss']:.4f} at best, in {best['wall_s']:.0f} s in all.",
    )


_CHARACTERS = {"best_val_loss": 4, "last_val_loss": 4, "ms_median": 2, "wall_s": 0, "peak_mib": 0}
REPORTS: dict[str, Callable[[list[Row]], Report]] = {
    "attention": attention,
    "cuda_ladder": ladder,
    "generate": generation,
    "gpt2_124m": training,
    "hopper": hopper,
    "parity": parity,
    "shakespeare_char": characters,
}


def drawn_elsewhere(study: str, gpu: str, rows: list[Row]) -> list[str]:
    """Pictures of a study that others draw: part `results` of scripts/report.py, and scripts/plot.py."""
    if study == "attention":
        passes = dict.fromkeys(row["point"]["pass"] for row in rows)
        return [f"{gpu}.svg", *(f"{gpu}_{passed}.svg" for passed in passes)]
    return ["loss.svg"] if study == "shakespeare_char" else []
