"""From leases to ready batches through the real broker, with a scripted worker and trainer; and what kills do to it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from headrace.create import create_run
from headrace.schemas.chain import Chain
from headrace.schemas.codec import decode, encode
from headrace.schemas.events import (
    GroupClosed,
    Heartbeat,
    Lease,
    LeaseEnded,
    Manifest,
    Publication,
    SampleChunk,
    Version,
)
from headrace.schemas.payload import content_hash, from_chunks
from headrace.schemas.settings import RunSettings
from headrace.schemas.topics import FLEET, GROUPS, POLICY, SAMPLES, TASKS, TRAJECTORIES, RunTopics
from headrace.streams.assembling import run_assembler
from headrace.streams.coordinating import run_coordinator
from headrace.streams.log import clients
from headrace.streams.log.reader import Reader, beginning_offsets, end_offsets, read_at, read_range
from headrace.streams.log.transactions import Transactor
from headrace.streams.tasks import task_source
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


@contextmanager
def role(run: Callable[..., None], *args: Any) -> Iterator[list[BaseException]]:
    """A role in a thread; what it raised, if anything."""
    stop, raised = threading.Event(), list[BaseException]()

    def body() -> None:
        try:
            run(*args[:3], stop, *args[3:])
        except BaseException as error:
            raised.append(error)

    thread = threading.Thread(target=body)
    thread.start()
    try:
        yield raised
    finally:
        stop.set()
        thread.join(30)
        assert not thread.is_alive()


class Trainer:
    """Commits and publishes versions without training anything."""

    def __init__(self, kafka: Kafka, topics: RunTopics) -> None:
        self._topic = topics.name(POLICY)
        self._transactor = Transactor(kafka, topics.transactional_id("trainer"))
        self._chain = Chain()

    def _put(self, event: Version | Publication) -> None:
        from headrace.streams.log.transactions import Output

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


def test_a_scripted_run_becomes_batches_that_hold_what_was_sampled(kafka: Kafka, run_name: str) -> None:
    topics, run = RunTopics(run_name), settings()
    create_run(kafka, topics, run)
    trainer, worker = Trainer(kafka, topics), Worker(kafka, topics)
    with role(run_assembler, kafka, topics, run), role(run_coordinator, kafka, topics, run, task_source(run.tasks)):
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
    assert all(ref.max_lag <= run.batch.max_lag for m in found for ref in m.groups)
    closures = {(g.group): g for g in everything(kafka, topics, GROUPS) if isinstance(g, GroupClosed)}
    for ref in found[0].groups:
        closure = closures[ref.group]
        places = [sample.offset for sample in closure.samples]
        chunks = [decode(r.value) for r in read_at(kafka, topics.name(SAMPLES), ref.partition, places).values()]
        payload = from_chunks([c for c in chunks if isinstance(c, SampleChunk)])
        assert content_hash(payload) == ref.content_hash == closure.content_hash
        assert [episode.reward for episode in payload.episodes] == [1.0, 0.0]
        assert all(sum(s.count for s in e.spans if s.source == "model") == 4 for e in payload.episodes)
