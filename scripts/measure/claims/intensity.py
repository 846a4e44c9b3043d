"""Claims 14, 19 and 28: compute and bandwidth of a layer's parts, of prefill and of decode, from
results/prefill_decode."""

from __future__ import annotations

from model.costs.gpus import gpu_sheet
from scripts.measure.claims import Figures, NotMeasured, Results, Row, claim, listed, missing, of
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

STUDY, LARGE = "prefill_decode", "13b"
MASK = {True: "with a causal mask", False: "without a mask"}


def layer_of(results: Results, **wanted: object) -> Row:
    return of(results.ok(STUDY, implementation="parts", **wanted), **wanted)


@claim(
    14,
    "Arithmetic intensity decides what bounds a part of a layer: softmax is bound by memory.",
    theirs="""QKV projection 910 FLOP/byte, 306 us, 61.2% of the peak in compute, 12% in memory; QK^T 102,
        143 us, 21.8%, 50%; scale and softmax 2.5, 433 us, 1.3%, 32%; PV 160 us, 19.4%, 6%; balance 138.9
        (V100). Matrix products: over 99.8% of the FLOPs, 61% of the time. Balance: A100 156, H100 295
        FLOP/byte""",
    # Theirs: the projection at 61.2% of the compute, QK^T at 50% and softmax at 32% of the bandwidth, softmax
    # at 1.3% of the compute; products over 99.8% of the FLOPs in 61% of the time. In part: those of softmax.
    holds=lambda f: (
        (f.qkv >= 0.612 and f.qk >= 0.5 and f.softmax_bandwidth >= 0.32 and f.softmax <= 0.013)
        and (f.flops > 0.998 and f.time <= 0.61)
    ),
    partly=lambda f: f.softmax_bandwidth >= 0.32 and f.softmax <= 0.013,
    differ=(),
    figure="QKV {qkv:.0%}, softmax {softmax:.1%} of the compute",
    why="""
        At 8 rows of 512 tokens, 16 heads of 64, a shape whose products have their figures: {said}{idle}.
        The balance of this GPU, as measured, is {balance:.0f} FLOP/byte{below}. Products are {flops:.1%} of a
        layer's FLOPs and {time:.0%} of its time. Their 910 and 102 come out as FLOPs an element, not a byte
        (910 for one of Q, K and V by itself), and so does 2.5 with 5 FLOPs counted for a score's softmax.
        """,
)
def intensity_decides(results: Results) -> Figures:
    row = layer_of(results, model=BERT)
    parts, ceilings = parts_of(row), row["result"]["ceilings"]
    names = ("QKV projection", "QK^T", "softmax", "PV")
    if not set(names) <= parts.keys():
        raise missing(STUDY, model=BERT)
    used = {name: share(parts[name], ceilings) for name in names}
    below = [name for name in names if name != "softmax" and intensity(parts[name]) < balance(ceilings)]
    flops, time = layer_share(parts, "standard")
    each = [(name, intensity(parts[name]), 1e3 * parts[name]["ms_median"], *used[name]) for name in names]
    sentence = "{} {:.3g} FLOP/byte, {:.0f} us, {:.1%} of the compute and {:.0%} of the bandwidth"
    return Figures(
        [row],
        qkv=used["QKV projection"][0],
        qk=used["QK^T"][1],
        softmax=used["softmax"][0],
        softmax_bandwidth=used["softmax"][1],
        balance=balance(ceilings),
        idle="" if max(used["softmax"]) >= 0.5 else ": softmax is at neither limit",
        below=f", more than {' and '.join(below)} have, which are products" if below else "",
        flops=flops,
        time=time,
        said=listed(sentence, each, "; "),
    )


@claim(
    19,
    "Prefill is bound by compute, decoding by memory; FlashAttention helps the first.",
    theirs="""prefill of 8,192 tokens: 67,108,864 scores, a step of decoding 8,192. A prefill of 512
        tokens of a 13B model (40 layers, 5,120 wide) saturates an A100""",
    # Saturated: 90% of the model's best rate, and half of the compute; memory-bound: half of a copy's rate, a
    # tenth of the compute.
    holds=lambda f: saturates(f) and f.busy >= 0.5 and f.idle <= 0.1 and f.prefill > f.decode,
    partly=lambda f: saturates(f) or (f.busy >= 0.5 and f.idle <= 0.1) or f.prefill > f.decode,
    differ=(),
    apart=("implementation", "model", "pass", "batch", "seq_len"),
    figure="512 tokens {compute:.0%} of the compute; decode {busy:.0%} of the bandwidth",
    why="""
        The 13B shape reaches {saturated:.0%} of its best prefill, {best:.0f} TFLOP/s, at {shortest:,}
        tokens; 512 tokens use {compute:.0%} of the {cublas:.0f} TFLOP/s of cuBLAS' product of 8,192 x 8,192
        matrices in the same run, which is the compute here. A decoding step of one row uses {busy:.0%} of a
        copy's bandwidth and {idle:.1%} of the compute. Fused attention is {prefill:.1f}x the standard one in
        a prefill of 512 tokens and {decode:.1f}x in a decoding step.
        8,192 tokens have 67,108,864 scores a head in prefill (half are masked), 8,192 in a step.

        GPT-2 124M, of which less fills the GPU, reaches {small_compute:.0%} and {small_busy:.0%}.
        """,
)
def prefill_and_decode(results: Results) -> Figures:
    prefill, decode, rows = steps_of(results, LARGE)
    reached = saturation(rows, LARGE)
    if reached is None:
        raise missing(STUDY, model=LARGE, passed="prefill")
    shortest, best, longest = reached
    layers = [
        layer_of(results, model=LARGE, passed="prefill", seq_len=512),
        layer_of(results, model=LARGE, passed="decode", batch=1),
    ]
    try:  # the claim is of a model that fills the GPU
        beside = list(steps_of(results, "gpt2")[:2])
        small = used(beside[0])[0], used(beside[1])[1]
    except NotMeasured:
        beside, small = [], (None, None)
    return Figures(
        [*rows, *layers, *beside],
        cublas=prefill["result"]["ceilings"]["tflops"],
        compute=used(prefill)[0],
        idle=used(decode)[0],
        busy=used(decode)[1],
        saturated=SATURATED,
        shortest=shortest,
        longest=longest,
        best=best,
        prefill=fused_saves(layers[0]),
        decode=fused_saves(layers[1]),
        small_compute=small[0],
        small_busy=small[1],
    )


def saturates(f: Figures) -> bool:
    return f.shortest <= 512 < f.longest and f.compute >= 0.5


def steps_of(results: Results, model: str) -> tuple[Row, Row, list[Row]]:
    """A prefill of 512 tokens, a decoding step of one row, and all rows of whole steps."""
    rows = [row for row in results.ok(STUDY, model=model) if row["point"]["implementation"] != "parts"]
    return of(rows, passed="prefill", seq_len=512), of(rows, passed="decode", batch=1), rows


def used(row: Row) -> tuple[float, float]:
    """Shares of the compute and of the bandwidth that were measured on this GPU."""
    return share(row["result"], row["result"]["ceilings"])


def fused_saves(row: Row) -> float:
    """How much faster than standard attention the best fused one is. Raises NotMeasured without either."""
    found = utilisation(parts_of(row))
    fused = [ms for name, (ms, _) in found.items() if name.startswith("attention")]
    if not fused or "standard" not in found:
        raise missing(STUDY, model=row["point"]["model"], passed=row["point"]["pass"])
    return found["standard"][0] / min(fused)


@claim(
    28,
    "Matrix products use most of the GPU and attention little of it, until FlashAttention.",
    theirs="70-80% of the peak; 30%; with FlashAttention 75%",
    # Theirs: 70-80%, 30%, 75%; at most 35% counts as 30.
    holds=lambda f: f.products >= 0.7 and f.standard <= 0.35 and f.fused >= 0.75,
    partly=lambda f: min(f.products, f.fused) > f.standard,
    differ=(),
    apart=("study", "causal"),
    figure="products {products:.0%}, standard {standard:.0%}, fused {fused:.0%} of the peak",
    why="""
        In a layer of the 13B shape (prefill of 2,048 tokens, causal) the products with weights use
        {products:.0%} of the datasheet's peak, standard attention {standard:.0%} and {which} {fused:.0%}, the
        better of the {tried} fused ones that were timed there ({names}; useful FLOPs, half as causal).

        At its best among all shapes, which the claim does not name, fused attention uses {best}.
        """,
)
def utilisations(results: Results) -> Figures:
    row = layer_of(results, model=LARGE, passed="prefill", seq_len=2048)
    found, peak = utilisation(parts_of(row)), gpu_sheet(row["machine"]["gpu"]).bf16_flops / 1e12
    rates = {name: rate for name, (_, rate) in found.items() if name.startswith("attention")}
    if not rates or "standard" not in found:
        raise missing(STUDY, model=LARGE, seq_len=2048)
    which = max(rates, key=rates.__getitem__)
    products, standard, fused = (
        rate / peak for rate in (found["weights"][1], found["standard"][1], rates[which])
    )
    try:
        alone = results.ok("attention", passed="forward", dtype="bfloat16", features="")
    except NotMeasured:
        alone = []
    tops = [
        max(mine, key=lambda each: each["result"]["tflops"])
        for causal in (True, False)
        if (mine := [each for each in alone if bool(each["point"]["causal"]) == causal])
    ]
    best = [
        (each["result"]["tflops"] / peak, MASK[bool(each["point"]["causal"])], each["point"]) for each in tops
    ]
    said = "{0:.0%} {1} ({2[implementation]}, T = {2[seq_len]:,}, D = {2[head_dim]})"
    return Figures(
        [row, *tops],
        products=products,
        standard=standard,
        fused=fused,
        which=short(which),
        tried=len(rates),
        names=", ".join(map(short, rates)),
        best=listed(said, best, " and ") or None,
    )


def short(part: str) -> str:
    """The implementation of a part of a layer."""
    return part.removeprefix("attention, ")
