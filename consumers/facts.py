"""Decoded records with their addresses, and the check of the chains that run through them.

A chain's record carries a running number and the digest of the record before it: a missing, altered or repeated record
is noticed at its successor. This module checks them by its own reading of the rule, not through `schemas.chain`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from headrace.schemas.codec import decode
from headrace.schemas.errors import UndecodableRecord
from headrace.schemas.events import Chained, Kinds
from headrace.schemas.hashes import GENESIS, digest

from .source import LogSource

E = TypeVar("E", covariant=True)


def address(topic: str, partition: int, offset: int) -> str:
    """How people find a record again."""
    return f"{topic}[{partition}]@{offset}"


@dataclass(frozen=True, slots=True)
class Fact(Generic[E]):
    """A record as it was read: its place, the digest of its value, and what it says."""

    topic: str
    partition: int
    offset: int
    timestamp_ms: int
    digest: bytes
    event: E

    def __str__(self) -> str:
        return address(self.topic, self.partition, self.offset)


@dataclass(slots=True)
class Failures:
    """What doesn't hold, one line each, in the order found; the address comes first."""

    lines: list[str] = field(default_factory=list)

    def add(self, where: object, message: str) -> None:
        self.lines.append(f"{where}: {message}")


def read_facts(source: LogSource, topic: str, partition: int, failures: Failures) -> Iterator[Fact[Any]]:
    """The records of one partition; one that doesn't decode, or doesn't belong there, is a failure and left out."""
    for record in source.records(topic, partition):
        where = address(topic, partition, record.offset)
        try:
            event = decode(record.value)
        except UndecodableRecord as error:
            failures.add(where, str(error))
            continue
        if not isinstance(event, Kinds.BY_TOPIC[topic]):
            failures.add(where, f"a {type(event).__name__} does not belong into {topic}")
            continue
        yield Fact(topic, partition, record.offset, record.timestamp_ms, digest(record.value or b""), event)


def check_chain(facts: Iterable[Fact[Chained]], failures: Failures, begin: Fact[Any] | None = None) -> None:
    """Numbers from 0 without gap, each with the digest of the one before; the first follows `begin`, if any."""
    number, previous, before = 0, begin.digest if begin else GENESIS, begin
    for fact in facts:
        event = fact.event
        after = f"after {before}" if before else "at the beginning"
        if event.number > number:
            failures.add(fact, f"number {event.number} where {number} is due {after}: records before it are missing")
        elif event.number < number:
            failures.add(fact, f"number {event.number} where {number} is due {after}: it is a repetition")
        elif event.previous != previous:
            failures.add(fact, f"does not follow {before or 'the beginning'} as it is now: one of the two was altered")
        number, previous, before = event.number + 1, fact.digest, fact
