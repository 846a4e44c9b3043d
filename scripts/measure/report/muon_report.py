"""What the rows of studies/muon.py say: Muon's held-out loss beside AdamW's, by tokens and by seconds."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from statistics import mean, stdev

from scripts.measure.report.figures import Line, canvas, panel, svg
from scripts.measure.report.intervals import of_mean
from scripts.measure.report.pages import page
from scripts.measure.report.tables import Record, distinct, listed, records, where
from scripts.measure.studies import Report, Row, Table

NAMES = {"adamw": "AdamW", "muon": "Muon"}
HEAD = "|learning rate|steps|tokens|seeds|held-out loss|less AdamW's|95%|ms per step"


Groups = dict[tuple[str, float], list[Record]]  # runs by optimiser and share


def last(r: Record) -> float:
    return r.held_out[-1]["loss"]


def ms_per_step(r: Record) -> float:
    """From the first evaluation within the run to the last: without compiling, and without the evaluations
    where a row has their times."""
    first, *later = r.held_out[min(1, len(r.held_out) - 2) :]
    seconds = later[-1]["s"] - first["s"] - sum(each.get("took", 0) for each in later)
    return 1e3 * seconds / (later[-1]["step"] - first["step"])


def timed(groups: Groups, runs: Iterable[Record]) -> Groups:
    """Of each group the runs whose steps are timed: those of the last sources in `runs` of which both
    optimisers have runs on all tokens; where a group has none, all."""
    of_all = [{r.machine.get("code") for r in mine} for (_, share), mine in groups.items() if share == 1.0]
    sources = [r.machine.get("code") for r in runs]
    newest = next((code for code in reversed(sources) if all(code in each for each in of_all)), None)
    return {key: [r for r in mine if r.machine.get("code") == newest] or mine for key, mine in groups.items()}


def with_evaluations(runs: Iterable[Record]) -> str:
    """What is to be said of the times of steps."""
    return "" if all("took" in each for r in runs for each in r.held_out) else ", with evaluations"


def compared(runs: Sequence[Record]) -> Groups:
    """Runs by optimiser and share, of the learning rate at which the optimiser has the most seeds, and among
    these of that with the lowest loss."""
    found: Groups = {}
    for name in NAMES:
        mine = where(runs, optimizer=name)
        lrs = distinct(mine, "lr")
        lowest = {lr: min(map(last, where(mine, lr=lr))) for lr in lrs}
        lr = max(lrs, key=lambda lr: (len(distinct(where(mine, lr=lr), "seed")), -lowest[lr]), default=None)
        for share in sorted(distinct(where(mine, lr=lr), "share")):
            found[name, share] = sorted(where(mine, lr=lr, share=share), key=lambda r: r.seed)
    return found


def difference(mine: Sequence[Record], adamw: Sequence[Record]) -> tuple[float, float] | None:
    """Of the held-out losses, the mean over the seeds of both, and half its interval; None for fewer than
    two."""
    theirs = {r.seed: last(r) for r in adamw}
    pairs = [last(r) - theirs[r.seed] for r in mine if r.seed in theirs]
    return (mean(pairs), of_mean(stdev(pairs), len(pairs))) if len(pairs) > 1 else None


def earlier(muon: Sequence[Record], adamw: Sequence[Record]) -> dict[int, int]:
    """By seed, the step before the last at which Muon was first evaluated at AdamW's last loss or below."""
    theirs = {r.seed: last(r) for r in adamw}
    reached = {
        r.seed: [e["step"] for e in r.held_out[:-1] if e["loss"] <= theirs[r.seed]]
        for r in muon
        if r.seed in theirs
    }
    return {seed: min(steps) for seed, steps in reached.items() if steps}


def report(rows: list[Row]) -> Report:
    found = records(rows)
    newest = [r for r in found if r.text == found[-1].text]
    runs = [r for r in newest if r.status == "ok" and r.ended_by == "steps"]
    groups = compared(runs)
    adamw = groups.get(("adamw", 1.0), [])
    apart = {
        share: gap
        for (name, share), mine in groups.items()
        if name == "muon" and (gap := difference(mine, adamw))
    }
    reached = [share for share, (gap, half) in apart.items() if gap + half <= 0]
    clocked = timed(groups, runs)
    times = {name: mean(map(ms_per_step, mine)) for (name, share), mine in clocked.items() if share == 1.0}
    return page(
        "muon",
        [table(groups, adamw, clocked)],
        {"": picture(rows, groups, clocked)} if adamw else {},
        apart=apart,
        reached=max(reached, default=None),
        earlier=earlier(groups.get(("muon", 1.0), []), adamw),
        steps=adamw[0].steps if adamw else 0,
        apart_from=with_evaluations(r for mine in clocked.values() for r in mine),
        slower=times["muon"] / times["adamw"] if len(times) == 2 else None,
        tokens=adamw[0].steps * adamw[0].tokens_per_step if adamw else 0,
        tried=[
            (NAMES[name], r.lr, last(r))
            for name in NAMES
            for r in where(runs, optimizer=name, share=1.0, seed=min(distinct(runs, "seed")))
        ],
        failed=[r for r in newest if r not in runs],
    )


def table(groups: Groups, adamw: Sequence[Record], clocked: Groups) -> Table:
    def line(item: tuple[tuple[str, float], list[Record]]) -> list[str]:
        key, mine = item
        name = key[0]
        r = mine[0]
        gap = difference(mine, adamw) if name == "muon" else None
        apart = [f"{gap[0]:+.4f}", f"{gap[1]:.4f}"] if gap else ["", ""]
        cells = [NAMES[name], f"{r.lr:g}", f"{r.steps:,}", f"{r.steps * r.tokens_per_step:,}", f"{len(mine)}"]
        return [*cells, f"{mean(map(last, mine)):.4f}", *apart, f"{mean(map(ms_per_step, clocked[key])):.2f}"]

    head = HEAD + with_evaluations(r for mine in clocked.values() for r in mine)
    return listed("Loss of held-out packages, nats per token", head, list(groups.items()), line)


def picture(rows: list[Row], groups: Groups, clocked: Groups) -> str:
    """Means over the seeds of the runs on all tokens."""
    figure, axes = canvas(rows, "Muon and AdamW", 2)
    by_tokens, by_time = [], []
    for at, name in enumerate(NAMES):
        if not (mine := groups.get((name, 1.0), [])):
            continue
        steps = sorted({e["step"] for e in mine[0].held_out} - {0})
        losses = {at: mean(e["loss"] for r in mine for e in r.held_out if e["step"] == at) for at in steps}
        millions, s = mine[0].tokens_per_step / 1e6, mean(map(ms_per_step, clocked[name, 1.0])) / 1e3
        by_tokens.append(Line(NAMES[name], {step * millions: one for step, one in losses.items()}, at))
        by_time.append(Line(NAMES[name], {step * s: one for step, one in losses.items()}, at))
    apart = with_evaluations(r for mine in clocked.values() for r in mine)
    linear = {"log_x": False, "log_y": False}
    panel(axes[0, 0], by_tokens, "held-out loss by tokens", "million tokens", "nats per token", **linear)
    panel(
        axes[0, 1],
        by_time,
        f"by time{apart}, without compilation",
        "seconds",
        "nats per token",
        **linear,
    )
    return svg(figure, rows)
