"""What is usual: a batch is launched in order, and the next one when its last trajectory has ended. Requests go to the
replicas in turn. (Its sandboxes are started cold, one per episode, in the episode's own slot; that is the caller's.)"""

from __future__ import annotations

import itertools
from collections import Counter, deque
from collections.abc import Callable, Iterable


class BarrierCollector:
    """`admit`, `ended` and `version` as `collect_virtual.Collector` says."""

    def __init__(self, groups: int, group_size: int) -> None:
        self._groups, self._size = groups, group_size
        self.version = self._next = 0
        self._ended: Counter[int] = Counter()

    def admit(self, waiting: int) -> list[int]:
        if self._next > self.version * self._groups:
            return []
        self._next += self._groups
        return list(range(self._next - self._groups, self._next))

    def foresee(self) -> list[int]:
        """The next batch's tasks are known: who sets sandboxes up ahead may begin with theirs."""
        return list(range(self._next, self._next + self._groups))

    def began(self, group: int, slot: int) -> None:
        pass

    def ended(self, group: int, slot: int, versions: list[tuple[int, int]]) -> list[list[tuple[int, int]]]:
        self._ended[group] += 1
        if sum(self._ended.values()) < self._groups * self._size:
            return []
        batch = [(one, 0) for one in self._ended]  # nobody samples ahead: the lag is always 0
        self._ended.clear()
        self.version += 1
        return [batch]


class RoundRobin:
    def __init__(self, replicas: int) -> None:
        self._turn = itertools.cycle(range(replicas))

    def choose(self) -> int:
        return next(self._turn)


class LaunchOrder:
    """Slots begin as they were launched, the first that may."""

    def __init__(self, slots: int) -> None:
        self._free = slots
        self._queue: deque[tuple[int, int]] = deque()

    @property
    def waiting(self) -> int:
        return len(self._queue)

    def launched(self, keys: Iterable[tuple[int, int]]) -> None:
        self._queue += keys

    def starts(self, able: Callable[[tuple[int, int]], bool]) -> list[tuple[int, int]]:
        begin: list[tuple[int, int]] = []
        while self._free > len(begin) and (key := next(filter(able, self._queue), None)) is not None:
            self._queue.remove(key)
            begin.append(key)
        self._free -= len(begin)
        return begin

    def ended(self, key: tuple[int, int]) -> None:
        self._free += 1
