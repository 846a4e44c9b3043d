"""Claims 1, 2, 3, 11, 12, 15, 16 and 24: attention by itself, from the studies attention_memory and
attention_speed. Standard attention there is the formula in eager PyTorch in 16 bits, `standard`."""

from __future__ import annotations

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
    graded,
    missing,
    of,
)

MEMORY, SPEED = "attention_memory", "attention_speed"
GROWTH = (1024, 16384)
NEAR = 0.1  # a figure this close to the claimed one is that figure
LEAN = ("sdpa_flash", "cuda_fa2", "triton", "flash4")
# What each of them says of one head in D = 128, fp32: N -> MB in all.
CLAIMED_TOTALS = {1024: 5, 4096: 66, 8192: 260}


def near(ours: float, claimed: float) -> bool:
    return abs(ours / claimed - 1) <= NEAR


def leanest(rows: list[Row], field: str = "peak_mib") -> Row:
    """The row with the least memory of those that keep no scores. Raises NotMeasured for none."""
    rows = [row for row in rows if row["point"]["implementation"] in LEAN]
    if not rows:
        raise missing(MEMORY, implementation=LEAN)
    return min(rows, key=lambda row: row["result"][field])


def ms(row: Row) -> float:
    return row["result"]["ms_median"]


def fastest(rows: list[Row]) -> Row:
    """Of those that keep no scores. Raises NotMeasured for none."""
    from attention import registry

    rows = [row for row in rows if not registry.declaration(row["point"]["implementation"]).writes_scores]
    if not rows:
        raise missing(SPEED)
    return min(rows, key=ms)


def name(row: Row) -> str:
    return row["point"]["implementation"]


def in_words(factors: dict[int, float], figures: int = 1) -> str:
    return ", ".join(f"{factor:.{figures}f}x at N = {n:,}" for n, factor in factors.items())


@answers(1)
def scores_and_statistics(results: Results) -> Answer:
    """Stored: what is allocated beyond the output."""
    big = results.ok(MEMORY, passed="forward", batch=8, heads=32, seq_len=8192)
    standard, tiled = of(big, implementation="standard"), of(big, implementation="cuda_fa2")
    scores, kept = standard["result"]["scores_mib"], tiled["result"]["extra_mib"]
    most = standard["result"]["extra_mib"]
    grown = []
    for each in ("standard", "cuda_fa2"):
        ends = results.ok(MEMORY, passed="forward", batch=1, heads=12, implementation=each, seq_len=GROWTH)
        small, large = (of(ends, seq_len=n)["result"]["extra_mib"] for n in GROWTH)
        grown.append(large / small)
    # 32 GiB have to be there at least once, and the statistic is one fp32 number a row: 8 MiB.
    stored = most >= 32 * 1024 and near(kept, 8)
    verdict = HOLDS if stored and near(grown[0], 256) and near(grown[1], 16) else IN_PART if stored else FAILS
    why = (
        f"At B = 8, H = 32, N = 8192 in fp16 the scores are {scores / 1024:.0f} GiB; standard attention "
        f"allocates {most / 1024:.0f} GiB beyond its output, {most / scores:.1f} matrices at a time, and "
        f"cuda_fa2 {kept:.1f} MiB. From N = 1k to 16k what is beyond the output grows {grown[0]:.0f}x and "
        f"{grown[1]:.0f}x (batch 1, 12 heads)."
    )
    return answer([standard, tiled], f"{most / 1024:.0f} GiB against {kept:.1f} MiB", verdict, why)


@answers(2)
def twenty_times_less(results: Results) -> Answer:
    rows = results.ok(MEMORY, passed="both", batch=16, heads=8)
    factors, whole = {}, {}
    for n in sorted({row["point"]["seq_len"] for row in rows}):
        standard = of(rows, implementation="standard", seq_len=n)
        lean = leanest([row for row in rows if row["point"]["seq_len"] == n])
        peaks = [row["result"]["peak_mib"] for row in (standard, lean)]
        inputs = lean["result"]["inputs_mib"]
        factors[n], whole[n] = peaks[0] / peaks[1], (peaks[0] + inputs) / (peaks[1] + inputs)
    if 4096 not in factors:
        raise missing(MEMORY, passed="both", batch=16, heads=8, seq_len=4096)
    why = (
        f"Forward and backward (B = 16, H = 8, D = 64, fp16), standard over the leanest ({name(lean)}): what "
        f"a call allocates, {in_words(factors)}; with the inputs on both sides, {in_words(whole)}."
    )
    # Memory in use is what one sees, so the inputs count on both sides: the smaller factor.
    return answer(rows, f"{whole[4096]:.1f}x at N = 4k", graded(whole[4096], 20.3), why)


@answers(3)
def alone(results: Results) -> Answer:
    """Causal, D = 64, 16,384 tokens: the fastest of the fused, and PyTorch's own FlashAttention-2."""
    factors: dict[str, dict[int, float]] = {}
    used = []
    for passed in ("forward", "both"):
        for n in (1024, 2048):
            wanted = {"passed": passed, "seq_len": n, "batch": 16384 // n, "head_dim": 64, "causal": True}
            rows = results.ok(SPEED, dtype="bfloat16", **wanted)
            standard, best = of(rows, implementation="standard"), fastest(rows)
            flash = of(rows, implementation="sdpa_flash")
            factors.setdefault(f"{passed}, fastest", {})[n] = ms(standard) / ms(best)
            factors.setdefault(f"{passed}, FlashAttention-2 of PyTorch", {})[n] = ms(standard) / ms(flash)
            used += [standard, best, flash]
    full, used_full = unmasked(results)
    # Whether theirs has a mask, which the formula has to add, is not said: the least of all that is measured.
    least = min(factors[f"{passed}, fastest"][2048] for passed in ("forward", "both"))
    least = min(least, full.get("fastest", least))
    said = "; ".join(f"{what} {in_words(of_n)}" for what, of_n in factors.items())
    why = f"Over the formula in eager PyTorch in bf16 (causal, as GPT-2's is; D = 64): {said}."
    if full:
        why += (
            f" Without a mask, which the formula has to add, the forward is {full['fastest']:.1f}x at N = "
            f"2,048, and {full['flash']:.1f}x with FlashAttention-2 of PyTorch: the mask's cost is the rest."
        )
    both = " / ".join(f"{factors[f'{passed}, fastest'][2048]:.1f}x" for passed in ("forward", "both"))
    figure = f"{both} (forward / both) at N = 2k, causal" + (f"; {full['fastest']:.1f}x full" if full else "")
    return answer([*used, *used_full], figure, graded(least, 7.6), why)


def unmasked(results: Results) -> tuple[dict[str, float], list[Row]]:
    """Factors of the forward without a mask over the formula's, and the rows; none where not measured."""
    try:
        wanted = {"passed": "forward", "seq_len": 2048, "batch": 8, "head_dim": 64, "causal": False}
        rows = results.ok(SPEED, dtype="bfloat16", **wanted)
        best, flash = fastest(rows), of(rows, implementation="sdpa_flash")
        standard = ms(of(rows, implementation="standard"))
    except NotMeasured:
        return {}, []
    return {"fastest": standard / ms(best), "flash": standard / ms(flash)}, [best, flash]


@answers(11)
def one_head(results: Results) -> Answer:
    rows = results.rows(MEMORY, passed="forward", heads=1, head_dim=128)
    totals: dict[str, dict[int, float]] = {}
    for row in rows:
        if row["result"]["status"] == "ok":
            total = row["result"]["peak_mib"] + row["result"]["inputs_mib"]
            totals.setdefault(name(row), {})[row["point"]["seq_len"]] = total
    if not {1024, 4096, 8192} <= totals.get("standard", {}).keys():
        raise missing(MEMORY, passed="forward", heads=1, head_dim=128)
    right = {
        n for n, mb in CLAIMED_TOTALS.items() if any(near(of_n.get(n, 0), mb) for of_n in totals.values())
    }
    fits = 16384 in totals["standard"]
    # The matrix, N^2 x 4 bytes, is theirs whoever computes it; the totals and the end are what can be wrong.
    verdict = HOLDS if len(right) == len(CLAIMED_TOTALS) and not fits else IN_PART
    listed = "; ".join(
        f"{who} {', '.join(f'{mb:,.0f} MiB at {n:,}' for n, mb in sorted(of_n.items()))}"
        for who, of_n in totals.items()
    )
    big = of(rows, implementation="standard", seq_len=8192)["result"]
    why = (
        f"A head's scores are N^2 x 4 bytes, {big['scores_mib']:,.0f} MiB at 8,192, as claimed. With q, k, "
        f"v and out ({big['inputs_mib'] + big['outputs_mib']:,.0f} MiB there): {listed}. Standard attention "
        f"holds {big['extra_mib'] / big['scores_mib']:.1f} matrices at its peak. One head at 16,384 "
        f"{'fits here' if fits else 'ran out of memory here'}: 1 GiB of scores fills no 80 GB card."
    )
    at = totals["standard"]
    return answer(rows, ", ".join(f"{at[n]:,.0f} MiB at {n:,}" for n in CLAIMED_TOTALS), verdict, why)


@answers(12)
def tiles_in_pytorch(results: Results) -> Answer:
    wanted = {"batch": 1, "heads": 8, "seq_len": 2048, "dtype": "float16"}
    faster, saved, used = {}, {}, []
    for passed in ("forward", "both"):
        for study, kept in ((SPEED, faster), (MEMORY, saved)):
            rows = results.ok(study, passed=passed, **wanted)
            standard, tiled = (of(rows, implementation=which) for which in ("standard", "tiled"))
            used += [standard, tiled]
            if study == SPEED:
                kept[passed] = ms(standard) / ms(tiled)
            else:
                kept[passed] = 1 - tiled["result"]["peak_mib"] / standard["result"]["peak_mib"]
    # "2-4x" and "50%": of the forward, which their code is
    parts = [faster["forward"] >= 2, saved["forward"] >= 0.48]
    verdict = HOLDS if all(parts) else IN_PART if any(parts) else FAILS
    launches = [sum((row["result"].get("kernels") or {}).values()) for row in used[:2]]
    why = (
        "attention=tiled computes what their code means to (which does not run at this shape). It takes "
        f"{1 / faster['forward']:.3g} times standard attention's time forward ({launches[1]:,} kernels for "
        f"{launches[0]:,}) and {1 / faster['both']:.3g} times with backward, and allocates "
        f"{saved['forward']:.0%} less forward and {saved['both']:.0%} less with backward: the source that "
        f"expects it to be no faster {'errs' if faster['forward'] > 1 else 'is right'}."
    )
    slower = faster["forward"] < 1
    times = f"{1 / faster['forward']:.3g}x as slow" if slower else f"{faster['forward']:.3g}x as fast"
    figure = f"{times}, {saved['forward']:.0%} less memory"
    return answer(used, figure, verdict, why)


@answers(15)
def skipped_tiles(results: Results) -> Answer:
    from scripts.measure.instruments.bench_points import Shape
    from scripts.measure.instruments.speed_bench import tiles

    wanted = {"passed": "forward", "head_dim": 64, "dtype": "bfloat16", "features": "", "heads": 32}
    lengths = (1024, 2048, 4096, 16384)
    rows = results.ok(SPEED, implementation="cuda_fa2", seq_len=lengths, **wanted)
    rows = [row for row in rows if row["point"]["batch"] * row["point"]["seq_len"] == 16384]
    gains = {n: ms(of(rows, seq_len=n, causal=False)) / ms(of(rows, seq_len=n, causal=True)) for n in lengths}
    causal = of(rows, seq_len=16384, causal=True)
    windows = {}
    for n in (256, 1024, 4096):
        with_window = wanted | {"features": f"window={n}"}
        one = of(results.ok(SPEED, implementation="cuda_fa2", **with_window), seq_len=16384)
        windows[n] = ms(causal) / ms(one)
    computed, every = tiles(Shape(1, 1, 1, 4, 64, True, "bf16"), 1, 1)
    counted = causal["result"]["tiles_computed"] / causal["result"]["tiles_all"]
    rising = gains[16384] > gains[1024] and all(gain > 1 for gain in windows.values())
    # "towards 2x, not guaranteed": rising with N, and most of the way at the end
    verdict = HOLDS if (computed, every) == (10, 16) and rising and gains[16384] >= 1.75 else IN_PART
    narrower = ", ".join(f"{gain:.1f}x for {n:,} keys" for n, gain in windows.items())
    why = (
        f"cuda_fa2 at N = 16k computes {counted:.0%} of its tiles under a causal mask; of a 4 x 4 grid it "
        f"is {computed} of {every}. Without a mask its forward takes {in_words(gains, 2)} as long. Windows "
        f"make the causal N = 16k faster still: {narrower}."
    )
    verdict = FAILS if gains[16384] <= 1 else verdict
    return answer(rows, f"{gains[16384]:.2f}x at N = 16k", verdict, why)


@answers(16)
def short_sequences(results: Results) -> Answer:
    from scripts.measure.report.attention_speed_report import (
        MANY,
        MEASURES,
        ONE,
        PASSES,
        beats,
        crossover,
        winners,
    )

    rows = results.rows(SPEED)
    said: dict[str, list[str]] = {}
    wins, beaten = {}, {}
    for what in MEASURES:
        for passed in ("forward", "both"):
            if not (won := winners(rows, passed, False, what)):
                raise missing(SPEED, passed=passed, batch=1, seq_len=32)
            said.setdefault(crossover(won), []).append(f"{what}, {PASSES[passed]}")
            wins[what, passed] = [n for n, (_, eager, _, fused) in won.items() if eager < fused and n <= 256]
            beaten[f"{what}, {PASSES[passed]}"] = beats(rows, passed, False, what, 256)
    if many := winners(rows, "forward", True, "device"):
        said.setdefault(crossover(many), []).append(f"{MANY}, device, forward")
        beaten[f"{MANY}, device, forward"] = beats(rows, "forward", True, "device", 256)
    beaten = {where: names for where, names in beaten.items() if names}
    # "may win" asks for some N up to 256 at which it beats all of them, by the device and by the clock alike;
    # in part: by one of these, or some of them.
    by = [any(at for (measure, _), at in wins.items() if measure == what) for what in MEASURES]
    verdict = HOLDS if all(by) else IN_PART if any(by) or beaten else FAILS
    outcomes = "; ".join(f"{outcome} ({'; '.join(where)})" for outcome, where in said.items())
    why = (
        f"The formula in eager PyTorch against the fastest that writes no scores, {ONE} of 32 heads, D = "
        "64, bf16, by the device's time and in a stream of calls, which is the host's where that is "
        f"longer: {outcomes}."
    )
    if beaten:
        each = "; ".join(f"{where}: {', '.join(names)}" for where, names in beaten.items())
        why += f" Up to N = 256 it is faster than some others (the largest such N): {each}."
    most = max((n for at in wins.values() for n in at), default=0)
    figure = f"it wins up to N = {most:,}" if most else "slower than the fastest at all N from 32 on"
    some = {one.split()[0] for names in beaten.values() for one in names}
    figure += f"; faster than {len(some)} of the rest at some N to 256" if some and not most else ""
    return answer(rows, figure, verdict, why)


@answers(24)
def scores_over_memory(results: Results) -> Answer:
    rows = results.ok(SPEED, passed="forward", batch=1, heads=32, seq_len=8192, head_dim=128, dtype="float16")
    standard, best = of(rows, implementation="standard"), fastest(rows)
    bandwidth = standard["result"]["copy_gb_per_s"]
    once = 32 * 8192**2 * 2 / bandwidth / 1e6
    floor = 4 * once  # scores written and read, probabilities written and read
    # Theirs, 2 ms, is one trip at 2 TB/s, so one trip is what is compared; in part where the four that no
    # implementation of the formula avoids cost as much.
    measured = ms(standard)
    verdict = HOLDS if min(once, measured) >= 2 else IN_PART if min(floor, measured) >= 2 else FAILS
    why = (
        f"In 16 bits the scores are 4 GiB: one trip over memory at the {bandwidth:,.0f} GB/s of a copy "
        f"takes {once:.1f} ms, the four that the formula needs {floor:.1f} ms. Standard attention takes "
        f"{ms(standard):.1f} ms a layer (scale and mask are trips of their own), {32 * ms(standard):,.0f} "
        f"ms in 32 layers; {name(best)} takes {ms(best):.2f} ms."
    )
    figure = f"one trip {once:.1f} ms, four {floor:.1f} ms, measured {ms(standard):.1f} ms a layer"
    return answer([standard, best], figure, verdict, why)
