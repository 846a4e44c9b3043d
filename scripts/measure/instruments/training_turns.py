"""Training points of several contestants, each in a process of its own, whose steps are timed in turns."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

POINT = "scripts.measure.instruments.training_point:child"
ROUNDS = 5


def in_turns(asked: dict[str, list[str]]) -> dict[str, dict[str, Any]]:
    """The results of contestants, by name, whose words `asked` has, --rounds=ROUNDS among them: a round of
    each after the other. One that fails does so in company: others may have taken its memory."""
    from scripts.measure.worker import Worker

    with ExitStack() as stack:
        workers = {name: stack.enter_context(Worker(POINT, beside=len(asked) - 1)) for name in asked}
        for name, worker in workers.items():
            worker.start({"words": asked[name]}, wait=True)
        for worker in workers.values():
            worker.ready()  # it has compiled
        for _ in range(ROUNDS):
            for worker in workers.values():
                worker.go()
                worker.ready()
        return {name: worker.result() for name, worker in workers.items()}
