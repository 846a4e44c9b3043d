"""Reports, for results/README.md, of the measurements that are no module of measure/studies: tables, pictures
and figures; templates/<study>.md.j2 have the words."""

from __future__ import annotations

import math
from collections.abc import Callable
from statistics import mean, median
from typing import Any

from scripts.measure.report.pages import page
from scripts.measure.report.sweep_report import beside
from scripts.measure.report.tables import Record, distinct, listed, records, where
from scripts.measure.rows import trusted
from scripts.measure.studies import Report, Row, Table


def attention(rows: list[Row]) -> Report:
    """The fastest, and the fastest of ours, at the longest T with the wider heads of docs/measuring.md."""
    from scripts.measure.report.attention_report import is_peer
    from scripts.measure.report.summary import IN_TABLE, shown, table

    able = any(row["result"]["status"] == "ok" for row in rows)
    title = "bf16, causal; TFLOP/s forward / backward, for decode microseconds; !: error beyond rounding, or "
    passes = ("forward", "backward")
    panels = {key[0]: of for key, of in shown(rows).items() if key[0] in passes and key[2] == IN_TABLE[-1]}
    longest = max((t for panel in panels.values() for line in panel.values() for t in line), default=0)
    speeds: dict[str, dict[str, float]] = {}
    for passed, panel in panels.items():
        for name, line in panel.items():
            if longest in line and trusted(line[longest]["result"]):
                speeds.setdefault(name, {})[passed] = line[longest]["result"]["tflops"]
    both = {name: of for name, of in speeds.items() if len(of) == len(passes)}
    ours = {name: of for name, of in both.items() if not is_peer(name)}
    return page(
        "attention",
        [Table(f"{title}another kernel; -: refused", plain(table(rows)))] if able else [],
        best={
            words: max(of.items(), key=lambda item: item[1]["forward"])
            for words, of in (("fastest", both), ("fastest of ours", ours))
            if ours
        },
        head_dim=IN_TABLE[-1],
        longest=longest,
    )


def plain(lines: list[list[str]]) -> list[list[str]]:
    """With no markup of names."""
    return [[cell.replace("`", "") for cell in line] for line in lines]


def ladder(rows: list[Row]) -> Report:
    """The first, the tiled and the last stage, and cuDNN, at the longest N that all have; by the units that
    their products are computed on."""
    from scripts import bench_ladder

    fma, cores = "FMA units", "tensor cores"
    names = {"cuda_naive": ("naive", fma), bench_ladder.FMA: ("tiled", fma), "cuda_tiled": ("tiled", cores)}
    names |= {"cuda_fa2": ("fa2", cores), "sdpa_cudnn": ("cuDNN", cores)}
    shape = {"heads": bench_ladder.HEADS[0], "head_dim": bench_ladder.HEAD_DIM, "causal": True}
    at = {
        (r.seq_len, r.implementation): r for r in where(records(rows), passed="forward", status="ok", **shape)
    }
    longest = max((n for n, _ in at if all((n, name) in at for name in names)), default=0)
    stages: dict[tuple[str, str], dict[str, Record]] = {}
    for name, (word, units) in names.items() if longest else ():
        stages.setdefault((at[longest, name].dtype, units), {})[word] = at[longest, name]
    return page(
        "cuda_ladder",
        [Table(table.title, plain(table.lines)) for table in bench_ladder.tables(rows)],
        stages=stages,
        longest=longest,
    )


def hopper(rows: list[Row]) -> Report:
    """cuda_fa3 beside the fastest libraries, by pass, head dim and mask: squares of D = 64 and 128, which are
    drawn, and what other shapes and masks there are."""
    tables, pictures, gains, others = [], {}, {}, {}
    for passed in ("forward", "backward"):
        mine = [row for row in rows if row["point"]["pass"] == passed]
        drawn = _speeds([row for row in mine if _is_square(row["point"])])
        lines, gains[passed] = _lines(drawn)
        tables.append(Table(f"TFLOP/s, {passed}", lines))
        pictures[passed] = _hopper_picture(rows, drawn, passed)
        if rest := _speeds([row for row in mine if not _is_square(row["point"])]):
            lines, others[passed] = _lines(rest)
            tables.append(Table(f"TFLOP/s, {passed}, other shapes and masks", lines))
    gains = {passed: of for passed, of in gains.items() if of}
    means = {passed: math.exp(sum(map(math.log, of)) / len(of)) for passed, of in gains.items()}
    return page("hopper", tables, pictures, gains=gains, means=means, others=others)


def _is_square(point: dict[str, Any]) -> bool:
    plain = point["heads"] == point["kv_heads"] and not point["features"]
    return plain and point["head_dim"] in (64, 128)


Speeds = dict[str, dict[str, dict[float, float]]]  # by shape and mask, by name, by T


def _speeds(rows: list[Row]) -> Speeds:
    speeds: Speeds = {}
    found = where(records(rows), trusted=True)
    for r in sorted(found, key=lambda r: (r.features, r.kv_heads != r.heads, r.head_dim, r.seq_len)):
        title = f"D = {r.head_dim}, {'causal' if r.causal else 'no mask'}"
        title += f", {r.heads} / {r.kv_heads} heads" if r.kv_heads != r.heads else ""
        title += f", {r.features}" if r.features else ""
        speeds.setdefault(title, {}).setdefault(r.implementation, {})[r.seq_len] = r.tflops
    return speeds


def _lines(speeds: Speeds) -> tuple[list[list[str]], list[float]]:
    """A table, and our speed over the best of the others', shape by shape."""
    lengths = sorted({t for of in speeds.values() for line in of.values() for t in line})
    lines, ratios = [["", *(f"T = {t:,}" for t in lengths)]], []
    for title, of in speeds.items():
        ours = of.get("cuda_fa3", {})
        peers = {t: max(of[name].get(t, 0.0) for name in of if name != "cuda_fa3") for t in ours}
        each = {t: ours[t] / peers[t] for t in ours if peers[t]}
        for name, line in of.items():
            lines.append([f"{title}: {name}", *(f"{line[t]:.0f}" if t in line else "" for t in lengths)])
        lines.append([f"{title}: ours / best", *(f"{each[t]:.2f}" if t in each else "" for t in lengths)])
        ratios += each.values()
    return lines, ratios


def _hopper_picture(rows: list[Row], speeds: Speeds, passed: str) -> str:
    from scripts.measure.report.figures import Line, panel, panels_of, svg

    said = f"{passed.capitalize()} on Hopper, bf16, 16,384 tokens, width 2,048"
    figure, axes = panels_of(rows, said, len(speeds))
    for axis, (title, of) in zip(axes, speeds.items(), strict=True):
        drawn = [Line(name, line) for name, line in sorted(of.items())]
        panel(axis, drawn, title, "T, tokens", "TFLOP/s", log_y=False, bottom=0)
    return svg(figure, rows)


def training(rows: list[Row]) -> Report:
    """The fastest of ours at each T and batch, beside nanoGPT of the same commit, if it was measured with
    it."""
    tables, best = [], []
    by_size: dict[tuple[int, int, int], list[Row]] = {}
    for row in rows:
        p = row["point"]
        by_size.setdefault((p["seq_len"], p["tokens_per_step"], p.get("micro_batch", 0)), []).append(row)
    for (tokens, step, batch), mine in sorted(by_size.items()):
        several = sum(size[:2] == (tokens, step) for size in by_size) > 1
        mine.sort(key=lambda row: -row["result"].get("tokens_per_s", 0))
        p = mine[0]["point"]
        title = f"{p['model']}, T = {tokens:,}, {p['tokens_per_step']:,} tokens per step, {p['dtype']}"
        title += f", micro-batches of {batch}" * several
        head = "|tokens/s|of nanoGPT's|MFU|ms per step (p10 to p90)|peak MiB|date"
        tables.append(listed(f"{title}, compiled", head, mine, lambda row, mine=mine: _trained(row, mine)))
        timed = [(row, beside(row, mine)) for row in mine if row["result"]["status"] == "ok"]
        best += [pair for pair in timed if not _is_nanogpt(pair[0])][:1]
    return page("gpt2_124m", tables, best=best, speed=lambda row: row["result"]["tokens_per_s"])


def _is_nanogpt(row: Row) -> bool:
    return row["point"]["implementation"] == "nanoGPT"


def _trained(row: Row, rows: list[Row]) -> str:
    name, r = row["point"]["implementation"], row["result"]
    peer = row if _is_nanogpt(row) else beside(row, rows)
    if r["status"] != "ok":
        return f"{name}|{r['status']}"
    ratio = f"{r['tokens_per_s'] / peer['result']['tokens_per_s']:.3f}x" if peer else ""
    step = f"{r['ms_median']:.1f} ({r['ms_p10']:.1f} to {r['ms_p90']:.1f})"
    said = f"{name}|{r['tokens_per_s']:,.0f}|{ratio}|{r['mfu']:.1%}|{step}|{r['peak_mib']:,.0f}"
    return f"{said}|{row['machine']['date']}"


def generation(rows: list[Row]) -> Report:
    found = records(rows)
    shown = (("tokens_per_s", ",.0f"), ("prefill_tokens_per_s", ",.0f"), ("setup_s", ".1f"))

    def line(r: Record) -> str:
        step = "fused" if r.get("fused") else "torch.compile" if r.get("compile") else "PyTorch"
        start = f"{r.model}|{r.implementation}|{step}|{r.batch:,}|{r.prompt:,}|{r.new_tokens:,}"
        if r.status != "ok":
            return f"{start}|{r.status}"
        return "|".join(
            [start, *(format(r.get(key) or 0.0, how) for key, how in (*shown, ("peak_mib", ",.0f")))]
        )

    groups: dict[tuple[bool, int], list[Record]] = {}
    for r in found:
        groups.setdefault((not r.get("kv_cache", True), r.get("seq_len", 0)), []).append(r)
    contexts = {context for _, context in groups}
    # with a cache, and of the context that most rows have
    of_best = max(groups, key=lambda key: (not key[0], len(groups[key])))
    best: dict[tuple[str, int], float] = {}
    for r in () if of_best[0] else where(groups[of_best], status="ok"):
        best[r.model, r.batch] = max(best.get((r.model, r.batch), 0.0), r.tokens_per_s)
    head = "model|attention|step|batch|prompt|new tokens|tokens/s|prefill tokens/s|set-up s|peak MiB"
    tables = []
    for (without, context), mine in sorted(groups.items()):
        title = f"{mine[0].dtype}, with{'out' * without} a KV cache"
        title += f", a context of {context:,}" * (len(contexts) > 1)
        tables.append(listed(title, head, mine, line))
    return page("generate", tables, best=dict(sorted(best.items())))


def parity(rows: list[Row]) -> Report:
    found = records(rows)

    def line(r: Record) -> str:
        options = {name: r.model.get(name) for name in ("position", "sparsity")}
        other = [f"{name}={value}" for name, value in options.items() if value not in (None, "learned")]
        other += [f"{name}={value}" for name, value in (r.get("settings") or {}).items()]
        who = ", ".join([r.implementation, *other])
        if r.status != "ok":
            return f"{who}|{r.status}"
        so = "yes" if r.parity else "no"
        losses = f"{r.loss:.4f}|{r.reference_loss:.4f}|{r.difference:+.1e}"
        return f"{who}|{losses}|{r.standard_error:.1e}|{so}"

    p = found[0]
    title = f"The last {p.steps // 4} of {p.steps} steps, {len(p.seeds)} seeds, {p.dtype}"
    head = "attention|loss|of naive on the same text|difference|standard error over seeds|parity"
    return page("parity", [listed(title, head, found, line)], alike=[bool(r.get("parity")) for r in found])


def characters(rows: list[Row]) -> Report:
    found = records(rows)

    def line(r: Record) -> str:
        how = f"{r.implementation}|{str(r.compile).lower()}|{r.seed}"
        losses = f"{how}|{r.best_val_loss:.4f}|{r.last_val_loss:.4f}"
        return f"{losses}|{r.ms_median:.2f}|{r.caches}|{r.wall_s:,.0f}|{r.peak_mib:,.0f}"

    head = "attention|compile|seed|best loss|last loss|ms per step|caches|seconds in total|peak MiB"
    table = listed("Validation loss, nats per character", head, found, line)
    seeds = [mean(r.best_val_loss for r in where(found, seed=seed)) for seed in distinct(found, "seed")]
    times = {
        caches: median(r.wall_s for r in where(found, caches=caches)) for caches in distinct(found, "caches")
    }
    return page("shakespeare_char", [table], mean=mean(seeds), seeds=len(seeds), times=times)


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
