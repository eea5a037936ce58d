"""What the benchmarks of assembler and coordinator share: a run, its processes, and a producer of synthetic groups.

Nobody samples here: token ids and log-probabilities are drawn, with the spread of sampled ones (many are nearly
certain). Groups are leased by the coordinator, or opened by the producer itself as if they were.
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from confluent_kafka import Producer

from headrace.create import create_run
from headrace.schemas.chain import Chain
from headrace.schemas.codec import encode
from headrace.schemas.columns import pack_float32, pack_ids
from headrace.schemas.events import (
    Assignment,
    EpisodeEnded,
    EpisodeStarted,
    Event,
    Lease,
    Publication,
    Span,
    Task,
    Version,
    VersionRun,
)
from headrace.schemas.hashes import digest
from headrace.schemas.outcomes import Boundary, Outcome, Purpose, Source
from headrace.schemas.settings import RunSettings
from headrace.schemas.topics import POLICY, TRAJECTORIES, RunTopics
from headrace.streams.log import clients
from headrace.streams.log.policy import open_settings
from headrace.streams.log.transactions import Output, Transactor

from .harness import Started

DAY_S = 86_400.0  # longer than anything here: no deadline or lease runs out
SIBLINGS = 8


def settings(*, commit_ms: int = 200, room: int = 8, partitions: int = 4) -> RunSettings:
    """`room`: groups that may be open or wait at once; each manifest holds one group."""
    return RunSettings.model_validate({
        "model": {"path": "unused", "max_length": 1 << 20},
        "tasks": {"dataset": "chain_sum"},
        "rollout": {"group_size": SIBLINGS, "max_new_tokens": 1 << 19, "lease_timeout_s": DAY_S, "deadline_s": DAY_S,
                    "max_age_s": DAY_S},
        "batch": {"groups": 1, "max_lag": room - 1, "max_ahead": room, "max_groups_per_batch": 1_000_000},
        "staleness": {"hard_lag": 1 << 20},
        "log": {"commit_ms": commit_ms, "partitions": partitions},
    })  # fmt: skip


def create(kafka: Mapping[str, Any], run: str, rules: RunSettings) -> RunTopics:
    topics = RunTopics(run)
    create_run(kafka, topics, rules)
    return topics


@contextmanager
def role(name: str, run: str, bootstrap: str, *more: str) -> Iterator[Started]:
    """A role as `headrace start` runs it, in a process of its own; killed at the end."""
    with tempfile.TemporaryDirectory(prefix="headrace-bench-") as home:
        argv: list[str | Path] = [sys.executable, "-m", "headrace", "start", name, run, "--bootstrap", bootstrap, *more]
        with Started(argv, env={"HEADRACE_HOME": home}) as process:
            yield process


class Rollouts:
    """Writes the events of groups. Not for several threads."""

    def __init__(self, kafka: Mapping[str, Any], topics: RunTopics, incarnation: str = "w0", seed: int = 0) -> None:
        self._producer: Producer = clients.producer(kafka)
        self._topic, self._incarnation = topics.name(TRAJECTORIES), incarnation
        self._draw = np.random.default_rng(seed)

    def put(self, key: str, event: Event) -> None:
        while True:
            try:
                self._producer.produce(self._topic, encode(event), key=key)
                self._producer.poll(0)
                return
            except BufferError:
                self._producer.poll(0.1)

    def flush(self) -> None:
        if left := self._producer.flush(120):
            raise TimeoutError(f"the broker didn't take {left} records within two minutes")

    def open(self, group: str, rules: RunSettings) -> None:
        everyone = tuple(Assignment(slot, 0) for slot in range(SIBLINGS))
        self.put(group, Lease(group, 0, True, False, "w", self._incarnation, Purpose.TRAIN, 0, everyone, rules.spec(),
                              Task(group, "reasoning_gym", "{}", 0), 0, None))  # fmt: skip

    def start(self, group: str, slot: int) -> None:
        self.put(group, EpisodeStarted(group, slot, 0, self._incarnation, 0, "w", "{}", 1.0, 1.0, 0, 1024, slot, 0))

    def sample(self, group: str, slot: int, sequence: int, tokens: int, version: int = 0) -> None:
        ids = self._draw.integers(0, 50_000, tokens).astype(np.int32)
        logprobs = -(self._draw.exponential(0.5, tokens) * (self._draw.random(tokens) < 0.6)).astype(np.float32)
        self.put(group, Span(group, slot, 0, self._incarnation, sequence, Source.MODEL, 0, -1, tokens,
                             (VersionRun(version, tokens),), None, None, None, {}, pack_ids(ids),
                             pack_float32(logprobs.astype(np.float32)), None, None))  # fmt: skip

    def end(self, group: str, slot: int, sequence: int) -> None:
        good = slot % 2 == 0
        outcome = Outcome.MODEL_SUCCESS if good else Outcome.MODEL_FAILURE
        self.put(group, EpisodeEnded(group, slot, 0, self._incarnation, sequence, outcome, "stop", Boundary.NONE,
                                     float(good), {}, (), None, 0, {}))  # fmt: skip

    def all_but_the_end(self, group: str, tokens: int, spans: int = 1) -> None:
        """Every sibling samples `spans` x `tokens` and is only not over."""
        for slot in range(SIBLINGS):
            self.start(group, slot)
        for number in range(spans):
            for slot in range(SIBLINGS):
                self.sample(group, slot, 1 + number, tokens)


class Trainer:
    """Publishes versions that nobody trained."""

    def __init__(self, kafka: Mapping[str, Any], topics: RunTopics) -> None:
        self._topic = topics.name(POLICY)
        self._transactor = Transactor(kafka, topics.transactional_id("trainer"))
        self._chain = Chain(0, digest(open_settings(kafka, topics).value))

    def publish(self, version: int, path: str = "unused", served_hash: bytes = b"0", algorithm: str = "none") -> None:
        """`path` and the hash: of a model folder, where a receiver looks."""
        now = int(time.time() * 1000)
        first = Version(**self._chain.link(), writer="trainer", version=version, parent=version - 1,
                        batch=version or -1, batch_offset=-1, batch_digest=b"", hash_algorithm=algorithm,
                        served_hash=served_hash, train_hash=b"", rho=0.0, rho_tokens=0, groups=(), metrics={},
                        fingerprint="{}", committed_ms=now)  # fmt: skip
        values = [self._chain.extend(first)]
        then = Publication(**self._chain.link(), writer="trainer", version=version, kind="path", base=-1,
                           base_hash=b"", hash_algorithm=algorithm, served_hash=served_hash, path=path, chunks=(),
                           size=0, changed=0, elements=0, published_ms=now)  # fmt: skip
        values.append(self._chain.extend(then))
        self._transactor.send([Output(self._topic, 0, value) for value in values])

    def close(self) -> None:
        self._transactor.close()
