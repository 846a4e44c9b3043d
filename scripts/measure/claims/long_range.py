"""Claim 7: long-range classification, from results/long_range."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from scripts.measure.claims import Figures, NotMeasured, Results, claim, command_of, listed
from scripts.measure.report import long_range_report as speeds
from scripts.measure.report.long_range_accuracy import (
    ALIKE,
    DIFFERS,
    STANDARD,
    Comparison,
    Group,
    capped,
    comparisons,
    groups,
    learned,
)
from scripts.measure.report.pages import notes

ACCURACY = "{} {:.1%} (others {:.1%} to {:.1%}, majority class {:.1%}, by the first token alone {:.1%})"

NOT_RUN = ", Pathfinder was not run"
CAPPED = (
    "{}, one run of {} with a cap of {} s of a shared GPU: {:.1%} after {:,} examples (majority class "
    "{:.1%}, by the first token alone {:.1%}): {}."
)


@claim(
    7,
    "Long Range Arena, N = 1k to 4k: faster, with accuracies alike.",
    theirs="""2.4x (block-sparse 2.8x). Accuracy: Transformer 36.0 63.6 81.6 42.3 72.7, average 59.3;
        FlashAttention 37.6 63.9 81.4 43.5 72.7, 59.8; block-sparse 37.0 63.0 81.3 43.6 73.3, 59.6""",
    # The mean speed-up over T = 1k, 2k and 4k is the one claimed, all accuracies are those of standard
    # attention within what seeds do, which must be narrow enough to decide, and all tasks were learned.
    holds=lambda f: f.mean >= 2.4 and f.alike and f.all_learned,
    partly=lambda f: f.mean >= 2.4 or (f.mean > 1 and not f.differs),
    differ=("implementation", "seed", "run"),  # runs: of accuracies, not of times
    apart=("measured", "task", "seq_len", "compile"),
    figure="{mean:.1f}x; accuracies {in_short}",
    why="""
        A step with {name} is faster than with standard attention in eager PyTorch by {by_length}
        tokens{compiled}. Accuracy with standard attention: {accuracies}. {decided} Of the arena's five tasks
        ListOps is one, Matching is our own{not_run}; no block-sparse attention.

        {capped}
        """,
)
def accuracy_and_speed(results: Results) -> Figures:
    rows = results.ok("long_range")
    found = groups(rows)
    alone = capped(rows)
    compared = [each for each in comparisons(found) if each.allowed is not None]
    eager, compiled = (speeds.speed_ups(rows, compiled) for compiled in (False, True))
    name, name_compiled = speeds.best(eager), speeds.best(compiled)
    if name is None or not compared:
        raise NotMeasured(
            "of long_range either accuracies of two seeds or speeds beside standard attention are missing: "
            f"run `{command_of('long_range')}`"
        )
    verdicts, all_learned = {each.verdict for each in compared}, all(map(learned, found))
    decided = notes("long_range_accuracy", **speeds.sentences(compared, found))
    decided += [] if all_learned else ["Not everything was learned."]
    baselines = [
        (
            speeds.NAMES[group.task],
            group.mean,
            *span(found, group.task),
            group.fact["majority"],
            group.fact["first_token"],
        )
        for group in found
        if group.name == STANDARD
    ]
    both = None
    if name_compiled is not None:
        factor = speeds.mean_speed_up(compiled[name_compiled])
        both = f" (both compiled, {name_compiled}: {factor:.1f}x in the mean)"
    return Figures(
        rows,
        name=name,
        mean=speeds.mean_speed_up(eager[name]),
        alike=verdicts == {ALIKE},
        differs=DIFFERS in verdicts,
        all_learned=all_learned,
        in_short=in_short(compared),
        by_length=listed("{1:.1f}x at {0:,}", eager[name].items()),
        compiled=both or "",
        accuracies=listed(ACCURACY, baselines, "; "),
        decided=" ".join(decided),
        not_run="" if any(group.task == "pathfinder" for group in [*found, *alone]) else NOT_RUN,
        capped=listed(CAPPED, map(of_capped, alone), " ") or None,
    )


def of_capped(group: Group) -> tuple[Any, ...]:
    """What CAPPED says of a run that trained until its time was up."""
    point, fact = group.rows[0]["point"], group.fact
    got = "it learned more than these" if learned(group) else "it has not learned more than these"
    shares = fact["majority"], fact["first_token"]
    how = point["model"], point["cap_s"], fact["accuracy"], fact["examples_seen"]
    return speeds.NAMES[group.task], *how, *shares, got


def in_short(compared: Sequence[Comparison]) -> str:
    if any(each.verdict == DIFFERS for each in compared):
        return "differ"
    alike = sum(each.verdict == ALIKE for each in compared)
    if not alike:
        return "not decided"
    widest = max(each.allowed for each in compared if each.verdict == ALIKE)
    rest = ", the rest not decided" if alike < len(compared) else ""
    return f"alike to {100 * widest:.1f} points in {alike} of {len(compared)} comparisons{rest}"


def span(found: list, task: str) -> tuple[float, float]:
    means = [group.mean for group in found if group.task == task and group.name != STANDARD]
    return min(means), max(means)
