"""Decides what became of each attempt, slot and group: a deterministic fold over one partition of `trajectories`.

No client, thread or clock of the machine is used here: the same records give the same effects, so a restart is a
replay. The decisions, in one place:

- Only an opening lease opens a group; a record of a group that isn't open is `late` and opens nothing.
- An event counts if a lease named its incarnation for its slot and attempt; else it is `foreign`. Events of an attempt
  that isn't the one by which its slot ends (an earlier one, or one leased after the slot's end) are `superseded`: they
  change nothing but the closure's token accounts.
- An equal repeat is `duplicate`. A repeat with other content, a gap in the sequence, and an event that contradicts the
  protocol end the attempt as an infrastructure failure at once. Events after an attempt's own end are `late`.
- A slot ends with a trainable outcome, or when its attempts are used up. `unknown` on every attempt allowed is the
  model's failure; one recorded fault of ours among them makes it infrastructure. A failure that no scorer had to judge
  (attempts, or a budget on the episode's own clock, spent) has reward 0.
- A trainable outcome without a finite reward is a failure of the scorer.
- The slots that count are the first `group_size` by number that have not failed; the group closes when they have all
  ended, or at its deadline. A record that arrives with the deadline is applied before the deadline is.
- A success whose reward is suspicious is marked when its group closes; where its group's rules exclude the sign, it
  doesn't count, and no reserve stands in for it.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from xxhash import xxh3_64_intdigest

from headrace.schemas import codec
from headrace.schemas.errors import InvalidRecord, RecordError
from headrace.schemas.events import (
    Addendum,
    AttemptEnded,
    EpisodeEnded,
    EpisodeStarted,
    Event,
    Exhausted,
    GroupClosed,
    GroupPayload,
    Kinds,
    Lease,
    Span,
)
from headrace.schemas.hashes import GENESIS
from headrace.schemas.outcomes import (
    REASON_BUDGET_SPENT,
    REASON_CONFLICTING_REPEAT,
    REASON_DEADLINE,
    REASON_EXHAUSTED,
    REASON_SCORER_FAILED,
    REASON_SEQUENCE_GAP,
    Boundary,
    Closure,
    Outcome,
    Purpose,
    Source,
)
from headrace.schemas.topics import TRAJECTORIES

from .clock import LogClock
from .slots import Attempt, EpisodeEvent, Group, Slot, accounts, episodes, fate, judge

REASON_INVALID_EVENT = "invalid_event"
REASON_SURPLUS = "surplus"
# The producer doesn't know of an end that the fold decided, and may still be at work.
ENDED_BY_FOLD = frozenset({REASON_BUDGET_SPENT, REASON_CONFLICTING_REPEAT, REASON_DEADLINE, REASON_INVALID_EVENT,
                           REASON_SEQUENCE_GAP, REASON_SURPLUS})  # fmt: skip
FLAG_ZERO_VARIANCE = "zero_variance"
UNLINKED: dict[str, Any] = {"number": -1, "previous": GENESIS}  # until a commit gives the record its place

_EPISODE = (Span, EpisodeStarted, EpisodeEnded)  # the most frequent first
_OUTCOMES = frozenset(Outcome)
_TRAINABLE = frozenset(outcome for outcome in Outcome if outcome.trainable)


class RecordLike(Protocol):
    """What the fold needs of a record: a reader's and a test's alike."""

    @property
    def offset(self) -> int: ...
    @property
    def timestamp_ms(self) -> int: ...
    @property
    def value(self) -> bytes | None: ...


@dataclass(frozen=True, slots=True)
class Refused:
    """The input record at `cause` goes to `deadletter`."""

    cause: int
    kind: str
    reason: str


@dataclass(frozen=True, slots=True)
class Closed:
    """A closure. `payload` says what a candidate carries: its episodes with their events' offsets, no spans yet."""

    record: GroupClosed
    payload: GroupPayload | None

    @property
    def cause(self) -> int:
        return self.record.cause


# Records carry `UNLINKED` in place of their position in the chain.
Effect = AttemptEnded | Closed | Addendum | Refused


def read_event(value: bytes | None, decode: Callable[[bytes | None], Event] = codec.decode) -> Event | RecordError:
    """A record of `trajectories`, or what is wrong with it."""
    try:
        event = decode(value)
        if not isinstance(event, Kinds.BY_TOPIC[TRAJECTORIES]):
            raise InvalidRecord(f"a {type(event).__name__} does not belong into {TRAJECTORIES}")
        if isinstance(event, Span):
            event.check()
    except RecordError as error:
        return error
    return event


class Fold:
    """Feed it every record of a partition in order, from a position's low mark and with the clock as it stood there."""

    def __init__(self, clock: LogClock | None = None) -> None:
        self.clock = clock or LogClock()
        self._open: dict[str, Group] = {}  # in order of opening
        self._due: list[tuple[int, int, str]] = []  # heap of (clock, opened, group)
        self._effects: list[Effect] = []
        self._at = -1

    @property
    def open_groups(self) -> int:
        return len(self._open)

    def low_mark(self, position: int) -> tuple[int, int, int]:
        """(offset, clock, timestamp) from which a restart at `position` must replay."""
        for group in self._open.values():
            return (group.opened, *group.before)
        return position, self.clock.now_ms, self.clock.last_ms

    def apply(self, record: RecordLike, event: Event | RecordError | None = None) -> list[Effect]:
        """What this record decides. `event` spares a second decoding; it must be `read_event(record.value)`."""
        event = read_event(record.value) if event is None else event
        before = (self.clock.now_ms, self.clock.last_ms)
        now = self.clock.see(record.timestamp_ms)
        self._effects, self._at = [], record.offset
        if isinstance(event, _EPISODE):
            self._event(event, record.value or b"")
        elif isinstance(event, RecordError):
            self._effects.append(Refused(self._at, type(event).__name__, str(event)))
        elif isinstance(event, Lease):
            self._lease(event, now, before)
        elif isinstance(event, Exhausted):
            self._exhausted(event)
        while self._due and self._due[0][0] <= now:
            _, opened, name = heapq.heappop(self._due)
            group = self._open.get(name)
            if group is not None and group.opened == opened:
                self._expire(group)
        return self._effects

    # ------------------------------------------------------------------------------------------------- leases

    def _lease(self, lease: Lease, now: int, before: tuple[int, int]) -> None:
        group = self._open.get(lease.group)
        if group is None:
            if not lease.opens:
                return  # its group has closed: a lease changes nothing then
            spec = lease.spec
            group = Group(lease.group, self._at, now, before, lease.purpose, lease.unmanaged, spec, lease.task,
                           [Slot(i) for i in range(spec.slots)])  # fmt: skip
            self._open[lease.group] = group
            wait = spec.max_age_s if spec.on_deadline == "wait" else spec.deadline_s
            heapq.heappush(self._due, (now + round(wait * 1000), self._at, lease.group))
        for assignment in lease.assignments:
            if not 0 <= assignment.slot < len(group.slots):
                continue
            slot = group.slots[assignment.slot]
            if assignment.attempt in slot.attempts:
                continue
            attempt = slot.attempts[assignment.attempt] = Attempt(assignment.attempt, lease.incarnation)
            if not slot.ended and (slot.current is None or slot.current.number < attempt.number):
                slot.current = attempt
        self._close_if_complete(group)  # a group without slots is complete

    def _exhausted(self, event: Exhausted) -> None:
        group = self._open.get(event.group)
        if group is None or not 0 <= event.slot < len(group.slots):
            return
        slot = group.slots[event.slot]
        if not slot.ended and (slot.current is None or slot.current.number == event.attempt):
            self._end_slot(group, slot, Outcome.INFRA_FAILURE, event.reason, Boundary.PRODUCER, None)
            self._close_if_complete(group)

    # ------------------------------------------------------------------------------------------------- events

    def _event(self, event: EpisodeEvent, value: bytes) -> None:
        group = self._open.get(event.group)
        if group is None:
            self._add("late", event)
            return
        slot = group.slots[event.slot] if 0 <= event.slot < len(group.slots) else None
        attempt = slot.attempts.get(event.attempt) if slot else None
        if slot is None or attempt is None or attempt.incarnation != event.incarnation:
            self._add("foreign", event)
            return
        runs = attempt is slot.current and attempt.outcome is None and not slot.ended
        digest = xxh3_64_intdigest(value)
        known = attempt.known(event.sequence)
        if known is not None:
            self._add("duplicate" if known == digest else "conflict", event)
            if known != digest and runs:
                said = (f"event {event.sequence} of {event.group}, slot {event.slot}, attempt {event.attempt} came "
                        "before with other content")  # fmt: skip
                self._effects.append(Refused(self._at, InvalidRecord.__name__, said))
                self._fail(group, slot, REASON_CONFLICTING_REPEAT, Boundary.PRODUCER)
            return
        if attempt.reported:
            self._add("late", event)
            return
        gap = event.sequence != len(attempt.hashes)
        if gap:
            attempt.beyond[event.sequence] = digest
        else:
            attempt.hashes.append(digest)
            attempt.offsets.append(self._at)
        attempt.count(event)
        if isinstance(event, Span):
            attempt.signs.see(event, group)
        attempt.reported = isinstance(event, EpisodeEnded)
        if not runs:
            return
        if gap:
            self._fail(group, slot, REASON_SEQUENCE_GAP, Boundary.LOG)
        elif isinstance(event, EpisodeStarted) != (event.sequence == 0) and not (
            isinstance(event, EpisodeEnded) and event.outcome not in _TRAINABLE  # it may fail before it starts
        ):
            self._fail(group, slot, REASON_INVALID_EVENT, Boundary.PRODUCER)
        elif isinstance(event, EpisodeStarted):
            attempt.temperature = event.temperature
        elif isinstance(event, EpisodeEnded):
            self._ended(group, slot, event)

    def _ended(self, group: Group, slot: Slot, event: EpisodeEnded) -> None:
        reward = event.reward if event.reward is not None and math.isfinite(event.reward) else None
        if event.outcome not in _OUTCOMES:
            self._fail(group, slot, REASON_INVALID_EVENT, Boundary.PRODUCER)
        elif Outcome(event.outcome).trainable and reward is None:
            self._end(group, slot, Outcome.INFRA_FAILURE, REASON_SCORER_FAILED, Boundary.SCORER, None)
        else:
            self._end(group, slot, Outcome(event.outcome), event.reason, event.boundary, reward)

    def _fail(self, group: Group, slot: Slot, reason: str, boundary: Boundary) -> None:
        self._end(group, slot, Outcome.INFRA_FAILURE, reason, boundary, None)

    def _end(self, group: Group, slot: Slot, outcome: Outcome, reason: str, boundary: str,
             reward: float | None) -> None:  # fmt: skip
        """The slot's current attempt is over; so is the slot, unless another attempt is allowed."""
        attempt = slot.current
        assert attempt is not None
        attempt.outcome = outcome
        if outcome.trainable:
            self._end_slot(group, slot, outcome, reason, boundary, reward)
        elif attempt.number + 1 < group.spec.max_attempts:
            self._attempt_ended(group, slot, outcome, reason, boundary, reward, ends_slot=False)
        elif all(one.outcome == Outcome.UNKNOWN for one in slot.attempts.values()):
            self._end_slot(group, slot, Outcome.MODEL_FAILURE, REASON_EXHAUSTED, Boundary.MODEL, 0.0)
        else:
            self._end_slot(group, slot, outcome, reason, boundary, reward)
        self._close_if_complete(group)

    def _end_slot(self, group: Group, slot: Slot, outcome: Outcome, reason: str, boundary: str,
                  reward: float | None) -> None:  # fmt: skip
        slot.ended, slot.ended_at = True, self._at
        slot.outcome, slot.reason, slot.boundary, slot.reward = outcome, reason, boundary, reward
        self._attempt_ended(group, slot, outcome, reason, boundary, reward, ends_slot=True)

    def _attempt_ended(self, group: Group, slot: Slot, outcome: Outcome, reason: str, boundary: str,
                       reward: float | None, *, ends_slot: bool) -> None:  # fmt: skip
        attempt = slot.current or Attempt(-1, "")
        self._effects.append(AttemptEnded(
            **UNLINKED, cause=self._at, group=group.id, slot=slot.number, attempt=attempt.number,
            incarnation=attempt.incarnation, outcome=outcome, reason=reason, boundary=boundary, reward=reward,
            model_tokens=attempt.model_tokens, ends_slot=ends_slot, timings_ms=dict(attempt.times),
        ))  # fmt: skip

    def _add(self, kind: str, event: EpisodeEvent) -> None:
        tokens = event.count if isinstance(event, Span) and event.source == Source.MODEL else 0
        self._effects.append(Addendum(**UNLINKED, cause=self._at, kind=kind, group=event.group, slot=event.slot,
                                      attempt=event.attempt, model_tokens=tokens))  # fmt: skip

    # ------------------------------------------------------------------------------------------------- closures

    def _close_if_complete(self, group: Group) -> None:
        if all(slot.ended for slot in group.counting()):
            self._close(group, expired=False)

    def _expire(self, group: Group) -> None:
        counting = {slot.number for slot in group.counting()}
        for slot in group.slots:
            if slot.ended or slot.number not in counting:
                continue
            attempt = slot.current
            if attempt is not None and attempt.outcome is None and attempt.spent(group.spec):
                self._end_slot(group, slot, Outcome.MODEL_FAILURE, REASON_BUDGET_SPENT, Boundary.MODEL, 0.0)
            else:
                self._end_slot(group, slot, Outcome.INFRA_FAILURE, REASON_DEADLINE, Boundary.PRODUCER, None)
        self._close(group, expired=True)

    def _close(self, group: Group, *, expired: bool) -> None:
        counting = group.counting()
        # At a deadline, reserves that still run can't stand in any more: only what has ended counts.
        survivors = [slot for slot in (group.slots if expired else counting) if slot.ended and slot.outcome.trainable]
        survivors = survivors[: group.spec.group_size]
        judge(group)
        survivors = [slot for slot in survivors if not slot.excluded]
        held_up_by = max(group.slots, key=lambda s: (s.ended_at, -s.number)).number if group.slots else -1
        for slot in group.slots:
            if not slot.ended:
                self._end_slot(group, slot, Outcome.UNKNOWN, REASON_SURPLUS, Boundary.NONE, None)
        closure, flagged = self._closure(group, survivors, expired)
        counted = {slot.number for slot in survivors}
        record = GroupClosed(
            **UNLINKED, cause=self._at, group=group.id, closure=closure, purpose=group.purpose, task=group.task.id,
            opened=group.opened, open_ms=self.clock.now_ms - group.opened_ms, flagged=flagged,
            slots=tuple(fate(slot, slot.number in counted) for slot in group.slots),
            accounts=accounts(group, counted, closure),
            context_tokens=sum(a.context_tokens for slot in group.slots for a in slot.attempts.values()),
            content_hash=None, samples=(), held_up_by=held_up_by,
        )  # fmt: skip
        payload = GroupPayload(group.id, group.task, tuple(episodes(survivors)))
        del self._open[group.id]
        self._effects.append(Closed(record, payload if closure == Closure.CANDIDATE else None))

    @staticmethod
    def _closure(group: Group, survivors: list[Slot], expired: bool) -> tuple[Closure, str | None]:
        spec = group.spec
        if group.unmanaged:
            return Closure.UNMANAGED, None
        if group.purpose != Purpose.TRAIN:
            return Closure.EVALUATED, None
        if expired and spec.on_deadline == "cancel":
            return Closure.EXPIRED, None
        if len(survivors) < max(1, spec.min_survivors):
            return Closure.TOO_FEW_SURVIVORS, None
        if spec.group_size > 1 and len({slot.reward for slot in survivors}) == 1:
            if spec.zero_variance == "keep":
                return Closure.CANDIDATE, FLAG_ZERO_VARIANCE
            return Closure.ZERO_VARIANCE, None
        return Closure.CANDIDATE, None
