"""From leases to ready batches through the real broker, with a scripted worker and trainer; and what kills do to it."""

from __future__ import annotations

import itertools
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
from confluent_kafka import TopicPartition

from headrace.consumers.ledger import audit
from headrace.consumers.source import Snapshot
from headrace.create import create_run
from headrace.producers.sdk import Producer, open_producer
from headrace.schemas.chain import Chain
from headrace.schemas.codec import decode, encode
from headrace.schemas.errors import DataLossError, Fenced
from headrace.schemas.events import (
    Addendum,
    DeadLetter,
    GroupClosed,
    Heartbeat,
    Lease,
    LeaseEnded,
    Manifest,
    Position,
    Publication,
    SampleChunk,
    Task,
    Tick,
    Version,
)
from headrace.schemas.payload import content_hash, from_chunks
from headrace.schemas.settings import RunSettings
from headrace.schemas.topics import DEADLETTER, FLEET, GROUPS, POLICY, SAMPLES, TASKS, TRAJECTORIES, RunTopics
from headrace.streams.assembling import run_assembler
from headrace.streams.coordinating import run_coordinator
from headrace.streams.log import clients, transactions
from headrace.streams.log.reader import Reader, beginning_offsets, end_offsets, last_record, read_at, read_range
from headrace.streams.log.transactions import Output, Transactor
from headrace.streams.tasks import task_source
from tests.roles import role
from tests.scripted import Script, run_settings

Kafka = Mapping[str, Any]


def settings(**rollout: Any) -> RunSettings:
    return run_settings(
        rollout={"group_size": 2, "lease_timeout_s": 3.0} | rollout,
        batch={"groups": 3, "max_lag": 1},
        log={"partitions": 2, "commit_ms": 50},
    )


def everything(kafka: Kafka, topics: RunTopics, topic: str) -> list[Any]:
    name = topics.name(topic)
    ends = end_offsets(kafka, name)
    return [decode(r.value) for p, begin in beginning_offsets(kafka, name).items()
            for r in read_range(kafka, name, p, begin, ends[p])]  # fmt: skip


def until(condition: Callable[[], bool], timeout_s: float = 30.0) -> None:
    end = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.05)


class Trainer:
    """Commits and publishes versions without training anything."""

    def __init__(self, kafka: Kafka, topics: RunTopics) -> None:
        self._topic = topics.name(POLICY)
        self._transactor = Transactor(kafka, topics.transactional_id("trainer"))
        self._chain = Chain()

    def _put(self, event: Version | Publication) -> None:
        self._transactor.send([Output(self._topic, 0, self._chain.extend(event))])

    def version(self, number: int, rho: float = 0.01) -> None:
        self._put(Version(**self._chain.link(), writer="trainer", version=number, parent=number - 1,
                          batch=number or -1, batch_offset=-1, batch_digest=b"", hash_algorithm="none", served_hash=b"",
                          train_hash=b"", rho=rho, rho_tokens=100, groups=(), metrics={}, fingerprint="{}",
                          committed_ms=0))  # fmt: skip
        self._put(Publication(**self._chain.link(), writer="trainer", version=number, kind="path", base=-1,
                              base_hash=b"", hash_algorithm="none", served_hash=b"", path="x", chunks=(), size=0,
                              changed=0, elements=0, published_ms=0))  # fmt: skip

    def close(self) -> None:
        self._transactor.close()


class Worker:
    """Runs what it is leased: slot 0 succeeds, the others fail, unless `judge` says otherwise."""

    def __init__(self, kafka: Kafka, topics: RunTopics, name: str = "w", capacity: int = 8,
                 judge: Callable[[str, int], float] | None = None) -> None:  # fmt: skip
        self._topics, self._capacity = topics, capacity
        self.name, self.incarnation = name, f"{name}-{time.monotonic_ns()}"
        self._judge = judge or (lambda group, slot: float(slot == 0))
        self._producer = clients.producer(kafka)
        tasks = topics.name(TASKS)
        self._tasks = Reader(kafka, {(tasks, 0): end_offsets(kafka, tasks)[0]})
        self.mute = False  # beats, but runs nothing
        self.leases: list[Lease] = []
        self.version = 0
        self._beat = 0.0

    def turn(self) -> None:
        if time.monotonic() - self._beat > 0.3:
            self._beat = time.monotonic()
            beat = Heartbeat(self.name, self.incarnation, self.version, self._capacity, 0, True, "{}", {})
            self._producer.produce(self._topics.name(FLEET), encode(beat), key=self.name)
        for one in self._tasks.poll(100, 0.02):
            event = decode(one.value)
            if isinstance(event, Lease) and event.incarnation == self.incarnation:
                self.leases.append(event)
                if not self.mute:
                    self.run(event)
            else:
                assert isinstance(event, Lease | LeaseEnded)
        self._producer.flush(5)

    def run(self, lease: Lease) -> None:
        for one in lease.assignments:
            script = Script(lease.group, one.slot, one.attempt, self.incarnation, lease.min_version)
            for event in script.whole(self._judge(lease.group, one.slot)):
                self.send(lease.group, encode(event))

    def send(self, group: str, value: bytes) -> None:
        self._producer.produce(self._topics.name(TRAJECTORIES), value, key=group)

    def turns(self, condition: Callable[[], bool], timeout_s: float = 30.0) -> None:
        end = time.monotonic() + timeout_s
        while not condition():
            assert time.monotonic() < end, "waited in vain"
            self.turn()


def manifests(kafka: Kafka, topics: RunTopics) -> list[Manifest]:
    return [one for one in everything(kafka, topics, "batches") if isinstance(one, Manifest)]


@pytest.mark.parametrize("trouble", ["none", "every second transaction is aborted", "no memory for spans"])
def test_a_scripted_run_becomes_batches_that_hold_what_was_sampled(
    kafka: Kafka, run_name: str, trouble: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assembler = partial(run_assembler, memory_bytes=0 if trouble == "no memory for spans" else 1 << 20)
    if trouble.startswith("every"):
        send, calls = Transactor._send, itertools.count()

        def sent_in_vain(self: Transactor, outputs: Sequence[Output]) -> list[int]:
            offsets = send(self, outputs)
            if "assembler" in self.transactional_id and outputs[0].topic.endswith(GROUPS) and next(calls) % 2 == 0:
                raise transactions._Abort("for a test")
            return offsets

        monkeypatch.setattr(Transactor, "_send", sent_in_vain)
    topics, run = RunTopics(run_name), settings()
    create_run(kafka, topics, run)
    trainer, worker = Trainer(kafka, topics), Worker(kafka, topics)
    with role(assembler, kafka, topics, run), role(run_coordinator, kafka, topics, run, task_source(run.tasks)):
        for _ in range(20):
            worker.turn()
        assert not worker.leases, "nothing may be leased before version 0 is published"
        trainer.version(0)
        for version in range(1, 4):
            worker.turns(lambda n=version: len(manifests(kafka, topics)) >= n)  # type: ignore[misc]
            trainer.version(version)
            worker.version = version
    found = manifests(kafka, topics)
    assert [m.target for m in found][:3] == [0, 1, 2]
    assert [max(ref.max_lag for ref in m.groups) for m in found][:2] == [0, 1]
    closures = {(g.group): g for g in everything(kafka, topics, GROUPS) if isinstance(g, GroupClosed)}
    for ref in found[0].groups:
        closure = closures[ref.group]
        places = [sample.offset for sample in closure.samples]
        chunks = [decode(r.value) for r in read_at(kafka, topics.name(SAMPLES), ref.partition, places).values()]
        payload = from_chunks([c for c in chunks if isinstance(c, SampleChunk)])
        assert content_hash(payload) == ref.content_hash == closure.content_hash
        assert [episode.reward for episode in payload.episodes] == [1.0, 0.0]
        assert all(sum(s.count for s in e.spans if s.source == "model") == 4 for e in payload.episodes)
    assert audited(kafka, topics) == []


def ticks(kafka: Kafka, topics: RunTopics) -> list[Tick]:
    return [one for one in everything(kafka, topics, TRAJECTORIES) if isinstance(one, Tick)]


def test_assembler_whose_input_was_deleted_says_so_and_skips_nothing(kafka: Kafka, run_name: str) -> None:
    topics, run = RunTopics(run_name), settings(deadline_s=600)
    create_run(kafka, topics, run)
    with open_producer(run_name, dict(kafka), unmanaged=True) as producer:
        lease = producer._open(Task("t", "jsonl", "{}", 0), 2)
        producer.flush()
        with role(run_assembler, kafka, topics, run):
            until(lambda: bool(ticks(kafka, topics)))  # it has read the opening record
        with producer.group(Task("t", "jsonl", "{}", 0), 2):
            pass
    name = topics.name(TRAJECTORIES)
    (partition,) = (p for p in range(2) for r in read_range(kafka, name, p, 0, end_offsets(kafka, name)[p])
                    if r.key == lease.group.encode() and r.offset == 0)  # fmt: skip
    admin = clients.admin(kafka)  # it must outlive its futures
    for future in admin.delete_records([TopicPartition(name, partition, 1)]).values():
        future.result(10)
    with pytest.raises(DataLossError, match=f"{partition}.@0: what has still to be read begins here"):
        run_assembler(kafka, topics, run, threading.Event())


def audited(kafka: Kafka, topics: RunTopics) -> list[str]:
    """What the ledger has to say against the streams. (Nobody really trains here, and nobody checks these versions.)"""
    found = audit(Snapshot(kafka, topics)).failures
    return [line for line in found if line.startswith(("groups", "samples", "trajectories", "tasks", "batches"))
            and "policy" not in line]  # fmt: skip


def accounted(kafka: Kafka, topics: RunTopics, partition: int) -> bool:
    """Whether everything in a partition of `trajectories` lies below the assembler's position."""
    end = end_offsets(kafka, topics.name(TRAJECTORIES))[partition]
    if end == 0:
        return True
    last = last_record(kafka, topics.name(GROUPS), partition)
    event = decode(last.value) if last else None
    return isinstance(event, Position) and event.offset >= end


def test_broken_events_are_counted_and_named_and_the_partition_goes_on(kafka: Kafka, run_name: str) -> None:
    topics, run = RunTopics(run_name), settings(max_attempts=1, deadline_s=600)
    create_run(kafka, topics, run)
    with open_producer(run_name, dict(kafka), unmanaged=True) as producer:
        tasks = [Task(f"t{n}", "jsonl", "{}", 0) for n in range(2)]
        good, bad = (producer._open(task, 2) for task in tasks)
        raw = clients.producer(kafka)

        def send(group: str, value: bytes) -> None:
            raw.produce(topics.name(TRAJECTORIES), value, key=group)

        producer.flush()
        for lease in (good, bad):
            scripts = [Script(lease.group, slot, 0, lease.incarnation) for slot in (0, 1)]
            events = [[encode(event) for event in script.whole(float(script.slot))] for script in scripts]
            if lease is good:
                events[0] = [one for value in events[0] for one in (value, value)]
            else:
                del events[0][2]
                events[1].insert(2, b"garbage")
                send(lease.group, encode(Script(lease.group, 0, 0, "stranger").started()))
            for value in (one for events_of_slot in events for one in events_of_slot):
                send(lease.group, value)
            send(lease.group, events[0][0])  # after the closure
        raw.flush()
    with role(run_assembler, kafka, topics, run):
        until(lambda: len([g for g in everything(kafka, topics, GROUPS) if isinstance(g, GroupClosed)]) == 2)
        time.sleep(0.5)
    closures = {g.group: g for g in everything(kafka, topics, GROUPS) if isinstance(g, GroupClosed)}
    assert [fate.outcome for fate in closures[good.group].slots] == ["model_failure", "model_success"]
    assert [fate.reason for fate in closures[bad.group].slots] == ["sequence_gap", "stop"]
    kinds = sorted(one.kind for one in everything(kafka, topics, GROUPS) if isinstance(one, Addendum))
    assert kinds == ["duplicate"] * 4 + ["foreign"] + ["late"] * 2
    (letter,) = everything(kafka, topics, DEADLETTER)
    assert isinstance(letter, DeadLetter) and letter.value == b"garbage" and letter.kind == "UndecodableRecord"
    (origin,) = read_at(kafka, letter.topic, letter.partition, [letter.offset]).values()
    assert origin.value == b"garbage"
    assert all(accounted(kafka, topics, p) for p in range(2)), "a clean stop settles what it has read"
    assert audited(kafka, topics) == []


@pytest.mark.slow
def test_deadline_closes_a_group_also_after_a_stop_and_a_resume(kafka: Kafka, run_name: str) -> None:
    topics, run = RunTopics(run_name), settings(deadline_s=4)
    create_run(kafka, topics, run)
    with open_producer(run_name, dict(kafka), unmanaged=True) as producer, \
            producer.group(Task("t", "jsonl", "{}", 0), 8) as group:  # fmt: skip
        for slot in group.slots[:-1]:
            with group.episode(slot) as episode:
                episode.start(temperature=1.0, max_new_tokens=4, seed=slot)
                episode.model([1, 2], [-0.5, -0.5], version=0)
                episode.finish(float(slot % 2))
        # The eighth is silent: its producer lives, and does nothing.
        with role(run_assembler, kafka, topics, run):
            until(lambda: bool(ticks(kafka, topics)))
        stopped = time.monotonic()
        time.sleep(3)  # the log stands still meanwhile, and so does its clock
        with role(run_assembler, kafka, topics, run):
            until(lambda: any(isinstance(g, GroupClosed) for g in everything(kafka, topics, GROUPS)))
    assert time.monotonic() - stopped > 3
    (closure,) = [g for g in everything(kafka, topics, GROUPS) if isinstance(g, GroupClosed)]
    assert [fate.reason for fate in closure.slots] == ["finished"] * 7 + ["deadline"]
    assert 4000 <= closure.open_ms < 10_000
    assert audited(kafka, topics) == []


# A role in a process of its own, which holds still in the middle of its nth transaction: everything has been sent, and
# nothing is committed.
HOLDING = """
import sys, threading, time
from headrace.schemas.topics import RunTopics
from headrace.streams.assembling import run_assembler
from headrace.streams.coordinating import run_coordinator
from headrace.streams.log.policy import open_settings
from headrace.streams.log.transactions import Transactor
from headrace.streams.tasks import task_source
role, bootstrap, run, hold_at = sys.argv[1:]
kafka, topics, commit, count = {"bootstrap.servers": bootstrap}, RunTopics(run), Transactor.commit, [int(hold_at)]
def held(self, build):
    def slow(send):
        built = build(send)
        count[0] -= 1
        if count[0] == 0:
            print("holding", flush=True)
            time.sleep(60)
        return built
    return commit(self, slow)
Transactor.commit = held
settings = open_settings(kafka, topics).settings
if role == "assembler":
    run_assembler(kafka, topics, settings, threading.Event())
else:
    run_coordinator(kafka, topics, settings, threading.Event(), task_source(settings.tasks))
"""


@contextmanager
def holding(name: str, kafka: Kafka, topics: RunTopics, hold_at: int) -> Iterator[subprocess.Popen[str]]:
    arguments = [name, kafka["bootstrap.servers"], topics.run, str(hold_at)]
    process = subprocess.Popen([sys.executable, "-c", HOLDING, *arguments], stdout=subprocess.PIPE, text=True)
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def killed_while_holding(process: subprocess.Popen[str], work: Callable[[], None]) -> None:
    """Work on until the process holds an open transaction, then kill it."""
    said: list[str] = []
    assert process.stdout is not None
    out = process.stdout
    reading = threading.Thread(target=lambda: said.append(out.readline()))
    reading.start()
    end = time.monotonic() + 60
    while not said and time.monotonic() < end:
        work()
    assert said == ["holding\n"]
    process.kill()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["assembler", "coordinator"])
def test_role_killed_in_mid_transaction_loses_and_doubles_nothing(kafka: Kafka, run_name: str, name: str) -> None:
    topics, run = RunTopics(run_name), settings()
    create_run(kafka, topics, run)
    trainer, worker = Trainer(kafka, topics), Worker(kafka, topics)
    source = task_source(run.tasks)
    own: tuple[Any, ...] = (run_assembler, kafka, topics, run)
    other: tuple[Any, ...] = (run_coordinator, kafka, topics, run, source)
    if name == "coordinator":
        own, other = other, own
    trainer.version(0)
    published = 0

    def work() -> None:
        nonlocal published
        for _ in range(10):
            worker.turn()
        while len(manifests(kafka, topics)) > published:
            published += 1
            trainer.version(published)

    with role(*other):
        for hold_at in (1, 2, 3):
            with holding(name, kafka, topics, hold_at) as process:
                killed_while_holding(process, work)
        before = published
        with role(*own):
            while published < before + 3:
                work()
    leases = [one for one in everything(kafka, topics, TASKS) if isinstance(one, Lease)]
    leased = [(one.group, a.slot, a.attempt) for one in leases for a in one.assignments]
    assert len(leased) == len(set(leased))
    closed = [g.group for g in everything(kafka, topics, GROUPS) if isinstance(g, GroupClosed)]
    assert len(closed) == len(set(closed))
    batches = [m.batch for m in manifests(kafka, topics)]
    assert batches == list(range(1, len(batches) + 1)) and len(batches) >= 3
    assert audited(kafka, topics) == []


def test_second_assembler_fences_the_first(kafka: Kafka, run_name: str) -> None:
    topics, run = RunTopics(run_name), settings(deadline_s=600)
    create_run(kafka, topics, run)
    task = Task("t", "jsonl", "{}", 0)

    def one_group(producer: Producer) -> None:
        with producer.group(task, 1) as group, group.episode(0) as episode:
            episode.start(temperature=1.0, max_new_tokens=4, seed=0)
            episode.finish(1.0)
        producer.flush()

    def closures() -> int:
        return len([g for g in everything(kafka, topics, GROUPS) if isinstance(g, GroupClosed)])

    with open_producer(run_name, dict(kafka), unmanaged=True) as producer:
        with role(run_assembler, kafka, topics, run) as first:
            one_group(producer)
            until(lambda: closures() == 1)
            with role(run_assembler, kafka, topics, run) as second:
                while not first:
                    one_group(producer)
                    time.sleep(0.05)
                until(lambda: closures() == producer._opened)
            assert isinstance(first[0], Fenced) and not second
    assert audited(kafka, topics) == []


def test_slots_of_a_silent_worker_are_run_by_another(kafka: Kafka, run_name: str) -> None:
    topics, run = RunTopics(run_name), settings(lease_timeout_s=2.0)
    create_run(kafka, topics, run)
    trainer = Trainer(kafka, topics)
    lost, other = (Worker(kafka, topics, name, capacity=100) for name in ("lost", "other"))
    lost.mute = True
    trainer.version(0)
    with role(run_assembler, kafka, topics, run), role(run_coordinator, kafka, topics, run, task_source(run.tasks)):
        lost.turns(lambda: bool(lost.leases))
        other.turns(lambda: bool(manifests(kafka, topics)))
    assert {a.attempt for lease in other.leases if not lease.opens for a in lease.assignments} == {1}
    ended = [one for one in everything(kafka, topics, TASKS) if isinstance(one, LeaseEnded)]
    assert {(one.incarnation, one.reason) for one in ended} == {(lost.incarnation, "worker_lost")}
    assert audited(kafka, topics) == []
