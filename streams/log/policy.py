"""The run's own settings, and the schemas that its records are written with: both stand in `policy`.

The settings are the first record. Schemas are announced (`SchemaAdded`) by whoever creates or resumes the run, before
any process of that version writes; `check_announced` keeps a writer from starting before readers can see that. So a
reader that meets an unknown fingerprint finds its schema in `policy` by then, or never: see `Schemas`.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

from pydantic import ValidationError

from headrace.schemas.chain import Chain
from headrace.schemas.codec import decode, kind_of, knows, learn, own_schemas
from headrace.schemas.errors import InvalidRecord, LogError, NotAnnounced, RecordError, RunNotFound, UnknownSchema
from headrace.schemas.events import Authored, Event, RunCreated, SchemaAdded, SettingsChanged
from headrace.schemas.hashes import digest
from headrace.schemas.settings import RunSettings, changed
from headrace.schemas.topics import POLICY, RunTopics

from .clients import KafkaConfig, admin, reason
from .reader import Reader, Record

log = logging.getLogger("headrace.policy")

E = TypeVar("E", SchemaAdded, SettingsChanged)

_ASK_S = 10.0
SETTLE_S = 120.0  # an open transaction is aborted by the broker long before


@dataclass(frozen=True, slots=True)
class Opened:
    """A run as its first record describes it."""

    created: RunCreated
    settings: RunSettings
    offset: int  # of that record in `policy`
    value: bytes


def runs(kafka: KafkaConfig, prefix: str) -> list[str]:
    """The ids of all runs on the cluster. Raises LogError."""
    from confluent_kafka import KafkaException

    try:
        names = admin(kafka).list_topics(timeout=_ASK_S).topics
    except KafkaException as error:
        raise LogError(f"the cluster's topics are not to be had: {reason(error)}") from error
    end = f".{POLICY}"
    return sorted(n[len(prefix) + 1 : -len(end)] for n in names if n.startswith(prefix + ".") and n.endswith(end))


def open_settings(kafka: KafkaConfig, topics: RunTopics) -> Opened:
    """The run's settings; its schemas are learned on the way. Raises RunNotFound (with the runs there are),
    InvalidRecord where the first record is something else."""
    known = runs(kafka, topics.prefix)
    records = _records(kafka, topics) if topics.run in known else iter(())
    first = next(records, None)
    if first is None or first.value is None:
        others = f"known runs: {', '.join(known)}" if known else "there are no runs yet"
        raise RunNotFound(f"no run {topics.run!r} (prefix {topics.prefix!r}) on this cluster; {others}")
    learn_from(records)
    created = decode(first.value)
    if not isinstance(created, RunCreated):
        raise InvalidRecord("the first record of a run must be its settings", first.topic, 0, first.offset)
    try:
        settings = RunSettings.model_validate(json.loads(created.settings))
    except (ValidationError, ValueError) as error:
        raise InvalidRecord(
            f"this version of Headrace can't read the run's settings (written by {created.software}): {error}",
            first.topic, 0, first.offset,
        ) from error  # fmt: skip
    return Opened(created, settings, first.offset, first.value)


def settings_from(settings: RunSettings, offset: int, changes: Iterable[tuple[int, SettingsChanged]]
                  ) -> dict[int, RunSettings]:  # fmt: skip
    """The settings in force from each offset of `policy` on, in order, beginning with those that the run was created
    with. What asks for settings that can't be decides nothing, for whoever reads it."""
    found = {offset: settings}
    for at, event in changes:
        try:
            settings = found[at] = changed(settings, json.loads(event.changes))
        except ValueError as error:
            log.warning("%s[0]@%d decides nothing: %s", POLICY, at, error)
    return found


def in_force(settings: RunSettings, changes: Iterable[tuple[int, SettingsChanged]]) -> RunSettings:
    """The settings after all changes."""
    return list(settings_from(settings, 0, changes).values())[-1]


def settings_changes(records: Iterable[Record]) -> Iterator[tuple[int, SettingsChanged]]:
    """The changes of settings among records of `policy`, by offset. One that can't be read is left out."""
    return _of_kind(SettingsChanged, records)


def chain_of(writer: str, records: Sequence[Record]) -> Chain:
    """Where a writer's chain ends in `policy`, given all of its records; its first one continues the run's first."""
    for record in reversed(records):
        try:
            event = decode(record.value)
        except RecordError:
            continue  # the ledger names it
        if isinstance(event, Authored) and event.writer == writer:
            return Chain.after(event, record.value or b"")
    return Chain(0, digest(records[0].value or b"")) if records else Chain()


def settled_end(kafka: KafkaConfig, topics: RunTopics) -> int:
    """Where `policy` ends now, once all below is decided and can be read. Raises LogError where that takes too long.

    It has several writers, and readers stop at the first transaction that is open: what lies behind it is committed
    perhaps, and yet not shown. Who goes on from its own last record must wait for the others' transactions, or it would
    overlook that record and write its number twice.
    """
    name = topics.name(POLICY)
    with Reader(kafka, isolation="read_uncommitted") as raw:
        end = raw.bounds(name, 0)[1]
    deadline = time.monotonic() + SETTLE_S
    with Reader(kafka) as reader:
        while reader.bounds(name, 0)[1] < end:
            if time.monotonic() > deadline:
                raise LogError(f"{name}: a transaction has been open for {SETTLE_S:g} s; is its writer alive?")
            time.sleep(0.02)
    return end


def settled_records(kafka: KafkaConfig, topics: RunTopics) -> list[Record]:
    """All of `policy`, once it is settled. For who owns a transactional id, and so can't miss what it wrote itself."""
    name = topics.name(POLICY)
    end = settled_end(kafka, topics)
    with Reader(kafka) as reader:
        return list(reader.read(name, 0, reader.bounds(name, 0)[0], end))


# -------------------------------------------------------------------------------------------------------- schemas


def announced(records: Iterable[Record]) -> Iterator[SchemaAdded]:
    """The schemas among records of `policy`. One that can't be read is the ledger's matter: left out."""
    return (event for _, event in _of_kind(SchemaAdded, records))


def _of_kind(kind: type[E], records: Iterable[Record]) -> Iterator[tuple[int, E]]:
    for record in records:
        if kind_of(record.value) is kind:
            try:
                event = decode(record.value)
            except RecordError as error:
                log.error("%s[%d]@%d is ignored: %s", record.topic, record.partition, record.offset, error)
                continue
            assert isinstance(event, kind)
            yield record.offset, event


def learn_from(records: Iterable[Record]) -> None:
    """Decode what is written with the schemas among these records of `policy`, from now on, in the whole process."""
    for event in announced(records):
        try:
            learn(event.schema)
        except InvalidRecord as error:
            log.error("the schema of %s %s in policy is ignored: %s", event.name, event.fingerprint.hex(), error)


def learn_schemas(kafka: KafkaConfig, topics: RunTopics, start: int = 0) -> None:
    """Learn all that are announced by now, from this offset of `policy` on."""
    learn_from(_records(kafka, topics, start))


def check_announced(kafka: KafkaConfig, topics: RunTopics) -> None:
    """For who is about to write. Raises NotAnnounced where readers can't know yet what this version writes."""
    known = {event.fingerprint for event in announced(_records(kafka, topics))}
    if new := [name for name, fingerprint, _ in own_schemas() if fingerprint not in known]:
        raise NotAnnounced(
            f"run {topics.run!r} doesn't know how this version of Headrace writes {', '.join(new)}: once, run "
            "`headrace create CONFIG` with this version, which announces it to all readers (`headrace run` does too)"
        )


class Schemas:
    """Decodes records of a run also where a newer Headrace than this process wrote them.

    An unknown fingerprint is looked up in what has come to `policy` since the last look. The answer is final: who
    writes a record has seen its schema there, committed, before (`check_announced`), and what one reader could see
    stays. So whoever meets the record later, here or after a restart, finds the schema too; and one that is not there
    now is no writer's who keeps the rule: it is refused, and announcing it afterwards is a mistake. A record is thus
    never refused in one pass of a fold and accepted in the next. A "no" isn't kept: it costs a question about the end
    of `policy` per such record, but one cast for garbage would also refuse a schema that is announced properly later.
    """

    def __init__(self, kafka: KafkaConfig, topics: RunTopics) -> None:
        self._kafka, self._name = kafka, topics.name(POLICY)
        self._next = 0

    def decode(self, value: bytes | None) -> Event:
        """As the codec's. Raises UnknownSchema where `policy` doesn't know it either."""
        try:
            return decode(value)
        except UnknownSchema as error:
            if not self.learn(error):
                raise
            return decode(value)

    def learn(self, unknown: UnknownSchema) -> bool:
        """Whether its schema is known now."""
        with Reader(self._kafka) as reader:
            begin, end = reader.bounds(self._name, 0)
            learn_from(reader.read(self._name, 0, max(begin, self._next), end))
        self._next = end
        return knows(unknown.fingerprint)


def _records(kafka: KafkaConfig, topics: RunTopics, start: int = 0) -> Iterator[Record]:
    """What of `policy` can be read now, from this offset on. The topic must exist."""
    name = topics.name(POLICY)
    with Reader(kafka) as reader:
        first, end = reader.bounds(name, 0)
        yield from reader.read(name, 0, max(first, start), end)
