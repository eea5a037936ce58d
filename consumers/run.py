"""A run opened for reading: its settings, its events, its groups with their fates, its tables, its lineage.

Readers see what is committed, join no consumer group and commit nothing: any number of them may read, and none of them
changes what the run does. Nothing here needs a broker of its own: the address is given, or in the environment. Only a
`Service`, which is asked for by name, keeps its position on the cluster.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Generator, Mapping
from datetime import datetime
from typing import TYPE_CHECKING, Any

from headrace.schemas.codec import kind_of
from headrace.schemas.errors import SettingsError, UndecodableRecord
from headrace.schemas.events import Disposed, Event, GroupClosed, Manifest, Version
from headrace.schemas.settings import RunSettings
from headrace.schemas.topics import ALL_TOPICS, BATCHES, GROUPS, POLICY, RunTopics
from headrace.streams.log.clients import check_broker
from headrace.streams.log.policy import Schemas, open_settings, runs
from headrace.streams.log.reader import (
    Position,
    Reader,
    Record,
    beginning_offsets,
    end_offsets,
    offsets_at,
    read_backwards,
)

from .groups import GroupFates, GroupView
from .selection import FromVersion, Selection, Start
from .source import Snapshot
from .stream import Stopped, Stream

if TYPE_CHECKING:
    from .frames import Table
    from .lineage import EpisodeFate, TokenOrigin
    from .service import Service

BOOTSTRAP_VARIABLE = "HEADRACE_BOOTSTRAP_SERVERS"
_POLL_S = 0.2

Read = tuple[Record, Event | UndecodableRecord]


class Run:
    """Use `open_run`."""

    def __init__(self, kafka: Mapping[str, Any], topics: RunTopics, settings: RunSettings) -> None:
        self.kafka, self.topics, self.settings = kafka, topics, settings
        self._learned = 0  # what is below in `policy` need not be read again for its schemas

    @property
    def name(self) -> str:
        """The run id."""
        return self.topics.run

    def snapshot(self) -> Snapshot:
        """Everything that the run's topics hold, as of now."""
        found = Snapshot(self.kafka, self.topics, self._learned)
        self._learned = found.end(POLICY, 0)
        return found

    # -------------------------------------------------------------------------------------------------- events

    def records(self, *topics: str, start: Start = "earliest", follow: bool = False,
                stop: threading.Event | None = None) -> Stream[Record]:  # fmt: skip
        """Committed records of these topics (named without prefix and run), in order within each partition.

        Without `follow` it ends where the log ends now. With it, it goes on until `stop` is set. Iterate with `for` or
        `async for`. Raises SettingsError, and while it is iterated DataLossError, LogError.
        """
        _check_topics(topics)
        return Stream(lambda stopped: self._read(topics, start, follow, stopped), stop)

    def events(self, *topics: str, start: Start = "earliest", follow: bool = False, stop: threading.Event | None = None,
               group: str | None = None, episode: str | None = None, version: int | None = None,
               kinds: type | tuple[type, ...] = ()) -> Stream[Read]:  # fmt: skip
        """As `records` (without topics: of all that may hold the kinds), decoded, and only those that `Selection`
        describes.

        Where nothing is selected, a record that can't be decoded is handed out with the error that says why: it is a
        fact too.
        """
        wanted = Selection.of(group=group, episode=episode, version=version, kinds=kinds)
        topics = topics or wanted.topics()
        _check_topics(topics)

        def read(stopped: Stopped) -> Generator[list[Read], None, None]:
            decode = Decoder(self.kafka, self.topics, wanted)
            for batch in self._read(topics, start, follow, stopped):
                yield decode(batch)

        return Stream(read, stop)

    def groups(self, *, follow: bool = False, stop: threading.Event | None = None) -> Stream[GroupView]:
        """Closed groups, each once: when its fate is known. Without `follow`, candidates that still wait come last."""

        def read(stopped: Stopped) -> Generator[list[GroupView], None, None]:
            wanted = Selection.of(kinds=(GroupClosed, Manifest, Disposed))
            decode, fates = Decoder(self.kafka, self.topics, wanted), GroupFates()
            for batch in self._read((GROUPS, BATCHES), "earliest", follow, stopped):
                yield [view for record, event in decode(batch) if not isinstance(event, UndecodableRecord)
                       for view in fates.feed(record, event)]  # fmt: skip
            yield fates.waiting()

        return Stream(read, stop)

    def service(self, name: str, *topics: str, start: Start = "earliest", exactly_once: bool = False) -> Service:
        """A reader that remembers where it was, under this name: see `Service` for what it promises."""
        from .service import Service

        _check_topics(topics)
        return Service(self, name, topics, start=start, exactly_once=exactly_once)

    # ------------------------------------------------------------------------------------------- tables and lineage

    def table(self, name: str) -> Table:
        """One of the tables of docs/tables.md, as of now. Raises SettingsError for another name, or where the extra
        `frames` is not installed."""
        from .frames import open_table

        return open_table(self.snapshot(), name)

    def trace_token(self, group: str, slot: int, index: int) -> TokenOrigin:
        """Where the `index`-th token (from 0, context included) of a candidate's counted episode comes from: the event
        that brought it, with its record, worker and engine. See `lineage.trace_token`."""
        from .lineage import trace_token

        return trace_token(self.snapshot(), group, slot, index)

    def trace_episode(self, group: str, slot: int) -> EpisodeFate:
        """What an episode fed: its attempts, its group's closure, the batches and versions. See
        `lineage.trace_episode`."""
        from .lineage import trace_episode

        return trace_episode(self.snapshot(), group, slot)

    # ------------------------------------------------------------------------------------------------- positions

    def positions(self, topics: tuple[str, ...], start: Start) -> tuple[dict[Position, int], dict[Position, int]]:
        """(where to begin, where the log ends now), by the whole name of the topic and partition."""
        begin: dict[Position, int] = {}
        ends: dict[Position, int] = {}
        if isinstance(start, FromVersion):
            version = self._version(start.version)
        for topic in topics:
            name = self.topics.name(topic)
            first, last = beginning_offsets(self.kafka, name), end_offsets(self.kafka, name)
            strict = False  # whether a position that is deleted is an error
            match start:
                case "earliest":
                    at = first
                case "latest":
                    at = last
                case int():
                    at = dict.fromkeys(first, start)
                case datetime():
                    at = offsets_at(self.kafka, name, int(start.timestamp() * 1000))
                case FromVersion():
                    record, event = version
                    own = {POLICY: record.offset, BATCHES: event.batch_offset if event.version else first[0]}
                    at = {0: own[topic]} if topic in own else offsets_at(self.kafka, name, event.committed_ms)
                case _:
                    at = {p: start.get((topic, p), first[p]) for p in first}
                    strict = True
            for p, end in last.items():
                begin[name, p] = at[p] if strict else max(first[p], min(end, at[p]))
                ends[name, p] = end
        return begin, ends

    def _version(self, number: int) -> tuple[Record, Version]:
        schemas = Schemas(self.kafka, self.topics)
        for record in read_backwards(self.kafka, self.topics.name(POLICY), 0):
            event = schemas.decode(record.value)
            if isinstance(event, Version) and event.version == number:
                return record, event
        raise SettingsError(f"run {self.name!r} has no version {number}: `headrace show {self.name} versions` lists "
                            "those that it has")  # fmt: skip

    def _read(self, topics: tuple[str, ...], start: Start, follow: bool, stopped: Stopped
              ) -> Generator[list[Record], None, None]:  # fmt: skip
        positions, ends = self.positions(topics, start)
        with Reader(self.kafka, positions, gather=follow) as reader:
            while not stopped():
                if not follow and all(reader.positions[place] >= end for place, end in ends.items()):
                    return
                records = reader.poll(timeout_s=_POLL_S)
                yield records if follow else [r for r in records if r.offset < ends[r.topic, r.partition]]


class Decoder:
    """Records of a run as events, those that are wanted. A key or a kind that can't be a wanted one spares the
    decoding."""

    def __init__(self, kafka: Mapping[str, Any], topics: RunTopics, wanted: Selection | None = None) -> None:
        self._schemas, self._topics, self._wanted = Schemas(kafka, topics), topics, wanted or Selection()
        self._keys = {topics.name(topic): self._wanted.key(topic) for topic in ALL_TOPICS}

    def __call__(self, records: list[Record]) -> list[Read]:
        """The wanted ones with their events, in order; undecodable ones with the error, where everything is wanted."""
        out: list[Read] = []
        for record in records:
            key = self._keys[record.topic]
            if key is not None and record.key is not None and record.key != key:
                continue
            kind = kind_of(record.value)  # None: of a schema that is to be looked up, or none of ours
            if kind is not None and not self._wanted.wants_kind(kind):
                continue
            try:
                event = self._schemas.decode(record.value)
            except UndecodableRecord as error:
                if self._wanted.everything:
                    place = (self._topics.short(record.topic), record.partition, record.offset)
                    out.append((record, UndecodableRecord(str(error), *place)))
                continue
            if self._wanted.wants(event):
                out.append((record, event))
        return out


def open_run(run: str, kafka: Mapping[str, Any] | None = None, prefix: str = "headrace") -> Run:
    """Raises RunNotFound with the runs there are, BrokerUnreachable."""
    kafka = _kafka(kafka)
    topics = RunTopics(run, prefix)
    check_broker(kafka)
    return Run(kafka, topics, open_settings(kafka, topics).settings)


def list_runs(kafka: Mapping[str, Any] | None = None, prefix: str = "headrace") -> list[str]:
    """The ids of all runs on the cluster. Raises BrokerUnreachable."""
    kafka = _kafka(kafka)
    check_broker(kafka)
    return runs(kafka, prefix)


def _kafka(kafka: Mapping[str, Any] | None) -> Mapping[str, Any]:
    if kafka is not None:
        return kafka
    if address := os.environ.get(BOOTSTRAP_VARIABLE):
        return {"bootstrap.servers": address}
    raise SettingsError(f"no address of a Kafka broker: pass `kafka`, or set {BOOTSTRAP_VARIABLE}")


def _check_topics(topics: tuple[str, ...]) -> None:
    for topic in topics:
        if topic not in ALL_TOPICS:
            raise SettingsError(f"a run has no topic {topic!r}: use one of {', '.join(ALL_TOPICS)}")
