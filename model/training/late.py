"""Numbers of a step that the host looks at some steps later, so that it never waits for the device."""

from __future__ import annotations

from collections import deque

import torch
from torch import Tensor


class LateScalars:
    """Scalars of a step that the host reads `lag` steps later, when they have long been computed.

    `push` starts a copy into pinned memory and returns what has become due; waiting for the event of an older
    step keeps the host at most `lag` steps ahead and costs the device nothing."""

    def __init__(self, lag: int = 2):
        self.lag = lag
        self.pending: deque[tuple[int, Tensor, torch.cuda.Event | None]] = deque()

    def push(self, step: int, values: Tensor) -> list[tuple[int, list[float]]]:
        event = None
        if values.is_cuda:
            host = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
            values = host.copy_(values, non_blocking=True)
            event = torch.cuda.Event()
            event.record()
        self.pending.append((step, values, event))
        return self.take(keep=self.lag if event is not None else 0)

    def take(self, keep: int = 0) -> list[tuple[int, list[float]]]:
        """All but the newest `keep` steps, oldest first."""
        due = []
        while len(self.pending) > keep:
            step, values, event = self.pending.popleft()
            if event is not None:
                event.synchronize()
            due.append((step, values.tolist()))
        return due
