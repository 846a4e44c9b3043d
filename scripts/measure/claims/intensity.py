"""Claims 14, 19 and 28: compute and bandwidth of a layer's parts, of prefill and of decode, from
results/prefill_decode."""

from __future__ import annotations

from model.costs.gpus import gpu_sheet
from scripts.measure.claims import (
    FAILS,
    HOLDS,
    IN_PART,
    Answer,
    NotMeasured,
    Results,
    Row,
    answer,
    answers,
    missing,
    of,
)
from scripts.measure.report.prefill_decode_report import (
    BERT,
    SATURATED,
    balance,
    intensity,
    layer_share,
    parts_of,
    saturation,
    share,
    utilisation,
)

LARGE = "13b"


def layer_of(results: Results, **wanted: object) -> Row:
    return of(results.ok("prefill_decode", implementation="parts", **wanted), **wanted)


@answers(14)
def intensity_decides(results: Results) -> Answer:
    row = layer_of(results, model=BERT)
    parts, ceilings = parts_of(row), row["result"]["ceilings"]
    names = ("QKV projection", "QK^T", "softmax", "PV")
    if not set(names) <= parts.keys():
        raise missing("prefill_decode", model=BERT)
    used = {name: share(parts[name], ceilings) for name in names}
    flops, time = layer_share(parts, "standard")
    meet = balance(ceilings)
    # Theirs: the projection at 61.2% of the compute, softmax at 1.3% of it, products 99.8% of the FLOPs in
    # 61% of the time. Here: at least half, at most 5%, and 99.5% of the FLOPs in less than 80% of the time.
    memory_bound = intensity(parts["softmax"]) < meet and used["softmax"][0] <= 0.05
    rest = used["QKV projection"][0] >= 0.5 and flops >= 0.995 and time < 0.8
    verdict = HOLDS if memory_bound and rest else IN_PART if memory_bound else FAILS
    said = "; ".join(
        f"{name} {intensity(parts[name]):.3g} FLOP/byte, {1e3 * parts[name]['ms_median']:.0f} us, "
        f"{used[name][0]:.1%} of the compute and {used[name][1]:.0%} of the bandwidth"
        for name in names
    )
    why = (
        f"At 8 rows of 512 tokens, 16 heads of 64, a shape whose products have their figures: {said}; the "
        f"balance of this GPU, as measured, is {meet:.0f} FLOP/byte. Products are {flops:.1%} of a layer's "
        f"FLOPs and {time:.0%} of its time. Their 910 and 102 come out as FLOPs an element, not a byte (910 "
        "for one of Q, K and V by itself), and so does 2.5 with 5 FLOPs counted for a score's softmax."
    )
    figure = f"QKV {used['QKV projection'][0]:.0%}, softmax {used['softmax'][0]:.1%} of the compute"
    return answer([row], figure, verdict, why)


@answers(19)
def prefill_and_decode(results: Results) -> Answer:
    rows = [r for r in results.ok("prefill_decode", model=LARGE) if r["point"]["implementation"] != "parts"]
    prefill, decode = of(rows, passed="prefill", seq_len=512), of(rows, passed="decode", batch=1)
    reached = saturation(rows, LARGE)
    if reached is None:
        raise missing("prefill_decode", model=LARGE, passed="prefill")
    shortest, best, longest = reached
    compute = share(prefill["result"], prefill["result"]["ceilings"])[0]
    idle, busy = share(decode["result"], decode["result"]["ceilings"])
    layers = [
        layer_of(results, model=LARGE, passed="prefill", seq_len=512),
        layer_of(results, model=LARGE, passed="decode", batch=1),
    ]
    saves = [fused_saves(row) for row in layers]
    # Saturated: 90% of the model's best rate; bound by memory: half of a copy's rate, a tenth of the compute.
    checks = (shortest <= 512 < longest, busy >= 0.5 and idle <= 0.1, saves[0] > saves[1])
    verdict = HOLDS if all(checks) else IN_PART if any(checks) else FAILS
    why = (
        f"The 13B shape reaches {SATURATED:.0%} of its best prefill, {best:.0f} TFLOP/s, at {shortest:,} "
        f"tokens; 512 tokens use {compute:.0%} of what a cuBLAS product reaches. A decoding step of one row "
        f"uses {busy:.0%} of a copy's bandwidth and {idle:.1%} of the compute. Fused attention is "
        f"{saves[0]:.1f}x the standard one in a prefill of 512 tokens and {saves[1]:.1f}x in a decoding "
        f"step. 8,192 tokens have {8192**2:,} scores a head in prefill (half are masked), 8,192 in a step."
        f"{small_model(results)}"
    )
    figure = f"512 tokens {compute:.0%} of the compute; decode {busy:.0%} of the bandwidth"
    return answer([prefill, decode, *layers], figure, verdict, why)


def small_model(results: Results) -> str:
    """The same shares of GPT-2 124M, in a sentence: the claim is of a model that fills the GPU."""
    try:
        rows = [
            r for r in results.ok("prefill_decode", model="gpt2") if r["point"]["implementation"] != "parts"
        ]
        prefill, decode = of(rows, passed="prefill", seq_len=512), of(rows, passed="decode", batch=1)
    except NotMeasured:
        return ""
    compute = share(prefill["result"], prefill["result"]["ceilings"])[0]
    bandwidth = share(decode["result"], decode["result"]["ceilings"])[1]
    return f" GPT-2 124M, of which less fills the GPU, reaches {compute:.0%} and {bandwidth:.0%}."


def fused_saves(row: Row) -> float:
    """How much faster than standard attention the best fused one is. Raises NotMeasured without either."""
    found = utilisation(parts_of(row))
    fused = [ms for name, (ms, _) in found.items() if name.startswith("attention")]
    if not fused or "standard" not in found:
        raise missing("prefill_decode", model=row["point"]["model"], passed=row["point"]["pass"])
    return found["standard"][0] / min(fused)


@answers(28)
def utilisations(results: Results) -> Answer:
    row = layer_of(results, model=LARGE, passed="prefill", seq_len=2048)
    found, peak = utilisation(parts_of(row)), gpu_sheet(row["machine"]["gpu"]).bf16_flops / 1e12
    fused = {name: rate for name, (_, rate) in found.items() if name.startswith("attention")}
    if not fused or "standard" not in found:
        raise missing("prefill_decode", model=LARGE, seq_len=2048)
    products, standard = (found[name][1] / peak for name in ("weights", "standard"))
    here, rows = max(fused.values()) / peak, [row]
    best, where = here, "at this shape"
    try:  # at other shapes it may do better: the claim names none
        alone = results.ok("attention", passed="forward", dtype="bfloat16", features="")
        top = max(alone, key=lambda each: each["result"]["tflops"])
        if top["result"]["tflops"] / peak > best:
            best, rows = top["result"]["tflops"] / peak, [row, top]
            p = top["point"]
            where = f"at its best ({p['implementation']}, T = {p['seq_len']:,}, D = {p['head_dim']})"
    except NotMeasured:
        pass
    # Theirs: 70-80%, 30%, 75%; at most 35% counts as 30.
    verdict = HOLDS if products >= 0.7 and standard <= 0.35 and here >= 0.75 else FAILS
    if verdict == FAILS and min(products, here) > standard:
        verdict = IN_PART
    why = (
        f"In a layer of the 13B shape (prefill of 2,048 tokens) the products with weights use {products:.0%} "
        f"of the datasheet's peak, standard attention {standard:.0%} and the better fused one {here:.0%} "
        f"(useful FLOPs, half as causal); fused attention {where} uses {best:.0%}."
    )
    figure = f"products {products:.0%}, standard {standard:.0%}, fused {here:.0%} of the peak"
    return answer(rows, figure, verdict, why)
