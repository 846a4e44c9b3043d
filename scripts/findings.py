"""What each study found, a sentence with its figures: the index of results/README.md.

A function a study, named as the study: of its rows and of its notes (scripts/studies: Report.notes), whose
figures it repeats. Of a study without one, or where the rows do not say it, the first sentence of its first
note stands, if short.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

Row = dict[str, Any]
Finding = Callable[[Sequence[Row], Sequence[str]], str]
SHORT = 160  # characters of a sentence that a table can hold
DTYPES = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}

FINDINGS: dict[str, Finding] = {}


def found(study: str, rows: Sequence[Row], notes: Sequence[str]) -> str:
    say = FINDINGS.get(study)
    first = re.split(r"(?<=\.) (?=[A-Z])", notes[0])[0] if notes else ""
    return (say(rows, notes) if say else "") or (first if len(first) <= SHORT else "")


def finding(function: Finding) -> Finding:
    FINDINGS[function.__name__] = function
    return function


def told(notes: Sequence[str], pattern: str) -> list[tuple[str, ...]]:
    """The groups of the pattern wherever a note has it."""
    return [match.groups() for note in notes for match in re.finditer(pattern, note)]


@finding
def attention(rows: Sequence[Row], notes: Sequence[str]) -> str:
    """The fastest, and the fastest of ours, at the longest T with the wider heads of the README's table."""
    from scripts import attention_report
    from scripts.summary import IN_TABLE, shown

    speeds: dict[str, dict[str, float]] = {}
    panels = [(key, panel) for key, panel in shown(list(rows)).items() if key[2] == IN_TABLE[-1]]
    panels = [(key, panel) for key, panel in panels if key[0] in ("forward", "backward")]
    longest = max((t for _, panel in panels for line in panel.values() for t in line), default=0)
    for key, panel in panels:
        for name, line in panel.items():
            if longest in line and attention_report.trusted(line[longest]["result"]):
                speeds.setdefault(name, {})[key[0]] = line[longest]["result"]["tflops"]
    both = {name: of for name, of in speeds.items() if len(of) == 2}
    ours = {name: of for name, of in both.items() if not attention_report.is_peer(name)}
    if not ours:
        return ""
    said = []
    for words, of in (("fastest", both), ("fastest of ours", ours)):
        name = max(of, key=lambda name: of[name]["forward"])
        said.append(f"{words} {name}, {of[name]['forward']:.0f} / {of[name]['backward']:.0f} TFLOP/s")
    return f"D = {IN_TABLE[-1]}, T = {longest:,}, forward / backward: {'; '.join(said)}."


@finding
def attention_speed(rows: Sequence[Row], notes: Sequence[str]) -> str:
    times = told(notes, r"^N = ([\d,]+), forward: \S+ is ([\d.]+x) as fast as standard")
    if not times:
        return ""
    each = " to ".join(f"{factor} (N = {n})" for n, factor in dict.fromkeys((times[0], times[-1])))
    return f"Forward, the fastest is {each} as fast as standard attention."


@finding
def attention_memory(rows: Sequence[Row], notes: Sequence[str]) -> str:
    exponents = told(notes, r"^forward \+ backward: exponents of ([\d.]+) to ([\d.]+)")
    if len(exponents) < 2:
        return ""
    (_, square), (_, linear) = exponents[:2]
    return (
        f"Forward and backward, memory grows as N^{square} where scores are written, as N^{linear} elsewhere."
    )


@finding
def numerics(rows: Sequence[Row], notes: Sequence[str]) -> str:
    others = told(notes, r"(\d+) of (\d+) calls that ran took another kernel")
    exact = told(notes, r"^Online softmax is exact .* of all implementations ([\d.]+)\.")
    if not (others and exact):
        return ""
    return (
        f"Exact within {exact[0][0]} epsilons; {others[0][0]} of {others[0][1]} calls ran another kernel "
        "than they asked for."
    )


@finding
def cuda_ladder(rows: Sequence[Row], notes: Sequence[str]) -> str:
    """The first, the tiled and the last stage, and cuDNN, at the longest N that all have."""
    names = {"cuda_naive": "naive", "cuda_tiled": "tiled", "cuda_fa2": "fa2", "sdpa_cudnn": "cuDNN"}
    at: dict[int, dict[str, Row]] = {}
    for row in rows:
        p = row["point"]
        shape = (p["pass"], p["causal"], p["heads"], p["head_dim"]) == ("forward", True, 32, 128)
        if shape and row["result"]["status"] == "ok":
            at.setdefault(p["seq_len"], {})[p["implementation"]] = row
    full = [tokens for tokens, of in at.items() if names.keys() <= of.keys()]
    if not full:
        return ""
    each = [
        f"{word} {row['result']['ms_median']:.3g} ms ({DTYPES[row['point']['dtype']]})"
        for name, word in names.items()
        for row in [at[max(full)][name]]
    ]
    return f"Forward at N = {max(full):,}: {', '.join(each)}."


@finding
def roofline(rows: Sequence[Row], notes: Sequence[str]) -> str:
    read = {
        (row["point"]["implementation"], row["point"]["seq_len"]): row["result"]["counters"][
            "dram_read_bytes"
        ]
        for row in rows
        if row["result"].get("counters") and row["point"].get("causal") and row["point"]["head_dim"] == 128
    }
    both = [tokens for name, tokens in read if name == "cuda_naive" and ("cuda_fa2", tokens) in read]
    if not both:
        return ""
    naive, fa2 = (read[name, max(both)] / 1e9 for name in ("cuda_naive", "cuda_fa2"))
    return f"At T = {max(both):,} naive reads {naive:.0f} GB of DRAM, fa2 {fa2:.2f} GB."


@finding
def backward_recompute(rows: Sequence[Row], notes: Sequence[str]) -> str:
    times = told([note for note in notes if "P again over P kept" in note], r"([\d.]+x) at N = (\w+)")
    if not times:
        return ""
    each = " to ".join(f"{factor} (N = {n})" for factor, n in dict.fromkeys((times[0], times[-1])))
    return f"To compute P again is {each} as fast as to keep it."


@finding
def gpt2_124m(rows: Sequence[Row], notes: Sequence[str]) -> str:
    done = [row for row in rows if row["result"]["status"] == "ok"]
    speeds = {row["point"]["implementation"]: row["result"]["tokens_per_s"] for row in done}
    ours = {name: speed for name, speed in speeds.items() if name != "nanoGPT"}
    if not ours:
        return ""
    best = max(ours, key=ours.__getitem__)
    of = f", {ours[best] / speeds['nanoGPT']:.3f}x nanoGPT's" if "nanoGPT" in speeds else ""
    return f"{ours[best]:,.0f} tokens/s{of} ({best})."


@finding
def seqlen_scaling(rows: Sequence[Row], notes: Sequence[str]) -> str:
    times = told([note for note in notes if "nanoGPT's speed" in note], r"([\d.]+)x at ([\d,]+)")
    ends = told(notes, r"^naive is out of memory at T = ([\d,]+)")
    if not times:
        return ""
    ratios = [float(ratio) for ratio, _ in times]
    first, last = (times[i][1].rstrip(",") for i in (0, -1))
    words = (
        f"The fastest is {min(ratios):.3f}x to {max(ratios):.3f}x nanoGPT's speed at T = {first} to {last}"
    )
    return words + (f"; naive is out of memory at {ends[0][0]}." if ends else ".")


@finding
def speedup_end_to_end(rows: Sequence[Row], notes: Sequence[str]) -> str:
    pattern = r"^(\w+): .*? ([\d.]+x) Hugging Face's with its eager attention.*? ([\d.]+x) ours with standard"
    each = [
        f"{m}: {whole} its eager speed, {alone} by attention alone"
        for m, whole, alone in told(notes, pattern)
    ]
    return "; ".join(each) + "." if each else ""


@finding
def encoder_short(rows: Sequence[Row], notes: Sequence[str]) -> str:
    times = told(notes, r"trains ([\d.]+x) as fast as attention written out, (where .*)\.$")
    return f"Fused: {', '.join(f'{factor} {where}' for factor, where in times)}." if times else ""


@finding
def shakespeare_char(rows: Sequence[Row], notes: Sequence[str]) -> str:
    best = min((row["result"] for row in rows), key=lambda result: result["best_val_loss"])
    return f"Validation loss {best['best_val_loss']:.4f} at best, in {best['wall_s']:.0f} s in all."


@finding
def generate(rows: Sequence[Row], notes: Sequence[str]) -> str:
    done = [row for row in rows if row["result"]["status"] == "ok"]
    each = {row["point"]["batch"]: row["result"]["tokens_per_s"] for row in done}
    said = ", ".join(f"{speed:,.0f} tokens/s in batches of {batch}" for batch, speed in sorted(each.items()))
    return f"{done[0]['point']['model']}: {said}." if said else ""


@finding
def kv_cache(rows: Sequence[Row], notes: Sequence[str]) -> str:
    pattern = r"At ([\d,]+) tokens the cache saves ([\d.]+x), (\w+) ([\d.]+x) and both ([\d.]+x)"
    return "".join(
        f"Over {tokens} tokens the cache saves {cache}, {name} {fused}, both {both}."
        for tokens, cache, name, fused, both in told(notes, pattern)[:1]
    )


@finding
def prefill_decode(rows: Sequence[Row], notes: Sequence[str]) -> str:
    prefill = dict(told(notes, r"^(\w+): a prefill .* at 512 tokens (\d+%) of what a cuBLAS"))
    decode = told(
        notes, r"^(\w+): decoding one row uses (\d+%) of the bandwidth and ([\d.]+%) of the compute"
    )
    if not decode or decode[-1][0] not in prefill:
        return ""
    model, bandwidth, compute = decode[-1]
    return (
        f"{model}: a prefill of 512 tokens uses {prefill[model]} of the compute, a decoding step {bandwidth} "
        f"of the bandwidth and {compute} of the compute."
    )
