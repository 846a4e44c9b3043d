"""What the rows of studies/long_context_quality.py say: tables, picture, sentences."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import exp, sqrt
from statistics import mean, stdev
from typing import Any

from scripts.measure.report import intervals
from scripts.measure.report.figures import Line, label, panel, panels_of, svg, thousands
from scripts.measure.report.pages import page
from scripts.measure.report.tables import Record, listed, records
from scripts.measure.studies import Report, Row, Table
from scripts.plot import COLOURS

FROM = 24  # tokens: before that a loss is several times higher, and no context is used up

Measure = tuple[float, float]  # mean and standard deviation


def spread(values: Sequence[float]) -> Measure:
    return mean(values), stdev(values) if len(values) > 1 else 0.0


@dataclass(frozen=True)
class Gain:
    """A loss less that of the shortest context, by the seeds that both have: mean, standard deviation over
    seeds, standard error over documents."""

    nats: float
    seeds: float
    runs: int
    documents: float

    @property
    def interval(self) -> float:
        """Half the 95% interval of the mean over seeds, by Student's t."""
        return intervals.of_mean(self.seeds, self.runs)

    @property
    def clear(self) -> bool:
        """Beyond the interval over seeds, which takes two of them, and two standard errors over documents."""
        return self.runs > 1 and abs(self.nats) > max(self.interval, 2 * self.documents)


class Measured:
    """The rows of the text, config and budget that was studied last.

    runs: context -> finished runs by seed; speeds: context -> row; failed: rows of everything else."""

    def __init__(self, rows: Sequence[Row]):
        keys = ("text", "tokens", "tokens_per_step", "settings", "dtype", "compile")
        last = rows[-1]["point"]
        self.rows = [row for row in rows if all(row["point"][key] == last[key] for key in keys)]
        self.rows.sort(key=lambda row: (row["point"]["seq_len"], row["point"]["seed"]))
        self.failed = [row for row in self.rows if row["result"]["status"] != "ok"]
        self.runs: dict[int, list[Row]] = {}
        self.speeds: dict[int, Row] = {}
        for row in self.rows:
            if row not in self.failed:
                context = row["point"]["seq_len"]
                if row["point"]["measured"] == "speed":
                    self.speeds[context] = row
                else:
                    self.runs.setdefault(context, []).append(row)

    def losses(self, context: int, key: str = "loss") -> Measure:
        return spread([row["result"][key] for row in self.runs[context]])

    def pairs(self, context: int) -> list[tuple[dict[str, Any], dict[str, Any]]]:
        """Results of this context and of the shortest, of the same seed."""
        base = {row["point"]["seed"]: row["result"] for row in self.runs[min(self.runs)]}
        found = [(row["result"], base.get(row["point"]["seed"])) for row in self.runs[context]]
        return [(one, other) for one, other in found if other]

    def gain(self, context: int) -> Gain | None:
        """None of the shortest context itself, and where no seed is shared."""
        import numpy as np

        pairs = self.pairs(context)
        if context == min(self.runs) or not pairs:
            return None
        middle, over_seeds = spread([one["loss"] - other["loss"] for one, other in pairs])
        each = np.array([[side["loss_by_document"] for side in pair] for pair in pairs])  # (seeds, 2, D)
        each = (each[:, 0] - each[:, 1]).mean(axis=0)
        error = float(each.std(ddof=1) / sqrt(len(each))) if len(each) > 1 else 0.0
        return Gain(middle, over_seeds, len(pairs), error)

    def by_position(self, context: int) -> dict[float, Measure]:
        every = [row["result"]["loss_by_position"] for row in self.runs[context]]
        return {bins[0][0]: spread([loss for _, loss in bins]) for bins in zip(*every, strict=True)}

    def gain_by_position(self, context: int) -> dict[float, Measure]:
        found = {}
        pairs = [(one["loss_by_position"], other["loss_by_position"]) for one, other in self.pairs(context)]
        for i, (position, _) in enumerate(pairs[0][0] if pairs else []):
            found[position] = spread([one[i][1] - other[i][1] for one, other in pairs])
        return found


def tables(measured: Measured) -> list[Table]:
    runs, speeds, plus = measured.runs, measured.speeds, "{:.4f} ± {:.4f}".format
    base = next(iter(speeds.values()), {"result": {}})["result"]
    columns = {context: measured.by_position(context) for context in runs}

    def quality(context: int) -> str:
        gain, loss = measured.gain(context), measured.losses(context)
        half, own = measured.losses(context, "loss_last_half"), measured.losses(context, "loss_chunked")[0]
        less = f"{gain.nats:+.4f} ± {gain.seeds:.4f} ± {gain.documents:.4f}" if gain else ""
        start = f"{thousands(context)}|{len(runs[context])}|{plus(*loss)}|{exp(loss[0]):.3f}"
        return f"{start}|{plus(*half)}|{own:.4f}|{less}"

    def cost(r: Record) -> str:
        mfu = f"{100 * r.mfu:.1f}%" if r.get("mfu") else ""
        step = f"{r.ms_median:.2f} ({r.ms_p10:.2f}, {r.ms_p90:.2f})"
        times = f"{r.train_s:,.1f}|{r.train_s / base['train_s']:.2f}x"
        return f"{thousands(r.seq_len)}|{r.tokens_per_s:,.0f}|{step}|{times}|{mfu}|{r.peak_mib / 1024:.1f}"

    return [
        listed(
            "Loss in nats per token of the same held-out targets, mean and standard deviation over seeds (of "
            "the difference: over seeds, and standard error over documents). Own windows: each document is "
            "cut into consecutive windows of the model's context",
            "context|runs|loss|perplexity|second half of documents|own windows|"
            f"less that of {thousands(min(runs))} (over seeds, over documents)",
            runs,
            quality,
        ),
        listed(
            "Training speed, measured by steps with the device to itself: speed, total time, peak memory",
            "context|tokens/s|step, ms (10%, 90%)|s for all tokens|relative to the shortest|MFU|GiB",
            records(speeds.values()),
            cost,
        ),
        listed(
            "Loss by position: number of tokens before the target (middle of each bin); columns: context",
            "|".join(["position", *map(thousands, runs)]),
            next(iter(columns.values())),
            lambda at: "|".join([f"{at:,.0f}", *(plus(*column[at]) for column in columns.values())]),
        ),
    ]


def lines_of(
    axes: Any, curves: dict[int, dict[float, Measure]], title: str, y: str, log_y: bool = False
) -> None:
    """A line for each context with its band of a standard deviation to both sides."""
    lines = []
    for place, (context, curve) in enumerate(curves.items()):
        curve = {position: measure for position, measure in curve.items() if position >= FROM}
        if curve:
            low, high = ([m + sign * s for m, s in curve.values()] for sign in (-1, 1))
            axes.fill_between(list(curve), low, high, color=COLOURS[place], alpha=0.25, lw=0)
            lines.append(Line(thousands(context), {position: m for position, (m, _) in curve.items()}, place))
    panel(axes, lines, title, "tokens of the document before the target", y, log_y=log_y)
    last = max((max(line.points) for line in lines), default=64)
    ticks = [2**power for power in range(5, 40) if 2**power <= 1.2 * last]
    axes.set_xticks(ticks, [thousands(tick) for tick in ticks])


def picture(measured: Measured) -> str:
    shown, shortest = measured.rows, min(measured.runs)
    contexts = list(measured.runs)
    title = f"The same tokens at contexts of {', '.join(map(thousands, contexts))}"
    figure, axes = panels_of(shown, title, 3)
    seeds = max(map(len, measured.runs.values()))
    band = f"mean of {seeds} seeds, band: standard deviation" if seeds > 1 else "one seed"
    by_position = {context: measured.by_position(context) for context in contexts}
    lines_of(axes[0], by_position, f"Held-out loss by position ({band})", "nats per token")
    differences = {context: measured.gain_by_position(context) for context in contexts}
    title = f"The same, less that of context {thousands(shortest)} of the same seed"
    lines_of(axes[1], differences, title, "nats per token")
    against_time(axes[2], measured)
    return svg(figure, shown)


def against_time(axes: Any, measured: Measured) -> None:
    """Loss over all targets against what the budget of tokens takes."""
    tokens = measured.rows[-1]["point"]["tokens"]
    for place, context in enumerate(measured.runs):
        if context in measured.speeds:
            (loss, over), seconds = measured.losses(context), measured.speeds[context]["result"]["train_s"]
            axes.errorbar(seconds, loss, over, fmt="o", ms=5, color=COLOURS[place], capsize=3)
            beside = {"xytext": (8, 6), "textcoords": "offset points", "fontsize": 9, "color": COLOURS[place]}
            axes.annotate(thousands(context), (seconds, loss), **beside)
    title = f"Loss over all targets against training time, {tokens / 1e6:,.1f}M tokens"
    label(axes, title, "seconds of training at the speed measured alone", "nats per token")
    axes.tick_params(labelsize=8)
    axes.margins(0.15)


def report(rows: Sequence[Row]) -> Report:
    """Of the newest text, model and budget among the rows; where no run of it has finished, why."""
    measured = Measured(rows)
    facts = {
        "failed": records(measured.failed),
        "runs": measured.runs,
        "gain": None,
        "times": {},
        "last": None,
    }
    if not measured.runs:
        return page("long_context_quality", [], **facts)
    shortest, longest = min(measured.runs), max(measured.runs)
    facts |= {"shortest": shortest, "longest": longest, "gain": measured.gain(longest)}
    if facts["gain"]:
        parts = measured.gain_by_position(longest)
        facts["near"] = mean(m for position, (m, _) in parts.items() if position < shortest)
        facts["far"] = list(parts.values())[-1][0]
        facts["perplexity"] = [exp(measured.losses(context)[0]) for context in (shortest, longest)]
    facts["times"] = {context: row["result"]["train_s"] for context, row in measured.speeds.items()}
    facts["last"] = measured.runs[longest][-1]["result"]
    return page("long_context_quality", tables(measured), {"": picture(measured)}, **facts)
