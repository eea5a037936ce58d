"""What a reader of a whole run reads from: each partition's retained records, as of one moment.

A run goes on while it is read, so the moment has two edges. Everything below `settled` was committed before the
snapshot's upper edge was taken in any partition, and the upper edges are taken in the order in which records name each
other (`policy` names `batches`, which names `groups`, ...). So a record below its lower edge finds whatever it refers
to, and whatever had to be written together with it, below the upper edges.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

from headrace.schemas.topics import (
    BATCHES,
    DEADLETTER,
    EVALS,
    FLEET,
    GROUPS,
    POLICY,
    SAMPLES,
    TASKS,
    TRAJECTORIES,
    WEIGHTS,
    RunTopics,
)
from headrace.streams.log.clients import KafkaConfig
from headrace.streams.log.policy import learn_schemas
from headrace.streams.log.reader import FIRST_WINDOW, LAST_WINDOW, Reader, Record

# Referring topics before those that they refer to.
_CUT_ORDER = (POLICY, WEIGHTS, BATCHES, GROUPS, SAMPLES, DEADLETTER, TRAJECTORIES, TASKS, FLEET, EVALS)
# A transaction's markers reach its partitions one after another; so long we wait between the two edges.
_MARKERS_S = 0.2


class LogSource(Protocol):
    """Topics are named without prefix and run."""

    run: str

    def partitions(self, topic: str) -> int:
        """How many; numbered from 0."""

    def first(self, topic: str, partition: int) -> int:
        """The first retained offset; what lies below was deleted on purpose."""

    def end(self, topic: str, partition: int) -> int:
        """The upper edge; it may lie behind markers."""

    def settled(self, topic: str, partition: int) -> int:
        """The lower edge: what must exist because of a record below it does exist in `records`."""

    def records(self, topic: str, partition: int, start: int = 0, end: int | None = None) -> Iterator[Record]:
        """The retained records below the upper edge with start <= offset < end, in order; by default all."""

    def offset_at(self, topic: str, partition: int, time_ms: int) -> int:
        """The first offset whose record is not older; the upper edge where all are."""


def backwards(source: LogSource, topic: str, partition: int, end: int | None = None,
              widest: int = LAST_WINDOW) -> Iterator[Record]:  # fmt: skip
    """The records below `end`, newest first, in windows that grow: who looks for a near one reads little."""
    window, first = FIRST_WINDOW, source.first(topic, partition)
    if end is None:
        end = source.end(topic, partition)
    while end > first:
        start = max(first, end - window)
        yield from reversed(list(source.records(topic, partition, start, end)))
        end, window = start, min(2 * window, widest)


class Snapshot:
    """A LogSource over Kafka: read-committed, no consumer group."""

    def __init__(self, kafka: KafkaConfig, topics: RunTopics, learned: int = 0):
        """`learned`: the schemas that `policy` announces below this offset are known in this process."""
        self.run = topics.run
        self._kafka, self._topics = kafka, topics
        # Whoever reads partition after partition, or record after record, needs one client, not one for each.
        self._idle: list[Reader] = []
        with self._reader() as reader:

            def bounds(topic: str) -> list[tuple[int, int]]:
                name = topics.name(topic)
                return [reader.bounds(name, p) for p in reader.partitions(name)]

            self._lower = {topic: bounds(topic) for topic in _CUT_ORDER}
            time.sleep(_MARKERS_S)
            self._upper = {topic: bounds(topic) for topic in _CUT_ORDER}
        learn_schemas(kafka, topics, learned)  # after the edges: the schemas of all below are announced by now

    def partitions(self, topic: str) -> int:
        return len(self._upper[topic])

    def first(self, topic: str, partition: int) -> int:
        return self._upper[topic][partition][0]

    def settled(self, topic: str, partition: int) -> int:
        return self._lower[topic][partition][1]

    def end(self, topic: str, partition: int) -> int:
        return self._upper[topic][partition][1]

    def records(self, topic: str, partition: int, start: int = 0, end: int | None = None) -> Iterator[Record]:
        first, last = self._upper[topic][partition]
        start, end = max(first, start), last if end is None else min(last, end)
        if start < end:
            with self._reader() as reader:
                yield from reader.read(self._topics.name(topic), partition, start, end)

    def offset_at(self, topic: str, partition: int, time_ms: int) -> int:
        with self._reader() as reader:
            return min(reader.offset_at(self._topics.name(topic), partition, time_ms), self.end(topic, partition))

    @contextmanager
    def _reader(self) -> Iterator[Reader]:
        """One that nobody uses, or a new one. Those that are idle end with the snapshot."""
        reader = self._idle.pop() if self._idle else Reader(self._kafka)
        try:
            yield reader
        finally:
            reader.assign({})  # else it would fetch on
            self._idle.append(reader)
