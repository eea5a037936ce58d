"""A run opened for reading: its settings, its events, its groups with their fates.

Readers see what is committed, join no consumer group and commit nothing: any number of them may read, and none of them
changes what the run does. Nothing here needs a broker of its own: the address is given, or in the environment.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any, Literal, NamedTuple

from headrace.schemas.errors import SettingsError, UndecodableRecord
from headrace.schemas.events import Disposed, Event, GroupClosed, Manifest, SlotFate
from headrace.schemas.outcomes import Closure, Disposition
from headrace.schemas.settings import RunSettings
from headrace.schemas.topics import ALL_TOPICS, BATCHES, GROUPS, RunTopics
from headrace.streams.log.clients import check_broker
from headrace.streams.log.policy import Schemas, open_settings, runs
from headrace.streams.log.reader import Reader, Record, beginning_offsets, end_offsets, offsets_at

from .source import Snapshot

BOOTSTRAP_VARIABLE = "HEADRACE_BOOTSTRAP_SERVERS"

Start = Literal["earliest", "latest"] | int | datetime
"""Where to begin: an end of the log, an offset (in each partition), or a time."""


@dataclass(frozen=True, slots=True)
class GroupView:
    """A closed group and its fate. `disposition` is None while a candidate waits for the coordinator."""

    id: str
    partition: int
    offset: int  # of the closure in `groups`
    closed_ms: int
    closure: str
    disposition: str | None
    reason: str
    batch: int | None
    max_lag: int | None  # versions between sampling and training; None: not in a batch
    held_up_by: int  # the slot that ended last
    open_ms: int
    purpose: str
    task: str
    slots: tuple[SlotFate, ...]
    accounts: Mapping[str, int]

    @property
    def reward(self) -> float | None:
        """Mean over the counted slots."""
        rewards = [slot.reward for slot in self.slots if slot.counted and slot.reward is not None]
        return sum(rewards) / len(rewards) if rewards else None


class _Fate(NamedTuple):
    disposition: str
    reason: str
    batch: int | None
    max_lag: int | None


class Run:
    """Use `open_run`."""

    def __init__(self, kafka: Mapping[str, Any], topics: RunTopics, settings: RunSettings) -> None:
        self.kafka, self.topics, self.settings = kafka, topics, settings

    @property
    def name(self) -> str:
        return self.topics.run

    def snapshot(self) -> Snapshot:
        """Everything that the run's topics hold, as of now."""
        return Snapshot(self.kafka, self.topics)

    def records(self, *topics: str, start: Start = "earliest", follow: bool = False,
                stop: threading.Event | None = None) -> Iterator[Record]:  # fmt: skip
        """Committed records of these topics (named without prefix and run), in order within each partition.

        Without `follow` it ends where the log ends now. With it, it goes on until `stop` is set.
        """
        positions: dict[tuple[str, int], int] = {}
        ends: dict[tuple[str, int], int] = {}
        for topic in topics:
            if topic not in ALL_TOPICS:
                raise SettingsError(f"a run has no topic {topic!r}: use one of {', '.join(ALL_TOPICS)}")
            name = self.topics.name(topic)
            first, last = beginning_offsets(self.kafka, name), end_offsets(self.kafka, name)
            match start:
                case "earliest":
                    begin = first
                case "latest":
                    begin = last
                case int():
                    begin = dict.fromkeys(first, start)
                case datetime():
                    begin = offsets_at(self.kafka, name, int(start.timestamp() * 1000))
            for p, end in last.items():
                positions[name, p] = max(first[p], min(end, begin[p]))
                ends[name, p] = end
        with Reader(self.kafka, positions) as reader:
            while not (stop is not None and stop.is_set()):
                if not follow and all(reader.positions[place] >= end for place, end in ends.items()):
                    return
                for record in reader.poll(timeout_s=0.2):
                    if follow or record.offset < ends[record.topic, record.partition]:
                        yield record

    def events(self, *topics: str, start: Start = "earliest", follow: bool = False,
               stop: threading.Event | None = None) -> Iterator[tuple[Record, Event | UndecodableRecord]]:  # fmt: skip
        """As `records`, decoded. One that can't be is handed out with the error that says why: it is a fact too."""
        schemas = Schemas(self.kafka, self.topics)
        for record in self.records(*topics, start=start, follow=follow, stop=stop):
            try:
                yield record, schemas.decode(record.value)
            except UndecodableRecord as error:
                place = (self.topics.short(record.topic), record.partition, record.offset)
                yield record, UndecodableRecord(str(error), *place)

    def groups(self, *, follow: bool = False, stop: threading.Event | None = None) -> Iterator[GroupView]:
        """Closed groups, each once: when its fate is known. Without `follow`, candidates that still wait come last."""
        waiting: dict[str, GroupView] = {}
        early: dict[str, _Fate] = {}  # read before their closures
        schemas = Schemas(self.kafka, self.topics)
        for record in self.records(GROUPS, BATCHES, follow=follow, stop=stop):
            event = schemas.decode(record.value)
            fates: dict[str, _Fate] = {}
            if isinstance(event, GroupClosed):
                view = _view(record, event)
                if event.closure != Closure.CANDIDATE:
                    yield view
                    continue
                waiting[event.group] = view
                if event.group in early:
                    fates = {event.group: early.pop(event.group)}
            elif isinstance(event, Manifest):
                fates = {ref.group: _Fate(Disposition.BATCHED, "", event.batch, ref.max_lag) for ref in event.groups}
            elif isinstance(event, Disposed):
                fates = {event.group: _Fate(event.disposition, event.reason, None, None)}
            for group, fate in fates.items():
                if group in waiting:
                    yield replace(waiting.pop(group), **fate._asdict())
                else:
                    early[group] = fate
        yield from waiting.values()


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


def _view(record: Record, event: GroupClosed) -> GroupView:
    final = None if event.closure == Closure.CANDIDATE else event.closure
    place = (record.partition, record.offset, record.timestamp_ms)
    return GroupView(
        event.group,
        *place,
        event.closure,
        final,
        "",
        None,
        None,
        event.held_up_by,
        event.open_ms,
        event.purpose,
        event.task,
        event.slots,
        event.accounts,
    )
