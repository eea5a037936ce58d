"""Decoded records with their addresses, what doesn't hold of them, and the check of the chains that run through them.

A chain's record carries a running number and the digest of the record before it: a missing, altered or repeated record
is noticed at its successor. This module checks them by its own reading of the rule, not through `schemas.chain`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, Generic, Literal, TypeVar

from headrace.schemas.codec import decode
from headrace.schemas.errors import UndecodableRecord
from headrace.schemas.events import Chained, Kinds
from headrace.schemas.hashes import GENESIS, digest

from .source import LogSource

E = TypeVar("E", covariant=True)

# One missing record may lead to thousands of failures that follow from it: the first ones of a kind tell enough.
LINES_OF_A_KIND = 50

Kind = Literal[
    "unreadable record", "broken chain", "position", "input record", "recount", "dead letter", "closure", "sample",
    "decision", "version", "publication", "weights", "lease", "reuse", "schema", "total",
]  # fmt: skip


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
    """What doesn't hold, in the order found. All are counted, by kind; of each kind the first lines are kept."""

    counts: Counter[Kind] = field(default_factory=Counter)
    _kept: list[str] = field(default_factory=list)

    def add(self, kind: Kind, where: object, message: str) -> None:
        """`where` is the record's address."""
        self.counts[kind] += 1
        if self.counts[kind] <= LINES_OF_A_KIND:
            self._kept.append(f"{where}: {message}")

    @property
    def lines(self) -> list[str]:
        """One for each failure that is kept, the address first; then one for each kind of which there are more."""
        more = [f"{n - LINES_OF_A_KIND} more failures of the kind {kind!r}"
                for kind, n in self.counts.items() if n > LINES_OF_A_KIND]  # fmt: skip
        return self._kept + more


def read_facts(source: LogSource, topic: str, partition: int, failures: Failures,
               start: int = 0) -> Iterator[Fact[Any]]:  # fmt: skip
    """The records of one partition from an offset on; one that doesn't decode, or doesn't belong there, is a failure
    and left out."""
    for record in source.records(topic, partition, start):
        where = address(topic, partition, record.offset)
        try:
            event = decode(record.value)
        except UndecodableRecord as error:
            failures.add("unreadable record", where, str(error))
            continue
        if not isinstance(event, Kinds.BY_TOPIC[topic]):
            failures.add("unreadable record", where, f"a {type(event).__name__} does not belong into {topic}")
            continue
        yield Fact(topic, partition, record.offset, record.timestamp_ms, digest(record.value or b""), event)


class ChainCheck:
    """Numbers from 0 without gap, each with the digest of the one before; the first follows `begin`, if any.

    Feed it the chain's records in order: it keeps the last one.
    """

    def __init__(self, failures: Failures, begin: Fact[Any] | None = None) -> None:
        self._failures = failures
        self._number, self._previous = 0, begin.digest if begin else GENESIS
        self._before: Fact[Any] | None = begin

    def feed(self, fact: Fact[Chained]) -> None:
        event, before = fact.event, self._before or "the beginning"
        if event.number != self._number:
            why = "records before it are missing" if event.number > self._number else "it is a repetition"
            self._fail(fact, f"number {event.number} where {self._number} is due after {before}: {why}")
        elif event.previous != self._previous:
            self._fail(fact, f"does not follow {before} as it is now: one of the two was altered")
        self._number, self._previous, self._before = event.number + 1, fact.digest, fact

    def _fail(self, fact: Fact[Chained], message: str) -> None:
        self._failures.add("broken chain", fact, message)


def check_chain(facts: Iterable[Fact[Chained]], failures: Failures) -> None:
    """`ChainCheck` over all of them."""
    chain = ChainCheck(failures)
    for fact in facts:
        chain.feed(fact)
