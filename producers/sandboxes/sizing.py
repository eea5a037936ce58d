"""How many sandboxes to start now: the pool's one decision, without clocks, threads or sandboxes.

The pool is sized apart from the engines' slots: sandboxes are set up ahead of their episodes and outlive them while a
verifier runs. Whoever waits comes first, then what was ordered ahead, in order, then spare ones for who comes without
an order. There is one limit for all that exist and one for those being set up at once.

How many spare ones adapts to demand by Little's law: as many as are taken during one set-up. A set-up's time has a long
tail, so a high quantile of the newest is used; it is bounded below (a pool that has been idle isn't empty) and above.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

WINDOW_S = 60.0  # over which the rate of takes is measured: several set-ups long, and short enough to follow a batch
SETUPS = 64  # newest set-up times that are looked at
QUANTILE = 0.95


@dataclass(frozen=True, slots=True)
class Size:
    """`total` sandboxes at once, `starting` of them being set up, and between `least` and `most` spare ones."""

    total: int
    starting: int
    least: int = 0
    most: int = 0

    def __post_init__(self) -> None:
        if not (self.total >= 1 and self.starting >= 1 and 0 <= self.least <= self.most <= self.total):
            raise ValueError(f"{self}: at least one in total and one starting, and 0 <= least <= most <= total")


@dataclass(frozen=True, slots=True)
class Standing:
    """What there is now. `ordered`: orders for which nothing is ready or being set up. `spare`: ready or being set up
    without an order."""

    in_use: int
    ready: int
    starting: int
    ordered: int
    spare: int


def to_start(size: Size, now: Standing, spare: int) -> tuple[int, int]:
    """(for orders, to have `spare` spare ones) to start now. What is merely spare leaves room for one order."""
    free = size.total - now.in_use - now.ready - now.starting
    at_once = size.starting - now.starting
    ordered = max(0, min(now.ordered, free, at_once))
    return ordered, max(0, min(spare - now.spare, free - ordered - 1, at_once - ordered))


@dataclass(slots=True)
class Demand:
    """Seconds, on any clock."""

    _takes: deque[float] = field(default_factory=deque)
    _setups: deque[float] = field(default_factory=lambda: deque(maxlen=SETUPS))

    def took(self, now: float) -> None:
        self._takes.append(now)

    def set_up(self, seconds: float) -> None:
        self._setups.append(seconds)

    def spare(self, now: float, size: Size) -> int:
        """How many spare ones there should be."""
        while self._takes and self._takes[0] < now - WINDOW_S:
            self._takes.popleft()
        during = len(self._takes) / WINDOW_S * quantile(self._setups, QUANTILE)
        return max(size.least, min(size.most, math.ceil(during)))


def quantile(values: Sequence[float], q: float) -> float:
    """The value that a share q of them doesn't exceed; 0.0 of none."""
    return sorted(values)[min(len(values) - 1, int(q * len(values)))] if values else 0.0
