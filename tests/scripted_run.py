"""A run on a real broker in seconds: the real assembler and coordinator, and a worker and a trainer without a model.

The worker's slots succeed, fail, or break as `judge` says; the trainer commits and publishes a version for every batch,
with weights that are a few numbers.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from headrace.create import create_run
from headrace.schemas import delta
from headrace.schemas.chain import Chain
from headrace.schemas.codec import decode, encode
from headrace.schemas.events import EpisodeEnded, Event, GroupCount, Heartbeat, Lease, Manifest, Publication, Version
from headrace.schemas.hashes import digest
from headrace.schemas.outcomes import Outcome
from headrace.schemas.settings import RunSettings
from headrace.schemas.topics import BATCHES, FLEET, POLICY, TASKS, TRAJECTORIES, WEIGHTS, RunTopics
from headrace.streams.assembling import run_assembler
from headrace.streams.coordinating import run_coordinator
from headrace.streams.log import clients
from headrace.streams.log.policy import open_settings
from headrace.streams.log.reader import Reader, end_offsets
from headrace.streams.log.transactions import Output, Transactor
from headrace.streams.tasks import task_source
from tests.scripted import Script

Judge = Callable[[str, int, int], float | None]  # group, slot, attempt -> reward; None: lost by the infrastructure


def scripted_settings(**sections: Any) -> RunSettings:
    return RunSettings.model_validate(
        {
            "model": {"path": "unused"},
            "tasks": {"dataset": "chain_sum"},
            "rollout": {"group_size": 2},
            "batch": {"groups": 2},
            "log": {"partitions": 2, "commit_ms": 50},
            **sections,
        }
    )


def judge_mixed(group: str, slot: int, attempt: int) -> float | None:
    """Every third group is solved by all; in every fourth, slot 1 is lost the first time."""
    number = int(group[1:])
    if number % 4 == 3 and slot == 1 and attempt == 0:
        return None
    return 1.0 if slot == 0 or number % 3 == 2 else 0.0


@dataclass
class ScriptedRun:
    kafka: Mapping[str, Any]
    topics: RunTopics
    settings: RunSettings
    judge: Judge = judge_mixed
    extra: Callable[[ScriptedRun, Lease], None] | None = None  # called before each lease is run
    timings: Callable[[str, int], dict[str, float]] | None = None  # group, slot -> what an attempt's end says
    capacity: int = 8
    version: int = -1
    leases: list[Lease] = field(default_factory=list)
    incarnation: str = field(default_factory=lambda: f"w-{time.monotonic_ns()}")

    def __post_init__(self) -> None:
        create_run(self.kafka, self.topics, self.settings)
        self._producer = clients.producer(self.kafka)
        self._transactor = Transactor(self.kafka, self.topics.transactional_id("trainer"))
        self._chain = Chain(0, digest(open_settings(self.kafka, self.topics).value))
        tasks, batches = self.topics.name(TASKS), self.topics.name(BATCHES)
        ends = {(name, 0): end_offsets(self.kafka, name)[0] for name in (tasks, batches)}
        self._reader = Reader(self.kafka, ends)
        self._state = {"w": delta.Tensor("float32", np.zeros(64, np.uint32))}
        self._hash = delta.state_hash(self._state)

    def until(self, version: int, timeout_s: float = 60.0) -> None:
        """Run until this version is published; then let every role finish cleanly."""
        stop, raised = threading.Event(), list[BaseException]()

        def role(run: Callable[..., None], *more: Any) -> threading.Thread:
            def body() -> None:
                try:
                    run(self.kafka, self.topics, self.settings, stop, *more)
                except BaseException as error:
                    raised.append(error)

            thread = threading.Thread(target=body)
            thread.start()
            return thread

        threads = [role(run_assembler), role(run_coordinator, task_source(self.settings.tasks))]
        try:
            if self.version < 0:
                self._commit(None, b"", -1)
            end, beat = time.monotonic() + timeout_s, 0.0
            while self.version < version:
                assert not raised, raised
                assert time.monotonic() < end, f"waited in vain for version {version}, at {self.version}"
                if time.monotonic() - beat > 0.3:
                    beat = time.monotonic()
                    self.send(
                        FLEET,
                        "w",
                        Heartbeat(
                            "w",
                            self.incarnation,
                            self.version,
                            self.capacity,
                            self.capacity,
                            True,
                            "{}",
                            {"sampled_tokens": 1.0},
                        ),
                    )
                for record in self._reader.poll(100, 0.05):
                    event = decode(record.value)
                    if isinstance(event, Lease) and event.incarnation == self.incarnation:
                        self._work(event)
                    elif isinstance(event, Manifest) and self.version < version:
                        self._commit(event, record.value or b"", record.offset)
                self._producer.flush(5)
        finally:
            stop.set()
            for thread in threads:
                thread.join(30)
        assert not raised, raised

    def send(self, topic: str, key: str, event: Event | bytes) -> None:
        value = event if isinstance(event, bytes) else encode(event)
        self._producer.produce(self.topics.name(topic), value, key=key)

    def _work(self, lease: Lease) -> None:
        self.leases.append(lease)
        if self.extra is not None:
            self.extra(self, lease)
        for one in lease.assignments:
            script = Script(lease.group, one.slot, one.attempt, self.incarnation, max(0, self.version))
            reward = self.judge(lease.group, one.slot, one.attempt)
            for event in script.whole(reward, Outcome.INFRA_FAILURE if reward is None else None):
                if self.timings is not None and isinstance(event, EpisodeEnded):
                    event = replace(event, timings_ms=self.timings(lease.group, one.slot))
                self.send(TRAJECTORIES, lease.group, event)

    def _commit(self, manifest: Manifest | None, value: bytes, offset: int) -> None:
        """Version and publication, as a trainer writes them; one bit of the weights changes."""
        number = manifest.batch if manifest else 0
        now = int(time.time() * 1000)
        base, policy = self._hash, self.topics.name(POLICY)
        chunks: list[int] = []
        if manifest:
            changes: delta.Changes = {"w": (np.array([number % 64], np.int64), np.array([number], np.uint32))}
            self._hash = delta.updated_hash(self._hash, self._state, changes)
            out = [
                Output(self.topics.name(WEIGHTS), 0, encode(c))
                for c in delta.encode_delta(number, self._state, changes)
            ]
            delta.write(self._state, changes)
            chunks = self._transactor.send(out)
        counts = tuple(GroupCount(ref.group, ref.model_tokens, 0) for ref in (manifest.groups if manifest else ()))
        version = Version(
            **self._chain.link(),
            writer="trainer",
            version=number,
            parent=number - 1,
            batch=number,
            batch_offset=offset,
            batch_digest=digest(value) if manifest else b"",
            hash_algorithm=delta.HASH_ALGORITHM,
            served_hash=self._hash,
            train_hash=b"",
            rho=0.01,
            rho_tokens=100,
            groups=counts,
            metrics={},
            fingerprint="{}",
            committed_ms=now,
        )
        self._transactor.send([Output(policy, 0, self._chain.extend(version))])
        publication = Publication(
            **self._chain.link(),
            writer="trainer",
            version=number,
            kind="delta" if manifest else "path",
            base=number - 1,
            base_hash=base if manifest else b"",
            hash_algorithm=delta.HASH_ALGORITHM,
            served_hash=self._hash,
            path=None if manifest else "unused",
            chunks=tuple(chunks),
            size=1,
            changed=1,
            elements=64,
            published_ms=now,
        )
        self._transactor.send([Output(policy, 0, self._chain.extend(publication))])
        self.version = number

    def flush(self) -> None:
        self._producer.flush(5)

    def close(self) -> None:
        self.flush()
        self._transactor.close()
        self._reader.close()
