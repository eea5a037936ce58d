"""Who runs what: the slots of open groups, the workers that are alive, and what each has been leased.

Facts come from `tasks`, `groups` and `fleet`; the order between these topics doesn't matter, since an attempt's end
means something only while that attempt is the slot's newest.

- A group goes to one worker where one has room for all of its waiting slots (the one with most room), else to several.
- A worker is lost when its heartbeats stop for the timeout on the clock of `fleet`, or when a new incarnation of it
  reports. Its slots wait for their next attempt; one without a next attempt is exhausted.
- A task that kills every worker is bounded by its attempts, and must not take others with it: a group whose last
  attempt follows one that was lost with its worker is a suspect. It runs on one worker, which runs no other suspect.
- A lease handed back is no failure and uses no attempt up: the number goes on, the limit doesn't apply. One that names
  a slot which isn't leased under its number (handed back twice, or after the worker was lost) changes nothing.
- A group that a producer asked for is bound: its slots are never leased unasked. One that is lost or returned waits for
  the next producer that asks with attempts to spare; where the group has but one attempt, it is exhausted.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from enum import Enum, auto

from headrace.schemas.errors import InvalidRecord
from headrace.schemas.events import (
    Assignment,
    AttemptEnded,
    Exhausted,
    HandBack,
    Heartbeat,
    Lease,
    LeaseEnded,
    LeaseRequest,
)
from headrace.schemas.outcomes import REASON_HANDED_BACK, REASON_WORKER_LOST, Purpose

from .assembler import ENDED_BY_FOLD
from .clock import MAX_STEP_MS, MIN_STEP_MS, LogClock
from .stalls import Held

REASON_SLOT_ENDED = "slot_ended"


class _State(Enum):
    WAITING = auto()
    LEASED = auto()
    ENDED = auto()


@dataclass(slots=True)
class _Slot:
    attempt: int = -1  # the newest leased
    incarnation: str = ""
    lease: int = -1  # its number
    state: _State = _State.WAITING
    lost: int = 0  # attempts that ended with their worker


@dataclass(slots=True)
class OpenGroup:
    """A group between its opening lease and its closure."""

    opening: Lease
    slots: list[_Slot]

    @property
    def bound(self) -> bool:
        return self.opening.request is not None

    @property
    def waiting(self) -> list[int]:
        return [number for number, slot in enumerate(self.slots) if slot.state is _State.WAITING]

    @property
    def suspect(self) -> bool:
        last = self.opening.spec.max_attempts - 1

        def tries_last(slot: _Slot) -> bool:
            return slot.attempt + (slot.state is _State.WAITING) >= last

        return any(s.lost and s.state is not _State.ENDED and tries_last(s) for s in self.slots)

    @property
    def lost(self) -> int:
        """How often a slot's worker was lost at most."""
        return max((slot.lost for slot in self.slots), default=0)


@dataclass(slots=True)
class _Worker:
    name: str
    seen_ms: int
    heard: bool = False  # else known by its leases alone
    capacity: int = 0
    managed: bool = False  # only such ones are given leases unasked
    refuses: bool = False  # has handed a lease back since its last heartbeat: it would be given the same again
    held: set[tuple[str, int]] = field(default_factory=set)  # (group, slot) that it runs

    @property
    def free(self) -> int:
        return self.capacity - len(self.held) if self.managed and not self.refuses else 0


class Leasing:
    """`timeout_ms` on the clock of `fleet` after which a silent worker is lost."""

    def __init__(self, timeout_ms: int) -> None:
        self.clock = LogClock()
        self.expire_after(timeout_ms)
        self.groups: dict[str, OpenGroup] = {}  # in order of opening
        self._workers: dict[str, _Worker] = {}  # by incarnation
        self._replaced: set[str] = set()  # incarnations that a newer one of their worker has followed
        self._waiting: dict[str, None] = {}  # groups with slots to lease, in order
        self._overdue: list[LeaseEnded] = []  # to be written: returned, or to tell a worker what it can't know
        self._lost: list[str] = []

    def expire_after(self, timeout_ms: int) -> None:
        """The timeout from now on. An outage takes at most half of it."""
        self.timeout_ms = timeout_ms
        self.clock.max_step_ms = min(MAX_STEP_MS, max(MIN_STEP_MS, timeout_ms // 2))

    def open_groups(self, purpose: Purpose) -> int:
        return sum(group.opening.purpose == purpose for group in self.groups.values())

    def oldest_versions(self, purpose: Purpose) -> list[int]:
        """Of each open group: the oldest version that may have sampled its tokens."""
        return [group.opening.min_version for group in self.groups.values() if group.opening.purpose == purpose]

    @property
    def free(self) -> int:
        """Slots that could be leased unasked."""
        return sum(max(0, worker.free) for worker in self._workers.values())

    def reporting(self) -> tuple[int, int]:
        """Incarnations whose heartbeats are heard, and how many of them take leases unasked."""
        heard = [w for w in self._workers.values() if w.heard and self.clock.now_ms - w.seen_ms <= self.timeout_ms]
        return len(heard), sum(worker.managed for worker in heard)

    def held(self) -> tuple[int, Held | None]:
        """How many slots are leased, and the one whose lease is oldest."""
        leased = [(slot.lease, number, group) for group in self.groups.values()
                  for number, slot in enumerate(group.slots) if slot.state is _State.LEASED]  # fmt: skip
        if not leased:
            return 0, None
        lease, number, group = min(leased, key=lambda one: one[:2])
        slot, opening = group.slots[number], group.opening
        worker = self._workers.get(slot.incarnation)
        return len(leased), Held(opening.group, opening.task.id, number, slot.attempt, lease,
                                 worker.name if worker else "a lost worker", slot.incarnation)  # fmt: skip

    def owed(self) -> int:
        """Open groups of which every slot has ended."""
        return sum(all(s.state is _State.ENDED for s in group.slots) for group in self.groups.values())

    # ------------------------------------------------------------------------------------------------- facts

    def leased(self, lease: Lease) -> None:
        """A lease of `tasks`, our own or a predecessor's. Raises InvalidRecord for a group or slot that isn't there."""
        if not lease.opens and lease.group not in self.groups:
            raise InvalidRecord(f"lease {lease.number} names group {lease.group}, which was never opened")
        if any(not 0 <= one.slot < lease.spec.slots for one in lease.assignments):
            raise InvalidRecord(f"lease {lease.number} names a slot that group {lease.group} doesn't have")
        if lease.opens:
            self.groups[lease.group] = OpenGroup(lease, [_Slot() for _ in range(lease.spec.slots)])
        group = self.groups[lease.group]
        for one in lease.assignments:
            before = group.slots[one.slot]
            if before.state is _State.LEASED:  # at a start, word of that attempt's end is still to be read
                self._release(lease.group, one.slot, before)
            group.slots[one.slot] = _Slot(one.attempt, lease.incarnation, lease.number, _State.LEASED, before.lost)
            self._worker(lease.incarnation, lease.worker).held.add((lease.group, one.slot))
        self._sort(lease.group)

    def lease_ended(self, event: LeaseEnded) -> list[Exhausted]:
        """What of it has no next attempt."""
        group = self.groups.get(event.group)
        exhausted = []
        for number in event.slots if group else ():
            assert group is not None
            if not 0 <= number < len(group.slots):
                continue
            slot = group.slots[number]
            if slot.state is not _State.LEASED or slot.lease != event.number:
                continue
            self._release(event.group, number, slot)
            slot.state = _State.WAITING
            returned, lost = event.reason == REASON_HANDED_BACK, event.reason == REASON_WORKER_LOST
            slot.lost += lost
            last = slot.attempt + 1 >= group.opening.spec.max_attempts
            once = group.bound and group.opening.spec.max_attempts == 1
            if (once and returned) or (lost and last):
                slot.state = _State.ENDED
                exhausted.append(Exhausted(event.group, number, slot.attempt, event.reason))
        self._sort(event.group)
        return exhausted

    def attempt_ended(self, event: AttemptEnded) -> None:
        """An end that the assembler recorded. Raises InvalidRecord for a slot that the group doesn't have."""
        group = self.groups.get(event.group)
        if group is None:
            return
        if not 0 <= event.slot < len(group.slots):
            raise InvalidRecord(f"group {event.group} has no slot {event.slot}")
        slot = group.slots[event.slot]
        newest = slot.attempt == event.attempt
        if not (newest or event.ends_slot):
            return
        if slot.state is _State.LEASED:
            self._release(event.group, event.slot, slot)
            if not newest or event.reason in ENDED_BY_FOLD:  # the worker can't know
                reason = event.reason if newest else REASON_SLOT_ENDED
                self._overdue.append(LeaseEnded(event.group, slot.lease, slot.incarnation, (event.slot,), reason))
        if slot.state is not _State.ENDED:
            slot.state = _State.ENDED if event.ends_slot else _State.WAITING
        self._sort(event.group)

    def asked_again(self, request: LeaseRequest) -> tuple[OpenGroup, list[int]] | None:
        """A group whose slots wait for somebody who asks as this request does, and as many of them as it asks for."""
        for group in self.groups.values():
            lease = group.opening
            if (group.bound and group.waiting and lease.spec.max_attempts > 1 and request.attempts > 1
                    and (lease.purpose, lease.version) == (request.purpose, request.version)
                    and request.task in (None, lease.task.id)):  # fmt: skip
                return group, group.waiting[: request.size]
        return None

    def closed(self, name: str) -> OpenGroup | None:
        """The group, which is open no longer."""
        group = self.groups.pop(name, None)
        self._waiting.pop(name, None)
        for number, slot in enumerate(group.slots) if group else ():
            if slot.state is _State.LEASED:
                self._release(name, number, slot)
        return group

    def heartbeat(self, beat: Heartbeat) -> None:
        if beat.incarnation in self._replaced:
            return
        if beat.incarnation not in self._workers:
            for incarnation, other in self._workers.items():
                if other.name == beat.worker:
                    self._replaced.add(incarnation)
                    self._lost.append(incarnation)
        worker = self._worker(beat.incarnation, beat.worker)
        worker.seen_ms, worker.capacity, worker.managed = self.clock.now_ms, beat.capacity, beat.managed
        worker.heard, worker.refuses = True, False

    def handed_back(self, event: HandBack) -> None:
        group, worker = self.groups.get(event.group), self._workers.get(event.incarnation)
        if worker is not None:
            worker.refuses = True
        told = {(one.number, n) for one in self._overdue for n in one.slots}
        mine = [n for n in event.slots if group is not None and 0 <= n < len(group.slots)
                and group.slots[n].lease == event.number and group.slots[n].incarnation == event.incarnation
                and group.slots[n].state is _State.LEASED and (event.number, n) not in told]  # fmt: skip
        if mine:
            self._overdue.append(LeaseEnded(event.group, event.number, event.incarnation, tuple(mine),
                                            REASON_HANDED_BACK))  # fmt: skip

    # ------------------------------------------------------------------------------------------------- decisions

    def due(self) -> Iterator[LeaseEnded]:
        """Leases that are over by now, and not yet so on the log. Apply each with `lease_ended`."""
        yield from self._overdue
        self._overdue = []
        silent = [i for i, w in self._workers.items() if self.clock.now_ms - w.seen_ms > self.timeout_ms]
        for incarnation in [*self._lost, *silent]:
            worker = self._workers.get(incarnation)
            if worker is None:
                continue
            leases: dict[tuple[str, int], list[int]] = {}
            for name, number in sorted(worker.held):
                leases.setdefault((name, self.groups[name].slots[number].lease), []).append(number)
            for (name, lease), slots in leases.items():
                yield LeaseEnded(name, lease, incarnation, tuple(slots), REASON_WORKER_LOST)
            del self._workers[incarnation]
        self._lost = []

    def waiting(self) -> Iterator[OpenGroup]:
        """Open groups with slots to lease, oldest first."""
        for name in list(self._waiting):
            yield self.groups[name]

    def next_attempts(self, group: OpenGroup, slots: Iterable[int]) -> tuple[Assignment, ...]:
        return tuple(Assignment(number, group.slots[number].attempt + 1) for number in slots)

    def place(self, slots: list[int], group: OpenGroup | None = None) -> list[tuple[str, str, list[int]]]:
        """(worker, incarnation, its share) for as many of the slots as there is room; `group` where it is open."""
        pool = [(worker.free, incarnation) for incarnation, worker in self._workers.items() if worker.free > 0]
        if group is not None and group.suspect:
            pool = self._quarantine(group, pool)
        out, rest = [], slots
        for free, incarnation in sorted(pool, key=lambda p: (-p[0], p[1])):
            if rest:
                out.append((self._workers[incarnation].name, incarnation, rest[:free]))
                rest = rest[free:]
        return out

    def _quarantine(self, group: OpenGroup, pool: list[tuple[int, str]]) -> list[tuple[int, str]]:
        """The one worker that may run a suspect now, if any."""
        own = {slot.incarnation for slot in group.slots if slot.state is _State.LEASED}
        if own:
            return [place for place in pool if place[1] in own][:1]
        return sorted((p for p in pool if not self._runs_suspect(p[1])), key=lambda p: (-p[0], p[1]))[:1]

    def _runs_suspect(self, incarnation: str) -> bool:
        return any(self.groups[name].suspect for name in {name for name, _ in self._workers[incarnation].held})

    # ------------------------------------------------------------------------------------------------- bookkeeping

    def _worker(self, incarnation: str, name: str) -> _Worker:
        if incarnation not in self._workers:
            self._workers[incarnation] = _Worker(name, self.clock.now_ms)
        return self._workers[incarnation]

    def _release(self, name: str, number: int, slot: _Slot) -> None:
        if worker := self._workers.get(slot.incarnation):
            worker.held.discard((name, number))

    def _sort(self, name: str) -> None:
        group = self.groups.get(name)
        if group is not None and not group.bound and group.waiting:
            self._waiting.setdefault(name)
        else:
            self._waiting.pop(name, None)
