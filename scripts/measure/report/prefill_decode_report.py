"""What the rows of studies/prefill_decode.py say: tables, pictures, notes; nothing is measured."""

from __future__ import annotations

from typing import Any

from scripts.measure.rows import trusted
from scripts.measure.studies import Row, Table

COMMAND = "python scripts/study.py prefill_decode"
QUESTION = "How much of a GPU's compute and bandwidth do prefill and decode use, and which part of a layer?"
BERT = "bert_large"  # 8 rows of 512 tokens without a mask: the shape of claim 14's figures
SATURATED = 0.9  # of the most that a model reaches at any length
Parts = dict[str, dict[str, Any]]


def parts_of(row: Row) -> Parts:
    """The parts with figures to trust."""
    return {
        name: part for name, part in row["result"]["parts"].items() if "ms_median" in part and trusted(part)
    }


def setting(row: Row) -> str:
    """ "prefill 1 x 512", "decode 64 on 1,024"."""
    p = row["point"]
    if p["pass"] == "prefill":
        return f"prefill {p['batch']} x {p['seq_len']:,}"
    return f"decode {p['batch']} on {p['kv_len']:,}"


def intensity(work: dict[str, Any]) -> float:
    """FLOPs a byte."""
    return work["flops"] / work["bytes"]


def share(result: dict[str, Any], ceilings: dict[str, float]) -> tuple[float, float]:
    """Of the compute and of the bandwidth measured in the same process."""
    return result["tflops"] / ceilings["tflops"], result["gb_per_s"] / ceilings["gb_per_s"]


def balance(ceilings: dict[str, float]) -> float:
    """FLOPs a byte at which both roofs meet."""
    return 1e3 * ceilings["tflops"] / ceilings["gb_per_s"]


def peak(row: Row) -> float | None:
    """TFLOP/s of the datasheet in bf16, where the GPU is known."""
    from model.costs.flops import peak_bf16_flops

    flops = peak_bf16_flops(row["machine"]["gpu"] or "")
    return None if flops is None else flops / 1e12


def utilisation(parts: Parts) -> dict[str, tuple[float, float]]:
    """(ms, TFLOP/s) of a layer's products with weights, of its standard attention and of each fused one.
    Attention's FLOPs are those of the fused: half where a mask hides half."""
    found = {}
    fused = {name: part for name, part in parts.items() if part["kind"] == "fused"}
    groups = {"weights": [part for part in parts.values() if part["kind"] == "weights"]}
    standard = [part for part in parts.values() if part["kind"] == "standard"]
    for name, group in groups.items():
        ms = sum(part["ms_median"] for part in group)
        found[name] = ms, sum(part["flops"] for part in group) / ms / 1e9
    if len(standard) == 3 and fused:
        ms = sum(part["ms_median"] for part in standard)
        found["standard"] = ms, next(iter(fused.values()))["flops"] / ms / 1e9
    return found | {name: (part["ms_median"], part["tflops"]) for name, part in fused.items()}


def layer_share(parts: Parts, which: str) -> tuple[float, float]:
    """Shares of FLOPs and of time that matrix products have in a layer with `which` attention: standard or a
    fused one's name (its FLOPs are products)."""
    one = {n: p for n, p in parts.items() if p["kind"] not in ("standard", "fused")}
    one |= {n: p for n, p in parts.items() if n == which or p["kind"] == which}
    flops, ms = ({n: p["times"] * p[key] for n, p in one.items()} for key in ("flops", "ms_median"))
    products = [n for n, p in one.items() if p["kind"] != "pointwise" and n != "softmax"]
    return tuple(sum(each[n] for n in products) / sum(each.values()) for each in (flops, ms))


def models(whole: list[Row], phase: str) -> Table:
    lines = [["model", "call", "ms", "tokens/s", "FLOP/byte", "TFLOP/s", "of cuBLAS", "of the sheet"]]
    lines[0] += ["GB/s", "of a copy"]
    for row in whole:
        if row["point"]["pass"] != phase:
            continue
        result, sheet = row["result"], peak(row)
        compute, bandwidth = share(result, result["ceilings"])
        line = [row["point"]["model"], setting(row), f"{result['ms_median']:.3f}"]
        line += [f"{result['tokens_per_s']:,.0f}", f"{intensity(result):,.1f}", f"{result['tflops']:.1f}"]
        line += [f"{compute:.1%}", "-" if sheet is None else f"{result['tflops'] / sheet:.1%}"]
        lines.append([*line, f"{result['gb_per_s']:,.0f}", f"{bandwidth:.1%}"])
    what = {"prefill": "into the cache", "decode": "one token a row"}[phase]
    return Table(f"Whole models, {phase} ({what}), bytes of weights and cache alone", lines)


def by_part(row: Row) -> Table:
    ceilings = row["result"]["ceilings"]
    lines = [["part", "GFLOP", "FLOP/element", "FLOP/byte", "us", "of compute", "of bandwidth", "roof"]]
    for name, part in parts_of(row).items():
        compute, bandwidth = share(part, ceilings)
        below = intensity(part) < balance(ceilings)
        times = f"{part['times']} x {name}" if part["times"] > 1 else name
        line = [times, f"{part['flops'] / 1e9:.4g}", f"{part['flops'] / part['elements']:.4g}"]
        line += [f"{intensity(part):.4g}", f"{1e3 * part['ms_median']:.1f}", f"{compute:.1%}"]
        lines.append([*line, f"{bandwidth:.1%}", "bandwidth" if below else "compute"])
    p = row["point"]
    title = f"A layer of {p['model']}, {setting(row)}: balance at {balance(ceilings):.0f} FLOP/byte"
    return Table(title, lines)


def kinds(layers: list[Row]) -> Table:
    """How well the kinds of work use the GPU, and what fused attention saves of the standard."""
    lines = [["model", "call", "work", "us", "TFLOP/s", "of cuBLAS", "of the sheet", "standard / this"]]
    for row in layers:
        found, sheet = utilisation(parts_of(row)), peak(row)
        for name, (ms, tflops) in found.items():
            line = [row["point"]["model"], setting(row), name, f"{1e3 * ms:.1f}", f"{tflops:.1f}"]
            line += [f"{tflops / row['result']['ceilings']['tflops']:.1%}"]
            line += ["-" if sheet is None else f"{tflops / sheet:.1%}"]
            saves = name.startswith("attention") and "standard" in found
            lines.append([*line, f"{found['standard'][0] / ms:.1f}x" if saves else "-"])
    title = "Use of the compute by kind of work in a layer (attention: useful FLOPs, half where causal)"
    return Table(title, lines)


def saturation(whole: list[Row], model: str) -> tuple[int, float, int] | None:
    """(shortest prefill with SATURATED of the model's best rate, that best in TFLOP/s, the longest tried)."""
    rates = {
        row["point"]["seq_len"]: row["result"]["tflops"]
        for row in whole
        if row["point"]["pass"] == "prefill" and row["point"]["model"] == model
    }
    if len(rates) < 2:
        return None
    best = max(rates.values())
    return min(t for t, rate in rates.items() if rate >= SATURATED * best), best, max(rates)


def at_512(whole: list[Row], model: str) -> float | None:
    """The share of the compute that the model's prefill of 512 tokens uses."""
    for row in whole:
        p, result = row["point"], row["result"]
        if (p["pass"], p["model"], p["seq_len"]) == ("prefill", model, 512):
            return share(result, result["ceilings"])[0]
    return None


def of_one_row(whole: list[Row]) -> list[Row]:
    """Decoding without a batch."""
    return [row for row in whole if (row["point"]["pass"], row["point"]["batch"]) == ("decode", 1)]


def finding(whole: list[Row]) -> str:
    """Of the last model that decodes, the largest."""
    for row in of_one_row(whole)[-1:]:
        model = row["point"]["model"]
        compute, bandwidth = share(row["result"], row["result"]["ceilings"])
        if (prefill := at_512(whole, model)) is not None:
            return (
                f"{model}: a prefill of 512 tokens uses {prefill:.0%} of the compute, a decoding step "
                f"{bandwidth:.0%} of the bandwidth and {compute:.1%} of the compute."
            )
    return ""


def notes(rows: list[Row], whole: list[Row], layers: list[Row]) -> list[str]:
    found = []
    for model in dict.fromkeys(row["point"]["model"] for row in whole):
        if (reached := saturation(whole, model)) is not None:
            tokens, best, longest = reached
            limit = ", the longest tried: it may not be saturated" if tokens == longest else ""
            if (short := at_512(whole, model)) is not None:
                limit += f"; at 512 tokens {short:.0%} of what a cuBLAS product reaches"
            found.append(
                f"{model}: a prefill reaches {SATURATED:.0%} of its best, {best:.3g} TFLOP/s, at {tokens:,} "
                f"tokens{limit}."
            )
    for row in of_one_row(whole):
        result = row["result"]
        compute, bandwidth = share(result, result["ceilings"])
        found.append(
            f"{row['point']['model']}: decoding one row uses {bandwidth:.0%} of the bandwidth and "
            f"{compute:.1%} of the compute, at {intensity(result):.1f} FLOP/byte."
        )
    found += [units(row) for row in layers if row["point"]["model"] == BERT]
    scores = 8192**2
    found.append(
        f"Scores of a head: {scores:,} in a prefill of 8,192 tokens, half of them masked; 8,192 in a "
        "decoding step."
    )
    found.append("Bytes are the least that a call has to move; what the caches serve again is not in them.")
    bad = [row for row in rows if not trusted(row["result"])]
    found += [f"Left out: {row['point']['model']} {setting(row)}: {why(row['result'])}" for row in bad]
    for row in layers:
        for name, part in row["result"]["parts"].items():
            if name not in parts_of(row):
                found.append(f"Left out: {name}, {row['point']['model']} {setting(row)}: {why(part)}")
    return found


def why(result: dict[str, Any]) -> str:
    if result.get("reason"):
        return result["reason"]
    return f"error ratio {result.get('error_ratio')}, kernels right: {result.get('kernels_ok')}"


def units(row: Row) -> str:
    """Claim 14's figures of intensity are FLOPs an element: what reproduces them, and where the time goes."""
    p, parts = row["point"], parts_of(row)
    rows, width = p["batch"] * p["seq_len"], p["heads"] * p["head_dim"]
    if not {"QK^T", "softmax", "QKV projection"} <= parts.keys():
        return ""
    alone = 2 * rows * width**2 / (2 * rows * width + width**2)  # Q's, K's or V's projection by itself
    each = {name: part["flops"] / part["elements"] for name, part in parts.items()}
    flops, ms = layer_share(parts, "standard")
    return (
        f"At {p['batch']} x {p['seq_len']} tokens, {p['heads']} heads of {p['head_dim']}: Q's, K's or V's "
        f"projection by itself has {alone:.0f} FLOPs an element, Q K^T {each['QK^T']:.0f}, softmax "
        f"{each['softmax']:.1f}; in 16 bits that is half as many a byte. Matrix products are {flops:.1%} of "
        f"a layer's FLOPs and {ms:.0%} of its time with standard attention."
    )
