"""Claims 20, 21, 22 and 25: what runs for what is asked, exactness, the backward that computes P again, and
16 bits; from results/numerics and results/backward_recompute."""

from __future__ import annotations

import math
from collections.abc import Callable

from attention import registry
from scripts.measure.claims import Figures, Results, Row, claim, listed, missing, ms, name
from scripts.measure.instruments.textbook import FORMULAS
from scripts.measure.report import backward_report
from scripts.measure.report import numerics_report as numerics

BYTES = {"ncu": lambda row: backward_report.dram(row["result"]), "the model": backward_report.modelled}
EPSILON = {"float64": 2.0**-52, "float32": 2.0**-23, "float16": 2.0**-10}


@claim(
    20,
    "Asking for a backend is no evidence that it ran.",
    theirs="only the names of the kernels in a profile are",
    # Asking names one backend and no other. No evidence: another kernel runs for half of such calls; in part:
    # for any of them. A preference, which leaves another backend open, asks for none and does not count, nor
    # do implementations of this project, which run as named or are refused.
    holds=lambda f: f.wrong >= f.forced / 2 > 0,
    partly=lambda f: f.wrong > 0,
    differ=(),  # each call by itself: what it asks for beside what ran
    apart=("implementation", "pass", "dtype", "head_dim", "causal", "features"),
    figure="another kernel ran for {wrong} of {forced} calls that force one backend, "
    "{ignored} of {hinted} that prefer one",
    why="""
        Calls that name one backend alone ran it in {obeyed} of {forced} cases, and {refused} more were
        refused with a reason: PyTorch raises an error where the one backend cannot run. {ours}
        implementations here ran as named. That is one version of PyTorch and of transformers, on one GPU.

        Preferences, which leave another backend open, do not count as such calls; of them the claim is right:
        {ignored} of {hinted} were passed over without a word ({examples}). Left to itself, SDPA took
        {choices}, by the inputs. {rest}

        On this GPU transformers' GPT-2 with attn_implementation="flash_attention_2" ran {flag}.
        """,
)
def asked_and_run(results: Results) -> Figures:
    rows = results.rows("numerics", part="asked")
    done = [row for row in rows if row["result"]["status"] == "ok"]
    asked = [row for row in done if row["point"]["wants"]]
    ours = [row for row in asked if "(" not in name(row)]
    forced = [row for row in asked if numerics.forces(name(row))]
    hinted = [row for row in asked if numerics.prefers(name(row))]
    wrong, ignored = ([row for row in some if not row["result"]["as_asked"]] for some in (forced, hinted))
    others = [row for row in asked if row not in (*ours, *forced, *hinted)]
    rest = [(call(row), ran(row)) for row in others if not row["result"]["as_asked"]]
    examples = [(call(row), ran(row)) for row in ignored]
    refused = [row for row in rows if row["result"]["status"] == "unsupported" and numerics.forces(name(row))]
    flags = {
        kernel for row in forced if name(row).startswith(numerics.MODEL) for kernel in row["result"]["ran"]
    }
    choices = {kernel for row in done if not row["point"]["wants"] for kernel in row["result"]["ran"]}
    return Figures(
        rows,
        forced=len(forced),
        hinted=len(hinted),
        wrong=len(wrong),
        ignored=len(ignored),
        obeyed=len(forced) - len(wrong),
        refused=len(refused),
        ours=f"{sum(row['result']['as_asked'] for row in ours)} of {len(ours)}",
        examples=listed("{} ran {}", examples, "; ") or "none",
        choices=", ".join(sorted(choices)),
        rest=listed("{} ran {}.", rest, " "),
        flag=" and ".join(sorted(flags)) or None,
    )


def ran(row: Row) -> str:
    return " and ".join(row["result"]["ran"])


def call(row: Row) -> str:
    point = row["point"]
    given = [numerics.SHORT[point["dtype"]], f"D = {point['head_dim']}", point["features"]]
    return f"{name(row)} ({', '.join(filter(None, given))})"


@claim(
    21,
    "Online softmax is exact.",
    theirs="""scores [2, 5, 3] in two blocks: the sum 1.19 both ways; scores [1, 2, 0.5], values [10, 20,
        40]: 20.492649 both ways""",
    holds=lambda f: f.tiles_right and not f.off,
    partly=lambda f: f.tiles_right or not f.off,
    # Each against the same exact values, with its keys in tiles of its own; errors do not vary between runs.
    differ=("implementation", "tile", "features", "seq_len", "run"),
    apart=("part", "dtype"),
    figure="at most {epsilons}",
    why="""
        {implementations} implementations, keys in different tiles: the sum is {sum:.4f} and the output
        {out:.6f}{in_fp64}; {within} within rounding. With {sizes} sizes of tiles the largest error of
        `tiled` is {epsilons}.
        """,
)
def exact(results: Results) -> Figures:
    known = [row for row in results.ok("numerics", part="known") if "got" in row["result"]]
    tiles = results.ok("numerics", part="tiles")
    off = {
        name(row)
        for row in known
        for what in ("sum", "out")
        if row["result"]["got"][what] is not None and error(row, what) > allowed(row, what)
    }
    right, worst = [], {}
    for dtype in sorted({row["point"]["dtype"] for row in tiles}):
        tiled, naive = (epsilons(tiles, which, dtype) for which in ("tiled", "naive"))
        if tiled and naive:
            worst[numerics.SHORT[dtype]] = max(tiled)
            # Two epsilons more than the formula's own error, which in fp64 is the reference's.
            right.append(max(tiled) <= max(naive) + 2)
    if not right:
        raise missing("numerics", part="tiles", implementation="tiled")
    most = max((error(row, "out") for row in known if row["point"]["dtype"] == "float64"), default=None)
    return Figures(
        [*known, *tiles],
        off=off,
        tiles_right=all(right),
        epsilons=listed("{1:.1f} epsilons in {0}", worst.items()),
        implementations=len({name(row) for row in known}),
        **known[0]["result"]["expected"],
        in_fp64="" if most is None else f", to {most:.0e} in fp64" if most else ", exactly in fp64",
        within=f"all but for {', '.join(sorted(off))}" if off else "all",
        sizes=len({str(row["point"]["tile"]) for row in tiles if name(row) == "tiled"}),
    )


def error(row: Row, what: str) -> float:
    return abs(row["result"]["got"][what] - row["result"]["expected"][what])


def allowed(row: Row, what: str) -> float:
    """Two roundings of the output; of the sum, which is exp(lse - 5), those of an lse of 5.17."""
    dtype = row["point"]["dtype"]
    if what == "out":
        return 2 * EPSILON[dtype] * row["result"]["expected"]["out"]
    return 16 * EPSILON["float64" if dtype == "float64" else "float32"]


def epsilons(rows: list[Row], which: str, dtype: str) -> list[float]:
    return [r["result"]["epsilons"] for r in rows if name(r) == which and r["point"]["dtype"] == dtype]


@claim(
    25,
    "Naive attention is unstable in fp16 and FlashAttention is stable.",
    theirs="large inputs, against fp64",
    # The claim needs both: every formula in 16 bits breaks, and none that writes no scores does. With scores
    # in fp32 it is not naive attention in fp16, and no fp16 input makes them overflow.
    holds=lambda f: f.narrow_overflow == f.narrow > 0 and not f.fused_break,
    partly=lambda f: f.overflow and not f.fused_break,
    # Some have no backward, whose NaN would count too; errors do not vary between runs.
    differ=("implementation", "pass", "run"),
    apart=("magnitude",),
    figure="{narrow_overflow} of {narrow} formulas in 16 bits overflow, {stable} implementations do not",
    why="""
        NaN in fp16 as q and k grow: {said}. No NaN up to a factor of {largest}: {good}{broken}.

        Where formulas in 16 bits give no NaN, their error against fp64 is up to {error:.2g}, that of
        implementations which write no scores up to {fused_error:.2g}.

        With scores in fp32 and the row's maximum taken off, as {naive} has them, the formula is as stable:
        scores and exp(s) overflow in 16 bits{wide}.
        """,
)
def stable(results: Results) -> Figures:
    rows = results.ok("numerics", part="stability", dtype="float16")
    first = {
        which: numerics.first_bad(rows, which, "float16") for which in numerics.unique(rows, "implementation")
    }
    formulas = {which: bad for which, bad in first.items() if which in FORMULAS}
    if not formulas or len(formulas) == len(first):
        raise missing("numerics", part="stability", implementation="formula_torch")
    broken = sorted(which for which, bad in first.items() if bad and which not in FORMULAS)
    good = [which for which, bad in first.items() if not bad and which not in FORMULAS]
    overflow = [which for which, bad in formulas.items() if bad]
    narrow = [which for which in formulas if FORMULAS[which][2] is None]  # in the dtype of the inputs
    wide = [which for which in overflow if which not in narrow]
    said = [
        (which, numerics.SAID[which], bad[0], bad[1]["largest_score"])
        for which, bad in formulas.items()
        if bad
    ]
    return Figures(
        rows,
        overflow=len(overflow),
        narrow=len(narrow),
        narrow_overflow=len(set(overflow) & set(narrow)),
        stable=len(good),
        fused_break=any(not writes_scores(which) for which in broken),
        error=largest_error(rows, lambda which: which in narrow),
        fused_error=largest_error(rows, lambda which: which in good and not writes_scores(which)),
        naive="`naive`" if "naive" in good else None,
        wide=f", and exp(s) of the bare score in fp32 as well ({', '.join(wide)})" if wide else "",
        said=listed("{} ({}) from a factor of {}, scores to {:,.3g}", said, "; ") or "none",
        largest=max(numerics.unique(rows, "magnitude")),
        good=", ".join(good),
        broken=f"; NaN: {', '.join(broken)}" if broken else "",
    )


def writes_scores(which: str) -> bool:
    return registry.declaration(which).writes_scores


def largest_error(rows: list[Row], chosen: Callable[[str], bool]) -> float | None:
    """Of the outputs that are numbers, over all factors."""
    errors = [row["result"].get("max_error") for row in rows if chosen(name(row))]
    return max((error for error in errors if error is not None and math.isfinite(error)), default=None)


@claim(
    22,
    "Backward computes tiles again from (O, lse): more FLOPs, less traffic, faster.",
    theirs='"more than paid for"',
    # "More than paid for": faster and with fewer bytes wherever it was measured, and by that alone, for which
    # a fused kernel that keeps P is needed: never more than in part until there is one.
    holds=lambda f: f.least > 1 and f.fewest_bytes > 1 and f.alike,
    partly=lambda f: f.most > 1,
    differ=("implementation",),
    apart=("dtype", "head_dim", "seq_len"),
    figure="{least:.1f} to {most:.1f}x the speed of a backward with P kept",
    why="""
        The fastest backward that computes P again, which is fused, over the fastest that kept it, which is
        compiled around cuBLAS: {said}; five or seven products a tile for four, {bytes}. A fused kernel that
        reads P and is alike in all else is not among them.

        The formula's own forward computed again, scores and all, takes {again_least:.1f} to
        {again_most:.1f}x the time of the formula's backward{saves}.
        """,
)
def recomputed(results: Results) -> Figures:
    # In fp32 what keeps P is on FMA units and what computes it again on tensor cores: no answer.
    rows = results.ok("backward_recompute", passed="backward", dtype=("bfloat16", "float16"))
    ratios, fewer, said, again, used = [], [], [], [], []
    for (dtype, dim), mine in backward_report.panels(rows).items():
        again += [ratio for ratio, _ in backward_report.again(mine).values()]
        used += [r for r in mine if again and r["implementation"] in ("naive", "naive_checkpointed")]
        pairs = backward_report.pairs(mine)
        for pair in pairs.values():
            used += pair
            for how, bytes_of in BYTES.items():
                kept, computed = map(bytes_of, pair)
                if kept and computed:  # of one kind, never one counted over one modelled
                    fewer.append((kept / computed, how, pair[0]["point"]["seq_len"], dim))
                    break
        if here := sorted((ms(kept) / ms(computed), n) for n, (kept, computed) in pairs.items()):
            ratios += [ratio for ratio, _ in here]
            ends = listed("{:.1f}x (N = {})", [here[0], here[-1]][: len(here)], " to ")
            said.append(f"{backward_report.SHORT[dtype]}, D = {dim}: {ends}")
    if not ratios:
        raise missing("backward_recompute", passed="backward")
    counted = listed("{:.0f} times fewer bytes of DRAM by {}, at N = {:,}, D = {} alone", fewer)
    if len(fewer) > 1:
        ends = " to ".join(dict.fromkeys(f"{each(fewer)[0]:.0f}" for each in (min, max)))
        counted = f"{ends} times fewer bytes of DRAM by {' and '.join(sorted({how for _, how, *_ in fewer}))}"
    why = ": to compute again saves memory, and time is saved where the scores are not written"
    return Figures(
        used,
        least=min(ratios),
        most=max(ratios),
        fewest_bytes=min(fewer, default=(0,))[0],
        alike=False,
        said="; ".join(said),
        bytes=counted or "bytes not counted",
        again_least=min(again, default=None),
        again_most=max(again, default=None),
        saves=why if again and min(again) > 1 else "",
    )
