"""A run's log in memory: what the ledger reads, and what a test may tamper with."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from headrace.consumers.source import LogSource
from headrace.schemas.codec import encode
from headrace.schemas.events import Event
from headrace.schemas.topics import ALL_TOPICS
from headrace.streams.log.reader import Record

Place = tuple[str, int]  # topic without prefix and run, partition


@dataclass
class MemoryLog:
    """A LogSource whose records are lists. Offsets may have gaps, as those of a transactional log have."""

    run: str
    logs: dict[Place, list[Record]]
    firsts: dict[Place, int] = field(default_factory=dict)

    @classmethod
    def empty(cls, run: str, partitions: dict[str, int]) -> MemoryLog:
        return cls(run, {(topic, p): [] for topic in ALL_TOPICS for p in range(partitions.get(topic, 1))})

    @classmethod
    def copy_of(cls, source: LogSource) -> MemoryLog:
        places = [(topic, p) for topic in ALL_TOPICS for p in range(source.partitions(topic))]
        return cls(source.run, {place: list(source.records(*place)) for place in places},
                   {place: source.first(*place) for place in places})  # fmt: skip

    def partitions(self, topic: str) -> int:
        return sum(name == topic for name, _ in self.logs)

    def first(self, topic: str, partition: int) -> int:
        return self.firsts.get((topic, partition), 0)

    def settled(self, topic: str, partition: int) -> int:
        return self.end(topic, partition)

    def records(self, topic: str, partition: int, start: int = 0, end: int | None = None) -> Iterator[Record]:
        log = self.logs[topic, partition]
        return (r for r in log if start <= r.offset and (end is None or r.offset < end))

    def offset_at(self, topic: str, partition: int, time_ms: int) -> int:
        newer = (r.offset for r in self.logs[topic, partition] if r.timestamp_ms >= time_ms)
        return next(newer, self.end(topic, partition))

    def end(self, topic: str, partition: int) -> int:
        log = self.logs[topic, partition]
        return log[-1].offset + 1 if log else self.firsts.get((topic, partition), 0)

    def append(self, topic: str, partition: int, event: Event | bytes, key: str = "", at_ms: int = 0) -> Record:
        value = event if isinstance(event, bytes) else encode(event)
        record = Record(topic, partition, self.end(topic, partition), at_ms, key.encode() or None, value)
        self.logs[topic, partition].append(record)
        return record

    # ------------------------------------------------------------------------------------------------ tampering

    def without(self, record: Record, place: Place) -> MemoryLog:
        return self._with(place, [r for r in self.logs[place] if r.offset != record.offset])

    def altered(self, record: Record, place: Place, value: bytes) -> MemoryLog:
        return self._with(
            place, [replace(r, value=value) if r.offset == record.offset else r for r in self.logs[place]]
        )

    def repeated(self, record: Record, place: Place) -> MemoryLog:
        """The record once more, at the end: the only place where anyone can add to a log."""
        return self._with(place, [*self.logs[place], replace(record, offset=self.end(*place))])

    def trimmed(self, place: Place, below: int) -> MemoryLog:
        """As after `delete_records`."""
        kept = self._with(place, [r for r in self.logs[place] if r.offset >= below])
        return replace(kept, firsts={**self.firsts, place: below})

    def _with(self, place: Place, records: list[Record]) -> MemoryLog:
        return replace(self, logs={**self.logs, place: records})
