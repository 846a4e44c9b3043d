"""Reports, for results/README.md, of the measurements that are no module of measure/studies."""

from __future__ import annotations

import math
from collections.abc import Callable

from scripts.measure.report.tables import SHORT, Record, listed, records, where
from scripts.measure.rows import trusted
from scripts.measure.studies import Report, Row, Table


def attention(rows: list[Row]) -> Report:
    from scripts.measure.report.summary import table

    able = any(row["result"]["status"] == "ok" for row in rows)
    title = "bf16, causal: TFLOP/s forward / backward, for decode microseconds; bold: the fastest; !: not to "
    shown = [Table(f"{title}be trusted; -: refused", plain(table(rows)))] if able else []
    notes = ["Every shape is in the pictures of each pass and, with errors and kernels, in the rows."]
    question = "How fast is each implementation at each shape, all of them in one process?"
    command = "python scripts/bench_attention.py"
    return Report(question, command, shown, notes=notes, found=_fastest(rows))


def plain(lines: list[list[str]]) -> list[list[str]]:
    """With no markup of names."""
    return [[cell.replace("`", "") for cell in line] for line in lines]


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
    from scripts import bench_ladder

    found = [Table(table.title, plain(table.lines)) for table in bench_ladder.tables(rows)]
    question = "What does each stage of the CUDA ladder gain, beside PyTorch's kernels?"
    shown = [table for table in found if len(table.lines) > 1]
    return Report(question, "python scripts/bench_ladder.py", shown, found=_stages(rows))


def _stages(rows: list[Row]) -> str:
    """The first, the tiled and the last stage, and cuDNN, at the longest N that all have."""
    from scripts.bench_ladder import HEAD_DIM, HEADS

    names = {"cuda_naive": "naive", "cuda_tiled": "tiled", "cuda_fa2": "fa2", "sdpa_cudnn": "cuDNN"}
    shape = {"passed": "forward", "causal": True, "heads": HEADS[0], "head_dim": HEAD_DIM, "status": "ok"}
    at = {(r.seq_len, r.implementation): r for r in where(records(rows), **shape)}
    full = [tokens for tokens, _ in at if all((tokens, name) in at for name in names)]
    if not full:
        return ""
    of = [(word, at[max(full), name]) for name, word in names.items()]
    each = [f"{word} {r.ms_median:.3g} ms ({SHORT[r.dtype]})" for word, r in of]
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
        drawn = [Line(name, line) for name, line in sorted(of.items())]
        panel(axis, drawn, title, "T, tokens", "TFLOP/s", log_y=False)
    return lines, ratios, svg(figure, rows)


def training(rows: list[Row]) -> Report:
    """The fastest of ours, beside nanoGPT."""
    found = sorted(records(rows), key=lambda r: -r.get("tokens_per_s", 0))
    speeds = {r.implementation: r.tokens_per_s for r in where(found, status="ok")}
    peer = speeds.pop("nanoGPT", None)

    def line(r: Record) -> str:
        if r.status != "ok":
            return f"{r.implementation}|{r.status}"
        ratio = f"{r.tokens_per_s / peer:.3f}x" if peer else ""
        step = f"{r.ms_median:.1f} ({r.ms_p10:.1f} to {r.ms_p90:.1f})"
        return f"{r.implementation}|{r.tokens_per_s:,.0f}|{ratio}|{r.mfu:.1%}|{step}|{r.peak_mib:,.0f}"

    p = found[0]
    title = f"{p.model}, T = {p.seq_len:,}, {p.tokens_per_step:,} tokens a step, {p.dtype}, compiled"
    best = max(speeds, key=speeds.__getitem__, default="")
    of = f", {speeds[best] / peer:.3f}x nanoGPT's" if peer and best else ""
    return Report(
        "How fast does GPT-2 124M train, beside nanoGPT on the same machine?",
        "python scripts/bench_train.py --nanogpt nanoGPT/model.py",
        [listed(title, "|tokens/s|of nanoGPT's|MFU|ms a step (p10 to p90)|peak MiB", found, line)],
        found=f"{speeds[best]:,.0f} tokens/s{of} ({best})." if best else "",
    )


def generation(rows: list[Row]) -> Report:
    found = records(rows)

    def line(r: Record) -> str:
        step = "fused" if r.get("fused") else "torch.compile" if r.get("compile") else "PyTorch"
        start = f"{r.model}|{r.implementation}|{step}|{r.batch:,}|{r.prompt:,}|{r.new_tokens:,}"
        if r.status != "ok":
            return f"{start}|{r.status}"
        measured = (("tokens_per_s", ",.0f"), ("prefill_tokens_per_s", ",.0f"), ("setup_s", ".1f"))
        figures = [format(r.get(key) or 0.0, how) for key, how in (*measured, ("peak_mib", ",.0f"))]
        return "|".join([start, *figures])

    best: dict[tuple[str, int], float] = {}
    for r in where(found, status="ok"):
        best[r.model, r.batch] = max(best.get((r.model, r.batch), 0.0), r.tokens_per_s)
    each = [
        f"{model} {speed:,.0f} tokens/s at batch {batch}" for (model, batch), speed in sorted(best.items())
    ]
    head = "model|attention|step|batch|prompt|new tokens|tokens/s|prefill tokens/s|set-up s|peak MiB"
    shown = [listed(f"{found[0].dtype}, a KV cache", head, found, line)]
    said = f"{'; '.join(each)}." if each else ""
    return Report("How fast is text generated?", "python scripts/bench_generate.py", shown, found=said)


def parity(rows: list[Row]) -> Report:
    found = records(rows)
    p, alike = found[0], sum(bool(r.get("parity")) for r in found)

    def line(r: Record) -> str:
        if r.status != "ok":
            return f"{r.implementation}|{r.status}"
        so = "yes" if r.parity else "no"
        return f"{r.implementation}|{r.loss:.4f}|{r.difference:+.1e}|{r.standard_error:.1e}|{so}"

    title = f"The last {p.steps // 4} of {p.steps} steps, {len(p.seeds)} seeds, {p.dtype}"
    head = "attention|loss|less naive's|standard error of seeds|parity"
    notes = [f"{alike} of {len(rows)} train to the loss of `naive`, within what seeds differ by."]
    question = "Does a model train to the same loss whatever the implementation?"
    return Report(question, "python scripts/parity.py", [listed(title, head, found, line)], notes=notes)


def characters(rows: list[Row]) -> Report:
    found = records(rows)
    best = min(found, key=lambda r: r.best_val_loss)
    table = listed(
        "Validation loss, nats a character",
        "attention|best loss|last loss|ms a step|seconds in all|peak MiB",
        found,
        lambda r: (
            f"{r.implementation}|{r.best_val_loss:.4f}|{r.last_val_loss:.4f}|{r.ms_median:.2f}|"
            f"{r.wall_s:,.0f}|{r.peak_mib:,.0f}"
        ),
    )
    return Report(
        "What loss does a small model of characters reach on Shakespeare, and how soon?",
        "python train.py experiment=shakespeare_char",
        [table],
        found=f"Validation loss {best.best_val_loss:.4f} at best, in {best.wall_s:.0f} s in all.",
    )


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
