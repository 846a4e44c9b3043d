"""Claims 20, 21, 22 and 25: what runs for what is asked, exactness, the backward that computes P again, and
16 bits; from results/numerics and results/backward_recompute."""

from __future__ import annotations

from attention import registry
from scripts.measure.claims import FAILS, HOLDS, IN_PART, Answer, Results, Row, answer, answers, missing
from scripts.measure.instruments.textbook import FORMULAS
from scripts.measure.report import backward_report
from scripts.measure.report import numerics_report as numerics

EPSILON = {"float64": 2.0**-52, "float32": 2.0**-23, "float16": 2.0**-10}


@answers(20)
def asked_and_run(results: Results) -> Answer:
    rows = results.rows("numerics", part="asked")
    ran = [row for row in rows if row["result"]["status"] == "ok" and row["point"]["wants"]]
    forced = [row for row in ran if _forces(row)]
    hinted = [row for row in ran if not _forces(row)]
    wrong, ignored = ([row for row in some if not row["result"]["as_asked"]] for some in (forced, hinted))
    # Asking names one implementation or backend and no other: one such call that ran another kernel makes
    # asking no evidence; a preference among several that is passed over makes it so in part.
    verdict = HOLDS if wrong else IN_PART if ignored else FAILS
    examples = "; ".join(f"{_call(row)} ran {' and '.join(row['result']['ran'])}" for row in wrong + ignored)
    left = [row for row in rows if row["result"]["status"] == "ok" and not row["point"]["wants"]]
    refused = sum(row["result"]["status"] == "unsupported" for row in rows)
    choices = sorted({name for row in left for name in row["result"]["ran"]})
    why = (
        f"Calls that name one backend alone ran it, or were refused with a reason ({refused} calls), in "
        f"{len(forced) - len(wrong)} of {len(forced)} cases. Preferences, which leave another one open, "
        f"were passed over without a word: {examples or 'none'}. Left to itself, SDPA took "
        f"{', '.join(choices)}, by the inputs. Flags of other libraries are not tried here."
    )
    figure = f"another kernel ran for {len(wrong)} of {len(forced)} forced calls and {len(ignored)} of "
    figure += f"{len(hinted)} preferences"
    return answer(rows, figure, verdict, why)


def _forces(row: Row) -> bool:
    """Whether the call leaves nothing else to run: not a list of backends, a flag, or a formula to "
    "compile."""
    name = row["point"]["implementation"]
    return not name.startswith(("sdpa_kernel([", "enable_", "softmax(", "torch.compile"))


def _call(row: Row) -> str:
    point = row["point"]
    given = [numerics.SHORT[point["dtype"]], f"D = {point['head_dim']}", point["features"]]
    return f"{point['implementation']} ({', '.join(filter(None, given))})"


@answers(21)
def exact(results: Results) -> Answer:
    known = [row for row in results.ok("numerics", part="known") if "got" in row["result"]]
    tiles = results.ok("numerics", part="tiles")
    # Two roundings of the output; of the sum, which is exp(lse - 5), those of an lse of 5.17.
    off = [
        row["point"]["implementation"]
        for row in known
        for name in ("sum", "out")
        if row["result"]["got"][name] is not None and _error(row, name) > _allowed(row, name)
    ]
    factors, worst = [], {}
    for dtype in sorted({row["point"]["dtype"] for row in tiles}):
        mine = {name: _epsilons(tiles, name, dtype) for name in ("tiled", "naive")}
        if all(mine.values()):
            worst[dtype] = max(mine["tiled"])
            # Two epsilons more than the formula's own error, which in fp64 is the reference's.
            factors.append(worst[dtype] <= max(mine["naive"]) + 2)
    if not factors:
        raise missing("numerics", part="tiles", implementation="tiled")
    verdict = HOLDS if all(factors) and not off else IN_PART if all(factors) or not off else FAILS
    error = max((_error(row, "out") for row in known if row["point"]["dtype"] == "float64"), default=None)
    figures = ", ".join(f"{value:.1f} epsilons in {numerics.SHORT[dtype]}" for dtype, value in worst.items())
    wanted = known[0]["result"]["expected"]
    sizes = {str(row["point"]["tile"]) for row in tiles if row["point"]["implementation"] == "tiled"}
    why = (
        f"{len({row['point']['implementation'] for row in known})} implementations, keys in different "
        f"tiles: the sum is {wanted['sum']:.4f} and the output {wanted['out']:.6f}"
        f"{'' if error is None else f', to {error:.0e} in fp64' if error else ', exactly in fp64'}; "
        f"{'all' if not off else 'but for ' + ', '.join(sorted(set(off)))} within rounding. With "
        f"{len(sizes)} sizes of tiles the largest error of `tiled` is {figures}."
    )
    return answer([*known, *tiles], f"at most {figures}", verdict, why)


def _error(row: Row, name: str) -> float:
    result = row["result"]
    return abs(result["got"][name] - result["expected"][name])


def _allowed(row: Row, name: str) -> float:
    dtype = row["point"]["dtype"]
    if name == "out":
        return 2 * EPSILON[dtype] * row["result"]["expected"]["out"]
    return 16 * EPSILON["float64" if dtype == "float64" else "float32"]


def _epsilons(rows: list[Row], name: str, dtype: str) -> list[float]:
    wanted = {"implementation": name, "dtype": dtype}
    return [r["result"]["epsilons"] for r in rows if all(r["point"][k] == v for k, v in wanted.items())]


@answers(25)
def stable(results: Results) -> Answer:
    rows = results.ok("numerics", part="stability", dtype="float16")
    first = {
        name: numerics.first_bad(rows, name, "float16") for name in numerics.unique(rows, "implementation")
    }
    formulas = {name: bad for name, bad in first.items() if name in FORMULAS}
    if not formulas or len(formulas) == len(first):
        raise missing("numerics", part="stability", implementation="formula_torch")
    broken = sorted(name for name, bad in first.items() if bad and name not in FORMULAS)
    overflow = [name for name, bad in formulas.items() if bad]
    fused_fail = [name for name in broken if not registry.declaration(name).writes_scores]
    # The claim needs both: the formula breaks, also where its scores are fp32, and the tiled ones never do.
    verdict = FAILS if fused_fail or not overflow else HOLDS if "naive" in broken else IN_PART
    said = [
        f"{name} ({numerics.SAID[name]}) from a factor of {bad[0]}, scores to {bad[1]['largest_score']:,.3g}"
        for name, bad in formulas.items()
        if bad
    ]
    good = [name for name in first if name not in FORMULAS and name not in broken]
    why = (
        f"NaN in fp16 as q and k grow: {'; '.join(said) or 'none'}. No NaN up to a factor of "
        f"{max(numerics.unique(rows, 'magnitude'))}: "
        f"{', '.join(good)}{'; NaN: ' + ', '.join(broken) if broken else ''}. "
    )
    if "naive" in good:
        why += (
            "What overflows are scores and exp() in 16 bits, not the formula: with scores in fp32, as `naive`"
        )
        why += " has them, it is as stable."
    narrow = [name for name in formulas if FORMULAS[name][2] is None]  # in the dtype of the inputs
    figure = (
        f"{len(set(overflow) & set(narrow))} of {len(narrow)} formulas in 16 bits overflow, {len(good)} "
        "implementations do not"
    )
    return answer(rows, figure, verdict, why)


@answers(22)
def recomputed(results: Results) -> Answer:
    rows = results.ok("backward_recompute", passed="backward")
    ratios, fewer, said = [], [], []
    for (dtype, dim), mine in backward_report.panels(rows).items():
        pairs = backward_report.pairs(mine)
        here = []
        for n, (kept, again) in pairs.items():
            here.append((kept["result"]["ms_median"] / again["result"]["ms_median"], n))
            moved = [
                backward_report.dram(of["result"]) or backward_report.modelled(of) for of in (kept, again)
            ]
            fewer += [moved[0] / moved[1]] if all(moved) else []
        if here:
            ratios += [ratio for ratio, _ in here]
            least, most = min(here), max(here)
            of = f"{backward_report.SHORT[dtype]}, D = {dim}"
            said.append(f"{of}: {least[0]:.1f}x (N = {least[1]})")
            said[-1] += f" to {most[0]:.1f}x (N = {most[1]})" * (len(here) > 1)
    if not ratios:
        raise missing("backward_recompute", passed="backward")
    # "More than paid for": faster and with fewer bytes wherever it was measured.
    paid = [ratio > 1 for ratio in ratios]
    verdict = HOLDS if all(paid) and min(fewer, default=0) > 1 else IN_PART if any(paid) else FAILS
    by = "ncu and the model" if any(backward_report.dram(row["result"]) for row in rows) else "the model"
    bytes_said = "bytes not counted"
    if fewer:
        bytes_said = f"{min(fewer):.0f} to {max(fewer):.0f} times fewer bytes of DRAM ({by})"
    why = (
        f"The fastest backward that computes P again over the fastest that kept it: {'; '.join(said)}; five "
        f"or seven products a tile for four, {bytes_said}."
    )
    slower = [
        ratio
        for mine in backward_report.panels(rows).values()
        for ratio, _ in backward_report.again(mine).values()
    ]
    if slower:
        why += f" The formula's own forward computed again, scores and all, takes {min(slower):.1f} to "
        why += f"{max(slower):.1f}x the time of the formula's backward" + (
            ": to compute again saves memory, and time is saved where the scores are not written."
            if min(slower) > 1
            else "."
        )
    return answer(
        rows, f"{min(ratios):.1f} to {max(ratios):.1f}x the speed of a backward with P kept", verdict, why
    )
