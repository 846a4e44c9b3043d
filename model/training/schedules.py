"""Learning rates as pure functions of the step: nothing to save, nothing to restore.

Each returns a factor of the optimiser's lr for the update after `step` updates were made, of `max_steps` in
all.
"""

from __future__ import annotations

import math


def _warmup(step: int, warmup_steps: int) -> float:
    return min(1.0, (step + 1) / (warmup_steps + 1))


def cosine(
    step: int, max_steps: int, *, warmup_steps: int, min_factor: float, decay_steps: int | None = None
) -> float:
    """Linear warm-up, then a half cosine down to `min_factor` at `decay_steps` (None: the end of
    training)."""
    end = max_steps if decay_steps is None else decay_steps
    if step < warmup_steps:
        return _warmup(step, warmup_steps)
    progress = min(1.0, (step - warmup_steps) / max(1, end - warmup_steps))
    return min_factor + (1 - min_factor) * 0.5 * (1 + math.cos(math.pi * progress))


def warmup_stable_decay(
    step: int, max_steps: int, *, warmup_steps: int, decay_fraction: float, min_factor: float
) -> float:
    """Linear warm-up, a plateau, then a linear descent to `min_factor` over the last `decay_fraction` of the
    steps (WSD, Hu et al. 2024): a run can be continued from the plateau with another end."""
    decay_steps = max(1, round(decay_fraction * max_steps))
    left = max(0, max_steps - step)
    if left >= decay_steps:
        return _warmup(step, warmup_steps)
    return min(_warmup(step, warmup_steps), min_factor + (1 - min_factor) * left / decay_steps)


def constant(step: int, max_steps: int, *, warmup_steps: int) -> float:
    """Linear warm-up, then no change."""
    return _warmup(step, warmup_steps)
