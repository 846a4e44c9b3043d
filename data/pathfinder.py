"""Pathfinder: a picture of dashed curves, read pixel by pixel; are the two dots the ends of one of them?

The task is that of Long Range Arena (Tay et al. 2020, after Linsley et al. 2018): two long curves and short
ones that distract; in half of the pictures the dots are the ends of one long curve, else an end of each. A
picture is redrawn until some ends of different curves are as far apart as those of one: distance alone, and
how dots and curves look, do not give the label away. The directions of the dashes at the two dots do in part:
that both point at the other dot tells 77% of 3,000 pictures.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass
from itertools import product
from typing import ClassVar

import numpy as np

from conf.values import whole

DASH, GAP, TURN = 4, 1, 0.5  # pixels, pixels, and the most that a curve turns at a gap, in radians
LONG, SHORT = 6, 2  # dashes of a long curve: a sixth of the size; and of one that distracts
NEAR = 1.0  # pixels that two distances may differ by and count as the same
TRIES = 20  # to fit a curve in

Point = tuple[int, int]  # column, row


@dataclass(frozen=True)
class Pathfinder:
    """The task for data.examples: one sequence of size x size pixels (0, 1 on a dash, 2 on a dot), 2 classes,
    1 where the dots are joined. `distractors` short curves, as far as they fit in."""

    size: int = 32
    distractors: int = 6
    name: ClassVar[str] = "pathfinder"
    sequences: ClassVar[int] = 1
    n_classes: ClassVar[int] = 2
    n_tokens: ClassVar[int] = 3

    def __post_init__(self) -> None:
        whole("pathfinder.size", self.size, 18)
        whole("pathfinder.distractors", self.distractors, 0)

    def example(self, rng: random.Random, split: str) -> tuple[tuple[np.ndarray], int]:
        """((pixels,), label); the splits differ by their seeds alone."""
        while True:
            pixels, taken = bytearray(self.size**2), bytearray(self.size**2)
            if not (first := self._curve(rng, self.size // LONG, pixels, taken)):
                continue
            if not (second := self._curve(rng, self.size // LONG, pixels, taken)):
                continue
            far = math.dist(*first)
            pairs = [pair for pair in product(first, second) if abs(math.dist(*pair) - far) <= NEAR]
            if not pairs:
                continue
            for _ in range(self.distractors):
                self._curve(rng, SHORT, pixels, taken)
            label = rng.randrange(2)
            picture = np.frombuffer(pixels, dtype=np.uint8).reshape(self.size, self.size)
            for x, y in first if label else rng.choice(pairs):
                picture[y - 1 : y + 2, x - 1 : x + 2] = 2
            return (picture.ravel(),), label

    def _curve(
        self, rng: random.Random, dashes: int, pixels: bytearray, taken: bytearray
    ) -> tuple[Point, Point] | None:
        """Draw a curve where nothing is near, and return its ends; None where there was no room for it."""
        for _ in range(TRIES):
            if cells := self._walk(rng, dashes, taken):
                for x, y in cells:
                    pixels[y * self.size + x] = 1
                    for row in range(y - 2, y + 3):
                        taken[row * self.size + x - 2 : row * self.size + x + 3] = b"\1" * 5
                return cells[0], cells[-1]
        return None

    def _walk(self, rng: random.Random, dashes: int, taken: bytearray) -> list[Point]:
        """The pixels of a curve from end to end; none where it leaves the picture or meets another."""
        x, y = (rng.uniform(2, self.size - 3) for _ in range(2))
        heading, cells = rng.uniform(0, 2 * math.pi), []
        for _ in range(dashes):
            dx, dy = math.cos(heading), math.sin(heading)
            for _ in range(DASH):
                column, row = round(x), round(y)
                inside = 2 <= column < self.size - 2 and 2 <= row < self.size - 2
                if not inside or taken[row * self.size + column]:
                    return []
                cells.append((column, row))
                x, y = x + dx, y + dy
            x, y = x + GAP * dx, y + GAP * dy
            heading += rng.uniform(-TURN, TURN)
        return cells
