"""Decides what the coordinator may believe of a record: decoded, at home in its topic, and possible.

What isn't goes to `deadletter`, once. Of the topics that a start reads from the beginning, those letters are skipped
that `deadletter` holds already; `fleet` is read from its end, so what was written there while nobody coordinated
decides nothing and gets no letter.
"""

from __future__ import annotations

from collections.abc import Callable, Container

from headrace.schemas.codec import decode
from headrace.schemas.errors import InvalidRecord, RecordError
from headrace.schemas.events import DeadLetter, Event, Heartbeat, Kinds, LeaseRequest
from headrace.schemas.outcomes import Purpose
from headrace.schemas.payload import CHUNK_BYTES

from .log.reader import Record

MAX_SIZE = 4096  # slots of a group that a producer asks for

Place = tuple[str, int, int]  # topic, partition, offset


def understand(topic: str, value: bytes | None, read: Callable[[bytes | None], Event] = decode) -> Event:
    """A record of `topic` (its short name). Raises RecordError where it can't be one of that topic's."""
    event = read(value)
    if not isinstance(event, Kinds.BY_TOPIC[topic]):
        raise InvalidRecord(f"a {type(event).__name__} does not belong into {topic}")
    if isinstance(event, LeaseRequest):
        if event.size is not None and not 1 <= event.size <= MAX_SIZE:
            raise InvalidRecord(f"request {event.request} asks for a group of {event.size} slots")
        if event.purpose not in set(Purpose):
            raise InvalidRecord(f"request {event.request} has an unknown purpose, {event.purpose!r}")
        if event.version is not None and event.version < 0:
            raise InvalidRecord(f"request {event.request} pins version {event.version}")
    elif isinstance(event, Heartbeat) and event.capacity < 0:
        raise InvalidRecord(f"worker {event.worker} reports a capacity of {event.capacity}")
    return event


def letters(refused: list[tuple[Record, RecordError]], known: Container[Place]) -> list[DeadLetter]:
    """For each refused record that has none yet."""
    return [
        # A value that fills a record to its limit would not fit with the reason beside it.
        DeadLetter(record.topic, record.partition, record.offset, type(error).__name__, str(error), record.key,
                   None if record.value is None else record.value[:CHUNK_BYTES])
        for record, error in refused if (record.topic, record.partition, record.offset) not in known
    ]  # fmt: skip
