"""The door for whoever makes trajectories outside our worker.

    with open_producer("demo", kafka) as producer:
        with producer.group(size=8) as group:
            for slot in group.slots:
                with group.episode(slot) as episode:
                    episode.start(temperature=1.0, max_new_tokens=64, seed=slot)
                    episode.prompt(ids)
                    episode.model(tokens, logprobs, version=3)
                    episode.finish(reward=1.0)

A managed producer asks the coordinator for a group and is answered with a lease. An unmanaged one (shadow mode) writes
the opening record itself: its groups are in ledger, tables and report, and never in a batch. An episode that raises
ends as an infrastructure failure; its siblings go on. Closing drains, and says what could not be sent.
"""

from __future__ import annotations

import json
import threading
import time
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from numpy.typing import ArrayLike

from headrace.schemas.codec import decode
from headrace.schemas.errors import HeadraceError, NoProgress, UndecodableRecord
from headrace.schemas.events import Assignment, Event, GroupSpec, Heartbeat, Lease, LeaseRequest, Task
from headrace.schemas.outcomes import REASON_PRODUCER_RAISED, Boundary, Outcome, Purpose, Source
from headrace.schemas.settings import RunSettings
from headrace.schemas.topics import FLEET, TASKS, TRAJECTORIES, RunTopics
from headrace.streams.log.policy import open_settings
from headrace.streams.log.reader import Reader, end_offsets

from .episodes import Attempt, EpisodeWriter
from .outbox import Outbox

HEARTBEAT_S = 1.0


class Episode:
    """One attempt of one slot, being written."""

    def __init__(self, writer: EpisodeWriter, worker: str) -> None:
        self._writer, self._worker = writer, worker

    @property
    def ended(self) -> bool:
        return self._writer.ended

    def start(self, *, temperature: float, max_new_tokens: int, seed: int, engine: Mapping[str, str] | None = None,
              top_p: float = 1.0, top_k: int = 0) -> None:  # fmt: skip
        """How the attempt is sampled. Call it first."""
        self._writer.start(worker=self._worker, engine=engine or {}, temperature=temperature, top_p=top_p, top_k=top_k,
                           max_new_tokens=max_new_tokens, seed=seed)  # fmt: skip

    def prompt(self, tokens: ArrayLike) -> None:
        """Prompt token ids, int [n]."""
        self._writer.context(tokens, Source.PROMPT)

    def model(self, tokens: ArrayLike, logprobs: ArrayLike, version: int) -> None:
        """Sampled ids int [n] with processed logprobs float [n] (nats), all by policy `version`. Raises InvalidRecord
        where a logprob is missing or not finite."""
        self._writer.model(tokens, logprobs, version)

    def environment(self, tokens: ArrayLike) -> None:
        """What the environment answered, int [n]; the next model tokens belong to the next turn."""
        self._writer.context(tokens, Source.ENVIRONMENT)
        self._writer.next_turn()

    def finish(self, reward: float | None, outcome: Outcome | None = None, *, reason: str = "finished",
               rewards: Mapping[str, float | None] | None = None, text: str | None = None) -> None:  # fmt: skip
        """End the attempt. Without `outcome`: success where the reward is positive; no reward means that the scorer
        failed, which never trains."""
        if outcome is None:
            if reward is None:
                self._writer.end(Outcome.INFRA_FAILURE, "scorer_failed", Boundary.SCORER, text=text)
                return
            outcome = Outcome.MODEL_SUCCESS if reward > 0 else Outcome.MODEL_FAILURE
        self._writer.end(outcome, reason, reward=reward, rewards=rewards, text=text)


class Group:
    """A leased (or unmanaged) group."""

    def __init__(self, producer: Producer, lease: Lease) -> None:
        self._producer, self.lease = producer, lease

    @property
    def id(self) -> str:
        return self.lease.group

    @property
    def task(self) -> Task:
        return self.lease.task

    @property
    def slots(self) -> list[int]:
        return [assignment.slot for assignment in self.lease.assignments]

    @contextmanager
    def episode(self, slot: int) -> Iterator[Episode]:
        attempts = {a.slot: a.attempt for a in self.lease.assignments}
        if slot not in attempts:
            raise HeadraceError(f"group {self.id}: slot {slot} isn't leased here (slots: {self.slots})")
        episode = self._producer._episode(Attempt(self.id, slot, attempts[slot], self.lease.incarnation))
        try:
            yield episode
        except Exception as error:
            if not episode.ended:
                episode._writer.end(Outcome.INFRA_FAILURE, REASON_PRODUCER_RAISED, Boundary.PRODUCER,
                                    text=f"{type(error).__name__}: {error}"[:500])  # fmt: skip
            raise
        if not episode.ended:
            episode._writer.end(Outcome.UNKNOWN, "never_finished", Boundary.PRODUCER)


class Producer:
    """Use `open_producer`. One thread writes; a second one, of ours, sends heartbeats."""

    def __init__(self, kafka: Mapping[str, Any], topics: RunTopics, settings: RunSettings, *, unmanaged: bool,
                 worker: str | None = None) -> None:  # fmt: skip
        self._topics, self._settings, self._unmanaged = topics, settings, unmanaged
        self.incarnation = uuid.uuid4().hex
        self.worker = worker or f"sdk-{self.incarnation[:8]}"
        self._outbox = Outbox(kafka)
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._opened = 0
        self._tasks: Reader | None = None
        if not unmanaged:
            name = topics.name(TASKS)
            # Before the first heartbeat: an older lease can't name this incarnation, and a newer one is not missed.
            self._tasks = Reader(kafka, {(name, 0): end_offsets(kafka, name)[0]})
            self._heart = threading.Thread(target=self._beat, daemon=True, name="headrace-heartbeat")
            self._heart.start()

    def __enter__(self) -> Producer:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    @contextmanager
    def group(self, task: Task | str | None = None, size: int | None = None, *, purpose: Purpose = Purpose.TRAIN,
              version: int | None = None, timeout_s: float = 60.0) -> Iterator[Group]:  # fmt: skip
        """A group of `size` slots. Managed: `task` may name a task of the run's source; raises NoProgress where the
        coordinator doesn't answer in time (it is full, or not running). Unmanaged: `task` is needed. `version` pins an
        evaluation: sample with exactly that one."""
        yield Group(self, self._open(task, size) if self._unmanaged
                    else self._request(task, size, purpose, version, timeout_s))  # fmt: skip

    def _open(self, task: Task | str | None, size: int | None) -> Lease:
        if not isinstance(task, Task):
            raise HeadraceError("an unmanaged producer opens groups itself: give it the Task")
        spec = self._settings.spec()
        size = size or spec.group_size
        spec = GroupSpec(size, 0, 1, 1, spec.deadline_s, spec.max_age_s, spec.on_deadline, spec.zero_variance,
                         spec.max_tokens)  # fmt: skip
        lease = Lease(f"u-{self.incarnation[:12]}-{self._opened}", self._opened, True, True, self.worker,
                      self.incarnation, Purpose.TRAIN, 0, tuple(Assignment(s, 0) for s in range(size)), spec, task,
                      0, None)  # fmt: skip
        self._opened += 1
        self._send(lease.group, lease)
        return lease

    def _request(self, task: Task | str | None, size: int | None, purpose: Purpose, version: int | None,
                 timeout_s: float) -> Lease:  # fmt: skip
        assert self._tasks is not None
        request = LeaseRequest(uuid.uuid4().hex, self.worker, self.incarnation,
                               task.id if isinstance(task, Task) else task, size, purpose, version)  # fmt: skip
        with self._lock:
            self._outbox.put(self._topics.name(FLEET), self.worker, request, wait_s=timeout_s)
        end = time.monotonic() + timeout_s
        while time.monotonic() < end:
            for record in self._tasks.poll(100, 0.2):
                try:
                    lease = decode(record.value)
                except UndecodableRecord:
                    continue
                if isinstance(lease, Lease) and lease.request == request.request:
                    return lease
        raise NoProgress(f"the coordinator gave no group within {timeout_s:g} s: it isn't running, has no room "
                         f"(see `headrace status {self._topics.run}`), or doesn't know the task")  # fmt: skip

    def _episode(self, attempt: Attempt) -> Episode:
        return Episode(EpisodeWriter(attempt, self._send, self._settings.log.span_tokens), self.worker)

    def _send(self, key: str, event: Event) -> None:
        with self._lock:
            self._outbox.poll()
            self._outbox.put(self._topics.name(TRAJECTORIES), key, event)

    def _beat(self) -> None:
        while not self._stop.is_set():
            beat = Heartbeat(self.worker, self.incarnation, 0, 0, 0, False, json.dumps({}), {})
            with self._lock:
                if not self._stop.is_set():
                    self._outbox.put(self._topics.name(FLEET), self.worker, beat)
                    self._outbox.poll()
            self._stop.wait(HEARTBEAT_S)

    def flush(self, timeout_s: float = 30.0) -> int:
        """Wait until everything is on the log; how many events are not."""
        with self._lock:
            return self._outbox.flush(timeout_s)

    def close(self, timeout_s: float = 30.0) -> None:
        """Drain. Raises NoProgress that says how many events are unsent after `timeout_s`."""
        self._stop.set()
        with self._lock:
            unsent = self._outbox.close(timeout_s)
        if self._tasks is not None:
            self._tasks.close()
        if unsent:
            raise NoProgress(f"{unsent} events could not be sent within {timeout_s:g} s: the broker doesn't take them")


def open_producer(run: str, kafka: Mapping[str, Any], *, prefix: str = "headrace", unmanaged: bool = False,
                  worker: str | None = None) -> Producer:  # fmt: skip
    """Raises RunNotFound, BrokerUnreachable."""
    topics = RunTopics(run, prefix)
    return Producer(kafka, topics, open_settings(kafka, topics).settings, unmanaged=unmanaged, worker=worker)
