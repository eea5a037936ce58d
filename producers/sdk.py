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
the opening record itself: its groups are in ledger, tables and report, and never in a batch. Every episode that began
ends on the log: one that raises as an infrastructure failure (its siblings go on), one whose events the broker refuses
as `delivery_failed`. A call raises `Backpressure` where it can't take anything now: make the same call again later.
Closing drains, and says what could not be sent.
"""

from __future__ import annotations

import json
import logging
import threading
import time
import uuid
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from headrace.schemas.errors import (
    AttemptOver,
    Backpressure,
    DeliveryFailed,
    HeadraceError,
    NoProgress,
    ProducerClosed,
    Undelivered,
)
from headrace.schemas.events import Assignment, Event, Heartbeat, Lease, LeaseEnded, Task
from headrace.schemas.outcomes import (
    REASON_HANDED_BACK,
    REASON_NEVER_STARTED,
    REASON_PRODUCER_CLOSED,
    Boundary,
    Outcome,
    Purpose,
)
from headrace.schemas.settings import RunSettings
from headrace.schemas.topics import FLEET, TRAJECTORIES, RunTopics
from headrace.streams.log.blobs import open_blobs
from headrace.streams.log.policy import check_announced, open_settings

from .backlog import MAX_UNASSEMBLED, Unassembled, candidates_waiting
from .episodes import Attempt, EpisodeWriter, never_started
from .groups import Episode, Group
from .outbox import MAX_QUEUE_BYTES, Failure, Outbox, Unsent
from .refusals import Refusals
from .requests import Requests, hand_back

log = logging.getLogger("headrace.producer")

HEARTBEAT_S = 1.0
DRAIN_POLL_S = 0.05


class Producer:
    """Use `open_producer`. Any thread may open groups and episodes; one of ours sends heartbeats."""

    def __init__(self, kafka: Mapping[str, Any], topics: RunTopics, settings: RunSettings, *, unmanaged: bool,
                 worker: str | None = None, max_unassembled: int = MAX_UNASSEMBLED,
                 max_bytes: int = MAX_QUEUE_BYTES) -> None:  # fmt: skip
        self._kafka, self._topics, self._settings = kafka, topics, settings
        self.incarnation = uuid.uuid4().hex
        self.worker = worker or f"sdk-{self.incarnation[:8]}"
        blobs = open_blobs(settings.log, topics.run)
        self._put_blob = None if blobs is None else blobs.put
        self._lock = threading.RLock()  # guards all of the following
        self._later: deque[tuple[str, str, Event]] = deque()  # what must leave as soon as it can, in order
        self._refusals = Refusals()
        self._attempts: dict[tuple[str, int], tuple[int, Attempt]] = {}  # by group and slot: with the lease's number
        self._over: dict[Attempt | str, AttemptOver] = {}  # attempts, and whole groups, that take no more events
        self._writers: dict[Attempt, EpisodeWriter] = {}
        self._opened = 0
        self._closed = False
        # What heartbeats tell of an engine behind this producer: version, fingerprint (JSON), running totals.
        self.report: Callable[[], tuple[int, str, dict[str, float]]] = lambda: (0, json.dumps({}), {})
        self._stop = threading.Event()
        self._heart: threading.Thread | None = None
        self._requests: Requests | None = None
        self._unassembled: Unassembled | None = None
        self._opening = threading.Lock()
        if unmanaged:
            self._unassembled = Unassembled(kafka, topics, max_unassembled)
        else:
            self._requests = Requests(kafka, topics, self.worker, self.incarnation, ask=self._ask,
                                      later=self.to_fleet, ended=self._lease_ended)  # fmt: skip
        self._outbox = Outbox(kafka, max_bytes)
        if self._requests is not None:
            self._heart = threading.Thread(target=self._beat, daemon=True, name="headrace-heartbeat")
            self._heart.start()

    def __enter__(self) -> Producer:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        try:
            self.close()
        except Undelivered as undelivered:
            if error is None:
                raise
            log.error("%s", undelivered)  # the body's own error says more

    @contextmanager
    def group(self, task: Task | str | None = None, size: int | None = None, *, purpose: Purpose = Purpose.TRAIN,
              version: int | None = None, wait_s: float = 60.0) -> Iterator[Group]:  # fmt: skip
        """A group of `size` slots. Managed: `task` may name a task of the run's source. Unmanaged: `task` is needed.
        `version` pins an evaluation: sample with exactly that one.

        Raises Backpressure where there is no room within `wait_s`: too many candidates wait for the trainer (managed),
        too many groups of this producer wait for the assembler (unmanaged), or the queue is full; ask again later.
        Raises NoProgress where nothing waits and the coordinator doesn't answer.
        """
        group = Group(self, self._open(task, size, wait_s) if self._unassembled is not None
                      else self.lease(task, size, purpose, version, wait_s))  # fmt: skip
        try:
            yield group
        finally:
            group.close()

    def _open(self, task: Task | str | None, size: int | None, wait_s: float = 60.0) -> Lease:
        if not isinstance(task, Task):
            raise HeadraceError("an unmanaged producer opens groups itself: give it the Task")
        assert self._unassembled is not None
        spec = self._settings.spec()
        size = size or spec.group_size
        spec = replace(spec, group_size=size, reserves=0, max_attempts=1, min_survivors=1)
        with self._opening:
            self._unassembled.make_room(wait_s)
            lease = Lease(f"u-{self.incarnation[:12]}-{self._opened}", self._opened, True, True, self.worker,
                          self.incarnation, Purpose.TRAIN, 0, tuple(Assignment(s, 0) for s in range(size)), spec, task,
                          0, None)  # fmt: skip
            with self._lock:
                self._serve()
                self._outbox.put(self._topics.name(TRAJECTORIES), lease.group, lease)
            self._opened += 1
            self._unassembled.opened(lease.group)
        return lease

    def lease(self, task: Task | str | None, size: int | None, purpose: Purpose, version: int | None,
              wait_s: float, attempts: int = 1) -> Lease:  # fmt: skip
        """The lease behind `group`, for whoever runs its slots by itself; it raises as `group` does: Backpressure,
        NoProgress. With more `attempts`, a slot whose attempt was lost or failed by infrastructure waits for the next
        such request, which may so be answered with fewer slots than it asks for: those of a group that is open."""
        assert self._requests is not None
        named = task.id if isinstance(task, Task) else task
        lease = self._requests.group((named, size, purpose, version, attempts), wait_s)
        if lease is not None:
            with self._lock:
                for one in lease.assignments:
                    attempt = Attempt(lease.group, one.slot, one.attempt, self.incarnation)
                    self._attempts[lease.group, one.slot] = lease.number, attempt
            return lease
        said = f"the coordinator gave no group within {wait_s:g} s"
        where = f"see `headrace status {self._topics.run}`"
        try:
            waiting, unpublished = candidates_waiting(self._kafka, self._topics)
        except HeadraceError as error:
            raise NoProgress(f"{said}, and why is not to be had ({error})") from error
        if waiting or unpublished:
            raise Backpressure(f"{said}: {waiting} candidates wait for a batch and {unpublished} batches for the "
                               f"trainer ({where}); ask again later, the request stands")  # fmt: skip
        raise NoProgress(f"{said}: it isn't running, has no room because all of it is in open groups, or doesn't know "
                         f"the task ({where})")  # fmt: skip

    # ------------------------------------------------------------------------------------------------- episodes

    def begin(self, attempt: Attempt) -> Episode:
        """The attempt, to be written. Raises ProducerClosed."""
        return Episode(self.writer(attempt), self.worker)

    def writer(self, attempt: Attempt) -> EpisodeWriter:
        """As `begin`, for whoever sees to it himself that one at a time writes, and that the attempt ends. Raises
        ProducerClosed."""
        def send(key: str, event: Event) -> None:
            with self._lock:
                self._serve()
                over = self._over.get(attempt) or self._over.get(attempt.group)
                if over is None:
                    self._outbox.put(self._topics.name(TRAJECTORIES), key, event)
                    return
            writer.abandon(over)
            raise over

        writer = EpisodeWriter(attempt, send, self._settings.log.span_tokens, self._put_blob)
        with self._lock:
            if self._closed:
                raise ProducerClosed("the producer is closed: open a new one")
            self._writers[attempt] = writer
        return writer

    def over(self, attempt: Attempt) -> AttemptOver | None:
        """Why nothing more of the attempt would be taken, if so."""
        if not self._over:
            return None
        with self._lock:
            return self._over.get(attempt) or self._over.get(attempt.group)

    def end(self, writer: EpisodeWriter, outcome: Outcome, reason: str, boundary: Boundary = Boundary.PRODUCER, *,
            reward: float | None = None, text: str | None = None) -> None:  # fmt: skip
        """End an attempt unless it has ended; what can't leave now leaves as soon as it can."""
        with self._lock:
            if not self._settled(writer):
                events = writer.leave(outcome, reason, boundary, reward=reward, text=text)
                self._later += [(self._topics.name(TRAJECTORIES), writer.attempt.group, event) for event in events]
                self._serve()

    def _settled(self, writer: EpisodeWriter) -> bool:
        """Whether the attempt has its end already."""
        self._writers.pop(writer.attempt, None)
        place = (writer.attempt.group, writer.attempt.slot)
        if self._attempts.get(place, (-1, None))[1] == writer.attempt:
            del self._attempts[place]
        over = self._over.get(writer.attempt) or self._over.get(writer.attempt.group)
        if over is not None and not writer.ended:
            writer.abandon(over)
        return writer.ended

    def give_back(self, lease: Lease, attempts: list[Attempt], reason: str = REASON_HANDED_BACK) -> None:
        """Slots of a lease that will not be run."""
        with self._lock:
            if self._closed:
                return  # heartbeats have stopped: the coordinator takes the lease back
            if lease.unmanaged:
                self._later += [(self._topics.name(TRAJECTORIES), lease.group,
                                 never_started(attempt, REASON_NEVER_STARTED)) for attempt in attempts]  # fmt: skip
            else:
                self.to_fleet(hand_back(lease, tuple(attempt.slot for attempt in attempts), reason))
            self._serve()

    # ------------------------------------------------------------------------------------------------- out

    def _ask(self, event: Event) -> None:
        with self._lock:
            self._outbox.put(self._topics.name(FLEET), self.worker, event)

    def to_fleet(self, event: Event) -> None:
        """As soon as it can."""
        with self._lock:
            self._later.append((self._topics.name(FLEET), self.worker, event))

    def _lease_ended(self, ended: LeaseEnded) -> None:
        with self._lock:
            for slot in ended.slots:
                number, attempt = self._attempts.get((ended.group, slot), (-1, None))
                if attempt is None or number != ended.number:
                    continue
                said = f"{attempt}: the coordinator took its lease back ({ended.reason})"
                self._over.setdefault(attempt, AttemptOver(said))

    def _serve(self) -> None:
        """Act on what the broker said, and send what is to leave as soon as it can. With the lock held."""
        self._outbox.poll()
        for failure in self._outbox.take_failures():
            self._refused(failure)
        while self._later:
            try:
                self._outbox.put(*self._later[0])
            except Backpressure:
                return
            self._later.popleft()

    def _refused(self, failure: Failure) -> None:
        owner = failure.attempt or failure.key
        log.error("the broker refused a %s of %s for good: %s", failure.kind, owner, failure.reason)
        if failure.attempt is None and failure.kind != Lease.__name__:
            return  # a heartbeat, a request: the next one tells the same
        if owner is not None and owner not in self._over:
            self._over[owner] = DeliveryFailed(f"{owner}: the broker refused event {failure.sequence} "
                                               f"({failure.kind}) for good: {failure.reason}; it has ended as an "
                                               "infrastructure failure")  # fmt: skip
        if (end := self._refusals.end_for(failure)) is not None:
            self._later.append((self._topics.name(TRAJECTORIES), end.group, end))

    def _beat(self) -> None:
        assert self._requests is not None
        while not self._stop.is_set():
            try:
                with self._lock:
                    if self._stop.is_set():
                        return
                    self._serve()
                    version, engine, counters = self.report()
                    beat = Heartbeat(self.worker, self.incarnation, version, 0, 0, False, engine, counters)
                    self._outbox.put(self._topics.name(FLEET), self.worker, beat)
                self._requests.serve()
            except Backpressure:
                pass  # the broker is away: the next heartbeat says the same
            except HeadraceError as error:
                log.error("no more heartbeats: %s", error)
                return
            self._stop.wait(HEARTBEAT_S)

    def flush(self, timeout_s: float = 30.0) -> int:
        """Wait until every event that was cut is on the log; how many are not."""
        return self._drain(timeout_s).events

    def _drain(self, timeout_s: float) -> Unsent:
        end = time.monotonic() + timeout_s
        while True:
            with self._lock:  # not for long: heartbeats go on
                self._serve()
                if not (unsent := self._unsent()).events or time.monotonic() >= end:
                    return unsent
                self._outbox.poll(DRAIN_POLL_S)

    def _unsent(self) -> Unsent:
        by_episode = dict(self._outbox.unsent.by_episode)
        for _, key, _ in self._later:
            by_episode[key] = by_episode.get(key, 0) + 1
        return Unsent(by_episode)

    def close(self, timeout_s: float = 30.0) -> None:
        """Drain. Episodes that are still open end as infrastructure failures. Raises Undelivered that says, by episode,
        what is unsent after `timeout_s`."""
        self._stop.set()
        with self._lock:
            if self._closed:
                return
            for writer in list(self._writers.values()):
                self.end(writer, Outcome.INFRA_FAILURE, REASON_PRODUCER_CLOSED)
            self._closed = True
        if self._heart is not None and self._heart is not threading.current_thread():
            self._heart.join(10 * HEARTBEAT_S)
        unsent = self._drain(timeout_s)
        with self._lock:
            self._outbox.close(0.0)
        if self._requests is not None:
            self._requests.close()
        if self._unassembled is not None:
            self._unassembled.close()
        if unsent.events:
            raise Undelivered(f"{unsent} within {timeout_s:g} s: the broker doesn't take them", unsent.by_episode)


def open_producer(run: str, kafka: Mapping[str, Any], *, prefix: str = "headrace", unmanaged: bool = False,
                  worker: str | None = None, max_unassembled: int = MAX_UNASSEMBLED,
                  max_bytes: int = MAX_QUEUE_BYTES) -> Producer:  # fmt: skip
    """`max_bytes` of events may wait for the broker; `max_unassembled` groups of an unmanaged producer for the
    assembler. Raises RunNotFound, BrokerUnreachable, NotAnnounced where an older Headrace created the run,
    SettingsError where the run's blob store can't be opened here."""
    topics = RunTopics(run, prefix)
    settings = open_settings(kafka, topics).settings
    check_announced(kafka, topics)
    return Producer(kafka, topics, settings, unmanaged=unmanaged, worker=worker, max_unassembled=max_unassembled,
                    max_bytes=max_bytes)  # fmt: skip
