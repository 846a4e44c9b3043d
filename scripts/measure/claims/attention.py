"""Claims 3, 12, 15, 16 and 24: attention by itself, from the studies attention_speed and attention_memory.
Standard attention there is the formula in eager PyTorch in 16 bits, `standard`."""

from __future__ import annotations

from scripts.measure.claims import (
    Figures,
    NotMeasured,
    Results,
    Row,
    by_length,
    claim,
    listed,
    missing,
    ms,
    name,
    of,
)
from scripts.measure.claims.memory import over

MEMORY, SPEED = "attention_memory", "attention_speed"
FLASH, FLASH_SAID = "sdpa_flash", "FlashAttention-2 of PyTorch"


def fastest(rows: list[Row]) -> Row:
    """Of those that keep no scores. Raises NotMeasured for none."""
    from attention import registry

    rows = [row for row in rows if not registry.declaration(name(row)).writes_scores]
    if not rows:
        raise missing(SPEED)
    return min(rows, key=ms)


@claim(
    3,
    "At N = 2k, tiled attention alone is several times faster than standard.",
    theirs="7.6x (A100)",
    # Theirs is FlashAttention's, so that of PyTorch counts, not the fastest there is. Whether theirs has a
    # mask, which the formula has to add, is not said: the least of all that is measured.
    holds=lambda f: min(f.forward, f.both, f.full or f.forward) >= 7.6,
    partly=lambda f: min(f.forward, f.both, f.full or f.forward) >= 3,  # "several times"
    differ=("implementation",),
    apart=("pass", "causal", "seq_len"),
    figure="{full_first}causal {forward:.1f}x / {both:.1f}x (forward / both), N = 2k",
    why="""
        Over the formula in eager PyTorch in bf16, D = 64.

        Alike but for the tiles, without a mask, the forward of FlashAttention-2 of PyTorch is {full:.1f}x at
        N = 2,048, that of the fastest {full_fastest:.1f}x; both passes were not measured.

        Causal, as GPT-2's is: {said}.

        Under that mask the formula, which has to add it, takes {mask:.2f}x as long as without, and
        FlashAttention-2, which skips the tiles of the future, is {skipping:.2f}x as fast: together these turn
        {full:.1f}x into {forward:.1f}x.
        """,
)
def alone(results: Results) -> Figures:
    """D = 64, 16,384 tokens: the fastest of the fused, and PyTorch's own FlashAttention-2."""
    factors: dict[str, dict[int, float]] = {}
    used, masked = [], {}

    def times(passed: str, n: int, causal: bool) -> tuple[float, float, float]:
        """Of standard attention, the fastest, and FlashAttention-2."""
        wanted = {"passed": passed, "seq_len": n, "batch": 16384 // n, "head_dim": 64, "causal": causal}
        rows = results.ok(SPEED, dtype="bfloat16", **wanted)
        found = of(rows, implementation="standard"), fastest(rows), of(rows, implementation=FLASH)
        used.extend(found)
        return tuple(map(ms, found))

    for passed in ("forward", "both"):
        for n in (1024, 2048):
            standard, best, flash = masked[passed] = times(passed, n, causal=True)
            factors.setdefault(f"{passed}, {FLASH_SAID}", {})[n] = standard / flash
            factors.setdefault(f"{passed}, the fastest", {})[n] = standard / best
    full = full_fastest = mask = skipping = None
    try:
        unmasked = times("forward", 2048, causal=False)
    except NotMeasured:
        pass
    else:
        full_fastest, full = unmasked[0] / unmasked[1], unmasked[0] / unmasked[2]
        mask, skipping = masked["forward"][0] / unmasked[0], unmasked[2] / masked["forward"][2]
    return Figures(
        used,
        forward=factors[f"forward, {FLASH_SAID}"][2048],
        both=factors[f"both, {FLASH_SAID}"][2048],
        full=full,
        full_fastest=full_fastest,
        mask=mask,
        skipping=skipping,
        full_first="" if full is None else f"{full:.1f}x (forward) without a mask; ",
        said="; ".join(f"{what} {by_length(of_n)}" for what, of_n in factors.items()),
    )


@claim(
    12,
    "Tiles written in plain PyTorch beat standard attention in time and memory.",
    theirs="""3.1x faster ("2-4x") and 48% ("50%") less memory: B = 1, N = 2048, H = 8, D = 64, fp16, causal;
        another source: it "won't be faster\"""",
    # "2-4x" and "50%": of the forward, which their code is
    holds=lambda f: f.faster >= 2 and f.saved >= 0.48,
    partly=lambda f: f.faster >= 2 or f.saved >= 0.48,
    differ=("implementation",),
    apart=("study", "pass"),
    figure="{times}, {saved:.0%} less memory",
    why="""
        attention=tiled computes what their code means to (which does not run at this shape), in tiles of
        {tile}. It takes {slower:.3g} times standard attention's time forward ({launches:,} kernels for
        {standard_launches:,}; {each:.0f} us for each, about what the host takes to launch one) and
        {slower_both:.3g} times with backward, and its peak, inputs included, is
        {saved:.0%} less forward and {saved_both:.0%} less with backward: the source that expects it to be no
        faster {outcome}.
        """,
)
def tiles_in_pytorch(results: Results) -> Figures:
    wanted = {"batch": 1, "heads": 8, "seq_len": 2048, "head_dim": 64, "causal": True, "dtype": "float16"}
    faster, saved, used = {}, {}, []
    for passed in ("forward", "both"):
        for study, kept in ((SPEED, faster), (MEMORY, saved)):
            rows = results.ok(study, passed=passed, **wanted)
            standard, tiled = (of(rows, implementation=which) for which in ("standard", "tiled"))
            used += [standard, tiled]
            if study == SPEED:
                kept[passed] = ms(standard) / ms(tiled)
            else:
                kept[passed] = 1 - 1 / over(standard, tiled, inputs=True)
    forward = faster["forward"]
    launches = [sum((row["result"].get("kernels") or {}).values()) for row in used[:2]]
    return Figures(
        used,
        faster=forward,
        times=f"{1 / forward:.3g}x as slow" if forward < 1 else f"{forward:.3g}x as fast",
        slower=1 / forward,
        slower_both=1 / faster["both"],
        saved=saved["forward"],
        saved_both=saved["both"],
        standard_launches=launches[0],
        launches=launches[1],
        each=1e3 * ms(used[1]) / max(1, launches[1]),
        outcome="errs" if forward > 1 else "is right",
        tile=" x ".join(map(str, used[1]["result"].get("tile") or ["?"])),
    )


@claim(
    15,
    "Under a causal mask the tiles of the future are skipped, and those outside a window.",
    theirs="10 of 16 tiles on a 4 x 4 grid; towards 2x, not guaranteed",
    # "towards 2x, not guaranteed": rising with N, and most of the way at the end
    holds=lambda f: (f.computed, f.every) == (10, 16) and f.rising and f.gain >= 1.75,
    partly=lambda f: f.gain > 1,
    # Windows were timed in a run of their own: they are 2x and more, and runs differ by a few per cent.
    differ=("causal", "features", "run"),
    apart=("seq_len",),
    figure="{gain:.2f}x at N = 16k",
    why="""
        By arithmetic, {counted:.0%} of cuda_fa2's tiles at N = 16k hold a score that a causal mask leaves, of
        a 4 x 4 grid {computed} of {every}; that it computes no others shows in its times. Without a mask its
        forward takes {gains} as long. Windows make the causal N = 16k faster still: {narrower}.
        """,
)
def skipped_tiles(results: Results) -> Figures:
    from scripts.measure.instruments.bench_points import Shape
    from scripts.measure.instruments.speed_bench import tiles

    wanted = {"passed": "forward", "head_dim": 64, "dtype": "bfloat16", "features": "", "heads": 32}
    lengths = (1024, 2048, 16384)  # at 4,096 the two masks were timed in different runs
    rows = results.ok(SPEED, implementation="cuda_fa2", seq_len=lengths, **wanted)
    rows = [row for row in rows if row["point"]["batch"] * row["point"]["seq_len"] == 16384]
    gains = {n: ms(of(rows, seq_len=n, causal=False)) / ms(of(rows, seq_len=n, causal=True)) for n in lengths}
    causal = of(rows, seq_len=16384, causal=True)
    windows = {}
    for n in (256, 1024, 4096):
        with_window = wanted | {"features": f"window={n}"}
        one = of(results.ok(SPEED, implementation="cuda_fa2", **with_window), seq_len=16384)
        windows[n] = ms(causal) / ms(one)
        rows.append(one)
    computed, every = tiles(Shape(1, 1, 1, 4, 64, True, "bf16"), 1, 1)
    return Figures(
        rows,
        computed=computed,
        every=every,
        counted=causal["result"]["tiles_computed"] / causal["result"]["tiles_all"],
        gain=gains[16384],
        rising=gains[16384] > gains[1024] and all(gain > 1 for gain in windows.values()),
        gains=by_length(gains, 2),
        narrower=listed("{1:.1f}x for {0:,} keys", windows.items()),
    )


@claim(
    16,
    "At short N, standard attention may win.",
    theirs="under N of about 256",
    # "may win" asks for some N up to 256 at which it beats all of them, by the device and by the clock alike;
    # in part: by one of these. That it beats some slow implementation, as our teaching stages, says nothing.
    holds=lambda f: all(f.wins_by),
    partly=lambda f: any(f.wins_by),
    differ=("implementation",),
    apart=("pass", "batch", "seq_len"),
    figure="{result}",
    why="""
        The formula in eager PyTorch, with the causal mask that it has to add, against the fastest that
        writes no scores, {one} of 32 heads, D = 64, bf16, by the device's time and in a stream of calls,
        which is the host's where that is longer: {outcomes}.

        Up to N = 256 it is faster than some others (the largest such N): by the device's time, by a tenth at
        least, {beaten}; in a stream of calls, by 1.4x at least, as the host's times differ between lengths
        where they should not (by 10 to 40%, at N = 128 by up to 2x), {by_stream}. Without a mask short N were
        not measured.
        """,
)
def short_sequences(results: Results) -> Figures:
    from scripts.measure.report import attention_speed_report as speed

    rows = results.rows(SPEED)
    said: dict[str, list[str]] = {}
    wins, beaten, by_stream = {}, {}, {}
    for what in speed.MEASURES:
        for passed in ("forward", "both"):
            if not (won := speed.winners(rows, passed, False, what)):
                raise missing(SPEED, passed=passed, batch=1, seq_len=32)
            said.setdefault(speed.crossover(won), []).append(f"{what}, {speed.PASSES[passed]}")
            wins[what, passed] = [n for n, (_, eager, _, fused) in won.items() if eager < fused and n <= 256]
            by, found = (1.1, beaten) if what == "device" else (1.4, by_stream)
            found[speed.PASSES[passed]] = speed.beats(rows, passed, False, what, 256, by)
    if many := speed.winners(rows, "forward", True, "device"):
        said.setdefault(speed.crossover(many), []).append(f"{speed.MANY}, device, forward")
        beaten[f"{speed.MANY}, forward"] = speed.beats(rows, "forward", True, "device", 256)
    most = max((n for at in wins.values() for n in at), default=0)
    result = f"it wins up to N = {most:,}" if most else "slower than the fastest at all N from 32 on, causal"
    compared = [speed.at_short(rows, *of) for of in (("forward", False), ("both", False), ("forward", True))]
    return Figures(
        [row for by_n in compared for at in by_n.values() for row in at.values()],
        one=speed.ONE,
        wins_by=[any(at for (measure, _), at in wins.items() if measure == what) for what in speed.MEASURES],
        result=result,
        outcomes=listed("{} ({})", [(outcome, "; ".join(where)) for outcome, where in said.items()], "; "),
        beaten=named(beaten),
        by_stream=named(by_stream),
    )


def named(found: dict[str, list[str]]) -> str:
    return listed("{}: {}", [(at, ", ".join(names)) for at, names in found.items() if names], "; ") or "none"


@claim(
    24,
    "Scores in memory cost milliseconds a layer in traffic alone.",
    theirs="N = 8192, 32 heads: over 2 ms a layer, over 70 ms in 32 layers (A100, 2 TB/s)",
    # Theirs, 2 ms, is one trip at 2 TB/s, so one trip is what is compared; in part where the four that no
    # implementation of the formula avoids cost as much.
    holds=lambda f: min(f.once, f.measured) >= 2,
    partly=lambda f: min(f.floor, f.measured) >= 2,
    differ=("implementation",),
    figure="one trip {once:.1f} ms, four {floor:.1f} ms, measured {measured:.1f} ms a layer",
    why="""
        In 16 bits the scores are 4 GiB: one trip over memory at the {bandwidth:,.0f} GB/s of a copy takes
        {once:.1f} ms, the four that the formula needs {floor:.1f} ms. Standard attention{masked} takes
        {measured:.1f} ms a layer, as long as {trips:.0f} trips, {layers:,.0f} ms in 32 layers; {best}{skips}
        takes {best_ms:.2f} ms.
        """,
)
def scores_over_memory(results: Results) -> Figures:
    rows = results.ok(SPEED, passed="forward", batch=1, heads=32, seq_len=8192, head_dim=128, dtype="float16")
    standard, best = of(rows, implementation="standard"), fastest(rows)
    bandwidth, causal = standard["result"]["copy_gb_per_s"], standard["point"]["causal"]
    once = 32 * 8192**2 * 2 / bandwidth / 1e6
    return Figures(
        [standard, best],
        bandwidth=bandwidth,
        once=once,
        floor=4 * once,  # scores written and read, probabilities written and read
        masked=", with a causal mask that it has to add in trips of its own," if causal else "",
        skips=", which skips what the mask hides," if causal else "",
        measured=ms(standard),
        trips=ms(standard) / once,
        layers=32 * ms(standard),
        best=name(best),
        best_ms=ms(best),
    )
