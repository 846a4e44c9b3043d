"""The bench of side_by_side.py for the study `backward_recompute`: also what the forward keeps, and
what the backward does."""

from __future__ import annotations

import gc
from typing import Any

import torch

from scripts.measure.instruments.allocations import Event, Halves, recorder_of
from scripts.measure.instruments.backward_work import NOT_YET, flops_done, kind_of
from scripts.measure.instruments.bench_points import Shape
from scripts.measure.instruments.contestants import Field
from scripts.measure.instruments.side_by_side import Bench, Results
from scripts.measure.instruments.timing import MIB, Contestant, Probe


def kept_mib(contestant: Contestant, device: str) -> float:
    """What a forward leaves until its backward: out, and all that was saved beside q, k and v."""
    with recorder_of(torch.device(device)) as recorder:
        out = contestant.prepare()
        recorder.mark(Event("point"))
        del out
    return Halves.of(recorder.events()).at / MIB


class BackwardBench(Bench):
    """Rows have no counters yet: those come last, from a program of their own (backward_work.counted)."""

    def alone(self, field: Field, passed: str, name: str, probes: dict[str, Probe]) -> Results:
        found = super().alone(field, passed, name, probes)
        contestant = field.contestant(name, self.attentions[name], passed)
        found[name] |= {"kept_mib": kept_mib(contestant, self.device)} | self.done(name, field.shape)
        gc.freeze()  # what is imported and compiled by now need not be gone through at every clean-up
        return found

    def done(self, name: str, shape: Shape) -> dict[str, Any]:
        """What is known of the work without a clock."""
        kind = kind_of(name, shape)
        return {
            "keeps": kind.keeps,
            "products": kind.products,
            "flops_done": flops_done(kind, shape),
            "counters": None,
            "counters_from": NOT_YET,
            "copy_gb_per_s": self.copy_gb_per_s,
        }
