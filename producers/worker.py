"""The worker: runs the slots that a lease names for this incarnation, and nothing else.

One thread drives everything in turn: leases in, prompts from the environment host, one engine step, spans out, verdicts
in, weights between steps, a heartbeat each second. So a heartbeat means that the loop itself is alive. The incarnation
is new at each start, and the end of `tasks` is sought before the first heartbeat: an older lease can't be taken up.
"""

from __future__ import annotations

import collections
import hashlib
import json
import logging
import os
import socket
import threading
import time
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from headrace.schemas.errors import BlobError, EngineError, RecordTooLarge, UndecodableRecord
from headrace.schemas.events import Event, HandBack, Heartbeat, Lease, LeaseEnded
from headrace.schemas.outcomes import (
    REASON_BLOB_FAILED,
    REASON_ENGINE_LOST,
    REASON_HANDED_BACK,
    REASON_LENGTH,
    REASON_OTHER_VERSION,
    REASON_PROMPT_TOO_LONG,
    REASON_RECORD_TOO_LARGE,
    REASON_STOP,
    Boundary,
    Outcome,
    Purpose,
    Source,
)
from headrace.schemas.settings import RunSettings
from headrace.schemas.topics import FLEET, TASKS, TRAJECTORIES, RunTopics
from headrace.streams.log.blobs import open_blobs
from headrace.streams.log.policy import Schemas
from headrace.streams.log.reader import Reader, end_offsets

from .engines import Engine, GenerationRequest, Progress, Sampling
from .engines.opening import EngineChoice, open_engine
from .environments.host import EnvironmentHost, Reply
from .episodes import Attempt, EpisodeWriter
from .outbox import Outbox
from .receiver import Receiver
from .refusals import Refusals

log = logging.getLogger("headrace.worker")

HEARTBEAT_S = 1.0
IDLE_WAIT_S = 0.02  # how long an idle worker waits for a lease before it looks elsewhere
OUTAGE_S = 600.0  # a broker that is away so long ends the process; until then the worker holds still
DRAIN_S = 30.0


@dataclass(slots=True)
class _Job:
    """One assignment on its way: messages -> (served version) -> decoding -> scoring."""

    lease: Lease
    attempt: Attempt
    writer: EpisodeWriter
    received: float
    prompt: list[int] | None = None
    tokens: list[int] = field(default_factory=list)
    submitted: float = 0.0
    first_token: float = 0.0
    finished: float = 0.0
    stop_reason: str = ""

    @property
    def key(self) -> str:
        a = self.attempt
        return f"{a.group}/{a.slot}/{a.attempt}"


class Worker:
    def __init__(self, kafka: Mapping[str, Any], topics: RunTopics, settings: RunSettings, engine: Engine,
                 receiver: Receiver, *, name: str, incarnation: str, capacity: int) -> None:  # fmt: skip
        self._topics, self._settings = topics, settings
        self._engine, self._receiver = engine, receiver
        self.name, self.incarnation = name, incarnation
        self._capacity = capacity
        self._outbox = Outbox(kafka)
        self._refusals = Refusals()
        blobs = open_blobs(settings.log, topics.run)
        self._put_blob = None if blobs is None else blobs.put
        self._host = EnvironmentHost(settings.tasks.source)
        self._asked: dict[int, list[_Job]] = {}  # by request number of the environment host
        self._ready: collections.deque[_Job] = collections.deque()  # prompt known, not yet submitted
        self._decoding: dict[str, _Job] = {}
        self._jobs: dict[str, _Job] = {}  # all of them
        self._fingerprint = engine.fingerprint()
        self._counters: dict[str, float] = collections.defaultdict(float)
        self._last_beat = 0.0
        self._draining = False
        name_of_tasks = topics.name(TASKS)
        self._schemas = Schemas(kafka, topics)
        self._tasks = Reader(kafka, {(name_of_tasks, 0): end_offsets(kafka, name_of_tasks)[0]})

    # ------------------------------------------------------------------------------------------------- the loop

    def run(self, stop: threading.Event) -> None:
        log.info("worker %s serves version %d (incarnation %s)", self.name, self._engine.version, self.incarnation[:8])
        while not stop.is_set():
            self.turn()
        self._drain()

    def turn(self) -> None:
        """Everything once."""
        began = time.monotonic()
        self._beat(began)
        self._take_leases(0.0 if self._jobs else IDLE_WAIT_S)
        # A worker that only waits for its environment must not spin.
        self._take_replies(0.0 if self._decoding or self._ready or not self._asked else IDLE_WAIT_S)
        self._take_weights()
        self._submit()
        progress = self._engine.step()
        for one in progress:
            self._progressed(one)
        if progress:
            self._receiver.sampled(progress[-1].version)
        self._outbox.poll()
        self._take_refusals()
        now = time.monotonic()
        for job in self._decoding.values():
            job.writer.flush_older(now)
        self._counters["busy_s" if progress else f"idle_{self._idle_reason()}_s"] += now - began

    def _idle_reason(self) -> str:
        if not self._jobs:
            return "no_requests"
        return "weights" if self._ready else "environment"

    def _drain(self) -> None:
        """Hand back what hasn't begun, finish what has, within a bound."""
        self._draining = True
        for job in [*self._ready, *(job for jobs in self._asked.values() for job in jobs if job.prompt is None)]:
            self._hand_back(job)
        self._ready.clear()
        end = time.monotonic() + DRAIN_S
        while self._jobs and time.monotonic() < end:
            self.turn()
        for job in list(self._jobs.values()):
            self._hand_back(job)
        self.close()

    def close(self) -> None:
        self._host.close()
        self._tasks.close()
        unsent = self._outbox.close()
        if unsent.events:
            log.error("worker %s ends with %s: the broker doesn't take them", self.name, unsent)

    # ------------------------------------------------------------------------------------------------- leases

    def _take_leases(self, wait_s: float) -> None:
        for record in self._tasks.poll(200, wait_s):
            try:
                event = self._schemas.decode(record.value)
            except UndecodableRecord as error:
                log.error("%s[%d]@%d: %s", record.topic, record.partition, record.offset, error)
                continue
            if isinstance(event, Lease) and event.incarnation == self.incarnation:
                self._take(event)
            elif isinstance(event, LeaseEnded) and event.incarnation == self.incarnation:
                for job in list(self._jobs.values()):
                    own = (job.attempt.group, job.lease.number) == (event.group, event.number)
                    if own and job.attempt.slot in event.slots:
                        self._forget(job)

    def _take(self, lease: Lease) -> None:
        jobs = []
        for assignment in lease.assignments:
            attempt = Attempt(lease.group, assignment.slot, assignment.attempt, self.incarnation)
            writer = EpisodeWriter(attempt, self._send, self._settings.log.span_tokens, self._put_blob)
            job = _Job(lease, attempt, writer, time.monotonic())
            self._jobs[job.key] = job
            if self._draining:
                self._hand_back(job)
            else:
                jobs.append(job)
        if jobs:
            # Asked once for all siblings, so that they begin together and the engine prefills their prompt once.
            self._asked[self._host.ask_messages(lease.task, self._settings.rollout.score_timeout_s)] = jobs

    def _hand_back(self, job: _Job, reason: str = REASON_HANDED_BACK) -> None:
        lease = job.lease
        self._forget(job)
        self._put_fleet(HandBack(self.name, self.incarnation, lease.group, lease.number, (job.attempt.slot,),
                                 reason))  # fmt: skip

    def _forget(self, job: _Job) -> None:
        self._engine.cancel(job.key)
        self._decoding.pop(job.key, None)
        self._jobs.pop(job.key, None)
        if job in self._ready:
            self._ready.remove(job)
        if not job.writer.ended:
            job.writer.abandon()

    # --------------------------------------------------------------------------------------------- environment

    def _take_replies(self, wait_s: float) -> None:
        for reply in self._host.poll(wait_s):
            jobs = [job for job in self._asked.pop(reply.request) if job.key in self._jobs]
            prompt = None if reply.messages is None else self._engine.encode_chat(reply.messages)
            for job in jobs:
                if prompt is not None:
                    job.prompt = prompt
                    self._ready.append(job)
                elif job.prompt is None:
                    self._failed_to_start(job, reply)
                else:
                    self._judged(job, reply)

    def _failed_to_start(self, job: _Job, reply: Reply) -> None:
        assert reply.failed is not None
        self._start_writer(job)
        self._end(job, Outcome.INFRA_FAILURE, reply.failed.reason, Boundary(reply.failed.boundary),
                       text=reply.failed.message)  # fmt: skip
        self._forget(job)

    def _judged(self, job: _Job, reply: Reply) -> None:
        text = self._text(job)
        timings = {
            "queue": (job.submitted - job.received) * 1e3,
            "prefill": (job.first_token - job.submitted) * 1e3,
            "decode": (job.finished - job.first_token) * 1e3,
            "scorer": (time.monotonic() - job.finished) * 1e3,
        }
        if reply.failed is not None:
            self._end(job, Outcome.INFRA_FAILURE, reply.failed.reason, Boundary(reply.failed.boundary), text=text,
                           timings_ms=timings)  # fmt: skip
        else:
            assert reply.verdict is not None
            verdict = reply.verdict
            outcome = Outcome.MODEL_SUCCESS if verdict.success else Outcome.MODEL_FAILURE
            self._end(job, outcome, job.stop_reason, Boundary.NONE if verdict.success else Boundary.MODEL,
                           reward=verdict.reward, rewards=verdict.components, text=text,
                           timings_ms=timings)  # fmt: skip
        self._forget(job)

    def _end(self, job: _Job, outcome: Outcome, reason: str, boundary: Boundary, **facts: Any) -> None:
        try:
            job.writer.end(outcome, reason, boundary, **facts)
        except RecordTooLarge as error:
            job.writer.end(Outcome.INFRA_FAILURE, REASON_RECORD_TOO_LARGE, Boundary.PRODUCER, text=str(error))
        except BlobError as error:
            job.writer.end(Outcome.INFRA_FAILURE, REASON_BLOB_FAILED, Boundary.PRODUCER, text=str(error))

    def _text(self, job: _Job) -> str:
        return self._engine.decode(job.tokens)

    # -------------------------------------------------------------------------------------------------- engine

    def _take_weights(self) -> None:
        if any(job.lease.version == self._engine.version for job in self._jobs.values()):
            return  # pinned: what has come is applied afterwards
        for clock in self._receiver.apply_ready(self._engine):
            self._put_fleet(clock)

    def _submit(self) -> None:
        """Hand over what may run: a slot starts only at a version that its lease allows."""
        for _ in range(len(self._ready)):
            job = self._ready.popleft()
            if job.lease.version is not None and self._engine.version > job.lease.version:
                self._hand_back(job, REASON_OTHER_VERSION)  # served weights never go back
                continue
            if self._engine.version < job.lease.min_version:
                self._ready.append(job)
                continue
            assert job.prompt is not None
            sampling = self._start_writer(job)
            try:
                self._engine.submit(GenerationRequest(job.key, job.prompt, sampling, self._engine.eos_ids))
            except EngineError as error:
                self._end(job, Outcome.INFRA_FAILURE, REASON_PROMPT_TOO_LONG, Boundary.ENVIRONMENT, text=str(error))
                self._forget(job)
                continue
            job.submitted = time.monotonic()
            job.writer.context(job.prompt, Source.PROMPT)
            self._decoding[job.key] = job

    def _start_writer(self, job: _Job) -> Sampling:
        rollout, a = self._settings.rollout, job.attempt
        words = f"{self._settings.seed}/{a.group}/{a.slot}/{a.attempt}".encode()
        seed = int.from_bytes(hashlib.blake2b(words, digest_size=8).digest(), "little") >> 1
        sampling = Sampling(rollout.temperature, job.lease.spec.max_tokens, seed,
                            greedy=job.lease.purpose == Purpose.EVAL)  # fmt: skip
        job.writer.start(worker=self.name, engine=self._fingerprint,
                         temperature=0.0 if sampling.greedy else sampling.temperature,
                         max_new_tokens=sampling.max_new_tokens, seed=seed)  # fmt: skip
        return sampling

    def _progressed(self, one: Progress) -> None:
        job = self._decoding.get(one.request_id)
        if job is None:
            return
        job.first_token = job.first_token or time.monotonic()
        if len(one.token_ids):
            job.writer.model(one.token_ids, one.logprobs, one.version)
        job.tokens += one.token_ids.tolist()
        self._counters["sampled_tokens"] += len(one.token_ids)
        if one.finished is None:
            return
        if one.finished == "lost":
            self._end(job, Outcome.INFRA_FAILURE, REASON_ENGINE_LOST, Boundary.ENGINE, text=self._text(job))
            self._forget(job)
            return
        job.finished = time.monotonic()
        job.stop_reason = REASON_STOP if one.finished == "stop" else REASON_LENGTH
        job.writer.flush(job.stop_reason)
        del self._decoding[job.key]
        number = self._host.ask_score(job.lease.task, self._text(job), self._settings.rollout.score_timeout_s)
        self._asked[number] = [job]

    # ---------------------------------------------------------------------------------------------------- out

    def _beat(self, now: float) -> None:
        if now - self._last_beat < HEARTBEAT_S:
            return
        self._last_beat = now
        free = 0 if self._draining else max(0, self._capacity - len(self._jobs))
        self._put_fleet(Heartbeat(self.name, self.incarnation, self._engine.version,
                                  0 if self._draining else self._capacity, free, not self._draining,
                                  json.dumps(self._fingerprint, sort_keys=True), dict(self._counters)))  # fmt: skip

    def _take_refusals(self) -> None:
        """What the broker refuses for good ends its attempt: the log gets an end, never a silent gap."""
        for failure in self._outbox.take_failures():
            log.error("the broker refused a %s of %s for good: %s", failure.kind, failure.attempt or failure.key,
                      failure.reason)  # fmt: skip
            end = self._refusals.end_for(failure)
            if end is None:
                continue
            for job in [job for job in self._jobs.values() if job.attempt == failure.attempt]:
                self._forget(job)
            self._send(end.group, end)

    def _put_fleet(self, event: Event) -> None:
        self._outbox.put(self._topics.name(FLEET), self.name, event, wait_s=OUTAGE_S)

    def _send(self, key: str, event: Event) -> None:
        self._outbox.put(self._topics.name(TRAJECTORIES), key, event, wait_s=OUTAGE_S)


def run_worker(kafka: Mapping[str, Any], topics: RunTopics, settings: RunSettings, stop: threading.Event,
               choice: EngineChoice, *, name: str | None = None, threads: int | None = None) -> None:  # fmt: skip
    """Load the model, catch up with the newest published version, then serve leases until `stop`.

    As many sequences as decode at once may wait, so that the engine never idles while the coordinator learns of a free
    slot. Raises ModelError, WeightsRefused, ReplicaLost, EnvironmentFailed.
    """
    import torch

    from .engines.served import ModelFolder

    if threads:
        torch.set_num_threads(threads)
    model = settings.model
    name, incarnation = name or _default_name(), uuid.uuid4().hex
    engine = open_engine(model, choice)
    receiver = Receiver(kafka, topics, worker=name, incarnation=incarnation,
                        initial=lambda: ModelFolder(model.path, model.dtype).bits)  # fmt: skip
    try:
        if not receiver.load(engine, stop):
            return
        worker = Worker(kafka, topics, settings, engine, receiver, name=name, incarnation=incarnation,
                        capacity=2 * engine.capacity)  # fmt: skip
        worker.run(stop)
    finally:
        receiver.close()
        engine.close()


def _default_name() -> str:
    return f"{socket.gethostname().split('.')[0]}-{os.getpid()}"
