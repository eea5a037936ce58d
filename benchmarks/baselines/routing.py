"""Routers that an expert would put before replicas without thinking of their caches, each a few lines.

`choose(key, now)` names a replica by number; `ended` says that a request there is over. `key` is what a request has in
common with the earlier turns of its conversation: the first block of its prompt.
"""

from __future__ import annotations

import bisect
import hashlib
from collections.abc import Hashable
from typing import Protocol


class Baseline(Protocol):
    def choose(self, key: Hashable, now: float) -> int: ...
    def ended(self, replica: int) -> None: ...


class RoundRobin:
    def __init__(self, replicas: int) -> None:
        self._replicas, self._next = replicas, -1

    def choose(self, key: Hashable, now: float) -> int:
        self._next = (self._next + 1) % self._replicas
        return self._next

    def ended(self, replica: int) -> None:
        pass


class LeastLoaded:
    """Fewest requests under way; of equals the one that has had fewest in all."""

    def __init__(self, replicas: int) -> None:
        self._active, self._all = [0] * replicas, [0] * replicas

    def choose(self, key: Hashable, now: float) -> int:
        chosen = min(range(len(self._active)), key=lambda i: (self._active[i], self._all[i]))
        self._active[chosen] += 1
        self._all[chosen] += 1
        return chosen

    def ended(self, replica: int) -> None:
        self._active[replica] -= 1


class ConsistentHash:
    """A ring with 160 points for each replica (as ketama has them)."""

    POINTS = 160

    def __init__(self, replicas: int) -> None:
        self._ring = sorted((self._hash((replica, point)), replica)
                            for replica in range(replicas) for point in range(self.POINTS))  # fmt: skip
        self._points = [point for point, _ in self._ring]

    @staticmethod
    def _hash(key: Hashable) -> int:
        return int.from_bytes(hashlib.blake2b(repr(key).encode(), digest_size=8).digest(), "big")

    def choose(self, key: Hashable, now: float) -> int:
        return self._ring[bisect.bisect(self._points, self._hash(key)) % len(self._ring)][1]

    def ended(self, replica: int) -> None:
        pass
