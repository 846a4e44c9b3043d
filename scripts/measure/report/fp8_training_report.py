"""What the rows of studies/fp8_training.py say: speed and loss in fp8 beside those in bf16."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from statistics import mean, median, stdev
from typing import Any, NamedTuple

from scripts.measure.report.figures import Line, panel, panels_of, svg
from scripts.measure.report.intervals import of_mean
from scripts.measure.report.pages import page
from scripts.measure.report.tables import Record, fmt, listed, records
from scripts.measure.rows import key_of
from scripts.measure.studies import Report, Row, Table

LINEAR = {"log_x": False, "log_y": False}
TITLE = "Training in fp8 and in bf16"
OF_PRECISION = ("precision", "dtype", "compile")


class Pair(NamedTuple):
    """Runs that differ in precision and what follows from it; `again`: bf16's in micro-batches of half as
    many rows, which rounding alone tells apart."""

    bf16: Record
    fp8: Record
    again: Record | None


def pairs(rows: Sequence[Row], measured: str) -> list[Pair]:
    """Of the newest rows."""
    newest: dict[str, dict[tuple[str, int], Record]] = {}
    for row in rows:
        (r,) = records([row])
        point = {
            key: value for key, value in row["point"].items() if key not in (*OF_PRECISION, "micro_batch")
        }
        settings = {key: value for key, value in point["settings"].items() if key != "cuda_graphs"}
        if r.measured == measured and r.status == "ok":
            newest.setdefault(key_of(point | {"settings": settings}), {})[r.precision, r.micro_batch] = r
    return [
        Pair(of["bf16-mixed", size], fp8, of.get(("bf16-mixed", size // 2)))
        for of in newest.values()
        for (precision, size), fp8 in of.items()
        if precision == "fp8" and ("bf16-mixed", size) in of
    ]


def faster(both: Pair) -> float:
    """How many times the speed of bf16, the median over the rounds."""
    rounds = zip(both.bf16.ms_by_round, both.fp8.ms_by_round, strict=True)
    return median(bf16 / fp8 for bf16, fp8 in rounds)


def ends(both: Pair) -> tuple[float, float, float, float | None] | None:
    """The last step at which bf16 and fp8 have both been validated, and the losses there: of bf16, of fp8
    and, where it has one, of bf16 again."""
    bf16, fp8, again = (dict(r.validation) if r else {} for r in both)
    common = [step for step in bf16 if step in fp8]
    return (common[-1], bf16[common[-1]], fp8[common[-1]], again.get(common[-1])) if common else None


class Seeds(NamedTuple):
    """The last losses in fp8 less those in bf16, `gaps`, of runs that differ in their seed: by seed; their
    mean, half its 95% interval (None of one seed), and one of the runs, with its last step. `again`: rows of
    a micro-batch, and bf16's last loss with these less that with twice as many."""

    fp8: Record
    step: float
    gaps: dict[int, float]
    mean: float
    half: float | None
    again: list[tuple[int, float]]


def over_seeds(losses: Sequence[tuple[Pair, float, float, float, float | None]]) -> list[Seeds]:
    alike: dict[str, list[Any]] = {}
    for of in losses:
        facts = ("model", "seq_len", "micro_batch", "tokens_per_step", "steps", "text", "settings")
        alike.setdefault(key_of({name: getattr(of[0].fp8, name) for name in facts}), []).append(of)
    found = []
    for runs in alike.values():
        gaps = {both.fp8.seed: fp8 - bf16 for both, _, bf16, fp8, _ in runs}
        half = of_mean(stdev(gaps.values()), len(gaps)) if len(gaps) > 1 else None
        again = [(both.again.micro_batch, a - bf16) for both, _, bf16, _, a in runs if a is not None]
        both, step, *_ = runs[-1]
        found.append(Seeds(both.fp8, step, gaps, mean(gaps.values()), half, again))
    return found


def less_bf16(both: Pair, r: Record) -> dict[float, float]:
    """By step: the validation loss of a run less that of bf16's."""
    bf16 = dict(both.bf16.validation)
    return {step: nats - bf16[step] for step, nats in r.validation if step in bf16}


def speed_table(compared: Sequence[Pair]) -> Table:
    def line(of: tuple[Record, float | None]) -> str:
        r, ratio = of
        how = f"{r.model}|{r.precision}|{r.seq_len:,}|{r.micro_batch}|{r.tokens_per_step:,}"
        speed = f"{r.tokens_per_s:,.0f}|{fmt(ratio, '.3f') + 'x' if ratio else ''}|{r.ms_median:.1f}"
        return f"{how}|{speed}|{r.peak_mib / 1024:.1f}"

    every = [of for both in compared for of in ((both.bf16, None), (both.fp8, faster(both)))]
    head = "model|precision|T|rows of a micro-batch|tokens a step|tokens/s|of bf16's|ms a step|peak GiB"
    return listed("Speed on one GPU, steps in turns", head, every, line)


def others(both: Pair) -> dict[str, Record]:
    """What is compared with bf16's run, by name."""
    again = {f"bf16 in micro-batches of {both.again.micro_batch}": both.again} if both.again else {}
    return {"fp8": both.fp8} | again


def loss_table(both: Pair) -> Table:
    gaps = [less_bf16(both, r) for r in others(both).values()]

    def line(of: tuple[float, float]) -> str:
        step, nats = of
        cells = (f"{nats + gap[step]:.4f}|{gap[step]:+.4f}" if step in gap else "|" for gap in gaps)
        return "|".join([f"{step:,.0f}|{step * both.fp8.tokens_per_step:,.0f}|{nats:.4f}", *cells])

    head = "|".join(["step|tokens|bf16-mixed", *(f"{name}|difference" for name in others(both))])
    return listed(f"{both.fp8.model}: validation loss, nats per token", head, both.bf16.validation, line)


def picture(rows: list[Row], both: Pair) -> str:
    figure, (loss, gap) = panels_of(rows, TITLE, 2)
    millions = both.fp8.tokens_per_step / 1e6

    def curve(of: Iterable[tuple[float, float]]) -> dict[float, float]:
        return {step * millions: nats for step, nats in of}

    lines = [Line(r.precision, curve(r.validation), i) for i, r in enumerate((both.bf16, both.fp8))]
    title = f"{both.fp8.model}: validation loss"
    panel(loss, lines, title, "million tokens", "nats per token", **LINEAR)
    apart = enumerate(others(both).items(), 1)
    lines = [Line(f"{name} less bf16", curve(less_bf16(both, r).items()), i) for i, (name, r) in apart]
    panel(gap, lines, "difference", "million tokens", "nats per token", **LINEAR)
    return svg(figure, rows)


def report(rows: list[Row]) -> Report:
    speeds = pairs(rows, "speed")
    losses = [(both, *last) for both in pairs(rows, "loss") if (last := ends(both))]
    return page(
        "fp8_training",
        [speed_table(speeds), *(loss_table(both) for both, *_ in losses)],
        {"": picture(rows, losses[-1][0])} if losses else {},
        speeds=[(both, faster(both)) for both in speeds],
        losses=losses,
        seeds=over_seeds(losses),
        failed=[r for r in records(rows) if r.status != "ok"],
    )
