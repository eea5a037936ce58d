"""How a start reads the log: in which order, and what of it is not worth keeping.

`tasks` and `groups` grow with the run; what matters of them is what is open. So `groups` comes before `tasks`: the ends
of attempts whose group has closed are dropped undecoded, and of that group's leases only what is counted over the whole
run stays. Ends that are left are held back until their leases are known.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Protocol, TypeVar

from headrace.schemas.codec import kind_of
from headrace.schemas.events import Addendum, AttemptEnded, GroupClosed, LeaseEnded, Position
from headrace.schemas.topics import BATCHES, GROUPS, POLICY, TASKS

from .coordinator import Addressed, Coordinator


class Keyed(Addressed, Protocol):
    """A record that also says its key."""

    @property
    def key(self) -> bytes | None: ...


R = TypeVar("R", bound=Keyed)


def restore(coordinator: Coordinator, whole: Callable[[str], Iterable[R]], observe: Callable[[str, R], None]) -> int:
    """Bring a new coordinator to where the log stands. `whole` gives a topic's records (by its short name) in order,
    `observe` hands one over, decoded. Returns how many there were."""
    count = 0
    for topic in (POLICY, BATCHES):
        for record in whole(topic):
            observe(topic, record)
            count += 1
    ends: dict[bytes | None, list[R]] = {}  # of attempts, by group
    closed: set[bytes | None] = set()
    positions: dict[int, R] = {}  # the newest of each partition
    for record in whole(GROUPS):
        count += 1
        kind = kind_of(record.value)
        if kind is AttemptEnded:
            ends.setdefault(record.key, []).append(record)
        elif kind is Position:
            positions[record.partition] = record
        elif kind is not Addendum:
            observe(GROUPS, record)
            if kind is GroupClosed:
                closed.add(record.key)
                ends.pop(record.key, None)
        coordinator.passed(GROUPS, record)
    for record in whole(TASKS):
        count += 1
        if record.key not in closed or kind_of(record.value) is not LeaseEnded:
            observe(TASKS, record)
    for held in ends.values():
        for record in held:
            observe(GROUPS, record)
    for record in positions.values():
        observe(GROUPS, record)
    coordinator.restored()
    return count
