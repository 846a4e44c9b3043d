"""What the rows of studies/long_context_quality.py say: tables, picture, sentences."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import exp, sqrt
from statistics import mean, stdev
from typing import Any

from scripts.measure.report.figures import Line, panel, panels_of, svg, thousands
from scripts.measure.studies import Report, Row, Table
from scripts.plot import COLOURS

QUESTION = "Is a model of the same size better with a longer context after the same tokens, and at what cost?"
COMMAND = "python scripts/study.py long_context_quality"
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
    def clear(self) -> bool:
        """Beyond two standard errors, of the seeds, which takes two of them, and of the documents."""
        return self.runs > 1 and abs(self.nats) > 2 * max(self.seeds / sqrt(self.runs), self.documents)


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


def quality(measured: Measured) -> Table:
    head = ["context", "runs", "loss", "perplexity", "second half of documents", "in windows of its own"]
    shortest = min(measured.runs)
    lines = [[*head, f"less that of {thousands(shortest)} (over seeds, over documents)"]]
    for context, rows in measured.runs.items():
        gain, loss = measured.gain(context), measured.losses(context)
        cells = [thousands(context), str(len(rows)), "{:.4f} ± {:.4f}".format(*loss), f"{exp(loss[0]):.3f}"]
        cells += ["{:.4f} ± {:.4f}".format(*measured.losses(context, "loss_last_half"))]
        cells += ["{:.4f}".format(measured.losses(context, "loss_chunked")[0])]
        said = f"{gain.nats:+.4f} ± {gain.seeds:.4f} ± {gain.documents:.4f}" if gain else ""
        lines.append([*cells, said])
    title = (
        "Loss in nats per token of the same held-out targets, mean and standard deviation over seeds (of the "
        "difference: over seeds, and standard error over documents); in windows of its own: not of the same "
        "contexts, the document cut into windows that follow each other"
    )
    return Table(title, lines)


def cost(measured: Measured) -> Table:
    lines = [
        ["context", "tokens/s", "step, ms (10%, 90%)", "s for the budget", "of the shortest", "MFU", "GiB"]
    ]
    base = next(iter(measured.speeds.values()), None)
    for context, row in measured.speeds.items():
        r = row["result"]
        mfu = f"{100 * r['mfu']:.1f}%" if r.get("mfu") else ""
        step = f"{r['ms_median']:.2f} ({r['ms_p10']:.2f}, {r['ms_p90']:.2f})"
        cells = [thousands(context), f"{r['tokens_per_s']:,.0f}", step, f"{r['train_s']:,.1f}"]
        lines.append(
            [*cells, f"{r['train_s'] / base['result']['train_s']:.2f}x", mfu, f"{r['peak_mib'] / 1024:.1f}"]
        )
    return Table("Training alone on the device, by steps of the same config: speed, time, peak memory", lines)


def positions(measured: Measured) -> Table:
    lines = [["position", *map(thousands, measured.runs)]]
    columns = [measured.by_position(context) for context in measured.runs]
    for position in columns[0]:
        lines.append(
            [f"{position:,.0f}", *("{:.4f} ± {:.4f}".format(*column[position]) for column in columns)]
        )
    title = (
        "Loss by position: tokens of the document before the target, the middle of each bin; columns: context"
    )
    return Table(title, lines)


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
    axes.set_title(f"Loss over all targets against training time, {tokens / 1e6:,.1f}M tokens", fontsize=9)
    axes.set_xlabel("seconds of training at the speed measured alone", fontsize=9)
    axes.set_ylabel("nats per token", fontsize=9)
    axes.tick_params(labelsize=8)
    axes.margins(0.15)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(alpha=0.25)


def notes(measured: Measured) -> list[str]:
    """A sentence each on quality, where it comes from, cost and limits."""
    shortest, longest = min(measured.runs), max(measured.runs)
    found, gain = [], measured.gain(longest)
    a, b = thousands(shortest), thousands(longest)
    if gain:
        first, last = (measured.losses(context)[0] for context in (shortest, longest))
        how = "lower" if gain.nats < 0 else "higher"
        word = f"{how} by {abs(gain.nats):.4f} nats" if gain.clear else "no different beyond the spread"
        word = word if gain.runs > 1 else f"{how}, with one seed, whose spread is not known,"
        found.append(
            f"With a context of {b} the loss is {word} than with {a}: perplexity {exp(last):.2f} against "
            f"{exp(first):.2f}; difference {gain.nats:+.4f} ± {gain.seeds:.4f}, seeds: {gain.runs}."
        )
        parts = measured.gain_by_position(longest)
        near = [m for position, (m, _) in parts.items() if position < shortest]
        far = list(parts.values())[-1][0]
        found.append(
            f"Where both have all that precedes, up to token {shortest:,}, it differs by "
            f"{mean(near):+.4f} (mean of the bins), in the last bin {far:+.4f}: the first is what training "
            "on longer windows does to the model, the second is that and what the longer context is worth."
        )
    if longest in measured.speeds and shortest in measured.speeds:
        times = [measured.speeds[context]["result"]["train_s"] for context in (shortest, longest)]
        found.append(f"The budget takes {times[1]:,.0f} s at {b} against {times[0]:,.0f} s at {a}.")
    result = measured.runs[longest][-1]["result"]
    corpus, parameters = result["corpus"], result["parameters"]
    training, evaluated = corpus["training"], corpus["evaluated"]
    found.append(
        f"{parameters / 1e6:.2f}M parameters, trained on {training['files']:,} documents "
        f"({training['bytes'] / 1e6:,.0f} MB, sha256 {training['sha256'][:12]}), {corpus['passes']} pass(es) "
        f"of {training['tokens']:,} tokens; "
        f"evaluated on {evaluated['documents']} others, held out with all of their package: "
        f"{evaluated['targets']:,} targets (sha256 {evaluated['sha256'][:12]}), the same for all contexts."
    )
    found.append(
        "One size of model and one learning rate for all contexts: other choices could move the differences."
    )
    return found


def failures(measured: Measured) -> list[str]:
    return [
        f"T={row['point']['seq_len']:,}, {row['point']['measured']}, seed {row['point']['seed']}: "
        f"{row['result']['status']}, {row['result']['reason']}"
        for row in measured.failed
    ]


def report(rows: Sequence[Row]) -> Report:
    """Of the newest text, model and budget among the rows; where no run of it has finished, why."""
    measured = Measured(rows)
    if not measured.runs:
        return Report(QUESTION, COMMAND, [], notes=[*failures(measured), "No run has finished."])
    tables = [quality(measured), positions(measured)]
    if measured.speeds:
        tables.insert(1, cost(measured))
    return Report(QUESTION, COMMAND, tables, {"": picture(measured)}, notes(measured) + failures(measured))
