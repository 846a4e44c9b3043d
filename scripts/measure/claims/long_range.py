"""Claim 7: long-range classification, from results/long_range."""

from __future__ import annotations

from collections.abc import Sequence

from scripts.measure.claims import (
    FAILS,
    HOLDS,
    IN_PART,
    Answer,
    NotMeasured,
    Results,
    answer,
    answers,
    graded,
)
from scripts.measure.report.long_range_accuracy import (
    ALIKE,
    DIFFERS,
    STANDARD,
    Comparison,
    comparisons,
    groups,
    learned,
)
from scripts.measure.report.long_range_report import (
    NAMES,
    best,
    decided,
    mean_speed_up,
    speed_ups,
    tasks_of,
    unsteady,
)

CLAIMED = 2.4  # a mean over tasks of 1k to 4k tokens


@answers(7)
def accuracy_and_speed(results: Results) -> Answer:
    """Holds where the mean speed-up over T = 1k, 2k and 4k is the one claimed, all accuracies are those of
    standard attention within what seeds do, which must be narrow enough to decide, and both tasks were
    learned."""
    rows = results.ok("long_range")
    found = groups(rows)
    compared = [each for each in comparisons(found) if each.allowed is not None]
    factors = {compiled: speed_ups(rows, compiled) for compiled in (False, True)}
    name = best(factors[False])
    if name is None or not compared:
        raise NotMeasured(
            "of long_range either accuracies of two seeds or speeds beside standard attention are missing: "
            "run `python scripts/study.py long_range`"
        )
    mean = mean_speed_up(factors[False][name])
    verdicts, all_learned = {each.verdict for each in compared}, all(map(learned, found))
    verdict = graded(mean, CLAIMED)
    if not (verdicts == {ALIKE} and all_learned):
        verdict = IN_PART if verdict == HOLDS else FAILS if DIFFERS in verdicts else verdict
    baselines = [group for group in found if group.name == STANDARD]
    accuracies = "; ".join(
        f"{NAMES[group.task]} {group.mean:.1%} (others {span(found, group.task)}, majority class "
        f"{group.fact['majority']:.1%})"
        for group in baselines
    )
    by_length = ", ".join(f"{factor:.1f}x at {length:,}" for length, factor in factors[False][name].items())
    said = decided(compared)
    said += [why for task in tasks_of(compared) if (why := unsteady(found, task))]
    said += [] if all_learned else ["Not everything was learned."]
    why = (
        f"A step with {name} is faster than with standard attention in eager PyTorch by {by_length} tokens"
        f"{compiled_too(factors[True])}. Accuracy with standard attention: {accuracies}. {' '.join(said)} "
        "Two tasks of our own making, not the five of the arena; no block-sparse attention."
    )
    return answer(rows, f"{mean:.1f}x, accuracies {in_short(compared)}", verdict, why)


def in_short(compared: Sequence[Comparison]) -> str:
    if any(each.verdict == DIFFERS for each in compared):
        return "differ"
    alike = sum(each.verdict == ALIKE for each in compared)
    if alike == len(compared):
        return "alike"
    return (
        f"alike in {alike} of {len(compared)} comparisons, the rest not decided" if alike else "not decided"
    )


def span(found: list, task: str) -> str:
    means = [group.mean for group in found if group.task == task and group.name != STANDARD]
    return f"{min(means):.1%} to {max(means):.1%}"


def compiled_too(factors: dict[str, dict[int, float]]) -> str:
    """The same where blocks are compiled, standard attention's too."""
    name = best(factors)
    return (
        "" if name is None else f" (both compiled, {name}: {mean_speed_up(factors[name]):.1f}x in the mean)"
    )
