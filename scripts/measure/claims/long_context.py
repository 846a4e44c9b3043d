"""Claim 5: longer contexts cost little and give better models, from results/long_context_quality."""

from __future__ import annotations

from math import exp, sqrt

from scripts.measure.claims import FAILS, HOLDS, IN_PART, UNTESTED, Answer, Results, answer, answers, missing
from scripts.measure.report.long_context_report import Measured

SHORTEST = 1024  # what the paper compares with
LITTLE = 3.6 / 2.7  # of the time at 1k, at 4k: the paper's days
SCALE = 124e6  # parameters of GPT-2 small, which the claim is of: a smaller model decides nothing
# Two-sided 95% of Student's t by degrees of freedom: the interval of a mean over n seeds has n - 1.
STUDENT = {1: 12.71, 2: 4.30, 3: 3.18, 4: 2.78, 5: 2.57, 6: 2.45, 7: 2.36, 8: 2.31, 9: 2.26}


@answers(5)
def longer_contexts(results: Results) -> Answer:
    rows = results.ok("long_context_quality")
    every = Measured(rows)
    rows = [row for row in every.rows if row["point"]["seq_len"] >= SHORTEST]
    measured = Measured(rows) if rows else every
    contexts = list(measured.runs)
    if len(contexts) < 2 or contexts[0] != SHORTEST:
        raise missing("long_context_quality", measured="loss", seq_len=f"{SHORTEST} and more")
    if untimed := [context for context in contexts if context not in measured.speeds]:
        raise missing("long_context_quality", measured="speed", seq_len=untimed[0])
    gains = {context: measured.gain(context) for context in contexts[1:]}
    times = {context: measured.speeds[context]["result"]["train_s"] for context in contexts}
    costs = {context: times[context] / times[SHORTEST] for context in contexts[1:]}
    longest = contexts[-1]
    # A gain counts where it is beyond two standard errors; as little cost counts what the paper paid.
    better = gains[longest] is not None and gains[longest].nats < 0 and gains[longest].clear
    verdict = (HOLDS if costs[longest] <= LITTLE else IN_PART) if better else FAILS
    perplexity = {context: exp(measured.losses(context)[0]) for context in contexts}
    figure = f"perplexity {' / '.join(f'{p:.2f}' for p in perplexity.values())}, time 1.00 / " + " / ".join(
        f"{cost:.2f}" for cost in costs.values()
    )
    shortest = min(every.runs)
    before = {f"{shortest:,} to {SHORTEST:,}": every.gain(SHORTEST)} if shortest < SHORTEST else {}
    after = {f"{SHORTEST:,} to {context:,}": gain for context, gain in gains.items()}
    differences = ", ".join(
        f"{gain.nats:+.3f} ± {STUDENT[min(max(gain.runs - 1, 1), 9)] * gain.seeds / sqrt(gain.runs):.3f} "
        f"nats from {step}"
        for step, gain in (before | after).items()
        if gain
    )
    tokens, parameters = rows[-1]["point"]["tokens"], measured.runs[longest][-1]["result"]["parameters"]
    small = parameters < SCALE
    why = (
        f"A model of {parameters / 1e6:.1f}M parameters after {tokens / 1e6:.0f}M tokens, with the same "
        f"held-out targets: {differences} (95% interval over seeds). The time at {longest:,} is "
        f"{costs[longest]:.2f}x that at {SHORTEST:,}, the paper's {LITTLE:.2f}x"
    )
    if small:
        why = f"not at this scale: {why[0].lower()}{why[1:]}; GPT-2 small on OpenWebText may do otherwise"
    return answer(rows, figure, UNTESTED if small else verdict, why if small else f"{why}.")
