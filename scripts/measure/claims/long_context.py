"""Claim 5: longer contexts cost little and give better models, from results/long_context_quality."""

from __future__ import annotations

from math import exp

from scripts.measure.claims import FAILS, HOLDS, IN_PART, Answer, Results, answer, answers, missing
from scripts.measure.report.long_context_report import Measured

SHORTEST = 1024  # what the paper compares with
LITTLE = 3.6 / 2.7  # of the time at 1k, at 4k: the paper's days


@answers(5)
def longer_contexts(results: Results) -> Answer:
    rows = results.ok("long_context_quality")
    measured = Measured(rows)
    rows = [row for row in measured.rows if row["point"]["seq_len"] >= SHORTEST]
    measured = Measured(rows) if rows else measured
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
    differences = ", ".join(
        f"{gain.nats:+.4f} ± {gain.seeds:.4f} nats at {context:,}" for context, gain in gains.items() if gain
    )
    tokens, parameters = rows[-1]["point"]["tokens"], measured.runs[longest][-1]["result"]["parameters"]
    why = (
        f"Contexts of {', '.join(f'{context:,}' for context in contexts)} on the same tokens, with the same "
        f"held-out targets: {differences}, against {SHORTEST:,} with the same seed (standard deviation over "
        f"seeds). The time at {longest:,} is {costs[longest]:.2f}x that at {SHORTEST:,}, the paper's "
        f"{LITTLE:.2f}x. This is a model of {parameters / 1e6:.1f}M parameters after {tokens / 1e6:.0f}M "
        "tokens, not GPT-2 small after days: attention is a larger part of its time."
    )
    return answer(rows, figure, verdict, why)
