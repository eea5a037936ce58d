"""The run's own settings: the first record of `policy`, and the changes after it."""

from __future__ import annotations

import json
from dataclasses import dataclass

from pydantic import ValidationError

from headrace.schemas.codec import decode
from headrace.schemas.errors import InvalidRecord, LogError, RunNotFound
from headrace.schemas.events import RunCreated
from headrace.schemas.settings import RunSettings
from headrace.schemas.topics import POLICY, RunTopics

from .clients import KafkaConfig, admin, reason
from .reader import Reader, Record, beginning_offsets, end_offsets

_ASK_S = 10.0


@dataclass(frozen=True, slots=True)
class Opened:
    """A run as its first record describes it."""

    created: RunCreated
    settings: RunSettings
    offset: int  # of that record in `policy`
    value: bytes


def runs(kafka: KafkaConfig, prefix: str) -> list[str]:
    """The ids of all runs on the cluster."""
    from confluent_kafka import KafkaException

    try:
        names = admin(kafka).list_topics(timeout=_ASK_S).topics
    except KafkaException as error:
        raise LogError(f"the cluster's topics are not to be had: {reason(error)}") from error
    end = f".{POLICY}"
    return sorted(n[len(prefix) + 1 : -len(end)] for n in names if n.startswith(prefix + ".") and n.endswith(end))


def first_record(kafka: KafkaConfig, topics: RunTopics) -> Record | None:
    """The first record of `policy`, or None while there is none. The topic must exist."""
    name = topics.name(POLICY)
    begin, end = beginning_offsets(kafka, name)[0], end_offsets(kafka, name)[0]
    with Reader(kafka) as reader:
        return next(reader.read(name, 0, begin, end), None)


def open_settings(kafka: KafkaConfig, topics: RunTopics) -> Opened:
    """Raises RunNotFound (with the runs there are), InvalidRecord where the first record is something else."""
    known = runs(kafka, topics.prefix)
    record = first_record(kafka, topics) if topics.run in known else None
    if record is None or record.value is None:
        others = f"known runs: {', '.join(known)}" if known else "there are no runs yet"
        raise RunNotFound(f"no run {topics.run!r} (prefix {topics.prefix!r}) on this cluster; {others}")
    created = decode(record.value)
    if not isinstance(created, RunCreated):
        raise InvalidRecord("the first record of a run must be its settings", record.topic, 0, record.offset)
    try:
        settings = RunSettings.model_validate(json.loads(created.settings))
    except (ValidationError, ValueError) as error:
        raise InvalidRecord(
            f"this version of Headrace can't read the run's settings (written by {created.software}): {error}",
            record.topic, 0, record.offset,
        ) from error  # fmt: skip
    return Opened(created, settings, record.offset, record.value)
