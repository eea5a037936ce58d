"""What a run should have trained, recomputed from its raw events the slow and obvious way.

The assembler folds record by record and survives restarts; this looks at each group as a whole, with every event at
hand: when did each slot end, when were enough of them ended, and what had been sampled by then. It shares the schemas
and nothing else with the streams. Use `check_batches` on a copy of a run's log whose `trajectories` are all retained.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from headrace.consumers.source import LogSource
from headrace.schemas.codec import decode
from headrace.schemas.errors import RecordError
from headrace.schemas.events import (
    EpisodeEnded,
    EpisodeStarted,
    Exhausted,
    GroupClosed,
    GroupPayload,
    Lease,
    Manifest,
    PayloadEpisode,
    Span,
)
from headrace.schemas.payload import content_hash, payload_span
from headrace.streams.log.reader import Record

TRAINABLE = ("model_success", "model_failure")


@dataclass(frozen=True)
class Closure:
    """What a group's closure should say."""

    closure: str
    cause: int
    content_hash: bytes | None


@dataclass(frozen=True)
class _Event:
    offset: int
    clock: int
    event: Any
    value: bytes


@dataclass(frozen=True)
class _End:
    """How a slot ended."""

    offset: int
    outcome: str
    reward: float | None
    attempt: int


def reference_closures(records: Iterable[Record]) -> dict[str, Closure]:
    """The closures that one partition of `trajectories` calls for, by group; none for groups that are still open."""
    timeline = list(_timeline(records))
    by_group: dict[str, list[_Event]] = defaultdict(list)
    for entry in timeline:
        if (group := getattr(entry.event, "group", None)) is not None:
            by_group[group].append(entry)
    closures = {}
    for group, events in by_group.items():
        opening = next((i for i, e in enumerate(events) if isinstance(e.event, Lease) and e.event.opens), None)
        if opening is not None and (closure := _close(events[opening:], timeline)):
            closures[group] = closure
    return closures


def _timeline(records: Iterable[Record]) -> Iterator[_Event]:
    """Usable events (else None) with the partition's clock, which no record moves by more than five seconds. Only what
    is newer than all before moves it, until time went back by more than a minute."""
    clock, newest = 0, None
    for record in records:
        if newest is None or record.timestamp_ms < newest - 60_000:
            newest = record.timestamp_ms
        clock += min(max(0, record.timestamp_ms - newest), 5000)
        newest = max(newest, record.timestamp_ms)
        try:
            event: Any = decode(record.value)
            if isinstance(event, Span):
                event.check()
        except RecordError:
            event = None
        yield _Event(record.offset, clock, event, record.value or b"")


def _close(events: Sequence[_Event], timeline: Sequence[_Event]) -> Closure | None:
    opening, spec = events[0], events[0].event.spec
    wait = spec.max_age_s if spec.on_deadline == "wait" else spec.deadline_s
    expiry = next((e.offset for e in timeline if e.offset >= opening.offset and
                   e.clock >= opening.clock + round(1000 * wait)), None)  # fmt: skip
    ends = {slot: _slot_end(events, slot) for slot in range(spec.slots)}
    for offset in sorted(end.offset for end in ends.values() if end):
        if expiry is not None and offset > expiry:
            break
        ended = {slot: end for slot, end in ends.items() if end and end.offset <= offset}
        standing = [s for s in range(spec.slots) if s not in ended or ended[s].outcome in TRAINABLE]
        counting = standing[: spec.group_size]
        if all(slot in ended for slot in counting):
            return _closure(events, offset, {slot: ended[slot] for slot in counting}, expired=False)
    if expiry is None:
        return None
    ended = {slot: end for slot, end in ends.items() if end and end.offset <= expiry}
    standing = [s for s in range(spec.slots) if s not in ended or ended[s].outcome in TRAINABLE]
    for slot in standing[: spec.group_size]:
        current = _attempts(events, slot, expiry)
        over = _attempt_end(events, slot, current[-1]) if current else None  # it failed, and waits for the next
        runs = current and (over is None or over.offset > expiry)
        if slot not in ended and runs and _spent(events, slot, current[-1], expiry, spec):
            ended[slot] = _End(expiry, "model_failure", 0.0, current[-1].attempt)
    survivors = [slot for slot in sorted(ended) if ended[slot].outcome in TRAINABLE][: spec.group_size]
    return _closure(events, expiry, {slot: ended[slot] for slot in survivors}, expired=True)


@dataclass(frozen=True)
class _Attempt:
    """An attempt that its slot ran at some time: from its lease until the next one's."""

    attempt: int
    incarnation: str
    begin: int
    end: int


def _attempts(events: Sequence[_Event], slot: int, until: int) -> list[_Attempt]:
    """In order; an attempt leased out of order (a smaller number than before) never runs."""
    leases: list[tuple[int, str, int]] = []
    for entry in events:
        if isinstance(entry.event, Lease) and entry.offset <= until:
            for one in entry.event.assignments:
                if one.slot == slot and (not leases or one.attempt > leases[-1][0]):
                    leases.append((one.attempt, entry.event.incarnation, entry.offset))
    ends = [begin for _, _, begin in leases[1:]] + [until + 1]
    return [_Attempt(*lease, end) for lease, end in zip(leases, ends, strict=False)]


def _of(events: Sequence[_Event], slot: int, attempt: _Attempt) -> Iterator[_Event]:
    """What the lessee wrote for it, once it had the lease."""
    for entry in events:
        e = entry.event
        if isinstance(e, EpisodeStarted | Span | EpisodeEnded) and entry.offset > attempt.begin:
            if (e.slot, e.attempt, e.incarnation) == (slot, attempt.attempt, attempt.incarnation):
                yield entry


def _spent(events: Sequence[_Event], slot: int, attempt: _Attempt, until: int, spec: Any) -> bool:
    """Whether the attempt had used up a budget by then."""
    spans = [e.event for e in _whole(events, slot, attempt, until)]
    if sum(span.count for span in spans if span.source == "model") >= max(1, spec.max_tokens):
        return True
    begun = max((span.turn for span in spans), default=0)
    over = {span.turn for span in spans if span.source == "model" and span.stop_reason is not None} | set(range(begun))
    if spec.max_turns is not None and over and max(over) + 1 >= spec.max_turns:
        return True
    for limit, step in ((spec.model_time_s, "model"), (spec.tool_time_s, "environment")):
        if limit is not None and sum(span.timings_ms.get(step, 0) for span in spans) >= 1000 * limit:
            return True
    return False


def _whole(events: Sequence[_Event], slot: int, attempt: _Attempt, until: int) -> list[_Event]:
    """Its spans up to an offset, without repetitions."""
    seen: dict[int, _Event] = {}
    for entry in _of(events, slot, attempt):
        if entry.offset <= until:
            seen.setdefault(entry.event.sequence, entry)
    return [seen[n] for n in sorted(seen) if isinstance(seen[n].event, Span)]


def _slot_end(events: Sequence[_Event], slot: int) -> _End | None:
    spec, last = events[0].event.spec, events[-1].offset
    outcomes: list[str | None] = []
    attempts = _attempts(events, slot, last)
    given_up = [(e.offset, e.event.attempt) for e in events if isinstance(e.event, Exhausted) and e.event.slot == slot]
    if given_up and (not attempts or given_up[0][0] < attempts[0].begin):
        return _End(given_up[0][0], "infra_failure", None, -1)
    for attempt in attempts:
        end = _attempt_end(events, slot, attempt)
        exhausted = next((offset for offset, number in given_up
                          if number == attempt.attempt and attempt.begin < offset < attempt.end), None)  # fmt: skip
        if exhausted is not None and (end is None or exhausted < end.offset or end.outcome not in TRAINABLE):
            if end is None or exhausted < end.offset or end.attempt + 1 < spec.max_attempts:
                return _End(exhausted, "infra_failure", None, attempt.attempt)
        outcomes.append(end.outcome if end else None)
        if end is None:
            continue
        if end.outcome in TRAINABLE:
            return end
        if attempt.attempt + 1 >= spec.max_attempts:
            if all(outcome == "unknown" for outcome in outcomes):
                return _End(end.offset, "model_failure", 0.0, attempt.attempt)
            return end
    return None


def _attempt_end(events: Sequence[_Event], slot: int, attempt: _Attempt) -> _End | None:
    """While it is its slot's newest: by its own last event, or by the first thing that is wrong with it."""
    seen: dict[int, bytes] = {}

    def failed(at: int) -> _End:
        return _End(at, "infra_failure", None, attempt.attempt)

    for entry in _of(events, slot, attempt):
        e = entry.event
        known = seen.setdefault(e.sequence, entry.value)
        if entry.offset >= attempt.end:
            return None
        if known is not entry.value:
            if known != entry.value:
                return failed(entry.offset)
            continue
        if e.sequence != len(seen) - 1:
            return failed(entry.offset)
        lost = isinstance(e, EpisodeEnded) and e.outcome not in TRAINABLE
        if isinstance(e, EpisodeStarted) != (e.sequence == 0) and not lost:
            return failed(entry.offset)
        if isinstance(e, EpisodeEnded):
            scored = e.reward is not None and abs(e.reward) < float("inf")
            if e.outcome in TRAINABLE and not scored or e.outcome not in (*TRAINABLE, "infra_failure", "unknown"):
                return failed(entry.offset)
            return _End(entry.offset, e.outcome, e.reward if scored else None, attempt.attempt)
    return None


def _closure(events: Sequence[_Event], cause: int, counted: dict[int, _End], expired: bool) -> Closure:
    lease, spec = events[0].event, events[0].event.spec
    survivors = {slot: end for slot, end in counted.items() if end.outcome in TRAINABLE}
    rewards = {end.reward for end in survivors.values()}
    if lease.unmanaged:
        name = "unmanaged"
    elif lease.purpose != "train":
        name = "evaluated"
    elif expired and spec.on_deadline == "cancel":
        name = "expired"
    elif len(survivors) < max(1, spec.min_survivors):
        name = "too_few_survivors"
    elif spec.group_size > 1 and len(rewards) == 1 and spec.zero_variance == "refill":
        name = "zero_variance"
    else:
        name = "candidate"
        episodes = [_episode(events, slot, end, cause) for slot, end in survivors.items()]
        return Closure(name, cause, content_hash(GroupPayload(lease.group, lease.task, tuple(episodes))))
    return Closure(name, cause, None)


def _episode(events: Sequence[_Event], slot: int, end: _End, cause: int) -> PayloadEpisode:
    attempt = next(a for a in _attempts(events, slot, cause) if a.attempt == end.attempt)
    started = next((e.event for e in _of(events, slot, attempt) if isinstance(e.event, EpisodeStarted)), None)
    spans = _whole(events, slot, attempt, min(cause, end.offset))
    return PayloadEpisode(slot, end.attempt, attempt.incarnation, end.outcome, end.reward,
                          started.temperature if started else float("nan"),
                          tuple(payload_span(e.event) for e in spans), ())  # fmt: skip


# ------------------------------------------------------------------------------------------------------ the check


def check_batches(log: LogSource) -> list[str]:
    """Where the run's closures and batches differ from what its raw events call for; empty where they agree."""
    expected: dict[str, Closure] = {}
    said: dict[str, Closure] = {}
    for p in range(log.partitions("trajectories")):
        if log.first("trajectories", p):
            raise ValueError(f"trajectories[{p}] has been trimmed: a reference fold needs all of it")
        expected |= reference_closures(log.records("trajectories", p))
        for record in log.records("groups", p):
            if isinstance(event := decode(record.value), GroupClosed):
                said[event.group] = Closure(event.closure, event.cause, event.content_hash)
    # What closed at the very end may not have been committed yet; what was committed must be right.
    wrong = [f"{group}: closed as {closure}; the events call for {expected.get(group)}"
             for group, closure in said.items() if closure != expected.get(group)]  # fmt: skip
    batched: dict[str, int] = {}
    for record in log.records("batches", 0):
        if isinstance(event := decode(record.value), Manifest):
            for ref in event.groups:
                if ref.group in batched:
                    wrong.append(f"{ref.group} is in batch {batched[ref.group]} and in batch {event.batch}")
                batched[ref.group] = event.batch
                due = expected.get(ref.group)
                if due is None or due.closure != "candidate" or due.content_hash != ref.content_hash:
                    wrong.append(f"batch {event.batch} holds {ref.group}; the events call for {due}")
    return wrong
