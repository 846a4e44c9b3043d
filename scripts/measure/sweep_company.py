"""Which points of a study may be set up side by side: as many as the GPU has room for, by prediction."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from model.costs.gpus import GpuSheet
    from scripts.measure.sweep_points import Point

HOPELESS = 1.3  # times what the GPU can give: predictions are within 10%, so that this need not be tried
PEER = 1.5  # times what ours would take: nanoGPT took 1.43 times, at GPT-2 124M and 65,536 tokens


@dataclass(frozen=True)
class Room:
    """What the GPU at hand can give (`sheet`; None: a CPU, or a GPU not known), and how many processes are
    set up on it at a time."""

    sheet: GpuSheet | None
    most: int

    @staticmethod
    def here(most: int) -> Room:
        import torch

        from model.costs.gpus import gpu_sheet

        try:
            return Room(gpu_sheet(torch.cuda.get_device_name()) if torch.cuda.is_available() else None, most)
        except ValueError:
            return Room(None, most)

    def needs(self, point: Point) -> int:
        """Predicted bytes of the peak; 0 where that is not known, or the attention will refuse."""
        return _needs(point, self.sheet) if self.sheet else 0

    def is_hopeless(self, point: Point) -> bool:
        return self.sheet is not None and self.needs(point) > HOPELESS * self.sheet.usable_bytes

    def groups(self, points: Sequence[Point]) -> Iterator[list[Point]]:
        """The points in their order, cut where the next does not fit beside those before it."""
        group: list[Point] = []
        held = 0
        for point in points:
            needed = self.needs(point)
            full = self.sheet is not None and held + needed > self.sheet.usable_bytes
            if group and (full or len(group) >= self.most):
                yield group
                group, held = [], 0
            group.append(point)
            held += needed
        if group:
            yield group


@functools.cache
def _needs(point: Point, sheet: GpuSheet) -> int:
    from attention import registry
    from attention.base import CostsNotDeclared, UnsupportedAttention
    from model.costs.memory import peak
    from scripts.estimate import run_of
    from scripts.measure.instruments import training_peers

    try:
        run = run_of(point.cfg, sheet)
        if not point.peer:
            return peak(run).peak
    except (UnsupportedAttention, CostsNotDeclared):
        return 0
    peer, _ = training_peers.chosen(point.peer)
    like = replace(run, compiled=point.fields["compile"], attention=registry.shared_instance(peer.attention))
    return int(PEER * peak(like).peak)
