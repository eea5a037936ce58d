"""Schemas in `policy`: announced once, provable, and what lets an older process read what a newer one writes."""

from __future__ import annotations

import io
import json
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from importlib import resources
from typing import Any

import fastavro
import pytest
from fastavro.schema import to_parsing_canonical_form

from headrace import create
from headrace.consumers.accounts import Accounts
from headrace.consumers.facts import Failures
from headrace.consumers.index import Index
from headrace.consumers.proofs import check_policy
from headrace.consumers.source import Snapshot
from headrace.create import create_run
from headrace.producers.sdk import open_producer
from headrace.schemas import codec
from headrace.schemas.codec import decode, encode, fingerprint_of
from headrace.schemas.columns import pack_float32, pack_int32
from headrace.schemas.errors import NotAnnounced
from headrace.schemas.events import (
    Assignment,
    DeadLetter,
    EpisodeEnded,
    EpisodeStarted,
    Event,
    GroupClosed,
    GroupSpec,
    Lease,
    RunCreated,
    SchemaAdded,
    Span,
    Task,
    Tick,
    VersionRun,
)
from headrace.schemas.settings import ModelSettings, RunSettings, TaskSettings
from headrace.schemas.topics import DEADLETTER, GROUPS, POLICY, TRAJECTORIES, RunTopics
from headrace.streams.assembling import run_assembler
from headrace.streams.log import clients, policy
from headrace.streams.log.reader import beginning_offsets, end_offsets, read_range
from tests.unit.test_wire import murmur2

Kafka = dict[str, Any]
SETTINGS = RunSettings(model=ModelSettings(path="unused"), tasks=TaskSettings(dataset="chain_sum"),
                       log={"partitions": 1, "commit_ms": 50})  # fmt: skip


def newer(cls: type, field: str) -> dict[str, Any]:
    """The record's schema as a later version of Headrace could have it."""
    schema = json.loads((resources.files("headrace.schemas") / "avro" / f"{cls.__name__}.avsc").read_text())
    schema["fields"].append({"name": field, "type": ["null", "string"], "default": None})
    return dict(schema)


def written_newer(event: Event, field: str) -> bytes:
    schema = newer(type(event), field)
    body = io.BytesIO()
    fastavro.schemaless_writer(body, fastavro.parse_schema(schema), codec.to_plain(event) | {field: "new"})
    return codec.schema_header(schema) + body.getvalue()


def announcing(*schemas: dict[str, Any]) -> Callable[[], Iterator[tuple[str, bytes, str]]]:
    """What `own_schemas` says in a version that also writes these."""
    texts = [(schema["name"], to_parsing_canonical_form(schema)) for schema in schemas]
    return lambda: iter([*codec.own_schemas(), *((name, fingerprint_of(text), text) for name, text in texts)])


def everything(kafka: Kafka, topics: RunTopics, topic: str) -> list[Any]:
    name = topics.name(topic)
    return [decode(r.value) for r in read_range(kafka, name, 0, beginning_offsets(kafka, name)[0],
                                                end_offsets(kafka, name)[0])]  # fmt: skip


def failures_of_policy(kafka: Kafka, topics: RunTopics) -> list[str]:
    failures = Failures()
    with Index() as index:
        check_policy(Snapshot(kafka, topics), index, Accounts(), failures)
    return failures.lines


def test_run_announces_all_schemas_once_and_a_newer_version_only_its_own(
    kafka: Kafka, run_name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    topics = RunTopics(run_name)
    assert create_run(kafka, topics, SETTINGS)
    first, *added = everything(kafka, topics, POLICY)
    assert isinstance(first, RunCreated) and all(isinstance(event, SchemaAdded) for event in added)
    assert {(e.name, e.fingerprint, e.schema) for e in added} == set(codec.own_schemas())
    assert not create_run(kafka, topics, SETTINGS)
    assert len(everything(kafka, topics, POLICY)) == 1 + len(added)

    monkeypatch.setattr(create, "own_schemas", announcing(newer(Tick, "zone"), newer(Span, "zone")))
    assert not create_run(kafka, topics, SETTINGS)
    assert not create_run(kafka, topics, SETTINGS)
    assert [(e.name, e.number) for e in everything(kafka, topics, POLICY)[1 + len(added) :]] == [
        ("Tick", len(added) + 1), ("Span", len(added) + 2)]  # fmt: skip
    assert not failures_of_policy(kafka, topics)


def test_who_create_the_same_run_at_once_make_one_of_it(kafka: Kafka, run_name: str) -> None:
    topics = RunTopics(run_name)
    with ThreadPoolExecutor(3) as pool:
        made = list(pool.map(lambda _: create_run(kafka, topics, SETTINGS), range(3)))
    assert made.count(True) == 1
    events = everything(kafka, topics, POLICY)
    assert [type(event) for event in events] == [RunCreated] + [SchemaAdded] * len(list(codec.own_schemas()))
    assert not failures_of_policy(kafka, topics)


def test_writer_whose_schemas_nobody_announced_is_refused_at_the_door(
    kafka: Kafka, run_name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    topics = RunTopics(run_name)
    create_run(kafka, topics, SETTINGS)
    monkeypatch.setattr(policy, "own_schemas", announcing(newer(Span, "colour")))
    with pytest.raises(NotAnnounced, match="writes Span: once, run `headrace create"):
        open_producer(run_name, kafka, unmanaged=True)


def test_who_goes_on_in_policy_waits_for_the_transaction_that_hides_its_own_records(
    kafka: Kafka, run_name: str
) -> None:
    topics = RunTopics(run_name)
    create_run(kafka, topics, SETTINGS)
    before = end_offsets(kafka, topics.name(POLICY))[0]
    other = clients.transactional_producer(kafka, topics.transactional_id("another"), 60.0)
    other.init_transactions()
    other.begin_transaction()
    other.produce(topics.name(POLICY), value=b"undecided", partition=0)
    other.flush()
    with ThreadPoolExecutor(1) as pool:
        found = pool.submit(policy.settled_records, kafka, topics)
        time.sleep(1.0)
        assert not found.done() and end_offsets(kafka, topics.name(POLICY))[0] == before
        other.abort_transaction()
        assert len(found.result(60)) == 1 + len(list(codec.own_schemas()))


def test_older_assembler_takes_what_a_newer_producer_announced_and_refuses_what_nobody_did(
    kafka: Kafka, run_name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The process that folds never had these schemas. The ledger, another process, comes to the same accounts."""
    topics, worker = RunTopics(run_name), "w" * 32
    create_run(kafka, topics, SETTINGS)
    place = ("g", 0, 0, worker)
    lease = Lease("g", 0, True, True, "w", worker, "train", 0, (Assignment(0, 0),),
                  GroupSpec(1, 0, 1, 1, 3600.0, 3600.0, "survivors", "keep", 100), Task("t", "s", "{}", 0), 0, None)
    events: list[Event] = [
        EpisodeStarted(*place, 0, "w", "{}", 1.0, 1.0, 0, 8, 1, 0),
        Span(*place, 1, "model", 0, -1, 3, (VersionRun(0, 3),), None, None, None, {}, pack_int32([1, 2, 3]),  # type: ignore[arg-type]
             pack_float32([-0.5, -0.25, -1.0]), None, None),  # type: ignore[arg-type]
        EpisodeEnded(*place, 2, "model_success", "finished", "model", 1.0, {}, (), None, 0, {}),
    ]  # fmt: skip
    producer = clients.producer(kafka)

    def put(value: bytes) -> None:
        producer.produce(topics.name(TRAJECTORIES), value=value, key=b"g", partition=0)
        producer.flush()

    stop = threading.Event()
    thread = threading.Thread(target=run_assembler, args=(kafka, topics, SETTINGS, stop))
    thread.start()
    try:
        put(encode(lease))
        put(written_newer(events[0], "nobody"))
        until(lambda: everything(kafka, topics, DEADLETTER) != [])
        monkeypatch.setattr(create, "own_schemas", announcing(*(newer(type(e), "mood") for e in events)))
        create_run(kafka, topics, SETTINGS)
        for event in events:
            put(written_newer(event, "mood"))
        until(lambda: any(isinstance(e, GroupClosed) for e in everything(kafka, topics, GROUPS)))
    finally:
        stop.set()
        thread.join(60)
    closed = next(e for e in everything(kafka, topics, GROUPS) if isinstance(e, GroupClosed))
    assert [(s.outcome, s.model_tokens) for s in closed.slots] == [("model_success", 3)]
    letters = everything(kafka, topics, DEADLETTER)
    assert all(isinstance(letter, DeadLetter) for letter in letters)
    assert [(letter.kind, letter.offset) for letter in letters] == [("UnknownSchema", 1)]
    ledger = subprocess.run(
        [sys.executable, "-m", "headrace", "ledger", run_name, "--bootstrap", str(kafka["bootstrap.servers"])],
        capture_output=True, text=True, timeout=240,
    )  # fmt: skip
    assert ledger.returncode == 0 and "closes" in ledger.stdout, ledger.stdout + ledger.stderr


def until(condition: Callable[[], bool], timeout_s: float = 120.0) -> None:
    end = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.1)


def test_a_group_lies_in_the_partition_that_the_document_computes(kafka: Kafka, run_name: str) -> None:
    topics, partitions = RunTopics(run_name), 3
    clients.create_topics(kafka, topics.specs(partitions, 1))
    keys, placed = [f"demo-{i:06d}" for i in range(50)], {}
    producer = clients.producer(kafka)
    for key in keys:
        delivered = lambda _, message: placed.update({message.key().decode(): message.partition()})  # noqa: E731
        producer.produce(topics.name(TRAJECTORIES), value=b"", key=key.encode(), on_delivery=delivered)
    assert producer.flush(60) == 0
    assert placed == {key: (murmur2(key.encode()) & 0x7FFFFFFF) % partitions for key in keys}
