"""What the rows of studies/fp8_training.py say: speed and loss in fp8 beside those in bf16."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

from scripts.measure.report.figures import Line, panel, panels_of, svg
from scripts.measure.report.pages import page
from scripts.measure.report.tables import Record, fmt, listed, records
from scripts.measure.rows import key_of
from scripts.measure.studies import Report, Row, Table

LINEAR = {"log_x": False, "log_y": False}
TITLE = "Training in fp8 and in bf16"
OF_PRECISION = ("precision", "dtype", "compile")


def pairs(rows: Sequence[Row], measured: str) -> list[tuple[Record, Record]]:
    """(bf16-mixed, fp8) of the newest rows whose points differ in precision and what follows from it."""
    newest: dict[str, dict[str, Record]] = {}
    for row in rows:
        point = {key: value for key, value in row["point"].items() if key not in OF_PRECISION}
        settings = {key: value for key, value in point["settings"].items() if key != "cuda_graphs"}
        (r,) = records([row])
        if r.measured == measured and r.status == "ok":
            newest.setdefault(key_of(point | {"settings": settings}), {})[r.precision] = r
    return [(both["bf16-mixed"], both["fp8"]) for both in newest.values() if len(both) == 2]


def faster(both: tuple[Record, Record]) -> float:
    """How many times the speed of bf16, the median over the rounds."""
    rounds = zip(*(r.ms_by_round for r in both), strict=True)
    return median(bf16 / fp8 for bf16, fp8 in rounds)


def by_step(r: Record) -> dict[float, float]:
    return dict(r.validation)


def apart(both: tuple[Record, Record]) -> float:
    """The last validation loss in fp8 less that in bf16."""
    bf16, fp8 = (r.validation[-1][1] for r in both)
    return fp8 - bf16


def speed_table(compared: Sequence[tuple[Record, Record]]) -> Table:
    def line(of: tuple[Record, float | None]) -> str:
        r, ratio = of
        how = f"{r.model}|{r.precision}|{r.seq_len:,}|{r.micro_batch}|{r.tokens_per_step:,}"
        speed = f"{r.tokens_per_s:,.0f}|{fmt(ratio, '.3f') + 'x' if ratio else ''}|{r.ms_median:.1f}"
        return f"{how}|{speed}|{r.peak_mib / 1024:.1f}"

    every = [of for both in compared for of in ((both[0], None), (both[1], faster(both)))]
    head = "model|precision|T|rows of a micro-batch|tokens a step|tokens/s|of bf16's|ms a step|peak GiB"
    return listed("Speed on one GPU, steps in turns", head, every, line)


def loss_table(both: tuple[Record, Record]) -> Table:
    bf16, fp8 = map(by_step, both)
    tokens = both[0].tokens_per_step

    def line(step: float) -> str:
        return (
            f"{step:,.0f}|{step * tokens:,.0f}|{bf16[step]:.4f}|{fp8[step]:.4f}|{fp8[step] - bf16[step]:+.4f}"
        )

    title = f"{both[0].model}: validation loss, nats per token"
    return listed(
        title, "step|tokens|bf16-mixed|fp8|difference", [step for step in bf16 if step in fp8], line
    )


def picture(rows: list[Row], both: tuple[Record, Record]) -> str:
    figure, (loss, gap) = panels_of(rows, TITLE, 2)
    millions = both[0].tokens_per_step / 1e6
    bf16, fp8 = ({step * millions: nats for step, nats in r.validation} for r in both)
    lines = [Line(r.precision, curve, i) for i, (r, curve) in enumerate(zip(both, (bf16, fp8), strict=True))]
    title = f"{both[0].model}: validation loss"
    panel(loss, lines, title, "million tokens", "nats per token", **LINEAR)
    less = {at: fp8[at] - bf16[at] for at in bf16 if at in fp8}
    panel(gap, [Line("fp8 less bf16", less, 1)], "difference", "million tokens", "nats per token", **LINEAR)
    return svg(figure, rows)


def report(rows: list[Row]) -> Report:
    speeds, losses = pairs(rows, "speed"), pairs(rows, "loss")
    return page(
        "fp8_training",
        [speed_table(speeds), *map(loss_table, losses)],
        {"": picture(rows, losses[-1])} if losses else {},
        speeds=[(fp8.model, faster((bf16, fp8)), bf16, fp8) for bf16, fp8 in speeds],
        losses=[(fp8.model, apart((bf16, fp8)), bf16, fp8) for bf16, fp8 in losses],
        failed=[r for r in records(rows) if r.status != "ok"],
    )
