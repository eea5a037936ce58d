"""An asynchronous collector without a barrier: it launches the next group whenever a slot would be free, and whichever
32 groups have ended first make the batch. Nothing bounds how far sampling runs ahead but the number of slots."""

from __future__ import annotations

from collections import Counter


class FifoCollector:
    """`admit`, `ended` and `version` as `collect_virtual.Collector` says."""

    def __init__(self, groups: int, group_size: int) -> None:
        self._groups, self._size = groups, group_size
        self.version = self._next = 0
        self._ended: Counter[int] = Counter()
        self._oldest: dict[int, int] = {}
        self._complete: list[int] = []

    def admit(self, waiting: int) -> list[int]:
        if waiting >= self._size:
            return []
        self._next += 1
        return [self._next - 1]

    def foresee(self) -> list[int]:
        """One batch beyond what was launched."""
        return list(range(self._next, self._next + self._groups))

    def began(self, group: int, slot: int) -> None:
        pass

    def ended(self, group: int, slot: int, versions: list[tuple[int, int]]) -> list[list[tuple[int, int]]]:
        self._ended[group] += 1
        self._oldest[group] = min(self._oldest.get(group, self.version), versions[0][0])
        if self._ended[group] < self._size:
            return []
        self._complete.append(group)
        if len(self._complete) < self._groups:
            return []
        batch = [(one, self.version - self._oldest.pop(one)) for one in self._complete]
        self._complete = []
        self.version += 1
        return [batch]
