"""What the rows of studies/real_text.py say: tables, picture, sentences."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import mean
from typing import Any

from scripts.measure.report.figures import Line, panel, panels_of, svg
from scripts.measure.report.pages import page
from scripts.measure.report.tables import Record, fmt, listed, records
from scripts.measure.studies import Report, Row

PARTS = 20  # of a run, whose mean training losses are drawn
TITLES = {"gpt2": "GPT-2 124M", "bert_large": "BERT-large's shape, masked tokens"}


def held_out(r: Record, key: str = "loss") -> dict[float, float]:
    """By the step after which it was evaluated."""
    return {at["step"]: at[key] for at in r.held_out if key in at}


def by_part(losses: Sequence[float], width: int) -> dict[float, float]:
    """Means of so many steps, by the step in their middle."""
    parts = [losses[at : at + width] for at in range(0, len(losses) - width + 1, width)]
    return {(i + 0.5) * width: mean(part) for i, part in enumerate(parts)}


def paired(runs: Sequence[Record]) -> tuple[Record, Record] | None:
    """Ours and nanoGPT's of the newest text."""
    gpts = [r for r in runs if r.model == "gpt2"]
    ours = [r for r in gpts if r.implementation != "nanoGPT"]
    same = [(r, other) for r in ours for other in gpts if other.implementation == "nanoGPT"]
    same = [(r, other) for r, other in same if r.text == other.text and r.settings == other.settings]
    return same[-1] if same else None


def picture(rows: list[Row], runs: Sequence[Record]) -> str:
    models = list(dict.fromkeys(r.model for r in runs))
    figure, axes = panels_of(rows, "Training on Python sources", 2 * len(models))
    for model, loss, other in zip(models, axes[::2], axes[1::2], strict=True):
        mine = [r for r in runs if r.model == model]
        dashed = [("-", "--")[r.implementation == "nanoGPT"] for r in mine]
        lines = [
            Line(r.implementation, held_out(r), style=style) for r, style in zip(mine, dashed, strict=True)
        ]
        linear: dict[str, Any] = {"log_x": False, "log_y": False}
        title = f"{TITLES[model]}: loss of held-out packages" + "; dashed: nanoGPT" * ("--" in dashed)
        panel(loss, lines, title, "steps", "nats per token", **linear)
        if model == "bert_large":
            shares = {at: 100 * share for r in mine for at, share in held_out(r, "accuracy").items()}
            title = "masked tokens of held-out packages that are predicted"
            panel(other, [Line(mine[-1].implementation, shares)], title, "steps", "%", **linear)
            continue
        width = max(1, max(len(r.losses) for r in mine) // PARTS)
        lines = [Line(r.implementation, by_part(r.losses, width)) for r in mine]
        title = f"{TITLES[model]}: training loss, means of {width} steps"
        if both := paired(mine):
            ours, theirs = both
            gaps = [one - two for one, two in zip(ours.losses, theirs.losses, strict=False)]
            outside = held_out(theirs)
            outside = {at: loss - outside[at] for at, loss in held_out(ours).items() if at in outside}
            lines = [Line(f"training, means of {width} steps", by_part(gaps, width), 0)]
            lines += [Line("held-out packages", outside, 1)]
            title = f"{TITLES[model]}: our loss less nanoGPT's"
        panel(other, lines, title, "steps", "nats per token", **linear)
    return svg(figure, rows)


def report(rows: list[Row]) -> Report:
    found = records(rows)
    runs = [r for r in found if r.status == "ok"]
    facts: dict[str, Any] = {"pair": None, "tokens": 0, "corpus": runs[-1].corpus if runs else None}
    if both := paired(runs):
        mine, theirs = map(held_out, both)
        shared = [at for at in mine if at in theirs]
        at = max(shared)
        worst = max(abs(mine[step] - theirs[step]) for step in shared)
        pairs = zip(both[0].losses, both[1].losses, strict=False)
        gap = mean(abs(one - other) for one, other in pairs)
        facts |= {"pair": (mine[at], theirs[at], at, worst, gap), "tokens": at * both[0].tokens_per_step}

    def curve(r: Record) -> str:
        last, accuracy = r.held_out[-1], held_out(r, "accuracy")
        share = fmt(100 * accuracy[last["step"]], ".1f") + "%" if accuracy else ""
        how = f"{r.steps_done:,}|{r.steps_done * r.tokens_per_step:,}|{r.ended_by}|{r.cap_s}"
        loss = f"{r.held_out[0]['loss']:.4f}|{last['loss']:.4f}"
        return f"{r.model}|{r.implementation}|{r.parameters / 1e6:,.0f}|{how}|{loss}|{share}"

    steps = sorted({at["step"] for r in runs for at in r.held_out})

    def at_step(step: int) -> str:
        shown = [held_out(r).get(step) for r in runs]
        return "|".join([f"{step:,}", *(fmt(loss, ".4f") for loss in shown)])

    names = [f"{r.model}, {r.implementation}" for r in runs]
    tables = [
        listed(
            "Runs; loss in nats per token of held-out packages",
            "model|run|M parameters|steps|tokens|ended by|cap, s|loss before|after|masked tokens predicted",
            runs,
            curve,
        ),
        listed(
            "The same loss, by the step after which it was measured",
            "|".join(["step", *names]),
            steps,
            at_step,
        ),
    ]
    failed = [r for r in found if r.status != "ok"]
    pictures = {"": picture([row for row in rows if row["result"]["status"] == "ok"], runs)} if runs else {}
    return page("real_text", tables, pictures, runs=runs, failed=failed, **facts)
