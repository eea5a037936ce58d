"""Groups and their attempts, one partition at a time: what `groups` says, read in step with `trajectories`.

A closure names the offset that decided it, so the raw events are read just up to there: what is held are the groups
that are open at that point of the log. Spans are passed over without decoding.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from headrace.schemas.codec import decode, kind_of
from headrace.schemas.errors import UndecodableRecord
from headrace.schemas.events import AttemptEnded, EpisodeEnded, EpisodeStarted, GroupClosed, Lease
from headrace.schemas.topics import GROUPS, TRAJECTORIES
from headrace.streams.log.reader import Record

from ..facts import Fact, Failures, read_facts
from ..source import LogSource

_WANTED = (Lease, EpisodeStarted, EpisodeEnded)
Attempt = tuple[int, int]  # slot, attempt


@dataclass(slots=True)
class Told:
    """What is known of a group from the start of its life. Events of incarnations that no lease named are left out."""

    group: str
    opening: Lease | None = None
    opened_ms: int | None = None
    opened: int = -1  # offset
    lessees: dict[Attempt, str] = field(default_factory=dict)
    started: dict[Attempt, EpisodeStarted] = field(default_factory=dict)
    finished: dict[Attempt, EpisodeEnded] = field(default_factory=dict)
    ended: dict[Attempt, Fact[AttemptEnded]] = field(default_factory=dict)


def closures(source: LogSource, partition: int) -> Iterator[tuple[Told, Fact[GroupClosed] | None]]:
    """Each group of the partition, in order of closure; then those that are open, without a closure."""
    raw = _Raw(source, partition)
    ended: dict[str, dict[Attempt, Fact[AttemptEnded]]] = {}
    for fact in read_facts(source, GROUPS, partition, Failures()):
        event = fact.event
        if isinstance(event, AttemptEnded):
            ended.setdefault(event.group, {})[event.slot, event.attempt] = fact
        elif isinstance(event, GroupClosed):
            raw.advance(event.cause)
            told = raw.open.pop(event.group, None)
            if told is None or told.opened != event.opened:
                told = Told(event.group)
            told.ended = ended.pop(event.group, {})
            yield told, fact
    raw.advance(None)
    for told in list(raw.open.values()):
        told.ended = ended.pop(told.group, {})
        yield told, None


class _Raw:
    """The raw events up to an offset, by open group."""

    def __init__(self, source: LogSource, partition: int) -> None:
        self.open: dict[str, Told] = {}
        self._records = source.records(TRAJECTORIES, partition)
        self._next: Record | None = next(self._records, None)

    def advance(self, offset: int | None) -> None:
        """Through the record at `offset`; None: to the end."""
        while self._next is not None and (offset is None or self._next.offset <= offset):
            self._feed(self._next)
            self._next = next(self._records, None)

    def _feed(self, record: Record) -> None:
        if kind_of(record.value) not in _WANTED:
            return
        try:
            event = decode(record.value)
        except UndecodableRecord:
            return
        if isinstance(event, Lease):
            told = self.open.get(event.group)
            if told is None and event.opens:
                told = self.open[event.group] = Told(event.group, event, record.timestamp_ms, record.offset)
            if told is not None:
                for one in event.assignments:
                    told.lessees.setdefault((one.slot, one.attempt), event.incarnation)
        elif isinstance(event, EpisodeStarted | EpisodeEnded) and (told := self.open.get(event.group)):
            attempt = (event.slot, event.attempt)
            if told.lessees.get(attempt) != event.incarnation:
                return
            if isinstance(event, EpisodeStarted):
                told.started.setdefault(attempt, event)
            else:
                told.finished.setdefault(attempt, event)
